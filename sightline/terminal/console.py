"""Lines and bars by rich, behind the guard of terminal/__init__.py: text is shown as it is, without markup."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import IO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.file_proxy import FileProxy
from rich.progress import Progress, Task, TextColumn
from rich.segment import Segment
from rich.text import Text

from sightline import terminal


class Terminal(Console):
    """Prints around the guard, because rich moves the cursor; control characters are made visible here."""

    def __init__(self, *, stderr: bool = False, quiet: bool = False):
        # In a notebook rich would write HTML.
        super().__init__(
            stderr=stderr, quiet=quiet, highlight=False, markup=False, emoji=False, soft_wrap=True, force_jupyter=False
        )

    @property  # type: ignore[misc]  # rich lets it be set; nobody does
    def file(self) -> IO[str]:
        return terminal.behind(sys.stderr if self.stderr else sys.stdout) or super().file

    @property
    def is_terminal(self) -> bool:
        return super().is_terminal and terminal.can_draw(self.file)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else terminal.visible(text, self.encoding), style, control)

    def on_broken_pipe(self) -> None:
        """Continue without output; rich would end the process, but a run still writes its files."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


class Bars(Progress):
    """While bars are shown, rich prints what others write above them, but obeys colours in it: a guard comes first."""

    def start(self) -> None:
        super().start()
        terminal.guard(FileProxy)


class Words(TextColumn):
    """A column of text in which brackets are brackets, as wide as what is shown of it."""

    def render(self, task: Task) -> Text:
        return Text(terminal.visible(self.text_format.format(task=task)))
