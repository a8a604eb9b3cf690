"""Copy or alias, leaf or not, raises or not: what each way of moving a tensor or a module does on a device.

    python benchmarks/cuda_semantics.py --device cuda --out benchmarks/results/cuda-semantics-cuda.json
    sightline migrate benchmarks/cuda_semantics.py --device cuda --out migrated.json

Needs nothing but torch. The cases are named in the words of a CUDA script, on whatever device they run. On a machine
without a GPU the test device "twin" stands for one: memory of its own, below the same code of torch.

    export TWIN_LIBRARY=$(python tests/migrate/accelerator/twin_backend.py) PYTHONPATH=tests/migrate/accelerator
    python benchmarks/cuda_semantics.py --device twin --out benchmarks/results/cuda-semantics-twin.json

tests/migrate/test_semantics.py compares `sightline migrate` with each of these files, case by case.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

Answer = dict[str, Any]
HOST = "cpu"
KINDS = {
    "cuda": "a GPU, unless migrated: then the name says so",
    "twin": "no GPU: a test device on host memory, tests/migrate/accelerator/twin.cpp",
}


class Device:
    """The device of a run: "cuda" in the names of the cases."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.object = torch.device(kind, 0)
        self.there = torch.ones(1, device=kind)
        self.here = torch.ones(1)
        self.model = Model().to(kind)

    def cuda(self, thing: Any, *args: Any, **kwargs: Any) -> Any:
        """Call thing.cuda(), or the method of that name of the device."""
        return getattr(thing, self.kind)(*args, **kwargs)

    def place(self, place: str) -> str:
        return HOST if place == "host" else self.kind


