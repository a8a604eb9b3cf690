"""The terminal output of a run: lines, or one line with a bar that moves, and numbers as people read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sightline.terminal import visible
from sightline.terminal.console import Bars, Terminal

BAR_LEAST, BAR_MOST = 6, 24
GAP = 2  # columns between two numbers
KEPT = ("loss", "eta_s", "bar", "steps", "images_per_s")  # numbers of the live line, the most important first
DROPPED = ("lr", "data_wait", "memory_gb")  # from the last on, before the bar shrinks
NOT_SHOWN = ("grad_norm", "steps_per_s", "images_per_s_per_rank")
COUNTED = {"samples": "images", "truths": "objects", "pixels": "pixels"}  # what a row of the table of classes counts


def counted(row: Mapping[str, Any]) -> str:
    """Return how much a row of the table of classes counts, as the end of a line: "  1 image"."""
    return "".join(
        f"  {row[key]} {what if row[key] != 1 else what[:-1]}" for key, what in COUNTED.items() if key in row
    )


@dataclass(frozen=True)
class RunSize:
    """Epochs and steps of a run. Where patience may end it, `epochs` is only a limit, far beyond the usual end."""

    epochs: int
    steps: int
    steps_per_epoch: int
    is_limit: bool = False

    def title(self, epoch: int) -> str:
        """Name an epoch, counted from 0, for people."""
        return f"epoch {epoch + 1}" if self.is_limit else f"epoch {epoch + 1}/{self.epochs}"

    def place(self, epoch: int, step: int) -> tuple[int, int]:
        """Return the step and the number of steps: of the run, or of the epoch where the run's length is not known."""
        if self.is_limit:
            return step - epoch * self.steps_per_epoch, self.steps_per_epoch
        return step, self.steps

    def ends_epoch(self, step: int) -> bool:
        """Return whether an epoch, or the run, ends with this step."""
        return step == self.steps or step % self.steps_per_epoch == 0


class Screen:
    """The terminal of one rank. Ranks other than the first are silent unless `output` is "all"."""

    def __init__(self, progress: str = "auto", rank: int = 0, output: Literal["main", "all"] = "main"):
        is_main = rank == 0
        self.console = Terminal(quiet=progress == "off" or not (is_main or output == "all"))
        can_draw = self.console.is_terminal and not self.console.is_dumb_terminal
        is_live = progress == "live" or (progress == "auto" and can_draw)
        self.has_bar = is_live and is_main and output == "main"
        self._tag = f"[rank {rank}] " if output == "all" else ""
        self._line = LiveLine()
        self._bar: Bars | None = None

    def say(self, text: str) -> None:
        """Print a line."""
        if self._tag:
            text = "\n".join(self._tag + line for line in text.split("\n"))
        self.console.print(visible(text, self.console.encoding))

    def show(self, title: str, done: int, total: int, numbers: Mapping[str, float] | None = None) -> None:
        """Move the bar; without new numbers it keeps those it has."""
        self._line.set(title, done, total, numbers)
        if self._bar is None:
            self._bar = _LineOfBars(self._line, self.console)
            self._bar.start()

    def rename(self, title: str) -> None:
        """Give the bar another title, where there is one."""
        self._line.title = visible(title)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar:
            self._bar.stop()
            self._bar = None


class _LineOfBars(Bars):
    """Rich's moving display, which shows our line."""

    def __init__(self, line: LiveLine, console: Console):
        self.line = line
        super().__init__(console=console, transient=True)

    def get_renderable(self) -> LiveLine:
        return self.line


class LiveLine:
    """The line that moves: it always fits the width of the terminal, and leaves out the least important first."""

    def __init__(self) -> None:
        self.title, self.done, self.total = "", 0, 1
        self.numbers: Mapping[str, float] = {}

    def set(self, title: str, done: int, total: int, numbers: Mapping[str, float] | None = None) -> None:
        """Set what is shown; numbers stay where none are given."""
        self.title, self.done, self.total = visible(title), done, total
        self.numbers = self.numbers if numbers is None else numbers

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        texts, bar = self._fitted(options.max_width - 1)  # a full line would move the cursor of some terminals on
        grid = Table.grid(padding=(0, GAP, 0, 0))
        cells: list[Text | ProgressBar] = [Text(text) for text in texts]
        if bar:
            cells.insert(1, ProgressBar(total=max(1, self.total), completed=self.done, width=bar))
        for _ in cells:
            grid.add_column(no_wrap=True)
        grid.add_row(*cells)
        yield grid

    def _fitted(self, room: int) -> tuple[list[str], int]:
        """Return title and numbers that fit, and the width of the bar, 0 for none."""
        words = {name: visible(text) for name, text in as_words(self.numbers).items()}
        texts = {"title": self.title, "steps": f"{self.done}/{self.total}", **words, "bar": " " * BAR_LEAST}
        chosen = {"title"}

        def width(names: set[str]) -> int:
            return sum(cell_len(texts[name]) + GAP for name in names) - GAP

        def fits(name: str, more: int = 0) -> bool:
            return name in texts and width({*chosen, name}) + more <= room

        for name in KEPT:
            if fits(name):
                chosen.add(name)
        own = [name for name in words if name not in (*KEPT, *DROPPED)]
        if "bar" in chosen:
            for name in (*own, *DROPPED):
                if not fits(name, BAR_MOST - BAR_LEAST):
                    break
                chosen.add(name)
        bar = min(BAR_MOST, BAR_LEAST + room - width(chosen)) if "bar" in chosen else 0
        shown = [text for name, text in texts.items() if name in chosen and name != "bar"]
        return [shown[0][: max(0, room)], *shown[1:]], bar


def as_score(value: float | None) -> str:
    """Format a score; a dash where there is none, and for COCO's -1, which means that there was nothing to measure."""
    if value is None or value == -1:
        return "-"
    if 1 < value < 1e9 and float(value).is_integer():  # a count
        return f"{value:.0f}"
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.4g}"


def as_words(numbers: Mapping[str, float]) -> dict[str, str]:
    """Format the numbers of a training line, by name."""
    words = {}
    for name, value in numbers.items():
        if name == "images_per_s":
            words[name] = as_speed(value)
        elif name == "data_wait":
            words[name] = f"wait {value:.0%}"
        elif name == "memory_gb":
            words[name] = f"{value:.1f} GB"
        elif name == "eta_s":
            words[name] = f"eta {as_hours(value)}"
        elif name not in NOT_SHOWN:
            words[name] = f"{name} {value:.4g}"
    return words


def as_speed(images_per_s: float) -> str:
    """Format a speed; a slow one has more digits, so that it is not 0."""
    return f"{images_per_s:,.0f} img/s" if images_per_s >= 10 else f"{images_per_s:.2g} img/s"


def as_hours(seconds: float) -> str:
    """Format seconds as hours:minutes:seconds."""
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02d}:{int(seconds) % 60:02d}"
