"""The targets that label smoothing makes, read from the gradient of the loss."""

import pytest
import torch
from torch import nn

from sightline.tasks.classification import Classification

CLASSES = 1001


def test_smoothed_targets_over_1001_classes():
    """The gradient by the logits is softmax - target; equal logits have a softmax of 1 / classes."""
    logits = torch.zeros(2, CLASSES, requires_grad=True)
    batch = {"image": logits, "label": torch.tensor([7, 1000])}
    Classification(label_smoothing=0.1).loss(nn.Identity(), batch).total.backward()
    targets = 1 / CLASSES - 2 * logits.grad  # of a mean over two samples
    assert targets[0, 7].item() == pytest.approx(0.9000999, abs=1e-7)
    assert targets[1, 1000].item() == pytest.approx(0.9000999, abs=1e-7)
    assert targets[0, 8].item() == pytest.approx(0.0000999001, abs=1e-9)
    assert targets.sum(1).tolist() == pytest.approx([1.0, 1.0], abs=1e-5)


def test_the_smoothed_loss_is_the_one_written_out():
    torch.manual_seed(0)
    logits, label = torch.randn(5, CLASSES, dtype=torch.float64), torch.tensor([0, 3, 1000, 3, 12])
    target = torch.full((5, CLASSES), 0.1 / CLASSES, dtype=torch.float64)
    target[range(5), label] += 0.9
    expected = -(target * logits.log_softmax(1)).sum(1).mean()
    got = Classification(label_smoothing=0.1).loss(nn.Identity(), {"image": logits, "label": label}).total
    assert float(got) == pytest.approx(float(expected), rel=1e-6)