class Model(nn.Module):
    """Plain, tied, recurrent and frozen weights, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.rnn = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.RNN(3, 3)
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.first.weight
        self.tied.bias.requires_grad_(False)

    @property
    def device(self) -> torch.device:
        return self.first.weight.device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(self.tied(self.norm(self.first(x))))[0]


# ---- tensors ---------------------------------------------------------------------------------------------------------

SOURCES: dict[str, Callable[[str], tuple[torch.Tensor, torch.Tensor]]] = {
    "data": lambda d: _alone(torch.ones(3, device=d)),
    "result": lambda d: _alone(torch.ones(3, device=d) * 2),
    "leaf": lambda d: _alone(torch.ones(3, device=d, requires_grad=True)),
    "leaf of a result": lambda d: _alone(Variable(torch.ones(3, device=d).data + 1, requires_grad=True)),
    "result of a leaf": lambda d: _of_a_leaf(torch.ones(3, device=d, requires_grad=True)),
    "parameter": lambda d: _alone(nn.Parameter(torch.ones(3, device=d))),
}
"""name -> (tensor, the leaf that its gradient reaches)"""


def _alone(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return tensor, tensor


def _of_a_leaf(leaf: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return leaf * 2, leaf


MOVES: dict[str, Callable[[Any, Device], Any]] = {
    "x.cpu()": lambda x, d: x.cpu(),
    "x.cuda()": lambda x, d: d.cuda(x),
    "x.cuda(0)": lambda x, d: d.cuda(x, 0),
    "x.cuda(non_blocking=True)": lambda x, d: d.cuda(x, non_blocking=True),
    "x.to('cpu')": lambda x, d: x.to("cpu"),
    "x.to('cuda')": lambda x, d: x.to(d.kind),
    "x.to(torch.device('cpu'))": lambda x, d: x.to(torch.device("cpu")),
    "x.to(torch.device('cuda', 0))": lambda x, d: x.to(d.object),
    "x.to(device='cpu')": lambda x, d: x.to(device="cpu"),
    "x.to(device='cuda')": lambda x, d: x.to(device=d.kind),
    "x.to('cpu', torch.float64)": lambda x, d: x.to("cpu", torch.float64),
    "x.to('cuda', torch.float64)": lambda x, d: x.to(d.kind, torch.float64),
    "x.to('cpu', copy=True)": lambda x, d: x.to("cpu", copy=True),
    "x.to('cuda', copy=True)": lambda x, d: x.to(d.kind, copy=True),
    "x.to(x.dtype)": lambda x, d: x.to(x.dtype),
    "x.to(x.dtype, copy=True)": lambda x, d: x.to(x.dtype, copy=True),
    "x.to(torch.float64)": lambda x, d: x.to(torch.float64),
    "x.to(host tensor)": lambda x, d: x.to(d.here),
    "x.to(device tensor)": lambda x, d: x.to(d.there),
    "x.to(host tensor.device)": lambda x, d: x.to(d.here.device),
    "x.to(device tensor.device)": lambda x, d: x.to(d.there.device),
    "x.to((device tensor * 2).device)": lambda x, d: x.to((d.there * 2).device),
    "x.to(x.device)": lambda x, d: x.to(x.device),
    "x.to(model.device)": lambda x, d: x.to(d.model.device),
    "x.to(next(model.parameters()).device)": lambda x, d: x.to(next(d.model.parameters()).device),
    "x.type(torch.float32)": lambda x, d: x.type(torch.float32),
    "x.type(torch.float64)": lambda x, d: x.type(torch.float64),
    "x.type_as(host tensor)": lambda x, d: x.type_as(d.here),
    "x.type_as(device tensor)": lambda x, d: x.type_as(d.there),
    "x.float()": lambda x, d: x.float(),
    "x.double()": lambda x, d: x.double(),
    "x.half().cuda()": lambda x, d: d.cuda(x.half()),
    "x.cuda().cpu()": lambda x, d: d.cuda(x).cpu(),
    "x.cpu().cuda()": lambda x, d: d.cuda(x.cpu()),
    "x.clone()": lambda x, d: x.clone(),
    "x.detach()": lambda x, d: x.detach(),
    "x.detach().cpu()": lambda x, d: x.detach().cpu(),
    "x.data": lambda x, d: x.data,
    "x.data.cuda()": lambda x, d: d.cuda(x.data),
    "x.contiguous()": lambda x, d: x.contiguous(),
    "x.view(-1)": lambda x, d: x.view(-1),
    "x.new_tensor([1., 2.])": lambda x, d: x.new_tensor([1.0, 2.0]),
    "x.new_zeros(2)": lambda x, d: x.new_zeros(2),
    "x.new_zeros(2, device='cpu')": lambda x, d: x.new_zeros(2, device="cpu"),
    "torch.zeros_like(x)": lambda x, d: torch.zeros_like(x),
    "torch.zeros_like(x, device='cuda')": lambda x, d: torch.zeros_like(x, device=d.kind),
    "torch.zeros(2, device=x.device)": lambda x, d: torch.zeros(2, device=x.device),
    "torch.as_tensor(x)": lambda x, d: torch.as_tensor(x),
    "torch.as_tensor(x, device='cpu')": lambda x, d: torch.as_tensor(x, device="cpu"),
    "torch.as_tensor(x, device='cuda')": lambda x, d: torch.as_tensor(x, device=d.kind),
    "torch.tensor(x)": lambda x, d: torch.tensor(x),
    "torch.tensor(x, device='cpu')": lambda x, d: torch.tensor(x, device="cpu"),
    "torch.tensor(x, device='cuda')": lambda x, d: torch.tensor(x, device=d.kind),
    "torch.from_numpy(x.numpy())": lambda x, d: torch.from_numpy(x.numpy()),
    "torch.from_numpy(x.numpy()).cuda()": lambda x, d: d.cuda(torch.from_numpy(x.numpy())),
    "x.detach().numpy()": lambda x, d: torch.from_numpy(x.detach().numpy()),
    "x.pin_memory()": lambda x, d: x.pin_memory(),
    "Variable(x)": lambda x, d: Variable(x),
    "Variable(x).cuda()": lambda x, d: d.cuda(Variable(x)),
    "Variable(x.data, requires_grad=True).cuda()": lambda x, d: d.cuda(Variable(x.data, requires_grad=True)),
    "nn.Parameter(x)": lambda x, d: nn.Parameter(x),
    "nn.Parameter(x.data).cuda()": lambda x, d: d.cuda(nn.Parameter(x.data)),
    "copy.copy(x)": lambda x, d: copy.copy(x),
    "copy.deepcopy(x)": lambda x, d: copy.deepcopy(x),
    "x + host tensor": lambda x, d: x + d.here,
    "x + device tensor": lambda x, d: x + d.there,
}


def tensors(device: Device) -> Iterator[tuple[str, Answer]]:
    for way, move in MOVES.items():
        for source, make in SOURCES.items():
            for place in ("host", "device"):
                yield f"{way} | {source}, {place}", _moved(make, move, device.place(place), device)


def _moved(make: Callable[[str], Any], move: Callable[[Any, Device], Any], where: str, device: Device) -> Answer:
    x, leaf = make(where)
    try:
        y = move(x, device)
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        return {"raises": type(error).__name__}
    found: Answer = {
        "is x": y is x,
        "leaf": y.is_leaf,
        "requires grad": y.requires_grad,
        "parameter": isinstance(y, nn.Parameter),
        "on": _on(y, device),
    }
    if y.requires_grad:
        (y * 2).sum().backward()
        found["grad reaches x"] = leaf.grad is not None
    found["shares x"] = _shares(x, y)
    return found


def _shares(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return True if a change of `x` in place shows in `y`."""
    before = y.detach().tolist()
    x.data.add_(1)
    return y.detach().tolist() != before


