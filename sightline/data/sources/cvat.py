"""CVAT's own xml, `CVAT for images 1.1`: annotations.xml with its images, or the zip that CVAT exports, also below
train/ and val/.

Boxes, polygons, ellipses and masks become boxes and outlines, tags are labels of images. A zip is unpacked once, beside
it or in the user's cache, after all of its names and sizes are checked. Subsets that are called like splits are those.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.parsers import expat

import numpy as np

from sightline.data.formats import marked as m
from sightline.data.formats.marked import Marked, Shape, WrongEntry
from sightline.data.sources import index_files
from sightline.data.sources.annotations import chunks_of
from sightline.data.sources.layouts import Splits
from sightline.data.sources.tool_exports import MOST_BYTES, Entry, Tool
from sightline.errors import BadData
from sightline.files.archive import extract, zip_members
from sightline.files.regular import regular
from sightline.files.typed_json import short
from sightline.files.whole import user_cache

_ROOT = re.compile(rb"<annotations[\s>/]")
_INSIDE = re.compile(rb"<(?:version|meta|image|track)[\s>/]")
_FILE = "annotations.xml"
_END = b"</image>"
_SHAPES = ("box", "polygon", "polyline", "points", "ellipse", "mask", "cuboid", "skeleton")
_DIRECTORY = 2**20  # bytes at the end of a damaged zip in which its names may be
_MOST_ELEMENTS = 200_000  # of one image
_MOST_MASKED = 2**30  # pixels of all masks of one image together, which take 3 s


@dataclass
class Element:
    """An element of an image: its name, its attributes, and the texts of its own `attribute` elements."""

    tag: str
    values: dict[str, str]
    inside: list[Element] = field(default_factory=list)


class Cvat(Tool):
    kind, title, suffixes = "cvat", "CVAT", (".xml", ".zip")
    has_subsets = True

    def is_export(self, head: bytes) -> bool:
        return bool((found := _ROOT.search(head)) and _INSIDE.search(head, found.start()))

    def detect(self, path: str) -> bool:
        """Return whether PATH is or holds CVAT's xml or zip, which is not unpacked for that."""
        return self._is_zip(Path(path)) or bool(self._zips(Path(path))) or super().detect(path)

    def _zips(self, folder: Path) -> list[Path]:
        return [each for each in self.exports(folder) if self._is_zip(each)]

    def _is_zip(self, file: Path) -> bool:
        return file.suffix.lower() == ".zip" and os.path.isfile(file) and _is_zip_of_cvat(file)

    def _is_export(self, file: Path) -> bool:
        return _is_zip_of_cvat(file) if file.suffix.lower() == ".zip" else super()._is_export(file)

    def _layout(self, path: str) -> Splits | None:
        root = Path(path)
        zips = [root] if self._is_zip(root) else self._zips(root)
        if zips and zips != [root] and len(self.exports(root)) > 1:
            raise BadData(
                f"{path} holds {len(zips)} zips of CVAT beside other exports; give one of them as --data.path"
            )
        return super()._layout(str(_unpacked(zips[0]) / _FILE) if zips else path)

    def entries(self, file: Path) -> Iterator[Entry]:
        yield from _Reading(str(file)).images(chunks_of(file))

    def value(self, data: bytes) -> Any:
        try:
            found = next(_Reading("").images([b"<annotations>", data]), None)
        except BadData as error:
            raise ValueError(str(error)) from None
        if found is None:
            raise ValueError("not an image")
        return found[2]

    def read(self, value: Any, file: str) -> Marked | None:
        name = value.values.get("name", "").strip()
        if not name:
            raise WrongEntry("an <image> without a name")
        found = Marked(name, m.side(value.values.get("height")), m.side(value.values.get("width")))
        if (subset := value.values.get("subset", "").strip()).lower() != "default":
            found.subset = subset
        masks = [each.values for each in value.inside if each.tag == "mask"]
        if (masked := sum(m.side(of.get("width")) * m.side(of.get("height")) for of in masks)) > _MOST_MASKED:
            raise WrongEntry(f"{name}: its masks have {masked} pixels together, {_MOST_MASKED} are allowed")
        order: list[tuple[int, Shape]] = []
        for number, each in enumerate(value.inside):
            where = f"{name}: <{each.tag}> number {number + 1}"
            if each.tag == "tag":
                found.labels.append(m.name(each.values.get("label"), f"label of {where}"))
            elif each.tag in _SHAPES:
                shape = _shape(each, found, where)
                if shape is None:
                    found.notes[m.WITHOUT_AREA] += 1
                else:
                    order.append((int(m.number(each.values.get("z_order") or 0, f"z_order of {where}")), shape))
        found.shapes = [shape for _, shape in sorted(order, key=lambda pair: pair[0])]
        return found


def _shape(each: Element, image: Marked, where: str) -> Shape | None:
    label = m.name(each.values.get("label"), f"label of {where}")

    def read(*keys: str) -> list[float]:
        return [m.number(each.values.get(key), f"{key} of {where}") for key in keys]

    degrees = m.number(each.values.get("rotation") or 0, f"rotation of {where}")
    if each.tag == "box":
        left, top, right, bottom = read("xtl", "ytl", "xbr", "ybr")
        if not degrees:
            return m.rectangle(label, left, top, right, bottom)
        image.notes[m.ROTATED] += 1
        corners = np.asarray([(left, top), (right, top), (right, bottom), (left, bottom)])
        return m.polygon(label, m.turned(corners, degrees, ((left + right) / 2, (top + bottom) / 2)))
    if each.tag == "ellipse":
        x, y, rx, ry = read("cx", "cy", "rx", "ry")
        return m.ellipse(label, x, y, rx, ry, degrees)
    if each.tag == "polygon":
        pairs = [pair.split(",") for pair in each.values.get("points", "").split(";") if pair.strip()]
        return m.polygon(label, m.points(pairs, f"points of {where}"))
    if each.tag == "mask":
        return _mask(label, each, image, where)
    return None


