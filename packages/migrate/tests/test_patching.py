"""Modules that are changed when a script imports them: afterwards they look as if nobody had followed their import."""

import importlib.util
from pathlib import Path

from sightline_migrate.patching import _Follower


def test_a_followed_module_has_its_own_loader(tmp_path: Path):
    (tmp_path / "followed.py").write_text("VALUE = 3\n")
    seen: list[int] = []
    for has_spec in (True, False):
        spec = importlib.util.spec_from_file_location("followed", tmp_path / "followed.py")
        own = spec.loader
        spec.loader = _Follower(own, lambda: [lambda followed: seen.append(followed.VALUE)])
        assert spec.loader.path == own.path, "other attributes are those of its own"
        module = importlib.util.module_from_spec(spec)
        if not has_spec:
            module.__spec__ = None
        spec.loader.exec_module(module)
        assert seen.pop() == 3 and not seen and module.__loader__ is own
        assert module.__spec__ is None if not has_spec else module.__spec__.loader is own
