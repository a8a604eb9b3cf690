"""Functions that create tensors: zeros, empty, tensor, *_like, new_*, windows, fft frequencies."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_dynamo_compiling

from sightline.migrate.reporting import record
from sightline.migrate.rules.conversion import Conversions, convert_of, converts_here
from sightline.migrate.rules.makers import maps
from sightline.migrate.rules.table import Rule, dressed
from sightline.migrate.targets import HOST_MEMORY
from sightline.migrate.virtual import places

if TYPE_CHECKING:
    from sightline.migrate.session import Session

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
    convert, conversions = convert_of(session), Conversions(rule)
    unpins = session.target.name in HOST_MEMORY
    finish = _finish(rule.name) if session.target.is_cpu else None
    inherits = session.target.is_cpu and (rule.name.endswith("_like") or rule.name.startswith("torch.Tensor."))

    def factory(*args: Any, **kwargs: Any) -> Any:
        is_moved = False
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
                        is_moved = finish is not None
            if unpins and kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
                if not is_dynamo_compiling():
                    record.hit(rule, args, {"pin_memory": True}, "not pinned: the target uses host memory")
        try:
            made = original(*args, **kwargs)
            if is_moved and finish is not None:
                return finish(args, made)
            if inherits and args and not is_dynamo_compiling():
                places.put(made, places.place_of(args[0]))
            return made
        except RuntimeError as error:
            if not unpins or HOST_IS_FULL not in str(error):
                raise
            raise torch.OutOfMemoryError(f"CUDA out of memory: {error}") from error

    return factory


def _finish(name: str) -> Callable[[tuple[Any, ...], Any], Any]:
    """Return the function that marks a new tensor as on the device; one that shares host memory becomes a copy."""

    def apart(args: tuple[Any, ...], made: Any) -> Any:
        given = args[0] if args and isinstance(args[0], torch.Tensor) else made
        return places.to_device(given, made)

    return apart if name in SHARING else lambda args, made: places.put(made, places.DEVICE)
