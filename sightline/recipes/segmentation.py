"""Segmentation of your own images with masks, of any classes and sizes, decided from the images and the machine.

    sightline train segmentation --data.path DIR --run.out runs/mine

DIR holds images and a mask for each (docs/reference/data_masks.md): images/ beside masks/, X.jpg beside X_mask.png,
Pascal VOC's folders, or the outlines of COCO or YOLO. The network is a U-Net whose way down is a pretrained classifier.
Training sees random crops, predictions see all of an image. Before it starts, the run looks at the images and decides
the classifier and its weights, the size of crops, the batch, the epochs and the rates. It says what it decided, and
`sightline inspect RUN` says why. What you type stays: `--weights FILE|torchvision:resnet50|timm:NAME|none`,
`--data.size 512`, `--epochs 80`, `--lr 0.0005`.
Expected: mean IoU of 0.59 on streets in 11 classes, 120 images, and of 0.78 on leaves, with 20 epochs in 18 s on an
H200 (docs/why/results.md, rows 31 and 33). Three epochs on two shared CPU cores gave 0.17 on streets after 17 minutes,
and 0.70 on membranes, 24 images, after 13 (benchmarks/notes/results.md, rows S1 and S2). 30 drawn images, from
scratch: 0.97 on the six that validate, after 12 s of one core (tests/cli/test_segmentation.py).
"""

from sightline.data.masks import MaskData
from sightline.hardware import early_cuda
from sightline.models import pretrained
from sightline.models.config import EncoderUnetConfig
from sightline.recipe.plan import Known
from sightline.recipe.recipe import Recipe
from sightline.tasks.config import MaskConfig
from sightline.train.config import TrainConfig
from sightline.train.optimizers import OptimizerConfig
from sightline.train.schedules import ScheduleConfig


def recipe() -> Recipe:
    """Return a U-Net on a classifier; `plan` chooses that, and everything that depends on the images."""
    return Recipe(
        name="segmentation",
        model=EncoderUnetConfig(arch="resnet34"),
        data=MaskData(size=384),
        task=MaskConfig(),
        optimizer=OptimizerConfig(
            kind="adamw",
            lr=5e-4,
            lr_for_batch=16,
            weight_decay=0.01,
            norm_weight_decay=0.0,
            bias_weight_decay=0.0,
        ),
        schedule=ScheduleConfig(kind="cosine", warmup_epochs=1),
        train=TrainConfig(epochs=40, global_batch=16, ema=0.99, clip=5.0, last_batch="wrap", min_epoch_steps=50),
        plan=plan,
        chosen=chosen,
    )


def plan(known: Known) -> None:
    """Decide in the order in which one thing follows from another: classifier, crops, length, rates."""
    has_gpu = early_cuda.is_expected(known["run.device"])
    arch, why = ("resnet34", "there is a GPU") if has_gpu else ("resnet18", "the CPU is too slow for more")
    if named := pretrained.network_of(known["model.weights"] or ""):
        arch, why = named, f"the network of {known['model.weights']}"
    known.decide("model.arch", arch, why)
    is_tuned = pretrained.start_from(known, pretrained.weights_of(known["model.arch"] or ""))
    if known.purpose == "score":
        return
    _crops(known, has_gpu)
    _length(known, has_gpu, is_tuned)


def chosen(known: Known) -> tuple[str, str]:
    """Return the network, and what becomes of the images."""
    return f"U-Net on {known['model.arch'] or 'your network'}", f"crops of {known['data.size']} px"


def _crops(known: Known, has_gpu: bool) -> None:
    """Take crops within the usual image, in steps of the network's stride."""
    side = known.side or 384
    most = 512 if has_gpu else 256
    known.decide("data.size", min(most, max(64, side // 32 * 32)), f"images are {side} pixels on their shorter side")


def _length(known: Known, has_gpu: bool, is_tuned: bool) -> None:
    """Choose batch and epochs for the number of images; random weights need twice as long."""
    images = known.train.items
    because = f"{images} training images"
    epochs = min(40, max(8, round(40 * (5_000 / images) ** 0.5)))
    if not has_gpu:
        epochs //= 2
        known.decide("train.global_batch", 8, "fewer than on a GPU: a CPU takes seconds for each step")
        known.decide("train.min_epoch_steps", 15, "fewer than on a GPU: a CPU takes seconds for each step")
    if is_tuned:
        known.decide("optimizer.lr", 0.001, "pretrained weights take high rates for a short time")
        known.decide("optimizer.trunk_lr_scale", 0.2, "keeps more of what the weights have learnt")
    else:
        epochs *= 2
    known.decide_length(epochs, because, head_epochs=1 if is_tuned else 0)
