"""The front door: finds the command, and turns errors into exit codes. commands/ has a file for each.

--help and list import no torch.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence

from sightline import __version__, plugins, recipes, terminal
from sightline.commands import COMMANDS
from sightline.errors import Interrupted, SightlineError, UsageError, unforeseen_disk_error
from sightline.hardware.launch.place import is_rank_0
from sightline.recipe import help as help_text
from sightline.safe_path import folder_off_path


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code of the process."""
    flags = list(sys.argv[1:] if argv is None else argv)
    if flags[:1] == ["migrate"]:  # a script's output is its own; the command guards what it says itself
        return _run(flags)
    with terminal.guarded(), folder_off_path():
        code = _run(flags)
    if argv is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while Python shuts down: no traceback of its threads
    return code


def _run(flags: list[str]) -> int:
    try:
        if not flags or flags[0] in ("-h", "--help"):
            print(_overview(), flush=True)
            return 0 if flags else UsageError.exit_code
        if flags[0] == "--version":
            print(f"sightline {__version__}", flush=True)
            return 0
        _command(flags[0])(flags[1:])
        if sys.stdout:  # None where it was closed
            sys.stdout.flush()  # here, where a reader that has gone can be met; at exit it would be code 120
    except Interrupted as stop:  # as asked for, so not an error
        if is_rank_0():
            _complain(str(stop))
        return stop.exit_code
    except SightlineError as error:
        _complain(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        _complain("stopped by Ctrl-C; the same command starts again, or resumes if something was saved")
        return 130
    except BrokenPipeError:  # `| head` has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        if (failed := unforeseen_disk_error(error)) is None:
            raise
        _complain(f"error: {failed}")
        return failed.exit_code
    return 0


def _complain(text: str) -> None:
    """Print an error. On a terminal that was closed (SIGHUP) only the exit code is left."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _overview() -> str:
    lines = [f"sightline {__version__}: vision training", "", "usage: sightline COMMAND ...", ""]
    lines += [help_text.row(f"  {name:10} ", (command.__doc__ or "").strip()) for name, command in COMMANDS.items()]
    lines += [
        "",
        "`sightline COMMAND --help` lists options, `sightline train RECIPE --help` the usual flags of a recipe.",
    ]
    return "\n".join(lines)


def _command(command: str) -> Callable[[Sequence[str]], None]:
    """Return a command, of ours or of another installed package; UsageError for an unknown one."""
    if command in COMMANDS:
        return COMMANDS[command]
    if plugins.has("commands", command):
        found: Callable[[Sequence[str]], None] = plugins.load("commands", command)
        return found
    from sightline.recipe.suggest import nearest

    meant = f"; did you mean `sightline train {command}`?" if recipes.is_known(command) else ""
    hint = meant or nearest(command, COMMANDS, "'{}'")
    known = f"{hint} Known" if hint else "; known"
    raise UsageError(f"unknown command '{command}'{known}: {', '.join(COMMANDS)}{plugins.also_known('commands')}")
