"""The classes of masks, from the values in them: which values are classes, which count for nothing, and their names."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sightline.data.formats.class_table import ClassTable, colour_text
from sightline.data.sources import IGNORED
from sightline.data.sources.layouts import NAMES, TEST
from sightline.data.sources.mask_images import MOST_CLASSES
from sightline.data.sources.mask_survey import COLOURED, NO_COLOUR, PALETTE, Survey
from sightline.errors import UsageError, first_of

NONE = "none"  # instead of what to ignore: everything is a class
_BINARY = {0, 255}
_MOST_GREYS = 16  # more even steps than that are a photo's
_VOID = 0xE0E0C0  # the colour of Pascal VOC's borders, which are 255 in its palette
_SHOWN = 8  # values
_MOST_BELOW = 2  # folders between that of all data and one of masks
_SPLITS = {*NAMES["train"], *NAMES["val"], *TEST}
_MANY = 64  # values; so many that hold few pixels are edges
_SOME, _BRIGHT = 16, 200  # values between 0 and 255, and the largest: classes are rarely numbered so
_EDGES_SHARE = 0.25  # of all pixels
_MOST_OF_ALL = 0.99  # of the pixels
_PER_CLASS = 8  # values for each that holds many pixels: more are edges


@dataclass(frozen=True)
class MaskClasses:
    """What the values of masks mean."""

    values: tuple[int, ...]  # of each class: its number or colour
    names: tuple[str, ...]
    is_coloured: bool
    ignored: tuple[int, ...]  # values that count for nothing
    said: tuple[str, ...]
    problem: tuple[str, str] | None  # kind, text: why these are no classes
    unknown: tuple[int, ...]  # values that the table lacks


def decide(surveys: Sequence[Survey], table: ClassTable | None, ignore: str) -> MaskClasses:
    """Return the classes of masks that were looked at together."""
    is_coloured, table = _coding(surveys, table)
    pixels = pixels_per_value(surveys, is_coloured)
    names = dict(table.names) if table else {}
    ignored = _ignored(ignore, set(pixels), names, is_coloured)
    found = sorted(set(pixels) - ignored)
    names = _in_order(names, found) if table and not table.is_coloured else names
    listed = [value for value in names if value not in ignored]
    unknown = [value for value in found if value not in names]
    values = listed + unknown if is_coloured else sorted({*listed, *unknown})
    shown = {value: names.get(value) or value_text(value, is_coloured) for value in values}
    return MaskClasses(
        tuple(values),
        tuple(shown.values()),
        is_coloured,
        tuple(sorted(ignored)),
        tuple(_said(values, sorted(ignored & set(pixels)), is_coloured, table)),
        _problem(pixels, values, unknown, is_coloured, table, ignored),
        tuple(unknown) if table else (),
    )


def pixels_per_value(surveys: Sequence[Survey], is_coloured: bool) -> dict[int, int]:
    """Return how many pixels have each value."""
    values = np.concatenate([each.colours if is_coloured else each.values for each in surveys])
    found, place = np.unique(values, return_inverse=True)
    counts = np.bincount(place, np.concatenate([each.counts for each in surveys]), len(found))
    return dict(zip(found.tolist(), counts.astype(np.int64).tolist(), strict=True))


def _coding(surveys: Sequence[Survey], table: ClassTable | None) -> tuple[bool, ClassTable | None]:
    """Return whether colours are the classes, and the table if it can name them."""
    kinds = np.concatenate([each.kinds for each in surveys])
    if table and table.is_coloured:
        if (kinds != COLOURED).all():
            numbers, colours = (set(pixels_per_value(surveys, each)) - {IGNORED} for each in (False, True))
            if not colours - {_VOID} <= set(table.names) and max(numbers, default=0) < len(table.names):
                return False, ClassTable(table.file, dict(enumerate(table.names.values())), False)
        return True, table
    if (kinds == COLOURED).any() or ((kinds == PALETTE).any() and not _share_a_palette(surveys)):
        return True, None
    return False, table


def _share_a_palette(surveys: Sequence[Survey]) -> bool:
    """Return whether each number has one colour in all masks with a palette."""
    seen: set[tuple[int, int]] = set()
    for each in surveys:
        kinds = np.repeat(each.kinds, np.diff(each.ends, prepend=0))
        is_indexed = kinds == PALETTE
        seen |= set(zip(each.values[is_indexed].tolist(), each.colours[is_indexed].tolist(), strict=True))
    return len({number for number, _ in seen}) == len(seen)


def _ignored(ignore: str, found: set[int], names: Mapping[int, str], is_coloured: bool) -> set[int]:
    """Return the values that count for nothing: those that are named; else 255, unless the values are greys from black
    to white as people draw classes, and VOC's colour of borders; no value that a table names."""
    if ignore == NONE:
        return set()
    if not ignore:
        value = _VOID if is_coloured else IGNORED
        are_classes = found == {value} or (not is_coloured and _are_greys(sorted(found)))
        return {value} if value in found and value not in names and not are_classes else set()
    chosen = set()
    by_name = {name: value for value, name in names.items()}
    for word in filter(None, (each.strip() for each in ignore.split(","))):
        colour = re.fullmatch("#([0-9a-fA-F]{6})", word)
        if word in by_name:
            chosen.add(by_name[word])
        elif colour and is_coloured:
            chosen.add(int(colour[1], 16))
        elif re.fullmatch(r"\d{1,5}", word) and not is_coloured:
            chosen.add(int(word))
        else:
            there = [*by_name] or [value_text(value, is_coloured) for value in sorted(found)]
            raise UsageError(f"--data.ignore {word}: the masks have {first_of(there, _SHOWN)}; none: all are classes")
    return chosen


