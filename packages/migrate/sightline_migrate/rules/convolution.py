"""Avoid a bug of oneDNN in strided 1x1 convolutions on the CPU: see onednn.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.overrides import handle_torch_function

from sightline_migrate import onednn
from sightline_migrate.reporting import record
from sightline_migrate.rules.makers import is_overridden
from sightline_migrate.rules.table import Rule, dressed

if TYPE_CHECKING:
    from sightline_migrate.session import Session

DROPPED = f"pixels skipped by the stride are dropped first: oneDNN issue {onednn.ISSUE.rpartition('/')[2]}"


def rules() -> list[Rule]:
    names = ("torch.nn.functional.conv2d", "torch.conv2d")  # one function with two names
    return [Rule(name, "adapted", dressed(_make_conv2d), DROPPED, targets=("cpu",)) for name in names]


def _make_conv2d(rule: Rule, original: Any, session: Session) -> Any:
    """Wrap conv2d, which nn.Conv2d also calls. With a stride of 1 it costs one comparison."""

    def conv2d(
        input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: Any = 1
    ) -> Any:
        if stride != (1, 1) and stride != 1 and _is_eager(input):
            steps, around = _pair(stride), padding if isinstance(padding, str) else _pair(padding)
            if onednn.is_affected(input, weight, steps, around, groups):
                if not is_dynamo_compiling():
                    record.hit(rule, (input, weight, bias, stride))
                input, stride = onednn.subsampled(input, steps), 1
        given = input, weight, bias, stride, padding, dilation, groups
        if not is_dynamo_compiling() and is_overridden(given[:3]):
            return handle_torch_function(conv2d, given[:3], *given)
        return original(*given)

    return conv2d


def _is_eager(input: Any) -> bool:
    """Return True if sizes are known; a traced program (fx, torch.jit, ONNX) keeps its stride."""
    return isinstance(input, Tensor) and (is_dynamo_compiling() or not torch.jit.is_tracing())


def _pair(value: Any) -> tuple[int, int]:
    """Return a pair; a single number applies to both dimensions."""
    numbers = (value,) if isinstance(value, int) else tuple(value)
    return (numbers[0], numbers[-1])
