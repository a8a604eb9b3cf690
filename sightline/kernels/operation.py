"""Functions as operations of torch: a compiler neither traces into them nor changes the layout of their inputs.

torch.library.custom_op makes the same, but the first call of each imports torch's compiler, which takes 1.3 s and more
of the first step of a run that compiles nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

NAMESPACE = "sightline"


def operation(
    name: str, mutates_args: Iterable[str] = (), tags: Sequence[torch.Tag] = ()
) -> Callable[[Callable[..., object]], Any]:
    """Return a decorator that registers a function on tensors of any device; its annotations say what it takes."""

    def register(function: Callable[..., object]) -> Any:
        qualified = f"{NAMESPACE}::{name}"
        torch.library.define(qualified, torch.library.infer_schema(function, mutates_args=mutates_args), tags=tags)
        torch.library.impl(qualified, "default", function)
        return getattr(getattr(torch.ops, NAMESPACE), name).default

    return register


def refuse_gradient(operation: Any) -> None:
    """Let autograd refuse to go through an operation, as those without a formula would only warn."""

    def refuse(context: Any, *gradients: object) -> None:
        raise RuntimeError(f"{operation} has no gradient: a step computes first derivatives only")

    torch.library.register_autograd(operation, refuse)
