"""The examples of docs/howto/{recipe,source,source_boxes,task}.md, added as pages say; a device is in tests/migrate."""

import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from sightline import cli, config
from sightline.data import sources
from sightline.data.sources.layouts import NoTestSplit

HOWTO = Path(__file__).resolve().parents[2] / "docs" / "howto"


def example(page: str, place: int = 0) -> str:
    """Return a Python block of a page."""
    text = (HOWTO / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[place]


@pytest.fixture
def source_of_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The file of the example, in the folder of sources as far as Python knows."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "listing.py").write_text(example("source"), encoding="utf-8")
    monkeypatch.setattr(sources, "__path__", [*sources.__path__, str(folder)])
    yield
    sys.modules.pop("sightline.data.sources.listing", None)


@pytest.mark.usefixtures("source_of_lists")
def test_the_source_gives_the_batches_of_the_folders_that_it_lists(tmp_path: Path, shapes: Path, train):
    listed = tmp_path / "listed"
    listed.mkdir()
    for split in ("train", "val"):
        files = sorted((shapes / split).glob("*/*"), reverse=True)
        lines = "".join(f"{path.parent.name} {path}\n" for path in files)
        (listed / f"{split}.txt").write_text(lines, encoding="utf-8")
    ours, folders = (
        train("demo_classification", tmp_path / name, f"--data.path={path}", "--train.max-steps=2")
        for name, path in (("ours", listed), ("folders", shapes))
    )
    assert ours.error is None and ours.scores.values == folders.scores.values
    assert ours.scores.tables == folders.scores.tables
    assert ours.bits() == folders.bits()


def test_the_source_of_boxes_has_the_objects_of_coco(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    helpers = Path(__file__).resolve().parents[1] / "unit/data/sources/box_layouts.py"
    layouts = runpy.run_path(str(helpers))
    amounts = ["--only", "detection", "--train-pictures=8", "--val-pictures=4"]
    assert cli.main(["prepare", "shapes", "--out", str(tmp_path), *amounts]) == 0
    data = layouts["read"](tmp_path / "detection")
    layouts["LAYOUTS"]["coco"](data, tmp_path / "coco")
    (tmp_path / "flat").mkdir()
    for split, entries in data.items():
        layouts["images"](tmp_path / "boxlist" / split, entries)
        layouts["images"](tmp_path / "flat", entries)
        lines = [f"{each.file},{n},{x},{y},{x + w},{y + h}\n" for each in entries for n, x, y, w, h in each.boxes]
        (tmp_path / "boxlist" / split / "boxes.csv").write_text("".join(lines))
        with (tmp_path / "flat" / "boxes.csv").open("a") as file:
            file.writelines(lines)
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "boxlist.py").write_text(example("source_boxes"), encoding="utf-8")
    monkeypatch.setattr(sources, "__path__", [*sources.__path__, str(tmp_path / "sources")])
    try:
        for split in ("train", "val"):
            ours, coco = (sources.open_boxes("auto", str(tmp_path / each), split) for each in ("boxlist", "coco"))
            assert type(ours) is type(coco) and ours.kind == "boxlist" and ours.classes == coco.classes
            assert len(ours) == len(coco) > 0 and ours.files
            there = {coco.name(row).rpartition("/")[2]: row for row in range(len(coco))}
            for row in range(len(ours)):
                other = there[ours.name(row).rpartition("/")[2]]
                assert ours.image(row) == coco.image(other)
                for name in ("height", "width", "boxes", "labels", "area", "crowd"):
                    found, expected = (getattr(each, name) for each in (ours.objects(row), coco.objects(other)))
                    np.testing.assert_array_equal(found, expected)
        with pytest.raises(NoTestSplit, match="has no folder test"):
            sources.open_boxes("boxlist", str(tmp_path / "boxlist"), "test")
        drawn = [sources.open_boxes("auto", str(tmp_path / "flat"), split) for split in ("train", "val")]
        assert sum(map(len, drawn)) == sum(map(len, data.values())) and drawn[1].held_out is not None
    finally:
        sys.modules.pop("sightline.data.sources.boxlist", None)


def test_the_plan_decides_by_the_number_of_images(tmp_path: Path, shapes: Path):
    text = example("recipe", 1)
    (tmp_path / "own_plan.py").write_text(
        "from dataclasses import replace\nfrom sightline.recipe.plan import Known\n"
        f"from sightline.recipes import demo_classification\n{text}\ndef recipe():\n"
        "    return replace(demo_classification.recipe(), name='own_plan', plan=plan)\n",
        encoding="utf-8",
    )
    flags = [f"--data.path={shapes}", f"--run.out={tmp_path / 'run'}"]
    recipe, _ = config.load(str(tmp_path / "own_plan.py"), flags)
    images = sum(1 for _ in (shapes / "train").glob("*/*"))
    assert recipe.train.epochs == 30 and recipe.origins["train.epochs"] == f"decided: {images} training images"
    assert config.load(str(tmp_path / "own_plan.py"), [*flags, "--epochs=3"])[0].train.epochs == 3


def test_the_task_learns_and_its_field_is_a_flag(tmp_path: Path, tiny, train_made):
    file = tmp_path / "own_task.py"
    file.write_text(example("task"), encoding="utf-8")
    flags = [*tiny("demo_classification"), "--data.path=synthetic:classes=10,samples=320,size=28", "--data.augment=off"]
    flags += ["--model.width=8", "--optimizer.lr=0.1", "--train.epochs=4", "--train.global-batch=32"]
    flags += ["--task.positive-weight=4", f"--run.out={tmp_path / 'run'}", "--train.eval-every-epochs=4"]
    result = train_made(*config.load(str(file), flags))
    assert result.error is None and result.scores.values["top1"] >= 0.9
    recipe, _ = config.load(str(file), flags)
    logits, label = torch.randn(4, 10), torch.arange(4)
    loss = recipe.task.loss(lambda image: image, {"image": logits, "label": label})
    shown = -4 * F.logsigmoid(logits)[label, label].sum()
    others = -F.logsigmoid(-logits).sum() + F.logsigmoid(-logits)[label, label].sum()
    torch.testing.assert_close(loss.total, (shown + others) / 40)


def test_a_task_without_a_reporter_says_so_and_takes_that_of_another(tmp_path: Path, shapes: Path, capsys):
    (tmp_path / "own_task.py").write_text(example("task"), encoding="utf-8")
    words = ["--recipe", str(tmp_path / "own_task.py"), "--run.device", "cpu", "--run.workers", "0"]
    flags = [
        "--data.path",
        str(shapes),
        "--train.max-steps",
        "1",
        "--model.width",
        "4",
        "--run.out",
        str(tmp_path / "r"),
    ]
    assert cli.main(["train", str(tmp_path / "own_task.py"), *flags, *words[2:]]) == 0
    said = capsys.readouterr().out
    assert "sightline evaluate" in said and "sightline predict" not in said  # of what follows: only what works
    assert (
        cli.main(
            ["predict", str(tmp_path / "r"), str(next(shapes.glob("val/*/*"))), "--out", str(tmp_path / "s"), *words]
        )
        == 2
    )
    assert "OneVersusRest has no reporter" in capsys.readouterr().err
    with (tmp_path / "own_task.py").open("a", encoding="utf-8") as file:
        file.write(f"\n\n{example('task', 1)}")
    image = str(next(shapes.glob("val/*/*")))
    assert cli.main(["predict", str(tmp_path / "r"), image, "--out", str(tmp_path / "s"), *words]) == 0
    assert (tmp_path / "s" / "predictions.json").is_file()
