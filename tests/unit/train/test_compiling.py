"""`--run.compile auto`: compile where it pays, say why, remember it, and leave runs alone whose bits must not move."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from tiny import tiny
from torch._dynamo.utils import counters

from sightline import api
from sightline.engine import compile_cache
from sightline.hardware import devices
from sightline.train import compiling

TINY = [
    *(*tiny(), "--data.path=synthetic:classes=10,samples=96,size=24", "--run.keep=50", "--train.epochs=1"),
    *("--run.checkpoint-every-steps=1", "--run.report=auto", "--run.progress=auto"),
]


@pytest.mark.parametrize(
    ("wanted", "can", "deterministic", "stored", "steps", "choice"),
    [
        ("on", False, False, "off", 1, "on"),
        ("off", True, False, "on", 10**6, "off"),
        ("auto", False, False, "on", 10**6, "off"),  # a CPU never compiles by itself
        ("auto", True, False, "", 10**6, ""),  # to be timed
        ("auto", True, False, "on", 1, "on"),
        ("auto", True, False, "off", 10**6, "off"),
        ("auto", True, True, "", 9_999, "off"),  # the count alone decides
        ("auto", True, True, "", 10_000, "on"),
        ("auto", True, True, "on", 1, "on"),  # nothing switches in mid-run
        ("auto", True, True, "off", 10**6, "off"),
    ],
)
def test_what_needs_no_clock_is_decided_before_the_first_step(wanted, can, deterministic, stored, steps, choice):
    assert compiling.choose_by_count(wanted, can, deterministic, stored, steps) == choice


@pytest.mark.parametrize(
    ("seconds_left", "is_cached", "expected"),
    [(20, False, False), (7 * 60, False, True), (100, False, False), (100, True, True), (20, True, False)],
)
def test_compiling_pays_when_it_saves_more_than_it_takes(seconds_left, is_cached, expected):
    assert compiling.pays(seconds_left, is_cached) is expected


def test_the_line_gives_the_numbers_of_the_choice():
    assert compiling.as_line(True, 12_000, 0.035, False) == (
        "compiling, about 40 s: 12,000 steps of 35 ms are left, 7 min, of which it saves about 105 s"
    )
    assert "not compiled: 500 steps of 4 ms are left, 2 s, " in compiling.as_line(False, 500, 0.004, False)


@pytest.fixture
def compiles_here(monkeypatch, tmp_path):
    """Let `auto` compile on this CPU, with a backend that only traces, after three steps."""
    cpu = dataclasses.replace(devices.KINDS["cpu"], compile_auto=True, compile_backend="eager")
    monkeypatch.setitem(devices.KINDS, "cpu", cpu)
    monkeypatch.setattr(compiling, "SKIPPED_STEPS", 1)
    monkeypatch.setattr(compiling, "TIMED_STEPS", 2)
    monkeypatch.setattr(compiling, "COLD_S", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(compile_cache.INDUCTOR_CACHE, str(tmp_path / "inductor"))


def train(folder: Path, *flags: str) -> None:
    torch.compiler.reset()
    counters.clear()
    api.train(*api.load("demo_classification", [*TINY, f"--run.out={folder}", *flags]))


def graphs() -> int:
    """Count the graphs that torch has traced in the last run."""
    return int(counters["stats"]["unique_graphs"])


def choices(folder: Path) -> list[str]:
    states = sorted(folder.glob("checkpoints/ckpt-*/state.json"))
    return [json.loads(state.read_text()).get("choices", {}).get("compile", "") for state in states]


def weights(folder: Path) -> bytes:
    return (folder / "checkpoints/ckpt-00000012/model.safetensors").read_bytes()


@pytest.mark.slow  # tracing takes seconds
def test_a_run_that_lasts_compiles_in_mid_run_and_resumes_compiled(compiles_here, tmp_path, capsys):
    train(tmp_path / "plain", "--run.compile=off")
    capsys.readouterr()
    assert graphs() == 0
    train(tmp_path / "a", "--train.max-steps=8")
    assert "compiling, about 0 s: " in capsys.readouterr().out
    assert graphs() > 0
    assert choices(tmp_path / "a") == [""] * 3 + ["on"] * 5
    train(tmp_path / "a", "--train.max-steps=0", "--run.override")
    assert "compiling" not in capsys.readouterr().out  # it was decided
    assert graphs() > 0
    assert weights(tmp_path / "a") == weights(tmp_path / "plain")  # the backend changes no operation
    assert list((tmp_path / "cache/sightline/compiled").iterdir())


def test_a_run_that_is_nearly_over_is_not_compiled(compiles_here, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(compiling, "COLD_S", 1e9)
    train(tmp_path, "--train.max-steps=8")
    assert "not compiled: 4 steps of" in capsys.readouterr().out
    assert choices(tmp_path)[-1] == "off"
    monkeypatch.setattr(compiling, "COLD_S", 0.0)
    train(tmp_path, "--train.max-steps=0", "--run.override")
    assert graphs() == 0


def test_a_deterministic_run_never_switches(compiles_here, tmp_path):
    train(tmp_path, "--train.deterministic", "--train.max-steps=8")
    assert graphs() == 0
    assert choices(tmp_path) == ["off"] * 8


@pytest.mark.slow
def test_a_run_from_before_there_was_a_choice_is_compiled_from_its_first_step(compiles_here, tmp_path, capsys):
    train(tmp_path, "--run.compile=off", "--train.max-steps=2")
    checkpoint = tmp_path / "checkpoints/ckpt-00000002"
    state = json.loads((checkpoint / "state.json").read_text())
    del state["choices"]
    (checkpoint / "state.json").write_text(json.dumps(state))
    _sign(checkpoint)
    train(tmp_path, "--train.max-steps=4", "--run.override")
    assert graphs() > 0
    assert choices(tmp_path)[-2:] == ["on", "on"]


def _sign(checkpoint: Path) -> None:
    """Write the manifest of a checkpoint again."""
    from sightline.files.checkpoint_folder import sha256_of

    manifest = json.loads((checkpoint / "manifest.json").read_text())
    for name in manifest["files"]:
        file = checkpoint / name
        manifest["files"][name] = {"bytes": file.stat().st_size, "sha256": sha256_of(file)}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def test_a_cpu_keeps_no_choice_and_compiles_nothing(tmp_path):
    train(tmp_path, "--train.max-steps=5")
    assert choices(tmp_path) == [""] * 5
    assert graphs() == 0


def test_compiled_code_goes_to_the_users_cache_unless_another_folder_is_set(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(compile_cache.INDUCTOR_CACHE, raising=False)
    compile_cache.keep_compiled_code()
    assert compile_cache.os.environ[compile_cache.INDUCTOR_CACHE] == str(tmp_path / "sightline/inductor")
    monkeypatch.setenv(compile_cache.INDUCTOR_CACHE, "/elsewhere")
    compile_cache.keep_compiled_code()
    assert compile_cache.os.environ[compile_cache.INDUCTOR_CACHE] == "/elsewhere"
