"""The most wrong samples in a report: drawings that the evaluation left, or thumbnails of the files."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from sightline.data.decode import decode_rgb
from sightline.errors import BadData
from sightline.files.image_bytes import read_bytes
from sightline.report.html import is_score, text
from sightline.report.story import RunStory
from sightline.runs.screen import as_score

SHOWN = 12
THUMBNAIL = 180
MOST_TILES = 4  # of one sample
_JPEG = re.compile("/9j/[A-Za-z0-9+/]+={0,2}")  # the first bytes of a JPEG, in base64
_COLOUR = re.compile("#[0-9a-f]{6}")


def most_wrong(story: RunStory, most_bytes: int, most: int = SHOWN) -> str:
    """Return the samples in the order of the scores; images take at most this many bytes of the page."""
    worst = story.scores.get("worst")
    rows = [row for row in worst if isinstance(row, dict)] if isinstance(worst, list) else []
    drawn = _drawings(story)
    shown = [row for row in rows if not drawn or str(row.get("index")) in drawn]
    figures = _figures(story, shown[:most], drawn, most_bytes)
    return (_legend(story) if drawn else "") + figures if figures else ""


def suspicious(story: RunStory, most_bytes: int) -> str:
    """Return the samples whose labels the network contradicts, as `check RUN` found them."""
    found = story.suspicious
    rows = (
        [row for row in found.get("rows", ()) if isinstance(row, dict)] if isinstance(found.get("rows"), list) else []
    )
    if not rows:
        return ""
    told = f"{len(rows)} images, the most suspicious first, as {found.get('checkpoint', '?')} predicts them"
    return f'<p class="dim">{text(told)}</p>{_figures(story, rows[:SHOWN], {}, most_bytes)}'


def _figures(
    story: RunStory, rows: Sequence[dict[str, Any]], drawn: Mapping[str, dict[str, str]], most_bytes: int
) -> str:
    figures, wide = [], False
    for row in rows:
        tiles = drawn[str(row.get("index"))] if drawn else _thumbnail(_file_of(story, row))
        size = sum(map(len, tiles.values()))
        tiles = tiles if size <= most_bytes else {}
        most_bytes -= size if tiles else 0
        wide |= len(tiles) > 1
        figures.append(_figure(row, tiles))
    return f'<div class="samples{" wide" * wide}">{"".join(figures)}</div>' if figures else ""


def _figure(row: dict[str, Any], tiles: dict[str, str]) -> str:
    shown = "".join(
        f"<span>{f'<small>{text(title)}</small>' if len(tiles) > 1 else ''}"
        f'<img alt="{text(title)}" src="data:image/jpeg;base64,{data}"></span>'
        for title, data in tiles.items()
    )
    tiled = f'<div class="tiles">{shown}</div>' if shown else ""
    return (
        f"<figure>{tiled}<figcaption>{_said(row)}<br><small>{text(row.get('name', '?'))}</small></figcaption></figure>"
    )


def _said(row: dict[str, Any]) -> str:
    """Say what is wrong with a sample."""
    words = []
    if "predicted" in row:
        was, found = text(row.get("class") or "no class"), text(row["predicted"] or "no class")
        words.append(f'<b>{was}</b> predicted as <b class="bad">{found}</b>')
    if "missed" in row:
        missed = f"{text(row['missed'])} of {text(row.get('truths'))} objects missed"
        words.append(f"{missed}, {text(row.get('wrong'))} wrong")
    told = ("index", "name", "path", "class", "predicted", "truths", "missed", "wrong", "volume")
    words += [
        f"{text(key.replace('_', ' '))} {text(as_score(value) if is_score(value) else value)}"
        for key, value in row.items()
        if key not in told
    ]
    return ", ".join(words)


def _drawings(story: RunStory) -> dict[str, dict[str, str]]:
    """Return the tiles of each sample; {} if they belong to other scores than those that are shown."""
    found = story.drawings.get("drawings")
    if not isinstance(found, dict) or story.drawings.get("step") != story.scores.get("step"):
        return {}
    drawn = {}
    for index, tiles in found.items():
        listed = list(tiles.items())[:MOST_TILES] if isinstance(tiles, dict) else []
        drawn[index] = {title: data for title, data in listed if isinstance(data, str) and _JPEG.fullmatch(data)}
    return {index: tiles for index, tiles in drawn.items() if tiles}


def _legend(story: RunStory) -> str:
    colours = story.drawings.get("colours")
    if not isinstance(colours, dict):
        return ""
    items = (
        f'<span><i style="background:{colour}"></i>{text(name)}</span>'
        for name, colour in colours.items()
        if isinstance(colour, str) and _COLOUR.fullmatch(colour)
    )
    return f'<p class="legend">{"".join(items)}</p>'


def _file_of(story: RunStory, row: dict[str, Any]) -> Path | None:
    """Return the image of a sample, if it is a file below the data of the run."""
    name, data, path = row.get("name"), story.summary.data, row.get("path")
    if isinstance(path, str) and Path(path).is_file():
        return Path(path)
    if not isinstance(name, str) or not data:
        return None
    places = (Path(data), *(Path(data) / split for split in ("val", "valid", "validation", "test", "train")))
    return next((place / name for place in places if (place / name).is_file()), None)


def _thumbnail(path: Path | None) -> dict[str, str]:
    """Return a small JPEG; {} for what cannot be decoded."""
    if path is None:
        return {}
    try:
        image = Image.fromarray(decode_rgb(read_bytes(path, path.name), path.name))
    except BadData:
        return {}
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    packed = io.BytesIO()
    image.save(packed, "JPEG", quality=82)
    return {"image": base64.b64encode(packed.getvalue()).decode()}
