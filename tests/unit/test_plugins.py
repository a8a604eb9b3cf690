"""Parts of other packages: only for names that are not ours, and errors that name the package."""

import sys
from pathlib import Path

import pytest

from sightline import cli, config, plugins, recipes
from sightline.data import sources
from sightline.errors import BadData, UsageError
from sightline.export import formats

NAME = "demo_classification"
RECIPE = """'The demo under another name.'
from dataclasses import replace
from sightline.recipes import demo_classification

def recipe():
    return replace(demo_classification.recipe(), name='{name}')
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """install(package, entry_points, {module: text}): as pip leaves it on sys.path, until the test ends."""
    known = set(sys.modules)
    monkeypatch.setattr(plugins, "_loaded", {})

    def put(package: str, entry_points: str, **modules: str) -> None:
        site = tmp_path / package
        info = site / f"{package}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(entry_points)
        for name, text in modules.items():
            (site / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(str(site))

    yield put
    for name in set(sys.modules) - known:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in sys.modules[name].__file__:
            del sys.modules[name]


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(list(words)) == 2
    return capsys.readouterr().err


def test_names_of_ours_stay_ours(install, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A module that cannot be imported takes a name in every list of ours."""
    names = {"recipes": NAME, "sources": "folder", "preparations": "shapes", "formats": "pth", "commands": "list"}
    install("greedy", "".join(f"[sightline.{g}]\n{n} = broken_greedy\n" for g, n in names.items()), broken_greedy="1/0")
    assert all(plugins.has(group, name) for group, name in names.items())
    assert recipes.load(NAME).name == NAME and cli.main(["list", NAME]) == 0
    assert sources.open_source("auto", "synthetic:classes=2,samples=8,size=8", "train").classes
    with pytest.raises(BadData):
        sources.open_source("folder", str(tmp_path), "train")  # it is ours that looks
    assert formats.find("pth").__name__ == "sightline.export.formats.pth"
    assert "--out" in said(capsys, "prepare", "shapes")  # its own refusal
    assert "broken_greedy" not in sys.modules


def test_nothing_is_scanned_for_names_of_ours(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def refuse(group: str) -> None:
        raise AssertionError(f"scanned for {group}")

    monkeypatch.setattr(plugins, "_scan", refuse)
    for words in (["--help"], ["list"], ["list", NAME], ["train", "--help"], ["train", NAME, "-h"]):
        assert cli.main(words) == 0
    assert said(capsys, "train", NAME, "--data", "no/such/folder")
    assert said(capsys, "train", NAME, "--optimizer.lrr", "1")


def test_a_refusal_lists_what_other_packages_bring(install, capsys: pytest.CaptureFixture[str]):
    groups = ("recipes", "commands", "preparations", "formats", "sources")
    install("lab", "".join(f"[sightline.{group}]\nflowers = lab_parts\n" for group in groups), lab_parts="")
    for words in (["train", "flower"], ["flower"], ["prepare", "flower"]):
        assert "flowers (lab 1.0)" in said(capsys, *words)
    with pytest.raises(UsageError, match=r"unknown; use one of .*pth.*, flowers \(lab 1.0\)"):
        formats.find("flower")
    with pytest.raises(UsageError, match=r"unknown --data.source 'flower'; known: auto, .*, flowers \(lab 1.0\)"):
        sources.open_source("flower", "x", "train")


def test_a_part_that_cannot_be_used_names_its_package(install, capsys: pytest.CaptureFixture[str]):
    points = "[sightline.recipes]\nbroken = lab_broken\nempty = lab_empty\ngone = lab_gone\nother = lab_other\n"
    points += "script = lab_script\n"
    points += "[sightline.commands]\nnumber = lab_empty:NUMBER\n"
    install(
        "lab",
        points,
        lab_broken="import no_such_module",
        lab_empty="NUMBER = 1",
        lab_other=RECIPE.format(name="b"),
        lab_script="raise SystemExit(0)",
    )
    where = "of the package lab 1.0 (sightline.recipes)"
    no_module = f"'broken' {where} cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"
    assert no_module in (error := said(capsys, "train", "broken")) and "`pip uninstall lab`" in error
    assert f"'empty' {where} is lab_empty, which does not define recipe" in said(capsys, "train", "empty")
    assert f"'script' {where} cannot be imported: SystemExit: 0" in said(capsys, "train", "script")
    assert f"'gone' {where} cannot be imported: ModuleNotFoundError" in said(capsys, "list", "gone")
    assert "recipe() of other is called 'b'; name it 'other' like its entry point" in said(capsys, "train", "other")
    assert "'number' of the package lab 1.0 (sightline.commands) is lab_empty:NUMBER, which cannot be called" in said(
        capsys, "number"
    )


def test_a_name_of_two_packages_is_refused(install, capsys: pytest.CaptureFixture[str]):
    for package in ("lab", "mill"):
        install(package, f"[sightline.recipes]\nflowers = {package}_recipe\n", **{f"{package}_recipe": ""})
    assert "'flowers' is brought by lab 1.0 and mill 1.0 as one of their recipes; uninstall all but one" in said(
        capsys, "train", "flowers"
    )


def test_a_config_file_may_name_an_installed_recipe_and_no_file(install, tmp_path: Path):
    install("lab", "[sightline.recipes]\nflowers = lab_recipe\n", lab_recipe=RECIPE.format(name="flowers"))
    file = tmp_path / "config.yaml"
    file.write_text("recipe: flowers\ntrain: {epochs: 3}\n")
    assert config.asked("train", ["--config", str(file)]).settings["train.epochs"].value == 3
    assert config.of_run("inspect", tmp_path).build()[0].name == "flowers"
    assert config.of_stored({"recipe": "flowers", "train": {"epochs": 4}}).build()[0].train.epochs == 4
    assert recipes.describe("flowers") == "The demo under another name."
    (tmp_path / "theirs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    for name in (str(tmp_path / "theirs.py"), "lab_recipe", "os", "flowers.py"):
        file.write_text(f"recipe: {name}\n")
        with pytest.raises(UsageError, match="own"):
            config.asked("train", ["--config", str(file)])
        with pytest.raises(UsageError, match="own recipe"):
            config.of_run("inspect", tmp_path)
        with pytest.raises(UsageError, match="own recipe"):
            config.of_stored({"recipe": name})
    assert not (tmp_path / "ran").exists()


def test_a_format_of_another_package_is_found_by_its_name_and_once(install):
    words = "SUFFIX = '.own'\nABOUT = 'mine'\nRUNS = False\ncheck_installed = write = load = print\n"
    install(
        "brings",
        "[sightline.formats]\nown = own_format\nhalf = half_format\n",
        own_format=words,
        half_format="RUNS = 1",
    )
    found = formats.find("own")
    assert (found.__name__, found.SUFFIX) == ("own_format", ".own") and formats.find("own") is found
    assert plugins.names("formats") == ["half", "own"] and "own" not in formats.names()
    with pytest.raises(
        UsageError, match="which does not define SUFFIX, ABOUT, check_installed, write, load; update or"
    ):
        formats.find("half")
    with pytest.raises(
        UsageError, match=r"^--format odd is unknown; use one of onnx, .*, half \(brings 1.0\), own \(brings"
    ):
        formats.find("odd")
    with pytest.raises(UsageError, match="^no installed package brings 'odd' among its formats; install it, or check"):
        plugins.load("formats", "odd")
