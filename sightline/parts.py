"""The parts a workload fills in: data, model, task, metric. The engine knows these and nothing more concrete.
A recipe puts concrete parts together; `train()` calls them in the order of this file."""

from __future__ import annotations

import dataclasses
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from sightline.errors import UsageError
from sightline.files.typed_json import as_dataclass, short
from sightline.recipe.part import Part

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import torch
    from PIL import Image
    from torch import Tensor, nn

    from sightline.hardware.devices import Device
    from sightline.hardware.world import World

# Limits on a spec read from a file: a network is built from it before anything else is checked.
MAX_CHANNELS, MAX_SIDE = 1024, 2**16
_LATER = ("multi_label", "coloured", "bits")  # fields of a spec that older versions do not know

Batch = dict[str, "Tensor"]  # keys are listed at the top of each tasks/*.py
Arrays = dict[str, "np.ndarray"]
Layout = Mapping[str, tuple[tuple[int, ...], str]]  # key -> (shape, NumPy dtype) of one item
Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val")  # of a training; a test split is scored when asked for
IGNORED = 255  # in a mask: pixels that neither loss nor scores count


@dataclass(frozen=True)
class DataSpec:
    """Facts about the data that models are built from; checkpoints carry them."""

    classes: tuple[str, ...]
    channels: int
    size: tuple[int, ...]  # (depth,) height, width of the network's input in evaluation
    mean: tuple[float, ...]  # empty if each volume is scaled by its own mean and deviation
    std: tuple[float, ...]
    class_ids: tuple[int, ...] = ()  # numbers of the classes in the files, in the same order; empty: 0, 1, 2...
    spacing: tuple[float, ...] = ()  # volumes: mm from voxel to voxel along each axis of `size`
    clip: tuple[float, ...] = ()  # volumes: lowest and highest value, before mean and std
    multi_label: bool = False  # images: any number of classes each
    coloured: bool = False  # masks: `class_ids` are colours, 0xRRGGBB
    bits: int = 8  # images with masks: of each channel, 8 or 16

    def to_json(self) -> dict[str, Any]:
        """Return plain lists and numbers, for a checkpoint, without what older versions do not know and data do not
        have."""
        later = {each.name: each.default for each in dataclasses.fields(self) if each.name in _LATER}
        kept = {name: v for name, v in vars(self).items() if name not in later or v != later[name]}
        return {name: list(v) if isinstance(v, tuple) else v for name, v in kept.items()}

    @classmethod
    def from_json(cls, values: Any) -> DataSpec:
        """Undo `to_json`. Raises ValueError for impossible values and UnknownField for fields of a later version."""
        found = as_dataclass(cls, values)
        if not 1 <= found.channels <= MAX_CHANNELS:
            raise ValueError(f"{found.channels} channels, expected 1 to {MAX_CHANNELS}")
        if not all(1 <= side <= MAX_SIDE for side in found.size):
            raise ValueError(f"size is {short(found.size)}, expected sides of 1 to {MAX_SIDE}")
        if found.bits not in (8, 16):
            raise ValueError(f"{short(found.bits)} bits, expected 8 or 16")
        for name in ("mean", "std", "spacing", "clip"):
            if not all(map(math.isfinite, getattr(found, name))):
                raise ValueError(f"{name} is {short(getattr(found, name))}, expected finite numbers")
        return found


@dataclass(frozen=True)
class SplitFacts:
    """Numbers of a split, as the report of a run shows them. Some are of a part of the items."""

    items: int
    kind: str = "samples"  # of the items: images, volumes
    counted: str = ""  # what `counts` counts for each class of the spec: images, boxes, voxels
    counts: tuple[int, ...] = ()
    counted_in: int = 0  # items
    sizes: tuple[tuple[int, ...], ...] = ()  # of items as they lie on disk: (depth,) height, width
    boxes: tuple[int, ...] = ()  # of each image that was counted


def no_numbers(epoch: int, step: int) -> Arrays:
    """Draw nothing for a batch as a whole."""
    return {}


def any_batch(items: int) -> None:
    """Accept batches of any size."""


