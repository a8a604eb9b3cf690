"""Classification data: a source of pictures, decoded and augmented into squares with a label."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from sightline.data.augment.classification import CUT_KEYS, Augment, erase, mix, partner_of
from sightline.data.check import Report, check_pictures
from sightline.data.decode import decode_rgb, read_header
from sightline.data.progress import Progress
from sightline.data.sources import Source, SourceOptions, open_source
from sightline.errors import BadData, UsageError
from sightline.parts import Batch, DataConfig, Dataset, DataSpec, Split, undecisive

BACKGROUND = "background"


@dataclass(frozen=True)
class ClassificationData(Augment, DataConfig):
    """Where the pictures are, and how they become what the network sees."""

    path: str = undecisive("")
    """Class folders, tar shards or TFRecords of a train and a val split, or synthetic:classes=10,samples=1000,size=64;
    see docs/data.md."""
    source: str = "auto"
    """How the path is read: auto, folder, tar, tfrecord, synthetic."""
    classes: int = 0
    """How many classes there must be; 0 takes what is found."""
    background: Literal["none", "first", "last"] = "none"
    """One class more that no picture has, as the TensorFlow originals' 1001 outputs: before the others, whose labels
    then begin at 1, or after them. `classes` does not count it."""
    first_label: Literal[0, 1] = 1
    """TFRecords: the smallest label in the files."""
    samples: int = undecisive(0)
    """How many training pictures the recipe is made for; `inspect` counts steps with it where no path is given."""
    on_bad_sample: Literal["fail", "skip"] = "fail"
    """A picture that cannot be read: end the run with exit 3, or leave it out, counted and listed."""
    max_bad_samples: int = undecisive(100)
    """skip: more bad pictures than this end the run after all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.background not in ("none", "first", "last"):
            raise UsageError(f"background={self.background!r} is unknown; use one of none, first, last")

    def open(self, split: Split, seed: int) -> Dataset:
        """The train or val pictures under `path`."""
        if not self.path:
            raise UsageError("no data: give --data.path DIR (draw some with `sightline prepare shapes --out DIR`)")
        source = open_source(self.source, self.path, split, SourceOptions(self.first_label, self.classes))
        if self.classes and self.classes != len(source.classes):
            raise BadData(
                f"{self.path} has {len(source.classes)} classes, the recipe declares {self.classes}; "
                f"give the right --data.path or --data.classes {len(source.classes)}"
            )
        return ClassificationDataset(self, source, split, seed)

    def declared(self) -> tuple[DataSpec, int] | None:
        """`classes` nameless classes and `samples` pictures, where no path is given."""
        if self.path:
            return None
        if not self.classes:
            raise UsageError("give --data.path DIR or --data.classes N: the network's head depends on it")
        return self.spec_of(tuple(f"class{i}" for i in range(self.classes))), self.samples

    def check(self, decode: bool, processes: int, progress: Progress) -> Report:
        """Both splits under `path`, every picture."""
        if not self.path:
            raise UsageError("no data: give --data.path DIR")
        options = SourceOptions(self.first_label, self.classes)
        return check_pictures(self.path, self.source, options, self.classes, decode, processes, progress)

    def spec_of(self, classes: tuple[str, ...]) -> DataSpec:
        """What the network is built from."""
        if self.background != "none" and BACKGROUND in classes:
            raise BadData(f"the data has a class {BACKGROUND!r} already; use --data.background none")
        extra = (BACKGROUND,)
        classes = {"none": classes, "first": extra + classes, "last": classes + extra}[self.background]
        return DataSpec(classes, 3, (self.eval_size, self.eval_size), self.mean, self.std)


class ClassificationDataset(Dataset):
    """One split of the pictures."""

    def __init__(self, config: ClassificationData, source: Source, split: Split, seed: int):
        self.config = config
        self.source = source
        self.is_training = split == "train"
        self.seed = seed
        self.fingerprint = source.fingerprint
        self.spec = config.spec_of(source.classes)
        side = config.size if self.is_training else config.eval_size
        self.layout = {"image": ((side, side, 3), config.travels_as), "label": ((), "int64")}
        if self.is_training and config.erases:
            self.layout["erase"] = ((4,), "int32")
        if self.is_training:
            self.layout |= {key: ((), str(value.dtype)) for key, value in config.draw_mix(seed, 0, 0).items()}

    def __len__(self) -> int:
        return len(self.source)

    def name(self, index: int) -> str:
        return self.source.name(index)

    def load(self, epoch: int, index: int) -> dict[str, np.ndarray]:
        sample = self.source.read(index)
        name = self.source.name(index)
        header = read_header(sample.data, name) if isinstance(sample.data, bytes) else None
        height, width = (header.shape if header else np.shape(sample.data))[:2]
        if self.is_training:
            params = self.config.draw(self.seed, epoch, index, height, width)
        else:
            params = self.config.evaluation_params(height, width)
        if isinstance(sample.data, bytes):
            pixels = decode_rgb(sample.data, name, header, rows=params.top + params.height)
        else:
            pixels = sample.data
        label = sample.label + (self.config.background == "first")
        loaded = {"image": self.config.pack(self.config.apply(params, pixels)), "label": np.asarray(label)}
        if "erase" in self.layout:
            loaded["erase"] = np.asarray(params.erase, dtype=np.int32)
        if self.is_training:
            loaded |= self.config.draw_mix(self.seed, epoch, index)
        return loaded

    def draw_batch(self, epoch: int, step: int) -> dict[str, np.ndarray]:
        return self.config.draw_batch(self.seed, epoch, step) if self.is_training else {}

    def finish(self, batch: Batch, dtype: torch.dtype) -> Batch:
        image = self.config.unpack(batch["image"], dtype)
        if "erase" in batch:
            image = erase(image, batch["erase"])
        if "mix" in batch:
            box = tuple(batch[key] for key in CUT_KEYS) if CUT_KEYS[0] in batch else None
            ranks = batch.get("mix_rank")
            partner = partner_of(self.config.mixup_partner, len(image), ranks, image.device)
            image = mix(image, batch["mix"], box, partner)
            if partner is not None:
                batch = {**batch, "partner": partner}
        return {**batch, "image": image}
