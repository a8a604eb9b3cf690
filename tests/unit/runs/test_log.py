"""The run folder as programs read it, and the lines a person sees."""

import errno
import json
import os
import re
from pathlib import Path

import pytest
from tiny import tiny

from sightline import __version__, api, config
from sightline.data.loading.workers import Bad
from sightline.errors import DiskError, UsageError
from sightline.hardware import devices
from sightline.parts import Scores
from sightline.recipe import store
from sightline.runs.attempts import Attempt
from sightline.runs.environment import environment
from sightline.runs.events import SCHEMA
from sightline.runs.folder import RunFolder
from sightline.runs.log import RunLog
from sightline.runs.screen import RunSize, Screen

SCORES = Scores(
    values={"top1": 0.75, "loss": 1.25, "samples": 8.0},
    tables={"classes": [{"class": "ant", "top1": 0.75, "samples": 8}]},
    worst=[{"index": 3, "name": "ant/3.jpg", "loss": 9.0}],
)


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def lines(folder: Path, name: str = "log.jsonl") -> list[dict]:
    """As a strict parser reads them."""
    return [json.loads(line, parse_constant=refuse_constant) for line in (folder / name).read_text().splitlines()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "some" / "run"


@pytest.fixture
def log(folder: Path):
    log = RunLog(folder)
    yield log
    log.close(0, "finished")


def test_the_first_line_names_the_schema_and_comes_once(folder: Path):
    for number in range(2):
        log = RunLog(folder)
        log.event("start", step=number)
        log.close(0, "finished")
    first, *rest = lines(folder)
    assert (first["event"], first["schema"], first["sightline"]) == ("log", SCHEMA, __version__)
    assert [line["event"] for line in rest] == ["start", "exit", "start", "exit"]
    assert not any("schema" in line for line in rest)
    times = [line["time"] for line in lines(folder)]
    assert times == sorted(times)


def test_a_line_is_on_disk_as_soon_as_it_is_logged(log: RunLog, folder: Path):
    log.event("start", step=1)
    assert lines(folder)[-1]["event"] == "start"


def test_numbers_that_are_not_finite_leave_the_files_readable(log: RunLog, folder: Path):
    log.event("train", loss=float("nan"), grad_norm=float("inf"), table=[{"loss": -float("inf")}])
    assert lines(folder)[-1]["event"] == "train"
    values = {"top1": 0.0, "loss": float("nan"), "samples": 8.0}
    log.scores(Scores(values, {}, [{"index": 1, "loss": float("inf")}]), "scores.json", epoch=1)
    json.loads((folder / "scores.json").read_text(), parse_constant=refuse_constant)
    assert lines(folder)[-1]["top1"] == 0.0


def test_exit_json_says_how_it_ended(folder: Path):
    log = RunLog(folder)
    log.close(5, "loss not finite")
    told = json.loads((folder / "exit.json").read_text())
    assert (told["code"], told["reason"]) == (5, "loss not finite") and told["time"] > 1e9
    exit_line = {"event": "exit", "time": 0, "code": 5, "reason": "loss not finite"}
    assert lines(folder)[-1] | {"time": 0} == {**exit_line, "started": False}
    log = RunLog(folder)
    log.started({}, (), 0)
    log.close(5, "loss not finite")
    assert lines(folder)[-1] | {"time": 0} == exit_line


def test_scores_go_to_a_file_a_line_and_an_event(log: RunLog, folder: Path, capsys):
    log.scores(SCORES, "scores.json", epoch=2, step=40)
    log.tell_scores(SCORES, epoch=2, step=40)
    told = json.loads((folder / "scores.json").read_text())
    assert told == {"epoch": 2, "step": 40, "values": SCORES.values, "tables": SCORES.tables, "worst": SCORES.worst}
    assert lines(folder)[-1] | {"time": 0} == {"event": "evaluate", "time": 0, "epoch": 2, "step": 40, **SCORES.values}
    assert capsys.readouterr().out == "evaluated epoch 2  step 40  top1 0.7500  loss 1.2500  on 8 samples\n"


def test_twelve_scores_take_short_lines_and_unmeasured_ones_are_not_scores(log: RunLog, folder: Path, capsys):
    values = {f"ap{number}": number / 10 for number in range(11)} | {"apl": -1.0, "samples": 8.0}
    log.scores(Scores(values, {}, []), "scores.json", epoch=2, step=40)
    log.tell_scores(Scores(values, {}, []), epoch=2, step=40)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "evaluated epoch 2  step 40  ap0 0.0000  on 8 samples"
    assert said[1].split()[:4] == ["ap1", "0.1000", "ap2", "0.2000"] and said[2].endswith("  ap10 1.0000  apl -")
    assert len(said) == 3 and max(map(len, said)) <= 80
    assert json.loads((folder / "scores.json").read_text())["values"]["apl"] == -1.0  # as COCO has it


def test_bad_samples_are_listed_and_told(log: RunLog, folder: Path, capsys):
    for index in (3, 5):
        log.bad_sample(Bad("train", index, f"ant/{index}.jpg", "cannot be decoded"))
    assert lines(folder, "bad_samples.jsonl") == [
        {"feed": "train", "index": index, "name": f"ant/{index}.jpg", "reason": "cannot be decoded"} for index in (3, 5)
    ]
    assert [line["event"] for line in lines(folder)[1:]] == ["warning", "warning"]
    assert "warning: sample skipped: ant/3.jpg: cannot be decoded\n" in capsys.readouterr().out


@pytest.mark.parametrize("rank", [0, 1])
def test_a_folder_for_logs_of_ranks_that_cannot_be_is_refused_with_its_flag(folder: Path, tmp_path: Path, rank: int):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"file/logs cannot be written: Not a directory; .*--run.rank-logs DIR"):
        RunLog(folder, rank=rank, rank_logs=tmp_path / "file" / "logs")
    assert not folder.exists()


