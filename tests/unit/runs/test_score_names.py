"""Scores as people read them: recall and AP of a class, every number once, columns below their names."""

from sightline.overview import score_text
from sightline.parts import Scores
from sightline.runs import score_names


def test_a_class_has_recall_and_ap_where_all_samples_have_accuracy_and_map():
    assert [score_names.of_class(key) for key in ("top1", "map", "ap", "dice")] == ["recall", "ap", "ap", "dice"]
    rows = [
        {"class": "cat", "top1": 0.25, "precision": None, "f1": 0.0, "samples": 4},
        {"class": "dog", "top1": 1.0, "precision": 0.5, "f1": 2 / 3, "samples": 2},
    ]
    lines = score_text.of_classes(Scores({"top1": 0.5}, {"classes": rows}, []), "scores.json")
    assert [line.split() for line in lines] == [
        ["cat", "recall", "0.2500", "precision", "-", "f1", "0.0000", "4", "images"],
        ["dog", "recall", "1.0000", "precision", "0.5000", "f1", "0.6667", "2", "images"],
    ]


def test_the_macro_f1_of_several_labels_is_printed_once():
    values = {"map": 0.5, "macro_f1": 0.25, "f1": 0.25, "exact": 0.1, "samples": 8.0}
    assert list(score_names.shown(values)) == ["map", "macro_f1", "exact"]
    assert list(score_names.shown({"ap": 0.5, "f1": 0.25, "samples": 8.0})) == ["ap", "f1"]


def test_scores_of_checkpoints_stand_below_their_names():
    values = {"top1": 0.5, "balanced_accuracy": 0.25, "loss": 1.0, "samples": 8.0}
    head, *lines = score_text.of_checkpoints([{"step": 5, "values": values}, {"step": 10, "values": values}]).split(
        "\n"
    )
    assert head.split() == ["step", "top1", "balanced_accuracy", "loss"]
    for line in lines:
        assert len(line) == len(head)
        assert line.endswith("0.5000             0.2500  1.0000")
    boxes = {"ap": 0.25, "ap50": 0.5, "f1": 0.5, "ap75": 0.1, "aps": -1.0, "ar1": 0.1, "samples": 8.0}
    assert score_text.of_checkpoints([{"step": 5, "values": boxes}]).split()[:4] == ["step", "ap", "ap50", "f1"]
    assert "ap75" not in score_text.of_checkpoints([{"step": 5, "values": boxes}])


def test_twenty_classes_and_five_samples_are_printed():
    rows = [{"class": f"class {number}", "dice": number / 100} for number in range(23)]
    worst = [{"name": f"case {number}", "dice": number / 8} for number in range(6)]
    lines = score_text.of_classes(Scores({"dice": 0.5}, {"classes": rows}, worst), "scores.json", shows_worst=True)
    assert [line.split()[:4] for line in lines[:20]] == [["class", str(n), "dice", f"{n / 100:.4f}"] for n in range(20)]
    assert lines[20:] == [
        "  and 3 more classes in scores.json",
        "  lowest: case 0 0.0000, case 1 0.1250, case 2 0.2500, case 3 0.3750, case 4 0.5000",
    ]
    assert len(score_text.of_classes(Scores({"dice": 0.5}, {"classes": rows[:20]}, worst), "scores.json")) == 20


def test_what_is_wrong_with_the_worst_samples_stands_behind_their_path():
    worst = [
        {"name": "a", "path": "a.jpg", "predicted": "cat"},
        {"name": "b", "path": "b.jpg", "missed": 2, "truths": 5, "wrong": 1},
        {"name": "c", "path": "c.nii"},
        {"name": "d"},
    ]
    assert score_text.of_classes(Scores({"top1": 0.5}, {}, worst), "scores.json") == [
        "  worst: a.jpg  predicted as cat",
        "  worst: b.jpg  2 of 5 objects missed, 1 wrong",
        "  worst: c.nii",
    ]
