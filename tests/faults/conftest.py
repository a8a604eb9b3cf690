"""Fixtures of the fault tests: starting `sightline` as a process, watching it, and telling whether bits are equal."""

import json
import shutil
import signal
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import warm

FAULTY = str(Path(__file__).with_name("faulty.py"))
REPORTED = "--run.report=auto"


class Result:
    """A run folder and how the process that wrote it ended."""

    def __init__(self, out: Path, code: int, stdout: str, stderr: str):
        self.out, self.code, self.stdout, self.stderr = out, code, stdout, stderr

    def __repr__(self) -> str:  # pytest shows it where an assertion fails
        return f"exit {self.code}\n{self.stdout}{self.stderr}"

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The lines of this kind in log.jsonl."""
        return [line for line in read_log(self.out) if line["event"] == kind]

    @property
    def warnings(self) -> str:
        """What was said of faults; a high loss after few steps is none."""
        told = [line["text"] for line in self.events("warning")]
        return "\n".join(text for text in told if "batch-norm statistics lag" not in text)

    @property
    def exit_code_in_folder(self) -> int:
        return json.loads((self.out / "exit.json").read_text())["code"]

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.out / "checkpoints").glob("ckpt-*"))

    @property
    def bits(self) -> dict[str, str]:
        return bits(self.out)

    @property
    def progress(self) -> dict[str, Any]:
        return json.loads((newest(self.out) / "state.json").read_text())["progress"]

    def tensors(self) -> dict[str, Any]:
        """All tensors of the newest checkpoint, by FILE/NAME."""
        from safetensors.torch import load_file

        files = sorted(newest(self.out).glob("*.safetensors"))
        return {f"{file.stem}/{name}": tensor for file in files for name, tensor in load_file(file).items()}


def newest(out: Path) -> Path:
    return out / "checkpoints" / (out / "checkpoints" / "latest").read_text().strip()


def bits(out: Path) -> dict[str, str]:
    """sha256 of every tensor file of the newest checkpoint."""
    return {file.name: sha256(file.read_bytes()).hexdigest() for file in sorted(newest(out).glob("*.safetensors"))}


def read_log(out: Path) -> list[dict[str, Any]]:
    """All whole lines of log.jsonl; the last one may be in the making."""
    path = out / "log.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def is_stopped(pid: int) -> bool:
    """By a SIGSTOP."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


class Started:
    """A run in progress."""

    def __init__(self, out: Path, process: warm.Started):
        self.out, self.pid, self.process = out, process.pid, process

    def wait(self) -> Result:
        """Until the process has ended; one that does not end is killed and fails the test."""
        return Result(self.out, *self.process.wait())

    def until(self, fact: Callable[[], Any]) -> Any:
        """Wait for something to become true while the process runs; return it."""
        return self.process.until(fact)

    def until_stopped(self) -> None:
        """By the SIGSTOP of a fault."""
        self.until(lambda: is_stopped(self.pid))


class Runner:
    """Runs `sightline train` in processes of its own that can be killed; see tests/warm.py."""

    log = staticmethod(read_log)

    def __init__(self, folder: Path):
        self.folder = folder

    def start(
        self,
        out: Path,
        *flags: str,
        recipe: str = FAULTY,
        progress: str = "off",
        closed_stdout: bool = False,
        terminal: str = "",
        **environ: str,
    ) -> Started:
        """`sightline train` with the tiny recipe of faulty.py, or another, writing to `out`."""
        fixed = ["--run.threads", "1", "--run.device", "cpu", "--run.out", str(out), "--run.progress", progress]
        given = [] if "--run.workers" in flags else ["--run.workers", "0"]
        # A fault in step N + 1 must find the checkpoint of step N written; what comes otherwise is asked for.
        given += [] if "--run.save-in-background" in flags else ["--run.no-save-in-background"]
        given += [] if REPORTED in flags else ["--run.report=off"]  # a quarter of such a run
        words = ["train", recipe, *fixed, *given, *flags]
        how = {"closed_stdout": closed_stdout, "terminal": terminal}
        return Started(out, warm.start("sightline", *words, environ=environ, cwd=self.folder, **how))

    def run(self, out: Path, *flags: str, **options: Any) -> Result:
        """The same, to its end."""
        return self.start(out, *flags, **options).wait()


@pytest.fixture(scope="session")
def sightline(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """Start `sightline train` as processes that can be killed."""
    return Runner(tmp_path_factory.mktemp("processes"))


@pytest.fixture(scope="session")
def reference(sightline: Runner, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Result]:
    """The uninterrupted run with these flags, made once; for reading only."""
    made: dict[tuple[str, ...], Result] = {}

    def run(*flags: str) -> Result:
        if flags not in made:
            made[flags] = sightline.run(tmp_path_factory.mktemp("reference") / "run", *flags)
            assert made[flags].code == 0, made[flags]
        return made[flags]

    return run


@pytest.fixture(scope="session")
def halfway(sightline: Runner, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Copy a run that SIGTERM stopped after step 5 of 16 to where the test wants it."""
    original = tmp_path_factory.mktemp("halfway") / "run"
    assert sightline.run(original, FAULT="term@train:5").code == 128 + signal.SIGTERM

    def copy(out: Path) -> Path:
        return Path(shutil.copytree(original, out))

    return copy
