"""Parts that learn and parts that do not: the head alone, and steps before the run that leave nothing behind."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny
from torch import nn
from torch.nn import functional as F

from sightline import api
from sightline.data.loading.order import TrainOrder
from sightline.engine import checkpoint
from sightline.engine.model import choose_trainable
from sightline.errors import UsageError

TINY = [*tiny(4), "--train.epochs=2", "--run.log-every-steps=1", "--run.keep=50"]
HEAD = {"fc.weight", "fc.bias"}
EVERYTHING = ["--train.ema=0.9", "--train.accumulation=2", "--train.clip=1", "--data.mixup=0.2"]


def train(folder: Path, *flags: str) -> Path:
    api.train(*api.load("demo_classification", [*TINY, f"--run.out={folder}", *flags]))
    return folder


def tensors(folder: Path, file: str = "model") -> dict[str, torch.Tensor]:
    return load_file(checkpoint.find(folder, "latest") / f"{file}.safetensors")


def bits(folder: Path) -> dict[str, bytes]:
    latest = checkpoint.find(folder, "latest")
    return {path.name: path.read_bytes() for path in sorted(latest.glob("*.safetensors"))}


def events(folder: Path, kind: str) -> list[dict]:
    found = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in found if line["event"] == kind]


# The head


@pytest.fixture(scope="module")
def donor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("donor") / "run")


def test_only_the_head_learns_and_statistics_still_move(donor: Path, tmp_path: Path):
    given = checkpoint.find(donor, "latest") / "model.safetensors"
    run = train(tmp_path / "run", "--train.trainable=head", f"--model.weights={given}", "--train.ema=0.5")
    start, end, average = load_file(given), tensors(run), tensors(run, "ema")
    changed = {name for name in start if not torch.equal(start[name], end[name])}
    statistics = {name for name in start if "running_" in name or "num_batches" in name}
    assert changed == HEAD | statistics
    assert {name.partition(":")[0] for name in tensors(run, "optimizer")} == HEAD
    assert all(torch.equal(average[name], start[name]) for name in start if name not in changed)


def test_the_head_learns_as_a_linear_layer_on_fixed_features_does(donor: Path, tmp_path: Path):
    """Three plain steps of torch's own SGD on the features that the untouched network gives."""
    given = checkpoint.find(donor, "latest") / "model.safetensors"
    flags = ["--train.trainable=head", f"--model.weights={given}", "--train.epochs=1", "--schedule.kind=constant"]
    flags += ["--schedule.warmup-epochs=0", "--data.augment=off", "--task.label-smoothing=0"]
    run = train(tmp_path / "run", *flags)
    recipe, _ = api.load("demo_classification", [*TINY, *flags])
    dataset = recipe.data.open("train", 0)
    model = recipe.model.build(dataset.spec)
    model.load_state_dict(load_file(given))
    model.train().requires_grad_(False)  # nothing here avoids what oneDNN does to gradients of narrow layers
    model.fc.requires_grad_(True)
    settings = recipe.optimizer
    optimizer = torch.optim.SGD(model.fc.parameters(), settings.lr, momentum=settings.momentum, nesterov=True)
    optimizer.param_groups[0]["params"] = [model.fc.weight]
    optimizer.param_groups[0]["weight_decay"] = settings.weight_decay
    optimizer.add_param_group({"params": [model.fc.bias], "weight_decay": settings.bias_weight_decay})
    order = TrainOrder(len(dataset), 8, recipe.train.seed)
    for step in range(3):
        samples = [dataset.load(int(e), int(i)) for e, i in zip(*order.batch(step), strict=True)]
        batch = {key: torch.stack([torch.as_tensor(s[key]) for s in samples]) for key in samples[0]}
        loss = F.cross_entropy(model(dataset.finish(batch, torch.float32)["image"]), batch["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for name in HEAD:
        torch.testing.assert_close(tensors(run)[name], model.state_dict()[name], rtol=1e-4, atol=1e-6)


def test_the_head_is_the_last_linear_layer():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.ReLU())
    choose_trainable(model, "head")
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == [
        "1.1.weight",
        "1.1.bias",
    ]
    with pytest.raises(UsageError, match="train.trainable=head needs a linear layer, Conv2d has none; use all"):
        choose_trainable(nn.Conv2d(1, 1, 1), "head")


def test_what_learns_cannot_be_changed_on_the_way(tmp_path: Path):
    run = train(tmp_path / "run")
    with pytest.raises(UsageError, match="train.trainable: all -> head"):
        train(run, "--train.trainable=head", "--run.override")


# Warm-up


@pytest.mark.parametrize(
    "flags",
    [
        EVERYTHING,
        pytest.param(
            ["--train.precision=fp16", "--optimizer.kind=adamw", "--optimizer.no-nesterov", "--optimizer.momentum=0.9"],
            marks=pytest.mark.slow,
        ),
        ["--optimizer.lr=1e30", "--run.on-nan=skip"],  # a warm-up that is not finite
    ],
    ids=["everything", "fp16", "diverging"],
)
def test_steps_before_the_run_leave_nothing_behind(tmp_path: Path, flags: list[str]):
    cold = train(tmp_path / "cold", *flags)
    warm = train(tmp_path / "warm", *flags, "--run.warmup-steps=3")
    assert bits(warm) == bits(cold)
    for kind, keys in (("train", ("step", "loss", "top1", "grad_norm")), ("evaluate", ("step", "top1", "loss"))):
        ours, theirs = ([[e[k] for k in keys] for e in events(folder, kind)] for folder in (warm, cold))
        assert ours == theirs
    assert [e["step"] for e in events(warm, "bad_step")] == [e["step"] for e in events(cold, "bad_step")]
    ours, theirs = (checkpoint.read(checkpoint.find(each, "latest"))[1]["progress"] for each in (warm, cold))
    assert ours == theirs
