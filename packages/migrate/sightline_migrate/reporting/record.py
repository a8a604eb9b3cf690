"""Counts of changed calls per call site, and one Record for the first hit of each.

Wrappers call hit(); listeners (the log files, tests) receive each new Record.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from sightline_migrate import terminal, zones

if TYPE_CHECKING:
    from sightline_migrate.rules.table import Rule

TEXT_OF_ARGUMENT = 80
ARGUMENTS_SHOWN = 8


@dataclass(frozen=True)
class Record:
    """The first hit of one rule at one line."""

    rule: Rule
    kind: str
    site: zones.Site
    """the line that called the replaced function; may be inside torch or a library"""
    user: zones.Site
    """the user's own line that led there"""
    arguments: str
    what: str
    time: float


# Looked up once: hit() runs on every changed call.
_getframe = sys._getframe
_zones = zones._zones
THROUGH = zones.THROUGH

Key = tuple[str, int, "Rule"]
counts: dict[Key, int] = {}
"""calls per (file, line, rule)"""
records: dict[Key, Record] = {}
truths: dict[str, int] = {}
"""calls per name by torch itself, which got the real answer"""
listeners: list[Callable[[Record], None]] = []


def hit(rule: Rule, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, what: str = "") -> None:
    """Count a changed call; `what` is read only the first time and defaults to the rule's text.

    Call it from a wrapper's body, or from functions of this package that a wrapper calls.
    """
    frame = _getframe(2)
    filename = frame.f_code.co_filename
    if _zones.get(filename, THROUGH) == THROUGH:
        frame = zones.caller()
        filename = frame.f_code.co_filename
    key = (filename, frame.f_lineno, rule)
    try:
        counts[key] += 1
    except KeyError:
        counts[key] = 1
        _first(key, frame, args, kwargs or {}, what)


def truth(rule: Rule) -> None:
    """Count a question from torch itself."""
    truths[rule.name] = truths.get(rule.name, 0) + 1


def _first(key: Key, frame: Any, args: Sequence[Any], kwargs: Mapping[str, Any], what: str) -> None:
    rule = key[2]
    record = Record(
        rule=rule,
        kind=rule.kind,
        site=zones.site_of(frame),
        user=zones.user_site(frame),
        arguments=describe(args, kwargs),
        what=what or rule.what,
        time=time.time(),
    )
    records[key] = record
    for listener in listeners:
        listener(record)


def describe(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Describe arguments in one line: tensors and big objects by type and shape, never by value."""
    parts = [_text(value) for value in args[:ARGUMENTS_SHOWN]]
    if len(args) > ARGUMENTS_SHOWN:
        parts.append("...")
    return ", ".join([*parts, *(f"{name}={_text(value)}" for name, value in kwargs.items())])


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"Tensor{tuple(value.shape)}"
    if isinstance(value, bool | int | float | str | torch.dtype | torch.device) or value is None:
        text = repr(value)
        return text if len(text) <= TEXT_OF_ARGUMENT else text[:TEXT_OF_ARGUMENT] + "..."
    if isinstance(value, list | tuple):
        inside = ", ".join(_text(each) for each in value[:ARGUMENTS_SHOWN])
        text = f"{inside}, ..." if len(value) > ARGUMENTS_SHOWN else inside
        text = text if len(text) <= TEXT_OF_ARGUMENT else text[:TEXT_OF_ARGUMENT] + "..."
        return f"[{text}]" if isinstance(value, list) else f"({text})"
    # Read no other object's name: a value being traced would return another traced value.
    return value.__name__ if isinstance(value, type | FunctionType) else type(value).__name__


def reset() -> None:
    """Clear all counts: a forked child starts its own."""
    counts.clear()
    records.clear()
    truths.clear()


def say(text: str) -> None:
    """Print one line, on rank 0 only."""
    if os.environ.get("RANK", "0") == "0":
        terminal.say(f"sightline migrate: {text}", "stderr")


os.register_at_fork(after_in_child=reset)