class Dataset(ABC):
    """One split of the data as it was found. Nothing in it changes after `DataConfig.open`."""

    spec: DataSpec
    fingerprint: str  # of names and sizes found on disk, so that a resumed run notices other data
    files: Sequence[Path] = ()  # that hold the samples, in a fixed order; see data/contents.py
    kept: Mapping[str, str] = MappingProxyType({})  # texts for files of the run folder, by name, e.g. of a drawn split
    predict_batch: int = 64  # most items `predict` takes at once: a training batch may not fit where it runs
    eval_batch: int = 0  # most items that a device evaluates at once, where images have any size; 0: a training batch
    balanced_by: np.ndarray | None = None  # the class of each item if training draws all classes equally often

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of items."""

    @abstractmethod
    def name(self, index: int) -> str:
        """Return the name of an item for people, e.g. its relative path."""

    def samples_per_item(self, global_batch: int) -> int:
        """Return how many samples one item gives: a volume gives as many slices as its share of the batch needs."""
        return 1

    def facts(self, is_late: Callable[[], bool]) -> SplitFacts:
        """Count and measure for the report of a run: at most a few hundred files, and none once it is late."""
        return SplitFacts(len(self))

    def prefers_host(self, device: Device, workers: int, deterministic: bool) -> tuple[bool, str]:
        """Return whether the host should decode although the device may be able to, and a line that says why. Measured
        with this many loader processes, unless `deterministic`; (False, "") if there is nothing to choose."""
        return False, ""

    def on_host(self) -> Dataset:
        """Return this split decoded on the host."""
        return self

    @abstractmethod
    def bind(self, device: Device, global_batch: int) -> Bound:
        """Decide how items are loaded for batches of this many samples (over all ranks) on this kind of device."""


@dataclass(frozen=True)
class Bound:
    """A dataset bound to a device and a batch size: all that the loader needs. Loader workers get a pickled copy."""

    dataset: Dataset
    layout: Layout
    load: Callable[[int, int], Arrays]
    """load(epoch, index): read, decode, augment one item. Returns an array per key of `layout`; raises BadSample."""
    finish: Callable[[Batch, torch.dtype], Batch]
    """The device half, inside the step: uint8 to normalised floats, batched augmentation. Static shapes."""
    draw_batch: Callable[[int, int], Arrays] = no_numbers
    """draw_batch(epoch, step of the epoch): random numbers that belong to a whole batch, e.g. those of mixup."""
    samples_per_item: int = 1  # samples of train.global_batch that one `load` gives
    decode: Callable[[Batch, Batch], Batch | None] | None = None
    """decode(batch on the host, its copy on the device): the part of loading that runs there, on the loader's stream.
    Returns None if the device refuses the batch. None: `load` does it all."""
    on_host: Bound | None = None
    """Comes with `decode`: the same items loaded on the host alone, for batches that the device refuses."""
    host_keys: frozenset[str] = frozenset()
    """Keys of `layout` that are not copied to the device."""
    check_batch: Callable[[int], None] = any_batch
    """check_batch(items per device): raises UsageError if the data cannot come in batches of this size."""
    begin: Callable[[int, int], Callable[[], Arrays]] | None = None  # `load` in two: what is read, then what computes
    parts: int = 0  # of a batch, each loaded by one process; 0: as many as even out slow samples
    cache: Any = None  # memory of loading/cache.py or device_cache.py; the loader starts it before its processes
    repeats_first: bool = False  # the loader hands out the first batch again and again (--data.fake)
    notes: tuple[str, ...] = ()
    """Lines for the user: what was decided, and why."""


@dataclass(frozen=True)
class ServedInput:
    """The input of an exported network, and how a program that serves it prepares one."""

    axes: str  # e.g. NHWC; the first is the batch, of any size
    shape: tuple[int, ...]  # the other axes
    dtype: Literal["uint8", "float32"]  # uint8: `finish` does all that `Bound.finish` does; float32: nothing
    preprocessing: Mapping[str, Any]  # steps left to that program, as plain values
    finish: Callable[[Tensor], Tensor]  # the step inside the graph
    fields: Mapping[str, Any] = field(default_factory=dict)  # of the data config, for a loader of such inputs


@dataclass(frozen=True)
class DataFacts:
    """What lies at the path of some data, before they are opened for training."""

    line: str = ""  # for the user, e.g. "data: 2 classes, 8 + 2 images"
    fields: Mapping[str, Any] = field(default_factory=dict)  # values of the data config that these data decide
    said: str = ""  # why these values, for `inspect` and the report: "8 + 2 images of 2 classes in pets"
    steps: Callable[[int], int] | None = None  # of an epoch, by batch, without a partial last one; None if unknown
    opened: Mapping[Any, Any] = field(default_factory=dict)  # what was read, for `open_splits`
    has_test: bool = False  # there is a test split that neither trains nor validates
    val_items: int = 0  # samples that validate; 0 if unknown
    count: Callable[[], SplitFacts] | None = None  # numbers of the train split; None if unknown
    warning: str = ""  # for the user, below the line


NOTHING_OPENED = DataFacts()


class DataConfig(Part, ABC):
    """Location of the samples, and how they are prepared for the network."""

    part = "data"
    worker_modules: tuple[str, ...] = ()  # that loader processes need, to be imported once for all of them

    on_bad_sample: Literal["fail", "skip"]
    max_bad_samples: int
    fingerprint: Literal["names", "sampled", "full"] = "sampled"

    @abstractmethod
    def open(self, split: Split, seed: int) -> Dataset:
        """Find the samples of a split."""

    def look(self, run: Path, typed: Collection[str]) -> DataFacts:
        """Look at `path` before torch is imported: say what is there, and decide fields that nobody typed. `run` is the
        run folder, which may keep a drawn split. Raises what opening would raise; nothing without a path."""
        return DataFacts()

    def open_splits(self, seed: int, facts: DataFacts) -> dict[Split, Dataset]:
        """Open both splits; `facts` are what `look` returned, or DataFacts()."""
        return {split: self.open(split, seed) for split in SPLITS}

    def open_test(self, seed: int) -> Dataset:
        """Open the test split, which no training looks at. UsageError if the data have none."""
        raise UsageError(
            f"{type(self).__name__} opens no test split; give its data as --data.path DIR, without --split"
        )

    def at_absolute_path(self) -> Self:
        """Return this config with `path` absolute if it is on disk: a run finds its data from any directory."""
        path = getattr(self, "path", "")
        if not (isinstance(path, str) and path and os.path.exists(path)):
            return self
        return dataclasses.replace(self, path=os.path.abspath(path))  # type: ignore[type-var]  # all are dataclasses

    def in_run(self, folder: Path, typed: Collection[str] = ()) -> Self:
        """Return this config with what a run folder keeps of the data, e.g. the split that was drawn; fields that were
        typed win."""
        return self

    def whole(self, typed: Collection[str]) -> Self:
        """Return this config with all samples in the val split, where the data have no val split of their own and no
        field that was typed chooses some."""
        return self

    def following(self, recipe: Self, typed: Collection[str]) -> dict[str, Any]:
        """Return values of fields that follow others which differ from the recipe's; fields that were typed do not."""
        return {}

    def for_ranks(self, ranks: int) -> Self:
        """Return this config with what depends on the number of ranks decided, where it leaves that open."""
        return self

    def on_host(self) -> Self:
        """Return this config with its samples decoded on the host, where it leaves that open."""
        return self

    # Files that are not a split: `predict` and `evaluate --labels`

    file_suffixes: tuple[str, ...] = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")  # read in folders

    def open_files(self, files: Mapping[str, Path | np.ndarray | Image.Image], spec: DataSpec) -> Dataset:
        """Open files, arrays and images by name as in evaluation, with dummy labels. UsageError for odd shapes."""
        raise UsageError(f"{type(self).__name__} cannot open single files, so there is no `predict` for it yet")

    def first_files(self, files: dict[str, Path], spec: DataSpec) -> dict[str, Path]:
        """Return the files that are samples; of a sample that several files make up, the first."""
        return files

    def labelled_files(self, folder: Path) -> dict[str, tuple[Path, Path]]:
        """Find the raw file and the label file of each sample of the val split in `folder`."""
        raise UsageError(f"{type(self).__name__} has no label files to evaluate against; leave out --labels")

    # A network without this program: `export`

    def served(self, spec: DataSpec) -> ServedInput:
        """Describe the input of an exported network."""
        raise UsageError(f"{type(self).__name__} does not say how to feed an exported network, so it has no `export`")

    # No data at hand: `inspect`, `launch` and `benchmark`

    @abstractmethod
    def declared(self) -> tuple[DataSpec, int] | None:
        """Return the spec and the number of training items that the recipe declares; None if data are given."""

    def declared_per_item(self, global_batch: int) -> int:
        """Return `Dataset.samples_per_item` of the declared data."""
        return 1

    def synthetic(self, spec: DataSpec, samples: int) -> DataConfig:
        """Return this config for synthetic samples that look like those of `spec`."""
        raise UsageError(f"{type(self).__name__} has no synthetic data; give --data.path DIR and --data real")

    def check_samples(self, decode: bool, processes: int, progress: Callable[[str, int, int], None]) -> CheckReport:
        """Look at every sample of both splits, with `decode` also at its pixels; progress(what, done, total)."""
        raise UsageError(f"{type(self).__name__} has no check of its own; train with it, it stops at the first problem")

    def open_plain(self, split: Split, seed: int) -> Dataset:
        """Open a split, also that of training, as it is evaluated: without augmentation."""
        raise UsageError("check RUN looks for wrong labels of whole images; the data of this run are of another kind")

    def refuse_list(self) -> None:
        """Raise UsageError unless the report of `check_samples` can write a list of clean samples."""
        raise UsageError(
            "--write lists images with labels, in class folders or a table; these data are of another kind"
        )


