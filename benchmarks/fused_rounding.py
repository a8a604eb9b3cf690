"""Rounding of fused bottlenecks: the reference of their kernels and plain fp16, both beside float64, on hard numbers.

    python benchmarks/fused_rounding.py --seeds 3

On the CPU. `block` rows: relative errors of a block's output, its input's gradient and its running means, where the
first convolution's channels have the given mean in deviations, all weights or inner gammas are scaled, the last gamma
is 0, or the gradient is scaled. `channel` rows: the variance of many fp16 numbers, in two passes and from sums.
`network` rows: the error of all gradients of five blocks with fixed weights, for one batch and for the mean over
batches, where a bias would not shrink with their number; and how often gradients overflow.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from sightline.hardware import devices
from sightline.measure.provenance import provenance, result_file
from sightline.models.resnet import Bottleneck, ResNetConfig

Change = Callable[[Bottleneck, Tensor], None]
BATCHES = 48
ROWS, PROGRAMS, TILE = 802_816, 264, 16  # of 256 channels of 256 images of 56 x 56 pixels, as the kernels add them up
POWERS, NETWORKS = (6.2, 6.4, 6.5, 6.6, 6.8), 13


def make_block(channels: int, width: int, stride: int, project: bool) -> Bottleneck:
    """Return a block with random norms and with weights that fp16 holds."""
    block = Bottleneck(ResNetConfig(), channels, width, stride, project)
    with torch.no_grad():
        for conv, norm in zip(*block.layers(), strict=True):
            conv.weight.copy_(conv.weight.half())
            norm.weight.uniform_(0.5, 1.5)
            norm.bias.normal_(0, 0.3)
    return block.to(memory_format=torch.channels_last).train()


def draw(*shape: int) -> Tensor:
    return torch.randn(shape).half().contiguous(memory_format=torch.channels_last)


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def with_mean(deviations: float) -> Change:
    """Give the outputs of the first convolution a mean, by an input channel of ones."""

    def change(block: Bottleneck, x: Tensor) -> None:
        x[:, 0], weight = 1.0, block.conv1.weight
        weight[:, 0] = 0.0
        y = block.conv1(x.float())
        sign = torch.randint(2, (len(weight),)) * 2 - 1
        weight[:, 0, 0, 0] = ((deviations * y.std((0, 2, 3)) - y.mean((0, 2, 3))) * sign).half()

    return change


def with_weights(factor: float) -> Change:
    def change(block: Bottleneck, x: Tensor) -> None:
        for conv in block.layers()[0]:
            conv.weight.copy_((conv.weight * factor).half())

    return change


def with_gammas(factor: float, *numbers: int) -> Change:
    def change(block: Bottleneck, x: Tensor) -> None:
        for number in numbers:
            block.layers()[1][number].weight.mul_(factor)

    return change


def run(model: nn.Module, x: Tensor, outer: Tensor, scale: float) -> list[Tensor]:
    """Return the output, the gradient of x and those of parameters, for a gradient that was scaled."""
    leaf = x.detach().clone().requires_grad_()
    with torch.autocast("cpu", torch.float16, enabled=x.dtype == torch.float16):
        y = model(leaf)
    found = torch.autograd.grad(y, [leaf, *model.parameters()], (outer * scale).to(y.dtype))
    return [y.detach(), *(grad.double() / scale for grad in found)]


def models_of(plain: nn.Module) -> dict[str, nn.Module]:
    """Return the network in float64, as it is, and with fused blocks."""
    models = {"exact": copy.deepcopy(plain).double(), "plain": plain, "fused": copy.deepcopy(plain)}
    for module in models["fused"].modules():
        if isinstance(module, Bottleneck):
            module.is_fused = True
    return models


def measure_block(change: Change, scale: float) -> dict[str, dict[str, float]]:
    block, x = make_block(64, 16, 1, True), draw(16, 64, 12, 12).relu_()
    with torch.no_grad():
        change(block, x)
    models, outer = models_of(block), draw(16, 64, 12, 12)
    found = {name: run(model, x.double() if name == "exact" else x, outer, scale) for name, model in models.items()}
    means = {
        name: torch.cat([buffer for key, buffer in model.named_buffers() if key.endswith("running_mean")])
        for name, model in models.items()
    }
    return {
        name: {
            "output": error(found[name][0], found["exact"][0]),
            "input": error(found[name][1], found["exact"][1]),
            "running means": error(means[name], means["exact"].double()),
        }
        for name in ("plain", "fused")
    }


def measure_network() -> dict[str, dict[str, float]]:
    shapes = ((64, 16, 1, True), (64, 16, 1, False), (64, 32, 2, True), (128, 32, 1, False), (128, 32, 1, False))
    models = models_of(nn.Sequential(*(make_block(*shape) for shape in shapes)))
    errors: dict[str, list[Tensor]] = {"plain": [], "fused": []}
    lengths = []
    for _ in range(BATCHES):
        x, outer = draw(16, 64, 10, 10).relu_(), draw(16, 128, 5, 5)
        grads = {
            name: torch.cat(
                [grad.flatten() for grad in run(model, x.double() if name == "exact" else x, outer, 1.0)[2:]]
            )
            for name, model in models.items()
        }
        lengths.append(float(grads["exact"].norm()))
        for name, kept in errors.items():
            kept.append(grads[name] - grads["exact"])
    length = statistics.mean(lengths)
    return {
        name: {
            "one batch": statistics.mean(float(each.norm()) for each in kept) / length,
            f"mean of {BATCHES}": float(torch.stack(kept).mean(0).norm()) / length,
        }
        for name, kept in errors.items()
    }


def measure_variance(deviations: float) -> dict[str, dict[str, float]]:
    """Return errors of a channel's variance: in two passes, and from sums in the order of the kernels."""
    values = (torch.randn(ROWS) + deviations).half()
    exact = values.double().var(correction=0)
    tiles = torch.nn.functional.pad(values.float(), (0, -ROWS % (PROGRAMS * TILE))).view(PROGRAMS, -1, TILE)
    sums = torch.zeros(2, PROGRAMS, TILE)
    for tile in tiles.unbind(1):
        sums += torch.stack([tile, tile * tile])
    mean, squares = sums.sum(2).sum(1) / ROWS
    found = {"plain": values.float().var(correction=0), "fused": squares - mean * mean}
    return {name: {"variance": abs(float(each / exact) - 1)} for name, each in found.items()}


