"""apex.amp on torch's autocast: O0 is fp32; O1, O2 and O3 run the model's forward under autocast.

Weights stay fp32 at every level and serve as the master weights of O1 and O2. Losses are scaled, gradients unscaled and
steps skipped as in apex, with the level's loss scale; there is no scaling if nothing runs in float16.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from sightline_migrate import session, terminal
from sightline_migrate.reporting import record
from sightline_migrate.rules import amp
from sightline_migrate.stand_ins.rules import counted_rules

LEVELS = {"O0": None, "O1": "dynamic", "O2": "dynamic", "O3": 1.0}
"""loss scale of each opt_level; None: no mixed precision at all"""
FIRST_SCALE, GROWS_AFTER = 2.0**16, 2000  # apex's numbers

RULES = counted_rules(
    "apex.amp",
    {
        "initialize": "autocast around the model's forward; weights stay fp32",
        "scale_loss": "scaled and unscaled as in apex",
        "disable_casts": "autocast off",
        "half_function": "left to autocast",
        "float_function": "runs in fp32",
    },
)


class LossScaler:
    """The loss scale: halved after an overflow, doubled after 2000 steps without one."""

    __module__ = "apex.amp.scaler"

    def __init__(self, scale: float | str, lowest: float | None, highest: float) -> None:
        self.dynamic = scale == "dynamic"
        self._loss_scale = min(highest, FIRST_SCALE) if self.dynamic else float(scale)
        self._lowest = lowest or 0.0
        self._highest = highest
        self._unskipped = 0

    def loss_scale(self) -> float:
        return self._loss_scale

    def update(self, is_finite: bool) -> None:
        if not self.dynamic:
            return
        if not is_finite:
            self._loss_scale = max(self._lowest, self._loss_scale / 2)
            self._unskipped = 0
            return
        self._unskipped += 1
        if self._unskipped == GROWS_AFTER:
            self._loss_scale = min(self._highest, self._loss_scale * 2)
            self._unskipped = 0


class AmpState:
    """Settings of initialize(), for all models and optimizers of the process."""

    def __init__(self) -> None:
        self.loss_scalers: list[LossScaler] = []
        self.is_initialized = False
        self.is_enabled = False


_amp_state = AmpState()


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> Any:
    """Prepare models and optimizers, alone or in lists; return the same objects.

    Weights, also those of batch norm, stay fp32 whatever master_weights and keep_batchnorm_fp32 say, and autocast
    replaces patch_torch_functions.
    """
    record.hit(RULES["initialize"], (models,), {"opt_level": opt_level, "enabled": enabled})
    if opt_level not in LEVELS:
        raise RuntimeError(f"opt_level={opt_level!r} is not known; use one of {', '.join(LEVELS)} (letter O, not zero)")
    _amp_state.is_initialized = True
    _amp_state.is_enabled = enabled
    if not enabled:
        return models if optimizers is None else (models, optimizers)
    narrow = cast_model_type or torch.float16
    is_mixed = LEVELS[opt_level] is not None and narrow is not torch.float32
    wanted = loss_scale if loss_scale is not None else LEVELS[opt_level] or 1.0
    active = session.active()
    scales = is_mixed and active is not None and amp.runs_in_float16(active, narrow)
    _amp_state.loss_scalers = [
        LossScaler(_number(wanted) if scales else 1.0, min_loss_scale, max_loss_scale) for _ in range(num_losses)
    ]
    for model in _as_list(models) if is_mixed else ():
        if not isinstance(model.forward, MixedForward):
            model.forward = MixedForward(model.forward, narrow, cast_model_outputs or torch.float32)
    for optimizer in [] if optimizers is None else _as_list(optimizers):
        if not hasattr(optimizer, "_amp_stash"):
            _make_skippable(optimizer)
    return models if optimizers is None else (models, optimizers)


def _number(scale: float | str) -> float | str:
    return scale if scale == "dynamic" else float(scale)


def _as_list(one_or_many: Any) -> list[Any]:
    return list(one_or_many) if isinstance(one_or_many, list | tuple) else [one_or_many]


class MixedForward:
    """Replaces a model's forward; an object, not a closure, so that the model can be copied and pickled."""

    def __init__(self, forward: Callable[..., Any], narrow: torch.dtype, result_type: torch.dtype) -> None:
        self.forward = forward
        self.narrow = narrow
        self.result_type = result_type

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Scripts for O2 and O3 may pass float16 inputs, which do not fit fp32 weights if autocast is off.
        args, kwargs = cast(args, torch.float32), cast(kwargs, torch.float32)
        with torch.autocast("cuda", self.narrow):
            result = self.forward(*args, **kwargs)
        return cast(result, self.result_type)


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast floating-point tensors in nested lists, tuples and dicts to `dtype`; float64 stays."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() and value.dtype is not torch.float64 else value
    if isinstance(value, tuple):
        parts = [cast(each, dtype) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list):
        return [cast(each, dtype) for each in value]
    if isinstance(value, dict):
        made = copy.copy(value)  # keeps the class of a model's output type
        for name, each in value.items():
            made[name] = cast(each, dtype)
        return made
    return value


