"""`benchmark --whole`: where the wall clock of a run went, ours and a plain loop's."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TextIO

import pytest

from sightline import cli, config
from sightline.errors import SightlineError, UsageError
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


class Processes:
    """What `subprocess` would start: each leaves the files of a short run behind, and takes no time."""

    STDOUT = subprocess.STDOUT

    def __init__(self):
        self.commands: list[list[str]] = []
        self.environs: list[Mapping[str, str]] = []
        self.given: list[dict] = []

    def run(self, command: list[str], env: Mapping[str, str], stdout: TextIO, **how) -> SimpleNamespace:
        assert how == {"stderr": subprocess.STDOUT, "check": False}
        self.commands.append(command)
        self.environs.append(env)
        now = time.time()
        if command[2] == "sightline":
            run = Path(command[command.index("--run.out") + 1])
            run.mkdir()
            shift = now - 104.0
            events = [{**event, "time": event["time"] + shift} for event in EVENTS]
            (run / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
            (run / "environment.json").touch()
            stdout.write("first step after 1.5 s, 0.2 s of it for data\n")
        else:
            self.given.append(json.loads(Path(command[-1]).read_text()))
            marks = [("import", 1), ("listing", 2), ("first step", 4), ("training", 8)]
            ends = [{"phase": name, "time": now + seconds} for name, seconds in marks]
            Path(self.given[-1]["marks"]).write_text(json.dumps(ends))
        return SimpleNamespace(returncode=0)


def test_both_run_twice_in_turn_and_all_of_it_is_kept(tmp_path: Path, monkeypatch, shapes: Path):
    monkeypatch.setattr(whole, "subprocess", processes := Processes())
    monkeypatch.setenv("MARK", "kept")
    words = ["demo_classification", "--data.path", str(shapes), "--model.width=64", "--train.epochs=3"]
    words += ["--train.global-batch=4", "--train.precision=fp32", "--run.device=cpu", "--run.workers=1"]
    recipe, run = config.load(words[0], words[1:])
    said: list[str] = []
    out = tmp_path / "of" / "results"
    result = whole.measure(recipe, run, words, out, said.append)
    ours, plain, again, second = processes.commands
    python = [sys.executable, "-m"]
    assert ours[:-6] == again[:-6] == [*python, "sightline", "train", *words]
    assert plain[:-1] == second[:-1] == [*python, "sightline.measure.plain_classification"]
    folders = [command[command.index("--run.out") + 1] for command in (ours, again)]
    assert len(set(folders)) == 2 and ours[-4:] == "--run.progress plain --run.resume auto".split()
    caches = {environ["XDG_CACHE_HOME"] for environ in processes.environs[::2]}
    assert len(caches) == 1 and caches != {os.environ.get("XDG_CACHE_HOME")}, (
        "the second run finds the first one's code"
    )
    assert {environ["MARK"] for environ in processes.environs} == {"kept"}
    assert not Path(folders[0]).exists(), "the runs are deleted"
    options = processes.given[0]
    assert (options["epochs"], options["batch"], options["workers"], options["device"]) == (3, 4, 1, "cpu")
    assert (options["precision"], options["network"], options["path"]) == ("fp32", "resnet18", str(shapes))
    assert options["marks"] != processes.given[1]["marks"] and options["checkpoint"]
    assert {key: value for key, value in options.items() if key not in ("marks", "checkpoint")} == {
        key: list(value) if isinstance(value, tuple) else value for key, value in result["peer"].items()
    }
    names = [(row["name"], row["round"]) for row in result["whole"]]
    assert names == [(name, turn) for turn in whole.ROUNDS for name in (whole.OURS, whole.PLAIN)]
    phases = result["whole"][0]["phases"]
    assert (phases["first step"], phases["evaluation"], phases["report"]) == (1.5, 0.75, 0.0)
    assert phases["workers"] == pytest.approx(2.0, abs=1.0) and sum(phases.values()) == pytest.approx(
        result["whole"][0]["whole_s"]
    )
    assert (result["schema"], result["recipe"], result["words"]) == (1, "demo_classification", words)
    assert result["device"] and result["commit"] and result["environment"]["versions"]
    assert datetime.fromisoformat(result["time"]).microsecond == 0
    [file] = out.iterdir()
    assert file.name.startswith("demo_classification-whole-") and json.loads(file.read_text()) == json.loads(
        json.dumps(result)
    )
    assert len(said) == 5 and said[-1] == f"written to {file}"
    assert said[0].startswith("sightline, first time: 0.0") and "training 2.50, evaluation 0.75, " in said[0]
    assert said[1].startswith("plain loop, first time: 0.0") and "import, listing 2.0" in said[1]


def test_a_recipe_without_a_plain_loop_runs_alone_and_says_why(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(whole, "subprocess", processes := Processes())
    for name, reason in (
        ("demo_detection", "there is none for Detection"),
        ("demo_classification", "torchvision reads folders of classes"),
    ):
        said: list[str] = []
        recipe, run = config.load(name, ["--run.device=cpu", "--data.path=synthetic:samples=8"])
        result = whole.measure(recipe, run, [name], tmp_path, said.append)
        assert said[0].startswith(f"no plain loop beside it: {reason}") and result["peer"] in said[0]
        assert [row["name"] for row in result["whole"]] == [whole.OURS] * 2
    assert len(processes.commands) == 4


def test_the_command_prints_what_it_measured(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(whole, "subprocess", Processes())
    flags = ["--run.device=cpu", "--data.path=synthetic:samples=8", "--out", str(tmp_path / "out")]
    assert cli.main(["benchmark", "demo_detection", "--whole", *flags]) == 0
    (file,) = (tmp_path / "out").iterdir()
    assert capsys.readouterr().out.endswith(whole.as_text(json.loads(file.read_text())) + "\n")


def test_the_whole_table():
    ours = {"import, listing": 2.5, "workers": 0.25, "first step": 1.5, "training": 100.0, "evaluation": 1.0}
    ours |= {"checkpoints": 0.5, "report": 0.25, "leaving": 0.004}
    plain = {name: seconds for name, seconds in ours.items() if name not in ("workers", "report")}
    rows = [
        {"name": name, "round": turn, "whole_s": whole_s, "phases": phases}
        for turn, factor in zip(whole.ROUNDS, (1, 2), strict=True)
        for name, phases, whole_s in ((whole.OURS, ours, 106.0), (whole.PLAIN, plain, 212.0 * factor))
    ]
    table = whole.as_text({"recipe": "demo", "device": "a CPU", "whole": rows}).splitlines()
    head, names, turns, *lines = table
    assert head == "demo on a CPU, whole runs, seconds from start to exit of the process"
    assert names == " " * 16 + f"{'sightline':>14}{'plain loop':>14}" * 2
    assert turns == " " * 16 + f"{'first time':>14}" * 2 + f"{'second time':>14}" * 2
    assert [line[:16].strip() for line in lines[:-2]] == [*whole.PHASES, "to first step", "whole"]
    by_phase = {line[:16].strip(): line[16:].split() for line in lines[:-2]}
    assert by_phase["training"] == ["100.00"] * 4 and by_phase["workers"] == ["0.25"] * 2
    assert (
        by_phase["to first step"] == ["4.25", "4.00"] * 2 and by_phase["whole"] == "106.00 212.00 106.00 424.00".split()
    )
    assert {len(line) for line in lines[:-2]} == {16 + 4 * 14}
    assert lines[-2:] == [
        "first time: ours takes 0.50 of the plain loop's time",
        "second time: ours takes 0.25 of the plain loop's time",
    ]


def test_a_run_that_fails_says_how(tmp_path: Path):
    command = [sys.executable, "-c", "print('no such image'); raise SystemExit(3)"]
    with pytest.raises(SightlineError, match=r"ended with exit code 3: no such image"):
        whole._finished(command, {}, tmp_path / "out.txt")
