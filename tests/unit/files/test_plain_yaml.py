"""YAML that is written, and read again or remembered: the same text as PyYAML's, the same values, nobody else's."""

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sightline import config, recipes
from sightline.errors import UsageError
from sightline.files import plain_yaml
from sightline.files.plain_yaml import read_yaml
from sightline.recipe import store
from sightline.recipe.settings import plain

RECIPES = Path(recipes.__file__).parent
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


def mutants(text: str, count: int) -> Iterator[str]:
    """Change one to three places: a letter, a line, a run of indentation."""
    draw = random.Random(0)
    signs = ":-[]{}#,'\" \n09aN~=.\\"
    for _ in range(count):
        changed = text
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(len(changed))
            how = draw.randrange(4)
            lines = changed.splitlines(keepends=True)
            line = draw.randrange(len(lines))
            if how == 0:
                changed = changed[:at] + draw.choice(signs) + changed[at:]
            elif how == 1:
                changed = changed[:at] + changed[at + draw.randint(1, 3) :]
            elif how == 2:
                changed = "".join([*lines[:line], " " * draw.randrange(4), *lines[line:]])
            else:
                changed = "".join([*lines[:line], draw.choice(lines), *lines[line:]])
        yield changed


def read(text: str) -> tuple[bool, object]:
    try:
        return True, repr(plain_yaml._parsed(text))
    except (yaml.YAMLError, ValueError) as error:
        return False, str(error)


@pytest.mark.skipif(not hasattr(yaml, "CSafeLoader"), reason="PyYAML is built without libyaml")
def test_the_fast_parser_reads_what_the_careful_one_reads_and_complains_as_it_does(monkeypatch):
    values = {
        "recipe": "own",
        "data": {"path": "/my photos/a=b, c", "crop": [0.5, 1.0], "mean": [], "split": "", "on": "on", "no": "no"},
        "train": {"lr": 1e-5, "epochs": 10, "big": 1.5e20, "at": "2026-11-19", "none": None, "names": ["-", "a: b"]},
        "task": {"range": [-180.0, -1, -0.5e-3], "offset": -3, "text": ["-a", "- b", "-.inf"]},
        "run": {"out": "runs/#1", "deep": {"er": [{"a": 1}, {"b": [1, 2]}]}, "octal": "010", "hex": "0x1f"},
    }
    texts = [plain_yaml.dump(values), *mutants(plain_yaml.dump(values), 400)]
    found = [read(text) for text in texts]
    assert found[0] == (True, repr(values))
    assert 40 < sum(map(bool, (good for good, _ in found))) < 400
    monkeypatch.setattr(plain_yaml, "_PLAIN", re.compile("(?!)"))
    assert found == [read(text) for text in texts]


@pytest.mark.skipif(not hasattr(yaml, "CSafeLoader"), reason="PyYAML is built without libyaml")
@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("[a-z]*.py")))
def test_the_configs_of_all_recipes_are_read_by_the_fast_parser(name: str, monkeypatch):
    recipe, run = config.load(name, [])
    monkeypatch.setattr(plain_yaml, "_PlainLoader", lambda text: pytest.fail("the careful one was asked"))
    assert plain_yaml._parsed(store.dump(recipe, run))["recipe"]


@pytest.mark.parametrize("line", ["url: https://host/a.zip?dl=1", "path: R&D", "a: b  # < 5", "é: 1"])
def test_a_line_that_only_the_careful_parser_reads_ends_a_search_at_once(line: str):
    """The fast parser's rule once tried 2 ** 80 ways to read these."""
    text = "".join(f"  {number}: class{number}\n" for number in range(80))
    assert plain_yaml._parsed(f"names:\n{text}{line}\n")["names"][79] == "class79"


@pytest.mark.skipif(not hasattr(yaml, "CSafeLoader"), reason="PyYAML is built without libyaml")
def test_up_to_64_levels_are_read_by_the_fast_parser(monkeypatch):
    careful = []
    monkeypatch.setattr(plain_yaml, "_PlainLoader", lambda text: careful.append(text) or yaml.SafeLoader(text))
    for text in ("[" * 64 + "]" * 64, "- [{}]\n" * 32):
        assert plain_yaml._parsed(text) and not careful
    for text in ("[" * 65 + "]" * 65, "- [{}, []]\n" * 22):
        assert plain_yaml._parsed(text) and careful.pop()


def test_what_stands_for_a_value_is_refused_by_both():
    for text in ("=:", "a: =", "[=, b]", "- ="):
        assert read(text)[0] is False, text


@pytest.mark.parametrize(
    "text",
    ["[" * 30_000, "- " * 30_000, "{a: " * 10_000, "a:\n " + "- " * 30_000 + "x"],
    ids=["lists", "items", "mappings", "indented items"],
)
def test_deep_nesting_is_left_to_the_careful_parser(text: str, tmp_path: Path):
    (tmp_path / "deep.yaml").write_text(text)
    with pytest.raises(UsageError, match="cannot be read as YAML"):
        read_yaml(tmp_path / "deep.yaml")


def test_a_config_file_has_a_limit(tmp_path: Path):
    file = tmp_path / "a.yaml"
    file.write_text("a: 1\n".ljust(65_536, "#"))
    assert read_yaml(file) == {"a": 1}
    file.write_text("a: 1\n".ljust(65_537, "#"))
    with pytest.raises(UsageError, match="a.yaml is larger than 65536 bytes; a config file is a few kB"):
        read_yaml(file)


def test_merge_keys_and_anchors_are_refused(tmp_path: Path):
    file = tmp_path / "a.yaml"
    for text, said in (
        ("a: {<<: {b: 1}}\n", "merge keys are not read"),
        ("a: &b 1\n", "anchors and aliases are not read"),
        ("a: *b\n", "anchors and aliases are not read"),
        ("- a\n", "must hold `part: {field: value}` pairs"),
    ):
        file.write_text(text)
        with pytest.raises(UsageError, match=said):
            read_yaml(file)


def test_several_documents_are_written_in_their_order():
    assert plain_yaml.to_documents([{"b": 1, "a": "x"}, {}]) == "---\nb: 1\na: x\n--- {}\n"
    assert plain_yaml.to_text({"b": "ü", "a": [1]}) == "b: ü\na:\n- 1\n"
