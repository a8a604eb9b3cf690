"""Moves of tensors and modules beside those of a real second device: the tables of benchmarks/cuda_semantics.py."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import warnings
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sightline import migrate
from sightline_migrate.reporting import record
from sightline_migrate.virtual import places

REPO = Path(__file__).resolve().parents[2]
SCRIPT = REPO / "benchmarks" / "cuda_semantics.py"
TABLES = sorted((REPO / "benchmarks" / "results").glob("cuda-semantics-*.json"))
Cases = dict[str, dict[str, Any]]

TO_HOST = ["x.cpu()", "x.to('cpu')", "x.to(torch.device('cpu'))", "x.to(device='cpu')"]
TO_HOST += ["torch.as_tensor(x, device='cpu')"]
TO_CUDA = ["x.cuda()", "x.cuda(0)", "x.cuda(non_blocking=True)", "x.to('cuda')", "x.to(torch.device('cuda', 0))"]
TO_CUDA += ["x.to(device='cuda')", "torch.as_tensor(x, device='cuda')"]
LIKE_HOST = ["x.to(host tensor)", "x.to(host tensor.device)", "x.type_as(host tensor)"]
LIKE_CUDA = ["x.to(device tensor)", "x.to(device tensor.device)", "x.type_as(device tensor)", "x.to(model.device)"]
LIKE_CUDA += ["x.to(next(model.parameters()).device)"]
OPERATIONS = ["x.clone()", "x.double()", "x.to(torch.float64)", "x.type(torch.float64)", "x.to(x.dtype, copy=True)"]
SAME_PLACE = ["x.to(x.dtype)", "x.type(torch.float32)", "x.float()", "x.detach()", "x.data", "x.contiguous()"]
SAME_PLACE += ["x.view(-1)", "Variable(x)", "nn.Parameter(x)"]
MADE_LIKE = ["x.to(x.device)", "x.new_tensor([1., 2.])", "x.new_zeros(2)", "torch.zeros_like(x)", "torch.tensor(x)"]
MADE_LIKE += ["torch.zeros(2, device=x.device)", "torch.as_tensor(x)"]
Known = list[tuple[list[str], str]]

# (ways, source and place) of each case that differs; docs/reference/migration_reference.md shows the reasons.
KNOWN: dict[str, Known] = {
    "host and device are one memory, so that an operation of both, NumPy and pinning do not raise": [
        (["torch.from_numpy(x.numpy())", "torch.from_numpy(x.numpy()).cuda()", "x.detach().numpy()"], "*, device"),
        (["x + host tensor", "x.pin_memory()"], "*, device"),
        (["x + device tensor"], "*, host"),
    ],
    "memory is not pinned, so that x.pin_memory() is x": [(["x.pin_memory()"], "*, host")],
    "a result carries no mark: a move to a place by name copies it": [
        ([*TO_HOST, "x.detach().cpu()"], "result, host"),
        (["x.detach().cpu()"], "*leaf*result, host"),
        (["x.detach().cpu()"], "result of a leaf, host"),
        ([*TO_CUDA, "x.data.cuda()", "Variable(x).cuda()"], "result, device"),
        (["x.data.cuda()", "Variable(x).cuda()"], "leaf of a result, device"),
        (["x.data.cuda()", "Variable(x).cuda()"], "result of a leaf, device"),
    ],
    "a result carries no mark: a move to the place of a tensor returns it": [
        (LIKE_HOST, "result, device"),
        (LIKE_CUDA, "result, host"),
    ],
    "a result carries no mark: its .device tells no place": [(["x.to((device tensor * 2).device)"], "*, host")],
    "a leaf made from a result stays itself, wherever it is moved": [
        ([*TO_HOST, *LIKE_HOST], "leaf of a result, device"),
        ([*TO_CUDA, *LIKE_CUDA], "leaf of a result, host"),
        (["Variable(x.data, requires_grad=True).cuda()"], "*result*, host"),
    ],
    "a Parameter made from a result counts as the host's": [(["nn.Parameter(x.data).cuda()"], "*result*, device")],
}
# On a GPU alone; the test device has no cuDNN.
CUDNN: Known = [
    (["m.cuda()", "m.cuda(0)", "m.to('cuda')", "m.to(torch.device('cuda', 0))", "m.to(device tensor)"], "device"),
    (["m.to(device tensor.device)", "m.to(torch.float32)", "m.to(memory_format=torch.channels_last)"], "device"),
    (["m.float()", "m._apply(lambda t: t)", "m._apply(lambda t: t.cuda())"], "device"),
    (["m.state_dict(); train"], "*"),  # of a GPU's module the state holds the block, which training changes
]
# Equal in themselves; only the next move differs, as that of a result does.
UNMARKED: Known = [
    (OPERATIONS, "*, *"),
    (["x + host tensor"], "*, host"),
    (["x + device tensor"], "*, device"),
    (SAME_PLACE, "*result*, *"),
    (MADE_LIKE, "*result, *"),  # the graph of the result of a leaf tells the place
    (["copy.copy(x)", "copy.deepcopy(x)"], "*result, *"),  # copying reads x.device, which marks what the graph tells
    (LIKE_HOST, "result, host"),
    (LIKE_CUDA, "result, device"),
    (["x.to((device tensor * 2).device)"], "*result*, device"),
    (["m.load_state_dict(host)", "m.load_state_dict(device)"], "*"),  # the gradients
]


@pytest.fixture(scope="module")
def migrated(once: Callable[..., Path], fork: Callable[..., Any]) -> Cases:
    def run(folder: Path) -> None:
        fork(
            folder, "-m", "sightline.migrate", "--target", "cpu", "--quiet",
            SCRIPT, "--device", "cuda", "--out", "ours.json", warm=True,
        )  # fmt: skip

    return json.loads((once("semantics", run) / "ours.json").read_text())["cases"]


@pytest.mark.parametrize("table", TABLES or [SCRIPT], ids=lambda path: path.stem)
def test_moves_do_what_a_device_does_but_for_the_known_differences(table: Path, migrated: Cases) -> None:
    read = json.loads(table.read_text())
    cuda: Cases = read["cases"]
    rows = [*[row for rows in KNOWN.values() for row in rows], *(CUDNN if read["is a GPU"] else [])]
    assert cuda.keys() == migrated.keys()
    differ = {name for name in cuda if cuda[name] != migrated[name]}
    unmarked = {name for name in differ if _is_only_unmarked(cuda[name], migrated[name])}
    known = _names(cuda, rows)
    assert _show(differ - unmarked - known, cuda, migrated) == [], "new differences"
    assert sorted(known - (differ - unmarked)) == [], "no longer different: take them out of KNOWN"
    assert unmarked == _names(cuda, UNMARKED)


@pytest.mark.parametrize("table", TABLES, ids=lambda path: path.stem)
def test_the_log_names_the_moves_that_a_device_may_answer_otherwise(
    table: Path, migrated: Cases, semantics: ModuleType, in_doubt: set[str]
) -> None:
    cuda: Cases = json.loads(table.read_text())["cases"]
    questions = ("is x", "shares x", "leaf")
    of_tensors = {name for name in cuda if name.partition(" | ")[0] in semantics.MOVES and "is x" in cuda[name]}
    differ = {name for name in of_tensors if any(cuda[name][each] != migrated[name].get(each) for each in questions)}
    raises_or_is_not_pinned = {name for name in differ if name.startswith(("torch.from_numpy", "x.pin_memory"))}
    assert len(differ) > 60 and differ - raises_or_is_not_pinned - in_doubt == set()
    computed = ("x.to((device tensor * 2).device)", "x.half().cuda()")
    assert all("result" in name or name.startswith(computed) for name in in_doubt)


@pytest.fixture(scope="module")
def semantics() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cuda_semantics", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def in_doubt(semantics: ModuleType) -> set[str]:
    """Names of the moves whose log line says that a GPU may answer otherwise."""
    said = set()
    with migrate.migrate(target="cpu"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.tensor(x)
        device = semantics.Device("cuda")
        for way, move in semantics.MOVES.items():
            for source, make in semantics.SOURCES.items():
                for place in ("host", "device"):
                    x, _ = make(device.place(place))
                    record.reset()
                    with contextlib.suppress(RuntimeError):  # NumPy reads no tensor that requires grad
                        move(x, device)
                    if any(
                        each.what in (places.COPIED_IN_DOUBT, places.SHARED_IN_DOUBT)
                        for each in record.records.values()
                    ):
                        said.add(f"{way} | {source}, {place}")
    return said


def _names(cases: Cases, rows: Known) -> set[str]:
    return {
        name
        for name in cases
        for ways, source in rows
        if name.partition(" | ")[0] in ways and fnmatchcase(name.partition(" | ")[2], source)
    }


def _is_only_unmarked(cuda: dict[str, Any], ours: dict[str, Any]) -> bool:
    """Return True if the answers differ only in places that nothing tells: a move to either place copies."""
    if isinstance(ours.get("on"), dict):
        told = {name: place for name, place in ours["on"].items() if place != "neither"}
        return {**cuda, "on": {name: cuda["on"][name] for name in told}} == {**ours, "on": told}
    return ours.get("on") == "neither" and {**cuda, "on": "neither"} == ours


def _show(names: Iterable[str], cuda: Cases, ours: Cases) -> list[str]:
    return [f"{name}: there {cuda[name]}, here {ours[name]}" for name in sorted(names)]
