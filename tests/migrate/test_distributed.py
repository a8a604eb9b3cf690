"""Two ranks over gloo, started as users start them; and what a single process can tell about groups and parallelism."""

from __future__ import annotations

import gc
import json
import os
import re
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from warm import free_port

from sightline_migrate import cli, targets
from sightline_migrate.reporting import record
from sightline_migrate.rules import distributed
from sightline_migrate.targets import Target

FIXTURES = Path(__file__).parent / "fixtures"
BUILT_WITH_NCCL = dist.is_nccl_available(), dist.is_backend_available("nccl")  # of torch, before any activation


def done_for(name: str) -> list[str]:
    return [each.what for each in record.records.values() if each.rule.name == name]


# backends


@pytest.mark.parametrize(
    ("wanted", "target", "there"),
    [
        ("nccl", "cpu", "gloo"),
        ("NCCL", "cpu", "gloo"),
        ("nccl", "hpu", "hccl"),
        ("nccl", "xpu", "xccl"),
        ("nccl", "musa", "mccl"),
        ("gloo", "xpu", "gloo"),
        ("mpi", "cpu", "mpi"),
        ("cuda:nccl", "cpu", "cpu:gloo"),
        ("cpu:gloo,cuda:nccl", "cpu", "cpu:gloo"),
        ("cuda:nccl,cpu:mpi", "cpu", "cpu:mpi"),
        ("cpu:gloo,cuda:nccl", "hpu", "cpu:gloo,hpu:hccl"),
        ("cpu:gloo, cuda:nccl", "xpu", "cpu:gloo,xpu:xccl"),
    ],
)
def test_backend_of_the_target(wanted: str, target: str, there: str):
    collectives = {"cpu": "gloo", "hpu": "hccl", "xpu": "xccl", "musa": "mccl"}
    assert distributed.backend_of(wanted, Target(target, None, collectives[target])) == there


def test_collectives_of_a_target(monkeypatch: pytest.MonkeyPatch):
    for name in ("hpu", "npu", "xpu", "musa", "mps", "warp"):
        module = types.ModuleType(f"torch.{name}")
        module.is_available = lambda: True  # type: ignore[attr-defined]
        monkeypatch.setattr(torch, name, module, raising=False)
    found = {name: targets.choose(name) for name in ("cpu", "hpu", "npu", "xpu", "musa", "mps", "warp")}
    assert {name: target and target.collective for name, target in found.items()} == {
        "cpu": "gloo", "hpu": "hccl", "npu": "hccl", "xpu": "xccl", "musa": "mccl", "mps": "gloo", "warp": "gloo"
    }  # fmt: skip
    without = [name for name, target in found.items() if target and not target.has_collectives]
    assert without == ["mps", "warp"]  # gloo takes no tensors of theirs


@pytest.fixture
def alone(on_cpu: Callable[..., Any], tmp_path: Path) -> Iterator[Callable[..., None]]:
    """alone(backend, **more): a process group of one rank."""
    on_cpu()
    # By its name of here, as scripts call it: the rules are in place now.
    yield lambda *args, **kwargs: dist.init_process_group(
        *args, store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1, **kwargs
    )
    gc.collect()  # threads of gloo must not hold tensors of a model that nobody has any more
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("args", "kwargs", "name", "config", "done"),
    [
        (("nccl",), {}, "nccl", "cuda:nccl", ["backend gloo"]),
        (
            (),
            {"backend": "nccl", "device_id": torch.device("cuda", 0)},
            "nccl",
            "cuda:nccl",
            ["backend gloo, device_id None"],
        ),
        (
            (),
            {"backend": dist.Backend.NCCL, "pg_options": object()},
            "nccl",
            "cuda:nccl",
            ["backend gloo, without the options for another backend"],
        ),
        (("cpu:gloo,cuda:nccl",), {}, "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl", ["backend cpu:gloo"]),
        (("gloo",), {}, "gloo", "cpu:gloo", []),
    ],
)
def test_script_hears_the_backend_it_named(
    alone: Callable[..., None],
    args: tuple[str, ...],
    kwargs: dict[str, Any],
    name: str,
    config: str,
    done: list[str],
):
    alone(*args, **kwargs)
    assert done_for("torch.distributed.init_process_group") == done
    assert dist.get_backend() == name and done_for("torch.distributed.get_backend") == ["the name the script passed"]
    assert dist.get_backend_config().startswith(config)
    assert dist.get_backend(dist.new_group(backend="gloo")) == "gloo"
    assert dist.get_backend(dist.new_group(backend="nccl")) == "nccl"
    assert dist.get_backend(dist.new_group()) == name
    assert dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).name() == "gloo"  # the truth


