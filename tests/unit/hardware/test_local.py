"""`--run.devices`: how the end of a rank becomes the end of the command; too many ranks are refused before."""

import signal

import pytest
from torch.distributed.elastic.multiprocessing.api import ProcessFailure, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from sightline.errors import Interrupted, PeerLost, RankFailed, UsageError
from sightline.hardware.devices import Device
from sightline.hardware.launch import local
from sightline.hardware.launch.local import OneHost


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
