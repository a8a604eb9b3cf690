"""What a CUDA script does, one function per topic; run as a script under migration with target twin.

It prints one JSON object: the topic, and the error it ended with or "". `where()` tells the truth about a tensor.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import pickle
import traceback
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

DEVICES = ("cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 0), 0)
SECOND = ("cuda:1", torch.device("cuda:1"), 1)


def where(tensor: Any) -> str:
    return str(torch._C.TensorBase.device.__get__(tensor))


def factories() -> None:
    host = torch.ones(2)
    made = {
        "zeros": lambda d: torch.zeros(2, device=d),
        "tensor": lambda d: torch.tensor([1.0], device=d),
        "as_tensor": lambda d: torch.as_tensor([1.0], device=d),
        "asarray": lambda d: torch.asarray([1.0], device=d),
        "arange": lambda d: torch.arange(3, device=d),
        "full": lambda d: torch.full((2,), 1.0, device=d),
        "eye": lambda d: torch.eye(2, device=d),
        "linspace": lambda d: torch.linspace(0, 1, 3, device=d),
        "rand": lambda d: torch.rand(2, device=d),
        "randint": lambda d: torch.randint(0, 5, (2,), device=d),
        "randperm": lambda d: torch.randperm(4, device=d),
        "normal": lambda d: torch.normal(0.0, 1.0, (2,), device=d),
        "empty_strided": lambda d: torch.empty_strided((2,), (1,), device=d),
        "hann_window": lambda d: torch.hann_window(4, device=d),
        "fftfreq": lambda d: torch.fft.fftfreq(4, device=d),
        "ones_like": lambda d: torch.ones_like(host, device=d),
        "new_zeros": lambda d: host.new_zeros(3, device=d),
    }
    for name, make in made.items():
        for device in DEVICES:
            assert where(make(device)) == "twin:0", (name, device)
        for device in SECOND:
            assert where(make(device)) == "twin:1", (name, device)
        assert where(make("cpu")) == "cpu", name


def factories_after_a_tensor() -> None:
    there = torch.ones(2, device="cuda:1")
    assert where(torch.zeros_like(there)) == where(there.new_ones(2)) == "twin:1"
    assert where(torch.ones(2, device=there.device)) == "twin:1"


def moves() -> None:
    host = torch.ones(2)
    for device in DEVICES:
        assert where(host.to(device)) == where(host.cuda(device)) == "twin:0", device
    for device in SECOND:
        assert where(host.to(device)) == where(host.cuda(device)) == "twin:1", device
    assert where(host.cuda()) == where(host.to("cuda", torch.float64)) == "twin:0"
    assert where(host.to(device="cuda", dtype=torch.half, non_blocking=True, copy=True)) == "twin:0"
    there = host.cuda()
    assert there.cuda() is there and there.to("cuda") is there and there.to(there.device) is there
    assert where(there.cpu()) == where(there.to("cpu")) == "cpu" and where(host.to(there)) == "twin:0"
    assert where(nn.Parameter(host).cuda()) == "twin:0"
    assert where(host.type(torch.cuda.FloatTensor)) == where(host.type("torch.cuda.DoubleTensor")) == "twin:0"


def current_device() -> None:
    host = torch.ones(2)
    with torch.cuda.device(1):
        assert torch.cuda.current_device() == 1
        assert where(host.cuda()) == where(torch.zeros(1, device="cuda")) == "twin:1"
    with torch.cuda.device_of(torch.ones(1, device="cuda:1")):
        assert torch.cuda.current_device() == 1
    for device in (1, "cuda:1", torch.device("cuda:1")):
        torch.cuda.set_device(device)
        assert where(host.cuda()) == "twin:1", device
        torch.cuda.set_device(0)
    assert torch.cuda.current_device() == 0 and where(host.cuda()) == "twin:0"


def modules() -> None:
    for device in DEVICES:
        assert where(nn.Linear(2, 2).to(device).weight) == where(nn.Linear(2, 2, device=device).weight) == "twin:0"
    for device in SECOND:
        assert where(nn.Linear(2, 2).cuda(device).weight) == where(nn.Linear(2, 2).to(device).weight) == "twin:1"
    assert where(nn.Linear(2, 2).to(device="cuda", dtype=torch.float64).weight) == "twin:0"
    assert where(nn.Linear(2, 2, device="meta").to_empty(device="cuda").weight) == "twin:0"
    norm = nn.BatchNorm2d(3).cuda()
    assert where(norm.running_mean) == "twin:0" and next(norm.parameters()).is_cuda
    assert where(norm.cpu().weight) == "cpu"
    averaged = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2), device="cuda")
    averaged.update_parameters(nn.Linear(2, 2).cuda())
    assert where(averaged.module.weight) == "twin:0"


def typed_constructors() -> None:
    there = torch.cuda.FloatTensor([1, 2])
    assert where(there) == "twin:0" and there.dtype is torch.float32 and there.tolist() == [1, 2]
    assert where(torch.cuda.FloatTensor(2, 3).fill_(1)) == where(torch.cuda.LongTensor([3])) == "twin:0"
    assert torch.cuda.LongTensor(3).shape == (3,) and torch.cuda.HalfTensor(2).dtype is torch.float16
    assert isinstance(there, torch.cuda.FloatTensor) and not isinstance(there, torch.FloatTensor)
    assert not isinstance(torch.ones(2), torch.cuda.FloatTensor)
    assert there.type() == "torch.cuda.FloatTensor" and torch.ones(2).type() == "torch.FloatTensor"


def identity() -> None:
    there, host = torch.ones(2, device="cuda:1"), torch.ones(2)
    assert there.is_cuda and not there.is_cpu and host.is_cpu and not host.is_cuda
    assert there.device == torch.device("cuda:1") and there.device.type == "cuda" and str(there.device) == "cuda:1"
    assert host.device == torch.device("cpu")
    assert there.get_device() == 1 and host.get_device() == -1
    assert nn.Parameter(there).is_cuda and nn.Linear(2, 2).cuda().weight.device.type == "cuda"


def truth_for_torch() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(2, device="cuda"))
    assert str(fake.fake_device) == "twin:0", fake.fake_device
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None and accelerator.type == "twin"


def storages() -> None:
    there = torch.ones(2, device="cuda").untyped_storage()
    assert there.is_cuda and there.device.type == "cuda"
    assert torch.ones(2).untyped_storage().cuda().is_cuda and not torch.ones(2).untyped_storage().is_cuda
    assert torch.UntypedStorage(4, device="cuda").is_cuda
    assert torch.cuda.FloatStorage(3).is_cuda and torch.ones(3).storage().cuda().is_cuda


def mixing_is_refused() -> None:
    host, there = torch.ones(2, 2), torch.ones(2, 2, device="cuda")
    for mix in (
        lambda: host + there,
        lambda: host @ there,
        lambda: nn.Linear(2, 2)(there),
        lambda: torch.cat([host, there]),
    ):
        said = ""
        try:
            mix()
        except RuntimeError as error:
            said = str(error)
        assert "same device" in said, said or "host and device tensors were mixed"


def _saved(value: Any, tag: str = "") -> io.BytesIO:
    """`tag` makes it what a GPU saves: its storages say where they lay."""
    written = io.BytesIO()
    real = torch.serialization.location_tag
    if tag:
        torch.serialization.location_tag = lambda storage: tag
    try:
        torch.save(value, written)
    finally:
        torch.serialization.location_tag = real
    written.seek(0)
    return written


LOADS: tuple[tuple[Any, str], ...] = (
    (None, "twin:1"),
    ("cpu", "cpu"),
    ("cuda", "twin:0"),
    ("cuda:1", "twin:1"),
    (torch.device("cuda:1"), "twin:1"),
    ({"cuda:1": "cuda:0"}, "twin:0"),
    ({"cuda:1": "cpu"}, "cpu"),
    (lambda storage, location: storage.cuda(0), "twin:0"),
    (lambda storage, location: storage, "cpu"),
)


def checkpoints_of_a_gpu() -> None:
    for place, expected in LOADS:
        loaded = torch.load(_saved({"w": torch.arange(3.0)}, "cuda:1"), map_location=place)["w"]
        assert where(loaded) == expected and loaded.tolist() == [0, 1, 2], (place, where(loaded))


def checkpoints_of_its_own() -> None:
    there = {"w": torch.arange(3.0, device="cuda:1"), "host": torch.ones(1)}
    for place, expected in LOADS:
        loaded = torch.load(_saved(there), map_location=place)
        assert where(loaded["w"]) == expected and loaded["w"].tolist() == [0, 1, 2], (place, where(loaded["w"]))
    assert where(torch.load(_saved(there))["host"]) == "cpu"


def optimizer_state() -> None:
    model = nn.Linear(2, 2).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2).cuda()).sum().backward()
    optimizer.step()
    state = torch.load(_saved([model.state_dict(), optimizer.state_dict()]), map_location="cpu")
    model.load_state_dict(state[0])
    optimizer.load_state_dict(state[1])
    assert where(optimizer.state[model.weight]["exp_avg"]) == "twin:0"
    optimizer.step()


def autocast() -> None:
    model, there = nn.Linear(2, 2).cuda(), torch.ones(1, 2).cuda()
    for mode, expected in (
        (torch.autocast("cuda"), torch.float16),
        (torch.autocast(device_type=there.device.type), torch.float16),
        (torch.cuda.amp.autocast(), torch.float16),
        (torch.amp.autocast("cuda", dtype=torch.bfloat16), torch.bfloat16),
        (torch.cuda.amp.autocast(enabled=False), torch.float32),
    ):
        with mode:
            assert model(there).dtype is expected, (mode, expected)
            assert torch.is_autocast_enabled() == (expected is not torch.float32)
            assert expected is torch.float32 or torch.get_autocast_gpu_dtype() is expected
    assert not torch.is_autocast_enabled()


def grad_scaler() -> None:
    for scaler in (torch.cuda.amp.GradScaler(), torch.amp.GradScaler("cuda"), torch.amp.GradScaler()):
        model = nn.Linear(2, 2).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler.scale(model(torch.ones(1, 2).cuda()).sum()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scaler.load_state_dict(scaler.state_dict())
        assert scaler.is_enabled() and scaler.get_scale() == 65536
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    weight = torch.ones(1, device="cuda", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale((weight * float("inf")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.item() == 1 and scaler.get_scale() == 2, "a step with infinite gradients was taken"


def generators() -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    first = torch.randn(3, device="cuda", generator=generator)
    assert isinstance(generator, torch.Generator)
    assert torch.equal(first, torch.randn(3, device="cuda", generator=generator.manual_seed(1)))
    assert torch.Generator(torch.device("cuda:1")).device.index == 1 and torch.Generator().device.type == "cpu"
    for seed in (torch.cuda.manual_seed, torch.cuda.manual_seed_all, torch.manual_seed):
        seed(3)
        first = torch.randn(3, device="cuda")
        seed(3)
        assert torch.equal(first, torch.randn(3, device="cuda")), seed
    torch.manual_seed(3)
    host = torch.randn(3)
    torch.manual_seed(3)
    torch.randn(3, device="cuda")
    assert torch.equal(host, torch.randn(3)), "the device drew from the host's generator"


def random_states() -> None:
    for device in ("cuda", "cuda:1", torch.device("cuda"), 1):
        state = torch.cuda.get_rng_state(device)
        first = torch.randn(3, device=device)
        torch.cuda.set_rng_state(state, device)
        assert torch.equal(first, torch.randn(3, device=device)), device
    states = torch.cuda.get_rng_state_all()
    first = torch.randn(3, device="cuda:1")
    torch.cuda.set_rng_state_all(states)
    assert len(states) == 2 and torch.equal(first, torch.randn(3, device="cuda:1"))
    with torch.random.fork_rng():
        first = torch.randn(2, device="cuda")
    assert torch.equal(first, torch.randn(2, device="cuda"))


def default_device() -> None:
    torch.set_default_device("cuda")
    try:
        assert where(torch.ones(2)) == where(nn.Linear(2, 2).weight) == "twin:0"
        assert torch.get_default_device().type == "cuda"
    finally:
        torch.set_default_device(None)
    with torch.device("cuda:1"):
        assert where(torch.ones(2)) == "twin:1"
    torch.set_default_tensor_type("torch.cuda.FloatTensor")
    try:
        assert where(torch.ones(2)) == "twin:0"
    finally:
        torch.set_default_tensor_type("torch.FloatTensor")
    assert where(torch.ones(2)) == "cpu"


def streams() -> None:
    side = torch.cuda.Stream()
    torch.cuda.Stream(device="cuda:1"), torch.cuda.Stream(device=torch.device("cuda"), priority=-1)
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side
        there = torch.ones(2, device="cuda") * 2
    with torch.cuda.stream(stream=None):
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.cuda.current_stream().wait_stream(side)
    there.record_stream(side)
    side.synchronize()
    for device in (None, *DEVICES):
        torch.cuda.synchronize(device)
        torch.cuda.current_stream(device)
    torch.cuda.set_stream(side)
    assert torch.cuda.current_stream() == side and isinstance(side, torch.cuda.Stream) and side.query()
    torch.cuda.set_stream(torch.cuda.default_stream())
    assert torch.Stream("cuda").device.index == 0


def events() -> None:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    side = torch.cuda.Stream()
    start.record()
    end.record(side)
    end.synchronize()
    assert start.elapsed_time(end) >= 0 and end.query()
    side.wait_event(start)
    start.wait(side)
    assert side.record_event().query()
    torch.Event("cuda", enable_timing=True).record()


def queries() -> None:
    assert torch.cuda.is_available() and torch.cuda.device_count() == 2
    assert torch.cuda.get_device_name() == "Twin 0" and torch.cuda.get_device_name("cuda:1") == "Twin 1"
    properties = torch.cuda.get_device_properties(torch.device("cuda:1"))
    assert properties.total_memory > 0 and properties.multi_processor_count > 0 and properties.name == "Twin 1"
    assert torch.cuda.get_device_capability() == (8, 0) and torch.cuda.is_bf16_supported()
    before = torch.cuda.memory_allocated()
    there = torch.ones(1 << 20, device="cuda")
    assert torch.cuda.memory_allocated("cuda:0") - before == there.numel() * 4
    assert torch.cuda.max_memory_allocated(torch.device("cuda")) >= before + there.numel() * 4
    del there
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated()
    torch.cuda.empty_cache(), torch.cuda.mem_get_info(), torch.cuda.memory_summary(), torch.cuda.memory_reserved(1)


def pinning() -> None:
    assert torch.ones(2).pin_memory().is_pinned() and torch.ones(2).pin_memory("cuda").is_pinned("cuda")
    assert torch.empty(2, pin_memory=True).is_pinned() and not torch.ones(2).is_pinned()
    assert torch.ones(2).untyped_storage().pin_memory().is_pinned()
    for more in ({}, {"pin_memory_device": "cuda"}, {"num_workers": 1}):
        for (batch,) in DataLoader(TensorDataset(torch.ones(4, 2)), 2, pin_memory=True, **more):
            assert batch.is_pinned() and where(batch.cuda(non_blocking=True)) == "twin:0", more


def profilers() -> None:
    assert torch.autograd.profiler.profile(use_cuda=True).use_device == "twin"
    assert torch.autograd.profiler.profile(use_device="cuda").use_device == "twin"
    activity = torch.profiler.ProfilerActivity
    for asked in ({"use_cuda": True}, {"activities": [activity.CPU, activity.CUDA]}):
        assert set(torch.profiler.profile(**asked).activities) == {activity.CPU, activity.PrivateUse1}, asked


def compiled() -> None:
    def add(x: torch.Tensor) -> torch.Tensor:
        return (x.cuda() * 2 + torch.ones(2, device="cuda")).sum()

    for backend in ("eager", "aot_eager"):
        fast = torch.compile(add, backend=backend, fullgraph=True)
        for x in (torch.ones(2), torch.ones(2).cuda()):
            assert fast(x).item() == 6 and where(fast(x)) == "twin:0", backend


def copies() -> None:
    there = torch.ones(2, device="cuda:1")
    assert where(copy.deepcopy(there)) == where(pickle.loads(pickle.dumps(there))) == where(there.clone()) == "twin:1"
    assert there.cpu().numpy().tolist() == there.tolist() == [1, 1] and there.sum().item() == 2


def data_parallel() -> None:
    model = nn.Linear(2, 2)
    expected = model(torch.ones(4, 2))
    model = model.cuda()
    assert torch.equal(nn.DataParallel(model, device_ids=[0])(torch.ones(4, 2).cuda()).cpu(), expected)
    assert torch.equal(nn.DataParallel(model)(torch.ones(4, 2).cuda()).cpu(), expected)


def parallelism_by_hand() -> None:
    """Two devices with memory of their own: what each part of the batch does there comes back as one gradient."""
    torch.manual_seed(0)
    plain = nn.Linear(3, 2)
    net, x = copy.deepcopy(plain).cuda(), torch.rand(4, 3)
    replicas = nn.parallel.replicate(net, [0, "cuda:1"])
    parts = nn.parallel.scatter(x, [0, torch.device("cuda:1")])
    assert [where(part) for part in parts] == [where(each.weight) for each in replicas] == ["twin:0", "twin:1"]
    made = [replica(part) for replica, part in zip(replicas, parts, strict=True)]
    whole = nn.parallel.gather(made, 1)
    assert where(whole) == "twin:1"
    whole.pow(2).sum().backward()
    plain(x).pow(2).sum().backward()
    torch.testing.assert_close(net.weight.grad.cpu(), plain.weight.grad)
    total = torch.nn.parallel.comm.reduce_add([part.sum() for part in parts], destination=1)
    assert where(total) == "twin:1" and [where(t) for t in torch.cuda.comm.broadcast(x, [1, 0])] == ["twin:1", "twin:0"]


def _script_moves(x: torch.Tensor, device: torch.device = torch.device("cuda"), name: str = "1") -> list[torch.Tensor]:  # noqa: B008
    return [x.to(device), x.to("cuda:" + name), x.cuda(), torch.zeros(1, device="cuda:1")]


def process_groups() -> None:
    """Made, for host tensors; but the script is told that gloo does not take those of the device."""
    with contextlib.redirect_stderr(io.StringIO()) as told:
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    assert "init_process_group cannot run on twin; gloo sends host tensors only" in told.getvalue()
    dist.all_reduce(torch.ones(2))
    try:
        dist.all_reduce(torch.ones(2, device="cuda"))
    except RuntimeError:
        return
    finally:
        dist.destroy_process_group()
    raise AssertionError("gloo took a tensor of the device")


def scripted() -> None:
    """TorchScript: the index of a device that only the run tells is kept."""
    program = torch.jit.script(_script_moves)
    host = torch.ones(2)
    assert [where(each) for each in program(host)] == ["twin:0", "twin:1", "twin:0", "twin:1"]
    assert [where(each) for each in program(host, torch.device("cuda:1"), name="0")][:2] == ["twin:1", "twin:0"]
    assert where(program(host, torch.device("cpu"))[0]) == "cpu"


def recomputation() -> None:
    for reentrant in (True, False):
        there = torch.ones(64, device="cuda", requires_grad=True)
        out = checkpoint(lambda x: nn.functional.dropout(x) * x, there, use_reentrant=reentrant)
        out.sum().backward()
        # d(x·x·mask)/dx at x = 1 is twice the mask: the second draw was the first one's.
        assert torch.equal(there.grad, 2 * out.detach()), reentrant


def training() -> None:
    def losses(device: Any, **more: Any) -> list[float]:
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1)
        model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 5)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **more)
        draw, seen = torch.Generator().manual_seed(1), []
        for _ in range(4):
            images = torch.randn(8, 3, 16, 16, generator=draw).to(device, non_blocking=True)
            labels = torch.randint(0, 5, (8,), generator=draw).to(device)
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        return seen

    expected = losses("cpu")
    assert len(set(expected)) == 4
    for device in ("cuda", torch.device("cuda:1"), 0):
        assert losses(device) == expected, device
    assert losses("cuda", fused=True) == losses("cpu", fused=True)


TOPICS = (
    factories, factories_after_a_tensor, moves, current_device, modules, typed_constructors, identity, truth_for_torch,
    storages, mixing_is_refused, checkpoints_of_a_gpu, checkpoints_of_its_own, optimizer_state, autocast, grad_scaler,
    generators, random_states, default_device, streams, events, queries, pinning, profilers, compiled, copies,
    data_parallel, parallelism_by_hand, process_groups, scripted, recomputation, training,
)  # fmt: skip

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    ended = {}
    for topic in TOPICS:
        try:
            topic()
            ended[topic.__name__] = ""
        except Exception:  # noqa: BLE001  each topic reports for itself
            ended[topic.__name__] = traceback.format_exc()
    print(json.dumps(ended))