def test_torch_hears_the_truth_about_the_backend(alone: Callable[..., None]):
    alone("nccl")
    record.truths.clear()
    nn.parallel.DistributedDataParallel(nn.Linear(2, 2), device_ids=[0])
    dist.broadcast_object_list([1], 0, None, "cuda:0")
    assert done_for("torch.distributed.broadcast_object_list") == ["sent through the target"]
    from_torch: dict[str, Any] = {"dist": dist}
    code = "backend, built = dist.get_backend(), (dist.is_nccl_available(), dist.is_backend_available('nccl'))"
    exec(compile(code, os.path.join(os.path.dirname(torch.__file__), "nn", "x.py"), "exec"), from_torch)
    assert from_torch["backend"] == "gloo" and from_torch["built"] == BUILT_WITH_NCCL
    assert record.truths["torch.distributed.get_backend"] >= 1


def test_nccl_is_available_to_the_script(on_cpu: Callable[..., Any]):
    on_cpu()
    assert dist.is_nccl_available()
    assert dist.is_backend_available("nccl")
    assert not dist.is_backend_available("no_such_backend")


def test_barrier_without_the_index(alone: Callable[..., None]):
    alone("nccl")
    dist.barrier(device_ids=[0])
    dist.barrier()
    assert done_for("torch.distributed.barrier") == ["waits without device_ids"]


def test_what_nccl_refuses_is_refused(alone: Callable[..., None]):
    alone("nccl")
    columns = torch.zeros(2, 3).t()
    with pytest.raises(ValueError, match=r"contiguous tensors, but got strides \(1, 3\); use .contiguous\(\)"):
        dist.all_gather([torch.zeros(6)], columns)
    with pytest.raises(TypeError, match="PREMUL_SUM takes floating point tensors, as with nccl, but got torch.int64"):
        dist.all_reduce(torch.ones(2, dtype=torch.int64), op=dist._make_nccl_premul_sum(0.5))


def test_failed_coalescing_leaves_nothing_behind(alone: Callable[..., None]):
    alone("nccl")
    with pytest.raises(KeyError), dist._coalescing_manager(device=torch.device("cuda:0")):
        raise KeyError
    x = torch.full((2,), 3.0)
    work = dist.all_reduce(x, async_op=True)
    assert isinstance(work, dist.Work) and work.wait() and x.tolist() == [3, 3]
    assert not dist.distributed_c10d._world.pg_coalesce_state


@pytest.mark.parametrize(
    "given",
    [
        {"device_ids": [0], "output_device": 0},
        {"device_ids": [torch.device("cuda", 0)]},
        {"device_ids": ("cuda:0",), "output_device": torch.device("cuda:0")},
        {"device_ids": [1]},
        {},
    ],
)
def test_ddp_runs_without_indices(alone: Callable[..., None], given: dict[str, Any]):
    alone("nccl")
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 3), **given, find_unused_parameters=True)
    assert model.find_unused_parameters
    model(torch.ones(1, 2)).sum().backward()
    assert model.device_ids is None and model.module.bias.grad is not None
    assert bool(done_for("torch.nn.parallel.DistributedDataParallel.__init__")) == bool(given)


def test_sync_batch_norm_of_one_rank_is_batch_norm(alone: Callable[..., None]):
    alone("nccl")
    torch.manual_seed(0)
    plain = nn.BatchNorm2d(3)
    layer = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(3)))[0]
    x = torch.randn(4, 3, 5, 5)
    torch.testing.assert_close(layer(x), plain(x), rtol=0, atol=0)
    torch.testing.assert_close(layer.running_var, plain.running_var, rtol=0, atol=0)
    torch.testing.assert_close(layer.eval()(x), plain.eval()(x), rtol=0, atol=0)


def test_data_parallel_is_a_plain_call(on_cpu: Callable[..., Any]):
    on_cpu()
    inner = nn.Linear(2, 2)
    x = torch.ones(3, 2)
    model = nn.DataParallel(inner, device_ids=[0, 1], output_device=torch.device("cuda:1")).cuda()
    torch.testing.assert_close(model(x), inner(x), rtol=0, atol=0)
    torch.testing.assert_close(nn.parallel.data_parallel(inner, x, [0, 1]), inner(x), rtol=0, atol=0)
    assert list(model.state_dict()) == ["module.weight", "module.bias"]


