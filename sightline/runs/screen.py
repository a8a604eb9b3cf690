"""The terminal output of a run: lines, or one bar that moves, and numbers as people read them."""

from __future__ import annotations

from typing import Literal

from rich.progress import BarColumn

from sightline.terminal import visible
from sightline.terminal.console import Bars, Terminal, Words


class Screen:
    """The terminal of one rank. Ranks other than the first are silent unless `output` is "all"."""

    def __init__(self, progress: str = "auto", rank: int = 0, output: Literal["main", "all"] = "main"):
        is_main = rank == 0
        self.console = Terminal(quiet=progress == "off" or not (is_main or output == "all"))
        can_draw = self.console.is_terminal and not self.console.is_dumb_terminal
        is_live = progress == "live" or (progress == "auto" and can_draw)
        self.has_bar = is_live and is_main and output == "main"
        self._tag = f"[rank {rank}] " if output == "all" else ""
        self._bar: Bars | None = None

    def say(self, text: str) -> None:
        """Print a line."""
        if self._tag:
            text = "\n".join(self._tag + line for line in text.split("\n"))
        self.console.print(visible(text, self.console.encoding))

    def show(self, title: str, done: int, total: int, numbers: str = "") -> None:
        """Move the bar; without new numbers it keeps those it has."""
        if self._bar is None:
            columns = (
                Words("{task.description}"),
                BarColumn(bar_width=24),
                Words("{task.completed:.0f}/{task.total:.0f}"),
                Words("{task.fields[numbers]}"),
            )
            self._bar = Bars(*columns, console=self.console, transient=True)
            self._bar.start()
            self._bar.add_task(title, total=total, numbers=numbers)
        task = self._bar.tasks[0]
        kept = numbers or task.fields["numbers"]
        self._bar.update(task.id, completed=done, total=total, description=title, numbers=kept)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar:
            self._bar.stop()
            self._bar = None


def as_score(value: float | None) -> str:
    """Format a score; a dash where there is none, and for COCO's -1, which means that there was nothing to measure."""
    if value is None or value == -1:
        return "-"
    return f"{value:.0f}" if value > 1 and float(value).is_integer() else f"{value:.4f}"  # a count


def as_line(numbers: dict[str, float]) -> str:
    """Format the numbers of a training line."""
    shown = []
    for name, value in numbers.items():
        if name == "images_per_s":
            shown.append(f"{value:,.0f} img/s")
        elif name == "data_wait":
            shown.append(f"wait {value:.0%}")
        elif name == "memory_gb":
            shown.append(f"{value:.1f} GB")
        elif name == "eta_s":
            shown.append(f"eta {as_hours(value)}")
        elif name not in ("grad_norm", "steps_per_s", "images_per_s_per_rank"):
            shown.append(f"{name} {value:.4g}")
    return "  ".join(shown)


def as_hours(seconds: float) -> str:
    """Format seconds as hours:minutes:seconds."""
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02d}:{int(seconds) % 60:02d}"
