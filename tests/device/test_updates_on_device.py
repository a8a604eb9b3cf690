"""Keras' SGD, LARS and decoupled decay on an accelerator: captured, skipped on the device, close to the CPU."""

import os

# cuBLAS repeats its bits only with this, and only if it is set before CUDA is initialised.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
import torchvision
from torch import nn

from sightline.hardware import devices
from sightline.train.optimizers import OptimizerConfig
from sightline.train.torch_optimizer import set_rate

pytestmark = pytest.mark.device

UPDATES = pytest.mark.parametrize(
    "config",
    [
        OptimizerConfig("sgd_keras", decay_form="keras_l2"),
        OptimizerConfig("sgd_keras", nesterov=True, decay_form="decoupled"),
        OptimizerConfig("sgd_keras", momentum=0.0),
        OptimizerConfig("sgd", nesterov=True, decay_form="decoupled"),
        OptimizerConfig("lars", eps=1e-7),
        OptimizerConfig("lars", eps=0.0),
    ],
    ids=lambda c: f"{c.kind} {c.decay_form} {c.momentum} {c.eps}",
)


def cuda() -> torch.device:
    device = devices.select()
    if device.kind != "cuda":
        pytest.skip(f"written for cuda, this is {device.kind}")
    return device.torch_device


def network(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return torchvision.models.resnet18(num_classes=10).to(device, memory_format=torch.channels_last)


def gradients(model: nn.Module, number: int) -> None:
    """Written into the same memory each time, as a captured step does."""
    torch.manual_seed(1000 + number)
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape).to(parameter.device, memory_format=torch.preserve_format)
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.copy_(drawn)


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    found = [*model.parameters(), *(v for state in optimizer.state.values() for v in state.values())]
    return [t.detach().cpu().clone() for t in found]


@UPDATES
def test_a_captured_update_follows_the_rate_and_skips_as_an_eager_one(config: OptimizerConfig):
    """Step 2 is bad; a graph that kept its rate or its flag from the capture would differ."""
    device = cuda()
    ends = []
    for captured in (False, True):
        model = network(device)
        optimizer = config.build(model, device)
        optimizer.found_inf = torch.zeros((), device=device)
        gradients(model, 0)
        graph = None
        if captured:
            kept = [
                t.clone() for t in (*model.parameters(), *(v for s in optimizer.state.values() for v in s.values()))
            ]
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                optimizer.step()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                optimizer.step()
            with torch.no_grad():
                now = [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())]
                torch._foreach_copy_(now, kept)
        seen = []
        for number in range(5):
            gradients(model, number)
            if number == 2:
                model.conv1.weight.grad[0, 0, 0, 0] = float("nan")
            optimizer.found_inf.fill_(number == 2)
            set_rate(optimizer, 0.1 * (number + 1))
            if graph is None:
                optimizer.step()
            else:
                graph.replay()
            seen.append(states(model, optimizer))
        assert all(torch.equal(a, b) for a, b in zip(seen[1], seen[2], strict=True))
        assert not any(torch.equal(a, b) for a, b in zip(seen[2], seen[3], strict=True))
        ends.append(seen[-1])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@UPDATES
def test_the_device_and_the_cpu_agree(config: OptimizerConfig):
    ends = []
    for device in (cuda(), torch.device("cpu")):
        model = network(device)
        optimizer = config.build(model, device)
        for number in range(5):
            gradients(model, number)
            set_rate(optimizer, 0.1 * (number + 1))
            optimizer.step()
        ends.append(states(model, optimizer))
    for mine, other in zip(*ends, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@UPDATES
def test_nothing_waits_for_the_device_and_launches_are_few(config: OptimizerConfig):
    device = cuda()
    # Where an earlier test asked for equal bits, torch fills whatever is allocated: a launch for each tensor.
    torch.use_deterministic_algorithms(False)
    model = network(device)
    optimizer = config.build(model, device)
    optimizer.found_inf = torch.zeros((), device=device)
    gradients(model, 0)
    optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            optimizer.step()
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    kernels = sum(event.count for event in profile.key_averages() if event.self_device_time_total > 0)
    # resnet18 has 62 tensors; lars scales each of its 21 weights by a number of its own, which is a launch each.
    names = {event.key[:80]: event.count for event in profile.key_averages() if event.self_device_time_total > 0}
    assert 0 < kernels < (100 if config.kind == "lars" else 62), names
