"""Choosing a device and its precision. Other hardware is played by patching torch's own answers."""

import os
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
import warm

from sightline import recipes
from sightline.errors import UsageError
from sightline.hardware import devices
from sightline.hardware.devices import KINDS, available, select, set_deterministic

HERE = [kind for kind in KINDS if not devices.unavailable_because(kind)]

OWN_BF16 = recipes.load("resnet50")  # which nobody typed


def play(monkeypatch, kind: str, count: int = 1, **api) -> None:
    """Let torch claim `count` devices of a kind."""
    module = SimpleNamespace(is_available=lambda: count > 0, device_count=lambda: count, **api)
    monkeypatch.setattr(torch, kind, module, raising=False)


def play_nothing(monkeypatch) -> None:
    for kind in ("cuda", "xpu", "mps"):
        monkeypatch.setattr(getattr(torch, kind), "is_available", lambda: False)


def refusal(*arguments) -> str:
    with pytest.raises(UsageError) as error:
        select(*arguments)
    return str(error.value)


def test_the_cpu_is_always_there_and_last():
    assert available() == HERE
    assert available()[-1] == "cpu"


def test_auto_takes_the_first_that_is_available(monkeypatch):
    play_nothing(monkeypatch)
    assert select().kind == "cpu"
    for kind in ("mps", "xpu", "cuda"):
        play(monkeypatch, kind)
        assert select("auto").kind == kind
    assert available() == ["cuda", "xpu", "mps", "cpu"]


