"""What was compiled before into the cache of the user: known again by the same words, under this torch, here."""

import os
import tempfile
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


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (compile_cache.INDUCTOR_CACHE, compile_cache.TRITON_CACHE):
        monkeypatch.setenv(name, "")  # restored after the test, whoever sets it meanwhile
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("unset")
def test_code_goes_to_the_users_cache_also_where_torch_has_named_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    assert os.path.dirname(cache_dir()) == tempfile.gettempdir()  # torch writes it into the environment
    compile_cache.keep_compiled_code()
    kept = [os.environ[name] for name in (compile_cache.INDUCTOR_CACHE, compile_cache.TRITON_CACHE)]
    assert kept == [str(tmp_path / "sightline" / name) for name in ("inductor", "triton")]
    monkeypatch.setenv(compile_cache.TRITON_CACHE, "/chosen")
    compile_cache.keep_compiled_code()
    assert os.environ[compile_cache.TRITON_CACHE] == "/chosen"


@pytest.mark.usefixtures("unset")
@pytest.mark.parametrize("name", ["torchinductor_shared", "torchinductor_", "inductor"])
def test_a_folder_that_the_user_chose_beside_torchs_default_stays(name: str, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    chosen = os.path.join(tempfile.gettempdir(), name)
    monkeypatch.setenv(compile_cache.INDUCTOR_CACHE, chosen)
    compile_cache.keep_compiled_code()
    assert os.environ[compile_cache.INDUCTOR_CACHE] == chosen


@pytest.mark.parametrize("user", ["anna", r"HOST\anna", 'a:*?"<>|/b'])
def test_torchs_default_is_known_for_any_name_of_a_user(user: str, monkeypatch):
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.setenv("LOGNAME", user)
    assert compile_cache._is_default(default_cache_dir())
    for error in (KeyError, OSError):
        with monkeypatch.context() as patch:
            patch.setattr("getpass.getuser", lambda error=error: (_ for _ in ()).throw(error("no name")))
            assert compile_cache._is_default(default_cache_dir())
            assert not compile_cache._is_default(f"{default_cache_dir()}0")


@pytest.mark.usefixtures("unset")
def test_a_note_holds_where_the_folder_is_mounted_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "here"))
    compile_cache.keep_compiled_code()
    compile_cache.note_known("a network")
    (tmp_path / "here").rename(tmp_path / "there")
    for name in (compile_cache.INDUCTOR_CACHE, compile_cache.TRITON_CACHE):
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "there"))
    compile_cache.keep_compiled_code()
    assert compile_cache.is_known("a network")
