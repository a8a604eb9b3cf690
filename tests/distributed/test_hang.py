"""A rank that hangs, or fails alone: the others do not wait for ever, and say which it was (B5: 17)."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from sightline.hardware import watchdog
from sightline.hardware.watchdog import Watchdog
from sightline.hardware.world import World

slow = pytest.mark.slow  # limits of seconds, which a busy machine overruns


@slow
def test_a_hung_rank_ends_all_with_their_stacks(ranks, tmp_path: Path):
    out = tmp_path / "run"
    said = ranks.run(out, 2, "--run.timeout-s=3", FAULT="hang@1:4")
    ended = ranks.ended(out)
    assert ended["code"] == 8, said
    assert ended["reason"].startswith("no step was done in ")
    assert "rank 1 is late, in fail() of faulty_ranks.py:" in ended["reason"]
    assert f"error: {ended['reason']}" in said and "--run.timeout-s" in ended["reason"]
    assert "[rank0]: Traceback" not in said
    hung, waiting = ((out / f"rank_{rank}.log").read_text() for rank in (1, 0))
    assert "in fail\n" in hung and "faulty_ranks.py" in hung
    assert "in fail\n" not in waiting and "the stacks of rank 0" in waiting and "train/loop.py" in waiting


@slow
def test_a_rank_that_fails_alone_is_named_with_its_reason(ranks, tmp_path: Path):
    out = tmp_path / "run"
    said = ranks.run(out, 2, FAULT="raise@1:4")
    assert ranks.ended(out) | {"time": 0, "run_id": ""} == {
        "code": 8,
        "reason": "rank 1 ended with exit 1: ValueError: made to fail",
        "time": 0,
        "run_id": "",
        "restarts": 0,
        "ranks": 2,
    }
    assert "[rank1]: ValueError: made to fail" in said and "[rank0]: Traceback" not in said
    assert "ends with exit 1: ValueError: made to fail" in (out / "rank_1.log").read_text()


@slow
@pytest.mark.parametrize("how", ["--run.save-in-background", "--run.no-save-in-background"])
def test_a_slow_disk_is_not_a_hung_rank(ranks, tmp_path: Path, how: str):
    """All ranks wait for rank 0, which waits for the disk, three times as long as a step may take."""
    out = tmp_path / "run"
    said = ranks.run(out, 2, "--run.timeout-s=3", "--run.checkpoint-every-steps=2", how, FAULT="disk@0:4")
    assert ranks.ended(out)["code"] == 0, said
    assert [line["step"] for line in ranks.events(out, "checkpoint")][:3] == [2, 4, 6]


@slow
def test_rank_0_may_hang_too(ranks, tmp_path: Path):
    out = tmp_path / "run"
    said = ranks.run(out, 2, "--run.timeout-s=3", FAULT="hang@0:4")
    assert ranks.ended(out)["code"] == 8 and "rank 0 is late, in fail()" in ranks.ended(out)["reason"], said


# A rank of two whose step has begun: it says so, is stopped and continued from outside, and ends its step.
STOPPED = """
import sys
import torch.distributed as dist
from sightline.hardware.watchdog import Watchdog
from sightline.hardware.world import World

store = dist.HashStore()
dist.init_process_group("gloo", rank=0, world_size=1, store=store)
world = World(rank=0, size=2, store=store)
with Watchdog(world, 10.0, lambda why: None, lambda message, is_ours: print(message, flush=True), "here") as watchdog:
    watchdog.beat()
    print("begun", flush=True)
    sys.stdin.readline()
    watchdog.beat()
print("done", flush=True)
"""


class Clock:
    """Lets these seconds pass before each look of a watchdog, then ends the training."""

    def __init__(self, *pauses: float):
        self.now, self.pauses = 0.0, list(pauses)

    def wait(self, _: float) -> bool:
        self.now += self.pauses[0] if self.pauses else 0.0
        return not self.pauses or not self.pauses.pop(0)


@pytest.mark.parametrize(
    ("pauses", "told"),
    [
        ([1.0] * 12, ["no step was done in 11 s"]),  # the main thread hangs while this one looks
        ([1.0] * 3 + [600.0] + [1.0] * 3, []),  # the process was stopped, and so was this thread
        ([1.0] * 3 + [600.0] + [1.0] * 9, ["no step was done in 11 s"]),  # and then hangs
        ([4.0] * 12, ["no step was done in 11 s"]),  # hangs on a machine so busy that each look comes late
    ],
    ids=["hung", "stopped", "stopped, then hung", "late"],
)
def test_time_in_which_the_whole_process_stood_still_does_not_count(monkeypatch, pauses: list[float], told: list[str]):
    clock, found = Clock(*pauses), []
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: clock.now))
    watched = Watchdog(World(rank=0, size=2, store=dist.HashStore()), 10.0, found.append, found.append, "here")
    watched._limit_s = watched.timeout_s  # a step was done
    monkeypatch.setattr(watched, "_closed", clock)
    monkeypatch.setattr(watched, "_end", lambda why, has_answered: found.append(why))
    watched._watch()
    assert found == told


@slow
def test_a_process_that_was_stopped_for_longer_than_a_step_may_take_is_not_hung():
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "begun\n"
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(12)
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(3)  # the watchdog looks every second
        said, _ = process.communicate("\n", timeout=60)
    assert (process.returncode, said) == (0, "done\n")
