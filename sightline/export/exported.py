"""An exported file in place of a run, for `sightline predict FILE.onnx INPUT`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sightline import config
from sightline.engine import checkpoint
from sightline.errors import BadCheckpoint, BadData, UsageError
from sightline.export import formats
from sightline.export.by_task import Outputs, misfit, outputs_of
from sightline.export.run import on_cpu
from sightline.export.served import FORMAT, Runs
from sightline.files.typed_json import loads, typed
from sightline.inference.checkpoints import Trained
from sightline.parts import Batch, Bound, DataSpec, PredictOptions, Task
from sightline.recipe.flags import Given

MAX_ABOUT_BYTES = 16 * 2**20


class Runner(nn.Module):
    """A loaded file in place of the network; what it answers is compared with what the task can read."""

    def __init__(self, run: Runs, path: Path, outputs: Outputs, spec: DataSpec):
        super().__init__()
        self.run = run
        self.path = path
        self.outputs = outputs
        self.spec = spec
        self.patch = spec.size  # the window of segmentation

    def forward(self, image: Tensor) -> Tensor | tuple[Tensor, ...]:
        if image.dtype == torch.uint8:  # files take pixels as (batch, height, width, channels)
            image = image.permute(0, 2, 3, 1).contiguous()
        found = tuple(self.run(image))
        if wrong := misfit(self.outputs, found, len(image), self.spec):
            raise BadData(f"{self.path} answers {wrong}: it is not what its description says; export it again")
        return found[0] if len(found) == 1 else found


@dataclass(frozen=True)
class Exported(Trained):
    """A file, its recipe as changed by flags, and the CPU."""

    trust: bool = False  # load it even if that can run its author's code

    @property
    def _decodes(self) -> bool:
        """Whether the file holds more of the task than the network."""
        return outputs_of(self.recipe.task).decodes and not self.stored["raw"]

    def about(self) -> dict[str, Any]:
        """Say where the network comes from; the file names its class."""
        return {**super().about(), "model": self.stored["model"]}

    def build(self) -> nn.Module:
        """Load the file."""
        run = _format_of(self.path).load(self.path, trust=self.trust)
        return Runner(run, self.path, outputs_of(self.recipe.task, self.stored["raw"]), self.spec)

    def showing(self, options: PredictOptions) -> Task:
        """Return the task; refuse options that ask for more than the file keeps."""
        task = super().showing(options)
        if self._decodes and task != self.recipe.task:
            raise UsageError(
                f"{self.path} keeps the boxes that it was exported with; give a higher --score-threshold and a lower "
                f"--top, or export again with --raw"
            )
        return task

    def predict(self, task: Task, model: nn.Module, bound: Bound, loaded: Batch) -> tuple[dict[str, Tensor], Batch]:
        """Run the file, which normalises pixels itself."""
        if self.stored["input"]["dtype"] == "uint8":  # channels first, as tasks know images, some of which mirror them
            batch = {**loaded, "image": loaded["image"].permute(0, 3, 1, 2)}
        else:
            batch = bound.finish(loaded, torch.float32)
        if not self._decodes:
            return task.predict(model, batch), batch
        return dict(zip(self.stored["outputs"], model(batch["image"]), strict=True)), batch


def open_exported(path: Path, which: str, recipe_file: str, trust: bool, *given: Given) -> Exported:
    """Open a file for `predict`; one whose loading can run code only if the user trusts it."""
    if which != "best":
        raise UsageError(f"--checkpoint {which}: {path} is one network; leave it out, or give the run")
    chosen = _format_of(path)
    if chosen.RUNS_CODE and not trust:
        raise chosen.not_trusted(path)
    text = chosen.about(path)
    if not text:
        raise BadData(f"{path} was not written by `sightline export`: it does not say how to feed it; export it again")
    try:
        if len(text) > MAX_ABOUT_BYTES:
            raise ValueError(f"{len(text)} bytes, at most {MAX_ABOUT_BYTES} are read")
        about = typed(loads(text.encode(), refuse_twice=True), dict[str, Any])
        if (found := typed(about.get("format"), int)) > FORMAT:
            raise UsageError(f"{path} has format {found}, this version reads {FORMAT}; use the version that wrote it")
        checkpoint.check_state(about)
        typed(about.get("outputs"), list[str]), typed(about.get("raw"), bool), typed(about.get("model"), str)
        dtype = typed(typed(about.get("input"), dict[str, Any]).get("dtype"), str)
    except ValueError as error:
        raise BadCheckpoint(f"{path}: its description is damaged ({error}); export it again") from error
    opened = Exported.set_up(path, {}, about, recipe_file, *on_cpu("predict with a file", *given))
    if dtype != (fed := opened.recipe.data.served(opened.spec).dtype):
        raise BadCheckpoint(f"{path}: its description is damaged (input of {dtype}, not of {fed}); export it again")
    opened = dataclasses.replace(opened, trust=trust)
    stored = config.of_stored(about["recipe"], recipe_file).build()[0]
    changes = [f"--model.{each}" for each in _differing(opened.recipe.model, stored.model)]
    if not about["raw"] and outputs_of(stored.task).decodes:
        changes += [f"--task.{each}" for each in _differing(opened.recipe.task, stored.task)]
    if changes:
        raise UsageError(
            f"{path} is a finished graph, which {changes[0].replace('_', '-')} cannot change; leave it out"
        )
    return opened


def _differing(part: Any, stored: Any) -> list[str]:
    return [each.name for each in dataclasses.fields(part) if getattr(part, each.name) != getattr(stored, each.name)]


def _format_of(path: Path) -> Any:
    for name in formats.names():
        chosen = formats.find(name)
        if path.suffix == chosen.SUFFIX and chosen.RUNS:
            return chosen
    raise UsageError(
        f"predict takes a run folder or a file of `sightline export` that ends in .onnx or .pt2, not {path}; weights "
        f"are scored by `sightline evaluate RECIPE --model.weights {path}`"
    )
