"""All terminal output passes through here: control characters in names and texts are shown, never obeyed.

guard() puts it in front of all that a process of ours prints; say() is for code that may run in somebody else's. Bars
and lines of a run are console.py. Imports nothing of Sightline and no rich, for `sightline --help`; migrate has a copy.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, Literal, TextIO

# C0 but tab and newline, DEL, C1, overrides of the direction of writing, and bytes of file names that are not text.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str, encoding: str = "") -> str:
    r"""Return text with control characters written out, as \x1b; and what `encoding`, if given, does not know."""
    if not text.isprintable():
        text = _CONTROLS.sub(_written_out, text)
    if encoding and not text.isascii():
        text = text.encode(encoding, "backslashreplace").decode(encoding)
    return text


def _written_out(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def say(text: str, to: Literal["stdout", "stderr"] = "stdout") -> None:
    """Print a line; nothing where the stream was closed."""
    stream = getattr(sys, to)
    if stream is not None:
        print(visible(text, _encoding(stream)), file=stream, flush=True)


def say_if_read(text: str) -> None:
    """Print a line about work that goes on even where the reader of the output has gone."""
    with suppress(BrokenPipeError):
        say(text)


def leave(code: int) -> None:
    """End the process as Python does, threads and exit handlers first, but leave its memory to the system: to free
    that of torch and of captured graphs piece by piece takes a second (1.4 s instead of 0.2 s on the H200)."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or nobody reads it any more
            if stream:
                stream.flush()
    os._exit(code)


def _encoding(stream: TextIO) -> str:
    """Return the encoding of a stream; one that a user's script put in place of Python's may have none."""
    return getattr(stream, "encoding", "") or ""


class Guarded:
    """A stream that shows control characters. It is not a terminal to whoever asks, so that nobody sends it colours."""

    def __init__(self, stream: TextIO):
        self.rich_proxied_file = stream
        """The stream behind it; rich's own proxies use the same name."""

    def write(self, text: str) -> int:
        self.rich_proxied_file.write(visible(text, _encoding(self.rich_proxied_file)))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def isatty(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


def behind(stream: TextIO | None) -> TextIO | None:
    """Return the stream that a guard, or rich while a bar is shown, stands in front of."""
    while (inner := getattr(stream, "rich_proxied_file", None)) is not None:
        stream = inner
    return stream


def can_draw(stream: IO[str] | None) -> bool:
    """Return whether a stream is a terminal that lets the cursor be moved; that of a notebook only says so, both to its
    kernel and to commands after `!`, which inherit the kernel's environment."""
    is_notebooks = type(stream).__module__.startswith("ipykernel") or "JPY_PARENT_PID" in os.environ
    return stream is not None and stream.isatty() and not is_notebooks


def guard(*kinds: type) -> None:
    """Put a guard before stdout and stderr; where kinds are given, only before streams of these."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, Guarded) and (not kinds or type(stream) in kinds):
            setattr(sys, name, Guarded(stream))


_commands = 0  # at work in this process


def is_command() -> bool:
    """Return whether this process carries out a command: then it is ours to end, else it is somebody's script."""
    return _commands > 0


@contextmanager
def guarded() -> Iterator[None]:
    """Guard a command. The guard stays after an error, because its traceback is still to be printed."""
    global _commands
    before = sys.stdout, sys.stderr
    guard()
    _commands += 1
    try:
        yield
    finally:
        _commands -= 1
    sys.stdout, sys.stderr = before
