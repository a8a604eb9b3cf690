"""OptimizerConfig: the fields of a recipe under `optimizer.`; torch_optimizer.py makes what they describe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from sightline.errors import UsageError
from sightline.recipe.part import Above, AtLeast, Below, Part, foreign_defaults, refuse_foreign_fields

if TYPE_CHECKING:
    import torch
    from torch import nn

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
FUSED = ("sgd", "adam", "adamw")
OURS = ("sgd_keras", "lars")
AS_OTHERS = -1.0  # a decay that means: the same as weight_decay


def said_rate(rate: float, lr: float, lr_for_batch: int) -> str:
    """Return a base rate as people are told it, with the one it was scaled from."""
    return f"{rate:g} ({lr:g} per {lr_for_batch} samples)" if lr_for_batch and lr != rate else f"{rate:g}"


@dataclass(frozen=True)
class OptimizerConfig(Part):
    """The rule by which gradients change weights."""

    kind: Literal["sgd", "sgd_keras", "rmsprop", "adam", "adamw", "radam", "lars"] = "sgd"
    """sgd: v = momentum * v + g; w -= lr * v, which is also TensorFlow 1's momentum. sgd_keras: the rate goes into the
    velocity, v = momentum * v - lr * g; w += v, which differs as soon as the rate moves. lars: sgd_keras with a rate
    scaled for each tensor (see eta), but for norms and biases, which also do not decay. adamw shrinks w by itself."""
    lr: Annotated[float, AtLeast(0)] = 0.1
    """Base learning rate, for the global batch of the recipe unless lr_for_batch says otherwise."""
    lr_for_batch: Annotated[int, AtLeast(0)] = 0
    """The global batch that lr is meant for: lr is scaled linearly to the recipe's; 0: lr is taken as it is."""
    lr_many: Annotated[float, AtLeast(0)] = 0.0
    """The base learning rate when more than one rank takes part; 0, and where lr is given alone: the same as lr."""
    trunk_lr_scale: Annotated[float, Above(0, "to train the head alone use --train.trainable head")] = 1.0
    """Rate of all layers but the head, as a share of lr: below 1 keeps more of pretrained weights. Not for lars."""
    weight_decay: Annotated[float, AtLeast(0)] = 1e-4
    """Decay of weights."""
    norm_weight_decay: float = AS_OTHERS
    """Decay of norm parameters; -1: the same as weight_decay. lars: they never decay."""
    bias_weight_decay: float = AS_OTHERS
    """Decay of biases outside norms; -1: the same as weight_decay. lars: they never decay."""
    decay_form: Literal["gradient", "keras_l2", "decoupled"] = "gradient"
    """sgd, sgd_keras: gradient adds decay * w to g; keras_l2 adds 2 * decay * w, because Keras' L2(decay) is decay *
    sum(w^2) without a half; decoupled shrinks w by lr * decay before the update."""
    momentum: Annotated[float, AtLeast(0), Below(1)] = 0.9
    """sgd, sgd_keras, rmsprop, lars: share of the velocity kept."""
    nesterov: bool = False
    """sgd, sgd_keras: look ahead along the velocity, as torch or as Keras does."""
    alpha: Annotated[float, AtLeast(0), Below(1)] = 0.9
    """rmsprop: share of the mean square kept."""
    beta1: Annotated[float, AtLeast(0), Below(1)] = 0.9
    """adam, adamw, radam: decay of the mean."""
    beta2: Annotated[float, AtLeast(0), Below(1)] = 0.999
    """adam, adamw, radam: decay of the square."""
    eta: Annotated[float, AtLeast(0)] = 0.001
    """lars: the rate of a tensor is lr * eta * |w| / (|g| + weight_decay * |w| + eps); lr itself where |w| or |g| is
    0."""
    eps: Annotated[float, AtLeast(0)] = 1e-8
    """rmsprop, adam, adamw, radam: added to the root of the square; torchvision's rmsprop uses 0.0316. lars: see eta;
    Keras uses 1e-7, others 0."""

    part = "optimizer"

    def check(self) -> None:
        super().check()
        refuse_foreign_fields(self.part, self, FIELDS_OF_KIND)
        if self.nesterov and not self.momentum:
            raise UsageError("optimizer.nesterov looks ahead along the velocity: give --optimizer.momentum above 0")
        for name in ("norm_weight_decay", "bias_weight_decay"):
            if not (getattr(self, name) >= 0 or getattr(self, name) == AS_OTHERS):
                raise UsageError(
                    f"optimizer.{name}={getattr(self, name)} must be a finite number, at least 0; -1 means: as "
                    "weight_decay"
                )

    def implied(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of other kinds to their defaults where a kind is named. An explicit lr disables lr_many."""
        values = foreign_defaults(self, named, FIELDS_OF_KIND)
        if "lr" in named and "lr_many" not in named:
            values["lr_many"] = 0.0
        return values

    @property
    def skips_by_itself(self) -> bool:
        """Return whether the optimizer itself skips a step that is not finite."""
        return self.kind in (*FUSED, *OURS)

    def base_lr(self, global_batch: int, ranks: int) -> float:
        """Return the rate that a schedule moves, for this batch and this many ranks."""
        lr = self.lr_many if self.lr_many and ranks > 1 else self.lr
        return lr * global_batch / self.lr_for_batch if self.lr_for_batch else lr

    def groups(self, model: nn.Module) -> list[tuple[float, list[tuple[str, nn.Parameter]]]]:
        """Return (decay, named parameters) per group."""
        from sightline.train import torch_optimizer

        return [(key.decay, named) for key, named in torch_optimizer.groups(self, model)]

    def build(self, model: nn.Module, device: torch.device, head: tuple[str, ...] = ()) -> torch.optim.Optimizer:
        """Build the optimizer over `groups`; its rate is a tensor on the device, but a number if torch needs it. Names
        of parameters outside the trunk begin with one of `head`; without, there is no trunk."""
        from sightline.train import torch_optimizer

        return torch_optimizer.build(self, model, device, head)
