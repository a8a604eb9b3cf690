"""What a script sees when it calls torch as if CUDA were there: factories, moves, queries, streams, random numbers."""

from __future__ import annotations

import io
import mmap
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from sightline_migrate import migrate
from sightline_migrate.options import MigrateError
from sightline_migrate.reporting import record
from sightline_migrate.rules import factories
from sightline_migrate.session import Session

Start = Callable[..., Session]
CUDA = ["cuda", "cuda:0", "cuda:1", torch.device("cuda"), torch.device("cuda", 0), 0, 3, -1]
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "as_tensor": ([1.0],), "asarray": ([1.0],), "tensor": ([1.0],), "scalar_tensor": (1.0,), "eye": (3,),
    "full": ((2,), 1.0), "full_like": (torch.ones(2), 1.0), "randint": (5, (2,)), "randint_like": (torch.ones(2), 5),
    "normal": (0.0, 1.0, (2,)), "linspace": (0, 1, 3), "logspace": (0, 1, 3), "randperm": (4,), "range": (0, 3),
    "empty_strided": ((2,), (1,)), "empty_permuted": ((2, 3), (0, 1)), "tril_indices": (3, 3), "triu_indices": (3, 3),
    "sparse_coo_tensor": ([[0, 1]], [1.0, 2.0]), "sparse_csr_tensor": ([0, 1], [0], [1.0]),
    "sparse_csc_tensor": ([0, 1], [0], [1.0]), "sparse_bsr_tensor": ([0, 1], [0], [[[1.0]]]),
    "sparse_bsc_tensor": ([0, 1], [0], [[[1.0]]]), "nested.nested_tensor": ([torch.ones(2)],),
    "nested.as_nested_tensor": ([torch.ones(2)],), "new_full": ((2,), 1.0), "new_tensor": ([1.0],),
    "new_empty_strided": ((2,), (1,)), "from_dlpack": (torch.ones(2),),
}  # fmt: skip
# Rare ones whose arguments say nothing about devices.
NOT_CALLED = {"empty_quantized", "sparse_compressed_tensor", "from_file"}


def factory(name: str) -> Callable[..., Any]:
    here: Any = torch
    for part in name.split("."):
        here = getattr(here, part)
    return here


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_factories(on_cpu: Start):
    """All after one activation: each takes as long as a hundred of them."""
    on_cpu()
    wrong = {}
    for name in factories.FACTORIES:
        if name in NOT_CALLED:
            continue
        record.reset()
        like = (torch.ones(2),) if name.endswith("_like") else (4,)
        made = factory(name)(*ARGUMENTS.get(name, like), device="cuda")
        found = [each for each in record.records.values() if each.rule.name == f"torch.{name}"]
        seen = [(each.user.file, "'cuda'" in each.arguments) for each in found]
        if (made.device.type, seen) != ("cpu", [(__file__, True)]):
            wrong[name] = made.device, seen
    assert not wrong


def test_factories_of_a_tensor(on_cpu: Start):
    on_cpu()
    made = {
        name: getattr(torch.ones(2), name)(*ARGUMENTS.get(name, ((2,),)), device="cuda:0").device.type
        for name in factories.OF_TENSORS
        if name != "new"
    }
    assert made == dict.fromkeys(made, "cpu") and len(made) == len(factories.OF_TENSORS) - 1


def test_moves(on_cpu: Start):
    on_cpu()
    x = torch.arange(3.0)
    for device in CUDA:
        for moved in (
            x.to(device), x.to(device, non_blocking=True), x.to(device=device), x.to(device, torch.float64),
            x.cuda(device), x.cuda(device, non_blocking=True), torch.zeros(1, device=device),
            torch.nn.Linear(1, 1).to(device).weight, torch.nn.Linear(1, 1).cuda(device).weight,
            torch.nn.Linear(1, 1, device=device).weight, torch.nn.Linear(1, 1).to_empty(device=device).weight,
            x.untyped_storage().cuda(), x.to(torch.ones(1).cuda()),
        ):  # fmt: skip
            assert moved.device.type == "cpu", device
        assert torch.equal(x.to(device), x) and x.to(device, torch.float64).dtype is torch.float64, device
        assert x.cuda() is not x and (there := x.to(device)).cuda() is there


