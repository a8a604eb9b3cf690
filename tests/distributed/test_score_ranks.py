"""Scores over real ranks: COCO's numbers and counts of pixels, of ranks that hold different numbers of images."""

import json
from pathlib import Path

import pytest
import tiny
import torch
import warm

from sightline import api, cli
from sightline.hardware.world import World
from sightline.metrics.coco_map import CocoMap
from sightline.parts import Scores

IMAGES, PLACES, CLASSES = 11, 8, ("a", "b", "c")
HERE = ["--run.device=cpu", "--run.workers=0"]
BOXES = """demo_detection --model.depth=18 --model.width=8 --model.init=torch --data.classes=3 --data.size=64
    --data.path=synthetic:classes=3,samples=104,size=60 --data.augment=off --train.epochs=3 --train.eval-every-epochs=3
    --optimizer.kind=adam --optimizer.lr=0.003 --schedule.warmup-epochs=0""".split()
MASKS = """segmentation --model.arch=resnet18 --model.width=4 --data.path=synthetic:classes=4,samples=104,size=40
    --data.size=32 --train.epochs=1 --train.min-epoch-steps=0 --train.head-epochs=0""".split()
SCORED = {"boxes": (BOXES, ["--task.score-threshold=0"]), "masks": (MASKS, [])}


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


def evaluate(folder: Path) -> None:
    """The command on one of two ranks, for each run."""
    for name, (_, flags) in SCORED.items():
        print(name, flush=True)
        assert cli.main(["evaluate", str(folder / name), *HERE, *flags]) == 0


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Scores], str]:
    """Return the runs, the scores of one rank, and what two ranks said."""
    folder, alone = tmp_path_factory.mktemp("scored"), {}
    for name, ((recipe, *flags), more) in SCORED.items():
        quiet = ["--train.global-batch=8", *tiny.HERE, "--run.progress=off", f"--run.out={folder / name}"]
        api.train(*api.load(recipe, [*flags, *quiet]))
        alone[name] = api.evaluate(str(folder / name), [*HERE, *more])
    return folder, alone, warm.run(__file__, folder, 2, function="evaluate")


@pytest.mark.parametrize(("name", "score"), [("boxes", "ar100"), ("masks", "miou")])
def test_two_ranks_evaluate_thirteen_images_as_one_and_one_of_them_tells(both, name: str, score: str):
    folder, alone, said = both
    assert alone[name].values["samples"] == 13 and 0 < alone[name].values[score] < 1
    [file] = (folder / name).glob("scores-ckpt-*.json")
    found = json.loads(file.read_text())
    assert found["tables"] == alone[name].tables
    assert found["values"] == pytest.approx(alone[name].values, rel=1e-7 if name == "masks" else 0)  # sums in fp32
    assert [row["index"] for row in found["worst"]] == [row["index"] for row in alone[name].worst]
    assert said.count("  ar1 ") == said.count("  pixel_accuracy ") == 1
    assert all(said.count(f"  {row['class']} ") >= 1 for row in alone["boxes"].tables["classes"])
