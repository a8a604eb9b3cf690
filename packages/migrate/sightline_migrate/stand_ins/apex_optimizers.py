"""apex.optimizers and LARC in plain torch, with the update rules, state names and defaults of apex.

Sums are in fp32 for any parameter dtype, as in apex's kernels; tests compare them with plain NumPy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sightline_migrate.reporting import record
from sightline_migrate.stand_ins.rules import counted_rules

_NAMES = ("FusedSGD", "FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedAdagrad")
RULES = counted_rules("apex.optimizers", dict.fromkeys(_NAMES, "the same update in plain torch"))
RULES |= counted_rules("apex.parallel", {"LARC": "the same update in plain torch"})


class _Fused(Optimizer):
    """Base of apex's optimizers: one step count per group, zero_grad obeys set_grad_none."""

    master_weights = False

    def __init__(self, params: Any, set_grad_none: bool, **defaults: Any) -> None:
        rule = next(RULES[kind.__name__] for kind in type(self).__mro__ if kind.__name__ in RULES)
        record.hit(rule, (), defaults)
        super().__init__(params, defaults)
        self.set_grad_none = set_grad_none
        self._masters: dict[Tensor, Tensor] = {}  # fp32 copies of weights in 16 bits; as in apex they are not saved

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        super().zero_grad(set_to_none=self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        shared = self._of_all_groups()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse:
                    raise RuntimeError(f"{type(self).__name__} cannot use sparse gradients; use torch.optim.SparseAdam")
                weights = self._masters.get(parameter, parameter).float()
                weights = weights - self._change(parameter, weights, parameter.grad.float(), group, shared)
                if self.master_weights:
                    self._masters[parameter] = weights
                parameter.copy_(weights)
        return loss

    def _of_all_groups(self) -> Any:
        """Return a value over all groups that every update needs."""
        return None

    def _change(self, parameter: Tensor, weights: Tensor, grad: Tensor, group: dict[str, Any], shared: Any) -> Tensor:
        """Return the value to subtract from the weights of a parameter, in fp32."""
        raise NotImplementedError

    def _moment(self, parameter: Tensor, name: str) -> Tensor:
        state = self.state[parameter]
        if name not in state:
            state[name] = torch.zeros_like(parameter, dtype=torch.float32)
        found: Tensor = state[name]
        return found


def _corrections(group: dict[str, Any]) -> tuple[float, float]:
    first, second = group["betas"]
    if not group["bias_correction"]:
        return 1.0, 1.0
    return 1 - first ** group["step"], 1 - second ** group["step"]


def _refuse_amsgrad(name: str, amsgrad: bool) -> None:
    if amsgrad:
        raise RuntimeError(f"{name} has no AMSGrad variant, as in apex; use torch.optim.AdamW(amsgrad=True)")


class FusedAdam(_Fused):
    """Adam; with adam_w_mode weight decay is decoupled from the moments.

    `capturable` serves CUDA graphs alone; as in apex, master_weights needs it.
    """

    __module__ = "apex.optimizers.fused_adam"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        _refuse_amsgrad("FusedAdam", amsgrad)
        if master_weights and not capturable:
            raise RuntimeError("FusedAdam: master_weights=True needs capturable=True, as in apex; add it")
        self.adam_w_mode = int(adam_w_mode)
        self.capturable, self.master_weights = capturable, master_weights
        super().__init__(
            params,
            set_grad_none,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
        )

    def _change(self, parameter: Tensor, weights: Tensor, grad: Tensor, group: dict[str, Any], shared: Any) -> Tensor:
        decay = group["weight_decay"] * weights
        update = _adam(self, parameter, grad if self.adam_w_mode else grad + decay, group, 1 - group["betas"][0])
        return group["lr"] * (update + decay if self.adam_w_mode else update)


def _adam(optimizer: _Fused, parameter: Tensor, grad: Tensor, group: dict[str, Any], share: float) -> Tensor:
    """Update both moments; return the first divided by the root of the second."""
    first, second = group["betas"]
    mean, square = optimizer._moment(parameter, "exp_avg"), optimizer._moment(parameter, "exp_avg_sq")
    mean.mul_(first).add_(grad, alpha=share)
    square.mul_(second).addcmul_(grad, grad, value=1 - second)
    of_mean, of_square = _corrections(group)
    return (mean / of_mean) / ((square / of_square).sqrt() + group["eps"])


class FusedLAMB(_Fused):
    """Adam with steps scaled per layer to the norm of the weights (arXiv 1904.00962).

    NVIDIA's variant: gradients of all groups are clipped to a common norm first, and layers without weight decay are
    not scaled, unless use_nvlamb.
    """

    __module__ = "apex.optimizers.fused_lamb"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        _refuse_amsgrad("FusedLAMB", amsgrad)
        self.adam_w_mode = int(adam_w_mode)
        self.use_nvlamb = use_nvlamb
        super().__init__(
            params,
            set_grad_none,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            grad_averaging=grad_averaging,
            max_grad_norm=max_grad_norm,
        )

    def _of_all_groups(self) -> Tensor | None:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not grads:
            return None
        return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g in grads]))

    def _change(self, parameter: Tensor, weights: Tensor, grad: Tensor, group: dict[str, Any], shared: Any) -> Tensor:
        decay = group["weight_decay"] * weights
        if group["max_grad_norm"] > 0:
            grad = grad / (shared / group["max_grad_norm"]).clamp(min=1.0)
        share = 1 - group["betas"][0] if group["grad_averaging"] else 1.0
        update = _adam(self, parameter, grad if self.adam_w_mode else grad + decay, group, share)
        if self.adam_w_mode:
            update = update + decay
        if not self.use_nvlamb and group["weight_decay"] == 0:
            return group["lr"] * update
        size, change = weights.norm(), update.norm()
        ratio = torch.where((size > 0) & (change > 0), size / change, torch.ones_like(size))
        return group["lr"] * ratio * update