def test_what_is_not_cuda_is_untouched(on_cpu: Start):
    on_cpu()
    assert torch.zeros(2, device="meta").device.type == "meta"
    assert torch.ones(2).to("meta").device.type == "meta"
    assert torch.ones(2).to(torch.float64).dtype is torch.float64
    assert torch.device("cuda").type == "cuda" and torch.device("cuda:1").index == 1
    assert not record.records


def test_what_is_put_aside_on_the_host_stays(on_cpu: Start):
    """On a GPU `.cpu()` is a copy; a script that keeps the best weights relies on it."""
    on_cpu()
    model = torch.nn.Linear(2, 2).cuda()
    best = {name: value.cpu() for name, value in model.state_dict().items()}
    also = {name: value.to("cpu") for name, value in model.state_dict().items()}
    with torch.no_grad():
        model.weight.add_(1)
    assert torch.equal(best["weight"] + 1, model.weight) and torch.equal(also["weight"] + 1, model.weight)
    leaf = torch.ones(2, requires_grad=True)
    assert leaf.cpu() is leaf and leaf.to("cpu") is leaf
    module = torch.nn.Linear(2, 2)
    weight = module.weight
    assert module.cpu().weight is weight


def test_pinning(on_cpu: Start):
    on_cpu()
    x = torch.ones(2)
    assert x.pin_memory() is x and not x.is_pinned() and not x.is_pinned("cuda")
    assert torch.empty(3, pin_memory=True).shape == (3,)
    x.record_stream(torch.cuda.current_stream())


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_typed_constructors(on_cpu: Start):
    on_cpu()
    assert torch.cuda.FloatTensor([1, 2]).tolist() == [1.0, 2.0]
    assert torch.cuda.LongTensor(2, 3).shape == (2, 3)
    assert torch.cuda.BoolTensor([True]).dtype is torch.bool
    assert torch.cuda.HalfTensor([1]).dtype is torch.float16
    assert torch.cuda.FloatTensor().numel() == 0
    assert torch.cuda.sparse.FloatTensor(torch.tensor([[0, 1]]), torch.ones(2), torch.Size([3])).is_sparse
    assert torch.cuda.FloatStorage(3).device.type == "cpu"
    x = torch.ones(2)
    assert x.type(torch.cuda.DoubleTensor).dtype is torch.float64
    assert x.type("torch.cuda.HalfTensor").dtype is torch.float16
    assert x.type() == "torch.FloatTensor" and x.type(torch.IntTensor).dtype is torch.int32
    assert not isinstance(x, torch.cuda.FloatTensor)  # host and device cannot be told apart
    torch.set_default_tensor_type("torch.cuda.DoubleTensor")
    assert torch.ones(1).dtype is torch.float64
    torch.set_default_tensor_type(torch.cuda.FloatTensor)
    assert torch.ones(1).dtype is torch.float32


def test_claim(on_cpu: Start):
    on_cpu(claim=True)
    x = torch.ones(2)
    assert x.is_cuda and not x.is_cpu and x.device == torch.device("cuda", 0) and x.get_device() == 0
    assert x.type() == "torch.cuda.FloatTensor" and isinstance(x, torch.cuda.FloatTensor)
    assert not isinstance(x, torch.cuda.HalfTensor)
    assert torch.zeros(1, device=x.device).add(x).tolist() == [1.0, 1.0]  # what is shown can be asked for
    assert repr(x) == "tensor([1., 1.])"  # torch itself knows the truth


# What cudaGetDeviceProperties says of an A100, and what a script cannot need of a device that is none.
A100 = {
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "warp_size": 32,
    "regs_per_multiprocessor": 65536,
    "shared_memory_per_block": 48 << 10,
    "shared_memory_per_block_optin": 163 << 10,
    "shared_memory_per_multiprocessor": 164 << 10,
    "L2_cache_size": 40 << 20,
}
UNKNOWN = [
    "is_integrated", "is_multi_gpu_board", "clock_rate", "memory_clock_rate", "memory_bus_width",
    "pci_bus_id", "pci_device_id", "pci_domain_id", "minor",
]  # fmt: skip


