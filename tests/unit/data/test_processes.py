"""A map over processes: order, what is shared, errors, and a process that dies; how progress is shown; and scripts that
start processes without a guard."""

import io
import operator
import os
import sys
import types
from multiprocessing import spawn
from pathlib import Path

import pytest
import warm

from sightline.data.processes import needs_script, over_processes, without_script
from sightline.errors import PeerLost, UsageError
from sightline.terminal import progress
from sightline.terminal.progress import shown_progress


@pytest.mark.parametrize("count", [0, 1, 2])
def test_results_in_order(count):
    with over_processes(count, 10) as run:
        assert list(run(operator.add, range(50))) == list(range(10, 60))
        assert list(run(operator.sub, [1])) == [9]


@pytest.mark.parametrize("count", [1, 2])
def test_error_of_a_job_comes_back(count):
    with pytest.raises(ZeroDivisionError), over_processes(count, 1) as run:
        list(run(operator.truediv, [1, 0, 1]))


def test_process_that_dies_is_reported():
    with pytest.raises(PeerLost, match="a process died; .*out-of-memory"), over_processes(2, os._exit) as run:
        list(run(operator.call, [9]))


def test_progress_is_silent_for_short_work_and_plain_elsewhere_than_on_a_terminal(capsys, monkeypatch):
    with shown_progress() as show:
        show("reading", 1, 2)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(progress, "_LINE_EVERY_S", 0)
    with shown_progress() as show:
        show("reading", 1, 2)
        show("reading", 2, 2)
    assert capsys.readouterr() == ("", "reading: 1 of 2\nreading: 2 of 2\n")


def test_progress_is_a_bar_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with shown_progress() as show:
        show("reading train", 3, 12)
        show("reading train", 12, 12)
    assert "reading train" in sys.stderr.getvalue() and "12/12" in sys.stderr.getvalue()


def test_progress_without_stderr(monkeypatch, capfd):
    """As a service without a terminal may start: nothing fails, and nothing goes elsewhere."""
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr(progress, "_LINE_EVERY_S", 0)
    with shown_progress() as show:
        show("reading", 1, 2)
    assert capfd.readouterr() == ("", "")


SCRIPT = """
from dataclasses import dataclass, replace
from sightline import api
from sightline.data.classification import ClassificationData

print("the script runs", flush=True)
{own}
FLAGS = {flags}
recipe, run = api.load("demo_classification", [*FLAGS, "--run.out", {out!r}])
{start}
"""
OWN = """
@dataclass(frozen=True)
class Mine(ClassificationData):
    pass
"""
TRAIN = "print(api.train({recipe}, run).ended)"
FLAGS = """--model.width=4 --data.path=synthetic:classes=10,samples=24,size=24 --data.size=24 --data.eval-resize=24
    --data.eval-size=24 --train.max-steps=1 --train.global-batch=8 --train.precision=fp32 --run.workers=1
    --run.device=cpu --run.progress=off""".split()


def script(folder: Path, own: bool, is_guarded: bool) -> Path:
    """Write a script that trains with a loader worker, with a class of its own if asked for."""
    start = TRAIN.format(recipe="replace(recipe, data=Mine(**vars(recipe.data)))" if own else "recipe")
    start = f'if __name__ == "__main__":\n    {start}' if is_guarded else start
    text = SCRIPT.format(own=OWN if own else "", flags=FLAGS, out=str(folder / "run"), start=start)
    (folder / "script.py").write_text(text)
    return folder / "script.py"


def test_processes_start_without_the_script_of_their_parent(monkeypatch: pytest.MonkeyPatch):
    """multiprocessing reads it from __main__."""
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None, raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "script.py", raising=False)
    names = {"init_main_from_path", "init_main_from_name"}
    assert names & set(spawn.get_preparation_data("worker"))
    with without_script():
        assert not names & set(spawn.get_preparation_data("worker"))
    assert names & set(spawn.get_preparation_data("worker"))


@pytest.mark.slow
def test_a_script_without_a_guard_trains_and_runs_once(tmp_path: Path):
    ended = warm.start("script", script(tmp_path, own=False, is_guarded=False)).wait()
    assert (ended.code, ended.stdout) == (0, "the script runs\ntrain.max_steps=1 steps are done\n"), ended


@pytest.mark.slow
def test_a_script_whose_class_the_workers_need_is_imported_by_them(tmp_path: Path):
    ended = warm.start("script", script(tmp_path, own=True, is_guarded=True)).wait()
    assert ended.code == 0 and ended.stdout.splitlines()[-1] == "train.max_steps=1 steps are done"
    assert ended.stdout.count("the script runs") == 2


@pytest.mark.slow
def test_without_a_guard_such_a_script_is_told_to_have_one(tmp_path: Path):
    ended = warm.start("script", script(tmp_path, own=True, is_guarded=False)).wait()
    assert ended.code == 1 and ended.stdout.count("the script runs") == 2
    lines = [line for line in ended.stderr.splitlines() if line.startswith("sightline.errors.")]
    guard = 'put what starts the run under `if __name__ == "__main__":`'
    assert len(lines) == 2 and all(guard in line for line in lines), ended


def test_a_class_that_no_process_can_import_is_named_before_one_starts(monkeypatch):
    """As in a notebook: it belongs to __main__, which has no file."""
    mine = type("Mine", (), {"__module__": "__main__"})
    main = types.ModuleType("__main__")
    main.Mine = mine
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert not needs_script({"data": [1, "text"]}, ())
    with pytest.raises(UsageError, match="class or function of this notebook or prompt.*or use --run.workers 0"):
        needs_script({"data": mine()}, ())
