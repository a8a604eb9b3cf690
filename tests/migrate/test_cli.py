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

from sightline.migrate import AUTOLOAD, cli

REPO = Path(__file__).resolve().parents[2]
Run = Callable[..., subprocess.CompletedProcess[str]]
Call = Callable[..., subprocess.CompletedProcess[str]]
LOOK = """import json, sys
main = sys.modules["__main__"]
print(json.dumps([__name__, __file__, sys.argv, sys.path[0], main.__file__, vars(main) is globals(),
                  getattr(__spec__, "name", None), __builtins__.__name__]))
"""


@pytest.fixture
def call(tmp_path: Path) -> Call:
    """call(*words, env={}): `python words` in a folder of its own."""

    def run(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SIGHTLINE_MIGRATE")}
        environment = kept | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"} | (env or {})
        command = [sys.executable, *words]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)

    return run


MIGRATE = ("-m", "sightline.migrate")


@pytest.mark.parametrize("words", [("jobs/look.py", "--target", "x y", "-m"), ("-m", "jobs.look", "--help")])
def test_script_sees_what_python_would_show_it(words: tuple[str, ...], call: Call, tmp_path: Path):
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "__init__.py").touch()
    (tmp_path / "jobs" / "look.py").write_text(LOOK)
    plain = call(*words)
    done = call(*MIGRATE, "--log-level", "0", "--target", "cpu", *words)
    assert plain.returncode == done.returncode == 0, done.stderr
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


def test_help_needs_no_torch(call: Call):
    code = (
        "import sys\nfrom sightline.migrate.cli import main\ntry: main(['-h'])\nfinally: print('torch' in sys.modules)"
    )
    done = call("-c", code)
    assert done.returncode == 0 and done.stdout.endswith("\nFalse\n")
    for (
        flag
    ) in "--target --fp16-to-bf16 --amp --strict --claim --compile --cuda-version --log --legacy-load --syncs".split():
        assert flag in done.stdout


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


def test_names_of_the_vendors_toolkit(call: Call, tmp_path: Path):
    (tmp_path / "train.py").write_text("import torch\nprint(torch.ones(2, device='cuda').sum())\n")
    env = {"PT_HPU_GPU_MIGRATION": "1", "GPU_MIGRATION_LOG_LEVEL": "1", "PYTHONPATH": AUTOLOAD}
    done = call("train.py", env=env)
    assert done.returncode == 0 and done.stdout == "tensor(2.)\n"
    (log,) = (tmp_path / "migrate_log").glob("gpu_migration_*.log")
    assert "[exact]: torch.ones(" in log.read_text() and "refused: nothing" in done.stderr


def test_without_autoload_no_launcher(call: Call):
    done = call(*MIGRATE, "--target", "cpu", "torchrun", "x.py", env={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    assert done.returncode == 2 and "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps the processes of" in done.stderr
