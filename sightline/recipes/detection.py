"""Detection in your own images with boxes: from 50 images on, decided from the images and the machine.

    sightline train detection --data.path DIR --run.out runs/mine

DIR holds images with boxes in files of COCO, YOLO or Pascal VOC (docs/reference/data_boxes.md). Before it starts, the
run looks at the images and decides the trunk, its pretrained weights, the size, the batch, the epochs and the rates. It
says what it decided, and `sightline inspect RUN` says why. What you type stays: `--weights
FILE|torchvision:resnet34|none`, `--data.size 512`, `--epochs 80`, `--lr 0.0003`.
Expected: AP of 0.57 on 200 photos of blood cells after 30 to 60 s on an H200 that was shared, from random weights and
with 20 epochs (docs/why/results.md, row 26); of 0.36 on 100 of them after 7 minutes on one CPU core, at 160 pixels
(benchmarks/notes/results.md, row 22). Not measured: pretrained weights.
"""

from sightline.data.detection import DetectionData
from sightline.errors import UsageError
from sightline.hardware import early_cuda
from sightline.models import pretrained
from sightline.models.config import SsdConfig
from sightline.recipe.plan import Known
from sightline.recipe.recipe import Recipe
from sightline.tasks.config import DetectionConfig
from sightline.train.config import TrainConfig
from sightline.train.optimizers import OptimizerConfig
from sightline.train.schedules import ScheduleConfig


def recipe() -> Recipe:
    """Return an SSD tuned at low rates; `plan` chooses its trunk, and everything that depends on the images."""
    return Recipe(
        name="detection",
        model=SsdConfig(depth=34, init="torch"),
        data=DetectionData(size=300, resize="antialias"),
        task=DetectionConfig(),
        optimizer=OptimizerConfig(
            kind="adamw",
            lr=5e-4,
            lr_for_batch=16,
            weight_decay=0.01,
            norm_weight_decay=0.0,
            bias_weight_decay=0.0,
        ),
        schedule=ScheduleConfig(kind="cosine", warmup_epochs=1),
        train=TrainConfig(
            epochs=40,
            global_batch=16,
            ema=0.99,
            clip=5.0,
            eval_every_epochs=2,
            last_batch="wrap",
            min_epoch_steps=50,
        ),
        plan=plan,
        chosen=chosen,
    )


def plan(known: Known) -> None:
    """Decide in the order in which one thing follows from another: trunk, size, length, rates."""
    has_gpu = early_cuda.is_expected(known["run.device"])
    is_tuned = _trunk(known, has_gpu)
    if known.purpose == "score":
        return
    side = known.side or 300
    size = 512 if has_gpu and side >= 600 else 300 if side > 200 else 160
    known.decide("data.size", size, f"images are {side} pixels on their shorter side")
    images = known.train.items
    because = f"{images} training images"
    epochs, batch = min(40, max(12, round(40 * (10_000 / images) ** 0.5))), 16 if images < 4_000 else 32
    if not has_gpu:
        epochs, batch = epochs // 2, 8
        known.decide("train.min_epoch_steps", 15, "fewer than on a GPU: a CPU takes seconds for each step")
    known.decide("train.global_batch", batch, because)
    if is_tuned:
        known.decide("optimizer.trunk_lr_scale", 0.2, "keeps more of what the weights have learnt")
    else:
        epochs *= 2
    known.decide_length(epochs, because, head_epochs=1 if is_tuned else 0)


def chosen(known: Known) -> tuple[str, str]:
    """Return the network, and what becomes of the images."""
    return f"SSD on ResNet-{known['model.depth']}", f"{known['data.size']} px"


def _trunk(known: Known, has_gpu: bool) -> bool:
    """Take the weights that were typed and their trunk, or a trunk and its weights; return whether it has any."""
    weights = known["model.weights"] or ""
    network = pretrained.network_of(weights)
    named = {f"resnet{depth}": depth for depth in (18, 34)}.get(network) or pretrained.model_of_run(weights).get(
        "depth"
    )
    if network and not named:
        raise UsageError(
            f"--weights {weights} are those of {network}; a detector starts from a ResNet-18 or ResNet-34, e.g. "
            "`--weights torchvision:resnet34`, or from another detector"
        )
    if named:
        known.decide("model.depth", named, f"the trunk of {weights}")
    elif not has_gpu and not weights:
        known.decide("model.depth", 18, "the CPU is too slow for more")
    depth = known["model.depth"]
    return pretrained.start_from(known, f"{pretrained.TORCHVISION}resnet{depth}" if depth else "")