def _are_greys(values: Sequence[int]) -> bool:
    """Return whether a few values lie evenly between 0 and 255: 0 and 255; 0, 128 and 255; 0, 85, 170 and 255."""
    steps = np.linspace(0, IGNORED, len(values))
    return len(values) <= _MOST_GREYS and bool((np.abs(values - steps) <= 1).all())


def _in_order(names: Mapping[int, str], found: Sequence[int]) -> dict[int, str]:
    """Return names by value; a list of as many names as there are values names them in their order."""
    is_list = list(names) == list(range(len(names)))
    if is_list and len(found) == len(names) and not set(found) <= set(names):
        return dict(zip(found, names.values(), strict=True))
    return dict(names)


def _said(values: Sequence[int], ignored: Sequence[int], is_coloured: bool, table: ClassTable | None) -> list[str]:
    """Return what to tell the user about the values."""
    said = []
    shown = ", ".join(value_text(value, is_coloured) for value in values[:_SHOWN]) + (
        ", ..." if len(values) > _SHOWN else ""
    )
    if is_coloured and not table:
        said.append(f"colours {shown}")
    elif not is_coloured and list(values) != list(range(len(values))):
        said.append(f"values {shown} renumbered")
    if ignored:
        said.append(f"{first_of([value_text(value, is_coloured) for value in ignored])} ignored")
    return [*said, f"names from {table.file.name}"] if table else said


def _problem(
    pixels: Mapping[int, int],
    values: Sequence[int],
    unknown: Sequence[int],
    is_coloured: bool,
    table: ClassTable | None,
    ignored: set[int],
) -> tuple[str, str] | None:
    what = "colours" if is_coloured else "values"
    shown = first_of([value_text(value, is_coloured) for value in unknown], _SHOWN)
    if is_coloured and NO_COLOUR in pixels:
        return "mixed masks", "some masks have colours, others numbers above 255; store all alike"
    if table and is_coloured and unknown:
        return (
            "unknown colours",
            f"{table.file} lacks the {what} {shown}; add them, or rename the file if it is not about these masks",
        )
    is_named = table is not None and not unknown
    if not is_named and _has_soft_edges(pixels, ignored, is_coloured):
        return "soft edges", (
            f"the masks hold {len(values)} {what} ({shown}), most of them in few pixels, as resized masks and photos "
            "do; resize masks with nearest neighbour and store them as PNG, or name all classes in a file classes.txt"
        )
    if len(values) > MOST_CLASSES:
        told = f"{table.file} names" if table and is_named else "the masks hold"
        shown = first_of([value_text(value, is_coloured) for value in values], _SHOWN)
        return "too many classes", f"{told} {len(values)} {what} ({shown}), at most {MOST_CLASSES} are possible"
    if len(values) < 2:
        return (
            "too few classes",
            f"the masks hold {first_of([*map(str, values)]) or 'nothing'} alone, 2 classes are needed",
        )
    return None


def _has_soft_edges(pixels: Mapping[int, int], ignored: set[int], is_coloured: bool) -> bool:
    """Return whether most values lie between others: 0 and 255 with some up to white, or many that hold few pixels."""
    total = sum(pixels.values())
    between = {value: count for value, count in pixels.items() if value not in _BINARY}
    if not is_coloured and set(pixels) >= _BINARY and len(between) > _SOME and _BRIGHT < max(between) < IGNORED:
        return len(between) > _MANY or sum(between.values()) < _EDGES_SHARE * total
    counts = np.sort(np.asarray([count for value, count in pixels.items() if value not in ignored], np.int64))[::-1]
    most = 1 + int(np.searchsorted(np.cumsum(counts), _MOST_OF_ALL * counts.sum()))
    return len(counts) > _MANY and len(counts) > _PER_CLASS * most


def value_text(value: int, is_coloured: bool) -> str:
    """Return a value as people write it."""
    return colour_text(value) if is_coloured else str(value)


def table_folders(places: Sequence[tuple[Path, Path]]) -> list[Path]:
    """Return where a file with the names of the classes may lie: in the folders of the images and masks, in the one of
    both, and above those of the splits. A run finds it again from what it keeps of its data."""
    found = []
    for masks, images in places:
        both = Path(os.path.commonpath([masks.absolute(), images.absolute()]))
        found += [masks, images]
        if len(masks.absolute().parts) - len(both.parts) <= _MOST_BELOW:
            found += [both, both.parent] if both.name.lower() in _SPLITS else [both]
    return list(dict.fromkeys(found))
