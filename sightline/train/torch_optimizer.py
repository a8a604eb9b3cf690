"""torch's side of OptimizerConfig: groups of parameters, the optimizer over them, its rate and one update.

A rate in a tensor keeps a captured or compiled step valid. Fused kernels and our own updates also read `found_inf`
and then skip a step by themselves; for the others the step guards their tensors.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import nn

from sightline.train.optimizers import AS_OTHERS, FUSED, OURS, OptimizerConfig
from sightline.train.updates import DecoupledSGD, KerasSGD, Lars

NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
SCALE = "lr_scale"  # of a group whose rate is not that of the schedule
Named = list[tuple[str, nn.Parameter]]


class Key(NamedTuple):
    """Settings that the parameters of a group share."""

    decay: float
    trusts: bool  # lars scales the rate of each tensor
    scale: float  # of the rate


def groups(config: OptimizerConfig, model: nn.Module, head: tuple[str, ...] = ()) -> list[tuple[Key, Named]]:
    """Return the parameters by the settings that they share. Those whose names begin with one of `head` have the rate
    of the schedule. Norms are told by module type: a name like `downsample.1` tells nothing."""
    lars = config.kind == "lars"
    norm = config.weight_decay if config.norm_weight_decay == AS_OTHERS else config.norm_weight_decay
    bias = config.weight_decay if config.bias_weight_decay == AS_OTHERS else config.bias_weight_decay
    found: dict[Key, Named] = {}
    seen: set[nn.Parameter] = set()  # a shared weight belongs to the module that has it first
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in seen or not parameter.requires_grad:
                continue
            seen.add(parameter)
            is_norm, whole = isinstance(module, NORMS), f"{prefix}.{name}" if prefix else name
            scale = 1.0 if whole.startswith(head or "") else config.trunk_lr_scale
            if lars and (is_norm or name == "bias"):
                key = Key(0.0, False, scale)
            else:
                key = Key(norm if is_norm else bias if name == "bias" else config.weight_decay, lars, scale)
            found.setdefault(key, []).append((whole, parameter))
    return sorted(found.items(), key=lambda item: (-item[0].decay, not item[0].trusts, -item[0].scale))


def _group_options(config: OptimizerConfig, decay: float, trusts: bool) -> dict[str, Any]:
    if config.kind == "lars":
        return {"weight_decay": decay, "trusts": trusts}
    if config.decay_form == "decoupled":
        return {"weight_decay": 0.0, "shrink": decay}
    return {"weight_decay": 2 * decay if config.decay_form == "keras_l2" else decay}


def build(
    config: OptimizerConfig, model: nn.Module, device: torch.device, head: tuple[str, ...] = ()
) -> torch.optim.Optimizer:
    """Build the optimizer over `groups`; its rate is a tensor on the device, but a number if torch needs it. Names
    of parameters outside the trunk begin with one of `head`; without, there is no trunk."""
    on_device = device.type != "cpu"
    fused = config.kind in FUSED

    def rate() -> Any:
        return torch.tensor(config.lr, device=device) if fused or on_device or config.kind in OURS else config.lr

    _spare_compiler()
    made: Any = []
    for (decay, trusts, scale), named in groups(config, model, head):
        own: dict[str, Any] = {} if scale == 1 else {SCALE: scale, "lr": rate()}  # the others share one tensor
        made.append({"params": [p for _, p in named], **_group_options(config, decay, trusts), **own})
    lr = rate()
    how: dict[str, Any] = {"fused": True} if fused else {"foreach": True, "capturable": on_device}
    betas = (config.beta1, config.beta2)
    velocity = ["momentum_buffer"] if config.momentum else []
    if config.kind == "sgd":
        form = DecoupledSGD if config.decay_form == "decoupled" else torch.optim.SGD
        return _with_state(form(made, lr, momentum=config.momentum, nesterov=config.nesterov, **how), *velocity)
    if config.kind == "sgd_keras":
        return _with_state(KerasSGD(made, lr, config.momentum, config.nesterov), *velocity)
    if config.kind == "lars":
        return _with_state(Lars(made, lr, config.momentum, config.eta, config.eps), *velocity)
    if config.kind == "rmsprop":
        rms = torch.optim.RMSprop(made, lr, alpha=config.alpha, eps=config.eps, momentum=config.momentum, **how)
        return _with_state(rms, "square_avg", *velocity, count=True)
    if config.kind == "radam":
        radam = torch.optim.RAdam(made, lr, betas=betas, eps=config.eps, **how)
        return _with_state(radam, "exp_avg", "exp_avg_sq", count=True)
    kind = torch.optim.Adam if config.kind == "adam" else torch.optim.AdamW
    adam = kind(made, lr, betas=betas, eps=config.eps, capturable=device.type == "cuda", **how)
    return _with_state(adam, "exp_avg", "exp_avg_sq", count=True)


def update(optimizer: torch.optim.Optimizer) -> None:
    """Make one update; the caller has disabled gradients. torch's wrapper would do that, and import the compiler."""
    name = f"Optimizer.step#{type(optimizer).__name__}.step"  # in a trace, as torch calls it
    with torch.autograd.profiler.record_function(name):
        inspect.unwrap(type(optimizer).step)(optimizer)


def _spare_compiler() -> None:
    """Let torch build optimizers without its compiler: it imports that, 1 to 3 s of every start, only to mark a method
    as one that is not to be compiled. Nothing here compiles it."""
    method = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    vars(method).setdefault("__dynamo_disable", method)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of the next step, scaled for groups that say so."""
    for group in optimizer.param_groups:
        own = rate * group.get(SCALE, 1.0)
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(own)
        else:
            group["lr"] = own


def _with_state(optimizer: torch.optim.Optimizer, *names: str, count: bool = False) -> torch.optim.Optimizer:
    """Make the state now, not in the first step: a skipped first step would leave it uninitialised,
    a captured step would allocate it inside the graph, and a checkpoint of step 0 would lack it."""
    for group in optimizer.param_groups:
        on_host = not (group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if count:
                state["step"] = torch.zeros((), device="cpu" if on_host else parameter.device)
            for name in names:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    return optimizer
