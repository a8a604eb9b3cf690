"""What data of images have in common, with labels, boxes or masks: fields of their splits, opening them, and looking at
the path. Imports neither torch nor NumPy.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from sightline.errors import UsageError
from sightline.parts import SPLITS, DataConfig, DataFacts, Dataset, DataSpec, Split
from sightline.recipe.part import Above, Below, Part, not_compared

if TYPE_CHECKING:
    from sightline.data.inputs import Files

_CHOOSING = {"val_fraction", "split"}  # fields that choose the samples that validate


@dataclass(frozen=True)
class SplitFields(Part):
    """Settings: which samples validate if the data have no val split."""

    part = "data"

    val_fraction: Annotated[float, Above(0), Below(1, "0.2 is usual")] = 0.2
    """Data without a val split: share of the training samples (of each class) that validate. They are chosen by their
    names, the same ones for every seed, and kept in split.json of the run folder."""
    split: str = not_compared("")
    """Data without a val split: JSON file that lists the samples that validate, e.g. split.json of another run; all:
    every sample, for `evaluate` only."""

    def in_run(self, folder: Path, typed: Collection[str] = ()) -> Self:
        """Return these fields with the split that a run keeps, if it keeps one and none was typed: the first start
        decides."""
        from sightline.data.sources.layouts import kept_split

        if not _CHOOSING.isdisjoint(typed):
            return self
        return dataclasses.replace(self, split=kept_split(folder) or self.split)

    def whole(self, typed: Collection[str]) -> Self:
        """Return these fields with all samples of data without a val split in it, unless one of them was typed. Refuse
        a typed `all` for data that have one: it would score that alone."""
        from sightline.data.sources.layouts import ALL, SPLIT

        if _CHOOSING.isdisjoint(typed):
            return dataclasses.replace(self, split=ALL)
        if self.split == ALL and isinstance(self, DataConfig) and SPLIT not in self.open("val", 0).kept:
            path = getattr(self, "path", "")
            raise UsageError(
                f"--data.split {ALL}: {path} has a val split; give one part, e.g. --data.path {path}/train"
            )
        return self


class ImageData(SplitFields, DataConfig):
    """Images of a source. A class of one's own that overrides `open` reads something else than lies at the path."""

    path: str
    classes: int
    samples: int

    @abstractmethod
    def dataset_module(self) -> Any:
        """Return the module that opens splits and files; it needs torch."""

    @abstractmethod
    def source_opener(self) -> Any:
        """Return open_source, open_boxes or open_masks; they need NumPy."""

    @abstractmethod
    def declared_spec(self, classes: tuple[str, ...]) -> DataSpec:
        """Return the spec of data with these classes, of which nothing else is known."""

    def declared(self) -> tuple[DataSpec, int] | None:
        """Declare `classes` nameless classes and `samples` images if no path is given."""
        if self.path:
            return None
        if not self.classes:
            raise UsageError("give --data.path DIR or --data.classes N: the network's head depends on it")
        return self.declared_spec(tuple(f"class{number}" for number in range(self.classes))), self.samples

    def open_files(self, files: Files, spec: DataSpec) -> Dataset:
        """Open single images, of which nothing is known."""
        dataset: Dataset = self.dataset_module().open_files(self, files, spec)
        return dataset

    def open(self, split: Split, seed: int) -> Dataset:
        """Open the train, val or test images under `path`."""
        dataset: Dataset = self.dataset_module().open_split(self, split, seed)
        return dataset

    @property
    def _opens_otherwise(self) -> bool:
        return type(self).open is not ImageData.open

    def open_splits(self, seed: int, facts: DataFacts) -> dict[Split, Dataset]:
        """Open both splits, each listed once, with the sources that `look` opened."""
        if self._opens_otherwise:
            return super().open_splits(seed, facts)
        from sightline.data.sources import Opener

        module, opener = self.dataset_module(), Opener(facts.opened)
        return {split: module.open_split(self, split, seed, opener) for split in SPLITS}

    def open_test(self, seed: int) -> Dataset:
        """Open the test split, all of it; UsageError if the data have none."""
        if self._opens_otherwise:  # its `open` may return another split
            return super().open_test(seed)
        from sightline.data.sources.layouts import NoTestSplit

        try:
            return self.open("test", seed)
        except NoTestSplit as error:
            raise NoTestSplit(f"{getattr(self, 'path', '')}: {error}") from error

    def measured(self, train: Any, typed: Collection[str]) -> dict[str, Any]:
        """Return values of fields that the training images of a source decide, e.g. their mean."""
        return {}

    def look(self, run: Path, typed: Collection[str]) -> DataFacts:
        """Open both splits for their classes and most boxes, unless numbers were typed."""
        if self._opens_otherwise:
            return DataFacts()
        from sightline.data import facts

        return facts.of_images(self, run, typed, self.source_opener())  # type: ignore[arg-type]


class SquareData(ImageData):
    """Images that become squares, which a device may decode, or keep decoded."""

    cache: Literal["auto", "off", "ram", "gpu"]
    decoder: Literal["auto", "cpu", "gpu"]
