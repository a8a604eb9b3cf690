"""The CPUs of each rank, on made-up hosts; and a process that really keeps to its own."""

import itertools
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from sightline import config
from sightline.data.loading.loader import worker_count
from sightline.engine.setup import set_up
from sightline.errors import UsageError
from sightline.hardware import affinity, devices
from sightline.hardware.affinity import Topology, cores_for, parse_cpus, read_topology
from sightline.hardware.world import World

UNIQUE = ("single_unique", "socket_unique_interleaved", "socket_unique_continuous")
MODES = ("socket", "single", *UNIQUE)
CUDA = devices.KINDS["cuda"]


def host(sockets: int, cores: int, threads: int) -> Topology:
    """CPU numbers as Linux gives them: first one thread of every core, socket by socket, then the second threads."""
    total = sockets * cores
    return Topology(
        socket={cpu: cpu % total // cores for cpu in range(total * threads)},
        core={cpu: cpu % total for cpu in range(total * threads)},
    )


def only(topology: Topology, *cpus: int) -> Topology:
    return replace(topology, socket={c: topology.socket[c] for c in cpus}, core={c: topology.core[c] for c in cpus})


TWO_SOCKETS = host(2, 4, 2)  # socket 0: 0-3 and 8-11; socket 1: 4-7 and 12-15
FIRST, SECOND = [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]
HOSTS = {
    "two sockets": TWO_SOCKETS,
    "one socket": host(1, 8, 1),
    "four cores": host(1, 4, 2),
    "a cpuset across": only(TWO_SOCKETS, 2, 3, 7, 10, 15),
    "a cpuset of one socket": only(TWO_SOCKETS, 4, 5, 12, 13),
    "threads of one core": only(TWO_SOCKETS, 3, 11),
    "one CPU": only(TWO_SOCKETS, 6),
    "near devices": replace(TWO_SOCKETS, near=(frozenset(SECOND), frozenset(SECOND), frozenset(FIRST))),
    "homes that overlap": replace(TWO_SOCKETS, near=(frozenset(range(8)), frozenset(FIRST), frozenset())),
    "a device without a place": replace(TWO_SOCKETS, near=(frozenset(), frozenset({99}))),
    "a small home": replace(TWO_SOCKETS, near=(frozenset({5}),) * 3),
}


@pytest.mark.parametrize("name", HOSTS)
def test_everybody_has_cpus_and_unique_ones_are_nobody_elses(name: str):
    topology = HOSTS[name]
    for mode, ranks in itertools.product(MODES, range(1, 10)):
        if mode in UNIQUE and ranks > len(topology.socket):
            with pytest.raises(UsageError, match=rf"{ranks} processes on this host cannot have CPUs of their own"):
                cores_for(mode, 0, ranks, topology)
            continue
        given = [cores_for(mode, rank, ranks, topology) for rank in range(ranks)]
        assert all(cpus and cpus == sorted(set(cpus)) and set(cpus) <= topology.socket.keys() for cpus in given)
        if mode in UNIQUE:
            everyone = [cpu for cpus in given for cpu in cpus]
            assert len(everyone) == len(set(everyone)), (ranks, given)
        if mode.startswith("socket_unique") and ranks >= len(set(topology.socket.values())) and not topology.near:
            assert sorted(cpu for cpus in given for cpu in cpus) == sorted(topology.socket)  # nothing lies idle


@pytest.mark.parametrize(
    ("mode", "given"),
    [
        ("socket", [FIRST, SECOND, FIRST, SECOND]),
        ("single", [[0], [4], [0], [4]]),
        ("single_unique", [[0], [4], [1], [5]]),
        ("socket_unique_interleaved", [[0, 2, 8, 10], [4, 6, 12, 14], [1, 3, 9, 11], [5, 7, 13, 15]]),
        ("socket_unique_continuous", [[0, 1, 8, 9], [4, 5, 12, 13], [2, 3, 10, 11], [6, 7, 14, 15]]),
    ],
)
def test_four_ranks_on_two_sockets(mode: str, given: list[list[int]]):
    assert [cores_for(mode, rank, 4, TWO_SOCKETS) for rank in range(4)] == given


def test_what_the_kernel_says_of_devices_decides_where_it_says_something():
    near = HOSTS["near devices"]
    assert [cores_for("socket", rank, 3, near) for rank in range(3)] == [SECOND, SECOND, FIRST]
    assert [cores_for("socket_unique_continuous", rank, 3, near) for rank in range(3)] == [
        [4, 5, 12, 13],
        [6, 7, 14, 15],
        FIRST,
    ]


def test_homes_that_overlap_are_shared_out_evenly():
    given = [cores_for("socket_unique_continuous", rank, 3, HOSTS["homes that overlap"]) for rank in range(3)]
    assert given == [[0, 1, 8, 9], [2, 3, 4, 10, 11, 12], [5, 6, 7, 13, 14, 15]]


def test_a_second_thread_of_a_core_is_the_last_choice_at_home():
    topology = host(1, 2, 2)
    assert [cores_for("single_unique", rank, 4, topology) for rank in range(4)] == [[0], [1], [2], [3]]
    topology = only(TWO_SOCKETS, 0, 8, 1, 4)
    assert [cores_for("single_unique", rank, 4, topology) for rank in range(4)] == [[0], [4], [1], [8]]


# The kernel's tables


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-3,8", {0, 1, 2, 3, 8}), ("5", {5}), ("", set()), ("0-1, 4-5\n", {0, 1, 4, 5}), ("x,3-,-4,7", {7})],
)
def test_lists_of_cpus(text: str, cpus: set[int]):
    assert parse_cpus(text) == cpus