def test_packages_of_other_vendors_are_imported_only_where_installed(monkeypatch, tmp_path):
    assert "npu" not in available()
    assert "torch_npu" not in sys.modules
    (tmp_path / "torch_npu.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    play_nothing(monkeypatch)
    play(monkeypatch, "npu", is_bf16_supported=lambda: False)
    try:
        assert select("auto").kind == "npu"
        assert select("npu").resolve_precision("auto") == "fp16"
    finally:
        sys.modules.pop("torch_npu", None)


def test_a_broken_vendor_package_is_a_reason_not_a_crash(monkeypatch, tmp_path):
    (tmp_path / "torch_npu.py").write_text("raise ImportError('libascendcl.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)

    assert "torch_npu cannot be imported: libascendcl.so" in refusal("npu")


def test_what_cannot_be_had_names_what_can(monkeypatch):
    play_nothing(monkeypatch)

    assert refusal("hpu") == ("device 'hpu' is not available: habana_frameworks is not installed; available here: cpu")
    assert "device 'cuda' is not available" in refusal("cuda")
    assert "available here: cpu" in refusal("cuda:1")


@pytest.mark.parametrize("wanted", ["gpu", "cuda:", "cuda:x", "cuda:-1", "", "auto:0"])
def test_unknown_names_are_usage_errors(wanted):
    assert f"device '{wanted}' is unknown; use auto or one of cuda, hpu, xpu, npu, mps, cpu" in refusal(wanted)


def test_each_process_of_a_host_gets_its_own(monkeypatch):
    play(monkeypatch, "cuda", count=4)

    assert [select("cuda", rank).index for rank in range(4)] == [0, 1, 2, 3]
    assert select("auto", 2).torch_device == torch.device("cuda", 2)
    assert "start at most 4 processes per host" in refusal("cuda", 4)


def test_a_numbered_device_is_shared_by_ranks_where_that_is_possible(monkeypatch):
    """NCCL refuses two ranks on one device, gloo does not; nobody has tried that with other devices."""
    play(monkeypatch, "cuda", count=2)
    play(monkeypatch, "xpu", count=2)

    alone, first, second = select("cuda:1"), select("cuda:1", 0, 2), select("cuda:1", 1, 2)
    assert alone.torch_device == torch.device("cuda", 1) and (alone.backend, alone.sharing_note()) == ("nccl", "")
    assert first == second and (first.torch_device, first.backend) == (torch.device("cuda", 1), "gloo")
    assert first.sharing_note().startswith("2 ranks share cuda:1 and exchange tensors by gloo")
    assert select("cuda", 1, 2).backend == "nccl"
    assert "the last one here is cuda:1" in refusal("cuda:2")
    assert "2 processes of this host, but each process needs its own; use --run.device xpu" in refusal("xpu:1", 1)


def test_devices_without_numbers():
    cpu = select("cpu", 5)

    assert (cpu.torch_device, cpu.index) == (torch.device("cpu"), 0)
    assert select("cpu:0") == cpu
    assert "cannot be numbered" in refusal("cpu:1")


@pytest.mark.parametrize(
    ("kind", "native", "expected"),
    [("cuda", True, "bf16"), ("cuda", False, "fp16"), ("xpu", True, "bf16"), ("xpu", False, "fp16")],
)
def test_auto_precision_of_accelerators(monkeypatch, kind, native, expected):
    play(monkeypatch, kind, is_bf16_supported=lambda including_emulation: including_emulation or native)

    assert select(kind).resolve_precision("auto") == expected
    assert select(kind).precision_of(OWN_BF16) == ("bf16" if native else "fp32")
    assert bool(select(kind).no_bf16_because()) is not native


@pytest.mark.device
def test_the_accelerator_of_this_machine_answers_everything():
    device = select("auto")
    device.activate()
    ones = torch.ones(1 << 20, device=device.torch_device)
    device.synchronize()

    assert device.kind != "cpu"
    assert device.tested, f"{device.kind} works here: mark it tested in devices.py"
    assert ones.sum().item() == 1 << 20
    assert device.peak_memory_bytes() >= ones.nbytes
    assert device.name()
    assert device.resolve_precision("auto") in device.autocast


@pytest.mark.parametrize(
    ("flags", "limit", "expected"),
    [
        ("fpu avx2 avx512f", "", "fp32"),
        ("avx512f avx512_bf16", "", "bf16"),
        ("amx_tile amx_bf16", "", "bf16"),
        ("amx_tile", "", "fp32"),
        ("avx512f avx512_bf16", "avx2", "fp32"),  # what oneDNN may not use does not count
        ("avx512f avx512_bf16", "AVX512_CORE_BF16", "bf16"),
    ],
)
def test_auto_precision_of_the_cpu_follows_its_instructions(monkeypatch, flags, limit, expected):
    monkeypatch.setattr(devices, "_cpu_fact", lambda name: flags)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)

    cpu = select("cpu")
    assert cpu.resolve_precision("auto") == cpu.precision_of(OWN_BF16) == expected
    why = f"ONEDNN_MAX_CPU_ISA={limit} rules it out" if limit else "this CPU has neither AVX512_BF16 nor AMX"
    assert cpu.no_bf16_because() == ("" if expected == "bf16" else why)


def test_asked_for_precisions_are_kept_or_refused(monkeypatch):
    cpu = select("cpu")
    assert [cpu.resolve_precision(name) for name in ("fp32", "bf16", "fp16")] == ["fp32", "bf16", "fp16"]
    with pytest.raises(UsageError, match=r"'fp16' is not available on hpu; use .* with auto, fp32, bf16"):
        KINDS["hpu"].resolve_precision("fp16")
    with pytest.raises(UsageError, match="'fp8' is not available on cpu"):
        cpu.resolve_precision("fp8")


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_the_cpu_really_trains_in_what_it_claims(precision):
    layer = torch.nn.Conv2d(3, 4, 3)
    with torch.autocast("cpu", precision):
        out = layer(torch.randn(2, 3, 8, 8))
    out.float().sum().backward()

    assert out.dtype == precision
    assert torch.isfinite(layer.weight.grad).all()


def test_the_cpu_answers_everything():
    cpu = select("cpu")
    cpu.activate()
    cpu.synchronize()
    before = cpu.peak_memory_bytes()
    ballast = np.ones(200_000_000, dtype=np.uint8)

    assert cpu.peak_memory_bytes() >= max(before, ballast.nbytes)
    assert cpu.name()
    assert cpu.count() == 1
    assert (cpu.backend, cpu.can_pin, cpu.has_streams, cpu.has_graphs, cpu.compile_auto) == (
        "gloo",
        False,
        False,
        False,
        False,
    )


def test_backends_and_what_was_tested():
    assert {kind: row.backend for kind, row in KINDS.items()} == {
        "cuda": "nccl",
        "hpu": "hccl",
        "xpu": "xccl",
        "npu": "hccl",
        "mps": "gloo",
        "cpu": "gloo",
    }
    assert [kind for kind, row in KINDS.items() if row.tested] == ["cuda", "cpu"]
    assert [kind for kind, row in KINDS.items() if row.has_graphs] == ["cuda"]


def test_accelerators_are_asked_by_their_own_module(monkeypatch):
    asked = []
    play(
        monkeypatch,
        "cuda",
        count=2,
        set_device=lambda device: asked.append(("set", str(device))),
        synchronize=lambda device: asked.append(("sync", str(device))),
        max_memory_allocated=lambda device: 123,
        get_device_name=lambda device: "Played GPU",
    )
    device = select("cuda:1")
    device.activate()
    device.synchronize()

    assert asked == [("set", "cuda:1"), ("sync", "cuda:1")]
    assert (device.peak_memory_bytes(), device.name()) == (123, "Played GPU")


def test_unknown_memory_is_zero(monkeypatch):
    play(monkeypatch, "mps")

    assert (select("mps").peak_memory_bytes(), select("mps").name()) == (0, "mps")


def test_devices_travel_to_worker_processes():
    for row in KINDS.values():
        assert pickle.loads(pickle.dumps(row)) == row


def test_importing_initialises_no_device(tmp_path):
    (tmp_path / "script.py").write_text(
        "import torch, sightline.hardware.devices, sys\n"
        "assert not torch.cuda.is_initialized() and not torch.xpu.is_initialized()\n"
        "assert 'torch_npu' not in sys.modules and 'habana_frameworks' not in sys.modules\n"
    )
    done = warm.python(tmp_path, "script.py", environ=os.environ)  # which has imported torch alone
    assert done.returncode == 0, done.stderr


@pytest.fixture
def restored(monkeypatch):
    """A process that has not begun with CUDA; puts torch's switches and the environment back."""
    cudnn, cuda = torch.backends.cudnn, torch.backends.cuda.matmul
    before = (cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, cuda.allow_tf32)
    monkeypatch.setitem(os.environ, "CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delitem(os.environ, "CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)  # another test may have begun with CUDA
    yield
    torch.use_deterministic_algorithms(False)
    cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, cuda.allow_tf32 = before


@pytest.mark.usefixtures("restored")
def test_set_deterministic_switches_everything_both_ways():
    for on in (True, False):
        set_deterministic(on)
        assert torch.are_deterministic_algorithms_enabled() is on
        assert torch.backends.cudnn.deterministic is on
        assert torch.backends.cudnn.benchmark is not on
        assert (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32) == (True, False)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.usefixtures("restored")
def test_a_useless_cublas_workspace_is_refused(monkeypatch):
    monkeypatch.setitem(os.environ, "CUBLAS_WORKSPACE_CONFIG", ":0:0")

    with pytest.raises(UsageError, match=r"CUBLAS_WORKSPACE_CONFIG is ':0:0'.*export CUBLAS_WORKSPACE_CONFIG=:4096:8"):
        set_deterministic(True)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.usefixtures("restored")
def test_after_cuda_began_the_workspace_cannot_be_set_any_more(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)

    with pytest.raises(UsageError, match="was not set before CUDA was initialised"):
        set_deterministic(True)
    monkeypatch.setitem(os.environ, "CUBLAS_WORKSPACE_CONFIG", ":16:8")
    set_deterministic(True)


def test_memory_of_the_cpu_is_what_is_free_and_what_the_process_has():
    own, free = select("cpu").memory_bytes()
    assert own == pytest.approx(psutil.Process().memory_info().rss, rel=0.1)
    assert own < own + free < 1.01 * psutil.virtual_memory().total


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="this system does not forget a peak")
def test_the_peak_of_memory_counts_from_a_reset_on():
    cpu = select("cpu")
    cpu.reset_peak_memory()
    before = cpu.peak_memory_bytes()
    block = torch.ones(2**26)  # 256 MiB
    assert cpu.peak_memory_bytes() > before + 0.9 * block.nbytes
    del block
    cpu.reset_peak_memory()
    assert cpu.peak_memory_bytes() < before + 2**26


