"""Mixed precision: autocast in all its spellings, its state, GradScaler, custom_fwd and custom_bwd."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.amp.autocast_mode import autocast
from torch.compiler import is_dynamo_compiling
from torch.nn import Module
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from sightline_migrate import patching, zones
from sightline_migrate.reporting import record
from sightline_migrate.rules import mixed
from sightline_migrate.rules.conversion import Conversions, convert_of, name_of
from sightline_migrate.rules.table import Rule, dressed
from sightline_migrate.virtual.runtime import ARITHMETIC, has_arithmetic

if TYPE_CHECKING:
    from sightline_migrate.session import Session

CUDA_DEFAULT = torch.float16  # the default dtype of autocast("cuda"); the CPU's own default is bfloat16
EAGERLY = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
"""for what compiled code calls after a graph break inside a region: dynamo does not compile torch's own there either"""
WATCHED_STEPS = 20  # an optimizer of 16-bit weights may come after others

_modules: weakref.WeakValueDictionary[int, Module] = weakref.WeakValueDictionary()
"""modules that were created, moved or converted while migrated, by id: a script's module may have its own =="""


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
    if session.target.is_cpu:
        mixed.register(session)
        slow = [dtype for dtype in ARITHMETIC if not has_arithmetic(dtype)]
        if slow and not session.options.float32:
            _remember_modules(session)
            _choose_at_entry(session)
            _watch(session, slow)


def _remember_modules(session: Session) -> None:
    """Collect modules when they get parameters, and when they are moved or converted: copies register none."""
    original: Any = Module._apply

    def remember(module: Any, name: str, parameter: Any) -> None:
        if not is_dynamo_compiling():
            _modules[id(module)] = module

    def _apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        remember(self, "", None)
        return original(self, *args, **kwargs)

    session.undo.on_undo(_modules.clear)
    session.undo.on_undo(register_module_parameter_registration_hook(remember).remove)
    session.undo.set(Module, "_apply", patching.dress(_apply, original, "torch.nn.Module._apply"))


def _types_of_weights() -> set[torch.dtype]:
    """Return the types of all live modules' parameters."""
    found = (module for reference in _modules.valuerefs() if (module := reference()) is not None)
    return {each.dtype for module in found for each in list(module._parameters.values()) if each is not None}


def _watch(session: Session, slow: list[torch.dtype]) -> None:
    """Warn once, after a step, if this CPU emulates the type of the weights or of autocast: it looks like a hang."""
    steps = 0

    def after_step(optimizer: Any, *_: Any) -> None:
        nonlocal steps
        if is_dynamo_compiling() or steps >= WATCHED_STEPS:
            return
        steps += 1
        used = {p.dtype for group in optimizer.param_groups for p in group["params"]} | session.autocast_to
        if torch.float32 not in session.autocast_to:  # there, weights of any type are computed in float32
            # Optimizers of scripts that keep float32 masters do not hold the model's own weights.
            used |= _types_of_weights()
        emulated = [dtype for dtype in slow if dtype in used]
        if emulated:
            record.say(
                f"this CPU emulates {name_of(emulated[0])}, many times slower than float32; --float32 computes in "
                "float32, and --capability 7.5 lets a script that asks for the capability choose another type itself"
            )
        if emulated or steps == WATCHED_STEPS:
            steps = WATCHED_STEPS
            at_step.remove()

    at_step = register_optimizer_step_post_hook(after_step)
    session.undo.on_undo(at_step.remove)


def _choose_at_entry(session: Session) -> None:
    """Choose the type of regions again when they are entered: decorators come before the script makes its model."""
    original: Any = autocast.__enter__
    printed: list[bool] = []

    def __enter__(self: Any) -> Any:
        emulated = vars(self).get("emulated")
        if emulated is not None and not is_dynamo_compiling():
            self.fast_dtype = used = _used_for(emulated)
            session.autocast_to.add(used)
            if used is torch.float32 and not printed:
                printed.append(True)
                record.say(
                    f"autocast runs in float32: {name_of(emulated)} is many times slower on this CPU; "
                    "--amp keep runs it as the script asks"
                )
        return original(self)

    set_code_exec_strategy(__enter__.__code__, EAGERLY)
    session.undo.set(autocast, "__enter__", patching.dress(__enter__, original, "torch.autocast.__enter__"))


def _used_for(emulated: torch.dtype) -> torch.dtype:
    """Return the type of autocast to an emulated one: that one if modules have weights of it, else float32.

    Results of a region meet the script's own 16-bit tensors, whose type they have on a GPU.
    """
    if torch.is_autocast_enabled("cpu"):
        around = torch.get_autocast_dtype("cpu")
        if around in (emulated, torch.float32):
            return around
    return emulated if emulated in _types_of_weights() else torch.float32


def _is_replaced(session: Session, dtype: torch.dtype) -> bool:
    """Return True if --amp auto may run autocast to that type in float32."""
    is_emulated = session.target.is_cpu and dtype in ARITHMETIC and not has_arithmetic(dtype)
    return is_emulated and session.options.amp == "auto"


