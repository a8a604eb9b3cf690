"""Optimizers: which parameters decay, and one update whose rate is a tensor where the device can read it there.

A rate in a tensor keeps a captured or compiled step valid. Fused kernels also read `found_inf` and then skip a step
by themselves; for the others the step guards their tensors (`updates_in_place_of_nan`).
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from sightline.errors import UsageError
from sightline.parts import refuse_foreign_fields

FIELDS_OF_KIND = {
    "sgd": {"momentum", "nesterov"},
    "rmsprop": {"momentum", "alpha", "eps"},
    "adam": {"beta1", "beta2", "eps"},
    "adamw": {"beta1", "beta2", "eps"},
    "radam": {"beta1", "beta2", "eps"},
}
FUSED = ("sgd", "adam", "adamw")
AS_OTHERS = -1.0  # a decay that means: the same as weight_decay
NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
Groups = list[tuple[float, list[tuple[str, nn.Parameter]]]]


@dataclass(frozen=True)
class OptimizerConfig:
    """How gradients change weights."""

    kind: Literal["sgd", "rmsprop", "adam", "adamw", "radam"] = "sgd"
    """sgd: v = momentum * v + g; w -= lr * v. Decay is added to g, but for adamw, which shrinks w by itself."""
    lr: float = 0.1
    """Base learning rate, for the global batch of the recipe."""
    weight_decay: float = 1e-4
    """Decay of weights."""
    norm_weight_decay: float = AS_OTHERS
    """Decay of norm parameters; -1: the same as weight_decay."""
    bias_weight_decay: float = AS_OTHERS
    """Decay of biases outside norms; -1: the same as weight_decay."""
    momentum: float = 0.9
    """sgd, rmsprop: share of the velocity kept."""
    nesterov: bool = False
    """sgd: look ahead along the velocity."""
    alpha: float = 0.9
    """rmsprop: share of the mean square kept."""
    beta1: float = 0.9
    """adam, adamw, radam: decay of the mean."""
    beta2: float = 0.999
    """adam, adamw, radam: decay of the square."""
    eps: float = 1e-8
    """rmsprop, adam, adamw, radam: added to the root of the square; torchvision's rmsprop uses 0.0316."""

    def __post_init__(self) -> None:
        refuse_foreign_fields("optimizer", self, FIELDS_OF_KIND)
        # Every test is written so that NaN fails it.
        for name in ("lr", "weight_decay", "eps"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"optimizer.{name}={getattr(self, name)} must not be negative")
        for name in ("momentum", "alpha", "beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"optimizer.{name}={getattr(self, name)} must be in [0, 1)")
        if self.nesterov and not self.momentum:
            raise UsageError("optimizer.nesterov looks ahead along the velocity: give --optimizer.momentum above 0")
        for name in ("norm_weight_decay", "bias_weight_decay"):
            if not (0 <= getattr(self, name) < math.inf or getattr(self, name) == AS_OTHERS):
                raise UsageError(
                    f"optimizer.{name}={getattr(self, name)} must not be negative; -1 means: as weight_decay"
                )

    @property
    def skips_by_itself(self) -> bool:
        """Whether a step that is not finite leaves its tensors alone."""
        return self.kind in FUSED

    def groups(self, model: nn.Module) -> Groups:
        """(decay, named parameters) per group. Chosen by module type: a name like `downsample.1` tells nothing."""
        norm = self.weight_decay if self.norm_weight_decay == AS_OTHERS else self.norm_weight_decay
        bias = self.weight_decay if self.bias_weight_decay == AS_OTHERS else self.bias_weight_decay
        found: dict[float, list[tuple[str, nn.Parameter]]] = {}
        seen: set[nn.Parameter] = set()  # a shared weight belongs to the module that has it first
        for prefix, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter in seen:
                    continue
                seen.add(parameter)
                decay = norm if isinstance(module, NORMS) else bias if name == "bias" else self.weight_decay
                found.setdefault(decay, []).append((f"{prefix}.{name}" if prefix else name, parameter))
        return sorted(found.items(), key=lambda item: -item[0])

    def build(self, model: nn.Module, device: torch.device) -> torch.optim.Optimizer:
        """The optimizer over `groups`; its rate is one tensor on the device, but a number where torch wants one."""
        groups: Any = [{"params": [p for _, p in group], "weight_decay": d} for d, group in self.groups(model)]
        on_device = device.type != "cpu"
        fused = self.kind in FUSED
        lr: Any = torch.tensor(self.lr, device=device) if fused or on_device else self.lr
        how: dict[str, Any] = {"fused": True} if fused else {"foreach": True, "capturable": on_device}
        betas = (self.beta1, self.beta2)
        if self.kind == "sgd":
            sgd = torch.optim.SGD(groups, lr, momentum=self.momentum, nesterov=self.nesterov, **how)
            return _with_state(sgd, *(["momentum_buffer"] if self.momentum else []))
        if self.kind == "rmsprop":
            rms = torch.optim.RMSprop(groups, lr, alpha=self.alpha, eps=self.eps, momentum=self.momentum, **how)
            return _with_state(rms, "square_avg", *(["momentum_buffer"] if self.momentum else []), count=True)
        if self.kind == "radam":
            radam = torch.optim.RAdam(groups, lr, betas=betas, eps=self.eps, **how)
            return _with_state(radam, "exp_avg", "exp_avg_sq", count=True)
        kind = torch.optim.Adam if self.kind == "adam" else torch.optim.AdamW
        adam = kind(groups, lr, betas=betas, eps=self.eps, capturable=device.type == "cuda", **how)
        return _with_state(adam, "exp_avg", "exp_avg_sq", count=True)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The learning rate of the next step."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def _with_state(optimizer: torch.optim.Optimizer, *names: str, count: bool = False) -> torch.optim.Optimizer:
    """State from the start instead of from the first step: a skipped first step would leave it uninitialised,
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
