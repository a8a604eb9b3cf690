"""A task of a headline and three methods trains, evaluates, resumes and reports; what it registers adds `predict`."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sightline import api
from sightline.errors import UsageError

BARE = '''
"""Regress the brightness of an image: no classes, boxes or masks."""
from dataclasses import dataclass, replace

from sightline.parts import Loss, Metric, Scores, Task
from sightline.recipes import demo_classification


def brightness(batch):
    return batch["image"].float().mean((1, 2, 3))


class Distance(Metric):
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, predictions, batch):
        distance = (predictions["brightness"] - brightness(batch)).abs()
        self.sum += float(distance[batch["valid"]].sum())
        self.count += int(batch["valid"].sum())

    def merge(self, world):
        pass

    def result(self):
        return Scores({"closeness": 1 - self.sum / self.count, "samples": self.count}, {}, [])


@dataclass(frozen=True)
class Brightness(Task):
    headline = "closeness"

    def loss(self, model, batch):
        return Loss(((model(batch["image"]).float().mean(1) - brightness(batch)) ** 2).mean(), {})

    def predict(self, model, batch):
        return {"brightness": model(batch["image"]).float().mean(1)}

    def metric(self, spec, device):
        return Distance()


def recipe():
    return replace(demo_classification.recipe(), name="bare", task=Brightness())
'''
REGISTERED = """
from sightline.inference.by_task import results
from sightline.parts import Prediction


@dataclass(frozen=True)
class Shine(Prediction):
    value: float


@results.register(Brightness)
def shines(task, names, outputs, batch, spec, options):
    rows = zip(names, outputs["brightness"].tolist(), strict=True)
    return [Shine(name, value) for name, value in rows if name is not None]
"""
HERE = {"run.device": "cpu", "run.workers": 0, "run.progress": "off"}
SMALL = {"data.path": "synthetic:classes=3,samples=24,size=16", "data.size": 16, "model.depth": 18, "model.width": 4}
SMALL |= {"train.global_batch": 8, "train.epochs": 2, "train.precision": "fp32", **HERE}


@pytest.fixture
def bare(tmp_path: Path) -> str:
    (tmp_path / "bare.py").write_text(BARE)
    return str(tmp_path / "bare.py")


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(max((run / "checkpoints").glob("ckpt-*")) / "model.safetensors")


def test_it_trains_evaluates_and_resumes_to_the_bit(bare: str, tmp_path: Path):
    whole = api.train(bare, flags=SMALL, out=str(tmp_path / "whole"))
    api.train(bare, flags={**SMALL, "train.max_steps": 4}, out=str(tmp_path / "cut"))
    again = api.train(bare, flags=SMALL, out=str(tmp_path / "cut"))
    assert again.values == whole.values and whole.values["samples"] > 0
    first, second = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    scores = api.evaluate(tmp_path / "whole", HERE, which="latest", recipe_file=bare)
    assert scores.values == whole.values
    assert "closeness" in (tmp_path / "whole" / "report.html").read_text()


def test_what_it_registers_is_what_predict_returns(bare: str, tmp_path: Path):
    api.train(bare, flags={**SMALL, "train.max_steps": 1}, out=str(tmp_path / "run"), report=False)
    image = torch.full((20, 20, 3), 255, dtype=torch.uint8).numpy()
    with pytest.raises(UsageError, match="Brightness has no results"):
        api.predict(tmp_path / "run", [image], flags=HERE, recipe_file=bare)
    Path(bare).write_text(BARE + REGISTERED)
    [found] = api.predict(tmp_path / "run", [image], flags=HERE, recipe_file=bare)
    assert isinstance(found.value, float)
