"""Optimizers: which parameters decay, and one update whose rate is a tensor where the device can read it there.

A rate in a tensor keeps a captured or compiled step valid. Fused kernels and our own updates also read `found_inf`
and then skip a step by themselves; for the others the step guards their tensors.
"""

import inspect
import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from sightline.errors import UsageError
from sightline.parts import refuse_foreign_fields
from sightline.train.updates import DecoupledSGD, KerasSGD, Lars

BY_GROUP = {"norm_weight_decay", "bias_weight_decay", "trunk_lr_scale"}
FIELDS_OF_KIND = {
    "sgd": {"momentum", "nesterov", "decay_form", *BY_GROUP},
    "sgd_keras": {"momentum", "nesterov", "decay_form", *BY_GROUP},
    "rmsprop": {"momentum", "alpha", "eps", *BY_GROUP},
    "adam": {"beta1", "beta2", "eps", *BY_GROUP},
    "adamw": {"beta1", "beta2", "eps", *BY_GROUP},
    "radam": {"beta1", "beta2", "eps", *BY_GROUP},
    "lars": {"momentum", "eta", "eps"},
}
RESET_BY = {"lr": ("lr_many", 0.0)}  # an explicit lr disables lr_many, unless that is given too
FUSED = ("sgd", "adam", "adamw")
OURS = ("sgd_keras", "lars")
AS_OTHERS = -1.0  # a decay that means: the same as weight_decay
NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
SCALE = "lr_scale"  # of a group whose rate is not that of the schedule
Named = list[tuple[str, nn.Parameter]]
Groups = list[tuple[float, Named]]


class _Key(NamedTuple):
    """Settings that the parameters of a group share."""

    decay: float
    trusts: bool  # lars scales the rate of each tensor
    scale: float  # of the rate