class FusedNovoGrad(_Fused):
    """Adam with one second moment per layer: the norm of its gradient (arXiv 1905.11286)."""

    __module__ = "apex.optimizers.fused_novograd"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        _refuse_amsgrad("FusedNovoGrad", amsgrad)
        if norm_type not in (0, 2):
            raise RuntimeError(f"norm_type={norm_type} is not known; use 2, or 0 for the maximum norm")
        self.moment_mode = 0 if reg_inside_moment else 1
        super().__init__(
            params,
            set_grad_none,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            grad_averaging=grad_averaging,
            norm_type=norm_type,
            init_zero=init_zero,
        )

    def _change(self, parameter: Tensor, weights: Tensor, grad: Tensor, group: dict[str, Any], shared: Any) -> Tensor:
        first, _ = group["betas"]
        mean, size = self._moment(parameter, "exp_avg"), self._size(parameter, grad, group)
        of_mean, of_square = _corrections(group)
        bound = size / of_square**0.5 + group["eps"]
        share = 1 - first if group["grad_averaging"] else 1.0
        decay = group["weight_decay"] * weights
        if self.moment_mode == 0:
            mean.mul_(first).add_(grad / bound + decay, alpha=share)
            return group["lr"] * mean / of_mean
        mean.mul_(first).add_(grad, alpha=share)
        return group["lr"] * (mean / of_mean / bound + decay)

    def _size(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        """Return the running norm; the first step uses the norm itself, later steps a moving average."""
        state, second = self.state[parameter], group["betas"][1]
        now = grad.abs().max() if group["norm_type"] == 0 else grad.norm()
        before = state.get("grad_norm", torch.zeros_like(now) if group["init_zero"] else now)
        if group["norm_type"] == 0:
            state["grad_norm"] = second * before + (1 - second) * now
        else:
            state["grad_norm"] = (second * before**2 + (1 - second) * now**2).sqrt()
        found: Tensor = state["grad_norm"]
        return found


class FusedAdagrad(_Fused):
    """Adagrad; with adagrad_w_mode weight decay is decoupled from the sum of squares."""

    __module__ = "apex.optimizers.fused_adagrad"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        self.adagrad_w_mode = int(adagrad_w_mode)
        super().__init__(params, set_grad_none, lr=lr, eps=eps, weight_decay=weight_decay)

    def _change(self, parameter: Tensor, weights: Tensor, grad: Tensor, group: dict[str, Any], shared: Any) -> Tensor:
        total, decay = self._moment(parameter, "sum"), group["weight_decay"] * weights
        if not self.adagrad_w_mode:
            grad = grad + decay
        total.addcmul_(grad, grad)
        update = grad / (total.sqrt() + group["eps"])
        return group["lr"] * (update + decay if self.adagrad_w_mode else update)


class FusedSGD(_Fused):
    """torch's SGD; with wd_after_momentum weight decay is applied after momentum.

    materialize_master_grads saves memory in apex's O2; results are the same.
    """

    __module__ = "apex.optimizers.fused_sgd"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError(f"nesterov needs momentum > 0 and dampening 0, got {momentum} and {dampening}")
        self.wd_after_momentum = wd_after_momentum
        super().__init__(
            params,
            set_grad_none,
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
        )

    def _change(self, parameter: Tensor, weights: Tensor, grad: Tensor, group: dict[str, Any], shared: Any) -> Tensor:
        decay = group["weight_decay"] * weights
        update = grad if self.wd_after_momentum else grad + decay
        if group["momentum"]:
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = update.clone()
            else:
                state["momentum_buffer"].mul_(group["momentum"]).add_(update, alpha=1 - group["dampening"])
            buffer = state["momentum_buffer"]
            update = update + group["momentum"] * buffer if group["nesterov"] else buffer
        return group["lr"] * (update + decay if self.wd_after_momentum else update)


class LARC:
    """Wraps an optimizer: scales each layer's gradient to the norm of its weights (arXiv 1708.03888)."""

    __module__ = "apex.parallel.LARC"

    def __init__(self, optimizer: Any, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8) -> None:
        record.hit(RULES["LARC"], (optimizer,))
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.clip = clip
        self.eps = eps

    def __getattr__(self, name: str) -> Any:
        if name == "optim":  # not set yet: a copy is being created
            raise AttributeError(name)
        return getattr(self.optim, name)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Scale gradients, then step. Weight decay is scaled too, so it is applied here, not by the optimizer."""
        decays = [group.get("weight_decay", 0.0) for group in self.optim.param_groups]
        for group, decay in zip(self.optim.param_groups, decays, strict=True):
            group["weight_decay"] = 0.0
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._scale(parameter, group["lr"], decay)
        try:
            return self.optim.step(*args, **kwargs)
        finally:
            for group, decay in zip(self.optim.param_groups, decays, strict=True):
                group["weight_decay"] = decay

    @torch.no_grad()
    def _scale(self, parameter: Tensor, lr: float, decay: float) -> None:
        size, grad = parameter.norm(), parameter.grad
        assert grad is not None
        slope = grad.norm()
        if size == 0 or slope == 0:
            return
        rate = self.trust_coefficient * size / (slope + decay * size + self.eps)
        if self.clip:
            rate = (rate / lr).clamp(max=1.0)
        grad.add_(parameter, alpha=decay).mul_(rate)


CONTENTS: dict[str, Any] = {
    "FusedSGD": FusedSGD,
    "FusedAdam": FusedAdam,
    "FusedLAMB": FusedLAMB,
    "FusedNovoGrad": FusedNovoGrad,
    "FusedAdagrad": FusedAdagrad,
}
