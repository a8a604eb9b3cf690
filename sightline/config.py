"""Recipe and Run, and how they flow: recipe function, then YAML, then flags, then frozen objects, then config.yaml.

The only file that knows tyro and yaml.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import itertools
import math
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro
import yaml

from sightline import recipes
from sightline.errors import BadCheckpoint, UsageError
from sightline.parts import DataConfig, ModelConfig, Task, undecisive
from sightline.stored import short, typed
from sightline.train import optimizers, schedules
from sightline.train.optimizers import OptimizerConfig
from sightline.train.schedules import ScheduleConfig

MAX_YAML_BYTES = 1 << 16  # read in two seconds; a config file is a few kB
Options = TypeVar("Options")


@dataclass(frozen=True)
class TrainConfig:
    """How long, how much at once, and with which numbers."""

    epochs: int
    """How often every training sample is seen."""
    global_batch: int
    """Samples per optimizer update, over all devices and accumulation steps."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Autocast type; auto takes what the device does well and says which."""
    accumulation: int = 1
    """Parts a device's share of the batch is cut into, to save memory."""
    ema: float = 0.0
    """Decay of the moving average of weights; 0 is off. When on, the average is evaluated and is best."""
    ema_every_steps: int = 1
    """Steps between updates of the average."""
    ema_rule: Literal["plain", "torchvision"] = "plain"
    """plain: the decay is per update; torchvision: scaled by batch * ema_every_steps / epochs, copied in warm-up."""
    clip: float = 0.0
    """Largest gradient norm; 0 is off."""
    eval_every_epochs: int = 1
    """Epochs between evaluations; the last epoch is evaluated too, unless eval_at_end is off."""
    eval_from_epoch: int = 0
    """First evaluation after this many epochs, then every eval_every_epochs: 3 and 4 evaluate after epochs 3, 7, 11 and
    so on, and after the last. 0: the first one after eval_every_epochs."""
    eval_at_end: bool = True
    """Also evaluate when the run ends; off: only where eval_every_epochs says, which may be never."""
    eval_max_steps: int = 0
    """Most batches of an evaluation, for a quick look: the score of a part of the set is another score. 0: the whole
    set."""
    eval_shards: Literal["sharded", "full"] = "sharded"
    """Several ranks: sharded: each evaluates its part, counts are added up; full: each evaluates everything, those of
    rank 0 are reported and decide. With bn_eval local, full scores rank 0's own statistics, sharded a mixture."""
    target_score: float = undecisive(0.0)
    """The run is finished after an evaluation whose headline score reaches this, e.g. 0.759; 0 is off."""
    diverged_score: float = undecisive(0.0)
    """The run ends with exit 5 after an evaluation whose headline score is not above this, e.g. 0.002; 0 is off."""
    patience: int = undecisive(0)
    """The run is finished after this many planned evaluations in a row without a better headline score; 0 is off. The
    same command with a larger number goes on."""
    min_epochs: int = undecisive(0)
    """patience: epochs that a run has at least."""
    steps_per_epoch: int = 0
    """Most steps of an epoch; the schedule and evaluations count in these shorter epochs. 0: all samples once."""
    max_steps: int = undecisive(0)
    """The run is finished, evaluated and saved, at this step; the schedule stays that of all epochs. 0 is off. The
    same command with a larger number goes on."""
    last_batch: Literal["drop", "pad", "wrap"] = "drop"
    """What happens to samples that fill no batch: dropped, filled up from the epoch's start, or carried on into."""
    eval_autocast: bool = True
    """Evaluate in the training precision; off: in fp32."""
    repeats: int = 1
    """Repeated augmentation: how often a picture comes in an epoch of unchanged length, augmented anew each time."""
    bn_eval: Literal["averaged", "rank0", "local"] = "averaged"
    """Whose batch-norm statistics are evaluated and saved when there are several ranks."""
    bn_group: int = 0
    """Several ranks: how many share batch-norm statistics in training. 0 or 1: each has its own; N: ranks 0..N-1 and so
    on, N must divide the number of ranks; -1: all."""
    trainable: Literal["all", "head"] = "all"
    """head: only the model's last linear layer learns; batch-norm statistics of the rest still follow the data."""
    fp32_ops: tuple[str, ...] = ()
    """Modules kept in fp32 under autocast, by type or path, with wildcards: BatchNorm2d, fc, layer4.*; names of what is
    no module of the model (relu, mean) are told and left alone."""
    seed: int = 0
    """Every random number of the run is a function of this and of its place in the run."""
    deterministic: bool = False
    """Equal bits on CUDA too, at some cost in speed; on the CPU bits are always equal."""

    def __post_init__(self) -> None:
        for name in ("epochs", "global_batch", "accumulation", "eval_every_epochs", "ema_every_steps", "repeats"):
            if getattr(self, name) < 1:
                raise UsageError(f"train.{name}={getattr(self, name)} must be at least 1")
        for name in ("eval_from_epoch", "eval_max_steps", "steps_per_epoch", "max_steps", "patience", "min_epochs"):
            if getattr(self, name) < 0:
                raise UsageError(f"train.{name}={getattr(self, name)} must not be negative; 0 switches it off")
        if self.bn_group < -1:
            raise UsageError(
                f"train.bn_group={self.bn_group} must be -1 (all ranks), 0 (each its own) or a number of ranks"
            )
        for name in ("target_score", "diverged_score"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(
                    f"train.{name}={getattr(self, name)} must be in [0, 1]: a share, not per cent; 0 switches it off"
                )
        if self.target_score and self.diverged_score >= self.target_score:
            raise UsageError(
                f"train.diverged_score={self.diverged_score} must lie below train.target_score={self.target_score}"
            )
        if not 0 <= self.ema < 1:
            raise UsageError(f"train.ema={self.ema} must be in [0, 1); 0 switches it off, 0.999 is usual")
        if not 0 <= self.clip < math.inf:
            raise UsageError(f"train.clip={self.clip} must not be negative; 0 switches it off")
        if not 0 <= self.seed < 1 << 63:
            raise UsageError(f"train.seed={self.seed} must be in 0..2^63-1")

    @property
    def eval_precision(self) -> str:
        """What evaluation runs in."""
        return self.precision if self.eval_autocast else "fp32"

    def evaluates_after(self, epochs: int) -> bool:
        """Whether an evaluation follows when this many epochs are done."""
        is_due = epochs >= self.eval_from_epoch and (epochs - self.eval_from_epoch) % self.eval_every_epochs == 0
        return is_due or (self.eval_at_end and epochs == self.epochs)


@dataclass(frozen=True)
class Run:
    """Where and how a recipe is run; nothing here is compared on resume."""

    out: str = ""
    """Run folder; default runs/RECIPE."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, xpu, hpu, mps, npu."""
    devices: int = 0
    """Local ranks, one device each, that `train` and `evaluate` start by themselves; 0: those a launcher started."""
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
    """torch.compile of forward, loss and backward; auto is on for CUDA only."""
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
    """Memory format of pictures and weights; faster for convolutions almost everywhere."""
    log_every_steps: int = 10
    """Steps between log lines; each line costs one synchronisation with the device."""
    checkpoint_initial: bool = False
    """Also save before the first step."""
    checkpoint_every_epochs: int = 1
    """Epochs between checkpoints; the last epoch, and one that scored best so far, are always saved."""
    checkpoint_every_steps: int = 0
    """Steps between checkpoints within an epoch, besides those when epochs end."""
    save_in_background: bool = True
    """Write checkpoints while training goes on, from a copy that takes as much host memory on rank 0; off: training
    waits for the disk. What a run ends with is always waited for."""
    keep: int = 2
    """Newest checkpoints kept; the best one is kept besides."""
    resume: str = "auto"
    """auto: go on where the run folder stands; never: refuse a folder that holds checkpoints; PATH: go on from it."""
    override: bool = False
    """Resume although the recipe or the data changed; the model must still fit."""
    on_nan: Literal["stop", "skip", "rewind"] = "stop"
    """A step that is not finite: stop with exit 5; skip it; rewind to the last checkpoint and skip it this time."""
    max_bad_steps: int = 20
    """on_nan skip, rewind: how many such steps end the run after all."""
    tensorboard: bool = False
    """Write TensorBoard events with hparams into the run folder; needs `pip install sightline[tensorboard]`."""
    benchmark_log: str = ""
    """Folder for metric.log (JSON lines) and benchmark_run.log, as the TensorFlow benchmark logger writes them."""
    test_id: str = ""
    """benchmark_log: what this run is called in benchmark_run.log."""
    profile: str = ""
    """FIRST,LAST: trace exactly these optimizer steps, e.g. 5,8 for four; writes profile/ in the run folder."""
    progress: Literal["auto", "live", "plain", "off"] = "auto"
    """What the terminal shows; auto is live on a terminal and plain lines elsewhere."""
    rank_output: Literal["main", "all"] = "main"
    """Several ranks: whose lines the terminal shows, all of them with [rank N] in front. Each has a rank_N.log too."""
    timeout_s: int = 300
    """Several ranks: seconds without a step after which a rank counts as hung: stacks go to rank_N.log, exit 8. Before
    the first step it is ten minutes."""

    def __post_init__(self) -> None:
        least_of = {"prefetch": 1, "log_every_steps": 1, "checkpoint_every_epochs": 1, "checkpoint_every_steps": 0}
        least_of |= {"keep": 1, "max_cpus": 0, "warmup_steps": 0, "devices": 0, "timeout_s": 1}
        for name, least in least_of.items():
            if getattr(self, name) < least:
                raise UsageError(f"run.{name}={getattr(self, name)} must be at least {least}")
        if self.workers < -1 or self.threads < 0 or self.max_bad_steps < 1:
            raise UsageError("run.workers must be -1 or more, run.threads 0 or more, run.max_bad_steps 1 or more")
        if self.max_cpus and self.affinity != "disabled":
            raise UsageError(
                f"run.max_cpus={self.max_cpus} and run.affinity={self.affinity} both choose CPUs; leave one of them out"
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
    task: Task
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    train: TrainConfig


@dataclass(frozen=True)
class _CommandLine:
    recipe: Annotated[Recipe, tyro.conf.arg(name="")]
    run: Run


def load(name: str, flags: Sequence[str] = (), config: Path | None = None) -> tuple[Recipe, Run]:
    """The recipe `name`, changed by a YAML file and then by flags."""
    default = recipes.find(name).recipe()
    return _parse(name, default, _read_yaml(config, default) if config else {}, flags)


def _parse(name: str, default: Recipe, stored: Mapping[str, Any], flags: Sequence[str]) -> tuple[Recipe, Run]:
    """Objects out of a recipe, what a file stores ("part.field" -> value), and flags. Only flags are words to parse: no
    text of a file is ever read as one."""
    recipe, run = _holding(default, {**_resets(default, stored), **stored, **_resets(default, _named(flags))})
    parsed = tyro.cli(
        _CommandLine,
        default=_CommandLine(recipe, run),
        config=(tyro.conf.AvoidSubcommands,),
        args=list(flags),
        prog=f"sightline train {name}",
        description=recipes.find(name).__doc__,
    )
    return parsed.recipe, parsed.run


def recipe_named_in(config: Path) -> str:
    """The recipe that a config file says it belongs to."""
    values = _safe_load(config)
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
    """The recipe stored in a checkpoint, changed by flags. Only our own names are resolved from a file; a user's
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
                dataclasses.replace(part)
        raise


@contextlib.contextmanager
def _blaming_the_checkpoint() -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        raise BadCheckpoint(f"{error}; take another checkpoint, or the version that wrote this one") from error


def to_json(recipe: Recipe) -> dict[str, Any]:
    """Plain values of every field, under the names users type."""
    values: dict[str, Any] = {"recipe": recipe.name}
    for part in dataclasses.fields(recipe)[1:]:
        values[part.name] = _plain(getattr(recipe, part.name))
    return values


def dump(recipe: Recipe, run: Run) -> str:
    """The text of config.yaml; `load` of it gives the same objects."""
    return yaml.safe_dump({**to_json(recipe), "run": _plain(run)}, sort_keys=False)


def diff(stored: Mapping[str, Any], recipe: Recipe) -> list[str]:
    """One line per field that decides the result and has changed since `stored` was written.

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
    """Every field under its dotted name, e.g. for TensorBoard's hparams."""
    return dict(_leaves({**to_json(recipe), "run": _plain(run)}))


def parse_options(options: type[Options], flags: Sequence[str], prog: str) -> Options:
    """A command's own options, e.g. those of `prepare shapes`."""
    return tyro.cli(options, args=list(flags), prog=prog)


def split_options(options: type[Options], flags: Sequence[str], prog: str) -> tuple[Options, list[str]]:
    """A command's own options, and in their order the words that are none of them."""
    return tyro.cli(options, args=list(flags), prog=prog, return_unknown_args=True)


def to_yaml(documents: Sequence[Mapping[str, Any]]) -> str:
    """Plain values as YAML, one document each."""
    return yaml.safe_dump_all(documents, sort_keys=False, explicit_start=True)


def _resets(recipe: Recipe, named: Mapping[str, Any]) -> dict[str, Any]:
    """Values for fields that what is named makes obsolete.

    Those that the kind of optimizer or schedule named does not read go back to their defaults: switching needs one
    flag, not one per field of the kind that a recipe or a file had before. An explicit optimizer.lr disables lr_many.
    """
    resets: dict[str, Any] = {}
    for part, fields_of_kind in (("optimizer", optimizers.FIELDS_OF_KIND), ("schedule", schedules.FIELDS_OF_KIND)):
        if f"{part}.kind" in named:
            foreign = set().union(*fields_of_kind.values()) - fields_of_kind.get(named[f"{part}.kind"], set())
            fields = {f.name: f.default for f in dataclasses.fields(getattr(recipe, part))}
            resets |= {f"{part}.{name}": fields[name] for name in foreign}
    if "optimizer.lr" in named and "optimizer.lr_many" not in named:
        resets["optimizer.lr_many"] = 0.0
    return resets


def _named(flags: Sequence[str]) -> dict[str, str]:
    """What flags set, as "part.field" -> the text of the last one."""
    named = {}
    for flag, after in itertools.pairwise([*flags, ""]):
        if flag.startswith("--"):
            key, equals, value = flag.removeprefix("--").partition("=")
            named[key.replace("-", "_")] = value if equals else after
    return named


def _parts(recipe: Recipe) -> dict[str, Any]:
    return {part.name: getattr(recipe, part.name) for part in dataclasses.fields(recipe)[1:]}


def _holding(default: Recipe, values: Mapping[str, Any]) -> tuple[Recipe, Run]:
    """Copies that hold these values. Unchecked: whether they fit together is decided when flags have had their say."""
    parts = {}
    for name, part in {**_parts(default), "run": Run()}.items():
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


class _PlainLoader(yaml.SafeLoader):
    """YAML without anchors, aliases and merge keys: 500 bytes of these become gigabytes."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise yaml.composer.ComposerError(None, None, "anchors and aliases are not read", event.start_mark)
        return super().compose_node(parent, index)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(None, None, "merge keys are not read", key.start_mark)


def _safe_load(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_YAML_BYTES + 1)
        if len(data) > MAX_YAML_BYTES:
            raise UsageError(f"{path} is larger than {MAX_YAML_BYTES} bytes; a config file is a few kB")
        values = _PlainLoader(data.decode("utf-8")).get_single_data()
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:  # ValueError: no UTF-8, no such date
        raise UsageError(f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(values, dict):
        raise UsageError(f"{path} must hold `part: {{field: value}}` pairs, e.g. `train: {{epochs: 10}}`")
    return values


def _read_yaml(path: Path, recipe: Recipe) -> dict[str, Any]:
    values = _safe_load(path)
    values.pop("recipe", None)
    return _typed_fields(values, {**_parts(recipe), "run": Run()}, str(path))


def _typed_fields(values: Mapping[str, Any], parts: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of these parts as "part.field" -> value, each as the type that its part declares."""
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
                found[key] = typed(value, typing.get_type_hints(type(parts[part]))[field], from_text=True)
            except ValueError as error:
                like = f"write it like its default, {known[key]!r}"
                raise UsageError(f"{where}: '{key}' is {short(value)}; {error}; {like}") from None
    return found