def test_memory_of_an_accelerator_is_what_its_own_module_says(monkeypatch):
    done: list[tuple] = []
    own = SimpleNamespace(
        memory_reserved=lambda device: 700.0,
        mem_get_info=lambda device: (300, 1000),
        max_memory_allocated=lambda device: 650,
        reset_peak_memory_stats=lambda device: done.append(("reset", device)),
        empty_cache=lambda: done.append(("empty",)),
        get_device_name=lambda device: f"the {device}",
    )
    monkeypatch.setattr(torch, "xpu", own)
    device = KINDS["xpu"]
    place = device.torch_device
    assert device.memory_bytes() == (700, 300) and device.peak_memory_bytes() == 650
    device.reset_peak_memory()
    device.free_cached_memory()
    assert done == [("reset", place), ("empty",)] and device.name() == f"the {place}"
    for name in ("memory_reserved", "mem_get_info"):
        monkeypatch.delattr(own, name)
        assert device.memory_bytes() == (0, 0)
    for name in ("max_memory_allocated", "reset_peak_memory_stats", "empty_cache", "get_device_name"):
        monkeypatch.delattr(own, name)
    device.reset_peak_memory()
    device.free_cached_memory()
    assert device.peak_memory_bytes() == 0 and device.name() == "xpu" and len(done) == 2


def test_a_fact_of_the_cpu_is_the_first_of_its_name(monkeypatch, tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nmodel name\t: Some: CPU\nflags\t\t: sse amx_bf16\nmodel name\t: Other\nlast :\n")
    monkeypatch.setattr(devices, "Path", lambda place: path if place == "/proc/cpuinfo" else Path(place))
    assert [devices._cpu_fact(name) for name in ("model name", "processor", "last", "model")] == [
        "Some: CPU",
        "0",
        "",
        "",
    ]
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)
    assert devices._cpu_has_bf16()
    path.write_text("flags : sse\n")
    assert not devices._cpu_has_bf16()
    path.unlink()
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True, raising=False)
    assert devices._cpu_fact("flags") == "" and devices._cpu_has_bf16() is True
    monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported")
    assert devices._cpu_has_bf16() is False
