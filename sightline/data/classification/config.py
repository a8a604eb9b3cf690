"""The data of classification: where images with labels lie, and how they become the network's input."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self

from sightline.data.augment import with_fields_of
from sightline.data.augment.fields import ClassificationFields
from sightline.data.image_data import SquareData
from sightline.errors import BadData, UsageError
from sightline.parts import Dataset, DataSpec, ServedInput, Split
from sightline.recipe.part import not_compared

if TYPE_CHECKING:
    from sightline.data.augment.classification import Augmentation
    from sightline.data.check.images import Report
    from sightline.data.sources import SourceOptions
    from sightline.terminal.progress import Progress

BACKGROUND = "background"


@dataclass(frozen=True)
class ClassificationData(ClassificationFields, SquareData):
    """Location of the images, and how they become the network's input."""

    path: str = not_compared("")
    """Class folders, a table (labels.csv), tar shards, TFRecords, or synthetic:classes=10,samples=1000,size=64; see
    docs/reference/data.md."""
    source: str = "auto"
    """Kind of data at the path: auto, folder, table, tar, tfrecord, labelme, via, cvat, labelstudio,
    metadata, parquet, synthetic."""
    classes: int = 0
    """Number of classes the data must have; 0 accepts any number."""
    background: Literal["none", "first", "last"] = "none"
    """Add a class that no image has, as in the 1001 outputs of the TensorFlow originals: first (labels then begin at
    1) or last. `classes` does not count it."""
    sampling: Literal["uniform", "balanced"] = "uniform"
    """uniform: every training image once an epoch; balanced: every class equally often, in epochs of the same length;
    images of small classes repeat, each time augmented differently."""
    class_weights: Literal["none", "balanced"] = "none"
    """balanced: weight the training loss of each class by images / (classes x images of the class); with several labels
    per image, that of a class's images by images without it / images with it."""
    first_label: Literal[0, 1] = 1
    """TFRecords: the smallest label in the files."""
    file_column: str = not_compared("")
    """Tables: the column of file names, where neither the names of the columns nor what is in them decide."""
    label_column: str = not_compared("")
    """Tables: the column of labels, or the columns of 0 and 1 for each class: names with commas between, or a pattern
    such as 'is_*'."""
    decoder: Literal["auto", "cpu", "gpu"] = not_compared("auto")
    """Device that decodes, crops and resizes JPEGs. gpu: by the JPEG engines of the device, with the same random
    numbers and slightly different pixels; auto: where some images of the data are decoded faster, and says so."""
    downscale: Literal["off", "dct"] = "off"
    """dct: decode JPEGs at 1/2, 1/4 or 1/8 of their size where a crop is that many times larger than what it is resized
    to, in training and evaluation: faster for large photos, with slightly different pixels."""
    samples: int = not_compared(0)
    """Number of training images the recipe is made for; `inspect` counts steps with it if no path is given."""
    cache: Literal["auto", "off", "ram", "gpu"] = not_compared("auto")
    """ram: keep images in memory once read, decoded if that takes at most half of what is available, else encoded, and
    share them between the ranks of a host; auto: only if they take at most half, and says so; gpu: keep them decoded on
    the device and cut crops there, with the same random numbers and slightly different pixels; see
    docs/howto/cache.md."""
    on_bad_sample: Literal["fail", "skip"] = "fail"
    """If an image cannot be read: end the run with exit 3, or skip the image, count and list it."""
    max_bad_samples: int = not_compared(100)
    """skip: end the run if there are more bad images than this."""
    fingerprint: Literal["names", "sampled", "full"] = not_compared("sampled")
    """How a resumed run knows its data again, besides names and sizes. sampled: the bytes of at most 256 files, 64 MiB
    in all, of each split; full: every byte; names: no bytes."""

    worker_modules = ("sightline.data.classification.dataset",)

    @property
    def augmentation(self) -> Augmentation:
        """The operations that these fields choose."""
        from sightline.data.augment.classification import Augmentation

        return with_fields_of(self, Augmentation)

    @property
    def source_options(self) -> SourceOptions:
        """What these fields say about the files."""
        from sightline.data.sources import SourceOptions

        options = SourceOptions(self.first_label, self.classes, self.val_fraction, self.split)
        return replace(options, file_column=self.file_column, label_column=self.label_column)

    def dataset_module(self) -> Any:
        from sightline.data.classification import dataset

        return dataset

    def source_opener(self) -> Any:
        from sightline.data.sources import open_source

        return open_source

    def on_host(self) -> ClassificationData:
        """Decode on the CPU, unless a decoder was typed."""
        return replace(self, decoder="cpu") if self.decoder == "auto" else self

    def following(self, recipe: Self, typed: Collection[str]) -> dict[str, Any]:
        """Scale both sizes of evaluation with that of training, unless one of them was typed."""
        if self.size == recipe.size or {"eval_size", "eval_resize"} & set(typed):
            return {}
        return {name: round(getattr(recipe, name) * self.size / recipe.size) for name in ("eval_size", "eval_resize")}

    def served(self, spec: DataSpec) -> ServedInput:
        """Take squares of pixels, resized and cut as in evaluation; the graph normalises them."""
        from sightline.data.augment.classification import served_pixels

        steps = {
            "colours": "RGB, turned as EXIF says",
            "resize": self.eval_resize,
            "geometry": self.eval_geometry,
            "crop": self.eval_size,
            "interpolation": self.interpolation,
            "antialias": self.interpolation != "legacy",
            "normalised_in_graph": {"mean": list(self.mean), "std": list(self.std)},
        }
        return served_pixels(spec, steps, image_type="uint8")

    def declared_spec(self, classes: tuple[str, ...]) -> DataSpec:
        return self.spec_of(classes)

    def synthetic(self, spec: DataSpec, samples: int) -> ClassificationData:
        """Use synthetic images; `spec` counts the background class, if there is one, among its classes."""
        path = f"synthetic:classes={len(spec.classes)},samples={samples},size={max(spec.size)}"
        return replace(self, path=path, source="auto", classes=len(spec.classes), background="none")

    def check_samples(self, decode: bool, processes: int, progress: Progress) -> Report:
        """Check every image of both splits under `path`."""
        from sightline.data.check.images import check_images

        if not self.path:
            raise UsageError("no data: give --data.path DIR")
        return check_images(self.path, self.source, self.source_options, self.classes, decode, processes, progress)

    def open_plain(self, split: Split, seed: int) -> Dataset:
        """Open a split as it is evaluated."""
        from sightline.data.classification.dataset import ClassificationDataset

        opened = self.open(split, seed)
        if not isinstance(opened, ClassificationDataset):  # of a class of one's own
            return super().open_plain(split, seed)
        return ClassificationDataset(self, opened.source, "val", seed)

    def refuse_list(self) -> None:
        """Images in tar files or records have no files of their own."""
        from sightline.data.sources import recognised

        kind = recognised("open_source", self.path) if self.source == "auto" else self.source
        if kind not in ("folder", "table"):
            raise UsageError(
                f"--write lists image files, and {self.path} is read as {kind or 'nothing'}; write class folders "
                f"first: `sightline prepare convert --source {self.path} --out DIR --form folder`"
            )

    def spec_of(self, classes: tuple[str, ...], multi_label: bool = False) -> DataSpec:
        """Return the spec of data with these classes."""
        if self.background != "none" and BACKGROUND in classes:
            raise BadData(f"the data has a class {BACKGROUND!r} already; use --data.background none")
        extra = (BACKGROUND,)
        classes = {"none": classes, "first": extra + classes, "last": classes + extra}[self.background]
        return DataSpec(classes, 3, (self.eval_size, self.eval_size), self.mean, self.std, multi_label=multi_label)

    @property
    def around_classes(self) -> tuple[int, int]:
        """Classes that the network has before and after those of the files."""
        return {"none": (0, 0), "first": (1, 0), "last": (0, 1)}[self.background]
