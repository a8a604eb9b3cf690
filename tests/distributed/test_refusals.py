"""What only several ranks can refuse or exchange: files that differ between them, apex's Reducer and its groups.

warm.py runs main() of this file on every rank.
"""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import warm
from torch import nn

from sightline.errors import BadData, PeerLost, UsageError
from sightline.hardware.world import World
from sightline.inference import shares
from sightline.inference.shares import Share, refuse_other_files
from sightline_migrate.stand_ins import apex

RANKS = 2


def main(out: Path) -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=RANKS)
    here = World(rank=rank, size=RANKS, side_group=dist.new_group(backend="gloo"))
    refuse_other_files(here, ["a.jpg", "b.jpg"])
    with pytest.raises(
        BadData, match=r"ranks 0 and 1 find different files \(2 and 3\); give a folder that all of them"
    ):
        refuse_other_files(here, ["a.jpg", "b.jpg", "c.jpg"][: 2 + rank])
    with pytest.raises(BadData, match=r"ranks 0 and 1 find different files \(1 and 1\)"):
        refuse_other_files(here, ["ab"[rank]])
    with pytest.raises(UsageError, match="dict is not a ResultFolder, so ranks cannot share its files; predict on one"):
        Share(here, 60.0, print).checked({})  # type: ignore[arg-type]
    reduce_gradients(rank)
    wait_for_a_rank_that_begins_nothing(out, rank)
    (out / f"done-{rank}").touch()


def wait_for_a_rank_that_begins_nothing(out: Path, rank: int) -> None:
    """Batches that another begins are awaited; without any for a while it counts as lost."""
    store = dist.FileStore(str(out / "beats"), RANKS)
    share = Share(World(rank=rank, size=RANKS, store=store), 60.0, print)
    shares.BEAT_S, share.limit_s = 0.02, 0.5
    if rank == 1:
        for number in range(4):
            store.set("predict/1", str(number))
            time.sleep(0.3)
        (out / "silent").touch()
        while not (out / "lost").exists():
            time.sleep(0.02)
        share._wait_for_all()
    else:
        with pytest.raises(PeerLost, match="no rank of 2 began a batch in 0 s, and predictions.json was not written"):
            share._wait_for_all()
        assert (out / "silent").exists(), "it was awaited while it began batches"
        (out / "lost").touch()


def reduce_gradients(rank: int) -> None:
    """As apex: parameters become those of rank 0, gradients the mean of all."""
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, 1.0 + rank)
    reducer = apex.Reducer(model)
    assert model.weight.tolist() == [[1.0, 1.0]]
    model.weight.grad = torch.full((1, 2), 4.0 * rank)
    reducer.reduce()
    assert model.weight.grad.tolist() == [[2.0, 2.0]] and model.bias.grad is None
    gradients = [torch.tensor([float(rank)]), torch.tensor([2.0 + 2 * rank])]
    apex.Reducer(iter(gradients)).reduce()
    assert [each.item() for each in gradients] == [0.5, 3.0]
    assert apex.create_syncbn_process_group(0) is None
    assert dist.get_world_size(apex.create_syncbn_process_group(2)) == 2
    alone = apex.create_syncbn_process_group(1)
    assert dist.get_process_group_ranks(alone) == [rank]
    for size in (3, 4):
        with pytest.raises(ValueError, match=f"2 ranks cannot be split into groups of {size}; use a divisor"):
            apex.create_syncbn_process_group(size)


def test_two_ranks(tmp_path: Path):
    warm.run(__file__, tmp_path, RANKS)
    assert all((tmp_path / f"done-{rank}").exists() for rank in range(RANKS))
