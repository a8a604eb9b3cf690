"""Words that a user types: short flags of `train`, suggestions for unknown words, refusals before torch is imported.

`api.train` takes the same words as keywords.
"""

from __future__ import annotations

import difflib
import errno
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypedDict

from sightline import recipes
from sightline.errors import UsageError
from sightline.fields import Fields, Flag, flags_of, named
from sightline.hardware import launch

ALIASES = {
    "--data": "--data.path",
    "--epochs": "--train.epochs",
    "--batch-size": "--train.global-batch",
    "--lr": "--optimizer.lr",
    "--out": "--run.out",
    "--device": "--run.device",
    "--workers": "--run.workers",
    "--weights": "--model.weights",
    "--resume": "--run.resume",
}


class ShortFields(TypedDict, total=False):
    """The same words as keywords of `api.train`."""

    data: str | os.PathLike[str]
    epochs: int
    batch_size: int | str
    lr: float
    out: str | os.PathLike[str]
    device: str
    workers: int
    weights: str | os.PathLike[str]
    resume: str | os.PathLike[str]


MEANT = {  # words of other trainers that are unlike ours
    "--bs": "--batch-size",
    "--batch": "--batch-size",
    "--learning-rate": "--lr",
    "--imgsz": "--data.size",
    "--img-size": "--data.size",
    "--image-size": "--data.size",
}
NUMBERS: dict[str, tuple[Callable[[str], object], str]] = {  # by annotation
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "Measured": (lambda text: text == "auto" or int(text), "a whole number or auto"),
}
SHORT = 4  # letters of words that are like too many others
SURE = 0.8  # ratio from which a short word counts as near one that begins otherwise
NEAR = 0.7  # ratio of difflib from which two words count as near
SHOWN = 3  # most flags that a suggestion names
OPENS_DATA = ("train", "check", "evaluate", "show")  # commands that read --data.path on this machine


def expand(flags: Sequence[str]) -> list[str]:
    """Return flags with short ones written out: --lr 0.1 is --optimizer.lr 0.1."""
    return [_long(flag) for flag in flags]


def as_flags(fields: Mapping[str, Any], known: Fields) -> list[str]:
    """Return the flags of values given in Python, by dotted names or by the short ones: {"lr": 0.1, "run.workers": 0}.
    None is as if it were not given. `known` are the fields of the recipe, where they are known."""
    flags: list[str] = []
    for name, value in fields.items():
        if value is None:
            continue
        flag = _long(f"--{name}").replace("_", "-")
        part, dot, field = flag.removeprefix("--").partition(".")
        if not dot:
            short = ", ".join(each.removeprefix("--").replace("-", "_") for each in ALIASES)
            raise UsageError(
                f"unknown field '{name}'; the short names are {short}, all others are dotted and go into a dict: "
                '{"optimizer.kind": "adamw"}'
            )
        if isinstance(value, bool):
            declared = known.get(f"{part}.{field}".replace("-", "_"))
            if declared is None or declared.is_switch:
                flags.append(flag if value else f"--{part}.no-{field}")
                continue
            value = "on" if value else "off"  # as in a config file
        if isinstance(value, list | tuple):
            flags += [flag, *map(str, value)]
        else:
            flags.append(f"{flag}={os.fspath(value) if isinstance(value, os.PathLike) else value}")
    return flags


def _long(flag: str) -> str:
    name, equals, value = flag.partition("=")
    return ALIASES.get(name.replace("_", "-"), name) + equals + value


def refuse(command: str, recipe: str, flags: Sequence[str], own: Collection[str] = ()) -> None:
    """Raise UsageError for an unknown recipe, unknown flags, wrong values and a missing data path. `own` are the flags
    of the command itself, which may be meant."""
    recipes.refuse_unknown(recipe)
    refuse_flags(command, recipe, flags, own)
    if recipe in recipes.names() and command in OPENS_DATA and launch.detect(os.environ) is None:
        _refuse_missing_data(flags)  # among ranks, one that ends this early would leave the others waiting


def refuse_command(command: str, known: Collection[str]) -> None:
    """Raise UsageError for an unknown command."""
    if command in known:
        return
    near = difflib.get_close_matches(command, known, n=1)
    meant = f"`sightline train {command}`" if command in recipes.names() else f"'{near[0]}'" if near else ""
    hint = f"; did you mean {meant}? Known" if meant else "; known"
    raise UsageError(f"unknown command '{command}'{hint}: {', '.join(known)}")


def refuse_flags(command: str, recipe: str, flags: Sequence[str], own: Collection[str] = ()) -> None:
    """Raise UsageError for flags that a recipe does not have, and for values that they cannot have."""
    if not (known := flags_of(recipe)):
        return
    names = set(_spellings(known))
    if flags and not flags[0].startswith("-"):
        raise UsageError(f"unexpected '{flags[0]}' after {recipe}; flags come next, e.g. --data.path {flags[0]}")
    for flag in flags:
        name = flag.partition("=")[0].replace("_", "-")
        if not name.startswith("--") or name in names or name in ("--", "--help"):
            continue
        near = " or ".join(nearest(name, known, own))
        hint = f" did you mean {near}?" if near else ""
        more = f"; `sightline {command} --help` shows those of {command}" if command != "train" else ""
        raise UsageError(
            f"unknown flag {name} of {command} {recipe};{hint} `sightline train {recipe} --help` shows the usual ones, "
            f"--help-all every one{more}"
        )
    several = _all_values(flags)
    _refuse_words_of_switches(several, known)
    for name, value in named(flags).items():
        if name not in known:
            continue
        flag, declared = f"--{name.replace('_', '-')}", known[name]
        if declared.kind.startswith("tuple["):
            _refuse_values(flag, several[name], declared.kind.removeprefix("tuple[").removesuffix("]").split(", "))
        else:
            _refuse_value(flag, value, declared)


