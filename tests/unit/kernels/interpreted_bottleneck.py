"""The Triton kernels of a bottleneck as Triton's interpreter runs them on the CPU, against plain torch in float64.

test_instance_norm.py runs this file in a process of its own: the interpreter must be chosen before Triton is imported.
"""

import pytest
import torch
from torch import Tensor

from sightline.kernels import bottleneck, bottleneck_check, bottleneck_cudnn, bottleneck_steps, self_check
from sightline.kernels import bottleneck_reference as reference
from sightline.kernels import bottleneck_triton as passes
from sightline.kernels.bottleneck_steps import Norm
from sightline.kernels.cudnn.backend import CudnnError
from sightline.models.resnet import Bottleneck, ResNetConfig

SHAPE = (3, 64, 5, 7)  # 105 rows fill no tile


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    """Several tiles and several programs for each reduction, in little time."""
    monkeypatch.setattr(passes, "TILE", 2048)
    monkeypatch.setattr(passes, "SUMMED_TILE", 1024)
    monkeypatch.setattr(passes, "PROGRAMS", 3)


def draw(*shape: int) -> Tensor:
    return (
        torch.randn(shape)
        .half()
        .contiguous(memory_format=torch.channels_last if len(shape) == 4 else torch.contiguous_format)
    )


def make_norm(channels: int) -> Norm:
    gradients = torch.full((2, 2 * channels), float("nan"))  # parts of longer rows, as in the operation
    return Norm(
        torch.randn(channels) * 0.3,
        torch.rand(channels) + 0.5,
        torch.rand(channels) + 0.5,
        gradients[0, 8 : 8 + channels],
        gradients[1, 8 : 8 + channels],
    )


def wide(norm: Norm | None) -> Norm | None:
    return Norm(*(each.double().clone() for each in norm)) if norm else None


def check(found: Tensor, expected: Tensor, rtol: float = 1e-3, atol: float = 1e-3) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=atol)


