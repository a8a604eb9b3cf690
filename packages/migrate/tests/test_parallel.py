"""Data parallelism by hand, on devices that are all one: against plain torch on the parts of the batch."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.cuda.comm
from torch import nn
from torch.nn.functional import batch_norm

from sightline_migrate.reporting import record

Start = Callable[..., Any]
DEVICES = [0, "cuda:1", torch.device("cuda")]


def adapted() -> set[str]:
    return {each.rule.name for each in record.records.values() if each.kind == "adapted"}


def test_replicas_learn_what_one_module_learns_part_by_part(on_cpu: Start):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    plain, x = copy.deepcopy(net), torch.randn(6, 3)
    on_cpu()
    replicas = nn.parallel.replicate(net, devices=DEVICES)
    parts = nn.parallel.scatter(x, DEVICES)
    out = nn.parallel.gather(nn.parallel.parallel_apply(replicas, parts, devices=DEVICES), target_device="cuda:0")
    out.pow(2).sum().backward()

    first, norm, last = plain
    expected = [last(batch_norm(first(p), None, None, norm.weight, norm.bias, True)) for p in x.chunk(3)]
    torch.cat(expected).pow(2).sum().backward()
    torch.testing.assert_close(out, torch.cat(expected))
    for got, want in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad)
    # The first replica is the module itself as far as buffers go: only its part of the batch is remembered.
    norm(first(x[:2]))
    torch.testing.assert_close(net[1].running_mean, norm.running_mean)
    names = ("replicate", "scatter", "parallel_apply", "gather")
    assert adapted() == {f"torch.nn.parallel.{name}" for name in names}


def test_the_module_of_parallel_apply_is_hidden_by_its_function(on_cpu: Start):
    on_cpu()
    parallel_apply = importlib.import_module("torch.nn.parallel.parallel_apply").parallel_apply
    net, x = nn.Linear(3, 2), torch.randn(2, 3)
    assert torch.equal(parallel_apply([net], [x], devices=[0])[0], net(x))


def test_replicas_without_gradients_have_weights_of_their_own(on_cpu: Start):
    on_cpu()
    net = nn.Linear(2, 2)
    net.register_buffer("phase", torch.ones(2, dtype=torch.complex64))
    _, other = nn.parallel.replicate(net, [0, 1], detach=True)
    other.weight.add_(1)
    assert torch.equal(other.weight, net.weight + 1) and torch.equal(other.phase, net.phase)


def test_scatter_and_gather_go_through_collections(on_cpu: Start):
    on_cpu()
    x = torch.arange(4.0)
    given = {"x": x, "pair": [x.view(2, 2), "word"]}
    parts = nn.parallel.scatter(given, target_gpus=["cuda:0", "cuda:1"])
    assert [part["x"].tolist() for part in parts] == [[0, 1], [2, 3]] and parts[1]["pair"][1] == "word"
    back = nn.parallel.gather([{"x": part["x"], "loss": part["x"].sum()} for part in parts], "cpu")
    assert torch.equal(back["x"], x) and back["loss"].tolist() == [1, 5]
    function = torch.nn.parallel._functions.Scatter  # as libraries with a data parallelism of their own call it
    assert [each.tolist() for each in function.apply([0, 1], [1, 3], 0, x)] == [[0], [1, 2, 3]]


@pytest.mark.parametrize("comm", [torch.cuda.comm, torch.nn.parallel.comm], ids=lambda module: module.__name__)
def test_comm(comm: Any, on_cpu: Start):
    on_cpu()
    x = torch.arange(6.0).view(3, 2)
    first, second = comm.broadcast(x, [0, 1])
    second.add_(1)  # another device has memory of its own
    assert first is x and torch.equal(second, x + 1)
    out = [torch.zeros(3, 2), torch.zeros(3, 2)]
    assert comm.broadcast(x, out=out)[1] is out[1] and torch.equal(out[1], x)
    assert [[t.shape for t in each] for each in comm.broadcast_coalesced([x, x[0]], [0, 1])] == [[(3, 2), (2,)]] * 2
    assert torch.equal(comm.reduce_add([x, x, x]), 3 * x)
    assert torch.equal(comm.reduce_add_coalesced([[x, x[0]], [x, x[1]]], 0)[1], x[0] + x[1])
    parts = comm.scatter(x, ["cuda:0", "cuda:1"])
    assert [len(part) for part in parts] == [2, 1] and torch.equal(comm.gather(parts), x)
    assert [part.tolist() for part in comm.scatter(x, [0, 1], [1, 1], dim=1)][1] == [[1], [3], [5]]
    targets = torch.zeros(1, 2), torch.zeros(2, 2)
    assert comm.scatter(x, out=targets)[1] is targets[1] and torch.equal(targets[1], x[1:])
    whole = torch.zeros(3, 2)
    assert comm.gather(parts, out=whole) is whole and torch.equal(whole, x)
    assert comm.broadcast(torch.ones(2, dtype=torch.complex64), [0])[0].shape == (2, 2)  # as torch: as real numbers
    names = ("broadcast", "broadcast_coalesced", "reduce_add", "reduce_add_coalesced", "scatter", "gather")
    assert adapted() == {f"{comm.__name__}.{name}" for name in names}


def test_wrong_use_of_comm_is_told(on_cpu: Start):
    on_cpu()
    x, comm = torch.ones(2), torch.cuda.comm
    with pytest.raises(RuntimeError, match="one of 'devices' and 'out' must be given"):
        comm.broadcast(x)
    with pytest.raises(ValueError, match=r"one size, but got \[\(2,\), \(3,\)\]"):
        comm.reduce_add([x, torch.ones(3)])
    with pytest.raises(RuntimeError, match="'out' cannot be combined with devices="):
        comm.scatter(x, [0], out=[x])
    with pytest.raises(RuntimeError, match="'out' cannot be combined with destination=0"):
        comm.gather([x], destination=0, out=x)
