"""Sources: where samples lie. One file is one kind: `open_source(path, split, options)` and `detect(path)`.

All kinds give samples in one order, by class and then by file name, so the same pictures in another form make the same
batches. (TFRecords without file names keep the order of their records.)
"""

import importlib
import pkgutil
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from sightline.errors import UsageError
from sightline.parts import Split


@dataclass(frozen=True)
class Sample:
    """What lies on disk for one index: encoded bytes, or pixels (height, width, 3) where nothing needs decoding."""

    data: bytes | np.ndarray
    label: int


@dataclass(frozen=True)
class SourceOptions:
    """What a user knows of the data and the files do not say."""

    first_label: int = 1  # tfrecord: the smallest label in the files
    classes: int = 0  # tar, tfrecord: how many there are, where some of the numbered labels have no samples


DEFAULT_OPTIONS = SourceOptions()


class Source(ABC):
    """Random access to the samples of one split. Pickled to loader workers, so it holds no open files."""

    classes: tuple[str, ...]
    fingerprint: str

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def name(self, index: int) -> str:
        """What a person would call this sample."""

    @abstractmethod
    def read(self, index: int) -> Sample: ...


def kinds() -> list[str]:
    """All kinds of source, which are the files of this folder; those that begin with _ serve several."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def open_source(kind: str, path: str, split: Split, options: SourceOptions = DEFAULT_OPTIONS) -> Source:
    """The source of this kind, or with `auto` the one that recognises the path."""
    if kind == "auto":
        for candidate in kinds():
            module = importlib.import_module(f"{__name__}.{candidate}")
            if module.detect(path):
                return module.open_source(path, split, options)
        raise UsageError(
            f"--data.path '{path}' is nothing a source can read; expected a folder with train/CLASS/*.jpg and "
            f"val/CLASS/*.jpg (draw one with `sightline prepare shapes --out DIR`), with train/*.tar and val/*.tar, or "
            f"with train/train-00000-of-01024 and validation/validation-00000-of-00128; "
            f"known sources: {', '.join(kinds())}"
        )
    if kind not in kinds():
        raise UsageError(f"unknown --data.source '{kind}'; known: auto, {', '.join(kinds())}")
    return importlib.import_module(f"{__name__}.{kind}").open_source(path, split, options)
