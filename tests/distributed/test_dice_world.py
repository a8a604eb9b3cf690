"""Dice over real ranks: as a loss whose sums are those of all of them, and as a score of volumes they share.

warm.py runs main() of this file on every rank.
"""

import json
from pathlib import Path

import pytest
import torch
import warm
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sightline.hardware import devices
from sightline.hardware.world import World, connect, detect
from sightline.metrics.dice import Dice
from sightline.tasks.segmentation import Segmentation

SAMPLES, CLASSES = 6, ("background", "edema", "non-enhancing", "enhancing")  # samples are slices of four volumes


class TwoOutputs(nn.Module):
    """With deep supervision."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 2, 2)

    def forward(self, image):
        full = self.first(image)
        return full, self.second(full)


def everything() -> dict[str, Tensor]:
    """The samples are not alike, so the Dice of one rank's is not that of all: the first have no foreground."""
    random = torch.Generator().manual_seed(1)
    label = torch.randint(0, 4, (SAMPLES, 8, 10), generator=random)
    label[:2] = 0
    label[3] = label[3].clamp(max=1)
    image = torch.randn(SAMPLES, 2, 8, 10, generator=random) + label[:, None]
    index = torch.arange(SAMPLES)
    return {"image": image, "label": label, "index": index, "volume": torch.tensor([0, 1, 1, 2, 3, 1])}


def trained(world: World, dice_over, compiled: bool = False) -> dict[str, list[float]]:
    """Return loss and gradients of this rank's part of the batch."""
    rows = slice(world.rank * SAMPLES // world.size, (world.rank + 1) * SAMPLES // world.size)
    part = {key: value[rows] for key, value in everything().items()}
    model = TwoOutputs()
    network = DistributedDataParallel(model) if world.size > 1 else model
    task = Segmentation(dice_over=dice_over)

    def loss_of(batch):
        loss = task.loss(network, batch)
        return loss.total, loss.sums["dice_loss"]

    total, dice = (torch.compile(loss_of, backend="aot_eager") if compiled else loss_of)(part)
    total.backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return {"dice": [dice.item() / len(part["label"])], "gradients": gradients.tolist()}


def measured(world: World) -> str:
    """Return scores as JSON; batches have two rows, and a rank's last ones are not full."""
    whole, metric = everything(), Dice(CLASSES, torch.device("cpu"), "brats", "ce")
    task, model = Segmentation(), nn.Conv2d(2, 4, 3, padding=1)
    with torch.inference_mode():
        torch.manual_seed(2)
        nn.init.normal_(model.weight)
        for start in range(2 * world.rank, SAMPLES + 2 * world.size, 2 * world.size):
            rows = torch.arange(start, start + 2)
            batch = {key: value[rows.clamp(max=SAMPLES - 1)] for key, value in whole.items()}
            metric.update(task.predict(model, batch), {**batch, "valid": rows < SAMPLES})
    metric.merge(world)
    scores = metric.result()
    return json.dumps([scores.values, scores.tables, scores.worst])


@pytest.mark.shows("task.dice_over")
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_give_the_gradients_and_scores_of_one(tmp_path: Path, ranks: int):
    warm.run(__file__, tmp_path, ranks)
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    whole, scores = trained(World(), "local"), measured(World())
    values = json.loads(scores)[0]
    assert values["samples"] == SAMPLES and values["volumes"] == 4 and 0 < values["dice"] < 1
    for rank in seen:
        assert rank["scores"] == scores
        for name in ("world", "compiled") if ranks == 3 else ("world",):
            assert rank[name]["gradients"] == pytest.approx(whole["gradients"], abs=1e-6), name
            assert rank[name]["dice"] == pytest.approx(whole["dice"], abs=1e-6), name
    # What each rank makes of its own samples is something else.
    assert max(abs(a - b) for a, b in zip(seen[0]["local"]["gradients"], whole["gradients"], strict=True)) > 1e-3
    assert len({rank["local"]["dice"][0] for rank in seen}) == ranks


def main(out: Path) -> None:
    world = connect(detect(), devices.select("cpu"))
    seen = {"local": trained(world, "local"), "world": trained(world, "world"), "scores": measured(world)}
    if world.size == 3:  # the slow case: to compile takes seconds on every rank
        seen["compiled"] = trained(world, "world", compiled=True)
    (out / f"{world.rank}.json").write_text(json.dumps(seen))
