"""Dice over real ranks: as a loss whose sums are those of all of them, and as a score of volumes they share; and the
U-Net, whose coarser outputs learn too, trained by them."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sightline import config
from sightline.data.loader import Loader
from sightline.data.order import TrainOrder
from sightline.evaluate.dice import Dice
from sightline.hardware import devices
from sightline.hardware.world import World, connect, detect
from sightline.tasks.segmentation import Segmentation
from sightline.train.schedules import Plan
from sightline.train.state import TrainState
from sightline.train.step import build_step

SAMPLES, CLASSES = 6, ("background", "edema", "non-enhancing", "enhancing")  # samples are slices of four volumes
REPO = Path(__file__).resolve().parents[2]
CPU = devices.select("cpu")
# Plain SGD: Adam divides by the gradient, which would make much of what rounding leaves of one that should be 0.
UNET = """--model.width=4 --data.path=synthetic:samples=6 --data.task=04 --data.nvol=2 --task.dice-over=world
    --optimizer.kind=sgd --optimizer.lr=0.05 --train.global-batch=4 --train.precision=fp32 --run.device=cpu""".split()
STEPS = 3


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
    """Loss and gradients of this rank's part of the batch."""
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
    """Scores as JSON; batches of two, of which a rank's last are not filled."""
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


def trained_unet(world: World) -> dict[str, Any]:
    """The volumes of every step, and the U-Net after the last: its bits, and numbers to compare with others'."""
    recipe, run = config.load("unet2d", UNET)
    cfg, data = recipe.train, recipe.data.open("train", 0).for_batch(recipe.train.global_batch)
    items = data.samples_per_item
    order = TrainOrder(len(data), cfg.global_batch, 0, rank=world.rank, ranks=world.size, samples_per_item=items)
    state = TrainState(recipe, run, data.spec, CPU, Plan(1, STEPS, 12, 4), world)
    step = build_step(recipe, run, CPU, world, state, data)
    loader = Loader(
        {"train": data},
        {"train": order},
        recipe.data,
        CPU,
        workers=0,
        prefetch=1,
        on_bad=print,
        check_stop=lambda: None,
    )
    loader.seek("train", 0, STEPS)
    before = {name: value.clone() for name, value in state.model.state_dict().items()}
    given = []
    for number in range(STEPS):
        batch = loader.next("train")
        given.append(batch["index"].tolist())
        step(batch, number, 0.05)
    loader.close()
    after = state.model.state_dict()
    bits = hashlib.sha256(b"".join(value.numpy().tobytes() for value in after.values())).hexdigest()
    still = [name for name in after if torch.equal(after[name], before[name])]
    numbers = torch.cat([value.flatten() for value in after.values()]).tolist()
    return {"bits": bits, "numbers": numbers, "still": still, "given": given, "heads": len(state.model.heads)}


def run_ranks(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """What each of them saw."""
    environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    subprocess.run([*command, __file__, str(folder)], env=environment, check=True, timeout=300, capture_output=True)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(tmp_path_factory.mktemp("two"), 2)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_give_the_gradients_and_scores_of_one(tmp_path: Path, two: list[dict[str, Any]], ranks: int):
    seen = two if ranks == 2 else run_ranks(tmp_path, ranks)
    whole, scores = trained(World(), "local"), measured(World())
    values = json.loads(scores)[0]
    assert values["samples"] == SAMPLES and values["volumes"] == 4 and 0 < values["dice"] < 1
    for rank in seen:
        assert rank["scores"] == scores
        for name in ("world", "compiled") if ranks == 2 else ("world",):
            assert rank[name]["gradients"] == pytest.approx(whole["gradients"], abs=1e-6), name
            assert rank[name]["dice"] == pytest.approx(whole["dice"], abs=1e-6), name
    # What each rank makes of its own samples is something else.
    assert max(abs(a - b) for a, b in zip(seen[0]["local"]["gradients"], whole["gradients"], strict=True)) > 1e-3
    assert len({rank["local"]["dice"][0] for rank in seen}) == ranks


def test_two_ranks_train_the_unet_as_one_does(two: list[dict[str, Any]]):
    """Each has one of the two volumes of a batch; all weights move, those of the coarser heads too."""
    whole, (first, second) = trained_unet(World()), [rank["unet"] for rank in two]
    assert whole["heads"] == 3 and first["still"] == second["still"] == whole["still"] == []
    assert [len(volumes) for volumes in first["given"]] == [1] * STEPS
    assert [a + b for a, b in zip(first["given"], second["given"], strict=True)] == whole["given"]
    assert first["bits"] == second["bits"]
    assert first["numbers"] == pytest.approx(whole["numbers"], abs=1e-5)


def main(out: Path) -> None:
    world = connect(detect(), CPU)
    seen = {"local": trained(world, "local"), "world": trained(world, "world"), "scores": measured(world)}
    if world.size == 2:
        seen["compiled"] = trained(world, "world", compiled=True)
        seen["unet"] = trained_unet(world)
    world.close()
    (out / f"{world.rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