def test_queries(on_cpu: Start, monkeypatch: pytest.MonkeyPatch):
    on_cpu()
    cuda = torch.cuda
    assert cuda.is_available() and cuda.is_initialized() and cuda.device_count() == 1 and cuda.current_device() == 0
    assert cuda.get_device_capability() == (8, 0) and cuda.is_bf16_supported() and cuda.get_arch_list() == ["sm_80"]
    assert cuda.is_tf32_supported() and cuda.get_gencode_flags() == "" and not cuda.can_device_access_peer(0, 1)
    properties = cuda.get_device_properties(0)
    assert properties.major == 8 and properties.name == cuda.get_device_name(torch.device("cuda:0"))
    assert properties.total_memory == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert properties.multi_processor_count == os.cpu_count() and "total_memory" in repr(properties)
    facts = {name: value for name, value in vars(properties).items() if name in A100 or value in (0, "")}
    assert facts == A100 | dict.fromkeys(UNKNOWN, 0) | {"gcnArchName": ""}
    assert torch.backends.cudnn.is_available() and torch.backends.cudnn.version() > 0 and torch.backends.cuda.is_built()
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "3")
    cuda.set_device(1)
    assert cuda.current_device() == 1 and cuda.device_count() == 3
    streams = cuda.Stream(), cuda.Stream(-1), cuda.Stream("cuda"), cuda.Stream(2), cuda.Stream("cuda:2")
    assert [each.device_index for each in streams] == [1, 1, 1, 2, 2] and cuda.Event().device.index == 1
    with cuda.device(0):
        assert cuda.current_device() == 0
    with cuda.device(torch.device("cuda:2")), cuda.device_of(torch.ones(1)):
        assert cuda.current_device() == 2
    assert cuda.current_device() == 1
    cuda.init(), cuda.synchronize(), cuda.synchronize(device="cuda:0"), cuda.ipc_collect(), cuda.check_error(0)
    cuda.cudart().cudaProfilerStart(), cuda.set_sync_debug_mode("warn")
    library = cuda.cudart()
    assert cuda.get_sync_debug_mode() == 1 and library.cudaError.success == 0
    answers = library.cudaProfilerStart(), library.cudaProfilerStop(), library.cudaHostRegister(0, 1, 0)
    assert (*answers, library.cudaHostUnregister(0), library.cudaGetErrorString(0)) == (0, 0, 0, 0, "no error")
    free, total = library.cudaMemGetInfo()
    assert 0 < free <= total == cuda.mem_get_info()[1] and cuda.nccl.version() == (2, 21, 5)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert cuda.device_count() == 4
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not cuda.is_available() and cuda.device_count() == 0


def test_torch_itself_gets_the_truth(on_cpu: Start):
    on_cpu()
    with torch.random.fork_rng():  # asks torch.cuda.device_count() inside torch
        torch.manual_seed(3)
    assert torch.nn.DataParallel(torch.nn.Linear(2, 2)).cuda()(torch.ones(1, 2)).shape == (1, 2)
    from torch.utils import benchmark

    assert benchmark.Timer("1 + 1").timeit(10).mean > 0
    assert record.truths["torch.cuda.is_available"] > 0


