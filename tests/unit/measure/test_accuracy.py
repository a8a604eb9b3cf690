"""benchmarks/accuracy.py: that its plain loop is the same training, and that it runs."""

import importlib.util
import json
from pathlib import Path

import pytest

from sightline.train.schedules import RunLength, ScheduleConfig

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "accuracy.py"


@pytest.fixture(scope="module")
def accuracy():
    spec = importlib.util.spec_from_file_location("accuracy", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_both_follow_one_schedule(accuracy):
    schedule = ScheduleConfig(kind="cosine", warmup_epochs=accuracy.WARMUP_EPOCHS)
    for step in range(5 * 7):
        assert accuracy.rate(step, 0.3, 5 * 7, 7) == pytest.approx(schedule.rate(step, 0.3, RunLength(5, 7)))


@pytest.mark.slow  # two ResNet-18, which the script cannot make smaller
def test_both_train_on_every_batch(accuracy, shapes, tmp_path, capsys):
    flags = f"--data {shapes} --classes 10 --epochs 2 --batch 32 --size 32 --seeds 3 --device cpu --workers 0"
    result = accuracy.main([*flags.split(), "--precision", "fp32", "--out", str(tmp_path)])
    [path] = tmp_path.iterdir()
    assert json.loads(path.read_text())["results"] == result["results"]
    for name in ("sightline", "torchvision"):
        [run] = result["results"][name]["runs"]
        assert 0 <= run["top1"] <= 1 and run["top1"] * 40 == pytest.approx(round(run["top1"] * 40))  # of 40 images
        # The second of two epochs, 2 steps of 32, took less than everything together.
        assert 64 / run["images_per_s"] < run["wall_s"]
    assert result["settings"]["precision"] == "fp32" and result["settings"]["seeds"] == [3]
    assert "top-1, mean and sd of 1" in capsys.readouterr().out
