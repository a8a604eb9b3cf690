"""What `sightline predict` leaves behind: predictions.json, a picture for each one looked at, and lines to read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from sightline.data.decode import decode_rgb, read_header
from sightline.data.files import read_bytes
from sightline.errors import DISK_FULL, BadSample, DiskFull, UsageError
from sightline.parts import Finding
from sightline.report.draw import draw

DOCUMENT = "predictions.json"
FORMAT = 1
# Full colour at every pixel: halved, thin red lines and small letters blur.
_ENCODERS: dict[str, dict[str, Any]] = {
    ".jpg": {"format": "JPEG", "quality": 92, "subsampling": 0},
    ".jpeg": {"format": "JPEG", "quality": 92, "subsampling": 0},
    ".png": {"format": "PNG", "compress_level": 4},
    ".webp": {"format": "WEBP", "quality": 90},
    ".bmp": {"format": "BMP"},
}


class Predictions:
    """The folder of results. A picture keeps its name, and its format where that is one we write; else it is a PNG."""

    def __init__(self, folder: Path, files: Mapping[str, Path], draws: bool, say: Callable[[str], None]):
        self.folder = folder
        self.draws = draws
        self.say = say
        self.unreadable: list[dict[str, str]] = []
        self._files = files
        self._rows: dict[str, dict[str, Any]] = {}
        self._pictures = _picture_names(files)
        if draws:
            self._protect_inputs()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{folder} cannot be made: {error.strerror}; give another --out DIR") from error

    def add(self, name: str, findings: Sequence[Finding]) -> None:
        """Draws, tells and keeps what was found in one file."""
        try:
            data = read_bytes(self._files[name], name)
            height, width = read_header(data, name).shape[:2]
            pixels = decode_rgb(data, name) if self.draws else None
        except BadSample as bad:  # below the part that the network sees, or changed since
            self.note_unreadable(bad.name, bad.reason)
            return
        row: dict[str, Any] = {"file": name, "path": str(self._files[name]), "width": width, "height": height}
        row["found"] = [_as_json(finding, width, height) for finding in findings]
        if pixels is not None:
            row["picture"] = self._pictures[name]
            self._save(draw(pixels, findings), self._pictures[name])
        self._rows[name] = row
        for line in as_lines(row):
            self.say(line)

    def note_unreadable(self, name: str, reason: str) -> None:
        """A file that the rest goes on without."""
        self.unreadable.append({"file": name, "path": str(self._files[name]), "reason": reason})
        self.say(f"warning: {name} cannot be read: {reason}")

    def write(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """predictions.json, with the files in the order they were given."""
        rows = [self._rows[name] for name in self._files if name in self._rows]
        document = {"format": FORMAT, **about, "files": rows, "unreadable": self.unreadable}
        text = json.dumps(document, indent=1, allow_nan=False) + "\n"
        self._replace(self.folder / DOCUMENT, lambda path: path.write_text(text, encoding="utf-8"))
        return document

    def _save(self, picture: Image.Image, name: str) -> None:
        options = _ENCODERS[Path(name).suffix.lower()]
        self._replace(self.folder / name, lambda path: picture.save(path, **options))

    def _replace(self, path: Path, write: Callable[[Path], object]) -> None:
        """Whole or not at all; a link that lies there is replaced, not followed."""
        temporary = path.with_name(f".predicted-{os.getpid()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(temporary)
            os.replace(temporary, path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            if error.errno in DISK_FULL:
                raise DiskFull(f"{path} could not be written: {error.strerror}; free some space") from error
            raise UsageError(f"{path} cannot be written: {error.strerror}; give another --out DIR") from error

    def _protect_inputs(self) -> None:
        """The pictures of the user are never drawn into."""
        inputs = {os.path.realpath(path) for path in self._files.values()}
        for picture in self._pictures.values():
            if os.path.realpath(self.folder / picture) in inputs:
                raise UsageError(f"--out {self.folder} would replace {self.folder / picture}; give another folder")


def as_lines(row: Mapping[str, Any]) -> list[str]:
    """A row of predictions.json for the terminal: one line of classes, or a line for each box."""
    found = row["found"]
    if not found:
        return [f"{row['file']}  nothing found"]
    if "box" not in found[0]:
        return ["  ".join([row["file"], *(f"{each['class']} {each['score']:.4f}" for each in found)])]
    lines = [f"{row['file']}  {row['width']}x{row['height']}  {len(found)} found"]
    for each in found:
        x, y, width, height = each["box"]
        corners = f"({x:.0f}, {y:.0f}) ({x + width:.0f}, {y + height:.0f})"
        lines.append(f"  {each['score']:.3f} ({each['id']}) {each['class']}  {corners}")
    return lines


def _as_json(finding: Finding, width: int, height: int) -> dict[str, Any]:
    values: dict[str, Any] = {"class": finding.name, "id": finding.class_id, "score": finding.score}
    if finding.box is not None:
        left, top, right, bottom = finding.box
        edges = (left * width, top * height, (right - left) * width, (bottom - top) * height)
        values["box"] = [round(edge, 2) for edge in edges]  # x, y, width, height in pixels of the file
    return values


def _picture_names(files: Mapping[str, Path]) -> dict[str, str]:
    names = {name: name if Path(name).suffix.lower() in _ENCODERS else f"{name}.png" for name in files}
    if len(set(names.values())) < len(names):  # "x" beside "x.png"
        names = {name: f"{name}.png" for name in files}
    return names