def test_memory(on_cpu: Start):
    on_cpu()
    cuda = torch.cuda
    before = cuda.memory_allocated()
    held = mmap.mmap(-1, 120_000_000)  # fresh pages: a tensor may lie in memory that earlier tests gave back
    for page in range(0, len(held), mmap.PAGESIZE):
        held[page] = 1
    assert cuda.memory_allocated() - before > 100e6 and cuda.max_memory_allocated() >= cuda.memory_allocated() - 5e6
    (kib,) = re.findall(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert cuda.max_memory_allocated() == pytest.approx(int(kib) * 1024, rel=5e-4)
    assert cuda.memory_reserved("cuda:0") > 0 and cuda.max_memory_reserved(0) > 0
    stats = cuda.memory_stats()
    assert stats["allocated_bytes.all.peak"] >= stats["allocated_bytes.all.current"] > 0 and stats["num_ooms"] == 0
    free, total = cuda.mem_get_info()
    assert 0 < free < total and 0 <= cuda.memory_usage() <= 100
    held.close()
    cuda.empty_cache(), cuda.reset_peak_memory_stats(), cuda.reset_max_memory_allocated(0)
    cuda.set_per_process_memory_fraction(0.5)
    assert "MiB" in cuda.memory_summary(abbreviated=True) and cuda.memory_snapshot() == []
    assert str(os.getpid()) in cuda.list_gpu_processes()


def test_streams_and_events(on_cpu: Start):
    on_cpu()
    cuda = torch.cuda
    side = cuda.Stream(device="cuda:0", priority=-1)
    side.wait_stream(cuda.current_stream())
    with cuda.stream(stream=side):
        assert cuda.current_stream() == side
        event = side.record_event()
    with side:
        assert cuda.current_stream() is side
    with cuda.stream(None):
        pass
    assert cuda.current_stream() == cuda.default_stream() != side and event.query() and side.query()
    cuda.current_stream().wait_event(event)
    start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    start.record()
    began = time.perf_counter()
    while time.perf_counter() - began < 0.02:
        pass
    end.record()
    cuda.synchronize()
    assert 20 <= start.elapsed_time(end) < 2000
    with pytest.raises(ValueError, match="enable_timing=True"):
        cuda.Event().elapsed_time(end)
    assert isinstance(side, cuda.Stream) and isinstance(side, torch.Stream) and isinstance(start, torch.cuda.Event)
    assert issubclass(type(side), torch.Stream) and not issubclass(type(start), torch.Stream)
    assert isinstance(torch.Stream(device="cuda"), cuda.Stream) and isinstance(torch.Event("cuda"), torch.Event)
    assert not cuda.is_current_stream_capturing()
    least, greatest = cuda.Stream.priority_range()
    assert least == 0 > greatest and side.priority_range() == (least, greatest)
    cuda._sleep(1000)


def test_host_memory_that_runs_out_is_caught_as_on_a_gpu(on_cpu: Start):
    on_cpu()
    with pytest.raises(torch.cuda.OutOfMemoryError, match="CUDA out of memory.*you tried to allocate") as caught:
        torch.empty(10**15, device="cuda")
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(RuntimeError, match="negative dimension") as other:
        torch.empty(-1, device="cuda")
    assert not isinstance(other.value, torch.cuda.OutOfMemoryError)


def test_graphs_are_refused(on_cpu: Start):
    on_cpu()
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(MigrateError, match=r"test_calls.py:\d+: CUDA graphs cannot be captured"),
        torch.cuda.graph(graph),
    ):
        pass
    for use in (graph.capture_begin, graph.capture_end, graph.replay):
        with pytest.raises(MigrateError, match=r"test_calls.py:\d+: CUDA graphs"):
            use()
    refused = {each.rule.name: each.user.file for each in record.records.values() if each.kind == "refused"}
    assert refused == {"torch.cuda.graph": __file__, "torch.cuda.CUDAGraph": __file__}
    layer = torch.nn.Linear(2, 2)
    assert torch.cuda.make_graphed_callables(layer, (torch.ones(1, 2),)) is layer


