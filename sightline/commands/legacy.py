"""`sightline legacy`: command lines of the original READMEs; legacy/ translates them."""

from __future__ import annotations

from collections.abc import Sequence


def legacy(flags: Sequence[str]) -> None:
    """Run a command line of the original READMEs: `sightline legacy --print train.py --batch-size 256`"""
    from sightline.commands import COMMANDS
    from sightline.legacy import command

    command.legacy(flags, print, lambda words: COMMANDS[words[0]](words[1:]))
