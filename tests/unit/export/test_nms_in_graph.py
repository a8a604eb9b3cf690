"""The choice of boxes in exported graphs against the one of evaluation: equal to the bit, ties included."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sightline.export import nms_in_graph
from sightline.tasks.nms import best_boxes, suppress

ANCHORS, CLASSES = 60, 3
CHOICES = [(0.05, 0.5, 20, 15), (0.5, 0.3, 100, 30), (0.97, 0.5, 5, 500)]  # threshold, IoU, candidates, per image


def crowded(images: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draw boxes that overlap much, with scores in steps of an eighth, so that many are equal."""
    draws = torch.Generator().manual_seed(seed)
    centre, half = torch.rand(images, ANCHORS, 2, generator=draws), torch.rand(images, ANCHORS, 2, generator=draws) / 3
    scores = torch.rand(images, ANCHORS, CLASSES, generator=draws).mul(8).round().div(8)
    return torch.cat([centre - half, centre + half], 2), scores


class Chooser(nn.Module):
    def __init__(self, choice: tuple):
        super().__init__()
        self.choice = choice

    def forward(self, boxes: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return nms_in_graph.best_boxes_in_graph(boxes, scores, *self.choice)


def test_torchvisions_nms_over_all_rows_keeps_what_the_loop_keeps():
    boxes, scores = crowded(4)
    is_candidate = scores[..., 0] > 0.3
    assert torch.equal(nms_in_graph.suppress(boxes, is_candidate, 0.4), suppress(boxes, is_candidate, 0.4))
    nothing = torch.zeros_like(is_candidate)
    assert not nms_in_graph.suppress(boxes, nothing, 0.4).any()


def test_an_overlap_of_the_threshold_itself_is_dropped():
    boxes = torch.tensor([[[0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.5, 1.0]]])  # IoU 0.5
    kept = torch.ones(1, 2, dtype=torch.bool)
    for choose in (suppress, nms_in_graph.suppress):
        assert choose(boxes, kept, 0.5).tolist() == [[True, False]]
        assert choose(boxes, kept, 0.51).tolist() == [[True, True]]


def test_torch_export_chooses_the_same():
    choice = CHOICES[0]
    batch = {0: torch.export.Dim("batch")}
    program = torch.export.export(Chooser(choice), crowded(2), dynamic_shapes=(batch, batch))
    program = program.run_decompositions(nms_in_graph.for_torch())
    assert not any("sightline" in str(node.target) for node in program.graph.nodes)
    for images in (1, 3):
        given = crowded(images, seed=images)
        for found, wanted in zip(program.module()(*given), best_boxes(*given, *choice), strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.slow  # an exported detector in cli/test_export.py chooses by default
@pytest.mark.parametrize("choice", CHOICES)
def test_onnxruntime_chooses_the_same(choice: tuple):
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra export")
    pytest.importorskip("onnxscript", reason="needs the extra export")
    batch = {0: torch.export.Dim("batch")}
    program = torch.onnx.export(
        Chooser(choice).eval(),
        crowded(2),
        dynamo=True,
        opset_version=18,
        dynamic_shapes=(batch, batch),
        custom_translation_table=nms_in_graph.for_onnx(),
        verbose=False,
    )
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    for images in (1, 3):
        given = crowded(images, seed=images)
        names = [each.name for each in session.get_inputs()]
        found = session.run(None, dict(zip(names, map(np.asarray, given), strict=True)))
        for ours, wanted in zip(found, best_boxes(*given, *choice), strict=True):
            np.testing.assert_array_equal(ours, wanted.numpy())


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_what_a_compiler_is_told_of_the_result_is_true(choice: tuple):
    from torch._subclasses.fake_tensor import FakeTensorMode

    given = crowded(2)
    with FakeTensorMode() as mode:
        told = nms_in_graph.best_boxes_in_graph(*(mode.from_tensor(each) for each in given), *choice)
    found = best_boxes(*given, *choice)
    assert [(each.shape, each.dtype) for each in told] == [(each.shape, each.dtype) for each in found]


@pytest.mark.parametrize("scale", [0.01, 1.0, 300.0, 1e5])
def test_boxes_of_other_rows_never_count_whatever_their_size(scale: float):
    """Each row holds the same boxes, and boxes shifted by whole sides of them: what is kept is that of a row alone."""
    boxes, scores = crowded(1)
    rows = torch.cat([(boxes + shift) * scale for shift in (0.0, 0.0, 1.0, -1.0, 2.0, 7.0)])
    is_candidate = (scores[..., 0] > 0.3).expand(len(rows), -1)
    kept = nms_in_graph.suppress(rows, is_candidate, 0.4)
    alone = torch.cat([nms_in_graph.suppress(row[None], is_candidate[:1], 0.4) for row in rows])
    assert torch.equal(kept, alone) and torch.equal(kept, suppress(rows, is_candidate, 0.4))
