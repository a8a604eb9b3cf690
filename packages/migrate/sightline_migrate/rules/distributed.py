"""Process groups, device meshes, data parallelism, spawned processes and batch norm over several ranks.

The target's backend replaces nccl; a script that asks for the backend gets the name it passed.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import inspect
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.compiler import is_dynamo_compiling
from torch.nn.modules.batchnorm import _BatchNorm

from sightline_migrate import norm, zones
from sightline_migrate.options import PREFIX
from sightline_migrate.reporting import record
from sightline_migrate.rules.makers import maps, refuse
from sightline_migrate.rules.table import Rule, dressed
from sightline_migrate.targets import HOST_MEMORY

if TYPE_CHECKING:
    from sightline_migrate.session import Session
    from sightline_migrate.targets import Target

WITHOUT_INDEX = ("cpu", "mps", "hpu")
"""targets with one device per process: an index has no meaning, and DistributedDataParallel rejects it"""

NO_COLLECTIVES = (
    "gloo sends host tensors only: collectives and DistributedDataParallel of others raise; use --target cpu"
)

_asked: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""backend that the script asked for, per process group"""


def rules() -> list[Rule]:
    if not dist.is_available():
        return []
    from sightline_migrate.rules import collectives

    return [*_groups(), *collectives.rules(), *_meshes(), *_parallel(), *_spawning(), *_batch_norm()]


def setup(session: Session) -> None:
    if session.target.name in HOST_MEMORY:
        session.imports.when_imported("torch.distributed.fsdp", lambda _: _accept_host_states(session))


# process groups


def _groups() -> Iterator[Rule]:
    named = "the target's backend instead of nccl"
    for owner in ("torch.distributed", "torch.distributed.distributed_c10d"):
        yield Rule(f"{owner}.init_process_group", "exact", dressed(_make_init), named)
        yield Rule(f"{owner}.new_group", "exact", dressed(_make_new_group), named)
        yield Rule(f"{owner}.destroy_process_group", "exact", dressed(_make_destroy), "waits for gloo's threads, too")
        yield Rule(f"{owner}.get_backend", "exact", dressed(_make_get_backend), "the name the script passed")
        yield Rule(f"{owner}.get_backend_config", "exact", dressed(_make_get_backend), "the names the script passed")
        yield Rule(f"{owner}.is_nccl_available", "exact", dressed(_make_is_nccl_available), "True")
        yield Rule(f"{owner}.is_backend_available", "exact", dressed(_make_is_backend_available), "True for nccl")
        yield Rule(f"{owner}.barrier", "ignored", dressed(_make_barrier), "waits without device_ids")
        for name in ("broadcast_object_list", "send_object_list", "recv_object_list"):
            yield Rule(f"{owner}.{name}", "exact", maps(position=3), "sent through the target")


def backend_of(wanted: str, target: Target) -> str:
    """Return the target's name for a backend, or for a list such as cpu:gloo,cuda:nccl."""
    text = wanted.lower()
    if text == "nccl":
        return target.collective
    if ":" not in text:
        return wanted
    parts = [part.strip().partition(":") for part in text.split(",")]
    there = {device: name for device, _, name in parts if device != "cuda"}
    for device, _, name in parts:
        if device == "cuda":
            # If the target is the host, keep the script's backend for the host.
            there.setdefault(target.name, target.collective if name == "nccl" else name)
    return ",".join(f"{device}:{name}" for device, name in there.items())


def _with_backend(rule: Rule, original: Any, session: Session, keep: Callable[[str, Any], None]) -> Any:
    """Wrap a function to map `backend` and `device_id`; keep(wanted, result) receives the script's backend."""
    signature = inspect.signature(original)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        wanted = given.get("backend")
        changes = []
        if wanted is not None and (there := backend_of(str(wanted), session.target)) != str(wanted).lower():
            given["backend"] = there
            changes.append(f"backend {there}")
            if given.pop("pg_options", None) is not None:
                changes.append("without the options for another backend")
            _load_backend(there)
            if not session.target.has_collectives:
                refuse(replace(rule, kind="refused"), session, NO_COLLECTIVES, args, kwargs)
        device = given.get("device_id")
        if device is not None and (place := _place(device, session)) is not device:
            given["device_id"] = place
            changes.append(f"device_id {place}")
        if changes:
            record.hit(rule, args, kwargs, ", ".join(changes))
        result = original(*bound.args, **bound.kwargs)
        if wanted is not None:
            keep(str(wanted).lower(), result)
        return result

    return wrapper


def _place(device: Any, session: Session) -> Any:
    """Return a `device_id` for the target, or None if the target has no indices to bind a group to."""
    there = session.devices.get(device)
    if there is device:
        return device
    return None if session.target.name in WITHOUT_INDEX else torch.device(there)


def _load_backend(name: str) -> None:
    """Import Gaudi's collectives, which register on import; scripts written for CUDA do not import them."""
    if name == "hccl" and name not in dist.Backend.backend_list:
        # Missing on npu, whose own backend is also called hccl and registers itself.
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module("habana_frameworks.torch.distributed.hccl")


