"""TorchScript: programs contain device names; replace CUDA's by the target's after scripting or loading."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.jit import _state

from sightline_migrate.reporting import record
from sightline_migrate.rules.table import Rule, dressed

if TYPE_CHECKING:
    from sightline_migrate.session import Session

FROZEN = "only freezes: torch cannot reload a program optimized for a CPU"
# Inserted after every device that is known only at run time; keyed by whether the target is the CPU, where an index has
# no meaning. The device is built from text, since torch.device("xpu", 1) is xpu:0 in TorchScript.
MAPPING = {
    True: """
def there(device: Device) -> Device:
    found = device
    if device.type == "cuda":
        found = torch.device("{}")
    return found
""",
    False: """
def there(device: Device) -> Device:
    found = device
    if device.type == "cuda":
        index = device.index
        if index is None:
            found = torch.device("{0}")
        else:
            found = torch.device("{0}:" + str(index))
    return found
""",
}
IF_ANY = """
def there_if_any(device: Optional[Device]) -> Optional[Device]:
    if device is not None:
        return there(device)
    return device
"""
DEVICE_TYPES = ("Device", "Device?", "Optional[Device]")
MARK = "migrated_device"  # name of each mapped value: a graph that contains it is done
DECIDED = ("prim::Constant", "prim::device", "prim::If", "prim::Loop", "prim::unchecked_cast", "prim::Uninitialized")
"""nodes whose device needs no mapping: replaced in place, read from an existing tensor, already mapped, or in a branch
that ends before the value is read"""


def rules() -> list[Rule]:
    return [
        Rule("torch.jit.script", "adapted", dressed(_make_script), "devices inside are mapped to the target"),
        Rule("torch.jit.load", "adapted", dressed(_make_load), "loaded to the target, devices inside are mapped"),
        Rule("torch.jit.optimize_for_inference", "adapted", dressed(_make_optimize), FROZEN, targets=("cpu",)),
    ]


def _make_script(rule: Rule, original: Any, session: Session) -> Any:
    def script(obj: Any, optimize: Any = None, _frames_up: int = 0, *args: Any, **kwargs: Any) -> Any:
        # If another program called this function, torch may hold a plan for the old graph: compile again.
        known = _state._try_get_jit_cached_function(obj) if inspect.isfunction(obj) else None
        if known is not None and _names_cuda(known.graph, known.inlined_graph):
            del _state._jit_caching_layer[obj]
        # One more frame than torch counts: names are resolved in the caller's scope.
        made = original(obj, optimize, _frames_up + 1, *args, **kwargs)
        if map_devices(made, session):
            record.hit(rule, (obj,))
        return made

    return script


def _make_optimize(rule: Rule, original: Any, session: Session) -> Any:
    def optimize_for_inference(mod: Any, other_methods: list[str] | None = None) -> Any:
        record.hit(rule, (mod,))
        return torch.jit.freeze(mod.eval(), preserved_attrs=other_methods) if hasattr(mod, "training") else mod

    return optimize_for_inference


def _make_load(rule: Rule, original: Any, session: Session) -> Any:
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        there = session.devices.get(map_location)
        if there is None and session.target.is_cpu:  # a program saved on a GPU loads its weights there
            there = "cpu"
        made = original(f, there, *args, **kwargs)
        if map_devices(made, session) or there is not map_location:
            record.hit(rule, (), {"map_location": map_location})
        return made

    return load


def map_devices(program: Any, session: Session) -> bool:
    """Map CUDA devices in all graphs of a function or module to the target's; return True if there were any."""
    graphs = []
    if isinstance(program, torch.jit.ScriptFunction):
        graphs.append((program.graph, program.inlined_graph))
    elif isinstance(program, torch.jit.ScriptModule):
        for module in program.modules():
            inner: Any = module._c
            methods = [inner._get_method(name) for name in inner._method_names()]
            graphs += [(method.graph, method.inlined_graph) for method in methods]
    found = [graph for graph, whole in graphs if _names_cuda(graph, whole)]
    for graph in found:
        torch._C._jit_pass_inline(graph)  # called functions have graphs of their own
        _map_constants(graph, session)
        _map_values(graph, session)
    return bool(found)


def _names_cuda(graph: Any, whole: Any) -> bool:
    if MARK in str(graph):
        return False
    text = str(whole)
    return 'value="cuda' in text or "aten::cuda(" in text or bool(_undecided(whole))


def _undecided(graph: Any) -> list[tuple[Any, Any]]:
    """Return (value, next node) for every device that is known only at run time."""
    first = next(iter(graph.nodes()), graph.block())
    inputs = [(value, first) for value in graph.inputs() if _is_device(value)]
    return [*inputs, *_made_in(graph.block())]


def _made_in(block: Any) -> Iterator[tuple[Any, Any]]:
    nodes = list(block.nodes())
    for node, following in zip(nodes, [*nodes[1:], block], strict=False):  # a block may be empty
        for inner in node.blocks():
            yield from _made_in(inner)
        if node.kind() not in DECIDED:
            yield from ((value, following) for value in node.outputs() if _is_device(value))


def _is_device(value: Any) -> bool:
    return str(value.type()) in DEVICE_TYPES


def _map_constants(graph: Any, session: Session) -> None:
    for node in graph.findAllNodes("prim::Constant"):
        if str(node.output().type()) == "Device" and node.s("value").startswith("cuda"):
            node.s_("value", session.devices.get(node.s("value")))
    for node in graph.findAllNodes("aten::cuda"):
        graph.setInsertPoint(node)
        device = graph.insertConstant(torch.device(session.devices.name))
        nothing, no = graph.insertConstant(None), graph.insertConstant(False)
        moved = graph.create("aten::to", [node.inputsAt(0), device, nothing, no, no], 1)
        moved.insertBefore(node)
        moved.output().setType(node.output().type())
        node.output().replaceAllUsesWith(moved.output())
        node.destroy()


def _map_values(graph: Any, session: Session) -> None:
    mapping = torch.jit.CompilationUnit(MAPPING[session.target.is_cpu].format(session.target.name) + IF_ANY)
    for value, following in _undecided(graph):
        function = mapping.there if str(value.type()) == DEVICE_TYPES[0] else mapping.there_if_any
        graph.setInsertPoint(following)
        (mapped,) = graph.insertGraph(function.inlined_graph, [value])
        mapped.setDebugName(MARK)
        value.replaceAllUsesAfterNodeWith(mapped.node(), mapped)
