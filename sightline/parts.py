"""The parts a workload fills in: data, model, task, metric. The engine knows these and nothing more concrete.

A recipe puts concrete parts together; `train()` calls them in the order of this file.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from sightline.errors import UsageError
from sightline.files.typed_json import as_dataclass, short

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import torch
    from torch import Tensor, nn

    from sightline.data.check.images import Report
    from sightline.hardware.devices import Device
    from sightline.hardware.world import World
    from sightline.terminal.progress import Progress

# Of a spec out of a file: networks are built from it before anything else is looked at.
MAX_CHANNELS, MAX_SIDE = 1024, 2**16

Batch = dict[str, "Tensor"]  # keys are listed at the top of each tasks/*.py
Split = Literal["train", "val"]


def undecisive(default: Any) -> Any:
    """A config field that says where or how, and so is not compared on resume (a path, a cache size)."""
    return field(default=default, metadata={"decides_result": False})


def refuse_foreign_fields(part: str, config: Any, fields_of_kind: Mapping[str, set[str]]) -> None:
    """A config whose `kind` is one of several must not set a field that only another kind reads."""
    for kind, names in fields_of_kind.items():
        for name in sorted(names - fields_of_kind[config.kind]):
            if getattr(config, name) != config.__dataclass_fields__[name].default:
                raise UsageError(
                    f"{part}.{name}={getattr(config, name)} belongs to kind={kind}, not to kind={config.kind}; "
                    f"add --{part}.kind {kind} or leave it out"
                )


@dataclass(frozen=True)
class DataSpec:
    """What a source found and how it is fed; models are built from it and checkpoints carry it."""

    classes: tuple[str, ...]
    channels: int
    size: tuple[int, ...]  # (depth,) height, width of what the network sees in evaluation
    mean: tuple[float, ...]  # empty where each volume is scaled by its own mean and deviation
    std: tuple[float, ...]
    class_ids: tuple[int, ...] = ()  # what the files call the classes, in the same order, where that is not 0, 1, 2...
    spacing: tuple[float, ...] = ()  # volumes: mm from voxel to voxel along each axis of `size`
    clip: tuple[float, ...] = ()  # volumes: lowest and highest value, before mean and std

    def to_json(self) -> dict[str, Any]:
        """Plain lists and numbers, as they stand in a checkpoint."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in vars(self).items()}

    @classmethod
    def from_json(cls, values: Any) -> DataSpec:
        """The inverse of `to_json`; ValueError names what cannot be, UnknownField what is of a later version."""
        found = as_dataclass(cls, values)
        if not 1 <= found.channels <= MAX_CHANNELS:
            raise ValueError(f"{found.channels} channels, expected 1 to {MAX_CHANNELS}")
        if not all(1 <= side <= MAX_SIDE for side in found.size):
            raise ValueError(f"size is {short(found.size)}, expected sides of 1 to {MAX_SIDE}")
        for name in ("mean", "std", "spacing", "clip"):
            if not all(map(math.isfinite, getattr(found, name))):
                raise ValueError(f"{name} is {short(getattr(found, name))}, expected finite numbers")
        return found


class Dataset(ABC):
    """From an index to a ready sample. Loader workers run `load`; it is pickled to them once."""

    spec: DataSpec
    fingerprint: str  # of what was found on disk, so that a resumed run notices other data
    layout: dict[str, tuple[tuple[int, ...], str]]  # key -> (shape, numpy dtype) of one sample; static

    samples_per_item: int = 1  # what one `load` gives, in the samples that train.global_batch counts
    predict_batch: int = 64  # most items `predict` takes at once: a training batch may be too much where it runs

    def for_batch(self, global_batch: int) -> Dataset:
        """The data set as it fills batches of this many samples: a volume gives as many slices as that takes."""
        return self

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def name(self, index: int) -> str:
        """What a person would call this sample, e.g. its relative path."""

    @abstractmethod
    def load(self, epoch: int, index: int) -> dict[str, np.ndarray]:
        """Read, decode, augment: one array per key of `layout`. Raises BadSample."""

    def draw_batch(self, epoch: int, step: int) -> dict[str, np.ndarray]:
        """Random numbers that belong to a whole batch (mixup's); `step` counts within the epoch."""
        return {}

    host_keys: frozenset[str] = frozenset()  # of `layout`: what `decode` reads on the host and nobody on the device

    def settle_on(self, device: Device) -> str:
        """Once, before anything is loaded: the data set may move work to the device. Returns what to tell the user."""
        return ""

    def decode(self, slot: Batch, batch: Batch) -> Batch | None:
        """The part of loading that runs on the device, in the loader's stream: from a loaded batch as it lies on the
        host and as it was copied. None where the device cannot; the batch is then loaded anew on the host."""
        return batch

    def on_host(self) -> Dataset:
        """The same data set with every part of `load` on the host, into the same layout."""
        return self

    @abstractmethod
    def finish(self, batch: Batch, dtype: torch.dtype) -> Batch:
        """The device half of the data path: uint8 to normalised floats, batched augmentation. Static shapes."""


