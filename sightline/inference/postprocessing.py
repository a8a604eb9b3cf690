"""Largest-component post-processing, as in nnU-Net: chosen per class on the val split of a run, or on those of all
folds together, stored as postprocessing.json beside it, and applied by `predict`. The masks are those of prepared
volumes, as `evaluate` scores them, or with label files those of the raw files, as `predict` writes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sightline.data.loading.order import PADDING
from sightline.data.volumes.components import keep_largest
from sightline.data.volumes.files import read_label
from sightline.errors import BadData, UsageError
from sightline.files.checkpoint_folder import run_of
from sightline.files.regular import is_file
from sightline.files.typed_json import read_json, typed
from sightline.inference import checkpoints
from sightline.inference.checkpoints import Trained
from sightline.inference.label_files import Counts, refuse_misfit
from sightline.inference.predict import predict_objects
from sightline.parts import PredictOptions
from sightline.results import Segmentation
from sightline.runs.log import RunLog
from sightline.runs.screen import Screen

DOCUMENT = "postprocessing.json"
MAX_BYTES = 2**20
OFF = "--no-postprocessing"


def choose(runs: Sequence[Trained], folder: Path, labels: Path | None) -> dict[str, Any]:
    """Decide for each class whether its largest component alone has the better mean Dice over all validation volumes of
    these runs; write that into `folder` and return it."""
    log = RunLog(folder, Screen(runs[0].run.progress), attempt=None)
    out = log.folder
    with out.must_be_writable():
        folder.mkdir(parents=True, exist_ok=True)
    volumes = [row for trained in runs for row in _dice(trained, labels)]
    if not volumes:
        raise BadData(f"not one volume of the val split could be read; give with --labels what can be, not {labels}")
    rows = decided(runs[0].spec.classes[1:], volumes)
    document = {"checkpoints": [str(each.path) for each in runs], "volumes": len(volumes), "classes": rows}
    with out.must_be_writable():
        out.write_json(DOCUMENT, document)
    log.say(f"wrote the choice to {folder / DOCUMENT}; `predict` applies it where it lies in the folder of the run")
    return document


def decided(classes: Sequence[str], volumes: Sequence[Sequence[Sequence[float]]]) -> list[dict[str, Any]]:
    """Return a row per class with both means over the volumes, whose Dice are (2, classes): of the masks as they are,
    and with the largest components alone. The latter must be better; at a tie masks stay as they are."""
    dice = np.array(volumes).mean(0)
    return [
        {"class": name, "label": f"L{number}", "dice": plain, "dice_largest": largest, "largest": largest > plain}
        for number, (name, plain, largest) in enumerate(zip(classes, *dice.tolist(), strict=True), 1)
    ]


def chosen(folder: Path, classes: Sequence[str]) -> tuple[int, ...]:
    """Return the numbers of the classes that `choose` decided for; () where it has not been called."""
    path = folder / DOCUMENT
    if not is_file(path):
        return ()
    try:
        rows = typed(read_json(path, MAX_BYTES)["classes"], list[dict[str, Any]])
        if [row["class"] for row in rows] != list(classes[1:]):
            raise ValueError(f"its classes are not {', '.join(classes[1:])}")
        return tuple(number for number, row in enumerate(rows, start=1) if typed(row["largest"], bool))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadData(
            f"{path} cannot be read ({error}); make it again with `sightline evaluate {folder} "
            f"--choose-postprocessing`, or add {OFF}"
        ) from error


def as_text(document: dict[str, Any]) -> str:
    """Format the decision for people."""
    width = max(5, *(len(row["class"]) for row in document["classes"]))
    lines = [f"{'class':{width}}    dice  largest component only"]
    for row in document["classes"]:
        verdict = "chosen" if row["largest"] else "not better"
        lines.append(f"{row['class']:{width}}  {row['dice']:.4f}  {row['dice_largest']:.4f}  {verdict}")
    return "\n".join([*lines, f"mean Dice over {document['volumes']} validation volumes"])


def _dice(trained: Trained, labels: Path | None) -> Iterator[list[list[float]]]:
    """Yield the Dice of each class for every volume of the val split, twice: of the mask as it is, and with the largest
    components alone."""
    classes = len(trained.spec.classes)
    for mask, label in _of_files(trained, labels) if labels else _volumes(trained):
        both = (mask, keep_largest(mask, range(1, classes)))
        yield [Counts.of("", each, label).dice(classes) for each in both]


def _of_files(trained: Trained, labels: Path) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the predicted mask and the label of the raw file of each volume of the val split."""
    files = trained.recipe.data.labelled_files(labels)
    found = predict_objects(trained, {case: image for case, (image, _) in files.items()}, PredictOptions())
    for case, prediction in found.items():
        assert isinstance(prediction, Segmentation)  # only such data have label files
        mask = prediction.mask.reshape(-1, *prediction.mask.shape[-2:])  # an image is one slice
        classes = len(trained.spec.classes)
        label, affine = read_label(files[case][1], case, classes)
        refuse_misfit(case, mask, None, label, affine, classes)
        yield mask, label


@torch.inference_mode()
def _volumes(trained: Trained) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the predicted mask and the label of each volume of the val split, as prepared."""
    with checkpoints.opened(trained, run_of(trained.path), writes_scores=False) as evaluation:
        bound, loader = evaluation.bound, evaluation.loader
        if "volume" not in bound.layout:
            raise UsageError(
                f"{trained.path}: post-processing is for masks of volumes, and {trained.recipe.name} makes none; leave "
                "out --choose-postprocessing"
            )
        model, volume = evaluation.model.eval(), -1
        planes: list[tuple[np.ndarray, np.ndarray]] = []
        total = loader.feeds["val"].order.steps_per_epoch
        loader.seek("val", 0, total)
        for number in range(total):
            evaluation.log.evaluating(number, total, number, total)
            found, batch = trained.predict(trained.recipe.task.build(), model, bound, loader.next("val"))
            keys = ("index", "valid", "volume", "label")
            rows = (batch[key].cpu().numpy() for key in keys)
            extents = batch["extent"].tolist() if "extent" in batch else [None] * len(batch["index"])
            for *row, mask, extent in zip(*rows, found["classes"].cpu().numpy(), extents, strict=True):
                index, is_valid, its, label = row
                if index == PADDING or not is_valid:
                    continue
                if its != volume and planes:  # slices of a volume follow each other
                    yield _stacked(planes)
                    planes = []
                inside = tuple(slice(side) for side in extent) if extent else ...
                planes.append((mask[inside], label[inside].astype(np.uint8)))
                volume = its
        if not planes:
            raise BadData("nothing could be evaluated: not one sample of the val split could be read")
        yield _stacked(planes)


def _stacked(planes: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Return a volume and its label; of slices, all of them."""
    if planes[0][0].ndim == 3:
        return planes[0]
    masks, labels = zip(*planes, strict=True)
    return np.stack(masks), np.stack(labels)
