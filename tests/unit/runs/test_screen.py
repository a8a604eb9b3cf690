"""The line that moves while a run trains, and numbers as people read them."""

import io
import itertools
import re

import pytest
from rich.console import Console

from sightline.runs.log import RunLog
from sightline.runs.screen import LiveLine, RunSize, Screen, as_score, as_speed, as_words

LINE = {"loss": 2.3456, "top1": 0.1234, "lr": 0.1333, "grad_norm": 3.0, "images_per_s": 1234.5, "data_wait": 0.03}
LINE |= {"memory_gb": 10.2, "eta_s": 3661.0}
LARGE = LINE | {"images_per_s": 12345.6, "eta_s": 36000.0 * 3}


def drawn(width: int, line: dict = LINE, title: str = "epoch 12/90", done: int = 744, total: int = 12400) -> str:
    live, file = LiveLine(), io.StringIO()
    live.set(title, done, total, line)
    colours = {"color_system": "standard", "no_color": False, "legacy_windows": False}
    Console(file=file, width=width, force_terminal=True, **colours).print(live)
    [text] = re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue()).splitlines()
    return text.rstrip()


def bar_of(text: str) -> int:
    return len(re.findall("[━╸╺]", text))


def test_a_wide_terminal_shows_everything():
    text = drawn(160)
    for part in ("epoch 12/90", "744/12400", "loss 2.346", "top1 0.1234", "lr 0.1333", "1,234 img/s", "wait 3%"):
        assert part in text
    assert "10.2 GB" in text and "eta 1:01:01" in text and bar_of(text) == 24


@pytest.mark.parametrize("line", [LINE, LARGE], ids=["usual", "large"])
def test_eighty_columns_show_epoch_bar_steps_loss_speed_and_time_left(line: dict):
    text = drawn(80, line)
    assert len(text) < 80 and re.match("epoch 12/90  [━╸]", text)
    for part in ("744/12400", "loss 2.346", " img/s", "eta "):
        assert part in text
    assert bar_of(text) >= 6 and not re.search("GB|wait|lr ", text)


def test_memory_wait_and_rate_go_before_the_bar_shrinks():
    seen = [drawn(width) for width in range(160, 60, -1)]
    assert all(bar_of(text) == 24 for text in seen if re.search("GB|wait|lr ", text))
    shown = [[part in text for part in ("lr ", "wait", "GB")] for text in seen]
    assert all(a or not b for row in shown for a, b in itertools.pairwise(row)), "memory goes first, rate last"
    assert bar_of(seen[-1]) < 24


def test_fifty_columns_still_show_how_far_it_is():
    text = drawn(50, LINE, "epoch 2/3", 20, 60)
    assert len(text) < 50 and bar_of(text) >= 6
    for part in ("epoch 2/3", "20/60", "loss 2.346", "eta 1:01:01"):
        assert part in text
    assert not re.search("GB|wait|lr ", text)


def test_it_never_wraps():
    for width in (*range(1, 50), 79, 81, 120):
        for line in ({}, LINE, LARGE):
            text = drawn(width, line)
            assert len(text) <= width, (width, line)
        assert "loss 2.346" in text or width < 30


def test_numbers_stay_while_the_run_evaluates():
    live = LiveLine()
    live.set("epoch 1/2", 1, 2, LINE)
    live.set("evaluating 1/9", 1, 2)
    assert live.numbers == LINE and live.title == "evaluating 1/9"


def test_the_bar_moves_with_every_step_and_keeps_its_numbers(tmp_path):
    log = RunLog(tmp_path / "run", Screen("live"))
    size = RunSize(2, 60, 30)
    log.stepped(0, 1, size)
    log.training(0, 10, size, LINE)
    log.stepped(0, 11, size)
    line = log.screen._line
    assert (line.title, line.done, line.total, line.numbers) == ("epoch 1/2", 11, 60, LINE)
    log.close(0, "finished")


@pytest.mark.parametrize(("module", "has_bar"), [("io", True), ("ipykernel.iostream", False)])
def test_a_notebook_gets_lines_although_its_stream_calls_itself_a_terminal(monkeypatch, module: str, has_bar: bool):
    stream = type("Stream", (io.StringIO,), {"__module__": module, "isatty": lambda self: True, "encoding": "utf-8"})
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout", stream())
    assert Screen("auto").has_bar is has_bar
    assert not Screen("auto").console.is_jupyter


def test_the_bar_has_no_colours_where_nobody_wants_them(tmp_path, monkeypatch: pytest.MonkeyPatch):
    class Tty(io.StringIO):
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

    def shown(name: str) -> str:
        monkeypatch.setattr("sys.stdout", file := Tty())
        log = RunLog(tmp_path / name, Screen("live"))
        log.training(0, 1, RunSize(2, 6, 3), LINE)
        log.close(0, "finished")
        return file.getvalue()

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    colour = r"\x1b\[[0-9;]*m"
    assert re.search(colour, shown("with"))
    monkeypatch.setenv("NO_COLOR", "1")
    without = shown("without")
    assert not re.search(colour, without) and "━" in without and "epoch 1/2" in without


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (46738690161635357549187351257213304832.0, "4.674e+37"),
        (784435.3861, "7.844e+05"),
        (0.4545, "0.4545"),
        (1000.0, "1000"),
        (1.0, "1.0000"),
        (-1, "-"),
        (None, "-"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
    ],
)
def test_scores_are_short(value, text: str):
    assert as_score(value) == text


@pytest.mark.parametrize(
    ("speed", "text"), [(12345.6, "12,346"), (10.0, "10"), (9.96, "10"), (2.54, "2.5"), (0.0342, "0.034"), (0.0, "0")]
)
def test_a_slow_speed_is_not_zero(speed: float, text: str):
    assert as_speed(speed) == f"{text} img/s"
    assert as_words({"images_per_s": speed}) == {"images_per_s": f"{text} img/s"}


def test_a_run_with_patience_counts_within_the_epoch(tmp_path, capsys):
    size = RunSize(10000, 500000, 50, is_limit=True)
    log = RunLog(tmp_path / "run", Screen("plain"))
    log.training(2, 112, size, LINE | {"eta_s": (500000 - 112) * 0.5})
    log.close(0, "finished")
    shown = capsys.readouterr().out
    assert shown.startswith("epoch 3  step 12/50  loss 2.346") and shown.endswith("eta 0:00:19\n")  # 38 steps of 0.5 s
    assert "10000" not in shown and "500000" not in shown
