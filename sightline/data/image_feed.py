"""Images of a split on their way to the network: from a source to squares of one size, with what belongs to them.

A loader process makes the squares, or the device: with its JPEG decoder, or out of its memory. All three draw the same
random numbers. Classification and detection add labels or boxes, and their geometry.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from sightline.data.decode import Header, decode_rgb, read_header, why_not_on_device
from sightline.data.gpu import encoded
from sightline.data.gpu.squares import cut_squares, fill_squares
from sightline.data.image_data import ImageData, SquareData
from sightline.data.loading import cache as caching
from sightline.data.loading.cache import Form, ImageCache, as_pixels, with_sides
from sightline.data.loading.device_cache import DeviceCache
from sightline.data.loading.workers import LEFT_OVER, PACKED
from sightline.data.sources import Images
from sightline.data.sources.layouts import kept_of
from sightline.errors import BadSample, UsageError
from sightline.hardware.devices import Device
from sightline.parts import Arrays, Batch, Bound, Dataset, Layout, Split


class ImageSplit(Dataset):
    """One split of the images of a source."""

    config: ImageData
    source: Images
    augmentation: Any

    def __init__(self, config: Any, source: Images, split: Split, seed: int):
        self.config = config
        self.augmentation = config.augmentation
        self.source = source
        self.split: Split = split
        self.is_training = split == "train"
        self.seed = seed
        self.fingerprint, self.files = source.fingerprint, source.files
        self.kept = kept_of(source)

    def __len__(self) -> int:
        return len(self.source)

    def name(self, index: int) -> str:
        return self.source.name(index)


class StoredImage(NamedTuple):
    """An image as its source stores it, or as memory keeps it."""

    data: bytes | np.ndarray  # encoded, or pixels
    header: Header | None  # of encoded data
    truth: Any  # what is annotated: a label, or objects

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the decoded image."""
        return self.header.shape if self.header else np.shape(self.data)


