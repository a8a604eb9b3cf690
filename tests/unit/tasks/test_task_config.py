"""The fields of a task without torch, the task that they build, and a task of a user's own."""

import importlib
from dataclasses import asdict, dataclass, fields

import pytest

from sightline.errors import UsageError
from sightline.parts import ASKED_ELSEWHERE, DataSpec, Task
from sightline.tasks.classification import Classification, MultiLabel
from sightline.tasks.config import ClassificationConfig, DetectionConfig, SegmentationConfig

SPEC = DataSpec(("a", "b"), 3, (8, 8), (0.5,) * 3, (0.5,) * 3)
ABOUT = ("headline", "drawn", "peers", "batch_loss", "activation")
CONFIGS = [
    ClassificationConfig(label_smoothing=0.2),
    DetectionConfig(lineage="mlperf", per_image=7),
    SegmentationConfig(overlap=0.25, tta=True),
]


@dataclass(frozen=True)
class Focal(Classification):
    gamma: float = 2.0


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_it_builds_the_task_with_its_fields(config):
    task = config.build()
    assert isinstance(task, Task) and type(task).__name__ == type(config).__name__.removesuffix("Config")
    assert asdict(task) == asdict(config) and task.build() is task
    assert all(getattr(task, name) == getattr(config, name) for name in ABOUT)
    assert type(config.for_data(SPEC)) is type(task)


def test_data_with_several_labels_per_image_choose_another_loss():
    several = DataSpec(("a", "b"), 3, (8, 8), (0.5,) * 3, (0.5,) * 3, multi_label=True)
    assert CONFIGS[0].for_data(several) == MultiLabel(0.2)


def test_a_task_of_a_users_own_needs_no_second_class():
    focal = Focal(label_smoothing=0.1)
    assert focal.build() is focal is focal.for_data(SPEC) and focal.headline == "top1"
    assert [field.name for field in fields(focal)] == ["label_smoothing", "tta", "gamma"]
    with pytest.raises(UsageError, match=r"task.label_smoothing=1.0 must be in \[0, 1\)"):
        Focal(label_smoothing=1.0)
    with pytest.raises(UsageError, match="task.gamma=nan must be a finite number"):
        Focal(gamma=float("nan"))


@pytest.mark.parametrize("name", ASKED_ELSEWHERE)
def test_a_method_that_nothing_would_ask_is_refused_with_what_took_its_place(name: str):
    module, _, function = ASKED_ELSEWHERE[name].rpartition(".")
    assert hasattr(getattr(importlib.import_module(module), function), "register")
    with pytest.raises(UsageError, match=rf"Own.{name}\(\) is no longer asked: .* `@{function}.register\(Own\)`"):
        type("Own", (Classification,), {name: lambda self: None})


def test_a_task_names_the_score_that_decides():
    @dataclass(frozen=True)
    class Own(Task):
        loss = predict = metric = lambda self: None

    with pytest.raises(
        UsageError, match="Own names no score that decides which checkpoint is best; add e.g. `headline"
    ):
        Own()
