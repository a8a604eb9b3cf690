"""Volumes as `sightline prepare decathlon` leaves them: PATH/plan.json, CASE_x.npy and CASE_y.npy, split by fold."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np

from sightline.data.sources import VolumeSource, index_files
from sightline.data.volumes.layouts import describe_raw, find_raw
from sightline.data.volumes.plan import PLAN, Case, VolumePlan, read_plan
from sightline.errors import BadData, BadSample, UsageError
from sightline.files.arrays import map_array
from sightline.files.regular import is_file
from sightline.parts import DataSpec, Split

_FOLD_SEED = 12345  # the folds that published numbers are of


def detect(path: str) -> bool:
    """Return whether PATH is a prepared folder."""
    return is_file(Path(path) / PLAN)


def found_fields(path: str) -> dict[str, str]:
    """Return the fields of the data config that a prepared folder decides; none of any other path. Imports no torch."""
    return {"task": read_plan(Path(path)).task} if detect(path) else {}


def cases_of(plan: VolumePlan, fold: int, parts: int) -> str:
    """Return how many cases train and validate, e.g. `8 + 2 cases (fold 0 of 5)`, or how many there are."""
    count = len(plan.cases)
    if plan.mode != "training" or not (2 <= parts <= count and 0 <= fold < parts):
        return f"{count} cases"
    held_out = len(folds(count, parts)[fold])
    return f"{count - held_out} + {held_out} cases (fold {fold} of {parts})"


def describe_found(path: str, fold: int = 0, parts: int = 5) -> str:
    """Say in one phrase what lies at a path: a prepared folder or raw data; "" for anything else. Imports no torch."""
    if not detect(path):
        raw = find_raw(Path(path))
        return f"{describe_raw(raw)}; not prepared" if raw else ""
    plan = read_plan(Path(path))
    cases = cases_of(plan, fold, parts)
    return f"volumes: {len(plan.spec.classes)} classes, {cases}, task {plan.task}" + (
        ", dim 3" if plan.dim == 3 else ""
    )


def training_shapes(path: str, fold: int, parts: int) -> list[tuple[int, int, int]]:
    """Return the shapes of the training volumes; none if the path is not a prepared folder to train on. Imports no
    torch."""
    plan = read_plan(Path(path)) if detect(path) else None
    if plan is None or plan.mode != "training" or not (2 <= parts <= len(plan.cases) and 0 <= fold < parts):
        return []
    return [case.shape for case in _chosen(plan, "train", fold, parts)]


def steps_of_epoch(path: str, fold: int, parts: int, nvol: int) -> Callable[[int], int] | None:
    """Return the steps that an epoch has with a given batch, without a partial last one; None if the path is not a
    prepared folder to train on. Imports no torch."""
    shapes = training_shapes(path, fold, parts)
    if not shapes:
        return None
    if read_plan(Path(path)).dim == 3:
        return lambda batch: len(shapes) // batch
    shallowest = min(shape[0] for shape in shapes)
    return lambda batch: len(shapes) // volumes_of(batch, nvol, shallowest) if batch >= nvol else 0


def volumes_of(batch: int, nvol: int, depth: int) -> int:
    """Return how many volumes share a batch of slices if the shallowest volume has `depth` of them: the smallest number
    from nvol on that divides the batch into shares of at most `depth`."""
    if nvol > batch:
        raise UsageError(
            f"nvol={nvol} volumes cannot share a batch of {batch} slices; use --data.nvol {batch} or less, or a larger "
            f"--train.global-batch"
        )
    fitting = (n for n in range(max(1, nvol), batch + 1) if batch % n == 0)
    return next(n for n in fitting if batch // n <= depth)


def folds(count: int, parts: int) -> list[np.ndarray]:
    """Return the held-out indices of each part, sorted: scikit-learn's KFold(parts, shuffle=True,
    random_state=12345)."""
    if not 2 <= parts <= count:
        enough = f"use --data.folds 2 to {count}" if count > 1 else "prepare at least 2"
        raise UsageError(f"{count} volumes cannot be split into {parts} folds; {enough}")
    order = np.arange(count)
    np.random.RandomState(_FOLD_SEED).shuffle(order)
    return [np.sort(part) for part in np.array_split(order, parts)]


def open_volumes(path: str, split: Split, spec: DataSpec, fold: int, folds: int) -> DecathlonSource:
    """Open the volumes of a split; the spec is that of the plan, to be compared with what the recipe declares."""
    plan = read_plan(Path(path))
    if plan.mode != "training":
        raise UsageError(
            f"--data.path {path} was prepared with --mode {plan.mode}, so it has no labels; prepare another folder "
            f"with `sightline prepare decathlon --source DIR --dim {plan.dim} --mode training --out DIR`"
        )
    return DecathlonSource(Path(path), plan, _chosen(plan, split, fold, folds))


def _chosen(plan: VolumePlan, split: Split, fold: int, parts: int) -> list[Case]:
    """Choose in the order of the files, as published folds count them: liver_10_x.npy comes before liver_1_x.npy."""
    cases = sorted(plan.cases, key=lambda case: case.image)
    if not 0 <= fold < parts:
        raise UsageError(f"--data.fold {fold}: with {parts} folds use 0 to {parts - 1}")
    if parts == 1:
        if split == "train":
            raise UsageError("--data.folds 1 leaves no volumes to train on; use 2 or more, e.g. 5")
        return cases
    held_out = set(folds(len(cases), parts)[fold].tolist())
    return [case for index, case in enumerate(cases) if (index in held_out) == (split == "val")]


class DecathlonSource(VolumeSource):
    """Arrays mapped into memory when they are asked for."""

    def __init__(self, folder: Path, plan: VolumePlan, cases: list[Case]):
        self.folder, self.cases, self.spec = folder, cases, plan.spec
        self.files = [folder / file for case in cases for file in (case.image, case.label) if file]
        sizes = [_size(file) for file in self.files]
        rows = [(case.name, case.shape, case.original, case.start, case.end, case.spacing) for case in cases]
        self.fingerprint = index_files.digest("decathlon", 1, plan.spec.to_json(), rows, sizes)

    def __len__(self) -> int:
        return len(self.cases)

    def name(self, index: int) -> str:
        return self.cases[index].name

    def shape(self, index: int) -> tuple[int, int, int]:
        return self.cases[index].shape

    def image(self, index: int) -> np.ndarray:
        case = self.cases[index]
        return self._mapped(case.image, case, (self.spec.channels, *case.shape), np.float32)

    def label(self, index: int) -> np.ndarray:
        case = self.cases[index]
        assert case.label is not None, "the plan of a training folder has labels"
        return self._mapped(case.label, case, case.shape, np.uint8)

    def _mapped(self, file: str, case: Case, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        path = self.folder / file
        found = map_array(path, case.name, "prepare the data again")
        if found.shape != shape or found.dtype != dtype:
            raise BadSample(
                case.name,
                f"{path} is {found.dtype} of shape {found.shape}, the plan says {np.dtype(dtype)} of {shape}; "
                "prepare the data again",
            )
        return found


def _size(path: Path) -> int:
    try:
        info = os.stat(path)
    except OSError as error:
        raise BadData(f"{path} cannot be read: {error.strerror}; prepare the data again") from error
    if not stat.S_ISREG(info.st_mode):  # reading a pipe would block
        raise BadData(f"{path} is not a regular file; prepare the data again")
    return info.st_size
