"""Folders of predictions: their drawings have the answer painted in, so they are never the images of a data set."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sightline.errors import BadData
from sightline.files.our_folders import is_result
from sightline.files.typed_json import read_json

_DOCUMENT = "predictions.json"
_MOST_BYTES = 2**30
_EXPORTS = {"coco": "coco.json", "cvat": "annotations.xml", "labelme": "labelme", "yolo": "labels"}  # of --format


def refuse_drawings(places: Iterable[Path | str], files: Sequence[Path]) -> None:
    """Raise BadData if one of these files is a drawing of a folder of predictions that is, or is above, a place."""
    folders = {folder for place in places for folder in _and_above(place)}
    for folder in sorted(filter(_holds_predictions, folders)):
        drawings = {os.path.join(folder, row["picture"]) for row in _rows(folder) if "picture" in row}
        if drawings and any(os.path.abspath(file) in drawings for file in files):
            raise BadData(said_of(folder))


def said_of(path: Path | str) -> str:
    """Say what a folder of predictions is and how to train on what it holds; "" for other folders."""
    folder = os.path.abspath(path)
    if not _holds_predictions(folder):
        return ""
    said = f"{folder} is a folder of predictions: images in it are drawings that show the answer; "
    kind = next((kind for kind, name in _EXPORTS.items() if os.path.exists(os.path.join(folder, name))), "")
    if not kind:
        return said + "give the folder of the original images"
    images = next((os.path.abspath(row["path"].removesuffix(row["file"])) for row in _rows(folder)), "")
    images = images if os.path.isdir(images) else "FOLDER"
    return (
        f"{said}to train on the predictions, give a .yaml file as --data.path with the lines `kind: {kind}` and "
        f"`train: {{images: {images}, labels: {os.path.join(folder, _EXPORTS[kind])}}}` (docs/howto/predict.md)"
    )


def _and_above(place: Path | str) -> list[str]:
    whole = Path(os.path.abspath(place))
    return [str(folder) for folder in (whole, *whole.parents)]


def _holds_predictions(folder: str) -> bool:
    return os.path.isfile(os.path.join(folder, _DOCUMENT)) and is_result(folder, depth=1)


def _rows(folder: str) -> list[dict[str, Any]]:
    """Return the predicted files; none of a document that cannot be read."""
    names = ("file", "path", "picture")
    try:
        rows = read_json(Path(folder, _DOCUMENT), _MOST_BYTES)["files"]
        texts = [{name: row[name] for name in names if name in row} for row in rows]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [row for row in texts if {"file", "path"} <= row.keys() and all(isinstance(v, str) for v in row.values())]
