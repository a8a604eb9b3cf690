"""Images with a mask in a file each: PATH/images with PATH/masks, X.jpg with X_mask.png, VOC's JPEGImages with
SegmentationClass, Roboflow's export; see mask_places.py.

Masks hold a number per pixel (grey or palette) or a colour. All masks of train and val are looked at once: 255 counts
for nothing, unless the values are even steps from 0 to 255. The rest are the classes, in order."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from sightline.data.contents import PathsBelow
from sightline.data.decode import decode_values, palette_of
from sightline.data.formats.class_table import find_table
from sightline.data.sources import DEFAULT_OPTIONS, IGNORED, SourceOptions, index_files
from sightline.data.sources.layouts import SPLITS, Place, Splits, no_test_split
from sightline.data.sources.mask_classes import MaskClasses, decide, table_folders, value_text
from sightline.data.sources.mask_images import MaskImages, Pixels, common_pixels, split_rows
from sightline.data.sources.mask_places import MaskFiles, layout_at
from sightline.data.sources.mask_places import detect as detect
from sightline.data.sources.mask_survey import Survey, packed_colours, survey
from sightline.errors import BadData, BadSample, first_of
from sightline.files.image_bytes import read_bytes
from sightline.parts import Split

_UNKNOWN = 256  # in a table of values
_REMEDY = "`sightline check` lists all of them"
_SKIP = "; --data.on-bad-sample skip leaves these images out"


@dataclass
class Found:
    """All that lies at a path: the files of each place, what is in them, and what is wrong."""

    layout: Splits
    files: dict[Place, MaskFiles] = field(default_factory=dict)
    surveys: dict[Place, Survey] = field(default_factory=dict)
    classes: MaskClasses | None = None
    problems: list[tuple[str, Split, str, str]] = field(default_factory=list)  # kind, split, where, text

    @classmethod
    def at(cls, path: str, options: SourceOptions, wanted: Iterable[Split], layout: Splits | None = None) -> Found:
        """Look at train and val, which decide the classes together, and at other wanted splits."""
        found = cls(layout or layout_at(path, options.mask_pattern))
        places: dict[Place, Split] = {}
        for split in (*SPLITS, *wanted):
            place = found.layout.place(split) if split in wanted else getattr(found.layout, split)
            if place:
                places.setdefault(place, split)
        for place in places:
            key = (place, options.mask_pattern)
            files = options.once(("mask files", *key), functools.partial(MaskFiles.at, *key))
            found.files[place] = files
            found.surveys[place] = options.once(("mask survey", *key), functools.partial(survey, files))
            found._add_problems(place, places[place])
        deciding = [place for place in (found.layout.train, found.layout.val) if place] or list(places)
        found._decide(path, options, deciding, places)
        return found

    def _add_problems(self, place: Place, split: Split) -> None:
        files, seen = self.files[place], self.surveys[place]
        if not any(files.pairs.values()):
            text = (
                f"none of the {len(files.pairs)} images has a mask in {files.masks}; give --data.mask-pattern if the "
            )
            self.problems.append(("no masks", split, str(files.images), text + "names differ otherwise"))
            return
        self.problems += [(kind, split, where, text) for kind, where, text in files.problems]
        for image, mask in files.pairs.items():
            if not mask:
                text = f"no mask in {files.masks} has its name"
                self.problems.append(("image without a mask", split, f"{files.images.name}/{image}", text))
        masks = [mask for mask in files.pairs.values() if mask]
        for row, fault in enumerate(seen.faults.all()):
            if fault:
                kind, _, text = fault.decode("utf-8", "surrogateescape").partition(": ")
                self.problems.append((kind, split, f"{files.masks.name}/{masks[row]}", text))

    def _decide(self, path: str, options: SourceOptions, deciding: list[Place], places: dict[Place, Split]) -> None:
        surveys = [self.surveys[place] for place in deciding]
        if not any(len(each.values) for each in surveys):
            return
        table = find_table(table_folders([(self.files[at].masks, self.files[at].images) for at in deciding]))
        self.classes = decide(surveys, table, options.ignore)
        if self.classes.problem:
            kind, text = self.classes.problem
            where = [
                f"{at.images.name}: {masks}" for at in deciding if (masks := self._masks_with(at, self.classes.unknown))
            ]
            text += f" ({'; '.join(where)})" if where else ""
            self.problems.append((kind, places[deciding[0]], path, text))
            return
        known = [*self.classes.values, *self.classes.ignored]
        for place in places.keys() - set(deciding):
            there = np.unique(self._values_in(place))
            if unknown := there[~np.isin(there, known)].tolist():
                what = "colours" if self.classes.is_coloured else "values"
                shown = first_of([value_text(value, self.classes.is_coloured) for value in unknown])
                text = (
                    f"has the {what} {shown}, which no mask of train and val has ({self._masks_with(place, unknown)})"
                )
                self.problems.append(("unknown values", places[place], str(self.files[place].masks), text))

    def _values_in(self, place: Place) -> np.ndarray:
        seen = self.surveys[place]
        return seen.colours if self.classes and self.classes.is_coloured else seen.values

    def _masks_with(self, place: Place, values: Sequence[int]) -> str:
        """Return the first masks of a place that hold some of these values."""
        masks = [mask for mask in self.files[place].pairs.values() if mask]
        found = np.flatnonzero(np.isin(self._values_in(place), values))
        rows = np.unique(np.searchsorted(self.surveys[place].ends, found, "right"))
        return first_of([masks[row] for row in rows.tolist()], 2)


# Problems of single images, which may be skipped; without them there is no class, or no pairing, to rely on.
OF_ONE = (
    *("image without a mask", "mask without an image", "missing image"),
    *("unreadable", "unreadable image", "size differs"),
)


def open_masks(path: str, split: Split, options: SourceOptions = DEFAULT_OPTIONS) -> MaskFileImages:
    """Look at all masks and list the images of a split."""
    return _opened(Found.at(path, options, [split]), path, split, options)


def open_named(layout: Splits, path: str, split: Split, options: SourceOptions) -> MaskFileImages:
    """The same of images whose masks a file of each place names."""
    source = _opened(Found.at(path, options, [split], layout), path, split, options)
    source.notes = ("masks named by Hugging Face's metadata", *source.notes)
    return source


def _opened(found: Found, path: str, split: Split, options: SourceOptions) -> MaskFileImages:
    place = found.layout.place(split)
    if split == "test" and not any(found.files[place].pairs.values()):
        raise no_test_split("masks", f"none of the images in {found.files[place].images} has a mask")
    problems = [each for each in found.problems if not (options.skips_missing and each[0] in OF_ONE)]
    if problems or found.classes is None:
        skip = _SKIP if not options.keeps_all and {kind for kind, *_ in problems} <= set(OF_ONE) else ""
        raise BadData(f"{path}: {_in_one(problems, path)}; {_REMEDY}{skip}")
    return MaskFileImages(found, found.classes, split, options, path)


def _in_one(problems: Sequence[tuple[str, Split, str, str]], path: str) -> str:
    """Say all that is wrong, by kind with the first names."""
    kinds: dict[str, list[tuple[str, str]]] = {}
    for kind, _, where, text in problems:
        kinds.setdefault(kind, []).append((where, text))
    said = []
    for kind, each in kinds.items():
        where, text = each[0]
        first = text if where == path else f"{where}: {text}"
        others = first_of([name for name, _ in each[1:]])
        said.append(f"{kind} ({len(each)}): {first}; also {others}" if others else f"{kind}: {first}")
    return "; ".join(said)


class MaskFileImages(MaskImages):
    """Images of one folder and their masks, of the same or another folder."""

    def __init__(self, found: Found, classes: MaskClasses, split: Split, options: SourceOptions, path: str):
        place = found.layout.place(split)
        files, seen = found.files[place], found.surveys[place]
        images = [name.encode("utf-8", "surrogateescape") for name in files.pairs]
        rows, self.held_out = split_rows(images, found.layout, split, options, path)
        all_masks = list(files.pairs.values())
        seen_row = np.cumsum([bool(mask) for mask in all_masks]) - 1
        has_mask = np.asarray([bool(mask) for mask in all_masks], bool)
        sizes = np.zeros((len(images), 2), np.int64)
        sizes[has_mask] = np.stack([seen.heights, seen.widths], 1)[seen_row[has_mask]]
        names = index_files.Names.of([images[row] for row in rows])
        super().__init__("masks", place, names, sizes[rows], _pixels(found))
        faults = seen.faults.all()
        texts = [faults[seen_row[row]] if has_mask[row] else b"there is none" for row in rows]
        self.faults = index_files.Names.of(texts)
        mask_folder = str(files.masks.absolute()).encode("utf-8", "surrogateescape")
        masks = [mask_folder + b"/" + all_masks[row].encode("utf-8", "surrogateescape") for row in rows]
        self.files = PathsBelow(place.images, index_files.Names.of([*names.all(), *masks]))
        self.layout = found.layout
        self.classes, self.values = classes.names, classes.values
        self.is_coloured, self.unused = classes.is_coloured, classes.ignored
        self.notes = classes.said
        if files.left_out:
            self.notes += (f"{files.left_out} images without a mask left out",)
        listed = [(files.listings[0].files, files.pairs), (files.listings[1].files, all_masks)]
        sizes_in_bytes = [[listing[name][0] if name in listing else -1 for name in each] for listing, each in listed]
        self.fingerprint = index_files.digest(
            *("masks", 1, names.all(), self.values, self.classes, self.unused),
            *([each[row] for row in rows] for each in sizes_in_bytes),
        )

    def size(self, index: int) -> tuple[int, int]:
        """Return (height, width); BadSample of an image without a mask of its size."""
        if fault := self.faults[index]:
            raise BadSample(self.name(index), f"its mask is not usable: {fault}")
        return super().size(index)

    def mask(self, index: int) -> np.ndarray:
        name, size = self.name(index), self.size(index)
        path = self.files[len(self) + index]
        data = read_bytes(path, name)
        indices = indices_in(data, path.name, self.values, self.unused, self.is_coloured)
        if indices is None:
            raise BadSample(name, f"{path} has other values than when it was indexed; start again")
        if indices.shape != size:
            raise BadSample(name, f"{path} has another size than when it was indexed; start again")
        return indices


def indices_in(
    data: bytes, name: str, known: tuple[int, ...], ignored: tuple[int, ...], is_coloured: bool
) -> np.ndarray | None:
    """Return the index of the class of each pixel of a mask, uint8; None if it has other values."""
    values = decode_values(data, name)
    if is_coloured:
        values = _colours(values, data, name)
    elif values.ndim == 3:  # grey that was stored as RGB
        values = values[..., 0]
    table = _table(known, ignored)
    if int(values.max(initial=0)) >= len(table) or (indices := table[values]).max(initial=0) == _UNKNOWN:
        return None
    return indices.astype(np.uint8)


def _colours(values: np.ndarray, data: bytes, name: str) -> np.ndarray:
    """Return the colours of a mask that is read by its colours, whatever it stores."""
    if values.ndim == 3:
        return packed_colours(values)
    palette = palette_of(data, name)
    if palette is None:
        return values.astype(np.int64) * 0x010101
    return packed_colours(palette)[np.minimum(values, len(palette) - 1)]


@functools.lru_cache(maxsize=4)
def _table(values: tuple[int, ...], ignored: tuple[int, ...]) -> np.ndarray:
    """Return the index of the class of each value up to the largest; that of a colour takes 32 MiB."""
    table = np.full(max([*values, *ignored, 255]) + 1, _UNKNOWN, np.uint16)
    table[list(values)] = np.arange(len(values))
    table[list(ignored)] = IGNORED
    return table


def _pixels(found: Found) -> Pixels:
    """Return the form of the images of all splits together."""
    files: list[Path] = []
    forms = [np.zeros((0, 2), np.int64)]
    for place, seen in found.surveys.items():
        good = [not fault for fault in seen.faults.all()]
        images = [name for name, mask in found.files[place].pairs.items() if mask]
        files += [found.files[place].images / name for name, is_good in zip(images, good, strict=True) if is_good]
        forms.append(np.stack([seen.channels, seen.bits], 1)[good])
    return common_pixels(files, np.concatenate(forms))
