"""Losses that are computed again for the gradient: bits, what is kept, and what is imported."""

import os
from pathlib import Path

import pytest
import torch
import warm
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from sightline.metrics.dice import soft_sums
from sightline.tasks.recomputed import recomputed


def cross_entropy(logits, label):
    return F.cross_entropy(logits.float(), label, reduction="none")


@pytest.mark.parametrize(("function", "rest"), [(soft_sums, ("ce",)), (soft_sums, ("focal",)), (cross_entropy, ())])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_have_the_bits_of_torchs_checkpoint_and_of_keeping_everything(function, rest, dtype):
    torch.manual_seed(0)
    label = torch.randint(0, 4, (3, 9, 7))
    made = torch.randn(3, 4, 9, 7).to(dtype)

    def found(how):
        logits = made.clone().requires_grad_()
        outputs = how(logits * 1.5)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        (gradient,) = torch.autograd.grad(sum((output**2).sum() for output in outputs), logits)
        return *(output.detach() for output in outputs), gradient

    ours = found(lambda x: recomputed(function, x, label, *rest))
    again = found(lambda x: checkpoint(function, x, label, *rest, use_reentrant=False))
    kept = found(lambda x: function(x, label, *rest))
    for a, b, c in zip(ours, again, kept, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_only_the_input_is_kept_for_the_gradient():
    logits = torch.randn(2, 4, 8, 8, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.data_ptr()) or x, lambda x: x):
        recomputed(soft_sums, logits, torch.zeros(2, 8, 8, dtype=torch.int64), "ce")
    assert kept == [logits.data_ptr()]


FIRST_STEPS = """
import sys
import torch
from sightline.tasks.detection import Detection
from sightline.tasks.masks import Masks
from sightline.tasks.segmentation import Segmentation

class Answer(torch.nn.Module):
    def forward(self, answer):
        return answer

logits = torch.randn(2, 3, 8, 8, requires_grad=True)
label = torch.zeros(2, 8, 8, dtype=torch.int64)
for task in (Segmentation(), Masks()):
    task.loss(Answer(), {"image": logits, "label": label}).total.backward()
logits, offsets = torch.randn(1, 2, 3, requires_grad=True), torch.randn(1, 2, 4, requires_grad=True)
anchors = torch.tensor([[0.2, 0.2, 0.4, 0.4], [0.6, 0.6, 0.4, 0.4]])
boxes, labels = torch.tensor([[[0.0, 0.0, 0.4, 0.4]]]), torch.tensor([[1]])
Detection().loss(Answer(), {"image": (logits, offsets, anchors), "boxes": boxes, "labels": labels}).total.backward()
print(logits.grad is not None, "torch._dynamo" in sys.modules, "sympy" in sys.modules)
"""


def test_the_first_step_of_a_loss_does_not_import_torchs_compiler(tmp_path: Path):
    (tmp_path / "steps.py").write_text(FIRST_STEPS)
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = warm.python(tmp_path, tmp_path / "steps.py", environ=environ)
    assert done.stdout.split() == ["True", "False", "False"], done.stderr[-2000:]
