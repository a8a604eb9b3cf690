"""The data of segmentation in images: where images with masks lie, and how they become the network's input."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sightline import terminal
from sightline.data.augment import with_fields_of
from sightline.data.augment.fields import MaskFields
from sightline.data.image_data import ImageData
from sightline.errors import UsageError
from sightline.parts import DataSpec, ServedInput
from sightline.recipe.part import not_compared

if TYPE_CHECKING:
    from sightline.data.augment.masks import Augmentation
    from sightline.data.check.images import Report
    from sightline.data.sources import SourceOptions
    from sightline.terminal.progress import Progress


@dataclass(frozen=True)
class MaskData(MaskFields, ImageData):
    """Location of the images and their masks, and how they become the network's input."""

    path: str = not_compared("")
    """Images with a class for every pixel: images/ beside masks/, X.jpg beside X_mask.png, Pascal VOC's folders,
    Roboflow's export, outlines of COCO or YOLO, or synthetic:classes=4,samples=100,size=128; see
    docs/reference/data_masks.md."""
    source: str = "auto"
    """Kind of data at the path: auto, masks, coco, yolo, labelme, via, cvat, labelstudio, metadata, parquet,
    tar_objects, synthetic."""
    mask_pattern: str = ""
    """Name of a mask without its ending, with {} for what it shares with its image, e.g. {}_label; empty: found."""
    ignore: str = ""
    """What counts neither in training nor in scores: numbers or colours of the masks, or names of classes, with commas
    between; none: nothing. Empty: 255 beside other numbers than 0, and the border of Pascal VOC's colours."""
    classes: int = 0
    """Number of classes the data must have; 0 accepts any number."""
    samples: int = not_compared(0)
    """Number of training images the recipe is made for; `inspect` counts steps with it if no path is given."""
    cache: Literal["auto", "off", "ram"] = not_compared("auto")
    """ram: keep images and masks decoded in memory once read, and share them between the ranks of a host; auto: only if
    they take at most half of what is available, and says so; see docs/howto/cache.md."""
    on_bad_sample: Literal["fail", "skip"] = "fail"
    """If an image or its mask is missing or cannot be read: end the run with exit 3, or skip it, count and list it."""
    max_bad_samples: int = not_compared(100)
    """skip: end the run if there are more bad images than this."""
    fingerprint: Literal["names", "sampled", "full"] = not_compared("sampled")
    """How a resumed run knows its data again, besides names and sizes. sampled: the bytes of at most 256 files, 64 MiB
    in all, of each split; full: every byte; names: no bytes."""

    worker_modules = ("sightline.data.masks.dataset",)

    @property
    def augmentation(self) -> Augmentation:
        """The operations that these fields choose."""
        from sightline.data.augment.masks import Augmentation

        return with_fields_of(self, Augmentation)

    def dataset_module(self) -> Any:
        from sightline.data.masks import dataset

        return dataset

    def source_opener(self) -> Any:
        from sightline.data.sources import open_masks

        return open_masks

    @property
    def source_options(self) -> SourceOptions:
        """What these fields say about the files."""
        from sightline.data.sources import SourceOptions

        return SourceOptions(
            val_fraction=self.val_fraction,
            split=self.split,
            mask_pattern=self.mask_pattern,
            ignore=self.ignore,
            skips_missing=self.on_bad_sample == "skip",
        )

    def measured(self, train: Any, typed: Collection[str]) -> dict[str, Any]:
        """Measure mean and deviation of images that are not like ImageNet's: a run keeps them, so that it is evaluated
        and predicts with them."""
        from sightline.data.masks import pixels

        if self.mean:
            pixels.refuse_wrong_channels(self.mean, train, self.path)
            return {}
        found = pixels.normalisation(train)
        return {} if found == pixels.IMAGENET else dict(zip(("mean", "std"), found, strict=True))

    def first_files(self, files: dict[str, Path], spec: DataSpec) -> dict[str, Path]:
        """Leave out masks that lie beside their images."""
        from sightline.data.sources.mask_places import paired

        masks = set(paired(list(files), None, self.mask_pattern).masks.values())
        if masks:
            terminal.say(f"left out {len(masks)} masks beside their images, e.g. {min(masks)}")
        return {name: path for name, path in files.items() if name not in masks}

    def served(self, spec: DataSpec) -> ServedInput:
        """Take windows of normalised images, at their own scale; what lies beyond an image is 0."""
        steps = {
            "colours": {1: "grey", 3: "RGB, turned as EXIF says", 4: "RGBA"}.get(spec.channels, "as in the files"),
            "divide_by": 2**spec.bits - 1,
            "mean": list(spec.mean),
            "std": list(spec.std),
        }
        return ServedInput("NCHW", (spec.channels, *spec.size), "float32", steps, lambda image: image)

    def check_samples(self, decode: bool, processes: int, progress: Progress) -> Report:
        """Check every image and every mask of all splits under `path`."""
        from sightline.data.check.masks import check_masks

        if not self.path:
            raise UsageError("no data: give --data.path DIR")
        return check_masks(self.path, self.source, self.source_options, self.classes, decode, processes, progress)

    def declared_spec(self, classes: tuple[str, ...]) -> DataSpec:
        from sightline.data.masks.pixels import IMAGENET

        return DataSpec(classes, 3, (self.size, self.size), *IMAGENET, tuple(range(len(classes))))

    def synthetic(self, spec: DataSpec, samples: int) -> MaskData:
        """Use synthetic images with masks."""
        path = f"synthetic:classes={len(spec.classes)},samples={samples},size={max(spec.size)}"
        return replace(self, path=path, source="auto", classes=len(spec.classes))
