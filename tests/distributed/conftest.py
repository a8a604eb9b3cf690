"""Starts torchrun with the recipe of faulty_ranks.py, and reads what it left."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

RECIPE = Path(__file__).with_name("faulty_ranks.py")
LIMIT_S = 200  # after which a start counts as hung
FLAGS = ["--run.workers=0", "--run.device=cpu", "--run.threads=1", "--run.log-every-steps=1", "--run.keep=1000"]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Ranks:
    """`torchrun ... -m sightline train faulty_ranks.py --run.out=OUT`."""

    recipe = str(RECIPE)
    flags = FLAGS

    @contextlib.contextmanager
    def start(self, out: Path, launcher: list[str], *flags: str, **environ: str) -> Iterator[subprocess.Popen]:
        """What is left of it at the end is killed; torchrun's ranks have sessions of their own, but die with it."""
        command = [sys.executable, "-m", "torch.distributed.run", *launcher, "-m", "sightline", "train"]
        process = subprocess.Popen(
            [*command, self.recipe, *FLAGS, f"--run.out={out}", *flags],
            env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            kill_with_children(process.pid)
            process.wait()
            process.stdout.close()

    def run(self, out: Path, ranks: int, *flags: str, restarts: int = 0, **environ: str) -> str:
        """To its end, however that is; returns what it said."""
        launcher = ["--nproc-per-node", str(ranks), "--max-restarts", str(restarts), "--master-port", str(free_port())]
        with self.start(out, launcher, *flags, **environ) as process:
            said, _ = process.communicate(timeout=LIMIT_S)
        return said

    @staticmethod
    def events(out: Path, kind: str) -> list[dict[str, Any]]:
        """The whole lines of this kind in log.jsonl."""
        path = out / "log.jsonl"
        text = path.read_text() if path.exists() else ""
        lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        return [line for line in lines if line["event"] == kind]

    @staticmethod
    def ended(out: Path) -> dict[str, Any]:
        """How the run says that it ended."""
        return json.loads((out / "exit.json").read_text())

    @staticmethod
    def bits(out: Path, step: int) -> dict[str, str]:
        """sha256 of every tensor file of a checkpoint."""
        files = sorted((out / "checkpoints" / f"ckpt-{step:08d}").glob("*.safetensors"))
        return {file.name: sha256(file.read_bytes()).hexdigest() for file in files}


def children(pid: int) -> list[int]:
    """Of a process, as Linux lists them."""
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def kill_with_children(pid: int) -> None:
    """As when a host loses its power."""
    for each in [*children(pid), pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


@pytest.fixture(scope="session")
def ranks() -> Ranks:
    return Ranks()


@pytest.fixture(scope="session")
def lose_host():
    return kill_with_children
