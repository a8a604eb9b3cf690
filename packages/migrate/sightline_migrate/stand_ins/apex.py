"""The stand-in for apex: its modules, its layers, and data parallelism built on torch's own.

Mixed precision is in apex_amp.py, the optimizers are in apex_optimizers.py.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from sightline_migrate import zones
from sightline_migrate.reporting import record
from sightline_migrate.rules.table import Rule
from sightline_migrate.stand_ins import apex_amp as amp
from sightline_migrate.stand_ins import apex_optimizers as optimizers
from sightline_migrate.stand_ins.rules import counted_rules

ADVICE = "install apex, or use torch's own functions"
_KERNELS = "it is a CUDA kernel of apex; scripts that guard its import continue without it"
REFUSED = {
    f"apex.{part}": _KERNELS for part in ("contrib", "transformer", "mlp", "fused_dense", "RNN", "reparameterization")
}
REFUSED["apex.fp16_utils"] = "use torch.autocast and torch.amp.GradScaler"


_NORMALIZATION = counted_rules(
    "apex.normalization", dict.fromkeys(("FusedLayerNorm", "FusedRMSNorm"), "torch's own, same result")
)
_PARALLEL = counted_rules(
    "apex.parallel",
    {
        "DistributedDataParallel": "torch's own",
        "Reducer": "averages with torch.distributed",
        "SyncBatchNorm": "torch's own, with the target's collectives",
        "convert_syncbn_model": "torch's own, with the target's collectives",
    },
)
_APPLY = counted_rules("apex.multi_tensor_apply", {"multi_tensor_applier": _KERNELS}, "refused")


def rules() -> list[Rule]:
    return [
        rule for found in (amp.RULES, optimizers.RULES, _NORMALIZATION, _PARALLEL, _APPLY) for rule in found.values()
    ]


# apex.normalization


class _Norm:
    """apex's signature over torch's layers; memory_efficient changes no result."""

    __module__ = "apex.normalization.fused_layer_norm"

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        rule = next(_NORMALIZATION[kind.__name__] for kind in type(self).__mro__ if kind.__name__ in _NORMALIZATION)
        record.hit(rule, (normalized_shape,))
        super().__init__(normalized_shape, eps, elementwise_affine)  # type: ignore[call-arg]


class FusedLayerNorm(_Norm, nn.LayerNorm):
    """torch's own LayerNorm: same names, same result."""


class FusedRMSNorm(_Norm, nn.RMSNorm):
    """torch's own RMSNorm with apex's default eps."""


class _Mixed:
    """Layers that always have weights and return the weight's dtype for any input dtype."""

    def __init__(self, normalized_shape: Any, eps: float = 1e-5, **kwargs: Any) -> None:
        if not kwargs.get("elementwise_affine", True):
            name = type(self).__name__
            raise RuntimeError(f"{name} always has weights, as in apex; without them use {name.removeprefix('Mixed')}")
        super().__init__(normalized_shape, eps, **kwargs)  # type: ignore[call-arg]


class MixedFusedLayerNorm(_Mixed, FusedLayerNorm):
    """LayerNorm that returns the weight's dtype."""

    def forward(self, input: Tensor) -> Tensor:
        return mixed_dtype_fused_layer_norm_affine(input, self.weight, self.bias, self.normalized_shape, self.eps)


class MixedFusedRMSNorm(_Mixed, FusedRMSNorm):
    """RMSNorm that returns the weight's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return mixed_dtype_fused_rms_norm_affine(x, self.weight, self.normalized_shape, self.eps or 0.0)


for _kind in (FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm):
    _kind.__module__ = _Norm.__module__


def _shape(normalized_shape: Any) -> tuple[int, ...]:
    return (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)


def fused_layer_norm(input: Tensor, normalized_shape: Any, eps: float = 1e-6, memory_efficient: bool = False) -> Tensor:
    return functional.layer_norm(input, _shape(normalized_shape), None, None, eps)


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Any,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    return functional.layer_norm(input, _shape(normalized_shape), weight, bias, eps)


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Any,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    wide = torch.float32
    done = functional.layer_norm(input.to(wide), _shape(normalized_shape), weight.to(wide), bias.to(wide), eps)
    return done.to(weight.dtype)


def fused_rms_norm(input: Tensor, normalized_shape: Any, eps: float = 1e-6, memory_efficient: bool = False) -> Tensor:
    return functional.rms_norm(input, _shape(normalized_shape), None, eps)


def fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Any, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    return functional.rms_norm(input, _shape(normalized_shape), weight, eps)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Any, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    wide = torch.float32
    return functional.rms_norm(input.to(wide), _shape(normalized_shape), weight.to(wide), eps).to(weight.dtype)


# apex.parallel


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """torch's own with apex's signature; torch decides about buckets, streams and when to divide.

    So these change no result: message_size, allreduce_trigger_params, num_allreduce_streams, allreduce_communicators,
    gradient_predivide_factor and prof. There is no attribute allreduce_buffers to read.
    """

    __module__ = "apex.parallel.distributed"

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10_000_000,
        delay_allreduce: bool = False,
        shared_param: Any = None,
        allreduce_trigger_params: Any = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Any = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: Any = None,
        prof: bool = False,
    ) -> None:
        record.hit(_PARALLEL["DistributedDataParallel"], (module,))
        # With delay_allreduce apex waits for the end of backward, so that parameters may be unused.
        super().__init__(module, find_unused_parameters=delay_allreduce)
        if allreduce_always_fp32 or not gradient_average:
            self.register_comm_hook((gradient_average, allreduce_always_fp32), _reduced)


def _reduced(state: tuple[bool, bool], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Return the sum or, if the first of `state` is True, the average over ranks; the second asks for sums in fp32."""
    is_average, is_wide = state
    gradients = bucket.buffer()
    sent = gradients.float() if is_wide else gradients
    work = dist.all_reduce(sent / dist.get_world_size() if is_average else sent, async_op=True)
    assert work is not None
    future: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0].to(gradients.dtype))
    return future


