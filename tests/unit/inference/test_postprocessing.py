"""Which classes keep their largest component alone, by hand."""

import pytest

from sightline.inference.postprocessing import as_text, decided


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
