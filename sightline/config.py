"""How Recipe and Run flow: recipe function, then YAML, then flags, then frozen objects, then config.yaml.

The only file that knows tyro; files/plain_yaml.py reads YAML.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import difflib
import functools
import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
import yaml

from sightline import recipes
from sightline.data import found
from sightline.errors import BadCheckpoint, SightlineError, UsageError
from sightline.fields import named
from sightline.files import plain_yaml
from sightline.files.plain_yaml import read_yaml
from sightline.files.typed_json import hints_of, short, typed
from sightline.parts import DataConfig, ModelConfig, TaskConfig
from sightline.recipe.recipe import Recipe as Recipe
from sightline.recipe.recipe import Run as Run
from sightline.train.config import TrainConfig as TrainConfig
from sightline.train.optimizers import OptimizerConfig
from sightline.train.schedules import ScheduleConfig

RAISES = contextvars.ContextVar("RAISES", default=False)
"""Whether flags that cannot be parsed are a UsageError, as Python users expect; else tyro says so and exits."""
RULES = ("\u256d", "\u2500", "---")  # beginnings of the lines that tyro draws around and between parts of an error


@dataclass(frozen=True)
class _Shown:
    """The parts of a Recipe for tyro, which shows no flag for its name."""

    name: tyro.conf.Suppress[str]
    model: ModelConfig
    data: DataConfig
    task: TaskConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    train: TrainConfig


@dataclass(frozen=True)
class _CommandLine:
    recipe: Annotated[_Shown, tyro.conf.arg(name="")]
    run: Run


def load(
    name: str, flags: Sequence[str] = (), config: Path | None = None, say: Callable[[str], None] = lambda _: None
) -> tuple[Recipe, Run]:
    """Load the recipe `name`, changed by a YAML file and then by flags; say which fields of the data follow others."""
    default = untouched(name)
    stored = _read_yaml(config, default) if config else {}
    recipe, run = _parse(name, default, stored, [*flags, *_fields_of_data(name, flags, config)])
    data: Any = recipe.data
    typed = {key.removeprefix("data.") for key in (*stored, *named(flags)) if key.startswith("data.")}
    following, of_model = data.following(default.data, typed), recipe.model.data_fields()
    if sizes := ", ".join(f"{field} {value}" for field, value in following.items() if field not in of_model):
        say(f"data: {sizes}, in proportion to the size that was typed")
    fields = {field: value for field, value in {**following, **of_model}.items() if field not in typed}
    return (dataclasses.replace(recipe, data=dataclasses.replace(data, **fields)) if fields else recipe), run


def changed(recipe: Recipe, run: Run, flags: Sequence[str]) -> tuple[Recipe, Run]:
    """Return objects that were built in Python, changed by flags."""
    return _parse(recipe.name, recipe, {}, flags, run)


def _fields_of_data(name: str, flags: Sequence[str], config: Path | None) -> list[str]:
    """Return flags for what the data decide and nobody typed. What cannot be opened is reported by who needs it."""
    try:
        return found.of_recipe(name, flags, config, wants_line=False).flags
    except SightlineError:
        return []


def untouched(name: str) -> Recipe:
    """Return the recipe `name` as it is for a user who types nothing: its own bf16 may fall back to fp32."""
    recipe: Recipe = recipes.find(name).recipe()
    if recipe.train.precision != "bf16":
        return recipe
    return dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, precision="bf16_or_fp32"))


def _parse(
    name: str, default: Recipe, stored: Mapping[str, Any], flags: Sequence[str], run: Run | None = None
) -> tuple[Recipe, Run]:
    """Build objects from a recipe, values of a file ("part.field" -> value), and flags. Only flags are parsed: no text
    of a file is ever read as one."""
    recipe, run = _holding(default, {**_resets(default, stored), **stored, **_resets(default, named(flags))}, run)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            recipe, run = _parse_named(recipe, run, flags)
    except (SystemExit, TypeError, ValueError):  # the whole parser words the error, or shows the help
        recipe, run = _parse_whole(name, recipe, run, flags)
    recipe.model.refuse_unknown()
    return recipe, run


def _parse_whole(name: str, recipe: Recipe, run: Run, flags: Sequence[str]) -> tuple[Recipe, Run]:
    parse = functools.partial(
        tyro.cli,
        _CommandLine,
        default=_CommandLine(_Shown(**vars(recipe)), run),
        config=(tyro.conf.AvoidSubcommands,),
        args=list(flags),
        prog=f"sightline train {name}",
        description=recipes.find(name).__doc__ if name in recipes.names() or name.endswith(".py") else None,
    )
    if not RAISES.get():
        parsed = parse()
        return Recipe(**vars(parsed.recipe)), parsed.run
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            parsed = parse()
    except SystemExit:
        raise UsageError(_first_of_box(said.getvalue()) or "flags that print help are for the command line") from None
    return Recipe(**vars(parsed.recipe)), parsed.run


def _first_of_box(text: str) -> str:
    """Return the first part of what tyro says about an error, within rules and below a title; "" if it is help."""
    lines = [line.strip("\u2502| ") for line in text.splitlines()]
    rules = [at for at, line in enumerate(lines) if line.startswith(RULES)]
    return " ".join(lines[rules[0] + 1 : rules[1]]) if len(rules) > 1 and rules[0] <= 1 else ""


def print_flags(name: str, part: str = "") -> None:
    """Print every flag of a recipe, or those of one part, with their texts and defaults."""
    recipe = recipes.find(name).recipe()
    if not part:
        _parse(name, recipe, {}, ["--help"])  # exits
    shown = {**_parts(recipe), "run": Run()}[part]
    only = dataclasses.make_dataclass("only", [(part, type(shown))])
    markers = (tyro.conf.AvoidSubcommands,)
    tyro.cli(only, default=only(shown), config=markers, args=["--help"], prog=f"sightline train {name}")


def _parse_named(recipe: Recipe, run: Run, flags: Sequence[str]) -> tuple[Recipe, Run]:
    """Build what the whole parser builds, in a tenth of its time, with a parser of only the fields that flags name.
    Raise ValueError for flags of anything else. Every part is built again, which checks it."""
    parts = {**_parts(recipe), "run": run}
    asked = {".".join(key.split(".")[:2]).replace(".no_", ".") for key in named(flags)}
    fields = {
        name: tuple(field.name for field in dataclasses.fields(part) if field.init and f"{name}.{field.name}" in asked)
        for name, part in parts.items()
    }
    if sum(map(len, fields.values())) < len(asked):
        raise ValueError(f"some of these are not fields: {sorted(asked)}")
    values: dict[str, dict[str, Any]] = {name: {} for name in parts}
    if flags:
        whole, kinds = _holders(tuple((name, type(part), fields[name]) for name, part in parts.items() if fields[name]))
        default = {name: kind(*(getattr(parts[name], f) for f in fields[name])) for name, kind in kinds.items()}
        markers = tyro.conf.AvoidSubcommands, tyro.conf.HelptextFromCommentsOff
        parsed = tyro.cli(whole, default=whole(**default), config=markers, args=list(flags))
        values |= {name: vars(part) for name, part in vars(parsed).items()}
    # In the order of the whole parser, so that the first of several errors is the same.
    built = {name: dataclasses.replace(part, **values[name]) for name, part in _parts(recipe).items()}
    return dataclasses.replace(recipe, **built), dataclasses.replace(run, **values["run"])


@functools.cache
def _holders(fields: tuple[tuple[str, type, tuple[str, ...]], ...]) -> tuple[type, dict[str, type]]:
    """Return a dataclass of parts, and these by name: dataclasses of only these fields, without a part's checks."""
    kinds = {}
    for name, part, names in fields:
        hints = hints_of(part, with_extras=True)
        kinds[name] = _plain_dataclass(part.__name__, [(field, hints[field]) for field in names])
    return _plain_dataclass("Named", list(kinds.items())), kinds