def test_sums_and_statistics():
    y = draw(*SHAPE) + 2
    sums = passes.statistics(y)
    check(sums[0], y.double().sum((0, 2, 3)), 1e-5, 1e-3)
    check(sums[1], y.double().square().sum((0, 2, 3)), 1e-5, 1e-3)
    gamma, beta = torch.rand(64) + 0.5, torch.randn(64)
    stats, half = torch.full((5, 192), float("nan")), torch.full((2, 192), float("nan"), dtype=torch.half)
    passes.finish(sums, (gamma, beta), 105, 1e-5, stats[:, 64:128], half[:, 64:128])
    expected = torch.zeros(5, 64).double(), torch.zeros(2, 64).double()
    reference.finish(sums.double(), (gamma.double(), beta.double()), 105, 1e-5, *expected)
    check(stats[:, 64:128], expected[0], 1e-4, 1e-4)
    check(half[:, 64:128], expected[1])
    assert stats[:, :64].isnan().all() and half[:, 128:].isnan().all()
    torch.testing.assert_close(stats[2, 64:128].double(), y.double().var((0, 2, 3)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("steps", [passes, reference], ids=["passes", "reference"])
def test_the_mean_of_a_channel_becomes_beta_though_its_scale_is_rounded(steps):
    y, gamma, beta = draw(*SHAPE).float() + 30, torch.rand(64) + 0.5, torch.randn(64)
    sums = torch.stack([y.sum((0, 2, 3)), y.square().sum((0, 2, 3))])
    stats, half = torch.empty(5, 64), torch.empty(2, 64, dtype=torch.half)
    steps.finish(sums, (gamma, beta), 105, 1e-5, stats, half)
    scale, bias = half.double()
    error = (sums[0].double() / 105 * scale + bias - beta).abs()
    assert (error <= bias.abs() * 2.0**-11 + 1e-4).all()  # the rounding of the bias alone


@pytest.mark.parametrize("channels", [64, pytest.param(192, marks=pytest.mark.slow)])
@pytest.mark.parametrize("projected", [False, True], ids=["identity", "projected"])
def test_the_end_of_a_block_and_its_gradients(projected, channels):
    shape = (2, channels, 3, 5)
    y, shortcut, grad = draw(*shape), draw(*shape), draw(*shape)
    scales = (torch.rand(channels) + 0.5, torch.randn(channels))
    other = (torch.rand(channels) + 0.5, torch.randn(channels)) if projected else None
    out, bits = passes.end(y, scales, shortcut, other)
    as_wide = lambda pair: tuple(each.double() for each in pair) if pair else None  # noqa: E731
    exact, exact_bits = reference.end(y.double(), as_wide(scales), shortcut.double(), as_wide(other))
    check(out, exact)
    assert torch.equal(bits, exact_bits)
    norm, second = make_norm(channels), make_norm(channels) if projected else None
    exact_norm, exact_second = wide(norm), wide(second)
    given = (shortcut, second) if projected else (None, None)
    exact_given = (shortcut.double(), exact_second) if projected else (None, None)
    passes.end_sums(grad, bits, y, norm, *given)
    reference.end_sums(grad.double(), bits, y.double(), exact_norm, *exact_given)
    check(norm.dbeta, exact_norm.dbeta)
    check(norm.dgamma, exact_norm.dgamma)
    if projected:
        check(second.dgamma, exact_second.dgamma)
        second.dbeta.copy_(norm.dbeta)
    found = passes.end_gradients(grad, bits, y, norm, *given)
    expected = reference.end_gradients(grad.double(), bits, y.double(), exact_norm, *exact_given)
    check(found[0], expected[0], 2e-3, 2e-3)
    check(found[1], expected[1], 2e-3, 2e-3)


@pytest.mark.parametrize("wants_input", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_norm_and_relu_inside(wants_input):
    y, grad, half, norm = draw(*SHAPE), draw(*SHAPE), torch.randn(2, 192).half()[:, 64:128], make_norm(64)
    active = reference.activate(y.double(), half.double())
    check(passes.activate(y, half), active, 1e-3, 1e-4)
    z = passes.inner_sums(grad, y, half, norm, wants_input)
    assert (z is not None) == wants_input
    if z is not None:
        check(z, active, 1e-3, 1e-4)
    exact = wide(norm)
    passed = grad.double().where(active > 0, 0)
    check(norm.dbeta, passed.sum((0, 2, 3)))
    check(
        norm.dgamma,
        (passed * (y.double() - exact.mean.view(1, -1, 1, 1)) * exact.rstd.view(1, -1, 1, 1)).sum((0, 2, 3)),
    )
    expected = reference._behind_norm(passed, y.double(), exact)
    check(
        passes.inner_gradient(passed.half().contiguous(memory_format=torch.channels_last), y, half, norm, True),
        expected,
        2e-3,
        2e-3,
    )
    check(passes.inner_gradient(grad.clone(), y, half, norm, False), expected, 2e-3, 2e-3)


def test_what_is_not_finite_is_seen():
    y, shortcut = draw(1, 64, 2, 2), draw(1, 64, 2, 2)
    y[0, 3, 1, 0] = float("nan")
    out, bits = passes.end(y, (torch.ones(64), torch.zeros(64)), shortcut, None)
    assert out[0, 3, 1, 0].isnan() and out.isnan().sum() == 1
    half = torch.stack([torch.ones(64), torch.zeros(64)]).half()
    assert passes.activate(y, half)[0, 3, 1, 0].isnan()
    grad, norm = draw(1, 64, 2, 2), make_norm(64)
    grad[0, 5] = float("inf")
    bits.fill_(255)
    passes.end_sums(grad, bits, shortcut, norm, None, None)
    assert not norm.dbeta[5].isfinite() and norm.dbeta[:5].isfinite().all()


class Broken:
    """A plan that ran once and no longer does."""

    def run(self, tensors):
        raise CudnnError("engine 2: status 5000")


def use_cudnn_steps(monkeypatch, plan: Broken | None) -> None:
    """Run the steps of CUDA on the CPU; `plan` is the engine that is chosen for every layer."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)  # without a driver it raises
    monkeypatch.setattr(passes, "TILE", 8192)  # few programs: an interpreted one takes milliseconds
    monkeypatch.setattr(passes, "SUMMED_TILE", 4096)
    monkeypatch.setattr(bottleneck, "_steps", lambda x: bottleneck_cudnn)
    monkeypatch.setattr(bottleneck_cudnn, "_choose_forward", lambda *given: plan)
    monkeypatch.setattr(bottleneck_cudnn, "_choose_backward", lambda *given: bottleneck_cudnn.Backward(plan, plan))
    monkeypatch.setattr(bottleneck_cudnn, "_choose_adder", lambda *given: None)
    for choices in ("_forwards", "_backwards", "_adders"):
        monkeypatch.setattr(bottleneck_cudnn, choices, {})


def test_a_block_whose_engines_stop_working_is_right_all_the_same(monkeypatch):
    """All that bottleneck_cudnn.py does without cuDNN: what replaces an engine, and what wins where it is faster."""
    use_cudnn_steps(monkeypatch, Broken())
    block = Bottleneck(ResNetConfig(), 64, 64, 2, True).to(memory_format=torch.channels_last).train()
    exact = Bottleneck(ResNetConfig(), 64, 64, 2, True).double().train()
    exact.load_state_dict(block.state_dict())
    x, outer = draw(2, 64, 6, 6).requires_grad_(), draw(2, 256, 3, 3)
    wide_x = x.detach().double().requires_grad_()
    expected = exact(wide_x)
    told = "convolution .* runs as plain torch: .*status 5000"
    with pytest.warns(RuntimeWarning, match=told):
        found = bottleneck.run(block, x)
    with pytest.warns(RuntimeWarning, match=told):
        found.backward(outer)
    assert not any(bottleneck_cudnn._forwards.values())
    assert set(bottleneck_cudnn._backwards.values()) == {bottleneck_cudnn.Backward(None, None)}
    expected.backward(outer.double())
    check(found.detach(), expected.detach(), 1e-2, 1e-2)
    for (name, one), (_, other) in zip(block.named_parameters(), exact.named_parameters(), strict=True):
        assert float((one.grad - other.grad).norm() / other.grad.norm()) < 0.1, name  # a ReLU near 0 may flip
    assert float((x.grad - wide_x.grad).norm() / wide_x.grad.norm()) < 0.1


def decide(monkeypatch, tmp_path, kind: tuple[int, int, bool]) -> str:
    """Check a block of (channels in, stride, projection) as on a machine without a record."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(self_check, "_reasons", {})
    block = Bottleneck(ResNetConfig(), kind[0], 64, *kind[1:]).to(memory_format=torch.channels_last)
    return bottleneck_check.decide(torch.device("cpu"), [block], (2, 5, 6))


SLOW_KINDS = [pytest.param(each, marks=pytest.mark.slow) for each in ((256, 1, False), (64, 1, True))]


@pytest.mark.parametrize("kind", [(64, 2, True), *SLOW_KINDS])
def test_the_passes_are_right_by_the_check_of_a_run(kind, monkeypatch, tmp_path):
    use_cudnn_steps(monkeypatch, None)
    assert "1 bottlenecks run fused" in decide(monkeypatch, tmp_path, kind)


def unmasked(true):
    return lambda grad, y, half, norm, is_masked: true(grad, y, half, norm, True)


def half_of_the_rows(true):
    return lambda y: true(y[:1]) * 2


def unwritten(true):
    return lambda *given: torch.empty_like(true(*given))


FAULTS = [
    pytest.param(
        "inner_gradient", unmasked, "the gradient of an input has a relative error of", marks=pytest.mark.slow
    ),
    ("statistics", half_of_the_rows, "running statistics differ by up to"),
    pytest.param("activate", unwritten, "running statistics differ by up to nan", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "spoil", "why"), FAULTS)
def test_a_wrong_pass_is_found_though_no_layer_wants_it_in_the_check(name, spoil, why, monkeypatch, tmp_path):
    """The check also runs all layers without engines: the plan here would never call these passes."""
    use_cudnn_steps(monkeypatch, None)
    for step in ("convolve", "convolve_backward", "add_dgrad"):
        true, plain = getattr(bottleneck_cudnn, step), getattr(reference, step)
        by_engine = lambda *given, true=true, plain=plain: (  # noqa: E731
            plain if bottleneck_steps.has_engines else true
        )(*given)
        monkeypatch.setattr(bottleneck_cudnn, step, by_engine)
    monkeypatch.setattr(passes, name, spoil(getattr(passes, name)))
    told = decide(monkeypatch, tmp_path, (256, 1, False))
    assert told.startswith("kernels: bottlenecks run as plain torch: a block 256>64>256/1: ") and why in told
