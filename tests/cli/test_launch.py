"""`sightline launch` and `--run.devices` as a user types them, with nothing started."""

import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
import yaml

from sightline import api, cli, config
from sightline.commands import launch_check as check
from sightline.engine.orders import refuse_uneven
from sightline.errors import UsageError

REPO = Path(__file__).resolve().parents[2]
SPLIT = ["--train.global-batch=512"]


def launch(*words: str) -> int:
    return cli.main(["launch", "demo_classification", *SPLIT, *words])


def test_print_is_what_can_be_saved_and_handed_over(capsys: pytest.CaptureFixture[str]):
    where = ["--nodes=8", "--per-node=8", "--print"]
    assert launch("--data.path", "/my data", *where, "--launcher", "slurm") == 0
    script = capsys.readouterr().out
    assert script.startswith("#!/bin/bash\n#SBATCH --job-name=demo-classification\n")
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    assert script.endswith("-m sightline train demo_classification --train.global-batch=512 --data.path '/my data'\n")

    assert (
        launch(*where, "--launcher=kubernetes", "--kubernetes.image=x", "--kubernetes.volumes", "claim:data:/data") == 0
    )
    assert [document["kind"] for document in yaml.safe_load_all(capsys.readouterr().out)] == ["Service", "Job"]


@pytest.mark.parametrize(
    ("volumes", "warning"),
    [
        (
            [],
            "the data /data and the run folder /workspace/runs/demo_classification are in no volume and vanish with "
            "the pod; give --kubernetes.volumes claim:NAME:/data:ro claim:NAME:/workspace/runs",
        ),
        (
            ["claim:data:/data:ro", "claim:more:/workspace:ro"],
            "the run folder /workspace/runs/demo_classification is in no writable volume and vanishes with the pod; "
            "give --kubernetes.volumes claim:data:/data:ro claim:more:/workspace:ro claim:NAME:/workspace/runs",
        ),
        (["claim:runs:/workspace"], ""),  # the image may hold the data
    ],
)
def test_what_is_lost_with_a_pod_is_said(volumes: list[str], warning: str, capsys: pytest.CaptureFixture[str]):
    where = ["--nodes=8", "--data.path=/data", "--print", "--launcher=kubernetes"]
    assert launch(*where, *(["--kubernetes.volumes", *volumes] if volumes else [])) == 0
    said = capsys.readouterr()
    assert said.err == (f"warning: {warning}\n" if warning else "") and said.out.startswith("---\napiVersion: v1")
    assert launch(*where, "--kubernetes.form=trainjob") == 0 and capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        ([], "a rank and its"),
        (["--max-restarts=1"], "8 ranks and their"),
        (["--cores=96"], ""),
        (["--cores=-1"], ""),
        (["--slurm.extra=--cpus-per-gpu=12"], ""),
    ],
)
def test_a_slurm_file_that_asks_for_no_cpus_is_warned_about(words: list[str], ranks: str, capsys):
    assert launch("--nodes=2", "--per-node=8", "--launcher=slurm", "--print", *words) == 0
    said = capsys.readouterr()
    told = f"warning: no --cores: Slurm gives each task one CPU, here for {ranks} loader workers"
    assert said.err.startswith(told) and said.err.count("\n") == 1 if ranks else said.err == ""
    assert said.out.startswith("#!/bin/bash\n")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--hosts=-oProxyCommand=x:8", "--print"], "is not a host"),
        (["--hosts=a:7", "--print"], "global_batch=512 cannot be split over 7 devices"),
        (["--print"], "give the hosts"),
        (["--hosts=a:8", "--run.devices=8", "--print"], "--hosts says how many ranks"),
        (["--hosts=elsewhere:8,there:8"], "run each line of --print on its host"),
    ],
)
def test_a_start_that_cannot_be_is_refused(words: list[str], text: str, capsys: pytest.CaptureFixture[str]):
    assert launch(*words) == 2
    assert text in capsys.readouterr().err


def test_volumes_of_a_batch_follow_the_ranks(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["launch", "unet2d", "--hosts=a:2,b:2", "--print"]) == 0
    assert cli.main(["launch", "unet2d", "--hosts=a:2,b:2", "--print", "--data.nvol=2"]) == 2
    assert "is 2 volumes of 32 slices, which cannot be split over 4 devices" in capsys.readouterr().err


def test_a_flag_that_neither_launch_nor_the_recipe_knows_is_refused(capsys: pytest.CaptureFixture[str]):
    assert launch("--hostz", "a:8") == 2
    said = capsys.readouterr().err
    assert "unknown flag --hostz of launch" in said and "`sightline launch --help`" in said


