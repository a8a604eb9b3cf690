"""Fused bottlenecks on a Hopper GPU: each block against float64, a network beside plain fp16, compiled, captured."""

import copy

import pytest
import torch
from torch import Tensor, nn

from sightline import config, kernels
from sightline.data.loading.loader import BadSamples, Loader
from sightline.data.loading.order import TrainOrder
from sightline.engine.model import build_model
from sightline.hardware import devices
from sightline.hardware.world import World
from sightline.kernels import bottleneck, bottleneck_check, cudnn
from sightline.models.resnet import Bottleneck, ResNet, ResNetConfig
from sightline.train.schedules import RunLength
from sightline.train.state import TrainState
from sightline.train.step import build_step

pytestmark = pytest.mark.device

# (channels in, width, stride, projection, side): one block of each kind and stage, and one of odd sides.
BLOCKS = {
    "1.0": (64, 64, 1, True, 56),
    "1.1": (256, 64, 1, False, 56),
    "2.0": (256, 128, 2, True, 56),
    "2.1": (512, 128, 1, False, 28),
    "3.0": (512, 256, 2, True, 28),
    "3.1": (1024, 256, 1, False, 14),
    "4.0": (1024, 512, 2, True, 14),
    "4.1": (2048, 512, 1, False, 7),
    "odd": (256, 128, 2, True, 15),
}
FLAGS = """--data.path synthetic:classes=4,samples=256,size=72 --data.classes 4 --data.size 64 --model.depth 50
--model.width 64 --train.global-batch 32 --train.precision fp16""".split()


@pytest.fixture(autouse=True)
def _a_hopper():
    if reason := cudnn.unavailable_because() or ("" if bottleneck_check.HAS_TRITON else "Triton is not installed"):
        pytest.skip(reason)
    yield
    kernels.use("auto")


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").half().contiguous(memory_format=torch.channels_last)


def make(kind: str) -> Bottleneck:
    print(f"torch.manual_seed({torch.seed()})")
    channels, width, stride, project, _ = BLOCKS[kind]
    block = Bottleneck(ResNetConfig(), channels, width, stride, project)
    for norm in block.layers()[1]:
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias, 0, 0.3)
    with torch.no_grad():
        for conv in block.layers()[0]:
            conv.weight.copy_(conv.weight.half())  # float64 sees the weights of fp16
    return block.cuda().to(memory_format=torch.channels_last).train()


