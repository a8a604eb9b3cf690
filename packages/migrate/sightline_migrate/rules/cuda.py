"""Every public name of torch.cuda: queries, memory, random numbers, streams, events, graphs, nvtx, profiler.

Rules use the target's own function of the same name if there is one, else the virtual runtime. A name of torch.cuda
without a rule is refused: printed with the script's line, then passed on.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_dynamo_compiling

from sightline_migrate import targets, zones
from sightline_migrate.reporting import record
from sightline_migrate.rules.makers import answers, ignores, refuses
from sightline_migrate.rules.table import Kind, Maker, Rule
from sightline_migrate.targets import HOST_MEMORY
from sightline_migrate.virtual import classes, cudart, streams

if TYPE_CHECKING:
    from sightline_migrate.session import Session

CLASS_QUESTIONS = ("priority_range",)
NATIVE_GRAPHS = {"xpu": "XPUGraph", "npu": "NPUGraph", "hpu": "HPUGraph", "musa": "MUSAGraph"}


def rules() -> list[Rule]:
    known = [*_queries(), *_memory(), *_random(), *_types(), *_streams(), *_graphs(), *_measuring(), *_refused()]
    names = {rule.name for rule in known}
    return known + [
        Rule(name, "refused", refuses(UNKNOWN), UNKNOWN)
        for name in public_names()
        if name not in names and name not in LEFT_ALONE
    ]


UNKNOWN = "no rule covers it; passed to torch unchanged"
# Classes and constants that work without a CUDA device.
LEFT_ALONE = {
    f"torch.cuda.{name}"
    for name in (
        "AcceleratorError CudaError DeferredCudaCallError OutOfMemoryError cudaStatus has_half has_magma "
        "gds.is_available graph_annotations.is_available graph_annotations.clear_kernel_annotations "
        "graph_annotations.get_kernel_annotations graph_annotations.get_kernel_py_stacks nccl.is_available"
    ).split()
}
SUBMODULES = (
    "gds graph_annotations graphs green_contexts jiterator memory nccl nvtx profiler random sparse streams tunable"
).split()


def public_names() -> list[str]:
    """Return callables that a script may reach as torch.cuda.X or torch.cuda.part.X; aliases appear once."""
    top = {
        name
        for name in torch.cuda.__all__
        if callable(getattr(torch.cuda, name, None)) and not inspect.ismodule(getattr(torch.cuda, name))
    }
    found = [f"torch.cuda.{name}" for name in sorted(top)]
    for part in SUBMODULES:
        module = sys.modules.get(f"torch.cuda.{part}")
        for name, value in sorted(vars(module).items()) if module is not None else ():
            is_own = getattr(value, "__module__", "").startswith(f"torch.cuda.{part}") or part == "sparse"
            if callable(value) and is_own and not name.startswith("_") and (name not in top or part == "sparse"):
                found.append(f"torch.cuda.{part}.{name}")
    return found


def _rule(name: str, kind: Kind, make: Maker, what: str, **more: Any) -> Rule:
    return Rule(f"torch.cuda.{name}", kind, make, what, **more)


def native_or(name: str, virtual: Callable[[Session], Callable[..., Any]]) -> Maker:
    """Use the target's function of that name with devices mapped, or the virtual runtime's."""

    def build(session: Session) -> Callable[..., Any]:
        native = session.target.native(name)
        return virtual(session) if native is None else adapt(native, session)

    return answers(build)


def adapt(native: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """Wrap the target's function: map CUDA devices, and drop the device if it takes none."""
    get = session.devices.get
    try:
        parameters = inspect.signature(native).parameters.values()
        takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        most = len(parameters)
        takes_device = takes_any or any(p.name == "device" for p in parameters)
    except ValueError:  # a C function without a signature
        most, takes_any, takes_device = 9, True, True

    def call(*args: Any, **kwargs: Any) -> Any:
        args = tuple(get(a) if isinstance(a, str | torch.device) else a for a in args)
        if "device" in kwargs:
            device = kwargs.pop("device")
            if takes_device:
                kwargs["device"] = get(device) if isinstance(device, str | torch.device) else device
        return native(*(args if takes_any else args[:most]), **kwargs)

    return call