def measure_overflow() -> dict[str, dict[str, float]]:
    """Return the share of networks with a gradient that is not finite, over scales where some have one."""
    counts = {"plain": 0.0, "fused": 0.0}
    for power in POWERS:
        for _ in range(NETWORKS):
            models = models_of(nn.Sequential(make_block(64, 16, 1, True), make_block(64, 16, 1, False)))
            x, outer = draw(8, 64, 8, 8).relu_(), draw(8, 64, 8, 8)
            for name in counts:
                found = run(models[name], x, outer, 2.0**power)
                counts[name] += not all(bool(each.isfinite().all()) for each in found)
    return {name: {"overflow": count / (NETWORKS * len(POWERS))} for name, count in counts.items()}


def cases() -> dict[str, Callable[[], dict[str, dict[str, float]]]]:
    changes: dict[str, tuple[Change, float]] = {"block": (with_weights(1), 1.0)}
    changes |= {f"block, mean of {ratio} deviations": (with_mean(ratio), 1.0) for ratio in (3, 10, 30, 100)}
    changes |= {f"block, weights x {factor:g}": (with_weights(factor), 1.0) for factor in (1e-3, 300.0)}
    changes |= {f"block, inner gammas x {factor:g}": (with_gammas(factor, 0, 1), 1.0) for factor in (1e-2, 1e-4)}
    changes["block, last gamma 0"] = (with_gammas(0.0, 2), 1.0)
    changes |= {f"block, gradient x 2^{power}": (with_weights(1), 2.0**power) for power in (-20, 6)}
    blocks = {name: partial(measure_block, *given) for name, given in changes.items()}
    sums = {f"channel, mean of {ratio} deviations": partial(measure_variance, ratio) for ratio in (3, 10, 30, 100)}
    return {**blocks, **sums, "network, all gradients": measure_network, "networks": measure_overflow}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="networks and inputs per row")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    device, now = devices.select("cpu"), datetime.now(UTC)
    rows = []
    for name, measure in cases().items():
        repeats = []
        for seed in range(arguments.seeds):
            torch.manual_seed(seed)
            repeats.append(measure())
        for what in repeats[0]["plain"]:
            values = {kind: [each[kind][what] for each in repeats] for kind in ("plain", "fused")}
            rows.append({"case": name, "what": what, **values})
            said = (f"{kind} {statistics.mean(of):.1e} (up to {max(of):.1e})" for kind, of in values.items())
            print(f"{name:34} {what:14} {', '.join(said)}", flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = result_file(arguments.out, "fused-rounding", device, now)
    result = {"time": now.isoformat(timespec="seconds"), **provenance(device), "rows": rows}
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