def test_spawned_processes_are_told_how_many_there_are(on_cpu: Callable[..., Any], tmp_path: Path):
    on_cpu()
    name = "SIGHTLINE_MIGRATE_DEVICE_COUNT"

    def tell(rank: int) -> None:
        (tmp_path / f"{rank}.txt").write_text(os.environ[name])

    before = os.environ[name]
    for ranks, told in ((1, before), (2, "2")):
        torch.multiprocessing.start_processes(tell, (), ranks, start_method="fork")
        assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(ranks)] == [told] * ranks
        assert os.environ[name] == before == "0"
    assert len(done_for("torch.multiprocessing.start_processes")) == 1


def test_mesh_and_pipeline_stage_on_the_target(alone: Callable[..., None]):
    from torch.distributed.pipelining import PipelineStage

    alone("nccl")
    mesh = dist.init_device_mesh("cuda", (1,), mesh_dim_names=("data",))
    assert mesh.device_type == "cpu"
    assert dist.DeviceMesh(device_type="cuda", mesh=[0]).device_type == "cpu"
    group = dist.new_group()
    stage = PipelineStage(nn.Linear(2, 2), 0, 1, torch.device("cuda:0"), group=group)
    assert stage.device == torch.device("cpu") and stage.group is group
    assert done_for("torch.distributed.pipelining.PipelineStage.__init__") == ["on the target"]


# two ranks

ANSWERS = """
import json, os, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
said = {"count": torch.cuda.device_count(), "backend": dist.get_backend()}
total = torch.tensor([rank + 1.0], device="cuda")
dist.all_reduce(total, op=dist.ReduceOp.AVG)
said["mean"] = total.item()
objects = [{"a": 1} if rank == 0 else None]
dist.broadcast_object_list(objects, 0, device=torch.device("cuda", rank))
said["objects"] = objects

def trained(model, data, optimizer):
    for _ in range(2):
        optimizer.zero_grad()
        model(data).pow(2).mean().backward()
        optimizer.step()

def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).cuda(rank)

data = torch.arange(16.0, device="cuda").view(4, 4) / 16
mine = data[2 * rank : 2 * rank + 2]
whole, parallel, sharded, old = network(), network(), network(), network()
if rank == 1:
    old[0].weight.data.zero_()  # sync_module_states has to make it equal
trained(whole, data, torch.optim.SGD(whole.parameters(), lr=0.5, fused=True))
parallel = nn.parallel.DistributedDataParallel(parallel, device_ids=[rank], output_device=rank)
trained(parallel, mine, torch.optim.SGD(parallel.parameters(), lr=0.5))
fully_shard(sharded, mesh=init_device_mesh("cuda", (2,)))
trained(sharded, mine, torch.optim.SGD(sharded.parameters(), lr=0.5))
old = FullyShardedDataParallel(old, device_id=torch.cuda.current_device(), sync_module_states=True)
trained(old, mine, torch.optim.SGD(old.parameters(), lr=0.5))
with torch.no_grad(), FullyShardedDataParallel.summon_full_params(old):
    want = whole[0].weight
    said["ddp"] = (parallel.module[0].weight - want).abs().max().item()
    said["fsdp2"] = (sharded[0].weight.full_tensor() - want).abs().max().item()
    said["fsdp1"] = (old.module[0].weight - want).abs().max().item()
dist.barrier(device_ids=[rank])
with open(f"said{rank}.json", "w") as file:
    json.dump(said, file)
# As scripts end: networks hold the group. gloo's threads drop the tensors of the last collectives; here, at worst, they
# get the interpreter, which they need for it, only where this thread waits.
sys.setswitchinterval(60)
for _ in range(4):
    dist.all_reduce(torch.ones(3, device="cuda"))
dist.destroy_process_group()
"""