def _queries() -> Iterator[Rule]:
    def of(method: str) -> Maker:
        return answers(lambda session: getattr(session.runtime, method))

    yield _rule("is_available", "exact", answers(_is_available), "True, unless CUDA_VISIBLE_DEVICES hides all devices")
    yield _rule(
        "device_count",
        "adapted",
        answers(_device_count),
        "number of target devices; on cpu the ranks of the launcher, or 1",
    )
    yield _rule("current_device", "exact", of("current_device"), "the target's, or the one given to set_device")
    yield _rule(
        "set_device", "exact", of("set_device"), "stored per thread and set on the target; fails for a missing device"
    )
    yield _rule("synchronize", "exact", of("synchronize"), "synchronizes the target")
    yield _rule("is_initialized", "exact", answers(lambda session: lambda: True), "True")
    for name in ("init", "_lazy_init"):  # the second is private, but scripts call it
        yield _rule(name, "ignored", ignores(), "no effect: nothing to initialize")
    yield _rule("get_device_name", "exact", of("name"), "name of the target")
    yield _rule("get_device_capability", "adapted", of("capability"), "the value of --capability, default 8.0")
    yield _rule("get_device_properties", "adapted", of("properties"), "properties of the target")
    yield _rule("is_bf16_supported", "exact", of("is_bf16_supported"), "the target's answer; True on cpu")
    yield _rule("is_tf32_supported", "adapted", answers(lambda session: lambda: True), "True: it has no effect")
    yield _rule("get_arch_list", "adapted", of("arch_list"), "the value of --capability")
    yield _rule("get_gencode_flags", "adapted", answers(lambda session: lambda: ""), "empty")
    yield _rule("can_device_access_peer", "adapted", answers(lambda session: lambda *a, **k: False), "False")
    yield _rule("device", "exact", _make_device_context, "sets the target's current device, or stores it")
    yield _rule("device_of", "exact", _make_device_of, "sets the target's current device, or stores it")
    yield _rule("ipc_collect", "ignored", ignores(), "no effect: no device memory is shared between processes")
    yield _rule("get_sync_debug_mode", "ignored", _sync_mode(False), "stored, no effect")
    yield _rule("set_sync_debug_mode", "ignored", _sync_mode(True), "stored, no effect")
    yield _rule("check_error", "ignored", ignores(), "no effect: no CUDA call can have failed")
    yield _rule("cudart", "adapted", answers(lambda session: cudart.cudart), "an object whose calls do nothing")
    for name in ("utilization", "temperature", "power_draw", "clock_rate"):
        yield _rule(name, "adapted", native_or(name, lambda session: lambda device=None: 0), "0: not measured")
    for name in ("current_blas_handle", "current_solver_handle"):
        since = (2, 12) if name == "current_solver_handle" else (0, 0)
        yield _rule(name, "adapted", answers(lambda session: lambda *a, **k: 0), "0: there is no handle", since=since)


def _device_count(session: Session) -> Callable[[], int]:
    now = session.runtime.device_count()

    def device_count() -> int:
        return now if is_dynamo_compiling() else session.runtime.device_count()  # dynamo cannot trace os.environ

    return device_count


def _is_available(session: Session) -> Callable[[], bool]:
    count, is_cpu = _device_count(session), session.target.is_cpu
    now = count() > 0

    def is_available() -> bool:
        if is_dynamo_compiling():  # dynamo cannot trace os.environ
            return now
        return not targets.is_hidden() if is_cpu else count() > 0

    return is_available


def _make_device_context(rule: Rule, original: Any, session: Session) -> Any:
    class device:
        """Replaces torch.cuda.device; a class, so that scripts can test with isinstance."""

        def __init__(self, device: Any) -> None:
            is_script = zones.zone() == zones.SCRIPT
            self._real: Any = None
            self.prev_idx = -1
            if is_script:
                self.idx = session.devices.index_of(device, -1)
                record.hit(rule, (device,))
            else:
                self._real = original(device)
                self.idx = self._real.idx

        def __enter__(self) -> None:
            if self._real is not None:
                self._real.__enter__()
            elif self.idx >= 0:
                self.prev_idx = session.runtime.current_device()
                session.runtime.set_device(self.idx)

        def __exit__(self, *error: Any) -> None:
            if self._real is not None:
                self._real.__exit__(*error)
            elif self.idx >= 0:
                session.runtime.set_device(self.prev_idx)

    device.__module__, device.__qualname__ = original.__module__, original.__qualname__
    return device


def _make_device_of(rule: Rule, original: Any, session: Session) -> Any:
    class device_of(torch.cuda.device):
        """Switches to a tensor's device; a host tensor changes nothing."""

        def __init__(self, obj: Any) -> None:
            super().__init__(obj.get_device() if obj.is_cuda else -1)

    device_of.__module__, device_of.__qualname__ = original.__module__, original.__qualname__
    return device_of


