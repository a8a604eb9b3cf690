"""docs/reference/fault_table.md names tests that exist and run where it says."""

import ast
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

REPO = Path(__file__).resolve().parents[2]
TABLE = REPO / "docs" / "reference" / "fault_table.md"
FAULTS = 42


class Row(NamedTuple):
    number: int
    file: str
    test: str
    where: str


def rows() -> list[Row]:
    found = re.findall(r"^\| (\d+) \|[^|]*\| `([\w/]+\.py)::(test_\w+)` \| (\w+) \|$", TABLE.read_text(), re.MULTILINE)
    return [Row(int(number), *words) for number, *words in found]


@cache
def named_in(file: str) -> dict[str, str]:
    """The tests of a file, each with where it runs, by its marks; some cases of a default one may be slow."""
    tree = ast.parse((REPO / "tests" / file).read_text())
    whole = [ast.unparse(node.value) for node in tree.body if isinstance(node, ast.Assign) and is_mark(node)]
    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            marks = [ast.unparse(each) for each in node.decorator_list] + whole
            where = [name for name in ("device", "slow") if {name, f"pytest.mark.{name}"} & set(marks)]
            found[node.name] = where[0] if where else "default"
    return found


def is_mark(node: ast.Assign) -> bool:
    return isinstance(node.targets[0], ast.Name) and node.targets[0].id == "pytestmark"


def test_every_fault_has_a_test_that_runs_where_the_table_says():
    table = rows()
    assert len(table) == len([line for line in TABLE.read_text().splitlines() if re.match(r"\| \d", line)])
    assert sorted({row.number for row in table}) == list(range(1, FAULTS + 1))
    assert [row.number for row in table] == sorted(row.number for row in table)
    assert [row for row in table if named_in(row.file).get(row.test) != row.where] == []


@pytest.mark.slow
@pytest.mark.parametrize(("marks", "sets"), [("not slow", ("default", "device")), ("slow", ("slow",))])
def test_every_test_of_the_table_is_collected_there(marks, sets):
    wanted = {f"tests/{row.file}::{row.test}" for row in rows() if row.where in sets}
    how = ["--collect-only", "-q", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib", "-m", marks]
    command = [sys.executable, "-m", "pytest", *how, *sorted({test.partition("::")[0] for test in wanted})]
    environ = os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=REPO, env=environ, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert wanted - {line.partition("[")[0] for line in ended.stdout.splitlines()} == set()