def _mask(label: str, each: Element, image: Marked, where: str) -> Shape | None:
    """Read lengths of runs along the rows of a region, of pixels outside and inside by turns."""
    left, top, wide, tall = (m.number(each.values.get(key), f"{key} of {where}") for key in
                             ("left", "top", "width", "height"))  # fmt: skip
    wide, tall = m.side(wide), m.side(tall)
    if not wide or not tall or wide * tall > max(image.height * image.width, 1):
        raise WrongEntry(f"{where} is {wide}x{tall} in an image of {image.width}x{image.height}")
    runs = [m.number(run, f"rle of {where}") for run in each.values.get("rle", "").split(",") if run.strip()]
    lengths = np.asarray(runs, np.int64)
    if (lengths < 0).any() or lengths.sum() > wide * tall:
        raise WrongEntry(f"rle of {where} has {int(lengths.sum())} pixels, expected at most {wide * tall}")
    inside = np.zeros(wide * tall, bool)
    ends = np.cumsum(lengths)
    for start, end in zip(ends[::2].tolist(), ends[1::2].tolist(), strict=False):
        inside[start:end] = True
    return m.region(label, inside.reshape(tall, wide), int(left), int(top), image.height, image.width)


class _Reading:
    """The images of a file, one by one. Document types and entities are refused, so that nothing is expanded or
    fetched; nesting takes no recursion."""

    def __init__(self, name: str):
        self.name = name
        self._path: list[str] = []
        self._found: list[Entry] = []
        self._image: Element | None = None
        self._start = 0
        self._count = 0

    def images(self, chunks: Any) -> Iterator[Entry]:
        parser = expat.ParserCreate()
        parser.buffer_text = True
        parser.StartDoctypeDeclHandler = self._refuse
        parser.EntityDeclHandler = self._refuse
        parser.StartElementHandler = lambda tag, values: self._begin(tag, values, parser.CurrentByteIndex)
        parser.EndElementHandler = lambda tag: self._end(tag, parser.CurrentByteIndex)
        try:
            for chunk in chunks:
                parser.Parse(chunk, False)
                if self._image is not None and parser.CurrentByteIndex - self._start > MOST_BYTES:
                    raise BadData(f"{self.name}: an image at byte {self._start} takes more than {MOST_BYTES} bytes")
                yield from self._found
                self._found.clear()
            parser.Parse(b"", True)
        except (expat.ExpatError, LookupError, ValueError) as error:  # the latter two: an unknown encoding
            raise BadData(f"{self.name} is not a whole XML file: {error}; export it again") from error
        yield from self._found

    def _refuse(self, *_: Any) -> None:
        raise BadData(
            f"{self.name} declares a document type or an entity, which is not read; remove its <!DOCTYPE ...>"
        )

    def _begin(self, tag: str, values: dict[str, str], at: int) -> None:
        self._path.append(tag)
        if len(self._path) == 2 and self._path[0] != "annotations":
            raise BadData(f"{self.name} holds <{self._path[0][:60]}>, expected <annotations> as CVAT has it")
        if len(self._path) == 2 and tag == "track":
            raise BadData(
                f"{self.name} is a CVAT video export (<track>), whose frames are not in it; in CVAT choose Export "
                "annotations, COCO 1.0, with images"
            )
        if len(self._path) == 2 and tag == "image":
            self._image, self._start, self._count = Element(tag, values), at, 0
        elif self._image is not None and len(self._path) == 3:
            self._count += 1
            if self._count > _MOST_ELEMENTS:
                raise BadData(f"{self.name}: {short(self._image.values)} has more than {_MOST_ELEMENTS} objects")
            self._image.inside.append(Element(tag, values))

    def _end(self, tag: str, at: int) -> None:
        if len(self._path) == 2 and self._image is not None:
            # An end tag is at its own first byte. That of <image/> is behind it: some of what follows is read again.
            self._found.append((self._start, at + len(_END), self._image))
            self._image = None
        self._path.pop()


def _is_zip_of_cvat(file: Path) -> bool:
    try:
        with suppress(BadData):  # damaged or hostile, which is said when it is opened
            return any(each.name == _FILE for each in zip_members(file))
        with open(file, "rb", opener=regular) as opened:
            opened.seek(max(0, os.fstat(opened.fileno()).st_size - _DIRECTORY))
            return _FILE.encode() in opened.read(_DIRECTORY)
    except OSError:
        return False


def _unpacked(file: Path) -> Path:
    """Return the folder of what is in a zip, unpacked once; its names and sizes are checked before."""
    found = file.stat()
    key = index_files.digest(os.path.realpath(file), found.st_size, found.st_mtime_ns)[:16]
    cache = user_cache()
    folders = [file.parent / f".sightline-unpacked-{key}", *([cache / f"unpacked-{key}"] if cache else [])]
    for folder in folders:
        if (folder / ".whole").is_file():
            return folder
    error: OSError | None = None
    zip_members(file)  # refuses what is damaged or hostile before there is a folder
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            extract(file, folder)
            (folder / ".whole").touch()
            return folder
        except OSError as failed:
            error = failed
    raise BadData(f"{file} cannot be unpacked: {error.strerror if error else 'no folder'}; unpack it by hand")


TOOL = Cvat()
detect, open_boxes, open_masks, open_source = TOOL.detect, TOOL.open_boxes, TOOL.open_masks, TOOL.open_source
