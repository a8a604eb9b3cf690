"""`sightline report`: one self-contained HTML page about a run, or about several beside each other. Imports no torch.

No remote references and no scripts; all text of the run is escaped, its images are embedded.
"""

from __future__ import annotations

import re
import shlex
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sightline import __version__
from sightline.errors import UsageError
from sightline.files.regular import regular
from sightline.files.whole import write_whole
from sightline.report import data_facts
from sightline.report.curves import charts
from sightline.report.html import anchor, bar, folded, is_score, pairs, section, table, text
from sightline.report.most_wrong import most_wrong, suspicious
from sightline.report.scores import all_values, classes, confusions, numbers, speed
from sightline.report.story import RunStory, read_story
from sightline.report.style import STYLE
from sightline.runs.score_names import title as title_of
from sightline.runs.screen import as_hours, as_score

PAGE = "report.html"
TAIL_BYTES = 200  # of a page, whose end names us
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
IMAGE_BYTES = 2 * 2**20  # of all images of a page, so that it stays below 3 MB
SUSPICIOUS_BYTES = 2**18  # of those images whose labels may be wrong, besides
RELOAD_S = 60  # while the run is at work
SHARED_SHOWN = 10  # values that have one origin
SKIPPED_SHOWN, CLASSES_COMPARED = 20, 20


