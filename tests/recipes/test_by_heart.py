"""Every kind of optimizer and every kind of schedule learns 32 images by heart, through the whole of train()."""

from pathlib import Path

import pytest

from sightline.train.optimizers import FIELDS_OF_KIND as OPTIMIZERS
from sightline.train.schedules import FIELDS_OF_KIND as SCHEDULES

NAME = "demo_classification"
SMALL = [
    "--data.path=synthetic:classes=4,samples=32,size=16",
    "--data.classes=4",
    "--data.size=16",
    "--data.eval-resize=16",
    "--data.eval-size=16",
    "--data.augment=off",
    "--model.width=8",
    "--task.label-smoothing=0",
    "--train.global-batch=16",
    "--train.epochs=10",
    "--train.eval-every-epochs=10",
    "--run.checkpoint-every-epochs=10",
    "--run.log-every-steps=1000",  # a line at the end of an epoch tells its mean
]
RATES = {
    "sgd": ["--optimizer.lr=0.1"],
    "sgd_keras": ["--optimizer.lr=0.05", "--optimizer.decay-form=keras_l2"],
    "rmsprop": ["--optimizer.lr=0.003"],
    "adam": ["--optimizer.lr=0.01"],
    "adamw": ["--optimizer.lr=0.01"],
    "radam": ["--optimizer.lr=0.03"],
    "lars": ["--optimizer.lr=5", "--optimizer.eps=1e-7"],
}
COURSES = {
    "constant": [],
    "cosine": ["--schedule.warmup-from=zero", "--schedule.cosine-from=start", "--schedule.epoch-steps=exact"],
    "step": ["--schedule.drop-epochs", "7", "9", "--schedule.drop-after", "--schedule.warmup-from=zero"],
    "exponential": ["--schedule.factor=0.9"],
    "table": ["--schedule.table-epochs", "1", "7", "--schedule.table-rates", "0.015", "0.0015"],
    "plateau": ["--schedule.patience=3"],
    "polynomial": ["--schedule.warmup-from=zero", "--schedule.final-lr=1e-4"],
}


# One schedule with each optimizer: an update takes its rate as it comes.
PAIRS = dict(zip(RATES, ("cosine", "step", "exponential", "constant", "table", "plateau", "polynomial"), strict=True))


def test_there_is_a_row_for_every_kind():
    assert set(RATES) == set(OPTIMIZERS) and set(COURSES) == set(SCHEDULES) == set(PAIRS.values())


# By default one that torch has and the one that it has not: tests/unit/train compares every update and every rate with
# references, and the originals' pairs learn a batch there.
@pytest.mark.parametrize(
    ("optimizer", "schedule"),
    [pytest.param(*pair, marks=() if pair[0] in ("adamw", "lars") else pytest.mark.slow) for pair in PAIRS.items()],
)
def test_it_learns_32_images_by_heart(optimizer: str, schedule: str, tmp_path: Path, train):
    evaluations = ["--train.eval-every-epochs=1"] if schedule == "plateau" else []
    kinds = [f"--optimizer.kind={optimizer}", f"--schedule.kind={schedule}"]
    flags = [*SMALL, *evaluations, *kinds, *RATES[optimizer], *COURSES[schedule]]
    result = train(NAME, tmp_path / "run", *flags)
    assert result.error is None
    lines = result.events("train")
    assert len(lines) == 10 and lines[-1]["top1"] > 0.95 > lines[0]["top1"]
