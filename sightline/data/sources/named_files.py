"""Single files and images that a user gives, as a source without labels: what `sightline predict` looks at."""

import hashlib
from pathlib import Path

import numpy as np

from sightline.data.decode import decode_rgb, decoded_shape
from sightline.data.inputs import Files, as_pixels
from sightline.data.sources import BoxSource, Objects, Sample, Source
from sightline.files.image_bytes import read_bytes


class FilesSource(Source):
    """Files, or pixels, by the names they are shown under, in the order given; every label is 0, or no class."""

    def __init__(self, files: Files, classes: tuple[str, ...], is_multi_label: bool = False):
        self.classes = classes
        self.is_multi_label = is_multi_label
        self.labels = np.zeros(0 if is_multi_label else len(files), np.int64)
        self._names = list(files)
        self._given = [str(each) if isinstance(each, Path) else as_pixels(each, name) for name, each in files.items()]
        paths = [each if isinstance(each, str) else "" for each in self._given]
        self.fingerprint = hashlib.sha256("\0".join(paths).encode("utf-8", "surrogateescape")).hexdigest()

    def __len__(self) -> int:
        return len(self._names)

    def name(self, index: int) -> str:
        return self._names[index]

    def read(self, index: int) -> Sample:
        label = np.zeros(len(self.classes), np.uint8) if self.is_multi_label else 0
        given = self._given[index]
        return Sample(read_bytes(Path(given), self._names[index]) if isinstance(given, str) else given, label)


class BoxFilesSource(BoxSource):
    """The same as images of which no box is known."""

    def __init__(self, files: Files, classes: tuple[str, ...], class_ids: tuple[int, ...]):
        self._files = FilesSource(files, classes)
        self.classes, self.class_ids, self.fingerprint = classes, class_ids, self._files.fingerprint
        self.most_objects = 0
        self.room = np.zeros(len(self._files), np.int64)  # seen once, so there is nothing to keep

    def __len__(self) -> int:
        return len(self._files)

    def name(self, index: int) -> str:
        return self._files.name(index)

    def image(self, index: int) -> np.ndarray:
        """Return pixels, upright as a person sees them: no annotations refer to the image as stored."""
        data = self._files.read(index).data
        return decode_rgb(data, self.name(index)) if isinstance(data, bytes) else data

    def objects(self, index: int) -> Objects:
        data = self._files.read(index).data
        shape = decoded_shape(data, self.name(index))
        nothing = np.zeros(0)
        return Objects(
            index, shape[0], shape[1], np.zeros((0, 4)), nothing.astype(np.int64), nothing, nothing.astype(bool)
        )
