"""Files to results: whole passes of `predict` over the images of a val split, with weights that have learnt nothing."""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from sightline.data.loading.cache import read_once
from sightline.engine.model import build_model
from sightline.hardware.devices import Device
from sightline.hardware.world import World
from sightline.inference.checkpoints import Trained
from sightline.inference.predict import predict_files
from sightline.measure.peers import Say
from sightline.parts import PredictOptions
from sightline.recipe.recipe import Recipe, Run

NAME = "sightline predict, files to JSON and CSV"


@dataclass(frozen=True)
class Untrained(Trained):
    """A network of a recipe as `predict` takes it from a checkpoint."""

    def build(self) -> nn.Module:
        """Build the network with random weights."""
        return build_model(self.recipe, self.run, self.spec, self.device).model


def measure(recipe: Recipe, run: Run, device: Device, repeats: int, say: Say) -> dict[str, Any] | None:
    """Return a row of images per second: decoding, network, results and their files, in a process that has begun. None
    where the samples of the split are not image files, as those of prepared volumes."""
    dataset = read_once(recipe.data).open("val", recipe.train.seed)
    suffixes = recipe.data.file_suffixes
    files = {str(number): path for number, path in enumerate(dataset.files) if path.suffix.lower() in suffixes}
    if len(files) != len(dataset):
        say(f"files to results is not measured: {len(dataset)} samples of val are in {len(dataset.files)} files")
        return None
    stored = {"progress": {"step": 0}}
    quiet = replace(run, progress="off")
    engine = Untrained(Path("untrained"), {}, stored, recipe, quiet, dataset.spec, World(), device)
    seconds = []
    for _ in range(repeats + 1):
        with tempfile.TemporaryDirectory(prefix="sightline-benchmark-") as folder:
            started = time.perf_counter()
            predict_files(engine, files, Path(folder), PredictOptions(draws=False))
            seconds.append(time.perf_counter() - started)
    first, *others = seconds
    rates = [len(files) / each for each in others]
    found = {"median": statistics.median(rates), "min": min(rates), "max": max(rates), "all": rates}
    return {"name": NAME, "images": len(files), "images_per_s": found, "first_s": first}
