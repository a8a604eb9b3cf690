"""The numbers of a training line, on a clock that only reading images moves: 10 ms each, and nothing else costs."""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from sightline import api
from sightline.data.loading import loader
from sightline.data.sources.synthetic import SyntheticSource
from sightline.hardware import devices
from sightline.hardware.world import World
from sightline.train import meter

FLAGS = """--model.width=4 --data.path=synthetic:classes=10,samples=24,size=16 --data.size=16 --data.eval-resize=16
    --data.eval-size=16 --train.epochs=3 --train.global-batch=8 --train.precision=fp32 --run.workers=0 --run.device=cpu
    --run.log-every-steps=2 --run.progress=off""".split()


@pytest.fixture
def lines(tmp_path: Path, monkeypatch) -> list[dict]:
    """The lines of three epochs of three steps, evaluated after each."""
    clock = SimpleNamespace(now=100.0)
    read = SyntheticSource.read

    def slow_read(self, index: int):
        clock.now += 0.01
        return read(self, index)

    fake = SimpleNamespace(perf_counter=lambda: clock.now, time=time.time)
    monkeypatch.setattr(SyntheticSource, "read", slow_read)
    monkeypatch.setattr(meter, "time", fake)
    monkeypatch.setattr(loader, "time", fake)
    api.train(*api.load("demo_classification", [*FLAGS, f"--run.out={tmp_path}"]))
    events = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == "train"]


def test_images_per_second_leave_evaluation_out(lines: list[dict]):
    assert [line["step"] for line in lines] == [2, 3, 4, 6, 8, 9]  # every second step, and where an epoch ends
    assert [line["images_per_s"] for line in lines] == pytest.approx([100.0] * 6)
    assert [line["steps_per_s"] for line in lines] == pytest.approx([12.5] * 6)


def test_time_that_goes_into_reading_is_data_wait(lines: list[dict]):
    assert [line["data_wait"] for line in lines] == pytest.approx([1.0] * 6)


def test_the_time_left_counts_the_steps_left(lines: list[dict]):
    assert "eta_s" not in lines[0]  # the first interval holds compilation and start-up
    assert [line["eta_s"] for line in lines[1:]] == pytest.approx([(9 - line["step"]) * 0.08 for line in lines[1:]])


def test_sums_over_ranks_become_means_of_samples_and_rates_of_all_ranks(monkeypatch):
    """Three ranks made four steps of six samples each in two seconds; reading took half a second of them."""
    clock = SimpleNamespace(now=7.0)
    monkeypatch.setattr(meter, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    totals = {"loss": 36.0, "samples": 72.0, "bad_steps": 0.0, "grad_norm": 24.0, "steps": 12.0, "top1": 18.0}
    step = SimpleNamespace(read_totals=lambda world, restarts=True: totals)
    reader = SimpleNamespace(wait_s=3.0)
    measured = meter.Meter(reader, devices.select("cpu"), World(size=3), 40)
    clock.now, reader.wait_s = 9.0, 3.5
    line = measured.read(step, 4, 0.1)
    assert line.pop("memory_gb") > 0
    assert line == {
        "loss": 0.5,
        "top1": 0.25,
        "lr": 0.1,
        "grad_norm": 2.0,
        "images_per_s": 36.0,
        "images_per_s_per_rank": 12.0,
        "steps_per_s": 2.0,
        "data_wait": 0.25,
    }
    with measured.paused():
        clock.now += 100.0
    clock.now += 1.0
    assert measured.read(step, 8, 0.1)["eta_s"] == 8.0, "32 steps, four in a second"
    assert measured.read_epoch() == {"seconds": 3.0, "images_per_s": 48.0, "loss": 0.5}
    measured.start_epoch()
    clock.now += 1.0
    measured.read(step, 12, 0.1)
    assert measured.read_epoch()["images_per_s"] == 72.0
    assert measured.read_start() == {"images_per_s": 54.0}, "four seconds for 216 images"
