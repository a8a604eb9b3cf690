"""How the tests of migration run scripts: in a process of their own, as a user would."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sightline.migrate import activate, deactivate, record
from sightline.migrate.session import Session

REPO = Path(__file__).resolve().parents[2]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run_script(tmp_path: Path) -> Run:
    """run_script(text, *flags, args=(), env={}, check=True): `python -m sightline.migrate *flags script.py *args`."""

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
        start = [] if plain else ["-m", "sightline.migrate", *flags]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SIGHTLINE_MIGRATE")}
        environment = kept | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"} | (env or {})
        done = subprocess.run(
            [sys.executable, *start, str(script), *args],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
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