class CheckReport(Protocol):
    """Result of `sightline check`."""

    @property
    def problems(self) -> Sequence[object]: ...  # empty if the data are good
    def as_text(self) -> str: ...  # for people
    def as_json(self) -> str: ...  # for programs


RowState = Literal["loaded", "converted", "at random", "kept", "unused"]


@dataclass(frozen=True)
class TensorRow:
    """One tensor of a model, or of a file of weights, and what became of it."""

    name: str
    state: RowState
    there: str  # its shape in the file, and its name where that differs; "" if the file does not hold it
    here: str  # its shape in the model; "" if the model does not have it


@dataclass(frozen=True)
class LoadedWeights:
    """Initial weights that were loaded: a line for the user, and all tensors of both sides."""

    note: str = ""
    tensors: tuple[TensorRow, ...] = ()


class ModelConfig(Part, ABC):
    """The network; sizes that depend on the data come from the spec."""

    part = "model"

    def __post_init__(self) -> None:
        if getattr(self, "weights", "") == "none":  # as typed to mean no published ones
            object.__setattr__(self, "weights", "")
        super().__post_init__()

    def refuse_unknown(self) -> None:
        """Raise UsageError for a network that this installation does not have; asked before a run folder is made."""

    @abstractmethod
    def build(self, spec: DataSpec) -> nn.Module:
        """Build the network with random weights, drawn from torch's global generator."""

    def load_weights(self, model: nn.Module) -> LoadedWeights:
        """Load the weights that the config names, if it names any."""
        return LoadedWeights()

    def start_from(self, model: nn.Module) -> str:
        """Load pretrained weights at the start of a fresh run, if there are any; return a note for the user."""
        return self.load_weights(model).note

    def head_prefixes(self, model: nn.Module) -> tuple[str, ...]:
        """Return the beginnings of the names of the head's parameters; all others are the trunk, which pretrained
        weights fill. Empty: the head is the last linear layer."""
        return ()

    def data_fields(self) -> Mapping[str, Any]:
        """Return values of fields of `data` that this network was made for; they hold where nobody types others."""
        return {}

    def takes_any_size(self) -> bool:
        """Return whether its weights are good for images of other sizes than `data_fields` says."""
        return True


