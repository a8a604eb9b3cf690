"""The loss against torch's, mixup against mixed soft targets, and what is shown."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sightline.errors import UsageError
from sightline.metrics.topk import TopK
from sightline.parts import DataSpec
from sightline.tasks.classification import Classification

CLASSES = 6


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, CLASSES))


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {"image": torch.randn(5, 3, 2, 2), "label": torch.tensor([0, 5, 2, 2, 1]), "index": torch.arange(5)}


def soft(label: torch.Tensor, smoothing: float) -> torch.Tensor:
    """One-hot targets with `smoothing` of the mass spread over all classes."""
    return F.one_hot(label, CLASSES) * (1 - smoothing) + smoothing / CLASSES


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_loss_is_the_mean_cross_entropy_of_smoothed_targets(model, batch, smoothing: float):
    loss = Classification(smoothing).loss(model, batch)
    logits = model(batch["image"])
    expected = -(soft(batch["label"], smoothing) * logits.log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(loss.total, expected)
    assert int(loss.sums["top1"]) == int((logits.argmax(1) == batch["label"]).sum())
    assert loss.total.requires_grad and not loss.sums["top1"].requires_grad


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.8, 1.0])
def test_mixup_is_the_cross_entropy_of_mixed_targets(model, batch, share: float):
    """As published: one loss against share * y + (1 - share) * y of the partner, which is the image before."""
    loss = Classification(0.1).loss(model, {**batch, "mix": torch.tensor(share)})
    partner = batch["label"][[4, 0, 1, 2, 3]]
    target = share * soft(batch["label"], 0.1) + (1 - share) * soft(partner, 0.1)
    logits = model(batch["image"])
    torch.testing.assert_close(loss.total, -(target * logits.log_softmax(1)).sum(1).mean())
    named = batch["label"] if share >= 0.5 else partner
    assert int(loss.sums["top1"]) == int((logits.argmax(1) == named).sum())


def test_logits_are_read_in_fp32(batch):
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, CLASSES)).bfloat16()
    batch = {**batch, "image": batch["image"].bfloat16()}
    task = Classification()
    assert task.predict(model, batch)["logits"].dtype == torch.float32
    assert task.loss(model, batch).total.dtype == torch.float32


def test_predictions_are_the_models_logits(model, batch):
    assert torch.equal(Classification().predict(model, batch)["logits"], model(batch["image"]))


@pytest.mark.parametrize("multi_label", [False, True])
def test_tta_is_the_mean_over_the_image_and_its_mirror_image(model, batch, multi_label):
    spec = DataSpec(tuple("abcdef"), 3, (2, 2), (0.0,) * 3, (1.0,) * 3, multi_label=multi_label)
    found = Classification(tta=True).for_data(spec).predict(model, batch)["logits"]
    flipped = torch.from_numpy(batch["image"].numpy()[:, :, :, ::-1].copy())
    torch.testing.assert_close(found, torch.stack([model(batch["image"]), model(flipped)]).mean(0))
    assert not torch.allclose(found, model(batch["image"]))


def test_the_metric_has_the_classes_and_the_loss_of_the_task(model, batch):
    spec = DataSpec(tuple("abcdef"), 3, (2, 2), (0.0,) * 3, (1.0,) * 3)
    task = Classification(0.2)
    metric = task.metric(spec, torch.device("cpu"))
    assert isinstance(metric, TopK)
    metric.update(task.predict(model, batch), {**batch, "valid": torch.ones(5, dtype=torch.bool)})
    values = metric.result().values
    assert values["loss"] == pytest.approx(float(task.loss(model, batch).total.detach()), rel=1e-6)
    assert task.headline in values


@pytest.mark.parametrize("smoothing", [-0.1, 1.0, float("nan")])
def test_smoothing_out_of_range_is_refused(smoothing: float):
    with pytest.raises(UsageError, match=r"task.label_smoothing=.* must be in \[0, 1\)"):
        Classification(smoothing)
