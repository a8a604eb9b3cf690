"""Names of the drawings of `predict`: the image's own where Pillow writes that format, and never one name for two; and
its table, which no name can turn into formulas."""

import csv
import errno
import io
from functools import partial
from pathlib import Path

import pytest

from sightline.errors import BadSample, DiskError
from sightline.inference.predictions import Predictions, _as_csv, _as_json, _drawing_names, as_lines
from sightline.inference.reporter import PredictJob
from sightline.parts import DataSpec, Finding, PredictOptions


@pytest.mark.parametrize(
    ("names", "drawn"),
    [
        (["a.jpg", "sub/B.PNG", "c.jpeg"], ["a.jpg", "sub/B.PNG", "c.jpeg"]),
        (["a.jpg", "b.tif", "c"], ["a.jpg", "b.tif.png", "c.png"]),
        (["x", "x.png", "y.jpg"], ["x.png", "x.png.png", "y.jpg.png"]),
    ],
)
def test_every_image_has_a_drawing_of_its_own_name(names: list[str], drawn: list[str]):
    assert _drawing_names({name: Path(name) for name in names}) == dict(zip(names, drawn, strict=True))


FORMULAS = ["=cmd|x!A1", "+1", "-1.jpg", "@SUM(A1)", " =1", "\uff1d1"]
HARMLESS = ["cat", "a=b", "x, -y", "it's", 'say "hi"', "a;b", "vélo", "5-7"]


@pytest.mark.parametrize("name", FORMULAS)
def test_a_name_like_a_formula_stays_text_in_a_spreadsheet(name: str):
    row = {"file": "/data/a.png", "class": name, f"{name} pixels": -5, "score": -0.25}
    header, cells = csv.reader(io.StringIO(_as_csv((), [row]).decode()))
    assert cells == ["/data/a.png", f"'{name}", "-5", "-0.25"]  # numbers stay numbers
    assert header == ["file", "class", f"'{name} pixels", "score"]


def test_a_formula_behind_the_mark_of_another_language_stays_text():
    [[cell], [name]] = csv.reader(io.StringIO(_as_csv((), [{"class": "x;=1+1;y"}]).decode()))
    assert (cell, name) == ("class", "x;'=1+1;y")


@pytest.mark.parametrize("name", HARMLESS)
def test_other_names_are_written_as_they_are(name: str):
    assert list(csv.reader(io.StringIO(_as_csv((), [{"class": name}]).decode()))) == [["class"], [name]]


def test_control_characters_are_written_out():
    table = _as_csv((), [{"class": "\t=1\r\n\x1b[31mred\x9b\u202e\udcff"}]).decode()
    assert table == "class\n\\x09=1\\x0d\\x0a\\x1b[31mred\\x9b\\u202e\\udcff\n"


def test_rows_without_a_box_have_empty_cells():
    rows = [{"class": "a", "x": 1.5}, {"class": "b"}]
    assert _as_csv((), rows) == b"class,x\na,1.5\nb,\n"
    assert _as_csv(("file", "class"), []) == b"file,class\n"


@pytest.mark.parametrize("failing", [{"3"}, {"0"}, {"15"}, {"3", "7"}])
def test_what_was_written_beside_a_failed_write_is_listed(tmp_path: Path, failing: set[str]):
    names = [str(number) for number in range(16)]
    files = {name: tmp_path / "given" / name for name in names}
    spec, out = DataSpec(("a", "b"), 3, (8, 8), (), ()), tmp_path / "out"
    reporter = Predictions(lambda *given: [], PredictJob(out, files, spec, PredictOptions(), lambda line: None))

    def write(name: str, path: Path) -> None:
        if name in failing:
            raise OSError(errno.ENOSPC, f"no room for {name}")
        path.write_text(name)

    def make(name: str) -> dict:
        if name == "9":
            raise BadSample(name, "it is damaged")
        reporter.replace(name, partial(write, name))
        return {"file": name, "path": name, "found": []}

    with pytest.raises(DiskError, match=f"out/{min(failing, key=int)}"):
        reporter.add_files((name, partial(make, name)) for name in names)
    written = {path.name for path in out.iterdir()}
    assert written == set(names) - failing - {"9"} == reporter.found()["rows"].keys()
    assert [row["file"] for row in reporter.unreadable] == ["9"]


def test_lines_on_the_terminal_are_one_of_classes_or_one_a_box():
    classes = [{"class": "cat", "id": 1, "score": 0.98765}, {"class": "dog", "id": 2, "score": 0.01}]
    assert as_lines({"file": "a.jpg", "found": classes}) == ["a.jpg  cat 0.9877  dog 0.0100"]
    assert as_lines({"file": "a.jpg", "found": []}) == ["a.jpg  nothing found"]
    boxes = [{**classes[0], "box": [1.4, 2.6, 10.0, 20.25]}, {**classes[1], "box": [0, 0, 5, 6]}]
    assert as_lines({"file": "b.jpg", "width": 64, "height": 48, "found": boxes}) == [
        "b.jpg  64x48  2 found",
        "  0.988 (1) cat  (1, 3) (11, 23)",
        "  0.010 (2) dog  (0, 0) (5, 6)",
    ]


def test_a_finding_is_in_pixels_of_its_file_with_two_digits():
    box = (0.1, 0.25, 0.333, 0.75)
    assert _as_json(Finding("cat", 7, 0.5, box), 200, 101) == {
        "class": "cat", "id": 7, "score": 0.5, "box": [20.0, 25.25, 46.6, 50.5],
    }  # fmt: skip
    assert _as_json(Finding("cat", 7, 0.5), 200, 101) == {"class": "cat", "id": 7, "score": 0.5}
