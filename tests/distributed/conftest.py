"""Starts torchrun with the recipe of faulty_ranks.py, and reads what it left."""

import contextlib
import json
import runpy
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import warm

RECIPE = Path(__file__).with_name("faulty_ranks.py")
STARTED = runpy.run_path(str(Path(__file__).with_name("started.py")))
LIMIT_S = STARTED["LIMIT_S"]
FLAGS = [
    "--run.workers=0",
    "--run.device=cpu",
    "--run.threads=1",
    "--run.log-every-steps=1",
    "--run.keep=1000",
    "--run.report=off",
]


class Ranks:
    """`torchrun ... -m sightline train faulty_ranks.py --run.out=OUT`."""

    recipe = str(RECIPE)
    flags = FLAGS

    def start(
        self, out: Path, launcher: list[str], *flags: str, **environ: str
    ) -> contextlib.AbstractContextManager[subprocess.Popen]:
        """Start ranks; those left at the end are killed."""
        command = [sys.executable, "-m", "torch.distributed.run", *launcher, "-m", "sightline", "train"]
        return STARTED["started"]([*command, self.recipe, *FLAGS, f"--run.out={out}", *flags], **environ)

    def run(self, out: Path, ranks: int, *flags: str, restarts: int = 0, **environ: str) -> str:
        """To its end, however that is; returns what it said."""
        launcher = [
            "--nproc-per-node",
            str(ranks),
            "--max-restarts",
            str(restarts),
            "--master-port",
            str(warm.free_port()),
        ]
        with self.start(out, launcher, *flags, **environ) as process:
            said, _ = process.communicate(timeout=LIMIT_S)
        return said

    def run_warm(self, out: Path, ranks: int, *flags: str, restarts: int = 0, **environ: str) -> str:
        """The same by torchrun's own agent in a process that has imported torch, as its ranks have then."""
        launcher = ["--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
        words = ["sightline", "train", self.recipe, *FLAGS, f"--run.out={out}", *flags]
        ended = warm.start("torchrun", *launcher, *words, environ=environ).wait()
        return ended.stdout + ended.stderr

    events = staticmethod(STARTED["events"])

    @staticmethod
    def ended(out: Path) -> dict[str, Any]:
        """Return how the run ended, by its own account."""
        return json.loads((out / "exit.json").read_text())

    @staticmethod
    def bits(out: Path, step: int) -> dict[str, str]:
        """sha256 of every tensor file of a checkpoint."""
        files = sorted((out / "checkpoints" / f"ckpt-{step:08d}").glob("*.safetensors"))
        return {file.name: sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.fixture(scope="session")
def ranks() -> Ranks:
    return Ranks()


@pytest.fixture(scope="session")
def lose_host():
    return STARTED["kill_with_children"]
