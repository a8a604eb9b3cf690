"""Results as a notebook shows them: a piece of HTML with its own style, made of the parts of the report.

results.py asks for it (`as_html`). All text is escaped; images are inside, as JPEG.
"""

from __future__ import annotations

import contextlib
import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from sightline.data.decode import decode_rgb
from sightline.data.inputs import as_pixels
from sightline.drawing.findings import draw
from sightline.errors import SightlineError, UsageError
from sightline.files.image_bytes import read_bytes
from sightline.inference.mask_files import drawn_in_image
from sightline.inference.volume_files import drawn_mask
from sightline.overview.listing import RunSummary
from sightline.parts import Finding, Prediction
from sightline.report.curves import charts
from sightline.report.html import folded, text
from sightline.report.most_wrong import most_wrong
from sightline.report.page import PAGE
from sightline.report.scores import CLASSES_SHOWN, all_values, class_table, numbers, values_beside
from sightline.report.story import RunStory, read_story
from sightline.report.style import INLINE
from sightline.report.tiles import as_jpeg
from sightline.results import (
    Classification,
    Detection,
    Drawable,
    EvaluateResult,
    Predictions,
    ReportPage,
    Segmentation,
    TrainResult,
    as_html,
)

IMAGE_BYTES = 200_000  # of all images of one result, so that a notebook of many stays small
WORST_SHOWN = 6
SIDE, SIDE_AMONG = 480, 320  # pixels of the longer side of a prediction alone, and of one among several
SHEET_SIDE = 960  # of slices of a volume beside each other
NAMED = 5  # classes of an image, as `predict` shows them
FRAME_PX = 640  # height of a page
BASE = '<base href="about:srcdoc">'  # else the links of its contents would open the notebook inside of the frame


@as_html.register(TrainResult)
def of_training(result: TrainResult) -> str:
    """Show numbers, scores, curves and worst predictions of a run, and name its folder."""
    try:
        story = read_story(result.folder)
    except UsageError:  # moved or deleted
        return _inline(values_beside({"last": result.values}))
    has_page = (result.folder / PAGE).is_file()
    page = f", the report {result.folder / PAGE}" if has_page else ""
    said = f"{result.ended}. The run is in {result.folder}{page}; api.report({str(result.folder)!r}) shows it here."
    return _inline(
        numbers(story),
        "".join(f'<p class="bad">{text(problem)}</p>' for problem in story.problems),
        charts([story], [story.summary.name], only=("Loss", "Score")),
        all_values(story),
        _classes(story),
        _worst(story),
        f'<p class="dim">{text(said)}</p>',
    )


@as_html.register(EvaluateResult)
def of_evaluation(result: EvaluateResult) -> str:
    """Show scores and worst predictions; with the drawings of the run where these are of the same samples."""
    story = _story_of(result)
    return _inline(
        values_beside({"value": result.values}), _classes(story), _worst(story), f'<p class="dim">{text(result.of)}</p>'
    )


@as_html.register(Predictions)
def of_predictions(found: Sequence[Prediction]) -> str:
    """Show the drawings of predictions, as `sightline predict` writes them; the first ones of many."""
    figures: list[str] = []
    size = 0
    for each in found[: Predictions.SHOWN]:
        figure = _figure(each, SIDE if len(found) == 1 else SIDE_AMONG)
        size += len(figure)
        if figures and size > IMAGE_BYTES:
            break
        figures.append(figure)
    more = len(found) - len(figures)
    return _inline(
        f'<div class="drawn">{"".join(figures)}</div>', f'<p class="dim">and {more:,} more</p>' if more > 0 else ""
    )


@as_html.register(Drawable)
def of_prediction(found: Drawable) -> str:
    """Show the drawing of a prediction."""
    return of_predictions([found])


@as_html.register(ReportPage)
def of_page(report: ReportPage) -> str:
    """Show a whole page in a frame: no server, no script, and its style stays inside."""
    page = report.path.read_text(encoding="utf-8").replace("<head>", f"<head>{BASE}", 1)
    return (
        f'<iframe sandbox srcdoc="{html.escape(page)}" title="{text(report.path)}" '
        f'style="width:100%;height:{FRAME_PX}px;border:0;resize:vertical"></iframe>'
    )


def _inline(*parts: str) -> str:
    return f'<div class="sightline"><style>{INLINE}</style>{"".join(parts)}</div>'


