"""What lies at --data.path: one line for the user before torch is imported, and the fields that the data decide.

A recipe declares the classes of its original data; those of the data at hand replace them unless the user typed a
number. Imports no torch, like the sources.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sightline.data import sources
from sightline.data.sources import Images, SourceOptions, decathlon
from sightline.data.sources.layouts import NAMES, Layout, counted, kept_split
from sightline.errors import BadData
from sightline.fields import data_of, named
from sightline.files.plain_yaml import read_yaml
from sightline.parts import Split

OPENERS = {"ClassificationData": sources.open_source, "DetectionData": sources.open_boxes}
DATA_CLASSES = (*OPENERS, "SegmentationData")


@dataclass(frozen=True)
class Found:
    """One line about the data, and values of fields of `data` that nobody typed."""

    line: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)


def of_recipe(name: str, flags: Sequence[str], config: Path | None, wants_line: bool = True) -> Found:
    """Look at the data of a recipe as flags and a config file name them; nothing if they name none, or if there is
    nothing to decide and no line is wanted."""
    data_class, declared = data_of(name)
    stored = read_yaml(config) if config else {}
    typed = {key.removeprefix("data."): value for key, value in named(flags).items() if key.startswith("data.")}
    parts = [part if isinstance(part, dict) else {} for part in (stored.get("data"), stored.get("run"))]
    typed = {**{key: str(value) for key, value in parts[0].items()}, **typed}
    is_decided = {"classes", "task"} & set(typed) or declared.get("classes") == "0"
    path = typed.get("path", "")
    if not path or "\0" in path or data_class not in DATA_CLASSES or (is_decided and not wants_line):
        return Found()
    run = named(flags).get("run.out") or parts[1].get("out") or f"runs/{Path(name).stem}"
    return look(data_class, path, typed, declared, Path(str(run)))


def look(data_class: str, path: str, typed: Mapping[str, str], declared: Mapping[str, str], run: Path) -> Found:
    """Open the splits at a path as the data class of a recipe would. `typed` and `declared` are texts of its fields, by
    the user and by the recipe; `run` is the folder that may keep a drawn split. Raises what opening raises."""
    values = {**declared, **typed}
    try:
        if data_class == "SegmentationData":
            return _volumes(path, int(values["fold"]), int(values["folds"]), decides="task" not in typed)
        numbers = int(values.get("first_label", "1")), int(values["classes"]), float(values["val_fraction"])
    except (KeyError, ValueError):  # a user's own data; or not a number, which the parser of the flags says
        return Found()
    wanted = numbers[1]
    split_file = kept_split(run) or values.get("split", "")
    options = SourceOptions(*numbers, split_file, skips_missing=values.get("on_bad_sample") == "skip")
    opener, kind = OPENERS[data_class], values.get("source", "auto")

    def opened(split: Split, options: SourceOptions) -> Images:
        try:
            return opener(kind, path, split, options)
        except BadData:
            if not wanted or "classes" in typed:
                raise
            return opener(kind, path, split, replace(options, classes=0))  # not the recipe's number

    both = {split: opened(split, options) for split in ("train", "val")}
    count = len(both["train"].classes)
    fields = {"classes": str(count)} if wanted and "classes" not in typed else {}
    return Found(_line(both, options), fields)


def _volumes(path: str, fold: int, folds: int, decides: bool) -> Found:
    line = decathlon.describe_found(path, fold, folds)
    return Found(f"data: {line}" if line else "", decathlon.found_fields(path) if decides else {})


def _line(both: Mapping[str, Images], options: SourceOptions) -> str:
    train, val = both["train"], both["val"]
    said = [f"data: {len(train.classes)} classes, {len(train)} + {len(val)} images"]
    if train.held_out is not None:
        drawn = f"as {options.split} lists" if options.split else f"{options.val_fraction:.0%} of them, by name"
        said.append(f"no val split, so {len(val)} images validate ({drawn})")
    elif val.layout and (name := _other_name(val.layout)):
        said.append(f"{name} validates")
    if ignored := Counter(train.ignored) + Counter(val.ignored if train.held_out is None else {}):
        said.append(f"ignored: {counted(ignored)}")
    return "; ".join(said)


def _other_name(layout: Layout) -> str:
    """Return the name of a val split that is not called so, e.g. test; "" if it is, or if one file lists both."""
    place = layout.val
    if place is None or place == layout.train:
        return ""
    if place.labels is None:
        return "" if place.images.name.lower() in NAMES["val"][:-1] else place.images.name
    # images/test, test/images, test.json or test.csv
    return next((name for name in (*place.labels.parts[-2:], place.images.name) if Path(name).stem == "test"), "")
