"""A training from its first line to its last, started three times: every line of the screen, every event of the log.

Numbers that depend on the machine are left out; what they stand in is not.
"""

import json
import re
from pathlib import Path

import pytest
from tiny import tiny

from sightline import api
from sightline.runs import log

FLAGS = [*tiny(), "--run.log-every-steps=1", "--run.progress=plain", "--train.epochs=2", "--data.fingerprint=full"]
STARTS = ([], [], ["--train.epochs=3", "--optimizer.lr=0.3", "--run.override"])
SAID = """\
data: 10 classes, 24 + 3 images
reading all data for their fingerprint (--data.fingerprint full)
demo_classification: 24 training and 3 evaluation samples
2 epochs of 3 steps, batch 8, base rate #, fp32 on CPU
first step after # s: loss #
epoch 1/2  step 1/6  loss #  top1 #  lr #  # img/s  wait #  # GB
epoch 1/2  step 2/6  loss #  top1 #  lr #  # img/s  wait #  # GB  eta #
epoch 1/2  loss #  top1 # (SO FAR)  # at # img/s
  val  top5 #  balanced_accuracy #  macro_f1 #  loss #
epoch 2/2  step 4/6  loss #  top1 #  lr #  # img/s  wait #  # GB  eta #
epoch 2/2  step 5/6  loss #  top1 #  lr #  # img/s  wait #  # GB  eta #
epoch 2/2  loss #  top1 # (SO FAR)  # at # img/s
  val  top5 #  balanced_accuracy #  macro_f1 #  loss #
2 epochs are done; time to train # at # img/s
--
data: 10 classes, 24 + 3 images
reading all data for their fingerprint (--data.fingerprint full)
FOLDER is finished, 2 epochs are done; raise --train.epochs, or choose another --run.out
--
data: 10 classes, 24 + 3 images
resuming with other values than before (--run.override): optimizer.lr: # -> #
demo_classification: 24 training and 3 evaluation samples
3 epochs of 3 steps, batch 8, base rate #, fp32 on CPU
resuming from step 6
3 epochs instead of 2; the schedule is recomputed for them
first step after # s: loss #
epoch 3/3  step 7/9  loss #  top1 #  lr #  # img/s  wait #  # GB
epoch 3/3  step 8/9  loss #  top1 #  lr #  # img/s  wait #  # GB  eta #
epoch 3/3  loss #  top1 # (SO FAR)  # at # img/s
  val  top5 #  balanced_accuracy #  macro_f1 #  loss #
3 epochs are done; time to train # at # img/s
--
"""
TRAIN = "data_wait epoch {}grad_norm images_per_s loss lr memory_gb step steps_per_s time top1"
FIRST, NEXT = TRAIN.format(""), TRAIN.format("eta_s ")  # the first interval tells no rate
EPOCH = [
    ("epoch", "epoch images_per_s loss seconds step time"),
    ("evaluate_begin", "step time"),
    ("evaluate_end", "running_s step time wall_s"),
    ("evaluate", "balanced_accuracy epoch loss macro_f1 samples step time top1 top5"),
]
END = [("time_to_train", "running_s step time wall_s"), ("exit", "code images_per_s reason running_s time wall_s")]
STARTED = ("start", "base_lr local_batch step steps time workers")
RESUMED = ("resume", "changes checkpoint step time")
EVENTS = [
    ("log", "schema sightline time"),
    STARTED,
    *[("train", FIRST), ("train", NEXT), ("train", NEXT)],
    *EPOCH,
    *[("train", NEXT)] * 3,
    *[*EPOCH, *END],
    *[RESUMED, ("exit", "code reason started time")],
    *[RESUMED, STARTED],
    *[("train", FIRST), ("train", NEXT), ("train", NEXT)],
    *[*EPOCH, *END],
]


def plain(text: str, folder: Path) -> list[str]:
    """Return the lines of a screen without what a machine, or its speed, decides."""
    text = text.replace(str(folder), "FOLDER")
    text = re.sub(r"fp32 on .*", "fp32 on CPU", text)
    text = re.sub(r"\((best|equal)[^)]*\)", "(SO FAR)", text)
    text = re.sub(r"\d+:\d\d:\d\d|\d+%", "#", text)
    text = re.sub(r"(?<=(?:top1|loss|  lr|rate|top5) )[\d.e+-]+(?=\s|,)|[\d.,]+(?= img/s| GB| s:)", "#", text)
    text = re.sub(r"\d+\.\d+", "#", text)
    return [line for line in text.splitlines() if not line.startswith("warning: the validation loss")]


def test_every_line_and_every_event(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(log, "FIRST_STEP_S", 600.0)  # a slow machine says more
    said = []
    for flags in STARTS:
        api.train(*api.load("demo_classification", [*FLAGS, f"--run.out={tmp_path / 'run'}", *flags]))
        said += [*plain("".join(capsys.readouterr()), tmp_path / "run"), "--"]
    assert said == SAID.splitlines()
    found = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    saved = [each for each in found if each["event"] == "checkpoint"]  # as they are written, beside the steps
    assert [(each["step"], sorted(each)) for each in saved] == [
        (n, ["event", "name", "step", "time"]) for n in (3, 6, 9)
    ]
    found = [each for each in found if each["event"] not in ("warning", "stop_time", "checkpoint")]
    assert [(each["event"], " ".join(sorted(set(each) - {"event"}))) for each in found] == EVENTS
    rates = [round(each["lr"], 6) for each in found if each["event"] == "train"]
    assert rates[:3] == [round(0.2 * share / 3, 6) for share in (1, 2, 3)]  # an epoch of warm-up
    assert [(each["code"], each["reason"]) for each in found if each["event"] == "exit"] == [(0, "finished")] * 3
