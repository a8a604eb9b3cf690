"""Help of `train`: the usual flags of a recipe with examples, without importing torch. config.py prints all flags."""

from __future__ import annotations

import ast
import itertools
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence

from sightline import recipes, terminal
from sightline.errors import UsageError
from sightline.fields import Flag, flags_of
from sightline.words import ALIASES

USUAL = (
    *("data.path", "data.classes", "data.task", "data.dim", "data.fold", "data.size", "data.on_bad_sample"),
    *("model.arch", "model.depth", "model.width", "model.weights"),
    *("train.epochs", "train.global_batch", "train.precision", "train.patience", "train.seed"),
    *("optimizer.kind", "optimizer.lr", "optimizer.weight_decay", "schedule.kind"),
    *("run.out", "run.device", "run.devices", "run.workers", "run.resume"),
)  # of these, a recipe has 20 to 22
PARTS = ("model", "data", "task", "optimizer", "schedule", "train", "run")
EXAMPLES = """\
  sightline train {0} --data DIR{1} --out runs/mine
  sightline train {0} --data DIR{1} --epochs 10 --batch-size 32
  sightline train --config runs/mine/config.yaml --out runs/again
"""
HELP, HELP_ALL = ("-h", "--help"), "--help-all"
WIDEST = 100


def is_asked(flags: Sequence[str]) -> bool:
    """Return whether help is asked for about a recipe that is named first."""
    asks = any(flag in (*HELP, HELP_ALL) or flag.startswith(f"{HELP_ALL}=") for flag in flags[1:])
    return asks and not flags[0].startswith("-")


def question(flags: Sequence[str]) -> tuple[str, bool, str]:
    """Return the recipe, whether all flags are asked for, and the part that --help-all names."""
    for flag, after in itertools.pairwise([*flags, ""]):
        name, equals, value = flag.partition("=")
        if name == HELP_ALL:
            part = value if equals else after if not after.startswith("-") else ""
            if part not in ("", *PARTS):
                raise UsageError(f"--help-all {part}: there is no such part; known: {', '.join(PARTS)}")
            return flags[0], True, part
    return flags[0], False, ""


def of_train() -> str:
    """Return what `train --help` says besides its usage."""
    short = ", ".join(f"{short} for {long}" for short, long in ALIASES.items())
    lines = (
        f"recipes: {', '.join(recipes.names())}",
        "`sightline train RECIPE --help` shows the usual flags of one, `--help-all` every flag, `--help-all data` "
        "those of one part",
        f"short flags: {short}",
        "`--data.fold all`, where the data have folds, trains one run per fold and reports their mean and spread",
    )
    return "\n".join(_wrapped(line, "", "  ") for line in lines)


def of_recipe(name: str) -> str:
    """Return the usual flags of a recipe with examples; empty if its source cannot be read."""
    known = flags_of(name)
    if not known:
        return ""
    # The weights that the recipe's own example starts from; without them it warns.
    weights = re.search(r"(?m)^    sightline train .*--model\.weights (\S+)", recipes.describe(name))
    lines = [
        f"usage: sightline train {name} [--config FILE] [flags]",
        "",
        _wrapped(recipes.describe(name).split("\n\n")[0], "", ""),
        "",
        "examples:",
        EXAMPLES.format(name, f" --weights {weights[1]} \\\n     " if weights else ""),
        "the usual flags:",
    ]
    lines += [_described(field, known[field]) for field in USUAL if field in known]
    ends = (
        f"Every flag: `sightline train {name} --help-all`, those of one part: `--help-all data` ({', '.join(PARTS)}).",
        f"About the recipe: `sightline list {name}`. The same command again resumes its run.",
    )
    return "\n".join([*lines, "", *(_wrapped(line, "", "") for line in ends)])


def _described(field: str, flag: Flag) -> str:
    long = f"--{field.replace('_', '-')}"
    short = [short for short, of in ALIASES.items() if of == long]
    choices = f" {{{','.join(flag.choices)}}}" if flag.choices else ""
    default = _value(flag.default)
    text = flag.text.partition(". ")[0].rstrip(".") + (f" (default: {default})" if default else "")
    return f"{_wrapped(', '.join([*short, long]) + choices, '  ', '    ')}\n{_wrapped(text, '      ', '      ')}"


def _value(source: str) -> str:
    """Return a default as a user would type it."""
    try:
        return str(ast.literal_eval(source))
    except (ValueError, SyntaxError):
        return source


def _wrapped(text: str, first: str, later: str) -> str:
    width = min(shutil.get_terminal_size().columns, WIDEST)
    return textwrap.fill(
        text, width, initial_indent=first, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    )


def terminal_columns() -> int:
    """Return how wide the terminal is; 0 where a program reads the output."""
    stream = terminal.behind(sys.stdout)
    return shutil.get_terminal_size().columns if stream and stream.isatty() else 0


def description(text: str) -> str:
    """Return the text about a recipe, indented; its sentences are folded as rows are, its commands are not."""
    lines = (row("  ", line) if line[:1].strip() else textwrap.indent(line, "  ") for line in text.splitlines())
    return "\n".join(lines)


def row(name: str, text: str) -> str:
    """Return a row of a table of names and texts: folded between words where a terminal would do so inside of them, in
    one line where a program reads it."""
    columns = terminal_columns()
    if not columns:
        return name + text
    width = max(2 * len(name), columns)
    indent = " " * len(name)
    return textwrap.fill(name + text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
