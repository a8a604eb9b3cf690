"""benchmarks/published: what the protocol fixes, where a run's seconds go, and what is read of the peer's output."""

import importlib
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sightline import recipes
from sightline.data.classification import ClassificationData

REPO = Path(__file__).resolve().parents[3]
FOLDER = REPO / "benchmarks" / "published"
# Of the package: public sets that it must know nothing of.
FOREIGN = re.compile("cifar|imagenette|imagewoof|tiny.?imagenet|bccd", re.IGNORECASE)


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    for name in ("run", "peer"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("run")
    for name in ("run", "peer"):
        sys.modules.pop(name, None)


def write_images(folder: Path, each: int) -> None:
    random = np.random.default_rng(0)
    for split, number in (("train", each), ("test", 2)):
        for label in ("a", "b"):
            (folder / split / label).mkdir(parents=True)
            for index in range(number):
                pixels = random.integers(0, 256, (32, 32, 3), np.uint8)
                Image.fromarray(pixels).save(folder / split / label / f"{index}.png")


def test_every_row_is_fixed_and_those_with_a_command_have_a_recipe_that_builds(script):
    rows = script.rows()
    for name, row in rows.items():
        assert {"goal", "data", "note", "metric", "seeds", "published"} <= row.keys(), name
        assert row["seeds"] >= 3 and all({"who", "score", "on"} <= each.keys() for each in row["published"])
        assert ("command" in row) != ("contenders" in row), name
        if "command" in row:
            assert row["kind"] and row["splits"].keys() == {"train", "val"}
            path = row["command"].format(here=FOLDER).split()[0]
            assert recipes.find(path).recipe().train.eval_every_epochs > 100  # the test set is scored once


def test_the_package_names_none_of_these_sets():
    named = [path for path in (REPO / "sightline").rglob("*.py") if FOREIGN.search(path.read_text(encoding="utf-8"))]
    assert named == []


@pytest.mark.slow  # a process that imports torch
def test_a_row_is_trained_and_its_seconds_add_up(script, tmp_path):
    write_images(tmp_path / "images", 20)
    flags = "--model.width 4 --train.epochs 2 --train.global-batch 8 --schedule.warmup-epochs 0 --run.workers 0"
    words = ["--data", str(tmp_path / "images"), "--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    found = script.main(["cifar10_94", *words, "--seeds", "4", *flags.split(), "--run.report", "off"])
    (run,) = found["results"]["sightline"]["each"]
    assert run["seed"] == 4 and run["epochs"] == 2 and run["top1"] in (0.0, 0.25, 0.5, 0.75, 1.0)
    parts = run["setup_s"] + run["training_s"] + run["evaluation_s"] + run["end_s"]
    assert parts == pytest.approx(run["seconds"], abs=0.1)
    assert run["training_s"] >= run["later_epochs_s"] > 0
    (raw,) = (tmp_path / "out").glob("published-cifar10_94-*.json")
    assert json.loads(raw.read_text()) == json.loads(json.dumps(found))


def test_held_out_images_are_training_images_and_all_contenders_get_the_same(script, tmp_path):
    write_images(tmp_path / "images", 20)
    row = script.rows()["cifar10_94"]
    (tmp_path / "held").mkdir()
    held = script.described(row, tmp_path / "images", True, tmp_path / "held")
    whole = script.described(row, tmp_path / "images", False, tmp_path)
    assert [len(ClassificationData(path=str(whole)).open(split, 0)) for split in ("train", "val")] == [40, 4]
    for split, expected in (("train", 36), ("val", 4)):
        sys.modules["peer"].write_images(held, split, tmp_path / f"{split}.pt")
        theirs = torch.load(tmp_path / f"{split}.pt")
        ours = ClassificationData(path=str(held), val_fraction=0.1).open(split, 0)
        assert theirs["images"].shape == (expected, 32, 32, 3) and theirs["classes"] == ["a", "b"]
        for index in range(expected):
            path = tmp_path / "images" / "train" / ours.name(index)
            assert np.array_equal(theirs["images"][index].numpy(), np.asarray(Image.open(path)))
            assert theirs["labels"][index] == ["a", "b"].index(path.parent.name)


def test_the_last_row_of_every_run_of_the_peer_is_read(script):
    row = "|  {:>6}  |  {:>5}  |     0.5000  |   0.6000  |  {:>11}  |  {:>12}  |\n"
    text = row.format(7, 0, "", "1.2000") + row.format("", "eval", "0.9401", "1.2500") + "-" * 80 + "\n"
    found = list(sys.modules["peer"].LAST_ROW.finditer(text * 2))
    assert [(each["top1"], each["seconds"]) for each in found] == [("0.9401", "1.2500")] * 2


def test_the_table_of_the_notes_says_what_the_raw_files_say():
    page = (REPO / "benchmarks" / "notes" / "published.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|\n").split("|")] for line in page.splitlines() if "| cifar10" in line
    ]
    (name,) = re.findall(r"results/(published-cifar10_94-nvidia-h200-[\d-]+\.json)", page)
    raw = json.loads((REPO / "benchmarks" / "results" / name).read_text(encoding="utf-8"))["results"]
    for cells, found in zip(rows[1:], (raw["airbench94_muon"], raw["sightline"]), strict=True):
        each = [run["top1"] for run in found["each"]]
        assert cells[2] == f"{np.mean(each):.4f} ± {np.std(each, ddof=1):.4f}" and cells[3] == str(len(each))
        assert cells[4] == f"{np.mean([run['training_s'] for run in found['each']]):.2f}"
        assert cells[5] == (f"{np.mean([run['seconds'] for run in found['each']]):.2f}" if "seconds" in found else "")
    for label, file in (("ResNet-18", "222800"), ("ResNet-9", "224913-218189")):
        (path,) = (REPO / "benchmarks" / "results").glob(f"published-cifar10_94-held-out-*-{file}.json")
        results = json.loads(path.read_text(encoding="utf-8"))["results"]
        runs = list(results.values()) if label == "ResNet-18" else results["sightline"]["each"]
        for run in runs:
            assert (
                f"| {run['top1']:.4f} | {run['seconds']:.1f} | {run['setup_s']:.1f} | {run['later_epochs_s']:.1f} |"
                in page
            )
