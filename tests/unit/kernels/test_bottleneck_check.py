"""When bottlenecks run fused: where they can, and where the operation passes its check.

The operation is the reference here; interpreted_bottleneck.py checks the kernels.
"""

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sightline import kernels
from sightline.kernels import bottleneck, bottleneck_check, bottleneck_steps, cudnn, self_check
from sightline.kernels import bottleneck_reference as steps
from sightline.models.resnet import Bottleneck, ResNet, ResNetConfig

CPU = torch.device("cpu")
SIZE = (4, 7, 6)
FUSED = "3 bottlenecks run fused"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch, tmp_path):
    """As a new process on a machine that has no record of a pass."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(self_check, "_reasons", {})
    yield
    kernels.use("auto")


@pytest.fixture
def can_run(monkeypatch):
    monkeypatch.setattr(cudnn, "unavailable_because", lambda index: "")
    monkeypatch.setattr(bottleneck_check, "HAS_TRITON", True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")


def make_blocks() -> list[Bottleneck]:
    kinds = ((32, 1, True), (64, 1, False), (64, 2, True))  # channels in, stride, projection
    blocks = [Bottleneck(ResNetConfig(), channels, 16, stride, project) for channels, stride, project in kinds]
    return [block.to(memory_format=torch.channels_last).train() for block in blocks]


def blocks_of(model: nn.Module) -> list[Bottleneck]:
    return [module for module in model.modules() if isinstance(module, Bottleneck)]


def test_chosen_only_where_it_can_run(monkeypatch, can_run):
    monkeypatch.setattr(bottleneck_check, "why_wrong", lambda *given: "")
    with FakeTensorMode(), torch.device("cuda"):  # CUDA without a GPU
        model = ResNet(ResNetConfig(), classes=10, channels=3)
        blocks = blocks_of(model)
        for precision, deterministic, channels_last, said in (
            ("bf16", False, True, ""),
            ("fp16", True, True, "--train.deterministic"),
            ("fp16", False, False, "--run.channels-last"),
            ("fp16", False, True, "16 bottlenecks run fused"),
        ):
            note = bottleneck_check.choose(model, precision, deterministic, channels_last)
            assert said in note and bool(note) == bool(said)
            assert {block.is_fused for block in blocks} == {said.startswith("16")}
        x = torch.empty(2, 256, 8, 8, dtype=torch.half).to(memory_format=torch.channels_last)
        assert bottleneck.applies(blocks[1].train(), x)
        assert not bottleneck.applies(blocks[1], x.bfloat16())
        assert not bottleneck.applies(blocks[1], x.contiguous())
        one = torch.empty(1, 256, 2, 2, dtype=torch.half).to(memory_format=torch.channels_last)
        assert bottleneck.applies(blocks[1], one)
        assert not bottleneck.applies(blocks[3].train(), one)  # its stride leaves one value per channel
        assert not bottleneck.applies(blocks[1].eval(), x)
        kernels.use("off")
        assert not bottleneck.applies(blocks[1].train(), x)
        assert bottleneck_check.choose(model, "fp16", False, True) == ""


def test_a_reason_from_cudnn_reaches_the_user(monkeypatch, can_run):
    monkeypatch.setattr(cudnn, "unavailable_because", lambda index: "they need a Hopper GPU")
    with FakeTensorMode(), torch.device("cuda"):
        model = ResNet(ResNetConfig(depth=50), classes=10, channels=3)
        assert bottleneck_check.choose(model, "fp16", False, True).endswith(
            "run as plain torch: they need a Hopper GPU"
        )
        assert not model.layer1[0].is_fused


def test_a_failed_check_is_told_and_blocks_stay_plain(monkeypatch, can_run):
    runs = []
    wrong = "a block 256>64>256/1: the result has a relative error of 1.0e+00, expected less than 2e-03"
    monkeypatch.setattr(bottleneck_check, "why_wrong", lambda *given: runs.append(given) or wrong)
    with FakeTensorMode(), torch.device("cuda"):
        model = ResNet(ResNetConfig(), classes=10, channels=3)
        for block in blocks_of(model):
            block.is_fused = True
        for _ in range(2):
            told = bottleneck_check.choose(model, "fp16", False, True)
            assert told == f"kernels: bottlenecks run as plain torch: {wrong}"
            assert not any(block.is_fused for block in blocks_of(model))
    assert len(runs) == 1


def test_few_blocks_stand_for_all_of_a_network():
    with torch.device("meta"):
        blocks = blocks_of(ResNet(ResNetConfig(depth=101), classes=10, channels=3))
    kinds = [(b.conv1.in_channels, b.conv1.out_channels, b.conv2.stride[0]) for b in bottleneck_check.kinds_of(blocks)]
    # Each kind of shortcut and stride, and inner widths of 64, 128 and 256 channels per tile.
    assert kinds == [(64, 64, 1), (256, 64, 1), (256, 128, 2), (512, 256, 2)]


def test_the_operation_passes_once_and_leaves_blocks_and_random_numbers_as_they_are(monkeypatch):
    blocks = make_blocks()
    before, states = torch.random.get_rng_state(), [copy.deepcopy(block.state_dict()) for block in blocks]
    assert FUSED in bottleneck_check.decide(CPU, blocks, SIZE)
    assert all(block.is_fused for block in blocks)
    assert torch.equal(before, torch.random.get_rng_state())
    for block, state in zip(blocks, states, strict=True):
        assert all(torch.equal(tensor, state[name]) for name, tensor in block.state_dict().items())
    assert bottleneck_steps.has_engines and not torch.are_deterministic_algorithms_enabled()
    monkeypatch.setattr(self_check, "_reasons", {})  # a later start: the pass is on disk
    monkeypatch.setattr(bottleneck_check, "why_wrong", lambda *given: "checked again")
    assert FUSED in bottleneck_check.decide(CPU, blocks, SIZE)
    assert "checked again" in bottleneck_check.decide(CPU, blocks, (2, 7, 6))


def wrong_sums(y, sums):
    return y, sums * torch.tensor([[1.0], [1.02]])


def wrong_bits(out, bits):
    return [out, bits.roll(1, 1)]


def no_gradient(dy, rest):
    return [dy, torch.zeros_like(rest)]


def unwritten(dy, dweight):
    return dy, torch.empty_like(dweight)


def larger(dy, dweight):
    return dy, dweight * 1.02


def failing(*found):
    raise RuntimeError("out of resource:\nshared memory")


FAULTS = [
    ("convolve", wrong_sums, "running statistics differ by up to"),
    ("end", wrong_bits, "the gradient of an input has a relative error of"),
    ("end_gradients", no_gradient, "the gradient of an input has a relative error of"),
    ("convolve_backward", unwritten, "the gradient of a parameter has a relative error of nan"),
    ("convolve_backward", larger, "the gradient of a parameter has a relative error of 2"),
    ("end_gradients", failing, "RuntimeError: out of resource: shared memory"),
]


@pytest.mark.parametrize(("step", "spoil", "why"), FAULTS, ids=[spoil.__name__ for _, spoil, _ in FAULTS])
def test_a_wrong_step_lets_blocks_run_plain(step, spoil, why, monkeypatch, tmp_path):
    true = getattr(steps, step)
    monkeypatch.setattr(steps, step, lambda *given: spoil(*true(*given)))
    blocks = make_blocks()
    told = bottleneck_check.decide(CPU, blocks, SIZE)
    assert told.startswith("kernels: bottlenecks run as plain torch: ") and why in told
    assert "\n" not in told and not list(tmp_path.rglob("*.json"))
    block, x = blocks[1], torch.randn(2, 64, 4, 4).half().contiguous(memory_format=torch.channels_last)
    assert not bottleneck.applies(block, x)


@pytest.mark.parametrize("row", ["dbeta", "dgamma"])
def test_gradients_of_norms_that_are_not_written_are_seen(row, monkeypatch):
    true = steps.end_sums

    def forgetful(grad, bits, y, norm, *more):
        true(grad, bits, y, norm._replace(**{row: torch.zeros_like(norm.dbeta)}), *more)

    monkeypatch.setattr(steps, "end_sums", forgetful)
    assert "relative error of nan" in bottleneck_check.decide(CPU, make_blocks(), SIZE)


def test_running_statistics_are_checked(monkeypatch):
    monkeypatch.setattr(bottleneck, "_update_running", lambda norms, stats: None)
    assert "running statistics differ" in bottleneck_check.decide(CPU, make_blocks(), SIZE)
