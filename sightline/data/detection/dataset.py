"""Images with boxes from a source, decoded, augmented and padded to static shapes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from sightline.data import counts
from sightline.data.augment.detection import Params, move_boxes
from sightline.data.decode import Header, decode_rgb, read_header, why_not_on_device
from sightline.data.detection.config import DetectionData
from sightline.data.formats.coco import usable
from sightline.data.gpu import encoded
from sightline.data.gpu.squares import cut_squares, fill_squares
from sightline.data.inputs import Files
from sightline.data.loading import cache as caching
from sightline.data.loading.cache import ImageCache
from sightline.data.loading.device_cache import DeviceCache
from sightline.data.loading.static import StaticDataset
from sightline.data.loading.workers import LEFT_OVER, PACKED
from sightline.data.sources import BoxSource, Objects, Opener, open_boxes, spread, wrong_classes
from sightline.data.sources.layouts import kept_of
from sightline.data.sources.named_files import BoxFilesSource
from sightline.errors import BadData, BadSample, UsageError
from sightline.hardware.devices import Device
from sightline.parts import (
    Arrays,
    Batch,
    Bound,
    Dataset,
    DataSpec,
    Layout,
    Split,
    SplitFacts,
)


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


class DetectionDataset(Dataset):
    """One split of the images."""

    def __init__(self, config: DetectionData, source: BoxSource, split: Split, seed: int):
        self.config = config
        self.augmentation = config.augmentation
        self.source = source
        self.split = split
        self.is_training = split == "train"
        self.seed = seed
        self.fingerprint, self.files = source.fingerprint, source.files
        self.kept = kept_of(source)
        self.spec = config.spec_of(source.classes, source.class_ids)
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

    def __len__(self) -> int:
        return len(self.source)

    def name(self, index: int) -> str:
        return self.source.name(index)

    def facts(self, is_late: Callable[[], bool]) -> SplitFacts:
        """Count the boxes of every class in some images, whose sizes are annotated."""
        return counts.of_boxes(self.source, is_late)

    def bind(self, device: Device, global_batch: int) -> Bound:
        """Decide whether images are kept in memory, and whether the first batch is repeated."""
        if self.config.cache == "gpu":
            if device.kind == "cpu":
                raise UsageError("--data.cache gpu: this run trains on the CPU; use --data.cache ram")
            return self.bind_to_memory(device)
        if self.config.decoder == "cpu":
            return self._bind_to_host()
        why_not = why_not_on_device(device.torch_device)
        if why_not or not any(encoded.lengths_of(self.source.image, len(self))):
            raise UsageError(
                f"--data.decoder gpu: {why_not or f'{self.config.path} holds no image files'}; use --data.decoder cpu"
            )
        return self.bind_to_decoder(f"images are decoded on {device.name()}")

    def _bind_to_host(self, *notes: str, keeps_decoded: bool = True) -> Bound:
        mode = self.config.cache
        cache, note = caching.open_cache(mode, [] if mode == "off" else self._forms(keeps_decoded), self.split)
        return Bound(
            self,
            self.layout,
            partial(self.load, cache=cache),
            self.finish,
            cache=cache,
            repeats_first=self.config.fake and self.is_training,
            notes=tuple(filter(None, (*notes, note))),
        )

    def bind_to_decoder(self, *notes: str) -> Bound:
        """Load JPEGs as they are, with the numbers of their crop and flip; `decode` applies them on the device."""
        lengths = encoded.lengths_of(self.source.image, len(self))
        travelling: Layout = {**encoded.layout_of(lengths), **self._geometry_layout()}
        host = self._bind_to_host(*notes, keeps_decoded=False)
        return replace(
            host,
            layout={**self.layout, **travelling},
            load=partial(self.load_encoded, cache=host.cache),
            decode=self.decode,
            on_host=host,
            host_keys=frozenset({"image", LEFT_OVER, *travelling}),  # few of a batch, if any, are finished on the CPU
        )

    def _geometry_layout(self) -> Layout:
        one = self.augmentation.geometry(Params(), 1, 1)
        return {"geometry": (one.shape, str(one.dtype))}

    def bind_to_memory(self, device: Device) -> Bound:
        """Keep all images decoded in the memory of the device; load the numbers alone, `decode` cuts and resizes."""
        what, policy = f"decoded images of {self.split}", self.config.on_bad_sample
        cache = DeviceCache(device, what, self._shape_of, self._decoded, len(self), policy)
        host = replace(
            Bound(self, self.layout, self.load, self.finish, notes=(cache.note,)),
            repeats_first=self.config.fake and self.is_training,
        )
        return replace(
            host,
            layout={**self.layout, **self._geometry_layout(), "cached": ((), "int64")},
            load=partial(self.load_numbers, cache),
            decode=partial(self.cut_from_memory, cache),
            on_host=host,
            host_keys=frozenset({"image", "cached", "geometry"}),
            cache=cache,
        )

    def _forms(self, keeps_decoded: bool) -> list[caching.Form]:
        """Return the ways to keep these images in memory."""
        kept = caching.exact(self.source.room, "encoded images")
        if not keeps_decoded:
            return [kept]
        chosen = spread(len(self), caching.SAMPLED) if self.source.room.any() else []
        sides = [(found.height, found.width) for found in map(self.source.objects, chosen)]
        sizes = [caching.SIDES + 3 * height * width for height, width in sides]
        decoded = caching.estimated("decoded images", sizes, len(self), is_decoded=True)
        return [decoded, kept]

    def load(self, epoch: int, index: int, cache: ImageCache | None = None) -> Arrays:
        """Read, decode and augment one image, and move its boxes along."""
        found, params, numbers = self._numbers(epoch, index)
        pixels = self._pixels(index, found, params, cache)
        return {"image": self.augmentation.apply(params, pixels, found.height), **numbers}

    def load_numbers(self, cache: DeviceCache, epoch: int, index: int) -> Arrays:
        """Draw the augmentation of an image that lies in the memory of the device, and move its boxes along."""
        cache.check(index)
        found, params, numbers = self._numbers(epoch, index)
        geometry = self.augmentation.geometry(params, found.height, found.width)
        return {**numbers, "geometry": geometry, "cached": np.asarray(index)}

    def load_encoded(self, epoch: int, index: int, cache: ImageCache | None = None) -> Arrays:
        """Read one image and draw its augmentation; decode it only if the device's decoder must not get it."""
        found, params, numbers = self._numbers(epoch, index)
        data = self._encoded(index, cache)
        header = self._header(data, index, found) if isinstance(data, bytes) else None
        if header is None or not encoded.fits_device(data, header):
            pixels = (
                decode_rgb(data, self.name(index), header, rows=params.rows(found.height))
                if isinstance(data, bytes)
                else data
            )
            square = self.augmentation.apply(params, pixels, found.height)
            return {**numbers, "image": square, encoded.LENGTH: np.asarray(0)}
        row = np.frombuffer(data, dtype=np.uint8)
        geometry = self.augmentation.geometry(params, found.height, found.width)
        return {**numbers, PACKED: row, encoded.LENGTH: np.asarray(len(row)), "geometry": geometry}

    def decode(self, slot: Batch, batch: Batch) -> Batch | None:
        """Decode, cut and resize the encoded images of a batch on its device; None if the decoder fails."""

        def fill(images: torch.Tensor, rows: torch.Tensor, jpegs: encoded.Packed) -> None:
            fill_squares(images, rows, jpegs, slot["geometry"][rows], self.augmentation.interpolation)

        images = encoded.squares_of(slot, batch["boxes"].device, fill)
        return None if images is None else {**batch, "image": images}

    def cut_from_memory(self, cache: DeviceCache, slot: Batch, batch: Batch) -> Batch:
        """Cut and resize the images of a batch from the memory of the device."""
        rows = (slot["valid"] if "valid" in slot else slot["index"] >= 0).nonzero().flatten()  # others are padding
        images = torch.zeros_like(slot["image"], device=batch["boxes"].device)
        if len(rows):
            places, geometry = cache.places(slot["cached"][rows]), slot["geometry"][rows]
            cut_squares(images, rows, *places, geometry, self.augmentation.interpolation)
        return {**batch, "image": images}

    def _numbers(self, epoch: int, index: int) -> tuple[Objects, Params, Arrays]:
        """Return the annotations of an image, what is done to it, and all of an item but its pixels."""
        found = self.source.objects(index)
        boxes, labels = _for_network(found)
        augmentation, room = self.augmentation, self.config.max_boxes
        params = augmentation.draw(self.seed, epoch, index, boxes) if self.is_training else Params()
        moved, kept = move_boxes(params, boxes)
        loaded = {"boxes": _padded(moved, room, "float32"), "labels": _padded(labels[kept], room, "int64")}
        if self.is_training:
            return found, params, loaded | augmentation.carried(params)
        most = self.layout["truth_labels"][0][0]
        return (
            found,
            params,
            loaded
            | {
                "image_id": np.asarray(found.image_id, np.int64),
                "height": np.asarray(found.height, np.int32),
                "width": np.asarray(found.width, np.int32),
                "truth_boxes": _padded(found.boxes, most, "float64"),
                "truth_labels": _padded(found.labels, most, "int64"),
                "truth_area": _padded(found.area, most, "float64"),
                "truth_crowd": _padded(found.crowd, most, "bool"),
            },
        )

    def finish(self, batch: Batch, dtype: torch.dtype) -> Batch:
        """Jitter the colours and normalise."""
        image = self.augmentation.finish(batch["image"], batch.get("jitter"), batch.get("jitter_order"), dtype)
        return {**batch, "image": image}

    def _pixels(self, index: int, found: Objects, params: Params, cache: ImageCache | None) -> np.ndarray:
        if cache and cache.is_decoded:
            if (kept := cache.view(index)) is not None:
                return caching.as_pixels(kept)
            with contextlib.suppress(BadSample):  # perhaps it is damaged only below the crop
                pixels, _ = self._decoded(index)
                cache.put(index, *caching.with_sides(pixels))
                return pixels
            return self._pixels(index, found, params, None)
        data = self._encoded(index, cache)
        return data if isinstance(data, np.ndarray) else self._decode(data, index, found, params.rows(found.height))

    def _encoded(self, index: int, cache: ImageCache | None) -> bytes | np.ndarray:
        """Read an image as it is stored, from memory if it was read before."""
        kept = cache.view(index) if cache else None
        if kept is not None:
            return kept.tobytes()
        data = self.source.image(index)
        if cache and isinstance(data, bytes):
            cache.put(index, data)
        return data

    def _shape_of(self, index: int) -> tuple[int, ...]:
        found = self.source.objects(index)
        return found.height, found.width, 3

    def _decoded(self, index: int) -> tuple[np.ndarray, None]:
        data = self.source.image(index)
        return self._decode(data, index, self.source.objects(index)) if isinstance(data, bytes) else data, None

    def _decode(self, data: bytes, index: int, found: Objects, rows: int | None = None) -> np.ndarray:
        return decode_rgb(data, self.name(index), self._header(data, index, found), rows=rows)

    def _header(self, data: bytes, index: int, found: Objects) -> Header:
        """Read the header of an image, which must have the size that is annotated."""
        name, annotated = self.name(index), (found.height, found.width)
        header = read_header(data, name)
        if (header.height, header.width) == annotated and not self.source.is_upright:
            # Annotated as stored, whatever its EXIF says: the originals' decoders do not rotate images either.
            header = replace(header, orientation=1)
        if header.shape[:2] != annotated:
            raise BadSample(
                name,
                f"{header.shape[1]}x{header.shape[0]} pixels, but annotated as {found.width}x{found.height}; fetch the "
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