def dtype_on(session: Session, asked: torch.dtype) -> torch.dtype:
    """Return the type that autocast uses now for the one a script asks for.

    With --amp auto that is float32 on a CPU that only emulates the type, unless modules have weights of it: float32
    tensors are computed as without autocast, and others may be mixed with them, as on a GPU.
    """
    convert = convert_of(session)
    wanted = asked if convert is None else convert(asked)
    return _used_for(wanted) if _is_replaced(session, wanted) else wanted


def _dtypes_on(session: Session) -> dict[Any, torch.dtype]:
    """Return asked -> used, for look-ups that dynamo can trace; None is the default of CUDA."""
    found = {dtype: dtype_on(session, dtype) for dtype in ARITHMETIC}
    return {**found, None: found[CUDA_DEFAULT]}


def runs_in_float16(session: Session, asked: torch.dtype = CUDA_DEFAULT) -> bool:
    """Return True if autocast to that type runs in float16: it is float16, and neither in another type nor off."""
    return session.options.amp != "off" and dtype_on(session, asked) is torch.float16


def _make_autocast(rule: Rule, original: Any, session: Session) -> Any:
    name, is_cpu, is_kept = session.target.name, session.target.is_cpu, session.options.amp != "off"
    dtypes, convert, conversions = _dtypes_on(session), convert_of(session), Conversions(rule)
    printed: list[bool] = []

    def __init__(
        self: Any, device_type: Any, dtype: Any = None, enabled: bool = True, cache_enabled: bool | None = None
    ) -> None:
        if device_type != "cuda":
            # torch and libraries enter a region again by a tensor's device, in the type that it had: for backward,
            # to compute it once more, in a thread
            is_wide = is_cpu and device_type == "cpu" and dtype is torch.float32 and _ran_in_float32(session)
            original(self, device_type, torch.bfloat16 if is_wide else dtype, enabled, cache_enabled)
            if is_wide:
                self.fast_dtype = dtype
            return
        asked = CUDA_DEFAULT if dtype is None else dtype
        used = dtypes.get(dtype, dtype) if is_dynamo_compiling() or not enabled else dtype_on(session, asked)
        is_wide = used is torch.float32
        is_on = enabled and is_kept and (is_cpu or not is_wide)
        if not is_dynamo_compiling():
            given = {"dtype": dtype, "enabled": enabled}
            if enabled and convert is not None and convert(asked) is not asked and (is_on or is_wide):
                conversions.hit(asked, used, (device_type,), given)
            else:
                record.hit(rule, (device_type,), given, _effect(asked, used, enabled, is_on, name))
            if enabled and not printed and not is_kept:
                printed.append(True)
                record.say("autocast is off because of --amp off")
            if is_on:
                wanted = asked if convert is None else convert(asked)
                if _is_replaced(session, wanted):
                    self.emulated = wanted
                else:
                    session.autocast_to.add(used)
        # torch refuses autocast to float32 except for CUDA, but nothing below depends on that
        original(self, name, torch.bfloat16 if is_wide else used, is_on, cache_enabled)
        if is_wide:
            self.fast_dtype = used

    set_code_exec_strategy(__init__.__code__, EAGERLY)
    return __init__


def _ran_in_float32(session: Session) -> bool:
    return torch.float32 in session.autocast_to or torch.get_autocast_dtype("cpu") is torch.float32


def _effect(asked: torch.dtype, used: torch.dtype, enabled: bool, is_on: bool, target: str) -> str:
    if not enabled:
        return "off, as the script asks"
    if not is_on:
        return f"off: {name_of(asked)} is not used"
    emulated = "" if used is asked else f": {name_of(asked)} is emulated there"
    return f"autocast to {name_of(used)} on {target}{emulated}"


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
    dtypes, convert, conversions = _dtypes_on(session), convert_of(session), Conversions(rule)
    is_default = is_dtype and not is_set and session.target.is_cpu

    def state(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else kwargs.get("device_type")
        is_cuda = first == "cuda" or (is_set and isinstance(first, bool)) or (not is_set and first is None)
        if not is_cuda or (not is_dynamo_compiling() and zones.zone() == zones.MACHINERY):
            return original(*args, **kwargs)
        rest = args if isinstance(first, bool) else args[1:]
        kwargs.pop("device_type", None)
        asked: Any = (rest[0] if rest else kwargs["dtype"]) if is_set and is_dtype else None
        if not is_dynamo_compiling():
            if convert is None or convert(asked) is asked:
                record.hit(rule, args, kwargs)
            else:
                conversions.hit(asked, dtypes[asked], args)
        if is_set and is_dtype:
            session.sets_autocast_dtype = True
            return original(name, dtypes.get(asked, asked) if is_dynamo_compiling() else dtype_on(session, asked))
        if is_default and not is_dynamo_compiling() and not _is_chosen(session):
            return dtype_on(session, CUDA_DEFAULT)
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
