"""Predictions in the files that tools for labelling import: COCO, YOLO, LabelMe, Label Studio, CVAT.

Written beside predictions.json out of what it holds. Masks come from the files that are listed there.
"""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import quote
from xml.sax.saxutils import quoteattr

import numpy as np
from PIL import Image

from sightline.data.decode import decode_values
from sightline.data.formats.marked import is_background, run_lengths
from sightline.errors import UsageError
from sightline.files.image_bytes import read_bytes
from sightline.files.whole import write_whole
from sightline.parts import DataSpec, TaskConfig
from sightline.tasks.config import ClassificationConfig, DetectionConfig, MaskConfig
from sightline.terminal import visible

LabelFormat = Literal["coco", "yolo", "labelme", "labelstudio", "cvat"]
FORMATS: tuple[str, ...] = get_args(LabelFormat)
_Row = Mapping[str, Any]


def refuse_format(form: str, task: TaskConfig) -> None:
    """Raise UsageError for a format that cannot hold what a task predicts."""
    if form not in FORMATS:
        raise UsageError(f"--format {form}: choose one of {', '.join(FORMATS)}")
    is_of_classes, is_of_masks = isinstance(task, ClassificationConfig), isinstance(task, MaskConfig)
    if not (is_of_classes or is_of_masks or isinstance(task, DetectionConfig)):
        raise UsageError(f"--format {form} is for images with classes, boxes or masks; leave it out")
    if is_of_classes and form in ("coco", "yolo"):
        raise UsageError(f"--format {form} has no classes of whole images; choose labelstudio, labelme or cvat")
    if is_of_masks and form == "yolo":
        raise UsageError("--format yolo has polygons, not masks; choose coco, labelstudio, labelme or cvat")


def refuse_names(form: str, files: Iterable[str], classes: Sequence[str]) -> None:
    """Raise UsageError for files that would become one, and for classes that a line cannot hold."""
    seen = {"classes": "classes.txt"} if form == "yolo" else {}
    for file in files if form in ("yolo", "labelme") else ():
        if (other := seen.setdefault(os.path.splitext(file)[0], file)) != file:
            raise UsageError(f"--format {form}: {other} and {file} would both become one file; predict them apart")
    if form == "yolo" and (wrong := [name for name in classes if name.splitlines() != [name]]):
        raise UsageError(f"--format yolo: the class {wrong[0]!r} does not fit on a line; choose another format")


def _attribute(text: str) -> str:
    """Return a text as an attribute of XML, which holds no control characters and no bytes that are not text."""
    return quoteattr(visible(text).encode("utf-8", "backslashreplace").decode())


def write_labels(form: str, document: Mapping[str, Any], folder: Path, spec: DataSpec) -> str:
    """Write the files of a format; return what was written, for the user."""
    return _WRITERS[form](document["files"], folder, spec)


def _write(folder: Path, name: str, text: Iterator[str]) -> None:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)

    def write(path: Path) -> None:
        with path.open("w", encoding="utf-8", errors="surrogateescape") as opened:
            opened.writelines(text)

    write_whole(file, write)


def _listed(entries: Iterator[Any]) -> Iterator[str]:
    """Yield a JSON list, entry by entry."""
    yield "["
    for number, entry in enumerate(entries):
        yield ("," if number else "") + "\n" + json.dumps(entry, allow_nan=False)
    yield "\n]"


