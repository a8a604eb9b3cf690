"""What a run keeps about its data, and what its page says of them: also when data, facts or drawings are gone."""

import json
import re
import runpy
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sightline import config
from sightline.config import Recipe
from sightline.data.loading.loader import BadSamples
from sightline.engine.orders import train_order_of
from sightline.hardware import devices
from sightline.hardware.world import World
from sightline.parts import Batch, Dataset, DataSpec
from sightline.recipe import store
from sightline.report.by_task import SeenSample, seen
from sightline.report.data_facts import FACTS, SHEET, keep_facts
from sightline.report.samples import draw_samples
from sightline.tasks.classification import Classification

Page = runpy.run_path(str(Path(__file__).with_name("test_report.py")))["Page"]
SMALL = ["--data.size=24", "--data.eval-size=24"]
HOSTILE = "<script>alert(1)<"


def opened(name: str, *flags: str) -> tuple[Recipe, dict[str, Dataset]]:
    recipe, _ = config.load(name, flags)
    return recipe, {split: recipe.data.open(split, recipe.train.seed) for split in ("train", "val")}


def kept(folder: Path, recipe: Recipe, sets: Mapping[str, Dataset]) -> str:
    """As at the end of the first epoch of a run in this folder."""
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(store.dump(recipe, config.Run()))
    (folder / "log.jsonl").write_text('{"event": "log", "schema": 1, "time": 1}\n')
    bound = sets["train"].bind(devices.select("cpu"), recipe.train.global_batch)
    return keep_facts(folder, recipe, sets, bound, train_order_of(recipe.train, bound, World()))


