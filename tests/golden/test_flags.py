"""The flags of every recipe: none comes, goes or changes its default unnoticed."""

import difflib
import runpy
from pathlib import Path

import pytest

from sightline import config, recipes
from sightline.config import Run

REGENERATE = runpy.run_path(str(Path(__file__).with_name("regenerate.py")))


@pytest.mark.parametrize("name", recipes.names())
def test_flags_are_those_of_the_golden_file(name: str):
    path = REGENERATE["golden_file"](name)
    kept = path.read_text(encoding="utf-8") if path.is_file() else ""
    found = REGENERATE["flags_of"](name)
    changes = "\n".join(difflib.unified_diff(kept.splitlines(), found.splitlines(), "golden", "now", lineterm="", n=0))
    assert kept == found, f"{changes}\nIf this is meant, run: python tests/golden/regenerate.py"


@pytest.mark.parametrize("name", recipes.names())
def test_every_line_of_the_golden_file_is_a_flag_that_is_read(name: str):
    """All at once: the defaults given as flags make the recipe as it is."""
    flags = []
    for line in REGENERATE["golden_file"](name).read_text(encoding="utf-8").splitlines():
        flag, *values = line.split(" ")
        if values in (["True"], ["False"]):
            part, field = flag.split(".")
            flags.append(flag if values == ["True"] else f"{part}.no-{field}")
        elif values or flag.endswith(
            ("run.track", "drop-epochs", "table-epochs", "table-rates", "fp32-ops", ".mean", ".std")
        ):
            flags += [flag, *values]
        else:
            flags.append(f"{flag}=")
    assert config.load(name, flags) == (recipes.find(name).recipe(), Run())


def test_there_is_no_file_of_a_recipe_that_is_gone():
    found = {path.name for path in Path(__file__).parent.glob("flags_*.txt")}
    assert found == {REGENERATE["golden_file"](name).name for name in recipes.names()}
