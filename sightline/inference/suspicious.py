"""`sightline check RUN`: samples whose label the run's network contradicts with confidence; doubts.py has the rule."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from sightline import plugins
from sightline.data.loading.cache import read_once
from sightline.engine import checkpoint
from sightline.errors import BadData, UsageError, first_of
from sightline.files.checkpoint_folder import run_of
from sightline.files.whole import replace_text
from sightline.inference.checkpoints import Trained, loading
from sightline.inference.doubts import Doubts, doubts_of
from sightline.parts import SPLITS, Split
from sightline.recipe.flags import Given
from sightline.runs.folder import SUSPICIOUS
from sightline.runs.screen import as_score

MOST_KEPT = 1000  # samples in the file


def check_run(run: Path, given: Given, which: str, recipe_file: str) -> dict[str, Any]:
    """Predict every training and validation sample once; write suspicious.json into the run, or into run.out, and
    return what it holds. Its rows name the samples, most suspicious first."""
    path, tensors, stored = checkpoint.read_of_run(run, which)
    trained = Trained.set_up(path, tensors, stored, recipe_file, given)
    if trained.world.size > 1:
        raise UsageError("check RUN works in one process; start it without a launcher")
    folder = Path(trained.run.out) if trained.run.out else run_of(path)
    counts, unsure, rows = dict[str, int](), dict[str, list[str]](), list[dict[str, Any]]()
    for split in SPLITS:
        some, doubts = _of_split(trained, split, folder)
        counts[split], unsure[split] = doubts.count, list(doubts.unsure)
        rows += some
    rows.sort(key=lambda row: row["label_confidence"] - row["confidence"])
    found = {
        "checkpoint": path.name,
        "step": stored["progress"]["step"],
        "samples": counts,
        "suspicious": {split: sum(row["split"] == split for row in rows) for split in counts},
        "unsure_classes": unsure,
        "rows": rows[:MOST_KEPT],
    }
    replace_text(folder / SUSPICIOUS, json.dumps(found, indent=1) + "\n")
    return found


@torch.inference_mode()
def _of_split(trained: Trained, split: Split, folder: Path) -> tuple[list[dict[str, Any]], Doubts]:
    recipe = trained.recipe
    with plugins.naming_absent_sources(trained.path, trained.packages):
        dataset = read_once(recipe.data).open_plain(split, recipe.train.seed)
    if dataset.spec != trained.spec:
        raise BadData(f"the {split} data do not fit {trained.path}: other classes or sizes; give those of the run")
    task = recipe.task.build()
    doubts = doubts_of(task, dataset.spec, len(dataset))
    model = trained.build().eval()
    with loading(recipe, trained.run, trained.device, trained.world, dataset, folder) as (_, bound, loader, log):
        total = loader.feeds["val"].order.steps_per_epoch
        loader.seek("val", 0, total)
        for number in range(total):
            log.evaluating(number, total, number, total)
            predictions, batch = trained.predict(task, model, bound, loader.next("val"))
            doubts.update(predictions, batch)
    rows = doubts.rows()
    for row in rows:
        row |= {"split": split, "name": dataset.name(row["index"])}
        if len(dataset.files) == len(dataset):
            row["path"] = str(dataset.files[row["index"]].absolute())
    return rows, doubts


def as_text(found: Mapping[str, Any]) -> str:
    """Return a line for each sample that is suspicious."""
    counts = " and ".join(
        f"{found['suspicious'][split]} of {found['samples'][split]} {what} images"
        for split, what in (("train", "training"), ("val", "validation"))
    )
    lines = [f"suspicious labels: {counts}, as {found['checkpoint']} predicts them"]
    lines += [
        f"  {row['split']}: {row.get('path') or row['name']}: labelled {row['class'] or 'nothing'}, predicted as "
        f"{row['predicted'] or 'nothing'} (confidence {as_score(row['confidence'])}, of the label "
        f"{as_score(row['label_confidence'])})"
        for row in found["rows"]
    ]
    total = sum(found["suspicious"].values())
    lines += [f"  and {total - MOST_KEPT} more"] if total > MOST_KEPT else []
    lines += [
        f"{split}: the network mostly gets these classes wrong, so that its doubts say little: {first_of(names, 8)}"
        for split, names in found["unsure_classes"].items()
        if names
    ]
    return "\n".join([*lines, "The network has learnt from the training labels, so that it may repeat wrong ones."])
