"""TrainConfig: the fields of a recipe under `train.`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from sightline.errors import UsageError
from sightline.recipe.part import AtLeast, AtMost, Below, Part, not_compared

AUTO = "auto"
OFF = "0 switches it off"
if TYPE_CHECKING:
    Measured = int  # whatever computes with it comes after train/start.py, which measures it
else:
    Measured = int | Literal["auto"]


@dataclass(frozen=True)
class TrainConfig(Part):
    """Length, batch, precision and evaluation of a run."""

    epochs: Annotated[int, AtLeast(1)]
    """Passes over all training samples."""
    global_batch: Annotated[Measured, AtLeast(1)]
    """Samples per optimizer update, over all devices and accumulation steps; auto: the first start of the run measures
    the largest that fits and is not slower per image, and the run keeps it."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Autocast type; auto takes what the device does well and says which. A recipe's own bf16, which nobody typed,
    becomes fp32 where it would only be emulated. The first start decides, and the run keeps it."""
    accumulation: Annotated[Measured, AtLeast(1)] = 1
    """Parts a device's share of the batch is cut into, to save memory; auto: the first start of the run measures the
    fewest that fit, and the run keeps their number. If results depend on it (batch-norm), it is only named: exit 6."""
    ema: Annotated[float, AtLeast(0), Below(1, f"{OFF}, 0.999 is usual")] = 0.0
    """Decay of the moving average of weights; 0 is off. When on, the average is evaluated and is best."""
    ema_every_steps: Annotated[int, AtLeast(1)] = 1
    """Steps between updates of the average."""
    ema_rule: Literal["plain", "torchvision"] = "plain"
    """plain: the decay is per update; torchvision: scaled by batch * ema_every_steps / epochs, copied in
    warm-up, steps counted within each epoch."""
    clip: Annotated[float, AtLeast(0, OFF)] = 0.0
    """Largest gradient norm; 0 is off."""
    eval_every_epochs: Annotated[int, AtLeast(1)] = 1
    """Epochs between evaluations; the last epoch is evaluated too, unless eval_at_end is off."""
    eval_from_epoch: Annotated[int, AtLeast(0, OFF)] = 0
    """First evaluation after this many epochs, then every eval_every_epochs: 3 and 4 evaluate after epochs 3, 7, 11 and
    so on, and after the last. 0: the first one after eval_every_epochs."""
    eval_at_end: bool = True
    """Also evaluate when the run ends; off: only where eval_every_epochs says, which may be never."""
    eval_max_steps: Annotated[int, AtLeast(0, OFF)] = 0
    """Most batches of an evaluation, for a quick look: the score of a part of the set is another score. 0: all."""
    eval_shards: Literal["sharded", "full"] = "sharded"
    """Several ranks: sharded: each evaluates its part, counts are added up; full: each evaluates everything, those of
    rank 0 are reported and decide. With bn_eval local, full scores rank 0's own statistics, sharded a mixture."""
    target_score: Annotated[float, AtLeast(0), AtMost(1, f"a share, not per cent; {OFF}")] = not_compared(0.0)
    """The run is finished after an evaluation whose headline score reaches this, e.g. 0.759; 0 is off."""
    diverged_score: Annotated[float, AtLeast(0), AtMost(1, f"a share, not per cent; {OFF}")] = not_compared(0.0)
    """The run ends with exit 5 after an evaluation whose headline score is not above this, e.g. 0.002; 0 is off."""
    patience: Annotated[int, AtLeast(0, OFF)] = not_compared(0)
    """The run is finished after this many planned evaluations in a row without a better headline score; 0 is off. The
    same command with a larger number resumes."""
    min_epochs: Annotated[int, AtLeast(0, OFF)] = not_compared(0)
    """patience: epochs that a run has at least."""
    steps_per_epoch: Annotated[int, AtLeast(0, OFF)] = 0
    """Most steps of an epoch; the schedule and evaluations count in these shorter epochs. 0: all samples once."""
    min_epoch_steps: Annotated[int, AtLeast(0, OFF)] = 0
    """Least steps of an epoch, with last_batch wrap: in a small dataset all samples come several times. 0: once."""
    max_steps: Annotated[int, AtLeast(0, OFF)] = not_compared(0)
    """The run is finished, evaluated and saved, at this step; the schedule stays that of all epochs. 0 is off. The
    same command with a larger number resumes."""
    last_batch: Literal["drop", "pad", "wrap"] = "drop"
    """Last partial batch: drop, pad from the epoch's start, or wrap: carry into the next epoch."""
    eval_autocast: bool = True
    """Evaluate in the training precision; off: in fp32."""
    repeats: Annotated[int, AtLeast(1)] = 1
    """Repeated augmentation: how often an image comes in an epoch of unchanged length, augmented each time."""
    bn_eval: Literal["averaged", "rank0", "local"] = "averaged"
    """Whose batch-norm statistics are evaluated and saved when there are several ranks."""
    bn_group: Annotated[int, AtLeast(-1, "-1 is all ranks, 0 is each its own")] = 0
    """Several ranks: how many share batch-norm statistics in training. 0 or 1: each has its own; N: ranks 0..N-1 and so
    on, N must divide the number of ranks; -1: all."""
    trainable: Literal["all", "head"] = "all"
    """head: only the model's last linear layer learns; batch-norm statistics of the rest still follow the data."""
    head_epochs: Annotated[int, AtLeast(0, OFF)] = 0
    """Epochs at the start in which only the head learns; the trunk's weights then stay, while its batch-norm statistics
    follow the data. For pretrained weights: gradients of a random head would damage them. 0: all learn at once."""
    fp32_ops: tuple[str, ...] = ()
    """Modules kept in fp32 under autocast, by type or path, with wildcards: BatchNorm2d, fc, layer4.*. Patterns that
    match no module (relu, mean) are reported and ignored."""
    seed: Annotated[int, AtLeast(0)] = 0
    """Every random number of the run is a function of this and of its place in the run."""
    deterministic: bool = False
    """Equal bits on CUDA too, at some cost in speed; on the CPU bits are always equal."""

    part = "train"

    def check(self) -> None:
        super().check()
        if self.seed >> 63:
            raise UsageError(f"train.seed={self.seed} must be below 2^63")
        if self.target_score and self.diverged_score >= self.target_score:
            raise UsageError(
                f"train.diverged_score={self.diverged_score} must lie below train.target_score={self.target_score}"
            )
        if self.head_epochs and self.head_epochs >= self.epochs:
            raise UsageError(
                f"train.head_epochs={self.head_epochs} leaves none of train.epochs={self.epochs} for the whole "
                f"network; use more epochs, or --train.head-epochs 0"
            )
        if self.head_epochs and self.trainable == "head":
            raise UsageError(
                f"train.trainable=head trains the head alone in every epoch, train.head_epochs={self.head_epochs} in "
                f"the first ones only; leave one of them out (--train.head-epochs 0)"
            )
        if self.min_epoch_steps and self.last_batch != "wrap":
            raise UsageError(
                f"train.min_epoch_steps={self.min_epoch_steps} lets samples come several times in an epoch, which "
                f"train.last_batch={self.last_batch} cannot; add --train.last-batch wrap or --train.min-epoch-steps 0"
            )
        if self.steps_per_epoch and self.min_epoch_steps > self.steps_per_epoch:
            raise UsageError(
                f"train.min_epoch_steps={self.min_epoch_steps} is above train.steps_per_epoch={self.steps_per_epoch}, "
                f"the most steps of an epoch; add --train.min-epoch-steps 0"
            )

    @property
    def measures_batch(self) -> bool:
        """Return whether the batch is still to be measured."""
        return str(self.global_batch) == AUTO

    @property
    def measures_accumulation(self) -> bool:
        """Return whether the accumulation is still to be measured."""
        return str(self.accumulation) == AUTO

    def require_batch(self, command: str) -> None:
        """Raise UsageError where the batch or its parts are not numbers; only `train` measures them."""
        if self.measures_batch or self.measures_accumulation:
            flag = "--train.global-batch" if self.measures_batch else "--train.accumulation"
            raise UsageError(f"{flag} auto: only `train` measures a batch; give {command} a number")

    @property
    def eval_precision(self) -> str:
        """Return the precision of evaluation."""
        return self.precision if self.eval_autocast else "fp32"

    def evaluates_after(self, epochs: int) -> bool:
        """Return whether an evaluation follows when this many epochs are done."""
        is_due = epochs >= self.eval_from_epoch and (epochs - self.eval_from_epoch) % self.eval_every_epochs == 0
        return is_due or (self.eval_at_end and epochs == self.epochs)
