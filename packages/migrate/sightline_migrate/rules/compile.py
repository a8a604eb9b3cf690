"""Compilers: torch.compile, torch.jit, triton kernels, C++ and CUDA extensions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sightline_migrate import patching, zones
from sightline_migrate.options import MigrateError
from sightline_migrate.reporting import advice, record
from sightline_migrate.rules.table import Rule, dressed

if TYPE_CHECKING:
    from sightline_migrate.session import Session

OWN_BACKENDS = {"hpu": "hpu_backend"}
CUDA_BACKENDS = {"cudagraphs": "aot_eager", "tensorrt": "inductor", "torch_tensorrt": "inductor"}
EXTENSIONS = "torch.utils.cpp_extension"
NO_KERNELS = ("cpu", "mps")


def rules() -> list[Rule]:
    kernels = "error: CUDA code cannot be compiled for the target"
    return [
        Rule("torch.compile", "adapted", dressed(_make_compile), "compiled for the target"),
        Rule(f"{EXTENSIONS}.load", "refused", dressed(_make_load), kernels, module=EXTENSIONS),
        Rule(f"{EXTENSIONS}.load_inline", "refused", dressed(_make_load), kernels, module=EXTENSIONS),
        Rule(f"{EXTENSIONS}.CUDAExtension", "refused", dressed(_make_load), kernels, module=EXTENSIONS),
        Rule(
            "triton.runtime.jit.JITFunction.run",
            "refused",
            dressed(_make_kernel),
            "error: Triton does not support the target",
            targets=NO_KERNELS,
            module="triton.runtime.jit",
        ),
    ]


def setup(session: Session) -> None:
    """Register each wrapper with torch.jit, which knows functions by identity; install advice for other errors."""
    advice.install(session)
    builtins = torch.jit._builtins
    table = builtins._get_builtin_table()
    for value in (*vars(torch).values(), *vars(torch.nn.functional).values()):
        original = patching.original_of(value)
        if original is not value and id(original) in table:
            session.undo.set_item(table, id(value), table[id(original)])
    session.imports.when_imported("torch._dynamo.trace_rules", lambda module: _show_originals(module, session))


def _show_originals(trace_rules: Any, session: Session) -> None:
    """Put torch's originals back into dynamo's table of functions.

    dynamo looks up torch's functions by name, once, and would store our wrappers. With the originals in its table a
    wrapper is traced like any Python function, and the table stays valid after the session.
    """
    original = trace_rules.get_torch_obj_rule_map
    fixed: list[Any] = [None]

    def get_torch_obj_rule_map() -> dict[Any, Any]:
        found = original()
        if found is not fixed[0]:
            fixed[0] = found
            for value in [key for key in found if patching.original_of(key) is not key]:
                found.setdefault(patching.original_of(value), found.pop(value))
        return found

    get_torch_obj_rule_map.cache_clear = original.cache_clear  # type: ignore[attr-defined]
    session.undo.set(trace_rules, "get_torch_obj_rule_map", get_torch_obj_rule_map)


def _make_compile(rule: Rule, original: Any, session: Session) -> Any:
    own = OWN_BACKENDS.get(session.target.name)

    def compile(model: Any = None, **kwargs: Any) -> Any:
        what, asked = [], dict(kwargs)
        backend = kwargs.get("backend") or "inductor"
        if session.options.compile == "off":
            record.hit(rule, (), kwargs, "not compiled because of --compile off")
            return model if model is not None else lambda function: function
        if session.options.compile == "default" and (kwargs.get("mode") or kwargs.get("options")):
            what.append("without mode and options because of --compile default")
            kwargs = {**kwargs, "mode": None, "options": None}
        if isinstance(backend, str) and backend in CUDA_BACKENDS:
            what.append(f"{CUDA_BACKENDS[backend]} instead of {backend}")
            kwargs["backend"] = CUDA_BACKENDS[backend]
            kwargs.pop("options", None)
        if own is not None and kwargs.get("backend", "inductor") in ("inductor", None):
            what.append(f"{own} instead of inductor")
            kwargs |= {"backend": own, "mode": None, "options": None}
        if zones.zone() == zones.SCRIPT:
            record.hit(rule, (), asked, "; ".join(what) or "compiled for the target")
        return original(model, **kwargs)

    return compile


def _make_load(rule: Rule, original: Any, session: Session) -> Any:
    def build(name: Any, *args: Any, **kwargs: Any) -> Any:
        sources = args[0] if args else kwargs.get("sources", ())
        sources = [sources] if isinstance(sources, str) else list(sources or ())
        is_inline = rule.name.endswith("load_inline")
        cuda = (kwargs.get("cuda_sources") or (args[1] if len(args) > 1 else None)) if is_inline else None
        has_cuda = cuda or kwargs.get("with_cuda") or rule.name.endswith("CUDAExtension")
        has_cuda = has_cuda or (not is_inline and any(str(each).endswith((".cu", ".cuh")) for each in sources))
        if has_cuda:  # nvcc may be installed, but what it compiles cannot run
            what = f"CUDA sources of extension {name!r} cannot be compiled for {session.target.name}"
            _refuse(rule, f"{what}; use the script's switch for plain PyTorch, or remove the extension")
        return original(name, *args, **kwargs)

    return build


def _make_kernel(rule: Rule, original: Any, session: Session) -> Any:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = getattr(self, "__name__", "kernel")
        _refuse(rule, f"Triton kernel {name!r} cannot run on {session.target.name}; TRITON_INTERPRET=1 emulates it")
        return original(self, *args, **kwargs)

    return run


def _refuse(rule: Rule, text: str) -> None:
    """Raise here: continuing would fail later with a less useful error."""
    site = zones.user_site(zones.caller())
    record.hit(rule, (), {}, text)
    raise MigrateError(f"{site}: {text}")
