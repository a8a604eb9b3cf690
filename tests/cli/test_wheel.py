"""The built wheel, installed away from the repository, is whole and works."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Installed:
    """The unpacked wheel, its files, and an empty folder to run commands from."""

    site: Path
    files: frozenset[str]
    elsewhere: Path

    def run(self, *command: str) -> str:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment["PYTHONPATH"] = str(self.site)
        done = subprocess.run(command, cwd=self.elsewhere, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def python_in(folder: Path, *words: str | Path) -> None:
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


@pytest.fixture(scope="module", params=["setuptools", pytest.param("pip", marks=pytest.mark.slow)])
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Build from a copy: setuptools leaves build/ behind, and would pack what an earlier build left there.

    By default without pip, which takes seconds to call setuptools and to unpack.
    """
    root = tmp_path_factory.mktemp("wheel")
    copy, site, elsewhere = root / "repo", root / "site", root / "elsewhere"
    shutil.copytree(REPO / "sightline", copy / "sightline", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPO / name, copy)
    pip = ("-m", "pip", "--disable-pip-version-check")
    if request.param == "pip":
        python_in(copy, *pip, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", root / "dist", copy)
    else:
        python_in(copy, "-c", BUILD, root / "dist")
    (wheel,) = (root / "dist").glob("sightline-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        files = frozenset(archive.namelist())
        if request.param == "setuptools":
            archive.extractall(site)
    if request.param == "pip":
        python_in(root, *pip, "install", "--no-deps", "--no-index", "--target", site, wheel)
    elsewhere.mkdir()
    return Installed(site, files, elsewhere)


def test_holds_the_package_and_nothing_else(installed: Installed):
    wanted = [path for kind in ("*.py", "py.typed", "*.dist-info/*") for path in (REPO / "sightline").rglob(kind)]
    sources = {path.relative_to(REPO).as_posix() for path in wanted}
    packed = {name for name in installed.files if not name.split("/")[0].endswith(".dist-info")}
    assert packed == sources
    assert any(name.endswith("licenses/LICENSE") for name in installed.files)


# As the program that pip writes for the entry point: the second line is the place of the package.
ENTRY_POINT = """
import sys
from importlib.metadata import distribution
(command,) = distribution("sightline").entry_points.select(group="console_scripts")
import sightline
print(command.name, sightline.__file__, sep="\\n")
sys.exit(command.load()())
"""


def test_runs_away_from_the_repository(installed: Installed):
    program = installed.site / "bin" / "sightline"
    recipes = [p.stem for p in (REPO / "sightline" / "recipes").glob("*.py") if not p.stem.startswith("_")]
    name, where, listed = installed.run(sys.executable, "-c", ENTRY_POINT, "list").split("\n", 2)
    assert name == "sightline" and Path(where).is_relative_to(installed.site)
    assert recipes and [name for name in recipes if name not in listed] == []
    if program.exists():  # pip made it
        assert installed.run(str(program), "list") == listed
        assert installed.run(sys.executable, "-m", "sightline", "list") == listed


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Link everything that is installed here except Sightline: neither its package nor its metadata."""
    folder = tmp_path_factory.mktemp("site")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "sightline" not in entry.name:
            (folder / entry.name).symlink_to(entry)
    return folder


def python(code: str, *paths: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process that can import from `paths` and nothing else that is installed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SIGHTLINE_MIGRATE")}
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, paths)), **variables}
    command = [sys.executable, "-S", "-c", code]
    return subprocess.run(command, cwd=paths[0], env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.slow  # imports torch; there is no entry point that could fail, see pyproject.toml
def test_torch_is_imported_where_only_the_metadata_is_left(installed: Installed, site: Path, tmp_path: Path):
    """After a checkout has moved or a removal was cut short; `import torch` loads every backend that metadata name."""
    (metadata,) = installed.site.glob("sightline-*.dist-info")
    shutil.copytree(metadata, tmp_path / metadata.name)
    done = python("import torch; print(torch.ones(1).item())", tmp_path, site, SIGHTLINE_MIGRATE="1")
    assert done.stdout == "1.0\n", done.stderr


MIGRATED = """
import os, subprocess, sys
from sightline import migrate
migrate.activate(target="cpu", quiet=True)
child = "import torch; print(torch.ones(1, device='cuda').item())"
os.environ["PYTHONPATH"] = os.environ["PYTHONPATH"].replace({site!r}, {broken!r})
done = subprocess.run([sys.executable, "-S", "-c", child], capture_output=True, text=True)
print(done.stdout, done.stderr)
"""


@pytest.mark.slow  # imports torch; children are migrated in tests/migrate/test_log.py
def test_children_are_migrated_by_the_copy_that_their_parent_uses(installed: Installed, site: Path, tmp_path: Path):
    """The child's own path leads to a broken copy of Sightline; the entry point in the wheel does not need it."""
    (tmp_path / "sightline").mkdir()
    (tmp_path / "sightline" / "__init__.py").write_text("def")
    code = MIGRATED.format(site=f":{installed.site}:", broken=f":{tmp_path}:")
    done = python(code, installed.site, site)
    assert done.stdout.strip() == "1.0", done.stdout + done.stderr
