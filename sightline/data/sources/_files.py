"""Single files that a user names, as a source without labels: what `sightline predict` looks at."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from sightline.data.files import read_bytes
from sightline.data.sources import Sample, Source


class FilesSource(Source):
    """Files by the names they are shown under, in the order given; every label is 0."""

    def __init__(self, files: Mapping[str, Path], classes: tuple[str, ...]):
        self.classes = classes
        self._names = list(files)
        self._paths = [str(path) for path in files.values()]
        self.fingerprint = hashlib.sha256("\0".join(self._paths).encode("utf-8", "surrogateescape")).hexdigest()

    def __len__(self) -> int:
        return len(self._names)

    def name(self, index: int) -> str:
        return self._names[index]

    def read(self, index: int) -> Sample:
        return Sample(read_bytes(Path(self._paths[index]), self._names[index]), 0)