def test_random_numbers(on_cpu: Start):
    on_cpu()
    drawn = []
    for seed in (3, 4, 3):  # of a script that seeds the device only
        torch.cuda.manual_seed(seed)
        drawn.append(torch.rand(3, device="cuda").tolist())
    assert drawn[0] == drawn[2] != drawn[1]
    torch.manual_seed(5)
    torch.cuda.manual_seed(7)  # must not change what torch.manual_seed began
    torch.cuda.manual_seed_all(7)
    torch.cuda.seed_all()
    first = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(first, torch.rand(3))
    state = torch.cuda.get_rng_state()
    second = torch.rand(3, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(second, torch.rand(3, device="cuda"))
    states = torch.cuda.get_rng_state_all()
    third = torch.rand(2)
    torch.cuda.set_rng_state_all(states)
    assert torch.equal(third, torch.rand(2)) and len(states) == 1
    torch.cuda.set_rng_state(torch.zeros(16, dtype=torch.uint8))  # one that was saved on a GPU
    with torch.random.fork_rng(devices=[0]):
        fourth = torch.rand(2)
    assert torch.equal(fourth, torch.rand(2))
    assert torch.cuda.initial_seed() == 5 and torch.cuda.default_generators[0] is torch.default_generator


def test_generators(on_cpu: Start):
    import pickle

    on_cpu()
    made = torch.Generator(device="cuda")
    assert made.device.type == "cpu" and isinstance(made, torch.Generator) and type(made) is torch._C.Generator
    drawn = torch.rand(2, generator=made.manual_seed(3), device="cuda")
    assert torch.equal(drawn, torch.rand(2, generator=torch.Generator().manual_seed(3)))
    assert pickle.loads(pickle.dumps(made)).initial_seed() == 3

    class Own(torch.Generator):
        pass

    assert isinstance(Own(), Own) and isinstance(Own(), torch.Generator) and not isinstance(made, Own)


def test_default_device(on_cpu: Start):
    on_cpu()
    with torch.device("cuda"):
        assert torch.zeros(1).device.type == "cpu"
    torch.set_default_device("cuda:0")
    assert torch.zeros(1).device.type == "cpu" and torch.nn.Linear(1, 1).weight.device.type == "cpu"
    torch.set_default_device("meta")  # factories are still seen by torch's own mode
    assert torch.zeros(1).device.type == "meta" and torch.tensor([1.0]).device.type == "meta"
    torch.set_default_device(None)


def test_switches_and_markers(on_cpu: Start):
    on_cpu(cuda_version="12.4")
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    assert torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = before
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.cufft_plan_cache.max_size = 7
    assert torch.backends.cuda.cufft_plan_cache[0].max_size == 7 and torch.version.cuda == "12.4"
    with torch.cuda.nvtx.range("step"), torch.cuda.profiler.profile(), torch.autograd.profiler.emit_nvtx():
        torch.cuda.nvtx.range_push("a"), torch.cuda.nvtx.range_pop(), torch.cuda.nvtx.mark("b")
    torch.cuda.profiler.start(), torch.cuda.profiler.stop(), torch.cuda.tunable.enable(False)
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        assert pool.snapshot() == []


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_attention_kernels_of_cuda_fall_back(on_cpu: Start):
    q = torch.rand(1, 2, 4, 8)
    attention, cuda, kernels = torch.nn.functional.scaled_dot_product_attention, torch.backends.cuda, torch.nn.attention
    expected = attention(q, q, q)
    on_cpu()
    for chosen in (
        kernels.sdpa_kernel(kernels.SDPBackend.EFFICIENT_ATTENTION),
        kernels.sdpa_kernel([kernels.SDPBackend.CUDNN_ATTENTION], set_priority=True),
        cuda.sdp_kernel(enable_flash=False, enable_math=False, enable_mem_efficient=True),
    ):
        with chosen:
            assert not cuda.flash_sdp_enabled()
            assert torch.allclose(attention(q, q, q), expected, atol=1e-6)
    assert cuda.flash_sdp_enabled()
    try:
        cuda.enable_flash_sdp(False), cuda.enable_math_sdp(False)
        assert torch.allclose(attention(q, q, q), expected, atol=1e-6)
    finally:
        cuda.enable_flash_sdp(True)
    names = {each.rule.name for each in record.records.values()}
    assert names == {"torch.nn.attention._sdpa_kernel", "torch.backends.cuda.enable_math_sdp"}


def test_small_calls_that_scripts_make(on_cpu: Start):
    on_cpu(amp="keep")
    torch.cuda._lazy_init()
    assert torch.ops.aten.zeros([2], device="cuda").tolist() == [0, 0]
    assert torch.ops.aten.ones.default([2], device=torch.device("cuda")).tolist() == [1, 1]
    assert torch.get_autocast_gpu_dtype() is torch.get_autocast_dtype("cuda") is torch.float16
    torch.set_autocast_gpu_dtype(torch.bfloat16)
    assert torch.get_autocast_gpu_dtype() is torch.bfloat16 is torch.get_autocast_dtype("cpu")
    with pytest.raises(
        RuntimeError, match=r"invalid device ordinal: 5, but device_count\(\) is 1; use a larger --device"
    ):
        torch.cuda.set_device(5)
    torch.cuda.set_device(0)


def test_profiler(on_cpu: Start):
    on_cpu()
    with torch.profiler.profile(use_cuda=True) as profile:
        torch.ones(10, device="cuda").sum()
    assert "aten::sum" in profile.key_averages().table()
    with torch.autograd.profiler.profile(use_cuda=True) as older:
        torch.ones(10, device="cuda").sum()
    assert "aten::sum" in older.key_averages().table()
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CPU, activity.CUDA], record_shapes=True) as profile:
        torch.ones(10, device="cuda").sum()
    assert "aten::sum" in profile.key_averages().table(sort_by="cpu_time_total")
    assert profile.activities == [activity.CPU] or profile.activities == {activity.CPU}


