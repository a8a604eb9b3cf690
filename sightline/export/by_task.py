"""What an exported graph computes of a task: `outputs_of`, which chooses by the type of the task.

A task of one's own that does not inherit one of ours exports its logits, or registers its own
(docs/howto/task.md).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from sightline.export.nms_in_graph import best_boxes_in_graph
from sightline.parts import DataSpec, TaskConfig
from sightline.tasks.config import ClassificationConfig, DetectionConfig, MaskConfig, SegmentationConfig
from sightline.tasks.nms import boxes_of


@dataclass(frozen=True)
class Outputs:
    """Names of the outputs of a graph, and what computes them from the network and its input."""

    names: tuple[str, ...]
    compute: Callable[[nn.Module, Tensor], tuple[Tensor, ...]]
    decodes: bool = False  # it computes more than the network does, which --raw leaves out
    # Of each output: a number; a word of SIZES; or another word, an axis of any length. () is not compared.
    shapes: tuple[tuple[int | str, ...], ...] = ()


SIZES = {  # of axes
    "batch": lambda rows, spec: (rows,),
    "classes": lambda rows, spec: (len(spec.classes),),
    "classes and none": lambda rows, spec: (len(spec.classes) + 1,),
    "space": lambda rows, spec: tuple(spec.size),
}
NUMBERS = ("labels", "count")  # outputs of whole numbers


def misfit(outputs: Outputs, found: Sequence[Tensor], rows: int, spec: DataSpec) -> str:
    """Say what a graph has answered for so many rows that the task cannot read; "" where it fits."""
    if len(found) != len(outputs.names):
        return f"{len(found)} outputs, expected {len(outputs.names)}: {', '.join(outputs.names)}"
    lengths: dict[str, int] = {}
    for name, tensor, shape in zip(outputs.names, found, outputs.shapes, strict=False):
        sizes = [size for axis in shape for size in (SIZES[axis](rows, spec) if axis in SIZES else (axis,))]
        fits = len(sizes) == tensor.ndim
        for size, length in zip(sizes, tensor.shape, strict=False):
            fits = fits and length == (lengths.setdefault(size, length) if isinstance(size, str) else size)
        if not fits:
            expected = ", ".join(str(lengths.get(size, size) if isinstance(size, str) else size) for size in sizes)
            return f"{name} of shape ({', '.join(map(str, tensor.shape))}), expected ({expected})"
        if tensor.is_floating_point() is (name in NUMBERS) or tensor.is_complex():
            return f"{name} of {str(tensor.dtype).removeprefix('torch.')}"
        if name == "labels" and not bool(((tensor >= 0) & (tensor <= len(spec.classes))).all()):
            return f"labels beyond its {len(spec.classes)} classes"
        if name == "scores" and not bool(tensor.isfinite().all()):
            return "scores that are not finite"
    return ""


@functools.singledispatch
def outputs_of(task: TaskConfig, raw: bool = False) -> Outputs:
    """Return what `predict` needs of a task, or with `raw` what its network gives."""
    return Outputs(("logits",), lambda model, image: (model(image),))


@outputs_of.register(ClassificationConfig)
def _classes(task: ClassificationConfig, raw: bool = False) -> Outputs:
    """Return the logits of images."""
    return Outputs(("logits",), lambda model, image: (model(image),), shapes=(("batch", "classes"),))


@outputs_of.register(SegmentationConfig)
@outputs_of.register(MaskConfig)
def _masks(task: SegmentationConfig | MaskConfig, raw: bool = False) -> Outputs:
    """Return the logits of windows."""
    return Outputs(("logits",), lambda model, image: (model(image),), shapes=(("batch", "classes", "space"),))


@outputs_of.register(DetectionConfig)
def _boxes(task: DetectionConfig, raw: bool = False) -> Outputs:
    """Return what `predict` does and the number of detections of each image; raw: the answer of the model."""
    if raw:
        axes = (("batch", "anchors", "classes and none"), ("batch", "anchors", 4), ("anchors", 4))
        return Outputs(("logits", "offsets", "anchors"), lambda model, image: model(image), shapes=axes)

    def decoded(model: nn.Module, image: Tensor) -> tuple[Tensor, ...]:
        logits, offsets, anchors = model(image)
        boxes, scores, labels = boxes_of(task, logits, offsets, anchors, best_boxes_in_graph)
        return boxes, scores, labels, (labels > 0).sum(1)

    shapes = (("batch", "found", 4), ("batch", "found"), ("batch", "found"), ("batch",))
    return Outputs(("boxes", "scores", "labels", "count"), decoded, decodes=True, shapes=shapes)
