"""Optimizers: which parameters decay, and one fused update whose rate is a tensor.

A rate in a tensor keeps a captured or compiled step valid; `found_inf` lets the device skip a step by itself.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from sightline.errors import UsageError
from sightline.parts import refuse_foreign_fields

FIELDS_OF_KIND = {
    "sgd": {"momentum", "nesterov"},
    "adamw": {"beta1", "beta2", "eps"},
}
NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.LocalResponseNorm)


@dataclass(frozen=True)
class OptimizerConfig:
    """How gradients change weights."""

    kind: Literal["sgd", "adamw"] = "sgd"
    """sgd: v = momentum * v + g; w -= lr * v, with decay added to g. adamw: Adam with decoupled decay."""
    lr: float = 0.1
    """Base learning rate, for the global batch of the recipe."""
    weight_decay: float = 1e-4
    """Decay of weights."""
    decay_norm_and_bias: bool = True
    """Whether norm parameters and biases decay as well."""
    momentum: float = 0.9
    """sgd: share of the velocity kept."""
    nesterov: bool = False
    """sgd: look ahead along the velocity."""
    beta1: float = 0.9
    """adamw: decay of the mean."""
    beta2: float = 0.999
    """adamw: decay of the square."""
    eps: float = 1e-8
    """adamw: added to the root of the square."""

    def __post_init__(self) -> None:
        refuse_foreign_fields("optimizer", self, FIELDS_OF_KIND)
        if self.lr < 0 or self.weight_decay < 0:
            raise UsageError(f"optimizer.lr={self.lr} and weight_decay={self.weight_decay} must not be negative")

    def build(self, model: nn.Module, device: torch.device) -> torch.optim.Optimizer:
        """The optimizer over the groups of `parameter_groups`, with its rate in one tensor on the device."""
        groups = [
            {"params": [p for _, p in group], "weight_decay": decay}
            for decay, group in parameter_groups(model, self.weight_decay, self.decay_norm_and_bias)
        ]
        lr = torch.tensor(self.lr, dtype=torch.float32, device=device)
        if self.kind == "adamw":
            # On CUDA a captured step needs the step counter on the device too.
            on_cuda = device.type == "cuda"
            betas = (self.beta1, self.beta2)
            adam = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=self.eps, fused=True, capturable=on_cuda)
            return _with_state(adam, "exp_avg", "exp_avg_sq")
        sgd = torch.optim.SGD(groups, lr=lr, momentum=self.momentum, nesterov=self.nesterov, fused=True)
        return _with_state(sgd, "momentum_buffer") if self.momentum else sgd


def _with_state(optimizer: torch.optim.Optimizer, *names: str) -> torch.optim.Optimizer:
    """State from the start instead of from the first step: a skipped first step would leave it uninitialised,
    a captured step would allocate it inside the graph, and a checkpoint of step 0 would lack it."""
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        state = optimizer.state[parameter]
        for name in names:
            state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        if "exp_avg" in names:
            state["step"] = torch.zeros((), device=parameter.device)
    return optimizer


def parameter_groups(
    model: nn.Module, weight_decay: float, decay_norm_and_bias: bool
) -> list[tuple[float, list[tuple[str, nn.Parameter]]]]:
    """(decay, named parameters) per group. Chosen by module type: a name like `downsample.1` tells nothing."""
    decayed: list[tuple[str, nn.Parameter]] = []
    plain: list[tuple[str, nn.Parameter]] = []
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            spared = not decay_norm_and_bias and (isinstance(module, NORMS) or name == "bias")
            full_name = f"{prefix}.{name}" if prefix else name
            (plain if spared else decayed).append((full_name, parameter))
    return [(decay, group) for decay, group in ((weight_decay, decayed), (0.0, plain)) if group]