def _plain_dataclass(name: str, fields: list[tuple[str, Any]]) -> type:
    """Return a dataclass that holds values. tyro looks for no help in what calls itself built in, nor is there any."""
    return dataclasses.make_dataclass(
        name, fields, repr=False, eq=False, namespace={"__module__": "builtins", "__doc__": ""}
    )


def recipe_named_in(config: Path) -> str:
    """Return the recipe that a config file belongs to."""
    values = read_yaml(config)
    if "recipe" not in values:
        raise UsageError(f"{config} names no recipe; give one on the command line or write `recipe: NAME` in it")
    name = str(values["recipe"])
    if name not in recipes.names():  # never run code that a file names
        raise UsageError(
            f"{config} belongs to '{name}', which is not one of our recipes; if it is your own, give its path: "
            f"sightline train PATH/TO/{Path(name).stem}.py --config {config}"
        )
    return name


def from_json(values: Mapping[str, Any], name: str = "", flags: Sequence[str] = ()) -> tuple[Recipe, Run]:
    """Load the recipe stored in a checkpoint, changed by flags. Only our own names are resolved from a file; a user's
    recipe is named by the user."""
    stored = values.get("recipe")
    if not isinstance(stored, str):
        raise BadCheckpoint(f"the checkpoint's recipe is called {short(stored)}, expected a name; take another one")
    if not name and stored not in recipes.names():
        raise UsageError(f"this run was made with your own recipe '{stored}'; add --recipe PATH/TO/{stored}.py")
    default = recipes.find(name or stored).recipe()
    # Only what a recipe is made of: a checkpoint must not say where things are written.
    parts = {part.name: values[part.name] for part in dataclasses.fields(Recipe)[1:] if part.name in values}
    with _blaming_the_checkpoint():
        known = _typed_fields(parts, _parts(default), "the checkpoint's recipe")
    try:
        return _parse(name or stored, default, known, flags)
    except UsageError:
        with _blaming_the_checkpoint():  # where it cannot be used without the flags either
            for part in _parts(_holding(default, known)[0]).values():
                made = dataclasses.replace(part)
                if isinstance(made, ModelConfig):
                    made.refuse_unknown()
        raise


