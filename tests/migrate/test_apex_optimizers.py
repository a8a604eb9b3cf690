"""The optimizers of the stand-in for apex against NumPy and torch: five steps over two layers of different size."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn


@pytest.fixture
def apex(on_cpu: Callable[..., Any]) -> Any:
    """On a CPU where float16 is kept."""
    on_cpu(amp="keep")
    return importlib.import_module("apex")


STEPS = 5
rng = np.random.default_rng(0)
START = [rng.normal(size=(3, 4)), np.zeros(4), rng.normal(size=7) * 5]
GRADIENTS = [[rng.normal(size=each.shape) * 3 for each in START] for _ in range(STEPS)]


def stepped(optimizer_of: Callable[..., Any], **options: Any) -> list[np.ndarray]:
    parameters = [nn.Parameter(torch.tensor(each, dtype=torch.float32)) for each in START]
    optimizer = optimizer_of(parameters, **options)
    for gradients in GRADIENTS:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = torch.tensor(gradient, dtype=torch.float32)
        optimizer.step()
    return [parameter.detach().numpy() for parameter in parameters]


def expect_close(got: list[np.ndarray], want: list[np.ndarray]) -> None:
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


def numpy_lamb(
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    bias_correction: bool = True,
    adam_w_mode: bool = True,
    grad_averaging: bool = True,
    max_grad_norm: float = 1.0,
    use_nvlamb: bool = False,
) -> list[np.ndarray]:
    """NVIDIA's LAMB in float64."""
    weights = [each.copy() for each in START]
    first, second = [0.0] * len(weights), [0.0] * len(weights)
    for t, gradients in enumerate(GRADIENTS, 1):
        norm = math.sqrt(sum((g**2).sum() for g in gradients))
        c1, c2 = (1 - betas[0] ** t, 1 - betas[1] ** t) if bias_correction else (1, 1)
        for i, w in enumerate(weights):
            g = gradients[i] / max(1, norm / max_grad_norm) + (0 if adam_w_mode else weight_decay * w)
            first[i] = betas[0] * first[i] + (1 - betas[0] if grad_averaging else 1) * g
            second[i] = betas[1] * second[i] + (1 - betas[1]) * g**2
            update = (first[i] / c1) / (np.sqrt(second[i] / c2) + eps) + (weight_decay * w if adam_w_mode else 0)
            sizes = np.linalg.norm(w), np.linalg.norm(update)
            ratio = sizes[0] / sizes[1] if (use_nvlamb or weight_decay) and all(sizes) else 1
            weights[i] = w - lr * ratio * update
    return weights


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 0.1, "weight_decay": 0.0},
        {"lr": 0.1, "weight_decay": 0.0, "use_nvlamb": True},
        {"lr": 0.1, "adam_w_mode": False, "weight_decay": 0.1},
        {"lr": 0.1, "bias_correction": False, "grad_averaging": False},
        {"lr": 0.1, "max_grad_norm": 1e9, "betas": (0.8, 0.9), "eps": 1e-3},
    ],
)
def test_lamb(apex: Any, options: dict[str, Any]):
    expect_close(stepped(apex.optimizers.FusedLAMB, **options), numpy_lamb(**options))


def numpy_novograd(
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    reg_inside_moment: bool = False,
    norm_type: int = 2,
    init_zero: bool = False,
) -> list[np.ndarray]:
    weights = [each.copy() for each in START]
    first: list[Any] = [0.0] * len(weights)
    size: list[Any] = [0.0 if init_zero else None] * len(weights)
    for t, gradients in enumerate(GRADIENTS, 1):
        for i, (w, g) in enumerate(zip(weights, gradients, strict=True)):
            now = np.abs(g).max() if norm_type == 0 else np.linalg.norm(g)
            before = now if size[i] is None else size[i]
            blend = betas[1] * before + (1 - betas[1]) * now
            size[i] = blend if norm_type == 0 else math.sqrt(betas[1] * before**2 + (1 - betas[1]) * now**2)
            bound = size[i] / math.sqrt(1 - betas[1] ** t) + eps
            inside = g / bound + weight_decay * w if reg_inside_moment else g
            first[i] = betas[0] * first[i] + (1 - betas[0]) * inside
            mean = first[i] / (1 - betas[0] ** t)
            weights[i] = w - lr * (mean if reg_inside_moment else mean / bound + weight_decay * w)
    return weights


