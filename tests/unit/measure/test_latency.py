"""Latencies: which times are counted, the five numbers and their names, and that predictions are really made."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from sightline import cli, config
from sightline.data.loading.order import EvalOrder
from sightline.errors import UsageError
from sightline.hardware import devices
from sightline.measure import from_files, latency
from sightline.measure.benchmark import BenchmarkOptions, as_text, benchmark
from sightline.measure.peers import BATCHES, Contender
from sightline.tasks.classification import Classification

CPU = devices.select("cpu")
TINY = """--data.classes=10 --data.size=32 --data.eval-size=32 --data.eval-resize=32 --train.global-batch=8
--train.precision=fp32 --run.device=cpu --run.workers=0 --model.width=8""".split()
NAMES = ["throughput", "latency_mean", "latency_90", "latency_95", "latency_99"]


def names(what: str) -> list[str]:
    return [name.replace("_", f"_{what}_", 1) if "_" in name else f"{name}_{what}" for name in NAMES]


@pytest.mark.parametrize(("batches", "warmup", "count"), [(12, 3, 8), (150, 50, 99), (3, 0, 2), (3, 2, 0), (2, 5, 0)])
def test_batches_are_timed_from_start_to_start_after_the_warm_up(batches: int, warmup: int, count: int):
    starts = [float(n * n) for n in range(batches)]
    expected = [2 * n + 1 for n in range(warmup, batches - 1)]
    assert latency.deltas(starts, warmup) == expected and len(expected) == count


def test_the_five_numbers_of_made_up_times():
    """12 batches, the first three slow: eight times of 10 to 17 ms."""
    starts = np.cumsum([0.0, 1.0, 1.0, 1.0, *(0.010 + 0.001 * n for n in range(8))]).tolist()
    seconds = latency.deltas(starts, warmup=3)
    assert seconds == pytest.approx([0.010 + 0.001 * n for n in range(8)])
    found = latency.perf("train", seconds, 64 / np.mean(seconds))
    # Between the two nearest of the sorted times, as NumPy's percentile has it: 0.9 * 7 = 6.3 of the way from 10 to 17.
    assert found == {
        "throughput_train": 4740.741,
        "latency_train_mean": 13.5,
        "latency_train_90": 16.3,
        "latency_train_95": 16.65,
        "latency_train_99": 16.93,
    }
    assert list(found) == names("train")


class Clock(Contender):
    """Every batch takes one second longer than the one before."""

    name, images = "clock", 1

    def __init__(self):
        self.now, self.calls = 0.0, 0

    def advance(self):
        self.calls += 1
        self.now += self.calls


def test_a_pass_counts_as_many_batches_as_it_was_asked_for(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(latency.time, "perf_counter", lambda: clock.now)
    assert latency.measure(clock, warmup=2, batches=3, device=CPU) == [3, 4, 5]
    assert clock.calls == 6


def test_rounds_hold_full_batches_only():
    rounds = latency.EvalRounds(EvalOrder(10, 4))
    assert [rounds.batch(step)[1].tolist() for step in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]
    assert latency.EvalRounds(EvalOrder(3, 4)).batch(7)[1].tolist() == [0, 1, 2, -1]


# Through the benchmark


def measured(tmp_path: Path, *flags: str, **options) -> dict:
    recipe, run = config.load("demo_classification", [*TINY, *flags])
    given = {"steps": 3, "warmup": 1, "repeats": 2, "out": tmp_path / "results", **options}
    began = time.perf_counter()
    result = benchmark(recipe, run, BenchmarkOptions(**given), lambda _: None)
    for row in result.get("predict", {"contenders": []})["contenders"]:
        assert 0 < row["first_s"] < time.perf_counter() - began
    return result


def check_perf(perf: dict, what: str, row: dict) -> None:
    assert list(perf) == names(what) and len(row["latency_s"]) == 3 and min(row["latency_s"]) > 0
    assert perf[f"throughput_{what}"] == round(row["images_per_s"]["median"], 3)
    assert perf[f"latency_{what}_mean"] == round(1000 * sum(row["latency_s"]) / 3, 3)
    assert perf[f"latency_{what}_90"] <= perf[f"latency_{what}_95"] <= perf[f"latency_{what}_99"]


def test_every_benchmark_of_a_step_tells_its_latency(tmp_path: Path, capsys):
    flags = ["--steps=3", "--warmup=1", "--repeats=2", f"--out={tmp_path}", f"--logname={tmp_path}/sub/perf.json"]
    assert cli.main(["benchmark", "demo_classification", *flags, *TINY]) == 0
    [path] = tmp_path.glob("*.json")
    result = json.loads(path.read_text())
    [row] = result["step"]["contenders"]
    check_perf(result["perf"], "train", row)
    assert json.loads((tmp_path / "sub" / "perf.json").read_text()) == result["perf"]
    assert row["calls"] == 1 + 1 + 2 * (Contender.settle + 3) + (1 + 3 + 1)
    assert "latency of train, ms, waiting for each of 3: mean " in capsys.readouterr().out


@pytest.mark.parametrize("data", ["synthetic", "real"])
def test_predictions_are_made_of_evaluation_batches(tmp_path: Path, monkeypatch, shapes: Path, data: str):
    seen = []
    predict = Classification.predict

    def watched(self, model, batch):
        seen.append((batch["index"].tolist(), model.training, batch["image"].dtype, torch.is_inference_mode_enabled()))
        return predict(self, model, batch)

    monkeypatch.setattr(Classification, "predict", watched)
    flags = [f"--data.path={shapes}"] if data == "real" else []
    result = measured(tmp_path, *flags, "--train.precision=bf16", "--train.no-eval-autocast", what="predict", data=data)
    row, *whole = result["predict"]["contenders"]
    check_perf(result["perf"], "predict", row)
    assert "step" not in result and "latency of predict" in as_text(result)
    assert row["calls"] == 1 + 1 + 2 * (Contender.settle + 3) + (1 + 3 + 1)
    seen, passes = seen[: row["calls"]], seen[row["calls"] :]
    if data == "real":  # once to begin with, then the repeats: all files to tables that are thrown away
        assert [each["name"] for each in whole] == [from_files.NAME] and from_files.NAME in as_text(result)
        assert whole[0]["images"] == 40 and len(whole[0]["images_per_s"]["all"]) == 2
        assert [index for indices, *_ in passes for index in indices] == [*range(40)] * 3
    else:
        assert not whole and not passes
    rounds = BATCHES if data == "synthetic" else 40 // 8  # the val split of the shapes has 40 images
    for number, (indices, training, dtype, inference) in enumerate(seen):
        assert indices == [number % rounds * 8 + k for k in range(8)]
        assert (training, dtype, inference) == (False, torch.float32, True)
    assert (row["data_wait"] > 0) == (data == "real")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"what": "sleep"}, "--what sleep is unknown; use train or predict"),
        ({"what": "predict", "peers": True}, "leave --peers and --loader out"),
        ({"what": "predict", "loader": True}, "leave --peers and --loader out"),
        ({"logname": "perf.json", "loader": True}, "--loader alone makes none"),
    ],
)
def test_bad_options(options: dict, message: str):
    with pytest.raises(UsageError, match=message):
        BenchmarkOptions(**options)


def test_a_log_that_cannot_be_written_is_found_before_measuring(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="--logname .*file cannot be written"):
        measured(tmp_path, logname=str(tmp_path / "file" / "perf.json"))
    with pytest.raises(UsageError, match="is a folder; name a file, e.g. .*/perf.json"):
        measured(tmp_path, logname=str(tmp_path))