def test_a_rank_that_cannot_write_into_the_run_folder_names_run_out(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"file/run cannot be written: Not a directory; .*--run.out DIR"):
        RunLog(tmp_path / "file" / "run", rank=1)


def test_files_are_replaced_as_a_whole(log: RunLog, folder: Path):
    log.folder.write("config.yaml", "first, and longer")
    log.folder.write("config.yaml", "second")
    assert (folder / "config.yaml").read_text() == "second"
    assert sorted(p.name for p in folder.iterdir()) == [".lock", "config.yaml"]


def training(log: RunLog) -> None:
    line = {"loss": 0.5, "lr": 0.1, "grad_norm": 3.0, "images_per_s": 1234.5, "data_wait": 0.25, "memory_gb": 1.5}
    log.training(1, 20, RunSize(3, 60, 15), {**line, "eta_s": 3661.0})


def test_where_there_is_no_terminal_lines_are_plain(log: RunLog, folder: Path, capsys):
    training(log)
    log.evaluating(1, 2, 20, 60)
    log.say("a [red]bracket[/red] in /a/[path] and a very long line " + "x" * 300)
    out = capsys.readouterr().out
    assert out.splitlines()[0] == (
        "epoch 2/3  step 20/60  loss 0.5  lr 0.1  1,234 img/s  wait 25%  1.5 GB  eta 1:01:01"
    )
    assert out.splitlines()[1].startswith("a [red]bracket[/red] in /a/[path] and a") and len(out.splitlines()) == 2
    assert not re.search(r"[\x1b\r]", out)
    assert lines(folder)[-1]["images_per_s"] == 1234.5 and lines(folder)[-1]["grad_norm"] == 3.0


