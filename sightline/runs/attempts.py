"""Attempts: starts of one command by a launcher that restarts it, and exit.json, which stops hopeless restarts.

exit.json of the run folder says how a start ended. torchrun turns every exit code into 1 and starts again; an attempt
that would end the same way (wrong flags, bad data, no good checkpoint, not finite) raises the same error at once.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sightline.errors import BadCheckpoint, BadData, NotFinite, UsageError
from sightline.files.typed_json import read_json, typed

EXIT = "exit.json"
MAX_EXIT_BYTES = 2**20  # the reason may quote a message of many lines
IN_VAIN = {kind.exit_code: kind for kind in (UsageError, BadData, BadCheckpoint, NotFinite)}


@dataclass(frozen=True)
class Attempt:
    """One start of a command; without an elastic launcher the only one, and then `run_id` is empty."""

    run_id: str = ""
    command: str = ""
    """Like run_id, but never shared by two commands; the lock of a run folder holds it."""
    restarts: int = 0
    ranks: int = 1

    def obey(self, folder: Path) -> None:
        """Raise the error of an earlier attempt of the same command at once where a retry would end the same way.

        A first attempt is a person's new command and obeys nothing; nor does one with another number of ranks, over
        which the batch may split.
        """
        mark = read_exit(folder)
        if self.restarts and mark.get("run_id") == self.run_id and mark.get("ranks") == self.ranks:
            kind = IN_VAIN.get(mark["code"])
            if kind is not None:
                raise kind(f"{mark['reason']} (as the attempt before; not tried again)")

    def facts(self) -> dict[str, Any]:
        """Return the fields of exit.json that a later attempt compares."""
        return {"run_id": self.run_id, "restarts": self.restarts, "ranks": self.ranks} if self.run_id else {}


ALONE = Attempt()


def detect() -> Attempt:
    """Return this attempt as torchrun's variables describe it."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "")
    if not run_id:
        return ALONE
    command = run_id
    if run_id == "none":  # torchrun's default, so any two commands have it; these know each other by their launcher
        agent = os.getppid()
        command = f"launcher {agent} on {platform.node()}, started at {_start_time(agent)}"
    return Attempt(run_id, command, _number("TORCHELASTIC_RESTART_COUNT", 0), _number("WORLD_SIZE", 1))


def _number(name: str, default: int) -> int:
    text = os.environ.get(name) or str(default)
    if not text.isdecimal():
        raise UsageError(
            f"{name}='{text}' must be a whole number, as torchrun sets it beside TORCHELASTIC_RUN_ID; start with "
            f"torchrun, or unset both"
        )
    return int(text)


def read_exit(folder: Path) -> dict[str, Any]:
    """Return what exit.json holds; {} where it is missing or cannot be read."""
    try:
        told = typed(read_json(folder / EXIT, MAX_EXIT_BYTES), dict[str, Any])
        typed(told.get("code"), int), typed(told.get("reason"), str)
    except (OSError, ValueError):
        return {}
    return told


def is_in_vain(code: int) -> bool:
    """Return whether a restart would end with the same code again."""
    return code in IN_VAIN


def _start_time(pid: int) -> str:
    """Return clock ticks from boot to the start of a process: with the pid it names one process. Linux only."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except OSError:
        return "an unknown time"
