"""`sightline doctor`: what this machine can do; doctor_checks.py tries it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sightline.commands.words import parser_of
from sightline.errors import UsageError


def doctor(flags: Sequence[str]) -> None:
    """Report what this machine can do and what is missing: `sightline doctor --folder runs`"""
    parser = parser_of("doctor", doctor)
    parser.add_argument("--folder", type=Path, default=Path("."), help="folder in which runs will be written")
    parser.add_argument("--all", action="store_true", help="a line for everything, also for what is absent")
    arguments = parser.parse_args(flags)
    from sightline.commands.doctor_checks import as_lines, examine

    checks = examine(arguments.folder, arguments.all)
    for line in as_lines(checks, arguments.all):
        print(line)
    if any(check.status == "fail" for check in checks):
        raise UsageError("this machine cannot train; the lines marked `fail` say why")
