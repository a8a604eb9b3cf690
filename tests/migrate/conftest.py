"""How the tests of migration run scripts: in a process of their own, as a user would, or almost: fixtures/forker.py."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import warm as warmed
from warm import python

REPO = Path(__file__).resolve().parents[2]
GUEST = REPO / "packages" / "migrate"
PATHS = os.pathsep.join([str(REPO), str(GUEST)])
Run = Callable[..., subprocess.CompletedProcess[str]]
OF_OTHERS = ("SIGHTLINE_MIGRATE", "RANK", "WORLD_SIZE")
# Those of the package itself, whose tests need torch and pytest alone.
ITS_OWN = runpy.run_path(str(GUEST / "tests" / "conftest.py"))
NO_GPU = ITS_OWN["NO_GPU"]
_no_gpu, on_cpu = ITS_OWN["_no_gpu"], ITS_OWN["on_cpu"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ITS_OWN["skip_beside_a_gpu"](items, Path(__file__).parent)


def _environment(more: dict[str, str] | None) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OF_OTHERS)}
    return kept | NO_GPU | {"PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"} | (more or {})


@pytest.fixture(scope="session")
def fork() -> Run:
    """fork(folder, *words, env={}, check=True, warm=False): `python words` in a fork of a process that has torch.

    warm: with torch._dynamo, too, for scripts that train. What waits for its import is then done at once.
    """

    def run(
        folder: Path, *words: str | Path, env: dict[str, str] | None = None, check: bool = True, warm: bool = False
    ) -> Any:
        done = python(folder, *words, environ=_environment(env), warm=warm)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    return run


@pytest.fixture(scope="session")
def start() -> Run:
    """start(folder, *words, env={}, check=True): `python words` in a process of its own, as a user starts it."""

    def run(folder: Path, *words: str | Path, env: dict[str, str] | None = None, check: bool = True) -> Any:
        command = [sys.executable, *map(str, words)]
        done = subprocess.run(
            command, cwd=folder, env=_environment(env), capture_output=True, text=True, timeout=300, check=False
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    return run


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """once(name, make): the folder that `make(folder)` filled, for all test processes."""
    return lambda name, make: warmed.once(tmp_path_factory, name, make)


@pytest.fixture
def run_script(tmp_path: Path, fork: Run) -> Run:
    """run_script(text, *flags, args=(), **more of fork): `python -m sightline.migrate *flags script.py *args`.

    plain: `python script.py *args`.
    """

    def run(text: str, *flags: str, args: tuple[str, ...] = (), plain: bool = False, **more: Any) -> Any:
        script = tmp_path / "script.py"
        script.write_text(text)
        words = [*(() if plain else ("-m", "sightline.migrate", *flags)), script, *args]
        return fork(tmp_path, *words, **more)

    return run
