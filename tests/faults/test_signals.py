"""SIGTERM and SIGINT, wherever they meet a run: save at the step they came in, exit, and resume later (B5: 13, 15)."""

import ctypes
import json
import os
import queue
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sightline import terminal
from sightline.data.loading.order import TrainOrder
from sightline.engine.signals import HANDLED, StopSignals
from sightline.errors import Interrupted
from sightline.hardware.world import World

CODES = {"term": 143, "int": 130}
OFTEN = ("--run.checkpoint-every-steps", "2")


LEFT = "left without saving; the same command resumes from the last checkpoint, if there is one\n"


# Two epochs of 16 steps with two batches of evaluation each.
FLAGS = ("--data.path", "synthetic:classes=4,samples=128,size=24")


# Where it arrives, in faulty.py's words, and the step and epoch that must then be saved.
@pytest.mark.parametrize(
    ("where", "step", "epoch"),
    [
        ("open:1", 0, 0),  # while the data are listed
        pytest.param("eval:1", 16, 0, marks=pytest.mark.slow),  # tests/recipes/test_recipes.py, with every kind of data
        pytest.param("train:5", 5, 0, marks=pytest.mark.slow),  # with more to save: below
        pytest.param("eval:3", 32, 1, marks=pytest.mark.slow),  # nothing is left to do but the last evaluation
        pytest.param("train:1", 1, 0, marks=pytest.mark.slow),
        pytest.param("train:16", 16, 0, marks=pytest.mark.slow),  # the last step before an evaluation
        pytest.param("eval:2", 16, 1, marks=pytest.mark.slow),  # the last batch: ends the evaluation
        pytest.param("save:1", 16, 1, marks=pytest.mark.slow),  # while a checkpoint is written
        pytest.param("train:21", 21, 1, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", ["term", pytest.param("int", marks=pytest.mark.slow)])
def test_saves_at_the_exact_step_and_resumes_to_equal_bits(sightline, reference, tmp_path, name, where, step, epoch):
    out = tmp_path / "run"
    stopped = sightline.run(out, *FLAGS, "--run.report=auto", FAULT=f"{name}@{where}")
    assert stopped.code == stopped.exit_code_in_folder == CODES[name], stopped
    assert (stopped.progress["step"], stopped.progress["epoch"]) == (step, epoch)
    assert "Traceback" not in stopped.stderr
    again = sightline.run(out, *FLAGS)
    assert again.code == 0, again
    assert again.events("resume")[0]["step"] == step
    assert again.bits == reference(*FLAGS).bits
    assert again.progress == reference(*FLAGS).progress


@pytest.mark.parametrize(("where", "step"), [("train:3", 3), pytest.param("eval:1", 16, marks=pytest.mark.slow)])
def test_sigint_saves_too(sightline, tmp_path, where, step):
    stopped = sightline.run(tmp_path / "run", *FLAGS, FAULT=f"int@{where}")
    assert stopped.code == stopped.exit_code_in_folder == 130, stopped
    assert stopped.progress["step"] == step


@pytest.mark.parametrize(("name", "code"), [("term", -signal.SIGTERM), ("int", 130)])
def test_before_there_is_anything_to_save(sightline, tmp_path, name, code):
    """While the recipe is read. A shell shows -SIGTERM as 143."""
    stopped = sightline.run(tmp_path / "run", FAULT=f"{name}@recipe:1")
    assert stopped.code == code, stopped
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_several_stops_on_the_way_to_equal_bits(sightline, reference, tmp_path):
    out = tmp_path / "run"
    for where in ("train:3", "open:1", "train:1", "train:9", "eval:1", "eval:1", "save:1"):
        assert sightline.run(out, *FLAGS, FAULT=f"term@{where}").code == 143
    again = sightline.run(out, *FLAGS)
    assert again.code == 0, again
    assert again.bits == reference(*FLAGS).bits


@pytest.mark.parametrize("where", ["train:5", "save:5", pytest.param("eval:1", marks=pytest.mark.slow)])
def test_second_sigint_leaves_at_once(sightline, reference, tmp_path, where):
    out = tmp_path / "run"
    stopped = sightline.run(out, *OFTEN, FAULT=f"int@{where},int@{where}")
    assert stopped.code == 130, stopped
    assert stopped.stderr.endswith(LEFT)
    last = {"train:5": 4, "eval:1": 8, "save:5": 4}[where]  # two tensor files a checkpoint: the fifth is that of step 6
    assert stopped.progress["step"] == last, "no time was taken for another save"
    again = sightline.run(out, *OFTEN)
    assert again.code == 0, again
    assert not again.warnings
    assert again.bits == reference().bits


def test_second_sigterm_does_not_disturb_the_save(sightline, tmp_path):
    stopped = sightline.run(tmp_path / "run", FAULT="term@train:5,term@train:5,term@save:1")
    assert stopped.code == 143, stopped
    assert stopped.progress["step"] == 5


@pytest.fixture
def fifo(tmp_path: Path) -> Iterator[Path]:
    """A file whose readers wait; they are let go at the end, whatever became of the test."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    yield path
    os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))


@pytest.mark.parametrize("name", ["term", pytest.param("int", marks=pytest.mark.slow)])
def test_data_that_never_come(sightline, reference, fifo, tmp_path, name):
    """A worker hangs in a read, as on a dead file server; the trainer leaves without it."""
    out, sample = tmp_path / "run", 7
    order = TrainOrder(64, 8, seed=0)
    stalled_step = next(step for step in range(8) if sample in order.batch(step)[1])
    every_step = ("--run.checkpoint-every-steps", "1")
    flags = ("--run.workers", "2", *every_step)
    started = sightline.start(out, *flags, FAULT=f"stall@load:{sample}", STALL=str(fifo))
    writer = started.until(lambda: opened_for_writing(fifo))  # a worker is there to read, and nothing will come
    started.until(lambda: [line for line in sightline.log(out) if line.get("step") == stalled_step])
    os.kill(started.pid, {"term": signal.SIGTERM, "int": signal.SIGINT}[name])
    stopped = started.wait()
    os.close(writer)
    assert stopped.code == stopped.exit_code_in_folder == CODES[name], stopped
    assert stopped.progress["step"] == stalled_step
    again = sightline.run(out, *every_step)
    assert again.code == 0, again
    assert again.bits == reference().bits


def opened_for_writing(fifo: Path) -> int | None:
    """Succeed once somebody has opened it for reading."""
    try:
        return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["term", "int"])
def test_signal_to_the_whole_process_group(sightline, reference, tmp_path, name):
    """As a terminal does at Ctrl-C and a batch system at its time limit: loader workers are signalled as well."""
    out = tmp_path / "run"
    started = sightline.start(out, "--run.workers", "2", *OFTEN, FAULT="stop@train:5")
    started.until(lambda: Path(f"/proc/{started.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    os.killpg(started.pid, {"term": signal.SIGTERM, "int": signal.SIGINT}[name])
    os.kill(started.pid, signal.SIGCONT)
    stopped = started.wait()
    assert stopped.code == stopped.exit_code_in_folder == CODES[name], stopped
    assert stopped.progress["step"] == 5
    assert "Traceback" not in stopped.stderr
    assert sightline.run(out, *OFTEN).bits == reference().bits


@pytest.mark.slow  # the forkserver imports torch
@pytest.mark.parametrize(("name", "said"), [("int", "Ctrl-C"), ("term", "SIGTERM (signal 15)")])
def test_signal_to_the_whole_process_group_while_loader_workers_start(sightline, reference, tmp_path, name, said):
    out = tmp_path / "run"
    here = str(Path(__file__).parent)  # for the forkserver, which imports tests/faults/faulty.py by name
    stopped = sightline.run(out, "--run.workers", "2", FAULT=f"all-{name}@server:1", PYTHONPATH=here)
    assert stopped.code == stopped.exit_code_in_folder == CODES[name], stopped
    answer, line = stopped.stderr.splitlines()
    assert answer.startswith(f"{said}: stopping; no step was made yet") and line.startswith(f"stopped by {said}")
    assert sightline.run(out).bits == reference().bits


@pytest.mark.parametrize(
    ("name", "said", "more"),
    [("int", "Ctrl-C", "; again: leave without saving"), ("term", "SIGTERM (signal 15)", "")],
)
def test_a_stop_is_answered_and_is_no_error(sightline, tmp_path, name, said, more):
    stopped = sightline.run(tmp_path / "run", progress="plain", FAULT=f"{name}@train:3")
    line = f"stopped by {said}; saved at step 3; the same command resumes from there"
    assert stopped.code == CODES[name]
    assert stopped.stderr == f"{said}: saving after this step{more}\n{line}\n"
    assert "saved at step" not in stopped.stdout
    assert json.loads((tmp_path / "run" / "exit.json").read_text())["reason"] == line


@pytest.mark.parametrize(
    ("fault", "answer"),
    [
        ("int@train:5", "\r\x1b[KCtrl-C: saving after this step; again: leave without saving\r\n"),
        ("int@train:5,int@train:5", f"\r\x1b[K{LEFT.strip()}\r\n\x1b[?25h"),
    ],
    ids=["once", "twice"],
)
def test_an_answer_takes_the_place_of_the_bar_and_the_cursor_comes_back(sightline, tmp_path, fault, answer):
    """On a real terminal, where rich has hidden the cursor."""
    terminal, inside = os.openpty()
    how = {"progress": "live", "terminal": os.ttyname(inside), "TERM": "xterm", "COLUMNS": "60"}
    started = sightline.start(tmp_path / "run", "--run.log-every-steps=1", **how, FAULT=fault)
    shown = read_terminal(terminal, inside)
    assert started.wait().code == 130
    assert "\x1b[?25l" in shown and "epoch 1/2" in shown
    assert shown.count(answer) == 1 and shown.rindex("\x1b[?25h") >= shown.index(answer)


def read_terminal(terminal: int, inside: int) -> str:
    """Return all that is written until the process that uses it has ended."""
    data = os.read(terminal, 4096)
    os.close(inside)  # now that the process has opened it
    while True:
        try:
            data += os.read(terminal, 4096)
        except OSError:  # EIO: closed
            os.close(terminal)
            return data.decode()


class Stderr:
    """The file that is number 2, as a pipe."""

    def __enter__(self) -> int:
        self.before = os.dup(2)
        self.reading, writing = os.pipe()
        os.dup2(writing, 2)
        os.close(writing)
        return self.reading

    def __exit__(self, *_: object) -> None:
        os.dup2(self.before, 2)
        os.close(self.before)
        os.close(self.reading)


@pytest.mark.parametrize(
    ("saves", "has_begun", "lines"),
    [
        (True, True, ["Ctrl-C: saving after this step; again: leave without saving\n", LEFT]),
        (True, False, ["Ctrl-C: stopping; no step was made yet; again: leave without saving\n", LEFT]),
        (False, False, ["Ctrl-C: stopping after this batch; again: leave at once\n", "left at once\n"]),
    ],
)
def test_signals_are_answered_while_a_long_call_runs(monkeypatch, saves, has_begun, lines):
    """Python runs no handler while torch computes. Neither does it while its main thread waits for a lock of C."""
    monkeypatch.setattr("sightline.engine.signals.ONE_KEYSTROKE_S", 0)
    codes: queue.SimpleQueue[int] = queue.SimpleQueue()
    monkeypatch.setattr(os, "_exit", codes.put)
    lock, said = ctypes.create_string_buffer(256), []  # zeros are a mutex that is free
    c = ctypes.CDLL(None)

    def interrupt() -> None:
        c.pthread_mutex_lock(lock)
        is_locked.set()
        for _ in lines:
            os.kill(os.getpid(), signal.SIGINT)
            said.append(os.read(stderr, 100).decode())  # the main thread is still in its call
        c.pthread_mutex_unlock(lock)

    is_locked = threading.Event()
    with terminal.guarded(), StopSignals(World(), saves) as signals, Stderr() as stderr:
        signals.has_begun = has_begun
        thread = threading.Thread(target=interrupt)
        thread.start()
        is_locked.wait()
        c.pthread_mutex_lock(lock)
        thread.join()
        assert (said, codes.get(timeout=300)) == (lines, 130)  # it speaks before it leaves
        with pytest.raises(Interrupted):
            signals.check()


def test_the_time_to_stop_waits_for_a_second_step():
    """With one step in an epoch, batches of its evaluation come before that; they say nothing about a step."""
    signals = StopSignals(World())
    signals.agree()
    for _ in range(3):
        signals.agree(is_step=False)
    assert signals.interval_s > 0 == signals.answer_s
    signals.agree()
    assert signals.answer_s == signals.interval_s


def test_sighup_saves_too(sightline, tmp_path):
    stopped = sightline.run(tmp_path / "run", FAULT="hup@train:3")
    assert stopped.code == stopped.exit_code_in_folder == 129, stopped
    assert stopped.progress["step"] == 3


def test_sighup_is_nothing_where_it_was_ignored_at_the_start(sightline, tmp_path):
    """As nohup does."""
    ended = sightline.run(tmp_path / "run", FAULT="nohup@recipe:1,hup@train:3")
    assert ended.code == 0, ended
    assert ended.progress["step"] == 16


def test_a_terminal_that_is_closed_costs_no_step(sightline, tmp_path):
    """A real one: its end comes as SIGHUP, also to loader workers, and afterwards no word can be written to it."""
    out, (terminal, inside) = tmp_path / "run", os.openpty()
    flags = ("--run.workers", "1", "--run.log-every-steps", "1")
    started = sightline.start(out, *flags, progress="plain", terminal=os.ttyname(inside), FAULT="stop@train:5")
    os.close(inside)
    started.until_stopped()
    os.close(terminal)  # the kernel sends SIGHUP, and SIGCONT for those that stand
    code = started.wait().code
    ended = json.loads((out / "exit.json").read_text())
    assert (code, ended["code"]) == (129, 129), ended
    assert (out / "checkpoints" / "latest").read_text().strip() == "ckpt-00000005"


def test_exit_json_says_which_signal(sightline, tmp_path):
    sightline.run(tmp_path / "run", FAULT="term@train:2")
    ended = json.loads((tmp_path / "run" / "exit.json").read_text())
    assert ended["code"] == 143 and "15" in ended["reason"]


@pytest.mark.parametrize(("ranks", "is_deaf"), [(1, False), (2, True)])
def test_a_rank_that_ends_with_an_error_cannot_be_ended_before_it_has_reported_it(ranks, is_deaf):
    """As soon as one rank has ended, torchrun sends SIGTERM to the others, which are just leaving by themselves."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in HANDLED}  # nohup may have ignored one
    try:
        with pytest.raises(RuntimeError, match="lost"), StopSignals(World(size=ranks)):
            raise RuntimeError("lost")
        ignored = {number for number in before if signal.getsignal(number) is signal.SIG_IGN}
        assert ignored == ({signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1} if is_deaf else set())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_sigterm_while_a_batch_is_measured_ends_the_run_with_its_reason(sightline, tmp_path):
    ended = sightline.run(tmp_path / "run", "--train.accumulation", "auto", FAULT="term@open:1")
    assert ended.code == ended.exit_code_in_folder == 143, ended
    assert "stopped by SIGTERM (signal 15); before the first step; nothing was trained" in ended.stdout + ended.stderr
