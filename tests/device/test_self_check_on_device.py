"""The checks that a run makes of own kernels, on CUDA: the true ones pass, fresh, and a network then uses them."""

import pytest
import torch

from sightline import config, kernels
from sightline.data.gpu import resize_check
from sightline.engine.model import build_model
from sightline.hardware import devices
from sightline.hardware.world import World
from sightline.kernels import (
    batch_norm,
    batch_norm_check,
    bottleneck_check,
    cudnn,
    instance_norm,
    instance_norm_check,
    instance_norm_once_triton,
    self_check,
)
from sightline.models.resnet import Bottleneck, ResNet, ResNetConfig
from sightline.parts import DataSpec

pytestmark = pytest.mark.device

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CHANNELS = (64, 128, 256)  # of ResNet-50, one for each way of tiling; and some that fill no tile
ODD = (8, 24, 33)


@pytest.fixture(autouse=True)
def device(monkeypatch, tmp_path) -> devices.Device:
    """Start as a new process on a machine that has no record of a pass."""
    pytest.importorskip("triton")
    found = devices.select()
    if found.kind != "cuda":
        pytest.skip(f"written for cuda, this is {found.kind}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(self_check, "_reasons", {})
    monkeypatch.setattr(self_check, "_answers", {})
    monkeypatch.setattr(batch_norm, "_trusted", ())
    monkeypatch.setattr(batch_norm, "_is_off", False)
    monkeypatch.setattr(instance_norm, "_trusted", ())
    monkeypatch.setattr(instance_norm, "_is_off", False)
    kernels.use("auto")
    return found


@pytest.mark.parametrize("channels", [CHANNELS, ODD], ids=str)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_the_kernels_of_batch_norm_and_the_stems_tail_pass(dtype, channels):
    place = torch.device("cuda", torch.cuda.current_device())
    pools = (*batch_norm_check.POOLS, *batch_norm_check.SAME_POOLS)
    before = torch.cuda.get_rng_state(), torch.random.get_rng_state()
    assert batch_norm_check.why_wrong(place, dtype, channels, batch_norm_check.SIZES, pools) == ""
    after = torch.cuda.get_rng_state(), torch.random.get_rng_state()
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "legacy", "grid"])
def test_the_resize_kernel_passes(interpolation):
    place = torch.device("cuda", torch.cuda.current_device())
    assert resize_check.why_wrong(place, interpolation) == ""


@pytest.mark.parametrize("precision", DTYPES)
def test_a_network_that_trains_uses_them_after_the_check(precision, device, tmp_path):
    recipe, run = config.load("resnet50", ["--train.global-batch=256", f"--train.precision={precision}"])
    spec = DataSpec(tuple("abc"), 3, (224, 224), (0.5,) * 3, (0.2,) * 3)
    built = build_model(recipe, run, spec, device, World())
    assert not any("batch norm runs as plain torch" in note for note in built.notes), built.notes
    assert not any("bottlenecks run as plain torch: a block" in note for note in built.notes), built.notes
    is_fused = any("bottlenecks run fused" in note for note in built.notes)
    assert len(list((tmp_path / "sightline" / "kernels").iterdir())) == 1 + is_fused
    x = torch.empty(64, 64, 112, 112, dtype=DTYPES[precision], device="cuda").to(memory_format=torch.channels_last)
    assert batch_norm.applies(x, built.model.bn1)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_the_kernels_of_instance_norm_pass(dtype):
    place = torch.device("cuda", torch.cuda.current_device())
    before = torch.cuda.get_rng_state(), torch.random.get_rng_state()
    assert instance_norm_check.why_wrong(place, dtype, (24, 32, 64), instance_norm_check.SIZES) == ""
    after = torch.cuda.get_rng_state(), torch.random.get_rng_state()
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_a_unet_that_trains_reads_once_after_the_check(device):
    recipe, run = config.load("unet2d", ["--train.precision=bf16"])
    spec = DataSpec(tuple("abcd"), 4, (192, 160), (), ())
    built = build_model(recipe, run, spec, device, World())
    assert not any("instance norm runs as plain torch" in note for note in built.notes), built.notes
    assert not instance_norm._is_off
    assert bool(instance_norm._trusted) == instance_norm_once_triton.runs_at_once(device.torch_device)


def make_blocks() -> list[Bottleneck]:
    if reason := cudnn.unavailable_because():
        pytest.skip(reason)
    model = ResNet(ResNetConfig(), 10, 3).cuda().to(memory_format=torch.channels_last)
    return [module for module in model.modules() if isinstance(module, Bottleneck)]


def test_fused_bottlenecks_pass():
    kinds = bottleneck_check.kinds_of(make_blocks())
    place = torch.device("cuda", torch.cuda.current_device())
    before = torch.cuda.get_rng_state(), torch.random.get_rng_state()
    assert bottleneck_check.why_wrong(place, kinds, bottleneck_check.SIZE) == ""
    after = torch.cuda.get_rng_state(), torch.random.get_rng_state()
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_a_wrong_pass_of_fused_bottlenecks_lets_them_run_plain(monkeypatch):
    blocks = make_blocks()
    from sightline.kernels import bottleneck_cudnn  # imports Triton

    true = bottleneck_cudnn.end
    monkeypatch.setattr(bottleneck_cudnn, "end", lambda *given: [true(*given)[0], true(*given)[1].roll(1, 1)])
    place = torch.device("cuda", torch.cuda.current_device())
    told = bottleneck_check.decide(place, blocks[:1], bottleneck_check.SIZE)
    assert told.startswith("kernels: bottlenecks run as plain torch: a block 64>64>256/1 with a projection: ")
    assert not blocks[0].is_fused
