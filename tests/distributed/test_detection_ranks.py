"""COCO's numbers over real ranks that hold different numbers of images, detections and ground truths."""

import json
from pathlib import Path

import torch
import warm

from sightline import api, cli
from sightline.hardware.world import World
from sightline.metrics.coco_map import CocoMap

IMAGES, PLACES, CLASSES = 11, 8, ("a", "b", "c")
HERE = ["--run.device=cpu", "--run.workers=0", "--task.score-threshold=0"]


def everything() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return predictions and batch of all images: the first have no detections, the last no ground truth."""
    random = torch.Generator().manual_seed(0)
    low = torch.rand(IMAGES, PLACES, 2, generator=random, dtype=torch.float64) * 0.6
    size = 0.1 + 0.3 * torch.rand(IMAGES, PLACES, 2, generator=random, dtype=torch.float64)
    labels = torch.randint(1, 4, (IMAGES, PLACES), generator=random)
    moved = low + 0.03 * torch.randn(low.shape, generator=random, dtype=torch.float64)
    number = torch.arange(IMAGES)[:, None]
    found = {
        "boxes": torch.cat([moved, moved + size], dim=2).float(),
        "scores": torch.rand(IMAGES, PLACES, generator=random).sort(descending=True).values,
        "labels": labels * (torch.arange(PLACES) < number),
    }
    given = {
        "index": torch.arange(IMAGES),
        "valid": torch.ones(IMAGES, dtype=torch.bool),
        "height": torch.full((IMAGES,), 300, dtype=torch.int32),
        "width": torch.full((IMAGES,), 200, dtype=torch.int32),
        "truth_boxes": torch.cat([low.flip(2), size.flip(2)], dim=2) * torch.tensor([200.0, 300.0, 200.0, 300.0]),
        "truth_labels": labels * (torch.arange(PLACES) < IMAGES - 1 - number),
        "truth_area": size.prod(2) * 60000,
        "truth_crowd": torch.rand(IMAGES, PLACES, generator=random) < 0.1,
    }
    return found, given


def measured(world: World, batch: int = 3) -> CocoMap:
    """Each rank its batches, of which the last are not filled."""
    found, given = everything()
    metric = CocoMap(CLASSES, torch.device("cpu"))
    for start in range(world.rank * batch, IMAGES + batch * world.size, batch * world.size):
        rows = torch.arange(start, start + batch)
        valid, rows = rows < IMAGES, rows.clamp(max=IMAGES - 1)
        picked = {key: value[rows] for key, value in given.items()}
        metric.update({key: value[rows] for key, value in found.items()}, {**picked, "valid": valid})
    metric.merge(world)
    return metric


def answer(metric: CocoMap) -> str:
    scores = metric.result()
    return json.dumps([scores.values, scores.tables, scores.worst])


def test_the_detections_are_worth_a_comparison():
    """test_ddp.py has them measured by two, three and four ranks."""
    values = json.loads(answer(measured(World())))[0]
    assert values["samples"] == IMAGES and 0.1 < values["ap"] < 0.9


def evaluate(run: Path) -> None:
    """The command, on one of two ranks."""
    assert cli.main(["evaluate", str(run), *HERE]) == 0


def test_two_ranks_evaluate_thirteen_images_as_one_and_one_of_them_tells(tmp_path: Path):
    flags = """--model.depth=18 --model.width=8 --model.init=torch --data.path=synthetic:classes=3,samples=104,size=60
        --data.classes=3 --data.size=64 --data.augment=off --train.epochs=3 --train.global-batch=8
        --train.precision=fp32 --train.eval-every-epochs=3 --optimizer.kind=adam --optimizer.lr=0.003
        --schedule.warmup-epochs=0 --run.workers=0 --run.report=off --run.device=cpu --run.progress=off""".split()
    api.train(*api.load("demo_detection", [*flags, f"--run.out={tmp_path}"]))
    alone = api.evaluate(str(tmp_path), HERE)
    assert alone.values["samples"] == 13 and alone.values["ar100"] > 0
    said = warm.run(__file__, tmp_path, 2, function="evaluate")
    [file] = tmp_path.glob("scores-ckpt-*.json")
    found = json.loads(file.read_text())
    assert (found["values"], found["tables"]) == (alone.values, alone.tables)
    assert [row["index"] for row in found["worst"]] == [row["index"] for row in alone.worst]
    assert said.count("  ar1 ") == 1 and all(said.count(f"  {row['class']} ") == 1 for row in alone.tables["classes"])
