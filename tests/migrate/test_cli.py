"""`sightline migrate` as users type it: scripts, modules and torchrun run as Python would run them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sightline_migrate import AUTOLOAD, cli

REPO = Path(__file__).resolve().parents[2]
PATHS = os.pathsep.join([AUTOLOAD, str(REPO), str(REPO / "packages" / "migrate")])
Run = Callable[..., subprocess.CompletedProcess[str]]
LOOK = """import json, sys
main = sys.modules["__main__"]
print(json.dumps([__name__, __file__, sys.argv, sys.path[0], main.__file__, vars(main) is globals(),
                  getattr(__spec__, "name", None), __builtins__.__name__]))
"""


MIGRATE = ("-m", "sightline.migrate")


@pytest.mark.parametrize(
    ("words", "way"),
    [
        (("jobs/look.py", "--target", "x y", "-m"), "start"),
        pytest.param(("-m", "jobs.look", "--help"), "fork", marks=pytest.mark.slow),
    ],
)
def test_script_sees_what_python_would_show_it(
    words: tuple[str, ...], way: str, start: Run, tmp_path: Path, request: pytest.FixtureRequest
):
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "__init__.py").touch()
    (tmp_path / "jobs" / "look.py").write_text(LOOK)
    for name in ("cuda.py", "timeit.py"):  # modules that torch imports; these here are the user's
        (tmp_path / name).write_text("raise SystemError('torch imported a script of the current folder')\n")
    plain = start(tmp_path, *words)
    done = request.getfixturevalue(way)(tmp_path, *MIGRATE, "--log-level", "0", "--quiet", "--target", "cpu", *words)
    assert json.loads(done.stdout) == json.loads(plain.stdout)
    assert json.loads(done.stdout)[0] == "__main__"
    assert not (tmp_path / "migrate_log").exists() and done.stderr == ""


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ("a.py", ([], "", "a.py", [])),
        ("--target cpu --strict a.py --target x", (["--target", "cpu", "--strict"], "", "a.py", ["--target", "x"])),
        ("--target=cpu -m pkg.mod -m", (["--target=cpu"], "pkg.mod", "", ["-m"])),
        (
            "--log out torchrun --nproc-per-node 2 a.py",
            (["--log", "out"], "", "torchrun", "--nproc-per-node 2 a.py".split()),
        ),
        ("-- a.py --", ([], "", "a.py", ["--"])),
        ("--syncs", (["--syncs"], "", "", [])),
    ],
)
def test_everything_behind_the_script_is_its_own(argv: str, parts: tuple[object, ...]):
    assert cli.split(argv.split()) == parts


def test_exit_codes_and_signals_are_the_scripts(run_script: Run):
    assert run_script("import sys\nsys.exit(7)\n", "--quiet", check=False).returncode == 7
    stopped = run_script("raise KeyboardInterrupt\n", check=False)
    assert stopped.returncode == -signal.SIGINT
    assert stopped.stderr.index("KeyboardInterrupt\n") < stopped.stderr.index("on cpu, torch")


def test_help_needs_no_torch(start: Run, tmp_path: Path):
    code = (
        "import sys\nfrom sightline.migrate.cli import main\ntry: main(['-h'])\nfinally: print('torch' in sys.modules)"
    )
    done = start(tmp_path, "-c", code)
    assert done.stdout.endswith("\nFalse\n")
    flags = "--target --fp16-to-bf16 --amp --strict --claim --compile --cuda-version --log --legacy-load --syncs"
    assert [flag for flag in flags.split() if flag not in done.stdout] == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "nothing to run"),
        (("--quiet",), "nothing to run"),
        (("absent.py",), "'absent.py' is neither a file nor a command"),
        (("-m", "absent.module"), "-m absent.module: No module named 'absent'"),
        (("--amp", "maybe", "x.py"), "amp='maybe' is not known"),
        (("report", "nowhere"), "nowhere has no migrate_"),
        (("scan", "nowhere"), "nowhere is neither a file nor a folder"),
    ],
)
def test_usage_errors(
    words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str], monkeypatch, tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert cli.main(words) == 2
    assert says in capsys.readouterr().err


def test_names_of_the_vendors_toolkit(fork: Run, tmp_path: Path):
    (tmp_path / "train.py").write_text("import torch\nprint(torch.ones(2, device='cuda').sum())\n")
    env = {"PT_HPU_GPU_MIGRATION": "1", "GPU_MIGRATION_LOG_LEVEL": "1", "PYTHONPATH": PATHS}
    done = fork(tmp_path, "train.py", env=env)
    assert done.stdout == "tensor(2.)\n"
    (log,) = (tmp_path / "migrate_log").glob("gpu_migration_*.log")
    assert "[exact]: torch.ones(" in log.read_text() and "refused: none" in done.stderr


def test_without_autoload_no_launcher(start: Run, tmp_path: Path):
    words, environment = (*MIGRATE, "--target", "cpu", "torchrun", "x.py"), {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = start(tmp_path, *words, env=environment, check=False)
    assert done.returncode == 2 and "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps child processes of" in done.stderr


def test_import_with_the_variable_set_activates_without_a_word(fork: Run, tmp_path: Path):
    """As in every process that a script with this line spawns: its main module is imported again."""
    text = "import sightline.migrate.auto\nimport torch\nprint(torch.ones(2, device='cuda').sum())\n"
    (tmp_path / "train.py").write_text(text)
    env = {"SIGHTLINE_MIGRATE": "1", "SIGHTLINE_MIGRATE_TARGET": "cpu", "PYTHONPATH": PATHS}
    done = fork(tmp_path, "train.py", env=env)
    assert done.stdout == "tensor(2.)\n" and done.stderr == "sightline migrate: CUDA calls run on cpu\n"


def test_lines_of_sightlines_names_are_never_the_users(fork: Run, tmp_path: Path):
    """A library that is run by itself has no user above it, only sightline/migrate/__main__.py."""
    library = tmp_path / "site-packages" / "of_others.py"
    library.parent.mkdir()
    library.write_text("import torch\ntorch.ones(2).cuda()\n")
    env = {"PYTHONPATH": os.pathsep.join([PATHS, str(library.parent)])}
    fork(tmp_path, *MIGRATE, "--target", "cpu", "--quiet", "-m", "of_others", env=env)
    (log,) = (tmp_path / "migrate_log").glob("migrate_*.json")
    (site,) = [each for each in json.loads(log.read_text())["sites"] if each["api"] == "torch.Tensor.cuda"]
    assert site["file"] == str(library) and "sightline" not in Path(site["user_file"]).parts[-3:]
