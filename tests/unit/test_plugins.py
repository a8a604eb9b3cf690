"""Parts of other packages: only for names that are not ours, and errors that name the package."""

import json
import math
import shutil
import sys
from pathlib import Path

import pytest
from PIL import Image

from sightline import cli, config, plugins, recipes
from sightline.data import sources
from sightline.data.check.boxes import check_boxes
from sightline.data.check.images import check_images
from sightline.data.detection import DetectionData
from sightline.data.writing.forms import file_of
from sightline.errors import BadData, UsageError
from sightline.export import formats

NAME = "demo_classification"
RECIPE = """'The demo under another name.'
from dataclasses import replace
from sightline.recipes import demo_classification

def recipe():
    return replace(demo_classification.recipe(), name='{name}')
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """install(package, entry_points, {module: text}): as pip leaves it on sys.path, until the test ends."""
    known = set(sys.modules)
    monkeypatch.setattr(plugins, "_loaded", {})

    def put(package: str, entry_points: str, **modules: str) -> None:
        site = tmp_path / package
        info = site / f"{package}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(entry_points)
        for name, text in modules.items():
            (site / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(str(site))

    yield put
    for name in set(sys.modules) - known:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in sys.modules[name].__file__:
            del sys.modules[name]


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(list(words)) == 2
    return capsys.readouterr().err


def test_names_of_ours_stay_ours(install, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A module that cannot be imported takes a name in every list of ours."""
    names = {"recipes": NAME, "sources": "folder", "preparations": "shapes", "formats": "pth", "commands": "list"}
    install("greedy", "".join(f"[sightline.{g}]\n{n} = broken_greedy\n" for g, n in names.items()), broken_greedy="1/0")
    assert all(plugins.has(group, name) for group, name in names.items())
    assert recipes.load(NAME).name == NAME and cli.main(["list", NAME]) == 0
    assert sources.open_source("auto", "synthetic:classes=2,samples=8,size=8", "train").classes
    with pytest.raises(BadData):
        sources.open_source("folder", str(tmp_path), "train")  # it is ours that looks
    assert formats.find("pth").__name__ == "sightline.export.formats.pth"
    assert "--out" in said(capsys, "prepare", "shapes")  # its own refusal
    assert "broken_greedy" not in sys.modules


