"""The sections of a report that an evaluation fills: numbers, classes, precision over recall, confusions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sightline.report.charts import line_chart, short
from sightline.report.html import bar, card, folded, is_score, number, table, text
from sightline.report.story import RunStory
from sightline.runs.score_names import COCO_MORE, of_class, shown, title
from sightline.runs.screen import as_hours, as_score

CLASSES_SHOWN, CLASSES_LISTED, PAIRS_SHOWN = 20, 1000, 20
NUMBERED_MOST = 20  # classes up to which cells of the confusion matrix hold their number
MANY = 10**6  # of a cell: counts of pixels are shortened from here on
COUNTS = ("samples", "truths", "pixels")  # columns of the table of classes
COUNTED = ("samples", "volumes", "skipped")  # values of an evaluation
BESIDE = {"ap": "ap50", "dice": "iou", "miou": "dice"}  # a second score that people compare, by the headline


def numbers(story: RunStory) -> str:
    """Return the few numbers that one looks for first."""
    run, last = story.summary, story.last.get("values")
    tiles = []
    if run.headline:
        at = f"best, epoch {run.best_epoch}" if run.best_epoch is not None else "best"
        tiles.append((f"{title(run.headline)} {as_score(run.best)}", at))
        best, other = story.best.get("values"), BESIDE.get(run.headline, "")
        if isinstance(best, dict) and is_score(best.get(other)):
            tiles.append((f"{title(other)} {as_score(best[other])}", at))
        if isinstance(last, dict) and story.last.get("step") != story.best.get("step"):
            score = as_score(_score(last.get(run.headline)))
            tiles.append((f"{title(run.headline)} {score}", f"last, {_epoch(story.last)}"))
        tested = story.test.get("values")
        if isinstance(tested, dict):
            tiles.append((f"{title(run.headline)} {as_score(_score(tested.get(run.headline)))}", "test split"))
    if run.epochs_done is not None:
        tiles.append((f"{run.epochs_done} of {run.epochs or '?'}", "epochs"))
    if run.seconds is not None:
        tiles.append((as_hours(run.seconds), "training time"))
    if value := speed(story):
        tiles.append((value, "images per second"))
    if story.skipped:
        tiles.append((str(len(story.skipped)), "samples skipped"))
    return (
        '<div class="big">'
        + "".join(f"<div><b>{text(a)}</b><small>{text(b)}</small></div>" for a, b in tiles)
        + "</div>"
    )


def speed(story: RunStory) -> str:
    """Return the images per second of the last start, as its last line said; while there is none, the median of what
    was logged; "" without either."""
    if 0 < story.images_per_s < math.inf:
        return f"{story.images_per_s:,.0f}"
    values = sorted(y for _, y in story.curves.get("train/images_per_s", []) if math.isfinite(y))
    return f"{values[len(values) // 2]:,.0f}" if values else ""


def all_values(story: RunStory) -> str:
    """Return every score of the best and of the last evaluation, and those of the test split."""
    best, last = (each.get("values") for each in (story.best, story.last))
    columns = {f"best, {_epoch(story.best)}": best} if isinstance(best, dict) else {}
    if isinstance(last, dict) and (not columns or story.last.get("step") != story.best.get("step")):
        columns[f"last, {_epoch(story.last)}"] = last
    if isinstance(tested := story.test.get("values"), dict):
        columns[f"test split, step {story.test.get('step', '?')}"] = tested
    return values_beside(columns)


def values_beside(columns: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the values of evaluations by name, a column each; "" without a value."""
    every = columns.values()
    names = list(dict.fromkeys(name for values in every for name in (*shown(values), *COUNTED) if name in values))
    more = [name for name in names if name in COCO_MORE and "ap" in names]
    rows = {name: [text(title(name)), *(_value(name, values.get(name)) for values in every)] for name in names}
    header = ("score", *columns)
    drawn = table(header, [row for name, row in rows.items() if name not in more], numbers=True) if rows else ""
    others = table(header, [rows[name] for name in more], numbers=True) if more else ""
    return drawn + folded(f"{len(more)} more of COCO's scores", others)


def classes(story: RunStory) -> str:
    """Return the table of classes, the lowest scores first, and beside it precision over recall."""
    parts = [class_table(story), card(_curve_title(story), curves(story))]
    drawn = [f"<div>{part}</div>" for part in parts if part]
    return f'<div class="two">{"".join(drawn)}</div>' if len(drawn) > 1 else "".join(drawn)


