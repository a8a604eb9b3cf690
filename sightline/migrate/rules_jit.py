"""TorchScript: programs name their device inside; after scripting or loading, CUDA's is replaced by the target's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sightline.migrate import record
from sightline.migrate.rules import Rule, dressed

if TYPE_CHECKING:
    from sightline.migrate.session import Session


def rules() -> list[Rule]:
    return [
        Rule("torch.jit.script", "adapted", dressed(_make_script), "devices inside the program are the target's"),
        Rule("torch.jit.load", "adapted", dressed(_make_load), "loaded to the target, devices inside too"),
    ]


def _make_script(rule: Rule, original: Any, session: Session) -> Any:
    def script(obj: Any, optimize: Any = None, _frames_up: int = 0, *args: Any, **kwargs: Any) -> Any:
        # One frame more than torch counts: names are looked up where the caller stands.
        made = original(obj, optimize, _frames_up + 1, *args, **kwargs)
        if not mend(made, session):
            return made
        record.hit(rule, (obj,))
        if isinstance(made, torch.jit.ScriptFunction):
            # torch may hold a plan made of the old graph, if another program has called this function.
            return torch._C._create_function_from_graph(made.name, made.graph)  # type: ignore[arg-type]
        return made

    return script


def _make_load(rule: Rule, original: Any, session: Session) -> Any:
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        there = session.devices.get(map_location)
        if there is None and session.target.is_cpu:  # a program saved on a GPU wants its weights there
            there = "cpu"
        made = original(f, there, *args, **kwargs)
        if mend(made, session) or there is not map_location:
            record.hit(rule, (), {"map_location": map_location})
        return made

    return load


def mend(program: Any, session: Session) -> bool:
    """Replaces CUDA devices in all graphs of a function or module; whether there were any."""
    graphs = []
    if isinstance(program, torch.jit.ScriptFunction):
        graphs.append((program.graph, program.inlined_graph))
    elif isinstance(program, torch.jit.ScriptModule):
        for module in program.modules():
            inner: Any = module._c
            methods = [inner._get_method(name) for name in inner._method_names()]
            graphs += [(method.graph, method.inlined_graph) for method in methods]
    found = [graph for graph, whole in graphs if 'value="cuda' in str(whole) or "aten::cuda(" in str(whole)]
    for graph in found:
        torch._C._jit_pass_inline(graph)  # functions called inside have graphs of their own
        _mend_graph(graph, session)
    return bool(found)


def _mend_graph(graph: Any, session: Session) -> None:
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
