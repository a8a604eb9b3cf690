"""Copies between host and device, which on target cpu share memory: a script gets those that a GPU would make."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.nn.utils.rnn import pack_sequence

from sightline_migrate.reporting import record
from sightline_migrate.session import Session
from sightline_migrate.virtual import places

Start = Callable[..., Session]
TO_DEVICE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cuda()": lambda x: x.cuda(),
    "cuda(0)": lambda x: x.cuda(0, non_blocking=True),
    "to(cuda)": lambda x: x.to("cuda"),
    "to(device=)": lambda x: x.to(device=torch.device("cuda", 0)),
    "to(device, dtype)": lambda x: x.to("cuda", torch.float32),
    "type": lambda x: x.type(torch.cuda.FloatTensor),
    "as_tensor": lambda x: torch.as_tensor(x, device="cuda"),
    "asarray": lambda x: torch.asarray(x, device="cuda"),
}


@pytest.mark.parametrize("claim", [False, True])
@pytest.mark.parametrize("way", TO_DEVICE)
def test_changing_the_device_copy_leaves_the_data_alone(way: str, claim: bool, on_cpu: Start):
    numpy = pytest.importorskip("numpy")
    on_cpu(claim=claim)
    array = numpy.ones(4, numpy.float32)
    data = torch.from_numpy(array)
    for source in (data, data[1:3], torch.ones(3), torch.ones(3) * 1):
        before = source.clone()
        there = TO_DEVICE[way](source)
        there.sub_(5)
        assert torch.equal(source, before) and torch.equal(there, before - 5)
        again = TO_DEVICE[way](there)  # already there: the same memory, as on a GPU
        again.sub_(1)
        assert torch.equal(there, before - 6)
    assert array.tolist() == [1, 1, 1, 1]
    torch.as_tensor(array, device="cuda").sub_(1)
    assert array.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("claim", [False, True])
def test_move_to_the_device_of_another_tensor_copies_what_is_known_to_be_elsewhere(claim: bool, on_cpu: Start):
    numpy = pytest.importorskip("numpy")
    on_cpu(claim=claim)
    norm, x = torch.nn.BatchNorm1d(3).cuda(), torch.randn(4, 3).cuda()
    for other in (x, norm(x), x * 2):
        for state in (norm.running_mean, norm.running_mean * 1):
            assert state.to(other.device) is state and state.to(device=other.device) is state
    kept = norm.running_mean.to(x.device)
    kept.add_(9)
    assert torch.equal(norm.running_mean, kept)
    assert norm.to(x.device).running_mean is kept and norm.to((x * 2).device).running_mean is kept
    host, buffer = torch.zeros(3), numpy.zeros(3, numpy.float32)
    ways = host.to(x.device), host.to(x), host.to(tensor=x), host.type_as(x)
    for there in (*ways, torch.from_numpy(buffer).to(norm.weight.device)):
        there.add_(1)
    assert host.tolist() == buffer.tolist() == [0, 0, 0]
    assert torch.zeros(3, device=x.device).cuda(0).device == x.device
    for there in (torch.nn.Linear(2, 2).to(x), torch.nn.Linear(2, 2).to(tensor=x)):
        assert there.weight.cuda() is there.weight
    back = norm.weight.detach().to(host.device)
    norm.weight.data.add_(1)
    assert back.tolist() == [1, 1, 1]


def test_snapshots_on_the_host_stay_and_host_tensors_are_themselves(on_cpu: Start):
    on_cpu()
    weight = torch.nn.Parameter(torch.ones(2, device="cuda"))
    saved = [weight.cpu(), weight.detach().to("cpu"), weight.data.to(torch.device("cpu")), (weight.detach() * 1).cpu()]
    with torch.no_grad():
        weight.add_(1)
    assert [each.tolist() for each in saved] == [[1, 1]] * 4
    assert all(each.cpu() is each and each.to("cpu") is each for each in saved)


def test_views_copies_and_loaded_weights_stay_on_the_device(on_cpu: Start):
    on_cpu()
    x = torch.ones(4, device="cuda")
    net = torch.nn.Linear(2, 2).cuda()
    stream = io.BytesIO()
    torch.save(net.state_dict(), stream)
    stream.seek(0)
    loaded: dict[str, Any] = torch.load(stream, map_location="cuda:0")
    loss = (net(torch.ones(1, 2).cuda()) * 1).sum()
    empty = torch.nn.Linear(2, 2, device="meta").to_empty(device="cuda").weight
    for here in (
        x[1:], x.detach(), x.data, x.view(2, 2), torch.zeros_like(x), x.new_ones(2), net.weight, net.weight.data,
        copy.deepcopy(net).weight, torch.nn.Linear(2, 2, device="cuda").bias, loss, empty,
    ):  # fmt: skip
        assert here.cuda() is here and here.to("cuda:0") is here
    assert loaded["weight"].cuda() is not None


def test_model_keeps_its_parameters_and_their_graph(on_cpu: Start):
    on_cpu()
    for move in (lambda net: net.cuda(), lambda net: net.to("cuda"), lambda net: net.to(device="cuda:0")):
        net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.LSTM(2, 2))
        names, before = dict(net.named_parameters()), {k: v.detach().clone() for k, v in net.state_dict().items()}
        host = net[0].weight.data
        assert move(net) is net
        assert all(names[name] is value and value.is_leaf for name, value in net.named_parameters())
        assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
        net[0](torch.ones(1, 2)).sum().backward()
        gradient = net[0].weight.grad.data_ptr()
        with torch.no_grad():
            move(net)[0].weight.add_(1)  # a second move copies nothing, not even gradients
        assert torch.equal(host, before["0.weight"]) and net[0].weight.grad.data_ptr() == gradient
    lazy = torch.nn.LazyLinear(3).cuda().to("cuda")
    assert lazy(torch.ones(1, 2)).shape == (1, 3)
    sparse = torch.eye(2).to_sparse()
    assert torch.equal(sparse.cuda().to_dense(), torch.eye(2))


@pytest.mark.parametrize("way", ["default device", "with device", "default tensor type"])
def test_tensors_of_the_default_device_are_on_the_device(way: str, on_cpu: Start):
    on_cpu()
    try:
        if way == "default tensor type":
            torch.set_default_tensor_type("torch.cuda.FloatTensor")
        elif way == "default device":
            torch.set_default_device("cuda")
        with torch.device("cuda") if way == "with device" else contextlib.nullcontext():
            made = torch.ones(2), torch.nn.Parameter(torch.ones(2)), torch.nn.Linear(2, 2).weight
            host = torch.ones(2, device="cpu")
        assert all(each.cuda() is each for each in made)
    finally:
        torch.set_default_device(None)
        torch.set_default_tensor_type("torch.FloatTensor")
    assert host.cpu() is host and host.cuda() is not host
    assert torch.ones(2).cuda().add_(1).tolist() == [2, 2]


def test_model_that_never_left_the_host_is_not_copied(on_cpu: Start):
    on_cpu()
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    before = {name: value.data_ptr() for name, value in net.state_dict().items()}
    for move in (lambda: net.cpu(), lambda: net.to("cpu"), lambda: net.to(torch.device("cpu"), torch.float32)):
        assert {name: value.data_ptr() for name, value in move().state_dict().items()} == before


def test_what_torch_copies_to_the_host_for_a_script_stays(on_cpu: Start):
    """Functions of torch that call .cpu() and .to("cpu") themselves."""
    on_cpu()
    net = torch.nn.Linear(2, 2).cuda()
    packed = pack_sequence([torch.ones(2)]).cuda()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    saved = {**get_model_state_dict(net, options=options), "packed": packed.cpu().data}
    before = {name: value.tolist() for name, value in saved.items()}
    with torch.no_grad():
        for tensor in (net.weight, net.bias, packed.data):
            tensor.add_(1)
    assert {name: value.tolist() for name, value in saved.items()} == before
    assert packed.cpu().cpu().data.tolist() == [2, 2]


@pytest.mark.parametrize("claim", [False, True])
def test_state_of_an_optimizer_that_was_saved_on_the_host_stays(claim: bool, on_cpu: Start):
    """The optimizer moves it to the device of the parameter, which torch itself reads."""
    on_cpu(claim=claim)
    weight = torch.nn.Parameter(torch.ones(2).cuda())
    optimizer, other = (torch.optim.SGD([weight], 0.1, momentum=0.5) for _ in range(2))
    saved = torch.ones(2)
    optimizer.load_state_dict({**other.state_dict(), "state": {0: {"momentum_buffer": saved}}})
    weight.sum().backward()
    optimizer.step()
    assert saved.tolist() == [1, 1] and optimizer.state[weight]["momentum_buffer"].tolist() == [1.5, 1.5]


@pytest.mark.parametrize("back", ["cuda", "device of a tensor"])
def test_computed_buffers_move_with_their_module(back: str, on_cpu: Start):
    """As in a codebook that is averaged: `self.mean = self.mean * 0.9 + new`, a result, which carries no mark."""
    on_cpu()
    place: Any = "cuda" if back == "cuda" else torch.ones(1).cuda().device
    net = torch.nn.BatchNorm1d(2)
    for move in (lambda: net.to(place), lambda: net.cpu(), lambda: net.to(place), lambda: net.to("cpu")):
        net.running_mean = net.running_mean * 0 + 1  # type: ignore[assignment, operator]
        left = net.running_mean
        move()
        net.running_mean.add_(1)
        assert left.tolist() == [1, 1]
        kept = move().running_mean
        assert kept.data_ptr() == net.running_mean.data_ptr()


def test_a_copied_device_tells_the_place_of_its_tensor(on_cpu: Start):
    """A model that keeps `self.device = next(self.parameters()).device` is copied for an average of its weights."""
    on_cpu()
    weight, host = torch.ones(2).cuda(), torch.ones(2)
    device = copy.deepcopy({"device": weight.device})["device"]
    assert weight.to(device) is weight and host.to(device).add_(1).tolist() == [2, 2]
    assert host.tolist() == [1, 1]


def test_a_wide_graph_is_searched_once_and_not_to_its_end(on_cpu: Start):
    on_cpu()
    unknown, there = (torch.ones(2) * 1).requires_grad_(), torch.ones(2, device="cuda", requires_grad=True)
    for found in (torch.stack([there, *[unknown] * 100]), torch.stack([*(there * 2)[:, None].expand(2, 50).T])):
        assert places.place_of(found) is None
        assert found.to(found.device) is found and places.place_of(found) == places.DEVICE
    assert places.find_place(torch.stack([*[unknown] * 100, there])) is None


def test_the_original_of_a_new_tensor_may_be_named(on_cpu: Start):
    on_cpu()
    there = torch.ones(2, device="cuda")
    named = torch.zeros_like(input=there), torch.as_tensor(data=there), torch.asarray(obj=there)
    assert all(each.cuda() is each for each in named)


def test_the_graph_of_a_result_tells_its_place(on_cpu: Start):
    on_cpu()
    here, there = torch.ones(2, requires_grad=True), torch.ones(2, device="cuda", requires_grad=True)
    buffer = torch.zeros(2)
    buffer[:1] = there[:1]  # the host's memory, whatever is written into it
    back = (there * 2).cpu() * 3  # a move in between
    for host in (here * 2, (here * 2) @ torch.ones(2, 2), back, back.double().cpu() * 2, buffer):
        assert host.cpu() is host and host.to(buffer.device) is host
        changed = host.cuda()
        with torch.no_grad():
            changed.add_(1)
        assert not torch.equal(changed, host)
    for device in (there * 2, here.cuda() * 2, back.cuda() * 2, (here * 2).to(there.device) * 2):
        assert device.cuda() is device and device.to((there * 3).device) is device
        like = torch.zeros_like(device)
        assert like.cuda() is like and like.cpu() is not like
        assert buffer.to(device.device) is not buffer
    assert not [
        each for each in record.records.values() if each.what in (places.COPIED_IN_DOUBT, places.SHARED_IN_DOUBT)
    ]
    for unknown in (buffer * 1, (here * 2).detach() * 1):
        unknown.to((there.detach() * 2).device)
    (said,) = [key for key, each in record.records.items() if each.what == places.SHARED_IN_DOUBT]
    assert record.counts[said] == 2 and said[2].kind == "adapted"
