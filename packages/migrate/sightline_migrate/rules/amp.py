"""Mixed precision: autocast in all its spellings, its state, GradScaler, custom_fwd and custom_bwd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.optim.optimizer import register_optimizer_step_post_hook

from sightline_migrate import zones
from sightline_migrate.reporting import record
from sightline_migrate.rules.conversion import Conversions, convert_of, name_of
from sightline_migrate.rules.table import Rule, dressed
from sightline_migrate.virtual.runtime import ARITHMETIC, has_arithmetic

if TYPE_CHECKING:
    from sightline_migrate.session import Session

CUDA_DEFAULT = torch.float16  # the default dtype of autocast("cuda"); the CPU's own default is bfloat16
WATCHED_STEPS = 20  # an optimizer of 16-bit weights may come after others


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


def setup(session: Session) -> None:
    """Warn once, after a step, if this CPU emulates the type of the weights or of autocast: it looks like a hang."""
    if not session.target.is_cpu or session.options.float32:
        return
    steps = 0

    def after_step(optimizer: Any, *_: Any) -> None:
        nonlocal steps
        if is_dynamo_compiling() or steps >= WATCHED_STEPS:
            return
        steps += 1
        used = {p.dtype for group in optimizer.param_groups for p in group["params"]} | session.autocast_to
        slow = [dtype for dtype in ARITHMETIC if dtype in used and not has_arithmetic(dtype)]
        if slow:
            steps = WATCHED_STEPS
            record.say(
                f"this CPU emulates {name_of(slow[0])}, many times slower than float32; --float32 computes in float32, "
                "and --capability 7.5 lets a script that asks for the capability choose another type itself"
            )

    handle = register_optimizer_step_post_hook(after_step)
    session.undo.on_undo(handle.remove)


def wanted_dtype(session: Session, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype for a request of the script, after --fp16-to-bf16 and --float32."""
    wanted = CUDA_DEFAULT if dtype is None else dtype
    convert = convert_of(session)
    return wanted if convert is None else convert(wanted)


def is_kept(session: Session, dtype: torch.dtype) -> bool:
    """Return True if --amp allows autocast to that type."""
    if session.options.amp == "auto":
        return not session.target.is_cpu or has_arithmetic(dtype)
    return session.options.amp == "keep"


def _make_autocast(rule: Rule, original: Any, session: Session) -> Any:
    name = session.target.name
    kept = {dtype: is_kept(session, dtype) for dtype in (torch.float16, torch.bfloat16)} | {torch.float32: False}
    convert, conversions = convert_of(session), Conversions(rule)
    printed: list[str] = []

    def __init__(
        self: Any, device_type: Any, dtype: Any = None, enabled: bool = True, cache_enabled: bool | None = None
    ) -> None:
        if device_type != "cuda":
            original(self, device_type, dtype, enabled, cache_enabled)
            return
        asked = CUDA_DEFAULT if dtype is None else dtype
        wanted = asked if convert is None else convert(asked)
        is_on = enabled and kept.get(wanted, True)
        if not is_dynamo_compiling():
            given = {"dtype": dtype, "enabled": enabled}
            if enabled and wanted is not asked and (is_on or wanted is torch.float32):
                conversions.hit(asked, wanted, (device_type,), given)
            else:
                record.hit(rule, (device_type,), given, _effect(name_of(wanted), enabled, is_on, name))
            if enabled and not is_on and wanted is not torch.float32 and not printed:
                printed.append(name_of(wanted))
                record.say(
                    f"autocast is off: {name_of(wanted)} is many times slower on this CPU; --amp keep turns it on"
                    if session.options.amp == "auto"
                    else "autocast is off because of --amp off"
                )
            if is_on:
                session.autocast_to.add(wanted)
        # autocast to float32 is no autocast
        original(self, name, asked if wanted is torch.float32 else wanted, is_on, cache_enabled)

    return __init__