def class_table(story: RunStory, most: int = CLASSES_LISTED) -> str:
    """Return the table of classes, the lowest scores first; "" without one."""
    rows = story.rows("classes")
    if not rows:
        return ""
    names = [name for name in rows[0] if name not in ("class", "label")]
    names = [name for name in names if name not in COUNTS] + [name for name in names if name in COUNTS]
    rows = sorted(rows, key=lambda row: row[names[0]] if names and is_score(row.get(names[0])) else math.inf)
    cells = [
        [text(row.get("class", "?")), *((number if name in COUNTS else bar)(row.get(name)) for name in names)]
        for row in rows[:most]
    ]
    header = ("class", *(title(of_class(name)) for name in names))
    drawn = table(header, cells[:CLASSES_SHOWN], numbers=True)
    if more := cells[CLASSES_SHOWN:]:
        drawn += folded(f"{len(more)} more", table(header, more, numbers=True))
    if (left := len(rows) - most) > 0:
        drawn += f'<p class="dim">{left} more in the scores file</p>'
    return drawn + _threshold_note(story)


def _threshold_note(story: RunStory) -> str:
    """Say at which score boxes count for precision, recall and F1."""
    values = story.scores.get("values")
    found = values if isinstance(values, dict) else {}
    threshold: Any = found.get("score_threshold")
    if not (is_score(threshold) and found.get("f1")) or threshold < 0:
        return ""
    return (
        f'<p class="dim">Precision, recall and F1 are those of boxes with a score of at least {number(threshold)}, '
        "where F1 over all classes is best on these data; a box is right from IoU 0.5 on.</p>"
    )


def curves(story: RunStory) -> str:
    """Draw precision over recall; a curve ends where its recall does."""
    series = {}
    for row in story.rows("precision_recall"):
        values = row.get("precision")
        if isinstance(values, list) and len(values) > 1 and all(map(is_score, values)):
            name = "all classes" if row.get("class") is None else str(row["class"])
            points = [(place / (len(values) - 1), value) for place, value in enumerate(values)]
            while points and points[-1][1] == 0:
                points.pop()
            series[name] = points
    return line_chart(series, "recall", (0.0, 1.0), (0.0, 1.0))


def _curve_title(story: RunStory) -> str:
    headline = story.summary.headline
    if headline == "ap":
        return "Precision-recall curve at IoU 0.5"
    if headline == "top1":
        return "Precision-recall curve (by confidence threshold)"
    return "Precision-recall curve"


def confusions(story: RunStory) -> str:
    """Return the confusion matrix, or the most frequent mistakes of many classes."""
    if drawn := _matrix(story.rows("matrix")):
        return drawn
    rows = [row for row in story.rows("confusion") if is_score(row.get("samples"))][:PAIRS_SHOWN]
    cells = [[text(row.get("class")), text(row.get("predicted")), number(row["samples"])] for row in rows]
    return table(("class", "predicted as", "samples"), cells) if cells else ""


def _matrix(rows: Sequence[dict[str, Any]]) -> str:
    counts: list[Any] = [row.get("predicted") for row in rows]
    if not rows or not all(isinstance(row, list) and len(row) == len(rows) for row in counts):
        return ""
    if not all(is_score(count) for row in counts for count in row):
        return ""
    names = [str(row.get("class")) for row in rows]
    top = "".join(f'<th class="top"><span>{text(name)}</span></th>' for name in names)
    lines = []
    for place, (name, row) in enumerate(zip(names, counts, strict=True)):
        total = sum(row) or 1
        cells = "".join(
            _cell(count, count / total, other == place, f"{name} predicted as {names[other]}: {count}", len(names))
            for other, count in enumerate(row)
        )
        lines.append(f"<tr><th>{text(name)}</th>{cells}</tr>")
    return (
        f'<div class="scroll"><table class="matrix"><tr><th></th>{top}</tr>{"".join(lines)}</table></div>'
        '<p class="dim">rows: the true class; columns: the predicted one; colours: shares of a row</p>'
    )


def _cell(count: float, share: float, is_right: bool, said: str, classes: int) -> str:
    if not count:
        return "<td></td>"
    inside = text(short(count) if count >= MANY else count) if classes <= NUMBERED_MOST else ""
    kind = "good" if is_right else "wrong"
    return f'<td class="{kind}" style="--v:{100 * min(share, 1):.0f}%" title="{text(said)}">{inside}</td>'


def _epoch(scores: dict[str, Any]) -> str:
    return f"epoch {scores.get('epoch', '?')}"


def _value(name: str, value: Any) -> str:
    return number(int(value) if name in COUNTED and is_score(value) else _score(value))


def _score(value: Any) -> float | None:
    return value if is_score(value) else None
