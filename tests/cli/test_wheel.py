"""The built wheels, installed away from the repository, are whole and work: Sightline's and that of its guest."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import sightline
import sightline_migrate

REPO = Path(__file__).resolve().parents[2]
GUEST = REPO / "packages" / "migrate"


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


def install(project: Path, package: str, tool: str, root: Path) -> Installed:
    """Build from a copy: setuptools leaves build/ behind, and would pack what an earlier build left there.

    By default without pip, which takes seconds to call setuptools and to unpack.
    """
    copy, site, elsewhere = root / "repo", root / "site", root / "elsewhere"
    shutil.copytree(project / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(project / name, copy)
    pip = ("-m", "pip", "--disable-pip-version-check")
    if tool == "pip":
        python_in(copy, *pip, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", root / "dist", copy)
    else:
        python_in(copy, "-c", BUILD, root / "dist")
    (wheel,) = (root / "dist").glob(f"{package}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        files = frozenset(archive.namelist())
        if tool == "setuptools":
            archive.extractall(site)
    if tool == "pip":
        python_in(root, *pip, "install", "--no-deps", "--no-index", "--target", site, wheel)
    elsewhere.mkdir()
    return Installed(site, files, elsewhere)


@pytest.fixture(scope="module", params=["setuptools", pytest.param("pip", marks=pytest.mark.slow)])
def tool(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def installed(tool: str, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return install(REPO, "sightline", tool, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def guest(tool: str, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return install(GUEST, "sightline_migrate", tool, tmp_path_factory.mktemp("guest"))


def test_holds_the_package_and_nothing_else(installed: Installed):
    holds_only(installed, REPO, "sightline")


def test_the_guests_holds_the_guest_and_nothing_else(guest: Installed):
    holds_only(guest, GUEST, "sightline_migrate")


def holds_only(installed: Installed, project: Path, package: str) -> None:
    wanted = [
        path
        for kind in ("*.py", "py.typed", "known.jsonl", "*.dist-info/*")
        for path in (project / package).rglob(kind)
    ]
    sources = {path.relative_to(project).as_posix() for path in wanted}
    packed = {name for name in installed.files if not name.split("/")[0].endswith(".dist-info")}
    assert packed == sources
    (licence,) = [name for name in installed.files if name.endswith("licenses/LICENSE")]
    metadata = installed.site / licence.split("/")[0]
    if metadata.is_dir():
        assert (installed.site / licence).read_bytes() == (REPO / "LICENSE").read_bytes()


# The name, version and needs of a distribution, and how it is called.
FACTS = """
import json, sys
from importlib.metadata import distribution
found = distribution(sys.argv[1])
(command,) = found.entry_points.select(group="console_scripts")
print(json.dumps([found.version, sorted(found.requires or []), command.name]))
"""


def test_both_are_of_one_version_and_the_guest_needs_torch_alone(installed: Installed, guest: Installed):
    version, needs, command = json.loads(installed.run(sys.executable, "-c", FACTS, "sightline"))
    its_version, its_needs, its_command = json.loads(guest.run(sys.executable, "-c", FACTS, "sightline-migrate"))
    assert version == its_version == sightline.__version__ == sightline_migrate.__version__
    assert (command, its_command) == ("sightline", "sightline-migrate")
    assert its_needs == [need for need in needs if need.startswith("torch>=")] == ["torch>=2.11"]
    assert not [need for need in needs if "migrate" in need]


def test_the_entry_point_for_children_hides_no_version_of_the_guest(guest: Installed):
    """Its metadata come first on their path, so they must not have the name of the distribution."""
    folder = guest.site / "sightline_migrate" / "autoload"
    code = "from importlib.metadata import entry_points, version as v; print(v('sightline-migrate'), "
    done = python(code + "*[each.name for each in entry_points(group='torch.backends')])", folder, guest.site)
    assert done.stdout == f"{sightline_migrate.__version__} sightline_migrate\n", done.stderr


def test_alone_it_says_where_the_guest_is_found(installed: Installed, site: Path):
    """Nobody owns the name on the package index, so no answer may say `pip install sightline-migrate`."""
    run = "import sys; from sightline.__main__ import run; sys.argv[1:] = ['migrate', 'train.py']; run()"
    done = python(run, installed.site, site)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (
        "error: sightline-migrate is a package of its own, which is not installed here; in a checkout of Sightline's "
        "repository run `pip install ./packages/migrate`\n"
    )
    done = python("import sightline.migrate.auto", installed.site, site)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("sightline.migrate.NotInstalled: sightline-migrate is a package")


def test_the_hook_that_old_metadata_name_does_nothing_where_the_guest_is_gone(installed: Installed, tmp_path: Path):
    """`import torch` calls it in every program of the environment."""
    metadata = tmp_path / "old-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: old\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("[torch.backends]\nold = sightline.migrate.hook:autoload\n")
    code = "from importlib.metadata import entry_points; [each] = entry_points(group='torch.backends'); each.load()()"
    done = python(code, tmp_path, installed.site)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    done = python(code, tmp_path, installed.site, SIGHTLINE_MIGRATE="1")
    assert done.returncode == 0 and "sightline-migrate is not installed" in done.stderr


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
{names}
migrate.activate(target="cpu", quiet=True)
child = "import torch; print(torch.ones(1, device='cuda').item())"
os.environ["PYTHONPATH"] = os.environ["PYTHONPATH"].replace({site!r}, {broken!r})
done = subprocess.run([sys.executable, "-S", "-c", child], capture_output=True, text=True)
print(done.stdout, done.stderr)
"""


@pytest.mark.slow  # imports torch; children are migrated in tests/migrate/test_log.py
@pytest.mark.parametrize("names", ["from sightline import migrate", "import sightline_migrate as migrate"])
def test_children_are_migrated_by_the_copy_that_their_parent_uses(
    names: str, installed: Installed, guest: Installed, site: Path, tmp_path: Path
):
    """The child's own path leads to a broken copy of it; the entry point in the wheel does not need it."""
    for package in ("sightline", "sightline_migrate"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("def")
    code = MIGRATED.format(names=names, site=f":{guest.site}:", broken=f":{tmp_path}:")
    done = python(code, installed.site, guest.site, site)
    assert done.stdout.strip() == "1.0", done.stdout + done.stderr
