"""SSD's loss against its golden value and a plain NumPy version; what is predicted; what is refused."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from sightline.boxes import decode, encode
from sightline.errors import UsageError
from sightline.inference.by_task import boxes_in
from sightline.metrics.coco_map import CocoMap
from sightline.models.anchors import default_boxes
from sightline.parts import DataSpec, PredictOptions
from sightline.tasks.detection import Detection
from sightline.tasks.matching import match

GOLDEN = [(0.1, 0.1, 0.5, 0.5), (0.4, 0.3, 0.95, 0.9), (0.02, 0.02, 0.05, 0.05)]
SSD300 = (
    300,
    (38, 19, 10, 5, 3, 1),
    (8, 16, 32, 64, 100, 300),
    (21, 45, 99, 153, 207, 261, 315),
    ((2,), (2, 3), (2, 3), (2, 3), (2,), (2,)),
)
SMALL = (64, (8, 4, 1), (8, 16, 64), (8, 20, 40, 60), ((2,), (2, 3), (2,)))


class Answers(nn.Module):
    """A model that answers what it was given."""

    def __init__(self, logits: torch.Tensor, offsets: torch.Tensor, anchors: torch.Tensor):
        super().__init__()
        self.logits, self.offsets = nn.Parameter(logits), nn.Parameter(offsets)
        self.register_buffer("anchors", anchors, persistent=False)

    def forward(self, image):
        return self.logits, self.offsets, self.anchors


def random_case(seed: int, classes: int = 5, scale: float = 2.0) -> tuple[Answers, dict[str, torch.Tensor]]:
    """Six images with 0 to 5 boxes."""
    random = torch.Generator().manual_seed(seed)
    anchors = default_boxes(*SMALL)
    corners = torch.rand(6, 8, 2, 2, generator=random).sort(2).values.flatten(2)
    labels = torch.randint(1, classes + 1, (6, 8), generator=random) * (torch.arange(8) < torch.arange(6)[:, None])
    logits = torch.randn(6, len(anchors), classes + 1, generator=random) * scale
    offsets = torch.randn(6, len(anchors), 4, generator=random) * scale
    batch = {"image": torch.zeros(6, 3, 8, 8), "boxes": corners * (labels > 0)[..., None], "labels": labels}
    return Answers(logits, offsets, anchors), batch


def loss_by_hand(model: Answers, batch: dict[str, torch.Tensor], lineage: str = "tf") -> tuple[float, float, int]:
    """Sum over the batch in 64 bits, image by image, with two argsorts for the hard negatives."""
    logits, offsets = model.logits.detach().double().numpy(), model.offsets.detach().double().numpy()
    classes, targets = (t.numpy() for t in match(batch["boxes"], batch["labels"], model.anchors, lineage))
    class_loss, box_loss, matched = 0.0, 0.0, 0
    for image in range(len(classes)):
        positive = classes[image] > 0
        if not positive.any():
            continue
        shifted = logits[image] - logits[image].max(1, keepdims=True)
        entropy = np.log(np.exp(shifted).sum(1)) - shifted[np.arange(len(shifted)), classes[image]]
        rank = np.argsort(np.argsort(-np.where(positive, 0, entropy)))
        chosen = rank < min(3 * positive.sum(), len(positive))
        class_loss += (entropy * (positive.astype(int) + chosen)).sum() / positive.sum()
        away = np.abs(offsets[image] - targets[image])[positive]
        box_loss += np.where(away < 1, away**2 / 2, away - 0.5).sum() / positive.sum()
        matched += int(positive.sum())
    return class_loss, box_loss, matched


def test_golden_loss():
    """Zero logits and perfect boxes: every chosen anchor costs ln 81, and four are chosen per positive."""
    anchors = default_boxes(*SSD300)
    boxes, labels = torch.zeros(2, 10, 4), torch.zeros(2, 10, dtype=torch.int64)
    boxes[:, :3], labels[:, :3] = torch.tensor(GOLDEN), torch.tensor([17, 80, 1])
    _, offsets = match(boxes, labels, anchors)
    model = Answers(torch.zeros(2, 8732, 81), offsets, anchors)
    loss = Detection().loss(model, {"image": torch.zeros(2, 3, 1, 1), "boxes": boxes, "labels": labels})
    assert loss.total.item() == pytest.approx(17.5778, abs=1e-4)
    assert loss.sums["class_loss"].item() == pytest.approx(2 * 17.5778, abs=2e-4)
    assert loss.sums["box_loss"].item() == 0
    assert loss.sums["matched"].item() == 44
    loss.total.backward()
    chosen = model.logits.grad.abs().sum(2) > 0
    assert chosen.sum(1).tolist() == [4 * 22] * 2
    # Equal losses: the first background anchors are taken.
    background = (match(boxes, labels, anchors)[0][0] == 0).nonzero()[:66, 0]
    assert chosen[0, background].all()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("lineage", ["tf", "mlperf"])
def test_loss_is_the_one_written_out(seed: int, lineage: str):
    model, batch = random_case(seed)
    loss = Detection(lineage=lineage).loss(model, batch)
    class_loss, box_loss, matched = loss_by_hand(model, batch, lineage)
    assert loss.sums["class_loss"].item() == pytest.approx(class_loss, rel=1e-5)
    assert loss.sums["box_loss"].item() == pytest.approx(box_loss, rel=1e-5)
    assert loss.sums["matched"].item() == matched >= 15
    assert loss.total.item() == pytest.approx((class_loss + box_loss) / 6, rel=1e-5)
    assert all(not value.requires_grad for value in loss.sums.values())


def test_gradients_in_64_bits():
    """By differences of the loss: what is chosen is constant, and only chosen anchors are pulled."""
    model, batch = random_case(3)
    loss = Detection().loss(model, batch)
    loss.total.backward()
    random = torch.Generator().manual_seed(0)
    for parameter in (model.logits, model.offsets):
        direction = torch.randn(parameter.shape, generator=random) * (parameter.grad != 0)
        slope = float((parameter.grad * direction).sum())
        step, values = 1e-3, []
        for sign in (1, -1):
            with torch.no_grad():
                parameter += sign * step * direction
            values.append(sum(loss_by_hand(model, batch)[:2]) / 6)
            with torch.no_grad():
                parameter -= sign * step * direction
        assert (values[0] - values[1]) / (2 * step) == pytest.approx(slope, rel=2e-2)


def test_images_without_boxes_add_nothing():
    model, batch = random_case(0)
    empty = {**batch, "boxes": torch.zeros_like(batch["boxes"]), "labels": torch.zeros_like(batch["labels"])}
    loss = Detection().loss(model, empty)
    loss.total.backward()
    assert loss.total.item() == 0 and loss.sums["matched"].item() == 0
    assert not model.logits.grad.any() and not model.offsets.grad.any()


@pytest.mark.parametrize("spoilt", ["logits", "offsets"])
def test_a_network_that_has_diverged_has_no_finite_loss(spoilt: str):
    model, batch = random_case(1)
    with torch.no_grad():
        getattr(model, spoilt).fill_(torch.nan)
    assert not Detection().loss(model, batch).total.isfinite()


def test_outputs_of_half_precision_are_read_in_fp32():
    model, batch = random_case(2)
    halved = Answers(model.logits.detach().bfloat16(), model.offsets.detach().bfloat16(), model.anchors)
    widened = Answers(halved.logits.detach().float(), halved.offsets.detach().float(), model.anchors)
    got, expected = Detection().loss(halved, batch), Detection().loss(widened, batch)
    assert got.total.dtype == torch.float32 and got.total.item() == expected.total.item()
    task = Detection(score_threshold=0.2)
    for key, value in task.predict(halved, batch).items():
        assert torch.equal(value, task.predict(widened, batch)[key]), key


def test_the_gradient_keeps_no_second_copy_of_the_logits():
    """81 numbers for each of 8732 anchors of 128 images are 181 MB in half precision, and would be 362 in fp32."""
    model, batch = random_case(2, classes=80)
    model = Answers(model.logits.detach().bfloat16(), model.offsets.detach().bfloat16(), model.anchors)
    kept: dict[int, int] = {}

    def note(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = Detection().loss(model, batch)
    assert sum(kept.values()) < 1.5 * model.logits.nbytes
    loss.total.backward()
    assert model.logits.grad.dtype == torch.bfloat16 and model.logits.grad.any()


# Dynamo finds what breaks a graph; what AOTAutograd makes of it costs as much again.
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager_default_partitioner", marks=pytest.mark.slow)])
def test_one_graph_for_the_compiler_with_the_same_loss(backend):
    """A step compiles loss and model into one graph: nothing in it may ask the host."""
    model, batch = random_case(4)
    task = Detection()

    def loss_of(part):
        loss = task.loss(model, part)
        return loss.total, loss.sums

    compiled = torch.compile(loss_of, fullgraph=True, dynamic=False, backend=backend)
    for _ in range(2):
        total, sums = compiled(batch)
        expected, expected_sums = loss_of(batch)
        assert total.item() == expected.item()
        assert {k: v.item() for k, v in sums.items()} == {k: v.item() for k, v in expected_sums.items()}
        gradient, expected = (torch.autograd.grad(t, model.logits)[0] for t in (total, expected))
        torch.testing.assert_close(gradient, expected)
        batch = {**batch, "boxes": batch["boxes"].flip(0), "labels": batch["labels"].flip(0)}


def test_predictions_are_boxes_of_the_image():
    """One sure anchor per image: its decoded box, its softmax score, its class."""
    anchors = default_boxes(*SMALL)
    logits = torch.zeros(2, len(anchors), 4)
    logits[..., 0] = 9
    boxes = torch.tensor([[0.2, 0.3, 0.6, 0.5], [0.1, 0.4, 0.9, 0.8]])
    logits[0, 7, 2], logits[1, 300, 3] = 12, 10
    offsets = torch.zeros(2, len(anchors), 4)
    offsets[0, 7], offsets[1, 300] = encode(boxes[0], anchors[7]), encode(boxes[1], anchors[300])
    model = Answers(logits, offsets, anchors)
    got = Detection().predict(model, {"image": torch.zeros(2, 3, 8, 8)})
    assert got["boxes"].shape == (2, 200, 4) and got["labels"].dtype == torch.int64
    assert got["labels"][:, 0].tolist() == [2, 3] and not got["labels"][:, 1:].any() and not got["scores"][:, 1:].any()
    torch.testing.assert_close(got["boxes"][:, 0], boxes)
    expected = [model.logits[0, 7].softmax(0)[2].item(), model.logits[1, 300].softmax(0)[3].item()]
    assert got["scores"][:, 0].tolist() == pytest.approx(expected)
    torch.testing.assert_close(decode(offsets[0, 7], anchors[7]), boxes[0])


def test_each_field_of_prediction_counts():
    model, batch = random_case(5, scale=1.5)
    base = Detection(per_image=1000, candidates=40)
    counts = {"base": int((base.predict(model, batch)["labels"] > 0).sum())}
    for fields in ({"score_threshold": 0.5}, {"nms_iou": 0.2}, {"candidates": 2}, {"per_image": 3}):
        got = dataclasses.replace(base, **fields).predict(model, batch)
        counts[next(iter(fields))] = int((got["labels"] > 0).sum())
    assert all(0 < n < counts["base"] for name, n in counts.items() if name != "base"), counts


def test_the_metric_is_cocos():
    spec = DataSpec(("cat", "dog"), 3, (8, 8), (0.5,) * 3, (0.5,) * 3)
    metric = Detection().metric(spec, torch.device("cpu"))
    assert isinstance(metric, CocoMap) and metric.classes == ("cat", "dog") and Detection.headline == "ap"


@pytest.mark.parametrize(
    ("field", "value"),
    [("score_threshold", -0.1), ("score_threshold", 1.0), ("nms_iou", 0.0), ("candidates", 0), ("per_image", 0)],
)
def test_values_that_make_no_sense_are_refused(field: str, value: float):
    with pytest.raises(UsageError, match=f"task.{field}={value} must be"):
        Detection(**{field: value})


def test_predict_shows_what_is_asked_for_beyond_the_limits_of_evaluation():
    model, batch = random_case(3)
    spec = DataSpec(tuple("abcde"), 3, (8, 8), (), ())
    task = Detection(score_threshold=0.3, candidates=20, per_image=10)
    shown = task.showing(PredictOptions(top=400, threshold=0.0))
    found = boxes_in(shown.predict(model, batch), spec, 400, 0.0)
    free = Detection(score_threshold=0.0, candidates=10_000, per_image=10_000)
    assert found == boxes_in(free.predict(model, batch), spec, 400, 0.0)
    assert min(map(len, found)) > 50 and min(each[-1].score for each in found) < 0.3
    for options in (PredictOptions(), PredictOptions(top=3, threshold=0.5)):
        assert task.showing(options) == task
