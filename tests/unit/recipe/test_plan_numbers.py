"""The numbers that the recipes for anybody's data decide, for data of any size, each worked out by hand."""

import pytest

from sightline import recipes
from sightline.hardware import early_cuda
from sightline.parts import DataFacts, SplitFacts
from sightline.recipe.plan import Known
from sightline.recipe.recipe import Run
from sightline.recipe.settings import Origin, Settings


def decided(
    name: str, monkeypatch: pytest.MonkeyPatch, images: int, gpu: bool = False, *, tuned: bool = True, side: int = 0,
    val: int = 0, counts: tuple[int, ...] = (), typed: dict | None = None,
) -> Known:  # fmt: skip
    """Return what a recipe decides for so many training images, with weights of one's own or without."""
    monkeypatch.setattr(early_cuda, "is_expected", lambda device: gpu)
    settings = Settings(recipes.find(name).recipe(), Run())
    settings = settings.put(Origin.FLAG, {"model.weights": "mine.pth" if tuned else "", **(typed or {})})
    sizes = ((side + 7, side),) * bool(side)
    facts = DataFacts(val_items=val, count=lambda: SplitFacts(images, sizes=sizes, counts=counts))
    known = Known(settings, facts, "look")
    settings.recipe.plan(known)
    known.lines.append(known.line(*settings.recipe.chosen(known)))  # as a start does
    return known


@pytest.mark.parametrize(
    ("images", "gpu", "epochs", "batch", "rate"),
    [
        (20, False, 10, 16, 0.004),
        (499, False, 10, 16, 0.004),
        (500, False, 10, 32, 0.004),
        (20_000, False, 10, 32, 0.004),
        (80_000, False, 5, 32, 0.004),
        (2_000_000, False, 2, 32, 0.004),
        (3_999, True, 20, 32, 0.004),
        (4_000, True, 20, 64, 0.004),
        (80_000, True, 10, 64, 0.004),
        (99_999, True, 9, 64, 0.004),
        (100_000, True, 9, 256, 0.001),
        (2_000_000, True, 4, 256, 0.001),
    ],
)
@pytest.mark.parametrize("tuned", [True, False])
def test_length_and_rates_of_a_classification(images, gpu, epochs, batch, rate, tuned, monkeypatch):
    known = decided("classification", monkeypatch, images, gpu, tuned=tuned)
    names = ("train.epochs", "train.global_batch", "train.min_epoch_steps", "optimizer.lr")
    names += ("optimizer.trunk_lr_scale", "train.head_epochs", "model.arch")
    arch = ("resnet50" if gpu else "resnet18") if tuned else "resnet18"
    of_weights = (rate, 0.2, 1) if tuned else (0.001, 1.0, 0)
    least = 50 if gpu else 15
    assert [known[name] for name in names] == [epochs * (1 if tuned else 3), batch, least, *of_weights, arch]


@pytest.mark.parametrize(
    ("side", "gpu", "size"),
    [(0, False, 160), (0, True, 224), (1, True, 96), (48, False, 96), (49, False, 128), (64, True, 128),
     (65, True, 160), (80, False, 160), (81, False, 160), (81, True, 192), (97, True, 224), (500, True, 224)],
)  # fmt: skip
def test_size_of_a_classification(side: int, gpu: bool, size: int, monkeypatch: pytest.MonkeyPatch):
    """Twice the usual side, in steps of 32 from 96, at most that of the weights and 160 on a CPU."""
    assert decided("classification", monkeypatch, 100, gpu, side=side)["data.size"] == size


@pytest.mark.parametrize(
    ("counts", "weights"),
    [((10, 30), "balanced"), ((11, 30), "none"), ((30,), "none"), ((0, 30), "none"), ((0, 5, 15, 7), "balanced"),
     ((400, 1300), "none")],
)  # fmt: skip
def test_classes_three_times_as_large_as_others_are_weighted(counts, weights, monkeypatch: pytest.MonkeyPatch):
    """Not where images have several labels, which are more than the images."""
    known = decided("classification", monkeypatch, 1000, counts=counts)
    assert known["data.class_weights"] == weights
    least = min(count for count in counts if count)
    said = f", classes weighted ({least} to {max(counts)} images each)"
    assert known.lines[-1].endswith(f" 160 px{said * (weights == 'balanced')}")


