"""`sightline check` for images with masks, in files or drawn from outlines: what is wrong with any pair, how many
images and pixels each class has, and images that are in two splits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from sightline.data.check.images import Look, Report, add_twins, how_read, same_bytes, spread
from sightline.data.decode import decode_rgb, read_header
from sightline.data.sources import IGNORED, MaskSource, SourceOptions, kind_of_masks, open_masks
from sightline.data.sources.layouts import SPLITS, NoTestSplit
from sightline.data.sources.masks import Found
from sightline.errors import BadData, BadSample
from sightline.parts import Split
from sightline.terminal.progress import Progress


class SeenPair(NamedTuple):
    """An image and its mask: the size, a digest of the image's bytes, the pixels of each value, and what is wrong."""

    height: int
    width: int
    digest: bytes
    pixels: np.ndarray  # (256,) by the index of the class, the last those that count for nothing
    bad: str


def check_masks(
    path: str, kind: str, options: SourceOptions, classes: int, decode: bool, processes: int, progress: Progress
) -> Report:
    """Check all splits of images with masks; `classes` is what the recipe declares, or 0."""
    report = Report()
    kind = kind_of_masks(kind, path, options)
    options = replace(options, listed={})  # both splits share what is read
    if kind == "masks":
        _check_pairs(path, options, report)
    look = Look(decode, processes, progress)
    sources = _open_all(path, kind, options, report)
    seen = {split: look.at(_look_at, source, len(source), split) for split, source in sources.items()}
    for split, source in sources.items():
        _describe(split, source, seen[split], report)
    _check_together(sources, seen, report)
    found = next((len(source.classes) for source in sources.values()), 0)
    if classes and found and classes != found:
        report.add("number of classes", "train", path, f"{found} classes, the recipe declares {classes}")
    return report


def _check_pairs(path: str, options: SourceOptions, report: Report) -> None:
    """Report all that is wrong with the files of masks."""
    try:
        found = Found.at(path, options, [])
        if found.layout.own_test:
            found = Found.at(path, options, ["test"])
    except BadData as error:
        report.add("cannot be opened", "train", path, str(error))
        return
    for kind, split, where, text in found.problems:
        report.add(kind, split, where, text)


def _open_all(path: str, kind: str, options: SourceOptions, report: Report) -> dict[Split, MaskSource]:
    """Open the splits that can be opened, with the samples that are wrong among them."""
    sources: dict[Split, MaskSource] = {}
    lenient = replace(options, skips_missing=True)
    for split in SPLITS:
        try:
            sources[split] = open_masks(kind, path, split, lenient)
        except BadData as error:
            if not report.problems:  # which may be its reason
                report.add("cannot be opened", split, path, str(error))
    try:
        test = open_masks(kind, path, "test", lenient)
        if test.is_own_test(sources.get("val")):
            sources["test"] = test
    except NoTestSplit:
        pass
    except BadData as error:
        if not report.problems:
            report.add("cannot be opened", "test", path, str(error))
    return sources


def _look_at(shared: tuple[MaskSource, bool], job: tuple[int, int]) -> list[SeenPair]:
    source, decode = shared
    return [_look_at_one(source, index, decode) for index in range(*job)]


def _look_at_one(source: MaskSource, index: int, decode: bool) -> SeenPair:
    digest, pixels = b"", np.zeros(IGNORED + 1, np.int64)
    try:
        image = source.image(index)
        digest = hashlib.blake2b(image if isinstance(image, bytes) else image.tobytes(), digest_size=16).digest()
        if isinstance(image, bytes):
            name = source.name(index)
            shape = (decode_rgb(image, name) if decode else read_header(image, name)).shape
        else:
            shape = image.shape
        pixels = np.bincount(source.mask(index).reshape(-1), minlength=IGNORED + 1)
    except BadSample as error:
        return SeenPair(0, 0, digest, pixels, error.reason)
    return SeenPair(shape[0], shape[1], digest, pixels, "")


def _describe(split: Split, source: MaskSource, seen: Sequence[SeenPair], report: Report) -> None:
    whole = [each for each in seen if not each.bad]
    pixels = np.stack([np.zeros(IGNORED + 1, np.int64), *(each.pixels for each in whole)])
    total = max(1, int(pixels.sum()))
    images = (pixels > 0).sum(0)
    shares = {name: f"{_percent(int(pixels[:, at].sum()), total)}" for at, name in enumerate(source.classes)}
    report.facts[split] = {
        "images": len(seen),
        "unreadable": len(seen) - len(whole),
        "channels": source.channels,
        "bits": source.bits,
        "classes": len(source.classes),
        "classes without any": int((images[: len(source.classes)] == 0).sum()),
        "images per class": {name: int(images[at]) for at, name in enumerate(source.classes)},
        "pixels per class": shares,
        "pixels ignored": _percent(int(pixels[:, IGNORED].sum()), total),
        "width": spread([each.width for each in whole]),
        "height": spread([each.height for each in whole]),
        **same_bytes([(source.name(index), each.digest) for index, each in enumerate(seen)]),
        **how_read(split, source),
    }
    if not seen:
        report.add("no images", split, split, "the split is empty")
    if any(problem.split == split for problem in report.problems):  # which files, is said
        return
    for index, each in enumerate(seen):
        if each.bad:
            report.add("unreadable", split, source.name(index), each.bad)


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.2%}"


def _check_together(sources: dict[Split, MaskSource], seen: dict[Split, list[SeenPair]], report: Report) -> None:
    """Compare val and test with train."""
    if "train" not in sources:
        return
    named = {split: [(source.name(i), seen[split][i]) for i in range(len(source))] for split, source in sources.items()}
    in_train = _images_per_class(seen["train"])
    others: tuple[Split, ...] = ("val", "test")
    for split in others:
        if split not in sources:
            continue
        for at, name in enumerate(sources["train"].classes):
            if not in_train[at] and (count := int(_images_per_class(seen[split])[at])):
                report.add("class without training", split, name, f"in no training mask, in {count} of {split}")
        add_twins(named["train"], named[split], report, split)


def _images_per_class(seen: Sequence[SeenPair]) -> np.ndarray:
    return np.stack([np.zeros(IGNORED + 1, np.int64), *(each.pixels for each in seen)]).astype(bool).sum(0)
