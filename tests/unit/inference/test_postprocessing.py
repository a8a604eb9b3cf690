"""Which classes keep their largest component alone, by hand."""

import json
from pathlib import Path

import pytest

from sightline.errors import BadData
from sightline.inference.postprocessing import as_text, chosen, decided


def test_the_largest_component_must_be_better_on_average_and_not_equal():
    volumes = [  # Dice of four classes: as they are, and with the largest component alone
        [[0.5, 0.5, 1.0, 0.5], [1.0, 0.25, 1.0, 0.25]],
        [[0.5, 0.5, 0.25, 0.5], [0.25, 0.5, 0.25, 0.75]],
    ]
    rows = decided(["better", "worse", "equal", "equal on average"], volumes)
    assert [row["largest"] for row in rows] == [True, False, False, False]
    assert [(row["dice"], row["dice_largest"]) for row in rows] == [
        (0.5, 0.625),
        (0.5, 0.375),
        (0.625, 0.625),
        (0.5, 0.5),
    ]
    assert [row["label"] for row in rows] == ["L1", "L2", "L3", "L4"]
    text = as_text({"classes": rows, "volumes": 2})
    assert text.count("chosen") == 1 and text.count("not better") == 3


def test_classes_and_their_numbers_must_agree():
    with pytest.raises(ValueError, match="zip"):
        decided(["one"], [[[0.5, 0.5], [0.5, 0.5]]])


def test_the_table_is_as_wide_as_the_longest_class():
    rows = [
        {"class": "a long name", "dice": 0.5, "dice_largest": 0.625, "largest": True},
        {"class": "b", "dice": 1.0, "dice_largest": 0.98765, "largest": False},
    ]
    assert as_text({"classes": rows, "volumes": 7}).splitlines() == [
        "class          dice  largest component only",
        "a long name  0.5000  0.6250  chosen",
        "b            1.0000  0.9877  not better",
        "mean Dice over 7 validation volumes",
    ]
    assert as_text({"classes": rows[1:], "volumes": 7}).startswith(
        "class    dice  largest component only\nb      1.0000"
    )


def test_the_classes_that_were_chosen_are_read_back(tmp_path: Path):
    classes = ("background", "a", "b", "c")
    assert chosen(tmp_path, classes) == ()
    rows = [{"class": name, "largest": name != "b"} for name in classes[1:]]
    path = tmp_path / "postprocessing.json"
    path.write_text(json.dumps({"classes": rows}))
    assert chosen(tmp_path, classes) == (1, 3)
    with pytest.raises(
        BadData, match=r"postprocessing.json cannot be read \(its classes are not a, b\); make it again wi"
    ):
        chosen(tmp_path, classes[:3])
    for text in ("[]", "{", '{"classes": 3}', json.dumps({"classes": [{**row, "largest": 1} for row in rows]})):
        path.write_text(text)
        with pytest.raises(BadData, match="--choose-postprocessing`, or add --no-postprocessing$"):
            chosen(tmp_path, classes)
