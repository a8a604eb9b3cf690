"""`sightline evaluate --labels`: masks, or a run's predictions of its val split, against label files in their geometry.

Dice and IoU of each case and class: 1 where a class is neither in the mask nor in the label, 0 where it is in one only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from sightline.data.inputs import list_files
from sightline.data.volumes.files import FIRST_CHANNEL, MASK, SUFFIXES, case_name, read_label
from sightline.data.volumes.layouts import label_files, label_of_case, labels_in
from sightline.errors import BadData, BadSample, UsageError, first_of
from sightline.files.arrays import map_array
from sightline.files.typed_json import read_json
from sightline.files.whole import write_whole
from sightline.inference.checkpoints import Trained
from sightline.inference.predict import predict_files
from sightline.inference.predictions import DOCUMENT
from sightline.inference.volume_files import compared_slices
from sightline.metrics.dice import iou_of
from sightline.parts import PredictOptions, Scores
from sightline.runs.log import RunLog
from sightline.runs.screen import Screen

DOCUMENT_OF_SCORES = "scores-labels.json"
PROBABILITIES = ".npy"
WORST = 20
DRAWN = 4  # worst cases of a run
_VALUES = 256  # a label is a byte
_AFFINE_MM = 1e-3  # headers hold 32-bit floats
_MAX_JSON_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Counts:
    """Voxels of each value 0..255 of one case."""

    case: str
    shared: np.ndarray
    found: np.ndarray
    truth: np.ndarray

    @classmethod
    def of(cls, case: str, found: np.ndarray, truth: np.ndarray) -> Self:
        """Count the voxels of a mask and its label, both uint8."""
        values = (found[found == truth], found, truth)
        return cls(case, *(np.bincount(each.reshape(-1), minlength=_VALUES) for each in values))

    def dice(self, classes: int) -> list[float]:
        """Return the Dice of every class but the background."""
        total = self.found + self.truth
        every = np.where(total > 0, 2 * self.shared / np.maximum(total, 1), 1.0)
        return [float(value) for value in every[1:classes]]


def evaluate_folder(predicted: Path, labels: Path) -> Scores:
    """Score every CASE.nii.gz, CASE_mask.png or CASE.npy of probabilities of a folder against its label in another."""
    files = list_files([predicted], (*SUFFIXES, PROBABILITIES, MASK), labels)
    cases: dict[str, Path] = {}
    for name, path in files.items():
        ending = next((ending for ending in (PROBABILITIES, MASK) if name.endswith(ending)), "")
        case = name.removesuffix(ending) if ending else case_name(name)
        if case not in cases or ending != PROBABILITIES:  # of both, the mask is what was decided
            cases[case] = path
    base = labels / "labelsTr" if (labels / "labelsTr").is_dir() else labels
    known = label_files(labels) if base == labels else {}
    pairs = {case: (path, known.get(case) or _label_of(base, case, known)) for case, path in cases.items()}
    by_label: dict[Path, str] = {}
    for case, (path, label) in pairs.items():
        if (other := by_label.setdefault(label, case)) != case:
            raise UsageError(f"{pairs[other][0]} and {path} are both masks of {label.name}; remove one of them")
    log = RunLog(predicted, attempt=None)
    every = {*(known.values() or labels_in(base))}
    if missing := sorted(label.name for label in every - {*by_label}):
        log.say(f"{len(missing)} of {len(every)} labels have no mask: {first_of(missing)}")
    return _tell(pairs, _class_names(predicted, base), predicted, log)


def evaluate_run(trained: Trained, labels: Path, folder: Path) -> Scores:
    """Predict the raw files of a run's val split and score them; masks and drawings of the worst stay in `folder`."""
    files = trained.recipe.data.labelled_files(labels)
    images = {case: image for case, (image, _) in files.items()}
    document = predict_files(trained, images, folder, PredictOptions(draws=False))
    pairs = {row["file"]: (folder / row["mask"], files[row["file"]][1]) for row in document["files"]}
    # Of an earlier call, maybe of another fold: a later comparison of the folder would count them.
    masks = {mask for mask, _ in pairs.values()}
    for old in (*folder.glob("*.nii.gz"), *folder.glob("*.png")):
        if old not in masks:
            old.unlink()
    log = RunLog(folder, Screen(trained.run.progress), attempt=None)
    scores = _tell(pairs, trained.spec.classes, folder, log, checkpoint=str(trained.path))
    for row in scores.worst[:DRAWN]:
        case = row["name"]
        image = compared_slices(case, images[case], *pairs[case], trained.spec)
        write_whole(folder / f"{case}.png", image.save)
    log.say(f"masks, {DOCUMENT_OF_SCORES} and images of the worst cases are in {folder}")
    return scores


def compare(case: str, predicted: Path, label: Path, classes: int) -> Counts:
    """Count the voxels of one case; raise BadSample where the two are not a pair, or hold a number without a class."""
    found, affine = _read_predicted(case, predicted)
    truth, wanted = read_label(label, case, classes)
    refuse_misfit(case, found, affine, truth, wanted, classes)
    return Counts.of(case, found, truth)


def refuse_misfit(
    case: str, found: np.ndarray, affine: np.ndarray | None, truth: np.ndarray, wanted: np.ndarray, classes: int
) -> None:
    """Raise BadSample where a mask and a label are not a pair, or hold a number without a class."""
    if found.shape != truth.shape:
        raise BadSample(case, f"its mask has {_sides(found)} voxels and its label {_sides(truth)}; give its own label")
    if affine is not None and not np.allclose(affine, wanted, rtol=0, atol=_AFFINE_MM):
        raise BadSample(
            case, f"its mask lies at {affine.tolist()} and its label at {wanted.tolist()}; give its own label"
        )
    for what, values in (("mask", found), ("label", truth)):
        if classes and (highest := int(values.max(initial=0))) >= classes:
            raise BadSample(case, f"its {what} holds a {highest}; there are {classes} classes, 0 to {classes - 1}")