@pytest.mark.parametrize(("progress", "is_plain"), [("plain", True), ("live", False), ("off", False)])
def test_progress_can_be_chosen(folder: Path, capsys, progress: str, is_plain: bool):
    log = RunLog(folder, Screen(progress))
    training(log)
    log.evaluating(1, 2, 20, 60)
    log.close(0, "finished")
    out = capsys.readouterr().out
    assert ("epoch 2/3  step 20/60" in out) is is_plain
    assert bool(out) is (progress != "off")
    assert [line["event"] for line in lines(folder)] == ["log", "train", "exit"]  # the file has it all the same


def test_other_ranks_keep_silent_and_write_only_their_bad_samples(folder: Path, capsys):
    folder.mkdir(parents=True)  # as rank 0 does
    log = RunLog(folder, rank=1, attempt=None)
    training(log)
    log.warn("careful")
    log.bad_sample(Bad("train", 1, "ant/1.jpg", "gone"))
    log.scores(SCORES, "scores.json", epoch=1)
    log.folder.write("config.yaml", "")
    log.close(0, "finished")
    assert [path.name for path in folder.iterdir()] == ["bad_samples.jsonl"]
    assert "ant/1.jpg" in (folder / "bad_samples.jsonl").read_text() and capsys.readouterr() == ("", "")


def test_two_runs_in_one_folder_are_refused(folder: Path):
    first = RunLog(folder)
    with pytest.raises(UsageError, match=rf"another run is using .*pid {os.getpid()} on .*--run.out DIR"):
        RunLog(folder)
    first.close(0, "finished")
    RunLog(folder).close(0, "finished")


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"run folder .*file/run cannot be written: .*; give another one with"):
        RunLog(tmp_path / "file" / "run")


def test_a_full_disk_is_reported_once_and_other_errors_end_the_run(folder: Path):
    said: list[str] = []
    place = RunFolder(folder, 0, Attempt(), said.append)
    for name in ("log.jsonl", "scores.json"):
        with place.may_lack_room(name):
            raise OSError(errno.ENOSPC, "No space left on device")
    assert said == [f"{folder} cannot be written: No space left on device; the log may lack lines"]
    with pytest.raises(DiskError, match=r"log\.jsonl"), place.may_lack_room("log.jsonl"):
        raise OSError(errno.EIO, "Input/output error")


