"""apex and pynvml where they are missing: what they compute against plain torch, and what they refuse."""

from __future__ import annotations

import copy
import ctypes
import importlib
import os
import pickle
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sightline_migrate import deactivate
from sightline_migrate.reporting import record
from sightline_migrate.stand_ins import finder

Start = Callable[..., Any]


@pytest.fixture
def apex(on_cpu: Start) -> Any:
    """On a CPU where float16 is kept, so that losses are scaled."""
    on_cpu(amp="keep")
    return importlib.import_module("apex")


def kinds(name: str) -> set[str]:
    return {each.kind for each in record.records.values() if each.rule.name == name}


# import


def test_only_while_migrated_and_only_where_missing(on_cpu: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    on_cpu()
    assert finder.is_missing("apex")
    import apex
    from apex.parallel import LARC

    assert apex.parallel.LARC is LARC and isinstance(LARC, type)
    assert apex.optimizers.FusedAdam.__module__ == "apex.optimizers.fused_adam"
    deactivate()
    assert not [name for name in sys.modules if name.partition(".")[0] == "apex"]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("apex")
    (tmp_path / "apex.py").write_text("mine = True")
    on_cpu()
    monkeypatch.syspath_prepend(tmp_path)  # a module beside the script, found after activation
    assert not finder.is_missing("apex")
    assert importlib.import_module("apex").mine
    del sys.modules["apex"]


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("apex.amp", "initialize scale_loss state_dict load_state_dict master_params float_function half_function"),
        ("apex.multi_tensor_apply", "MultiTensorApply multi_tensor_applier"),
        ("apex.normalization", "FusedLayerNorm FusedRMSNorm MixedFusedLayerNorm MixedFusedRMSNorm"),
        ("apex.normalization.fused_layer_norm", "FusedLayerNorm fused_layer_norm_affine fused_rms_norm_affine"),
        ("apex.optimizers", "FusedAdagrad FusedAdam FusedLAMB FusedNovoGrad FusedSGD"),
        ("apex.parallel", "DistributedDataParallel LARC Reducer SyncBatchNorm convert_syncbn_model"),
        ("apex.parallel", "create_syncbn_process_group"),
        ("apex.parallel.LARC", "LARC"),
        ("apex.parallel.distributed", "DistributedDataParallel Reducer"),
        ("apex.parallel.optimized_sync_batchnorm", "SyncBatchNorm"),
    ],
)
def test_names_are_where_apex_has_them(apex: Any, module: str, names: str):
    found = importlib.import_module(module)
    assert [name for name in names.split() if not hasattr(found, name)] == []


def test_what_is_missing_says_where_it_was_asked_for(apex: Any, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ModuleNotFoundError, match=r"test_stand_ins.py:\d+: apex.contrib is not in the stand-in"):
        importlib.import_module("apex.contrib.xentropy")
    with pytest.raises(AttributeError, match=r"test_stand_ins.py:\d+: apex.optimizers.FusedMixedPrecisionLamb"):
        _ = apex.optimizers.FusedMixedPrecisionLamb
    with pytest.raises(ImportError):
        from apex.amp import no_such_name  # noqa: F401
    assert "apex.amp.no_such_name" in capsys.readouterr().err
    assert kinds("apex.contrib") == kinds("apex.amp.no_such_name") == {"refused"}
    applier = apex.multi_tensor_apply.multi_tensor_applier
    assert not applier.available
    with pytest.raises(RuntimeError, match=r"test_stand_ins.py:\d+: .*CUDA kernels"):
        applier(None, None, [])
    assert kinds("apex.multi_tensor_apply.multi_tensor_applier") == {"refused"}


# optimizers: tests/migrate/test_apex_optimizers.py of the repository compares their steps with NumPy