def _masks(row: _Row, folder: Path, spec: DataSpec) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (class, pixels) of each class of a predicted mask but the background."""
    if "mask" not in row:
        return
    file = folder / row["mask"]
    data = read_bytes(file, row["mask"])
    stored = decode_values(data, file.name)
    if spec.coloured:  # 0xRRGGBB
        stored = stored.astype(np.int64) @ (1 << 16, 1 << 8, 1)
    values = spec.class_ids or tuple(range(len(spec.classes)))
    for name, value in zip(spec.classes, values, strict=True):
        if not is_background(name) and (inside := stored == value).any():
            yield name, inside


def _region(inside: np.ndarray) -> tuple[int, int, np.ndarray]:
    """Return left and top of the true pixels, and these."""
    rows, columns = np.flatnonzero(inside.any(1)), np.flatnonzero(inside.any(0))
    return int(columns[0]), int(rows[0]), inside[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


def _boxes(row: _Row) -> list[tuple[str, float, tuple[float, float, float, float]]]:
    return [(each["class"], each["score"], tuple(each["box"])) for each in row["found"] if "box" in each]


def _labels(row: _Row, spec: DataSpec) -> list[tuple[str, float]]:
    """Return the classes of a whole image with their scores: the best one, or all that were found of several."""
    found = [(each["class"], each["score"]) for each in row["found"] if "box" not in each and "score" in each]
    return found if spec.multi_label else found[:1]


# COCO: json that CVAT, FiftyOne and others import


def _coco(rows: Sequence[_Row], folder: Path, spec: DataSpec) -> str:
    numbers = {name: number for number, name in enumerate(_object_classes(spec), 1)}

    def annotations() -> Iterator[dict[str, Any]]:
        number = 0
        for image, row in enumerate(rows, 1):
            for name, score, box in _boxes(row):
                number += 1
                about = {"id": number, "image_id": image, "category_id": numbers[name], "bbox": list(box)}
                yield about | {"area": box[2] * box[3], "iscrowd": 0, "score": score}
            for name, inside in _masks(row, folder, spec):
                number += 1
                left, top, part = _region(inside)
                outline = {"size": list(inside.shape), "counts": run_lengths(inside.T.ravel())}
                about = {"id": number, "image_id": image, "category_id": numbers[name], "segmentation": outline}
                box = (left, top, part.shape[1], part.shape[0])
                yield about | {"bbox": list(box), "area": int(part.sum()), "iscrowd": 0}

    def text() -> Iterator[str]:
        images = (
            {"id": image, "file_name": row["file"], "width": row["width"], "height": row["height"]}
            for image, row in enumerate(rows, 1)
        )
        yield '{"images": '
        yield from _listed(images)
        yield ',\n"annotations": '
        yield from _listed(annotations())
        categories = [{"id": number, "name": name} for name, number in numbers.items()]
        yield f',\n"categories": {json.dumps(categories)}}}\n'

    _write(folder, "coco.json", text())
    return "coco.json"


def _object_classes(spec: DataSpec) -> tuple[str, ...]:
    return tuple(name for name in spec.classes if not is_background(name)) or spec.classes


# YOLO: a text for each image


def _yolo(rows: Sequence[_Row], folder: Path, spec: DataSpec) -> str:
    numbers = {name: number for number, name in enumerate(_object_classes(spec))}
    for row in rows:
        lines = []
        for name, _, (x, y, wide, tall) in _boxes(row):
            shares = ((x + wide / 2) / row["width"], (y + tall / 2) / row["height"])
            sizes = (wide / row["width"], tall / row["height"])
            lines.append(" ".join([str(numbers[name]), *(f"{share:.6f}" for share in (*shares, *sizes))]) + "\n")
        _write(folder, f"labels/{os.path.splitext(row['file'])[0]}.txt", iter(lines))
    _write(folder, "labels/classes.txt", (f"{name}\n" for name in numbers))
    return "labels/*.txt with classes.txt"


# LabelMe: a json for each image


def _labelme(rows: Sequence[_Row], folder: Path, spec: DataSpec) -> str:
    for row in rows:
        shapes: list[dict[str, Any]] = []
        common: dict[str, Any] = {"group_id": None, "description": "", "flags": {}}
        for name, score, (x, y, wide, tall) in _boxes(row):
            points = [[x, y], [x + wide, y + tall]]
            about = {"label": name, "points": points, "shape_type": "rectangle", **common}
            shapes.append(about | {"description": f"score {score:.4f}"})
        for name, inside in _masks(row, folder, spec):
            left, top, part = _region(inside)
            points = [[left, top], [left + part.shape[1] - 1, top + part.shape[0] - 1]]
            about = {"label": name, "points": points, "shape_type": "mask", **common}
            shapes.append(about | {"mask": base64.b64encode(_png(part)).decode()})
        chosen = {name for name, _ in _labels(row, spec)}
        is_of_classes = not shapes and bool(chosen)
        name = f"labelme/{os.path.splitext(row['file'])[0]}.json"
        beside = os.path.relpath(os.path.abspath(row["path"]), os.path.abspath((folder / name).parent))
        content = {
            "version": "5.5.0",
            "flags": {each: each in chosen for each in spec.classes} if is_of_classes else {},
            "shapes": shapes,
            "imagePath": beside,
            "imageData": None,
            "imageHeight": row["height"],
            "imageWidth": row["width"],
        }
        _write(folder, name, iter([json.dumps(content, indent=1, allow_nan=False), "\n"]))
    return "labelme/*.json"


def _png(inside: np.ndarray) -> bytes:
    packed = io.BytesIO()
    Image.fromarray(inside.astype(np.uint8)).save(packed, "PNG")
    return packed.getvalue()


# Label Studio: tasks with predictions


def _labelstudio(rows: Sequence[_Row], folder: Path, spec: DataSpec) -> str:
    def results(row: _Row) -> Iterator[dict[str, Any]]:
        width, height = row["width"], row["height"]
        about = {"from_name": "label", "to_name": "image", "original_width": width, "original_height": height}
        about["image_rotation"] = 0
        for number, (name, score, (x, y, wide, tall)) in enumerate(_boxes(row)):
            shares = {"x": 100 * x / width, "y": 100 * y / height, "width": 100 * wide / width}
            value = shares | {"height": 100 * tall / height, "rotation": 0, "rectanglelabels": [name]}
            yield {"id": f"box{number}", "type": "rectanglelabels", "value": value, "score": score, **about}
        for number, (name, inside) in enumerate(_masks(row, folder, spec)):
            value = {"format": "rle", "rle": brush(inside), "brushlabels": [name]}
            yield {"id": f"mask{number}", "type": "brushlabels", "value": value, **about}
        if labels := _labels(row, spec):
            value = {"choices": [name for name, _ in labels]}
            yield {"id": "choice", "type": "choices", "from_name": "label", "to_name": "image", "value": value}

    def tasks() -> Iterator[dict[str, Any]]:
        for row in rows:
            scores = [score for _, score, _ in _boxes(row)] + [score for _, score in _labels(row, spec)]
            mean = float(np.mean(scores)) if scores else 0.0
            predicted = {"model_version": "sightline", "score": mean, "result": list(results(row))}
            address = f"/data/local-files/?d={quote(os.fsencode(os.path.abspath(row['path']).lstrip('/')))}"
            yield {"data": {"image": address}, "predictions": [predicted]}

    _write(folder, "labelstudio.json", _listed(tasks()))
    return "labelstudio.json"


def brush(inside: np.ndarray) -> list[int]:
    """Return the bytes of a brush as Label Studio stores it, see sources/labelstudio.py: runs of up to 65536 values, of
    four channels a pixel."""
    values = np.repeat(inside.ravel(), 4)
    bits = [(len(values), 32), (7, 5), (15, 4), (15, 4), (15, 4), (15, 4)]  # lengths of 16 bits, values of 8
    value = False
    for length in run_lengths(values):
        for start in range(0, length, 2**16):
            bits += [(1, 1), (0, 2), (min(length - start, 2**16) - 1, 16), (255 if value else 0, 8)]
        value = not value
    text = "".join(f"{number:0{count}b}" for number, count in bits)
    text += "0" * (-len(text) % 8)
    return list(int(text, 2).to_bytes(len(text) // 8, "big"))


# CVAT: xml that `Upload annotations`, CVAT 1.1, takes


def _cvat(rows: Sequence[_Row], folder: Path, spec: DataSpec) -> str:
    def text() -> Iterator[str]:
        yield '<?xml version="1.0" encoding="utf-8"?>\n<annotations>\n  <version>1.1</version>\n'
        for number, row in enumerate(rows):
            size = f'width="{row["width"]}" height="{row["height"]}"'
            yield f'  <image id="{number}" name={_attribute(row["file"])} {size}>\n'
            for name, _, (x, y, wide, tall) in _boxes(row):
                edges = f'xtl="{x:.2f}" ytl="{y:.2f}" xbr="{x + wide:.2f}" ybr="{y + tall:.2f}"'
                yield f'    <box label={_attribute(name)} source="auto" occluded="0" {edges} z_order="0"></box>\n'
            for name, inside in _masks(row, folder, spec):
                left, top, part = _region(inside)
                rle = ", ".join(map(str, run_lengths(part.ravel())))
                place = f'left="{left}" top="{top}" width="{part.shape[1]}" height="{part.shape[0]}"'
                about = f'label={_attribute(name)} source="auto" occluded="0" rle="{rle}" {place} z_order="0"'
                yield f"    <mask {about}></mask>\n"
            for name, _ in _labels(row, spec):
                yield f'    <tag label={_attribute(name)} source="auto"></tag>\n'
            yield "  </image>\n"
        yield "</annotations>\n"

    _write(folder, "annotations.xml", text())
    return "annotations.xml"


_WRITERS: dict[str, Callable[[Sequence[_Row], Path, DataSpec], str]] = {
    "coco": _coco,
    "yolo": _yolo,
    "labelme": _labelme,
    "labelstudio": _labelstudio,
    "cvat": _cvat,
}
