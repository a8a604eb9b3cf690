"""The hook that torch calls at the end of its import: it never raises, and loads backends that come after it."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from sightline_migrate import hook, session


def entry(value: str, told: list[str]) -> Any:
    module, _, attr = value.partition(":")
    owner = sys.modules.setdefault(module, types.ModuleType(module))
    *path, last = attr.split(".")
    for name in path:
        owner = owner.__dict__.setdefault(name, types.SimpleNamespace())
    setattr(owner, last, lambda: told.append(value))
    return types.SimpleNamespace(value=value, module=module, attr=attr, load=lambda: getattr(owner, last))


def test_backends_that_torch_would_load_later_are_loaded_first_and_once(monkeypatch: pytest.MonkeyPatch):
    told: list[str] = []
    values = ["early_backend:load", hook.OWN[0], "late_backend:load", hook.OWN[1], "late_backend:inside.of.load"]
    entries = [entry(value, told) for value in values]
    try:
        asked = []
        monkeypatch.setattr("importlib.metadata.entry_points", lambda group: asked.append(group) or entries)
        hook._load_later_backends()
        assert told == ["late_backend:load", "late_backend:inside.of.load"] and asked == ["torch.backends"]
        for each in entries:
            each.load()()
        assert told[2:] == [values[0], values[1], values[3]], "torch's own calls of the two have no effect"
        entries[2].load()()
        assert told[5:] == ["late_backend:load"], "but any later one has"
        monkeypatch.setattr("importlib.metadata.entry_points", lambda group: entries[:1])
        hook._load_later_backends()
        assert len(told) == 6
    finally:
        for name in {value.partition(":")[0] for value in values} - {"sightline.migrate.hook"}:
            sys.modules.pop(name)


@pytest.fixture
def activated(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []
    monkeypatch.setattr(session, "activate_and_announce", made.append)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [])
    for name in ("SIGHTLINE_MIGRATE", "PT_HPU_GPU_MIGRATION"):
        monkeypatch.delenv(name, raising=False)
    return made


def test_it_activates_where_the_environment_asks_and_tells_what_is_wrong(
    activated: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    hook.autoload()
    assert activated == []
    monkeypatch.setenv("SIGHTLINE_MIGRATE", "1")
    monkeypatch.setenv("SIGHTLINE_MIGRATE_AMP", "off")
    hook.autoload()
    assert [each.amp for each in activated] == ["off"]
    monkeypatch.setitem(sys.modules, "sightline_migrate.session", types.SimpleNamespace(
        __spec__=types.SimpleNamespace(_initializing=True)
    ))  # fmt: skip
    hook.autoload()
    monkeypatch.setitem(sys.modules, "sightline_migrate.session", session)
    assert len(activated) == 1 and capsys.readouterr() == ("", "")
    monkeypatch.setenv("SIGHTLINE_MIGRATE_AMP", "maybe")
    hook.autoload()
    said = capsys.readouterr()
    assert (
        said.out == "" and said.err.startswith("sightline migrate: not active, MigrateError(") and "maybe" in said.err
    )


def test_the_entry_point_finds_its_own_package_and_leaves_the_path_as_it_was(
    activated: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    folder = Path(hook.__file__).with_name("autoload")
    monkeypatch.syspath_prepend(folder)
    entry_point = importlib.import_module("sightline_migrate_autoload")
    try:
        assert f"{entry_point.__name__}:autoload" == hook.OWN[0] and Path(entry_point.ROOT) == folder.parents[1]
        before = list(sys.path)
        entry_point.autoload()
        assert activated == []
        for name in ("PT_HPU_GPU_MIGRATION", "SIGHTLINE_MIGRATE"):
            monkeypatch.setenv(name, "1")
            entry_point.autoload()
        assert len(activated) == 2 and sys.path == before
        monkeypatch.setitem(sys.modules, "sightline_migrate.hook", None)
        monkeypatch.delattr("sightline_migrate.hook")
        entry_point.autoload()
        assert "sightline migrate: not active, " in capsys.readouterr().err and sys.path == before
    finally:
        del sys.modules["sightline_migrate_autoload"]
