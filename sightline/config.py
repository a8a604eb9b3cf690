"""Recipe and Run, and how they flow: recipe function, then YAML, then flags, then frozen objects, then config.yaml.

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
from typing import Annotated, Any, Literal

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
from sightline.train.config import TrainConfig as TrainConfig
from sightline.train.optimizers import OptimizerConfig
from sightline.train.schedules import ScheduleConfig

RAISES = contextvars.ContextVar("RAISES", default=False)
"""Whether flags that cannot be parsed are a UsageError, as Python users expect; else tyro says so and exits."""
RULES = ("\u256d", "\u2500", "---")  # beginnings of the lines that tyro draws around and between parts of an error


@dataclass(frozen=True)
class Run:
    """The place and the way of a run; nothing here is compared on resume."""

    out: str = ""
    """Run folder; default runs/RECIPE."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, xpu, hpu, mps, npu."""
    devices: int = 0
    """Local ranks, one device each, that train, evaluate, predict and benchmark start; 0: those a launcher started."""
    threads: int = 0
    """CPU threads of the training process; 0 leaves torch's choice. Equal bits need equal threads."""
    max_cpus: int = 0
    """Bind each rank and its loader processes to the first N CPUs it may use (all ranks of a host to the same); torch
    takes no more threads than these. 0 is off."""
    affinity: Literal[
        "disabled", "socket", "single", "single_unique", "socket_unique_interleaved", "socket_unique_continuous"
    ] = "disabled"
    """Bind each rank and its loader processes to CPUs beside its device. socket: all of that socket; single: its first
    one; single_unique: one that no other rank has; socket_unique: an even share of the socket's cores, every so many of
    them (interleaved) or neighbours (continuous). torch takes no more threads than these."""
    workers: int = -1
    """Loader processes per rank; 0 loads in the training process, -1 chooses from the cores."""
    prefetch: int = 3
    """Batches prepared ahead."""
    device_prefetch: bool = True
    """Copy, and decode, the next batch on a stream of its own while the step runs; batches are the same without."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile of forward, loss and backward. auto: on CUDA where it pays: the run starts without, times 30 steps,
    and compiles if enough is left; with --train.deterministic if it has 10,000 steps. docs/startup.md."""
    kernels: Literal["auto", "off"] = "auto"
    """Our own kernels where they apply, which is on CUDA only; off: plain torch, equal within rounding."""
    graph: Literal["auto", "on", "off"] = "auto"
    """The whole step as one CUDA graph; auto is on for one CUDA device."""
    bucket_mb: int = 25
    """Several ranks: MiB of gradients that are exchanged at once, while those of earlier layers are still computed. The
    default is torch's, which sends a first 1 MiB early; with others the first is as large as the rest."""
    reduce: Literal["flat", "hierarchical"] = "flat"
    """Several ranks: flat: the backend's sum of gradients over all; hierarchical: within each host, then between hosts,
    then handed out within each, for hosts whose ranks are better connected than the hosts are."""
    warmup_steps: int = 0
    """Dummy steps on the first batch before the run, so that none of the run's own steps compiles or allocates; all
    they change is put back."""
    channels_last: bool = True
    """Memory format of images and weights; faster for convolutions almost everywhere."""
    log_every_steps: int = 10
    """Steps between log lines; each line costs one synchronisation with the device."""
    checkpoint_initial: bool = False
    """Also save before the first step."""
    checkpoint_every_epochs: int = 1
    """Epochs between checkpoints; the last epoch, and one that scored best so far, are always saved."""
    checkpoint_every_steps: int = 0
    """Steps between checkpoints within an epoch, besides those when epochs end."""
    save_in_background: bool = True
    """Write checkpoints while training continues, from a copy that takes as much host memory on rank 0; off: training
    waits for the disk. What a run ends with is always waited for."""
    keep: int = 2
    """Newest checkpoints kept; the best one is kept besides."""
    resume: str = "auto"
    """auto: resume where the run folder stands; never: refuse a folder that holds checkpoints; PATH: resume from it."""
    override: bool = False
    """Resume although the recipe or the data changed; the model must still fit."""
    on_nan: Literal["stop", "skip", "rewind"] = "stop"
    """A step that is not finite: stop with exit 5; skip it; rewind to the last checkpoint and skip it this time."""
    max_bad_steps: int = 20
    """on_nan skip, rewind: how many such steps end the run after all."""
    tensorboard: bool = False
    """Write TensorBoard events with hparams into the run folder; needs `pip install sightline[tensorboard]`."""
    tensorboard_every_steps: int = 0
    """tensorboard: steps between points of training, a multiple of --run.log-every-steps; 0: every log line."""
    benchmark_log: str = ""
    """Folder for metric.log (JSON lines) and benchmark_run.log, as the TensorFlow benchmark logger writes them."""
    test_id: str = ""
    """benchmark_log: what this run is called in benchmark_run.log."""
    report: Literal["auto", "off"] = "auto"
    """auto: draw samples and predictions, and write report.html at the end and every minute; off: none of these."""
    profile: str = ""
    """FIRST,LAST: trace exactly these optimizer steps, counted from 1 as in the log, e.g. 5,8 for four; writes profile/
    in the run folder."""
    progress: Literal["auto", "live", "plain", "off"] = "auto"
    """Display on the terminal; auto is live on a terminal and plain lines elsewhere."""
    rank_output: Literal["main", "all"] = "main"
    """Several ranks: whose lines the terminal shows, all of them with [rank N] in front. Each has a rank_N.log too."""
    rank_logs: str = ""
    """Folder for rank_N.log of every rank, the first too; default: the run folder, for all ranks but the first."""
    timeout_s: int = 300
    """Seconds after which a loader worker that begins no sample, or one of several ranks that does no step, counts as
    hung: its stack is reported (of ranks in rank_N.log), exit 8. Before the first one it is ten minutes."""

    def __post_init__(self) -> None:
        least_of = {"prefetch": 1, "log_every_steps": 1, "checkpoint_every_epochs": 1, "checkpoint_every_steps": 0}
        least_of |= {"keep": 1, "max_cpus": 0, "warmup_steps": 0, "devices": 0, "timeout_s": 1}
        least_of |= {"workers": -1, "threads": 0, "max_bad_steps": 1}
        for name, least in least_of.items():
            if getattr(self, name) < least:
                raise UsageError(f"run.{name}={getattr(self, name)} must be at least {least}")
        if self.max_cpus and self.affinity != "disabled":
            raise UsageError(
                f"run.max_cpus={self.max_cpus} and run.affinity={self.affinity} both choose CPUs; leave one of them out"
            )
        if self.tensorboard_every_steps < 0 or self.tensorboard_every_steps % self.log_every_steps:
            raise UsageError(
                f"run.tensorboard_every_steps={self.tensorboard_every_steps} must be a multiple of "
                f"run.log_every_steps={self.log_every_steps}, whose lines have the numbers; 0 takes every line"
            )
        if self.test_id and not self.benchmark_log:
            raise UsageError(f"run.test_id='{self.test_id}' goes into benchmark_run.log; add --run.benchmark-log DIR")
        if self.bucket_mb < 1:
            raise UsageError(f"run.bucket_mb={self.bucket_mb} must be at least 1; torch's default is 25")


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the result: hashed, compared on resume."""

    name: tyro.conf.Suppress[str]
    model: ModelConfig
    data: DataConfig
    task: TaskConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    train: TrainConfig


@dataclass(frozen=True)
class _CommandLine:
    recipe: Annotated[Recipe, tyro.conf.arg(name="")]
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
        default=_CommandLine(recipe, run),
        config=(tyro.conf.AvoidSubcommands,),
        args=list(flags),
        prog=f"sightline train {name}",
        description=recipes.find(name).__doc__ if name in recipes.names() or name.endswith(".py") else None,
    )
    if not RAISES.get():
        parsed = parse()
        return parsed.recipe, parsed.run
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            parsed = parse()
    except SystemExit:
        raise UsageError(_first_of_box(said.getvalue()) or "flags that print help are for the command line") from None
    return parsed.recipe, parsed.run


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
