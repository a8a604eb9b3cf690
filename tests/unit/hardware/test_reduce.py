"""Sums on two levels: which ranks share a host, and the mean of a bucket. tests/distributed/ runs ranks."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from sightline.errors import UsageError
from sightline.hardware import devices, reduce


def test_hosts_have_equally_many_ranks_numbered_host_by_host():
    assert reduce._ranks_per_host([(0, 2), (1, 2), (0, 2), (1, 2)]) == 2
    assert reduce._ranks_per_host([(0, 1)] * 3) == 1 and reduce._ranks_per_host([(0, 3), (1, 3), (2, 3)]) == 3


@pytest.mark.parametrize(
    ("places", "said"),
    [
        ([(0, 2), (0, 2), (1, 2), (1, 2)], "of 4 ranks, 2 are on the host of rank 0, and rank 1 is local rank 0 of 2;"),
        ([(0, 2), (1, 2), (0, 1)], "of 3 ranks, 2 are on the host of rank 0, and rank 0 is local rank 0 of 2;"),
        (
            [(0, 2), (1, 2), (0, 1), (0, 1)],
            "rank 2 is local rank 0 of 1; start as many on every host, or use",
        ),
    ],
)
def test_other_hosts_are_refused(places: list, said: str):
    with pytest.raises(UsageError) as raised:
        reduce._ranks_per_host(places)
    assert said in str(raised.value)


@pytest.mark.parametrize("length", [6, 7])
def test_a_bucket_becomes_its_mean_and_room_is_made_once(length: int, monkeypatch: pytest.MonkeyPatch):
    """Of two hosts with two ranks each; the others have one, two and three times our numbers."""
    called: list[tuple] = []
    ours = torch.arange(1.0, length + 1)
    rows = -(-length // 2)
    filled = torch.cat([ours, torch.zeros(2 * rows - length)]) / 4

    def scatter(share: torch.Tensor, whole: torch.Tensor, group: str) -> None:
        called.append(("scatter", group))
        torch.testing.assert_close(whole, filled)
        share.copy_((whole * 2)[:rows])  # rank 1 of this host has as much

    def all_reduce(share: torch.Tensor, group: str) -> None:
        called.append(("reduce", group))
        share.mul_(1 + 5 / 2)  # the other host has twice and three times as much

    def gather(whole: torch.Tensor, share: torch.Tensor, group: str) -> None:
        called.append(("gather", group))
        torch.testing.assert_close(share, filled[:rows] * 7)
        whole.copy_(filled * 7)

    names = {"reduce_scatter_tensor": scatter, "all_reduce": all_reduce, "all_gather_into_tensor": gather}
    monkeypatch.setattr(reduce, "dist", SimpleNamespace(**names, GradBucket=dist.GradBucket))
    monkeypatch.setattr(reduce, "_group", lambda ranks: f"{[*ranks]}")
    levels = reduce._Levels(SimpleNamespace(rank=2, local_rank=0, size=4), 2, devices.select("cpu"))
    assert (levels.host, levels.peers) == ("[2, 3]", "[0, 2]")
    buffer = ours.clone()
    bucket = SimpleNamespace(buffer=lambda: buffer, index=lambda: 3)
    done = reduce._reduce(levels, bucket)
    torch.testing.assert_close(done.wait(), ours * 7 / 4)
    assert done.wait() is buffer and called == [("scatter", "[2, 3]"), ("reduce", "[0, 2]"), ("gather", "[2, 3]")]
    padded, share = levels.scratch(bucket)
    assert (padded is None) == (length == 6) and len(share) == rows
    assert levels.scratch(bucket)[1] is share
    buffer = torch.ones(9)
    assert len(levels.scratch(bucket)[1]) == 5, "the buckets of the first step are others"