@pytest.mark.parametrize(
    ("images", "gpu", "epochs", "batch"),
    [(50, False, 20, 8), (10_000, False, 20, 8), (40_000, False, 10, 8), (10**6, False, 6, 8), (3_999, True, 40, 16),
     (4_000, True, 40, 32), (40_000, True, 20, 32), (10**6, True, 12, 32)],
)  # fmt: skip
@pytest.mark.parametrize("tuned", [True, False])
def test_length_of_a_detection(images, gpu, epochs, batch, tuned, monkeypatch):
    known = decided("detection", monkeypatch, images, gpu, tuned=tuned)
    names = ("train.epochs", "train.global_batch", "train.min_epoch_steps", "optimizer.trunk_lr_scale")
    assert [known[name] for name in (*names, "train.head_epochs")] == [
        epochs * (1 if tuned else 2), batch, 50 if gpu else 15, 0.2 if tuned else 1.0, int(tuned),
    ]  # fmt: skip
    assert known["model.depth"] == (18 if not (gpu or tuned) else 34)


@pytest.mark.parametrize(
    ("side", "gpu", "size"),
    [(0, True, 300), (1, False, 160), (200, True, 160), (201, True, 300), (599, True, 300), (600, True, 512),
     (600, False, 300), (5000, True, 512)],
)  # fmt: skip
def test_size_of_a_detection(side: int, gpu: bool, size: int, monkeypatch: pytest.MonkeyPatch):
    known = decided("detection", monkeypatch, 100, gpu, side=side)
    assert known["data.size"] == size and f"{size} px" in known.lines[-1]


@pytest.mark.parametrize("depth", [18, 34])
def test_the_depth_of_a_detector_is_that_of_its_trunks_weights(depth: int, monkeypatch: pytest.MonkeyPatch):
    typed = {"model.weights": f"torchvision:resnet{depth}"}
    assert decided("detection", monkeypatch, 100, not depth % 4, typed=typed)["model.depth"] == depth


@pytest.mark.parametrize(
    ("images", "gpu", "epochs", "batch"),
    [(50, False, 20, 8), (5_000, False, 20, 8), (20_000, False, 10, 8), (10**6, False, 4, 8), (5_000, True, 40, 16),
     (20_000, True, 20, 16), (10**6, True, 8, 16)],
)  # fmt: skip
@pytest.mark.parametrize("tuned", [True, False])
def test_length_of_a_segmentation(images, gpu, epochs, batch, tuned, monkeypatch):
    known = decided("segmentation", monkeypatch, images, gpu, tuned=tuned)
    names = ("train.epochs", "train.global_batch", "train.min_epoch_steps", "optimizer.trunk_lr_scale")
    assert [known[name] for name in names] == [
        epochs * (1 if tuned else 2), batch, 50 if gpu else 15, 0.2 if tuned else 1.0,
    ]  # fmt: skip
    assert known["train.head_epochs"] == int(tuned)


@pytest.mark.parametrize(
    ("side", "gpu", "size"),
    [(0, True, 384), (0, False, 256), (1, True, 64), (95, True, 64), (96, True, 96), (511, True, 480),
     (512, True, 512), (900, True, 512), (900, False, 256)],
)  # fmt: skip
def test_crops_of_a_segmentation(side: int, gpu: bool, size: int, monkeypatch: pytest.MonkeyPatch):
    known = decided("segmentation", monkeypatch, 100, gpu, side=side)
    assert known["data.size"] == size and f"crops of {size} px" in known.lines[-1]


@pytest.mark.parametrize(
    ("typed", "val", "ema", "head", "warmup", "patience"),
    [
        # 10 epochs of 15 steps, though 100 images are 6 batches of 16.
        ({}, 100, 1 - 1 / 15, 1, 0.5, 4),
        ({}, 99, 1 - 1 / 15, 1, 0.5, 0),
        ({}, 1, 1 - 1 / 15, 1, 0.5, 0),
        ({}, 0, 1 - 1 / 15, 1, 0.5, 4),
        ({"train.epochs": 40}, 0, 1 - 1 / 60, 1, 1, 16),
        ({"train.epochs": 40, "train.eval_every_epochs": 4}, 0, 1 - 1 / 60, 1, 1, 4),
        ({"train.epochs": 40, "schedule.warmup_epochs": 3.0}, 0, 1 - 1 / 60, 1, 3, 16),
        ({"train.epochs": 1}, 0, 1 - 1 / 2, 0, 0.05, 3),
        ({"train.epochs": 2}, 0, 1 - 1 / 3, 1, 0.1, 3),
        ({"train.epochs": 10_000}, 0, 1 - 1 / 1000, 1, 1, 4000),
        ({"train.epochs": 10, "train.min_epoch_steps": 1}, 0, 1 - 1 / 6, 1, 0.5, 4),
        ({"train.global_batch": 5}, 0, 1 - 1 / 20, 1, 0.5, 4),
    ],
)
def test_what_follows_from_the_length(typed, val, ema, head, warmup, patience, monkeypatch: pytest.MonkeyPatch):
    known = decided("classification", monkeypatch, 100, val=val, typed=typed)
    names = ("train.ema", "train.head_epochs", "schedule.warmup_epochs", "train.patience")
    assert [known[name] for name in names] == [round(ema, 4), head, warmup, patience]
