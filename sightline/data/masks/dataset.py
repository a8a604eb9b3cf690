"""Images with masks from a source: crops of one size for training, whole images of any size for evaluation."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from sightline.data import counts
from sightline.data.augment.classification import normalize
from sightline.data.augment.masks import Augmentation
from sightline.data.image_feed import ImageSplit
from sightline.data.inputs import Files, as_channels, decode_given
from sightline.data.loading import cache as caching
from sightline.data.loading.cache import SIDES, ImageCache
from sightline.data.masks.config import MaskData
from sightline.data.masks.pixels import highest_of, is_usual, normalisation, read_pixels
from sightline.data.sources import IGNORED, MaskSource, Opener, open_masks, spread, wrong_classes
from sightline.data.sources.layouts import ALL
from sightline.data.sources.mask_images import peek
from sightline.errors import BadSample, UsageError
from sightline.files.image_bytes import read_bytes
from sightline.hardware.devices import Device
from sightline.parts import Arrays, Batch, Bound, DataSpec, Layout, Split, SplitFacts

AT_ONCE = 2**26  # values of the images, or of their scores, that are evaluated at once: 256 MiB


def open_split(config: MaskData, split: Split, seed: int, opener: Opener | None = None) -> MaskDataset:
    """Open the train, val or test images."""
    if not config.path:
        raise UsageError("no data: give --data.path DIR, with images/ and masks/ in it")
    opener = opener or Opener()

    def opened(which: Split) -> MaskSource:
        return opener.open(open_masks, config.source, config.path, which, config.source_options)

    source = opened(split)
    if config.classes and config.classes != len(source.classes):
        raise wrong_classes(config.path, len(source.classes), config.classes)
    if len(config.mean) != source.channels:  # a run has them where they are measured
        is_whole = split == "train" or is_usual(source) or config.split == ALL
        mean, std = normalisation(source if is_whole else opened("train"))
        config = replace(config, mean=mean, std=std)
    return MaskDataset(config, source, split, seed)


def open_files(config: MaskData, files: Files, spec: DataSpec) -> MaskDataset:
    """Open images without known masks."""
    config = replace(config, cache="off", mean=spec.mean, std=spec.std, size=spec.size[0])
    return MaskDataset(config, GivenImages(files, spec), "val", seed=0)


class GivenImages(MaskSource):
    """Files and images in memory that a user gives, as a source without masks."""

    def __init__(self, files: Files, spec: DataSpec):
        self.classes, self.values, self.is_coloured = spec.classes, spec.class_ids, spec.coloured
        self.channels, self.bits = spec.channels, spec.bits
        self._names, self._given = list(files), list(files.values())
        paths = [str(each) if isinstance(each, Path) else "" for each in self._given]
        self.fingerprint = hashlib.sha256("\0".join(paths).encode("utf-8", "surrogateescape")).hexdigest()

    def __len__(self) -> int:
        return len(self._names)

    def name(self, index: int) -> str:
        return self._names[index]

    def image(self, index: int) -> np.ndarray:
        given, name = self._given[index], self._names[index]
        if not isinstance(given, Path):
            return as_channels(given, name, self.channels, self.bits)
        return decode_given(read_bytes(given, name), name, self.channels, self.bits)

    def mask(self, index: int) -> np.ndarray:
        return np.full(self.size(index), IGNORED, np.uint8)

    def size(self, index: int) -> tuple[int, int]:
        given, name = self._given[index], self._names[index]
        if isinstance(given, Path):
            try:
                height, width, _ = peek(given).shape
            except OSError as error:
                raise BadSample(name, f"cannot be read: {error.strerror}") from error
        else:
            height, width = as_channels(given, name, self.channels, self.bits).shape[:2]
        return height, width


class MaskDataset(ImageSplit):
    """One split of the images."""

    config: MaskData
    source: MaskSource
    augmentation: Augmentation

    def __init__(self, config: MaskData, source: MaskSource, split: Split, seed: int):
        super().__init__(config, source, split, seed)
        self.spec = DataSpec(
            source.classes,
            source.channels,
            (config.size, config.size),
            config.mean,
            config.std,
            source.values,
            coloured=source.is_coloured,
            bits=source.bits,
        )
        self.highest = highest_of(source.bits)
        self.pixel_type = np.dtype(np.uint16 if source.bits == 16 else np.uint8)
        self.fill = np.round(np.array(config.mean) * self.highest).astype(self.pixel_type)  # normalised: 0
        if self.is_training:
            self.layout: Layout = {
                "image": ((config.size, config.size, source.channels), self.pixel_type.name),
                "label": ((config.size, config.size), "uint8"),
            }
            if self.augmentation.changes_colours:
                self.layout = {**self.layout, "colours": ((3,), "float32")}
            return
        sides = np.array([self._size(index) for index in range(len(source))], np.int64)
        # Images of a batch are filled up to one size: how many there may be depends on the largest.
        values = int(sides.max(0).prod()) * max(source.channels, len(source.classes))
        self.eval_batch = self.predict_batch = max(1, min(64, AT_ONCE // values))
        most = int(sides.prod(1).max())
        self.layout = {
            "image": ((most * source.channels,), self.pixel_type.name),
            "label": ((most,), "uint8"),
            "extent": ((2,), "int64"),
        }

    def _size(self, index: int) -> tuple[int, int]:
        with contextlib.suppress(BadSample):  # reported when it is loaded
            height, width = self.source.size(index)
            return max(1, height), max(1, width)
        return 1, 1

    def facts(self, is_late: Callable[[], bool]) -> SplitFacts:
        """Count the pixels of every class in some images."""
        return counts.of_masks(self.source, is_late)

    def bind(self, device: Device, global_batch: int) -> Bound:
        """Decide whether images and masks are kept in memory."""
        mode = self.config.cache
        cache, note = caching.open_cache(mode, [] if mode == "off" else self._forms(), self.split)
        load = partial(self.load, cache=cache)
        return Bound(self, self.layout, load, self.finish, cache=cache, notes=(note,) if note else ())

    def _forms(self) -> list[caching.Form]:
        """Return the one way to keep these images in memory."""
        each = self.source.channels * self.pixel_type.itemsize + 1
        sides = [self._size(index) for index in spread(len(self), caching.SAMPLED)]
        sizes = [SIDES + height * width * each for height, width in sides]
        return [caching.estimated("decoded images with masks", sizes, len(self), is_decoded=True)]

    def load(self, epoch: int, index: int, cache: ImageCache | None = None) -> Arrays:
        """Read an image and its mask; cut a random crop out of both in training."""
        pixels, mask = self._read(index, cache)
        if not self.is_training:
            if pixels.size > self.layout["image"][0][0]:
                raise BadSample(self.name(index), "has grown since its size was read; start again")
            return {"image": pixels.reshape(-1), "label": mask.reshape(-1), "extent": np.array(mask.shape)}
        params = self.augmentation.draw(self.seed, epoch, index, mask)
        image, label = self.augmentation.apply(params, pixels, mask, self.fill)
        loaded = {"image": image, "label": label}
        return loaded | {"colours": np.array(params.colours, np.float32)} if "colours" in self.layout else loaded

    def _read(self, index: int, cache: ImageCache | None) -> tuple[np.ndarray, np.ndarray]:
        """Return the pixels (height, width, channels) of an image and its mask (height, width)."""
        if cache and (kept := cache.view(index)) is not None:
            height, width = kept[:SIDES].view(np.int32).tolist()
            end = SIDES + height * width * self.source.channels * self.pixel_type.itemsize
            pixels = kept[SIDES:end].view(self.pixel_type).reshape(height, width, self.source.channels)
            return pixels, kept[end:].reshape(height, width)
        pixels, mask = read_pixels(self.source, index), self.source.mask(index)
        if pixels.shape[:2] != mask.shape:
            (height, width), (tall, wide) = pixels.shape[:2], mask.shape
            raise BadSample(
                self.name(index), f"{width}x{height} pixels, but its mask has {wide}x{tall}; store both at one size"
            )
        if cache:
            cache.put(index, *caching.with_sides(pixels), mask)
        return pixels, mask

    def finish(self, batch: Batch, dtype: torch.dtype) -> Batch:
        """Change colours and normalise; whole images are filled up to the largest of the batch."""
        if self.is_training:
            image = self.augmentation.finish(batch["image"], batch.get("colours"), self.highest, dtype)
            rest = {key: value for key, value in batch.items() if key != "colours"}
            return {**rest, "image": image, "label": batch["label"].long()}
        rows, labels, channels = batch["image"], batch["label"], self.spec.channels
        # Synchronises with the device, because sizes differ from image to image.
        sides = batch["extent"].tolist()
        height, width = (max(1, *lengths) for lengths in zip((1, 1), *sides, strict=True))
        images = torch.zeros(len(sides), height, width, channels, dtype=rows.dtype, device=rows.device)
        masks = torch.full((len(sides), height, width), IGNORED, dtype=torch.int64, device=rows.device)
        for row, (tall, wide) in enumerate(sides):
            images[row, :tall, :wide] = rows[row, : tall * wide * channels].view(tall, wide, channels)
            masks[row, :tall, :wide] = labels[row, : tall * wide].view(tall, wide)
        image = normalize(images, self.spec.mean, self.spec.std, dtype, self.highest)
        return {**batch, "image": image, "label": masks}
