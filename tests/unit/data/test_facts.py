"""What a data part says of its path before it is opened, and that both splits are then listed once."""

import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from sightline.data import facts
from sightline.data.classification import ClassificationData
from sightline.data.detection import DetectionData
from sightline.data.masks import MaskData
from sightline.data.segmentation import SegmentationData
from sightline.data.sources import Opener, SourceOptions, folder, table
from sightline.errors import BadData, UsageError
from sightline.parts import DataFacts, Dataset, Split

NO_RUN = Path("runs/none")


@dataclass(frozen=True)
class Photos(ClassificationData):
    """Class folders of one's own."""

    photographer: str = ""


@dataclass(frozen=True)
class Reversed(ClassificationData):
    """Class folders, opened in a way of one's own."""

    def open(self, split: Split, seed: int) -> Dataset:
        return super().open("val" if split == "train" else "train", seed)


@pytest.fixture
def photos(shapes: Path, tmp_path: Path) -> Path:
    """Two classes of six images without a split, and a table of them in another folder."""
    root = tmp_path / "photos"
    rows = ["file,label"]
    for name in sorted(os.listdir(shapes / "train"))[:2]:
        (root / name).mkdir(parents=True)
        for file in sorted((shapes / "train" / name).iterdir())[:6]:
            shutil.copy(file, root / name)
            rows.append(f"../photos/{name}/{file.name},{name}")
    (tmp_path / "listed").mkdir()
    (tmp_path / "listed" / "labels.csv").write_text("\n".join(rows))
    return root


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the folders that are walked and the tables that are read."""
    seen: Counter[str] = Counter()
    walk, read = folder.Walk.list, table.read_table

    def walked(self, *arguments):
        seen[self.root.name] += 1
        return walk(self, *arguments)

    def read_counted(head, *arguments):
        seen[head.path.name] += 1
        return read(head, *arguments)

    monkeypatch.setattr(folder.Walk, "list", walked)
    monkeypatch.setattr(table, "read_table", read_counted)
    return seen


def test_a_class_that_opens_data_otherwise_is_not_asked_for_a_test_split(photos: Path):
    """Its `open` may know train and else val, as that of Reversed does."""
    for name in ("train", "test"):
        shutil.copytree(photos, photos.parent / "splits" / name)
    data = photos.parent / "splits"
    assert len(Photos(path=str(data)).open_test(0)) == 12
    with pytest.raises(UsageError, match="Reversed opens no test split; give its data as --data.path DIR"):
        Reversed(path=str(data)).open_test(0)


@pytest.mark.parametrize("part", [ClassificationData, Photos])
def test_the_datas_classes_replace_the_recipes_unless_they_were_typed(part: type, photos: Path):
    found = part(path=str(photos), classes=10).look(NO_RUN, ())
    assert found.fields == {"classes": 2} and found.said == "10 + 2 images of 2 classes in photos"
    assert found.line.startswith("data: 2 classes, 10 + 2 images; no val split, so 2 images validate")
    assert found.steps is not None and [found.steps(batch) for batch in (3, 10, 11)] == [3, 1, 0]
    for typed, classes in (({"classes"}, 10), ((), 0)):
        assert part(path=str(photos), classes=classes).look(NO_RUN, typed).fields == {}


def test_without_a_path_there_are_no_facts():
    for part in (ClassificationData, DetectionData, SegmentationData):
        for path in ("", "a\0b"):
            assert part(path=path).look(NO_RUN, ()) == DataFacts()


def test_more_boxes_than_the_recipe_has_room_for_raise_it():
    data = DetectionData(path="synthetic:classes=3,samples=40,size=32", classes=80, max_boxes=1)
    found = data.look(NO_RUN, ())
    most = found.fields["max_boxes"]
    assert found.fields == {"classes": 3, "max_boxes": most} and most > 1
    assert found.line.endswith(f"; up to {most} boxes in an image")
    assert found.said.endswith("images of 3 classes in synthetic:classes=3,samples=40,size=32")
    assert data.look(NO_RUN, {"max_boxes"}).fields == {"classes": 3}
    replace(data, **found.fields).open_splits(0, found)


@pytest.mark.parametrize("name", ["photos", "listed"])
def test_data_are_listed_once_from_any_directory(photos: Path, reads: Counter[str], name: str, monkeypatch):
    monkeypatch.chdir(photos.parent)
    data = ClassificationData(path=name, classes=10)
    found = data.look(NO_RUN, ())
    opened = replace(data, **found.fields).at_absolute_path().in_run(NO_RUN).open_splits(0, found)
    assert [len(opened[split]) for split in ("train", "val")] == [10, 2]
    assert reads == {{"photos": "photos", "listed": "labels.csv"}[name]: 1}
    file = next(photos.rglob("*.jpg"))
    shutil.copy(file, file.with_name("new.jpg"))
    again = replace(data, classes=2).open_splits(0, DataFacts())
    assert reads[{"photos": "photos", "listed": "labels.csv"}[name]] == 2, "both splits share one listing"
    assert sum(map(len, again.values())) == (13 if name == "photos" else 12)


def test_the_split_of_a_run_is_that_of_its_facts(photos: Path, reads: Counter[str], tmp_path: Path):
    data = ClassificationData(path=str(photos))
    first = data.open_splits(0, data.look(NO_RUN, ()))
    run = tmp_path / "run"
    (run / "checkpoints" / "ckpt-00000001").mkdir(parents=True)
    (run / "split.json").write_text(first["val"].kept["split.json"])
    reads.clear()
    found = data.look(run, ())
    again = data.in_run(run).open_splits(0, found)
    assert "as " in found.line and reads == {"photos": 1}
    assert {split: again[split].fingerprint for split in again} == {split: first[split].fingerprint for split in first}


def test_a_class_that_opens_in_its_own_way_is_asked(shapes: Path):
    data = Reversed(path=str(shapes))
    opened = data.open_splits(0, data.look(NO_RUN, ()))
    assert [len(opened[split]) for split in ("train", "val")] == [40, 80]


def test_an_error_names_the_path_as_it_was_typed(photos: Path, monkeypatch):
    monkeypatch.chdir(photos.parent)
    Path("listed/labels.csv").write_text("file,label\n../photos/none,a\n,b\n")
    with pytest.raises(BadData, match=r"^listed/labels.csv line 3"):
        ClassificationData(path="listed").look(NO_RUN, ())
    with pytest.raises(UsageError, match="'nowhere' does not exist"):
        ClassificationData(path="nowhere").look(NO_RUN, ())


def test_a_look_imports_no_torch(photos: Path):
    program = (
        "import sys\nfrom pathlib import Path\nfrom sightline.data.classification import ClassificationData\n"
        "print(ClassificationData(path=sys.argv[1], classes=10).look(Path('runs/none'), ()).fields)\n"
        "print([each for each in ('torch', 'torchvision') if each in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(photos)], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("{'classes': 2}\n[]\n", "")


@pytest.mark.parametrize("classes", [0, 2])
def test_a_check_without_a_declared_number_says_the_same(photos: Path, classes: int):
    report = ClassificationData(path=str(photos), classes=classes).check_samples(True, 1, lambda *_: None)
    assert not report.problems and report.facts["train"]["images"] == 10
    wrong = ClassificationData(path=str(photos), classes=10).check_samples(True, 1, lambda *_: None)
    assert [each.text for each in wrong.problems] == ["2 classes, the recipe declares 10"]
    assert wrong.facts == report.facts


# Images with masks


@pytest.fixture
def masks(tmp_path: Path) -> Path:
    """Ten images whose masks hold 0, 7 and 255."""
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    mask = Image.new("L", (9, 8))
    mask.putpixel((0, 0), 7)
    mask.putpixel((1, 0), 255)
    for number in range(10):
        Image.new("RGB", (9, 8), (number, 0, 0)).save(tmp_path / "images" / f"{number}.png")
        mask.save(tmp_path / "masks" / f"{number}.png")
    return tmp_path


def test_masks_decide_the_classes_and_the_line_says_how(masks):
    facts = MaskData(path=str(masks), classes=10).look(NO_RUN, ())
    assert facts.fields == {"classes": 2}
    assert facts.line == (
        "data: 2 classes, 8 + 2 images; values 0, 7 renumbered; 255 ignored; no val split, so 2 images validate "
        "(about 20%, by name)"
    )
    assert facts.said.startswith("8 + 2 images of 2 classes in ")
    assert MaskData(path=str(masks), ignore="none", classes=3).look(NO_RUN, {"classes"}).fields == {}


def test_a_test_split_of_masks_is_said(masks):
    for split in ("train", "test"):
        for name in ("images", "masks"):
            shutil.copytree(masks / name, masks / "data" / split / name)
    shutil.copytree(masks / "data" / "train", masks / "data" / "val")
    Image.new("L", (9, 8), 7).save(masks / "data" / "test" / "masks" / "0.png")
    facts = MaskData(path=str(masks / "data")).look(NO_RUN, ())
    assert facts.has_test and facts.line.endswith("test split: 10 images, scored by `evaluate RUN --split test`")


@pytest.mark.parametrize(("classes", "is_typed", "opens"), [(3, False, True), (3, True, False), (0, False, False)])
def test_a_number_of_classes_that_nobody_typed_gives_way_to_the_data(classes: int, is_typed: bool, opens: bool):
    def open_one(kind: str, path: str, split: Split, options: SourceOptions):
        if options.classes == classes:
            raise BadData(f"{path} has 2 classes")
        return SimpleNamespace(classes=("a", "b"))

    options = SourceOptions(classes=classes)
    if opens:
        both = facts.open_both(Opener(), open_one, "folder", "here", options, is_typed)
        assert [len(both[split].classes) for split in ("train", "val")] == [2, 2]
    else:
        with pytest.raises(BadData, match="^here has 2 classes$"):
            facts.open_both(Opener(), open_one, "folder", "here", options, is_typed)