def test_nothing_is_scanned_for_names_of_ours(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def refuse(group: str) -> None:
        raise AssertionError(f"scanned for {group}")

    monkeypatch.setattr(plugins, "_scan", refuse)
    for words in (["--help"], ["list"], ["list", NAME], ["train", "--help"], ["train", NAME, "-h"]):
        assert cli.main(words) == 0
    assert said(capsys, "train", NAME, "--data", "no/such/folder")
    assert said(capsys, "train", NAME, "--optimizer.lrr", "1")


def test_a_refusal_lists_what_other_packages_bring(install, capsys: pytest.CaptureFixture[str]):
    groups = ("recipes", "commands", "preparations", "formats", "sources")
    install("lab", "".join(f"[sightline.{group}]\nflowers = lab_parts\n" for group in groups), lab_parts="")
    for words in (["train", "flower"], ["flower"], ["prepare", "flower"]):
        assert "flowers (lab 1.0)" in said(capsys, *words)
    with pytest.raises(UsageError, match=r"unknown; use one of .*pth.*, flowers \(lab 1.0\)"):
        formats.find("flower")
    with pytest.raises(UsageError, match=r"unknown --data.source 'flower'; known: auto, .*, flowers \(lab 1.0\)"):
        sources.open_source("flower", "x", "train")


def test_a_part_that_cannot_be_used_names_its_package(install, capsys: pytest.CaptureFixture[str]):
    points = "[sightline.recipes]\nbroken = lab_broken\nempty = lab_empty\ngone = lab_gone\nother = lab_other\n"
    points += "script = lab_script\n"
    points += "[sightline.commands]\nnumber = lab_empty:NUMBER\n"
    install(
        "lab",
        points,
        lab_broken="import no_such_module",
        lab_empty="NUMBER = 1",
        lab_other=RECIPE.format(name="b"),
        lab_script="raise SystemExit(0)",
    )
    where = "of the package lab 1.0 (sightline.recipes)"
    no_module = f"'broken' {where} cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"
    assert no_module in (error := said(capsys, "train", "broken")) and "`pip uninstall lab`" in error
    assert f"'empty' {where} is lab_empty, which does not define recipe" in said(capsys, "train", "empty")
    assert f"'script' {where} cannot be imported: SystemExit: 0" in said(capsys, "train", "script")
    assert f"'gone' {where} cannot be imported: ModuleNotFoundError" in said(capsys, "list", "gone")
    assert "recipe() of other is called 'b'; name it 'other' like its entry point" in said(capsys, "train", "other")
    assert "'number' of the package lab 1.0 (sightline.commands) is lab_empty:NUMBER, which cannot be called" in said(
        capsys, "number"
    )


def test_a_name_of_two_packages_is_refused(install, capsys: pytest.CaptureFixture[str]):
    for package in ("lab", "mill"):
        install(package, f"[sightline.recipes]\nflowers = {package}_recipe\n", **{f"{package}_recipe": ""})
    assert "'flowers' is brought by lab 1.0 and mill 1.0 as one of their recipes; uninstall all but one" in said(
        capsys, "train", "flowers"
    )


BOXES = """
import json
from pathlib import Path
import numpy as np
from sightline.data.sources import BoxSource, Objects
from sightline.data.sources.layouts import NoTestSplit

def detect(path):
    return Path(path, "boxes.json").is_file()

class Drawn(BoxSource):
    def __init__(self, path, split):
        self.root = Path(path, split)
        self.rows = json.loads(Path(path, "boxes.json").read_text())[split]
        self.classes, self.class_ids, self.fingerprint = ("ball", "brick"), (1, 2), repr(self.rows)
        self.most_objects = max(len(boxes) for _, boxes in self.rows.values())
        self.room = np.full(len(self.rows), 10**6)
    def __len__(self):
        return len(self.rows)
    def name(self, index):
        return list(self.rows)[index]
    def image(self, index):
        return (self.root / self.name(index)).read_bytes()
    def objects(self, index):
        number, found = self.rows[self.name(index)]
        found = np.array(found, np.float64).reshape(-1, 5)
        return Objects(number, 30, 40, found[:, :4], found[:, 4].astype(int), found[:, 2], np.zeros(len(found), bool))

def open_boxes(path, split, options):
    if split == "test":
        raise NoTestSplit("none")
    return Drawn(path, split)
"""


NAMED = """
from pathlib import Path
import numpy as np
from sightline.data.sources import Sample, Source
from sightline.data.sources.layouts import NoTestSplit

def detect(path):
    return False

class Named(Source):
    classes, fingerprint = ("ball",), "1"
    def __init__(self, root):
        self.root = root
        self.names = sorted(str(path.relative_to(root)) for path in root.rglob("*.jpg"))
        self.labels = np.zeros(len(self.names), int)
    def __len__(self):
        return len(self.names)
    def name(self, index):
        return self.names[index]
    def read(self, index):
        return Sample((self.root / self.names[index]).read_bytes(), 0)

def open_source(path, split, options):
    if split == "test":
        raise NoTestSplit("none")
    return Named(Path(path, split))
"""


@pytest.fixture
def drawn(install, tmp_path: Path):
    """drawn(change): a folder of boxes of a package's source, its rows changed in between."""
    install("lab", "[sightline.sources]\ndrawn = lab_boxes\n", lab_boxes=BOXES)

    def write(change=lambda rows: None) -> Path:
        root = tmp_path / "boxes"
        rows = {}
        for base, split in enumerate(("train", "val")):
            (root / split).mkdir(parents=True, exist_ok=True)
            rows[split] = {f"{at}.jpg": [at, [[2, 3, 9, 8, 1], [20, 12, 15, 18, 2]]] for at in range(4)}
            for at, name in enumerate(rows[split]):
                Image.new("RGB", (40, 30), (50 * at, 90 * base, 60)).save(root / split / name)
        change(rows)
        (root / "boxes.json").write_text(json.dumps(rows))
        return root

    return write


def of_val(*boxes: list[float]):
    def change(rows: dict) -> None:
        rows["val"]["1.jpg"][1] = [*boxes]

    return change


def as_corners(rows: dict) -> None:
    for _, boxes in [row for split in rows.values() for row in split.values()]:
        for box in boxes:
            box[2:4] = box[0] + box[2], box[1] + box[3]


def as_shares(rows: dict) -> None:
    for _, boxes in [row for split in rows.values() for row in split.values()]:
        for box in boxes:
            box[:4] = box[0] / 40, box[1] / 30, box[2] / 40, box[3] / 30


GOOD = [2, 3, 9, 8, 1]
WRONG_BOXES = {
    "not a number": (of_val(GOOD, [2, math.nan, 9, 8, 1]), "box 1 of 1.jpg is 2, nan, 9, 8 .*expected four finite"),
    "a negative side": (of_val([2, 3, -9, 8, 1]), "box 0 of 1.jpg is 2, 3, -9, 8 .*no side is negative"),
    "corners": (as_corners, r"box 1 of 0.jpg is 20, 12, 35, 30 .* of 40x30, but these look like corners"),
    "elsewhere": (of_val(GOOD, [50, 3, 60, 8, 1]), "box 1 of 1.jpg is 50, 3, 60, 8 .*lies by far"),
    "shares": (as_shares, "box 0 of 0.jpg is 0.05, 0.1, .*look like shares.* 8 of 8 boxes"),
    "label 0": (of_val([2, 3, 9, 8, 0]), "box 0 of 1.jpg .* label 0; expected labels from 1, the first class, to 2"),
    "label 3": (of_val(GOOD, GOOD, [2, 3, 9, 8, 3]), "box 2 of 1.jpg .* label 3; expected labels .* to 2"),
    "one image_id": (lambda rows: rows["val"]["3.jpg"].__setitem__(0, 1), "1.jpg and 3.jpg have one image_id, 1"),
}


@pytest.mark.parametrize("wrong", WRONG_BOXES)
def test_impossible_boxes_of_a_package_are_refused_where_they_are_opened(drawn, wrong: str):
    change, said = WRONG_BOXES[wrong]
    root = drawn(change)
    with pytest.raises(BadData, match=f"{root}: source 'drawn' of the package lab 1.0: {said}"):
        [sources.open_boxes("auto", str(root), split) for split in ("train", "val")]


def test_boxes_of_a_package_may_be_as_careless_as_those_of_files(drawn):
    """Over an edge, without an area, in the middle of the image, none at all: those that are scored stay."""
    root = drawn(of_val([2, 3, 40, 8, 1], [2, 3, 0, 8, 2], [-1, 3, 9, 8, 1], [12, 9, 16, 12, 1]))
    assert len(sources.open_boxes("auto", str(root), "val").objects(1).labels) == 4
    root = drawn(of_val())
    assert [len(sources.open_boxes("auto", str(root), "val").objects(at).labels) for at in range(3)] == [2, 0, 2]
    for split in ("train", "val"):  # all start in the middle, where corners of two boxes may lie
        root = drawn(
            lambda rows: [row.__setitem__(1, [[10, 8, 20, 15, 1]]) for s in rows.values() for row in s.values()]
        )
        assert len(sources.open_boxes("auto", str(root), split)) == 4


def test_all_that_a_source_of_a_package_lacks_is_named_at_once(install, tmp_path: Path):
    less = BOXES.replace("self.classes, self.class_ids, self.fingerprint =", "self.classes, _, self.fingerprint =")
    less = less.replace("self.most_objects", "most").replace("self.room", "room")
    install("less", "[sightline.sources]\nless = less_boxes\n", less_boxes=less)
    (tmp_path / "boxes.json").write_text('{"train": {"0.jpg": [1, [[2, 3, 9, 8, 1]]]}}')
    with pytest.raises(
        UsageError, match=r"'less' of the package less 1.0: .*\(Drawn\) has no class_ids, most_objects, room;"
    ):
        sources.open_boxes("less", str(tmp_path), "train")


@pytest.mark.parametrize(
    ("was", "now", "said"),
    [
        ("np.full(len(self.rows)", "np.full(5", "room has 5 numbers for 4 images"),
        ("(1, 2), repr", "(1,), repr", "class_ids has 1 numbers for 2 classes"),
        ("max(len(boxes)", "min(1", "0.jpg has 2 boxes, but most_objects is 1"),
        (
            "found[:, :4], ",
            "found[:, :4].tolist(), ",
            r"0.jpg: Objects.boxes is a list, expected an array of shape \(2, 4\)",
        ),
        (
            "found[:, 2], ",
            "found[:1, 2], ",
            r"0.jpg: Objects.area is of shape \(1,\), expected an array of shape \(2,\)",
        ),
    ],
)
def test_numbers_of_a_package_that_do_not_fit_each_other_are_refused(drawn, was: str, now: str, said: str):
    root = drawn()
    file = Path(sys.path[0]) / "lab_boxes.py"
    assert BOXES.count(was) == 1
    file.write_text(BOXES.replace(was, now))
    with pytest.raises(BadData, match=said):
        sources.open_boxes("auto", str(root), "train")


def test_a_resumed_run_of_a_source_without_files_is_told_what_it_cannot_see(drawn, install, tmp_path: Path):
    line = "the source has no `files`, so a resumed run does not notice images that changed"
    assert line in DetectionData(path=str(drawn())).look(tmp_path, ()).line
    named = BOXES.replace("self.classes, ", "self.files = [self.root / name for name in self.rows]; self.classes, ", 1)
    (Path(sys.path[0]) / "lab_boxes.py").write_text(named)
    del sys.modules["lab_boxes"]
    plugins._loaded.clear()
    assert line not in DetectionData(path=str(tmp_path / "boxes")).look(tmp_path, ()).line


def test_images_of_a_package_are_told_apart_by_their_folders(install, shapes: Path, tmp_path: Path):
    """Names that begin with no folder, with one, and with that of the class."""
    install("lab", "[sightline.sources]\nnamed = lab_named\n", lab_named=NAMED)
    image = next(shapes.glob("train/*/*")).read_bytes()
    names = {"train": ["0.jpg", "2.jpg", "a/0.jpg", "ball/1.jpg"], "val": ["3.jpg", "b/3.jpg"]}
    for split, some in names.items():
        for at, name in enumerate(some):
            (tmp_path / split / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / split / name).write_bytes(image + bytes([at, len(split)]))
    report = check_images(str(tmp_path), "named", sources.DEFAULT_OPTIONS, 0, True, 1, lambda *_: None)
    assert report.problems == []
    source = sources.open_source("named", str(tmp_path), "train")
    assert [file_of(source, at) for at in range(4)] == ["0.jpg", "2.jpg", "a/0.jpg", "1.jpg"]


def test_boxes_of_a_package_are_checked_like_those_of_files(drawn):
    root = drawn(of_val(GOOD, [2, 3, 40, 8, 1]))
    (root / "val" / "2.jpg").write_bytes(b"no image")
    shutil.copy(root / "val" / "3.jpg", root / "train" / "0.jpg")
    report = check_boxes(str(root), "auto", 0, True, 1, lambda *_: None)
    assert {(each.kind, each.split, each.where) for each in report.problems} == {
        ("box outside of the image", "val", "1.jpg"),
        ("unreadable", "val", "2.jpg"),
        ("same image in train and val", "train", "0.jpg"),
    }
    assert {split: facts["boxes per class"] for split, facts in report.facts.items()} == {
        "train": {"ball": 4, "brick": 4},
        "val": {"ball": 5, "brick": 3},
    }
    report = check_boxes(str(drawn(as_corners)), "drawn", 0, True, 1, lambda *_: None)
    assert [(each.kind, each.split) for each in report.problems] == [("cannot be opened", s) for s in ("train", "val")]


def test_a_source_of_a_package_that_reads_something_else_says_what(drawn, install, tmp_path: Path):
    with pytest.raises(
        UsageError, match=r"'drawn' of the package lab 1.0 has no open_source.*; it reads images with boxes"
    ):
        sources.open_source("drawn", str(tmp_path), "train")


def test_a_config_file_may_name_an_installed_recipe_and_no_file(install, tmp_path: Path):
    install("lab", "[sightline.recipes]\nflowers = lab_recipe\n", lab_recipe=RECIPE.format(name="flowers"))
    file = tmp_path / "config.yaml"
    file.write_text("recipe: flowers\ntrain: {epochs: 3}\n")
    assert config.asked("train", ["--config", str(file)]).settings["train.epochs"].value == 3
    assert config.of_run("inspect", tmp_path).build()[0].name == "flowers"
    assert config.of_stored({"recipe": "flowers", "train": {"epochs": 4}}).build()[0].train.epochs == 4
    assert recipes.describe("flowers") == "The demo under another name."
    (tmp_path / "theirs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    for name in (str(tmp_path / "theirs.py"), "lab_recipe", "os", "flowers.py"):
        file.write_text(f"recipe: {name}\n")
        with pytest.raises(UsageError, match="own"):
            config.asked("train", ["--config", str(file)])
        with pytest.raises(UsageError, match="own recipe"):
            config.of_run("inspect", tmp_path)
        with pytest.raises(UsageError, match="own recipe"):
            config.of_stored({"recipe": name})
    assert not (tmp_path / "ran").exists()


def test_a_format_of_another_package_is_found_by_its_name_and_once(install):
    words = "SUFFIX = '.own'\nABOUT = 'mine'\nRUNS = False\ncheck_installed = write = load = print\n"
    install(
        "brings",
        "[sightline.formats]\nown = own_format\nhalf = half_format\n",
        own_format=words,
        half_format="RUNS = 1",
    )
    found = formats.find("own")
    assert (found.__name__, found.SUFFIX) == ("own_format", ".own") and formats.find("own") is found
    assert plugins.names("formats") == ["half", "own"] and "own" not in formats.names()
    with pytest.raises(
        UsageError, match="which does not define SUFFIX, ABOUT, check_installed, write, load; update or"
    ):
        formats.find("half")
    with pytest.raises(
        UsageError, match=r"^--format odd is unknown; use one of onnx, .*, half \(brings 1.0\), own \(brings"
    ):
        formats.find("odd")
    with pytest.raises(UsageError, match="^no installed package brings 'odd' among its formats; install it, or check"):
        plugins.load("formats", "odd")
