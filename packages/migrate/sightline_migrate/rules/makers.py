"""The few ways to replace a name; each function returns a Maker for a Rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.overrides import _get_current_function_mode, _is_torch_function_mode_enabled, has_torch_function

from sightline_migrate import patching, zones
from sightline_migrate.options import MigrateError
from sightline_migrate.reporting import record
from sightline_migrate.rules.table import Maker, Rule, dressed
from sightline_migrate.virtual.classes import replace_class

if TYPE_CHECKING:
    from sightline_migrate.session import Session

Build = Callable[["Session"], Callable[..., Any]]
"""session -> the replacement function; called once per activation"""


def answers(build: Build) -> Maker:
    """Answer a question: the script gets our answer, torch and machinery the real one.

    While dynamo traces there are no frames to inspect, and the traced code is the script. The check is
    is_dynamo_compiling, since is_compiling is also true while dynamo's own code runs.
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


def is_overridden(args: tuple[Any, ...] = ()) -> bool:
    """Return True if a mode or a tensor subclass of the script replaces the call of a function with these tensors.

    Then the wrapper asks it by handle_torch_function: C++ would hand on the original, which no table of the script
    has. torch's own modes and subclasses know the originals.
    """
    if _is_torch_function_mode_enabled() and not _is_torchs(_get_current_function_mode()):
        return True
    return has_torch_function(args) and any(has_torch_function((each,)) and not _is_torchs(each) for each in args)


def _is_torchs(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "torch"


def ignores(result: Any = None) -> Maker:
    """Skip a harmless call; torch itself still reaches the original."""
    return answers(lambda session: lambda *args, **kwargs: result)


def maps(*names: str, position: int | None = None) -> Maker:
    """Map devices in keyword arguments `names` (default: device), and in one positional argument, to the target's.

    Applies to every caller: without a CUDA device, a request for one can only mean the target.
    """
    keywords = names or ("device",)

    def make(rule: Rule, original: Any, session: Session) -> Any:
        get = session.devices.get

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            given, named = args, kwargs
            for keyword in keywords:
                if keyword in kwargs:
                    device = kwargs[keyword]
                    there = get(device)
                    if there is not device:
                        named = {**named, keyword: there}
            if position is not None and len(args) > position:
                device = args[position]
                if isinstance(device, str | torch.device | int):
                    there = get(device)
                    if there is not device:
                        given = (*args[:position], there, *args[position + 1 :])
            if (given is not args or named is not kwargs) and not is_dynamo_compiling():
                record.hit(rule, args, kwargs)
            return original(*given, **named)

        return wrapper

    return dressed(make)


def refuses(advice: str) -> Maker:
    """Refuse a call: print it with the script's line, then pass it on; raise with --strict."""

    def make(rule: Rule, original: Any, session: Session) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if zones.zone() == zones.SCRIPT:
                refuse(rule, session, advice, args, kwargs)
            return original(*args, **kwargs)

        if isinstance(original, type):  # scripts may derive from it or test with isinstance
            return replace_class(rule, original, wrapper)
        return patching.dress(wrapper, original, rule.name)

    return make


def refuse(rule: Rule, session: Session, advice: str, args: Any = (), kwargs: Any = None) -> None:
    """Print one line with the script's file and line; raise it with --strict."""
    site = zones.user_site(zones.caller())
    text = f"{site}: {rule.name} cannot run on {session.target.name}; {advice}"
    is_new = (zones.caller().f_code.co_filename, zones.caller().f_lineno, rule) not in record.counts
    record.hit(rule, args, kwargs, advice)
    if session.options.strict:
        raise MigrateError(text)
    if is_new:
        record.say(text)
