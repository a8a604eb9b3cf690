"""Parts of a loss that are computed again for the gradient, so that nothing but their input is kept until then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sightline.kernels.gradients import gradients


def recomputed(function: Callable[..., Any], x: Tensor, *others: Any) -> Any:
    """Return `function(x, *others)`, whose gradient goes to x alone.

    A compiler sees torch's checkpoint, which it knows. Elsewhere that would import the compiler, 1 to 4 s of a first
    step, so the same operations are called here, in the same order.
    """
    if torch.compiler.is_compiling():
        return checkpoint(function, x, *others, use_reentrant=False, preserve_rng_state=False)
    return _Recomputed.apply(lambda x: function(x, *others), x)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor], Any], x: Tensor) -> Any:
        ctx.function = function
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *given: Tensor) -> tuple[None, Tensor]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            outputs = ctx.function(x)
        (of_x,) = gradients(outputs if isinstance(outputs, tuple) else (outputs,), (x,), given)
        return None, of_x