@pytest.mark.parametrize("name", ["FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedSGD"])
def test_zero_grad_drops_gradients_as_apex_does(apex: Any, name: str):
    weight, kind = nn.Parameter(torch.ones(2)), getattr(apex.optimizers, name)

    def left(call: dict[str, bool], **options: bool) -> list[float] | None:
        weight.grad = torch.ones(2)
        kind([weight], lr=0.1, **options).zero_grad(**call)
        return None if weight.grad is None else weight.grad.tolist()

    assert left({}) == ([0.0, 0.0] if name == "FusedSGD" else None)
    assert left({"set_to_none": False}) == [0.0, 0.0] and left({"set_to_none": True}) is None
    assert left({}, set_grad_none=False) == [0.0, 0.0] and left({}, set_grad_none=True) is None


@pytest.mark.parametrize("name", ["FusedAdam", "FusedLAMB", "FusedNovoGrad"])
def test_optimizers_have_no_amsgrad(apex: Any, name: str):
    with pytest.raises(RuntimeError, match=f"{name} has no AMSGrad variant"):
        getattr(apex.optimizers, name)([nn.Parameter(torch.ones(2))], amsgrad=True)


def test_what_apex_refuses_is_refused(apex: Any):
    with pytest.raises(RuntimeError, match="master_weights=True needs capturable=True"):
        apex.optimizers.FusedAdam([nn.Parameter(torch.ones(2))], master_weights=True)
    for name in ("FusedLayerNorm", "FusedRMSNorm"):
        with pytest.raises(RuntimeError, match=f"Mixed{name} always has weights.*use {name}"):
            getattr(apex.normalization, f"Mixed{name}")(8, elementwise_affine=False)


def test_larc_is_otherwise_the_optimizer_that_it_wraps(apex: Any):
    weight = nn.Parameter(torch.ones(3))
    inner = torch.optim.SGD([weight], lr=0.25, momentum=0.5)
    outer = apex.parallel.LARC(inner)
    assert outer.param_groups is inner.param_groups and outer.state is inner.state
    assert outer.state_dict() == inner.state_dict() and outer.defaults["momentum"] == 0.5
    weight.grad = torch.ones(3)
    outer.zero_grad()
    assert weight.grad is None
    with pytest.raises(AttributeError, match="nothing"):
        _ = outer.nothing
    assert copy.deepcopy(outer).param_groups[0]["lr"] == 0.25


def test_optimizer_state_goes_on_after_a_reload(apex: Any):
    model = nn.Linear(3, 2)
    optimizer = apex.optimizers.FusedLAMB(model.parameters(), lr=0.1)
    data = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))

    def step(model: nn.Module, optimizer: Any) -> torch.Tensor:
        optimizer.zero_grad()
        model(data).pow(2).mean().backward()
        optimizer.step()
        return next(model.parameters()).detach().clone()

    step(model, optimizer)
    again = copy.deepcopy(model)
    other = apex.optimizers.FusedLAMB(again.parameters(), lr=0.1)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    torch.testing.assert_close(step(again, other), step(model, optimizer), rtol=0, atol=0)
    assert kinds("apex.optimizers.FusedLAMB") == {"adapted"}


# layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_layers(apex: Any, dtype: torch.dtype):
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0)) * 3 + 1
    wide = x.to(dtype).double()
    centred = wide - wide.mean(-1, keepdim=True)
    layer_norm = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    rms_norm = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    within = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    n = apex.normalization
    for kind, want in ((n.FusedLayerNorm, layer_norm), (n.FusedRMSNorm, rms_norm)):
        got = kind(8).to(dtype)(x.to(dtype))
        assert got.dtype is dtype
        torch.testing.assert_close(got.double(), want, **within)
    for kind, want in ((n.MixedFusedLayerNorm, layer_norm), (n.MixedFusedRMSNorm, rms_norm)):
        got = kind(8)(x.to(dtype))
        assert got.dtype is torch.float32  # that of the weight
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    functions = n.fused_layer_norm
    got = functions.fused_rms_norm_affine(x, torch.full((8,), 2.0), 8, 1e-5)
    torch.testing.assert_close(got, torch.nn.functional.rms_norm(x, (8,), None, 1e-5) * 2)


