"""`sightline legacy`: read a command line of an original README, show what it becomes, or run it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sightline.errors import UsageError
from sightline.files.regular import regular
from sightline.legacy import line, start
from sightline.legacy.parse import wants_help
from sightline.legacy.table import Act, Field, Notice, Script, plain
from sightline.legacy.translate import SCRIPTS, Translation, find_scripts, translate

USAGE = """usage: sightline legacy [--print] [--device WORD] [--set part.field=value ...] SCRIPT ARGS ...
       sightline legacy [options] -- LINE
       sightline legacy [options] --from FILE

Run a command line of one of the original READMEs as it is written there.

  SCRIPT ARGS              an original script with its own flags; `SCRIPT --help` lists them and what becomes of each
  -- LINE                  the whole line: variables, mpirun or torchrun, $PYTHON, the script
  --from FILE              lines from a file, one after the other; `export NAME=VALUE` holds for those that follow
  --print                  show the commands of ours and what became of every word; start nothing. Lines of a file
                           that cannot be run as written are listed at the end
  --device WORD            cpu, or a device by its number, e.g. cuda:1; without, what the machine has
  --set part.field=value   one more field of ours, e.g. --set run.workers=4

Example: sightline legacy --print train.py --batch-size 256 --epochs 90
"""
MAX_FILE_BYTES = 1 << 20
BOARD = "--run.tensorboard"
BINDING = {"--run.max-cpus", "--run.affinity"}
Show = Callable[[str], None]
RunCommand = Callable[[Sequence[str]], None]


@dataclass(frozen=True)
class LegacyOptions:
    """Options of the command itself."""

    prints: bool
    device: str
    extra: tuple[str, ...]
    file: str


def legacy(flags: Sequence[str], show: Show, run: RunCommand, environ: Mapping[str, str] | None = None) -> None:
    """Show or run what the flags ask for; `run` runs a command of ours."""
    environ = os.environ if environ is None else environ
    options, words = read_options(flags)
    if not options.file and (not words or (wants_help(words[:1]) and words[0].startswith("-"))):
        show(f"{USAGE}\nscripts: {', '.join(sorted({script.name for script in SCRIPTS}))}")
        if not words:
            raise UsageError("legacy what? Give a script, `-- LINE` or --from FILE")
        return
    if options.file:
        _run_file(options, show, run, environ)
        return
    if len(words) == 1 and any(letter.isspace() for letter in words[0]):
        words = line.split(words[0], environ)
    else:
        words = [line.with_listed(word, environ) for word in words]
    _run_line(words, options, start.of_environment(environ), show, run)


def read_options(flags: Sequence[str]) -> tuple[LegacyOptions, list[str]]:
    """Split our own options, which stand first (--print anywhere), from the line."""
    prints = "--print" in flags
    rest = [flag for flag in flags if flag != "--print"]
    device, file, extra = "", "", []
    while rest and rest[0].partition("=")[0] in ("--device", "--set", "--from"):
        name, equals, value = rest.pop(0).partition("=")
        if not equals:
            if not rest:
                raise UsageError(f"{name} needs a value")
            value = rest.pop(0)
        if name == "--device":
            device = value
        elif name == "--from":
            file = value
        else:
            field, has_value, _ = value.partition("=")
            if not has_value or "." not in field or field.startswith("-"):
                raise UsageError(f"--set {value}: write part.field=value, e.g. --set run.workers=4")
            extra.append(f"--{value}")
    if rest[:1] == ["--"]:
        del rest[0]
    elif file and rest:
        raise UsageError(f"--from {file} brings the lines; leave out {' '.join(rest)}")
    return LegacyOptions(prints, device, tuple(extra), file), rest


def _run_file(options: LegacyOptions, show: Show, run: RunCommand, environ: Mapping[str, str]) -> None:
    path = Path(options.file)
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UsageError(f"--from {path} is larger than {MAX_FILE_BYTES} bytes; a README is smaller")
        with open(path, encoding="utf-8", opener=regular) as file:
            text = file.read()
    except (OSError, ValueError) as error:
        raise UsageError(f"--from {path} cannot be read: {error}") from error
    exported: dict[str, str] = {}
    understood = out_of_scope = 0
    problems: list[str] = []
    for each in line.logical_lines(text):
        try:
            variables = {**environ, **exported}
            if (set_now := line.export_of(each, variables)) is not None:
                exported |= set_now
                continue
            begun = start.with_exports(start.of_environment(environ), exported)
            _run_line(line.split(each, variables), options, begun, show, run)
            understood += 1
        except line.OutOfScope as error:
            show(f"skipped: {error}")
            out_of_scope += 1
        except UsageError as error:
            if not options.prints:
                raise
            show(f"error: {error}")
            problems.append(f"{' '.join(each.split())}: {error}")
    show(f"{path}: {understood} commands, {out_of_scope} lines out of scope")
    if problems:
        lines = f"{len(problems)} line{'s' * (len(problems) > 1)}"
        raise UsageError(f"{path}: {lines} cannot be run as written:\n  " + "\n  ".join(problems))


def _run_line(words: Sequence[str], options: LegacyOptions, begun: start.Start, show: Show, run: RunCommand) -> None:
    read = line.read(words, begun)
    if wants_help(read.arguments):
        for script in find_scripts(read.script, read.arguments):
            show(help_of(script))
        return
    translation = translate(read, options.device, options.extra)
    if options.prints:
        show(translation.as_text())
        show(table_of(translation))
        return
    for old, new, effect in translation.rows:
        if new == "-" and translation.is_main:
            show(f"legacy: {old}: {effect}")
    carry_out(translation, show, run)


def carry_out(translation: Translation, show: Show, run: RunCommand) -> None:
    """Run the steps in this process, in their order; what one of them raises ends all."""
    if translation.ranks > 1 and not translation.device:
        _refuse_missing_devices(translation.ranks)
    os.environ.update(translation.variables)
    for step in translation.steps:
        if isinstance(step, Act):
            if translation.is_main:
                show(f"legacy: {step.text}")
                step.do()
            continue
        step = _without_missing_board(translation, step, show)
        if translation.is_main:
            show("legacy: " + replace(translation, steps=(step,)).as_text())
        with _cpus_restored() if BINDING & set(step) else contextlib.nullcontext():
            run(step)


@contextlib.contextmanager
def _cpus_restored() -> Iterator[None]:
    """Give this process its CPUs and threads back, so that a line of a file does not bind those after it."""
    import torch  # not before a line that needs this: OMP_NUM_THREADS of one is read now

    threads, cpus = torch.get_num_threads(), os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        for thread in Path("/proc/self/task").glob("*") if cpus else ():
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setaffinity(int(thread.name), cpus)


def _without_missing_board(translation: Translation, step: tuple[str, ...], show: Show) -> tuple[str, ...]:
    """Leave TensorBoard out where an original always wrote it and the package is missing; asked for, it is an error."""
    always = any(flag.key == "save_summary_steps" for flag in translation.script.flags)
    if BOARD not in step or not always or importlib.util.find_spec("tensorboard"):
        return step
    if translation.is_main:
        show(f"legacy: no TensorBoard events are written: `pip install sightline[tensorboard]` for {BOARD}")
    return tuple(word for word in step if word != BOARD)


def _refuse_missing_devices(ranks: int) -> None:
    from sightline.hardware import devices

    found = devices.select("auto")
    if found.kind == "cpu":
        raise UsageError(
            f"{ranks} devices are asked for, and this machine has none besides its CPU; `sightline legacy --device cpu "
            f"...` starts {ranks} CPU ranks"
        )


def table_of(translation: Translation) -> str:
    """Return the table old, new, effect, in as many columns as the terminal has."""
    rows = [("old", "new", "effect"), *translation.rows]
    room = max(80, shutil.get_terminal_size((160, 24)).columns)
    widths = [min(max(len(row[at]) for row in rows), room // 3) for at in (0, 1)]
    return "\n".join(f"{old:{widths[0]}}  {new:{widths[1]}}  {effect}".rstrip() for old, new, effect in rows)


def help_of(script: Script) -> str:
    """Return the flags of an original with their defaults, and what becomes of each."""
    lines = [f"{script.path}: {script.about}", ""]
    for old, new, effect in flag_rows(script):
        lines.append(f"  {old:44} {new}{': ' * bool(new and effect)}{effect}")
    return "\n".join([*lines, "", "`sightline legacy --print SCRIPT ARGS` shows what a command line becomes."])


def flag_rows(script: Script) -> Iterator[start.Row]:
    """Yield spellings with the default, what a flag becomes, and a note, for every flag."""
    for flag in script.flags:
        default = "" if flag.default in (None, False, "") else f" ({plain(flag.default)})"
        old = f"{', '.join(flag.names)}{default}"
        if isinstance(flag.outcome, Field):
            yield old, flag.outcome.to, flag.outcome.effect
        elif isinstance(flag.outcome, Notice):
            yield old, "no meaning here", flag.outcome.why
        else:
            yield old, "error", flag.outcome.remedy
