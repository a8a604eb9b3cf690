"""`sightline warm` on a CPU that compiles by itself, with a backend that only traces."""

import dataclasses

import pytest
import torch
from torch import nn

from sightline import config
from sightline.data.classification.config import ClassificationData
from sightline.engine import compile_cache
from sightline.engine.compile_cache import INDUCTOR_CACHE, TRITON_CACHE
from sightline.errors import UsageError
from sightline.hardware import devices
from sightline.measure import warm as warm_module
from sightline.measure.warm import warm
from sightline.parts import Batch, DataSpec, ModelConfig
from sightline.recipe.recipe import Run

TINY = """--data.classes=10 --data.size=32 --data.eval-size=32 --data.eval-resize=32 --train.global-batch=8
--train.precision=fp32 --run.device=cpu --run.workers=0""".split()


@dataclasses.dataclass(frozen=True)
class FewLayers(ModelConfig):
    """The compiler takes half a second to trace a ResNet-18."""

    def build(self, spec: DataSpec) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(spec.channels, 4, 8, 8), nn.ReLU(), nn.Flatten(), nn.Linear(64, len(spec.classes))
        )


@pytest.fixture
def folder(monkeypatch, tmp_path):
    for name in (INDUCTOR_CACHE, TRITON_CACHE):
        monkeypatch.setenv(name, "")  # restored after the test, whoever sets it meanwhile
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "sightline"


def warmed(*flags: str) -> list[str]:
    said: list[str] = []
    torch.compiler.reset()
    recipe, run = config.load("demo_classification", [*TINY, *flags])
    warm(dataclasses.replace(recipe, model=FewLayers()), run, said.append)
    return said


def test_a_run_later_finds_that_its_step_is_compiled(folder, monkeypatch):
    cpu = dataclasses.replace(devices.KINDS["cpu"], compile_auto=True, compile_backend="eager")
    monkeypatch.setitem(devices.KINDS, "cpu", cpu)
    noted: list[tuple[str, Batch]] = []
    note = compile_cache.key_of

    def key_of(recipe, device, ranks, batch):
        noted.append((note(recipe, device, ranks, batch), batch))
        return noted[-1][0]

    monkeypatch.setattr("sightline.measure.warm.key_of", key_of)
    said = warmed()
    assert [line.partition(":")[0] for line in said if line.startswith("first step")] == [
        "first step, compiled",
        "first step, not compiled",
    ]
    assert said[-1].startswith(f"{folder}: ") and said[-1].endswith(" MB")
    [(key, batch)] = noted
    assert compile_cache.is_known(key) and len(batch["index"]) == 8
    assert not compile_cache.is_known(key.replace("fp32", "bf16"))


def test_a_device_on_which_nothing_is_compiled_is_refused(folder):
    with pytest.raises(UsageError, match="nothing is compiled on cpu unless --run.compile on"):
        warmed()


def test_other_folders_of_torch_are_named(folder, monkeypatch, tmp_path):
    cpu = dataclasses.replace(devices.KINDS["cpu"], compile_backend="eager")
    monkeypatch.setitem(devices.KINDS, "cpu", cpu)
    (tmp_path / "chosen").mkdir()
    (tmp_path / "chosen" / "code.py").write_text("x" * 2_000_000)
    monkeypatch.setenv(INDUCTOR_CACHE, str(tmp_path / "chosen"))
    ranks: list[int] = []
    monkeypatch.setattr(ClassificationData, "for_ranks", lambda self, count: ranks.append(count) or self)
    said = warmed("--run.compile=on")
    assert ranks == [1]
    assert said[-1] == f"{tmp_path / 'chosen'}: 1 files, 2 MB"


def test_a_cache_that_cannot_be_written_is_refused(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UsageError, match="/file/sightline cannot be written; set XDG_CACHE_HOME"):
        warmed()


@pytest.mark.parametrize(
    ("asked", "kind", "compiles_itself", "ways"),
    [
        ("auto", "cuda", True, ("on", "off")),
        ("on", "cuda", True, ("on",)),
        ("off", "cuda", True, ("off",)),
        ("auto", "cuda", False, ("off",)),
        ("auto", "cpu", True, ("on", "off")),
        ("on", "cpu", False, ("on",)),
        ("off", "cpu", True, None),
        ("auto", "cpu", False, None),
    ],
)
def test_a_first_step_is_made_each_way_that_a_run_may_take(asked, kind, compiles_itself, ways):
    device = dataclasses.replace(devices.KINDS["cpu"], kind=kind, compile_auto=compiles_itself)
    if ways is None:
        with pytest.raises(UsageError, match=f"nothing is compiled on {kind}"):
            warm_module._ways(Run(compile=asked), device)
    else:
        assert warm_module._ways(Run(compile=asked), device) == ways
