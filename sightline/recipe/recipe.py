"""Recipe and Run: what a run is made of. Both are data; a part says what it does when it is asked to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from sightline.errors import UsageError
from sightline.recipe.part import AtLeast, Part

if TYPE_CHECKING:
    from sightline.parts import DataConfig, ModelConfig, TaskConfig
    from sightline.recipe.plan import Known
    from sightline.train.config import TrainConfig
    from sightline.train.optimizers import OptimizerConfig
    from sightline.train.schedules import ScheduleConfig

MEASURED = "measured on this device"  # why a value is what it is where `auto` was typed


@dataclass(frozen=True)
class Run(Part):
    """The place and the way of a run; nothing here is compared on resume."""

    out: str = ""
    """Run folder; default runs/RECIPE."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, xpu, hpu, mps, npu."""
    devices: Annotated[int, AtLeast(0)] = 0
    """Local ranks, one device each, that train, evaluate, predict and benchmark start; 0: those a launcher started."""
    threads: Annotated[int, AtLeast(0)] = 0
    """CPU threads of the training process; 0 leaves torch's choice. Equal bits need equal threads."""
    max_cpus: Annotated[int, AtLeast(0)] = 0
    """Bind each rank and its loader processes to the first N CPUs it may use (all ranks of a host to the same); torch
    takes no more threads than these. 0 is off."""
    affinity: Literal[
        "disabled", "socket", "single", "single_unique", "socket_unique_interleaved", "socket_unique_continuous"
    ] = "disabled"
    """Bind each rank and its loader processes to CPUs beside its device. socket: all of that socket; single: its first
    one; single_unique: one that no other rank has; socket_unique: an even share of the socket's cores, every so many of
    them (interleaved) or neighbours (continuous). torch takes no more threads than these."""
    workers: Annotated[int, AtLeast(-1)] = -1
    """Loader processes per rank; 0 loads in the training process, -1 chooses from the cores."""
    prefetch: Annotated[int, AtLeast(1)] = 3
    """Batches prepared ahead."""
    device_prefetch: bool = True
    """Copy, and decode, the next batch on a stream of its own while the step runs; batches are the same without."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile of forward, loss and backward. auto: on CUDA where it pays: the run starts without, times 30 steps,
    and compiles if enough is left; with --train.deterministic if it has 10,000 steps. docs/why/startup.md."""
    kernels: Literal["auto", "off"] = "auto"
    """Our own kernels where they apply, which is on CUDA only; off: plain torch, equal within rounding."""
    graph: Literal["auto", "on", "off"] = "auto"
    """The whole step as one CUDA graph; auto is on for one CUDA device."""
    bucket_mb: Annotated[int, AtLeast(1, "torch's default is 25")] = 25
    """Several ranks: MiB of gradients that are exchanged at once, while those of earlier layers are still computed. The
    default is torch's, which sends a first 1 MiB early; with others the first is as large as the rest."""
    reduce: Literal["flat", "hierarchical"] = "flat"
    """Several ranks: flat: the backend's sum of gradients over all; hierarchical: within each host, then between hosts,
    then handed out within each, for hosts whose ranks are better connected than the hosts are."""
    warmup_steps: Annotated[int, AtLeast(0)] = 0
    """Dummy steps on the first batch before the run, so that none of the run's own steps compiles or allocates; all
    they change is put back."""
    channels_last: bool = True
    """Memory format of images and weights; faster for convolutions almost everywhere."""
    log_every_steps: Annotated[int, AtLeast(1)] = 10
    """Steps between log lines; each line costs one synchronisation with the device."""
    checkpoint_initial: bool = False
    """Also save before the first step."""
    checkpoint_every_epochs: Annotated[int, AtLeast(1)] = 1
    """Epochs between checkpoints; the last epoch, and one that scored best so far, are always saved."""
    checkpoint_every_steps: Annotated[int, AtLeast(0)] = 0
    """Steps between checkpoints within an epoch, besides those when epochs end."""
    save_in_background: bool = True
    """Write checkpoints while training continues, from a copy that takes as much host memory on rank 0; off: training
    waits for the disk. What a run ends with is always waited for."""
    keep: Annotated[int, AtLeast(1)] = 2
    """Newest checkpoints kept; the best one is kept besides."""
    resume: str = "auto"
    """auto: resume where the run folder stands; never: refuse a folder that holds checkpoints; PATH: resume from it."""
    override: bool = False
    """Resume although the recipe or the data changed; the model must still fit."""
    on_nan: Literal["stop", "skip", "rewind"] = "stop"
    """A step that is not finite: stop with exit 5; skip it; rewind to the last checkpoint and skip it this time."""
    max_bad_steps: Annotated[int, AtLeast(1)] = 20
    """on_nan skip, rewind: how many such steps end the run after all."""
    track: tuple[str, ...] = ()
    """Trackers that show the run, one or several: mlflow, tensorboard, trackio, wandb, or a logger of another installed
    package. Addresses come from their own environment variables; docs/howto/trackers.md."""
    tensorboard: bool = False
    """The same as --run.track tensorboard: events with hparams in the run folder; needs `pip install
    sightline[tensorboard]`."""
    tensorboard_every_steps: Annotated[int, AtLeast(0)] = 0
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
    timeout_s: Annotated[int, AtLeast(1)] = 300
    """Seconds after which a loader worker that begins no sample, or one of several ranks that does no step, counts as
    hung: its stack is reported (of ranks in rank_N.log), exit 8. Before the first one it is ten minutes."""

    part = "run"

    @property
    def binds_cpus(self) -> bool:
        """Return whether the process binds itself, and with it those started later, to some CPUs."""
        return bool(self.max_cpus) or self.affinity != "disabled"

    def check(self) -> None:
        super().check()
        if self.max_cpus and self.affinity != "disabled":
            raise UsageError(
                f"run.max_cpus={self.max_cpus} and run.affinity={self.affinity} both choose CPUs; leave one of them out"
            )
        if self.tensorboard_every_steps % self.log_every_steps:
            raise UsageError(
                f"run.tensorboard_every_steps={self.tensorboard_every_steps} must be a multiple of "
                f"run.log_every_steps={self.log_every_steps}, whose lines have the numbers; 0 takes every line"
            )
        if self.test_id and not self.benchmark_log:
            raise UsageError(f"run.test_id='{self.test_id}' goes into benchmark_run.log; add --run.benchmark-log DIR")


