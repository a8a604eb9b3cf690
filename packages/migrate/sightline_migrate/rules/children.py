"""Children with a PYTHONPATH of their own: migrate them, too, or say that they are not."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sightline_migrate import AUTOLOAD, zones
from sightline_migrate.options import SWITCH, VENDOR_SWITCH, MigrateError, is_wanted
from sightline_migrate.reporting import record
from sightline_migrate.rules.table import Rule, dressed
from sightline_migrate.stand_ins.rules import as_it_is

if TYPE_CHECKING:
    from sightline_migrate.session import Session

ADDED = "the child is migrated, too: its PYTHONPATH had lost the folder for that"
NOT_MIGRATED = "the command sets PYTHONPATH, so that its Python is not migrated; write PYTHONPATH=...:$PYTHONPATH"
OWN_PATH = re.compile(r"""(?:^|[\s;&|("'])PYTHONPATH=(?!\S*\$\{?PYTHONPATH)\S*""", re.MULTILINE)
LARGEST_SCRIPT = 100_000
CWD, ENV = 8, 9  # positions in Popen(args, ...) after args


def rules() -> list[Rule]:
    return [
        Rule(f"{subprocess.__name__}.Popen.__init__", "adapted", dressed(_make_popen), ADDED),
        Rule("os.system", "adapted", dressed(_make_system), ADDED),
    ]


def _make_popen(rule: Rule, original: Any, session: Session) -> Any:
    def __init__(self: Any, args: Any, *more: Any, **kwargs: Any) -> None:
        env: Any = kwargs["env"] if "env" in kwargs else next(iter(more[ENV:]), None)
        path = _path_with_the_folder(env)
        if path:
            record.hit(rule)
            env = {**env, "PYTHONPATH": path}
            if "env" in kwargs:
                kwargs["env"] = env
            else:
                more = (*more[:ENV], env, *more[ENV + 1 :])
        _warn(args, kwargs["cwd"] if "cwd" in kwargs else next(iter(more[CWD:]), None))
        original(self, args, *more, **kwargs)

    return __init__


def _make_system(rule: Rule, original: Any, session: Session) -> Any:
    def system(command: Any) -> Any:
        _warn(command, None)
        return original(command)

    return system


def _path_with_the_folder(env: Any) -> str:
    """Return the PYTHONPATH for a child that asks for migration, as its parent does, but cannot find it; else "".

    An environment of bytes, like os.environb, and one that Popen will refuse are left alone.
    """
    if not isinstance(env, Mapping) or not all(isinstance(name, str) for name in env):
        return ""
    try:
        switches = {name: os.fsdecode(env[name]) for name in (SWITCH, VENDOR_SWITCH) if name in env}
        own = os.fsdecode(env.get("PYTHONPATH", ""))
        is_lost = is_wanted(switches) and AUTOLOAD not in own.split(os.pathsep)
    except (MigrateError, TypeError):
        return ""
    return os.pathsep.join(filter(None, [AUTOLOAD, own])) if is_lost else ""


def sets_its_own_path(command: Any, folder: Any = None) -> bool:
    """Return True if a command, or a shell script that it runs, sets PYTHONPATH without the present one."""
    given = [command] if isinstance(command, str | bytes | os.PathLike) else command
    line = " ".join(os.fsdecode(word) for word in given)
    texts = [line]
    for word in line.split()[:3]:
        path = Path(os.fsdecode(folder) if folder is not None else ".", word)
        if path.suffix in (".sh", ".bash") and path.is_file() and path.stat().st_size < LARGEST_SCRIPT:
            texts.append(path.read_text("utf-8", errors="replace"))
    return any("python" in text and OWN_PATH.search(text) for text in texts)


def _warn(command: Any, folder: Any) -> None:
    if not isinstance(command, str | bytes | os.PathLike | list | tuple):
        return  # e.g. a generator, which can be read once
    try:
        is_lost = sets_its_own_path(command, folder)
    except (OSError, TypeError, ValueError):
        return  # the call itself will say what is wrong
    if is_lost:
        frame = zones.caller()
        is_new = (frame.f_code.co_filename, frame.f_lineno, LOST) not in record.counts
        record.hit(LOST, (command,))
        if is_new:
            record.say(f"{zones.user_site(frame)}: {NOT_MIGRATED}")


LOST = Rule("PYTHONPATH=", "refused", as_it_is, NOT_MIGRATED)
