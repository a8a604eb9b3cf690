"""The last screen of a training, from the files of its run."""

import json
import os
import shlex
from pathlib import Path

import pytest

from sightline.overview import last_screen

CONFUSED = {
    "epoch": 5,
    "step": 225,
    "values": {"top1": 0.4545, "loss": 1.2, "samples": 170.0},
    "tables": {
        "classes": [
            {"class": "cat", "top1": 0.5, "samples": 40},
            {"class": "dog", "top1": 1.0, "samples": 40},
            {"class": "ant", "top1": None, "samples": 0},
            {"class": "猫", "top1": 0.25, "samples": 40},
            {"class": "a very long name of a class, " * 3, "top1": 0.1, "samples": 50},
        ],
        "confusion": [
            {"class": "cat", "predicted": "dog", "samples": 12},
            {"class": "猫", "predicted": "cat", "samples": 9},
            {"class": "cat", "predicted": "猫", "samples": 8},
            {"class": "dog", "predicted": "cat", "samples": 1},
        ],
    },
    "worst": [{"index": 3, "name": "cat/3.jpg", "path": "/data/val/cat/my 3.jpg", "loss": 9.0}],
}


def write(folder: Path, best: dict, last: dict | None = None, bad: list[dict] = ()) -> Path:
    folder.mkdir(parents=True)
    (folder / "scores-best.json").write_text(json.dumps(best))
    (folder / "scores.json").write_text(json.dumps(last or best))
    if bad:
        (folder / "bad_samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in bad))
    return folder


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_classifier():
    last = CONFUSED | {"epoch": 10, "step": 450, "values": {"top1": 0.4298, "samples": 170.0}}
    bad = [{"feed": "train", "index": 1, "name": "a.jpg", "reason": "cut off"}]
    bad += [bad[0], {"feed": "val", "index": 1, "name": "a.jpg", "reason": "cut off"}]  # the first again, by a restart
    bad += [{"feed": "val", "index": 1, "name": "b.jpg", "reason": "cut off", "data": "/elsewhere"}]  # by `evaluate`
    text = last_screen.as_text(write(Path("my runs/one"), CONFUSED, last, bad), "ckpt-00000225")
    lines = text.splitlines()
    assert lines == [
        "finished: best top1 0.4545 at epoch 5; last 0.4298 at epoch 10",
        "results are in my runs/one; evaluate and predict use ckpt-00000225",
        "worst classes:  a very long name of a...  recall 0.1000  50 images",
        "                猫                        recall 0.2500  40 images",
        "                cat                       recall 0.5000  40 images",
        "mistakes:       cat predicted as dog: 12 of 40",
        "                猫 predicted as cat: 9 of 40",
        "                cat predicted as 猫: 8 of 40",
        "skipped:        2 samples, listed in my runs/one/bad_samples.jsonl",
        "next:",
        "  sightline evaluate 'my runs/one'",
        "  sightline predict 'my runs/one' '/data/val/cat/my 3.jpg'",
    ]
    assert len(lines) <= 12 and max(map(len, lines)) <= 80
    assert shlex.split(lines[-1])[2:] == ["my runs/one", "/data/val/cat/my 3.jpg"]


def test_a_detector_and_a_segmentation():
    boxes = [{"class": name, "ap": ap, "ap50": 0.5, "truths": 7} for name, ap in (("a", 0.3), ("b", 0.1), ("c", 0.2))]
    found = {"epoch": 1, "step": 4, "values": {"ap": 0.2, "samples": 9.0}, "tables": {"classes": boxes}, "worst": []}
    lines = last_screen.as_text(write(Path("ssd"), found), "ckpt-00000004").splitlines()
    assert lines[0] == "finished: best ap 0.2000 at epoch 1"
    assert [line.split()[-5:] for line in lines[2:5]] == [
        [name, "ap", ap, "7", "objects"] for name, ap in (("b", "0.1000"), ("c", "0.2000"), ("a", "0.3000"))
    ]
    assert lines[-1] == "  sightline predict ssd IMAGE" and "predicted as" not in "\n".join(lines)
    organs = [{"class": "liver", "label": "L1", "dice": 0.9}, {"class": "spleen", "label": "L2", "dice": 1.0}]
    found |= {"values": {"dice": 0.95, "samples": 9.0, "skipped": 1.0}, "tables": {"classes": organs}}
    lines = last_screen.as_text(write(Path("unet"), found), "ckpt-00000004").splitlines()
    assert lines[2] == "worst classes:  liver  dice 0.9000" and "spleen" not in "\n".join(lines)
    assert lines[3].startswith("skipped:        1 sample, listed in ")


def test_the_image_to_predict_is_named_from_here():
    worst = [{"index": 3, "name": "cat/3.jpg", "path": os.path.join(os.getcwd(), "pets", "3.jpg")}]
    text = last_screen.as_text(write(Path("run"), CONFUSED | {"worst": worst}), "ckpt-00000225", "my recipe.py")
    assert text.endswith("  sightline predict run pets/3.jpg --recipe 'my recipe.py'")
    assert "  sightline evaluate run --recipe 'my recipe.py'\n" in text


def test_the_command_for_a_test_split_is_named_where_there_is_one():
    text = last_screen.as_text(write(Path("run"), CONFUSED), "ckpt-00000225", "mine.py", has_test=True)
    commands = ["evaluate run", "evaluate run --split test"]
    assert text.splitlines()[-3:-1] == [f"  sightline {command} --recipe mine.py" for command in commands]


def test_a_folder_that_looks_like_a_flag_is_none():
    write(Path("-x"), CONFUSED)
    assert "  sightline evaluate ./-x\n" in last_screen.as_text(Path("-x"), "ckpt-00000225")


def test_where_no_score_was_a_number_none_is_called_best():
    folder = write(Path("run"), CONFUSED | {"values": {"top1": None, "samples": 170.0}})
    (folder / "scores-best.json").unlink()
    assert last_screen.as_text(folder, "ckpt-00000225").startswith("finished: top1 - at epoch 5\n")


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"values": 1'])
def test_a_run_without_scores_is_finished_all_the_same(tmp_path: Path, content: str | None):
    if content is not None:
        (tmp_path / "scores-best.json").write_text(content)
    assert last_screen.as_text(Path("."), "ckpt-00000225") == "finished: not evaluated; results are in ."
