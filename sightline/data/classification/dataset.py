"""Images from a source, decoded and augmented into squares with a label."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from sightline.data import cached_samples, counts, decoder_choice
from sightline.data.augment import batched
from sightline.data.augment.classification import Params
from sightline.data.classification.config import ClassificationData
from sightline.data.decode import Header, decode_rgb, read_header, why_not_on_device
from sightline.data.gpu import encoded
from sightline.data.gpu.squares import cut_squares, fill_squares
from sightline.data.inputs import Files
from sightline.data.loading import cache as caching
from sightline.data.loading.cache import ImageCache
from sightline.data.loading.device_cache import DeviceCache
from sightline.data.loading.workers import LEFT_OVER, PACKED
from sightline.data.sources import Opener, Sample, Source, open_source, wrong_classes
from sightline.data.sources.layouts import kept_of
from sightline.data.sources.named_files import FilesSource
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

_GEOMETRY = ((len(batched.FIELDS),), "int32")
_HEIGHT = batched.FIELDS.index("height")


def open_split(
    config: ClassificationData, split: Split, seed: int, opener: Opener | None = None
) -> ClassificationDataset:
    """Open the train or val images."""
    if not config.path:
        raise UsageError("no data: give --data.path DIR (draw some with `sightline prepare shapes --out DIR`)")
    source = (opener or Opener()).open(open_source, config.source, config.path, split, config.source_options)
    if config.classes and config.classes != len(source.classes):
        raise wrong_classes(config.path, len(source.classes), config.classes)
    if source.missing and config.on_bad_sample == "fail":
        raise BadData(
            f"{len(source.missing)} of the {len(source)} {split} images that {config.path} lists do not exist, e.g. "
            f"{source.missing[0]}; `sightline check` lists them all. Restore them, or skip them with "
            f"--data.on-bad-sample skip"
        )
    if source.is_multi_label:
        _refuse_for_several_labels(config)
    return ClassificationDataset(config, source, split, seed)


def _refuse_for_several_labels(config: ClassificationData) -> None:
    if config.sampling == "balanced":
        raise UsageError(
            f"sampling=balanced needs one label per image, and those of {config.path} have several; use "
            f"--data.class-weights balanced instead"
        )
    if config.background != "none":
        raise UsageError(
            f"background={config.background} is for one label per image, and those of {config.path} have several; an "
            f"image without labels needs no class; use --data.background none"
        )


def open_files(config: ClassificationData, files: Files, spec: DataSpec) -> ClassificationDataset:
    """Open images of unknown class; their label is 0."""
    found = {"none": spec.classes, "first": spec.classes[1:], "last": spec.classes[:-1]}[config.background]
    # Each is read once, so a cache would only cost memory; this machine may lack the decoder of the run's.
    config = replace(config, cache="off", decoder="auto" if config.decoder == "gpu" else config.decoder)
    return ClassificationDataset(config, FilesSource(files, found, spec.multi_label), "val", seed=0)


def class_weight(config: ClassificationData, source: Source) -> np.ndarray:
    """Return the weight of every class, (classes,) float32; one that tells nothing (no images, or all) has 1."""
    counts = source.per_class()
    expected = len(source) - counts if source.is_multi_label else counts.sum() / np.count_nonzero(counts)
    weight = np.where(counts * expected > 0, expected / np.maximum(counts, 1), 1.0)
    return np.pad(weight, config.around_classes, constant_values=1.0).astype(np.float32)


class ClassificationDataset(Dataset):
    """One split of the images."""

    def __init__(self, config: ClassificationData, source: Source, split: Split, seed: int):
        self.config = config
        self.augmentation = augmentation = config.augmentation
        self.source = source
        self.split: Split = split
        self.is_training = split == "train"
        self.seed = seed
        self.fingerprint, self.files = source.fingerprint, source.files
        self.kept = kept_of(source)
        self.spec = config.spec_of(source.classes, source.is_multi_label)
        side = config.size if self.is_training else config.eval_size
        label = ((len(source.classes),), "uint8") if source.is_multi_label else ((), "int64")
        self.layout = {"image": ((side, side, 3), augmentation.packed_type), "label": label}
        if self.is_training and config.sampling == "balanced":
            self.balanced_by = source.labels
        if self.is_training and config.class_weights == "balanced":
            self._class_weight = class_weight(config, source)
            self.layout["class_weight"] = (self._class_weight.shape, "float32")
        if self.is_training and augmentation.erases:
            self.layout["erase"] = ((4,), "int32")
        if self.is_training:
            self.layout |= {key: ((), str(value.dtype)) for key, value in augmentation.draw_mix(seed, 0, 0).items()}

    def __len__(self) -> int:
        return len(self.source)

    def name(self, index: int) -> str:
        return self.source.name(index)

    def facts(self, is_late: Callable[[], bool]) -> SplitFacts:
        """Count the images of every class; read the sizes of some."""
        found = counts.of_labels(self.source, is_late)
        return replace(found, counts=tuple(np.pad(found.counts, self.config.around_classes).tolist()))

    def prefers_host(self, device: Device, workers: int, deterministic: bool) -> tuple[bool, str]:
        """Choose the decoder of `auto`: the faster one for these images; small ones are the CPU's."""
        is_open = self.config.decoder == "auto" and self.config.cache != "gpu" and device.kind != "cpu"
        if not is_open or self._why_cpu():
            return False, ""
        if deterministic:
            return decoder_choice.by_size(self)
        return decoder_choice.by_rate(self, device, workers)

    def on_host(self) -> ClassificationDataset:
        """Decode on the CPU, unless a decoder was typed."""
        return ClassificationDataset(self.config.on_host(), self.source, self.split, self.seed)

    def bind(self, device: Device, global_batch: int) -> Bound:
        """Bind to the memory of the device, or to its JPEG decoder, where the fields ask for it and it has one."""
        if self.config.cache == "gpu":
            if device.kind == "cpu":
                raise UsageError("--data.cache gpu: this run trains on the CPU; use --data.cache ram")
            if why_not := self._made_on_cpu():
                raise UsageError(f"--data.cache gpu: {why_not}; use --data.cache ram")
            return self.bind_to_memory(device)
        if self.config.decoder == "cpu":
            return self._bind_to_host()
        why_not = self._why_cpu(device.torch_device)
        if why_not and self.config.decoder == "gpu":
            raise UsageError(f"--data.decoder gpu: {why_not}; use --data.decoder auto or cpu")
        if why_not:
            return self._bind_to_host("" if device.kind == "cpu" else f"images are decoded on the CPU: {why_not}")
        return self.bind_to_decoder(f"images are decoded on {device.name()}")

    def bind_to_decoder(self, *notes: str) -> Bound:
        """Load JPEGs as they are, with the numbers of their crop and flip; `decode` applies them on the device."""
        lengths = encoded.lengths_of(lambda index: self.source.read(index).data, len(self))
        travelling: Layout = {**encoded.layout_of(lengths), "geometry": _GEOMETRY}
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
        shape, read = partial(cached_samples.shape_of, self.source), partial(cached_samples.decoded, self.source)
        cache = DeviceCache(device, what, shape, read, len(self), policy)
        host = replace(self._bind_to_host(keeps=False), notes=(cache.note,))
        return replace(
            host,
            layout={**self.layout, "geometry": _GEOMETRY, "cached": ((), "int64")},
            load=partial(self.load_numbers, cache),
            begin=None,
            decode=partial(self.cut_from_memory, cache),
            on_host=host,
            host_keys=frozenset({"image", "geometry", "cached"}),
            cache=cache,
        )

    def _bind_to_host(self, *notes: str, keeps: bool = True, keeps_decoded: bool = True) -> Bound:
        is_ours = type(self).load is ClassificationDataset.load  # a subclass may load otherwise
        mode = self.config.cache if keeps and is_ours else "off"
        keeps_decoded = keeps_decoded and self.config.downscale == "off"  # which does not decode whole images
        forms = [] if mode == "off" else cached_samples.forms(self.source, keeps_decoded)
        cache, note = caching.open_cache(mode, forms, self.split)
        said = tuple(filter(None, (*notes, note)))
        load = partial(self.load, cache=cache) if is_ours else self.load
        begin = partial(self.begin, cache=cache) if is_ours else None
        return Bound(self, self.layout, load, self.finish, self.draw_batch, cache=cache, begin=begin, notes=said)

    def _why_cpu(self, device: torch.device | None = None) -> str:
        """Return which condition of decoding on the device fails, or without one of the images; "" if none does."""
        why_not = self._made_on_cpu() or (why_not_on_device(device) if device else "")
        return why_not or ("" if self.starts_with_jpeg() else f"{self.config.path} holds no JPEGs")

    def _made_on_cpu(self) -> str:
        if self.config.policy != "none":
            return f"--data.policy {self.config.policy} works on the CPU"
        if self.config.image_type != "uint8":
            return f"--data.image-type {self.config.image_type} is made on the CPU"
        return "--data.downscale dct works on the CPU" if self.config.downscale != "off" else ""

    def starts_with_jpeg(self) -> bool:
        """Return whether the first image is a JPEG that any decoder takes."""
        try:
            data = self.source.read(0).data
            return isinstance(data, bytes) and read_header(data, self.source.name(0)).is_plain_jpeg
        except BadSample:
            return False

    def load(self, epoch: int, index: int, cache: ImageCache | None = None) -> Arrays:
        """Read, decode and augment one image."""
        return self.begin(epoch, index, cache)()

    def begin(self, epoch: int, index: int, cache: ImageCache | None = None) -> Callable[[], Arrays]:
        """Read one image and draw its augmentation; return what decodes and augments it."""
        sample, header = cached_samples.read(self.source, index, cache)
        params = self._params(epoch, index, header.shape if header else np.shape(sample.data))
        numbers = self._numbers(epoch, index, sample, params)
        return lambda: {**numbers, "image": self._square(index, sample.data, header, params)}

    def load_encoded(self, epoch: int, index: int, cache: ImageCache | None = None) -> Arrays:
        """Read one image and draw its augmentation; decode it only if the device's decoder must not get it."""
        sample, header = cached_samples.read(self.source, index, cache)
        params = self._params(epoch, index, header.shape if header else np.shape(sample.data))
        if header is None or not encoded.fits_device(sample.data, header):
            finished = {"image": self._square(index, sample.data, header, params), encoded.LENGTH: np.asarray(0)}
            return {**self._numbers(epoch, index, sample, params), **finished}
        row = np.frombuffer(sample.data, dtype=np.uint8)
        travelling = {PACKED: row, encoded.LENGTH: np.asarray(len(row)), "geometry": batched.as_row(params)}
        return {**self._numbers(epoch, index, sample, params), **travelling}

    def load_numbers(self, cache: DeviceCache, epoch: int, index: int) -> Arrays:
        """Draw the augmentation of an image that lies in the memory of the device."""
        cache.check(index)
        params = self._params(epoch, index, cache.shapes[index])
        numbers = self._numbers(epoch, index, Sample(b"", cache.extra[index]), params)
        return {**numbers, "geometry": batched.as_row(params), "cached": np.asarray(index)}

    def cut_from_memory(self, cache: DeviceCache, slot: Batch, batch: Batch) -> Batch:
        """Cut and resize the images of a batch from the memory of the device."""
        rows = slot["geometry"][:, _HEIGHT].nonzero().flatten()  # others are padding
        images = torch.zeros_like(slot["image"], device=batch["label"].device)
        if len(rows):
            places, geometry = cache.places(slot["cached"][rows]), slot["geometry"][rows]
            cut_squares(images, rows, *places, geometry, self.augmentation.interpolation)
        return {**batch, "image": images}

    def decode(self, slot: Batch, batch: Batch) -> Batch | None:
        """Decode, crop and resize the encoded images of a batch on its device; None if the decoder fails."""

        def fill(images: torch.Tensor, rows: torch.Tensor, jpegs: encoded.Packed) -> None:
            fill_squares(images, rows, jpegs, slot["geometry"][rows], self.augmentation.interpolation)

        images = encoded.squares_of(slot, batch["label"].device, fill)
        return None if images is None else {**batch, "image": images}

    def draw_batch(self, epoch: int, step: int) -> Arrays:
        """Draw the numbers of mixup and cutmix for a training batch."""
        return self.augmentation.draw_batch(self.seed, epoch, step) if self.is_training else {}

    def finish(self, batch: Batch, dtype: torch.dtype) -> Batch:
        """Normalise, erase and mix a batch on its device."""
        return self.augmentation.finish(batch, dtype)

    def _params(self, epoch: int, index: int, shape: tuple[int, ...]) -> Params:
        height, width = shape[:2]
        if self.is_training:
            return self.augmentation.draw(self.seed, epoch, index, height, width)
        return self.augmentation.evaluation_params(height, width)

    def _square(self, index: int, pixels: bytes | np.ndarray, header: Header | None, params: Params) -> np.ndarray:
        """Decode an image that was read, and augment it."""
        if isinstance(pixels, bytes):
            smaller = self.config.downscale == "dct" and header and header.is_plain_jpeg
            factor = params.most_downscale() if smaller else 1
            pixels = decode_rgb(pixels, self.source.name(index), header, params.top + params.height, factor)
            params = params.downscaled(factor)
        return self.augmentation.pack(self.augmentation.apply(params, pixels))

    def _numbers(self, epoch: int, index: int, sample: Sample, params: Params) -> Arrays:
        """Return all of an item but its pixels: the label, and random numbers that the device half needs."""
        numbers: Arrays = {"label": np.asarray(sample.label + (self.config.background == "first"))}
        if "class_weight" in self.layout:
            numbers["class_weight"] = self._class_weight
        if "erase" in self.layout:
            numbers["erase"] = np.asarray(params.erase, dtype=np.int32)
        if self.is_training:
            numbers |= self.augmentation.draw_mix(self.seed, epoch, index)
        return numbers
