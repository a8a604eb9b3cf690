"""YAML that is written, and read again or remembered: the same text as PyYAML's, the same values, nobody else's."""

from pathlib import Path
from typing import Any

import yaml

from sightline import config, recipes
from sightline.files import plain_yaml
from sightline.recipe import store
from sightline.recipe.settings import plain

TEXTS = """on off yes null ~ 1e3 1_000 0x1f 012 1:30 2001-01-01 = << @at `b %p !t &a *b | > - é 日本 😀 x:y 'q' "d"
    a\\b""".split()
SPACED = ["", " ", "word " * 40, "x: y", "# c", "tab\there", "new\nline", " lead", "\x07", "\u2028"]
ODD: dict[str, Any] = {
    "texts": [*TEXTS, *SPACED, "a" * 200],
    "numbers": [1e-5, 1e20, -0.0, 0.1, float("inf"), float("-inf"), 1.0, 0, -1, 2**60],
    "nothing": None,
    "switch": True,
    "empty": [],
}


def values_of_all_recipes() -> dict[str, dict[str, Any]]:
    made = {name: config.load(name) for name in recipes.names()}
    return {name: {**store.to_json(recipe), "run": plain(run)} for name, (recipe, run) in made.items()}


def test_the_text_is_that_of_pyyamls_own_dumper_and_is_read_as_it_is_remembered(tmp_path: Path):
    path = tmp_path / "config.yaml"
    for name, values in {"odd": ODD, **values_of_all_recipes()}.items():
        text = plain_yaml.dump(values)
        assert text == yaml.safe_dump(values, sort_keys=False), name
        path.write_text(text)
        remembered = plain_yaml.read_yaml(path)
        path.write_text(text + "# other bytes\n")
        assert repr(plain_yaml.read_yaml(path)) == repr(remembered) == repr(values), name


def test_what_a_reader_changes_is_its_own(tmp_path: Path):
    path, values = tmp_path / "config.yaml", {"train": {"milestones": [1, 2]}}
    path.write_text(plain_yaml.dump(values))
    values["train"]["milestones"].append(3)
    found = plain_yaml.read_yaml(path)
    found["train"]["milestones"].append(4)
    assert plain_yaml.read_yaml(path) == {"train": {"milestones": [1, 2]}}


def test_another_text_under_the_same_name_is_read(tmp_path: Path):
    path = tmp_path / "config.yaml"
    for epochs in (1, 2, 1):
        path.write_text(f"train: {{epochs: {epochs}}}\n")
        assert plain_yaml.read_yaml(path) == {"train": {"epochs": epochs}}
