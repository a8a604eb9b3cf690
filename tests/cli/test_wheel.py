"""The built wheel, installed away from the repository, is whole and works."""

import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Installed:
    """Where the wheel was unpacked, what it holds, and an empty folder to run commands from."""

    site: Path
    files: frozenset[str]
    elsewhere: Path

    def run(self, *command: str) -> str:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment["PYTHONPATH"] = str(self.site)
        done = subprocess.run(command, cwd=self.elsewhere, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Builds from a copy: setuptools leaves build/ behind, and would pack what an earlier build left there."""
    root = tmp_path_factory.mktemp("wheel")
    copy = root / "repo"
    shutil.copytree(REPO / "sightline", copy / "sightline", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPO / name, copy)
    pip("wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", root / "dist", copy)
    (wheel,) = (root / "dist").glob("sightline-*.whl")
    pip("install", "--no-deps", "--no-index", "--target", root / "site", wheel)
    with zipfile.ZipFile(wheel) as archive:
        files = frozenset(archive.namelist())
    elsewhere = root / "elsewhere"
    elsewhere.mkdir()
    return Installed(root / "site", files, elsewhere)


def test_holds_the_package_and_nothing_else(installed: Installed):
    sources = {path.relative_to(REPO).as_posix() for path in (REPO / "sightline").rglob("*.py")}
    packed = {name for name in installed.files if ".dist-info/" not in name}
    assert packed == sources
    assert any(name.endswith("licenses/LICENSE") for name in installed.files)


def test_runs_away_from_the_repository(installed: Installed):
    where = installed.run(sys.executable, "-c", "import sightline; print(sightline.__file__)")
    assert Path(where.strip()).is_relative_to(installed.site)

    recipes = [p.stem for p in (REPO / "sightline" / "recipes").glob("*.py") if not p.stem.startswith("_")]
    assert recipes
    listed = installed.run(sys.executable, "-m", "sightline", "list")
    assert [name for name in recipes if name not in listed] == []
    assert installed.run(str(installed.site / "bin" / "sightline"), "list") == listed