STATISTICS = """
import gc, os
import torch, torch.distributed as dist
from torch import nn

def network(norm):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))

def agree(gpu, ranks):
    dist.init_process_group("nccl", init_method=f"file://{os.getcwd()}/store", world_size=ranks, rank=gpu)
    torch.cuda.set_device(gpu)
    torch.set_default_dtype(torch.float64)  # differences are then mistakes, not rounding
    torch.manual_seed(1)
    x = torch.randn(5, 3, 6, 6) * 3 + 100  # unequal shares, far from zero
    y = torch.randn(5, 2)
    share = slice(0, 3) if gpu == 0 else slice(3, 5)
    whole = network(nn.BatchNorm2d(4))
    loss = (whole(x) - y).pow(2).sum()
    loss.backward()

    model = network(nn.BatchNorm2d(4)).to(gpu)
    names = list(model.state_dict())
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert isinstance(model[1], nn.SyncBatchNorm) and list(model.state_dict()) == names
    model = nn.parallel.DistributedDataParallel(model, device_ids=[gpu])
    # DDP averages over ranks, the loss is a sum.
    (ranks * (model(x[share].cuda(gpu)) - y[share].cuda(gpu)).pow(2).sum()).backward()
    for (name, want), got in zip(whole.named_parameters(), model.parameters()):
        torch.testing.assert_close(got.grad, want.grad, msg=lambda m: name + m)
    torch.testing.assert_close(model.module[1].running_var, whole[1].running_var)
    torch.testing.assert_close(model.module[1].running_mean, whole[1].running_mean)
    model.eval(), whole.eval()
    torch.testing.assert_close(model(x), whole(x))

    # Groups of one rank share nothing: plain batch norm of the own part.
    groups = [dist.new_group([0]), dist.new_group([1])]
    apart = nn.SyncBatchNorm(3, process_group=groups[gpu]).cuda()
    torch.testing.assert_close(apart(x[share]), nn.BatchNorm2d(3)(x[share]))

    import apex
    from apex.parallel import DistributedDataParallel, convert_syncbn_model
    for average in (True, False):
        again = convert_syncbn_model(network(nn.BatchNorm2d(4))).cuda()
        again = DistributedDataParallel(again, gradient_average=average)
        factor = ranks if average else 1
        (factor * (again(x[share]) - y[share]).pow(2).sum()).backward()
        torch.testing.assert_close(again.module[0].weight.grad, whole[0].weight.grad)
    last = convert_syncbn_model(nn.Sequential(nn.BatchNorm1d(6)), channel_last=True)
    torch.testing.assert_close(
        last(x[share]), nn.BatchNorm1d(6)(x.movedim(-1, 1).flatten(2)).unflatten(2, (3, 6)).movedim(1, -1)[share],
    )
    os.write(1, f"rank {gpu} of {ranks} agrees\\n".encode())  # at once: print() writes word by word where unbuffered
    del model, again, apart, last
    gc.collect()
    dist.destroy_process_group()

agree(int(os.environ["RANK"]), 2)
torch.set_default_dtype(torch.float32)
"""


REFERENCE = FIXTURES / "train_reference.py"
FLAGS = ("--samples", "64", "--lr", "2", "--model-ema", "--fast")


# By default ranks that are forked, of a process that is migrated; torchrun and its ranks import torch three times.
WAYS = pytest.mark.parametrize("way", ["forks", pytest.param("torchrun", marks=pytest.mark.slow)])


@pytest.fixture(scope="module")
def ran(once: Callable[..., Path], fork: Callable[..., Any]) -> Callable[[str], Path]:
    """ran(way): where two ranks ran two scripts, one after the other; torchrun starts one rank for each device."""

    def run(folder: Path) -> None:
        (folder / "statistics.py").write_text(STATISTICS)
        (folder / "answers.py").write_text(ANSWERS)
        runs = ("statistics.py",), (str(FIXTURES / "collectives.py"),), ("answers.py",)
        if folder.name == "torchrun":
            return _run_on_two(fork, folder, *runs)
        words = ("--target", "cpu", "--device-count", "2", "--log", "log", FIXTURES / "ranks.py", "2")
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        fork(folder, "-m", "sightline.migrate", *words, FIXTURES / "several.py", json.dumps(runs), env=meeting)

    return lambda way: once(way, run)


def _run_on_two(fork: Callable[..., Any], folder: Path, *runs: tuple[object, ...]) -> None:
    options = ("--target", "cpu", "--device-count", "2", "--log", "log", "torchrun")
    words = ("--standalone", "--nproc-per-node", "gpu", FIXTURES / "several.py", json.dumps(runs, default=str))
    fork(folder, "-m", "sightline.migrate", *options, *words)


def _told(folder: Path, run: int = 0) -> list[str]:
    """The lines with losses of the reference script."""
    text = re.split(r"^= \d+$", (folder / "out.txt").read_text(), flags=re.MULTILINE)[run]
    return re.findall(r"^(?:step|Test samples|EMA samples) .*", text, re.MULTILINE)


