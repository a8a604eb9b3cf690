"""Break a rule of reliability, one at a time, in a copy of the tree, and see the tests that guard it fail.

    .venv/bin/python tests/mutants.py            # all; about half a minute each
    .venv/bin/python tests/mutants.py fsync lock # those whose name holds one of these words

A mutant that survives is a rule without a test: the command ends with exit 1 and its name.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parents[1]


class Mutant(NamedTuple):
    """A rule, the line that keeps it, what is written instead, and the tests of which one must fail."""

    name: str
    file: str
    line: str
    instead: str
    tests: tuple[str, ...]


POWER = ("tests/faults/test_power_loss.py",)
MUTANTS = [
    Mutant(
        "fsync does nothing",
        "sightline/train/checkpoint.py",
        "        os.fsync(descriptor)\n",
        "        pass\n",
        POWER,
    ),
    Mutant(
        "files are not flushed before the manifest",
        "sightline/train/checkpoint.py",
        "    for path in files:\n        _fsync(path)\n",
        "",
        POWER,
    ),
    Mutant(
        "the manifest is not flushed",
        "sightline/train/checkpoint.py",
        "    _fsync(folder / MANIFEST)\n",
        "",
        POWER,
    ),
    Mutant(
        "the folder of a checkpoint is not flushed",
        "sightline/train/checkpoint.py",
        "    _fsync(folder)\n",
        "",
        POWER,
    ),
    Mutant(
        "the folder of checkpoints is not flushed after the rename",
        "sightline/train/checkpoint.py",
        "    _fsync(path.parent)\n",
        "",
        POWER,
    ),
    Mutant(
        "a pointer is not flushed before its rename",
        "sightline/files/whole.py",
        "                os.fsync(out.fileno())\n",
        "                pass\n",
        POWER,
    ),
    Mutant(
        "the folder of a new run is not flushed",
        "sightline/train/checkpoint.py",
        "                _fsync(parent)\n",
        "                pass\n",
        POWER,
    ),
]


def is_caught(mutant: Mutant, tree: Path) -> bool:
    """Write the mutant into the copy, run its tests, and undo it."""
    path = tree / mutant.file
    source = path.read_text("utf-8")
    if source.count(mutant.line) != 1:
        sys.exit(f"'{mutant.name}': {mutant.file} holds its line {source.count(mutant.line)} times, expected once")
    path.write_text(source.replace(mutant.line, mutant.instead), "utf-8")
    words = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "--durations=0", "-p", "no:cacheprovider"]
    environ = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [*words, "-m", "slow or not slow", *mutant.tests]
    ended = subprocess.run(command, cwd=tree, env=environ, capture_output=True, text=True)
    path.write_text(source, "utf-8")
    if ended.returncode not in (0, 1):  # 1: a test has failed; anything else says nothing about the rule
        sys.exit(f"'{mutant.name}': pytest ended with {ended.returncode}\n{ended.stdout}{ended.stderr}")
    return ended.returncode == 1


def main(words: list[str]) -> int:
    """Try the mutants whose names hold one of the words, or all; return 1 where one survives."""
    chosen = [mutant for mutant in MUTANTS if not words or any(word in mutant.name for word in words)]
    survivors = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        for name in ("sightline", "tests"):
            shutil.copytree(REPO / name, Path(folder, name), ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(REPO / "pyproject.toml", folder)
        for mutant in chosen:
            caught = is_caught(mutant, Path(folder))
            survivors += [] if caught else [mutant.name]
            print(f"{'caught' if caught else 'SURVIVED'}: {mutant.name}", flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
