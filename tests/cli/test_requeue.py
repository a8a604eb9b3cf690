"""`launch --launcher slurm --slurm.requeue`: the batch file in a shell, with stand-ins for Slurm's programs.

benchmarks/notes/distributed.md says what was tried with Slurm itself.
"""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

LAUNCH = "launch resnet50 --data.path /data --nodes 1 --launcher slurm --slurm.gres none --print".split()
SRUN = """#!/bin/bash
trap 'exit $ON_TERM' TERM
echo $$ > $CALLS.srun.part; mv $CALLS.srun.part $CALLS.srun
[ -z "$AT_ONCE" ] || exit $AT_ONCE
sleep 60 & wait
"""
SCANCEL = """#!/bin/bash
echo scancel "$@" >> $CALLS
kill -TERM $(cat $CALLS.srun)
"""
SCONTROL = """#!/bin/bash
echo scontrol "$@" >> $CALLS
"""


class Job:
    """The batch file at work."""

    def __init__(self, folder: Path, text: str, **environ: str):
        self.calls = folder / "calls"
        for name, program in {"srun": SRUN, "scancel": SCANCEL, "scontrol": SCONTROL}.items():
            (folder / name).write_text(program)
            (folder / name).chmod(0o755)
        known = {"PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(self.calls), "ON_TERM": "143", "AT_ONCE": ""}
        self.shell = subprocess.Popen(["bash", "-c", text], env=known | environ, start_new_session=True)
        deadline = time.monotonic() + 60
        while not self.calls.with_name("calls.srun").exists():
            assert time.monotonic() < deadline, "srun was not started"

    def ended(self, *signals: int) -> tuple[int, list[str]]:
        """Send signals to the file as Slurm does; return its exit code and what it asked of Slurm."""
        for number in signals:
            self.shell.send_signal(number)
        code = self.shell.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.shell.pid, signal.SIGKILL)  # what a cancelled job leaves
        return code, self.calls.read_text().splitlines() if self.calls.exists() else []


@pytest.fixture
def script(sightline, tmp_path: Path) -> str:
    said = sightline(*LAUNCH, "--slurm.requeue", "--folder", tmp_path)
    assert said.code == 0, said
    return said.out


def test_the_end_of_the_time_saves_and_queues_the_job_again(script: str, tmp_path: Path):
    assert "#SBATCH --signal=B:USR1@120" in script and "#SBATCH --requeue" in script
    code, calls = Job(tmp_path, script, SLURM_JOB_ID="7").ended(signal.SIGUSR1)
    assert (code, calls) == (143, ["scancel --signal=TERM 7", "scontrol requeue 7"])


@pytest.mark.parametrize(
    ("environ", "signals", "ends"),
    [
        ({}, [signal.SIGTERM], -signal.SIGTERM),  # scancel
        ({"AT_ONCE": "3"}, [], 3),  # the run fails
        ({"AT_ONCE": "0"}, [], 0),
        ({"SLURM_JOB_ID": ""}, [signal.SIGUSR1], -signal.SIGUSR1),  # no allocation
    ],
    ids=["cancelled", "failed", "finished", "no allocation"],
)
def test_nothing_else_queues_it_again(script: str, tmp_path: Path, environ, signals, ends):
    code, calls = Job(tmp_path, script, **{"SLURM_JOB_ID": "7"} | environ).ended(*signals)
    assert (code, calls) == (ends, [])


def test_run_that_finishes_on_the_signal_is_not_queued_again(script: str, tmp_path: Path):
    code, calls = Job(tmp_path, script, SLURM_JOB_ID="7", ON_TERM="0").ended(signal.SIGUSR1)
    assert (code, calls) == (0, ["scancel --signal=TERM 7"])


def test_without_the_flag_no_job_is_queued_again(sightline, tmp_path: Path):
    text = sightline(*LAUNCH, "--folder", tmp_path).out
    assert "#SBATCH --signal=TERM@120" in text and "requeue" not in text
