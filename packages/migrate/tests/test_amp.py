"""Mixed precision on the target: all spellings, the scaler, float16 as bfloat16, and what --amp decides."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from sightline_migrate.reporting import advice, record
from sightline_migrate.rules import amp as rules_of_amp
from sightline_migrate.session import Session
from sightline_migrate.virtual import runtime

Start = Callable[..., Session]
SPELLINGS: dict[str, Callable[..., Any]] = {
    "torch.autocast": lambda **k: torch.autocast("cuda", **k),
    "torch.autocast keyword": lambda **k: torch.autocast(device_type="cuda", **k),
    "torch.amp.autocast": lambda **k: torch.amp.autocast("cuda", **k),
    "torch.cuda.amp.autocast": lambda **k: torch.cuda.amp.autocast(**k),
}
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def product(**options: Any) -> torch.dtype:
    return (torch.ones(2, 2, device="cuda") @ torch.ones(2, 2, device="cuda")).dtype


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_autocast(spelling: str, on_cpu: Start):
    on_cpu(amp="keep")
    autocast = SPELLINGS[spelling]
    with autocast():
        assert product() is torch.float16  # CUDA's default, not the CPU's
        assert torch.is_autocast_enabled() and torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_gpu_dtype() is torch.float16 and torch.get_autocast_dtype("cuda") is torch.float16
        with autocast(enabled=False):
            assert product() is torch.float32 and not torch.is_autocast_enabled()
    with autocast(dtype=torch.bfloat16):
        assert product() is torch.bfloat16
    assert autocast()(product)() is torch.float16  # as a decorator
    assert not torch.is_autocast_enabled() and product() is torch.float32


def test_autocast_of_the_cpu_is_the_scripts_own(on_cpu: Start):
    on_cpu(amp="off", fp16_to_bf16=True)
    with torch.autocast("cpu", dtype=torch.float16):
        assert product() is torch.float16


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_amp_off(spelling: str, on_cpu: Start, capsys: Any):
    on_cpu(amp="off")
    with SPELLINGS[spelling]():
        assert product() is torch.float32
    assert capsys.readouterr().err.count("autocast is off because of --amp off") == 1
    assert torch.amp.GradScaler("cuda").is_enabled()


@pytest.mark.parametrize("capable", [True, False])
def test_amp_auto_asks_the_cpu(capable: bool, on_cpu: Start, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_fp16": capable, "avx512_bf16": True})
    on_cpu(amp="auto")
    of_float16 = torch.float16 if capable else torch.float32
    assert torch.get_autocast_dtype("cuda") is torch.get_autocast_gpu_dtype() is of_float16
    with torch.autocast("cuda"):
        assert product() is torch.get_autocast_dtype("cuda") is of_float16 and torch.is_autocast_enabled()
        with torch.autocast("cuda", enabled=False):
            assert not torch.is_autocast_enabled()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert product() is torch.get_autocast_dtype("cuda") is torch.bfloat16
    assert ("autocast runs in float32: float16 is many times slower" in capsys.readouterr().err) is not capable
    assert torch.amp.GradScaler("cuda").is_enabled()


@pytest.fixture(params=[{"avx512_bf16": True}, {}], ids=["bfloat16 alone", "no 16 bits"])
def on_old_cpu(request: Any, on_cpu: Start, monkeypatch: pytest.MonkeyPatch) -> Start:
    """As on a CPU that computes in bfloat16 but not in float16, or in neither."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: request.param)
    return on_cpu


def drawn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


