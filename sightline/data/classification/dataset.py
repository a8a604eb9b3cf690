"""Classification data: images from a source, decoded and augmented into squares with a label."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Self

import numpy as np
import torch

from sightline.data import cached_samples, decoder_choice
from sightline.data.augment import batched, with_fields_of
from sightline.data.augment.classification import Augmentation, AugmentFields, Params, served_pixels
from sightline.data.check.images import Report, check_images
from sightline.data.decode import Header, decode_rgb, read_header, why_not_on_device
from sightline.data.gpu import encoded
from sightline.data.gpu.squares import cut_squares, fill_squares
from sightline.data.inputs import Files
from sightline.data.loading import cache as caching
from sightline.data.loading.cache import ImageCache
from sightline.data.loading.device_cache import DeviceCache
from sightline.data.loading.workers import LEFT_OVER, PACKED
from sightline.data.sources import Sample, Source, SourceOptions, open_source, spread, wrong_classes
from sightline.data.sources.named_files import FilesSource
from sightline.data.split_fields import SplitFields, kept_of
from sightline.errors import BadData, BadSample, UsageError
from sightline.hardware.devices import Device
from sightline.parts import (
    Arrays,
    Batch,
    Bound,
    DataConfig,
    Dataset,
    DataSpec,
    Layout,
    ServedInput,
    Split,
    SplitFacts,
    undecisive,
)
from sightline.terminal.progress import Progress

BACKGROUND = "background"
MOST_SIZES = 200  # images whose sizes the report of a run is made from
_GEOMETRY = ((len(batched.FIELDS),), "int32")
_HEIGHT = batched.FIELDS.index("height")


@dataclass(frozen=True)
class ClassificationData(AugmentFields, SplitFields, DataConfig):
    """Location of the images, and how they become the network's input."""

    path: str = undecisive("")
    """Class folders, a table (labels.csv), tar shards, TFRecords, or synthetic:classes=10,samples=1000,size=64; see
    docs/data.md."""
    source: str = "auto"
    """Kind of data at the path: auto, folder, table, tar, tfrecord, synthetic."""
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
    decoder: Literal["auto", "cpu", "gpu"] = undecisive("auto")
    """Device that decodes, crops and resizes JPEGs. gpu: by the JPEG engines of the device, with the same random
    numbers and slightly different pixels; auto: where some images of the data are decoded faster, and says so."""
    downscale: Literal["off", "dct"] = "off"
    """dct: decode JPEGs at 1/2, 1/4 or 1/8 of their size where a crop is that many times larger than what it is resized
    to, in training and evaluation: faster for large photos, with slightly different pixels."""
    samples: int = undecisive(0)
    """Number of training images the recipe is made for; `inspect` counts steps with it if no path is given."""
    cache: Literal["auto", "off", "ram", "gpu"] = undecisive("auto")
    """ram: keep images in memory once read, decoded if that takes at most half of what is available, else encoded, and
    share them between the ranks of a host; auto: only if they take at most half, and says so; gpu: keep them decoded on
    the device and cut crops there, with the same random numbers and slightly different pixels; see docs/cache.md."""
    on_bad_sample: Literal["fail", "skip"] = "fail"
    """If an image cannot be read: end the run with exit 3, or skip the image, count and list it."""
    max_bad_samples: int = undecisive(100)
    """skip: end the run if there are more bad images than this."""
    fingerprint: Literal["names", "sampled", "full"] = undecisive("sampled")
    """How a resumed run knows its data again, besides names and sizes. sampled: the bytes of at most 256 files, 64 MiB
    in all, of each split; full: every byte; names: no bytes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        SplitFields.__post_init__(self)
        caching.check_mode(self.cache)
        if self.downscale not in ("off", "dct"):
            raise UsageError(f"downscale={self.downscale!r} is unknown; use one of off, dct")
        if self.background not in ("none", "first", "last"):
            raise UsageError(f"background={self.background!r} is unknown; use one of none, first, last")
        for name, known in (("sampling", ("uniform", "balanced")), ("class_weights", ("none", "balanced"))):
            if getattr(self, name) not in known:
                raise UsageError(f"{name}={getattr(self, name)!r} is unknown; use one of {', '.join(known)}")

    @property
    def augmentation(self) -> Augmentation:
        """The operations that these fields choose."""
        return with_fields_of(self, Augmentation)

    @property
    def _options(self) -> SourceOptions:
        return SourceOptions(self.first_label, self.classes, self.val_fraction, self.split)

    def open(self, split: Split, seed: int) -> Dataset:
        """Open the train or val images under `path`."""
        if not self.path:
            raise UsageError("no data: give --data.path DIR (draw some with `sightline prepare shapes --out DIR`)")
        source = open_source(self.source, self.path, split, self._options)
        if self.classes and self.classes != len(source.classes):
            raise wrong_classes(self.path, len(source.classes), self.classes)
        if source.missing and self.on_bad_sample == "fail":
            raise BadData(
                f"{len(source.missing)} of the {len(source)} {split} images that {self.path} lists do not exist, e.g. "
                f"{source.missing[0]}; `sightline check` lists them all. Restore them, or skip them with "
                f"--data.on-bad-sample skip"
            )
        if source.is_multi_label:
            self._refuse_for_several_labels()
        return ClassificationDataset(self, source, split, seed)

    def _refuse_for_several_labels(self) -> None:
        if self.sampling == "balanced":
            raise UsageError(
                f"sampling=balanced needs one label per image, and those of {self.path} have several; use "
                f"--data.class-weights balanced instead"
            )
        if self.background != "none":
            raise UsageError(
                f"background={self.background} is for one label per image, and those of {self.path} have several; an "
                f"image without labels needs no class; use --data.background none"
            )

    def on_host(self) -> ClassificationData:
        """Decode on the CPU, unless a decoder was typed."""
        return replace(self, decoder="cpu") if self.decoder == "auto" else self

    def following(self, recipe: Self, typed: Collection[str]) -> dict[str, Any]:
        """Scale both sizes of evaluation with that of training, unless one of them was typed."""
        if self.size == recipe.size or {"eval_size", "eval_resize"} & set(typed):
            return {}
        return {name: round(getattr(recipe, name) * self.size / recipe.size) for name in ("eval_size", "eval_resize")}

    def open_files(self, files: Files, spec: DataSpec) -> Dataset:
        """Open images of unknown class; their label is 0."""
        found = {"none": spec.classes, "first": spec.classes[1:], "last": spec.classes[:-1]}[self.background]
        # Each is read once, so a cache would only cost memory; this machine may lack the decoder of the run's.
        config = replace(self, cache="off", decoder="auto" if self.decoder == "gpu" else self.decoder)
        return ClassificationDataset(config, FilesSource(files, found, spec.multi_label), "val", seed=0)

    def served(self, spec: DataSpec) -> ServedInput:
        """Take squares of pixels, resized and cut as in evaluation; the graph normalises them."""
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

    def declared(self) -> tuple[DataSpec, int] | None:
        """Declare `classes` nameless classes and `samples` images if no path is given."""
        if self.path:
            return None
        if not self.classes:
            raise UsageError("give --data.path DIR or --data.classes N: the network's head depends on it")
        return self.spec_of(tuple(f"class{i}" for i in range(self.classes))), self.samples

    def synthetic(self, spec: DataSpec, samples: int) -> ClassificationData:
        """Use synthetic images; `spec` counts the background class, if there is one, among its classes."""
        path = f"synthetic:classes={len(spec.classes)},samples={samples},size={max(spec.size)}"
        return replace(self, path=path, source="auto", classes=len(spec.classes), background="none")

    def check_samples(self, decode: bool, processes: int, progress: Progress) -> Report:
        """Check every image of both splits under `path`."""
        if not self.path:
            raise UsageError("no data: give --data.path DIR")
        return check_images(self.path, self.source, self._options, self.classes, decode, processes, progress)

    def spec_of(self, classes: tuple[str, ...], multi_label: bool = False) -> DataSpec:
        """Return the spec of data with these classes."""
        if self.background != "none" and BACKGROUND in classes:
            raise BadData(f"the data has a class {BACKGROUND!r} already; use --data.background none")
        extra = (BACKGROUND,)
        classes = {"none": classes, "first": extra + classes, "last": classes + extra}[self.background]
        return DataSpec(classes, 3, (self.eval_size, self.eval_size), self.mean, self.std, multi_label=multi_label)

    def class_weight(self, source: Source) -> np.ndarray:
        """Return the weight of every class, (classes,) float32; one that tells nothing (no images, or all) has 1."""
        counts = source.per_class()
        expected = len(source) - counts if source.is_multi_label else counts.sum() / np.count_nonzero(counts)
        weight = np.where(counts * expected > 0, expected / np.maximum(counts, 1), 1.0)
        return np.pad(weight, self.around_classes, constant_values=1.0).astype(np.float32)

    @property
    def around_classes(self) -> tuple[int, int]:
        """Classes that the network has before and after those of the files."""
        return {"none": (0, 0), "first": (1, 0), "last": (0, 1)}[self.background]


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
            self._class_weight = config.class_weight(source)
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
        counts = np.pad(self.source.per_class(), self.config.around_classes)
        sizes = []
        for index in spread(len(self), MOST_SIZES):
            if is_late():
                break
            with contextlib.suppress(BadSample):
                sample, header = cached_samples.read(self.source, index)
                height, width = (header.shape if header else np.shape(sample.data))[:2]
                sizes.append((height, width))
        return SplitFacts(len(self), "images", "images", tuple(counts.tolist()), len(self), tuple(sizes))

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