class _Stash:
    """State of an optimizer between the scaling of a loss and the step."""

    def __init__(self) -> None:
        self.skips_step = False
        self.holds_scaled = False
        """gradients are still scaled: delay_unscale"""
        self.before: list[Tensor | None] = []
        """gradients of earlier backward calls, already unscaled"""


def _make_skippable(optimizer: Any) -> None:
    optimizer._amp_stash = _Stash()
    step = optimizer.step

    def step_or_skip(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._amp_stash.skips_step:
            self._amp_stash.skips_step = False
            return None
        return step(*args, **kwargs)

    # A bound method: learning rate schedulers read its parts.
    optimizer.step = MethodType(step_or_skip, optimizer)


def master_params(optimizer: Any) -> Iterator[Tensor]:
    """Yield all parameters of an optimizer, e.g. to clip their gradients."""
    for group in optimizer.param_groups:
        yield from group["params"]


@contextmanager
def scale_loss(
    loss: Any,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Any]:
    """Scale a loss: `with scale_loss(loss, optimizer) as scaled: scaled.backward()`; unscale gradients on exit.

    `model` is unused in apex, too; with delay_overflow_check the script itself looks for an overflow.
    """
    if not _amp_state.is_initialized:
        raise RuntimeError("amp.scale_loss needs amp.initialize; call model, optimizer = amp.initialize(...) first")
    if not _amp_state.is_enabled:
        yield loss
        return
    record.hit(RULES["scale_loss"], (loss,), {"loss_id": loss_id})
    scaler = _amp_state.loss_scalers[loss_id]
    used = _as_list(optimizers)
    for optimizer in used:
        if not hasattr(optimizer, "_amp_stash"):  # created after initialize()
            _make_skippable(optimizer)
        if not delay_unscale and not optimizer._amp_stash.holds_scaled:
            _stash_gradients(optimizer)
    yield (loss.float() if isinstance(loss, Tensor) else loss) * scaler.loss_scale()
    if delay_unscale:
        for optimizer in used:
            optimizer._amp_stash.holds_scaled = True
        return
    finite = [_unscale(optimizer, scaler) for optimizer in used]  # a list: all of them must be unscaled
    if delay_overflow_check:
        return
    is_finite = all(finite)
    scaler.update(is_finite)
    if not is_finite and scaler.dynamic:
        text = f"Gradient overflow.  Skipping step, loss scaler {loss_id} reducing loss scale to {scaler.loss_scale()}"
        terminal.say(text)
        for optimizer in used:
            optimizer._amp_stash.skips_step = True


def _stash_gradients(optimizer: Any) -> None:
    parameters = list(master_params(optimizer))
    optimizer._amp_stash.before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None


def _unscale(optimizer: Any, scaler: LossScaler) -> bool:
    """Divide by the loss scale and add stashed gradients; return True if all gradients are finite."""
    stash, scale = optimizer._amp_stash, scaler.loss_scale()
    parameters = list(master_params(optimizer))
    before = stash.before or [None] * len(parameters)
    stash.before, stash.holds_scaled = [], False
    is_finite = True
    for parameter, earlier in zip(parameters, before, strict=True):
        if parameter.grad is not None:
            if scale != 1.0:
                parameter.grad.div_(scale)
            if scaler.dynamic:
                is_finite = is_finite and bool(parameter.grad.isfinite().all())
        if earlier is not None:
            parameter.grad = earlier if parameter.grad is None else parameter.grad.add_(earlier)
    return is_finite


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    destination = {} if destination is None else destination
    for index, scaler in enumerate(_amp_state.loss_scalers):
        destination[f"loss_scaler{index}"] = {"loss_scale": scaler.loss_scale(), "unskipped": scaler._unskipped}
    return destination


def load_state_dict(state_dict: dict[str, Any]) -> None:
    """Restore loss scales; ignore them if nothing is scaled here."""
    for scaler, saved in zip(_amp_state.loss_scalers, state_dict.values(), strict=False):
        if scaler.dynamic:
            scaler._loss_scale, scaler._unskipped = saved["loss_scale"], saved["unskipped"]


def disable_casts() -> AbstractContextManager[Any]:
    record.hit(RULES["disable_casts"])
    return torch.autocast("cuda", enabled=False)


def float_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function to run in fp32, also under autocast."""
    record.hit(RULES["float_function"], (function,))

    def in_float(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cuda", enabled=False):
            return function(*cast(args, torch.float32), **cast(kwargs, torch.float32))

    return in_float


def half_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function unchanged: autocast decides what runs in 16 bits."""
    record.hit(RULES["half_function"], (function,))
    return function


def register_float_function(module: Any, name: str) -> None:
    setattr(module, name, float_function(getattr(module, name)))


def register_half_function(module: Any, name: str) -> None:
    setattr(module, name, half_function(getattr(module, name)))


_PUBLIC: tuple[Callable[..., Any], ...] = (
    initialize, scale_loss, state_dict, load_state_dict, master_params, disable_casts, float_function, half_function,
    register_float_function, register_half_function,
)  # fmt: skip
CONTENTS: dict[str, Any] = {
    **{function.__name__: function for function in _PUBLIC},
    # autocast decides by itself which input type wins.
    "promote_function": half_function,
    "register_promote_function": register_half_function,
    "_amp_state": _amp_state,
}