@pytest.mark.parametrize(
    "options",
    [
        {"lr": 0.1, "weight_decay": 0.1},
        {"lr": 0.1, "weight_decay": 0.1, "reg_inside_moment": True, "betas": (0.95, 0.5)},
        {"lr": 0.1, "norm_type": 0, "betas": (0.9, 0.5)},
        {"lr": 0.1, "init_zero": True},
    ],
)
def test_novograd(apex: Any, options: dict[str, Any]):
    expect_close(stepped(apex.optimizers.FusedNovoGrad, **options), numpy_novograd(**options))


@pytest.mark.parametrize(
    ("name", "options", "of_torch"),
    [
        ("FusedAdam", {"weight_decay": 0.1}, lambda p: torch.optim.AdamW(p, weight_decay=0.1)),
        (
            "FusedAdam",
            {"weight_decay": 0.1, "adam_w_mode": False},
            lambda p: torch.optim.Adam(p, weight_decay=0.1),
        ),
        ("FusedAdagrad", {"weight_decay": 0.1}, lambda p: torch.optim.Adagrad(p, weight_decay=0.1)),
        ("FusedAdagrad", {"eps": 0.5}, lambda p: torch.optim.Adagrad(p, eps=0.5)),
        ("FusedAdam", {"eps": 0.5}, lambda p: torch.optim.AdamW(p, eps=0.5, weight_decay=0)),
        (
            "FusedSGD",
            {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
        ),
        (
            "FusedSGD",
            {"lr": 0.1, "momentum": 0.9, "dampening": 0.5},
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
        ),
        ("FusedSGD", {"lr": 0.1}, lambda p: torch.optim.SGD(p, lr=0.1)),
    ],
)
def test_optimizers_torch_has_too(apex: Any, name: str, options: dict[str, Any], of_torch: Callable[..., Any]):
    expect_close(stepped(getattr(apex.optimizers, name), **options), stepped(of_torch))


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_master_weights(apex: Any, dtype: torch.dtype, decoupled: bool):
    """Against torch's optimizer of fp32 weights: steps below the resolution of 16 bits add up."""
    options = {"lr": 1e-5, "weight_decay": 0.1}
    given = {"adam_w_mode": decoupled, "capturable": True, "master_weights": True}

    def left(of_group: Callable[..., Any], dtype: torch.dtype, steps: int = 100) -> torch.Tensor:
        weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0, 0.5]).to(dtype))
        optimizer = of_group([weight], **options)
        for step in range(steps):
            weight.grad = torch.tensor([1.0, -1.0, 0.5 + step, 2.0]).to(dtype)
            optimizer.step()
        return weight.detach()

    got = left(lambda p, **o: apex.optimizers.FusedAdam(p, **o, **given), dtype)
    want = left(torch.optim.AdamW if decoupled else torch.optim.Adam, torch.float32)
    assert got.dtype is dtype and torch.equal(got, want.to(dtype))
    unmoved = left(lambda p, **o: apex.optimizers.FusedAdam(p, **o, adam_w_mode=decoupled), dtype)
    assert torch.equal(unmoved, torch.tensor([1.0, -2.0, 3.0, 0.5]).to(dtype)) and not torch.equal(got, unmoved)


def test_decay_after_momentum(apex: Any):
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "wd_after_momentum": True}
    weights, buffers = [each.copy() for each in START], [np.zeros_like(each) for each in START]
    for gradients in GRADIENTS:
        for i, g in enumerate(gradients):
            buffers[i] = 0.9 * buffers[i] + g
            weights[i] = weights[i] - 0.1 * (buffers[i] + 0.1 * weights[i])
    expect_close(stepped(apex.optimizers.FusedSGD, **options), weights)


@pytest.mark.parametrize("clip", [True, False])
def test_larc(apex: Any, clip: bool):
    lr, decay, trust, eps = 0.1, 0.1, 0.02, 1e-8
    weights = [each.copy() for each in START]
    for gradients in GRADIENTS:
        for i, g in enumerate(gradients):
            size, slope = np.linalg.norm(weights[i]), np.linalg.norm(g)
            if size and slope:
                rate = trust * size / (slope + decay * size + eps)
                g = (g + decay * weights[i]) * (min(rate / lr, 1) if clip else rate)
            weights[i] = weights[i] - lr * g
    sgd = torch.optim.SGD
    got = stepped(lambda p: apex.parallel.LARC(sgd(p, lr=lr, weight_decay=decay), trust, clip=clip))
    expect_close(got, weights)
