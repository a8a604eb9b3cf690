"""Batch norm over ranks, of which one is here: the other's numbers are worked out beside it. Against torch's own over
all samples; tests/migrate/test_distributed.py runs true ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from sightline_migrate import norm

KINDS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def axes(x: Tensor) -> list[int]:
    return [axis for axis in range(x.dim()) if axis != 1]


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3 + 100


@pytest.mark.parametrize("dims", [2, 3, 4, 5])
@pytest.mark.parametrize(
    "options",
    [{}, {"affine": False}, {"momentum": None}, {"momentum": 0.5, "eps": 0.1}, {"track_running_stats": False}],
    ids=str,
)
def test_two_ranks_do_what_one_does_with_all_samples(dims: int, options: dict, monkeypatch: pytest.MonkeyPatch):
    x, outer = drawn(5, 3, *(4,) * (dims - 2)), drawn(5, 3, *(4,) * (dims - 2)) - 100
    whole, ours = (KINDS[dims](3, **options).double() for _ in range(2))
    if whole.affine:
        with torch.no_grad():
            whole.weight.copy_(torch.tensor([0.5, -1.0, 2.0])), whole.bias.copy_(torch.tensor([1.0, 2.0, 3.0]))
        ours.load_state_dict(whole.state_dict())
    mine, other = slice(0, 3), slice(3, 5)
    asked: list[object] = []

    def gather(rows: list[Tensor], row: Tensor, group: object) -> None:
        asked.append(group)
        theirs = x[other].detach()
        var, mean = torch.var_mean(theirs, axes(theirs), correction=0)
        rows[0].copy_(row)
        rows[1].copy_(torch.cat([mean, var, mean.new_tensor([theirs.numel() / 3])]))

    def reduce(sums: Tensor, group: object) -> None:
        asked.append(group)
        mean, var = x.mean(axes(x), keepdim=True), x.var(axes(x), correction=0, keepdim=True)
        standard = (x[other] - mean) / (var + whole.eps).sqrt()
        grad = outer[other]
        sums.add_(torch.cat([grad.sum(axes(x)), (grad * standard).sum(axes(x))]).detach())

    fake = SimpleNamespace(get_world_size=lambda group: 2, all_gather=gather, all_reduce=reduce)
    monkeypatch.setattr(norm, "dist", fake)
    for _ in range(2):  # running statistics of two batches
        given, share = x.clone().requires_grad_(), x[mine].clone().requires_grad_()
        expected, found = whole(given), norm.normalise_over("both", ours, share)
        torch.testing.assert_close(found, expected[mine])
    expected.backward(outer)
    found.backward(outer[mine])
    torch.testing.assert_close(share.grad, given.grad[mine])
    assert set(asked) == {"both"}
    for name, value in whole.named_buffers():
        torch.testing.assert_close(dict(ours.named_buffers())[name], value, msg=name)
    if whole.affine:  # this rank's own
        standard = ((expected - whole.bias.view(1, -1, *(1,) * (dims - 2))) / whole.weight.view(
            1, -1, *(1,) * (dims - 2))).detach()  # fmt: skip
        torch.testing.assert_close(ours.bias.grad, outer[mine].sum(axes(x)))
        torch.testing.assert_close(ours.weight.grad, (outer * standard)[mine].sum(axes(x)))


def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(rows: list[Tensor], row: Tensor, group: object) -> None:
        rows[0].copy_(row)

    fake = SimpleNamespace(get_world_size=lambda group: 1, all_gather=gather, all_reduce=lambda sums, group: None)
    monkeypatch.setattr(norm, "dist", fake)


def test_half_precision_is_normalised_in_fp32_and_comes_back(monkeypatch: pytest.MonkeyPatch):
    alone(monkeypatch)
    layer, x = nn.BatchNorm2d(3), drawn(4, 3, 2, 2).bfloat16().requires_grad_()
    found = norm.normalise_over(None, layer, x)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.float(), nn.BatchNorm2d(3)(x.detach().float()), rtol=0.01, atol=0.01)
    found.sum().backward()
    assert x.grad.dtype is torch.bfloat16 and layer.weight.grad.dtype is torch.float32
    stopped = x.detach()
    norm.normalise_over(None, layer, stopped).sum().backward()
    assert stopped.grad is None


@pytest.mark.filterwarnings("ignore:var_mean")
def test_a_rank_without_samples_has_no_weight_and_one_value_no_deviation(monkeypatch: pytest.MonkeyPatch):
    alone(monkeypatch)
    layer = nn.BatchNorm1d(3)
    mean, var, count = norm._group_statistics(torch.empty(0, 3), None)
    assert mean.tolist() == var.tolist() == [0.0] * 3 and count.tolist() == 1.0
    norm.normalise_over(None, layer, torch.tensor([[1.0, 2.0, 3.0]]))
    assert layer.running_var.tolist() == pytest.approx([0.9] * 3), "unbiased of one value would be infinite"
    assert layer.running_mean.tolist() == pytest.approx([0.1, 0.2, 0.3]) and layer.num_batches_tracked == 1