@contextlib.contextmanager
def _blaming_the_checkpoint() -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        raise BadCheckpoint(f"{error}; take another checkpoint, or the version that wrote this one") from error


def to_json(recipe: Recipe) -> dict[str, Any]:
    """Return plain values of every field, under the names that users type."""
    values: dict[str, Any] = {"recipe": recipe.name}
    for part in dataclasses.fields(recipe)[1:]:
        values[part.name] = _plain(getattr(recipe, part.name))
    return values


def dump(recipe: Recipe, run: Run) -> str:
    """Return the text of config.yaml; `load` of it gives the same objects."""
    return plain_yaml.dump({**to_json(recipe), "run": _plain(run)})


def at_absolute_paths(recipe: Recipe, run: Run) -> tuple[Recipe, Run]:
    """Return what a run stores, so that it finds its data and its folder from any directory. Fields that are compared
    on resume (model.weights, data.static) stay as they were typed."""
    places = {"out": run.out or f"runs/{recipe.name}", "benchmark_log": run.benchmark_log}
    places["rank_logs"] = run.rank_logs
    if run.resume not in ("auto", "never"):
        places["resume"] = run.resume
    absolute: dict[str, Any] = {name: os.path.abspath(path) for name, path in places.items() if path}
    data = recipe.data.at_absolute_path()
    return dataclasses.replace(recipe, data=data), dataclasses.replace(run, **absolute)


def diff(stored: Mapping[str, Any], recipe: Recipe) -> list[str]:
    """Return one line per field that decides the result and has changed since `stored` was written.

    A field that `stored` does not know was added by a later version; at its default it changes nothing.
    """
    before, after = dict(_leaves(stored)), dict(_leaves(to_json(recipe)))
    ignored = set()
    for part, field in _fields(recipe):
        key = f"{part.name}.{field.name}"
        is_new = key not in before and getattr(getattr(recipe, part.name), field.name) == field.default
        if is_new or not field.metadata.get("decides_result", True):
            ignored.add(key)
    return [
        f"{key[:80]}: {str(before.get(key, 'absent'))[:200]} -> {after.get(key, 'absent')}"
        for key in dict.fromkeys([*before, *after])
        if before.get(key) != after.get(key) and key not in ignored
    ]


