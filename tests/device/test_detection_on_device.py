"""Matching, loss and suppression on an accelerator: the CPU's numbers, and nothing that waits for the host."""

import pytest
import torch
from torch import nn

from sightline.hardware import devices
from sightline.models.anchors import default_boxes
from sightline.tasks.detection import Detection
from sightline.tasks.nms import best_boxes

pytestmark = pytest.mark.device

CLASSES, PICTURES, PLACES = 20, 6, 30


class Answers(nn.Module):
    """A model that answers what it was given."""

    def __init__(self, logits: torch.Tensor, offsets: torch.Tensor, anchors: torch.Tensor):
        super().__init__()
        self.logits, self.offsets = nn.Parameter(logits), nn.Parameter(offsets)
        self.register_buffer("anchors", anchors, persistent=False)

    def forward(self, image):
        return self.logits, self.offsets, self.anchors


@pytest.fixture
def cuda() -> torch.device:
    device = devices.select()
    if device.kind != "cuda":
        pytest.skip(f"written for cuda, this is {device.kind}")
    return device.torch_device


def case(device: torch.device) -> tuple[Answers, dict[str, torch.Tensor]]:
    """Pictures with 0, 1, ... boxes."""
    random = torch.Generator().manual_seed(0)
    anchors = default_boxes(
        300,
        (38, 19, 10, 5, 3, 1),
        (8, 16, 32, 64, 100, 300),
        (21, 45, 99, 153, 207, 261, 315),
        ((2,), (2, 3), (2, 3), (2, 3), (2,), (2,)),
    )
    boxes = torch.rand(PICTURES, PLACES, 2, 2, generator=random).sort(2).values.flatten(2)
    labels = torch.randint(1, CLASSES + 1, (PICTURES, PLACES), generator=random)
    labels *= torch.arange(PLACES) < torch.arange(PICTURES)[:, None]
    logits = torch.randn(PICTURES, len(anchors), CLASSES + 1, generator=random)
    offsets = torch.randn(PICTURES, len(anchors), 4, generator=random)
    batch = {"image": torch.zeros(PICTURES, 1), "boxes": boxes, "labels": labels}
    return Answers(logits, offsets, anchors).to(device), {key: value.to(device) for key, value in batch.items()}


@pytest.mark.parametrize("lineage", ["tf", "mlperf"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_captured_loss_is_that_of_the_cpu(cuda: torch.device, compiled: bool, lineage: str):
    """A graph cannot be captured of anything that asks the host; another batch replays through it."""
    task = Detection(lineage=lineage)
    model, batch = case(cuda)

    def loss_of(part):
        loss = task.loss(model, part)
        return loss.total, loss.sums

    if compiled:
        loss_of = torch.compile(loss_of, fullgraph=True, dynamic=False)

    def step():
        model.zero_grad(set_to_none=True)
        total, sums = loss_of(batch)
        total.backward()
        return total, sums

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total, sums = step()

    reference, other = case(torch.device("cpu"))
    for turn in range(2):
        if turn:
            other["labels"] = other["labels"].flip(0)
            other["boxes"] = other["boxes"].flip(0)
        for key in ("boxes", "labels"):
            batch[key].copy_(other[key])
        graph.replay()
        reference.zero_grad(set_to_none=True)
        expected = task.loss(reference, other)
        expected.total.backward()
        assert total.item() == pytest.approx(expected.total.item(), rel=1e-5)
        assert {k: v.item() for k, v in sums.items()} == pytest.approx(
            {k: v.item() for k, v in expected.sums.items()}, rel=1e-5
        )
        torch.testing.assert_close(model.logits.grad.cpu(), reference.logits.grad, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(model.offsets.grad.cpu(), reference.offsets.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("static", [True, None])
def test_suppression_finds_what_the_cpu_finds(cuda: torch.device, static: bool | None):
    """Of static shapes it asks the device nothing. Left to itself it asks once a batch how many scores there are."""
    random = torch.Generator().manual_seed(1)
    boxes = torch.rand(4, 2000, 2, 2, generator=random).sort(2).values.flatten(2)
    scores = (torch.rand(4, 2000, 8, generator=random) ** 4 * 300).round() / 300  # many are equal
    options = {"score_threshold": 0.05, "nms_iou": 0.5, "candidates": 200, "per_image": 200}
    there = boxes.to(cuda), scores.to(cuda)
    torch.cuda.set_sync_debug_mode("error" if static else "default")
    try:
        found = best_boxes(*there, **options, static=static)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for got, expected in zip(found, best_boxes(boxes, scores, **options), strict=True):
        assert torch.equal(got.cpu(), expected)