class ImageFeed(ImageSplit):
    """One split of images that become squares; loader processes get a pickled copy.

    read -> draw -> square, or on the device: read -> draw -> geometry, then decode; or draw -> geometry, then cut.
    """

    config: SquareData
    layout: Layout
    geometry_layout: tuple[tuple[int, ...], str]  # of what `geometry` returns
    packed_bytes = 0  # of what `pack` returns
    repeats_first = False
    other_decoders = "auto or cpu"  # what to type where the device cannot decode

    # What differs between kinds of truth

    @abstractmethod
    def stored(self, index: int) -> tuple[bytes | np.ndarray, Any]:
        """Return an image as the source gives it, and what is annotated."""

    @abstractmethod
    def pack(self, truth: Any) -> bytes:
        """Return what memory keeps of the annotation beside the image: all of it, or nothing."""

    @abstractmethod
    def unpack(self, index: int, packed: bytes) -> Any:
        """Return the annotation of an image that memory keeps."""

    @abstractmethod
    def draw(self, epoch: int, index: int, shape: tuple[int, ...], truth: Any) -> tuple[Any, Arrays]:
        """Draw the augmentation of an image; return it, and all of an item but its pixels."""

    @abstractmethod
    def square(self, index: int, image: StoredImage, params: Any) -> np.ndarray:
        """Decode an image on the CPU and augment it."""

    @abstractmethod
    def geometry(self, shape: tuple[int, ...], params: Any) -> np.ndarray:
        """Return the numbers with which the device cuts and resizes an image of this shape."""

    @abstractmethod
    def forms(self, keeps_decoded: bool) -> list[Form]:
        """Return the ways to keep these images in memory, the preferred first."""

    @abstractmethod
    def finish(self, batch: Batch, dtype: torch.dtype) -> Batch:
        """Carry out the device half of the augmentation."""

    @abstractmethod
    def why_not_encoded(self) -> str:
        """Say why a decoder of JPEGs has nothing to do here; "" if it has."""

    def made_on_cpu(self) -> str:
        """Name the field that the CPU alone can carry out; "" if there is none."""
        return ""

    def header(self, index: int, data: bytes, truth: Any) -> Header:
        """Read the header of an encoded image."""
        return read_header(data, self.name(index))

    def shape(self, index: int) -> tuple[int, ...]:
        """Return the shape that an image has once it is decoded."""
        return self.read(index).shape

    def draw_batch(self, epoch: int, step: int) -> Arrays:
        """Draw the numbers that belong to a whole batch."""
        return {}

    # Where squares are made

    def bind(self, device: Device, global_batch: int) -> Bound:
        """Bind to the memory of the device, or to its JPEG decoder, where the fields ask for it and it has one."""
        config = self.config
        if config.cache == "gpu":
            if device.kind == "cpu":
                raise UsageError("--data.cache gpu: this run trains on the CPU; use --data.cache ram")
            if why_not := self.made_on_cpu():
                raise UsageError(f"--data.cache gpu: {why_not}; use --data.cache ram")
            return self.bind_to_memory(device)
        if config.decoder == "cpu":
            return self._bind_to_host()
        why_not = self.why_cpu(device.torch_device)
        if why_not and config.decoder == "gpu":
            raise UsageError(f"--data.decoder gpu: {why_not}; use --data.decoder {self.other_decoders}")
        if why_not:
            return self._bind_to_host("" if device.kind == "cpu" else f"images are decoded on the CPU: {why_not}")
        return self.bind_to_decoder(f"images are decoded on {device.name()}")

    def why_cpu(self, device: torch.device | None = None) -> str:
        """Say which condition of decoding on the device fails, or without one of the images; "" if none does."""
        why_not = self.made_on_cpu()
        if device is None:
            return why_not or self.why_not_encoded()
        if device.type != "cuda":  # known without reading an image
            return why_not or why_not_on_device(device)
        return why_not or self.why_not_encoded() or why_not_on_device(device)  # its decoder takes a while to start

    def bind_to_decoder(self, *notes: str) -> Bound:
        """Load JPEGs as they are, with the numbers of their crop and flip; `decode` applies them on the device."""
        lengths = encoded.lengths_of(lambda index: self.stored(index)[0], len(self))
        travelling: Layout = {**encoded.layout_of(lengths), "geometry": self.geometry_layout}
        host = self._bind_to_host(*notes, keeps_decoded=False)
        return replace(
            host,
            layout={**self.layout, **travelling},
            load=partial(self.load_encoded, cache=host.cache),
            begin=None,
            decode=self.decode,
            on_host=host,
            host_keys=frozenset({"image", LEFT_OVER, *travelling}),  # few of a batch, if any, are finished on the CPU
        )

    def bind_to_memory(self, device: Device) -> Bound:
        """Keep all images decoded in the memory of the device; load the numbers alone, `decode` cuts and resizes."""
        what, policy = f"decoded images of {self.split}", self.config.on_bad_sample
        cache = DeviceCache(device, what, self.shape, self._decoded, len(self), policy)
        host = replace(self._bind_to_host(keeps=False), notes=(cache.note,))
        return replace(
            host,
            layout={**self.layout, "geometry": self.geometry_layout, "cached": ((), "int64")},
            load=partial(self.load_numbers, cache),
            begin=None,
            decode=partial(self.cut_from_memory, cache),
            on_host=host,
            host_keys=frozenset({"image", "geometry", "cached"}),
            cache=cache,
        )

    def _bind_to_host(self, *notes: str, keeps: bool = True, keeps_decoded: bool = True) -> Bound:
        is_ours = type(self).load is ImageFeed.load  # a subclass may load otherwise
        mode = self.config.cache if keeps and is_ours else "off"
        cache, note = caching.open_cache(mode, [] if mode == "off" else self.forms(keeps_decoded), self.split)
        return Bound(
            self,
            self.layout,
            partial(self.load, cache=cache) if is_ours else self.load,
            self.finish,
            self.draw_batch,
            cache=cache,
            begin=partial(self.begin, cache=cache) if is_ours else None,
            repeats_first=self.repeats_first,
            notes=tuple(filter(None, (*notes, note))),
        )

    # In loader processes

    def load(self, epoch: int, index: int, cache: ImageCache | None = None) -> Arrays:
        """Read, decode and augment one image."""
        return self.begin(epoch, index, cache)()

    def begin(self, epoch: int, index: int, cache: ImageCache | None = None) -> Callable[[], Arrays]:
        """Read one image and draw its augmentation; return what decodes and augments it."""
        image = self.read(index, cache)
        params, numbers = self.draw(epoch, index, image.shape, image.truth)
        return lambda: {**numbers, "image": self.square(index, image, params)}

    def load_encoded(self, epoch: int, index: int, cache: ImageCache | None = None) -> Arrays:
        """Read one image and draw its augmentation; decode it only if the device's decoder must not get it."""
        image = self.read(index, cache)
        params, numbers = self.draw(epoch, index, image.shape, image.truth)
        if image.header is None or not encoded.fits_device(image.data, image.header):
            return {**numbers, "image": self.square(index, image, params), encoded.LENGTH: np.asarray(0)}
        row = np.frombuffer(image.data, dtype=np.uint8)
        geometry = self.geometry(image.shape, params)
        return {**numbers, PACKED: row, encoded.LENGTH: np.asarray(len(row)), "geometry": geometry}

    def load_numbers(self, cache: DeviceCache, epoch: int, index: int) -> Arrays:
        """Draw the augmentation of an image that lies in the memory of the device."""
        cache.check(index)
        shape = cache.shapes[index]
        params, numbers = self.draw(epoch, index, shape, self.unpack(index, cache.extra[index]))
        return {**numbers, "geometry": self.geometry(shape, params), "cached": np.asarray(index)}

    def read(self, index: int, cache: ImageCache | None = None) -> StoredImage:
        """Read an image, from memory if it was read before."""
        if cache and (kept := cache.view(index)) is not None:
            truth, kept = self.unpack(index, kept[: self.packed_bytes].tobytes()), kept[self.packed_bytes :]
            if cache.is_decoded:
                return StoredImage(as_pixels(kept), None, truth)
            data = kept.tobytes()
            return StoredImage(data, self.header(index, data, truth), truth)
        image = self._from_source(index)
        if cache and cache.is_decoded and image.header:
            try:
                image = StoredImage(self._pixels(index, image), None, image.truth)
            except BadSample:  # perhaps it is damaged only below the crop
                return image
        if cache:
            parts = [image.data] if isinstance(image.data, bytes) else with_sides(image.data)
            cache.put(index, self.pack(image.truth), *parts)
        return image

    def _from_source(self, index: int) -> StoredImage:
        data, truth = self.stored(index)
        return StoredImage(data, self.header(index, data, truth) if isinstance(data, bytes) else None, truth)

    def _decoded(self, index: int) -> tuple[np.ndarray, bytes]:
        """Return the pixels of a whole image, and its packed annotation."""
        image = self._from_source(index)
        return self._pixels(index, image), self.pack(image.truth)

    def _pixels(self, index: int, image: StoredImage) -> np.ndarray:
        data = image.data
        return decode_rgb(data, self.name(index), image.header) if isinstance(data, bytes) else data

    # On the device

    def decode(self, slot: Batch, batch: Batch) -> Batch | None:
        """Decode, cut and resize the encoded images of a batch on its device; None if the decoder fails."""

        def fill(images: torch.Tensor, rows: torch.Tensor, jpegs: encoded.Packed) -> None:
            fill_squares(images, rows, jpegs, slot["geometry"][rows], self.augmentation.interpolation)

        images = encoded.squares_of(slot, _device_of(batch), fill)
        return None if images is None else {**batch, "image": images}

    def cut_from_memory(self, cache: DeviceCache, slot: Batch, batch: Batch) -> Batch:
        """Cut and resize the images of a batch from the memory of the device."""
        rows = (slot["valid"] if "valid" in slot else slot["index"] >= 0).nonzero().flatten()  # others are padding
        images = torch.zeros_like(slot["image"], device=_device_of(batch))
        if len(rows):
            places, geometry = cache.places(slot["cached"][rows]), slot["geometry"][rows]
            cut_squares(images, rows, *places, geometry, self.augmentation.interpolation)
        return {**batch, "image": images}


def _device_of(batch: Batch) -> torch.device:
    return next(iter(batch.values())).device