def test_a_reader_that_went_away_does_not_end_the_run(folder: Path, monkeypatch):
    """As after `sightline train ... | head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w", buffering=1) as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        log = RunLog(folder, Screen("plain"))
        training(log)
        training(log)
        log.close(0, "finished")
        monkeypatch.undo()
    assert [line["event"] for line in lines(folder)] == ["log", "train", "train", "exit"]


def test_environment_names_what_a_result_depends_on():
    found = environment(devices.select("cpu"), ranks=4)
    assert found["ranks"] == 4 and found["device_kind"] == "cpu" and found["sightline"] == __version__
    assert found["packages"]["torch"] and "unknown" not in found["packages"].values()
    assert json.loads(json.dumps(found)) == found


def test_config_yaml_of_a_run_is_a_config_file(log: RunLog, folder: Path):
    recipe, run = config.load("demo_classification", ["--train.epochs", "3", "--run.out", str(folder)])
    log.folder.write("config.yaml", store.dump(recipe, run))
    path = folder / "config.yaml"
    assert config.load(config.recipe_named_in(path), [], path) == (recipe, run)


def test_the_time_to_train_stands_in_the_log_and_in_exit_json(folder: Path, capsys):
    log = RunLog(folder)
    times = {"wall_s": 7261.5, "running_s": 3600.25}
    log.evaluation("begin", 40)
    log.evaluation("end", 40, **times)
    log.scores(SCORES, "scores.json", times, epoch=2, step=40)
    total = {**times, "images_per_s": 51.2}
    log.finished("top1 0.7500 has reached the target 0.7 at step 40", 40, 40, times, total)
    log.close(0, "finished")
    kinds = ["log", "evaluate_begin", "evaluate_end", "evaluate", "time_to_train", "exit"]
    assert [line["event"] for line in lines(folder)] == kinds
    for line in (lines(folder)[2], lines(folder)[4]):
        assert {key: line[key] for key in ("step", "wall_s", "running_s")} == {"step": 40, **times}
    assert json.loads((folder / "scores.json").read_text())["time_to_train"] == times
    assert json.loads((folder / "exit.json").read_text())["time_to_train"] == times
    assert lines(folder)[-1].items() >= total.items()
    told = "has reached the target 0.7 at step 40; time to train 1:00:00 (2:01:01 with the pauses between starts)"
    assert f"{told} at 51 img/s\n" in capsys.readouterr().out


@pytest.mark.parametrize(("paused_s", "is_told"), [(0.9, False), (1.0, True)])
def test_pauses_of_a_second_are_told(folder: Path, capsys, paused_s: float, is_told: bool):
    log = RunLog(folder)
    times = {"wall_s": 64.0 + paused_s, "running_s": 64.0}
    log.finished("done", 40, 40, times, times)
    log.close(0, "finished")
    assert ("time to train 0:01:04 (0:01:05 with the pauses between starts)" in capsys.readouterr().out) is is_told


@pytest.mark.parametrize(
    ("scored_step", "told"),
    [
        (-1, "9 epochs are done; nothing was evaluated; total training time 1:00:00 at 51 img/s"),
        (20, "9 epochs are done; time to train 0:00:10; total training time 1:00:00 at 51 img/s"),
        (40, "9 epochs are done; time to train 0:00:10 at 51 img/s"),
    ],
)
def test_the_last_line_of_a_training_has_its_total_time_and_speed(folder: Path, capsys, scored_step: int, told: str):
    log = RunLog(folder)
    total = {"wall_s": 3600.0, "running_s": 3600.0, "images_per_s": 51.2}
    log.finished("9 epochs are done", 40, scored_step, {"wall_s": 10.0, "running_s": 10.0}, total)
    log.close(0, "finished")
    assert f"{told}\n" in capsys.readouterr().out
    assert lines(folder)[-1].items() >= {"event": "exit", "code": 0, **total}.items()


def test_the_board_has_the_numbers_of_the_original_scripts(tmp_path: Path):
    """Under our names; runs/events.py says which is which."""
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    flags = [*tiny(), "--train.epochs=2", "--run.log-every-steps=1", "--run.tensorboard"]
    api.train(*api.load("demo_classification", [*flags, f"--run.out={tmp_path}"]))
    board = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    names = ("loss", "lr", "top1", "images_per_s", "steps_per_s", "grad_norm")
    evaluated = ("top1", "top5", "loss", "begin", "end")
    tags = [*(f"train/{name}" for name in names), *(f"evaluate/{name}" for name in evaluated)]
    assert set(tags) <= set(board.Tags()["scalars"])
    assert [event.step for event in board.Scalars("train/steps_per_s")] == list(range(1, 7))
    begins, ends = board.Scalars("evaluate/begin"), board.Scalars("evaluate/end")
    assert [event.step for event in begins] == [event.step for event in ends] == [3, 6]
    assert all(begin.wall_time <= end.wall_time for begin, end in zip(begins, ends, strict=True))
    # A rate of steps times the batch is the rate of images.
    for steps, images in zip(board.Scalars("train/steps_per_s"), board.Scalars("train/images_per_s"), strict=True):
        assert images.value == pytest.approx(8 * steps.value, rel=1e-5)
    session = board.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert b"train.precision" in session and b"optimizer.lr" in session
    assert b"evaluate/top1" in board.SummaryMetadata("_hparams_/experiment").plugin_data.content
    tags = [value.tag for event in written(tmp_path / "tensorboard") for value in event.summary.value]
    assert tags[:2] == ["_hparams_/experiment", "_hparams_/session_start_info"], "from the start of the run on"
    assert tags[-1] == "_hparams_/session_end_info"


def written(folder: Path) -> list:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    return [event for path in folder.iterdir() for event in loader.EventFileLoader(str(path)).Load()]
