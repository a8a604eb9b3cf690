"""Progress of a long command over data: a bar on a terminal, else a line every ten seconds; on stderr."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sightline import terminal

Progress = Callable[[str, int, int], None]  # what, done, total

_LINE_EVERY_S = 10.0


@contextmanager
def shown_progress() -> Iterator[Progress]:
    """Yield a function that a command calls with (what, done, total) as its work proceeds."""
    stream = terminal.behind(sys.stderr)
    if not terminal.can_draw(stream):
        yield _Lines()
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn

    from sightline.terminal.console import Bars, Terminal, Words

    columns = (Words("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bars(*columns, console=Terminal(stderr=True)) as bars:
        tasks: dict[str, int] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = int(bars.add_task(what, total=total))
            bars.update(tasks[what], completed=done, total=total)  # type: ignore[arg-type]  # rich's own int type

        yield show


class _Lines:
    """Prints lines; silent for work that ends within ten seconds."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _LINE_EVERY_S

    def __call__(self, what: str, done: int, total: int) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _LINE_EVERY_S
            terminal.say(f"{what}: {done} of {total}", "stderr")
