"""Which device replaces CUDA, how many a script sees, and how CUDA's names become its own."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from sightline_migrate import targets
from sightline_migrate.options import MigrateError
from sightline_migrate.targets import DeviceMap, Target

CPU = Target("cpu", None, "gloo")
XPU = Target("xpu", types.ModuleType("torch.xpu"), "xccl")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", *targets.LOCAL_RANKS):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("value", "hidden"), [("", True), ("-1", True), (" -1 ", True), ("0", False), ("none", False), (None, False)]
)
def test_devices_are_hidden_by_cudas_own_variable(value: str | None, hidden: bool, monkeypatch: pytest.MonkeyPatch):
    if value is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert targets.is_hidden() is hidden
    assert CPU.count(3) == (0 if hidden else 3)


def test_a_cpu_is_as_many_devices_as_asked_for_or_as_the_launcher_has_ranks_here(monkeypatch: pytest.MonkeyPatch):
    assert (targets.local_ranks(), CPU.count()) == (0, 1)
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "4")
    assert (targets.local_ranks(), CPU.count(), CPU.count(2)) == (4, 4, 2)
    for name, ranks in (("MPI_LOCALNRANKS", 5), ("OMPI_COMM_WORLD_LOCAL_SIZE", 6), ("LOCAL_WORLD_SIZE", 7)):
        monkeypatch.setenv(name, str(ranks))
        assert targets.local_ranks() == ranks
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2(x3)")
    assert targets.local_ranks() == 5
    XPU.module.device_count = lambda: 9  # type: ignore[union-attr]
    assert XPU.count() == XPU.count(2) == 9


def test_a_target_is_refused_where_torch_has_none(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(MigrateError, match="^target 'cuda' is the device to be replaced; use auto, cpu, hpu, xpu, npu"):
        targets.choose("cuda")
    for name in ("warp", "ones"):  # torch.ones is no module
        with pytest.raises(MigrateError, match=f"^target '{name}': there is no torch.{name}; install its backend, or"):
            targets.choose(name)
    device = types.ModuleType("torch.npu")
    monkeypatch.setattr(torch, "npu", device, raising=False)
    found = targets.choose("npu")
    assert found is not None and (found.name, found.module, found.collective) == ("npu", device, "hccl")
    assert found.tells_apart and not found.is_cpu and found.native("nothing") is None
    monkeypatch.setattr(torch, "musa", types.ModuleType("torch.musa"), raising=False)
    musa = targets.choose("musa")
    assert musa is not None and (musa.name, musa.collective, musa.has_collectives) == ("musa", "mccl", True)
    monkeypatch.delattr(torch, "musa")
    device.is_available = lambda: False  # type: ignore[attr-defined]
    with pytest.raises(MigrateError, match="^target 'npu': torch.npu reports no device; use --target cpu$"):
        targets.choose("npu")
    device.is_available = lambda: True  # type: ignore[attr-defined]
    monkeypatch.setattr(targets, "real_cuda", lambda: False)
    reported = targets.choose("auto")
    assert reported is not None and reported.name == "npu"
    monkeypatch.setattr(targets, "real_cuda", lambda: True)
    assert targets.choose("auto") is None
    here = targets.choose("cpu")
    assert here == CPU and not CPU.tells_apart and CPU.is_cpu and CPU.native("device_count") is None


GIVEN: list[tuple[Any, Any]] = [
    ("cuda", "xpu"), ("cuda:0", "xpu:0"), ("cuda:63", "xpu:63"), ("cuda:64", "xpu:64"), (5, "xpu:5"),
    (torch.device("cuda"), "xpu"), (torch.device("cuda", 2), "xpu:2"), ("cpu", "cpu"), ("meta", "meta"),
    (torch.device("cpu"), torch.device("cpu")), (None, None), (True, True), (1.5, 1.5),
]  # fmt: skip


@pytest.mark.parametrize(("device", "there"), GIVEN, ids=str)
def test_a_device_of_cuda_becomes_one_of_the_target_and_others_stay(device: Any, there: Any):
    assert DeviceMap(XPU).get(device) == there
    assert DeviceMap(CPU).get(device) == ("cpu" if str(there).startswith("xpu") else there)


def test_the_table_has_the_first_64_devices_in_each_spelling():
    table, on_cpu = DeviceMap(XPU).table, DeviceMap(CPU).table
    for index in (0, 1, 63):
        assert table[index] == table[f"cuda:{index}"] == table[torch.device("cuda", index)] == f"xpu:{index}"
    assert table["cuda"] == table[torch.device("cuda")] == "xpu"
    assert not {64, "cuda:64", -1} & table.keys() and -1 in on_cpu and len(on_cpu) == len(table) + 1
    assert len({str(there) for there in on_cpu.values()}) == 1, "a CPU has no index"


def test_a_number_of_a_device_is_read_as_torch_cuda_reads_it():
    devices = DeviceMap(CPU)
    for given, index in ((None, 3), (-1, 3), (0, 0), (2, 2), ("cuda", 3), ("cuda:1", 1), (torch.device("cuda", 4), 4)):
        assert devices.index_of(given, 3) == index
