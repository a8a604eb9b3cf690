"""Data that no source reads, recognised so that an error can name the tool that made them and the way out."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from sightline.data.sources.layouts import subfolders
from sightline.files.regular import regular

_HEAD = 2**16
_LOOKED_AT = 50  # entries of a folder
_DICOM = b"DICM"  # behind 128 bytes of anything


def said(path: Path) -> str:
    """Say which tool's data lie at a path and what to do, for an error; "" if that is not known."""
    places = [path, *(path / each for each in subfolders(path)[:_LOOKED_AT])] if path.is_dir() else [path.parent]
    for place in places:
        if found := _in_folder(place, None if path.is_dir() else path.name):
            return found
    return ""


def _in_folder(folder: Path, only: str | None) -> str:
    names = _names(folder)
    if (folder / "dataset_description.json").is_file() and b'"BIDSVersion"' in _head(
        folder / "dataset_description.json"
    ):
        return (
            f"a BIDS dataset ({folder / 'dataset_description.json'}), which is not read; put its images into imagesTr/ "
            "and their labels into labelsTr/, then `sightline prepare decathlon --source DIR --out PREPARED`"
        )
    for name in [only] if only else names[:_LOOKED_AT]:
        head = _head(folder / name)
        for looks, text in _KNOWN:
            if looks(name.lower(), head):
                return text.format(folder / name)
    return ""


def _names(folder: Path) -> list[str]:
    try:
        return sorted(each for each in os.listdir(folder) if not each.startswith("."))
    except OSError:
        return []


def _head(file: Path) -> bytes:
    try:
        with open(file, "rb", opener=regular) as opened:
            return opened.read(_HEAD)
    except OSError:
        return b""


def _has(*keys: str) -> Callable[[str, bytes], bool]:
    """Return whether a json file has all of these keys near its beginning."""
    wanted = [re.compile(rb'"' + re.escape(key.encode()) + rb'"\s*:') for key in keys]
    return lambda name, head: name.endswith((".json", ".ndjson", ".jsonl")) and all(w.search(head) for w in wanted)


def _columns(*columns: str) -> Callable[[str, bytes], bool]:
    """Return whether a table has these columns."""

    def looks(name: str, head: bytes) -> bool:
        first = head.partition(b"\n")[0].decode("utf-8", "replace").lower().replace('"', "").lstrip("#")
        return name.endswith(".csv") and {*columns} <= {each.strip() for each in first.split(",")}

    return looks


_KNOWN: tuple[tuple[Callable[[str, bytes], bool], str], ...] = (
    (
        lambda name, head: head[128:132] == _DICOM or name.endswith(".dcm"),
        "DICOM ({}), which is not read; convert each series to NIfTI, e.g. with dcm2niix, or slices to PNG",
    ),
    (
        _columns("filename", "region_shape_attributes", "region_attributes"),
        "VIA's csv ({}), which is not read; in VIA choose Annotation, Export Annotations (as json)",
    ),
    (
        lambda name, head: name.endswith(".csv") and b"CSV_HEADER = metadata_id" in head,
        "the csv of VIA 3 ({}), which is not read; in VIA 3 choose Export, COCO format",
    ),
    (
        _has("data_row", "projects"),
        "an export of Labelbox ({}), which is not read; convert it to COCO with Labelbox's converter (labelbox[data])",
    ),
    (
        _has("classTitle", "geometryType"),
        "an export of Supervisely ({}), which is not read; in Supervisely run the app Export to COCO",
    ),
    (
        _has("item", "annotations", "slots"),
        "an export of V7 Darwin ({}), which is not read; in V7 choose the export format COCO",
    ),
    (
        lambda name, head: name.endswith(".json") and b'"_via_' not in head and _is_createml(head),
        "an export of Create ML ({}), which is not read; in the tool that wrote it choose COCO or YOLO",
    ),
    (
        lambda name, head: name.endswith((".h5", ".hdf5")) and head.startswith(b"\x89HDF"),
        "an HDF5 file ({}), which is not read; write its images into class folders, or into a .tar as "
        "docs/reference/data.md shows",
    ),
    (
        lambda name, head: name.endswith((".mdb", ".lmdb")) or head[16:20] == b"\xde\xc0\xef\xbe",
        "an LMDB ({}), which is not read; write its images into a .tar as docs/reference/data.md shows",
    ),
    (
        lambda name, head: name.endswith((".tar.gz", ".tgz", ".zip", ".7z", ".rar")),
        "an archive ({}), which is not read in place; unpack it and give the folder",
    ),
)


def _is_createml(head: bytes) -> bool:
    return all(key in head for key in (b'"image"', b'"annotations"', b'"coordinates"'))