def leaves(recipe: Recipe, run: Run) -> dict[str, Any]:
    """Return every field under its dotted name, e.g. for TensorBoard's hparams."""
    return dict(_leaves({**to_json(recipe), "run": _plain(run)}))


def to_yaml(documents: Sequence[Mapping[str, Any]]) -> str:
    """Format plain values as YAML, one document each."""
    return yaml.safe_dump_all(documents, sort_keys=False, explicit_start=True)


def _resets(recipe: Recipe, named: Mapping[str, Any]) -> dict[str, Any]:
    """Return values for fields that the named ones make obsolete."""
    resets: dict[str, Any] = {}
    for name, part in _parts(recipe).items():
        own = {key.removeprefix(f"{name}."): value for key, value in named.items() if key.startswith(f"{name}.")}
        implied = part.implied(own) if own and hasattr(part, "implied") else {}
        resets |= {f"{name}.{key}": value for key, value in implied.items()}
    return resets


def _parts(recipe: Recipe) -> dict[str, Any]:
    return {part.name: getattr(recipe, part.name) for part in dataclasses.fields(recipe)[1:]}


def _holding(default: Recipe, values: Mapping[str, Any], run: Run | None = None) -> tuple[Recipe, Run]:
    """Return copies with these values, unchecked: whether they fit together is decided after the flags."""
    parts = {}
    for name, part in {**_parts(default), "run": run or Run()}.items():
        parts[name] = object.__new__(type(part))
        for field in dataclasses.fields(part):
            value = values.get(f"{name}.{field.name}", getattr(part, field.name))
            object.__setattr__(parts[name], field.name, value)
    run = parts.pop("run")
    return dataclasses.replace(default, **parts), run


def _fields(recipe: Recipe) -> Iterator[tuple[dataclasses.Field[Any], dataclasses.Field[Any]]]:
    for part in dataclasses.fields(recipe)[1:]:
        for field in dataclasses.fields(getattr(recipe, part.name)):
            yield part, field


def _plain(part: Any) -> dict[str, Any]:
    values = {}
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        values[field.name] = list(value) if isinstance(value, tuple) else value
    return values


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _read_yaml(path: Path, recipe: Recipe) -> dict[str, Any]:
    values = read_yaml(path)
    values.pop("recipe", None)
    return _typed_fields(values, {**_parts(recipe), "run": Run()}, str(path))


def _typed_fields(values: Mapping[str, Any], parts: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the fields of these parts as "part.field" -> value, each as the type that its part declares."""
    known = {f"{name}.{field}": value for name, part in parts.items() for field, value in _plain(part).items()}
    found = {}
    for part, fields in values.items():
        if not isinstance(part, str) or not isinstance(fields, dict):
            raise UsageError(f"{where}: expected `{short(part)}` to hold fields, e.g. `train: {{epochs: 10}}`")
        for field, value in fields.items():
            key = f"{part}.{field}"
            if not isinstance(field, str) or key not in known:
                near = difflib.get_close_matches(key[:80], known, n=1)
                hint = f"; did you mean '{near[0]}'?" if near else ""
                raise UsageError(f"{where}: unknown key '{key[:80]}'{hint}")
            if isinstance(value, bool) and isinstance(known[key], str):
                value = "on" if value else "off"  # as YAML 1.1 reads these two words
            try:
                found[key] = typed(value, hints_of(type(parts[part]))[field], from_text=True)
            except ValueError as error:
                like = f"write it like its default, {known[key]!r}"
                raise UsageError(f"{where}: '{key}' is {short(value)}; {error}; {like}") from None
    return found
