"""`sightline report`: one self-contained HTML page about a run, or about several beside each other. Imports no torch.

No remote references and no scripts; all text of the run is escaped, its images are embedded.
"""

from __future__ import annotations

import base64
import io
import math
import shlex
import time
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from PIL import Image

from sightline import __version__
from sightline.data.decode import decode_rgb
from sightline.data.inputs import read_bytes
from sightline.errors import BadData
from sightline.files.whole import replace_text
from sightline.report import data_facts
from sightline.report.charts import line_chart
from sightline.report.story import RunStory, read_story
from sightline.report.style import STYLE
from sightline.runs.screen import as_hours, as_score

PAGE = "report.html"
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
CLASSES_SHOWN, MATRIX_MOST, PAIRS_SHOWN, SAMPLES_SHOWN = 40, 24, 20, 12
THUMBNAIL = 180
CHARTS = (  # title, and the curves that it shows
    ("Loss", ("train/loss", "evaluate/loss", "evaluate/val_loss")),
    ("Scores", ()),  # the headline and what the training measures of it
    ("Learning rate", ("train/lr",)),
    ("Images per second", ("train/images_per_s",)),
    ("Waiting for data, share of the time", ("train/data_wait",)),
    ("Gradient norm", ("train/grad_norm",)),
)


def write_report(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page of these runs and return where it lies: in the run folder, for several runs in this one."""
    stories = [read_story(folder) for folder in folders]
    path = out or (folders[0] / PAGE if len(folders) == 1 else Path(PAGE))
    replace_text(path, page(stories))
    return path


def page(stories: Sequence[RunStory]) -> str:
    """Return the whole page."""
    title = _e(", ".join(_name(story) for story in stories))
    body = _one(stories[0]) if len(stories) == 1 else _several(stories)
    made = f"written {time.strftime('%Y-%m-%d %H:%M')} by sightline {_e(__version__)}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>{title}</title><style>{STYLE}</style></head>\n"
        f'<body><main>{body}<p class="dim">{made}</p></main></body></html>\n'
    )


def _one(story: RunStory) -> str:
    run = story.summary
    parts = [
        f"<h1>{_e(_name(story))}</h1>",
        f'<p class="dim">{_e(run.recipe or "unknown recipe")} on {_e(run.data or "unknown data")}: {_e(run.state)}'
        f"{_e(', ' + run.reason) if run.reason and run.state != 'finished' else ''}</p>",
        _numbers(story),
        "".join(f'<p class="bad">{_e(problem)}</p>' for problem in story.problems),
        _section("Curves", _charts([story])),
        _section("Classes", _classes(story)),
        _section("Confusions", _confusions(story)),
        _section("Most wrong samples", _samples(story)),
        _section("Data", data_facts.section(Path(run.path))),
        _section("Command", _command(story)),
        _section("Events", _events(story)),
        _section("Environment", _pairs(_environment(story))),
        _section("Configuration", _folded("all fields", _pairs(story.fields.items()))),
    ]
    return "".join(parts)


def _several(stories: Sequence[RunStory]) -> str:
    rows = [
        [
            _e(_name(story)),
            _e(story.summary.recipe or "-"),
            _e(f"{story.summary.headline or '-'} {as_score(story.summary.best)}"),
            _e(story.summary.best_epoch if story.summary.best_epoch is not None else "-"),
            _e(as_hours(story.summary.seconds or 0)),
            _e(_speed(story)),
            _e(story.summary.state),
        ]
        for story in stories
    ]
    header = ("run", "recipe", "best", "at epoch", "time", "img/s", "state")
    keys = sorted({key for story in stories for key in story.fields if not key.startswith("run.out")})
    differing = [key for key in keys if len({story.fields.get(key, "-") for story in stories}) > 1]
    changes = [[_e(key), *(_e(story.fields.get(key, "-")) for story in stories)] for key in differing]
    return "".join(
        [
            f"<h1>{len(stories)} runs</h1>",
            _table(header, rows),
            _section("Curves", _charts(stories)),
            _section("What differs", _table(("field", *map(_name, stories)), changes) if changes else "nothing"),
            *(f"<h2>{_e(_name(story))}</h2>" + _folded("the whole page of this run", _one(story)) for story in stories),
        ]
    )


def _numbers(story: RunStory) -> str:
    run, last = story.summary, story.last.get("values")
    shown = []
    if run.headline:
        at = f"best, epoch {run.best_epoch}" if run.best_epoch is not None else "best"
        shown.append((f"{run.headline} {as_score(run.best)}", at))
        if isinstance(last, dict) and _is_score(last.get(run.headline)) and last[run.headline] != run.best:
            shown.append((f"{run.headline} {as_score(last[run.headline])}", f"last, epoch {story.last.get('epoch')}"))
    if run.epochs_done is not None:
        shown.append((f"{run.epochs_done} of {run.epochs or '?'}", "epochs"))
    if run.seconds is not None:
        shown.append((as_hours(run.seconds), "time at work"))
    if speed := _speed(story):
        shown.append((speed, "images per second"))
    return (
        '<div class="big">' + "".join(f"<div><b>{_e(a)}</b><small>{_e(b)}</small></div>" for a, b in shown) + "</div>"
    )


def _speed(story: RunStory) -> str:
    values = sorted(y for _, y in story.curves.get("train/images_per_s", []) if math.isfinite(y))
    return f"{values[len(values) // 2]:,.0f}" if values else ""


def _charts(stories: Sequence[RunStory]) -> str:
    cards = []
    for title, names in CHARTS:
        wanted = names or tuple(dict.fromkeys(key for story in stories for key in _score_curves(story)))
        series = {}
        for story in stories:
            for name in wanted:
                if points := story.curves.get(name):
                    label = name if len(stories) == 1 else f"{_name(story)} {name}" if len(wanted) > 1 else _name(story)
                    series[label] = points
        if drawn := line_chart(series):
            cards.append(f'<div class="card"><h3>{_e(title)}</h3>{drawn}</div>')
    return f'<div class="charts">{"".join(cards)}</div>' if cards else ""


def _score_curves(story: RunStory) -> list[str]:
    headline = story.summary.headline
    names = [f"train/{headline}", f"evaluate/{headline}"]
    return [name for name in names if name in story.curves]


def _classes(story: RunStory) -> str:
    rows = story.rows("classes")
    if not rows:
        return ""
    names = [name for name in rows[0] if name not in ("class", "label")]
    score = next((name for name in names if name not in ("samples", "truths")), names[0] if names else "")
    rows = sorted(rows, key=lambda row: row[score] if _is_score(row.get(score)) else math.inf)
    cells = [[_e(row.get("class", "?")), *(_cell(row.get(name)) for name in names)] for row in rows]
    shown = _table(("class", *names), cells[:CLASSES_SHOWN], numbers=True)
    more = cells[CLASSES_SHOWN:]
    return shown + (_folded(f"{len(more)} more", _table(("class", *names), more, numbers=True)) if more else "")


def _confusions(story: RunStory) -> str:
    rows = [row for row in story.rows("confusion") if _is_score(row.get("samples"))]
    if not rows:
        return ""
    classes = [str(row.get("class")) for row in story.rows("classes")]
    if not 2 <= len(classes) <= MATRIX_MOST:
        cells = [[_e(row.get("class")), _e(row.get("predicted")), _cell(row["samples"])] for row in rows[:PAIRS_SHOWN]]
        return _table(("class", "taken for", "samples"), cells, numbers=True)
    counts = {(str(row.get("class")), str(row.get("predicted"))): row["samples"] for row in rows}
    most = max(counts.values()) or 1
    top = "".join(f'<th class="top">{_e(name)}</th>' for name in classes)
    lines = []
    for name in classes:
        tds = (
            f'<td style="background:color-mix(in srgb,var(--c7) {100 * counts[name, other] / most:.0f}%,transparent)">'
            f"{_e(counts[name, other])}</td>"
            if counts.get((name, other))
            else "<td></td>"
            for other in classes
        )
        lines.append(f"<tr><th>{_e(name)}</th>{''.join(tds)}</tr>")
    return (
        f'<div class="scroll"><table class="matrix"><tr><th></th>{top}</tr>{"".join(lines)}</table></div>'
        '<p class="dim">rows: the class, columns: what it was taken for; correct ones are left out</p>'
    )


def _samples(story: RunStory) -> str:
    worst = story.scores.get("worst")
    figures = []
    for row in worst[:SAMPLES_SHOWN] if isinstance(worst, list) else []:
        if not isinstance(row, dict):
            continue
        said = "; ".join(
            f"{key} {as_score(value) if _is_score(value) else value}"
            for key, value in row.items()
            if key not in ("index", "name", "path")
        )
        image = _thumbnail(_file_of(story, row))
        source = f'<img alt="" src="{image}">' if image else ""
        figures.append(
            f"<figure>{source}<figcaption>{_e(row.get('name', '?'))}<br><small>{_e(said)}</small></figcaption></figure>"
        )
    return f'<div class="samples">{"".join(figures)}</div>' if figures else ""


def _file_of(story: RunStory, row: dict[str, Any]) -> Path | None:
    """Return the image of a sample, if it is a file below the data of the run."""
    name, data, path = row.get("name"), story.summary.data, row.get("path")
    if isinstance(path, str) and Path(path).is_file():
        return Path(path)
    if not isinstance(name, str) or not data:
        return None
    places = (Path(data), *(Path(data) / split for split in ("val", "valid", "validation", "test", "train")))
    return next((place / name for place in places if (place / name).is_file()), None)


def _thumbnail(path: Path | None) -> str:
    """Return a small JPEG as a data URI; "" for what cannot be decoded."""
    if path is None:
        return ""
    try:
        image = Image.fromarray(decode_rgb(read_bytes(path, path.name), path.name))
    except BadData:
        return ""
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    packed = io.BytesIO()
    image.save(packed, "JPEG", quality=82)
    return f"data:image/jpeg;base64,{base64.b64encode(packed.getvalue()).decode()}"


def _command(story: RunStory) -> str:
    command = story.environment.get("command")
    if not isinstance(command, list) or not command:
        return ""
    return f"<pre>{_e(shlex.join(['sightline', *map(str, command[1:])]))}</pre>"


def _events(story: RunStory) -> str:
    rows = [
        [_e(time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))), _e(text)]
        for when, text in story.events
        if 0 <= when < 2**33
    ]
    return _table(("time", "event"), rows) if rows else ""


def _environment(story: RunStory) -> Iterable[tuple[str, Any]]:
    for key, value in story.environment.items():
        if key == "command":
            continue
        if isinstance(value, dict):
            value = ", ".join(f"{name} {each}" for name, each in value.items())
        yield key, value


def _section(title: str, content: str) -> str:
    return f"<section><h2>{_e(title)}</h2>{content}</section>" if content else ""


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{_e(title)}</summary>{content}</details>" if content else ""


def _pairs(pairs: Iterable[tuple[str, Any]]) -> str:
    rows = [f'<tr><td>{_e(key)}</td><td class="wrap">{_e(value)}</td></tr>' for key, value in pairs]
    return f'<div class="scroll"><table>{"".join(rows)}</table></div>' if rows else ""


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], numbers: bool = False) -> str:
    """Return a table of cells that are escaped already; with `numbers` all but the first column are numbers."""
    kind = ' class="n"' if numbers else ""
    first, *rest = header
    head = f"<th>{_e(first)}</th>" + "".join(f"<th{kind}>{_e(name)}</th>" for name in rest)
    lines = [f"<tr><td>{row[0]}</td>" + "".join(f"<td{kind}>{cell}</td>" for cell in row[1:]) + "</tr>" for row in rows]
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(lines)}</table></div>'


def _cell(value: Any) -> str:
    return _e(as_score(value) if isinstance(value, float) or value is None else value)


def _is_score(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _name(story: RunStory) -> str:
    return story.summary.name


def _e(value: Any) -> str:
    return escape(str(value))
