"""The data of detection: where images with boxes lie, and how they become the network's input."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from sightline.data.augment import with_fields_of
from sightline.data.augment.fields import DetectionFields
from sightline.data.image_data import SquareData
from sightline.errors import UsageError
from sightline.parts import DataSpec, ServedInput
from sightline.recipe.part import AtLeast, not_compared

if TYPE_CHECKING:
    from sightline.data.augment.detection import Augmentation
    from sightline.data.check.images import Report
    from sightline.data.sources import SourceOptions
    from sightline.terminal.progress import Progress


@dataclass(frozen=True)
class DetectionData(DetectionFields, SquareData):
    """Location of the images and their boxes, and how they become the network's input."""

    path: str = not_compared("")
    """Images with boxes: COCO's json files, YOLO's data.yaml, Pascal VOC's xml files, COCO's TFRecords, or
    synthetic:classes=80,samples=1000,size=300; see docs/reference/data.md."""
    source: str = "auto"
    """Kind of data at the path: auto, coco, coco_tfrecord, yolo, voc, labelme, via, cvat, labelstudio,
    metadata, parquet, tar_objects, synthetic."""
    classes: int = 0
    """Number of classes the data must have; 0 accepts any number."""
    max_boxes: Annotated[int, AtLeast(1, "200 is usual")] = not_compared(200)
    """Most boxes of one image. More are an error; no box is dropped."""
    samples: int = not_compared(0)
    """Number of training images the recipe is made for; `inspect` counts steps with it if no path is given."""
    decoder: Literal["cpu", "gpu"] = not_compared("cpu")
    """Decoder of JPEGs: loader processes on the CPU, or the GPU's JPEG engines; see docs/why/input.md."""
    cache: Literal["auto", "off", "ram", "gpu"] = not_compared("auto")
    """ram: keep images in memory once read, decoded if that takes at most half of what is available, else encoded, and
    share them between the ranks of a host; auto: only if they take at most half, and says so; gpu: keep them decoded on
    the device and cut crops there; see docs/howto/cache.md."""
    static: str = ""
    """Folder of training batches written by `sightline prepare static`, replayed in their order instead of `path`'s."""
    fake: bool = False
    """Train on the first batch again and again: real data, but no loading."""
    on_bad_sample: Literal["fail", "skip"] = "fail"
    """If an image is missing or cannot be read: end the run with exit 3, or skip the image, count and list it."""
    max_bad_samples: int = not_compared(100)
    """skip: end the run if there are more bad images than this."""
    fingerprint: Literal["names", "sampled", "full"] = not_compared("sampled")
    """How a resumed run knows its data again, besides names and sizes. sampled: the bytes of at most 256 files, 64 MiB
    in all, of each split; full: every byte; names: no bytes."""

    worker_modules = ("sightline.data.detection.dataset",)

    def check(self) -> None:
        super().check()
        if self.static and self.fake:
            raise UsageError("data.static replays batches and data.fake repeats one; use one of them")

    @property
    def augmentation(self) -> Augmentation:
        """The operations that these fields choose."""
        from sightline.data.augment.detection import Augmentation

        return with_fields_of(self, Augmentation)

    def dataset_module(self) -> Any:
        from sightline.data.detection import dataset

        return dataset

    def source_opener(self) -> Any:
        from sightline.data.sources import open_boxes

        return open_boxes

    @property
    def source_options(self) -> SourceOptions:
        """What these fields say about the files."""
        from sightline.data.sources import SourceOptions

        return SourceOptions(
            val_fraction=self.val_fraction, split=self.split, skips_missing=self.on_bad_sample == "skip"
        )

    def served(self, spec: DataSpec) -> ServedInput:
        """Take squares of pixels, whole images without regard to their aspect ratio; the graph normalises them."""
        from sightline.data.augment.classification import served_pixels

        steps = {
            "colours": "RGB, turned as EXIF says",
            "resize": self.size,
            "geometry": "stretch",
            "crop": self.size,
            "interpolation": "legacy" if self.resize == "tf" else "bilinear",
            "antialias": self.resize != "tf",
            "normalised_in_graph": {"mean": list(self.mean), "std": list(self.std)},
        }
        return served_pixels(spec, steps, decoder="cpu")  # which every machine has

    def declared_spec(self, classes: tuple[str, ...]) -> DataSpec:
        return self.spec_of(classes, tuple(range(1, len(classes) + 1)))

    def synthetic(self, spec: DataSpec, samples: int) -> DetectionData:
        """Use synthetic images with boxes."""
        path = f"synthetic:classes={len(spec.classes)},samples={samples},size={max(spec.size)}"
        return replace(self, path=path, source="auto", classes=len(spec.classes))

    def check_samples(self, decode: bool, processes: int, progress: Progress) -> Report:
        """Check every image and every box of both splits under `path`."""
        from sightline.data.check.boxes import check_boxes

        if not self.path:
            raise UsageError("no data: give --data.path DIR")
        opens = partial(replace(self, static="").open, seed=0)
        return check_boxes(
            self.path, self.source, self.classes, decode, processes, progress, opens, self.source_options
        )

    def spec_of(self, classes: tuple[str, ...], class_ids: tuple[int, ...]) -> DataSpec:
        """Return the spec of data with these classes; background is not one of them."""
        return DataSpec(classes, 3, (self.size, self.size), self.mean, self.std, class_ids)