def test_checkpointed_module(on_cpu: Start):
    """It saves and restores the device's random numbers and autocast."""
    from torch.utils.checkpoint import checkpoint

    on_cpu(amp="keep")
    layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)).cuda()
    for use_reentrant in (True, False):
        x = torch.ones(2, 4, device="cuda", requires_grad=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            result = checkpoint(layer, x, use_reentrant=use_reentrant)
        assert result.dtype is torch.bfloat16
        result.sum().backward()
        assert x.grad is not None and bool(x.grad.isfinite().all())


def test_refused_classes_stay_classes(on_cpu: Start, capsys: Any):
    on_cpu()
    assert not isinstance(3, torch.cuda.ExternalStream)
    with pytest.raises((RuntimeError, TypeError)):
        torch.cuda.ExternalStream(0)
    assert "torch.cuda.ExternalStream cannot run on cpu; it returns CUDA memory" in capsys.readouterr().err


def test_one_record_per_line_and_counts(on_cpu: Start):
    on_cpu()
    for _ in range(5):
        made = [torch.zeros(1, device="cuda"), torch.zeros(1, device="cuda")]
    assert len(made) == 2
    ((key, count),) = [(k, n) for k, n in record.counts.items() if k[2].name == "torch.zeros"]
    assert count == 10 and key[0] == __file__
    heard: list[str] = []
    record.listeners.append(lambda each: heard.append(each.rule.name))
    try:
        io.BytesIO(), torch.ones(1, device="cuda")
    finally:
        record.listeners.pop()
    assert heard == ["torch.ones"]


def test_a_device_that_shares_the_hosts_memory_is_waited_for(monkeypatch: pytest.MonkeyPatch):
    """torch.mps where there is none: it has no streams and its functions take no device, unlike those of torch.cuda."""
    waits: list[str] = []
    fractions: list[float] = []

    def set_per_process_memory_fraction(fraction: float) -> None:
        fractions.append(fraction)

    monkeypatch.setattr(torch.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "device_count", lambda: 1)
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waits.append(doing))
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 5)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 7)
    monkeypatch.setattr(torch.mps, "set_per_process_memory_fraction", set_per_process_memory_fraction)
    with migrate(target="mps", quiet=True):
        stream, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
        asked = {
            "record": event.record, "event": event.synchronize, "stream": stream.synchronize,
            "all": torch.cuda.synchronize, "one": lambda: torch.cuda.synchronize("cuda:0"),
        }  # fmt: skip
        for doing, wait in asked.items():  # noqa: B007  # read above
            wait()
        assert (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(0)) == (5, 7)
        torch.cuda.set_per_process_memory_fraction(0.5)
        torch.cuda.set_per_process_memory_fraction(0.25, 0)
        torch.cuda.set_per_process_memory_fraction(0.125, device="cuda:0")
    assert waits == list(asked) and fractions == [0.5, 0.25, 0.125]


def test_what_scripts_ask_of_small_cuda_objects(on_cpu: Start):
    """As a GPU answers where nothing was done: success of cudart, an idle pool, streams and events by number."""
    on_cpu(device_count=3)
    cuda = torch.cuda
    runtime = cuda.cudart()
    assert runtime.cudaError.success == 0
    calls = (runtime.cudaProfilerStart(), runtime.cudaProfilerStop())
    assert (*calls, runtime.cudaHostRegister(1, 2, 0), runtime.cudaHostUnregister(1)) == (0, 0, 0, 0)
    free, total = runtime.cudaMemGetInfo(0)
    assert total == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") > free > 0
    assert runtime.cudaGetErrorString(0) == "no error"
    pool = cuda.MemPool()
    assert pool.use_count() == 1 and pool.snapshot() == [] and pool.allocator is None
    found = re.fullmatch(r"GPU:0\nprocess +(\d+) uses +([\d.]+) MB GPU memory", cuda.list_gpu_processes())
    assert found and int(found[1]) == os.getpid() and 10 < float(found[2]) < total / 2**20
    first, second = cuda.Stream(), cuda.Stream(device=2, priority=-1)
    assert second.stream_id == first.stream_id + 1 and first.stream_id != 0
    assert (first.device, first.device_index, first.priority) == (torch.device("cuda", 0), 0, 0)
    assert (second.device, second.device_index, second.priority) == (torch.device("cuda", 2), 2, -1)
    assert first.cuda_stream == first.native_handle == first.stream_id and first.is_capturing() is False
    same = cuda.Stream(stream_id=first.stream_id)
    assert same == first and hash(same) == hash(first) and first != second and first != 3
    assert cuda.Stream(device=1, stream_id=first.stream_id) != first
    assert repr(second) == f"<torch.cuda.Stream device=cuda:2 cuda_stream={second.stream_id:#x}>"
    assert cuda.default_stream(1).device == torch.device("cuda", 1) and cuda.default_stream().cuda_stream == 0
    event = cuda.Event(enable_timing=True)
    assert repr(event) == "<torch.cuda.Event uninitialized>" and event.device == torch.device("cuda", 0)
    later = first.record_event(cuda.Event(enable_timing=True))
    with pytest.raises(ValueError, match="must be recorded"):
        event.elapsed_time(later)
    with pytest.raises(ValueError, match="must be recorded"):
        later.elapsed_time(event)
    with pytest.raises(ValueError, match="enable_timing=True"):
        later.elapsed_time(cuda.Event())
    assert re.fullmatch(r"<torch.cuda.Event \d+ ns>", repr(later))
    assert cuda.CUDAGraph(keep_graph=True).keep_graph and not cuda.CUDAGraph().keep_graph
    assert len(cuda.CUDAGraph().pool()) == len(cuda.graph_pool_handle()) == 2
    cuda.set_device(1)
    assert cuda.Stream().device == cuda.current_stream().device == torch.device("cuda", 1)


