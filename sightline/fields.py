"""The flags of a recipe, read from its source and the sources of its parts: importing those would import torch.

Help and refusals use it before anything slow is imported; config.py parses the flags.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sightline import recipes

PACKAGE = Path(__file__).parent


@dataclass(frozen=True)
class Flag:
    """A field of a recipe or of Run."""

    default: str  # as in the source
    text: str
    kind: str  # the annotation, e.g. int
    choices: tuple[str, ...]  # of Literal[...]

    @property
    def is_switch(self) -> bool:
        """True if it also has --part.no-field."""
        return self.kind == "bool"


Fields = dict[str, Flag]


def flags_of(recipe: str) -> Fields:
    """Return "part.field" -> Flag of a recipe and of Run; empty if a user's own recipe cannot be read this way."""
    return _flags_in(Path(recipe)) if recipe.endswith(".py") else _flags_of_ours(recipe)


def data_of(recipe: str) -> tuple[str, dict[str, str]]:
    """Return the class of a recipe's data and the plain values of its fields as texts; "" if it cannot be read."""
    return _data_in(Path(recipe)) if recipe.endswith(".py") else _data_of_ours(recipe)


@functools.cache
def _flags_of_ours(name: str) -> Fields:
    return _flags_in(recipes.FOLDER / f"{name}.py")


@functools.cache
def _data_of_ours(name: str) -> tuple[str, dict[str, str]]:
    return _data_in(recipes.FOLDER / f"{name}.py")


def _flags_in(path: Path) -> Fields:
    try:
        parts = {**_parts_of(_read(path)), "run": _fields_of(_module("sightline.config"), "Run")}
    except (LookupError, OSError, SyntaxError, ValueError):
        return {}
    return {f"{part}.{field}": flag for part, fields in parts.items() for field, flag in fields.items()}


def _data_in(path: Path) -> tuple[str, dict[str, str]]:
    values = {}
    for name, flag in _flags_in(path).items():
        part, _, field = name.partition(".")
        with contextlib.suppress(ValueError, SyntaxError):
            if part == "data":
                values[field] = str(ast.literal_eval(flag.default))
    return (_class_of(_read(path), "data"), values) if values else ("", {})


def _class_of(source: _Source, part: str) -> str:
    """Return the name of the class of a part, which a base recipe may choose."""
    made, base = _made(source)
    given = next((each.value for each in made.keywords if each.arg == part), None)
    if given is None or _call(given).args:  # that of the base, or replace(base.data, ...)
        return _class_of(base, part) if base else ""
    return ast.unparse(_call(given).func)


def named(flags: Sequence[str]) -> dict[str, str]:
    """Return what flags set, as "part.field" -> the text of the last one."""
    found = {}
    for flag, after in itertools.pairwise([*flags, ""]):
        if flag.startswith("--"):
            key, equals, value = flag.removeprefix("--").partition("=")
            found[key.replace("-", "_")] = value if equals else after
    return found


class _Source:
    """The syntax tree of one file: what it defines and what it imports by name."""

    def __init__(self, tree: ast.Module):
        self.defined = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        self.imported: dict[str, str] = {}
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and not node.level:
                self.imported |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}


def _read(path: Path) -> _Source:
    return _parsed(path.read_text(encoding="utf-8"))


@functools.cache
def _parsed(text: str) -> _Source:
    """Parse once per text: a start asks for the flags of the user's own recipe three times."""
    return _Source(ast.parse(text))


@functools.cache
def _module(name: str) -> _Source:
    """Read a module of this package. Raises LookupError for others: finding those may import their packages."""
    first, *rest = name.split(".")
    if first != "sightline":
        raise LookupError(name)
    path = PACKAGE.joinpath(*rest)
    return _read(path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))


def _parts_of(source: _Source) -> dict[str, Fields]:
    """Return the fields of every part of `return Recipe(part=Class(...))`, or of `replace(base, part=...)`."""
    made, base = _made(source)
    parts = _parts_of(base) if base else {}
    for keyword in made.keywords:
        if keyword.arg is None:  # Recipe(**parts)
            raise LookupError("**")
        if keyword.arg != "name":
            part = _call(keyword.value)
            fields = parts[keyword.arg] if part.args else _fields_of(source, ast.unparse(part.func))
            given = {each.arg or "**": ast.unparse(each.value) for each in part.keywords}
            parts[keyword.arg] = fields | {name: replace(fields[name], default=text) for name, text in given.items()}
    return parts


def _made(source: _Source) -> tuple[ast.Call, _Source | None]:
    """Return the call that makes a recipe, and the source of the recipe that it changes, if it is `replace(base, ...)`
    after `base = other_recipe.recipe()`."""
    function = source.defined["recipe"]
    made = _call(next((node.value for node in function.body if isinstance(node, ast.Return)), None))
    if not made.args:
        return made, None
    names = {
        ast.unparse(target): each.value
        for each in function.body
        if isinstance(each, ast.Assign)
        for target in each.targets
    }
    other = ast.unparse(_call(names[ast.unparse(made.args[0])]).func).removesuffix(".recipe")
    return made, _module(source.imported[other])


def _call(node: ast.expr | None) -> ast.Call:
    if not isinstance(node, ast.Call):
        raise LookupError("not a call")
    return node


@functools.cache
def _fields_of(source: _Source, name: str) -> Fields:
    """Return the fields of a dataclass and of the classes it inherits from."""
    if name in source.imported:
        module, _, name = source.imported[name].rpartition(".")
        if module == "abc":
            return {}
        return _fields_of(_module(module), name)
    found: Fields = {}
    node = source.defined[name]
    if not isinstance(node, ast.ClassDef):
        raise LookupError(name)
    for base in reversed(node.bases):
        found |= _fields_of(source, ast.unparse(base))
    if not any("dataclass" in ast.unparse(each) for each in node.decorator_list):
        return found
    for field, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            kind = ast.unparse(_without_rules(field.annotation))
            found[field.target.id] = Flag(_default(field.value), _text(after), kind, _choices(kind))
    return found


def _without_rules(annotation: ast.expr) -> ast.expr:
    """Return the type of Annotated[type, rules]."""
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Annotated":
        return annotation.slice.elts[0] if isinstance(annotation.slice, ast.Tuple) else annotation.slice
    return annotation


def _choices(kind: str) -> tuple[str, ...]:
    """Return the words of Literal['a', 'b']."""
    if not kind.startswith("Literal["):
        return ()
    values = ast.literal_eval(f"({kind.removeprefix('Literal[').removesuffix(']')},)")
    return tuple(map(str, values))


def _default(value: ast.expr | None) -> str:
    """Return a default as it is written, without the mark not_compared()."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) in ("undecisive", "not_compared"):
        value = value.args[0]
    return ast.unparse(value) if value else ""


def _text(node: ast.stmt | None) -> str:
    """Return the string under a field as one line."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(node.value.value.split())
    return ""