@dataclass(frozen=True)
class Loss:
    """The mean loss of a batch (`total`), and sums over the batch to log (`sums`)."""

    total: Tensor
    sums: dict[str, Tensor]


@dataclass(frozen=True)
class Scores:
    """Results of an evaluation."""

    values: dict[str, float]
    tables: dict[str, list[dict[str, Any]]] = field(repr=False)
    worst: list[dict[str, Any]] = field(repr=False)  # samples to look at first


@dataclass(frozen=True)
class Finding:
    """One class or box that a network finds in an image."""

    name: str  # of the class
    class_id: int  # its number in the dataset's files
    score: float
    box: tuple[float, float, float, float] | None = None  # left, top, right, bottom; shares of width and height


@dataclass(frozen=True, eq=False)  # else a subclass without an == of its own would compare files alone
class Prediction:
    """Result of `api.predict` for one image or volume; results.py has those of our tasks."""

    file: str  # its path as given, from a folder with the folder; "inputs[2]" for an image in memory


@dataclass(frozen=True)
class PredictOptions:
    """Options of `predict`; None leaves the choice to the task."""

    top: int | None = None  # most findings of a file
    threshold: float | None = None  # lowest score that is shown
    draws: bool = True  # write images with the findings drawn into them
    probabilities: bool = False  # keep those of every class at every voxel
    largest: tuple[int, ...] = ()  # classes of voxels that keep their largest connected component alone
    form: str = ""  # what a tool for labelling imports, written too: coco, yolo, labelme, labelstudio or cvat

    def __post_init__(self) -> None:
        if self.top is not None and self.top < 1:
            raise UsageError(f"--top {self.top} must be at least 1")
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise UsageError(f"--score-threshold {self.threshold} must be in 0..1")


