"""What was compiled before into the cache of the user: known again by the same words, under this torch, here."""

from pathlib import Path

import pytest

from sightline.engine import compile_cache


def test_what_was_noted_is_known_for_this_cache_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(compile_cache.INDUCTOR_CACHE, "/one")
    assert not compile_cache.is_known("a network")
    compile_cache.note_known("a network")
    assert compile_cache.is_known("a network") and not compile_cache.is_known("another")
    monkeypatch.setenv(compile_cache.INDUCTOR_CACHE, "/two")
    assert not compile_cache.is_known("a network")
    monkeypatch.setattr(compile_cache, "cache_folder", lambda name: None)
    compile_cache.note_known("a network")
    assert not compile_cache.is_known("a network")
