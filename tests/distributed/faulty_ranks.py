"""A tiny recipe with batch-norm that fails on one rank where the environment variable FAULT wants it.

FAULT="WHAT@RANK:STEP" e.g. "kill@1:7": in the first attempt, or with "always-kill" in each, when that rank computes the
loss of its STEP-th step, from 1 on: kill (SIGKILL), hang (does not return), term (SIGTERM), raise, data (exit 3),
memory (there is not enough), disk (the next file takes SLOW_S to reach it). With TRACE=DIR every rank adds the samples
of each of its steps to DIR/RANK.jsonl. Without either it is an ordinary recipe.
"""

import json
import os
import signal
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from torch import nn

from sightline.config import Recipe, TrainConfig
from sightline.data.classification import ClassificationData
from sightline.errors import BadData
from sightline.parts import DataSpec, ModelConfig
from sightline.tasks.classification import Classification
from sightline.train.optimizers import OptimizerConfig
from sightline.train.schedules import ScheduleConfig

SLOW_S = 9
steps = count(1)


def fail(step: int) -> None:
    what, _, where = os.environ.get("FAULT", "").partition("@")
    always = what.startswith("always-")  # in every attempt
    is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if where != f"{os.environ.get('RANK', '0')}:{step}" or not (is_first or always):
        return
    what = what.removeprefix("always-")
    if what in ("kill", "term"):
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "term": signal.SIGTERM}[what])
    elif what == "hang":
        time.sleep(1000)
    elif what == "raise":
        raise ValueError("made to fail")
    elif what == "data":
        raise BadData("made to find bad data")
    elif what == "memory":
        raise torch.OutOfMemoryError("tried to allocate 20.00 GiB")
    elif what == "disk":
        at_once = os.fsync

        def fsync(descriptor: int) -> None:
            os.fsync = at_once
            time.sleep(SLOW_S)
            at_once(descriptor)

        os.fsync = fsync


@dataclass(frozen=True)
class Normed(ModelConfig):
    """A convolution with batch-norm."""

    def build(self, spec: DataSpec) -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(400, len(spec.classes)))


@dataclass(frozen=True)
class Regression(ModelConfig):
    """Softmax regression, where splitting a batch changes nothing but the order of a sum."""

    def build(self, spec: DataSpec) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(432, len(spec.classes)))


@dataclass(frozen=True)
class FaultyTask(Classification):
    """Fails, and tells which samples came."""

    def loss(self, model, batch):
        step = next(steps)
        if folder := os.environ.get("TRACE"):
            with (Path(folder) / f"{os.environ.get('RANK', '0')}.jsonl").open("a") as file:
                file.write(json.dumps(batch["index"].tolist()) + "\n")
        fail(step)
        return super().loss(model, batch)


def recipe() -> Recipe:
    """Two epochs of ten steps of twelve images."""
    return Recipe(
        name="faulty_ranks",
        model=Regression() if os.environ.get("MODEL") == "regression" else Normed(),
        data=ClassificationData(
            path="synthetic:classes=4,samples=120,size=16", size=12, eval_resize=12, eval_size=12, classes=4
        ),
        task=FaultyTask(label_smoothing=0.1),
        optimizer=OptimizerConfig(lr=0.02, lr_many=0.01),
        schedule=ScheduleConfig(kind="constant"),
        train=TrainConfig(epochs=2, global_batch=12, precision="fp32", ema=0.9),
    )
