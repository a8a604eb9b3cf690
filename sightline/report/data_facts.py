"""Facts about the data of a run: counted once by the training, kept in data.json and samples.jpg of its folder, and
shown on its page, also when the data are gone. Imports no torch until samples are drawn.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sightline.data.decode import decode_rgb
from sightline.errors import BadSample, UsageError
from sightline.files.image_bytes import read_bytes
from sightline.files.typed_json import as_dataclass, read_json
from sightline.files.whole import replace_text, replaced
from sightline.report.charts import short
from sightline.report.html import text

if TYPE_CHECKING:
    from sightline.data.loading.loader import Order
    from sightline.parts import Bound, Dataset, DataSpec, SplitFacts
    from sightline.recipe.recipe import Recipe

FACTS, SHEET = "data.json", "samples.jpg"
FORMAT = 1
MAX_BYTES = 2**24  # 100,000 classes take 4 MB
COUNT_S, DRAW_S = 0.5, 1.0  # no file is read after this; a slow disk or large volumes cost a run about as much
MOST_VALUES = 2**24  # numbers in the images that are drawn: eight patches of 128 x 128 x 128 voxels
CLASSES_SHOWN, ENDS_SHOWN = 30, 10


@dataclass(frozen=True)
class SplitRow:
    """A split in data.json. Sizes and boxes are lowest, median and highest, sizes for every axis."""

    items: int
    kind: str
    counted: str
    counts: tuple[int, ...]
    counted_in: int
    measured: int
    sizes: tuple[tuple[float, ...], ...]
    boxes: tuple[float, ...]


@dataclass(frozen=True)
class DataFacts:
    """data.json; `drawn` says what samples.jpg shows, or why there is none."""

    format: int
    fingerprint: str
    classes: tuple[str, ...]
    network: str
    splits: dict[str, Any]
    drawn: str


# Written by the training


def keep_facts(folder: Path, recipe: Recipe, sets: Mapping[str, Dataset], bound: Bound, order: Order) -> str:
    """Count, measure and draw once for a run, unless its folder has that of these data. Return why it could not be
    done, "" if it was: nothing that goes wrong here ends a run."""
    try:
        if _kept_fingerprint(folder) == sets["train"].fingerprint:
            return ""
        deadline = time.monotonic() + COUNT_S
        rows = {
            name: asdict(_row(dataset.facts(lambda: time.monotonic() > deadline))) for name, dataset in sets.items()
        }
        drawn = _keep_sheet(folder, recipe, bound, order)
        spec = sets["train"].spec
        facts = DataFacts(FORMAT, sets["train"].fingerprint, spec.classes, _network(spec), rows, drawn)
        replace_text(folder / FACTS, json.dumps(asdict(facts)) + "\n")
    except Exception as error:  # noqa: BLE001  # of a task or data of one's own: no reason to end a run
        return f"{FACTS} could not be written: {error}"
    return ""


def _kept_fingerprint(folder: Path) -> str:
    try:
        return str(read_json(folder / FACTS, MAX_BYTES)["fingerprint"])
    except (OSError, ValueError, LookupError, TypeError):
        return ""


def _row(facts: SplitFacts) -> SplitRow:
    axes = list(zip(*facts.sizes, strict=True))
    sizes = tuple(tuple(float(rule(axis)) for axis in axes) for rule in (min, statistics.median, max)) if axes else ()
    boxes = tuple(float(rule(facts.boxes)) for rule in (min, statistics.median, max)) if facts.boxes else ()
    counted = (facts.counted, facts.counts, facts.counted_in)
    return SplitRow(facts.items, facts.kind, *counted, len(facts.sizes), sizes, boxes)


def _network(spec: DataSpec) -> str:
    """Say what the network is given."""
    way = 1 if len(spec.size) > 2 else -1  # width first, as sizes of image files are shown
    sides, spacing = (" x ".join(f"{each:.5g}" for each in values[::way]) for values in (spec.size, spec.spacing))
    voxels = f", voxels of {spacing} mm" if spacing else ""
    return f"{sides}, {spec.channels} channel{'s' * (spec.channels > 1)}{voxels}"


def _keep_sheet(folder: Path, recipe: Recipe, bound: Bound, order: Order) -> str:
    """Write samples.jpg and return what is on it, or why there is none."""
    from sightline.data.loading.loader import BadSamples
    from sightline.report import samples

    data, deadline = recipe.data, time.monotonic() + DRAW_S
    bad = BadSamples(data.on_bad_sample, data.max_bad_samples, lambda _: None)  # the training has told of them
    try:
        (folder / SHEET).unlink(missing_ok=True)  # of other data
        task = recipe.task.build()
        drawn = samples.draw_samples(bound, order, task, bad, MOST_VALUES, lambda: time.monotonic() > deadline)
        words = f"{drawn.words()}; seed {recipe.train.seed}"
        image = samples.sheet(drawn, f"{recipe.name}: {words}")
        packed = io.BytesIO()
        image.save(packed, "JPEG", quality=75, subsampling=0)
        with replaced(folder / SHEET) as file:
            file.write(packed.getvalue())
    except UsageError as error:  # it names the remedy: a task without `seen`
        return f"samples were not drawn: {error}"
    except Exception as error:  # noqa: BLE001  # of a task or data of one's own: no reason to end a run
        return f"samples were not drawn: {error}; `sightline show {folder}` draws them"
    return words


# Shown on the page


def section(folder: Path, most_bytes: int) -> str:
    """Return what the page of a run says of its data; "" if its folder holds nothing about them. The sheet is left out
    if it has more bytes than these."""
    try:
        facts = as_dataclass(DataFacts, read_json(folder / FACTS, MAX_BYTES))
        rows = {str(name): as_dataclass(SplitRow, row) for name, row in facts.splits.items()}
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        return f'<p class="bad">{text(f"{FACTS} cannot be read: {error}"[:300])}</p>'
    return _splits(rows) + _bars(facts.classes, rows) + _seen(folder, facts, most_bytes)


def _splits(rows: Mapping[str, SplitRow]) -> str:
    header = ["split", "samples", *(f"{which} size" for which in ("smallest", "median", "largest")), "boxes per image"]
    lines = []
    for name, row in rows.items():
        sizes = [" x ".join(f"{side:g}" for side in (each if len(each) > 2 else each[::-1])) for each in row.sizes]
        low, median, high = row.boxes if len(row.boxes) == 3 else (0, 0, 0)
        boxes = f"{low:g} to {high:g}, median {median:g}" if row.boxes else ""
        lines.append([name, f"{row.items:,} {row.kind}", *(sizes if len(sizes) == 3 else [""] * 3), boxes])
    kept = [at for at in range(len(header)) if any(line[at] for line in lines)]
    head = "".join(f"<th>{text(header[at])}</th>" for at in kept)
    body = "".join(f"<tr>{''.join(f'<td>{text(line[at])}</td>' for at in kept)}</tr>" for line in lines)
    axes = {2: "width x height", 3: "slices x rows x columns"}
    ways = {axes[len(row.sizes[0])] for row in rows.values() if row.sizes and len(row.sizes[0]) in axes}
    part = [f"{row.measured:,} of {row.items:,} {name}" for name, row in rows.items() if 0 < row.measured < row.items]
    words = [*sorted(ways), *([f"of {', '.join(part)}, evenly spread"] if part else [])]
    of = f'<p class="dim">sizes: {text("; ".join(words))}</p>' if words else ""
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>{of}'


def _bars(classes: Sequence[str], rows: Mapping[str, SplitRow]) -> str:
    """Return a bar for every class and split, the largest class of the first split first."""
    rows = {name: row for name, row in rows.items() if _is_countable(row, len(classes))}
    if not rows:
        return ""
    first = next(iter(rows.values()))
    order = sorted(range(len(classes)), key=lambda number: -first.counts[number])
    shown, rest = [order], ""
    if len(order) > CLASSES_SHOWN:
        shown, between = [order[:ENDS_SHOWN], order[-ENDS_SHOWN:]], order[ENDS_SHOWN:-ENDS_SHOWN]
        low, high = first.counts[between[-1]], first.counts[between[0]]
        rest = f"{len(between):,} more classes with {low:,} to {high:,} {first.counted} each"
    head = "".join(f"<th>{text(f'{row.counted} of {name}')}</th>" for name, row in rows.items())
    line = f'<tr><td colspan="{1 + len(rows)}" class="dim">{text(rest)}</td></tr>' if rest else ""
    body = line.join("".join(_bar_row(classes[number], number, rows) for number in group) for group in shown)
    part = [f"{row.counted_in:,} of {row.items:,} {name}" for name, row in rows.items() if row.counted_in < row.items]
    of = f'<p class="dim">counted in {text(", ".join(part))}, evenly spread</p>' if part else ""
    return f'<div class="scroll"><table class="bars"><tr><th>class</th>{head}</tr>{body}</table></div>{of}'


def _is_countable(row: SplitRow, classes: int) -> bool:
    """Return whether a row out of a file has a number for every class, and something to compare."""
    return len(row.counts) == classes and min(row.counts, default=0) >= 0 and any(row.counts)


def _bar_row(name: str, number: int, rows: Mapping[str, SplitRow]) -> str:
    cells = []
    for row in rows.values():
        count, most = row.counts[number], max(row.counts)
        share = f" ({100 * count / sum(row.counts):.2g}\u00a0%)" if row.counted in ("voxels", "pixels") else ""
        said = f"{short(count) if count >= 10**6 else f'{count:,}'}{share}"
        cells.append(f'<td><i style="width:{60 * count / most:.1f}%"></i>{text(said)}</td>')
    return f'<tr><td class="wrap">{text(name)}</td>{"".join(cells)}</tr>'


def _seen(folder: Path, facts: DataFacts, most_bytes: int) -> str:
    image = ""
    with contextlib.suppress(BadSample):  # gone or damaged: the words are left
        data = read_bytes(folder / SHEET, SHEET)
        decode_rgb(data, SHEET)
        if 4 * len(data) <= 3 * most_bytes:  # as base64
            image = f'<img alt="training samples" src="data:image/jpeg;base64,{base64.b64encode(data).decode()}">'
    words = f"what the network sees ({facts.network}): {facts.drawn}"
    return f'<h3>Samples</h3><div class="scroll sheet">{image}</div><p class="dim">{text(words)}</p>'