def _make_init(rule: Rule, original: Any, session: Session) -> Any:
    def keep(wanted: str, _: Any) -> None:
        if dist.group.WORLD is not None:
            _asked[dist.group.WORLD] = wanted
            atexit.unregister(_wait_for_gloo)  # once is enough
            atexit.register(_wait_for_gloo)

    session.undo.on_undo(lambda: atexit.unregister(_wait_for_gloo))
    return _with_backend(rule, original, session, keep)


def _make_destroy(rule: Rule, original: Any, session: Session) -> Any:
    if session.target.collective != "gloo":
        return original

    def destroy_process_group(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        _wait_for_gloo()

    return destroy_process_group


def _wait_for_gloo() -> None:
    """Wait for gloo's threads when a group is destroyed and at exit.

    Unlike nccl's, they may still hold tensors of the last collective. Freeing those needs the interpreter: once it
    shuts down, the process aborts. If DDP is the last to hold a destroyed group, dropping the model joins these threads
    without releasing the interpreter, and the process hangs (torch 2.11).
    """
    time.sleep(0.1)


def _make_new_group(rule: Rule, original: Any, session: Session) -> Any:
    def keep(wanted: str, group: Any) -> None:
        if isinstance(group, dist.ProcessGroup):
            _asked[group] = wanted

    return _with_backend(rule, original, session, keep)


def _make_get_backend(rule: Rule, original: Any, session: Session) -> Any:
    is_config = rule.name.endswith("_config")

    def get_backend(group: Any = None) -> Any:
        real = original(group)  # called first, for its errors
        if is_dynamo_compiling():
            return real
        if zones.zone() != zones.SCRIPT:
            record.truth(rule)
            return real
        world = dist.group.WORLD
        # A group created without a backend, also by a mesh, has the world's.
        asked = _asked.get(group if group is not None else world) or _asked.get(world)
        if asked is None:
            return real
        record.hit(rule, (), {})
        backend = dist.Backend(asked)
        return str(dist.distributed_c10d.BackendConfig(backend)) if is_config else backend

    return get_backend


def _make_is_nccl_available(rule: Rule, original: Any, session: Session) -> Any:
    def is_nccl_available() -> bool:
        if is_dynamo_compiling() or zones.zone() != zones.SCRIPT:
            return original()
        record.hit(rule)
        return True

    return is_nccl_available


def _make_is_backend_available(rule: Rule, original: Any, session: Session) -> Any:
    def is_backend_available(backend: str) -> bool:
        if is_dynamo_compiling() or backend.lower() != "nccl" or zones.zone() != zones.SCRIPT:
            return original(backend)
        record.hit(rule, (backend,))
        return True

    return is_backend_available


def _make_barrier(rule: Rule, original: Any, session: Session) -> Any:
    if session.target.name not in WITHOUT_INDEX:
        return original
    signature = inspect.signature(original)

    def barrier(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        if bound.arguments.pop("device_ids", None) is not None:
            record.hit(rule, args, kwargs)
        return original(*bound.args, **bound.kwargs)

    return barrier


# meshes, sharding, pipelines


def _meshes() -> Iterator[Rule]:
    made = "on the target"
    for owner in ("torch.distributed", "torch.distributed.device_mesh"):
        yield Rule(f"{owner}.init_device_mesh", "exact", maps("device_type", position=0), made)
    yield Rule("torch.distributed.device_mesh.DeviceMesh.__init__", "exact", maps("device_type", position=1), made)
    yield Rule(
        "torch.distributed.fsdp.FullyShardedDataParallel.__init__",
        "exact",
        dressed(_make_fsdp),
        "sharded on the target",
        module="torch.distributed.fsdp",
    )
    yield Rule(
        "torch.distributed.pipelining.PipelineStage.__init__",
        "exact",
        dressed(_make_stage),
        made,
        module="torch.distributed.pipelining",
    )


def _make_fsdp(rule: Rule, original: Any, session: Session) -> Any:
    """Set device_id on the CPU: without one, FSDP looks for an accelerator and fails."""
    return _with_device(rule, original, session, "device_id", torch.device("cpu") if session.target.is_cpu else None)


def _make_stage(rule: Rule, original: Any, session: Session) -> Any:
    return _with_device(rule, original, session, "device", None)


def _with_device(rule: Rule, original: Any, session: Session, name: str, default: torch.device | None) -> Any:
    """Wrap a constructor to map its device argument `name`: a torch.device or an index."""
    signature = inspect.signature(original)

    def __init__(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments.get(name)
        place = default if given is None else given
        there = session.devices.get(place)
        if there is not given:
            bound.arguments[name] = torch.device(there)
            record.hit(rule, (), {name: given})
        original(*bound.args, **bound.kwargs)

    return __init__


def _accept_host_states(session: Session) -> None:
    """Disable the check in FullyShardedDataParallel(sync_module_states=True): sending from host memory works."""
    states, name = sys.modules.get("torch.distributed.fsdp._init_utils"), "_check_module_states_for_sync_module_states"
    if states is not None and hasattr(states, name):
        session.undo.set(states, name, lambda module_states: None)


# data parallelism


def _parallel() -> Iterator[Rule]:
    yield Rule(
        "torch.nn.parallel.DistributedDataParallel.__init__",
        "exact",
        dressed(_make_ddp),
        "device_ids and output_device mapped to the target; None if a process has one device",
    )
    one = "a plain call: the target is one device"
    yield Rule("torch.nn.DataParallel.__init__", "adapted", dressed(_make_data_parallel), one)
    yield Rule("torch.nn.parallel.data_parallel", "adapted", dressed(_make_data_parallel_call), one)


def _make_ddp(rule: Rule, original: Any, session: Session) -> Any:
    drops, get = session.target.name in WITHOUT_INDEX, session.devices.get

    def __init__(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        if device_ids is not None or output_device is not None:
            record.hit(rule, (), {"device_ids": device_ids, "output_device": output_device})
            if drops:
                device_ids = output_device = None
            else:
                device_ids = device_ids and [d if isinstance(d, int) else get(d) for d in device_ids]
                output_device = output_device if isinstance(output_device, int) else get(output_device)
        original(self, module, device_ids, output_device, *args, **kwargs)

    return __init__


def _make_data_parallel(rule: Rule, original: Any, session: Session) -> Any:
    """Use one device on every target: torch itself scatters to CUDA devices only."""

    def __init__(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, dim: int = 0) -> None:
        record.hit(rule, (module,), {"device_ids": device_ids})
        torch.nn.Module.__init__(self)
        self.module = module
        self.device_ids = []  # read by forward()
        self.output_device = None
        self.dim = dim

    return __init__


def _make_data_parallel_call(rule: Rule, original: Any, session: Session) -> Any:
    """Call the module directly on every target: torch's own function scatters to CUDA devices only."""

    def data_parallel(
        module: Any,
        inputs: Any,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
        module_kwargs: Any = None,
    ) -> Any:
        record.hit(rule, (module,), {"device_ids": device_ids})
        inputs = inputs if isinstance(inputs, tuple) else () if inputs is None else (inputs,)
        return module(*inputs, **(module_kwargs or {}))

    return data_parallel


# spawned processes


def _spawning() -> Iterator[Rule]:
    for name in ("spawn", "start_processes"):
        what = "each child process sees one device per child"
        yield Rule(f"torch.multiprocessing.{name}", "adapted", dressed(_make_spawn), what, targets=("cpu",))


def _make_spawn(rule: Rule, original: Any, session: Session) -> Any:
    if session.options.device_count:
        return original
    variable = PREFIX + "DEVICE_COUNT"

    @functools.wraps(original)
    def spawn(fn: Any, args: Any = (), nprocs: int = 1, *more: Any, **kwargs: Any) -> Any:
        if nprocs <= 1 or zones.zone() != zones.SCRIPT:
            return original(fn, args, nprocs, *more, **kwargs)
        record.hit(rule, (fn,), {"nprocs": nprocs})
        before = os.environ.get(variable)
        os.environ[variable] = str(nprocs)
        try:
            return original(fn, args, nprocs, *more, **kwargs)
        finally:
            os.environ.pop(variable)
            if before is not None:
                os.environ[variable] = before

    return spawn


# batch norm


def _batch_norm() -> Iterator[Rule]:
    """Replace methods only: the class stays torch's, so isinstance, state dicts and conversion work."""
    yield Rule(
        "torch.nn.SyncBatchNorm.forward",
        "exact",
        dressed(_make_sync_forward),
        "statistics over all ranks with the target's collectives",
        targets=HOST_MEMORY,
    )
    handle = "_passing_sync_batchnorm_handle"
    if hasattr(torch.nn.parallel.DistributedDataParallel, handle):
        yield Rule(
            f"torch.nn.parallel.DistributedDataParallel.{handle}",
            "exact",
            dressed(_make_accepts_sync),
            "accepts batch norm over all ranks on the target",
            targets=HOST_MEMORY,
        )


def _make_sync_forward(rule: Rule, original: Any, session: Session) -> Any:
    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        group = _group_of(self) if self.training else None
        if group is None:
            return _BatchNorm.forward(self, input)
        if not is_dynamo_compiling():
            record.hit(rule, (input,))
        self._check_input_dim(input)
        return norm.normalise_over(group, self, input)

    return forward


def _group_of(layer: Any) -> Any:
    """Return the process group that shares a layer's statistics, or None if there is only one rank."""
    if not dist.is_initialized():
        return None
    group = layer.process_group or dist.group.WORLD
    return group if dist.get_world_size(group) > 1 else None


def _make_accepts_sync(rule: Rule, original: Any, session: Session) -> Any:
    def accept(self: Any, module: Any) -> None:
        """Skip the original check, which only rejects modules on the CPU."""

    return accept
