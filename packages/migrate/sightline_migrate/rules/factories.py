"""Functions that create tensors: zeros, empty, tensor, *_like, new_*, windows, fft frequencies."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._C import _len_torch_function_stack
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.compiler import is_dynamo_compiling
from torch.overrides import _get_current_function_mode_stack, handle_torch_function
from torch.utils._device import DeviceContext

from sightline_migrate import zones
from sightline_migrate.reporting import record
from sightline_migrate.rules.conversion import Conversions, convert_of, converts_here
from sightline_migrate.rules.makers import is_overridden, maps
from sightline_migrate.rules.table import Rule, dressed, in_doubt
from sightline_migrate.targets import HOST_MEMORY
from sightline_migrate.virtual import places

if TYPE_CHECKING:
    from sightline_migrate.session import Session

FACTORIES = (
    "arange as_tensor asarray bartlett_window blackman_window empty empty_permuted empty_quantized empty_strided eye "
    "from_file full hamming_window hann_window kaiser_window linspace logspace normal ones rand randint randn randperm "
    "range scalar_tensor sparse_bsc_tensor sparse_bsr_tensor sparse_compressed_tensor sparse_coo_tensor "
    "sparse_csc_tensor sparse_csr_tensor tensor tril_indices triu_indices zeros "
    "empty_like full_like ones_like rand_like randint_like randn_like zeros_like "
    "fft.fftfreq fft.rfftfreq nested.nested_tensor nested.as_nested_tensor from_dlpack"
).split()
SHARING = ("torch.as_tensor", "torch.asarray", "torch.from_dlpack")
"""these return the memory that they are given if it is on the device"""
OF_ANY_TENSORS = ("torch.normal", "torch.from_dlpack", "torch.nested.nested_tensor", "torch.nested.as_nested_tensor")
"""without a device the result is where their tensors are"""
OF_BYTES = "torch.from_file"
"""the dtype says how to read bytes, so it is not converted"""
HOST_IS_FULL = "can't allocate memory"
OF_TENSORS = "new_empty new_empty_strided new_full new_ones new_tensor new_zeros new".split()


def rules() -> list[Rule]:
    names = [f"torch.{name}" for name in FACTORIES] + [f"torch.Tensor.{name}" for name in OF_TENSORS]
    operators = [f"torch._ops.{kind}.__call__" for kind in ("OpOverload", "OpOverloadPacket")]  # torch.ops.aten.zeros()
    return [
        *(Rule(name, "exact", dressed(make_factory), "created on the target") for name in names),
        *(Rule(name, "exact", maps(), "runs on the target") for name in operators),
    ]


def make_factory(rule: Rule, original: Any, session: Session) -> Any:
    """Wrap a factory: look up the device in a dict; do more only if an option or the target needs it."""
    table, slow = session.devices.table, session.devices.get
    convert = convert_of(session) if rule.name != OF_BYTES else None
    conversions = Conversions(rule)
    unpins = session.target.name in HOST_MEMORY
    place = _places(rule, session) if session.target.is_cpu else None
    is_like, is_function = rule.name.endswith("_like"), not rule.name.startswith("torch.Tensor.")

    def factory(*args: Any, **kwargs: Any) -> Any:
        device = None
        if kwargs:
            device, dtype = kwargs.get("device"), kwargs.get("dtype")
            wanted = convert(dtype) if convert is not None and converts_here() else dtype
            is_converted = wanted is not dtype
            if is_converted:
                if not is_dynamo_compiling():
                    conversions.hit(dtype, wanted, args, kwargs)
                kwargs["dtype"] = wanted
            if device is not None:
                if is_dynamo_compiling():
                    kwargs["device"] = slow(device)
                else:
                    there = table.get(device, device)
                    if there is not device:
                        if not is_converted:
                            record.hit(rule, args, kwargs)
                        kwargs["device"] = there
            if unpins and kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
                if not is_dynamo_compiling():
                    record.hit(rule, args, {"pin_memory": True}, "not pinned: the target uses host memory")
        try:
            given = args if args or not is_like else (kwargs.get("input"),)
            if is_function and not is_dynamo_compiling() and is_overridden(given if is_like else ()):
                made = handle_torch_function(factory, given, *args, **kwargs)
            else:
                made = original(*args, **kwargs)
            return made if place is None or is_dynamo_compiling() else place(args, kwargs, device, made)
        except RuntimeError as error:
            if not unpins or HOST_IS_FULL not in str(error):
                raise
            raise torch.OutOfMemoryError(f"CUDA out of memory: {error}") from error

    # Dynamo traces it as a part of its caller, but must not compile it alone: for a float that changes, compiled code
    # calls as_tensor first, which would then be compiled code for a float that changes, without end.
    set_code_exec_strategy(factory.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return factory


def _places(rule: Rule, session: Session) -> Callable[..., Any]:
    """Return the function that marks a new tensor's place; one that shares memory of the other side becomes a copy."""
    table, name = session.devices.table, rule.name
    shares, is_of_any = name in SHARING, name in OF_ANY_TENSORS
    is_of_tensors = shares or name.endswith("_like") or name.startswith("torch.Tensor.") or name == "torch.tensor"
    keyword = "input" if name.endswith("_like") else "obj" if name == "torch.asarray" else "data"

    def place(args: tuple[Any, ...], kwargs: dict[str, Any], device: Any, made: Any) -> Any:
        first = (args[0] if args else kwargs.get(keyword)) if is_of_tensors else None
        given = first if isinstance(first, torch.Tensor) else None
        if device is None:
            if given is not None:
                return places.put(made, places.find_place(given))
            return made if is_of_any or "out" in kwargs else places.put(made, _default_place(session))
        there, is_named = places.asked(device, device in table)
        if shares and (given is not None or places.place_of(made) is not None):  # else it is new
            apart, doubt = places.move(made if given is None else given, made, there, is_named)
            if doubt and zones.zone(2) == zones.SCRIPT:
                record.hit(in_doubt(rule, doubt), args, kwargs)
            return apart
        return places.put(made, there if is_named or places.is_of_a_tensor(device) else None)

    return place


def _default_place(session: Session) -> str | None:
    """Return the place of new tensors: what set_default_tensor_type, set_default_device or `with device:` says."""
    if _len_torch_function_stack():
        for mode in reversed(_get_current_function_mode_stack()):
            if isinstance(mode, DeviceContext):
                return getattr(mode, places.MARK, None)
    return session.default_place
