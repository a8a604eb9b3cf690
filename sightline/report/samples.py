"""Training samples as the network sees them, on one sheet with their labels, boxes or masks: read, augmented and mixed
as in training, by its loader. For `sightline show` and the report of a run.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw

from sightline.data.formats.image_headers import MAX_BYTES
from sightline.data.loading.loader import BadSamples, Loader, Order
from sightline.drawing.findings import GROUND, TEXT, Colour, colour_of, fitting
from sightline.drawing.letters import Letters, letters_of
from sightline.drawing.slices import outline_colour, outlined
from sightline.errors import UsageError
from sightline.hardware import devices
from sightline.hardware.world import World
from sightline.inference.predictions import ENCODERS
from sightline.parts import Bound, DataSpec, Finding, Task
from sightline.recipe.recipe import Run
from sightline.report.by_task import SeenSample, seen

COLUMNS, ROWS = 6, 4
LEAST_ITEMS = 6
TILE = 200  # pixels of the longer side of a sample
_GAP, _LETTERS, _TITLE = 8, 13, 15  # pixels
_WIDTH = COLUMNS * (TILE + _GAP) + _GAP
MARK = b"\nsheet of sightline show\n"  # follows the image: every format may have it there, and no decoder reads it
_DIM, _EDGE = (150, 158, 170), (16, 16, 16)
_PERCENTILES = (0.5, 99.5)
_SAMPLED = 2**20  # values that these are taken from


@dataclass(frozen=True)
class Drawn:
    """Samples to draw: several draws of the first one, and the first ones of the training."""

    spec: DataSpec
    draws: list[SeenSample] = field(default_factory=list)
    samples: list[SeenSample] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # of the items that `samples` come from
    about_labels: str = ""
    has_slices: bool = False  # samples are slices of volumes

    @property
    def is_mixed(self) -> bool:
        """True if a sample has shares of labels."""
        return any(0 < label.score < 1 for sample in self.samples for label in sample.labels)

    def words(self) -> str:
        """Say in words what is drawn."""
        each = "patch" if len(self.spec.size) == 3 else "slice" if self.has_slices else "image"
        # Width first; of a patch slices, rows and columns.
        sides = " x ".join(map(str, self.spec.size if each == "patch" else self.samples[0].image.shape[:0:-1]))
        said = [f"{len(self.samples)} training {each}{'es' if each == 'patch' else 's'} of {sides}"]
        if self.draws:
            one = "image augmented" if each == "image" else "volume cropped and augmented"
            said.append(f"the first row is one {one} {len(self.draws)} times")
        if self.is_mixed:
            said.append(f"{each}s are mixed (mixup, cutmix), with the share of each label behind its name")
        return "; ".join(filter(None, [*said, self.about_labels]))


@dataclass(frozen=True)
class _FirstRows:
    """The first rows of every batch of an order."""

    order: Order
    local_batch: int

    @property
    def steps_per_epoch(self) -> int:
        return self.order.steps_per_epoch

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        epochs, indices = self.order.batch(step)
        return epochs[: self.local_batch], indices[: self.local_batch]


@dataclass(frozen=True)
class _Draws:
    """One item alone, in one epoch after the other; alone it is mixed with itself, so that only it is seen."""

    index: int
    local_batch: int = 1
    steps_per_epoch: int = 1

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        return np.array([step]), np.array([self.index])


def never() -> bool:
    """Return False: nobody waits."""
    return False


def draw_samples(
    bound: Bound, order: Order, task: Task, bad: BadSamples, most_values: int, is_late: Callable[[], bool] = never
) -> Drawn:
    """Load the first samples of a training on the host, as its loader does, for one sheet.

    Images of all items together have about `most_values` numbers at most; once it is late, no batch but the first is
    loaded.
    """
    bound = bound.on_host or bound  # images of a device's memory are not brought there for a sheet
    comes_whole = set(bound.layout) <= bound.host_keys  # static batches: one draw, and no parts of them
    items = _affordable(bound, most_values)
    draws = 0 if comes_whole or bound.repeats_first else min(COLUMNS, items // 3)
    items = min(items - draws, order.steps_per_epoch * order.local_batch)
    rows = order.local_batch if comes_whole else min(order.local_batch, items)
    steps = 1 if bound.repeats_first else -(-items // rows)
    smoothing = getattr(task, "label_smoothing", 0.0)  # which `seen` does not show
    about_labels = f"label smoothing {smoothing:g}" if smoothing else ""
    drawn = Drawn(bound.dataset.spec, about_labels=about_labels, has_slices=bound.samples_per_item > 1)
    each = max(1, min(bound.samples_per_item, COLUMNS * (ROWS - bool(draws)) // items))
    loaded = _loaded(bound, _FirstRows(order, rows), task, bad, steps, is_late)
    first: int | None = None  # that could be read
    for index, of_item in itertools.islice(loaded, items):
        first = index if first is None else first
        chosen = np.linspace(0, len(of_item) - 1, each + 2)[1:-1].round().astype(int).tolist()
        drawn.samples.extend(_kept(of_item[at]) for at in chosen)
        drawn.names.extend([bound.dataset.name(index)] * each)
    if draws > 1 and first is not None and not is_late():
        again = _loaded(bound, _Draws(first), task, bad, draws, is_late)
        drawn.draws.extend(_kept(of_item[len(of_item) // 2]) for _, of_item in again)
        if all(np.array_equal(one.image, drawn.draws[0].image) for one in drawn.draws):  # nothing is random
            drawn.draws.clear()
    return drawn


def _affordable(bound: Bound, most_values: int) -> int:
    """Return how many items to load: a sheet full, fewer if they are as large as volumes are."""
    values = math.prod(bound.layout["image"][0])
    return max(LEAST_ITEMS, min(COLUMNS * ROWS, most_values // max(1, values)))


def _loaded(
    bound: Bound, order: Order, task: Task, bad: BadSamples, steps: int, is_late: Callable[[], bool]
) -> Iterator[tuple[int, list[SeenSample]]]:
    """Yield the index and the samples of each item of the first steps, until it is late."""
    feeds = {"train": (bound, order)}
    loader = Loader(feeds, Run(workers=0), devices.select("cpu"), World(), bad, check_stop=lambda: None)
    try:
        loader.seek("train", 0, steps)
        for step in range(steps):
            if step and is_late():
                return
            loaded = loader.next("train")
            with torch.no_grad():
                batch = bound.finish(loaded, torch.float32)
            samples, per_item = seen(task, batch, bound.dataset.spec), bound.samples_per_item
            for item, index in enumerate(loaded["index"].tolist()):
                yield index, samples[item * per_item : (item + 1) * per_item]
    finally:
        loader.close()


def _kept(sample: SeenSample) -> SeenSample:
    """Copy a sample out of a batch that the next one overwrites."""
    return replace(sample, image=sample.image.copy(), mask=None if sample.mask is None else sample.mask.copy())


def encoder_of(path: Path) -> dict[str, Any]:
    """Return how Pillow saves a sheet under this name; UsageError for an ending that is not an image's."""
    if found := ENCODERS.get(path.suffix.lower()):
        return found
    raise UsageError(f"--out {path} is not a name of an image; give one that ends in {', '.join(ENCODERS)}")