def _sync_mode(is_set: bool) -> Maker:
    def build(session: Session) -> Callable[..., Any]:
        def set_sync_debug_mode(debug_mode: Any) -> None:
            names = {"default": 0, "warn": 1, "error": 2}
            session.runtime.sync_debug_mode = names[debug_mode] if isinstance(debug_mode, str) else int(debug_mode)

        return set_sync_debug_mode if is_set else lambda: session.runtime.sync_debug_mode

    return answers(build)


def _memory() -> Iterator[Rule]:
    def of(name: str, method: str) -> Maker:
        return native_or(name, lambda session: getattr(session.runtime, method))

    process = "memory of the target; on cpu of the process"
    for name in ("memory_allocated", "memory_reserved", "memory_cached"):
        yield _rule(name, "adapted", of(name, "memory_allocated"), process)
    for name in ("max_memory_allocated", "max_memory_reserved", "max_memory_cached"):
        yield _rule(name, "adapted", of(name, "max_memory_allocated"), process)
    yield _rule("device_memory_used", "adapted", of("device_memory_used", "memory_allocated"), process)
    yield _rule("memory_usage", "adapted", of("memory_usage", "memory_usage"), "percent of memory in use")
    yield _rule("mem_get_info", "adapted", of("mem_get_info", "mem_get_info"), process)
    yield _rule("memory_stats", "adapted", of("memory_stats", "memory_stats"), process)
    yield _rule("memory_summary", "adapted", of("memory_summary", "memory_summary"), process)
    for name in ("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"):
        yield _rule(name, "adapted", of(name, "reset_peak"), "resets the peak if the system allows it")
    yield _rule("empty_cache", "exact", native_or("empty_cache", lambda session: lambda: None), "the target's")
    nothing = "no effect: the target has no such allocator"
    for name in (
        "reset_accumulated_memory_stats", "reset_accumulated_host_memory_stats", "reset_peak_host_memory_stats",
        "set_per_process_memory_fraction", "caching_allocator_enable",
    ):  # fmt: skip
        yield _rule(name, "ignored", native_or(name, lambda session: lambda *a, **k: None), nothing)
    for name, made in (
        ("memory_snapshot", list), ("host_memory_stats", dict), ("memory_stats_as_nested_dict", dict),
        ("host_memory_stats_as_nested_dict", dict),
    ):  # fmt: skip
        yield _rule(name, "adapted", native_or(name, lambda session, made=made: lambda *a, **k: made()), "empty")  # type: ignore[misc]
    yield _rule("get_per_process_memory_fraction", "adapted", answers(lambda session: lambda device=None: 1.0), "1.0")
    yield _rule("get_allocator_backend", "adapted", answers(lambda session: lambda: "native"), "native")
    yield _rule("list_gpu_processes", "adapted", answers(lambda session: cudart.list_processes), "this process")
    yield _rule("use_mem_pool", "ignored", answers(lambda session: cudart.no_op_context), nothing)
    disabled = answers(lambda session: cudart.no_op_context)
    yield _rule("caching_allocator_disabled", "ignored", disabled, nothing, since=(2, 12))
    yield _rule("_sleep", "ignored", ignores(), "no effect: it only keeps a CUDA queue busy, in tests and benchmarks")
    for name in ("_record_memory_history", "_dump_snapshot"):  # private, but torch's documentation recommends them
        yield _rule(f"memory.{name}", "ignored", ignores(), "no effect: there is no CUDA allocator to record")
    yield _rule("MemPool", "ignored", lambda rule, original, session: cudart.MemPool, nothing)


def _random() -> Iterator[Rule]:
    one = "the target's generator; on cpu the host's"
    for name in ("manual_seed", "manual_seed_all"):
        yield _rule(name, "adapted", native_or(name, lambda session: session.runtime.manual_seed), one)
    for name in ("seed", "seed_all"):
        yield _rule(name, "adapted", native_or(name, lambda session: session.runtime.seed), one)
    yield _rule("initial_seed", "adapted", native_or("initial_seed", lambda session: torch.initial_seed), one)
    for name in ("get_rng_state", "get_rng_state_all", "set_rng_state", "set_rng_state_all"):
        make = native_or(name, lambda session, name=name: getattr(session.runtime, name))  # type: ignore[misc]
        yield _rule(name, "adapted", make, one)
    yield _rule("default_generators", "adapted", _make_default_generators, one)
    yield Rule("torch.random.fork_rng", "adapted", _make_fork_rng, "generators of the host and the target")


