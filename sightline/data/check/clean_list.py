"""`sightline check --write FILE.csv`: a table of the samples that are worth training on, which --data takes."""

from __future__ import annotations

import codecs
import csv
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sightline.data.sources import Source
from sightline.data.sources.layouts import NAMES, TEST
from sightline.errors import BadData, UsageError, disk_error
from sightline.files.whole import replaced
from sightline.parts import Split

if TYPE_CHECKING:
    from sightline.data.check.images import SeenSample

_KEPT_IN: tuple[Split, ...] = ("test", "val", "train")  # of equal images in several splits, that of the first is kept
_WRITTEN: tuple[Split, ...] = ("train", "val", "test")
_READ_BY_A_FOLDER = {"labels", *NAMES["train"], *NAMES["val"], *TEST}  # names of tables
SOLVED = {"unreadable", "label out of range", "class without training"} | {
    f"same image in train and {split}" for split in ("val", "test")
}  # kinds of problems that the list does not have


class _Row(NamedTuple):
    split: Split
    at: int
    labels: tuple[str, ...]


def refuse_place(path: Path) -> None:
    """Raise UsageError unless a list may be written here: it replaces nothing, and no folder is read by it."""
    if path.suffix.lower() != ".csv":
        raise UsageError(f"--write {path}: expected a name that ends in .csv, e.g. clean.csv")
    if path.stem.lower() in _READ_BY_A_FOLDER:
        raise UsageError(f"--write {path}: a folder with {path.name} is read by it; use another name, e.g. clean.csv")
    if path.exists():
        raise UsageError(f"--write {path}: exists; delete it, or use another name")
    if not path.parent.is_dir():
        raise UsageError(f"--write {path}: there is no folder {path.parent}; make it first")


class CleanList:
    """The samples of all splits that were looked at, without those that cannot or should not be used."""

    def __init__(self, sources: Mapping[Split, Source], seen: Mapping[Split, Sequence[SeenSample]]):
        self._sources = sources
        self._seen = seen
        self._is_multi_label = any(source.is_multi_label for source in sources.values())

    def write(self, path: Path) -> str:
        """Write the table and return a line about it; BadData if nothing is left to train on."""
        refuse_place(path)
        rows, left_out = self._rows()
        if not any(row.split == "train" for row in rows):
            raise BadData(f"{path} was not written: no training image is left")
        folder = os.path.abspath(path.parent)
        roots = {split: _as_seen_from(folder, source) for split, source in self._sources.items()}
        # A table has several labels per image if a cell has; one label each is written so that it stays so.
        mark = ";" if self._is_multi_label and all(len(row.labels) == 1 for row in rows) else ""
        try:
            with replaced(path) as file:
                writer = csv.writer(codecs.getwriter("utf-8")(file))
                writer.writerow(("file", "label", "split"))
                for row in rows:
                    name = os.path.join(roots[row.split], self._sources[row.split].name(row.at))
                    writer.writerow((name, _cell(row.labels) + mark, row.split))
        except OSError as error:
            raise disk_error(path, error) from error
        total = sum(map(len, self._seen.values()))
        said = ", ".join(f"{count} {what}" for what, count in left_out.items())
        return f"wrote {path}: {len(rows)} of {total} images" + (f"; left out: {said}" if said else "")

    def _rows(self) -> tuple[list[_Row], Counter[str]]:
        """Return the rows in the order of the splits, and how many samples were left out for which reason."""
        left_out: Counter[str] = Counter()
        usable = {split: self._usable(split, left_out) for split in _KEPT_IN if split in self._sources}
        labels: dict[bytes, tuple[str, ...] | None] = {}  # None: contradictory
        for split, some in usable.items():
            for row in some:
                digest = self._seen[split][row.at].digest
                if labels.setdefault(digest, row.labels) != row.labels:
                    labels[digest] = None
        kept_in: dict[bytes, Split] = {}
        for split, some in usable.items():
            kept = []
            for row in some:
                digest = self._seen[split][row.at].digest
                if labels[digest] is None:
                    left_out["identical with different labels"] += 1
                elif digest in kept_in:
                    where = "each other" if kept_in[digest] == split else f"one in {kept_in[digest]}"
                    left_out[f"identical to {where}"] += 1
                else:
                    kept_in[digest] = split
                    kept.append(row)
            usable[split] = kept
        known = {name for row in usable.get("train", ()) for name in row.labels}
        rows = []
        for split in (split for split in _WRITTEN if split in usable):
            some = [row for row in usable[split] if known.issuperset(row.labels)]
            left_out["of a class without training images"] += len(usable[split]) - len(some)
            rows += some
        return rows, +left_out

    def _usable(self, split: Split, left_out: Counter[str]) -> list[_Row]:
        """Return the samples of a split that can be read and have labels."""
        source, rows = self._sources[split], []
        for index, seen in enumerate(self._seen[split]):
            are_known = all(0 <= label < len(source.classes) for label in seen.labels)
            if seen.bad:
                left_out["unreadable"] += 1
            elif not are_known or not (seen.labels or self._is_multi_label):
                left_out["without a class"] += 1
            elif not _can_be_written(source.name(index)):
                left_out["with a name that is not text"] += 1
            else:
                rows.append(_Row(split, index, tuple(source.classes[label] for label in seen.labels)))
        return rows


def _as_seen_from(folder: str, source: Source) -> str:
    """Return the folder of a source's files: relative to another one that it lies in, else absolute."""
    root = os.path.abspath(getattr(source, "root", ""))
    return os.path.relpath(root, folder) if f"{root}/".startswith(f"{folder.rstrip('/')}/") else root


def _can_be_written(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return name == name.strip()


def _cell(labels: Sequence[str]) -> str:
    """Return labels as one cell: separated by ;, or as a list if a name holds what separates names."""
    if not any(re.search(r"[;|]|^\[", name) for name in labels):
        return ";".join(labels)
    quoted = (re.sub(r'(["\\])', r"\\\1", name) for name in labels)
    return "[" + ", ".join(f'"{name}"' for name in quoted) + "]"
