"""A network as it is exported: its input, the network, its outputs, and a description that travels in the file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sightline import __version__
from sightline.export.by_task import outputs_of
from sightline.files.checkpoint_folder import sha256_of
from sightline.inference.checkpoints import Trained, stem_of
from sightline.parts import ServedInput, TaskConfig
from sightline.recipe import store

FORMAT = 1
INPUT = "image"
TRACED_BATCH = 2  # torch.export would take a batch of 1 for a constant


class Served(nn.Module):
    """The graph of an exported file: normalise, run the network, decode unless `raw`."""

    task: TaskConfig

    def __init__(self, model: nn.Module, task: TaskConfig, entry: ServedInput, raw: bool):
        super().__init__()
        self.model = model
        self.task = task
        self.outputs = outputs_of(task, raw)
        self.entry = entry
        self.raw = raw

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the outputs."""
        return self.outputs.names

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        return self.outputs.compute(self.model, self.entry.finish(image))

    def random_input(self, items: int) -> Tensor:
        """Draw a batch, the same in every call: pixels of any value, or normal floats."""
        generator = torch.Generator().manual_seed(items)
        shape = (items, *self.entry.shape)
        if self.entry.dtype == "uint8":
            return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        return torch.randn(shape, generator=generator)


Runs = Callable[[Tensor], tuple[Tensor, ...]]  # a loaded file: a batch in, the outputs by the order of their names


def describe(trained: Trained, served: Served) -> dict[str, Any]:
    """Return what a file says about itself: how to feed it, how to read it, where it comes from, and what `predict`
    needs. Paths of the machine are left out."""
    task, spec, entry = trained.recipe.task, trained.spec, served.entry
    stem = stem_of(trained.tensors)
    fields = store.to_json(trained.recipe)
    fields["data"] |= entry.fields
    return {
        "format": FORMAT,
        "sightline": __version__,
        "torch": str(torch.__version__),
        "task": type(task).__name__.lower(),
        "model": type(served.model).__name__,
        "classes": list(spec.classes),
        "class_ids": list(spec.class_ids),
        "input": {"name": INPUT, "axes": entry.axes, "shape": ["batch", *entry.shape], "dtype": entry.dtype},
        "preprocessing": dict(entry.preprocessing),
        "outputs": list(served.names),
        "activation": task.activation,
        "raw": served.raw,
        "checkpoint": {
            "name": trained.path.name,
            "weights": stem,
            "sha256": sha256_of(trained.path / f"{stem}.safetensors"),
        },
        "recipe": {part: _without_paths(values) for part, values in fields.items()},
        "spec": spec.to_json(),
        "progress": trained.stored["progress"],
    }


def as_text(about: dict[str, Any]) -> str:
    """Return the description as the text that a file holds."""
    return json.dumps(about)


def _without_paths(values: Any) -> Any:
    if not isinstance(values, dict):
        return values
    return {name: "" if isinstance(v, str) and os.path.isabs(v) else v for name, v in values.items()}
