"""Batch norm over the ranks of a group, on any device and backend: a copy of what sightline/models/norm.py has for it.

Copied because this package needs torch alone; a test holds both equal.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


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
