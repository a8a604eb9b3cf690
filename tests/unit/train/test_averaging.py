"""Averages of weights, against plain loops and torchvision's rule."""

import dataclasses

import pytest
import torch
from torch import nn

from sightline import config
from sightline.engine import checkpoint
from sightline.errors import BadCheckpoint, UsageError
from sightline.train.averaging import Ema, average_checkpoints
from sightline.train.schedules import RunLength


def recipe(**train):
    found, _ = config.load("demo_classification")
    return dataclasses.replace(found, train=dataclasses.replace(found.train, **train))


def moved(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter)
        model[1].running_mean += 1
        model[1].num_batches_tracked += 1


def test_the_plain_rule_is_a_moving_average_of_parameters_and_statistics():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    ema = Ema(model, recipe(ema=0.9, ema_every_steps=2), RunLength(3, 10))
    expected = {name: tensor.double().clone() for name, tensor in model.state_dict().items()}
    for step in range(6):
        moved(model)
        ema.update(step, torch.tensor(True))
        if step % 2 == 0:
            for name, tensor in model.state_dict().items():
                expected[name] = 0.9 * expected[name] + 0.1 * tensor.double()
    for name, tensor in ema.model.state_dict().items():
        if tensor.is_floating_point():
            assert torch.allclose(tensor.double(), expected[name], atol=1e-5)
    assert ema.model[1].num_batches_tracked == 5, "as of the last update"


def test_torchvisions_rule_scales_the_decay_and_copies_in_warm_up():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    made = recipe(ema=0.99998, ema_every_steps=32, ema_rule="torchvision", epochs=90, global_batch=256)
    made = dataclasses.replace(made, schedule=dataclasses.replace(made.schedule, warmup_epochs=2))
    ema = Ema(model, made, RunLength(90, 5004))
    # The original: adjust = world * batch * ema_steps / epochs; alpha = min(1, (1 - decay) * adjust).
    assert ema.share == pytest.approx(min(1.0, (1 - 0.99998) * 256 * 32 / 90))
    moved(model)
    ema.update(32, torch.tensor(True))
    assert torch.equal(ema.model[0].weight, model[0].weight)
    before = ema.model[0].weight.clone()
    moved(model)
    ema.update(33, torch.tensor(True))
    assert torch.equal(ema.model[0].weight, before), "not one of every 32"
    after = 2 * 5004 + 32  # after warm-up, and one of every 32 of its epoch
    ema.update(after, torch.tensor(False))  # but skipped
    assert torch.equal(ema.model[0].weight, before)
    ema.update(after, torch.tensor(True))
    assert not torch.equal(ema.model[0].weight, before) and not torch.equal(ema.model[0].weight, model[0].weight)


@pytest.mark.parametrize("warmup", [0, 1])
def test_torchvisions_rule_updates_when_its_own_loop_does(warmup: int):
    """Against torch's AveragedModel in the loop of torchvision's reference: every third step of each epoch of five."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    made = recipe(ema=0.9, ema_every_steps=3, ema_rule="torchvision", epochs=4, global_batch=1)
    made = dataclasses.replace(made, schedule=dataclasses.replace(made.schedule, warmup_epochs=warmup))
    ema = Ema(model, made, RunLength(4, 5))
    share = 0.1 * 1 * 3 / 4
    theirs = torch.optim.swa_utils.AveragedModel(
        model, avg_fn=lambda average, weight, _: (1 - share) * average + share * weight, use_buffers=True
    )
    for epoch in range(4):
        for step in range(5):
            moved(model)
            ema.update(5 * epoch + step, torch.tensor(True))
            if step % 3 == 0:
                theirs.update_parameters(model)
                if epoch < warmup:
                    theirs.n_averaged.fill_(0)
            for ours, expected in zip(ema.model.parameters(), theirs.module.parameters(), strict=True):
                torch.testing.assert_close(ours, expected)


def saved(folder, step, value, count):
    tensors = {"model": {"w": torch.full((2,), value), "n": torch.tensor(count)}}
    return checkpoint.write(folder / f"ckpt-{step:08d}", tensors, {"progress": {"step": step}})


def test_checkpoints_are_averaged_floats_by_mean_and_counters_by_floor(tmp_path):
    paths = [saved(tmp_path, step, float(step), step) for step in (1, 2, 6)]
    out = average_checkpoints(paths, tmp_path / "mean")
    tensors, state = checkpoint.read(out)
    assert tensors["model"]["w"].tolist() == [3.0, 3.0] and tensors["model"]["w"].dtype == torch.float32
    assert tensors["model"]["n"].item() == 3 and tensors["model"]["n"].dtype == torch.int64
    assert state["averaged"] == [path.name for path in paths]


def test_what_cannot_be_averaged_is_refused(tmp_path):
    one, two = saved(tmp_path, 1, 1.0, 1), saved(tmp_path, 2, 2.0, 2)
    with pytest.raises(UsageError, match="two or more"):
        average_checkpoints([one], tmp_path / "mean")
    with pytest.raises(UsageError, match="exists"):
        average_checkpoints([one, two], one)
    other = checkpoint.write(tmp_path / "ckpt-00000003", {"model": {"v": torch.zeros(2)}}, {})
    with pytest.raises(BadCheckpoint, match="another model"):
        average_checkpoints([one, other], tmp_path / "mean")
