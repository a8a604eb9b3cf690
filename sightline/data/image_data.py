"""What data of images have in common, with labels, boxes or masks: opening splits, and looking at the path.

Imports neither torch nor NumPy.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

from sightline.data.split_fields import SplitFields
from sightline.parts import SPLITS, DataConfig, DataFacts, Dataset, Split


class ImageData(SplitFields, DataConfig):
    """Images of a source. A class of one's own that overrides `open` reads something else than lies at the path."""

    @abstractmethod
    def dataset_module(self) -> Any:
        """Return the module that opens a split; it needs torch."""

    @abstractmethod
    def source_opener(self) -> Any:
        """Return open_source, open_boxes or open_masks; they need NumPy."""

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

    path: str
    cache: Literal["auto", "off", "ram", "gpu"]
    decoder: Literal["auto", "cpu", "gpu"]
