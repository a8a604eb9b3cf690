"""From a command line of an original to commands of ours, with a table of what became of every word."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sightline.errors import UsageError
from sightline.legacy import imagenet_main, keras_ctl, resnet50_pytorch, ssd, unet_scripts
from sightline.legacy.line import Line
from sightline.legacy.parse import parse, unknown_flags, wants_help
from sightline.legacy.start import Row
from sightline.legacy.table import (
    BENCHMARK,
    EVALUATE,
    PREPARE,
    TRAIN,
    Act,
    Field,
    Flag,
    Given,
    Mode,
    Notice,
    Refused,
    Script,
    nothing,
    plain,
)

SCRIPTS: tuple[Script, ...] = (
    resnet50_pytorch.SCRIPT,
    *keras_ctl.SCRIPTS,
    imagenet_main.SCRIPT,
    *ssd.SCRIPTS,
    *unet_scripts.SCRIPTS,
)


SAME = "as it is"
ON_RANKS = (TRAIN, EVALUATE, BENCHMARK)  # commands that start several


@dataclass(frozen=True)
class Translation:
    """The result for a line: steps in their order, and a row for every word that was read."""

    script: Script
    steps: tuple[tuple[str, ...] | Act, ...]
    """A command of ours without `sightline`, or something done beside them."""
    rows: tuple[Row, ...]
    variables: dict[str, str]
    """Variables of the line that our processes read."""
    ranks: int
    """Number that our command starts on this machine; `launch` checks its hosts itself."""
    device: str
    is_main: bool
    """True if this process prints for all ranks."""

    def as_text(self) -> str:
        """Return the commands as they could be typed, and what is done beside them as comments."""
        prefix = [f"{name}={value}" for name, value in self.variables.items()]
        lines = []
        for step in self.steps:
            if isinstance(step, Act):
                lines.append(f"# {step.text}")
            else:
                lines.append(shlex.join([*prefix, "sightline", *step]))
        return "\n".join(lines)


def find_scripts(path: str, arguments: Sequence[str] = ()) -> list[Script]:
    """Return the original that a path means, by its folder or else by its flags; several only where help is wanted."""
    name = path.rpartition("/")[2]
    named = [script for script in SCRIPTS if script.name == name]
    if not named:
        names = sorted({script.name for script in SCRIPTS})
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UsageError(f"'{path}' is not one of the original scripts; {hint}Known: {', '.join(names)}")
    in_folder = [script for script in named if "/" in path and f"/{script.path}".endswith(_last_two(path))]
    candidates = in_folder or named
    if len(candidates) == 1 or wants_help(arguments):
        return candidates
    unknown = {script.path: unknown_flags(script, arguments) for script in candidates}
    fitting = [script for script in candidates if not unknown[script.path]]
    if len(fitting) == 1:
        return fitting
    if fitting:
        which = " or ".join(f"{_last_two(script.path)[1:]} ({script.about})" for script in fitting)
        knowing = " that know these flags" if arguments else ""
        raise UsageError(f"{name} is the name of {len(fitting)} originals{knowing}; write {which}")
    each = "; ".join(f"{_last_two(key)[1:]} has no {', '.join(found)}" for key, found in unknown.items())
    raise UsageError(f"{name} is the name of several originals, and none knows these flags: {each}")


def _last_two(path: str) -> str:
    return "/" + "/".join(path.split("/")[-2:])


def translate(line: Line, device: str = "", extra: Sequence[str] = ()) -> Translation:
    """Translate a line; `device` and `extra` (--part.field=value) are the user's own additions."""
    script = find_scripts(line.script, line.arguments)[0]
    values, named = parse(script, line.arguments)
    given = Given(values, named, replace(line.start, device=device))
    _refuse(script, given)
    if script.forward:
        path, passed = script.forward(given)
        inner = translate(replace(line, script=path, arguments=tuple(passed)), device, extra)
        called = (script.name, shlex.join([path.rpartition("/")[2], *passed]), "what the launcher calls")
        own = [
            (as_typed(flag, given[flag.key]), "-", flag.outcome.why)
            for flag in script.flags
            if isinstance(flag.outcome, Notice)
            and flag.key in named
            and flag.key not in {f.key for f in inner.script.flags}
        ]
        return replace(inner, rows=(called, *own, *inner.rows))
    given = script.complete(given)
    given = replace(given, start=script.settle(given))
    mode = script.mode(given)
    if extra and mode.command in ("", PREPARE):
        raise UsageError(f"--set {extra[0][2:]}: {script.name} trains nothing, so it has no fields; leave it out")
    given = replace(given, recipe=mode.recipe)
    words, rows = _words(script, given, mode)
    return Translation(
        script,
        (*mode.before, _command(given, mode, [*words, *extra]), *mode.after) if mode.command else mode.before,
        (*given.start.rows, *_output_rows(given, mode), *mode.notes, *rows),
        given.start.passed,
        given.ranks if mode.command in ON_RANKS and not (given.start.is_rank or given.start.hosts) else 1,
        given.start.device,
        given.start.rank == 0,
    )


