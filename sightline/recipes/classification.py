"""Classification of your own images: from 50 to a million, decided from the images and the machine.

    sightline train classification --data.path DIR --run.out runs/mine

DIR holds class folders, a table, or shards (docs/reference/data.md). Before it starts, the run looks at the images and
decides the network, its pretrained weights, the size, the batch, the epochs, the rates, and weights of uneven classes.
It says what it decided, and `sightline inspect RUN` says why. What you type stays: `--weights
FILE|torchvision:NAME|timm:NAME`, `--weights none`, `--model.arch NAME`, `--data.size 320`, `--epochs 40`, `--lr
0.0005`.
Expected: top-1 of 0.45 on 50 photos of clothes in ten classes and of 0.85 on 1,000 of them after 20 s, and of 0.92 on
10,000 photos of scenes after 30 s, on an H200 that was shared (docs/why/results.md, rows 23 to 25). On one CPU core
that was shared the first took 1 to 3 minutes and the second 16 (benchmarks/notes/results.md, rows 20 and 21).
"""

from sightline.data.classification import ClassificationData
from sightline.hardware import early_cuda
from sightline.models import pretrained
from sightline.models.config import ArchConfig
from sightline.recipe.plan import Known
from sightline.recipe.recipe import Recipe
from sightline.tasks.config import ClassificationConfig
from sightline.train.config import TrainConfig
from sightline.train.optimizers import OptimizerConfig
from sightline.train.schedules import ScheduleConfig

UNEVEN = 3  # images of the largest class for one of the smallest, from which on classes are weighted
BALANCED, HAVE = "balanced", "the classes have "


def recipe() -> Recipe:
    """Return a network tuned at low rates; `plan` chooses it, and everything that depends on the images."""
    return Recipe(
        name="classification",
        model=ArchConfig(arch="resnet50"),
        data=ClassificationData(crop_scale=(0.35, 1.0)),
        task=ClassificationConfig(label_smoothing=0.1),
        optimizer=OptimizerConfig(
            kind="adamw",
            lr=1e-3,
            lr_for_batch=64,
            weight_decay=0.05,
            norm_weight_decay=0.0,
            bias_weight_decay=0.0,
        ),
        schedule=ScheduleConfig(kind="cosine", warmup_epochs=1),
        train=TrainConfig(epochs=20, global_batch=32, ema=0.99, clip=1.0, last_batch="wrap", min_epoch_steps=50),
        plan=plan,
        chosen=chosen,
    )


def plan(known: Known) -> None:
    """Decide in the order in which one thing follows from another: network, size, length, rates, classes."""
    has_gpu = early_cuda.is_expected(known["run.device"])
    is_tuned = _network(known, has_gpu)
    if known.purpose == "score":
        return
    _size(known, has_gpu)
    _length(known, has_gpu, is_tuned)
    _classes(known)


def chosen(known: Known) -> tuple[str, str]:
    """Return the network, and what becomes of the images."""
    images, why = f"{known['data.size']} px", known.because("data.class_weights")
    if known["data.class_weights"] == BALANCED:
        images += ", classes weighted" + f" ({why.removeprefix(HAVE)})" * bool(why)
    return known["model.arch"] or "your network", images


def _network(known: Known, has_gpu: bool) -> bool:
    """Take the weights that were typed and their network, or a network and its weights; return whether it has any."""
    arch, why = ("resnet50", "there is a GPU") if has_gpu else ("resnet18", "the CPU is too slow for more")
    if named := pretrained.network_of(known["model.weights"] or ""):
        arch, why = named, f"the network of {known['model.weights']}"
    known.decide("model.arch", arch, why)
    is_tuned = pretrained.start_from(known, pretrained.weights_of(known["model.arch"] or ""))
    if not is_tuned:
        known.decide("model.arch", "resnet18", "a smaller network learns more from random weights and few images")
    known.ask_model()
    return is_tuned


def _size(known: Known, has_gpu: bool) -> None:
    """Take the size of the weights, fewer pixels for small images and on a CPU. Small images are enlarged: weights of
    ImageNet know things as large as they are there."""
    if not known.settings.part("model").takes_any_size():
        return
    side, most = known.side or 224, known["data.size"] if has_gpu else min(known["data.size"], 160)
    size = min(most, max(96, -(-2 * side // 32) * 32))
    known.reopen("data.size", "data.eval_size", "data.eval_resize")
    known.decide("data.size", size, f"images are {side} pixels on their shorter side")


def _length(known: Known, has_gpu: bool, is_tuned: bool) -> None:
    """Choose batch and epochs for the number of images; random weights need three times as long."""
    images = known.train.items
    because = f"{images} training images"
    epochs, batch = min(20, max(4, round(20 * (20_000 / images) ** 0.5))), 32
    if not has_gpu:
        epochs //= 2
        batch = 16 if images < 500 else 32
        known.decide("train.min_epoch_steps", 15, "fewer than on a GPU: a CPU takes about a second for each")
    elif images >= 4_000:
        batch = 64 if images < 100_000 else 256
    known.decide("train.global_batch", batch, because)
    if is_tuned:  # tried with 800 images: a quarter of this rate learns too little in as many steps
        is_small = str(known["train.global_batch"]).isdecimal() and known["train.global_batch"] <= 64
        known.decide(
            "optimizer.lr", 0.004 if is_small else 0.001, "pretrained weights take high rates for a short time"
        )
        known.decide("optimizer.trunk_lr_scale", 0.2, "keeps more of what the weights have learnt")
    else:
        epochs *= 3
    known.decide_length(epochs, because, head_epochs=1 if is_tuned else 0)


def _classes(known: Known) -> None:
    """Weight classes that are uneven."""
    counts = [count for count in known.train.counts if count]
    has_one_each = sum(counts) <= known.train.items
    if not has_one_each or len(counts) < 2 or max(counts) < UNEVEN * min(counts):
        return
    known.decide("data.class_weights", BALANCED, f"{HAVE}{min(counts)} to {max(counts)} images each")
