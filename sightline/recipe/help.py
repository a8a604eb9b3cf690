"""Help texts: the flags of `train RECIPE`, from the objects that a recipe returned, and the layout of all help.

A field's text is the string below it in the source of its class, its choices are those of its annotation, and its
default is the value of the object. A part of the user's own is read in the same way.
"""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from sightline import terminal
from sightline.errors import UsageError
from sightline.files.typed_json import hints_of
from sightline.recipe.flags import flag_of
from sightline.recipe.suggest import ALIASES

if TYPE_CHECKING:
    from sightline.recipe.recipe import Recipe, Run

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
_TYPES = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH", NoneType: "none"}


@dataclass(frozen=True)
class Flag:
    """A field as help shows it. `default` is as a user would type it; "" shows none."""

    name: str  # train.global_batch
    hint: Any
    text: str
    default: str

    @property
    def spellings(self) -> list[str]:
        """How a user can type it, the short flag first."""
        long = flag_of(self.name)
        return [*(short for short, of in ALIASES.items() if of == long), long]


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


def of_train(names: Collection[str]) -> str:
    """Return what `train --help` says besides its usage; `names` are those of the recipes."""
    short = ", ".join(f"{short} for {long}" for short, long in ALIASES.items())
    lines = (
        f"recipes: {', '.join(names)}",
        "`sightline train RECIPE --help` shows the usual flags of one, `--help-all` every flag, `--help-all data` "
        "those of one part",
        f"short flags: {short}",
        "`--data.fold all`, where the data have folds, trains one run per fold and reports their mean and spread",
    )
    return "\n".join(wrapped(line, "", "  ") for line in lines)


def of_recipe(recipe: Recipe, run: Run, name: str, description: str) -> str:
    """Return the usual flags of a recipe with examples. `name` is what the user typed, `description` its docstring."""
    known = {flag.name: flag for flag in _flags_of({**recipe.parts, "run": run})}
    # The weights that the recipe's own example starts from; without them it warns.
    weights = re.search(r"(?m)^    sightline train .*--model\.weights (\S+)", description)
    lines = [
        _usage(name),
        "",
        wrapped(description.split("\n\n")[0], "", ""),
        "",
        "examples:",
        EXAMPLES.format(name, f" --weights {weights[1]} \\\n     " if weights else ""),
        "the usual flags:" if recipe.plan is None else "the usual flags; most defaults give way to the data:",
    ]
    for flag in (known[each] for each in USUAL if each in known):
        choices = taken(flag.hint) if get_origin(flag.hint) is Literal else ""
        lines.append(entry(flag.spellings, choices, flag.text.partition(". ")[0], flag.default))
    ends = (
        f"Every flag: `sightline train {name} --help-all`, those of one part: `--help-all data` ({', '.join(PARTS)}).",
        f"About the recipe: `sightline list {name}`. The same command again resumes its run.",
    )
    return "\n".join([*lines, "", *(wrapped(line, "", "") for line in ends)])


def every_flag(recipe: Recipe, run: Run, name: str, part: str = "") -> str:
    """Return every flag of a recipe, or those of one part, with their whole texts."""
    lines = [_usage(name)]
    for each, value in {**recipe.parts, "run": run}.items():
        if part in ("", each):
            lines += ["", f"{each}:"]
            for flag in _flags_of({each: value}):
                off = [flag_of(flag.name, off=True)] if flag.hint is bool else []
                lines.append(entry([*flag.spellings, *off], taken(flag.hint), flag.text, flag.default))
    return "\n".join(lines)


def texts_of(kind: type) -> dict[str, str]:
    """Return the texts of the fields of a class and of those it inherits from; none of a class without source."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        found |= _own_texts(each)
    return found


def taken(hint: Any) -> str:
    """Return what a flag takes behind it, e.g. INT, {sgd,adam} or FLOAT FLOAT; "" for a switch."""
    arguments = get_args(hint)
    if get_origin(hint) is Literal:
        return f"{{{','.join(map(str, arguments))}}}"
    if get_origin(hint) is list or arguments[-1:] == (...,):
        return f"{taken(arguments[0])} ..."
    if get_origin(hint) is tuple:
        return " ".join(map(taken, arguments))
    if arguments:  # a union
        return "|".join(taken(each).strip("{}").replace(",", "|") for each in arguments)
    return "" if hint is bool else _TYPES.get(hint, "VALUE")


def as_typed(value: Any) -> str:
    """Return a value as a user would type it; of a switch, whether it is on."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return shlex.join(map(str, value))
    return shlex.quote(str(value)) if value not in (None, "") else ""


def entry(spellings: Sequence[str], takes: str, text: str, default: str, note: str = "") -> str:
    """Return the lines about a flag: how it is typed and what it takes, and below it its text. `note` is for what has
    no default."""
    head = f"{', '.join(spellings)} {takes}".rstrip()
    if len(head) + 2 > columns():
        head = head.replace(takes, takes.replace(",", ", "))  # choices can be folded then
    said = " ".join(filter(None, [text.rstrip("."), f"(default: {default})" if default else note]))
    return "\n".join(filter(None, [wrapped(head, "  ", "    "), wrapped(said, "      ", "      ")]))


def columns() -> int:
    """Return how wide help is."""
    return min(shutil.get_terminal_size().columns, WIDEST)


def wrapped(text: str, first: str, later: str) -> str:
    """Return text in lines that begin with these indents, folded between words."""
    return textwrap.fill(
        text, columns(), initial_indent=first, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
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
    width = terminal_columns()
    if not width:
        return name + text
    return textwrap.fill(
        name + text,
        max(2 * len(name), width),
        subsequent_indent=" " * len(name),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _usage(name: str) -> str:
    return f"usage: sightline train {name} [--config FILE] [flags]"


def _flags_of(parts: dict[str, Any]) -> Iterator[Flag]:
    for name, part in parts.items():
        texts, hints = texts_of(type(part)), hints_of(type(part))
        for each in fields(part):
            if each.init:
                default = as_typed(getattr(part, each.name))
                yield Flag(f"{name}.{each.name}", hints[each.name], texts.get(each.name, ""), default)


@functools.cache
def _own_texts(kind: type) -> dict[str, str]:
    """Return the strings below the fields of a class, each as one line."""
    node = _classes_in(kind.__module__).get(kind.__qualname__) if "__annotations__" in vars(kind) else None
    found = {}
    for field, after in itertools.pairwise(node.body if node else ()):
        text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else None
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, str):
            found[field.target.id] = " ".join(text.split())
    return found


@functools.cache
def _classes_in(module: str) -> dict[str, ast.ClassDef]:
    """Return the classes of a module by their qualified names; inspect.getsource would parse the file for each."""
    try:
        found = sys.modules[module]
        source = "".join(linecache.getlines(found.__file__ or "", vars(found)))
        return dict(_classes_among(ast.parse(source).body))
    except (KeyError, AttributeError, SyntaxError, ValueError):  # made by code, typed into a shell, or edited since
        return {}


def _classes_among(body: Sequence[ast.stmt], before: str = "") -> Iterator[tuple[str, ast.ClassDef]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield before + node.name, node
            yield from _classes_among(node.body, f"{before}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield from _classes_among(node.body, f"{before}{node.name}.<locals>.")
        elif isinstance(node, ast.If | ast.Try):
            yield from _classes_among(node.body, before)
