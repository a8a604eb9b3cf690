"""The table of rules against this release of torch: nothing public is missing, nothing stale, signatures agree."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sightline_migrate import patching
from sightline_migrate.options import MigrateError
from sightline_migrate.reporting import record
from sightline_migrate.rules import cuda, table

# Submodules of torch.cuda that hold no functions of their own for scripts.
NO_RULES_NEEDED = {"amp", "comm"}


def names_with_a_rule() -> set[str]:
    return {rule.name for rule in table.all_rules() if rule.what != cuda.UNKNOWN}


def test_every_public_name_of_torch_cuda_has_a_rule():
    missing = [n for n in cuda.public_names() if n not in names_with_a_rule() | cuda.LEFT_ALONE]
    assert not missing, f"torch {torch.__version__} has {missing}: give each a rule in rules/cuda.py"


def test_every_submodule_of_torch_cuda_is_looked_at():
    found = {
        name
        for name, value in vars(torch.cuda).items()
        if inspect.ismodule(value) and value.__name__ == f"torch.cuda.{name}" and not name.startswith("_")
    }
    assert found <= set(cuda.SUBMODULES) | NO_RULES_NEEDED


def test_every_rule_names_something_that_exists():
    here = [rule.name for rule in table.all_rules() if not rule.module]
    assert "torch.Tensor.cuda" in here
    for rule in here:
        owner, name = table.locate(rule)
        assert hasattr(owner, name), rule


def test_a_rule_is_for_the_releases_of_torch_that_have_its_name():
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    before, now, after = (major, minor - 1), (major, minor), (major, minor + 1)

    def fits(**releases: tuple[int, int]) -> bool:
        return table.Rule("torch.ones", "exact", lambda *_: None, "", **releases).fits("cpu")

    assert fits() and fits(since=before) and fits(since=now) and fits(until=after) and fits(since=now, until=after)
    assert not fits(since=after) and not fits(until=now) and not fits(since=before, until=now)


def test_every_device_constructor_of_torch_has_a_rule():
    from torch.utils._device import _device_constructors

    missing = []
    for function in _device_constructors():
        path = {"fft_fftfreq": "fft.fftfreq", "fft_rfftfreq": "fft.rfftfreq"}.get(function.__name__, function.__name__)
        path = "nested.nested_tensor" if function.__name__ == "nested_tensor" else path
        if f"torch.{path}" not in names_with_a_rule():
            missing.append(path)
    assert not missing


def test_wrappers_accept_what_the_originals_accept(on_cpu: Callable[..., Any]):
    """By parameter name: a script may write torch.cuda.stream(stream=s)."""
    on_cpu()
    compared, differing = 0, []
    for name in cuda.public_names():
        owner, last = table.locate(name)
        here = getattr(owner, last)
        original = patching.original_of(here)
        virtual = _answer_of(here)
        if original is here or virtual is None:
            continue
        try:
            wanted, given = inspect.signature(original), inspect.signature(virtual)
        except (TypeError, ValueError):
            continue
        compared += 1
        takes_any = any(p.kind is p.VAR_KEYWORD for p in given.parameters.values())
        if not takes_any and not set(wanted.parameters) <= set(given.parameters):
            differing.append(f"{name}{wanted} but ours {given}")
    assert compared > 50 and not differing, "\n".join(differing)


def _answer_of(wrapper: Any) -> Any:
    """The function that answers inside a wrapper made by makers.answers()."""
    cells = (
        dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__ or (), strict=True))
        if hasattr(wrapper, "__code__")
        else {}
    )
    return cells["answer"].cell_contents if "answer" in cells else None


def test_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch, on_cpu: Callable[..., Any], capsys: Any):
    monkeypatch.setattr(torch.cuda, "new_thing", lambda: 7, raising=False)
    monkeypatch.setattr(torch.cuda, "__all__", [*torch.cuda.__all__, "new_thing"])
    on_cpu()
    assert torch.cuda.new_thing() == 7  # passed on
    assert "test_table.py" in capsys.readouterr().err
    (found,) = [each for each in record.records.values() if each.rule.name == "torch.cuda.new_thing"]
    assert found.kind == "refused" and found.user.file == __file__


def test_unknown_name_is_an_error_in_strict_mode(monkeypatch: pytest.MonkeyPatch, on_cpu: Callable[..., Any]):
    monkeypatch.setattr(torch.cuda, "new_thing", lambda: 7, raising=False)
    monkeypatch.setattr(torch.cuda, "__all__", [*torch.cuda.__all__, "new_thing"])
    on_cpu(strict=True)
    with pytest.raises(MigrateError, match=r"test_table.py:\d+: torch.cuda.new_thing cannot run on cpu"):
        torch.cuda.new_thing()


# What torch does on any accelerator by itself, so that only a target that lacks it needs another way.
ONLY_FOR = {
    ("cpu",): """torch.Tensor.cpu torch.Tensor.type_as torch.nn.Module.cpu torch.nn.Module._apply
torch.nn.utils.rnn.PackedSequence.cpu torch.Tensor.__deepcopy__ torch.nn.Parameter.__deepcopy__
torch.jit.optimize_for_inference torch.conv2d torch.nn.functional.conv2d torch.multiprocessing.spawn
torch.multiprocessing.start_processes""",  # its tensors are told apart from those of the host, and copied
    ("cpu", "mps"): """torch.Tensor.pin_memory torch.Tensor.record_stream torch.UntypedStorage.pin_memory
torch.TypedStorage.pin_memory triton.runtime.jit.JITFunction.run torch.backends.cuda.enable_math_sdp
torch.nn.attention._sdpa_kernel torch.nn.SyncBatchNorm.forward torch.nn.parallel.parallel_apply
torch.nn.parallel.DistributedDataParallel._passing_sync_batchnorm_handle torch.optim.Optimizer.add_param_group
torch.nn.parallel.parallel_apply.parallel_apply torch.optim.Optimizer.load_state_dict""",  # no memory of their own
    ("hpu",): "torch.autograd.backward",  # which collects its work and must be told where a step ends
}


def test_what_torch_does_on_other_targets_is_left_to_it():
    limited = {rule.name: rule.targets for rule in table.all_rules() if rule.targets}
    assert limited == {name: targets for targets, names in ONLY_FOR.items() for name in names.split()}
