"""Pictures made from numbers, for benchmarks and tests: `--data.path synthetic:classes=10,samples=1000,size=64`.

Each class is a smooth colour pattern of its own under noise, so that a network can learn them.
"""

import numpy as np

from sightline.data.draws import generator
from sightline.data.sources import DEFAULT_OPTIONS, BoxSource, Objects, Sample, Source, SourceOptions
from sightline.errors import UsageError
from sightline.parts import Split

PREFIX = "synthetic:"
DEFAULTS = {"classes": 1000, "samples": 12800, "size": 256}
MOST = {"classes": 100_000, "samples": 10**9, "size": 8192}  # beyond, only memory would be tested


def detect(path: str) -> bool:
    """Whether the path is a synthetic one."""
    return path.startswith(PREFIX)


class SyntheticSource(Source):
    """`samples` pictures for training, an eighth of that for evaluation."""

    def __init__(self, classes: int, samples: int, size: int, split: Split):
        self.classes = tuple(f"class{i:04d}" for i in range(classes))
        self.samples = samples if split == "train" else max(1, samples // 8)
        self.size = size
        self.split = split
        self.fingerprint = f"synthetic-1 {classes} {self.samples} {size} {split}"

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

    def picture(self, index: int) -> np.ndarray:
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


def open_source(path: str, split: Split, options: SourceOptions = DEFAULT_OPTIONS) -> SyntheticSource:
    """Reads the sizes out of the path."""
    return SyntheticSource(**_sizes(path), split=split)


def open_boxes(path: str, split: Split) -> SyntheticBoxes:
    """The same, for pictures with boxes."""
    return SyntheticBoxes(**_sizes(path), split=split)


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
