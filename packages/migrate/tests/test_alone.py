"""The package by itself, in processes of their own: script, child, log, report, and what they import.

In an environment of torch and pytest alone nothing else can be imported, so nothing else can be needed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import sightline_migrate
from sightline_migrate.options import command

PLACE = Path(sightline_migrate.__file__).resolve().parents[1]
CHILD = "import torch; print('child', torch.ones(2, device='cuda').sum().item())"
SCRIPT = f"""
import subprocess, sys, torch
x = torch.ones(3).cuda()
print("script", x.sum().item(), sys.argv[1:])
if "child" in sys.argv:
    subprocess.run([sys.executable, "-c", {CHILD!r}], check=True)
print("of others:", sorted({{"sightline", "rich", "torchvision"}} & set(sys.modules)))
sys.exit(7)
"""


def ran(folder: Path, *words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """`python WORDS` where only this package and what is installed can be imported."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SIGHTLINE_MIGRATE")}
    environment |= {"PYTHONPATH": str(PLACE), "OMP_NUM_THREADS": "1", **variables}
    words = (sys.executable, *map(str, words))
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)


# A child imports torch once more; in the repository tests/migrate/test_log.py has one that is a fork.
@pytest.mark.parametrize("word", ["alone", pytest.param("child", marks=pytest.mark.slow)])
def test_a_script_its_child_and_their_report(word: str, tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = ran(tmp_path, "-m", "sightline_migrate", "--target", "cpu", script, "--flag", word)
    assert done.returncode == 7, done.stderr
    child = ["child 2.0"] if word == "child" else []
    assert done.stdout.splitlines() == [f"script 3.0 ['--flag', '{word}']", *child, "of others: []"]
    assert f"all ranks and workers, line by line: {command()} report migrate_log" in done.stderr
    done = ran(tmp_path, "-m", "sightline_migrate", "report", "migrate_log", "--json")
    sites = json.loads(done.stdout)["sites"]
    found = {"torch.Tensor.cuda", *(["torch.ones"] if child else [])}
    assert found <= {site["api"] for site in sites}, done.stdout


@pytest.mark.slow  # imports torch; in the repository tests/migrate/test_scripts.py does it in a fork
def test_a_variable_and_the_folder_are_enough(tmp_path: Path):
    paths = os.pathsep.join([sightline_migrate.AUTOLOAD, str(PLACE)])
    wanted = {"SIGHTLINE_MIGRATE": "1", "SIGHTLINE_MIGRATE_TARGET": "cpu", "PYTHONPATH": paths}
    done = ran(tmp_path, "-c", CHILD, **wanted)
    assert (done.returncode, done.stdout) == (0, "child 2.0\n"), done.stderr


@pytest.mark.parametrize("words", [["--help"], ["report", "--help"], []], ids=" ".join)
def test_the_command_calls_itself_what_is_typed_here(words: list[str], tmp_path: Path):
    """`sightline migrate` is a command only where Sightline is."""
    (tmp_path / "sightline").mkdir()  # some folder of that name is no Sightline
    (tmp_path / "sightline_migrate").symlink_to(PLACE / "sightline_migrate")
    done = ran(tmp_path, "-S", "-m", "sightline_migrate", *words, PYTHONPATH="")
    assert done.returncode == (0 if words else 2)
    assert "sightline-migrate " in done.stdout + done.stderr and "sightline migrate" not in done.stdout + done.stderr