@pytest.fixture(scope="module")
def data(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders of which one has a hostile name and fewer images, and one image is larger."""
    data = tmp_path_factory.mktemp("data") / "images"
    shutil.copytree(shapes, data)
    for split in ("train", "val"):
        sorted((data / split).iterdir())[0].rename(data / split / HOSTILE)
    for file in sorted((data / "train" / HOSTILE).iterdir())[:5]:
        file.unlink()
    Image.new("RGB", (300, 40)).save(data / "train" / HOSTILE / "wide.png")
    return data


@pytest.fixture
def run(data: Path, tmp_path: Path) -> Path:
    recipe, sets = opened("demo_classification", f"--data.path={data}", *SMALL)
    assert kept(tmp_path / "run", recipe, sets) == ""
    return tmp_path / "run"


def test_a_page_counts_classes_and_shows_samples(sightline, run: Path, data: Path):
    assert sightline("report", run).code == 0
    page = Page(run / "report.html")
    text = page.text.partition(" Data ")[2]
    for split in ("train", "val"):
        counts = Counter(path.parent.name for path in (data / split).rglob("*.*"))
        assert json.loads((run / FACTS).read_text())["splits"][split]["counts"] == [
            counts[name] for name in sorted(counts)
        ]
    assert "train 76 images 64 x 40 64 x 64 300 x 64 val 40 images 64 x 64 64 x 64 64 x 64" in text
    assert f"{HOSTILE} 4 4" in text and "script" not in page.tags
    assert text.index("bolt 8 4") < text.index(f"{HOSTILE} 4 4")  # the largest first
    assert "what the network sees (24 x 24, 3 channels): 18 training images of 24 x 24; the first row is" in text
    outside = [link.partition(",")[0] for link in page.links if not link.startswith("#")]
    assert outside == ["data:image/jpeg;base64"]
    widths = re.findall(r'<i style="width:([0-9.]+)%">', (run / "report.html").read_text())
    assert sorted(set(map(float, widths))) == [30.0, 60.0]


def test_facts_are_kept_once_for_the_same_data(run: Path, data: Path):
    before = (run / FACTS).stat().st_mtime_ns, (run / SHEET).stat().st_mtime_ns
    recipe, sets = opened("demo_classification", f"--data.path={data}", *SMALL)
    assert kept(run, recipe, sets) == ""
    assert before == ((run / FACTS).stat().st_mtime_ns, (run / SHEET).stat().st_mtime_ns)
    other, others = opened("demo_classification", "--data.path=synthetic:classes=3,samples=9,size=30", *SMALL)
    assert kept(run, replace(other, train=replace(other.train, global_batch=4)), others) == ""
    assert json.loads((run / FACTS).read_text())["splits"]["train"]["counts"] == [3, 3, 3]


def odd(run: Path, **changes) -> None:
    (run / FACTS).write_text(json.dumps({**json.loads((run / FACTS).read_text()), **changes}))


def thousand(run: Path) -> None:
    facts = json.loads((run / FACTS).read_text())
    for number, split in enumerate(facts["splits"].values()):
        split["counts"] = [1000 - at + number for at in range(1000)]
    odd(run, splits=facts["splits"], classes=[f"c{at}" for at in range(1000)])


ODD = {
    "data.json is gone": (lambda run: (run / FACTS).unlink(), False, ""),
    "data.json is half a file": (lambda run: (run / FACTS).write_text('{"format": 1'), False, "cannot be read"),
    "data.json is a list": (lambda run: (run / FACTS).write_text("[]"), False, "an object was expected"),
    "a split is odd": (lambda run: odd(run, splits={"train": {"items": "x"}}), False, "data.json cannot be read"),
    "splits are odd": (lambda run: odd(run, splits=[1]), False, "data.json cannot be read"),
    "a later version wrote it": (lambda run: odd(run, more=1), False, "which this version does not know"),
    "counts are of other classes": (lambda run: odd(run, classes=["a"]), True, "76 images"),
    "samples.jpg is gone": (lambda run: (run / SHEET).unlink(), False, "76 images"),
    "samples.jpg is no image": (lambda run: (run / SHEET).write_bytes(b"\xff\xd8<script>"), False, "76 images"),
    "a name is not text": (lambda run: odd(run, classes=["\udcff", *"abcdefghi"]), True, "\\udcff 4 4"),
    "1,000 classes": (thousand, True, "980 more classes with 11 to 990 images each"),
}


@pytest.mark.parametrize("what", ODD)
def test_odd_facts_still_give_a_page(sightline, run: Path, what: str):
    change, has_image, said = ODD[what]
    change(run)
    assert sightline("report", run).code == 0
    page = Page(run / "report.html")
    assert said in page.text and page.tags.count("img") == has_image and "script" not in page.tags
    if what == "1,000 classes":
        assert len(re.findall(r"<tr><td class=\"wrap\">c\d+</td>", (run / "report.html").read_text())) == 20


def test_the_page_needs_no_data(sightline, data: Path, tmp_path: Path):
    shutil.copytree(data, tmp_path / "gone")
    assert kept(tmp_path / "run", *opened("demo_classification", f"--data.path={tmp_path / 'gone'}", *SMALL)) == ""
    shutil.rmtree(tmp_path / "gone")
    assert sightline("report", tmp_path / "run").code == 0
    page = Page(tmp_path / "run" / "report.html")
    assert "76 images" in page.text and page.tags.count("img") == 1


@dataclass(frozen=True)
class Broken(Classification):
    """A task of a user's own."""


@seen.register(Broken)
def _nothing(task: Broken, batch: Batch, spec: DataSpec) -> list[SeenSample]:
    raise KeyError("boxes")


def test_nothing_that_fails_ends_a_run(data: Path, tmp_path: Path):
    recipe, sets = opened("demo_classification", f"--data.path={data}", *SMALL)
    assert kept(tmp_path / "a", replace(recipe, task=Broken()), sets) == ""
    drawn = json.loads((tmp_path / "a" / FACTS).read_text())["drawn"]
    assert drawn == f"samples were not drawn: 'boxes'; `sightline show {tmp_path / 'a'}` draws them"
    (tmp_path / "b" / FACTS).mkdir(parents=True)
    assert kept(tmp_path / "b", recipe, sets).startswith("data.json could not be written: ")


def test_slow_disks_cost_no_more_than_a_bounded_time(data: Path):
    sets = opened("demo_classification", f"--data.path={data}", *SMALL)[1]
    asked = iter([False] * 3 + [True] * 9)
    facts = sets["train"].facts(lambda: next(asked))
    assert (facts.items, len(facts.sizes), sum(facts.counts)) == (76, 3, 76)


def test_a_sheet_that_takes_long_is_drawn_from_what_was_read(data: Path):
    recipe, sets = opened("demo_classification", f"--data.path={data}", *SMALL, "--train.global-batch=4")
    bound = sets["train"].bind(devices.select("cpu"), 4)
    asked = iter([False] + [True] * 9)
    bad, order = BadSamples("fail", 0, print), train_order_of(recipe.train, bound, World())
    drawn = draw_samples(bound, order, recipe.task.build(), bad, 2**24, lambda: next(asked))
    assert len(drawn.samples) == 8 and drawn.draws == []  # two batches
    assert drawn.names == [sets["train"].name(index) for step in (0, 1) for index in order.batch(step)[1].tolist()]


def test_a_sheet_names_the_images_that_replaced_unreadable_ones(shapes: Path, tmp_path: Path):
    data = Path(shutil.copytree(shapes, tmp_path / "data"))
    recipe, sets = opened("demo_classification", f"--data.path={data}", *SMALL)
    bound = sets["train"].bind(devices.select("cpu"), recipe.train.global_batch)
    order = train_order_of(recipe.train, bound, World())
    broken = {sets["train"].name(index) for index in order.batch(0)[1][:3].tolist()}
    for name in broken:
        (data / "train" / name).write_bytes(b"")
    drawn = draw_samples(bound, order, recipe.task.build(), BadSamples("skip", 9, lambda bad: None), 2**24)
    assert not broken & set(drawn.names)
    named = [max(sample.labels, key=lambda label: label.score).name for sample in drawn.samples]
    assert named == [Path(name).parts[0] for name in drawn.names]
    assert len(drawn.draws) == 6 and {draw.labels[0].name for draw in drawn.draws} == {named[0]}


def test_boxes_are_counted(shared_data: Path, tmp_path: Path):
    flags = [f"--data.path={shared_data / 'coco-tiny'}", "--data.max-boxes=60", "--data.size=48"]
    recipe, sets = opened("demo_detection", *flags)
    assert kept(tmp_path / "run", recipe, sets) == ""
    facts = json.loads((tmp_path / "run" / FACTS).read_text())
    [file] = (shared_data / "coco-tiny" / "annotations").glob("*val*.json")
    truth = json.loads(file.read_text())
    counts = Counter(each["category_id"] for each in truth["annotations"])
    names = {each["id"]: each["name"] for each in truth["categories"]}
    row = facts["splits"]["val"]
    found = {name: count for name, count in zip(facts["classes"], row["counts"], strict=True) if count}
    assert found == {names[number]: count for number, count in counts.items()}
    sides = [(each["height"], each["width"]) for each in truth["images"]]
    expected = [np.min(sides, 0), np.median(sides, 0), np.max(sides, 0)]
    assert np.array_equal(row["sizes"], expected) and row["items"] == len(sides)


def test_voxels_are_counted():
    sets = opened("unet3d", "--data.path=synthetic:samples=8", "--data.task=04", "--data.augment=off")[1]
    facts = sets["val"].facts(lambda: False)
    assert facts.counts == tuple(np.bincount(sets["val"].source.label(0).ravel(), minlength=3).tolist())
    assert (facts.items, facts.kind, facts.sizes) == (1, "volumes", ((40, 56, 40),))