def _make_default_generators(rule: Rule, original: Any, session: Session) -> Any:
    native = session.target.native("default_generators")
    return session.runtime.default_generators() if native is None else native


def _make_fork_rng(rule: Rule, original: Any, session: Session) -> Any:
    from sightline_migrate import patching

    def fork_rng(devices: Any = None, enabled: bool = True, *args: Any, **kwargs: Any) -> Any:
        kind = kwargs.get("device_type", "cuda")
        if kind != "cuda":
            return original(devices, enabled, *args, **kwargs)
        record.hit(rule, (devices,), kwargs)
        if session.target.is_cpu:
            return original([], enabled, *args, **kwargs)
        if devices is not None:
            devices = [session.devices.index_of(each, session.runtime.current_device()) for each in devices]
        return original(devices, enabled, *args, **(kwargs | {"device_type": session.target.name}))

    return patching.dress(fork_rng, original, rule.name)


TENSOR_TYPES = "BFloat16 Bool Byte Char Double Float Half Int Long Short".split()


def _types() -> Iterator[Rule]:
    made = "created on the host, then moved"
    for name in TENSOR_TYPES:
        yield _rule(f"{name}Tensor", "adapted", classes.typed_tensor, made)
    for name in ("BFloat16", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short"):
        yield _rule(f"sparse.{name}Tensor", "adapted", classes.typed_tensor, made)
    for name in (*TENSOR_TYPES, "ComplexDouble", "ComplexFloat"):
        yield _rule(f"{name}Storage", "exact", _make_storage, "created on the target")


def _make_storage(rule: Rule, original: Any, session: Session) -> Any:
    """Let torch.cuda.FloatStorage(3) create a typed storage on the target."""

    def build(*args: Any, **kwargs: Any) -> Any:
        record.hit(rule, args, kwargs)
        return torch.TypedStorage(*args, dtype=original.dtype, device=session.devices.name)

    return classes.replace_class(rule, original, build)


def _streams() -> Iterator[Rule]:
    virtual = streams
    own = "the target's; on cpu and mps a stream without effect"
    for name in ("Stream", "Event", "StreamContext"):
        yield _rule(name, "adapted", _native_class(name, getattr(virtual, name)), own)
    for name in ("current_stream", "set_stream", "stream"):
        make = native_or(name, lambda session, name=name: getattr(virtual, name))  # type: ignore[misc]
        yield _rule(name, "adapted", make, own)
    yield _rule("default_stream", "adapted", native_or("default_stream", _default_stream), own)
    for name in ("Stream", "Event"):
        yield Rule(f"torch.{name}", "adapted", classes.generic_stream(getattr(virtual, name)), own)


def _default_stream(session: Session) -> Callable[..., Any]:
    current = session.target.native("current_stream")
    if current is None:
        return streams.default_stream
    ask, make = adapt(current, session), torch.Stream  # still the original: its rule comes later

    def default_stream(device: Any = None) -> Any:
        """Return stream 0 of the device, the default in every backend."""
        now = ask(device)
        return make(stream_id=0, device_index=now.device_index, device_type=now.device_type)

    return default_stream


def _native_class(name: str, virtual: Any) -> Maker:
    def make(rule: Rule, original: Any, session: Session) -> Any:
        native = session.target.native(name) if session.target.name not in HOST_MEMORY else None
        found = virtual if native is None else native

        def build(*args: Any, **kwargs: Any) -> Any:
            if zones.zone() != zones.SCRIPT:
                return original(*args, **kwargs)
            record.hit(rule, args, kwargs)
            if native is None:
                return found(*args, **kwargs)
            get = session.devices.get
            args = tuple(get(a) if isinstance(a, str | torch.device) else a for a in args)
            if "device" in kwargs:
                kwargs["device"] = get(kwargs["device"])
            return found(*args, **kwargs)

        made = classes.replace_class(rule, original, build, (found,))
        # Class methods; the original would answer for CUDA.
        for asked in CLASS_QUESTIONS:
            if hasattr(found, asked):
                setattr(made, asked, staticmethod(getattr(found, asked)))
        return made

    return make


def _graphs() -> Iterator[Rule]:
    def native_graph(session: Session, name: str) -> Any:
        return session.target.native(NATIVE_GRAPHS.get(session.target.name, name) if name == "CUDAGraph" else name)

    def of(name: str) -> Maker:
        def make(rule: Rule, original: Any, session: Session) -> Any:
            virtual = getattr(streams, name)
            looks = {"rule": rule, "__doc__": virtual.__doc__, "__module__": "torch.cuda"}
            return native_graph(session, name) or type(name, (virtual,), looks)

        return make

    yield _rule("CUDAGraph", "refused", of("CUDAGraph"), "capture and replay raise if the target has no graphs")
    yield _rule("graph", "refused", of("graph"), "raises if the target has no graphs")
    graphed = native_or("make_graphed_callables", lambda session: streams.make_graphed_callables)
    yield _rule("make_graphed_callables", "adapted", graphed, "the unchanged callables, which compute the same")
    no = native_or("is_current_stream_capturing", lambda session: lambda: False)
    yield _rule("is_current_stream_capturing", "exact", no, "the target's answer, else False")
    handle = native_or("graph_pool_handle", lambda session: lambda: (0, 1))
    yield _rule("graph_pool_handle", "adapted", handle, "an unused handle")


def _measuring() -> Iterator[Rule]:
    nothing = "no effect: there is no CUDA profiler"
    for name in ("mark", "range_push", "range_pop", "range_start", "range_end"):
        yield _rule(f"nvtx.{name}", "ignored", ignores(0), nothing)
    yield _rule("nvtx.range", "ignored", answers(lambda session: cudart.no_op_context), nothing)
    for name in ("start", "stop"):
        yield _rule(f"profiler.{name}", "ignored", ignores(), nothing)
    yield _rule("profiler.profile", "ignored", answers(lambda session: cudart.no_op_context), nothing)
    for name in (
        "enable record_untuned_enable set_filename set_max_tuning_duration set_max_tuning_iterations "
        "set_numerical_check_tolerances set_rotating_buffer_size tuning_enable wildcard_fallback_enable "
        "set_cublaslt_requested_algo_count write_file tune_gemm_in_file mgpu_tune_gemm_in_file read_file "
        "write_file_on_exit dynamic_dims_mask"
    ).split():
        if hasattr(torch.cuda.tunable, name):
            yield _rule(f"tunable.{name}", "ignored", ignores(), "no effect: there is no CUDA kernel to tune")
    for name, value in (
        ("is_enabled", False), ("record_untuned_is_enabled", False), ("tuning_is_enabled", False),
        ("wildcard_fallback_is_enabled", False), ("get_filename", ""), ("get_max_tuning_duration", 0),
        ("get_max_tuning_iterations", 0), ("get_rotating_buffer_size", 0), ("get_results", ()), ("get_validators", ()),
        ("get_cublaslt_requested_algo_count", 0),
    ):  # fmt: skip
        if hasattr(torch.cuda.tunable, name):
            yield _rule(f"tunable.{name}", "ignored", ignores(value), "as if tuning were off")
    yield _rule("nccl.version", "adapted", answers(lambda session: lambda: (2, 21, 5)), "a version with all features")


def _refused() -> Iterator[Rule]:
    """Yield rules for direct access to CUDA: pointers, kernels, drivers."""
    advice = "it returns CUDA memory or CUDA objects; skip it on this device"
    names = (
        "CUDAPluggableAllocator ExternalStream GreenContext caching_allocator_alloc caching_allocator_delete "
        "change_current_allocator get_stream_from_external nccl.all_gather nccl.all_reduce nccl.broadcast "
        "nccl.init_rank nccl.reduce nccl.reduce_scatter nccl.unique_id gds.gds_register_buffer "
        "gds.gds_deregister_buffer export_dot export_graph_data graph_annotations.mark_kernels "
        "graph_annotations.dump_kernel_py_stacks green_contexts.get_num_locality_domains green_contexts.SMPartition "
        "green_contexts.is_localization_supported gds.GdsFile graphs.register_graph_capture_end_hook "
        "graphs.register_graph_capture_start_hook graphs.register_graph_destroy_hook "
        "graphs.register_graph_instantiate_hook graphs.register_graph_replay_end_hook "
        "graphs.register_graph_replay_start_hook"
    ).split()
    for name in names:
        if _is_there(name):
            yield _rule(name, "refused", refuses(advice), advice)


def _is_there(name: str) -> bool:
    here: Any = torch.cuda
    for part in name.split("."):
        here = getattr(here, part, None)
    return here is not None
