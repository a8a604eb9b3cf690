"""A trained network for Python users, `api.model`: a module that knows its preprocessing and its classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from sightline.hardware import devices
from sightline.hardware.devices import Device
from sightline.hardware.precision import DTYPES, autocast
from sightline.hardware.world import World
from sightline.inference.checkpoints import Trained
from sightline.parts import Batch, Bound, DataSpec, PredictOptions, Task
from sightline.recipe.recipe import Recipe, Run


class Model(nn.Module):
    """The network of a checkpoint in evaluation mode, with the weights that `evaluate` uses: averaged ones if the run
    has them. `model(model.preprocess(image)[None])` gives what the network gives; of a classifier, logits."""

    def __init__(self, trained: Trained):
        super().__init__()
        self.network = trained.build()
        self._trained = replace(trained, tensors={})
        self.eval()

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, by number."""
        return self.spec.classes

    @property
    def spec(self) -> DataSpec:
        """Facts about the data that the network was built for: channels, size, mean and deviation."""
        return self._trained.spec

    def forward(self, image: Tensor) -> Any:
        """Return the network's answer to a batch, in the precision of an evaluation; tensors in it are float32."""
        precision = self.recipe.train.eval_precision
        with autocast(devices.KINDS[image.device.type], precision):
            answer = self.network(image.to(DTYPES[precision]))
        return answer.float() if isinstance(answer, Tensor) else answer

    def preprocess(self, image: str | Path | np.ndarray | Image.Image) -> Tensor:
        """Return the network's input for an image, without the batch: decoded, resized and normalised as in evaluation,
        on the network's device. Of a volume it is all of it, (channels, depth, height, width)."""
        given = Path(image) if isinstance(image, str) else image
        name = str(given) if isinstance(given, Path) else "image"
        bound = self.recipe.data.open_files({name: given}, self.spec).bind(devices.KINDS["cpu"], 1)
        loaded = {key: torch.from_numpy(np.array(value)[None]) for key, value in bound.load(0, 0).items()}
        batch = {key: value.to(self.device.torch_device) for key, value in loaded.items()}
        return bound.finish(batch, torch.float32)["image"][0]

    # As an Engine, for predict.py

    @property
    def recipe(self) -> Recipe:
        """Everything that decided the result of the run."""
        return self._trained.recipe

    @property
    def run(self) -> Run:
        """Settings of this process."""
        return self._trained.run

    @property
    def world(self) -> World:
        """This process alone."""
        return self._trained.world

    @property
    def device(self) -> Device:
        """Device of the parameters, which `to()` may have moved."""
        return devices.select(str(next(self.parameters()).device))

    def build(self) -> nn.Module:
        """Return the network itself."""
        return self.network

    def showing(self, options: PredictOptions) -> Task:
        """Return the task whose predictions keep all that these options ask to see."""
        return self._trained.showing(options)

    def predict(self, task: Task, model: nn.Module, bound: Bound, loaded: Batch) -> tuple[Mapping[str, Tensor], Batch]:
        """Return the predictions for a batch of the loader, and the batch as the network was fed."""
        return replace(self._trained, device=self.device).predict(task, model, bound, loaded)

    def about(self) -> dict[str, Any]:
        """Say where the network comes from."""
        return self._trained.about()
