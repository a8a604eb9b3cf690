"""How the tests of migration run scripts: in a process of their own, as a user would, or almost: fixtures/forker.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sightline.migrate import activate, deactivate, record
from sightline.migrate.session import Session

REPO = Path(__file__).resolve().parents[2]
FORKER = Path(__file__).parent / "fixtures" / "forker.py"
Run = Callable[..., subprocess.CompletedProcess[str]]


Fork = Callable[[Path, dict[str, str], list[str]], int]


@pytest.fixture(scope="session")
def fork() -> Iterator[Fork]:
    """fork(folder, environment, words): the exit code of `python words`, which writes to out.txt and err.txt."""
    command = [sys.executable, FORKER]
    environment = os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    forker = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert forker.stdin is not None and forker.stdout is not None
    to, answers = forker.stdin, forker.stdout

    def run(folder: Path, environment: dict[str, str], words: list[str]) -> int:
        files = {"out": str(folder / "out.txt"), "err": str(folder / "err.txt")}
        for path in files.values():
            Path(path).unlink(missing_ok=True)
        job = {"folder": str(folder), "environment": environment, "words": words} | files
        print(json.dumps(job), file=to, flush=True)
        return int(answers.readline())

    yield run
    to.close()
    forker.wait()


@pytest.fixture
def run_script(tmp_path: Path, fork: Fork) -> Run:
    """run_script(text, *flags, args=(), env={}, check=True): `python -m sightline.migrate *flags script.py *args`.

    plain: `python script.py *args`; in a process of its own where the environment turns migration on.
    """

    def run(
        text: str,
        *flags: str,
        args: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        check: bool = True,
        plain: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        script = tmp_path / "script.py"
        script.write_text(text)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SIGHTLINE_MIGRATE")}
        environment = kept | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"} | (env or {})
        words = [*(() if plain else ("-m", "sightline.migrate", *flags)), str(script), *args]
        if "SIGHTLINE_MIGRATE" in environment:  # read when torch is imported
            command = [sys.executable, *words]
            done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        else:
            code = fork(tmp_path, environment, words)
            told = [(tmp_path / name).read_text() for name in ("out.txt", "err.txt")]
            done = subprocess.CompletedProcess(words, code, *told)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    return run


@pytest.fixture
def on_cpu() -> Iterator[Callable[..., Session]]:
    """on_cpu(**options) activates for the rest of the test, in this process."""
    record.reset()

    def start(**options: object) -> Session:
        found = activate(target="cpu", **options)
        assert found is not None
        return found

    yield start
    deactivate()
    record.reset()


def recorded(name: str) -> list[str]:
    """What was done for calls of a name, per call site."""
    return [each.what for each in record.records.values() if each.rule.name == name]