_reduced.__annotations__ = {}  # DistributedDataParallel expects classes here, not strings


class SyncBatchNorm(nn.SyncBatchNorm):
    """torch's own, which works on the target, plus apex's channel_last and fuse_relu."""

    __module__ = "apex.parallel.optimized_sync_batchnorm"

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        record.hit(_PARALLEL["SyncBatchNorm"], (num_features,))
        super().__init__(num_features, eps, momentum, affine, track_running_stats, process_group)
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        done = super().forward(input.movedim(-1, 1) if self.channel_last else input)
        done = done.movedim(1, -1) if self.channel_last else done
        done = done if z is None else done + z
        return done.relu() if self.fuse_relu else done


def convert_syncbn_model(module: nn.Module, process_group: Any = None, channel_last: bool = False) -> nn.Module:
    """Convert every BatchNorm to SyncBatchNorm, with its weights and statistics."""
    record.hit(_PARALLEL["convert_syncbn_model"], (module,))
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group)
    if channel_last:
        layers: list[Any] = [each for each in converted.modules() if isinstance(each, nn.SyncBatchNorm)]
        for layer in layers:
            layer.__class__ = SyncBatchNorm
            layer.channel_last, layer.fuse_relu = True, False
    return converted


def create_syncbn_process_group(group_size: int) -> Any:
    """Return this rank's group of `group_size` consecutive ranks; 0 means all ranks, returned as None."""
    if group_size == 0:
        return None
    ranks = dist.get_world_size()
    if ranks < group_size or ranks % group_size:
        raise ValueError(f"{ranks} ranks cannot be split into groups of {group_size}; use a divisor, or 0 for all")
    groups = [dist.new_group(list(range(start, start + group_size))) for start in range(0, ranks, group_size)]
    return groups[dist.get_rank() // group_size]


class Reducer:
    """Broadcasts parameters at the start; reduce() averages gradients when the script calls it."""

    __module__ = "apex.parallel.distributed"

    def __init__(self, module_or_grads_list: Any) -> None:
        record.hit(_PARALLEL["Reducer"])
        self.module = module_or_grads_list if isinstance(module_or_grads_list, nn.Module) else None
        self.grads = [] if self.module is not None else list(module_or_grads_list)
        if self.module is not None:
            for parameter in self.module.parameters():
                dist.broadcast(parameter.detach(), 0)

    def reduce(self) -> None:
        grads = self.grads
        if self.module is not None:
            grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        for grad in grads:
            dist.all_reduce(grad)
            grad.div_(dist.get_world_size())


# apex.multi_tensor_apply


class MultiTensorApply:
    """Runs apex's CUDA kernels over lists of tensors; `available` is False, since there are none."""

    __module__ = "apex.multi_tensor_apply"

    available = False
    warned = True

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(self, op: Any, *args: Any) -> NoReturn:
        record.hit(_APPLY["multi_tensor_applier"])
        site = zones.user_site(zones.caller())
        raise RuntimeError(
            f"{site}: apex.multi_tensor_apply runs CUDA kernels of apex, which are missing; use torch._foreach_* "
            "functions, or check multi_tensor_applier.available first"
        )


# the table

_LAYERS: dict[str, Any] = {
    each.__name__: each
    for each in (
        FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm, fused_layer_norm, fused_layer_norm_affine,
        mixed_dtype_fused_layer_norm_affine, fused_rms_norm, fused_rms_norm_affine, mixed_dtype_fused_rms_norm_affine,
    )
}  # fmt: skip
MODULES: dict[str, dict[str, Any]] = {
    "apex": {},
    "apex.amp": amp.CONTENTS,
    "apex.normalization": {name: value for name, value in _LAYERS.items() if name[0].isupper()},
    "apex.normalization.fused_layer_norm": _LAYERS,
    "apex.optimizers": optimizers.CONTENTS,
    "apex.parallel": {
        "DistributedDataParallel": DistributedDataParallel,
        "LARC": optimizers.LARC,
        "Reducer": Reducer,
        "SyncBatchNorm": SyncBatchNorm,
        "convert_syncbn_model": convert_syncbn_model,
        "create_syncbn_process_group": create_syncbn_process_group,
    },
    "apex.parallel.LARC": {"LARC": optimizers.LARC},
    "apex.parallel.distributed": {"DistributedDataParallel": DistributedDataParallel, "Reducer": Reducer},
    "apex.parallel.optimized_sync_batchnorm": {"SyncBatchNorm": SyncBatchNorm},
    "apex.multi_tensor_apply": {"MultiTensorApply": MultiTensorApply, "multi_tensor_applier": MultiTensorApply(65536)},
}
