"""Labels that a network contradicts with confidence.

The rule is that of confident learning (Northcutt et al. 2021): another answer than the label is the most probable one,
and at least as probable as it is on average for the samples that are labelled so. SURE is always enough: the average of
a network that has learnt the data by heart is next to 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sightline.errors import UsageError
from sightline.parts import Batch, DataSpec, Task
from sightline.tasks.config import ClassificationConfig

SURE = 0.75
MOST_BYTES = 2**31  # of the probabilities of several labels per image


class Doubts(ABC):
    """Samples of a split whose labels the predictions contradict."""

    count = 0  # samples that were looked at, once `rows` was called
    unsure: tuple[str, ...] = ()  # classes that the network mostly gets wrong, so that its doubts say little

    @abstractmethod
    def update(self, predictions: Mapping[str, Tensor], batch: Batch) -> None:
        """Look at a batch."""

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """Return index, class, predicted, confidence and label_confidence of each such sample."""


class OneLabel(Doubts):
    """Doubts about images with one label each: a few numbers per image."""

    def __init__(self, spec: DataSpec):
        self._classes = spec.classes
        self._parts: list[Tensor] = []

    def update(self, predictions: Mapping[str, Tensor], batch: Batch) -> None:
        probabilities = predictions["logits"].float().softmax(1)
        top, predicted = probabilities.max(1)
        label = batch["label"]
        columns = (batch["index"], label, predicted, probabilities.gather(1, label[:, None])[:, 0], top)
        rows = torch.stack([column.double().cpu() for column in columns], 1)
        self._parts.append(rows[batch["valid"].cpu() & rows.isfinite().all(1)])

    def rows(self) -> list[dict[str, Any]]:
        found = torch.cat(self._parts).numpy()
        self.count = len(found)
        label, predicted = found[:, 1].astype(int), found[:, 2].astype(int)
        usual = np.minimum(mean_of_class(label, found[:, 3], len(self._classes)), SURE)
        recall = mean_of_class(label, (label == predicted).astype(float), len(self._classes))
        self.unsure = tuple(self._classes[place] for place in np.flatnonzero(recall < 0.5))
        doubted = found[(label != predicted) & (found[:, 4] >= usual[predicted])]
        return [
            {
                "index": int(index),
                "class": self._classes[int(given)],
                "predicted": self._classes[int(other)],
                "confidence": top,
                "label_confidence": of_label,
            }
            for index, given, other, of_label, top in doubted.tolist()
        ]


def doubts_of(task: Task, spec: DataSpec, samples: int) -> Doubts:
    """Return what collects doubts about labels as the data have them; UsageError for a task of another kind."""
    if not isinstance(task, ClassificationConfig):
        raise UsageError(f"{type(task).__name__} is no classification, so its labels cannot be checked against a run")
    return SeveralLabels(spec, samples) if task.activation == "sigmoid" else OneLabel(spec)


def mean_of_class(label: np.ndarray, values: np.ndarray, classes: int) -> np.ndarray:
    """Return the mean over the samples of each class; infinity for a class without samples."""
    counts = np.bincount(label, minlength=classes)
    sums = np.bincount(label, values, minlength=classes)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.inf)


class SeveralLabels(Doubts):
    """Doubts about images with any number of labels: each class is a question of its own, answered by yes or no."""

    def __init__(self, spec: DataSpec, samples: int):
        if samples * len(spec.classes) * 5 > MOST_BYTES:
            raise UsageError(
                f"{samples} images of {len(spec.classes)} classes take more than {MOST_BYTES >> 30} GiB; check a part"
            )
        self._classes = spec.classes
        self._parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def update(self, predictions: Mapping[str, Tensor], batch: Batch) -> None:
        probabilities = predictions["logits"].float().sigmoid()
        usable = batch["valid"] & probabilities.isfinite().all(1)
        columns = (batch["index"], batch["label"].bool(), probabilities)
        self._parts.append(tuple(column[usable].cpu().numpy() for column in columns))  # type: ignore[arg-type]

    def rows(self) -> list[dict[str, Any]]:
        index, given, yes = (np.concatenate([part[i] for part in self._parts]) for i in range(3))
        self.count = len(index)
        of_label = np.where(given, yes, 1 - yes)  # (samples, classes)
        usual = np.stack([mean_of_class(given[:, c].astype(int), of_label[:, c], 2) for c in range(yes.shape[1])])
        usual = np.minimum(usual, SURE)
        other = 1 - of_label
        doubted = (other > 0.5) & (other >= np.take_along_axis(usual, (~given).T.astype(int), 1).T)
        rows = []
        for row in np.flatnonzero(doubted.any(1)).tolist():
            most = int(np.where(doubted[row], other[row], -1).argmax())
            rows.append(
                {
                    "index": int(index[row]),
                    "class": self._named(given[row]),
                    "predicted": self._named(given[row] ^ doubted[row]),
                    "confidence": float(other[row, most]),
                    "label_confidence": float(of_label[row, most]),
                }
            )
        return rows

    def _named(self, chosen: np.ndarray) -> str:
        return ";".join(self._classes[place] for place in np.flatnonzero(chosen))