def _effect(dtype: str, enabled: bool, is_on: bool, target: str) -> str:
    if not enabled:
        return "off, as the script asks"
    return f"autocast to {dtype} on {target}" if is_on else f"off: {dtype} is not used"


def runs_in_float16(session: Session) -> bool:
    """Return True if autocast to float16 stays: neither converted nor off."""
    return wanted_dtype(session, torch.float16) is torch.float16 and is_kept(session, torch.float16)


def _make_scaler(rule: Rule, original: Any, session: Session) -> Any:
    """Turn the scaler off with --fp16-to-bf16: bfloat16 has the range of float32. Otherwise keep it enabled.

    Scaling by a power of two changes no float32 result, and a disabled scaler has an empty state: scripts that log or
    save its scale fail, and their checkpoints do not load into the scaler of a GPU.
    """
    name, is_off = session.target.name, session.options.fp16_to_bf16
    printed: list[bool] = []

    def __init__(self: Any, device: Any = "cuda", *args: Any, **kwargs: Any) -> None:
        if device != "cuda":
            original(self, device, *args, **kwargs)
            return
        record.hit(rule, (device, *args), kwargs, "off: bfloat16 needs no scaling" if is_off else "")
        if is_off:
            is_asked = args[4] if len(args) > 4 else kwargs.get("enabled", True)
            args, kwargs = args[:4], kwargs | {"enabled": False}
            if is_asked and not printed:
                printed.append(True)
                record.say(
                    "GradScaler is off: with --fp16-to-bf16 there is no float16 that needs loss scaling. A script that "
                    'reads its state, e.g. state_dict()["scale"], needs --float32 instead'
                )
        original(self, name, *args, **kwargs)

    return __init__


def _make_state(rule: Rule, original: Any, session: Session) -> Any:
    """Map the first argument, a device type; without one these functions mean CUDA."""
    name = session.target.name
    is_set = ".set_" in rule.name
    is_dtype = rule.name.endswith("_dtype")
    convert, conversions = convert_of(session), Conversions(rule)
    is_default = is_dtype and not is_set and session.target.is_cpu

    def state(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else kwargs.get("device_type")
        is_cuda = first == "cuda" or (is_set and isinstance(first, bool)) or (not is_set and first is None)
        if not is_cuda or (not is_dynamo_compiling() and zones.zone() == zones.MACHINERY):
            return original(*args, **kwargs)
        rest = args if isinstance(first, bool) else args[1:]
        kwargs.pop("device_type", None)
        asked = (rest[0] if rest else kwargs["dtype"]) if is_set and is_dtype else None
        used = asked if convert is None else convert(asked)
        if not is_dynamo_compiling():
            if used is asked:
                record.hit(rule, args, kwargs)
            else:
                conversions.hit(asked, used, args)
        if is_set and is_dtype:
            session.sets_autocast_dtype = True
            return original(name, used)
        if is_default and not is_dynamo_compiling() and not _is_chosen(session):
            return wanted_dtype(session, None)
        return original(name, *rest, **kwargs)

    return state


def _is_chosen(session: Session) -> bool:
    """Return True if the script chose autocast's type: on the CPU the default is another than CUDA's."""
    return session.sets_autocast_dtype or torch.is_autocast_enabled("cpu")


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
    convert, conversions = convert_of(session), Conversions(rule)

    def of_device_type(*args: Any, **kwargs: Any) -> Any:
        asked = kwargs.get("cast_inputs")
        used = asked if convert is None else convert(asked)
        if used is not asked:
            conversions.hit(asked, used, (), kwargs)
            kwargs["cast_inputs"] = used
        if kwargs.get("device_type") == "cuda":
            if used is asked:
                record.hit(rule, (), kwargs)
            kwargs["device_type"] = name
        elif args and args[0] == "cuda" and isinstance(args[0], str):
            args = (name, *args[1:])
        return original(*args, **kwargs)

    return of_device_type
