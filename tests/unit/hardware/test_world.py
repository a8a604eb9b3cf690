"""Who we are among the ranks, and that one rank alone needs nobody. Several ranks are in tests/distributed."""

import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from sightline.errors import PeerLost, UsageError
from sightline.hardware import devices, world
from sightline.hardware.launch.place import is_rank_0, ranks_on_host
from sightline.hardware.world import World

COMPLETE = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}


@pytest.fixture
def environment(monkeypatch):
    """Set the variables a launcher would, and only those."""

    def set_to(values: dict[str, str]) -> None:
        for name in COMPLETE:
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return set_to


def test_without_a_launcher_there_is_one_rank(environment):
    environment({})
    assert world.detect() == World(rank=0, size=1, local_rank=0)
    environment({"LOCAL_RANK": "0", "MASTER_PORT": "29500"})  # left over from something else
    assert world.detect() == World()


def test_a_launchers_word_is_taken(environment):
    environment(COMPLETE)
    found = world.detect()
    assert (found.rank, found.size, found.local_rank, found.is_main) == (3, 8, 1, False)
    environment({**COMPLETE, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"})
    assert world.detect() == World() and world.detect().is_main


@pytest.mark.parametrize("missing", sorted(COMPLETE))
def test_half_an_environment_is_refused(environment, missing: str):
    for kept in ({}, {missing: ""}):
        environment({name: value for name, value in COMPLETE.items() if name != missing} | kept)
        with pytest.raises(UsageError, match=rf"half set for several ranks: {missing} missing; start with `torchrun"):
            world.detect()


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
def test_text_that_is_not_a_number_is_refused(environment, name: str):
    environment({**COMPLETE, name: "two"})
    with pytest.raises(UsageError, match="must be whole numbers, got .*two"):
        world.detect()


@pytest.mark.parametrize("changes", [{"RANK": "8"}, {"RANK": "-1"}, {"WORLD_SIZE": "0"}, {"LOCAL_RANK": "-2"}], ids=str)
def test_a_rank_that_cannot_be_is_refused_instead_of_waited_for(environment, changes: dict[str, str]):
    environment({**COMPLETE, **changes})
    with pytest.raises(UsageError):
        world.detect()


def test_one_rank_alone_needs_nobody():
    """No process group is made; sums, means and gathers are what they were given."""
    alone = world.connect(World(), devices.select("cpu"))
    tensor = torch.tensor([1.0, 2.0])
    assert alone.sum(tensor) is tensor and alone.gather(tensor) is tensor
    alone.average([tensor])
    alone.copy_from_main([tensor])
    alone.barrier()
    alone.close()
    assert tensor.tolist() == [1.0, 2.0]
    assert not torch.distributed.is_initialized()


IFF_LOOPBACK = 8  # of Linux


def test_the_loopback_is_taken_unless_the_user_names_interfaces(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "environ", {"NCCL_SOCKET_IFNAME": "ib0"})
    world.keep_to_loopback()
    flags = Path("/sys/class/net", os.environ["GLOO_SOCKET_IFNAME"], "flags").read_text()
    assert int(flags, 16) & IFF_LOOPBACK and os.environ["NCCL_SOCKET_IFNAME"] == "ib0"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def test_a_store_listens_at_the_address_that_all_hosts_were_given():
    """Linux answers at every address of 127.0.0.0/8, as at those of several interfaces."""
    port = free_port()
    with socket.socket(fileno=world._listener("127.0.0.2", port)) as listener:
        assert listener.getsockname() == ("127.0.0.2", port)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)
        with pytest.raises(PeerLost, match=f"127.0.0.2:{port}: Address already in use; set MASTER_PORT"):
            world._listener("127.0.0.2", port)


@pytest.mark.parametrize("address", ["node1", "203.0.113.7"])
def test_a_name_or_the_address_of_a_gateway_is_left_to_torch(address: str):
    assert world._listener(address, free_port()) is None


def test_several_hosts_know_where_they_meet(environment):
    environment(COMPLETE)
    assert "host:29500" in world.meeting_place(world.detect())
    environment({**COMPLETE, "LOCAL_WORLD_SIZE": "8"})
    assert world.meeting_place(world.detect()) == ""


def test_a_rank_that_does_not_come_to_a_file_is_lost(tmp_path: Path):
    """As one that does not come to a server: such stores raise errors of different types."""
    store = dist.FileStore(str(tmp_path / "store"))
    store.set_timeout(timedelta(seconds=0.01))
    store.set("there", "")
    with pytest.raises(RuntimeError) as met:
        store.wait(["absent"])
    assert world.is_loss(met.value)


@pytest.mark.parametrize(("environ", "expected"), [({}, True), ({"RANK": "0"}, True), ({"RANK": "3"}, False)])
def test_rank_0_speaks_where_a_launcher_started_several(environ: dict, expected: bool, monkeypatch):
    for name in ("RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert is_rank_0() is expected


def test_ranks_on_a_host_are_those_the_launcher_tells(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert ranks_on_host(default=1) == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert ranks_on_host(default=1) == 4


def test_the_command_line_reads_ranks_without_torch():
    code = "import sys, sightline.cli; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"), True),
        (RuntimeError("Application timeout caused pair closure"), True),
        (ValueError("gloo/"), False),
        (RuntimeError("out of memory"), False),
        (dist.DistError("a rank"), True),
        (dist.DistStoreError("no key"), True),
        (RuntimeError("Wait timeout"), True),
        (RuntimeError("Timeout waiting for key: a"), True),
        (RuntimeError("after Wait timeout"), False),
        (OSError("Wait timeout"), False),
    ],
    ids=repr,
)
def test_errors_that_mean_that_a_rank_is_lost(error: Exception, is_lost: bool, monkeypatch: pytest.MonkeyPatch):
    assert world.is_loss(error) is is_lost
    closed: list[bool] = []
    monkeypatch.setattr(World, "close", lambda self, is_lost=False: closed.append(is_lost))
    said: list[str] = []
    cpu = devices.select("cpu")
    remedy = "a rank was lost while predicting: its own output says why; give the command again ("
    with (
        pytest.raises(PeerLost if is_lost else type(error)) as raised,
        world.joined(World(), cpu, "predicting", "give the command again", said.append),
    ):
        raise error
    assert closed == [is_lost]
    assert str(raised.value) == (f"{remedy}{error})" if is_lost else str(error))


def test_ranks_that_share_a_device_are_told_and_left_at_the_end(monkeypatch: pytest.MonkeyPatch):
    closed: list[bool] = []
    monkeypatch.setattr(World, "close", lambda self, is_lost=False: closed.append(is_lost))
    said: list[str] = []
    with world.joined(World(), SimpleNamespace(sharing_note=lambda: "two share it"), "x", "y", said.append) as here:
        assert here == World() and said == ["two share it"] and closed == []
    assert closed == [False]


def test_the_largest_value_of_one_rank_is_its_own():
    assert World().largest(7) == 7


@pytest.mark.parametrize("name", ["set_timeout", "_set_pg_timeout"])
def test_the_timeout_is_set_by_whatever_name_torch_has_for_it(name: str, monkeypatch: pytest.MonkeyPatch):
    told: list[timedelta] = []
    monkeypatch.delattr(dist, "set_timeout", raising=False)
    monkeypatch.delattr(dist.distributed_c10d, "_set_pg_timeout", raising=False)
    monkeypatch.setattr(dist if name == "set_timeout" else dist.distributed_c10d, name, told.append, raising=False)
    world.set_timeout(timedelta(seconds=3))
    assert told == [timedelta(seconds=3)]