Mix = Callable[[Callable[..., torch.Tensor], Callable[..., torch.Tensor]], Any]
MIXES: dict[str, Mix] = {
    "linear": lambda a, b: F.linear(a(2, 4), b(3, 4), b(3)),
    "conv2d": lambda a, b: F.conv2d(a(1, 4, 5, 5), b(2, 4, 3, 3), b(2)),
    "conv_transpose2d": lambda a, b: F.conv_transpose2d(a(1, 4, 5, 5), b(4, 2, 3, 3), b(2)),
    "matmul": lambda a, b: a(2, 3, 4) @ b(4, 5),
    "matrix and vector": lambda a, b: a(3, 4) @ b(4),
    "dot": lambda a, b: a(4) @ b(4),
    "einsum": lambda a, b: torch.einsum("ij,jk->ik", a(2, 4), b(4, 3)),
    "tensordot": lambda a, b: torch.tensordot(a(2, 4), b(4, 3), 1),
    "multi_dot": lambda a, b: torch.linalg.multi_dot([a(2, 4), b(4, 4), a(4, 3)]),
    "bilinear": lambda a, b: F.bilinear(a(2, 4), a(2, 4), b(3, 4, 4)),
    "cross": lambda a, b: torch.linalg.cross(a(2, 3), b(2, 3)),
    "lerp": lambda a, b: torch.lerp(a(4), b(4), 0.25),
    "attention": lambda a, b: F.scaled_dot_product_attention(a(1, 2, 3, 4), b(1, 2, 5, 4), b(1, 2, 5, 4)),
    "cat": lambda a, b: torch.cat([a(2), b(3)]),
    "layer_norm": lambda a, b: F.layer_norm(a(2, 4), (4,), b(4), b(4)),
    "group_norm": lambda a, b: F.group_norm(a(2, 4, 3), 2, b(4), b(4)),
    "batch_norm": lambda a, b: F.batch_norm(a(3, 4), b(4), b(4).abs(), b(4), b(4), training=True),
    "mask": lambda a, b: a(4).masked_scatter(torch.arange(4) > 1, b(4)),
    "added rows": lambda a, b: torch.index_add(a(4, 2), 0, torch.tensor([1, 3]), b(2, 2)),
}
LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "LSTM": lambda: torch.nn.LSTM(4, 3),
    "LSTM of two layers": lambda: torch.nn.LSTM(4, 3, 2, bidirectional=True),
    "GRU": lambda: torch.nn.GRU(4, 3),
    "GRUCell": lambda: torch.nn.GRUCell(4, 3),
    "transformer": lambda: torch.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0),
}


@pytest.mark.parametrize("amp", ["auto", "keep"])
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
def test_types_may_be_mixed_under_autocast_as_on_a_gpu(amp: str, half: torch.dtype, on_old_cpu: Start):
    """Against the same calls in float32."""
    on_old_cpu(amp=amp)
    pairs = ((half, torch.float32), (torch.float32, half), (half, half), (torch.float32, torch.float32))
    close: dict[str, Any] = {"rtol": 0.03, "atol": 0.03, "check_dtype": False}
    for one, other in pairs:
        wide = [lambda *shape, given=given: drawn(*shape, dtype=given).float() for given in (one, other)]
        narrow = [lambda *shape, given=given: drawn(*shape, dtype=given) for given in (one, other)]
        for name, run in MIXES.items():
            with torch.autocast("cuda", half):
                got = run(*narrow)
            torch.testing.assert_close(got, run(*wide), **close, msg=lambda text, name=name: f"{name}: {text}")
        for name, make in LAYERS.items():
            torch.manual_seed(0)
            layer = make().to(other)
            x = drawn(3, 4, dtype=one) if name == "GRUCell" else drawn(3, 2, 4, dtype=one)
            with torch.autocast("cuda", half):
                found = layer(x)
            want = layer.float()(x.float())
            got, want = (each[0] if isinstance(each, tuple) else each for each in (found, want))
            torch.testing.assert_close(got, want, **close, msg=lambda text, name=name: f"{name}: {text}")


def test_writes_into_a_half_buffer_under_autocast(on_old_cpu: Start):
    """On a GPU the value is float16, as the script expects; here it is float32."""
    on_old_cpu()
    buffer, chosen = torch.zeros(4, 2, device="cuda").half(), torch.tensor([0, 3])
    with torch.autocast("cuda"):
        value = torch.ones(2, 2, device="cuda") @ torch.ones(2, 2, device="cuda")
        buffer[chosen] = value
        buffer[torch.tensor([False, True, False, False])] = value[:1]
        buffer.index_add_(0, chosen, value)
        buffer.index_copy_(0, torch.tensor([2]), value[:1])
        buffer.scatter_add_(0, chosen[:1, None], value)
    assert buffer.tolist() == [[6.0, 4.0], [2.0, 2.0], [2.0, 2.0], [4.0, 4.0]]