LIKE = ("zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "empty_like", "randint_like")


def overridden() -> tuple[list[str], list[str], list[str], list[torch.Size]]:
    """Return what a table keyed by functions of torch, and a mode that counts some, see of calls: as tensordict's."""
    seen: list[str] = []
    table = {getattr(torch, name): name for name in LIKE} | {torch.conv2d: "conv2d"}

    class Registered(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in table:
                seen.append(table[func])
            return super().__torch_function__(func, types, args, kwargs or {})

    class Counting(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names = (torch.zeros, torch.randn, torch.as_tensor, torch.Tensor.new_ones, torch.nn.functional.conv2d)
            counted.extend(each.__name__ for each in names if func is each)
            return func(*args, **(kwargs or {}))

    def both(x: torch.Tensor) -> list[torch.Size]:
        more = {"full_like": (2,), "randint_like": (3,)}
        made = [getattr(torch, name)(x, *more.get(name, ()), device="cpu") for name in LIKE]
        made += [
            torch.zeros_like(input=x),
            torch.zeros(2),
            torch.randn(2, dtype=torch.float64),
            torch.as_tensor(x),
            x.new_ones(3),
        ]
        made += [torch.conv2d(x, weight), torch.nn.functional.conv2d(x, weight=weight, stride=2), net(x)]
        return [each.shape for each in made]

    counted: list[str] = []
    plain, weight, net = torch.ones(1, 1, 3, 3), torch.ones(1, 1, 1, 1), torch.nn.Conv2d(1, 1, 1)
    subclass = plain.as_subclass(Registered)
    shapes = both(subclass)
    alone, seen = seen, []
    with Counting():
        shapes += both(plain)
    only_counted = list(counted)
    with torch.device("cpu"), Counting():
        shapes += both(subclass)
    assert isinstance(torch.zeros_like(subclass), Registered)
    return alone, only_counted, [*seen, *counted], shapes


def test_tables_and_modes_of_a_script_recognise_replaced_functions(on_cpu: Start):
    expected = overridden()
    on_cpu()
    assert overridden() == expected
    assert expected[0] == [*LIKE, "zeros_like", "conv2d", "conv2d", "conv2d"]


def test_a_mode_sees_only_what_the_script_calls(on_cpu: Start):
    class Watching(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[Any] = []
    on_cpu()
    net = torch.nn.Linear(2, 2).cuda()
    host, unknown = torch.ones(2, requires_grad=True) * 2, torch.ones(2) + 1
    for x in (net(torch.ones(1, 2).cuda()), host, unknown, torch.nn.Parameter(torch.ones(2) + 1)):
        seen.clear()
        with Watching():
            x.cpu(), x.cuda(), x.to("cuda"), x.device
        assert seen[:3] == [torch.Tensor.cpu, torch.Tensor.to, torch.Tensor.to]
        assert [each.__self__ for each in seen[3:]] == [torch.Tensor.device]


def test_a_mode_sees_a_call_once_and_its_tensor_is_on_the_device(on_cpu: Start):
    class Watching(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    on_cpu()
    seen: list[Any] = []
    with Watching():
        made = torch.ones(2, device="cuda"), torch.as_tensor([1.0, 2.0], device="cuda")
    assert seen == [torch.ones, torch.as_tensor] and all(each.cuda() is each for each in made)
    assert [record.counts[key] for key, each in record.records.items() if each.rule.name == "torch.ones"] == [1]
