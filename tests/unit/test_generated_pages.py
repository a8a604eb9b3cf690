"""The pages of docs/reference that docs/generate.py writes say what the code says."""

import runpy
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PAGES = runpy.run_path(str(REPO / "docs" / "generate.py"))["PAGES"]


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_what_the_script_writes(name: str):
    if sys.version_info >= (3, 13) and name == "commands.md":
        pytest.skip("argparse writes help in another form since Python 3.13")
    written = (REPO / "docs" / "reference" / name).read_text(encoding="utf-8")
    assert written == PAGES[name](), "run `python docs/generate.py`"


def test_every_command_field_and_name_of_the_api_is_on_its_page():
    from sightline import api, cli, recipes
    from sightline.recipe import store
    from sightline.recipe.flags import flag_of
    from sightline.recipe.recipe import Run

    pages = {name: (REPO / "docs" / "reference" / name).read_text(encoding="utf-8") for name in PAGES}
    assert [each for each in cli.COMMANDS if f"## sightline {each}\n" not in pages["commands.md"]] == []
    known = {key for name in recipes.names() for key in store.leaves(recipes.find(name).recipe(), Run())} - {"recipe"}
    assert [key for key in known if f"- `{flag_of(key)}" not in pages["fields.md"]] == []
    assert [each for each in recipes.names() if f"## {each}\n" not in pages["recipe_list.md"]] == []
    assert [each for each in api.__all__ if f"### {each}\n" not in pages["python_api.md"]] == []