class Product(torch.autograd.Function):
    """As scripts write it: backward runs outside of autocast, with the types of forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient


def gradient_of_product(y: torch.Tensor, b: Callable[..., torch.Tensor]) -> torch.Tensor:
    x, weight = y.detach().requires_grad_(), b(4, 4).requires_grad_()
    return torch.autograd.grad(Product.apply(x, weight).float().sum(), weight)[0]


ROWS = torch.tensor([2, 0])
MEETINGS: dict[str, Callable[[torch.Tensor, Callable[..., torch.Tensor]], Any]] = {
    "linear": lambda y, b: F.linear(y, b(3, 4), b(3)),
    "conv1d": lambda y, b: F.conv1d(y[None], b(2, 4, 1)),
    "matmul": lambda y, b: y @ b(4, 2),
    "batch_norm": lambda y, b: F.batch_norm(y, b(4), b(4).abs(), b(4), b(4)),
    "layer_norm": lambda y, b: F.layer_norm(y, (4,), b(4), b(4)),
    "index_put_": lambda y, b: b(4, 4).index_put_((ROWS,), y[:2]),
    "scatter_reduce_": lambda y, b: b(4, 4).scatter_reduce_(0, ROWS.expand(4, 2).t(), y[:2], "sum"),
    "index_reduce_": lambda y, b: b(4, 4).index_reduce_(0, ROWS, y[:2], "amax"),
    "put_": lambda y, b: b(4, 4).put_(ROWS, y[0, :2]),
    "lerp_": lambda y, b: b(4, 4).lerp_(y, 0.25),
    "addmm_": lambda y, b: b(4, 4).addmm_(y, b(4, 4)),
    "complex": lambda y, b: torch.view_as_real(torch.complex(y, b(4, 4))),
    "allclose": lambda y, b: torch.tensor(torch.allclose(y, b(4, 4))),
    "embedding_bag": lambda y, b: F.embedding_bag(ROWS[None], b(4, 4), per_sample_weights=y[:1, :2], mode="sum"),
    "custom function": gradient_of_product,
}
TO_HALF: dict[str, Callable[[torch.nn.Module], Any]] = {
    "half": lambda module: module.half(),
    "to": lambda module: module.to("cuda", torch.float16),
    "a copy": lambda module: copy.deepcopy(module).half(),
    "by parameter": lambda module: [setattr(each, "data", each.data.half()) for each in module.parameters()],
}


@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning", "ignore:index_reduce:UserWarning")
@pytest.mark.parametrize("way", TO_HALF)
def test_half_weights_keep_autocast_in_float16(way: str, on_old_cpu: Start, capsys: Any):
    """Results then have a GPU's type, and may meet half tensors inside and after; values against float32."""
    on_old_cpu()
    layer = torch.nn.Linear(4, 4).cuda()
    converted = TO_HALF[way](layer)
    layer = converted if isinstance(converted, torch.nn.Module) else layer
    x = drawn(4, 4, dtype=torch.float16)
    half, wide = (lambda *shape: drawn(*shape, dtype=torch.float16)), (lambda *shape: half(*shape).float())
    close: dict[str, Any] = {"rtol": 0.02, "atol": 0.02, "check_dtype": False}
    with torch.autocast("cuda"):
        y = layer(x)
        assert y.dtype is torch.float16 is torch.get_autocast_dtype("cuda") and torch.is_autocast_enabled()
        inside = {name: run(y, half) for name, run in MEETINGS.items()}
        mixes = {name: run(half, wide) for name, run in MIXES.items()}
    for name, run in MEETINGS.items():
        want = run(y.float(), wide)
        for got in (inside[name], run(y, half)):
            torch.testing.assert_close(got, want, **close, msg=lambda text, name=name: f"{name}: {text}")
    for name, run in MIXES.items():
        torch.testing.assert_close(mixes[name], run(wide, wide), **close, msg=lambda t, name=name: f"{name}: {t}")
    # the operations that CUDA's autocast runs in float16
    in_half = "linear conv2d conv_transpose2d matmul einsum attention".split()
    assert {mixes[name].dtype for name in in_half} == {torch.float16}
    assert capsys.readouterr().err == ""
    del layer, converted