@dataclass
class Properties:
    """The properties of a device as torch has them."""

    pci_domain_id: int = 0
    pci_bus_id: int = 0x1B
    pci_device_id: int = 0


def test_the_tables_of_a_host(tmp_path: Path, monkeypatch):
    for cpu in range(8):
        about = tmp_path / f"devices/system/cpu/cpu{cpu}/topology"
        about.mkdir(parents=True)
        (about / "physical_package_id").write_text(f"{cpu % 4 // 2}\n")
        (about / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    for bus, cpus in (("0000:1b", "2-3,6-7"), ("0001:c8", "0-1,4-5")):
        place = tmp_path / f"bus/pci/devices/{bus}:00.0"
        place.mkdir(parents=True)
        (place / "local_cpulist").write_text(cpus + "\n")
    found = read_topology(frozenset(range(8)), system=tmp_path)
    assert found == host(2, 2, 2)
    assert read_topology(frozenset({3, 7}), system=tmp_path) == only(host(2, 2, 2), 3, 7)
    # Torch's part: two devices, and a third whose place the kernel does not list.
    known = {0: Properties(), 1: Properties(1, 0xC8), 2: Properties(0, 0x55)}
    monkeypatch.setattr(torch.cuda, "get_device_properties", known.__getitem__)
    near = affinity.near_devices(CUDA, 3, tmp_path)
    assert near == (frozenset({2, 3, 6, 7}), frozenset({0, 1, 4, 5}), frozenset())
    assert affinity.near_devices(replace(CUDA, index=1), 1, tmp_path) == near[1:2]
    assert affinity.near_devices(devices.KINDS["cpu"], 3, tmp_path) == ()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: object())  # a torch that does not tell
    assert affinity.near_devices(CUDA, 3, tmp_path) == ()


def test_a_kernel_without_tables_has_one_socket_of_plain_cores(tmp_path: Path):
    assert read_topology(frozenset({1, 5}), system=tmp_path) == Topology({1: 0, 5: 0}, {1: 1, 5: 5})


# This process


@pytest.fixture
def allowed():
    """The CPUs of this process, given back afterwards."""
    if sys.platform != "linux":
        pytest.skip("only Linux binds processes to CPUs")
    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    affinity._given.cache_clear()
    yield sorted(before)
    affinity._given.cache_clear()
    os.sched_setaffinity(0, before)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("mode", MODES)
def test_a_run_keeps_to_its_cpus(allowed: list[int], mode: str):
    expected = cores_for(mode, 0, 1, read_topology(frozenset(allowed)))
    torch.set_num_threads(len(allowed) + 1)
    set_up(*config.load("demo_classification", [f"--run.affinity={mode}", "--run.device=cpu"]))
    assert sorted(os.sched_getaffinity(0)) == expected
    assert torch.get_num_threads() == min(len(allowed) + 1, len(expected))
    if mode == "single":
        asked = [sys.executable, "-c", "import os; print(*os.sched_getaffinity(0))"]
        child = subprocess.run(asked, capture_output=True, text=True, check=True)
        assert child.stdout.split() == [str(expected[0])]  # what it starts keeps to them too
    if mode == "socket_unique_continuous":  # whose share a second start must not cut again
        set_up(*config.load("demo_classification", [f"--run.affinity={mode}", "--run.device=cpu"]))
        assert sorted(os.sched_getaffinity(0)) == expected


def test_ranks_of_a_host_have_their_own_and_count_their_workers_once(allowed: list[int], monkeypatch):
    if len(allowed) < 2:
        pytest.skip("needs two CPUs")
    names = {"RANK": 5, "WORLD_SIZE": 8, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "x", "MASTER_PORT": 1}
    for name, value in names.items():
        monkeypatch.setenv(name, str(value))
    set_up(*config.load("demo_classification", ["--run.affinity=socket_unique_continuous", "--run.device=cpu"]))
    own = sorted(os.sched_getaffinity(0))
    assert own == cores_for("socket_unique_continuous", 1, 2, read_topology(frozenset(allowed)))
    assert worker_count(-1, CUDA, World(5, 8, 1)) == min(16, max(1, min(len(own), len(allowed) // 2) - 1))


def test_two_choices_are_refused():
    with pytest.raises(UsageError, match="run.max_cpus=1 and run.affinity=socket both choose CPUs; leave one"):
        config.load("demo_classification", ["--run.affinity=socket", "--run.max-cpus=1"])


def test_a_system_that_cannot_bind_is_reported(monkeypatch):
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    flags = ["--run.affinity=single", "--run.device=cpu"]
    with pytest.raises(UsageError, match=r"run.affinity=single: \w+ cannot bind a process to CPUs; use disabled"):
        set_up(*config.load("demo_classification", flags))
    set_up(*config.load("demo_classification", ["--run.device=cpu"]))


def test_a_file_of_the_kernel_that_is_gone_or_no_text_says_nothing(tmp_path):
    path = tmp_path / "list"
    assert affinity._read(path) == ""
    path.write_text(" 0-3\n")
    assert affinity._read(path) == "0-3"
    path.write_bytes("0-3 é".encode())
    assert affinity._read(path) == "", "the kernel writes ASCII"
