"""Images made from numbers, for benchmarks and tests: `--data.path synthetic:classes=10,samples=1000,size=64`.

Each class is a smooth colour pattern of its own under noise, so that a network can learn them. Volumes follow the
recipe's spec: `synthetic:samples=64`.
"""

import numpy as np

from sightline.data.draws import generator
from sightline.data.sources import (
    DEFAULT_OPTIONS,
    IGNORED,
    BoxSource,
    MaskSource,
    Objects,
    Sample,
    Source,
    SourceOptions,
    VolumeSource,
)
from sightline.data.sources.layouts import no_test_split
from sightline.errors import UsageError
from sightline.parts import DataSpec, Split

PREFIX = "synthetic:"
VOLUMES = 64  # drawn where the path does not say how many
SLICES = 64  # of a volume for a network that sees slices
DEFAULTS = {"classes": 1000, "samples": 12800, "size": 256}
MOST = {"classes": 100_000, "samples": 10**9, "size": 8192}  # beyond, only memory would be tested


def detect(path: str) -> bool:
    """Return whether the path is a synthetic one."""
    return path.startswith(PREFIX)


class SyntheticSource(Source):
    """`samples` images for training, an eighth of that for evaluation."""

    def __init__(self, classes: int, samples: int, size: int, split: Split):
        self.classes = tuple(f"class{i:04d}" for i in range(classes))
        self.samples = samples if split == "train" else max(1, samples // 8)
        self.size = size
        self.split = split
        self.fingerprint = f"synthetic-1 {classes} {self.samples} {size} {split}"

    @property
    def labels(self) -> np.ndarray:  # type: ignore[override]
        return np.arange(self.samples) % len(self.classes)

    def __len__(self) -> int:
        return self.samples

    def name(self, index: int) -> str:
        return f"{PREFIX}{self.split}/{index}"

    def read(self, index: int) -> Sample:
        label = index % len(self.classes)
        coarse = generator(0, 0, label, "pattern").integers(40, 216, (4, 4, 3), dtype=np.int16)
        repeat = -(-self.size // 4)
        pixels = coarse.repeat(repeat, 0).repeat(repeat, 1)[: self.size, : self.size]
        rng = generator(0, 0 if self.split == "train" else 1, index, "noise")
        noise = rng.integers(-40, 40, pixels.shape, dtype=np.int16)
        return Sample((pixels + noise).astype(np.uint8), label)


class SyntheticBoxes(BoxSource):
    """Plain rectangles on noise: some of each class's own colour, whose boxes are exact."""

    most_objects = 8

    def __init__(self, classes: int, samples: int, size: int, split: Split):
        self.classes = tuple(f"class{i:04d}" for i in range(classes))
        self.class_ids = tuple(range(1, classes + 1))
        self.samples = samples if split == "train" else max(1, samples // 8)
        self.size = max(8, size)
        self.epoch = 0 if split == "train" else 1
        self.prefix = f"{PREFIX}{split}/"
        self.room = np.zeros(self.samples, np.int64)  # nothing is encoded
        self.fingerprint = f"synthetic-boxes-1 {classes} {self.samples} {size} {split}"

    def __len__(self) -> int:
        return self.samples

    def name(self, index: int) -> str:
        return f"{self.prefix}{index}"

    def image(self, index: int) -> np.ndarray:
        pixels = generator(0, self.epoch, index, "noise").integers(0, 80, (self.size, self.size, 3), dtype=np.uint8)
        found = self.objects(index)
        for (x, y, wide, tall), label in zip(found.boxes.astype(int).tolist(), found.labels.tolist(), strict=True):
            pixels[y : y + tall, x : x + wide] = generator(0, 0, label, "colour").integers(80, 256, 3, dtype=np.uint8)
        return pixels

    def objects(self, index: int) -> Objects:
        random = generator(0, self.epoch, index, "boxes")
        count = int(random.integers(1, self.most_objects + 1))
        sides = random.integers(self.size // 8, self.size // 2 + 1, (count, 2))
        corners = random.integers(0, self.size - sides + 1)
        labels = random.integers(1, len(self.classes) + 1, count)
        boxes = np.concatenate([corners, sides], 1).astype(np.float64)
        area, crowd = boxes[:, 2] * boxes[:, 3], np.zeros(count, bool)
        return Objects(index, self.size, self.size, boxes, labels, area, crowd)


class SyntheticMasks(MaskSource):
    """The same, with a mask: the first class is the noise, and each of the others a colour."""

    def __init__(self, classes: int, samples: int, size: int, split: Split):
        self._boxes = SyntheticBoxes(max(1, classes - 1), samples, size, split)
        self.classes = tuple(f"class{i:04d}" for i in range(classes))
        self.values = tuple(range(classes))
        self.fingerprint = f"synthetic-masks-1 {classes} {self._boxes.samples} {size} {split}"

    def __len__(self) -> int:
        return len(self._boxes)

    def name(self, index: int) -> str:
        return self._boxes.name(index)

    def size(self, index: int) -> tuple[int, int]:
        return self._boxes.size, self._boxes.size

    def image(self, index: int) -> np.ndarray:
        return self._boxes.image(index)

    def mask(self, index: int) -> np.ndarray:
        found, mask = self._boxes.objects(index), np.zeros(self.size(index), np.uint8)
        for (x, y, wide, tall), label in zip(found.boxes.astype(int).tolist(), found.labels.tolist(), strict=True):
            mask[y : y + tall, x : x + wide] = label
        return mask


class SyntheticVolumes(VolumeSource):
    """Noise with an ellipsoid of every class, which each channel shows at a brightness of its own."""

    def __init__(self, samples: int, split: Split, spec: DataSpec):
        self.spec = spec
        self.samples = samples if split == "train" else max(1, samples // 8)
        self.sides = (spec.size[0], *spec.size[1:]) if len(spec.size) == 3 else (SLICES, *spec.size)
        self.epoch = 0 if split == "train" else 1
        self.prefix = f"{PREFIX}{split}/"
        self.fingerprint = (
            f"synthetic-volumes-1 {self.samples} {spec.channels} {self.sides} {len(spec.classes)} {split}"
        )

    def __len__(self) -> int:
        return self.samples

    def name(self, index: int) -> str:
        return f"{self.prefix}{index}"

    def shape(self, index: int) -> tuple[int, int, int]:
        depth, height, width = self.sides
        return depth, height, width

    def image(self, index: int) -> np.ndarray:
        random = generator(0, self.epoch, index, "noise")
        image = random.standard_normal((self.spec.channels, *self.sides), dtype=np.float32)
        shown = generator(0, 0, 0, "brightness").uniform(-3, 3, (self.spec.channels, len(self.spec.classes)))
        shown[:, 0] = 0
        label = self.label(index)
        for channel, levels in zip(image, shown.astype(np.float32), strict=True):
            channel += levels[label]
        return image

    def label(self, index: int) -> np.ndarray:
        label = np.zeros(self.sides, np.uint8)
        sides = np.array(self.sides)
        for number in range(1, len(self.spec.classes)):
            random = generator(0, self.epoch, index, f"blob {number}")
            radii = np.maximum(1.0, random.uniform(0.12, 0.3, 3) * sides)
            centre = random.uniform(np.minimum(radii, sides / 2), np.maximum(sides - radii, sides / 2))
            z, y, x = (
                ((np.arange(n, dtype=np.float32) - c) / r) ** 2 for n, c, r in zip(sides, centre, radii, strict=True)
            )
            label[z[:, None, None] + y[:, None] + x < 1] = number
        return label


def open_source(path: str, split: Split, options: SourceOptions = DEFAULT_OPTIONS) -> SyntheticSource:
    """Read the sizes out of the path."""
    _refuse_test(split)
    return SyntheticSource(**_sizes(path), split=split)


def open_boxes(path: str, split: Split, options: SourceOptions = DEFAULT_OPTIONS) -> SyntheticBoxes:
    """Do the same for images with boxes."""
    _refuse_test(split)
    return SyntheticBoxes(**_sizes(path), split=split)


def open_masks(path: str, split: Split, options: SourceOptions = DEFAULT_OPTIONS) -> SyntheticMasks:
    """Do the same for images with masks."""
    _refuse_test(split)
    sizes = _sizes(path)
    if not 2 <= sizes["classes"] < IGNORED:
        raise UsageError(f"--data.path {path}: masks have 2 to {IGNORED - 1} classes; write classes=4")
    return SyntheticMasks(**sizes, split=split)


def _refuse_test(split: Split) -> None:
    if split == "test":
        raise no_test_split("synthetic")


def open_volumes(path: str, split: Split, spec: DataSpec, fold: int = 0, folds: int = 5) -> SyntheticVolumes:
    """Do the same for volumes; the val split is drawn independently, so folds have no effect."""
    values = _sizes(path)
    sizes = path.removeprefix(PREFIX)
    if "classes=" in sizes or "size=" in sizes:
        raise UsageError(f"--data.path {path}: volumes take classes and size from the recipe; write {PREFIX}samples=64")
    return SyntheticVolumes(values["samples"] if "samples=" in sizes else VOLUMES, split, spec)


def _sizes(path: str) -> dict[str, int]:
    values = dict(DEFAULTS)
    for part in filter(None, path.removeprefix(PREFIX).split(",")):
        key, _, number = part.partition("=")
        if key not in values or not number.isdecimal() or not number.strip("0"):
            raise UsageError(f"--data.path {path}: cannot read '{part}'; write {PREFIX}classes=10,samples=1000,size=64")
        if len(number) > 12 or int(number) > MOST[key]:
            raise UsageError(f"--data.path {path}: '{part[:40]}' is more than {key}={MOST[key]}; give that or less")
        values[key] = int(number)
    return values