def _classes(story: RunStory) -> str:
    return folded("classes", class_table(story, CLASSES_SHOWN))


def _worst(story: RunStory) -> str:
    drawn = most_wrong(story, IMAGE_BYTES, WORST_SHOWN)
    return f"<h3>Worst predictions</h3>{drawn}" if drawn else ""


def _story_of(result: EvaluateResult) -> RunStory:
    """Return a story of these scores alone, with the drawings of the run if it has drawn the same samples."""
    headline = next(iter(result.values), None)
    nothing = dict.fromkeys(("recipe", "data", "best", "best_epoch", "epochs_done", "epochs", "seconds", "exit_code"))
    story = RunStory(RunSummary(name="", path="", headline=headline, state="finished", reason="", **nothing))
    story.best = {"values": result.values, "tables": result.tables, "worst": result.worst, "step": result.step}
    if result.folder:
        with contextlib.suppress(UsageError):  # moved or deleted
            run = read_story(Path(result.folder))
            story.drawings = run.drawings if _samples(run) == _samples(story) else {}
    return story


def _samples(story: RunStory) -> list[tuple[Any, ...]]:
    worst = story.best.get("worst")
    rows = [row for row in worst if isinstance(row, dict)] if isinstance(worst, list) else []
    return [tuple(row.get(key) for key in ("index", "name", "path")) for row in rows]


def _figure(found: Prediction, side: int) -> str:
    """Return the drawing of a prediction; its words, if it cannot be drawn."""
    said = text(_said(found))
    try:
        image = _drawn(found, side) if isinstance(found, Drawable) else None
        shown = f'<img alt="{said}" src="data:image/jpeg;base64,{_packed(image)}">' if image else f"{said}<br>"
    except SightlineError as error:  # the file has gone, or is another one
        shown = f"{said}<br>{text(error)}<br>"
    kind = "wide" if isinstance(found, Segmentation) and found.mask.ndim == 3 else ""
    return f'<figure class="{kind}">{shown}<figcaption>{text(found.file)}</figcaption></figure>'


def _packed(image: Image.Image) -> str:
    """Return an image as JPEG, smaller if it would take more than all images of a result may."""
    while len(data := as_jpeg(image)) > IMAGE_BYTES:
        image.thumbnail((image.width * 3 // 4, image.height * 3 // 4))
    return data


def _said(found: Prediction) -> str:
    """Say in a line what was found."""
    if isinstance(found, Segmentation):
        return ", ".join(f"{name} {count / found.mask.size:.2%}" for name, count in found.voxels.items())
    if isinstance(found, Drawable):
        named = [f"{each.name} {each.score:.4f}" for each in _findings(found)]
        return ", ".join(named) or "nothing found"
    return repr(found)


def _drawn(found: Drawable, side: int) -> Image.Image | None:
    """Draw a prediction into its input as `sightline predict` does; None if that was in memory and has gone."""
    origin = found.origin
    given = origin.given if origin else None
    if origin is None or given is None:
        return None
    name = Path(found.file).name
    if isinstance(found, Segmentation):
        if origin.spec.class_ids:  # masks say what they call the classes, volumes do not
            image = drawn_in_image(name, given, origin.spec, found.mask)
        else:
            mask = found.mask if found.mask.ndim == 3 else found.mask[None]
            image = drawn_mask(name, given, origin.spec, mask)
        side = SHEET_SIDE if found.mask.ndim == 3 else SIDE
        image.thumbnail((side, side))
        return image
    pixels = decode_rgb(read_bytes(given, name), name) if isinstance(given, Path) else as_pixels(given, name)
    small = Image.fromarray(pixels)
    small.thumbnail((side, side))  # before letters are drawn, which stay readable
    return draw(np.asarray(small), _findings(found))


def _findings(found: Drawable) -> list[Finding]:
    """Return the classes or boxes of an image as `sightline predict` draws them."""
    if isinstance(found, Detection):
        shares = found.boxes / (found.width, found.height, found.width, found.height)
        rows = zip(found.labels, found.ids, found.scores.tolist(), map(tuple, shares.tolist()), strict=True)
        return [Finding(*row) for row in rows]
    if isinstance(found, Classification):
        several = found.origin is not None and found.origin.spec.multi_label
        names = found.labels if several or not found.labels else list(found.probabilities)[:NAMED]
        return [Finding(name, 0, found.probabilities[name]) for name in names]
    return []
