"""The flags of every recipe: none comes, goes or changes its default unnoticed."""

import difflib
import runpy
from pathlib import Path

import pytest

from sightline import recipes

REGENERATE = runpy.run_path(str(Path(__file__).with_name("regenerate.py")))


@pytest.mark.parametrize("name", recipes.names())
def test_flags_are_those_of_the_golden_file(name: str):
    path = REGENERATE["golden_file"](name)
    kept = path.read_text(encoding="utf-8") if path.is_file() else ""
    found = REGENERATE["flags_of"](name)
    changes = "\n".join(difflib.unified_diff(kept.splitlines(), found.splitlines(), "golden", "now", lineterm="", n=0))
    assert kept == found, f"{changes}\nIf this is meant, run: python tests/golden/regenerate.py"


def test_there_is_no_file_of_a_recipe_that_is_gone():
    found = {path.name for path in Path(__file__).parent.glob("flags_*.txt")}
    assert found == {REGENERATE["golden_file"](name).name for name in recipes.names()}
