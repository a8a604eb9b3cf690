"""Every kind of optimizer and every kind of schedule learns 32 pictures by heart, through the whole of train()."""

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
    "--model.stem=3x3",
    "--task.label-smoothing=0",
    "--train.global-batch=16",
    "--train.epochs=20",
    "--train.eval-every-epochs=20",
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
    "step": ["--schedule.drop-epochs", "15", "18", "--schedule.drop-after", "--schedule.warmup-from=zero"],
    "exponential": ["--schedule.factor=0.9"],
    "table": ["--schedule.table-epochs", "1", "15", "--schedule.table-rates", "0.15", "0.015"],
    "plateau": ["--schedule.patience=5"],
    "polynomial": ["--schedule.warmup-from=zero", "--schedule.final-lr=1e-4"],
}


def test_there_is_a_row_for_every_kind():
    assert set(RATES) == set(OPTIMIZERS) and set(COURSES) == set(SCHEDULES)


@pytest.mark.parametrize(
    ("optimizer", "schedule"),
    [*((kind, "cosine") for kind in RATES if kind != "lars"), ("lars", "polynomial")]
    + [("sgd_keras", kind) for kind in COURSES if kind != "cosine"],
)
def test_it_learns_32_pictures_by_heart(optimizer: str, schedule: str, tmp_path: Path, train):
    evaluations = ["--train.eval-every-epochs=1"] if schedule == "plateau" else []
    kinds = [f"--optimizer.kind={optimizer}", f"--schedule.kind={schedule}"]
    flags = [*SMALL, *evaluations, *kinds, *RATES[optimizer], *COURSES[schedule]]
    result = train(NAME, tmp_path / "run", *flags)
    assert result.error is None
    lines = result.events("train")
    assert len(lines) == 20 and lines[-1]["top1"] > 0.95 > lines[0]["top1"]
