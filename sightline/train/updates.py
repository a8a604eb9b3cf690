"""Updates torch has no optimizer for: Keras' SGD, LARS, and SGD with decoupled decay; torch_optimizer.py builds them.

They work on all tensors of a group at once and never ask the device for a number, so a step can be captured. As
torch's fused kernels they read `found_inf`: where it is 1, no bit of a weight or of a velocity changes.
"""

from typing import Any

import torch
from torch import Tensor

TensorRow = list[Tensor] | tuple[Tensor, ...]
AS_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


class KerasSGD(torch.optim.Optimizer):
    """v = momentum * v - lr * g; w += v. Nesterov as Keras: w += momentum * v - lr * g, with the new v.

    `momentum_buffer` holds -v, so that it points the way torch's does.
    """

    found_inf: Tensor | None = None

    def __init__(self, groups: Any, lr: Tensor, momentum: float, nesterov: bool):
        defaults = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": 0.0, "shrink": 0.0}
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # nobody here evaluates a loss twice
        """Update all groups once."""
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            if weights:
                self._update(group, weights, [p.grad for p in weights])

    def _update(self, group: dict[str, Any], weights: TensorRow, gradients: TensorRow) -> None:
        bad, momentum = self.found_inf, group["momentum"]
        shrink(weights, group, bad)
        factors = self._factors(group, weights, gradients)
        if group["weight_decay"]:
            gradients = torch._foreach_add(gradients, weights, alpha=group["weight_decay"])
        moves: TensorRow = torch._foreach_mul(gradients, factors)  # -lr * g
        # From here on everything is subtracted: x - 0.0 is x on the bits, while -0.0 + 0.0 is not -0.0.
        if not momentum:
            torch._foreach_sub_(weights, _unless(bad, torch._foreach_neg(moves)))
            return
        moves = _unless(bad, moves)
        velocities = [self.state[p]["momentum_buffer"] for p in weights]
        torch._foreach_mul_(velocities, momentum if bad is None else momentum * (1 - bad) + bad)  # 1 if bad
        torch._foreach_sub_(velocities, moves)
        ahead: TensorRow = velocities
        if group["nesterov"]:
            ahead = torch._foreach_mul(velocities, momentum)
            torch._foreach_sub_(ahead, moves)
        torch._foreach_sub_(weights, _unless(bad, ahead))

    def _factors(self, group: dict[str, Any], weights: TensorRow, gradients: TensorRow) -> Any:
        """Return the factors of gradients: one number for all, or one for each."""
        return -group["lr"]


class Lars(KerasSGD):
    """Keras' SGD whose rate is scaled for each tensor of the groups that say `trusts`, in which decay is part of g:
    trust = eta * |w| / (|g| + decay * |w| + eps) with the norm of g before decay; 1 where |w| or |g| is 0."""

    def __init__(self, groups: Any, lr: Tensor, momentum: float, eta: float, eps: float):
        super().__init__(groups, lr, momentum, nesterov=False)
        self.eta = eta
        self.eps = eps

    def _factors(self, group: dict[str, Any], weights: TensorRow, gradients: TensorRow) -> Any:
        if not group["trusts"]:
            return super()._factors(group, weights, gradients)
        size = torch.stack(torch._foreach_norm(weights))  # (tensors,)
        slope = torch.stack(torch._foreach_norm(gradients))
        ratio = self.eta * size / (slope + group["weight_decay"] * size + self.eps)
        trust = torch.where((size > 0) & (slope > 0), ratio, 1.0)
        # Foreach kernels take no factor per tensor from the device: this one product is a launch for each of them.
        return list((-group["lr"] * trust).unbind())


class DecoupledSGD(torch.optim.SGD):
    """torch's SGD (fused) that shrinks weights by lr * shrink before the update, as AdamW does."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update all groups once."""
        for group in self.param_groups:
            shrink([p for p in group["params"] if p.grad is not None], group, getattr(self, "found_inf", None))
        super().step()


def shrink(weights: TensorRow, group: dict[str, Any], bad: Tensor | None) -> None:
    """Compute w *= 1 - lr * shrink; a bad step multiplies with 1, which keeps the bits."""
    if group["shrink"] and weights:
        share = group["lr"] * group["shrink"]
        torch._foreach_mul_(weights, 1 - (share if bad is None else share * (1 - bad)))


def _unless(bad: Tensor | None, tensors: TensorRow) -> TensorRow:
    """Return the tensors, or +0.0 throughout in a bad step: on the bits, because NaN * 0 is NaN."""
    if bad is None:
        return tensors
    keep = (bad == 0).to(AS_INTEGERS[tensors[0].itemsize])
    bits = torch._foreach_mul([t.view(AS_INTEGERS[t.itemsize]) for t in tensors], keep)
    return [b.view(t.dtype) for b, t in zip(bits, tensors, strict=True)]