def test_batch_norm_converted_to_channels_last_keeps_weights_and_statistics(apex: Any):
    x = torch.randn(4, 3, 5, 6, generator=torch.Generator().manual_seed(0))
    plain = nn.Sequential(nn.BatchNorm2d(3))
    weight, want = plain[0].weight, plain(x)
    expected = plain.eval()(x)
    converted = apex.parallel.convert_syncbn_model(plain, channel_last=True)
    assert isinstance(converted[0], apex.parallel.SyncBatchNorm) and converted[0].weight is weight
    torch.testing.assert_close(converted(x.movedim(1, -1)).movedim(-1, 1), expected)
    torch.testing.assert_close(converted.train()(x.movedim(1, -1)).movedim(-1, 1), want)


# mixed precision


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.layer(x)
        self.seen.append(y.dtype)
        return {"y": y}


@pytest.mark.parametrize(
    ("level", "inside", "scale"),
    [
        ("O0", torch.float32, 1.0),
        ("O1", torch.float16, 65536.0),
        ("O2", torch.float16, 65536.0),
        ("O3", torch.float16, 1.0),
    ],
)
def test_amp_levels(apex: Any, level: str, inside: torch.dtype, scale: float):
    amp = apex.amp
    plain, model = Small(), Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps step() in its own way
    x = torch.ones(2, 4)
    loss = model(x=x)["y"].pow(2).mean() / 100
    assert model.seen == [inside] and loss.dtype is torch.float32
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled.item() == pytest.approx(loss.item() * scale)
        scaled.backward()
    (plain(x)["y"].pow(2).mean() / 100).backward()
    torch.testing.assert_close(model.layer.weight.grad, plain.layer.weight.grad, rtol=2e-3, atol=2e-5)
    assert next(amp.master_params(optimizer)) is model.layer.weight
    optimizer.step()
    schedule.step()
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == scale
    assert kinds("apex.amp.initialize") == {"adapted"}