def _on(tensor: torch.Tensor, device: Device) -> str:
    """Return where a tensor is, from what moves do to it: the one to where it is returns the tensor itself."""
    is_there, is_here = device.cuda(tensor.detach()), tensor.detach().cpu()
    there, here = _shares(tensor, is_there), _shares(tensor, is_here)
    return "both" if there and here else "device" if there else "host" if here else "neither"


# ---- modules ---------------------------------------------------------------------------------------------------------

ACTIONS: dict[str, Callable[[Model, Device], Any]] = {
    "m.cpu()": lambda m, d: m.cpu(),
    "m.cuda()": lambda m, d: d.cuda(m),
    "m.cuda(0)": lambda m, d: d.cuda(m, 0),
    "m.to('cpu')": lambda m, d: m.to("cpu"),
    "m.to('cuda')": lambda m, d: m.to(d.kind),
    "m.to(torch.device('cpu'))": lambda m, d: m.to(torch.device("cpu")),
    "m.to(torch.device('cuda', 0))": lambda m, d: m.to(d.object),
    "m.to(device='cpu', dtype=torch.float32)": lambda m, d: m.to(device="cpu", dtype=torch.float32),
    "m.to(device='cuda', dtype=torch.float64)": lambda m, d: m.to(device=d.kind, dtype=torch.float64),
    "m.to('cpu', non_blocking=True)": lambda m, d: m.to("cpu", non_blocking=True),
    "m.to(host tensor)": lambda m, d: m.to(d.here),
    "m.to(device tensor)": lambda m, d: m.to(d.there),
    "m.to(host tensor.device)": lambda m, d: m.to(d.here.device),
    "m.to(device tensor.device)": lambda m, d: m.to(d.there.device),
    "m.to(torch.float64)": lambda m, d: m.to(torch.float64),
    "m.to(torch.float32)": lambda m, d: m.to(torch.float32),
    "m.to(memory_format=torch.channels_last)": lambda m, d: m.to(memory_format=torch.channels_last),
    "m.float()": lambda m, d: m.float(),
    "m.double()": lambda m, d: m.double(),
    "m.half()": lambda m, d: m.half(),
    "m.half().cuda()": lambda m, d: d.cuda(m.half()),
    "m.double().cpu()": lambda m, d: m.double().cpu(),
    "m.type(torch.float64)": lambda m, d: m.type(torch.float64),
    "m.cpu().cuda()": lambda m, d: d.cuda(m.cpu()),
    "m.cuda().cpu()": lambda m, d: d.cuda(m).cpu(),
    "m._apply(lambda t: t)": lambda m, d: m._apply(lambda t: t),
    "m._apply(lambda t: t.clone())": lambda m, d: m._apply(lambda t: t.clone()),
    "m._apply(lambda t: t.cpu())": lambda m, d: m._apply(lambda t: t.cpu()),
    "m._apply(lambda t: t.cuda())": lambda m, d: m._apply(lambda t: d.cuda(t)),
    "m.to_empty(device='cpu')": lambda m, d: _filled(m.to_empty(device="cpu")),
    "m.to_empty(device='cuda')": lambda m, d: _filled(m.to_empty(device=d.kind)),
    "copy.deepcopy(m)": lambda m, d: copy.deepcopy(m),
    "copy.deepcopy(m).cpu()": lambda m, d: copy.deepcopy(m).cpu(),
    "m.load_state_dict(host)": lambda m, d: _loaded(m, Model().state_dict()),
    "m.load_state_dict(device)": lambda m, d: _loaded(m, d.model.state_dict()),
    "m.load_state_dict(host, assign=True)": lambda m, d: _loaded(m, Model().state_dict(), assign=True),
    "m.requires_grad_(False).cpu()": lambda m, d: m.requires_grad_(False).cpu(),
}


