"""Sources of other installed packages: what one returns is checked where it is opened, so that its author gets a clear
error instead of a network that learns nonsense."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

from sightline import plugins
from sightline.data.sources import BoxSource, MaskSource, Objects, Source, VolumeSource, spread
from sightline.errors import BadData, UsageError
from sightline.parts import Split

MOST_CHECKED = 10_000  # images of a split whose boxes are looked at; `sightline check` looks at all
_RETURNED: dict[str, type] = {
    "open_source": Source,
    "open_boxes": BoxSource,
    "open_masks": MaskSource,
    "open_volumes": VolumeSource,
}
_FAR = 1.1  # of a side: a box that reaches further is not just drawn carelessly
_NOWHERE = 2.0  # of a side: a box that reaches further is not one of the image


def opened(opener: str, kind: str, path: str, split: Split, *given: object) -> Any:
    """Open a source of another package. UsageError if it lacks what every source has, BadData for impossible boxes."""
    source = getattr(plugins.load("sources", kind), opener)(path, split, *given)
    who = f"source '{kind}' of the package {plugins.package('sources', kind)}"
    base = _RETURNED[opener]
    needed = [name for each in base.__mro__ for name in inspect.get_annotations(each)]
    needed += sorted(getattr(base, "__abstractmethods__", ()))
    if missing := [name for name in needed if not hasattr(source, name)]:
        raise UsageError(
            f"{who}: what {opener} returns ({type(source).__name__}) has no {', '.join(missing)}; derive it from "
            f"sightline.data.sources.{base.__name__}, which says what each is, and set all of them"
        )
    if isinstance(source, BoxSource):
        _check_boxes(source, split, f"{path}: {who}")
    return source


def _check_boxes(source: BoxSource, split: Split, who: str) -> None:
    """Raise BadData for boxes that are not x, y, width, height in pixels, labels of no class, and wrong counts."""
    if len(source.class_ids) != len(source.classes):
        raise BadData(f"{who}: class_ids has {len(source.class_ids)} numbers for {len(source.classes)} classes")
    if len(source.room) != len(source):
        raise BadData(f"{who}: room has {len(source.room)} numbers for {len(source)} images; give each its own")
    every = {index: source.objects(index) for index in spread(len(source), MOST_CHECKED)} if len(source) else {}
    names = [source.name(index) for index in every]
    for name, found in zip(names, every.values(), strict=True):
        _check_shapes(found, f"{who}: {name}")
    counts = np.asarray([len(found.labels) for found in every.values()], np.int64)
    if (most := counts.max(initial=0)) > source.most_objects:
        crowded = names[int(counts.argmax())]
        raise BadData(f"{who}: {crowded} has {most} boxes, but most_objects is {source.most_objects}; give the largest")
    ids, times = np.unique([found.image_id for found in every.values()], return_counts=True)
    if split != "train" and times.max(initial=0) > 1:  # they would be scored as one image
        twice = ids[times > 1][0]
        same = [name for name, found in zip(names, every.values(), strict=True) if found.image_id == twice]
        raise BadData(f"{who}: {same[0]} and {same[1]} have one image_id, {twice}; give each its own")
    if not counts.any():
        return
    boxes = np.concatenate([found.boxes for found in every.values()])
    labels = np.concatenate([found.labels for found in every.values()])
    sides = np.repeat([(found.width, found.height) for found in every.values()], counts, 0)
    no_class = (labels < 1) | (labels > len(source.classes))
    of_labels = f"expected labels from 1, the first class, to {len(source.classes)}; number the classes so"
    for said, rows in {**_faults(boxes, sides), of_labels: no_class}.items():
        if rows.any():
            at = int(rows.argmax())
            image = int(np.searchsorted(counts.cumsum(), at, "right"))
            box = at - int(counts[:image].sum())
            numbers = ", ".join(f"{number:g}" for number in boxes[at])
            raise BadData(
                f"{who}: box {box} of {names[image]} is {numbers} with label {labels[at]}; "
                f"{said.format(*sides[at].tolist())} (so are {rows.sum()} of {len(rows)} boxes)"
            )


def _check_shapes(found: Objects, where: str) -> None:
    count = len(found.labels)
    for name, shape in (("boxes", (count, 4)), ("labels", (count,)), ("area", (count,)), ("crowd", (count,))):
        array: Any = getattr(found, name)
        if not isinstance(array, np.ndarray) or array.shape != shape:
            was = f"of shape {array.shape}" if isinstance(array, np.ndarray) else f"a {type(array).__name__}"
            raise BadData(f"{where}: Objects.{name} is {was}, expected an array of shape {shape}; change it there")


def _faults(boxes: np.ndarray, sides: np.ndarray) -> dict[str, np.ndarray]:
    """Return which boxes cannot be x, y, width, height in an image of these sides (width, height), by what to do."""
    start, size = boxes[:, :2], boxes[:, 2:]
    is_finite = np.isfinite(boxes).all(1)
    with np.errstate(over="ignore", invalid="ignore"):  # 1e308 + 1e308 is infinite, and elsewhere
        end = start + size
    is_far = (end > _FAR * sides).any(1)
    # A box that ends right of the middle reaches beyond the image if its end is taken for its width.
    fits_corners = (size >= start).all(1) & (start >= 0).all(1) & (size <= _FAR * sides).all(1)
    is_elsewhere = (end > _NOWHERE * sides).any(1) | (start < -sides).any(1)
    are_shares = bool((boxes <= 1).all() and (sides > 2).all())
    pixels = "expected x, y, width, height in pixels of an image of {}x{}"
    return {
        "expected four finite numbers; leave out boxes without them": ~is_finite,
        "expected x, y, width, height, of which no side is negative; width is x2 - x1": is_finite & (size < 0).any(1),
        f"{pixels}, but these look like corners; give x2 - x1 and y2 - y1 as sides": is_far & bool(fits_corners.all()),
        f"{pixels}, outside which it lies by far; correct it or leave it out": is_elsewhere,
        f"{pixels}, but these look like shares of it; multiply them by its sides": np.full(len(boxes), are_shares),
    }
