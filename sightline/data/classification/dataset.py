"""Images from a source, decoded and augmented into squares with a label."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from sightline.data import counts
from sightline.data.augment import batched
from sightline.data.augment.classification import Augmentation, Params
from sightline.data.classification.config import ClassificationData
from sightline.data.decode import decode_rgb, read_header
from sightline.data.gpu import decoder_choice
from sightline.data.image_feed import ImageFeed, StoredImage
from sightline.data.inputs import Files
from sightline.data.loading.cache import SAMPLED, SIDES, Form, estimated
from sightline.data.sources import Opener, Source, open_source, spread, wrong_classes
from sightline.data.sources.named_files import FilesSource
from sightline.errors import BadData, BadSample, UsageError
from sightline.hardware.devices import Device
from sightline.parts import Arrays, Batch, DataSpec, Split, SplitFacts


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
    dataset = ClassificationDataset(config, FilesSource(files, found, spec.multi_label), "val", seed=0)
    dataset.layout = {**dataset.layout, "height": ((), "int32"), "width": ((), "int32")}  # of the file, for its results
    return dataset


def class_weight(config: ClassificationData, source: Source) -> np.ndarray:
    """Return the weight of every class, (classes,) float32; one that tells nothing (no images, or all) has 1."""
    counts = source.per_class()
    expected = len(source) - counts if source.is_multi_label else counts.sum() / np.count_nonzero(counts)
    weight = np.where(counts * expected > 0, expected / np.maximum(counts, 1), 1.0)
    return np.pad(weight, config.around_classes, constant_values=1.0).astype(np.float32)


class ClassificationDataset(ImageFeed):
    """One split of the images."""

    config: ClassificationData
    source: Source
    augmentation: Augmentation
    geometry_layout = ((len(batched.FIELDS),), "int32")

    def __init__(self, config: ClassificationData, source: Source, split: Split, seed: int):
        super().__init__(config, source, split, seed)
        self.spec = config.spec_of(source.classes, source.is_multi_label)
        augmentation = self.augmentation
        side = config.size if self.is_training else config.eval_size
        label = ((len(source.classes),), "uint8") if source.is_multi_label else ((), "int64")
        self.layout = {"image": ((side, side, 3), augmentation.packed_type), "label": label}
        self.packed_bytes = len(source.classes) if source.is_multi_label else 8
        if self.is_training and config.sampling == "balanced":
            self.balanced_by = source.labels
        if self.is_training and config.class_weights == "balanced":
            self._class_weight = class_weight(config, source)
            self.layout["class_weight"] = (self._class_weight.shape, "float32")
        if self.is_training and augmentation.erases:
            self.layout["erase"] = ((4,), "int32")
        if self.is_training:
            self.layout |= {key: ((), str(value.dtype)) for key, value in augmentation.draw_mix(seed, 0, 0).items()}

    def facts(self, is_late: Callable[[], bool]) -> SplitFacts:
        """Count the images of every class; read the sizes of some."""
        found = counts.of_labels(self.source, is_late)
        return replace(found, counts=tuple(np.pad(found.counts, self.config.around_classes).tolist()))

    def prefers_host(self, device: Device, workers: int, deterministic: bool) -> tuple[bool, str]:
        """Choose the decoder of `auto`: the faster one for these images; small ones are the CPU's."""
        is_open = self.config.decoder == "auto" and self.config.cache != "gpu" and device.kind != "cpu"
        if not is_open or self.why_cpu():
            return False, ""
        if deterministic:
            return decoder_choice.by_size(self)
        return decoder_choice.by_rate(self, device, workers)

    def on_host(self) -> ClassificationDataset:
        """Decode on the CPU, unless a decoder was typed."""
        return ClassificationDataset(self.config.on_host(), self.source, self.split, self.seed)

    def made_on_cpu(self) -> str:
        if self.config.policy != "none":
            return f"--data.policy {self.config.policy} works on the CPU"
        if self.config.image_type != "uint8":
            return f"--data.image-type {self.config.image_type} is made on the CPU"
        return "--data.downscale dct works on the CPU" if self.config.downscale != "off" else ""

    def why_not_encoded(self) -> str:
        return "" if self.starts_with_jpeg() else f"{self.config.path} holds no JPEGs"

    def starts_with_jpeg(self) -> bool:
        """Return whether the first image is a JPEG that any decoder takes."""
        try:
            data = self.source.read(0).data
            return isinstance(data, bytes) and read_header(data, self.source.name(0)).is_plain_jpeg
        except BadSample:
            return False

    def stored(self, index: int) -> tuple[bytes | np.ndarray, int | np.ndarray]:
        sample = self.source.read(index)
        return sample.data, sample.label

    def pack(self, truth: int | np.ndarray) -> bytes:
        return np.asarray(truth, np.uint8 if self.source.is_multi_label else np.int64).tobytes()

    def unpack(self, index: int, packed: bytes) -> int | np.ndarray:
        if self.source.is_multi_label:
            return np.frombuffer(packed, np.uint8)
        return int(np.frombuffer(packed, np.int64)[0])

    def forms(self, keeps_decoded: bool) -> list[Form]:
        """Estimate from the sizes of some images; nothing is kept where nothing is encoded."""
        encoded, decoded = [], []
        for index in spread(len(self), SAMPLED):
            with contextlib.suppress(BadSample):
                image = self.read(index)
                if image.header is None:
                    return []
                encoded.append(self.packed_bytes + len(image.data))
                decoded.append(self.packed_bytes + SIDES + math.prod(image.shape))
        forms = [estimated("encoded images", encoded, len(self))]
        if keeps_decoded and self.config.downscale == "off":  # which does not decode whole images
            forms.insert(0, estimated("decoded images", decoded, len(self), is_decoded=True))
        return forms

    def draw(self, epoch: int, index: int, shape: tuple[int, ...], truth: int | np.ndarray) -> tuple[Params, Arrays]:
        height, width = shape[:2]
        numbers: Arrays = {"label": np.asarray(truth + (self.config.background == "first"))}
        if not self.is_training:
            if "height" in self.layout:
                numbers |= {"height": np.asarray(height, np.int32), "width": np.asarray(width, np.int32)}
            return self.augmentation.evaluation_params(height, width), numbers
        params = self.augmentation.draw(self.seed, epoch, index, height, width)
        if "class_weight" in self.layout:
            numbers["class_weight"] = self._class_weight
        if "erase" in self.layout:
            numbers["erase"] = np.asarray(params.erase, dtype=np.int32)
        return params, numbers | self.augmentation.draw_mix(self.seed, epoch, index)

    def square(self, index: int, image: StoredImage, params: Params) -> np.ndarray:
        pixels = image.data
        if isinstance(pixels, bytes):
            smaller = self.config.downscale == "dct" and image.header and image.header.is_plain_jpeg
            factor = params.most_downscale() if smaller else 1
            pixels = decode_rgb(pixels, self.name(index), image.header, params.top + params.height, factor)
            params = params.downscaled(factor)
        return self.augmentation.pack(self.augmentation.apply(params, pixels))

    def geometry(self, shape: tuple[int, ...], params: Params) -> np.ndarray:
        return batched.as_row(params)

    def draw_batch(self, epoch: int, step: int) -> Arrays:
        """Draw the numbers of mixup and cutmix for a training batch."""
        return self.augmentation.draw_batch(self.seed, epoch, step) if self.is_training else {}

    def finish(self, batch: Batch, dtype: torch.dtype) -> Batch:
        """Normalise, erase and mix a batch on its device."""
        return self.augmentation.finish(batch, dtype)
