"""The few ways in which a name is replaced. Families combine them; each gives a Maker for a Rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_dynamo_compiling

from sightline.migrate import patching, zones
from sightline.migrate.options import MigrateError
from sightline.migrate.reporting import record
from sightline.migrate.rules.table import Maker, Rule, dressed
from sightline.migrate.virtual.classes import replace_class

if TYPE_CHECKING:
    from sightline.migrate.session import Session

Build = Callable[["Session"], Callable[..., Any]]
"""made once per activation: session -> the function that takes the original's place"""


def answers(build: Build) -> Maker:
    """A question: the script gets our answer, torch and machinery the truth.

    While dynamo traces (is_dynamo_compiling; not is_compiling, which is also true while dynamo's own code runs) there
    are no frames to look at, and what is traced is the script.
    """

    def make(rule: Rule, original: Any, session: Session) -> Any:
        answer = build(session)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling():
                return answer(*args, **kwargs)
            if zones.zone() != zones.SCRIPT:
                record.truth(rule)
                return original(*args, **kwargs)
            record.hit(rule, args, kwargs)
            return answer(*args, **kwargs)

        return wrapper

    return dressed(make)


def ignores(result: Any = None) -> Maker:
    """A call that is harmless without; torch itself still reaches the original."""
    return answers(lambda session: lambda *args, **kwargs: result)


def maps(*names: str, position: int | None = None) -> Maker:
    """Devices in keyword arguments `names` (default: device), and in one positional argument, become the target's.

    For every caller: with no CUDA device, a request for one can only mean the target.
    """
    keywords = names or ("device",)

    def make(rule: Rule, original: Any, session: Session) -> Any:
        table, slow = session.devices.table, session.devices.get

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            changed = False
            for keyword in keywords:
                if keyword in kwargs:
                    device = kwargs[keyword]
                    there = slow(device) if is_dynamo_compiling() else table.get(device, device)
                    if there is not device:
                        kwargs[keyword] = there
                        changed = True
            if position is not None and len(args) > position:
                device = args[position]
                if isinstance(device, str | torch.device | int):
                    there = slow(device)
                    if there is not device:
                        args = (*args[:position], there, *args[position + 1 :])
                        changed = True
            if changed and not is_dynamo_compiling():
                record.hit(rule, args, kwargs)
            return original(*args, **kwargs)

        return wrapper

    return dressed(make)


def refuses(advice: str) -> Maker:
    """Cannot be honoured: told with the script's line, then passed on; an error where --strict is given."""

    def make(rule: Rule, original: Any, session: Session) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if zones.zone() == zones.SCRIPT:
                refuse(rule, session, advice, args, kwargs)
            return original(*args, **kwargs)

        if isinstance(original, type):  # scripts may derive from it, or test with isinstance
            return replace_class(rule, original, wrapper)
        return patching.dress(wrapper, original, rule.name)

    return make


def refuse(rule: Rule, session: Session, advice: str, args: Any = (), kwargs: Any = None) -> None:
    """One clear line that names the script's file and line; raises it in strict mode."""
    site = zones.user_site(zones.caller())
    text = f"{site}: {rule.name} cannot run on {session.target.name}; {advice}"
    is_new = (zones.caller().f_code.co_filename, zones.caller().f_lineno, rule) not in record.counts
    record.hit(rule, args, kwargs, advice)
    if session.options.strict:
        raise MigrateError(text)
    if is_new:
        record.say(text)