@pytest.mark.parametrize(("launcher", "program"), [("slurm", "sbatch"), ("kubernetes", "kubectl")])
def test_without_the_scheduler_the_user_is_asked_to_carry_the_file(
    launcher: str, program: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ["--nodes=8", f"--launcher={launcher}", "--kubernetes.image=x"]
    assert launch(*words) == 2
    said = capsys.readouterr().err
    assert f"{program} is not installed here; write the file with --print" in said
    port = "a port that follows from the job's number" if launcher == "slurm" else "port 29500"
    assert f"they meet on the first, at {port}, over a network that must be trusted" in said
    assert launch(*words, "--check") == 2
    assert f"fail  here             {program}" in capsys.readouterr().out


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_check_of_this_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(REPO))  # the check looks from another folder
    port = free_port()
    words = ["--hosts=localhost:8", "--check", f"--port={port}"]
    assert launch(*words, "--interfaces=lo") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and all(line.startswith("ok ") for line in lines)
    with socket.create_server(("", port)):
        assert launch(*words, "--interfaces=lo,nonesuch") == 2
    out = capsys.readouterr().out
    assert "no nonesuch  -> it has " in out and f"{port} is in use  -> choose another with --port" in out
    assert f"something answers at port {port}" in out


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("exec sleep 60", "no answer in 0.2 s  -> look at the host"),
        ("echo one >&2; echo two >&2; exit 3", "exit code 3: two  -> name --python"),
        ("echo three; exit 4", "exit code 4: three  -> name --python"),
        ("exit 5", "exit code 5: nothing  -> name --python"),
        ("echo welcome", "unexpected output: 'welcome\\n'  -> silence its shell profile"),
        ("", "is not installed here  -> install it, or name it with --python"),
    ],
    ids=["hangs", "fails", "fails on stdout", "fails silently", "chatters", "absent"],
)
def test_check_of_a_python_that_does_not_answer(capsys, monkeypatch, tmp_path: Path, script: str, found: str):
    timeout_s = 0.2 if "sleep" in script else 60
    python = tmp_path / "python"
    if script:
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
    monkeypatch.setattr(check, "PROBE_TIMEOUT_S", timeout_s)
    assert launch("--hosts=localhost:8", "--check", f"--port={free_port()}", f"--python={python}") == 2
    first, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("fail  localhost        python ") and first.endswith(found)


@pytest.mark.skipif(shutil.which("ssh") is None, reason="ssh is not installed")
def test_check_by_ssh_where_no_sshd_answers(capsys: pytest.CaptureFixture[str]):
    """Refused, told with its remedy, and nobody is asked for a password."""
    assert launch("--hosts=127.0.0.1:8", "--launcher=ssh", "--check", f"--ssh-port={free_port()}") == 2
    first, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("fail  127.0.0.1        ssh ") and "Connection refused" in first
    assert "must work without a question" in first


TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "x"}


@pytest.mark.parametrize(
    ("words", "environ", "text"),
    [
        (["--run.devices=2"], {**TORCHRUN, "MASTER_PORT": "1"}, "--run.devices 2, but torchrun has started 4"),
        (["--run.devices=2", "--run.device=cuda"], {}, "'cuda'"),
        (["--run.devices=-1"], {}, "run.devices=-1 must be at least 0"),
    ],
)
def test_devices_that_cannot_be_are_refused(
    words: list[str], environ: dict[str, str], text: str, capsys: pytest.CaptureFixture[str], monkeypatch
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["train", "demo_classification", *words]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "benchmark"])
def test_a_batch_that_cannot_be_split_is_refused_once_and_nothing_starts(
    command: str, tmp_path: Path, monkeypatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    small = ["--data.path=synthetic:samples=10", "--data.task=04", "--train.global-batch=9"]
    assert cli.main([command, "unet2d", *small, "--run.devices=2", "--run.device=cpu"]) == 2
    text = "global_batch=9 cannot be split over 2 devices"
    assert re.fullmatch(f"error: .*{text}.*\n", capfd.readouterr().err) and not any(tmp_path.iterdir())


def test_volumes_are_left_to_the_ranks_because_shallow_ones_are_split_further():
    recipe, _ = config.load("demo_segmentation", ["--train.global-batch=16", "--data.nvol=2"])
    refuse_uneven(recipe, 4)


def test_a_script_that_starts_no_ranks_refuses_devices(tmp_path: Path):
    flags = {"run.devices": 2, "run.device": "cpu", "run.out": str(tmp_path)}
    with pytest.raises(UsageError, match="only the commands train, evaluate, predict and benchmark start ranks"):
        api.train("demo_classification", flags=flags)