PARTS = (
    "model",
    "data",
    "task",
    "optimizer",
    "schedule",
    "train",
)  # the order in which they are checked


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the result: hashed, compared on resume."""

    name: str
    model: ModelConfig
    data: DataConfig
    task: TaskConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    train: TrainConfig
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Where values come from that are not the recipe's own: {"optimizer.lr": "flag: --lr"}; those of the run too."""

    former: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """Values that this recipe had in earlier versions: a run that was started with them keeps them on resume."""
    plan: Callable[[Known], None] | None = field(default=None, compare=False, repr=False)
    """Decides values from the data and the machine (recipe/plan.py); None: the numbers hold for any."""
    chosen: Callable[[Known], tuple[str, str]] | None = field(default=None, compare=False, repr=False)
    """Says what the plan chose, at every start of a run: the network, and what becomes of the images."""
    resolved: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """The values that had these origins, so that one which a script replaces later counts as its own word."""

    undecided: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """The recipe's own values of what the plan decided."""

    @property
    def parts(self) -> dict[str, Any]:
        """The parts by name."""
        return {name: getattr(self, name) for name in PARTS}

    def is_own(self, name: str) -> bool:
        """Return whether a value is the recipe's own: nobody typed it, and nothing decided it."""
        return name not in self.origins

    def undone(self) -> Recipe:
        """Return the recipe before its plan, but for values that were replaced since."""
        parts = self.parts
        for name, value in self.undecided.items():
            part, _, key = name.partition(".")
            if getattr(parts[part], key, None) == self.resolved[name]:
                parts[part] = replace(parts[part], **{key: value})
        return replace(self, **parts)

    def decided(self, values: Mapping[str, Any], why: str) -> Recipe:
        """Return the recipe with values that a start decides, e.g. {"train.precision": "fp32"}, and says why."""
        parts, origins, resolved = self.parts, dict(self.origins), dict(self.resolved)
        for name, value in values.items():
            part, _, key = name.partition(".")
            if getattr(parts[part], key) != value:
                parts[part], origins[name] = replace(parts[part], **{key: value}), f"derived: {why}"
                resolved[name] = value
        return replace(self, **parts, origins=origins, resolved=resolved)
