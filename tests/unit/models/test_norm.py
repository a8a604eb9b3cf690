"""Batch norm over ranks against torch's own over the joined batch; two threads with a connection each are the ranks."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from sightline.models.norm import convert, normalise_over


def on_ranks(work: Callable[[int, dist.ProcessGroup], object], size: int) -> list:
    """What work(rank, group) returns on each of `size` ranks."""
    store = dist.HashStore()

    def one(rank: int) -> object:
        return work(rank, dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60)))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


LAYERS = {
    "2d": (nn.BatchNorm2d(3), (4, 5)),
    "1d without parameters": (nn.BatchNorm1d(3, affine=False), ()),
    "3d with the plain average": (nn.BatchNorm3d(3, momentum=None), (2, 1, 3)),
    "without running statistics": (nn.BatchNorm2d(3, track_running_stats=False), (2, 2)),
}


@pytest.mark.filterwarnings("ignore:var_mean")  # of a rank without samples
@pytest.mark.parametrize("shares", [(4, 2), (3, 0), (1, 1, 2)], ids=str)
@pytest.mark.parametrize("kind", LAYERS)
def test_ranks_compute_what_one_computes_on_all_samples(kind: str, shares: tuple[int, ...]):
    layer, sides = copy.deepcopy(LAYERS[kind])
    torch.manual_seed(0)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    batches = [torch.randn(sum(shares), 3, *sides) * 2 + 5 for _ in range(2)]
    outer = torch.randn(sum(shares), 3, *sides)

    def trained(
        layer: nn.Module, forward: Callable[[Tensor], Tensor], part: slice
    ) -> tuple[list[Tensor], list[Tensor]]:
        x = [batch[part].clone().requires_grad_() for batch in batches]
        y = [forward(each) for each in x]
        sum((each * outer[part]).sum() for each in y).backward()
        return [*y, *(each.grad for each in x)], [parameter.grad for parameter in layer.parameters()]

    def rank(number: int, group: dist.ProcessGroup):
        own = copy.deepcopy(layer)
        start = sum(shares[:number])
        found = trained(own, lambda x: normalise_over(group, own, x), slice(start, start + shares[number]))
        return *found, list(own.buffers())

    whole = copy.deepcopy(layer)
    expected, gradients = trained(whole, whole, slice(None))
    ranks = on_ranks(rank, len(shares))
    for joined, theirs in zip(zip(*(found[0] for found in ranks), strict=True), expected, strict=True):
        torch.testing.assert_close(torch.cat(joined), theirs)
    for parts, theirs in zip(zip(*(found[1] for found in ranks), strict=True), gradients, strict=True):
        torch.testing.assert_close(sum(parts), theirs)
    for _, _, buffers in ranks:
        torch.testing.assert_close(buffers, list(whole.buffers()))


def test_half_precision_takes_statistics_in_fp32_and_returns_its_own_type():
    """Around 300 neighbours of bf16 are 2 apart, so that sums in bf16 would have lost the variance."""
    x = (torch.randn(64, 3, 4, 4) * 4 + 300).bfloat16().requires_grad_()
    layer = nn.BatchNorm2d(3)
    [y] = on_ranks(lambda rank, group: normalise_over(group, layer, x), 1)
    expected = nn.BatchNorm2d(3)(x.detach().float())
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), expected, rtol=1e-2, atol=1e-2)


@pytest.fixture
def one_process_of_four():
    """torch's stand-in for a group whose other ranks answer nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()


def test_norms_are_converted_in_place_to_the_group_of_their_rank(one_process_of_four):
    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm1d(3)))

    for size, members in ((2, [0, 1]), (4, [0, 1, 2, 3]), (-1, [0, 1, 2, 3])):
        made = model()
        norms, names = [made[1], *made[2]], list(made.state_dict())
        assert convert(made, size) == 3
        assert [made[1], *made[2]] == norms and list(made.state_dict()) == names
        assert [type(norm).__name__ for norm in norms] == ["BatchNorm2d", "BatchNorm2d", "BatchNorm1d"]
        assert all(dist.get_process_group_ranks(norm.group) == members for norm in norms)
    for size in (0, 1):
        made = model()
        assert convert(made, size) == 0 and type(made[1]) is nn.BatchNorm2d
    assert convert(nn.Linear(2, 2), 2) == 0
    for size in (3, -2):
        with pytest.raises(ValueError, match=f"4 ranks cannot be split into groups of {size}; use a divisor"):
            convert(model(), size)
