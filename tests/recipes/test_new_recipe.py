"""A recipe is added as one file: the one that docs/howto/recipe.md shows, trained and evaluated as it says."""

import json
import re
from pathlib import Path

import pytest

from sightline import cli

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "recipe.md"
HERE = ["--run.workers", "0", "--run.device", "cpu"]
FLAGS = ["--train.epochs", "1", *HERE]


@pytest.fixture
def in_folder_of_recipe(tmp_path: Path, monkeypatch) -> Path:
    """A folder that holds my_recipe.py and nothing else of Sightline."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (block,) = (block for block in blocks if "def recipe()" in block)
    (tmp_path / "my_recipe.py").write_text(block, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_documented_recipe_trains_and_evaluates(in_folder_of_recipe: Path, shapes: Path, capsys):
    data = ["--data.path", str(shapes)]
    assert cli.main(["train", "my_recipe.py", *data, *FLAGS]) == 0
    run = in_folder_of_recipe / "runs" / "my_recipe"
    assert json.loads((run / "exit.json").read_text())["code"] == 0
    trained = json.loads((run / "scores.json").read_text())
    assert cli.main(["evaluate", "runs/my_recipe", "--recipe", "my_recipe.py", *HERE]) == 0
    assert json.loads(next(run.glob("scores-ckpt-*.json")).read_text())["values"] == trained["values"]
    capsys.readouterr()
    assert cli.main(["train", "my_recipe.py", *data, *FLAGS]) == 0
    assert "is finished" in capsys.readouterr().out
    # A file that was moved or is not named cannot be guessed.
    assert cli.main(["evaluate", "runs/my_recipe"]) == 2
    assert "add --recipe PATH/TO/my_recipe.py" in capsys.readouterr().err
