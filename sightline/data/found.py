"""Look at --data.path: one line for the user before torch is imported, and the fields that the data decide.

A recipe declares the classes and the most boxes of its original data; those of the data at hand replace them unless the
user typed a number. Imports no torch, like the sources.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sightline.data import facts, sources
from sightline.data.sources import Images, Opener, SourceOptions, decathlon
from sightline.data.sources.layouts import ALL, kept_split
from sightline.errors import SightlineError, UsageError
from sightline.fields import Fields, data_of, flags_of, named
from sightline.files.plain_yaml import read_yaml
from sightline.parts import Split

OPENERS = {"ClassificationData": sources.open_source, "DetectionData": sources.open_boxes}
DATA_CLASSES = (*OPENERS, "SegmentationData")


@dataclass(frozen=True)
class Found:
    """One line about the data, and the texts of fields that nobody typed, by "part.field"."""

    line: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)
    steps: Callable[[int], int] | None = None  # of an epoch, by batch, without a partial last one; None if unknown

    @property
    def flags(self) -> list[str]:
        """Return the fields as flags; a text with spaces is several values."""
        texts = {f"--{name.replace('_', '-')}": text for name, text in self.fields.items()}
        several = [[name, *text.split()] if " " in text else [f"{name}={text}"] for name, text in texts.items()]
        return list(itertools.chain.from_iterable(several))


def of_recipe(name: str, flags: Sequence[str], config: Path | None, wants_line: bool = True) -> Found:
    """Look at the data of a recipe as flags and a config file name them; nothing if they name none, or if there is
    nothing to decide and no line is wanted."""
    data_class, declared = data_of(name)
    stored = read_yaml(config) if config else {}
    typed = {**_texts(stored.get("data")), **_of_part("data", flags)}
    is_decided = {"classes", "task"} & set(typed) or declared.get("classes") == "0"
    path = typed.get("path", "")
    if not path or "\0" in path or data_class not in DATA_CLASSES or (is_decided and not wants_line):
        return Found()
    run = Path({**_texts(stored.get("run")), **_of_part("run", flags)}.get("out") or f"runs/{Path(name).stem}")
    found = look(data_class, path, typed, declared, run)
    typed_rest = {f"{part}.{key}": text for part in stored for key, text in _texts(stored[part]).items()} | named(flags)
    return _with_smaller_batch(found, flags_of(name), typed_rest, run)


def _texts(part: object) -> dict[str, str]:
    """Return the fields of a part of a config file as texts."""
    return {str(key): str(value) for key, value in part.items()} if isinstance(part, dict) else {}


def _of_part(part: str, flags: Sequence[str]) -> dict[str, str]:
    """Return what flags set of a part, by field."""
    return {key.removeprefix(f"{part}."): value for key, value in named(flags).items() if key.startswith(f"{part}.")}


def _with_smaller_batch(found: Found, declared: Fields, typed: Mapping[str, str], run: Path) -> Found:
    """Take a batch that leaves two steps in an epoch where the recipe's own leaves one or none, and scale a rate that
    was meant for it; where the last batch is padded, only if not one is full. A run that started with one step in an
    epoch keeps it. `typed` are flags and values of a config file, by "part.field"."""
    own = {name: flag.default.strip("'") for name, flag in declared.items()} | dict(typed)
    batch = own.get("train.global_batch", "")
    enough = {"drop": 2, "pad": 1}.get(own.get("train.last_batch", ""), 0)
    is_open = "train.global_batch" not in typed and batch.isdecimal()
    if not is_open or int(batch) < 2 or not found.steps or (steps := found.steps(int(batch))) >= enough:
        return found
    has_step = bool(steps) or enough == 1
    if has_step and batch in (_batch_of(run), _batch_of(run / "fold-0")):
        return found
    powers = (1 << power for power in reversed(range((int(batch) - 1).bit_length())))
    smaller = next((each for each in powers if found.steps(each) >= 2), 0)
    if not smaller:
        return found
    fields, said = {**found.fields, "train.global_batch": str(smaller)}, f"batch {smaller}"
    if "optimizer.lr" not in typed and own.get("optimizer.lr_for_batch") == "0":
        fields["optimizer.lr"] = f"{float(own['optimizer.lr']) * smaller / int(batch):g}"
        said += f" and rate {fields['optimizer.lr']}"
        if own.get("schedule.kind") == "table" and "schedule.table_rates" not in typed:
            rates = [float(rate) * smaller / int(batch) for rate in own["schedule.table_rates"].strip("()").split(",")]
            fields["schedule.table_rates"] = " ".join(f"{rate:g}" for rate in rates)
            said += f" (later up to {max(rates):g})"
    why = "leaves one step in an epoch" if steps else "is more than there are"
    return replace(found, line=f"{found.line}; {said}, as the recipe's {batch} {why}", fields=fields)


def _batch_of(run: Path) -> str:
    """Return the batch that a run was started with; "" if there is none."""
    try:
        return _texts(read_yaml(run / "config.yaml").get("train")).get("global_batch", "")
    except UsageError:
        return ""


def look(data_class: str, path: str, typed: Mapping[str, str], declared: Mapping[str, str], run: Path) -> Found:
    """Open the splits at a path as the data class of a recipe would. `typed` and `declared` are texts of its fields, by
    the user and by the recipe; `run` is the folder that may keep a drawn split. Raises what opening raises."""
    values = {**declared, **typed}
    try:
        if data_class == "SegmentationData":
            fold, folds, nvol = (int(values[name]) for name in ("fold", "folds", "nvol"))
            return _volumes(path, fold, folds, nvol, decides="task" not in typed)
        numbers = int(values.get("first_label", "1")), int(values["classes"]), float(values["val_fraction"])
    except (KeyError, ValueError):  # a user's own data; or not a number, which the parser of the flags says
        return Found()
    wanted = numbers[1]
    typed_split = values.get("split", "")
    split_file = kept_split(run) or ("" if typed_split == ALL else typed_split)  # `all` would leave no train split
    # As the data class will open them, so that they can be handed on.
    options = SourceOptions(*numbers, split_file)
    if data_class == "DetectionData":
        skips_missing = values.get("on_bad_sample") == "skip"
        options = SourceOptions(val_fraction=numbers[2], split=split_file, skips_missing=skips_missing)
    opener, kind = OPENERS[data_class], values.get("source", "auto")
    place = os.path.abspath(path) if os.path.exists(path) else path

    def opened(path: str) -> dict[Split, Images]:
        return facts.open_both(Opener(), opener, kind, path, options, "classes" in typed)

    try:
        both = opened(place)
    except SightlineError:
        if place == path:
            raise
        both = opened(path)  # errors name the data as they were typed
    count = len(both["train"].classes)
    fields = {"data.classes": str(count)} if wanted and "classes" not in typed else {}
    line, room = facts.describe(both, options), values.get("max_boxes", "")
    most = max(getattr(source, "most_objects", 0) for source in both.values())
    if room.isdecimal() and "max_boxes" not in typed and most > int(room):
        fields["data.max_boxes"] = str(most)
        line += f"; up to {most} boxes in an image"
    images = len(both["train"])
    return Found(line, fields, lambda batch: images // batch)


def _volumes(path: str, fold: int, folds: int, nvol: int, decides: bool) -> Found:
    line = decathlon.describe_found(path, fold, folds)
    fields = decathlon.found_fields(path) if decides else {}
    steps = decathlon.steps_of_epoch(path, fold, folds, nvol)
    return Found(f"data: {line}" if line else "", {f"data.{name}": value for name, value in fields.items()}, steps)
