"""benchmarks/migration_scripts.py: which public scripts it names, and which of their numbers it compares."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "migration_scripts.py"


@pytest.fixture(scope="module")
def runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("migration_scripts", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_names_sixty_commands_of_25_repositories_at_a_commit(runner: ModuleType):
    entries = tomllib.loads(runner.TABLE.read_text(encoding="utf-8"))["script"]
    assert len(entries) >= 60 and len({entry["repository"] for entry in entries}) >= 25
    assert sum(entry.get("is_new", False) for entry in entries) >= 10
    for entry in entries:
        assert re.fullmatch(r"[0-9a-f]{7,40}", entry["commit"]), entry["repository"]
        assert entry.get("data", "mnist") in runner.DATA
        entry["arguments"].format(data="d", out="o", source="s")


def test_numbers_are_those_of_the_script_not_of_warnings_and_times(runner: ModuleType):
    text = "UserWarning: deprecated since 0.13\n 20%|##   | 1/5 [00:02<00:08,  2.00s/it]\ncorrect 12.5 %\n"
    assert runner.numbers_in(text) == ["12.5"]
    assert runner.numbers_in(text + "Loss: 0.25 in 3.5 s, acc@1 nan\n") == ["0.25", "nan"]


def test_fewer_numbers_than_the_cpu_mode_prints_count_as_different(runner: ModuleType):
    migrated, own = ({"code": 0, "numbers": numbers} for numbers in (["0.5"], ["0.5", "0.25"]))
    assert runner.compared(migrated, own) == "1 of 2 differ"
    assert runner.compared(own, own) == "2 equal" and runner.compared(own, None) == "no CPU mode"


def test_every_repository_has_one_line_that_says_whose_fault_a_failure_is(runner: ModuleType):
    ended = {"code": 0, "numbers": ["0.5"], "cpu_seconds": 2.0, "error": ""}
    failed = {"code": 1, "numbers": [], "cpu_seconds": 1.0, "error": "ValueError: x"}
    row = {"repository": "a/b", "path": "t.py", "note": ""}
    rows = [
        row | {"migrated": ended, "own": ended, "numbers": "1 equal"},
        row | {"migrated": failed, "own": failed, "numbers": "-"},
        row | {"migrated": failed, "own": ended, "numbers": "-"},
    ]
    (line,) = runner.by_repository(rows).splitlines()[2:]
    assert line == "| a/b | 3 | 1 | 1 of 1 | 2 | 2 | the script: ValueError: x; migration: ValueError: x |"
