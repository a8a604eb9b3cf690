"""What an exported graph computes of a task: `outputs_of`, which chooses by the type of the task.

A task of one's own that does not inherit one of ours exports its logits, or registers its own (docs/contributing.md).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from sightline.export.nms_in_graph import best_boxes_in_graph
from sightline.parts import TaskConfig
from sightline.tasks.config import DetectionConfig
from sightline.tasks.nms import boxes_of


@dataclass(frozen=True)
class Outputs:
    """Names of the outputs of a graph, and what computes them from the network and its input."""

    names: tuple[str, ...]
    compute: Callable[[nn.Module, Tensor], tuple[Tensor, ...]]
    decodes: bool = False  # it computes more than the network does, which --raw leaves out


@functools.singledispatch
def outputs_of(task: TaskConfig, raw: bool = False) -> Outputs:
    """Return what `predict` needs of a task, or with `raw` what its network gives."""
    return Outputs(("logits",), lambda model, image: (model(image),))


@outputs_of.register(DetectionConfig)
def _boxes(task: DetectionConfig, raw: bool = False) -> Outputs:
    """Return what `predict` does and the number of detections of each image; raw: the answer of the model."""
    if raw:
        return Outputs(("logits", "offsets", "anchors"), lambda model, image: model(image))

    def decoded(model: nn.Module, image: Tensor) -> tuple[Tensor, ...]:
        logits, offsets, anchors = model(image)
        boxes, scores, labels = boxes_of(task, logits, offsets, anchors, best_boxes_in_graph)
        return boxes, scores, labels, (labels > 0).sum(1)

    return Outputs(("boxes", "scores", "labels", "count"), decoded, decodes=True)
