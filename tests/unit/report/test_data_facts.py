"""The data section of a page, from a data.json written by hand: every word and every border of its rules."""

import base64
import io
import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sightline.parts import DataSpec, SplitFacts
from sightline.report import data_facts


def row(**more: Any) -> dict[str, Any]:
    made = {"items": 1200, "kind": "images", "counted": "images", "counts": [], "counted_in": 1200, "measured": 1200}
    return {**made, "sizes": [], "boxes": [], **more}


def section(folder: Path, classes: int = 0, most_bytes: int = 2**20, **splits: dict[str, Any]) -> str:
    facts = {"format": 1, "fingerprint": "f", "classes": [f"c{i}" for i in range(classes)], "network": "8 x 6"}
    (folder / "data.json").write_text(json.dumps({**facts, "splits": splits, "drawn": "4 of 9"}))
    return data_facts.section(folder, most_bytes)


def tables(html: str) -> list[list[list[str]]]:
    rows = [re.findall(r"<tr>(.*?)</tr>", table) for table in re.findall("<table.*?</table>", html)]
    cells = [[re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line) for line in found] for found in rows]
    return [[[unescape(re.sub("<[^>]*>", "", cell)) for cell in line] for line in found] for found in cells]


def notes(html: str) -> list[str]:
    return [unescape(each) for each in re.findall('<p class="dim">(.*?)</p>', html)]


def test_a_folder_without_facts_has_no_section_and_damage_is_told(tmp_path: Path):
    assert data_facts.section(tmp_path, 2**20) == ""
    (tmp_path / "data.json").write_text("{")
    assert data_facts.section(tmp_path, 2**20).startswith('<p class="bad">data.json cannot be read: ')


def test_sizes_of_images_are_width_first_and_of_volumes_as_they_lie(tmp_path: Path):
    sizes = [[300.0, 400.0], [480.5, 640.0], [1000.0, 2000.0]]
    train = row(sizes=sizes, measured=100, boxes=[0.0, 2.5, 40.0])
    html = section(tmp_path, train=train, val=row(items=7, counted_in=7, measured=7))
    assert tables(html) == [
        [
            ["split", "samples", "smallest size", "median size", "largest size", "boxes per image"],
            ["train", "1,200 images", "400 x 300", "640 x 480.5", "2000 x 1000", "0 to 40, median 2.5"],
            ["val", "7 images", "", "", "", ""],
        ]
    ]
    assert notes(html)[0] == "sizes: width x height; of 100 of 1,200 train, evenly spread"
    volumes = row(kind="volumes", sizes=[[8.0, 9.0, 10.0]] * 3, measured=0)
    html = section(tmp_path, train=volumes)
    assert tables(html) == [
        [
            ["split", "samples", "smallest size", "median size", "largest size"],
            ["train", "1,200 volumes", *["8 x 9 x 10"] * 3],
        ]
    ]
    assert notes(html)[0] == "sizes: slices x rows x columns"
    html = section(tmp_path, train=row())
    assert tables(html) == [[["split", "samples"], ["train", "1,200 images"]]] and "sizes:" not in html
    html = section(tmp_path, train=row(sizes=[[8.0, 9.0]], boxes=[1.0]))  # of another version: half of it
    assert tables(html)[0][1] == ["train", "1,200 images", "0 to 0, median 0"]


def test_bars_are_by_the_largest_class_of_each_split_and_sorted_by_the_first(tmp_path: Path):
    html = section(
        tmp_path, 3, train=row(counts=[30, 1_500_000, 60]), val=row(counts=[4, 0, 2], items=50, counted_in=20)
    )
    assert tables(html)[1] == [
        ["class", "images of train", "images of val"],
        ["c1", "1.5M", "0"],
        ["c2", "60", "2"],
        ["c0", "30", "4"],
    ]
    assert re.findall(r"width:([\d.]+)%", html) == ["60.0", "0.0", "0.0", "30.0", "0.0", "60.0"]
    assert notes(html)[0] == "counted in 20 of 50 val, evenly spread"
    html = section(tmp_path, 2, train=row(counted="voxels", counts=[999_999, 1]))
    counted = [["c0", "999,999 (1e+02\u00a0%)"], ["c1", "1 (0.0001\u00a0%)"]]
    assert tables(html)[1] == [["class", "voxels of train"], *counted]
    assert "(" not in str(tables(section(tmp_path, 2, train=row(counted="objects", counts=[3, 1])))[1])
    for counts in ([1], [1, 2, 3], [0, 0], [-1, 3]):
        assert len(tables(section(tmp_path, 2, train=row(counts=counts)))) == 1, counts


@pytest.mark.parametrize("classes", [30, 31, 33])
def test_of_more_than_thirty_classes_ten_of_both_ends_are_shown(tmp_path: Path, classes: int):
    html = section(tmp_path, classes, train=row(counts=[1000 + i for i in range(classes)]))
    found = tables(html)[1][1:]
    names = [cells[0] for cells in found]
    everything = [f"c{i}" for i in reversed(range(classes))]
    if classes == 30:
        assert names == everything and "more classes" not in html
        return
    between = f"{classes - 20} more classes with 1,010 to {1000 + classes - 11:,} images each"
    assert names == [*everything[:10], between, *everything[-10:]]
    assert 'colspan="2"' in html


def test_the_sheet_is_shown_where_it_fits_and_is_an_image(tmp_path: Path):
    packed = io.BytesIO()
    Image.new("RGB", (9, 9)).save(packed, "JPEG")
    data = packed.getvalue()
    (tmp_path / "samples.jpg").write_bytes(data)
    as_text = base64.b64encode(data).decode()
    limit = -(-4 * len(data) // 3)  # as base64
    html = section(tmp_path, most_bytes=limit, train=row())
    assert f'src="data:image/jpeg;base64,{as_text}"' in html and 'alt="training samples"' in html
    assert notes(html) == ["what the network sees (8 x 6): 4 of 9"]
    assert "base64" not in section(tmp_path, most_bytes=limit - 1, train=row())
    (tmp_path / "samples.jpg").write_bytes(b"no image")
    assert "base64" not in section(tmp_path, train=row()) and "<h3>Samples</h3>" in section(tmp_path, train=row())


def test_a_row_has_lowest_median_and_highest_of_every_axis():
    facts = SplitFacts(9, "images", "boxes", (3, 4), 8, ((4, 50), (6, 10), (5, 30)), (7, 0, 2, 3))
    assert data_facts._row(facts) == data_facts.SplitRow(
        9, "images", "boxes", (3, 4), 8, 3, ((4.0, 10.0), (5.0, 30.0), (6.0, 50.0)), (0.0, 2.5, 7.0)
    )
    assert data_facts._row(SplitFacts(9, "images", "images", (), 0, (), ())).sizes == ()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (DataSpec(("a",), 3, (24, 32), (0.0,), (1.0,)), "32 x 24, 3 channels"),
        (DataSpec(("a",), 1, (4, 5, 6), (0.0,), (1.0,), spacing=(2.5, 1.0, 0.123456789)),
         "4 x 5 x 6, 1 channel, voxels of 2.5 x 1 x 0.12346 mm"),
    ],
)  # fmt: skip
def test_what_the_network_is_given(spec: DataSpec, said: str):
    assert data_facts._network(spec) == said
