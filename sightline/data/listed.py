"""List data once per start: what both splits share is read once, and what the first look found is handed on.

`train` looks at the data before torch is imported, to say what they are; the run opens them a moment later.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

Kept = dict[Hashable, Any]
_SHARED: ContextVar[Kept | None] = ContextVar("shared by splits", default=None)
_HANDED: ContextVar[Kept | None] = ContextVar("handed on within a command", default=None)


@contextmanager
def both_splits() -> Iterator[None]:
    """Surround the opening of both splits: `shared` then reads what it is asked for once."""
    before = _SHARED.set({})
    try:
        yield
    finally:
        _SHARED.reset(before)


def shared(key: Hashable, read: Callable[[], Any]) -> Any:
    """Return what `read` returns, from the first call with this key within `both_splits`."""
    kept = _SHARED.get()
    if kept is None:
        return read()
    if key not in kept:
        kept[key] = read()
    return kept[key]


@contextmanager
def one_command() -> Iterator[None]:
    """Surround a command: sources may be handed on within it, never to the next one, before which files may change."""
    before = _HANDED.set({})
    try:
        yield
    finally:
        _HANDED.reset(before)


def hand_on(key: Hashable, source: Any) -> None:
    """Keep a source for who opens the same one later in this command."""
    kept = _HANDED.get()
    if kept is not None:
        kept[key] = source


def handed(key: Hashable) -> Any:
    """Return the source that was handed on under this key; None if there is none."""
    return (_HANDED.get() or {}).get(key)


def forget() -> None:
    """Drop what was handed on, once the data of the run are open: a later look at them is a new one."""
    kept = _HANDED.get()
    if kept is not None:
        kept.clear()