def test_type_of_autocast_follows_the_live_weights(on_old_cpu: Start, capsys: Any):
    on_old_cpu()

    @torch.autocast("cuda")
    def decorated() -> torch.dtype:
        return product()

    model, stored = torch.nn.Linear(2, 2).cuda(), torch.autocast("cuda")
    found = [torch.get_autocast_dtype("cuda"), decorated()]
    model.half()
    with stored:
        found += [torch.get_autocast_dtype("cuda"), product(), decorated()]
    model.float()
    checkpoint = copy.deepcopy(model).half()
    found.append(decorated())
    del checkpoint  # as a script that saves weights in half after each epoch
    with stored:
        model.half()  # regions inside one follow it
        found += [decorated(), torch.get_autocast_dtype("cuda")]
    found.append(torch.get_autocast_dtype("cuda"))
    wide, half = torch.float32, torch.float16
    assert found == [wide, wide, half, half, half, half, wide, wide, half]
    assert capsys.readouterr().err.count("autocast runs in float32: float16 is many times slower") == 1


def test_modules_that_are_gone_are_forgotten(on_old_cpu: Start):
    on_old_cpu()
    for _ in range(20):
        torch.nn.Linear(1, 1)
    kept = torch.nn.Linear(1, 1)
    assert [each for each in rules_of_amp._modules.values() if isinstance(each, torch.nn.Linear)] == [kept]


def test_library_enters_autocast_by_the_device_of_a_tensor(on_old_cpu: Start, recwarn: Any):
    on_old_cpu()
    x, half = torch.ones(2, 2, device="cuda"), torch.ones(2, 2).half()
    with torch.autocast("cuda"):
        kind = x.device.type
        seen = {
            "device_type": kind,
            "dtype": torch.get_autocast_dtype(kind),
            "enabled": torch.is_autocast_enabled(kind),
        }
        with torch.autocast(**seen):
            assert (x @ half).tolist() == [[2.0, 2.0]] * 2
    with torch.autocast(**seen):  # later, as code that computes a region once more
        assert (x @ half).tolist() == [[2.0, 2.0]] * 2
    assert not [each for each in recwarn if "autocast" in str(each.message)]


def half_backbone() -> torch.nn.Module:
    from torch import nn

    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.GroupNorm(2, 4), nn.Flatten(), nn.LayerNorm(36)]
    return nn.Sequential(*layers, nn.Linear(36, 8)).requires_grad_(False)


