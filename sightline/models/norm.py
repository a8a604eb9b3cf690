"""Batch norm over several ranks: in training, statistics are taken over the batches of a whole group of ranks.

Unlike torch.nn.SyncBatchNorm it works on any device and backend, including the CPU with gloo. Imports only torch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

ALL_RANKS = -1


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm with the statistics of all ranks of `group`, weighted by their numbers of values; see `convert`.

    With one rank, and in evaluation, results equal those of the original batch norm bit for bit.
    """

    group: Any = None  # on the class, not the instance: copying the model must not copy connections

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.group is None:
            return super().forward(input)
        self._check_input_dim(input)
        return normalise_over(self.group, self, input)


def convert(model: nn.Module, group_size: int) -> int:
    """Make every nn.BatchNorm of `model` share statistics within groups of consecutive ranks; return their number.

    `group_size` 0 or 1: no sharing; N: ranks 0..N-1, N..2N-1 and so on; -1: all ranks. Modules keep their identity,
    names, parameters and buffers. Call this on every rank.
    """
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    size = ranks if group_size == ALL_RANKS else group_size
    if size < 0 or (size > 1 and ranks % size):
        raise ValueError(f"{ranks} ranks cannot be split into groups of {group_size}; use a divisor, or -1 for all")
    layers = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)]
    assert not any(isinstance(layer, SyncBatchNorm) for layer in layers), "a model is converted once"
    if size < 2 or not layers:
        return 0
    # Separate connections: these small sums do not wait behind the gradient all-reduce.
    groups = [dist.new_group(list(range(start, start + size))) for start in range(0, ranks, size)]
    group = groups[dist.get_rank() // size]
    made: dict[type[nn.Module], type[nn.Module]] = {}
    for layer in layers:
        kind: type[nn.Module] = type(layer)
        if kind not in made:
            # Keep the class name: code that selects layers by type name, e.g. to keep them in fp32, still finds them.
            made[kind] = type(kind.__name__, (SyncBatchNorm, kind), {"group": group, "__module__": kind.__module__})
        layer.__class__ = made[kind]  # type: ignore[assignment]
    return len(layers)


def normalise_over(group: Any, layer: nn.modules.batchnorm._BatchNorm, x: Tensor) -> Tensor:
    """Apply `layer` to `x` in training mode with the statistics of all ranks of `group`; update its running ones."""
    mean, var, count = _group_statistics(x.detach(), group)
    if layer.track_running_stats:
        _update_running(layer, mean, var * (count / (count - 1).clamp(min=1)))
    return _Normalise.apply(x, layer.weight, layer.bias, mean, (var + layer.eps).rsqrt(), count, group)


@torch.no_grad()
def _update_running(layer: nn.modules.batchnorm._BatchNorm, mean: Tensor, var: Tensor) -> None:
    assert layer.running_mean is not None and layer.running_var is not None and layer.num_batches_tracked is not None
    layer.num_batches_tracked.add_(1)
    # As in nn.BatchNorm: momentum None means the plain average over all batches so far.
    share = 1 / layer.num_batches_tracked.to(mean.dtype) if layer.momentum is None else layer.momentum
    for running, new in ((layer.running_mean, mean), (layer.running_var, var)):
        running.copy_(running * (1 - share) + new * share)


def _group_statistics(x: Tensor, group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, biased variance and count of values per channel over all ranks; exchanges 2 C + 1 numbers once."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    axes = _all_but_channels(x)
    var, mean = torch.var_mean(x, axes, correction=0)
    count = x.numel() // max(1, x.shape[1])
    if not count:  # a rank without samples takes part with weight 0
        var, mean = torch.zeros_like(var), torch.zeros_like(mean)
    mine = torch.cat([mean, var, mean.new_full((1,), count)])
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, mine, group=group)
    means, variances, counts = torch.stack(rows).split([x.shape[1], x.shape[1], 1], dim=1)
    total = counts.sum().clamp(min=1)
    # Combine means and variances: a difference of sums of squares loses all digits if the mean is large.
    mean = (counts * means).sum(0) / total
    var = (counts * (variances + (means - mean) ** 2)).sum(0) / total
    return mean, var, total


class _Normalise(torch.autograd.Function):
    """(x - mean) * inverse * weight + bias, where mean and inverse depend on the x of every rank of the group."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        inverse: Tensor,
        count: Tensor,
        group: Any,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, inverse, count)
        ctx.group = group
        y = (x - _along(mean, x)) * _along(inverse if weight is None else inverse * weight, x)
        y = y if bias is None else y + _along(bias, x)
        # A cast to the same dtype would cut off the gradient under torch.compile in torch 2.11.
        return y if y.dtype == x.dtype else y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse, count = ctx.saved_tensors
        gradient = gradients[0].to(mean.dtype)
        axes = _all_but_channels(x)
        standard = (x - _along(mean, x)) * _along(inverse, x)
        of_bias, of_weight = gradient.sum(axes), (gradient * standard).sum(axes)
        of_x = None
        if ctx.needs_input_grad[0]:
            # This rank's values also changed the mean and variance of the other ranks.
            sums = torch.cat([of_bias, of_weight])
            dist.all_reduce(sums, group=ctx.group)
            mean_bias, mean_weight = (sums / count).chunk(2)
            centred = gradient - _along(mean_bias, x) - standard * _along(mean_weight, x)
            of_x = (centred * _along(inverse if weight is None else inverse * weight, x)).to(x.dtype)
        # Gradients of weight and bias are this rank's own: the gradient all-reduce averages them like all others.
        wanted = ctx.needs_input_grad
        return of_x, of_weight if wanted[1] else None, of_bias if wanted[2] else None, None, None, None, None


def _all_but_channels(x: Tensor) -> list[int]:
    return [axis for axis in range(x.dim()) if axis != 1]


def _along(row: Tensor, x: Tensor) -> Tensor:
    """Reshape one number per channel to broadcast with `x`."""
    return row.view(1, -1, *(1,) * (x.dim() - 2))
