"""The files of a COCO download, whether they lie in a zip or in the folder that it was unpacked to."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from sightline.errors import BadData, UsageError
from sightline.files.archive import Limits, Packed, clean_name, packed_chunks, zip_members

_CHUNK = 1 << 20


class Files(Protocol):
    """Files of one folder: (name below it) -> bytes. Holds nothing open, so that it goes to any process."""

    sizes: dict[str, int]
    fingerprint: str

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of a file, in parts."""

    def place(self, name: str) -> str:
        """Return what to call a file in messages."""


class ZipFiles:
    """The files of one folder in a zip, read where they lie."""

    def __init__(self, path: Path, folder: str, limits: Limits):
        self.path, self.folder = path, folder
        begin = f"{folder}/"
        members = [member for member in zip_members(path, limits) if member.name.startswith(begin)]
        self._members: dict[str, Packed] = {member.name.removeprefix(begin): member for member in members}
        self.sizes = {name: member.size for name, member in self._members.items()}
        rows = sorted((name, member.size, member.crc) for name, member in self._members.items())
        self.fingerprint = hashlib.sha256(repr(rows).encode("utf-8", "surrogateescape")).hexdigest()

    def chunks(self, name: str) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            yield from packed_chunks(file, self._members[name], str(self.path))

    def place(self, name: str) -> str:
        return f"{self.path}: {self.folder}/{name}"


class FolderFiles:
    """The files directly in a folder on disk."""

    def __init__(self, path: Path):
        self.path = path
        self.sizes = {}
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_file() and not entry.name.startswith("."):
                    self.sizes[clean_name(entry.name, str(path))] = entry.stat().st_size
        rows = sorted(self.sizes.items())
        self.fingerprint = hashlib.sha256(repr(rows).encode("utf-8", "surrogateescape")).hexdigest()

    def chunks(self, name: str) -> Iterator[bytes]:
        try:
            with (self.path / name).open("rb") as file:
                while chunk := file.read(_CHUNK):
                    yield chunk
        except OSError as error:
            raise BadData(f"{self.place(name)}: {error.strerror}; the source has changed or cannot be read") from error

    def place(self, name: str) -> str:
        return str(self.path / name)


def find_files(source: Path, folder: str, archive: str, limits: Limits) -> Files:
    """Return the files of a folder: from the archive if it is there, else from the folder itself."""
    if (source / archive).is_file():
        return ZipFiles(source / archive, folder, limits)
    if (source / folder).is_dir():
        return FolderFiles(source / folder)
    raise UsageError(
        f"{source} has neither {archive} nor a folder {folder}; put COCO's files there, or let --download fetch them"
    )
