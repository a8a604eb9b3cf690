"""Tables of scores on the terminal, line by line."""

from sightline.overview import score_text
from sightline.parts import Scores


def scores(rows: list[dict], worst: list[dict] = ()) -> Scores:
    return Scores({"top1": 0.5}, {"classes": rows} if rows else {}, list(worst))


def test_classes_are_a_line_each_with_what_was_counted():
    rows = [
        {"class": "cat", "top1": 0.25, "precision": None, "samples": 4},
        {"class": "a class with a name that is long", "ap": 1.0, "ap50": 0.5, "truths": 12},
        {"class": "lung", "label": "L1", "dice": 0.98765},
        {"class": "fox", "ap": 0.0, "samples": 1, "truths": 1},
    ]
    assert score_text.of_classes(scores(rows), "scores.json") == [
        f"  {'cat':24} recall 0.2500  precision      -  4 images",
        "  a class with a name that is long ap 1.0000  ap50 0.5000  12 objects",
        f"  {'lung':24} label L1  dice 0.9877",
        f"  {'fox':24} ap 0.0000  1 image  1 object",
    ]
    assert score_text.of_classes(scores([]), "scores.json") == []


def test_of_many_classes_twenty_are_shown_and_the_file_is_named():
    rows = [{"class": f"c{n}", "top1": 0.5} for n in range(21)]
    assert len(score_text.of_classes(scores(rows[:20]), "scores.json")) == 20
    lines = score_text.of_classes(scores(rows), "scores.json")
    assert len(lines) == 21 and lines[20] == "  and 1 more classes in scores.json" and lines[19].startswith("  c19 ")


def test_five_of_the_worst_are_named_with_what_is_wrong():
    volumes = [{"name": f"v{n}", "dice": n / 7} for n in range(6)]
    lowest = "  lowest: v0 0.0000, v1 0.1429, v2 0.2857, v3 0.4286, v4 0.5714"
    assert score_text.of_classes(scores([], volumes), "f", shows_worst=True) == [lowest]
    assert score_text.of_classes(scores([], volumes), "f") == []
    assert score_text.of_classes(scores([]), "f", shows_worst=True) == []
    files = [
        {"path": "a.jpg", "predicted": "dog", "missed": 1},
        {"path": "b.jpg", "missed": 2, "truths": 5, "wrong": 1},
        {"path": "c.png", "iou": 0.25},
        {"path": "d.png"},
        {"name": "e"},
        {"path": "f.png"},
    ]
    assert score_text.of_classes(scores([], files), "f") == [
        "  worst: a.jpg  predicted as dog",
        "  worst: b.jpg  2 of 5 objects missed, 1 wrong",
        "  worst: c.png  IoU 0.2500",
        "  worst: d.png",
    ]


def test_checkpoints_are_a_row_each():
    rows = [
        {"step": 10, "values": {"ap": 0.5, "ap75": 0.1, "score_threshold": 0.25, "samples": 9.0}},
        {"step": 12345, "values": {"ap": None, "ap75": 0.1, "score_threshold": -1.0, "samples": 9.0}},
    ]
    assert score_text.of_checkpoints(rows).splitlines() == [
        "      step      ap  score_threshold",
        "        10  0.5000           0.2500",
        "     12345       -                -",
    ]
    assert score_text.of_checkpoints([]) == "      step  "
