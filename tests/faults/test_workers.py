"""A loader worker that dies, fails or stands still ends the run with a message that names it (B5: 18, 19)."""

import os
import re
import signal

import pytest

from sightline.data.loading.order import TrainOrder


@pytest.mark.parametrize("when", ["training", pytest.param("evaluation", marks=pytest.mark.slow)])
def test_killed_worker(sightline, reference, tmp_path, when):
    out = tmp_path / "run"
    where = {"training": "train:3", "evaluation": "eval:1"}[when]
    # Two batches of evaluation, so that something is left to wait for.
    flags = ("--data.path", "synthetic:classes=4,samples=128,size=24", "--run.checkpoint-every-steps", "2")
    started = sightline.start(out, *flags, "--run.workers", "2", FAULT=f"stop@{where}")
    started.until_stopped()
    workers = next(line["workers"] for line in sightline.log(out) if line["event"] == "start")
    os.kill(workers[1], signal.SIGKILL)
    os.kill(started.pid, signal.SIGCONT)
    ended = started.wait()
    assert ended.code == ended.exit_code_in_folder == 8, ended
    assert f"loader worker {workers[1]} was killed by SIGKILL" in ended.stderr
    assert "out-of-memory" in ended.stderr and "--run.workers" in ended.stderr
    again = sightline.run(out, *flags)
    assert again.code == 0, again
    assert again.bits == reference(*flags).bits


def test_worker_that_crashes_is_not_called_out_of_memory(sightline, tmp_path):
    ended = sightline.run(tmp_path / "run", "--run.workers", "1", FAULT="segv@load:11")
    assert ended.code == ended.exit_code_in_folder == 8, ended
    assert "was killed by SIGSEGV: a library crashed in it" in ended.stderr
    assert "it was at synthetic:train/11 (train)" in ended.stderr and "sightline check" in ended.stderr
    assert "memory" not in ended.stderr


@pytest.mark.parametrize("workers", ["2", "0"])
def test_failing_load_shows_its_traceback_and_the_sample(sightline, tmp_path, workers):
    flags = ("--train.global-batch", "64", "--run.workers", workers)
    sample = int(TrainOrder(64, 64, seed=0).batch(0)[1][-1])  # far down in what a worker is asked for at once
    # The worker has to import the recipe by itself.
    ended = sightline.run(tmp_path / "run", *flags, FAULT=f"raise@load:{sample}")
    assert ended.code == ended.exit_code_in_folder == (8 if workers == "2" else 1), ended
    assert "RuntimeError: made to fail" in ended.stderr
    assert "faulty.py" in ended.stderr and "in load" in ended.stderr, "the line that failed"
    assert f"synthetic:train/{sample}" in ended.stderr


IMPATIENT = ("--run.workers", "1", "--run.timeout-s", "3")


def stop_only_worker(sightline, started, out) -> int:
    """SIGSTOP the worker in the third step, and let the trainer go on; return its pid."""
    started.until_stopped()
    (worker,) = next(line["workers"] for line in sightline.log(out) if line["event"] == "start")
    os.kill(worker, signal.SIGSTOP)
    os.kill(started.pid, signal.SIGCONT)
    return worker


def test_stopped_worker_of_a_single_rank_ends_the_run(sightline, reference, tmp_path):
    out = tmp_path / "run"
    flags = ("--run.checkpoint-every-steps", "2")
    started = sightline.start(out, *flags, *IMPATIENT, FAULT="stop@train:3")
    worker = stop_only_worker(sightline, started, out)
    ended = started.wait()
    assert ended.code == ended.exit_code_in_folder == 8, ended
    told = rf"loader worker {worker} has begun no sample for \d s, it is at synthetic:train/\d+ \(train\)"
    assert re.search(told, ended.stderr)
    assert f"it is stopped (SIGSTOP): `kill -CONT {worker}` continues it" in ended.stderr
    assert "--run.timeout-s" in ended.stderr
    stack = ended.stderr.partition("Its stack:\n")[2]
    assert "workers.py" in stack and " in _work\n" in stack
    assert re.search(told, ended.warnings), "told before it ends the run"
    again = sightline.run(out, *flags)
    assert again.code == 0, again
    assert again.bits == reference(*flags).bits


@pytest.mark.slow
def test_worker_that_waits_for_a_dead_file_server_shows_file_and_stack(sightline, tmp_path):
    fifo, sample = tmp_path / "fifo", int(TrainOrder(64, 8, seed=0).batch(3)[1][-1])
    os.mkfifo(fifo)
    ended = sightline.run(tmp_path / "run", *IMPATIENT, FAULT=f"stall@load:{sample}", STALL=str(fifo))
    assert ended.code == ended.exit_code_in_folder == 8, ended
    assert f"it is at synthetic:train/{sample} (train)" in ended.stderr
    for told in (ended.stderr, ended.warnings):
        assert "faulty.py" in told.partition("Its stack:\n")[2] and " in load\n" in told


@pytest.mark.slow
def test_worker_that_is_continued_in_time_costs_nothing(sightline, reference, tmp_path):
    out = tmp_path / "run"
    started = sightline.start(out, "--run.workers", "1", "--run.timeout-s", "10", FAULT="stop@train:3")
    worker = stop_only_worker(sightline, started, out)
    warned = f"loader worker {worker} has begun no sample"
    started.until(lambda: warned in str([line for line in sightline.log(out) if line["event"] == "warning"]))
    os.kill(worker, signal.SIGCONT)
    ended = started.wait()
    assert ended.code == 0, ended
    assert ended.bits == reference().bits


@pytest.mark.slow
def test_forkserver_killed_before_the_workers(sightline, reference, tmp_path):
    """The process that forked the workers is not needed again: losing it loses nothing."""
    out = tmp_path / "run"
    started = sightline.start(out, "--run.workers", "2", FAULT="stop@train:3")
    started.until_stopped()
    workers = next(line["workers"] for line in sightline.log(out) if line["event"] == "start")
    with open(f"/proc/{workers[0]}/stat") as file:
        server = int(file.read().rpartition(")")[2].split()[1])
    assert server not in (started.pid, os.getpid(), 1)
    os.kill(server, signal.SIGKILL)
    os.kill(started.pid, signal.SIGCONT)
    ended = started.wait()
    assert ended.code == 0, ended
    assert ended.bits == reference().bits
