"""Pascal VOC's annotation files: one XML file per image with a <bndbox> per <object>.

Document types and entities are refused, so that nothing is expanded or fetched; nesting takes no recursion. Each object
that cannot be used goes to a callback, as for COCO's json files.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple
from xml.parsers import expat

from sightline.data.formats.coco import FAULTS, MAX_SIDE, Wrong
from sightline.errors import BadData
from sightline.files.typed_json import short

MAX_XML_BYTES = 4 * 2**20  # of one image: 10,000 objects
_LARGEST = 1e9  # pixels
_MAX_TEXT = 1000  # letters of a name
_EDGES = ("xmin", "ymin", "xmax", "ymax")


class Box(NamedTuple):
    """An object: its class and its edges, as written."""

    name: str
    edges: tuple[float, float, float, float]  # left, top, right, bottom
    is_difficult: bool


@dataclass
class Annotation:
    """One image as its file describes it; a size of 0 is unknown."""

    file: str = ""
    height: int = 0
    width: int = 0
    boxes: list[Box] = field(default_factory=list)


def read_annotation(data: bytes, name: str, wrong: Wrong) -> Annotation:
    """Read a file; objects that are reported to `wrong` are left out. Raises BadData if it is not of this form."""
    if len(data) > MAX_XML_BYTES:
        raise BadData(f"{name} has more than the {MAX_XML_BYTES} bytes allowed for one annotation file")
    reading = _Reading(name)
    parser = expat.ParserCreate()
    parser.buffer_text = True
    parser.StartDoctypeDeclHandler = reading.refuse
    parser.EntityDeclHandler = reading.refuse
    parser.StartElementHandler = reading.start
    parser.EndElementHandler = reading.end
    parser.CharacterDataHandler = reading.text
    try:
        parser.Parse(data, True)
    except (expat.ExpatError, LookupError, ValueError) as error:  # the latter two: an unknown encoding
        raise BadData(f"{name} is not a whole XML file: {error}; fetch or write it again") from error
    if reading.root != "annotation":
        raise BadData(f"{name} holds <{reading.root[:60]}>, expected <annotation> as Pascal VOC has it")
    found = Annotation(reading.values.get("filename", "").strip())
    found.height, found.width = (_side(reading.values.get(f"size/{side}", "")) for side in ("height", "width"))
    for number, values in enumerate(reading.objects, 1):
        try:
            found.boxes.append(_box(values))
        except _WrongObject as error:
            wrong(error.kind, f"{name}: object {number}", str(error))
    return found


class _WrongObject(Exception):
    def __init__(self, text: str, kind: str = "unreadable entry"):
        super().__init__(text)
        self.kind = kind


class _Reading:
    """The texts of a file by their paths below <annotation>, those of each <object> apart."""

    def __init__(self, name: str):
        self.name = name
        self.root = ""
        self.values: dict[str, str] = {}
        self.objects: list[dict[str, str]] = []
        self._path: list[str] = []

    def refuse(self, *_: Any) -> None:
        raise BadData(
            f"{self.name} declares a document type or an entity, which is not read; remove its <!DOCTYPE ...>"
        )

    def start(self, tag: str, _: dict[str, str]) -> None:
        if not self._path:
            self.root = tag
        self._path.append(tag)
        if len(self._path) == 2 and tag == "object":
            self.objects.append({})

    def end(self, _: str) -> None:
        self._path.pop()

    def text(self, text: str) -> None:
        is_object = len(self._path) > 1 and self._path[1] == "object"
        above = 2 if is_object else 1
        if above < len(self._path) <= above + 2:
            values = self.objects[-1] if is_object else self.values
            key = "/".join(self._path[above:])
            values[key] = (values.get(key, "") + text)[:_MAX_TEXT]


def _side(text: str) -> int:
    number = _number(text)
    return int(number) if number is not None and 1 <= number <= MAX_SIDE and number == int(number) else 0


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _box(values: dict[str, str]) -> Box:
    name = " ".join(values.get("name", "").split())
    if not name:
        raise _WrongObject("has no <name>, expected its class")
    numbers = {edge: _number(values.get(f"bndbox/{edge}", "")) for edge in _EDGES}
    for edge, number in numbers.items():
        if number is None:
            text = short(values.get(f"bndbox/{edge}", "").strip())
            raise _WrongObject(f"{short(name)} has {edge} {text}, expected a number of pixels")
        if not abs(number) <= _LARGEST:
            raise _WrongObject(f"{short(name)} has {edge} {number}, expected a finite number", f"box {FAULTS[1]}")
    left, top, right, bottom = (float(number or 0) for number in numbers.values())
    return Box(name, (left, top, right, bottom), values.get("difficult", "").strip() == "1")