@dataclass(frozen=True)
class OptimizerConfig:
    """The rule by which gradients change weights."""

    kind: Literal["sgd", "sgd_keras", "rmsprop", "adam", "adamw", "radam", "lars"] = "sgd"
    """sgd: v = momentum * v + g; w -= lr * v, which is also TensorFlow 1's momentum. sgd_keras: the rate goes into the
    velocity, v = momentum * v - lr * g; w += v, which differs as soon as the rate moves. lars: sgd_keras with a rate
    scaled for each tensor (see eta), but for norms and biases, which also do not decay. adamw shrinks w by itself."""
    lr: float = 0.1
    """Base learning rate, for the global batch of the recipe unless lr_for_batch says otherwise."""
    lr_for_batch: int = 0
    """The global batch that lr is meant for: lr is scaled linearly to the recipe's; 0: lr is taken as it is."""
    lr_many: float = 0.0
    """The base learning rate when more than one rank takes part; 0, and where lr is given alone: the same as lr."""
    trunk_lr_scale: float = 1.0
    """Rate of all layers but the head, as a share of lr: below 1 keeps more of pretrained weights. Not for lars."""
    weight_decay: float = 1e-4
    """Decay of weights."""
    norm_weight_decay: float = AS_OTHERS
    """Decay of norm parameters; -1: the same as weight_decay. lars: they never decay."""
    bias_weight_decay: float = AS_OTHERS
    """Decay of biases outside norms; -1: the same as weight_decay. lars: they never decay."""
    decay_form: Literal["gradient", "keras_l2", "decoupled"] = "gradient"
    """sgd, sgd_keras: gradient adds decay * w to g; keras_l2 adds 2 * decay * w, because Keras' L2(decay) is decay *
    sum(w^2) without a half; decoupled shrinks w by lr * decay before the update."""
    momentum: float = 0.9
    """sgd, sgd_keras, rmsprop, lars: share of the velocity kept."""
    nesterov: bool = False
    """sgd, sgd_keras: look ahead along the velocity, as torch or as Keras does."""
    alpha: float = 0.9
    """rmsprop: share of the mean square kept."""
    beta1: float = 0.9
    """adam, adamw, radam: decay of the mean."""
    beta2: float = 0.999
    """adam, adamw, radam: decay of the square."""
    eta: float = 0.001
    """lars: the rate of a tensor is lr * eta * |w| / (|g| + weight_decay * |w| + eps); lr itself where |w| or |g| is
    0."""
    eps: float = 1e-8
    """rmsprop, adam, adamw, radam: added to the root of the square; torchvision's rmsprop uses 0.0316. lars: see eta;
    Keras uses 1e-7, others 0."""

    def __post_init__(self) -> None:
        refuse_foreign_fields("optimizer", self, FIELDS_OF_KIND)
        # Every test is written so that NaN fails it.
        for name in ("lr", "lr_for_batch", "lr_many", "weight_decay", "eta", "eps"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"optimizer.{name}={getattr(self, name)} must be a finite number, 0 or more")
        for name in ("momentum", "alpha", "beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"optimizer.{name}={getattr(self, name)} must be in [0, 1)")
        if not 0 < self.trunk_lr_scale < math.inf:
            raise UsageError(
                f"optimizer.trunk_lr_scale={self.trunk_lr_scale} must be above 0; to train the head alone use "
                f"--train.trainable head"
            )
        if self.nesterov and not self.momentum:
            raise UsageError("optimizer.nesterov looks ahead along the velocity: give --optimizer.momentum above 0")
        for name in ("norm_weight_decay", "bias_weight_decay"):
            if not (0 <= getattr(self, name) < math.inf or getattr(self, name) == AS_OTHERS):
                raise UsageError(
                    f"optimizer.{name}={getattr(self, name)} must be a finite number, 0 or more; -1 means: as "
                    "weight_decay"
                )

    @property
    def skips_by_itself(self) -> bool:
        """Return whether the optimizer itself skips a step that is not finite."""
        return self.kind in (*FUSED, *OURS)

    def base_lr(self, global_batch: int, ranks: int) -> float:
        """Return the rate that a schedule moves, for this batch and this many ranks."""
        lr = self.lr_many if self.lr_many and ranks > 1 else self.lr
        return lr * global_batch / self.lr_for_batch if self.lr_for_batch else lr

    def groups(self, model: nn.Module) -> Groups:
        """Return (decay, named parameters) per group, by module type: a name like `downsample.1` tells nothing."""
        return [(key.decay, group) for key, group in self._groups(model, ())]

    def _groups(self, model: nn.Module, head: tuple[str, ...]) -> list[tuple[_Key, Named]]:
        """Return the groups; parameters whose names begin with one of `head` have the rate of the schedule."""
        lars = self.kind == "lars"
        norm = self.weight_decay if self.norm_weight_decay == AS_OTHERS else self.norm_weight_decay
        bias = self.weight_decay if self.bias_weight_decay == AS_OTHERS else self.bias_weight_decay
        found: dict[_Key, Named] = {}
        seen: set[nn.Parameter] = set()  # a shared weight belongs to the module that has it first
        for prefix, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter in seen or not parameter.requires_grad:
                    continue
                seen.add(parameter)
                is_norm, whole = isinstance(module, NORMS), f"{prefix}.{name}" if prefix else name
                scale = 1.0 if whole.startswith(head or "") else self.trunk_lr_scale
                if lars and (is_norm or name == "bias"):
                    key = _Key(0.0, False, scale)
                else:
                    key = _Key(norm if is_norm else bias if name == "bias" else self.weight_decay, lars, scale)
                found.setdefault(key, []).append((whole, parameter))
        return sorted(found.items(), key=lambda item: (-item[0].decay, not item[0].trusts, -item[0].scale))

    def _group_options(self, decay: float, trusts: bool) -> dict[str, Any]:
        if self.kind == "lars":
            return {"weight_decay": decay, "trusts": trusts}
        if self.decay_form == "decoupled":
            return {"weight_decay": 0.0, "shrink": decay}
        return {"weight_decay": 2 * decay if self.decay_form == "keras_l2" else decay}

    def build(self, model: nn.Module, device: torch.device, head: tuple[str, ...] = ()) -> torch.optim.Optimizer:
        """Build the optimizer over `groups`; its rate is a tensor on the device, but a number if torch needs it. Names
        of parameters outside the trunk begin with one of `head`; without, there is no trunk."""
        on_device = device.type != "cpu"
        fused = self.kind in FUSED

        def rate() -> Any:
            return torch.tensor(self.lr, device=device) if fused or on_device or self.kind in OURS else self.lr

        _spare_compiler()
        groups: Any = []
        for (decay, trusts, scale), named in self._groups(model, head):
            own: dict[str, Any] = {} if scale == 1 else {SCALE: scale, "lr": rate()}  # the others share one tensor
            groups.append({"params": [p for _, p in named], **self._group_options(decay, trusts), **own})
        lr = rate()
        how: dict[str, Any] = {"fused": True} if fused else {"foreach": True, "capturable": on_device}
        betas = (self.beta1, self.beta2)
        velocity = ["momentum_buffer"] if self.momentum else []
        if self.kind == "sgd":
            form = DecoupledSGD if self.decay_form == "decoupled" else torch.optim.SGD
            return _with_state(form(groups, lr, momentum=self.momentum, nesterov=self.nesterov, **how), *velocity)
        if self.kind == "sgd_keras":
            return _with_state(KerasSGD(groups, lr, self.momentum, self.nesterov), *velocity)
        if self.kind == "lars":
            return _with_state(Lars(groups, lr, self.momentum, self.eta, self.eps), *velocity)
        if self.kind == "rmsprop":
            rms = torch.optim.RMSprop(groups, lr, alpha=self.alpha, eps=self.eps, momentum=self.momentum, **how)
            return _with_state(rms, "square_avg", *velocity, count=True)
        if self.kind == "radam":
            radam = torch.optim.RAdam(groups, lr, betas=betas, eps=self.eps, **how)
            return _with_state(radam, "exp_avg", "exp_avg_sq", count=True)
        kind = torch.optim.Adam if self.kind == "adam" else torch.optim.AdamW
        adam = kind(groups, lr, betas=betas, eps=self.eps, capturable=device.type == "cuda", **how)
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
