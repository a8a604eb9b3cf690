"""`sightline check RUN`: wrong labels that the network contradicts are listed, written, and shown in the report."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sightline import cli

NAME = "demo_classification"
HERE = ["--run.device=cpu", "--run.workers=0"]
KINDS = ("ant", "bee", "cow")
WRONG = {("train", "ant", 3), ("train", "bee", 7), ("train", "cow", 11), ("val", "ant", 5)}
SMALL = [
    *("--model.width=8", "--data.size=24", "--data.eval-resize=24", "--data.eval-size=24", "--data.augment=off"),
    *("--train.precision=fp32", "--train.global-batch=24", "--train.epochs=8", "--optimizer.lr=0.05", *HERE),
]


def draw(path: Path, number: int, channels: list[int]) -> None:
    random = np.random.default_rng(number)
    pixels = random.integers(0, 90, (24, 24, 3), np.uint8)
    for channel in channels:
        pixels[4:20, 4:20, channel] = random.integers(170, 255, (16, 16))
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on squares of three colours, of which four have a wrong label; for reading, and for `check`."""
    root = tmp_path_factory.mktemp("colours")
    for split, count in (("train", 40), ("val", 10)):
        for place, kind in enumerate(KINDS):
            for number in range(count):
                true = (place + 1) % 3 if (split, kind, number) in WRONG else place
                draw(root / "data" / split / kind / f"{number:02d}.png", number, [true])
    assert cli.main(["train", NAME, "--data", str(root / "data"), "--out", str(root / "run"), *SMALL]) == 0
    return root / "run"


def test_wrong_labels_are_found_and_shown(sightline, trained: Path):
    before = (trained / "log.jsonl").read_bytes()
    said = sightline("check", trained, *HERE)
    assert said.code == 0, said
    first, *rows = said.out.splitlines()
    assert first.startswith("suspicious labels: 3 of 120 training images and 1 of 30 validation images, as ckpt-"), said
    data = trained.parent / "data"
    expected = {
        f"  {split}: {data / split / kind}/{number:02d}.png: labelled {kind}, "
        f"predicted as {KINDS[(KINDS.index(kind) + 1) % 3]} (confidence"
        for split, kind, number in WRONG
    }
    assert {row.partition(" 0.")[0].partition(" 1.")[0] for row in rows[:4]} == expected
    assert rows[4:] == [
        "The network has learnt from the training labels, so that it may repeat wrong ones.",
        f"report: {trained / 'report.html'}",
    ]
    found = json.loads((trained / "suspicious.json").read_text())
    assert found["suspicious"] == {"train": 3, "val": 1} and found["unsure_classes"] == {"train": [], "val": []}
    page = (trained / "report.html").read_text()
    section = page.partition(">Suspicious labels</h2>")[2].partition("<h2")[0]
    assert section.count("<figure>") == section.count("data:image/jpeg;base64") == 4 and "ant/03.png" in section
    assert '<b>ant</b> predicted as <b class="bad">bee</b>' in section and "label confidence" in section
    assert (trained / "log.jsonl").read_bytes() == before
    as_json = sightline("check", trained, *HERE, "--json", "--checkpoint", "latest")
    assert as_json.code == 0 and json.loads(as_json.out)["samples"] == {"train": 120, "val": 30}


def test_wrong_labels_among_several_are_found(sightline, tmp_path: Path):
    lines = ["file,label"]
    for number in range(200):
        shown = [channel for channel in range(3) if number >> channel & 1]
        draw(tmp_path / "data" / f"{number:03d}.png", number, shown)
        labels = [KINDS[channel] for channel in shown]
        if number == 7:  # all three are shown
            labels = labels[1:]
        lines.append(f"{number:03d}.png,{';'.join(labels)}")
    (tmp_path / "data" / "labels.csv").write_text("\n".join(lines))
    flags = [*SMALL, "--train.epochs=4", "--run.report=off"]
    assert sightline("train", NAME, "--data", tmp_path / "data", "--out", tmp_path / "run", *flags).code == 0
    said = sightline("check", tmp_path / "run", *HERE)
    assert said.code == 0 and "007.png: labelled bee;cow, predicted as ant;bee;cow" in said.out, said
    assert "report:" not in said.out and len(said.out.splitlines()) < 8


def test_what_does_not_fit_is_refused(sightline, trained: Path, tmp_path: Path):
    said = sightline("check", trained, *HERE, "--write", tmp_path / "clean.csv")
    assert said.code == 2 and "--write and --no-decode are for `check RECIPE --data DIR`" in said.err, said
    said = sightline("check", NAME, "--data", trained.parent / "data", "--checkpoint", "latest")
    assert said.code == 2 and "--checkpoint is for `check RUN`" in said.err, said
    said = sightline("check", trained.parent / "data", *HERE)
    assert said.code == 2 and "data is not a run; to check data, name a recipe: sightline check demo" in said.err, said
    words = ["--data", "synthetic:classes=3,samples=8,size=32", "--out", tmp_path / "boxes", *HERE]
    small = ["--train.max-steps=1", "--train.global-batch=4", "--run.report=off", "--data.size=64"]
    assert sightline("train", "demo_detection", *words, *small).code == 0
    said = sightline("check", tmp_path / "boxes", *HERE)
    assert said.code == 2 and "check RUN looks for wrong labels of whole images" in said.err, said
