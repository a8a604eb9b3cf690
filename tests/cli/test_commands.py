"""Each command as a user types it, through main() in this process: what it prints, leaves behind and returns."""

import gzip
import json
import math
import os
import pty
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torchvision
from tiny import SMALL

from sightline import __version__, cli, recipes

NAME = "demo_classification"
HERE = ["--run.workers=0", "--run.device=cpu", "--train.precision=fp32"]


@pytest.fixture(scope="module")
def trained(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two epochs; for reading only."""
    out = tmp_path_factory.mktemp("trained") / "run"
    code = cli.main(["train", NAME, *SMALL, *HERE, f"--data.path={shapes}", f"--run.out={out}", "--train.epochs=2"])
    assert code == 0
    return out


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# The command line itself


def test_version(sightline):
    said = sightline("--version")
    assert (said.code, said.out) == (0, f"sightline {__version__}\n")


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_a_reader_that_went_away_ends_an_overview_quietly(flag: str):
    """As after `sightline --help | head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "sightline", flag]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_help_and_nothing_show_the_commands(sightline):
    for arguments, code in ((["--help"], 0), (["-h"], 0), ([], 2)):
        said = sightline(*arguments)
        assert said.code == code
        assert all(f"  {name} " in said.out for name in cli.COMMANDS)


@pytest.mark.parametrize("command", sorted(cli.COMMANDS))
def test_every_command_explains_itself(sightline, command: str):
    said = sightline(command, "--help")
    assert said.code == 0 and command in said.out and not said.err


def test_an_unknown_command_is_usage(sightline):
    for typed, hint in (
        ("trian", "did you mean 'train'? Known"),
        (NAME, f"did you mean `sightline train {NAME}`? Known"),
        ("xyz", "known"),
    ):
        said = sightline(typed, NAME)
        assert (said.code, said.out) == (2, "")
        assert said.err == f"error: unknown command '{typed}'; {hint}: {', '.join(cli.COMMANDS)}\n"


def test_ctrl_c_outside_of_training_is_130(sightline, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.COMMANDS, "doctor", interrupted)
    assert sightline("doctor").code == 130


IMPORTS = "sys.meta_path.insert(0, type('Slow', (), {'find_spec': interrupted}))"


@pytest.mark.parametrize(
    ("during", "at", "said"),
    [
        (IMPORTS, "sightline.terminal", "stopped by Ctrl-C\n"),
        (IMPORTS, "sightline.cli", "stopped by Ctrl-C\n"),
        (
            "from sightline import cli; cli.COMMANDS['doctor'] = interrupted",
            "",
            "stopped by Ctrl-C; the same command starts again, or resumes if something was saved\n",
        ),
    ],
    ids=["first import", "imports", "command"],
)
def test_ctrl_c_ends_the_process_with_one_line_and_130(tmp_path: Path, during: str, at: str, said: str):
    """Also within exec(), after which Python would end itself by the signal."""
    code = (
        "import runpy, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # whoever started the tests may have ignored it
        "def interrupted(name, *_):\n"
        f"    if isinstance(name, list) or name == '{at}':\n"
        "        exec('signal.raise_signal(signal.SIGINT)')\n"
        f"{during}\n"
        "runpy.run_module('sightline', run_name='__main__', alter_sys=True)\n"
    )
    (tmp_path / "interrupted.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-m", "interrupted", "doctor"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (130, said)


# list


def test_list(sightline):
    said = sightline("list")
    assert said.code == 0
    assert [line.split()[0] for line in said.out.splitlines()] == recipes.names()
    one = sightline("list", NAME)
    assert one.code == 0 and f"sightline train {NAME} --data.path" in one.out and "Expected: " in one.out
    unknown = sightline("list", "demo_classifikation")
    assert unknown.code == 2 and f"did you mean '{NAME}'?" in unknown.err


# inspect


def test_inspect_counts_as_published(sightline):
    """ResNet-18 of torchvision: 11,689,512 parameters, 1.814 G multiply-adds at 224 pixels."""
    said = sightline("inspect", NAME, "--json", "--model.width=64", "--data.classes=1000", "--data.eval-size=224")
    found = json.loads(said.out)
    assert said.code == 0
    weights = torchvision.models.ResNet18_Weights.IMAGENET1K_V1
    assert found["parameters"] == weights.meta["num_params"] == sum(g["parameters"] for g in found["groups"])
    assert found["forward_gflop"] == pytest.approx(2 * weights.meta["_ops"], rel=0.01)
    vectors = sum(p.numel() for p in torchvision.models.resnet18().parameters() if p.ndim == 1)
    assert {group["weight_decay"]: group["parameters"] for group in found["groups"]}[0.0] == vectors
    assert found["config"]["model"]["width"] == 64 and found["config"]["run"]["keep"] == 2
    assert "steps" not in found


def test_inspect_of_a_network_of_slices_counts_as_published(sightline):
    """20,613,092 parameters of NVIDIA's U-Net for task 01, of whose 484 volumes fold 0 leaves 387."""
    found = json.loads(sightline("inspect", "unet2d", "--json", "--model.no-deep-supervision").out)
    assert found["parameters"] == 20_613_092
    assert (found["steps_per_epoch"], found["samples"]) == (387, 387 * 64)


def test_inspect_with_data_knows_steps_and_rates(sightline, shapes: Path):
    flags = ["--train.epochs=4", "--train.global-batch=20", "--schedule.warmup-epochs=1", "--optimizer.lr=0.4"]
    said = sightline("inspect", NAME, f"--data.path={shapes}", *flags, "--json", "--lr-at", 0, 3, 10)
    found = json.loads(said.out)
    assert (found["samples"], found["steps_per_epoch"], found["steps"], found["classes"]) == (80, 4, 16, 10)
    assert found["lr_at"] == pytest.approx({"0": 0.1, "3": 0.4, "10": 0.2})
    text = sightline("inspect", NAME, f"--data.path={shapes}", *flags, "--lr-at", 3)
    assert "80 samples, 4 steps per epoch, 16 in all" in text.out and "learning rate at step 3: 0.4" in text.out


def test_inspect_refusals(sightline):
    said = sightline("inspect", NAME, "--lr-at", 3)
    assert said.code == 2 and "give --data.path or --data.samples too" in said.err
    said = sightline("inspect", NAME, "--data.classes=0")
    assert said.code == 2 and "give --data.path DIR or --data.classes N" in said.err
    said = sightline("inspect", "resnet50", "--lr-at", -5, 3)
    assert said.code == 2 and "--lr-at -5 is not a step" in said.err
    said = sightline("inspect", "resnet50", "--ranks", 3)
    assert said.code == 2 and "global_batch=256 cannot be split over 3 devices" in said.err
    assert sightline("inspect").code == 2


# prepare, doctor


def test_prepare(sightline, tmp_path: Path):
    amounts = ["--only", "classification", "--train-per-class=1", "--val-per-class=1"]
    said = sightline("prepare", "shapes", "--out", tmp_path / "drawn", *amounts)
    assert said.code == 0 and said.out.startswith("shapes: ") and str(tmp_path / "drawn") in said.out
    assert len(list((tmp_path / "drawn" / "classification" / "train").iterdir())) == 10
    assert "shapes" in sightline("prepare", "--help").out
    for arguments in ([], ["images"]):
        refused = sightline("prepare", *arguments)
        assert refused.code == 2 and "prepare what? Available: " in refused.err and "shapes" in refused.err
    assert sightline("prepare", "shapes").code == 2  # --out is missing


def test_doctor(sightline, tmp_path: Path):
    said = sightline("doctor", "--folder", tmp_path)
    rows = [line.split()[0] for line in said.out.splitlines()]
    assert said.code == (2 if "fail" in rows else 0)
    assert set(rows) <= {"ok", "absent", "warn", "fail"} and any("torch" in line for line in said.out.splitlines())
    assert list(tmp_path.iterdir()) == []


# train


def test_train_leaves_a_run_folder(trained: Path):
    names = {path.name for path in trained.iterdir()}
    assert {"config.yaml", "environment.json", "log.jsonl", "scores.json", "exit.json", "checkpoints"} <= names
    assert {"data.json", "samples.jpg"} <= names
    assert json.loads((trained / "exit.json").read_text())["code"] == 0
    first = json.loads((trained / "log.jsonl").read_text().splitlines()[0])
    assert (first["event"], first["schema"]) == ("log", 1)
    assert json.loads((trained / "environment.json").read_text())["device_kind"] == "cpu"


def logged_warnings(run: Path) -> list[str]:
    events = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [event["text"] for event in events if event["event"] == "warning"]


def test_every_warning_that_a_run_prints_is_in_its_log_once(sightline, shapes: Path, tmp_path: Path):
    """At its start, when it resumes, and in an evaluation of it."""
    run = tmp_path / "run"
    late = "--schedule.warmup-epochs=9"
    flags = [*SMALL, *HERE, f"--data.path={shapes}", f"--run.out={run}", "--train.epochs=2", late]
    said = [sightline("train", NAME, *flags, f"--train.max-steps={steps}") for steps in (1, 2)]
    said.append(sightline("evaluate", run, *HERE[:2], "--train.eval-max-steps=1"))
    printed = [re.findall("^warning: (.*)", each.out, re.M) for each in said]
    assert [each.code for each in said] == [0, 0, 0] and [len(each) for each in printed] == [2, 2, 1], said
    assert any(text.startswith("80 images are few for training from scratch") for text in printed[0])
    assert logged_warnings(run) == [text for each in printed for text in each]


def test_warnings_of_libraries_are_in_the_log_too(shapes: Path, tmp_path: Path):
    body = 'import warnings; warnings.warn("made of tin", RuntimeWarning); return super().loss(model, batch)'
    path, run = own_recipe(tmp_path, body), tmp_path / "run"
    flags = [*SMALL, *HERE, f"--data.path={shapes}", f"--run.out={run}", "--train.max-steps=2"]
    with pytest.warns(RuntimeWarning, match="made of tin") as shown:
        assert cli.main(["train", str(path), *flags]) == 0
    assert [text for text in logged_warnings(run) if "tin" in text] == ["RuntimeWarning: made of tin"] * len(shown)


def test_train_says_what_it_does(sightline, shapes: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("sightline.runs.log.FIRST_STEP_S", 600)  # also on a machine that is busy
    out = tmp_path / "run"
    flags = [*SMALL, *HERE, f"--data.path={shapes}", f"--run.out={out}", "--train.epochs=1"]
    said = sightline("train", NAME, *flags)
    lines = said.out.splitlines()
    assert said.code == 0
    assert lines.pop(0) == "data: 10 classes, 80 + 40 images"
    assert lines[0] == f"{NAME}: 80 training and 40 evaluation samples"
    assert lines[1].startswith("1 epoch of 5 steps, batch 16, base rate 0.2, fp32 on ")
    assert lines.pop(2).startswith("cache ON: 80 decoded images of train need 1.2 MiB, ")
    assert lines.pop(2).startswith("cache ON: 40 decoded images of val need 0.6 MiB, ")
    assert lines.pop(2).startswith("warning: 80 images are few for training from scratch")
    assert re.fullmatch(r"first step after [0-9.]+ s(, [0-9.]+ s of it for data)?: loss [0-9.]+", lines[2])
    assert re.fullmatch(r"epoch 1/1  loss [0-9.]+  top1 0\.\d{4} \(best so far\)  0:00:\d\d at [0-9,]+ img/s", lines[3])
    assert lines[4].startswith("  val  top5 0.")
    assert lines.pop(5).startswith("warning: the validation loss is this high because batch-norm statistics lag")
    assert re.fullmatch(r"1 epoch is done; time to train 0:00:\d\d at [0-9,]+ img/s", lines[5])
    assert re.fullmatch(r"finished: best top1 0\.\d{4} at epoch 1", lines[6])
    assert lines[7] == f"results are in {out}; evaluate and predict use ckpt-00000005"
    assert "img/s" not in "".join(lines[:3] + lines[4:5] + lines[6:]) and "a stop (SIGTERM)" not in said.out


@pytest.mark.parametrize("form", [["--config", "FILE"], ["--config=FILE"]], ids=str)
def test_train_from_the_config_of_a_run(sightline, trained: Path, tmp_path: Path, form: list[str]):
    form = [each.replace("FILE", str(trained / "config.yaml")) for each in form]
    said = sightline("train", *form, f"--run.out={tmp_path / 'again'}")
    assert said.code == 0, said
    model = Path("checkpoints", "ckpt-00000010", "model.safetensors")
    assert (tmp_path / "again" / model).read_bytes() == (trained / model).read_bytes()


def test_train_stops_early_and_says_why(sightline, shapes: Path, tmp_path: Path):
    out = tmp_path / "run"
    command = ["train", NAME, *SMALL, *HERE, f"--data.path={shapes}", f"--run.out={out}", "--train.epochs=4"]
    stopped = sightline(
        *command, "--train.max-steps=7", "--train.fp32-ops", "BatchNorm2d", "relu", "--run.warmup-steps=1"
    )
    assert stopped.code == 0
    assert "train.fp32_ops: the model has no module relu; left alone" in stopped.out
    assert "train.max_steps=7 steps are done; time to train 0:00:" in stopped.out
    assert "base rate 0.2," in stopped.out and re.search("^epoch 2/4  loss .*  top1 0.", stopped.out, re.M)
    assert "\nfinished: best top1 " in stopped.out
    again = sightline(*command, "--train.max-steps=7", "--train.fp32-ops", "BatchNorm2d", "relu")
    assert again.code == 0 and f"{out} is finished, train.max_steps=7 steps are done; " in again.out
    assert "step 8/" not in again.out
    diverged = sightline(*command, "--train.diverged-score=1", "--train.fp32-ops", "BatchNorm2d", "relu")
    assert diverged.code == 5 and diverged.err.startswith("error: diverged: top1 ")
    percent = sightline(*command, "--train.target-score=75.9")
    assert percent.code == 2 and "a share, not per cent" in percent.err


def test_inspect_knows_short_epochs_and_what_learns(sightline, shapes: Path):
    flags = [f"--data.path={shapes}", "--train.global-batch=20", "--train.epochs=4", "--train.steps-per-epoch=3"]
    found = json.loads(sightline("inspect", NAME, *flags, "--train.trainable=head", "--json").out)
    assert (found["steps_per_epoch"], found["steps"]) == (3, 12)
    assert sum(group["parameters"] for group in found["groups"]) == 10 * 256 + 10 < found["parameters"]


def test_train_refuses_what_it_cannot_understand(sightline, tmp_path: Path):
    for arguments, message in (
        ([], "train: which recipe? Available: classification"),
        (["--config"], "--config needs a file"),
        (["resnet_50000"], "unknown recipe 'resnet_50000'"),
        ([tmp_path / "gone.py"], "does not exist"),
        (["--config", tmp_path / "gone.yaml"], "gone.yaml does not exist"),
        (["--config", tmp_path], "cannot be read as YAML"),
        ([NAME, *HERE], "no data: give --data.path DIR"),
        ([NAME, "--run.device=abacus"], "device 'abacus' is unknown"),
        ([NAME, *HERE, f"--data.path={tmp_path}"], "holds nothing that this recipe can read"),
        ([NAME, "--train.epochs=0"], "train.epochs=0 must be at least 1"),
    ):
        said = sightline("train", *arguments, *([f"--run.out={tmp_path / 'run'}"] if NAME in arguments else []))
        assert said.code == 2 and message in said.err, said
        assert "Traceback" not in said.err
    assert sightline("train", NAME, "--train.epoch=3").code == 2


def refused(sightline, run: Path, code: int, message: str, *arguments: object) -> None:
    """The exit code of the process and that in the run folder are the same."""
    said = sightline("train", NAME, *SMALL, *HERE, f"--run.out={run}", *arguments)
    assert said.code == code and message in said.err, said
    told = json.loads((run / "exit.json").read_text())
    assert told["code"] == code and message in told["reason"]


def test_exit_codes_stand_in_the_run_folder(sightline, shapes: Path, tmp_path: Path):
    for name in ("usage", "data"):
        (tmp_path / name).mkdir()
    refused(sightline, tmp_path / "usage", 2, "no data", "--data.path=")
    refused(sightline, tmp_path / "data", 3, "10 classes", f"--data.path={shapes}", "--data.classes=7")
    (tmp_path / "checkpoint" / "checkpoints" / "ckpt-00000001").mkdir(parents=True)
    refused(sightline, tmp_path / "checkpoint", 4, "no checkpoint that verifies", f"--data.path={shapes}")
    diverging = ["--optimizer.lr=1e30", "--schedule.kind=constant", "--schedule.warmup-epochs=0"]
    refused(sightline, tmp_path / "loss", 5, "not finite in step 1", f"--data.path={shapes}", *diverging)


def own_recipe(folder: Path, statement: str) -> Path:
    """The demo with a task whose loss does something else."""
    path = folder / "own.py"
    path.write_text(
        textwrap.dedent(f'''
        """A task of one's own."""
        import dataclasses

        import torch
        from sightline.recipes import {NAME}
        from sightline.tasks.classification import Classification


        @dataclasses.dataclass(frozen=True)
        class Own(Classification):
            def loss(self, model, batch):
                {statement}


        def recipe():
            return dataclasses.replace({NAME}.recipe(), name="own", task=Own())
        ''')
    )
    return path


def test_out_of_memory_is_6_with_advice(sightline, shapes: Path, tmp_path: Path):
    path = own_recipe(tmp_path, 'raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")')
    run = tmp_path / "run"
    said = sightline("train", path, *SMALL, *HERE, f"--data.path={shapes}", f"--run.out={run}")
    assert said.code == 6 and "--train.accumulation 2" in said.err and "tried to allocate 2.00 GiB" in said.err
    told = json.loads((run / "exit.json").read_text())
    assert told["code"] == 6 and "--train.accumulation 2" in told["reason"]


def test_a_profile_traces_the_steps_that_the_log_names(sightline, shapes: Path, tmp_path: Path):
    counted = 'Own.calls = getattr(Own, "calls", 0) + 1'
    marked = 'torch.profiler.record_function(f"loss number {Own.calls}")'
    path = own_recipe(tmp_path, f"{counted}; {marked}.__enter__(); return super().loss(model, batch)")
    run = tmp_path / "run"
    flags = [*SMALL, *HERE, f"--data.path={shapes}", f"--run.out={run}", "--train.max-steps=5", "--run.profile=3,4"]
    said = sightline("train", path, *flags, "--run.log-every-steps=1")
    assert said.code == 0 and "steps 3 to 4 on " in said.out, said
    with gzip.open(run / "profile" / "trace.json.gz", "rt") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {f"loss number {number}" for number in range(9)} & names == {"loss number 3", "loss number 4"}
    assert json.loads((run / "profile" / "time.json").read_text())["steps"] == [3, 4]
    said = sightline("train", path, *flags, f"--run.out={run}-2", "--run.profile=0,1")
    assert said.code == 2 and "steps are 1 to 5, as the log counts them; use --run.profile 1,1" in said.err


def test_an_error_that_is_not_ours_keeps_its_traceback_and_is_reported(shapes: Path, tmp_path: Path):
    path = own_recipe(tmp_path, 'raise RuntimeError("a bug")')
    run = tmp_path / "run"
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["train", str(path), *SMALL, *HERE, f"--data.path={shapes}", f"--run.out={run}"])
    told = json.loads((run / "exit.json").read_text())
    assert (told["code"], told["reason"]) == (1, "RuntimeError: a bug")
    assert (
        cli.main(["train", NAME, *SMALL, *HERE, f"--data.path={shapes}", f"--run.out={run}", "--train.epochs=1"]) == 0
    )


# evaluate


def test_evaluate_shows_every_class(sightline, run: Path):
    before = json.loads((run / "scores.json").read_text())
    exit_before = (run / "exit.json").read_bytes()
    said = sightline("evaluate", run, *HERE[:2], "--checkpoint", "latest")
    assert said.code == 0
    lines = said.out.splitlines()
    assert lines[0].startswith("evaluated checkpoint ckpt-00000010  step 10  top1 ") and lines[0].endswith("40 samples")
    assert lines[1].startswith("  top5 0.") and " balanced_accuracy 0." in lines[1] and " macro_f1 0." in lines[1]
    rows = [line.split() for line in lines[2:12]]
    worst = [line for line in lines[12:] if line.startswith("  worst: ")]
    assert [line.split()[1] for line in worst] == [row["path"] for row in before["worst"][: len(worst)]] and worst
    assert all(Path(row["path"]).is_file() and row["path"].endswith(row["name"]) for row in before["worst"])
    assert [row[0] for row in rows] == [row["class"] for row in before["tables"]["classes"]] and len(rows) == 10
    names = ["recall", "precision", "f1"]
    assert all([*row[1:7:2], *row[7:]] == [*names, "4", "images"] for row in rows)
    assert sum(float(row[2]) for row in rows) / 10 == pytest.approx(before["values"]["top1"], abs=1e-3)
    assert json.loads((run / "scores.json").read_text()) == before  # of the last epoch
    after = json.loads((run / "scores-ckpt-00000010.json").read_text())
    assert after["values"] == before["values"] and after["checkpoint"] == "ckpt-00000010"
    assert (run / "exit.json").read_bytes() == exit_before  # how training ended


def test_evaluate_chooses_a_checkpoint(sightline, run: Path):
    by_name = sightline("evaluate", run, *HERE[:2], "--checkpoint", "ckpt-00000005")
    assert by_name.code == 0 and "checkpoint ckpt-00000005  step 5" in by_name.out
    itself = sightline("evaluate", run / "checkpoints" / "ckpt-00000005", *HERE[:2])
    assert itself.out == by_name.out
    best = (run / "checkpoints" / "best").read_text().strip()
    assert f"checkpoint {best}  " in sightline("evaluate", run, *HERE[:2]).out
    shutil.copytree(run / "checkpoints" / "ckpt-00000005", run.parent / "moved")
    assert sightline("evaluate", run.parent / "moved", *HERE[:2]).code == 0  # a checkpoint carried elsewhere
    missing = sightline("evaluate", run, "--checkpoint", "ckpt-7")
    assert missing.code == 4 and "holds no 'ckpt-7'" in missing.err


def test_evaluate_refuses_a_folder_that_is_not_a_run(sightline, tmp_path: Path):
    (tmp_path / "runs").mkdir()
    for folder, told in (
        ("runs", "is neither a run folder nor a checkpoint"),
        ("run", f"did you mean {tmp_path}/runs?"),
    ):
        said = sightline("evaluate", tmp_path / folder)
        assert said.code == 4 and told in said.err
    assert sightline("evaluate").code == 2
    assert list(tmp_path.rglob("*")) == [tmp_path / "runs"]


def test_evaluate_on_other_images(sightline, run: Path, shapes: Path, tmp_path: Path):
    """The same classes elsewhere are scored; other classes are refused, also where their number is the same."""
    for split in ("train", "val"):
        for source in sorted((shapes / split).iterdir()):
            if source.is_dir():
                (tmp_path / "same" / split).mkdir(parents=True, exist_ok=True)
                (tmp_path / "same" / split / source.name).symlink_to(source)
                (tmp_path / "other" / split).mkdir(parents=True, exist_ok=True)
                (tmp_path / "other" / split / f"a{source.name}").symlink_to(source)
    expected = sightline("evaluate", run, *HERE[:2]).out.replace(str(shapes), str(tmp_path / "same"))
    assert sightline("evaluate", run, *HERE[:2], "--data.path", tmp_path / "same").out == expected
    said = sightline("evaluate", run, *HERE[:2], "--data.path", tmp_path / "other")
    assert said.code == 3 and "it was trained on 10 classes" in said.err and "found 10" in said.err
    said = sightline("evaluate", run, *HERE[:2], "--data.path=synthetic:classes=7,samples=80", "--data.classes=0")
    assert said.code == 3 and "found 7" in said.err
    (tmp_path / "other" / "val" / "new").mkdir()
    said = sightline("evaluate", run, *HERE[:2], "--data.path", tmp_path / "other")
    assert said.code == 3 and "has class folders that" in said.err


def test_evaluate_writes_elsewhere_when_told_to(sightline, run: Path, tmp_path: Path):
    """Needed for a run that is still at work, or that belongs to somebody else."""
    before = contents(run)
    said = sightline("evaluate", run, *HERE[:2], f"--run.out={tmp_path / 'mine'}")
    assert said.code == 0
    assert contents(run) == before
    assert math.isfinite(json.loads(next((tmp_path / "mine").glob("scores-ckpt-*.json")).read_text())["values"]["loss"])


def test_evaluate_does_not_hold_the_folder_after_an_error(sightline, run: Path, shapes: Path):
    """The lock of a run folder ends with the command, however it ended."""
    victim = next(path for path in sorted((shapes / "val").rglob("*")) if path.is_file())
    copy = run.parent / "images"
    shutil.copytree(shapes, copy)
    (copy / victim.relative_to(shapes)).write_text("not an image")
    assert sightline("evaluate", run, *HERE[:2], f"--data.path={copy}").code == 3
    assert sightline("evaluate", run, *HERE[:2]).code == 0


def test_the_exit_code_outlives_the_terminal():
    """Writing to a closed terminal is itself an error, which must not hide the code."""
    master, slave = pty.openpty()
    wait = "import sys; from sightline.cli import main; sys.stdin.read(); sys.exit(main(['nonsense']))"
    with subprocess.Popen([sys.executable, "-c", wait], stdin=subprocess.PIPE, stderr=slave) as process:
        os.close(slave)
        os.close(master)
    assert process.returncode == 2


STARTS_ANOTHER = """
import subprocess, sys
from sightline import cli
cli.COMMANDS["start"] = lambda flags: subprocess.run([sys.executable, "-m", "sightline", "--version"], check=True)
sys.exit(cli.main(["start"]))
"""


def test_processes_of_a_command_import_nothing_from_the_current_folder(tmp_path: Path):
    """Ranks are started as `python -m sightline`, which would put the folder first: it may hold a stranger's data."""
    for name in ("data", "bin"):
        (tmp_path / name).mkdir()
    (tmp_path / "data" / "textwrap.py").write_text("print('a stranger speaks')")
    (tmp_path / "bin" / "sightline").write_text(STARTS_ANOTHER)
    environment = os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[1])}
    command = [sys.executable, tmp_path / "bin" / "sightline"]
    done = subprocess.run(command, cwd=tmp_path / "data", env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"sightline {__version__}\n", done.stdout + done.stderr


def test_a_command_that_used_torch_leaves_without_taking_python_apart():
    code = (
        "import atexit, sys, threading, types; sys.modules['torch'] = types.ModuleType('torch')\n"
        "class Late:\n    def __del__(self): print('taken apart')\n"
        "late = Late(); atexit.register(print, 'exit handler')\n"
        "threading.Timer(0.05, print, ['thread']).start()\n"
        "from sightline.__main__ import run; sys.argv = ['sightline', 'list', 'nothing']; run()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and "unknown recipe 'nothing'" in done.stderr
    assert done.stdout == "thread\nexit handler\n"
