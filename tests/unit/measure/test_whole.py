"""`benchmark --whole`: where the wall clock of a run went, ours and a plain loop's."""

import json
from pathlib import Path

import pytest

from sightline.errors import UsageError
from sightline.measure import benchmark, whole

EVENTS = [
    {"event": "log", "time": 106.0},
    {"event": "start", "time": 106.0},
    {"event": "epoch", "time": 109.0, "seconds": 3.0},
    {"event": "evaluate_begin", "time": 109.0},
    {"event": "evaluate_end", "time": 109.5},
    {"event": "epoch", "time": 111.0, "seconds": 1.0},
    {"event": "evaluate_begin", "time": 111.0},
    {"event": "evaluate_end", "time": 111.25},
    {"event": "exit", "time": 112.0},
]


def test_the_phases_of_a_run_add_up_to_its_wall_clock():
    written = {"environment.json": 104.0, "report.html": 112.5}
    phases = whole.our_phases(EVENTS, written, "first step after 1.5 s, 0.2 s of it for data", 100.0, 113.0)
    assert list(phases) == list(whole.PHASES)
    assert sum(phases.values()) == pytest.approx(13.0)
    assert phases["workers"] == 2.0 and phases["first step"] == 1.5 and phases["training"] == 2.5
    assert phases["evaluation"] == 0.75 and phases["report"] == 0.5 and phases["leaving"] == 0.5


def test_a_run_without_a_report_leaves_after_its_last_event():
    phases = whole.our_phases(EVENTS, {"environment.json": 104.0}, "", 100.0, 113.0)
    assert phases["report"] == 0.0 and phases["leaving"] == 1.0
    assert sum(phases.values()) == pytest.approx(13.0)


def test_the_phases_of_a_plain_loop_add_up_to_its_wall_clock():
    ends = [("import", 2), ("listing", 3), ("first step", 5), ("training", 7), ("evaluation", 8), ("checkpoints", 9)]
    ends += [("training", 11), ("evaluation", 12), ("checkpoints", 13)]
    phases = whole.plain_phases([{"phase": name, "time": time} for name, time in ends], 0.0, 14.0)
    assert phases["import, listing"] == 3 and phases["training"] == 4 and phases["leaving"] == 1
    assert sum(phases.values()) == pytest.approx(14.0)
    assert set(phases) < set(whole.PHASES)


def test_the_table_says_how_long_the_first_step_took_to_come():
    row = {"name": whole.OURS, "whole_s": 12.0, "phases": {"import, listing": 2.5, "workers": 0.25, "first step": 1.5}}
    rows = [{**row, "round": name} for name in whole.ROUNDS]
    shown = whole.as_text({"recipe": "demo", "device": "a CPU", "whole": rows}).splitlines()
    assert [line.split() for line in shown if line.startswith("to first step")] == ["to first step 4.25 4.25".split()]


@pytest.mark.parametrize("other", [{"peers": True}, {"loader": True}, {"scaling": True}, {"what": "predict"}])
def test_whole_stands_alone(other):
    with pytest.raises(UsageError, match="--whole stands alone"):
        benchmark.BenchmarkOptions(whole=True, **other)


@pytest.mark.slow  # four processes that import torch
def test_whole_runs_are_measured_beside_the_plain_loop(tmp_path: Path, capsys):
    from PIL import Image

    from sightline import cli

    for split in ("train", "val"):
        for name in ("a", "b"):
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(4):
                Image.new("RGB", (40, 40), (60 * number, 90, 30)).save(tmp_path / split / name / f"{number}.jpg")
    flags = f"--data.path {tmp_path} --model.width 64 --data.size 32 --data.eval-size 32 --data.eval-resize 32"
    flags += f" --train.epochs 1 --train.global-batch 4 --run.device cpu --run.workers 1 --out {tmp_path / 'out'}"
    assert cli.main(["benchmark", "demo_classification", "--whole", *flags.split()]) == 0
    assert "second time: ours takes" in capsys.readouterr().out
    (file,) = (tmp_path / "out").glob("*.json")
    result, words = json.loads(file.read_text()), ["demo_classification", *flags.split()[:-2]]
    assert (result["schema"], result["recipe"], result["words"]) == (1, "demo_classification", words)
    rows = result["whole"]
    assert [row["name"] for row in rows] == ["sightline", "plain loop"] * 2
    assert all(sum(row["phases"].values()) == pytest.approx(row["whole_s"]) for row in rows)
