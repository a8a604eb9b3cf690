"""A command's own options: a dataclass that is filled from words, with the grammar of flags.py.

    sightline prepare shapes --out DIR --only detection        sightline launch RECIPE --mpi.version 4 --data.path DIR

A dataclass checks its values itself. Flags of a recipe among the words are left to the recipe."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar, cast

from sightline import terminal
from sightline.errors import UsageError
from sightline.files.typed_json import hints_of
from sightline.recipe import help
from sightline.recipe.flags import Words, flag_of, spellings, value_of
from sightline.recipe.suggest import nearest_flags

T = TypeVar("T")
SHARED = ("RECIPE", "[--part.field VALUE ...]")  # words of the recipe, before and behind the options
FieldPath = tuple[str, ...]  # ("mpi", "networks")


@dataclass(frozen=True)
class Option:
    """A field of the options, or of a dataclass within them."""

    path: FieldPath
    hint: Any
    text: str
    default: Any  # MISSING of one that must be given


Options = Mapping[str, Option]  # by the name of the flag: mpi.networks, or networks of a flat command


def parse_options(kind: type[T], words: Sequence[str], prog: str) -> T:
    """Return a command's options; `prog` is the command, e.g. "sightline prepare shapes"."""
    known = _options(kind)
    _answer_help(kind, known, words, prog)
    values, rest = _read(known, words, shares_words=False)
    if rest:
        raise UsageError(f"{_not_an_option(rest[0], known, prog)} `{prog} --help` shows all")
    return _made(kind, known, values, prog)


def split_options(kind: type[T], words: Sequence[str], prog: str, flat: bool = False) -> tuple[T, list[str]]:
    """Return a command's options, and in their order the words that are not among them: a recipe and its flags. Flags
    of a nested dataclass begin with its name (--mpi.networks) unless the command is flat."""
    known = _options(kind, flat)
    _answer_help(kind, known, words, prog, SHARED)
    values, rest = _read(known, words, shares_words=True)
    return _made(kind, known, values, prog), rest


def _options(kind: type, flat: bool = False, before: FieldPath = (), defaults: Any = None) -> dict[str, Option]:
    """Return every option under its name; `defaults` is the object that a nested dataclass is changed from."""
    found: dict[str, Option] = {}
    hints, texts = hints_of(kind), help.texts_of(kind)
    for each in _fields(kind):
        hint, path = hints[each.name], (*before, each.name)
        default = getattr(defaults, each.name) if defaults is not None else _default(each)
        if is_dataclass(hint):
            found |= _options(cast(type, hint), flat, path, None if default is MISSING else default)
        else:
            found[each.name if flat else ".".join(path)] = Option(path, hint, texts.get(each.name, ""), default)
    return found


def _fields(kind: type) -> list[Field[Any]]:
    return [each for each in fields(kind) if each.init]


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _read(known: Options, words: Sequence[str], shares_words: bool) -> tuple[dict[FieldPath, Any], list[str]]:
    """Return what the options set, and the other words. Where a command shares its words with a recipe, one behind a
    switch may be the recipe."""
    hints = {name: option.hint for name, option in known.items()}
    spelled, left = spellings(hints), Words(words)
    values: dict[FieldPath, Any] = {}
    rest = []
    while left.left:
        word = left.next()
        flag, equals, text = word.partition("=")
        flag = flag.replace("_", "-")
        if flag in spelled:
            name, off = spelled[flag]
            behind = Words(()) if shares_words and hints[name] is bool else left
            values[known[name].path] = value_of(flag, off, hints[name], text if equals else None, behind)
        else:
            rest.append(word)
    return values, rest


def _made(kind: type[T], known: Options, values: Mapping[FieldPath, Any], prog: str) -> T:
    if needed := _needed(known, values):
        listed = " and ".join(filter(None, [", ".join(needed[:-1]), needed[-1]]))
        raise UsageError(f"{_command(prog)} needs {listed}; `{prog} --help` shows all")
    try:
        return cast(T, _filled(kind, values))
    except ValueError as error:
        raise UsageError(str(error)) from error


def _needed(known: Options, given: Collection[FieldPath] = ()) -> list[str]:
    """Return how the options are typed that have no default and are not given."""
    missing = {name: each for name, each in known.items() if each.default is MISSING and each.path not in given}
    return [f"{flag_of(name)} {help.taken(each.hint)}".rstrip() for name, each in missing.items()]


def _filled(kind: type, values: Mapping[FieldPath, Any], before: FieldPath = (), defaults: Any = None) -> Any:
    """Make a dataclass, its nested ones first, from values and from the object that holds its defaults."""
    own, hints = {}, hints_of(kind)
    for each in _fields(kind):
        path, hint = (*before, each.name), hints[each.name]
        if path in values:
            own[each.name] = values[path]
        elif is_dataclass(hint):
            default = getattr(defaults, each.name) if defaults is not None else _default(each)
            own[each.name] = _filled(cast(type, hint), values, path, None if default is MISSING else default)
    return kind(**own) if defaults is None else replace(defaults, **own)


def _command(prog: str) -> str:
    return prog.removeprefix("sightline ")


def _not_an_option(word: str, known: Options, prog: str) -> str:
    if not word.startswith("--") or word == "--":
        return f"unexpected '{word}'; every flag of {_command(prog)} begins with -- and has its value behind it;"
    flag = word.partition("=")[0].replace("_", "-")
    near = " or ".join(nearest_flags(flag, spellings({name: option.hint for name, option in known.items()})))
    return f"unknown flag {flag} of {_command(prog)};" + (f" did you mean {near}?" if near else "")


def _answer_help(
    kind: type, known: Options, words: Sequence[str], prog: str, shared: tuple[str, str] = ("", "")
) -> None:
    """Print the help and end the process, if it is asked for."""
    if any(word in help.HELP for word in words):
        terminal.say(_help(kind, known, prog, *shared))
        raise SystemExit(0)


def _help(kind: type, known: Options, prog: str, before: str = "", behind: str = "") -> str:
    """Return usage, what the command does, and its options; those of a nested dataclass below what that is."""
    usage = " ".join(filter(None, [f"usage: {prog}", before, *_needed(known), "[options]", behind]))
    lines = [help.wrapped(usage, "", "    "), "", help.wrapped(_first_paragraph(kind), "", "")]
    group: FieldPath | None = None
    for name, option in known.items():
        if option.path[:-1] != group:
            group = option.path[:-1]
            what = _first_paragraph(_kind_at(kind, group)).rstrip(".") if group else "options"
            lines += ["", help.wrapped(f"{what}:", "", "")]
        off = [flag_of(name, off=True)] if option.hint is bool else []
        is_needed = option.default is MISSING
        default, note = ("", "(required)") if is_needed else (help.as_typed(option.default), "")
        lines.append(help.entry([flag_of(name), *off], help.taken(option.hint), option.text, default, note))
    return "\n".join(lines)


def _kind_at(kind: type, path: FieldPath) -> type:
    for name in path:
        kind = hints_of(kind)[name]
    return kind


def _first_paragraph(kind: type) -> str:
    return " ".join((kind.__doc__ or "").split("\n\n")[0].split())
