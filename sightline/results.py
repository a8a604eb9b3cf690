"""The objects that `api.train` and `api.predict` return: plain values and NumPy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sightline.parts import Prediction, Scores

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np


@dataclass(frozen=True)
class TrainResult(Scores):
    """Result of a training: the scores of its last evaluation, and how the run ended."""

    folder: Path = field(compare=False)
    best_score: float | None  # of the score that decides, over all evaluations; None: none was a number
    best_step: int  # -1: none is best
    ended: str  # the reason, e.g. "5 epochs are done"


@dataclass(frozen=True)
class Classification(Prediction):
    """Class of an image."""

    label: str  # the most probable class
    probability: float  # of it
    probabilities: Mapping[str, float] = field(repr=False)  # of all classes, or `top`, the most probable first
    labels: tuple[str, ...]  # (label,); of data with several labels per image, all that reach the threshold


@dataclass(frozen=True, eq=False)  # arrays have no one answer to ==
class Detection(Prediction):
    """Objects in an image, the highest score first."""

    boxes: np.ndarray = field(repr=False)  # (n, 4) float64: left, top, right, bottom in pixels of the image
    scores: np.ndarray = field(repr=False)  # (n,) float64
    labels: tuple[str, ...]
    ids: tuple[int, ...]  # numbers of the classes in the files that it was trained on
    width: int  # of the image, upright
    height: int


@dataclass(frozen=True, eq=False)
class Segmentation(Prediction):
    """Class of every pixel or voxel, in the geometry of the input."""

    mask: np.ndarray = field(repr=False)  # uint8: (height, width) of an image, (depth, height, width) of a volume
    classes: tuple[str, ...]  # by number
    voxels: Mapping[str, int]  # pixels or voxels of each class
    probabilities: np.ndarray | None = field(default=None, repr=False)  # (classes, *mask.shape) float32, if asked for
