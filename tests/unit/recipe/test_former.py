"""Runs that were started with former defaults of a recipe keep them; new runs and typed values do not."""

import json
from pathlib import Path

import pytest
import yaml

from sightline import cli, config

# The defaults of resnet50 when it had absolute rates, typed.
TABLE = ["--schedule.kind=table", "--schedule.table-epochs", *"1 2 3 4 30 60 80".split(), "--schedule.table-rates"]
OLD = [*TABLE, *"0.275 0.45 0.625 0.8 0.08 0.008 0.0008".split(), "--schedule.unit=step", "--optimizer.lr-for-batch=0"]
OLD += ["--schedule.warmup-epochs=0", "--schedule.warmup-factor=0"]
SMALL = [
    "--data.path=synthetic:classes=3,samples=16,size=24",
    "--data.classes=3",
    "--data.size=24",
    "--data.eval-size=24",
]
SMALL += ["--data.eval-resize=24", "--model.arch=shufflenet_v2_x0_5", "--train.global-batch=8", "--train.epochs=3"]
SMALL += [
    "--run.workers=0",
    "--run.device=cpu",
    "--run.report=off",
    "--run.log-every-steps=1",
    "--train.precision=fp32",
]


def train(out: Path, *flags: str) -> dict[int, float]:
    """Train in `out`; return the rate of each step that was ever done there."""
    assert cli.main(["train", "resnet50", *SMALL, f"--run.out={out}", *flags]) == 0
    events = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return {event["step"]: event["lr"] for event in events if event["event"] == "train"}


def test_a_run_that_was_started_with_absolute_rates_resumes_with_them(tmp_path: Path, capsys):
    train(tmp_path / "run", *OLD, "--train.max-steps=1")
    file = tmp_path / "run" / "config.yaml"
    stored = yaml.safe_load(file.read_text())
    stored.pop("origins")  # as if nobody had typed them
    file.write_text(yaml.safe_dump(stored))
    capsys.readouterr()
    rates = train(tmp_path / "run")
    assert rates == pytest.approx({1: 0.1, 2: 0.1, 3: 0.275, 4: 0.275, 5: 0.45, 6: 0.45}, rel=1e-6)
    assert "keeps what resnet50 had when it was started: " in capsys.readouterr().out
    fresh = train(tmp_path / "fresh")
    assert fresh == pytest.approx({step: rate / 256 for step, rate in rates.items()}, rel=1e-6)  # batch 8 of 2,048
    assert "keeps what" not in capsys.readouterr().out


def load(folder: Path, *flags: str) -> config.Recipe:
    return config.load("resnet50", [f"--run.out={folder}", *flags])[0]


def test_only_a_run_of_the_recipe_with_its_former_rates_keeps_them(tmp_path: Path):
    now = config.load("resnet50")[0]
    old = {"optimizer": {"lr_for_batch": 0}, "schedule": {"kind": "table", "unit": "step", "drop_epochs": []}}
    old["schedule"] |= {"warmup_epochs": 0.0, "warmup_factor": 0.0, "table_epochs": [1], "table_rates": [0.2]}
    for name, stored, kind in (
        ("old", {"recipe": "resnet50", **old}, "table"),
        ("another", {"recipe": "resnet50_keras", **old}, "step"),
        ("partial", {"recipe": "resnet50", "optimizer": old["optimizer"]}, "step"),
        ("new", {"recipe": "resnet50", **old, "optimizer": {"lr_for_batch": 256}}, "step"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(yaml.safe_dump(stored))
        assert load(tmp_path / name).schedule.kind == kind, name
        assert load(tmp_path / f"after_{name}", f"--run.resume={tmp_path / name}").schedule.kind == kind, name
    assert load(tmp_path / "none").schedule == now.schedule
    typed = load(tmp_path / "old", "--schedule.kind=step", "--schedule.drop-epochs", "2", "--optimizer.lr=0.3")
    assert (typed.schedule.drop_epochs, typed.schedule.warmup_epochs) == ((2,), 0), "as the same line was before"
    assert (typed.optimizer.lr, typed.optimizer.lr_for_batch) == (0.3, 0)
