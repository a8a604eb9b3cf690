"""All terminal output passes through here: control characters in names and texts are shown, never obeyed.

say() is for code that runs in somebody else's process; guard() for a command of ours. A copy of what sightline/terminal
has for it, because this package needs torch alone; a test holds both equal.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import Any, Literal, TextIO

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


def guard(*kinds: type) -> None:
    """Put a guard before stdout and stderr; where kinds are given, only before streams of these."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, Guarded) and (not kinds or type(stream) in kinds):
            setattr(sys, name, Guarded(stream))