def _filled(model: Model) -> Model:
    """Fill memory that nothing was written to, which may hold NaN: that never compares equal."""
    with torch.no_grad():
        grads = [value.grad for value in model.parameters() if value.grad is not None]
        for value in (*model.parameters(), *model.buffers(), *grads):
            value.fill_(1)
    return model


def _loaded(model: Model, state: Any, **options: Any) -> Model:
    """Load without swapping (see keep_parameters): load_state_dict has a meaning of its own for it."""
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(False)
    model.load_state_dict(state, **options)
    torch.__future__.set_swap_module_params_on_conversion(swaps)
    return model


def modules(device: Device) -> Iterator[tuple[str, Answer]]:
    for name, action in ACTIONS.items():
        for place in ("host", "device"):
            yield f"{name} | {place}", _acted(action, device.place(place), device)


def _acted(action: Callable[[Model, Device], Any], where: str, device: Device) -> Answer:
    model = Model().to(where)
    model(torch.ones(2, 3, device=where)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    weight, bias, frozen = model.first.weight, model.first.bias, model.tied.bias
    data, grad, buffer = weight.data, weight.grad, model.norm.running_mean
    earlier, recurrent = model.state_dict(), model.rnn.get_parameter("weight_hh_l0").data
    moved = action(model, device)
    later, known = moved.state_dict(), {id(p) for group in optimizer.param_groups for p in group["params"]}
    found: Answer = {
        "is m": moved is model,
        "parameters are the same objects": moved.first.weight is weight and moved.tied.bias is frozen,
        "optimizer has the parameters": all(id(parameter) in known for parameter in moved.parameters()),
        "parameters are leaves": all(parameter.is_leaf for parameter in moved.parameters()),
        "requires grad": [moved.first.weight.requires_grad, moved.tied.bias.requires_grad],
        "tied weights stay tied": moved.tied.weight is moved.first.weight,
        "flat weights are the parameters": all(
            flat is getattr(moved.rnn, name)
            for flat, name in zip(moved.rnn._flat_weights, moved.rnn._flat_weights_names, strict=True)
        ),
        "buffer is the same object": moved.norm.running_mean is buffer,
        "grad is the same object": moved.first.weight.grad is grad,
        "on": {
            name: None if value is None else _on(value, device)
            for name, value in {
                "parameter": moved.first.weight,
                "frozen": moved.tied.bias,
                "recurrent": moved.rnn.weight_hh_l0,
                "buffer": moved.norm.running_mean,
                "grad": moved.first.weight.grad,
            }.items()
        },
    }
    if grad is not None and moved.first.weight.grad is not None and moved.first.weight.grad is not grad:
        found["grad shares the earlier grad"] = _shares(moved.first.weight.grad, grad)
    found["shares what was taken before"] = {
        "weight.data": _shares(moved.first.weight, data),
        "recurrent.data": _shares(moved.rnn.weight_hh_l0, recurrent),
        "state_dict()['first.bias']": _shares(moved.first.bias, earlier["first.bias"]),
        "state_dict()['tied.bias']": _shares(moved.tied.bias, earlier["tied.bias"]),
        "state_dict()['norm.running_mean']": _shares(moved.norm.running_mean, earlier["norm.running_mean"]),
        "bias": moved.first.bias is bias,
    }
    found["shares its state_dict()"] = _shares(moved.first.bias, later["first.bias"])
    return found


# ---- what scripts do -------------------------------------------------------------------------------------------------


def _train(model: Model, device: Device) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 3).to(device.kind)).square().sum().backward()
        optimizer.step()


def _is_kept(snapshot: Any, model: Model, device: Device, back: Callable[[Model], Any]) -> Answer:
    """Train after a snapshot: return which of its tensors stay as they were."""
    before = {name: value.tolist() for name, value in snapshot.items()}
    _train(back(model), device)
    names = ("first.weight", "rnn.weight_hh_l0", "norm.running_mean", "norm.num_batches_tracked")
    return {name: snapshot[name].tolist() == before[name] for name in names}