def refuse_other_file(path: Path) -> None:
    """Raise UsageError if `path` holds something that is not a sheet, and would be lost."""
    if path.is_file() and (path.stat().st_size > MAX_BYTES or not path.read_bytes().endswith(MARK)):
        raise UsageError(f"{path} exists and is not a sheet of `sightline show`; delete it, or give another --out")


def sheet(drawn: Drawn, title: str) -> Image.Image:
    """Draw all samples in rows, with their labels below."""
    spec, window = drawn.spec, _window(drawn)
    parts: list[Word] = [(part, None) for part in title.replace("; ", ";\0").split("\0")]
    head = _flow(parts, letters_of(_TITLE), _WIDTH - 2 * _GAP, 3)
    groups = (drawn.draws, drawn.samples)
    tiles = [[_tile(each, spec, window) for each in group] for group in groups]
    letters = letters_of(_LETTERS)
    captions = [[_flow(_caption(each, spec), letters, TILE, 2) for each in group] for group in groups]
    names = [[f"variant {number}" for number in range(1, len(drawn.draws) + 1)], drawn.names]
    high = max(tile.height for group in tiles for tile in group)
    said = max(len(lines) for group in captions for lines in group) * _line(_LETTERS)
    row, top = high + said + _line(_LETTERS) + _GAP, len(head) * _line(_TITLE) + 2 * _GAP
    rows = sum(-(-len(group) // COLUMNS) for group in tiles)
    canvas = Image.new("RGB", (_WIDTH, top + rows * row), GROUND)
    pen = ImageDraw.Draw(canvas)
    _write(pen, (_GAP, _GAP), head, _TITLE)
    for samples, drawings, words, called in zip(groups, tiles, captions, names, strict=True):
        for at, (sample, tile) in enumerate(zip(samples, drawings, strict=True)):
            down, across = divmod(at, COLUMNS)
            left, y = _GAP + across * (TILE + _GAP), top + down * row
            canvas.paste(tile, (left + (TILE - tile.width) // 2, y))
            _write(pen, (left, y + high), words[at], _LETTERS)
            name = f"{called[at]}, {sample.note}" if sample.note else called[at]
            name = fitting(letters.drawable(name), letters, TILE)
            letters.write(pen, (left, y + high + (len(words[at]) + 0.5) * _line(_LETTERS)), name, "lm", fill=_DIM)
        top += -(-len(samples) // COLUMNS) * row
    return canvas


Word = tuple[str, Colour | None]


def _caption(sample: SeenSample, spec: DataSpec) -> list[Word]:
    """Return the words under a sample: its classes, in the colours in which they are drawn."""
    if sample.mask is not None:
        present = [number for number in np.unique(sample.mask).tolist() if 0 < number < len(spec.classes)]
        named: list[Word] = [(spec.classes[number], outline_colour(number)) for number in present]
        return named or [(f"{spec.classes[0]} only", None)]
    if any(label.box for label in sample.labels):
        counts = Counter((label.name, label.class_id) for label in sample.labels)
        return [(f"{n} {name}" if n > 1 else name, colour_of(number)) for (name, number), n in counts.items()]
    if not sample.labels:
        return [("no boxes" if spec.class_ids else "no label", None)]
    is_mixed = any(label.score < 1 for label in sample.labels)
    return [(f"{label.name} {label.score:.2f}" if is_mixed else label.name, None) for label in sample.labels]


def _flow(words: Sequence[Word], letters: Letters, width: int, most: int) -> list[list[tuple[float, Word]]]:
    """Place words into at most so many lines; where they do not fit, say how many more there are."""
    lines: list[list[tuple[float, Word]]] = [[]]
    x = 0.0
    for number, (text, colour) in enumerate(words):
        mark, rest = letters.size if colour else 0, len(words) - number - 1
        shown = letters.drawable(text)
        needed = mark + letters.length(shown)
        if x and x + needed > width and len(lines) < most:
            lines.append([])
            x = 0.0
        room = width - (letters.length(f"+{rest}") + letters.size if rest and len(lines) == most else 0)
        if x and x + needed > room:
            lines[-1].append((x, (f"+{rest + 1}", None)))
            break
        shown = fitting(shown, letters, room - x - mark)
        lines[-1].append((x, (shown, colour)))
        x += mark + letters.length(shown) + letters.size
    return lines


def _write(pen: ImageDraw.ImageDraw, place: tuple[int, int], lines: list[list[tuple[float, Word]]], size: int) -> None:
    letters, line = letters_of(size), _line(size)
    for number, words in enumerate(lines):
        middle = place[1] + (number + 0.5) * line
        for x, (text, colour) in words:
            left = place[0] + x
            if colour:
                pen.rectangle((left, middle - 4, left + 8, middle + 4), fill=colour)
                left += size
            letters.write(pen, (left, middle), text, "lm", fill=TEXT)


def _line(size: int) -> int:
    return round(size * 1.5)


def _window(drawn: Drawn) -> tuple[float, float]:
    """Return what becomes black and what white, the same for all samples so that their brightness can be compared."""
    spec = drawn.spec
    if spec.clip:
        low, high = ((value - spec.mean[0]) / spec.std[0] for value in spec.clip)
    else:
        values = np.concatenate([each.image.reshape(-1) for each in (*drawn.samples, *drawn.draws)])
        low, high = np.percentile(values[:: max(1, len(values) // _SAMPLED)], _PERCENTILES).tolist()
    return low, max(high, low + 1e-6 * max(1.0, abs(low)))


def pixels_of(image: np.ndarray, spec: DataSpec, window: tuple[float, float] = (0.0, 1.0)) -> np.ndarray:
    """Undo the normalisation of an image (channels, height, width): (height, width, 3) uint8. Of volumes, `window`
    becomes black to white, and channels lie side by side."""
    if len(spec.mean) == 3:
        values = image * np.reshape(spec.std, (3, 1, 1)) + np.reshape(spec.mean, (3, 1, 1))
    else:
        values = (image - window[0]) / (window[1] - window[0])
    whole = np.clip(np.round(values * 255), 0, 255).astype(np.uint8)
    if len(whole) == 3 and len(spec.size) == 2:
        return whole.transpose(1, 2, 0)
    return np.repeat(_side_by_side(whole)[..., None], 3, 2)


def _side_by_side(planes: np.ndarray) -> np.ndarray:
    """Return (count, height, width) as one plane, about as wide as high."""
    columns = math.ceil(math.sqrt(len(planes)))
    rows = -(-len(planes) // columns)
    padded = np.concatenate([planes, np.zeros((rows * columns - len(planes), *planes.shape[1:]), planes.dtype)])
    return np.block([[padded[row * columns + column] for column in range(columns)] for row in range(rows)])


def _tile(sample: SeenSample, spec: DataSpec, window: tuple[float, float]) -> Image.Image:
    pixels = pixels_of(sample.image, spec, window)
    scale = TILE / max(pixels.shape[:2])
    size = max(1, round(pixels.shape[1] * scale)), max(1, round(pixels.shape[0] * scale))
    way = Image.Resampling.BOX if scale < 1 else Image.Resampling.NEAREST
    tile = Image.fromarray(pixels).resize(size, way)
    if sample.mask is not None:
        times = 1 if pixels.shape[:2] == sample.mask.shape else len(sample.image)
        mask = sample.mask if times == 1 else _side_by_side(np.repeat(sample.mask[None], times, 0))
        return outlined(tile, mask, None)
    _draw_boxes(tile, sample.labels)
    return tile


def _draw_boxes(tile: Image.Image, labels: Sequence[Finding]) -> None:
    pen = ImageDraw.Draw(tile)
    for label in labels:
        if label.box is None:
            continue
        left, top, right, bottom = (edge * side for edge, side in zip(label.box, tile.size * 2, strict=True))
        right, bottom = max(right - 1, left + 2), max(bottom - 1, top + 2)
        pen.rectangle((left - 1, top - 1, right + 1, bottom + 1), outline=_EDGE, width=4)
        pen.rectangle((left, top, right, bottom), outline=colour_of(label.class_id), width=2)