class Metric(ABC):
    """Counts that merge over ranks by sum or concatenation, so results are exact for any world size."""

    @abstractmethod
    def update(self, predictions: Mapping[str, Tensor], batch: Batch) -> None:
        """Add one batch; only samples with batch["valid"] count. Must not synchronise with the host."""

    @abstractmethod
    def merge(self, world: World) -> None:
        """Combine the counts of all ranks."""

    def names(self) -> tuple[str, ...]:
        """Return the keys of `result()`; a schedule that watches a missing one fails at startup. Empty if unknown."""
        return ()

    @abstractmethod
    def result(self) -> Scores:
        """Compute the scores from the counts."""


class TaskConfig(Part, ABC):
    """The fields of a task. `build` makes the task itself, which needs torch."""

    part = "task"
    headline: str  # the score that decides which checkpoint is best; higher is better
    drawn = 0  # most wrong samples of an evaluation that are drawn for the report
    peers: str = ""  # NAME of sightline/measure/peers_NAME.py, which `benchmark --peers` compares with
    batch_loss: str = ""  # the part of the loss that all samples computed at once share; accumulation changes it
    activation: str = ""  # softmax or sigmoid: what turns exported logits into probabilities

    def check(self) -> None:
        """Raise UsageError where the score that decides is not named."""
        super().check()
        if not getattr(self, "headline", ""):
            raise UsageError(
                f"{type(self).__name__} names no score that decides which checkpoint is best; add e.g. "
                f'`headline = "top1"`, one that its metric returns'
            )

    @abstractmethod
    def build(self) -> Task:
        """Return the task with these fields."""

    def for_data(self, spec: DataSpec) -> Task:
        """Return the task for data of this spec, with the same fields."""
        return self.build().for_data(spec)


# Former methods of a task, and the functions that took their place (docs/howto/task.md).
ASKED_ELSEWHERE = {
    **dict.fromkeys(("results", "findings"), "sightline.inference.by_task.results"),
    "reporter": "sightline.inference.by_task.reporter",
    **dict.fromkeys(("served", "served_names"), "sightline.export.by_task.outputs_of"),
    **dict.fromkeys(("draw", "drawn_colours"), "sightline.report.by_task.tiles"),
    "seen": "sightline.report.by_task.seen",
}


class Task(TaskConfig):
    """The loss, the reading of outputs, the metric. Subclasses are frozen dataclasses without state."""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        for name in vars(cls).keys() & ASKED_ELSEWHERE.keys():
            module, _, function = ASKED_ELSEWHERE[name].rpartition(".")
            raise UsageError(
                f"{cls.__name__}.{name}() is no longer asked: register a function instead, `@{function}.register("
                f"{cls.__name__})` of {module}; docs/howto/task.md shows it"
            )

    def build(self) -> Task:
        """Return the task itself."""
        return self

    def for_data(self, spec: DataSpec) -> Task:
        """Return the task for data of this spec, with the same fields."""
        return self

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Compute the loss of a finished batch."""

    @abstractmethod
    def predict(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Turn the outputs for a finished batch into predictions, a row per sample."""

    @abstractmethod
    def metric(self, spec: DataSpec, device: torch.device) -> Metric:
        """Return an empty metric whose counts are on `device`."""

    def showing(self, options: PredictOptions) -> Task:
        """Return the task whose `predict` keeps all that these options ask to see."""
        return self