class LowRank(torch.nn.Module):
    """LoRA: a frozen half layer plus a trained float32 one of low rank."""

    def __init__(self, frozen: torch.nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down, self.up = torch.nn.Parameter(torch.ones(2, 8) / 8), torch.nn.Parameter(torch.ones(3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + F.linear(F.linear(x, self.down), self.up)


@pytest.mark.parametrize("amp", ["auto", "keep"])
@pytest.mark.parametrize("head", ["linear", "LoRA"])
def test_frozen_half_backbone_and_a_float32_head_train(amp: str, head: str, on_old_cpu: Start):
    """CLIP-like fine-tuning; gradients against the same model in float32 without autocast."""
    torch.manual_seed(0)
    last = LowRank(torch.nn.Linear(8, 3)) if head == "LoRA" else torch.nn.Linear(8, 3)
    model = torch.nn.Sequential(half_backbone(), last)
    plain, x, target = copy.deepcopy(model), torch.randn(5, 3, 5, 5), torch.tensor([0, 1, 2, 0, 1])
    F.cross_entropy(plain(x), target).backward()

    on_old_cpu(amp=amp)
    model.cuda()
    model[0].half()
    if head == "LoRA":
        model[1].frozen.half()
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
    with torch.autocast("cuda"):
        loss = F.cross_entropy(model(x.cuda().half()), target.cuda())
    scaler.scale(loss).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) is (other.grad is None)
        if one.grad is not None and other.grad is not None:
            torch.testing.assert_close(one.grad / 8, other.grad, rtol=0.02, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_float32_weights_give_the_numbers_of_the_scripts_own_run(
    dtype: torch.dtype, on_cpu: Start, monkeypatch: pytest.MonkeyPatch
):
    """In every digit: without autocast where the CPU emulates its type, else with the CPU's autocast."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})

    def weights(device: str, is_on: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.ModuleList([half_backbone().requires_grad_(True), torch.nn.LSTM(8, 4)]).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for _ in range(3):
            with torch.autocast(device, dtype=dtype, enabled=is_on):
                loss = model[1](model[0](torch.randn(4, 3, 5, 5).to(device))[None])[0].float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [each.detach() for each in model.parameters()]

    own = weights("cpu", dtype is torch.bfloat16)
    on_cpu()
    for one, other in zip(weights("cuda", True), own, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_recomputed_regions_run_in_the_same_type(
    dtype: torch.dtype, use_reentrant: bool, on_old_cpu: Start, recwarn: Any
):
    """torch enters the region again during backward, for the target and in the type that it had."""
    on_old_cpu()
    weight, seen = drawn(4, 4, dtype=dtype), []
    model = torch.nn.Linear(1, 1).to(dtype)
    x = torch.ones(2, 4, device="cuda", requires_grad=True)

    def part(x: torch.Tensor) -> torch.Tensor:
        seen.append((torch.is_autocast_enabled(), torch.get_autocast_dtype("cuda")))
        return F.linear(x, weight)

    with torch.autocast("cuda"):
        torch.utils.checkpoint.checkpoint(part, x, use_reentrant=use_reentrant).sum().backward()
    assert seen == [(True, model.weight.dtype)] * 2
    torch.testing.assert_close(x.grad, weight.float().sum(0).expand(2, 4), rtol=2e-3, atol=2e-3)
    assert not [each for each in recwarn if "autocast" in str(each.message)]


def test_mixed_types_after_autocast_get_advice(on_old_cpu: Start, capsys: Any):
    """A GPU's results are float16 there: what follows autocast may rely on that. Half modules came too late here."""
    session = on_old_cpu()
    with torch.autocast("cuda"):
        x = torch.ones(2, 2, device="cuda") @ torch.ones(2, 2, device="cuda")
    head = torch.nn.Linear(2, 2).half()
    conv, cell, row = torch.nn.Conv1d(2, 2, 1).half(), torch.nn.LSTM(2, 2).half(), torch.zeros(2).half()
    runs = (lambda: head(x), lambda: conv(x), lambda: cell(x), lambda: row @ x[0], lambda: row.scatter_(0, at, x[0]))
    at = torch.tensor([0, 1])
    advice.install(session)
    for wrong in runs:
        with pytest.raises((RuntimeError, ValueError)) as caught:
            wrong()
        sys.excepthook(caught.type, caught.value, caught.tb)
        assert "test_amp.py" in (said := capsys.readouterr().err.splitlines()[-1])
        assert "use --float32" in said and "or --amp keep" in said


def test_mixed_types_in_a_compiled_function(on_old_cpu: Start):
    on_old_cpu()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)).half()

    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda"):
            return model(x)

    x = torch.ones(2, 4)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(run, backend="aot_eager", fullgraph=True)(x), run(x))


