"""Mixed precision: autocast in all its spellings, its state, GradScaler, custom_fwd and custom_bwd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_dynamo_compiling

from sightline.migrate import zones
from sightline.migrate.reporting import record
from sightline.migrate.rules.table import Rule, dressed

if TYPE_CHECKING:
    from sightline.migrate.session import Session

CUDA_DEFAULT = torch.float16  # the default dtype of autocast("cuda"); the CPU's own default is bfloat16
ARITHMETIC = {torch.bfloat16: ("avx512_bf16", "amx_bf16"), torch.float16: ("avx512_fp16", "amx_fp16")}


def rules() -> list[Rule]:
    mode = "torch.amp.autocast_mode"
    of_target = "state of the target"
    found = [
        Rule(f"{mode}.autocast.__init__", "adapted", dressed(_make_autocast), "autocast on the target"),
        Rule("torch.amp.GradScaler.__init__", "adapted", dressed(_make_scaler), "scales on the target"),
        Rule("torch.is_autocast_enabled", "exact", dressed(_make_state), of_target),
        Rule("torch.set_autocast_enabled", "exact", dressed(_make_state), of_target),
        Rule("torch.get_autocast_dtype", "exact", dressed(_make_state), of_target),
        Rule("torch.set_autocast_dtype", "exact", dressed(_make_state), of_target),
        Rule("torch.get_autocast_gpu_dtype", "exact", dressed(_make_get_gpu_dtype), of_target),
        Rule("torch.set_autocast_gpu_dtype", "exact", dressed(_make_set_gpu_dtype), of_target),
    ]
    for owner in ("torch.amp", mode):
        found += [
            Rule(f"{owner}.{name}", "exact", dressed(_make_device_type), of_target)
            for name in ("custom_fwd", "custom_bwd", "is_autocast_available")
        ]
    return found


def has_arithmetic(dtype: torch.dtype) -> bool:
    """Return True if this CPU computes in that type; converting back and forth runs at a tenth of the speed."""
    capabilities = torch.cpu.get_capabilities()
    is_arm = "sve" in capabilities or "bf16" in capabilities
    names = ("bf16", "arm_bf16") if is_arm and dtype is torch.bfloat16 else ARITHMETIC.get(dtype, ())
    return any(capabilities.get(name, False) for name in names)


def wanted_dtype(session: Session, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype for a request of the script, after --fp16-to-bf16."""
    wanted = CUDA_DEFAULT if dtype is None else dtype
    return torch.bfloat16 if wanted is torch.float16 and session.options.fp16_to_bf16 else wanted


def is_kept(session: Session, dtype: torch.dtype) -> bool:
    """Return True if --amp allows autocast to that type."""
    if session.options.amp == "auto":
        return not session.target.is_cpu or has_arithmetic(dtype)
    return session.options.amp == "keep"


def _make_autocast(rule: Rule, original: Any, session: Session) -> Any:
    name = session.target.name
    kept = {dtype: is_kept(session, dtype) for dtype in (torch.float16, torch.bfloat16)}
    printed: list[str] = []

    def __init__(
        self: Any, device_type: Any, dtype: Any = None, enabled: bool = True, cache_enabled: bool | None = None
    ) -> None:
        if device_type != "cuda":
            original(self, device_type, dtype, enabled, cache_enabled)
            return
        wanted = wanted_dtype(session, dtype)
        is_on = enabled and kept.get(wanted, True)
        if not is_dynamo_compiling():
            short = str(wanted).removeprefix("torch.")
            what = f"autocast to {short} on {name}" if is_on == enabled else f"off: {short} is not used"
            record.hit(rule, (device_type,), {"dtype": dtype, "enabled": enabled}, what)
            if is_on != enabled and not printed:
                printed.append(what)
                record.say(
                    f"autocast is off: {short} is many times slower on this CPU; --amp keep turns it on"
                    if session.options.amp == "auto"
                    else "autocast is off because of --amp off"
                )
        original(self, name, wanted, is_on, cache_enabled)

    return __init__


def runs_in_float16(session: Session) -> bool:
    """Return True if autocast to float16 stays: neither converted nor off."""
    return wanted_dtype(session, torch.float16) is torch.float16 and is_kept(session, torch.float16)


def _make_scaler(rule: Rule, original: Any, session: Session) -> Any:
    """Keep the scaler enabled: scaling by a power of two changes no float32 or bfloat16 result.

    A disabled one has an empty state: scripts that log or save its scale fail, and their checkpoints do not load
    into the scaler of a GPU. On accelerators it is off with --fp16-to-bf16, as in the vendor's toolkit.
    """
    name = session.target.name
    is_off = session.options.fp16_to_bf16 and not session.target.is_cpu

    def __init__(self: Any, device: Any = "cuda", *args: Any, **kwargs: Any) -> None:
        if device != "cuda":
            original(self, device, *args, **kwargs)
            return
        record.hit(rule, (device, *args), kwargs, "off: float16 is not used" if is_off else "")
        if is_off and len(args) > 4:
            args = (*args[:4], False)
        elif is_off:
            kwargs["enabled"] = False
        original(self, name, *args, **kwargs)

    return __init__


def _make_state(rule: Rule, original: Any, session: Session) -> Any:
    """Map the first argument, a device type; without one these functions mean CUDA."""
    name = session.target.name
    is_set = ".set_" in rule.name
    is_dtype = rule.name.endswith("_dtype")

    def state(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else kwargs.get("device_type")
        is_cuda = first == "cuda" or (is_set and isinstance(first, bool)) or (not is_set and first is None)
        if not is_cuda or (not is_dynamo_compiling() and zones.zone() == zones.MACHINERY):
            return original(*args, **kwargs)
        rest = args if isinstance(first, bool) else args[1:]
        kwargs.pop("device_type", None)
        if not is_dynamo_compiling():
            record.hit(rule, args, kwargs)
        if is_set and is_dtype:
            return original(name, wanted_dtype(session, rest[0] if rest else kwargs["dtype"]))
        return original(name, *rest, **kwargs)

    return state


def _make_get_gpu_dtype(rule: Rule, original: Any, session: Session) -> Any:
    def get_autocast_gpu_dtype() -> torch.dtype:
        return torch.get_autocast_dtype("cuda")

    return get_autocast_gpu_dtype


def _make_set_gpu_dtype(rule: Rule, original: Any, session: Session) -> Any:
    def set_autocast_gpu_dtype(dtype: torch.dtype) -> None:
        torch.set_autocast_dtype("cuda", dtype)

    return set_autocast_gpu_dtype


def _make_device_type(rule: Rule, original: Any, session: Session) -> Any:
    name = session.target.name

    def of_device_type(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device_type") == "cuda":
            kwargs["device_type"] = name
            record.hit(rule, (), kwargs)
        elif args and args[0] == "cuda" and isinstance(args[0], str):
            args = (name, *args[1:])
        return original(*args, **kwargs)

    return of_device_type
