"""Activation leaves no trace once it is undone."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import serialization

from sightline_migrate import activate, deactivate, migrate, patching, session
from sightline_migrate.options import MigrateError
from sightline_migrate.reporting import record
from sightline_migrate.rules import table

CLASSES = (
    torch.Tensor, torch.nn.Module, torch.UntypedStorage, torch.TypedStorage, torch.amp.autocast_mode.autocast,
    torch.amp.GradScaler, torch.utils._device.DeviceContext, torch.profiler.profile, torch.autograd.profiler.profile,
    torch.optim.Optimizer, torch.utils.data.DataLoader, torch.nn.Parameter, torch.nn.parameter.UninitializedTensorMixin,
    torch._ops.OpOverload, torch._ops.OpOverloadPacket,
)  # fmt: skip


def snapshot() -> dict[str, Any]:
    """Every attribute of every torch module and of the classes that are touched, the hooks and the environment."""
    found: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        if (name == "torch" or name.startswith("torch.")) and isinstance(module, ModuleType):
            found |= {f"{name}.{key}": id(value) for key, value in vars(module).items()}
    for each in CLASSES:
        found |= {f"{each.__qualname__}.{key}": id(value) for key, value in vars(each).items()}
    found |= {f"environment {key}": value for key, value in os.environ.items()}
    found["readers"] = [entry[0] for entry in serialization._package_registry]
    found["importers"] = [id(each) for each in sys.meta_path]
    found["jit"] = dict(torch.jit._builtins._get_builtin_table())
    found["excepthook"] = id(sys.excepthook)
    return found


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.slow), {"claim": True, "fp16_to_bf16": True, "cuda_version": "12.4"}],
    ids=str,
)
def test_undo_restores_everything(options: dict[str, Any]):
    table.families()  # importing them may import parts of torch
    with migrate(target="cpu", **options):
        pass
    before = snapshot()
    with migrate(target="cpu", **options):
        changed = [key for key, value in snapshot().items() if before.get(key) != value]
        assert len(changed) > 150
        torch.zeros(2, device="cuda").cuda()
    after = snapshot()
    assert {key for key in before | after if before.get(key) != after.get(key)} == set()
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(2, device="cuda")


def test_second_activation_changes_nothing():
    first = activate(target="cpu")
    zeros = torch.zeros
    assert activate(target="cpu", claim=True) is first
    with migrate(target="cpu"):
        assert torch.zeros is zeros
    assert torch.zeros is zeros
    assert session.active() is first
    deactivate()
    assert session.active() is None
    deactivate()  # nothing to undo


def test_undo_out_of_order_is_refused(monkeypatch: pytest.MonkeyPatch):
    activate(target="cpu")
    ours = torch.zeros
    torch.zeros = lambda *args, **kwargs: ours(*args, **kwargs)  # type: ignore[assignment]
    with pytest.raises(MigrateError, match="torch.zeros was replaced again"):
        deactivate()
    assert torch.cuda.is_available()  # nothing was half undone
    torch.zeros = ours  # type: ignore[assignment]
    deactivate()
    assert not torch.cuda.is_available()


def test_failing_activation_leaves_nothing(monkeypatch: pytest.MonkeyPatch):
    with migrate(target="cpu"):  # imports parts of torch
        pass
    before = snapshot()
    from sightline_migrate.rules import compile

    def fail(session: Any) -> None:
        raise OSError("no")

    monkeypatch.setattr(compile, "setup", fail)
    with pytest.raises(OSError, match="no"):
        activate(target="cpu")
    after = snapshot()
    assert {key for key in before | after if before.get(key) != after.get(key)} == set()
    assert session.active() is None


ones = torch.ones  # as `from torch import ones`, before activation
available = torch.cuda.is_available
version = torch.version.cuda


def test_late_activation_reaches_names_imported_before():
    before = ones
    with migrate(target="cpu", cuda_version="1.2"):
        assert ones is torch.ones is not before and available()
        assert version is not torch.version.cuda == "1.2"  # a value, which others may have by chance: None, a number
        assert ones(2, device="cuda").tolist() == [1.0, 1.0]
    assert ones is before and not available()


def test_a_module_that_was_only_looked_for_is_still_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "looked_for_first.py").write_text("VALUE = 1")
    monkeypatch.syspath_prepend(tmp_path)
    hook, undo, seen = patching.ImportHook(), patching.UndoStack(), []
    hook.install(undo)
    try:
        hook.when_imported("looked_for_first", lambda module: seen.append(module.VALUE))
        for _ in range(2):
            assert importlib.util.find_spec("looked_for_first") is not None
        assert seen == []
        importlib.import_module("looked_for_first")
        assert seen == [1]
    finally:
        undo.undo()
        sys.modules.pop("looked_for_first", None)


def test_unknown_target_and_option_are_told():
    with pytest.raises(MigrateError, match="there is no torch.warp; install its backend, or use --target cpu"):
        activate(target="warp")
    with pytest.raises(MigrateError, match="unknown option 'traget'; known: target"):
        activate(traget="cpu")
    with pytest.raises(MigrateError, match="amp='maybe' is not known"):
        activate(target="cpu", amp="maybe")
    assert session.active() is None


def test_real_cuda_is_left_alone(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Test")
    assert activate(target="auto") is None
    assert "not active: NVIDIA Test is available" in capsys.readouterr().err
    record.reset()