def _all_values(flags: Sequence[str]) -> dict[str, list[str]]:
    """Return what flags set, as "part.field" -> all words up to the next flag, of the last one of that name."""
    found: dict[str, list[str]] = {}
    words: list[str] = []
    for flag in flags:
        if flag.startswith("--"):
            key, equals, value = flag.removeprefix("--").partition("=")
            words = found[key.replace("-", "_")] = [value] if equals else []
        else:
            words.append(flag)
    return found


def _refuse_words_of_switches(given: Mapping[str, list[str]], known: Fields) -> None:
    """Raise UsageError for a switch with a word after it, such as `true`; the parser would not name the switch."""
    for name, flag in known.items():
        part, _, field = name.partition(".")
        if flag.is_switch and (given.get(name) or given.get(f"{part}.no_{field}")):
            on, off = (f"--{part}.{each}".replace("_", "-") for each in (field, f"no_{field}"))
            raise UsageError(f"{on} is a switch: write it alone, or {off}")


def _refuse_values(flag: str, values: Sequence[str], kinds: Sequence[str]) -> None:
    """Raise UsageError for words that a tuple of these types cannot hold; "..." as the last one: any number of them."""
    make, expected = NUMBERS.get(kinds[0], (str, "a word"))
    many = expected.partition(" ")[2] + "s"
    try:
        for value in values:
            make(value)
        is_right = kinds[-1] == "..." or len(values) == len(kinds)
    except ValueError:
        is_right = False
    if not is_right:
        given = f"is '{' '.join(values)}'" if values else "needs values"
        count = "" if kinds[-1] == "..." else f"{len(kinds)} "
        raise UsageError(f"{flag} {given}, expected {count}{many} with spaces between them")


def _refuse_value(flag: str, value: str, declared: Flag) -> None:
    """Raise UsageError for a word that is not one of the choices, or not a number; the parser checks other values."""
    make, expected = NUMBERS.get(declared.kind, (str, ""))
    if declared.choices:
        near = difflib.get_close_matches(value, declared.choices, n=1)
        expected = f"one of {', '.join(declared.choices)}" + (f"; did you mean {near[0]}?" if near else "")
    try:
        make(value)
        is_right = not declared.choices or value in declared.choices
    except ValueError:
        is_right = False
    if not is_right:
        given = "needs a value" if not value or value.startswith("--") else f"is '{value}'"
        raise UsageError(f"{flag} {given}, expected {expected}")


def nearest(flag: str, known: Fields, own: Collection[str] = ()) -> list[str]:
    """Return the long flags whose last word is most like that of `flag`: --bath-size is near --batch-size. `own` are
    the flags of a command, which have one word."""
    names = list(_spellings(known))
    aliases = {short: long for short, long in ALIASES.items() if long in names} | {each: each for each in own}
    if (meant := MEANT.get(flag)) in (*aliases, *names):
        return [str(meant)]
    if flag in aliases:
        return [aliases[flag]]
    if (dotted := f"--{flag[2:].replace('-', '.', 1)}") in names:  # --data-path
        return [dotted]
    if of_part := [name for name in names if name.startswith(f"{flag}.")]:  # --model resnet18
        return of_part[:1]
    part, _, word = flag.removeprefix("--").rpartition(".")
    scores: dict[str, float] = {}
    for typed, long in (*aliases.items(), *zip(names, names, strict=True)):
        its_part, _, other = typed.removeprefix("--").rpartition(".")
        ratios = [_likeness(word, other), *(0.85 * _likeness(word, piece) for piece in other.split("-"))]
        scores[long] = max(scores.get(long, 0), max(ratios) + (0.1 * _ratio(part, its_part) if part else 0))
    near = [name for name in sorted(scores, key=lambda name: -scores[name]) if scores[name] >= NEAR]
    first = aliases.get(f"--{word.partition('-')[0]}")  # --data-dir
    return [name for name in near if scores[name] > scores[near[0]] - 0.1][:SHOWN] or ([first] if first else [])


def _spellings(known: Fields) -> Iterator[str]:
    """Yield every flag of these fields, a switch also as --part.no-field."""
    for name, flag in known.items():
        part, _, field = name.replace("_", "-").partition(".")
        yield f"--{part}.{field}"
        if flag.is_switch:
            yield f"--{part}.no-{field}"


def _likeness(word: str, other: str) -> float:
    """Return the ratio of two words; 0 for a short one that begins otherwise and is not very near: count is not out."""
    ratio = _ratio(word, other)
    return ratio if ratio >= SURE or len(other) > SHORT or word[:1] == other[:1] else 0


def _ratio(word: str, other: str) -> float:
    return difflib.SequenceMatcher(None, word, other, autojunk=False).ratio()


def _refuse_missing_data(flags: Sequence[str]) -> None:
    path = named(flags).get("data.path")
    if not path or path.startswith("synthetic:"):
        return
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(
            f"--data.path '{path}' does not exist; give the folder of your data, or draw some with `sightline prepare "
            f"shapes --out DIR`"
        ) from None
    except (OSError, ValueError) as error:  # what opens the data says more
        if isinstance(error, OSError) and error.errno == errno.ELOOP:
            raise UsageError(
                f"--data.path '{path}' is a link that leads to itself; give the folder of your data"
            ) from None
