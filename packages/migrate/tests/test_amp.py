"""Mixed precision on the target: all spellings, the scaler, float16 as bfloat16, and what --amp decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sightline_migrate.reporting import record
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
    with torch.autocast("cuda"):
        assert product() is (torch.float16 if capable else torch.float32)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert product() is torch.bfloat16
    assert ("float16 is many times slower" in capsys.readouterr().err) is not capable
    assert torch.amp.GradScaler("cuda").is_enabled()


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


def test_custom_functions(on_cpu: Start):
    on_cpu(amp="keep")

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
    with torch.autocast("cuda"):
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
