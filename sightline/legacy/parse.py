"""The flags of an original, parsed as it did: argparse with abbreviations, or absl with `--nox` and single dashes."""

from __future__ import annotations

import argparse
import difflib
import functools
import math
from collections.abc import Sequence
from typing import Any, NoReturn

from sightline.errors import UsageError
from sightline.legacy.table import Flag, Script

TRUE, FALSE = ("true", "t", "1"), ("false", "f", "0")
HELP = ("-h", "--help", "--helpfull", "--helpshort")


def wants_help(words: Sequence[str]) -> bool:
    """Return whether the command line asks for help."""
    return any(word in HELP for word in words)


def parse(script: Script, words: Sequence[str]) -> tuple[dict[str, Any], frozenset[str]]:
    """Return every flag's value by its key, and the keys that the command line names."""
    found = (_argparse if script.style == "argparse" else _absl)(script, words)
    for flag in script.flags:
        if flag.choices and flag.key in found and found[flag.key] not in flag.choices:
            raise UsageError(f"{flag.name} {found[flag.key]}: {script.name} knows {', '.join(flag.choices)}")
        if flag.least is not None and flag.key in found and found[flag.key] < flag.least:
            raise UsageError(f"{flag.name} {found[flag.key]}: expected {flag.least} or more")
    values = {flag.key: found.get(flag.key, flag.default) for flag in script.flags}
    return {**{name: found.get(name) for name in script.operands}, **values}, frozenset(found)


def unknown_flags(script: Script, words: Sequence[str]) -> list[str]:
    """Return the flags among these words that a script does not have, to tell scripts of one name apart."""
    try:
        parse(script, words)
    except UsageError:
        known = {name for flag in script.flags for name in flag.names}
        given = [
            word.partition("=")[0] for word in words if word.startswith("-") and word[1:2] not in ("", *"0123456789.")
        ]
        return [name for name in given if name not in known and name not in HELP]
    return []


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}; `sightline legacy {self.prog} --help` lists its flags")


def _argparse(script: Script, words: Sequence[str]) -> dict[str, Any]:
    parser = _Parser(script.name, add_help=False, argument_default=argparse.SUPPRESS)
    for flag in script.flags:
        if flag.kind == "switch":
            parser.add_argument(*flag.names, action="store_true", dest=flag.key)
        elif flag.kind == "ints":
            parser.add_argument(*flag.names, type=int, nargs="+", dest=flag.key)
        else:
            parser.add_argument(*flag.names, type=functools.partial(_value, flag), dest=flag.key)
    for name in script.operands:
        parser.add_argument(name)
    return vars(parser.parse_args(list(words)))


def _absl(script: Script, words: Sequence[str]) -> dict[str, Any]:
    by_name = {name.lstrip("-"): flag for flag in script.flags for name in flag.names}
    found: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, text = word.lstrip("-").partition("=")
        if not word.startswith("-") or not name:
            raise UsageError(f"{script.name}: '{word}' is not a flag; write --FLAG VALUE")
        is_off = name.startswith("no") and name not in by_name
        flag = by_name.get(name.removeprefix("no") if is_off else name)
        if flag is None or (is_off and (flag.kind != "bool" or equals)):
            near = difflib.get_close_matches(name, by_name, n=1)
            hint = f"; did you mean --{near[0]}?" if near else ""
            raise UsageError(
                f"{script.name} has no flag {word}{hint} `sightline legacy {script.name} --help` lists its flags"
            )
        if flag.kind == "bool":
            if not equals and not is_off and rest and rest[0].lower() in ("true", "false"):
                equals, text = "=", rest.pop(0)  # absl would drop the word and read `--x False` as true
            found[flag.key] = _value(flag, text) if equals else not is_off
            continue
        if not equals:
            if not rest:
                raise UsageError(f"{script.name}: {word} needs a value, and the line ends")
            text = rest.pop(0)
        found[flag.key] = _value(flag, text)
    return found


def _value(flag: Flag, text: str) -> Any:
    """Read a value as the flag's kind; an error names both."""
    try:
        if flag.kind == "int":
            return int(text)
        if flag.kind == "float":
            number = float(text)
            if not math.isfinite(number):
                raise ValueError
            return number
        if flag.kind == "bool":
            if text.lower() in TRUE:
                return True
            if text.lower() in FALSE:
                return False
            raise ValueError
    except ValueError:
        kind = {"int": "a whole number", "float": "a number", "bool": "true or false"}[flag.kind]
        raise UsageError(f"{flag.name} {text}: expected {kind}") from None
    return text
