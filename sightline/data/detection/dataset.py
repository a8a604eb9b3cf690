"""Images with boxes from a source, decoded, augmented and padded to static shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from sightline.data import counts
from sightline.data.augment.detection import Augmentation, Params, move_boxes
from sightline.data.decode import Header, decode_rgb, read_header
from sightline.data.detection.config import DetectionData
from sightline.data.formats.coco import usable
from sightline.data.gpu import encoded
from sightline.data.image_feed import ImageFeed, StoredImage
from sightline.data.inputs import Files
from sightline.data.loading.cache import SAMPLED, SIDES, Form, estimated, exact
from sightline.data.loading.static import StaticDataset
from sightline.data.sources import BoxSource, Objects, Opener, open_boxes, spread, wrong_classes
from sightline.data.sources.named_files import BoxFilesSource
from sightline.errors import BadData, BadSample, UsageError
from sightline.parts import Arrays, Batch, Dataset, DataSpec, Split, SplitFacts

MOST_BOXES = 10_000  # of an image; those of satellites and of shelves have some thousands


def open_split(config: DetectionData, split: Split, seed: int, opener: Opener | None = None) -> Dataset:
    """Open the train or val images, or the static batches."""
    if config.static and split == "train":
        return open_static(config)
    if not config.path:
        raise UsageError(
            "no data: give --data.path DIR (draw some with `sightline prepare shapes --out DIR`: DIR/detection)"
        )
    source = (opener or Opener()).open(open_boxes, config.source, config.path, split, config.source_options)
    if len(source.missing) > config.max_bad_samples:
        raise BadData(
            f"{len(source.missing)} of the {len(source)} {split} images of {config.path} are missing, more than "
            f"max_bad_samples={config.max_bad_samples}; add them, or raise --data.max-bad-samples"
        )
    if config.classes and config.classes != len(source.classes):
        raise wrong_classes(config.path, len(source.classes), config.classes)
    if source.most_objects > MOST_BOXES:
        index = max(range(len(source)), key=lambda index: len(source.objects(index).labels))
        raise BadData(
            f"{source.name(index)} of {config.path} has {source.most_objects} boxes, at most {MOST_BOXES} are trained "
            f"on; every image gets room for as many. Cut it into tiles, or remove the image"
        )
    if source.most_objects > config.max_boxes:
        raise BadData(
            f"a {split} image of {config.path} has {source.most_objects} boxes, more than max_boxes="
            f"{config.max_boxes}; use --data.max-boxes {source.most_objects}"
        )
    if config.static and (written := open_static(config).spec).classes != source.classes:
        raise BadData(
            f"{config.static} was written from data with {len(written.classes)} classes ({written.classes[0]} ...), "
            f"{config.path} has {len(source.classes)} ({source.classes[0]} ...); both must be of the same data"
        )
    return DetectionDataset(config, source, split, seed)


def open_static(config: DetectionData) -> StaticDataset:
    """Open the static batches; they must fit this recipe, by which the network is built and evaluated."""
    found = StaticDataset(Path(config.static))
    expected = config.spec_of(found.spec.classes, found.spec.class_ids)
    differing = [
        f"{name} is {getattr(found.spec, name)} there, {getattr(expected, name)} here"
        for name in ("size", "mean", "std")
        if getattr(found.spec, name) != getattr(expected, name)
    ]
    if config.classes and config.classes != len(found.spec.classes):
        differing.append(f"it has {len(found.spec.classes)} classes, the recipe declares {config.classes}")
    if differing:
        raise BadData(
            f"{config.static} was written for another recipe: {'; '.join(differing)}. Give the same --data fields as "
            f"then, or write the batches again"
        )
    return found


def open_files(config: DetectionData, files: Files, spec: DataSpec) -> DetectionDataset:
    """Open images without known boxes."""
    # Each is read once, so a cache would only cost memory; this machine may lack the decoder of the run's.
    config = replace(config, cache="off", decoder="cpu")
    return DetectionDataset(config, BoxFilesSource(files, spec.classes, spec.class_ids), "val", seed=0)


class DetectionDataset(ImageFeed):
    """One split of the images."""

    config: DetectionData
    source: BoxSource
    augmentation: Augmentation
    other_decoders = "cpu"

    def __init__(self, config: DetectionData, source: BoxSource, split: Split, seed: int):
        super().__init__(config, source, split, seed)
        self.spec = config.spec_of(source.classes, source.class_ids)
        self.repeats_first = config.fake and self.is_training
        self.layout = {
            "image": ((config.size, config.size, 3), "uint8"),
            "boxes": ((config.max_boxes, 4), "float32"),  # ymin, xmin, ymax, xmax as shares of the network's input
            "labels": ((config.max_boxes,), "int64"),  # from 1 on; 0 for padding
        }
        if self.is_training:
            self.layout |= self.augmentation.jitter_keys
        else:
            most = max(1, source.most_objects)
            # What the metric needs, as annotated: sizes and boxes (x, y, width, height) in pixels of the file.
            self.layout |= {
                "image_id": ((), "int64"),
                "height": ((), "int32"),
                "width": ((), "int32"),
                "truth_boxes": ((most, 4), "float64"),
                "truth_labels": ((most,), "int64"),
                "truth_area": ((most,), "float64"),
                "truth_crowd": ((most,), "bool"),
            }
        one = self.augmentation.geometry(Params(), 1, 1)
        self.geometry_layout = one.shape, str(one.dtype)

    def facts(self, is_late: Callable[[], bool]) -> SplitFacts:
        """Count the boxes of every class in some images, whose sizes are annotated."""
        return counts.of_boxes(self.source, is_late)

    def why_not_encoded(self) -> str:
        any_encoded = any(encoded.lengths_of(self.source.image, len(self)))
        return "" if any_encoded else f"{self.config.path} holds no image files"

    def stored(self, index: int) -> tuple[bytes | np.ndarray, Objects]:
        objects = self.source.objects(index)
        return self.source.image(index), objects

    def pack(self, truth: Objects) -> bytes:
        """Keep nothing: the source has all annotations in memory."""
        return b""

    def unpack(self, index: int, packed: bytes) -> Objects:
        return self.source.objects(index)

    def shape(self, index: int) -> tuple[int, ...]:
        """Return the annotated shape, which needs no file."""
        found = self.source.objects(index)
        return found.height, found.width, 3

    def forms(self, keeps_decoded: bool) -> list[Form]:
        """Take the sizes of files as they were listed, and those of some images as annotated."""
        kept = exact(self.source.room, "encoded images")
        if not keeps_decoded:
            return [kept]
        chosen = spread(len(self), SAMPLED) if self.source.room.any() else []
        sides = [(found.height, found.width) for found in map(self.source.objects, chosen)]
        sizes = [SIDES + 3 * height * width for height, width in sides]
        return [estimated("decoded images", sizes, len(self), is_decoded=True), kept]

    def draw(self, epoch: int, index: int, shape: tuple[int, ...], truth: Objects) -> tuple[Params, Arrays]:
        boxes, labels = _for_network(truth)
        augmentation, room = self.augmentation, self.config.max_boxes
        params = augmentation.draw(self.seed, epoch, index, boxes) if self.is_training else Params()
        moved, kept = move_boxes(params, boxes)
        loaded = {"boxes": _padded(moved, room, "float32"), "labels": _padded(labels[kept], room, "int64")}
        if self.is_training:
            return params, loaded | augmentation.carried(params)
        most = self.layout["truth_labels"][0][0]
        return params, loaded | {
            "image_id": np.asarray(truth.image_id, np.int64),
            "height": np.asarray(truth.height, np.int32),
            "width": np.asarray(truth.width, np.int32),
            "truth_boxes": _padded(truth.boxes, most, "float64"),
            "truth_labels": _padded(truth.labels, most, "int64"),
            "truth_area": _padded(truth.area, most, "float64"),
            "truth_crowd": _padded(truth.crowd, most, "bool"),
        }

    def square(self, index: int, image: StoredImage, params: Params) -> np.ndarray:
        pixels, height = image.data, image.truth.height
        if isinstance(pixels, bytes):
            pixels = decode_rgb(pixels, self.name(index), image.header, rows=params.rows(height))
        return self.augmentation.apply(params, pixels, height)

    def geometry(self, shape: tuple[int, ...], params: Params) -> np.ndarray:
        return self.augmentation.geometry(params, *shape[:2])

    def finish(self, batch: Batch, dtype: torch.dtype) -> Batch:
        """Jitter the colours and normalise."""
        image = self.augmentation.finish(batch["image"], batch.get("jitter"), batch.get("jitter_order"), dtype)
        return {**batch, "image": image}

    def header(self, index: int, data: bytes, truth: Objects) -> Header:
        """Read the header of an image, which must have the size that is annotated."""
        name, annotated = self.name(index), (truth.height, truth.width)
        header = read_header(data, name)
        if (header.height, header.width) == annotated and not self.source.is_upright:
            # Annotated as stored, whatever its EXIF says: the originals' decoders do not rotate images either.
            header = replace(header, orientation=1)
        if header.shape[:2] != annotated:
            raise BadSample(
                name,
                f"{header.shape[1]}x{header.shape[0]} pixels, but annotated as {truth.width}x{truth.height}; fetch the "
                f"image or the annotations again",
            )
        return header


def _for_network(found: Objects) -> tuple[np.ndarray, np.ndarray]:
    """Return the usable boxes as ymin, xmin, ymax, xmax in 0..1, and their labels."""
    kept = usable(found.boxes, found.height, found.width)
    x, y, wide, tall = found.boxes[kept].T
    edges = np.stack([y / found.height, x / found.width, (y + tall) / found.height, (x + wide) / found.width], 1)
    return edges, found.labels[kept]


def _padded(values: np.ndarray, rows: int, dtype: str) -> np.ndarray:
    padded = np.zeros((rows, *values.shape[1:]), dtype)
    padded[: len(values)] = values
    return padded