@pytest.mark.parametrize("asked", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_amp_runs_in_the_type_that_is_asked_for(apex: Any, asked: torch.dtype):
    model, optimizer = Small(), torch.optim.SGD(Small().parameters(), lr=0.1)
    apex.amp.initialize(model, optimizer, opt_level="O2", cast_model_type=asked)
    with apex.amp.scale_loss(model(torch.ones(1, 4))["y"].sum(), optimizer):
        assert model.seen == [asked]
    assert apex.amp.state_dict()["loss_scaler0"]["loss_scale"] == (65536.0 if asked is torch.float16 else 1.0)


def test_amp_leaves_the_check_for_an_overflow_to_the_script(apex: Any):
    """NVIDIA's BERT reduces gradients over ranks first."""
    weight = nn.Parameter(torch.tensor([2.0]))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    apex.amp.initialize(nn.Identity(), optimizer, opt_level="O2")
    with apex.amp.scale_loss((weight * float("inf")).sum(), optimizer, delay_overflow_check=True) as scaled:
        scaled.backward()
    optimizer.step()
    assert weight.isinf().all() and apex.amp.state_dict()["loss_scaler0"]["loss_scale"] == 65536.0


def test_ranks_may_average_in_float32(apex: Any, monkeypatch: pytest.MonkeyPatch):
    """Of one rank: its own gradients, sent in float32, in the type of the weights."""
    dist, sent = torch.distributed, []
    send = dist.all_reduce
    monkeypatch.setattr(dist, "all_reduce", lambda x, **how: sent.append(x.dtype) or send(x, **how))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = apex.parallel.DistributedDataParallel(nn.Linear(2, 1).half(), allreduce_always_fp32=True)
        model(torch.ones(3, 2).half()).sum().backward()
        assert model.module.weight.grad.dtype is torch.float16 and model.module.weight.grad.tolist() == [[3.0, 3.0]]
        assert sent == [torch.float32]
    finally:
        dist.destroy_process_group()


def test_amp_model_can_be_copied_and_saved(apex: Any):
    model = apex.amp.initialize(Small(), opt_level="O2")
    other = copy.deepcopy(model)
    nn.init.zeros_(other.layer.weight), nn.init.zeros_(other.layer.bias)
    assert model(torch.ones(1, 4))["y"].any() and not other(torch.ones(1, 4))["y"].any()
    again = pickle.loads(pickle.dumps(other))
    assert not again(torch.ones(1, 4))["y"].any() and again.seen[-1] is torch.float16


def test_amp_accumulates_unscaled_gradients(apex: Any):
    """Two backward calls, both ways apex allows; against one backward of the sum."""
    amp = apex.amp
    for delays, is_late in ((False, False), (True, False), (True, True)):
        weight = nn.Parameter(torch.tensor([2.0]))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        amp.initialize(nn.Identity(), None if is_late else optimizer, opt_level="O1")  # late: made after initialize
        with amp.scale_loss((weight * 3).sum(), optimizer, delay_unscale=delays) as scaled:
            scaled.backward()
        with amp.scale_loss((weight * 4).sum(), optimizer) as scaled:
            scaled.backward()
        assert weight.grad is not None and weight.grad.item() == 7.0


def test_amp_skips_the_step_of_an_overflow(apex: Any, capsys: pytest.CaptureFixture[str]):
    amp = apex.amp
    weight = nn.Parameter(torch.tensor([2.0]))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    amp.initialize(nn.Identity(), optimizer, opt_level="O2", num_losses=2)
    with amp.scale_loss((weight * float("inf")).sum(), optimizer, loss_id=1) as scaled:
        scaled.backward()
    optimizer.step()
    assert weight.item() == 2.0 and "Skipping step, loss scaler 1" in capsys.readouterr().out
    saved = amp.state_dict()
    assert [saved[f"loss_scaler{i}"]["loss_scale"] for i in (0, 1)] == [65536.0, 32768.0]
    optimizer.zero_grad()
    with amp.scale_loss(weight.sum(), optimizer, loss_id=1) as scaled:
        scaled.backward()
    optimizer.step()
    assert weight.item() == pytest.approx(1.9)
    amp.initialize(nn.Identity(), optimizer, opt_level="O2", num_losses=2)
    amp.load_state_dict(saved)
    assert amp.state_dict() == saved
    saved["loss_scaler1"] = {"loss_scale": 2.0**24, "unskipped": 1999}  # apex's highest, about to be doubled
    amp.load_state_dict(saved)
    with amp.scale_loss(weight.sum(), optimizer, loss_id=1) as scaled:
        scaled.backward()
    assert amp.state_dict()["loss_scaler1"] == {"loss_scale": 2.0**24, "unskipped": 0}


def test_amp_scale_grows_and_stays_within_bounds(apex: Any):
    scaler_of = importlib.import_module("sightline_migrate.stand_ins.apex_amp").LossScaler
    scaler = scaler_of("dynamic", lowest=2.0**14, highest=2.0**17)
    seen = []
    for _ in range(5999):
        scaler.update(True)
        seen.append(scaler.loss_scale())
    assert seen == [2.0**16] * 1999 + [2.0**17] * 4000  # doubled after 2000, then at its highest
    for _ in range(9):
        scaler.update(False)
    assert scaler.loss_scale() == 2.0**14


@pytest.mark.parametrize("options", [{"amp": "off"}, {"amp": "keep", "fp16_to_bf16": True}])
def test_amp_scales_nothing_where_nothing_is_half(on_cpu: Start, options: dict[str, Any]):
    on_cpu(**options)
    amp = importlib.import_module("apex.amp")
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize([model], [optimizer], opt_level="O1")
    loss = model(torch.ones(1, 4).half())["y"].sum()
    assert model.seen == [torch.bfloat16 if options["amp"] == "keep" else torch.float32]
    with amp.scale_loss(loss, [optimizer]) as scaled:
        assert scaled.item() == loss.item()
        scaled.backward()


def test_amp_off_by_request_and_wrong_use(apex: Any):
    amp = apex.amp
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert amp.initialize(model, optimizer, enabled=False) == (model, optimizer)
    loss = model(torch.ones(1, 4))["y"].sum()
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
    assert model.seen == [torch.float32]
    with pytest.raises(RuntimeError, match="opt_level='02' is not known"):
        amp.initialize(model, optimizer, opt_level="02")


def test_float_functions(apex: Any):
    product = apex.amp.float_function(torch.mm)
    half = torch.ones(2, 2, dtype=torch.float16)
    with torch.autocast("cuda"):
        assert torch.mm(half, half).dtype is torch.float16
        assert product(half, half).dtype is torch.float32
        with apex.amp.disable_casts():
            assert torch.mm(half.float(), half.float()).dtype is torch.float32
    module = SimpleNamespace(wide=torch.mm, narrow=torch.mm)
    apex.amp.register_float_function(module, "wide"), apex.amp.register_half_function(module, "narrow")
    with torch.autocast("cuda"):
        assert module.wide(half, half).dtype is torch.float32 and module.narrow(half, half).dtype is torch.float16


# pynvml


@pytest.fixture
def _no_pynvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides the real one where it is installed."""
    find = PathFinder.find_spec
    monkeypatch.setattr(PathFinder, "find_spec", lambda name, *rest: None if name == "pynvml" else find(name, *rest))
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)


@pytest.mark.usefixtures("_no_pynvml")
def test_pynvml_answers_from_the_target(on_cpu: Start):
    on_cpu(device_count=2)
    import pynvml

    pynvml.nvmlInit()
    assert pynvml.nvmlDeviceGetCount() == torch.cuda.device_count() == 2
    handle = pynvml.nvmlDeviceGetHandleByIndex(1)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    assert memory.total == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert memory.used + memory.free == memory.total and memory.used > 0
    load = pynvml.nvmlDeviceGetUtilizationRates(handle)
    assert 0 <= load.gpu <= 100 and 0 < load.memory <= 100
    assert pynvml.nvmlDeviceGetName(handle) == torch.cuda.get_device_name(1)
    uuid = pynvml.nvmlDeviceGetUUID(handle)
    assert uuid != pynvml.nvmlDeviceGetUUID(0) and pynvml.nvmlDeviceGetHandleByUUID(uuid) == handle
    assert pynvml.nvmlDeviceGetComputeRunningProcesses(handle)[0].pid == os.getpid()
    assert pynvml.nvmlDeviceGetCudaComputeCapability(handle) == torch.cuda.get_device_capability()
    words = pynvml.nvmlDeviceGetCpuAffinity(handle, 1 + (os.cpu_count() or 1) // 64)
    bits = "".join(f"{word:064b}"[::-1] for word in words)  # the first core is the lowest bit
    assert [core for core, bit in enumerate(bits) if bit == "1"] == [*range(os.cpu_count() or 1)]
    pynvml.nvmlDeviceSetCpuAffinity(handle), pynvml.nvmlShutdown()
    assert kinds("pynvml.nvmlDeviceGetMemoryInfo") == {"adapted"}


@pytest.mark.usefixtures("_no_pynvml")
def test_pynvml_refuses_in_its_own_words(on_cpu: Start):
    on_cpu()
    import pynvml

    with pytest.raises(pynvml.NVMLError_InvalidArgument, match=r"nvmlDeviceGetCount\(\) is 1"):
        pynvml.nvmlDeviceGetHandleByIndex(1)
    with pytest.raises(
        pynvml.NVMLError, match=r"test_stand_ins.py:\d+: pynvml.nvmlDeviceGetPowerUsage is not available"
    ) as caught:
        pynvml.nvmlDeviceGetPowerUsage(0)
    assert caught.value.value == pynvml.NVML_ERROR_NOT_SUPPORTED
    with pytest.raises(AttributeError, match=r"test_stand_ins.py:\d+: pynvml.nvmlDeviceGetSomethingNew"):
        pynvml.nvmlDeviceGetSomethingNew(0)
    assert kinds("pynvml.nvmlDeviceGetPowerUsage") == {"refused"}


@pytest.mark.usefixtures("_no_pynvml")
def test_pynvml_has_the_numbers_of_nvidias_header(on_cpu: Start):
    """nvml.h; scripts compare errors with them, and pass the others."""
    header = {
        "NVML_SUCCESS": 0, "NVML_ERROR_UNINITIALIZED": 1, "NVML_ERROR_INVALID_ARGUMENT": 2,
        "NVML_ERROR_NOT_SUPPORTED": 3, "NVML_AFFINITY_SCOPE_NODE": 0, "NVML_AFFINITY_SCOPE_SOCKET": 1,
        "NVML_TEMPERATURE_GPU": 0, "NVML_CLOCK_GRAPHICS": 0, "NVML_CLOCK_SM": 1, "NVML_CLOCK_MEM": 2,
        "NVML_CLOCK_VIDEO": 3, "NVML_PCIE_UTIL_TX_BYTES": 0, "NVML_PCIE_UTIL_RX_BYTES": 1,
    }  # fmt: skip
    on_cpu()
    import pynvml

    assert {name: getattr(pynvml, name) for name in header} == header
    assert pynvml.nvmlMemory_v2 == 40 | 2 << 24  # the size of the structure and its version


@pytest.mark.parametrize(("code", "answers"), [(0, True), (9, False)])
def test_a_driver_is_there_where_its_library_says_so(code: int, answers: bool, monkeypatch: pytest.MonkeyPatch):
    """nvml.h: 0 is NVML_SUCCESS, 9 is NVML_ERROR_DRIVER_NOT_LOADED."""
    from sightline_migrate.stand_ins import pynvml as stand_in

    library = SimpleNamespace(nvmlInit_v2=lambda: code)
    monkeypatch.setattr(ctypes, "CDLL", {"libnvidia-ml.so.1": library}.__getitem__)
    assert stand_in.driver_answers.__wrapped__() is answers


@pytest.mark.parametrize(
    ("folder", "has_driver", "replaced"),
    [
        ("site-packages", False, True),
        ("site-packages", True, False),
        ("pip-target", False, True),
        ("of-the-script", False, False),
    ],
)
def test_pynvml_without_a_driver_is_replaced(
    folder: str, has_driver: bool, replaced: bool, on_cpu: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """NVIDIA's scripts install nvidia-ml-py; where no driver answers it can only raise."""
    from sightline_migrate.stand_ins import pynvml as stand_in

    installed = tmp_path / folder
    installed.mkdir()
    if folder == "pip-target":
        (installed / "nvidia_ml_py-13.615.71.dist-info").mkdir()
    (installed / "pynvml.py").write_text("def nvmlDeviceGetCount(): return 8\n")
    monkeypatch.syspath_prepend(installed)
    monkeypatch.setitem(sys.modules, "pynvml", sys)  # so that what is imported below goes when the test ends
    monkeypatch.delitem(sys.modules, "pynvml")
    monkeypatch.setattr(stand_in, "driver_answers", lambda: has_driver)
    real = importlib.import_module("pynvml")  # as torch.cuda may have done
    on_cpu()
    assert importlib.import_module("pynvml").nvmlDeviceGetCount() == (1 if replaced else 8)
    assert finder.is_missing("pynvml") is replaced
    deactivate()
    assert sys.modules["pynvml"] is real


@pytest.mark.usefixtures("_no_pynvml")
def test_pynvml_takes_the_hottest_sensor_that_can_be_read(on_cpu: Start, tmp_path: Path, monkeypatch):
    on_cpu()
    import pynvml

    from sightline_migrate.stand_ins import pynvml as ours

    monkeypatch.setattr(
        ours, "Path", lambda place: tmp_path / "thermal" if place == "/sys/class/thermal" else Path(place)
    )
    with pytest.raises(pynvml.NVMLError, match="nvmlDeviceGetTemperature is not available") as caught:
        pynvml.nvmlDeviceGetTemperature(0, pynvml.NVML_TEMPERATURE_GPU)
    assert caught.value.value == pynvml.NVML_ERROR_NOT_SUPPORTED
    for number, text in enumerate(("41999\n", "disabled\n", "52000\n", "-1000\n")):
        (tmp_path / "thermal" / f"thermal_zone{number}").mkdir(parents=True)
        (tmp_path / "thermal" / f"thermal_zone{number}" / "temp").write_text(text)
    assert pynvml.nvmlDeviceGetTemperature(0, pynvml.NVML_TEMPERATURE_GPU) == 52
    with pytest.raises(pynvml.NVMLError_InvalidArgument, match="no device has the UUID GPU-none"):
        pynvml.nvmlDeviceGetHandleByUUID(b"GPU-none")


def test_apex_refuses_what_its_optimizers_cannot(apex: Any):
    optimizers, weight = importlib.import_module("apex.optimizers"), nn.Parameter(torch.ones(2))
    for options in ({"nesterov": True}, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}):
        with pytest.raises(ValueError, match="nesterov needs momentum > 0 and dampening 0"):
            optimizers.FusedSGD([weight], lr=0.1, **options)
    optimizers.FusedSGD([weight], lr=0.1, nesterov=True, momentum=0.9)
    with pytest.raises(RuntimeError, match="norm_type=1 is not known; use 2, or 0 for the maximum norm"):
        optimizers.FusedNovoGrad([weight], norm_type=1).step()
    for name in ("FusedAdam", "FusedNovoGrad", "FusedAdagrad"):
        table = nn.Embedding(4, 2, sparse=True)
        optimizer = getattr(optimizers, name)(table.parameters())
        table(torch.tensor([1])).sum().backward()
        with pytest.raises(RuntimeError, match=f"{name} cannot use sparse gradients"):
            optimizer.step()


