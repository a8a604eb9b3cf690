"""The page of a run at work: another process writes it, one at a time, whole, and never after the run has ended."""

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from sightline.parts import Scores
from sightline.report import refresh
from sightline.report.live import LivePage
from sightline.report.refresh import Refresh
from sightline.runs.log import RunLog
from sightline.runs.page import Shown
from sightline.runs.screen import RunSize, Screen

SIZE = RunSize(2, 20, 10, is_limit=False)


@pytest.fixture
def log(tmp_path: Path):
    """The log of a run at work, whose page may be written at any time."""
    log = RunLog(tmp_path / "run", Screen("off"), page=LivePage)
    log.folder.write("config.yaml", "recipe: r\ntrain:\n  epochs: 2\n")
    log.event("start", step=0)
    yield log
    log.release()


def left_behind(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if ".part" in path.name]


def test_a_short_run_starts_no_process(log: RunLog):
    log.training(0, 1, SIZE, {"loss": 2.0})
    log.scores(Scores({"top1": 0.5}, {}, []), "scores.json", epoch=1, step=1)
    assert log.page._child is None and not (log.folder.path / "report.html").exists()


def test_scores_of_a_long_run_refresh_the_page(log: RunLog, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(refresh, "EVERY_S", 0)
    log.scores(Scores({"top1": 0.5}, {}, []), "scores.json", is_best=True, epoch=1, step=1)
    child = log.page._child
    assert os.getsid(child.pid) == child.pid, "Ctrl-C at the terminal is for the run"
    log.training(0, 2, SIZE, {"loss": 2.0})
    assert log.page._child is child  # one at a time
    assert child.wait(30) == 0
    text = (log.folder.path / "report.html").read_text()
    assert (
        "top1 0.5000" in text
        and 'http-equiv="refresh" content="60"' in text
        and "running when this was written" in text
    )
    monkeypatch.setattr(refresh, "EVERY_S", 1e6)
    log.training(0, 3, SIZE, {"loss": 2.0})
    assert log.page._child is child  # too early for another


def test_the_end_of_a_run_ends_the_process_and_leaves_nothing(log: RunLog, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(refresh, "EVERY_S", 0)
    log.training(0, 1, SIZE, {"loss": 2.0})
    child = log.page._child
    log.close(0, "finished")
    assert child.poll() is not None and not left_behind(log.folder.path)


def test_the_process_imports_nothing_from_the_current_folder_or_the_run(log: RunLog, monkeypatch: pytest.MonkeyPatch):
    run = log.folder.path
    for name in ("json", "torch", "re", "html"):
        (run / f"{name}.py").write_text(f"open({str(run / 'ran')!r}, 'a').write('{name} ')\n")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.chdir(run)
    monkeypatch.setattr(refresh, "EVERY_S", 0)
    log.training(0, 1, SIZE, {"loss": 2.0})
    assert log.page._child.wait(60) == 0
    assert "running when this was written" in (run / "report.html").read_text()
    assert not (run / "ran").exists()


def test_a_page_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(refresh, "EVERY_S", 0)
    page = Refresh(tmp_path)  # not a run
    page.look()
    assert page._child.wait(30) != 0
    page.close()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    page.look()
    page.close()
    assert not list(tmp_path.iterdir())


def test_a_rank_that_is_not_the_first_and_an_evaluation_write_no_page(tmp_path: Path):
    second = RunLog(tmp_path / "a", Screen("off", 1), 1, page=LivePage)
    for number, log in enumerate((second, RunLog(tmp_path / "b", Screen("off"), attempt=None))):
        assert log.page is None, number
        log.release()


def test_the_process_imports_no_torch_and_gives_way_to_every_other(log: RunLog):
    code = "import os, sys; from sightline.report import refresh; refresh.main(sys.argv[1]); print(os.nice(0))"
    command = [sys.executable, "-X", "importtime", "-c", code, str(log.folder.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert done.returncode == 0 and "sightline.report.page" in imported
    assert not imported & {"torch", "torchvision", "scipy", "triton"}
    assert (log.folder.path / "report.html").is_file() and done.stdout == "19\n"


def test_samples_that_cannot_be_drawn_do_not_end_the_run(log: RunLog):
    class Broken(LivePage):
        def evaluated(self, shown: Shown, scores: Scores) -> dict:
            raise AssertionError("a task of one's own")

    log.page = Broken(log.folder.path)
    log.show(Shown(*[None] * len(fields(Shown))))
    log.scores(Scores({"top1": 0.5}, {}, []), "scores.json", is_best=True, epoch=1, step=1)
    times = {"running_s": 1.0, "wall_s": 1.0}
    log.finished("done", 1, 1, times, times)  # short runs draw at their end
    told = [json.loads(line) for line in (log.folder.path / "log.jsonl").read_text().splitlines()]
    assert [event["text"] for event in told if event["event"] == "warning"] == [
        "the worst samples were not drawn: a task of one's own"
    ]
