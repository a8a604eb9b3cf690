"""`--run.devices`: how the end of a rank becomes the end of the command; too many ranks are refused before."""

import logging
import os
import signal
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.multiprocessing.api import ProcessFailure, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from sightline.commands import start
from sightline.errors import Interrupted, PeerLost, RankFailed, UsageError
from sightline.hardware.devices import Device
from sightline.hardware.launch import local
from sightline.hardware.launch.local import OneHost
from sightline.hardware.launch.place import STORE


def ended(code: int, monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Torch's launcher, of which rank 1 ends with this code at once."""
    started: list[tuple] = []

    def launch(config, python):
        def run(*words):
            started.append(words)
            failure = ProcessFailure(local_rank=1, pid=999, exitcode=code, error_file="none")
            raise ChildFailedError("sightline", {1: failure})

        return run

    monkeypatch.setattr(local, "elastic_launch", launch)
    return started


@pytest.mark.parametrize(
    ("command", "remedy"), [("train", "resumes from the last checkpoint"), ("evaluate", "starts again")]
)
def test_a_rank_that_was_killed_is_lost(command: str, remedy: str, monkeypatch: pytest.MonkeyPatch):
    started = ended(-9, monkeypatch)
    with pytest.raises(PeerLost, match=f"rank 1 of 3 was ended by signal 9; .* and the same command {remedy}"):
        local._run(None, 3, [command, "demo"])  # type: ignore[arg-type]
    assert started == [("-u", "-m", "sightline", command, "demo")]


def test_the_exit_code_of_a_rank_is_that_of_the_command(monkeypatch: pytest.MonkeyPatch):
    ended(6, monkeypatch)
    with pytest.raises(RankFailed, match="rank 1 of 2 ended with exit code 6; its error is above") as raised:
        local._run(None, 2, ["train"])  # type: ignore[arg-type]
    assert raised.value.exit_code == 6


def test_a_signal_to_the_starter_is_told(monkeypatch: pytest.MonkeyPatch):
    def stopped(*words):
        raise SignalException("a signal", signal.SIGTERM)

    monkeypatch.setattr(local, "elastic_launch", lambda config, python: stopped)
    with pytest.raises(Interrupted, match="all 4 ranks have ended") as raised:
        local._run(None, 4, ["train"])  # type: ignore[arg-type]
    assert raised.value.signal_number == signal.SIGTERM


@pytest.mark.parametrize(
    ("backend", "said"), [("", "or --run.device cpu$"), ("gloo", "--run.device xpu:0 lets all ranks")]
)
def test_more_ranks_than_devices_are_refused(backend: str, said: str, monkeypatch: pytest.MonkeyPatch):
    class Two(Device):
        def count(self) -> int:
            return 2

    monkeypatch.setattr(local.devices, "select", lambda name, local_size: Two("xpu", shared_backend=backend))
    local._refuse_too_many(2, "xpu")
    with pytest.raises(UsageError, match=f"--run.devices 3, but there are 2 of xpu here; use at most 2.*{said}"):
        local._refuse_too_many(3, "xpu")
    monkeypatch.setattr(local.devices, "select", lambda name, local_size: Two("xpu", sharers=3))
    local._refuse_too_many(3, "xpu:0")
    monkeypatch.setattr(local.devices, "select", lambda name, local_size: Two("cpu", is_shared=True))
    local._refuse_too_many(3, "cpu")


def test_an_agent_that_is_alone_meets_nobody():
    class Parameters:
        run_id = "abc"

    alone = OneHost(Parameters())  # type: ignore[arg-type]
    found = alone.next_rendezvous()
    assert (found.rank, found.world_size) == (0, 1) and not alone.is_closed() and alone.num_nodes_waiting() == 0
    alone.set_closed()
    assert (alone.get_run_id(), alone.get_backend(), alone.shutdown()) == ("abc", local.RENDEZVOUS, True)
    assert not alone.is_closed()


@pytest.fixture
def as_before() -> Iterator[None]:
    """The environment and the loggers of torch's agent are afterwards what they were."""
    environ, levels = dict(os.environ), {name: logging.getLogger(name).level for name in local.ELASTIC}
    yield
    os.environ.clear()
    os.environ.update(environ)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def test_ranks_are_started_by_torchs_agent_of_this_host_alone(as_before: None, monkeypatch: pytest.MonkeyPatch):
    seen: list = []

    def launch(config, python):
        def run(*words):
            store = Path(os.environ[STORE])
            seen.append((config, python, words, store, stat.S_IMODE(store.parent.stat().st_mode)))
            seen.append({name: os.environ.get(name) for name in (*asked, local.STARTER)})
            seen.append([logging.getLogger(name).getEffectiveLevel() for name in local.ELASTIC])

        return run

    asked = ("OMP_NUM_THREADS", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    for name in (*asked, STORE, local.STARTER):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(local.launch, "detect", lambda environ: None)
    monkeypatch.setattr(local, "elastic_launch", launch)
    assert local.start(3, "cpu", ["train", "demo"]) is True
    (config, python, words, store, mode), values, levels = seen
    assert (python, words, mode) == (sys.executable, ("-u", "-m", "sightline", "train", "demo"), 0o700)
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node, config.max_restarts) == (1, 1, 3, 0)
    assert (config.rdzv_backend, config.local_addr, len(config.run_id)) == (local.RENDEZVOUS, "127.0.0.1", 32)
    assert config.signals_to_handle.split(",")[:4] == ["SIGTERM", "SIGINT", "SIGQUIT", "SIGUSR1"]
    assert values == {
        "OMP_NUM_THREADS": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120", local.STARTER: str(os.getpid()),
    }  # fmt: skip
    assert levels == [logging.CRITICAL] * 2 and not store.parent.exists() and local.STARTER not in os.environ
    os.environ["OMP_NUM_THREADS"] = "7"
    assert local.start(2, "cpu", []) is True and seen[4]["OMP_NUM_THREADS"] == "7"


def test_one_device_starts_no_ranks(as_before: None, monkeypatch: pytest.MonkeyPatch):
    started: list = []
    monkeypatch.setattr(
        local, "elastic_launch",
        lambda config, python: lambda *words: started.append((config.nproc_per_node, *words[3:])),
    )  # fmt: skip
    assert start.ran_as_ranks(["train", "x"], 0, "cpu") is start.ran_as_ranks(["train", "x"], 1, "cpu") is False
    assert started == [] and start.ran_as_ranks(["train", "x"], 2, "cpu") is True
    assert start.ran_as_ranks_of_run(["evaluate", "x"], ["--run.devices", "3", "--run.device=cpu"]) is True
    assert start.ran_as_ranks_of_run(["evaluate", "x"], ["--run.device=cpu"]) is False
    assert started == [(2, "train", "x"), (3, "evaluate", "x")]
    with pytest.raises(UsageError, match="nonsense"):
        start.ran_as_ranks_of_run(["evaluate", "x"], ["--run.devices", "3", "--run.device=nonsense"])


@pytest.mark.parametrize(("parent", "is_there", "watches"), [(55, True, True), (1, False, True), (1, True, False)])
def test_a_rank_watches_the_process_that_started_it(
    parent: int, is_there: bool, watches: bool, as_before: None, monkeypatch: pytest.MonkeyPatch
):
    started: list = []
    place = SimpleNamespace(size=2, local_size=2, launcher="torchrun")
    monkeypatch.setattr(local.launch, "detect", lambda environ: place)
    monkeypatch.setattr(local.os, "getppid", lambda: parent)
    monkeypatch.setattr(local.psutil, "pid_exists", lambda number: is_there and number == 55)
    monkeypatch.setattr(
        local.threading, "Thread",
        lambda target, args, daemon: SimpleNamespace(start=lambda: started.append((target, args, daemon))),
    )  # fmt: skip
    os.environ[local.STARTER] = "55"
    assert local.start(2, "cpu", []) is False and local.STARTER not in os.environ
    assert started == ([(local._end_with, (55,), True)] if watches else [])
    assert local.start(2, "cpu", []) is False and len(started) == watches, "nobody to watch"
    with pytest.raises(UsageError, match="--run.devices 3, but torchrun has started 2 on this host"):
        local.start(3, "cpu", [])


def test_a_rank_ends_with_the_process_that_started_it(monkeypatch: pytest.MonkeyPatch):
    parents, done = [55, 55, 1], []
    monkeypatch.setattr(local.os, "getppid", lambda: parents.pop(0))
    monkeypatch.setattr(local.time, "sleep", lambda seconds: done.append(seconds))
    monkeypatch.setattr(local.os, "kill", lambda *signalled: done.append(signalled))
    local._end_with(55)
    assert done == [local.LOOK_S] * 2 + [(os.getpid(), signal.SIGTERM)]
