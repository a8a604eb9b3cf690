"""Look at the path of some data before they are opened: what is there, and the fields that it decides.

A recipe declares the classes and the most boxes of its original data; those of the data at hand replace them unless the
user typed a number. Imports no torch, like the sources.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sightline.data.sources import BoxSource, Images, MaskSource, Opener, SourceOptions, decathlon, folder
from sightline.data.sources.layouts import ALL, NoTestSplit, counted
from sightline.data.volumes.plan import read_plan
from sightline.errors import BadData, SightlineError, first_of
from sightline.parts import SPLITS, DataFacts, Split, SplitFacts

if TYPE_CHECKING:
    from sightline.data.classification import ClassificationData
    from sightline.data.detection import DetectionData
    from sightline.data.masks import MaskData
    from sightline.data.segmentation import SegmentationData

SIZED = 64  # images whose sizes a plan looks at
OpenOne = Callable[[str, str, Split, SourceOptions], Images]  # open_source, open_boxes or open_masks


def of_images(
    config: ClassificationData | DetectionData | MaskData, run: Path, typed: Collection[str], open_one: OpenOne
) -> DataFacts:
    """Open both splits as training will, with the run's own split if it kept one. Their number of classes and most
    boxes replace those of the recipe. Raises what opening raises."""
    path = config.path
    if not path or "\0" in path:
        return DataFacts()
    data = config.in_run(run)
    if data.split == ALL:  # would leave no train split
        data = replace(data, split="")
    options, is_typed = data.source_options, "classes" in typed
    place = os.path.abspath(path) if os.path.exists(path) else path  # as a run keeps it
    opener = Opener()
    try:
        both = open_both(opener, open_one, data.source, place, options, is_typed)
    except SightlineError:
        if place == path:
            raise
        both = open_both(Opener(), open_one, data.source, path, options, is_typed)  # errors name the path as typed
    train, val = both["train"], both["val"]
    count = len(train.classes)
    test, said_of_test = _test_split(opener, open_one, data.source, place, replace(options, classes=count), val)
    line = describe(both, options) + said_of_test
    fields: dict[str, Any] = {"classes": count} if config.classes and not is_typed else {}
    if not train.files and os.path.exists(path):  # of a source of another package
        line += "; the source has no `files`, so a resumed run does not notice images that changed"
    room, most = getattr(config, "max_boxes", 0), max(getattr(source, "most_objects", 0) for source in both.values())
    if room and "max_boxes" not in typed and most > room:
        fields["max_boxes"] = most
        line += f"; up to {most} boxes in an image"
    fields |= config.measured(train, typed)
    images = len(train)
    said = f"{images} + {len(val)} images of {count} classes in {_name(path)}"
    return DataFacts(
        line,
        fields,
        said,
        steps=lambda batch: images // batch,
        opened=opener.opened,
        has_test=test,
        val_items=len(val),
        count=partial(_count, train),
        warning=_warning(train),
    )


def _warning(train: Images) -> str:
    """Say where class folders look like data sets with the same classes; "" where they do not."""
    place = train.layout.train if train.layout and train.layout.kind == "folder" else None
    inner = folder.inner_classes(place.images, train.classes) if place else []
    if not inner:
        return ""
    return (
        f"{len(train.classes)} classes ({first_of(train.classes)}), each with folders {first_of(inner)}: if those are "
        "the classes, give one of the folders"
    )


def _count(source: Images) -> SplitFacts:
    """Count what the train split holds, for a plan; read the sizes of some images."""
    from sightline.data import counts  # here: it imports decoders, which only plans need this early

    if isinstance(source, MaskSource):
        return counts.of_masks(source, most=SIZED)
    return counts.of_boxes(source) if isinstance(source, BoxSource) else counts.of_labels(source, most=SIZED)  # type: ignore[arg-type]


def _test_split(
    opener: Opener, open_one: OpenOne, kind: str, path: str, options: SourceOptions, val: Images
) -> tuple[bool, str]:
    """Return whether there is a test split that neither trains nor validates, and what to say of it. One that cannot
    be opened is no reason not to train."""
    try:
        test = opener.open(open_one, kind, path, "test", options)
    except NoTestSplit:
        return False, ""
    except BadData:
        return False, "; the test split cannot be used: `sightline check` says why"
    if not test.is_own_test(val):  # which `describe` says
        return False, ""
    return True, f"; test split: {len(test)} images, scored by `evaluate RUN --split test`"


def open_both(
    opener: Opener, open_one: OpenOne, kind: str, path: str, options: SourceOptions, is_typed: bool
) -> dict[Split, Images]:
    """Open both splits; without the number of classes where the data have another one and nobody typed it."""

    def open_split(split: Split) -> Images:
        try:
            return opener.open(open_one, kind, path, split, options)
        except BadData:
            if not options.classes or is_typed:
                raise
            return opener.open(open_one, kind, path, split, replace(options, classes=0))

    return {split: open_split(split) for split in SPLITS}


def of_volumes(config: SegmentationData, typed: Collection[str]) -> DataFacts:
    """Read the plan of a prepared folder, whose task replaces that of the recipe; of raw data say what they are."""
    path = config.path
    if not path or "\0" in path:
        return DataFacts()
    line = decathlon.describe_found(path, config.fold, config.folds)
    fields = decathlon.found_fields(path) if "task" not in typed else {}
    steps = decathlon.steps_of_epoch(path, config.fold, config.folds, config.nvol)
    plan = read_plan(Path(path)) if decathlon.detect(path) else None
    said = f"{len(plan.cases)} cases of task {plan.task} in {_name(path)}" if plan else ""
    shapes = decathlon.training_shapes(path, config.fold, config.folds)
    count = partial(SplitFacts, len(shapes), "volumes", sizes=tuple(shapes)) if shapes else None
    return DataFacts(f"data: {line}" if line else "", fields, said, steps, count=count)


def _name(path: str) -> str:
    """Return the last part of a path, for a short text."""
    return os.path.basename(os.path.abspath(path)) or path


def describe(both: Mapping[Split, Images], options: SourceOptions) -> str:
    """Return one line about both splits for the user, e.g. `data: 2 classes, 8 + 2 images`."""
    train, val = both["train"], both["val"]
    said = [f"data: {len(train.classes)} classes, {len(train)} + {len(val)} images"]
    if train.inner:
        said.append(f"found in {train.inner}/, one folder deeper")
    places = (train.layout.train, train.layout.val) if train.layout and train.layout.kind == "table" else ()
    if tables := list(dict.fromkeys(place.labels for place in places if place and place.labels)):
        others = ", not from the class folders beside it" if folder.find(str(tables[0].parent)) else ""
        said.append(f"labels from {' and '.join(table.name for table in tables)}{others}")
    said += train.notes
    if getattr(train, "is_multi_label", False):
        said.append("several labels per image")
    elif tables and any("," in name for name in train.classes):
        said.append("labels hold commas; `;` or `|` separate several labels of an image")
    if train.held_out is not None:
        drawn = f"as {options.split} lists" if options.split else f"about {options.val_fraction:.0%}, by name"
        said.append(f"no val split, so {len(val)} images validate ({drawn})")
    elif val.val_name:
        said.append(f"{val.val_name} validates")
    if ignored := Counter(train.ignored) + Counter(val.ignored if train.held_out is None else {}):
        said.append(f"ignored: {counted(ignored)}")
    return "; ".join(said)