def test_plain_norms_of_apex_have_no_weights(apex: Any):
    normalization = importlib.import_module("apex.normalization")
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    layer = normalization.FusedLayerNorm(5, elementwise_affine=False)
    torch.testing.assert_close(layer(x), nn.functional.layer_norm(x, (5,), eps=1e-5))
    layer = normalization.FusedRMSNorm(5, elementwise_affine=False)
    torch.testing.assert_close(layer(x), nn.functional.rms_norm(x, (5,), eps=1e-5))


@pytest.mark.parametrize("name", ["FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedSGD"])
def test_a_weight_without_a_gradient_keeps_no_other_from_its_step(apex: Any, name: str):
    weights = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = getattr(importlib.import_module("apex.optimizers"), name)(weights, lr=0.1)
    weights[0].grad, weights[2].grad = torch.ones(2), torch.ones(2)
    optimizer.step()
    assert (weights[1] == 1).all() and (weights[0] < 1).all() and torch.equal(weights[0], weights[2])


@pytest.mark.usefixtures("_no_pynvml")
def test_the_load_of_an_accelerator_is_its_own_and_refused_where_it_has_none(on_cpu: Start, monkeypatch):
    on_cpu()
    import pynvml

    from sightline_migrate.stand_ins import pynvml as ours

    native = {"utilization": lambda handle: 40 + handle, "temperature": lambda handle: 60.9 + handle}
    target = SimpleNamespace(is_cpu=False, name="xpu", native=native.get)
    memory = SimpleNamespace(target=target, mem_get_info=lambda handle: (250, 1000), device_count=lambda: 2)
    monkeypatch.setattr(ours, "_runtime", lambda: memory)
    assert vars(pynvml.nvmlDeviceGetUtilizationRates(1)) == {"gpu": 41, "memory": 75}
    assert pynvml.nvmlDeviceGetTemperature(1, pynvml.NVML_TEMPERATURE_GPU) == 61
    assert vars(pynvml.nvmlDeviceGetMemoryInfo(0, 2)) == {
        "total": 1000, "free": 250, "used": 750, "reserved": 0, "version": 2,
    }  # fmt: skip
    native.clear()
    for name in ("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetTemperature"):
        with pytest.raises(pynvml.NVMLError_NotSupported, match=f"pynvml.{name} is not available on xpu; use"):
            getattr(pynvml, name)(0)
    assert str(pynvml.NVMLError(7)) == "NVML error 7" and pynvml.NVMLError().value == 999
