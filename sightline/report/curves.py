"""The curves of a report: loss, scores, rate and speed over steps, of one run or of several in common charts."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sightline.report.charts import COLOURS, line_chart
from sightline.report.html import card
from sightline.report.story import RunStory
from sightline.runs.score_names import title as title_of

MOST_LINES = 2 * COLOURS  # of a chart
NOTHING = -1  # COCO's score of objects that do not occur
KINDS = {"train": "training", "evaluate": "validation"}
NOT_SCORES = {"loss", "val_loss", "samples", "volumes", "skipped", "dice_sum", "score_threshold"}  # of another scale


def charts(stories: Sequence[RunStory], names: Sequence[str], only: Collection[str] = ()) -> str:
    """Return the charts of these runs, all or the named ones; "" without a curve."""
    known = list(dict.fromkeys(name for story in stories for name in story.curves))
    headlines = [story.summary.headline for story in stories if story.summary.headline]
    scores = [name for name in known if name.startswith("evaluate/") and name[9:] not in (*NOT_SCORES, *headlines)]
    parts = [name for name in known if name.startswith("train/") and name.endswith("_loss")]
    if len(stories) > 1:  # whose colours are those of the runs
        parts, scores = [], scores[:1]
    wanted = {
        "Loss": ["train/loss", "evaluate/loss", "evaluate/val_loss"],
        "Parts of the loss": parts,
        "Score": [f"{kind}/{name}" for name in dict.fromkeys(headlines) for kind in ("train", "evaluate")],
        "Other scores": scores[:COLOURS],
        "Learning rate": ["train/lr"],
        "Images per second": ["train/images_per_s"],
        "Time spent waiting for data (fraction)": ["train/data_wait"],
        "Gradient norm": ["train/grad_norm"],
    }
    cards = []
    for title, curves in wanted.items():
        if only and title not in only:
            continue
        found = {
            (run, curve): story.curves[curve]
            for run, story in zip(names, stories, strict=True)
            for curve in curves
            if curve in story.curves
        }
        shown = list(dict.fromkeys(curve for _, curve in found))
        series, looks = {}, {}
        for (run, curve), points in list(found.items())[:MOST_LINES]:
            label = _label(run, curve, shown, len(stories))
            series[label] = [(x, y) for x, y in points if y != NOTHING]
            if len(stories) > 1:  # a colour for each run
                looks[label] = names.index(run), "faint" if curve.startswith("train/") and len(shown) > 1 else ""
        if title.endswith(("Score", "scores")) and len({name.split("/", 1)[1] for name in shown}) == 1:
            title = f"{title}: {title_of(shown[0].split('/', 1)[1])}"
        cards.append(card(title, line_chart(series, looks=looks, epochs=_common_epochs(stories))))
    return f'<div class="charts">{"".join(cards)}</div>' if any(cards) else ""


def _common_epochs(stories: Sequence[RunStory]) -> Sequence[tuple[float, float]]:
    """Return the ends of epochs, of several runs those of the longest; none where their epochs differ in length."""
    known = [story.epochs for story in stories if story.epochs]
    lengths = {step / epoch for (step, epoch), *_ in known}
    return max(known, key=len) if len(lengths) == 1 and len(known) == len(stories) else ()


def _label(run: str, curve: str, curves: Sequence[str], runs: int) -> str:
    """Name a line by what tells it from the others of its chart."""
    kind, name = curve.replace("/val_", "/").split("/", 1)
    name = title_of(name)
    kinds, names = ({each.replace("/val_", "/").split("/", 1)[part] for each in curves} for part in (0, 1))
    words = [run] if runs > 1 else []
    words += [KINDS.get(kind, kind)] if len(kinds) > 1 else []
    return " ".join([*words, name] if len(names) > 1 or not words else words)