def _tell(
    pairs: Mapping[str, tuple[Path, Path]], classes: Sequence[str], folder: Path, log: RunLog, **about: Any
) -> Scores:
    """Compare, print the original's line with the names of the classes below, and write all of it."""
    counts = []
    for number, (case, (predicted, label)) in enumerate(pairs.items()):
        log.evaluating(number, len(pairs), number, len(pairs))
        counts.append(compare(case, predicted, label, len(classes)))
    if not classes:
        present = np.flatnonzero(np.sum([each.found + each.truth for each in counts], axis=0))
        classes = [f"L{number}" for number in range(max(int(present.max(initial=0)), 1) + 1)]
    scores = scores_of(counts, classes)
    log.release()
    log.say(f"scored cases: {len(counts)}")
    for name in ("dice", "iou"):
        per_class = " ".join(f"{row['label']} {row[name]:.4f}" for row in scores.tables["classes"])
        log.say(f"mean {name}: {scores.values[name]:.4f} - {per_class}")
    text = json.dumps({**about, **vars(scores)}, indent=1, allow_nan=False) + "\n"
    write_whole(folder / DOCUMENT_OF_SCORES, lambda path: path.write_text(text, encoding="utf-8"))
    return scores


def scores_of(counts: Sequence[Counts], classes: Sequence[str]) -> Scores:
    """Return means over cases of each class, their mean and sum, and the cases with the lowest Dice."""
    if not counts:
        raise BadData("not one case could be compared; fix the files that are listed above")
    dice = np.array([each.dice(len(classes)) for each in counts])  # (cases, classes - 1)
    iou = iou_of(dice)
    means, iou_means = dice.mean(0), iou.mean(0)
    values = {
        "dice": float(means.mean()),
        "iou": float(iou_means.mean()),
        "dice_sum": float(means.sum()),
        "samples": float(len(counts)),
    }
    rows = [
        {"class": name, "label": f"L{number}", "dice": float(means[number - 1]), "iou": float(iou_means[number - 1])}
        for number, name in enumerate(classes[1:], start=1)
    ]
    cases: list[dict[str, Any]] = [
        {
            "name": each.case,
            "dice": float(row.mean()),
            "iou": float(shares.mean()),
            **{f"L{n}": float(value) for n, value in enumerate(row, start=1)},
        }
        for each, row, shares in zip(counts, dice, iou, strict=True)
    ]
    worst = sorted((row for row in cases if row["dice"] < 1), key=lambda row: row["dice"])[:WORST]
    return Scores(values, {"classes": rows, "volumes": cases}, worst)


def _label_of(folder: Path, case: str, known: Mapping[str, Path]) -> Path:
    """Find the label of a case, also of a mask that bears nnU-Net's name of an image, CASE_0000."""
    plain = case.removesuffix(FIRST_CHANNEL)
    if plain in known:
        return known[plain]
    if not folder.is_dir():
        raise UsageError(f"--labels {folder} is not a folder; give one that holds CASE.nii.gz for every CASE")
    if found := label_of_case(folder, case) or label_of_case(folder, plain):
        return found
    raise BadSample(case, f"has no label: {folder / case}.nii.gz does not exist; add it or remove the mask")


def _read_predicted(case: str, path: Path) -> tuple[np.ndarray, np.ndarray | None]:
    """Return (depth, height, width) uint8 and, where the file has one, its affine."""
    if not path.name.endswith(PROBABILITIES):
        return read_label(path, case)
    scores = map_array(path, case, "predict it again")
    if scores.ndim != 4 or scores.dtype.kind != "f" or not scores.size:
        what = f"{scores.dtype} of shape {scores.shape}"
        raise BadSample(case, f"{path} holds {what}; floats of (classes, depth, height, width) were expected")
    if len(scores) > _VALUES:
        raise BadSample(case, f"{path} has {len(scores)} classes; at most {_VALUES} were expected")
    found = np.empty(scores.shape[1:], np.uint8)
    for number in range(len(found)):  # slice by slice, so that the file need not fit into memory
        plane = scores[:, number]
        if not np.isfinite(plane).all():
            raise BadSample(case, f"{path} holds values that are not finite; predict it again")
        found[number] = plane.argmax(0)
    return found, None


def _class_names(predicted: Path, labels: Path) -> list[str]:
    """Return the class names of the predictions, or of the data set of the labels; [] where there are none."""
    names = _json(predicted / DOCUMENT).get("classes")
    if isinstance(names, list) and 2 <= len(names) <= _VALUES and all(isinstance(name, str) for name in names):
        return names
    numbered = _json(labels.parent / "dataset.json").get("labels")
    if not isinstance(numbered, dict) or not 2 <= len(numbered) <= _VALUES:
        return []
    if all(type(value) is int for value in numbered.values()):  # nnU-Net v2 numbers names
        numbered = {str(value): name for name, value in numbered.items()}
    keys = [str(number) for number in range(len(numbered))]
    return [str(numbered[key]) for key in keys] if set(numbered) == set(keys) else []


def _json(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path, _MAX_JSON_BYTES)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _sides(volume: np.ndarray) -> str:
    return " x ".join(map(str, volume.shape))