SNAPSHOTS: dict[str, Callable[[Model, Device], Any]] = {
    "m.cpu().state_dict(); m.cuda()": lambda m, d: m.cpu().state_dict(),
    "m.to('cpu').state_dict(); m.cuda()": lambda m, d: m.to("cpu").state_dict(),
    "m.to(torch.device('cpu')).state_dict(); m.cuda()": lambda m, d: m.to(torch.device("cpu")).state_dict(),
    "m.to(device='cpu', dtype=torch.float32).state_dict(); m.cuda()": lambda m, d: m.to(
        device="cpu", dtype=torch.float32
    ).state_dict(),
    "m.cpu().state_dict().copy(); m.cuda()": lambda m, d: m.cpu().state_dict().copy(),
    "m.state_dict()": lambda m, d: m.state_dict(),
    "{k: v.cpu() for k, v in m.state_dict().items()}": lambda m, d: {k: v.cpu() for k, v in m.state_dict().items()},
    "{k: v.to('cpu') ...}": lambda m, d: {k: v.to("cpu") for k, v in m.state_dict().items()},
    "{k: v.detach().clone() ...}": lambda m, d: {k: v.detach().clone() for k, v in m.state_dict().items()},
    "copy.deepcopy(m).cpu().state_dict()": lambda m, d: copy.deepcopy(m).cpu().state_dict(),
    "copy.deepcopy(m.state_dict())": lambda m, d: copy.deepcopy(m.state_dict()),
}


def _optimizer_state(device: Device) -> Answer:
    """Move a loaded optimizer's state to where its parameters are."""
    model = Model().to(device.kind)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    model(torch.ones(2, 3, device=device.kind)).sum().backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    for entry in saved["state"].values():
        entry.update({key: value.cpu() for key, value in entry.items()})
    optimizer.load_state_dict(saved)
    state, first = optimizer.state[model.first.weight], saved["state"][0]
    return {
        "on": {key: _on(value, device) for key, value in state.items()},
        "shares the loaded one": {key: _shares(value, first[key]) for key, value in state.items()},
    }


def _reused(device: Device, take: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
    """Fill one buffer again and again, as loaders do; return the batches that were moved from it."""
    buffer = torch.zeros(1)
    batches = []
    for number in range(3):
        buffer.fill_(number)
        batches.append(take(buffer))
    return [batch.item() for batch in batches]


def scripts(device: Device) -> Iterator[tuple[str, Answer]]:
    for name, take in SNAPSHOTS.items():
        model = Model().to(device.kind)
        yield f"{name}; train", _is_kept(take(model, device), model, device, device.cuda)
    yield "optimizer.load_state_dict(host)", _optimizer_state(device)
    ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "x.cuda()": device.cuda,
        "x.to(model.device)": lambda x: x.to(device.model.device),
        "x.to(next(model.parameters()).device)": lambda x: x.to(next(device.model.parameters()).device),
        "x.type_as(weight)": lambda x: x.type_as(device.model.first.weight),
        "torch.as_tensor(x, device=weight.device)": lambda x: torch.as_tensor(x, device=device.model.device),
    }
    for name, to in ways.items():
        yield f"one buffer, three batches: {name}", {"batches": _reused(device, to)}


# ---- command ---------------------------------------------------------------------------------------------------------


def keep_parameters(kind: str) -> str:
    """Let a module's parameters be the same objects after a move, as on CUDA; return how.

    Module._apply assigns `.data` between the backends that torch has built in. For others it makes new Parameters,
    unless torch.__future__ tells it to swap them, which has the same outcome.
    """
    if torch._has_compatible_shallow_copy_type(torch.ones(1), torch.ones(1, device=kind)):
        return "kept by torch: .data is assigned"
    torch.__future__.set_swap_module_params_on_conversion(True)
    return "kept by torch.__future__.set_swap_module_params_on_conversion, in place of what torch does on CUDA"


def name_of(kind: str) -> str:
    module = getattr(torch, kind)
    return module.get_device_name() if hasattr(module, "get_device_name") else kind


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, or another device that torch knows")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    keeps = keep_parameters(arguments.device)
    device = Device(arguments.device)
    cases = {**dict(tensors(device)), **dict(modules(device)), **dict(scripts(device))}
    header = {
        "device": arguments.device,
        "name": name_of(arguments.device),
        "is a GPU": arguments.device == "cuda",
        "what it is": KINDS.get(arguments.device, "a device of torch"),
        "parameters of a moved module": keeps,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    lines = [f"{json.dumps(name)}: {json.dumps(answer)}" for name, answer in cases.items()]
    text = json.dumps(header)[:-1] + ', "cases": {\n' + ",\n".join(lines) + "\n}}\n"
    arguments.out.write_text(text, encoding="utf-8")
    print(f"{len(cases)} cases on {header['name']}: {arguments.out}")


if __name__ == "__main__":
    main()