def results(block: nn.Module, x: Tensor, outer: Tensor, is_half: bool) -> dict[str, Tensor]:
    """Output, gradients and running statistics of one step."""
    x = x.detach().clone().requires_grad_()
    with torch.autocast("cuda", torch.float16, enabled=is_half):
        y = block(x)
    y.backward(outer.to(y.dtype))
    gradients = {name: parameter.grad for name, parameter in block.named_parameters()}
    running = {name: buffer for name, buffer in block.named_buffers() if buffer.is_floating_point()}
    return {"output": y.detach(), "input": x.grad, **gradients, **running}


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block_is_as_close_to_float64_as_plain_fp16(kind):
    plain = make(kind)
    fused, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    fused.is_fused = True
    side, stride = BLOCKS[kind][4], BLOCKS[kind][2]
    x = draw(16, BLOCKS[kind][0], side, side).relu_()
    outer = draw(16, 4 * BLOCKS[kind][1], -(-side // stride), -(-side // stride))
    assert bottleneck.applies(fused, x)
    expected = results(exact, x.double(), outer, is_half=False)
    theirs, ours = results(plain, x, outer, is_half=True), results(fused, x, outer, is_half=True)
    for name, value in expected.items():
        # A running mean follows the scale that the next convolution reads in fp16: 2.4e-4 at most.
        room = 5e-4 if "running" in name else 2e-4
        assert error(ours[name], value) < 1.5 * error(theirs[name], value) + room, name


@pytest.mark.parametrize("kind", ["1.1", "2.0", "4.1"])
def test_statistics_are_those_of_the_convolutions_within_fp32_rounding(kind):
    block = make(kind)
    convs, norms = block.layers()
    weights = [conv.weight.half() for conv in convs]
    gammas, betas = [norm.weight for norm in norms], [norm.bias for norm in norms]
    x = draw(16, BLOCKS[kind][0], BLOCKS[kind][4], BLOCKS[kind][4]).relu_()
    _, _, y1, y2, y3, other, stats, _ = bottleneck._operation(x, weights, gammas, betas, BLOCKS[kind][2], 1e-5)
    columns = bottleneck._columns(weights)
    for y, own in zip((y1, y2, y3, other), columns, strict=False):
        wide = y.double()
        spread = wide.var((0, 2, 3)).sqrt()
        # cuDNN sums before the output is rounded to fp16, which is noise of 2^-12 per value.
        room = 2.0**-12 / (y.numel() // y.shape[1]) ** 0.5 * 8 + 1e-6
        assert float(((stats[0, own] - wide.mean((0, 2, 3))) / spread).abs().max()) < room * 2
        assert float((stats[2, own].double().sqrt() / spread - 1).abs().max()) < room * 2


def test_gradients_of_a_network_are_as_close_to_float64_as_those_of_plain_fp16():
    print(f"torch.manual_seed({torch.seed()})")
    plain = ResNet(ResNetConfig(), 1000, 3).cuda().to(memory_format=torch.channels_last).train()
    with torch.no_grad():
        for module in plain.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                module.weight.copy_(module.weight.half())
            if isinstance(module, Bottleneck):
                module.bn3.weight.fill_(0.2)  # as after some training: with 1 errors grow from block to block
    fused, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    for module in fused.modules():
        if isinstance(module, Bottleneck):
            module.is_fused = True
    x, outer = draw(16, 3, 224, 224), torch.randn(16, 1000, device="cuda")
    expected = results(exact, x.double(), outer, is_half=False)
    theirs, ours = results(plain, x, outer, is_half=True), results(fused, x, outer, is_half=True)
    names = [name for name in expected if "running" not in name]
    whole = {
        tag: torch.cat([r[name].double().flatten() for name in names])
        for tag, r in (("exact", expected), ("theirs", theirs), ("ours", ours))
    }
    assert error(whole["ours"], whole["exact"]) < 1.2 * error(whole["theirs"], whole["exact"])


def make_step(*flags: str):
    recipe, run = config.load("demo_classification", [*FLAGS, *flags])
    device = devices.select()
    device.activate()
    kernels.use(run.kernels)
    bound = recipe.data.open("train", 0).bind(device, recipe.train.global_batch)
    feed = {"train": (bound, TrainOrder(len(bound.dataset), recipe.train.global_batch, 0))}
    bad = BadSamples("fail", 0, lambda bad: None)
    loader = Loader(feed, config.Run(workers=0), device, World(), bad, lambda: None)
    loader.seek("train", 0, 4)
    batches = [{key: value.clone() for key, value in loader.next("train").items()} for _ in range(4)]
    loader.close()
    state = TrainState(recipe, build_model(recipe, run, bound.dataset.spec, device, World()), device, RunLength(1, 8))
    return build_step(recipe, run, device, World(), state, bound), state, batches


def run_steps(*flags: str) -> tuple[dict[str, float], TrainState]:
    step, state, feed = make_step(*flags)
    for number, batch in enumerate(feed):
        step(batch, number, 0.01)
    return step.read_totals(World()), state


def test_steps_compiled_and_captured_learn_as_plain_ones():
    off, _ = run_steps("--run.kernels", "off", "--run.compile", "off", "--run.graph", "off")
    for compiled, graph in (("off", "off"), ("off", "on"), ("on", "on")):
        found, state = run_steps("--run.compile", compiled, "--run.graph", graph)
        assert any("bottlenecks run fused" in note for note in state.notes)
        assert found["loss"] == pytest.approx(off["loss"], rel=2e-2), (compiled, graph)
        assert found["bad_steps"] == 0


def test_the_state_is_that_of_a_plain_run_and_resumes_in_either():
    _, fused = run_steps("--run.compile", "off", "--train.ema", "0.9", "--train.accumulation", "2")
    _, plain = run_steps(
        "--run.compile", "off", "--run.kernels", "off", "--train.ema", "0.9", "--train.accumulation", "2"
    )
    ours, theirs = fused.tensors(), plain.tensors()
    for stem in theirs:
        assert {n: (t.shape, t.dtype) for n, t in ours[stem].items()} == {
            n: (t.shape, t.dtype) for n, t in theirs[stem].items()
        }
    assert all(ours["model"][name].equal(t) for name, t in theirs["model"].items() if "num_batches" in name)
    plain.load(ours, fused.progress_json())


def test_a_step_that_overflows_changes_nothing_but_the_scale():
    step, state, feed = make_step("--run.compile", "off")
    step(feed[0], 0, 0.01)
    before = {name: tensor.clone() for name, tensor in state.tensors()["model"].items()}
    state.loss_scale.scale.fill_(2.0**40)
    step(feed[1], 1, 0.01)
    assert float(state.loss_scale.scale) == 2.0**39
    assert all(tensor.equal(before[name]) for name, tensor in state.tensors()["model"].items())


def test_deterministic_runs_stay_plain_and_say_so():
    _, state, _ = make_step("--train.deterministic")
    assert any("--train.deterministic" in note for note in state.notes)
    assert not any(block.is_fused for block in state.model.modules() if isinstance(block, Bottleneck))
