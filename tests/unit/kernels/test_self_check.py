"""Checks of kernels before a run uses them: made once, remembered if passed, and only where kernels can run.

What the checks compute is in interpreted_self_check.py, which test_instance_norm.py runs.
"""

import dataclasses
import itertools
import math
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sightline import config, kernels
from sightline.engine.model import choose_kernels
from sightline.hardware.world import World
from sightline.kernels import (
    batch_norm,
    batch_norm_check,
    instance_norm,
    instance_norm_check,
    overlaps,
    self_check,
    taps,
)
from sightline.models.resnet import ResNetConfig, make_pool
from sightline.parts import DataSpec

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    start_again(monkeypatch)
    yield
    kernels.use("auto")


def start_again(monkeypatch) -> None:
    """As a new process: nothing is remembered but what is on disk."""
    monkeypatch.setattr(self_check, "_reasons", {})
    monkeypatch.setattr(batch_norm, "_trusted", ())
    monkeypatch.setattr(batch_norm, "_is_off", False)
    monkeypatch.setattr(instance_norm, "_trusted", ())
    monkeypatch.setattr(instance_norm, "_is_off", False)


class Check:
    """A check that counts its runs."""

    def __init__(self, answer: str = ""):
        self.answer, self.runs = answer, 0

    def __call__(self, *_: object) -> str:
        self.runs += 1
        return self.answer


def kept(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "sightline" / "kernels").glob("*"))


def test_a_pass_is_remembered_by_later_starts_and_for_these_sources_alone(monkeypatch, tmp_path):
    check = Check()
    for _ in range(2):
        assert self_check.why_not("a norm", CPU, check) == ""
    start_again(monkeypatch)
    assert self_check.why_not("a norm", CPU, check) == ""
    assert check.runs == 1 and len(kept(tmp_path)) == 1
    for what, runs in (("another norm", 2), ("a norm", 2)):
        assert self_check.why_not(what, CPU, check) == "" and check.runs == runs
    monkeypatch.setattr(self_check, "_sources", lambda: "changed")
    assert self_check.why_not("a norm", CPU, check) == "" and check.runs == 3


def test_a_failure_holds_for_the_process_alone(monkeypatch, tmp_path):
    check = Check("the result is off")
    for _ in range(2):
        assert self_check.why_not("a norm", CPU, check) == "the result is off"
    assert check.runs == 1 and not kept(tmp_path)
    start_again(monkeypatch)
    assert self_check.why_not("a norm", CPU, Check()) == ""


@pytest.mark.parametrize("error", [RuntimeError("no\nmemory"), ValueError(), ImportError("no compiler: gcc")], ids=repr)
def test_what_a_check_raises_is_the_reason(error):
    def check() -> str:
        raise error

    assert self_check.why_not("a norm", CPU, check) == f"{type(error).__name__}: " + (
        str(error).replace("\n", " ") or "no message"
    )


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"format": 1, "passed": "another"}', b"\xff" * 100_000])
def test_a_damaged_record_is_ignored_and_replaced(damage, monkeypatch, tmp_path):
    check = Check()
    self_check.why_not("a norm", CPU, check)
    (path,) = kept(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(damage)
    start_again(monkeypatch)
    assert self_check.why_not("a norm", CPU, check) == "" and check.runs == 2
    assert path.read_bytes() == whole


def test_without_a_folder_to_write_to_each_start_checks(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    check = Check()
    for _ in range(2):
        assert self_check.why_not("a norm", CPU, check) == ""
        start_again(monkeypatch)
    assert check.runs == 2


def test_errors_beyond_their_limit_and_nan_are_named():
    found, expected = torch.tensor([3.0, 4.04]), torch.tensor([3.0, 4.0])
    assert math.isclose(self_check.relative_error(found, expected), 0.008, rel_tol=1e-5)
    assert self_check.relative_error(found, expected, least=50.0) < 0.001
    assert self_check.why_wrong([("y", 0.008, 0.01), ("x", 0.0, 0.01)]) == ""
    assert self_check.why_wrong([("y", 0.008, 0.01), ("x", 0.02, 0.01)]).startswith("x has a relative error of 2.0e-02")
    assert self_check.why_wrong([("y", math.nan, 0.01)]).startswith("y has a relative error of nan")


def test_memory_is_poisoned_without_a_word_about_operations_that_do_not_repeat(recwarn):
    with self_check.poisoned_memory():
        assert torch.empty(3).isnan().all()
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))  # torch would warn
    assert not recwarn.list and not torch.are_deterministic_algorithms_enabled()
    with pytest.warns(UserWarning, match="other"), self_check.poisoned_memory():
        warnings.warn("other", UserWarning, stacklevel=1)


def choose(precision="bf16", channels_last=True, batch=256, size=(224, 224), width=64, same=False, device="cuda"):
    with FakeTensorMode(), torch.device(device):  # CUDA without a GPU
        pool = make_pool(ResNetConfig(padding="same" if same else "torch"))
        model = nn.Sequential(nn.Conv2d(3, width, 7, 2), nn.BatchNorm2d(width), pool)
        return batch_norm_check.choose(model, precision, channels_last, batch, size)