@pytest.mark.slow
def test_the_reference_script_on_two_ranks(fork: Callable[..., Any], tmp_path: Path):
    """nccl, set_device, barrier, DDP with device_ids, all_reduce on cuda; then synchronised batch norm."""
    # Each group meets in a file of its own: torchrun's store keeps what a group wrote.
    urls = (f"--dist-url=file://{tmp_path}/{name}?rank=$RANK&world_size=2" for name in ("apart", "synced"))
    _run_on_two(fork, tmp_path, (REFERENCE, *FLAGS, next(urls)), (REFERENCE, *FLAGS, "--sync-bn", next(urls)))
    apart, synced = _told(tmp_path, 1), _told(tmp_path, 2)
    fork(tmp_path, FIXTURES / "ranks.py", 2, REFERENCE, "--device", "cpu", *FLAGS, warm=True)
    assert len(apart) == 6 and apart == _told(tmp_path)
    # Two ranks with synchronised statistics do what one rank with both batches does, up to the order of sums.
    fork(tmp_path, FIXTURES / "ranks.py", 1, REFERENCE, "--device", "cpu", "-b", "16", *FLAGS, warm=True)
    found = {name: lines[-2].split() for name, lines in (("a", apart), ("s", synced), ("alone", _told(tmp_path)))}
    assert all(words[:4] == ["Test", "samples", "32", "loss"] for words in found.values())
    losses = {name: float(words[4]) for name, words in found.items()}
    assert losses["s"] == pytest.approx(losses["alone"], rel=1e-5)
    assert losses["a"] != pytest.approx(losses["alone"], rel=1e-5)


@WAYS
def test_ranks_share_their_batch_statistics(ran: Callable[[str], Path], way: str):
    """Against plain batch norm over the whole batch: outputs, gradients and running statistics."""
    text = (ran(way) / "out.txt").read_text()
    assert "rank 0 of 2 agrees\n" in text and "rank 1 of 2 agrees\n" in text


@WAYS
def test_two_ranks_compute_what_one_process_does(ran: Callable[[str], Path], way: str):
    """Collectives, DDP and both kinds of FSDP."""
    for rank in (0, 1):
        said = json.loads((ran(way) / f"said{rank}.json").read_text())
        differences = [said.pop(name) for name in ("ddp", "fsdp2", "fsdp1")]
        assert said == {"count": 2, "backend": "nccl", "mean": 1.5, "objects": [{"a": 1}]}
        assert max(differences) < 1e-6, differences


@WAYS
def test_collectives_of_nccl(ran: Callable[[str], Path], way: str):
    """Flat, uneven, coalesced, scaled: what gloo refuses, or does otherwise."""
    for rank in (0, 1):
        said = json.loads((ran(way) / f"collectives{rank}.json").read_text())
        assert said["errors"] == {} and said["cases"] > 50


@WAYS
def test_the_log_of_each_rank_names_what_was_replaced(ran: Callable[[str], Path], way: str):
    documents = [json.loads(path.read_text()) for path in (ran(way) / "log").glob("migrate_*.json")]
    for rank in (0, 1):
        (sites,) = [each["sites"] for each in documents if each["rank"] == rank and each["sites"]]
        assert {site["api"] for site in sites} >= {
            "apex.parallel.DistributedDataParallel",
            "apex.parallel.convert_syncbn_model",
            "torch.distributed.ProcessGroup.allgather",
            "torch.distributed.distributed_c10d._coalescing_manager",
            "torch.distributed.barrier",
            "torch.distributed.broadcast_object_list",
            "torch.distributed.fsdp.FullyShardedDataParallel.__init__",
            "torch.distributed.init_process_group",
            "torch.nn.SyncBatchNorm.forward",
            "torch.nn.parallel.DistributedDataParallel.__init__",
        }


@pytest.mark.slow  # test_log.py has the one line and the one report of a process and its children
def test_torchrun_tells_one_line_and_one_report_for_all_ranks(
    ran: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
):
    folder = ran("torchrun")
    told = (folder / "err.txt").read_text()
    assert told.count("on cpu, torch") == told.count("CUDA calls run on cpu") == 1
    names = sorted(re.sub(r"\d+\.json", "N.json", path.name) for path in (folder / "log").glob("*.json"))
    assert names == ["migrate_0_N.json", "migrate_1_N.json"]  # the launcher itself writes none
    assert cli.main(["report", str(folder / "log")]) == 0
    merged = capsys.readouterr().out
    assert "2 ranks" in merged and re.search(r"\n +2  torch\.arange ", merged)