@pytest.mark.parametrize("amp", ["auto", "keep"])
def test_graph_breaks_inside_autocast(amp: str, on_old_cpu: Start):
    """The code after a break enters the region again."""
    on_old_cpu(amp=amp)
    model = torch.nn.Linear(4, 4)

    def run(x: torch.Tensor) -> tuple[Any, ...]:
        with torch.autocast("cuda"):
            y = model(x)
            torch._dynamo.graph_break()
            return model(y), torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled()

    x = torch.ones(2, 4)
    torch._dynamo.reset()
    compiled = torch.compile(run, backend="eager")
    for convert in (model.float, model.half):
        convert()
        (got, *seen), (want, *seen_plainly) = compiled(x), run(x)
        torch.testing.assert_close(got, want)
        assert seen == seen_plainly == [want.dtype, True]


def test_region_operations_of_torchvision(on_old_cpu: Start):
    """Under autocast CUDA's take mixed types and return that of the input; against float32."""
    ops = pytest.importorskip("torchvision").ops
    on_old_cpu(amp="keep")
    x, boxes, size = torch.rand(1, 4, 8, 8), torch.tensor([[0.0, 0.0, 0.0, 4.0, 4.0]]), (2, 2)
    for run in (ops.roi_align, ops.roi_pool, ops.ps_roi_align, ops.ps_roi_pool):
        want = run(x, boxes, size)
        for one, other in ((torch.float16, torch.float32), (torch.float32, torch.float16)):
            with torch.autocast("cuda"):
                got = run(x.to(one), boxes.to(other), size)
            assert got.dtype is one
            torch.testing.assert_close(got.float(), want, rtol=0.01, atol=0.01)


def test_arithmetic_of_this_cpu():
    with open("/proc/cpuinfo") as file:
        flags = next(line for line in file if line.startswith("flags")).split()
    assert runtime.has_arithmetic(torch.bfloat16) == bool({"avx512_bf16", "amx_bf16"} & set(flags))


@pytest.mark.parametrize("make", [torch.cuda.amp.GradScaler, lambda **k: torch.amp.GradScaler("cuda", **k),
                                  lambda **k: torch.GradScaler(**k)])  # fmt: skip
def test_scaler_scales_on_the_target(make: Callable[..., Any], on_cpu: Start):
    on_cpu(amp="keep")
    scaler = make(init_scale=8.0)
    weight = torch.nn.Parameter(torch.ones(2, device="cuda"))
    optimizer = torch.optim.SGD([weight], 0.5)
    scaler.scale((weight * torch.tensor([1.0, 2.0])).sum()).backward()
    assert weight.grad is not None and weight.grad.tolist() == [8.0, 16.0]
    scaler.unscale_(optimizer)
    assert weight.grad.tolist() == [1.0, 2.0]
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [0.5, 0.0] and scaler.get_scale() == 8.0
    make().load_state_dict(scaler.state_dict())


@pytest.mark.parametrize("options", [{"float32": True}, {"amp": "off"}], ids=str)
def test_scaler_keeps_its_state_and_changes_no_weight(options: dict[str, Any], on_cpu: Start):
    """Scripts log state_dict()["scale"], and a GPU's enabled scaler refuses the empty state of a disabled one."""
    on_cpu(**options)

    def trained(scaler: torch.amp.GradScaler) -> torch.Tensor:
        torch.manual_seed(0)
        net = torch.nn.Linear(4, 3).cuda()
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        for _ in range(5):
            optimizer.zero_grad()
            scaler.scale(net(torch.randn(8, 4)).square().mean()).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        return net.weight.detach()

    on, off = torch.cuda.amp.GradScaler(2.0**10, 2.0, 0.5, 3, True), torch.cuda.amp.GradScaler(enabled=False)
    assert torch.equal(trained(on), trained(off))
    assert on.state_dict()["scale"] == 2.0**11 and off.state_dict() == {}
    torch.amp.GradScaler("cpu").load_state_dict(on.state_dict())