class DataConfig(ABC):
    """Where the samples are and how they are prepared for the network."""

    on_bad_sample: Literal["fail", "skip"]
    max_bad_samples: int
    file_suffixes: tuple[str, ...] = (".jpg", ".jpeg", ".png", ".bmp", ".webp")  # what `predict` takes from a folder

    @abstractmethod
    def open(self, split: Split, seed: int) -> Dataset: ...

    def open_files(self, files: Mapping[str, Path], spec: DataSpec) -> Dataset:
        """Any files by name, as evaluation sees its samples; what their batches say of the truth means nothing."""
        raise UsageError(f"{type(self).__name__} cannot open single files, so there is no `predict` for it yet")

    def labelled_files(self, folder: Path) -> dict[str, tuple[Path, Path]]:
        """The samples of the val split by name, as raw files and the files of their labels, found in `folder`."""
        raise UsageError(f"{type(self).__name__} has no label files to evaluate against; leave out --labels")

    @abstractmethod
    def declared(self) -> tuple[DataSpec, int] | None:
        """What the recipe itself says of its data (spec, training items) where none are given to look at."""

    def synthetic_path(self, spec: DataSpec, samples: int) -> str:
        """The `path` of samples made from numbers that look like those of this spec."""
        return f"synthetic:classes={len(spec.classes)},samples={samples},size={max(spec.size)}"

    def declared_per_item(self, global_batch: int) -> int:
        """`Dataset.samples_per_item` of what is declared, in batches of this many samples."""
        return 1

    def check(self, decode: bool, processes: int, progress: Progress) -> Report:
        """Looks at every sample of both splits, for `sightline check`; `decode` also at its pixels."""
        raise UsageError(f"{type(self).__name__} has no check of its own; train with it, it stops at the first problem")


class ModelConfig(ABC):
    """Which network; sizes that depend on the data come from the spec."""

    @abstractmethod
    def build(self, spec: DataSpec) -> nn.Module:
        """The network with random weights, drawn from torch's global generator."""

    def start_from(self, model: nn.Module) -> str:
        """Replaces random weights by given ones where a fresh run wants that; returns what to tell the user."""
        return ""


@dataclass(frozen=True)
class Loss:
    """What a step needs (`total`, a mean over the batch) and what it shows (`sums` over the batch)."""

    total: Tensor
    sums: dict[str, Tensor]


@dataclass(frozen=True)
class Scores:
    """What an evaluation found."""

    values: dict[str, float]
    tables: dict[str, list[dict[str, Any]]]
    worst: list[dict[str, Any]]  # samples a person should look at first


@dataclass(frozen=True)
class Finding:
    """One thing that a network says of a picture, as a person reads it."""

    name: str  # of the class
    class_id: int  # as the data set numbers it
    score: float
    box: tuple[float, float, float, float] | None = None  # left, top, right, bottom; shares of width and height


@dataclass(frozen=True)
class PredictOptions:
    """What a user wants to have of predictions; None leaves the choice to the task."""

    top: int | None = None  # most findings of a file
    threshold: float | None = None  # least score of what is shown
    draws: bool = True  # pictures
    probabilities: bool = False  # of every class at every voxel


class Reporter(ABC):
    """The folder into which `predict` puts what a network says of files."""

    unreadable: list[dict[str, str]]

    @abstractmethod
    def add(self, names: Sequence[str | None], predictions: Mapping[str, Tensor], batch: Batch) -> None:
        """Writes and tells what is said of a batch; the name is None of a row without a file that could be read."""

    @abstractmethod
    def note_unreadable(self, name: str, reason: str) -> None:
        """A file that the rest goes on without."""

    @abstractmethod
    def write(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """The list of all files, at the end; returns what it holds: `about`, "files" and "unreadable"."""


class Metric(ABC):
    """Counts that merge over ranks by sum or concatenation, so results are exact for any world size."""

    @abstractmethod
    def update(self, predictions: Mapping[str, Tensor], batch: Batch) -> None:
        """Adds one batch; only samples with batch["valid"] count. Must not synchronise with the host."""

    @abstractmethod
    def merge(self, world: World) -> None:
        """Brings the counts of all ranks together."""

    def names(self) -> tuple[str, ...]:
        """What `result` will call its values, so that a schedule that watches another is refused before anything is
        learnt; empty where that is known afterwards only."""
        return ()

    @abstractmethod
    def result(self) -> Scores: ...


class Task(ABC):
    """What is learnt: the loss, how outputs are read, which metric. Frozen dataclasses without state."""

    headline: str  # the score that decides which checkpoint is best; higher is better
    peers: str = ""  # NAME of sightline/measure/peers_NAME.py, which `benchmark --peers` compares with

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Loss: ...

    @abstractmethod
    def predict(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]: ...

    @abstractmethod
    def metric(self, spec: DataSpec, device: torch.device) -> Metric: ...

    def findings(
        self, predictions: Mapping[str, Tensor], spec: DataSpec, top: int | None, threshold: float | None
    ) -> list[list[Finding]]:
        """What predictions say, for each sample the best first: at most `top`, with at least this score; None leaves
        the choice to the task."""
        raise UsageError(f"{type(self).__name__} cannot say what it found, so there is no `predict` for it yet")

    def reporter(
        self,
        folder: Path,
        files: Mapping[str, Path],
        spec: DataSpec,
        options: PredictOptions,
        say: Callable[[str], None],
    ) -> Reporter:
        """What `predict` does with predictions: here, `findings` are listed and drawn into their pictures."""
        from sightline.report.predictions import Predictions

        return Predictions(self, folder, files, spec, options, say)