def applies(dtype: torch.dtype) -> bool:
    with FakeTensorMode():
        x = torch.empty(64, 64, 56, 56, device="cuda", dtype=dtype).to(memory_format=torch.channels_last)
        return batch_norm.applies(x, nn.BatchNorm2d(64))


def test_only_a_run_that_can_use_the_kernels_of_batch_norm_checks_them(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    check = Check()
    monkeypatch.setattr(batch_norm_check, "why_wrong", check)
    assert choose(device="cpu") == choose(channels_last=False) == ""
    assert choose(batch=63, size=(32, 32)) == ""  # no layer can have 4 million elements
    kernels.use("off")
    assert choose() == ""
    kernels.use("auto", is_deterministic=True)
    assert choose() == ""
    kernels.use("auto")
    assert check.runs == 0 and not applies(torch.bfloat16)
    assert choose() == "" and applies(torch.bfloat16) and not applies(torch.float16)
    assert choose() == "" and check.runs == 1
    assert choose("fp16") == "" and applies(torch.float16)
    assert choose(same=True) == "" and check.runs == 3  # its pools pad otherwise


def test_a_failed_check_is_told_and_turns_the_kernels_off(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(batch_norm_check, "why_wrong", Check())
    assert choose() == "" and applies(torch.bfloat16)
    monkeypatch.setattr(batch_norm_check, "why_wrong", Check("norm + ReLU of 64 channels in float16: not finite"))
    told = "kernels: batch norm runs as plain torch: norm + ReLU of 64 channels in float16: not finite"
    assert choose("fp16") == choose("fp16") == told
    assert not applies(torch.float16) and not applies(torch.bfloat16)


@pytest.mark.parametrize(
    ("channels", "kinds"),
    [
        ([64, 128, 256, 512, 1024, 2048], (64, 128, 256)),
        ([64, 24, 512, 8], (8, 24, 64, 512)),
        ([48, 80, 96, 160], (48, 96)),
    ],
)
def test_channels_that_are_tiled_alike_are_checked_once(channels, kinds):
    pytest.importorskip("triton")
    assert batch_norm_check.kinds_of(channels) == kinds


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_pool_is_checked_on_windows_whose_largest_value_rounding_cannot_change(dtype):
    """Otherwise a right kernel could hand a gradient to another pixel than float64 does."""
    pytest.importorskip("triton")
    drawn = batch_norm_check._Draw(CPU, dtype).distinct((2, 3, 38, 49)).double()
    windows = drawn.unfold(2, 3, 1).unfold(3, 3, 1).flatten(4).sort().values  # (2, 3, 36, 47, 9)
    assert windows.diff().min() > 0.05


def choose_instance_norm(precision="bf16", channels_last=True, device="cuda", shapes=()):
    with FakeTensorMode(), torch.device(device):
        model = nn.Sequential(*(nn.InstanceNorm2d(count, affine=True) for count in (32, 64, 512)))
        return instance_norm_check.choose(model, precision, channels_last, shapes)


def test_a_run_checks_instance_norm_and_a_hopper_then_reads_once(monkeypatch):
    once = pytest.importorskip("sightline.kernels.instance_norm_once_triton")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    check = Check()
    monkeypatch.setattr(instance_norm_check, "why_wrong", check)
    assert choose_instance_norm(device="cpu") == choose_instance_norm(channels_last=False) == ""
    kernels.use("off")
    assert choose_instance_norm() == "" and check.runs == 0
    kernels.use("auto")
    monkeypatch.setattr(once, "runs_at_once", lambda device: False)
    assert choose_instance_norm() == "" and check.runs == 1 and not instance_norm._trusted
    monkeypatch.setattr(once, "runs_at_once", lambda device: True)
    assert choose_instance_norm() == "" and check.runs == 1
    assert [dtype for _, dtype in instance_norm._trusted] == [torch.bfloat16]


def test_norms_of_a_step_are_compiled_before_it_where_they_passed(monkeypatch):
    once = pytest.importorskip("sightline.kernels.instance_norm_once_triton")
    monkeypatch.setattr(once, "runs_at_once", lambda device: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(instance_norm_check, "why_wrong", Check())
    works = []
    monkeypatch.setattr(instance_norm_check, "compile_ahead", lambda given, device: works.extend(given))
    shapes = [(2, 32, 8, 8), (2, 512, 4, 4, 4), (2, 32, 8, 8)]
    assert choose_instance_norm() == choose_instance_norm(channels_last=False, shapes=shapes) == "" and not works
    assert choose_instance_norm(shapes=shapes) == ""
    seen = []

    def run(x, *others):  # in place of Triton: the result, or the gradient, and two numbers for each image and channel
        seen.append((tuple(x.shape), x.dtype, x.is_contiguous(memory_format=instance_norm.LAYOUTS[x.dim()])))
        return torch.empty_like(x), x.new_empty((2, *x.shape[:2]), dtype=torch.float32)

    for name, stand_in in (("applies", lambda x: True), ("run_forward", run), ("run_backward", run)):
        monkeypatch.setattr(instance_norm, name, stand_in)
    for work in works:
        work.func(CPU, *work.args[1:])
    assert seen == [(shape, torch.bfloat16, True) for shape in shapes[:2] for _ in ("forward", "backward")]


def test_instance_norm_that_failed_its_check_is_plain_torch(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(instance_norm_check, "why_wrong", Check("the result is off"))
    assert choose_instance_norm() == "kernels: instance norm runs as plain torch: the result is off"
    with FakeTensorMode():
        x = torch.empty(2, 32, 8, 8, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
        assert not instance_norm.applies(x)


@pytest.mark.parametrize(
    ("channels", "kinds"),
    [
        ((32, 64, 128, 256, 512), (32, 64)),
        ((30, 60, 120, 240, 480), (30, 32, 48, 56, 60)),  # of some nnU-Nets
        ((8, 16, 32, 64, 128), (8, 16, 32, 64)),  # demo_segmentation
        ((33, 97, 1, 320), (1, 33, 64)),
    ],
)
def test_few_channels_stand_for_all_that_instance_norm_tiles_alike(channels, kinds):
    once = pytest.importorskip("sightline.kernels.instance_norm_once_triton")
    assert instance_norm_check.kinds_of(channels) == kinds

    def tilings(counts):
        """Blocks, whether the last one is full, and whether loads may be wide."""
        found = {(count, once.choose_tiling(64, 7440, count).channels) for count in counts}
        return {(block, count % block, count % 16 == 0) for count, block in found}

    assert tilings(kinds) == tilings(channels)
    for count, numbers in itertools.product(kinds, (once.FORWARD, once.BACKWARD)):
        sizes = [(once.LEAST_PROGRAMS, height * width, count) for _, height, width in instance_norm_check.SIZES]
        assert any(once.choose_sizes(*size, numbers) for size in sizes)  # those that read once are checked too
    pixels = [height * width for _, height, width in instance_norm_check.SIZES]
    assert all(count % 16 == 0 for count in pixels)  # as in networks; Triton compiles code of its own for these


@pytest.mark.parametrize("name", ["resizing of crops", "matching of boxes"])
def test_an_operation_that_fails_its_check_warns_once_and_is_plain_torch(monkeypatch, name: str):
    """Triton does not run on a CPU, so that the check of the true kernels fails."""
    pytest.importorskip("triton")
    monkeypatch.setattr(self_check, "_answers", {})
    draws = torch.Generator().manual_seed(0)
    corners = torch.rand(2, 2, 5, 2, generator=draws).sort(dim=0).values
    boxes = torch.cat(list(corners), -1)  # (2, 5, 4)
    image, weights = torch.rand(2, 1, 4, 6, generator=draws), torch.rand(2, 3, 6, generator=draws)
    places = torch.randint(6, (2, 3, 6), generator=draws, dtype=torch.int32)
    operation, plain, given = {
        "resizing of crops": (taps.sum_taps, taps.plain, (image, places, weights, 3)),
        "matching of boxes": (
            overlaps.best_overlaps,
            lambda boxes, used, anchors: overlaps.plain(boxes, anchors),
            (boxes, torch.tensor([5, 5]), boxes[0]),
        ),
    }[name]
    with pytest.warns(RuntimeWarning, match=f"kernels: {name} runs as plain torch: ") as told:
        found = [operation(*given) for _ in range(2)]
    assert len(told) == 1
    for ours in found:
        torch.testing.assert_close(ours, plain(*given), rtol=0, atol=0)
    with FakeTensorMode() as mode:
        shown = operation(*(mode.from_tensor(each) if isinstance(each, Tensor) else each for each in given))
    expected = plain(*given)
    for fake, real in zip(*([x] if isinstance(x, Tensor) else x for x in (shown, expected)), strict=True):
        assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


@pytest.mark.parametrize(("batch", "ranks", "runs"), [(64, 1, 1), (63, 1, 0), (256, 4, 1), (252, 4, 0)])
def test_a_rank_checks_the_kernels_of_batch_norm_by_its_share_of_the_batch(monkeypatch, batch, ranks, runs):
    """64 images of 32 x 32 pixels in 64 channels have 4 Mi values, from which on kernels are used."""
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    check = Check()
    monkeypatch.setattr(batch_norm_check, "why_wrong", check)
    recipe, run = config.load("demo_classification", [f"--train.global-batch={batch}", "--train.precision=bf16"])
    run = dataclasses.replace(run, channels_last=True)
    spec = DataSpec(("a", "b"), 3, (32, 32), (0.0,) * 3, (1.0,) * 3)
    with FakeTensorMode(), torch.device("cuda"):
        network = nn.Sequential(nn.Conv2d(3, 64, 7, 2), nn.BatchNorm2d(64), make_pool(ResNetConfig()))
        assert not any(choose_kernels(network, recipe, run, spec, World(size=ranks)))
    assert check.runs == runs
