"""What a run needs is proved before the first step: room, descriptors, a folder that can be written; and a folder that
is deleted, or a launcher that is killed, ends it (B5: 11, 12, 16)."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import warm

from sightline.engine.checkpoint import Checkpoints
from sightline.errors import DiskFull

FAULTY = str(Path(__file__).with_name("faulty.py"))
ONE_BYTE = torch.zeros(1, dtype=torch.uint8)


def test_no_room_for_two_checkpoints_is_refused_before_the_first_step(sightline, tmp_path):
    """A buffer of a petabyte, which takes no memory, stands in for the small disk."""
    ended = sightline.run(tmp_path / "run", "--model.claimed", str(10**15), FAULT="kill@train:1")
    assert ended.code == ended.exit_code_in_folder == 7, ended
    assert "MB free, a checkpoint takes 1,000,000,00" in ended.stderr and "room for two" in ended.stderr
    assert "--run.out DIR" in ended.stderr
    assert ended.checkpoints == []


def test_room_is_counted_in_checkpoints(tmp_path):
    """By the free bytes of the disk as it is."""
    said: list[str] = []
    checkpoints = Checkpoints(tmp_path, 2, said.append)

    def prove(share: float) -> None:
        checkpoints.prove_room({"model": {"w": ONE_BYTE.expand(int(share * shutil.disk_usage(tmp_path).free))}})

    with pytest.raises(DiskFull, match="room for two"):
        prove(0.6)
    assert said == []
    prove(0.4)
    assert "room for 2 more checkpoints" in said.pop()
    prove(0.2)
    (tmp_path / "ckpt-00000001").mkdir()
    prove(0.6)  # resumes: there is one already
    assert "room for 1 more" in said.pop()
    with pytest.raises(DiskFull, match="room for one more"):
        prove(1.1)
    assert said == []


@pytest.mark.slow
def test_disk_of_16_kb(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=16k none {disk}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("this system lets a user mount no disk of its own")
    train = f"{sys.executable} -m sightline train {FAULTY} --run.device cpu --run.workers 0 --run.out {disk}/run"
    ended = subprocess.run(["unshare", "-rm", "sh", "-c", f"{mount} && {train}"], capture_output=True, text=True)
    assert ended.returncode == 7, ended
    assert "0.0 MB free, a checkpoint takes 1." in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.parametrize("workers", ["0", "2"])
def test_too_few_descriptors_are_refused_with_their_number(sightline, halfway, tmp_path, workers):
    out = halfway(tmp_path / "run")
    ended = sightline.run(out, "--run.workers", workers, FAULT="files40@recipe:1")
    assert ended.code == 2, ended
    assert "may open 40 files (ulimit -Hn) and needs " in ended.stderr and "Traceback" not in ended.stderr
    assert "nofile=1024" in ended.stderr


def test_soft_limit_of_descriptors_is_raised(sightline, tmp_path):
    ended = sightline.run(tmp_path / "run", FAULT="softfiles40@recipe:1")
    assert ended.code == 0, ended


@pytest.mark.parametrize(
    "how", [pytest.param("deleted", marks=pytest.mark.slow), pytest.param("moved", marks=pytest.mark.slow), "replaced"]
)
def test_run_folder_that_vanishes_ends_the_run(sightline, tmp_path, how):
    out = tmp_path / "run"
    started = sightline.start(out, FAULT="stop@train:5")
    started.until_stopped()
    if how == "deleted":
        shutil.rmtree(out)
    elif how == "moved":
        out.rename(tmp_path / "elsewhere")
    else:
        shutil.rmtree(out)
        out.mkdir()
    os.kill(started.pid, signal.SIGCONT)
    ended = started.wait()
    assert ended.code == 7, ended
    assert f"run folder {out} was deleted or moved while this run was running" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert out.exists() == (how == "replaced")
    assert not (out / "checkpoints").exists() and not (out / "exit.json").exists(), "it is somebody else's folder"


def evaluate(folder: Path, *flags: object) -> warm.Ended:
    """`sightline evaluate` by a user who obeys permissions."""
    words = ["evaluate", folder, "--recipe", FAULTY, "--run.device=cpu", "--run.workers=0", *flags]
    return warm.start("sightline", *words, environ={"FAULT": "powerless@recipe:1"}).wait()


def test_read_only_run_is_evaluated_into_another_folder(reference, tmp_path):
    run = Path(shutil.copytree(reference().out, tmp_path / "run"))
    before = sorted(path.name for path in run.iterdir())
    run.chmod(0o555)
    try:
        refused = evaluate(run)
        scored = evaluate(run, "--run.out", tmp_path / "scores")
    finally:
        run.chmod(0o755)
    assert refused.code == 2, refused
    assert f"{run} cannot be written: Permission denied" in refused.stderr and "--run.out DIR" in refused.stderr
    assert scored.code == 0, scored
    assert f"scores are in {tmp_path / 'scores'}, {run} is as it was" in scored.stdout.replace("\n", " ")
    assert (tmp_path / "scores" / "scores-ckpt-00000016.json").exists()
    assert sorted(path.name for path in run.iterdir()) == before


LONG = ("--train.epochs", "100000", "--run.log-every-steps", "1")


@pytest.mark.slow
def test_killed_launcher_takes_its_ranks_along(sightline, tmp_path):
    out, temporary = tmp_path / "run", tmp_path / "t"
    temporary.mkdir()
    flags = ("--run.devices", "2", "--run.workers", "1", *LONG)
    started = sightline.start(out, *flags, TMPDIR=str(temporary))
    started.until(lambda: any(line["event"] == "train" for line in sightline.log(out)))
    os.kill(started.pid, signal.SIGKILL)
    started.process.wait()
    once((out / "exit.json").exists)
    assert '"code": 143' in (out / "exit.json").read_text()
    assert any(path.name.startswith("ckpt-") for path in (out / "checkpoints").iterdir())
    once(lambda: not list(temporary.glob("pymp-*")))


@pytest.mark.slow
def test_killed_run_leaves_no_socket_of_its_forkserver(sightline, tmp_path):
    out, temporary = tmp_path / "run", tmp_path / "t"
    temporary.mkdir()
    started = sightline.start(out, "--run.workers", "1", *LONG, TMPDIR=str(temporary))
    started.until(lambda: any(line["event"] == "train" for line in sightline.log(out)))
    assert list(temporary.glob("pymp-*"))
    os.kill(started.pid, signal.SIGKILL)
    started.process.wait()
    once(lambda: not list(temporary.glob("pymp-*")))


@pytest.mark.slow  # three seconds: two processes import torch
def test_a_run_killed_while_its_forkserver_begins_leaves_no_socket(tmp_path):
    """By then the forkserver has another parent."""
    code = """import os
from sightline.data.loading import forkserver
forkserver.start()
print(os.listdir(os.environ["TMPDIR"]), flush=True)
os.kill(os.getpid(), 9)"""
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL and "pymp-" in ended.stdout
    once(lambda: not list(tmp_path.glob("pymp-*")))


def once(fact: Callable[[], object]) -> None:
    """Wait for what processes do that nobody waits for."""
    deadline = time.monotonic() + warm.LIMIT_S
    while not fact():
        assert time.monotonic() < deadline, "nothing came of it"
        time.sleep(0.05)