@pytest.mark.parametrize("make", [torch.cuda.amp.GradScaler, lambda *a, **k: torch.amp.GradScaler("cuda", *a, **k)])
@pytest.mark.parametrize("given", [(), (2.0**10, 2.0, 0.5, 3, True)], ids=["default", "positions"])
def test_scaler_is_off_if_float16_becomes_bfloat16(make: Any, given: tuple[Any, ...], on_cpu: Start, capsys: Any):
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    on_cpu(fp16_to_bf16=True, amp="keep")
    scaler = make(*given)
    weight = torch.nn.Parameter(torch.ones(2, 2, device="cuda"))
    optimizer = torch.optim.SGD([weight], 0.5)
    with torch.autocast("cuda", dtype=torch.float16):
        assert (weight @ weight).dtype is torch.bfloat16
        loss = (weight @ weight).sum().float()
    assert not scaler.is_enabled() and scaler.scale(loss) is loss and scaler.get_scale() == disabled.get_scale() == 1
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    assert weight.grad is not None and weight.grad.tolist() == [[4.0, 4.0], [4.0, 4.0]]
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [[-1, -1], [-1, -1]] and scaler.state_dict() == disabled.state_dict() == {}
    scaler.load_state_dict({"scale": 8.0, "growth_factor": 2.0})  # of a GPU
    make(enabled=False) if not given else make(*given[:4], False)
    assert capsys.readouterr().err.count("GradScaler is off: with --fp16-to-bf16") == 1
    said = {each.what for each in record.records.values() if each.rule.name == "torch.amp.GradScaler.__init__"}
    assert said == {"off: bfloat16 needs no scaling"}


