"""Control characters in what others named are shown on a terminal, never obeyed; what rich draws stays as it is."""

import io
import json
import os
import subprocess
import sys
import unicodedata
from collections.abc import Callable

import pytest

from sightline import terminal
from sightline.runs import screen as run_screen
from sightline.runs.log import RunLog
from sightline.terminal.console import Terminal
from sightline.terminal.progress import shown_progress

# Sets the title, clears the screen, colours by a C1 code, writes backwards, rings; then rich's markup and an emoji.
HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e[red][link=x]:x:\x7f"
SHOWN = r"\x1b]0;owned\x07\x1b[2J\x9b31m\u202e[red][link=x]:x:\x7f"


class Screen(io.StringIO):
    """A stream that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def turn_on(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Screen]:
    """turn_on() from inside the test: pytest puts its own streams in place after a fixture."""

    def screen() -> Screen:
        found = Screen()
        monkeypatch.setattr(sys, "stdout", found)
        monkeypatch.setattr(sys, "stderr", found)
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.delenv("NO_COLOR", raising=False)
        return found

    return screen


def obeyed(text: str) -> list[str]:
    """Return the parts of HOSTILE that a terminal would obey; rich's own sequences do not count."""
    return [part for part in ("\x1b]", "\x07", "\x1b[2J", "\x9b", "\u202e", "\x7f") if part in text]


def test_every_control_character_of_unicode_is_shown():
    """By the categories of Unicode: Cc but tab and newline, and surrogates; of Cf the overrides of direction."""
    of_direction = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    for code in range(0x10000):  # beyond there are none
        letter = chr(code)
        is_control = unicodedata.category(letter) in ("Cc", "Cs") and letter not in "\t\n"
        is_control |= unicodedata.bidirectional(letter) in of_direction
        assert (terminal.visible(letter) != letter) == is_control, hex(code)


def test_what_is_shown_names_the_character_and_the_rest_stays():
    assert terminal.visible(HOSTILE) == SHOWN == terminal.visible(SHOWN)
    assert terminal.visible("Käfer\tμ 犬\n") == "Käfer\tμ 犬\n"
    assert terminal.visible("caf\udce9 Käfer", "ascii") == r"caf\udce9 K\xe4fer"


def test_guard_shows_what_anybody_prints_and_is_not_a_terminal(turn_on):
    screen = turn_on()
    with terminal.guarded():
        print(HOSTILE)
        sys.stderr.writelines([HOSTILE, "\n"])
        assert not sys.stdout.isatty() and terminal.behind(sys.stdout) is screen
        terminal.guard()
        assert terminal.behind(sys.stdout) is screen
    assert sys.stdout is sys.stderr is screen
    assert screen.getvalue() == f"{SHOWN}\n{SHOWN}\n"


def test_say_needs_no_guard_and_no_stream(turn_on, monkeypatch: pytest.MonkeyPatch):
    screen = turn_on()
    terminal.say(HOSTILE)
    monkeypatch.setattr(sys, "stderr", None)
    terminal.say("nobody hears it", "stderr")
    with terminal.guarded():
        print("a line")
    assert screen.getvalue() == f"{SHOWN}\na line\n"


@pytest.mark.parametrize("is_guarded", [True, False])
def test_lines_and_bars_of_a_run(turn_on, tmp_path, is_guarded: bool):
    screen = turn_on()
    if is_guarded:
        terminal.guard()
    log = RunLog(tmp_path / "run", run_screen.Screen("live"))
    log.say(HOSTILE)
    log.screen.show(HOSTILE, 1, 2, {HOSTILE: 1.0})
    print("between", HOSTILE)  # by a library, while a bar is shown
    log.close(0, "finished")
    assert (sys.stdout is screen) is not is_guarded
    text = screen.getvalue()
    assert text.startswith(f"{SHOWN}\n") and f"between {SHOWN}" in text
    assert obeyed(text) == []
    assert "\x1b[?25l" in text  # the bar itself: rich hides the cursor


def test_bars_of_a_command(turn_on):
    screen = turn_on()
    with terminal.guarded(), shown_progress() as show:
        show(HOSTILE, 1, 2)
    assert SHOWN in screen.getvalue() and obeyed(screen.getvalue()) == []
    assert "\x1b[?25l" in screen.getvalue()


def test_names_of_links_in_rich_text_do_not_become_links(turn_on):
    screen = turn_on()
    Terminal().print(HOSTILE)
    assert obeyed(screen.getvalue()) == [] and "\x1b" not in screen.getvalue()


def test_logs_of_ranks_can_be_shown_by_cat(tmp_path, capsys):
    log = RunLog(tmp_path, rank=1)
    log.say(HOSTILE)
    log.close(0, HOSTILE)
    text = (tmp_path / "rank_1.log").read_text()
    assert text.count(SHOWN) == 2 and "\x1b" not in text


def test_the_log_as_json_keeps_names_and_holds_no_control_character(tmp_path):
    log = RunLog(tmp_path)
    log.event("start", name=HOSTILE)
    log.close(0, "finished")
    data = (tmp_path / "log.jsonl").read_bytes()
    assert json.loads(data.splitlines()[1])["name"] == HOSTILE
    assert set(data) <= {*range(32, 127), 10}


TRACEBACK = """
from sightline import cli
def fail(flags):
    raise RuntimeError(flags[0])
cli.COMMANDS["fail"] = fail
cli.main(["fail", {name!r}])
"""


def test_a_traceback_is_shown_too():
    command = [sys.executable, "-c", TRACEBACK.format(name=HOSTILE)]
    done = subprocess.run(command, env=os.environ, capture_output=True, timeout=60)
    assert done.returncode == 1 and f"RuntimeError: {SHOWN}".encode() in done.stderr and b"\x1b" not in done.stderr


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_bars_are_drawn_on_terminals_but_not_below_a_cell_of_a_notebook(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    near, far = os.openpty()
    with os.fdopen(near), os.fdopen(far, "w") as stream:
        assert terminal.can_draw(stream) and not terminal.can_draw(None)
        monkeypatch.setenv("JPY_PARENT_PID", "1")  # as a kernel has it: `!sightline ...` gets a pseudo-terminal
        assert not terminal.can_draw(stream)
