"""The self-checks in Triton's interpreter: the true kernels pass, wrong ones give way to plain torch.

test_instance_norm.py runs this file in a process of its own: the interpreter must be chosen before Triton is imported.
"""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from sightline.data.gpu import resize_check
from sightline.kernels import (
    batch_norm,
    batch_norm_check,
    batch_norm_sum_triton,
    batch_norm_triton,
    instance_norm,
    instance_norm_check,
    instance_norm_once_triton,
    instance_norm_triton,
    resize_triton,
    self_check,
    stem_tail_triton,
)

CPU = torch.device("cpu")
# Images, height and width of the norms; height, width and padding of the pool: TensorFlow's SAME.
GIVEN = (CPU, torch.float16, (3,), ((2, 5, 3),), ((3, 2, 1, 0),))


@pytest.fixture(autouse=True)
def _small_and_fresh(monkeypatch, tmp_path):
    """No pass of an earlier start or test, tiles of which a small tensor fills some, and the CPU taken for CUDA."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(self_check, "_reasons", {})
    monkeypatch.setattr(self_check, "_answers", {})
    monkeypatch.setattr(batch_norm, "_trusted", ())
    monkeypatch.setattr(batch_norm, "_is_off", False)
    monkeypatch.setattr(batch_norm_triton, "TILE", 64)
    monkeypatch.setattr(batch_norm_sum_triton, "SUM_TILE", 64)
    monkeypatch.setattr(stem_tail_triton, "make_tiling", lambda *_: stem_tail_triton.Tiling(2, 2, 4, 1))
    monkeypatch.setattr(batch_norm, "is_ours", lambda x: (x.device.index, x.dtype) in batch_norm._trusted)
    monkeypatch.setattr(instance_norm, "_is_off", False)
    monkeypatch.setattr(instance_norm_triton, "WHOLE", 512)
    for name, value in (("FORWARD", (512, 256, 32, 4)), ("BACKWARD", (512, 256, 64, 4)), ("LEAST_PROGRAMS", 4)):
        monkeypatch.setattr(instance_norm_once_triton, name, value)
    monkeypatch.setattr(resize_check, "SIDES", ((11, 16), (7, 6), (9, 9)))
    rows = ((1, 2, 9, 12, 9, 9, 0, 0, 0), (0, 1, 7, 5, 9, 9, 0, 0, 1), (0, 0, 9, 9, 7, 7, -1, -1, 0))
    monkeypatch.setattr(resize_check, "ROWS", rows)
    monkeypatch.setattr(resize_check, "SIZE", 9)


def layer() -> tuple[Tensor, nn.BatchNorm2d]:
    return torch.randn(2, 3, 4, 4).to(torch.float16, memory_format=torch.channels_last), nn.BatchNorm2d(3)


def plain(x: Tensor, norm: nn.BatchNorm2d) -> Tensor:
    return functional.relu(copy.deepcopy(norm)(x))


def test_the_kernels_of_batch_norm_pass_and_run_from_then_on(monkeypatch):
    before = torch.random.get_rng_state()
    assert batch_norm_check.decide(*GIVEN) == ""
    assert torch.equal(before, torch.random.get_rng_state())
    assert not torch.are_deterministic_algorithms_enabled()
    called = []
    apply = batch_norm_triton.apply
    monkeypatch.setattr(batch_norm_triton, "apply", lambda *given: called.append(1) or apply(*given))
    x, norm = layer()
    torch.testing.assert_close(batch_norm.norm_relu(x, norm), plain(x, norm), rtol=2e-3, atol=1e-3)
    assert called
    assert not batch_norm.applies(x.float(), norm)  # a precision that was not checked


def scaled(found):
    return found * 1.01


def with_a_nan(found):
    found[0][0, 0, 0, 0] = float("nan")
    return found


def unwritten(found):
    return torch.empty_like(found)


def misplaced(found):
    y, winners, places = found
    return y, winners, (places + 1) % 9


def one_more(found):
    found[1][1] *= 1.01
    return found


def refused(found):
    raise RuntimeError("out of resource:\nshared memory")


WRONG = {
    "norm + ReLU of 3 channels in float16: the result has a relative error of 1": (batch_norm_triton, "apply", scaled),
    "norm + ReLU of 3 channels in float16: the result has a relative error of nan": (
        batch_norm_triton,
        "apply",
        unwritten,
    ),
    "norm + ReLU of 3 channels in float16: the gradient of a parameter": (batch_norm_triton, "backward", one_more),
    "norm + shortcut + ReLU of 3 channels in float16: the gradient of an input has a relative error of nan": (
        batch_norm_sum_triton,
        "backward",
        with_a_nan,
    ),
    "the stem's tail, padded by 1 and 0, of 3 channels in float16: the gradient": (
        stem_tail_triton,
        "forward",
        misplaced,
    ),
    "RuntimeError: out of resource: shared memory": (batch_norm_triton, "statistics", refused),
}


@pytest.mark.parametrize("why", WRONG)
def test_a_wrong_kernel_gives_way_to_plain_torch(why, monkeypatch):
    module, name, spoil = WRONG[why]
    true = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *given: spoil(true(*given)))
    batch_norm.trust(CPU, torch.float32)  # what passed earlier in the process
    assert batch_norm_check.decide(*GIVEN).startswith(f"kernels: batch norm runs as plain torch: {why}")
    batch_norm.trust(CPU, torch.float16)  # no later pass lets them in again
    x, norm = layer()
    for given in (x, x.float()):
        assert not batch_norm.applies(given, norm)
    expected = plain(x, norm)
    assert torch.equal(batch_norm.norm_relu(x, norm), expected)


def test_running_statistics_are_checked(monkeypatch):
    true = batch_norm_triton.statistics
    fixed = lambda x, mean, var, *more: true(x, mean.clone(), var, *more)  # noqa: E731
    monkeypatch.setattr(batch_norm_triton, "statistics", fixed)
    assert "running statistics differ" in batch_norm_check.decide(*GIVEN)


def test_the_resize_kernel_passes_and_a_wrong_one_gives_way(monkeypatch):
    assert resize_check.is_right(CPU, "bilinear") and resize_check.is_right(CPU, "grid")
    monkeypatch.setattr(resize_triton, "resize", lambda buffer, places, geometry, out, kind: None)
    assert resize_check.is_right(CPU, "bilinear")  # not checked again
    with pytest.warns(
        RuntimeWarning, match=r"kernels: resizing \(legacy\) runs as plain torch: values differ by up to"
    ):
        assert not resize_check.is_right(CPU, "legacy")


# Channels, and sizes: held by one program, read once by two programs, and too few programs for that.
INSTANCE = (CPU, torch.float16, (3,), ((1, 2, 3), (2, 17, 9), (1, 17, 9)))


def test_the_kernels_of_instance_norm_pass_the_check():
    numbers = instance_norm_once_triton.FORWARD
    assert instance_norm_once_triton.choose_sizes(2, 17 * 9, 3, numbers)
    assert not instance_norm_once_triton.choose_sizes(1, 17 * 9, 3, numbers)
    before = torch.random.get_rng_state()
    assert instance_norm_check.decide(*INSTANCE) == ""
    assert torch.equal(before, torch.random.get_rng_state())
    assert not instance_norm._is_off and not instance_norm._trusted  # only a GPU runs all programs at once


@pytest.mark.parametrize("module", [instance_norm_triton, instance_norm_once_triton], ids=["twice", "once"])
def test_a_wrong_instance_norm_gives_way_to_plain_torch(module, monkeypatch):
    true = module.backward
    monkeypatch.setattr(module, "backward", lambda *given: with_a_nan(true(*given)))
    said = instance_norm_check.decide(*INSTANCE)
    assert said.startswith("kernels: instance norm runs as plain torch: instance norm of ")
    assert "the gradient of the input has a relative error of nan" in said
    assert instance_norm._is_off


def test_what_reads_once_in_large_batches_is_checked_with_few_images(monkeypatch):
    """A narrow network has too few programs in the check's own sizes."""
    true = instance_norm_once_triton.backward
    monkeypatch.setattr(instance_norm_once_triton, "backward", lambda *given: with_a_nan(true(*given)))
    assert not instance_norm_once_triton.choose_sizes(1, 17 * 9, 3, instance_norm_once_triton.BACKWARD)
    said = instance_norm_check.decide(CPU, torch.float16, (3,), ((1, 17, 9),))
    assert "the gradient of the input has a relative error of nan" in said


def test_a_wrong_result_is_found_where_only_forward_reads_once(monkeypatch):
    true = instance_norm_once_triton.forward
    monkeypatch.setattr(instance_norm_once_triton, "forward", lambda *given: with_a_nan(true(*given)))
    monkeypatch.setattr(instance_norm_once_triton, "BACKWARD", (4, 4, 32, 4))  # as if an image had too many programs
    said = instance_norm_check.decide(CPU, torch.float16, (3,), ((2, 17, 9),))
    assert "the result has a relative error of nan" in said
