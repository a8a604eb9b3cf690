"""The objects that `api.train`, `api.evaluate` and `api.predict` return: plain values and NumPy arrays.

In a notebook they show themselves: report/inline.py, which api.py imports, says how (`as_html`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from sightline.parts import DataSpec, Prediction, Scores

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image


@functools.singledispatch
def as_html(result: object) -> str | None:
    """Return a result as a notebook shows it; None where nothing that shows results was imported."""
    return None


@dataclass(frozen=True)
class TrainResult(Scores):
    """Result of a training: the scores of its last evaluation, and how the run ended."""

    folder: Path = field(compare=False)
    best_score: float | None  # of the score that decides, over all evaluations; None: none was a number
    best_step: int  # -1: none is best
    ended: str  # the reason, e.g. "5 epochs are done"

    def _repr_html_(self) -> str | None:
        return as_html(self)


@dataclass(frozen=True)
class EvaluateResult(Scores):
    """Scores of a checkpoint or of given weights."""

    of: str = field(compare=False)  # what was scored, e.g. "runs/a/checkpoints/ckpt-00000030 on the val split"
    folder: str = field(default="", compare=False)  # of the run, if there is one; a text, so that JSON takes it all
    step: int | None = field(default=None, compare=False)  # of the checkpoint

    def _repr_html_(self) -> str | None:
        return as_html(self)


@dataclass(frozen=True)
class ReportPage:
    """A page that `api.report` wrote."""

    path: Path

    def _repr_html_(self) -> str | None:
        return as_html(self)


class Origin:
    """The input of a prediction, into which it is drawn. An image in memory is not kept alive for that."""

    def __init__(self, given: Path | np.ndarray | Image.Image, spec: DataSpec):
        self.spec = spec
        self._given = given if isinstance(given, Path) else weakref.ref(given)

    @property
    def given(self) -> Path | np.ndarray | Image.Image | None:
        """The file or image; None if it has gone."""
        return self._given if isinstance(self._given, Path | None) else self._given()

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process knows files alone."""
        return {"spec": self.spec, "_given": self._given if isinstance(self._given, Path) else None}


@dataclass(frozen=True, eq=False)
class Drawable(Prediction):
    """A prediction that can be drawn into its input."""

    origin: Origin | None = field(default=None, repr=False, compare=False, kw_only=True)

    def _repr_html_(self) -> str | None:
        return as_html(self)


class Predictions(list[Prediction]):
    """The predictions of files or images, in the order given. The list keeps the first inputs, so that it can show
    images in memory that nobody else has."""

    SHOWN: ClassVar = 12

    def __init__(self, found: Iterable[Prediction] = (), inputs: Sequence[object] = ()):
        super().__init__(found)
        self._inputs = inputs[: self.SHOWN]

    def __getstate__(self) -> None:
        """A copy in another process knows files alone."""

    def _repr_html_(self) -> str | None:
        return as_html(self)


@dataclass(frozen=True)
class Classification(Drawable):
    """Class of an image."""

    label: str  # the most probable class
    probability: float  # of it
    probabilities: Mapping[str, float] = field(repr=False)  # of all classes, or `top`, the most probable first
    labels: tuple[str, ...]  # (label,); of data with several labels per image, all that reach the threshold


@dataclass(frozen=True, eq=False)  # arrays have no one answer to ==
class Detection(Drawable):
    """Objects in an image, the highest score first."""

    boxes: np.ndarray = field(repr=False)  # (n, 4) float64: left, top, right, bottom in pixels of the image
    scores: np.ndarray = field(repr=False)  # (n,) float64
    labels: tuple[str, ...]
    ids: tuple[int, ...]  # numbers of the classes in the files that it was trained on
    width: int  # of the image, upright
    height: int


@dataclass(frozen=True, eq=False)
class Segmentation(Drawable):
    """Class of every pixel or voxel, in the geometry of the input."""

    mask: np.ndarray = field(repr=False)  # uint8: (height, width) of an image, (depth, height, width) of a volume
    classes: tuple[str, ...]  # by number
    voxels: Mapping[str, int]  # pixels or voxels of each class
    probabilities: np.ndarray | None = field(default=None, repr=False)  # (classes, *mask.shape) float32, if asked for
