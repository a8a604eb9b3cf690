"""Sources: where samples lie. One file is one kind: `open_source(path, split)` and `detect(path)`."""

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
    """All kinds of source, which are the files of this folder."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def open_source(kind: str, path: str, split: Split) -> Source:
    """The source of this kind, or with `auto` the one that recognises the path."""
    if kind == "auto":
        for candidate in kinds():
            module = importlib.import_module(f"{__name__}.{candidate}")
            if module.detect(path):
                return module.open_source(path, split)
        raise UsageError(
            f"--data.path '{path}' is nothing a source can read; expected a folder with train/CLASS/*.jpg and "
            f"val/CLASS/*.jpg (draw one with `sightline prepare shapes --out DIR`); known sources: {', '.join(kinds())}"
        )
    if kind not in kinds():
        raise UsageError(f"unknown --data.source '{kind}'; known: auto, {', '.join(kinds())}")
    return importlib.import_module(f"{__name__}.{kind}").open_source(path, split)