@pytest.mark.parametrize("amp", ["auto", "keep"])
def test_custom_functions(amp: str, on_cpu: Start):
    on_cpu(amp=amp)

    class Double(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            assert x.dtype is torch.float32 and not torch.is_autocast_enabled("cuda")
            return x * 2

        @staticmethod
        @torch.cuda.amp.custom_bwd
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return gradient * 2

    x = torch.ones(2, dtype=torch.float16, requires_grad=True)
    with torch.autocast("cuda"):  # also where it runs in float32: the script's code relies on the type
        Double.apply(x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2.0, 2.0]


X = torch.ones(2)
REQUESTS: dict[str, Callable[[], Any]] = {
    "half": lambda: X.half(),
    "to": lambda: X.to(torch.float16),
    "to with a device": lambda: X.to("cuda", torch.float16),
    "to with keywords": lambda: X.to(device="cuda", dtype=torch.half),
    "type": lambda: X.type(torch.float16),
    "type of cuda": lambda: X.type("torch.cuda.HalfTensor"),
    "type of the host": lambda: X.type(torch.HalfTensor),
    "factory": lambda: torch.zeros(2, dtype=torch.float16, device="cuda"),
    "factory of a tensor": lambda: X.new_zeros(2, dtype=torch.half),
    "typed tensor": lambda: torch.cuda.HalfTensor([1]),
    "Module.half": lambda: torch.nn.Linear(2, 2).half().weight,
    "Module.to": lambda: torch.nn.Linear(2, 2).to("cuda", torch.float16).weight,
    "layer": lambda: torch.nn.Linear(2, 2, bias=False, dtype=torch.float16).weight,
    "autocast": lambda: product_in(torch.autocast("cuda", dtype=torch.float16)),
    "autocast by default": lambda: product_in(torch.cuda.amp.autocast()),
}
BRAIN: dict[str, Callable[[], Any]] = {
    "bfloat16": lambda: X.bfloat16(),
    "to bfloat16": lambda: X.cuda().to(torch.bfloat16),
    "Module.bfloat16": lambda: torch.nn.Linear(2, 2).bfloat16().weight,
    "autocast to bfloat16": lambda: product_in(torch.autocast("cuda", torch.bfloat16)),
}


def product_in(context: Any) -> torch.Tensor:
    with context:
        return torch.ones(2, 2) @ torch.ones(2, 2)


@pytest.mark.parametrize("option", ["fp16_to_bf16", "float32"])
def test_each_conversion_is_counted_once_in_a_class_of_its_own(option: str, on_cpu: Start):
    on_cpu(**{option: True}, amp="keep")
    used = torch.float32 if option == "float32" else torch.bfloat16
    for name, make in (REQUESTS | (BRAIN if option == "float32" else {})).items():
        record.reset()
        assert make().dtype is used, name
        found = [(record.counts[key], each.what) for key, each in record.records.items() if each.kind == "converted"]
        asked = "bfloat16" if name in BRAIN else "float16"
        assert found == [(1, f"{str(used)[6:]} instead of {asked}")], name
        assert not [each for each in record.records.values() if each.kind == "exact" and name != "to bfloat16"], name
    record.reset()
    torch.set_default_dtype(torch.float16)
    torch.set_autocast_dtype("cuda", torch.float16)
    try:
        assert torch.ones(1).dtype is used and torch.get_autocast_dtype("cuda") is used
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_autocast_dtype("cpu", torch.bfloat16)
    assert [each.rule.name for each in record.records.values() if each.kind == "converted"] == [
        "torch.set_default_dtype",
        "torch.set_autocast_dtype",
    ]
    assert torch.tensor([1.0]).double().dtype is torch.float64


@pytest.mark.parametrize("way", ["weights", "autocast"])
@pytest.mark.parametrize("capable", [True, False])
def test_emulated_16_bits_are_said_once_after_a_step(
    way: str, capable: bool, on_cpu: Start, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": capable})
    on_cpu(amp="keep")
    assert torch.cuda.is_bf16_supported() and torch.cuda.is_bf16_supported(including_emulation=False) is capable
    net = torch.nn.Linear(2, 2).cuda()
    optimizers = [torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 0.1), torch.optim.SGD(net.parameters(), 0.1)]
    net = net.bfloat16() if way == "weights" else net
    with torch.autocast("cuda", torch.bfloat16, enabled=way == "autocast"):
        net(torch.ones(1, 2, device="cuda").to(net.weight.dtype)).sum().backward()
    for optimizer in optimizers * 2:
        optimizer.step()
    assert capsys.readouterr().err.count("this CPU emulates bfloat16, many times slower") == (0 if capable else 1)


@pytest.mark.parametrize("amp", ["keep", "auto"])
def test_emulation_is_seen_behind_float32_masters(
    amp: str, on_cpu: Start, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    """As in guided-diffusion: the optimizer holds float32 copies of a float16 model's weights."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    on_cpu(amp=amp)
    net = torch.nn.Sequential(torch.nn.Linear(2, 2)).cuda()
    net[0].weight.data = net[0].weight.data.half()
    net[0].bias.data = net[0].bias.data.half()
    masters = [torch.nn.Parameter(each.detach().float()) for each in net.parameters()]
    optimizer = torch.optim.SGD(masters, 0.1)
    for _ in range(2):
        net(torch.ones(1, 2, device="cuda").half()).sum().backward()
        optimizer.step()
    assert capsys.readouterr().err.count("this CPU emulates float16, many times slower") == 1


def test_autocast_that_the_script_turns_off_is_said_so(on_cpu: Start):
    on_cpu(amp="keep")
    product_in(torch.autocast("cuda", enabled=False))
    assert [each.what for each in record.records.values()] == ["off, as the script asks"]


def test_float16_data_stays_what_it_is(on_cpu: Start):
    """Requests are rewritten, never data; and float16 itself keeps its meaning."""
    numpy = pytest.importorskip("numpy")
    on_cpu(fp16_to_bf16=True)
    assert torch.from_numpy(numpy.ones(2, numpy.float16)).dtype is torch.float16
    assert str(torch.float16) == "torch.float16"


def test_float16_of_compilers_is_not_touched(on_cpu: Start):
    """The fusion patterns of inductor are written in float16; turned into bfloat16 they would match nothing."""
    on_cpu(fp16_to_bf16=True)
    code = compile("import torch\nmade = torch.ones(1).half()", torch.__path__[0] + "/_inductor/pattern.py", "exec")
    space: dict[str, Any] = {}
    exec(code, space)
    assert space["made"].dtype is torch.float16
    assert not [each for each in record.records.values() if "_inductor" in each.site.file]


def test_without_the_option_float16_stays(on_cpu: Start):
    on_cpu()
    assert torch.ones(1).half().dtype is torch.float16 and torch.zeros(1, dtype=torch.half).dtype is torch.float16