def write_report(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page of these runs and return where it lies: in the run folder, for several runs in this one."""
    stories = [read_story(folder) for folder in folders]
    path = out or (folders[0] / PAGE if len(folders) == 1 else Path(PAGE))
    if path.is_file() and path not in [folder / PAGE for folder in folders] and not _is_page(path):
        raise UsageError(f"{path} exists and is not a page of `sightline report`; delete it, or give another --out")
    html = page(stories)
    write_whole(path, lambda temporary: temporary.write_text(html, encoding="utf-8"))
    return path


def _is_page(path: Path) -> bool:
    with open(path, "rb", opener=regular) as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        return bool(re.search(rb" by sightline [^<]*</p></main></body></html>\s*$", file.read()))


def page(stories: Sequence[RunStory]) -> str:
    """Return the whole page; it reloads itself while a run is at work."""
    names = _names(stories)
    is_running = any(story.summary.state == "running" for story in stories)
    reload = f'<meta http-equiv="refresh" content="{RELOAD_S}">' if is_running else ""
    body = _one(stories[0], names[0], IMAGE_BYTES) if len(stories) == 1 else _several(stories, names)
    written = f'<p class="dim">written {_time(time.time())} by sightline {text(__version__)}</p>'
    if is_running:
        body = f'<p class="note">running when this was written, {_time(time.time())}; reloads every minute</p>{body}'
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">{reload}'
        f"<title>{text(', '.join(names))}</title><style>{STYLE}</style></head>\n"
        f"<body><main>{body}{written}</main></body></html>\n"
    )


def _one(story: RunStory, name: str, image_bytes: int, is_whole: bool = True) -> str:
    run = story.summary
    sections = {
        "Curves": charts([story], [name]),
        "Worst predictions": most_wrong(story, image_bytes // 2),
        "Suspicious labels": suspicious(story, SUSPICIOUS_BYTES),
        "Classes": classes(story),
        "Confusion matrix": confusions(story),
        "Scores": all_values(story),
        "Data": data_facts.section(Path(run.path), image_bytes // 2),
        "Command": _command(story),
        "Events": _events(story),
        "Environment": pairs(_environment(story)),
        "Configuration": _configuration(story),
    }
    links = "".join(f'<a href="#{anchor(title)}">{text(title)}</a>' for title, content in sections.items() if content)
    parts = [
        f"<h1>{text(name)} {_state(story)}</h1>",
        f'<p class="dim">{text(run.recipe or "unknown recipe")} on {text(run.data or "unknown data")}'
        f"{text(': ' + run.reason) if run.reason and run.state != 'finished' else ''}</p>",
        f"<nav>{links}</nav>" if is_whole else "",
        numbers(story),
        "".join(f'<p class="bad">{text(problem)}</p>' for problem in story.problems),
        *(section(title, content, is_whole) for title, content in sections.items()),
    ]
    return "".join(parts)


def _configuration(story: RunStory) -> str:
    """Show the values that are not the recipe's own, and where they come from; all others folded."""
    shared = Counter(story.why.values())  # a config file that names every field is one row
    rows = [
        [text(name), text(story.fields[name]), text(said)]
        for name, said in story.why.items()
        if shared[said] <= SHARED_SHOWN
    ]
    rows += [[f"{count} values", "", text(said)] for said, count in shared.items() if count > SHARED_SHOWN]
    decided = table(("value", "is", "because of"), rows) if rows else ""
    return decided + folded("all fields", pairs(story.fields.items()))


def _several(stories: Sequence[RunStory], names: Sequence[str]) -> str:
    keys = sorted({key for story in stories for key in story.fields if not key.startswith("run.out")})
    differing = [key for key in keys if len({story.fields.get(key, "-") for story in stories}) > 1]
    changes = [[text(key), *(text(story.fields.get(key, "-")) for story in stories)] for key in differing]
    each = IMAGE_BYTES // len(stories)
    return "".join(
        [
            f"<h1>{len(stories)} runs</h1>",
            _overview(stories, names),
            section("What differs", table(("field", *names), changes) if changes else "nothing"),
            section("Curves", charts(stories, names)),
            section("Classes that differ most", _compared_classes(stories, names)),
            *(
                f"<h2>{text(name)}</h2>" + folded("the whole page of this run", _one(story, name, each, is_whole=False))
                for name, story in zip(names, stories, strict=True)
            ),
        ]
    )


def _overview(stories: Sequence[RunStory], names: Sequence[str]) -> str:
    known = [story.summary.best for story in stories if story.summary.best is not None]
    rows = []
    for name, story in zip(names, stories, strict=True):
        run = story.summary
        best = text(f"{title_of(run.headline or '-')} {as_score(run.best)}")
        rows.append(
            [
                text(name),
                text(run.recipe or "-"),
                f"<b>{best}</b>" if known and run.best == max(known) else best,
                text("-" if run.best_epoch is None else run.best_epoch),
                text(f"{'-' if run.epochs_done is None else run.epochs_done} of {run.epochs or '?'}"),
                text(as_hours(run.seconds or 0)),
                text(speed(story) or "-"),
                _state(story),
            ]
        )
    return table(("run", "recipe", "best", "at epoch", "epochs", "time", "img/s", "state"), rows)


def _compared_classes(stories: Sequence[RunStory], names: Sequence[str]) -> str:
    """Return the headline score of each class in every run, those first in which the runs differ most."""
    found: dict[str, dict[int, float]] = {}
    for place, story in enumerate(stories):
        for row in story.rows("classes"):
            value: Any = row.get(story.summary.headline or "")
            if is_score(value):
                found.setdefault(str(row.get("class")), {})[place] = value
    rows = sorted(found.items(), key=lambda item: min(item[1].values()) - max(item[1].values()))[:CLASSES_COMPARED]
    cells = [[text(name), *(bar(values.get(place)) for place in range(len(stories)))] for name, values in rows]
    return table(("class", *names), cells, numbers=True) if cells else ""


def _command(story: RunStory) -> str:
    command = story.environment.get("command")
    if not isinstance(command, list) or not command:
        return ""
    return f"<pre>{text(shlex.join(['sightline', *map(str, command[1:])]))}</pre>"


def _events(story: RunStory) -> str:
    rows = [[_time(when), text(said)] for when, said in story.events if 0 <= when < 2**33]
    shown = table(("time", "event"), rows) if rows else ""
    if count := len(story.skipped):
        listed = pairs(list(story.skipped.items())[:SKIPPED_SHOWN])
        listed += f"<p>and {count - SKIPPED_SHOWN} more</p>" if count > SKIPPED_SHOWN else ""
        shown += folded(f"{count} samples could not be read and were skipped", listed)
    return shown


def _environment(story: RunStory) -> Iterable[tuple[str, Any]]:
    for key, value in story.environment.items():
        if key == "command":
            continue
        if isinstance(value, dict):
            value = ", ".join(f"{name} {each}" for name, each in value.items())
        yield key, value


def _state(story: RunStory) -> str:
    return f'<span class="state {story.summary.state}">{story.summary.state}</span>'


def _time(when: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))


def _names(stories: Sequence[RunStory]) -> list[str]:
    """Name runs by their folders, and by folders above where these are alike."""
    paths = [Path(story.summary.path).resolve().parts for story in stories]
    depth = next((n for n in range(1, 8) if len({path[-n:] for path in paths}) == len(paths)), 1)
    return ["/".join(path[-depth:]) for path in paths]
