"""A map over processes: order, what is shared, errors, and a process that dies; and how progress is shown."""

import io
import operator
import os
import sys

import pytest

from sightline.data.processes import over_processes
from sightline.errors import PeerLost
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