def _refuse(script: Script, given: Given) -> None:
    for flag in script.flags:
        if isinstance(flag.outcome, Refused) and flag.key in given.named and given[flag.key] != flag.default:
            raise UsageError(f"{as_typed(flag, given[flag.key])}: {flag.outcome.remedy}")


def _words(script: Script, given: Given, mode: Mode) -> tuple[list[str], list[Row]]:
    """Return the words of our command, and a row for each flag that was named or whose default must be written."""
    words: list[str] = []
    rows: list[Row] = []
    for flag in script.flags:
        outcome, is_named = flag.outcome, flag.key in given.named
        old = as_typed(flag, given[flag.key]) + ("" if is_named else " (default)")
        if isinstance(outcome, Field):
            new = list(_field_words(flag, outcome, given)) if mode.command in outcome.on else []
            words += new
            if is_named and mode.command in outcome.read_on:
                rows.append((old, f"{mode.command} ...", outcome.effect))
            elif is_named and mode.command not in outcome.on:
                rows.append((old, "-", f"not read by {mode.command}"))
            elif is_named or new:
                goes_on = outcome.make is nothing and given[flag.key] != flag.default
                rows.append((old, shlex.join(new) or (outcome.to if goes_on else SAME), outcome.effect))
        elif isinstance(outcome, Notice) and is_named:
            rows.append((old, "-", outcome.why))
        elif is_named:
            rows.append((old, SAME, ""))
    return words, rows


def _field_words(flag: Flag, outcome: Field, given: Given) -> Sequence[str]:
    if outcome.make:
        return outcome.make(given)
    value = given[flag.key]
    ours = outcome.ours.get(given.recipe) if isinstance(outcome.ours, dict) else outcome.ours
    if value is None or value == ours:
        return []
    return option(outcome.to, value)


def option(name: str, value: Any) -> list[str]:
    """Write a field as a flag of ours: booleans as --part.no-field."""
    if isinstance(value, bool):
        return [name if value else name.replace(".", ".no-", 1)]
    if isinstance(value, list | tuple):
        return [name, *map(plain, value)]
    return [name, plain(value)]


def as_typed(flag: Flag, value: Any) -> str:
    """Write a flag of the original and its value."""
    if isinstance(value, bool):
        return flag.name if value else f"{flag.name}=False" if flag.kind == "bool" else f"without {flag.name}"
    if isinstance(value, list):
        return f"{flag.name} {' '.join(map(str, value))}"
    return f"{flag.name} {plain(value)}" if value is not None else flag.name


def _command(given: Given, mode: Mode, words: Sequence[str]) -> tuple[str, ...]:
    """Put a command together; several hosts make it `launch`, several ranks of one host --run.devices."""
    start = given.start
    device = ["--run.device", start.device] if start.device and mode.command != PREPARE else []
    logs = ["--run.rank-logs", start.output] if start.output and mode.command == TRAIN else []
    if start.is_rank or mode.command == PREPARE:
        return (mode.command, *mode.words, *words, *device)
    if start.hosts:
        if mode.command != TRAIN:
            raise UsageError(f"{len(start.hosts)} hosts can only train; run `{mode.command}` on one of them")
        return ("launch", *mode.words, *start.launch_words(), *words, *device)
    if given.ranks > 1 and mode.command in ON_RANKS:
        return (mode.command, *mode.words, *words, *device, *logs, "--run.devices", str(given.ranks))
    return (mode.command, *mode.words, *words, *device, *logs)


def _output_rows(given: Given, mode: Mode) -> list[Row]:
    """Say what becomes of mpirun's folder for the output of ranks."""
    folder, several = given.start.output, bool(given.start.hosts)
    if not folder:
        return []
    if mode.command != TRAIN:
        return [(f"--output-filename {folder}", "-", f"not read by {mode.command}")]
    new, effect = ("--output", "on every host") if several else ("--run.rank-logs", "rank_N.log of every rank in it")
    return [(f"--output-filename {folder}", f"{new} {folder}", effect)]
