"""Several runs as one network: `predict RUN RUN ... INPUT` averages their probabilities, and so does the folder of
`train --data.fold all` for its folds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sightline.errors import UsageError
from sightline.inference.checkpoints import Trained
from sightline.parts import Batch, Bound, DataConfig, Task


class Networks(nn.ModuleList):
    """The networks of the runs, in their order."""


@dataclass(frozen=True)
class Ensemble(Trained):
    """Runs that are fed alike; recipe, data and device are those of the first. `path` is its checkpoint, or the folder
    of all folds."""

    members: tuple[Trained, ...]

    @classmethod
    def of(cls, members: Sequence[Trained], path: Path) -> Self:
        """Put runs together; UsageError names two that do not fit."""
        first = members[0]
        if not first.recipe.task.activation:
            raise UsageError(
                f"{first.path} and {members[1].path} find boxes, and only probabilities of classes are averaged; "
                "predict with one of them"
            )
        for other in members[1:]:
            _refuse_misfits(first, other)
        part = {each.name: getattr(first, each.name) for each in fields(Trained)}
        return cls(**{**part, "path": path, "tensors": {}, "stored": {}}, members=tuple(members))

    def about(self) -> dict[str, Any]:
        """Say where the networks come from."""
        runs = [{key: each.about()[key] for key in ("checkpoint", "step")} for each in self.members]
        what = f"ensemble of {len(runs)} runs"
        return {"recipe": self.recipe.name, "checkpoint": str(self.path), "model": what, "runs": runs}

    def build(self) -> nn.Module:
        """Build all networks."""
        return Networks(each.build() for each in self.members)

    def predict(self, task: Task, model: nn.Module, bound: Bound, loaded: Batch) -> tuple[dict[str, Tensor], Batch]:
        """Return what the mean of the probabilities says: its logits, and the most probable classes of voxels."""
        assert isinstance(model, Networks)
        total, batch, has_classes = torch.zeros(0), loaded, False
        for number, (member, network) in enumerate(zip(self.members, model, strict=True)):
            found, batch = member.predict(member.recipe.task.build(), network, bound, loaded)
            part, has_classes = _log_probabilities(found["logits"], task.activation), "classes" in found
            total = torch.logaddexp(total, part) if number else part
        logits = total - math.log(len(self.members))
        if task.activation == "sigmoid":
            logits = logits[..., 0] - logits[..., 1]
        return {"logits": logits, **({"classes": logits.argmax(1).to(torch.uint8)} if has_classes else {})}, batch


def _log_probabilities(logits: Tensor, activation: str) -> Tensor:
    """Return log probabilities of the classes; with sigmoid (..., 2): of each class, and of its absence."""
    if activation == "sigmoid":
        return torch.stack([F.logsigmoid(logits), F.logsigmoid(-logits)], dim=-1)
    return logits.log_softmax(1)


def _refuse_misfits(first: Trained, other: Trained) -> None:
    """Raise UsageError unless both runs answer the same question about the same input."""
    mine, yours = _fed(first), _fed(other)
    for name in dict.fromkeys([*mine, *yours]):
        if mine.get(name) != yours.get(name):
            raise UsageError(
                f"{first.path} and {other.path} do not fit together: {name} is {_short(mine.get(name))} in the first "
                f"and {_short(yours.get(name))} in the second; average runs of one task on data prepared alike"
            )


def _fed(trained: Trained) -> dict[str, Any]:
    """Return everything that must be equal, by the name that an error uses."""
    data, spec = trained.recipe.data, trained.spec
    facts = {"task": type(trained.recipe.task).__name__, "data": type(data).__name__, **vars(spec)}
    if type(data).served is not DataConfig.served:
        served = data.served(spec)
        facts |= {"axes": served.axes, **served.preprocessing, **served.fields}
    return {**facts, "device": trained.device.name()}


def _short(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
