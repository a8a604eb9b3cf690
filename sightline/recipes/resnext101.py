"""ResNeXt-101 32x4d on ImageNet: cosine schedule, label smoothing, 90 epochs.

    sightline train resnext101 --data.path IMAGENET --run.out runs/resnext101

IMAGENET is class folders, tar shards or TFRecords (docs/reference/data.md). An epoch of 1,281,167 images has 10,009
steps at batch 128. For eight devices with 128 images each use `--train.global-batch 1024` (1,251 steps). The learning
rate is 0.256 for a batch of 256 and scales with it.
Expected: 79.2 % top-1 on one accelerator (the vendor's page for release 1.0.0); NVIDIA, the author of the recipe, gives
79.2 to 79.4 %; not reproduced by us (no ImageNet here). About 8 hours on one H200, computed from its step on synthetic
images at batch 256 (4,019 img/s: docs/why/results.md, row 5a), not run. docs/reference/recipes.md lists the deliberate
differences from the original.
"""

from sightline.data.augment.fields import TF_MEAN, TF_STD
from sightline.data.classification import ClassificationData
from sightline.models.config import ArchConfig
from sightline.recipe.recipe import Recipe
from sightline.tasks.config import ClassificationConfig
from sightline.train.config import TrainConfig
from sightline.train.optimizers import OptimizerConfig
from sightline.train.schedules import ScheduleConfig


def recipe() -> Recipe:
    """Return the recipe with the numbers of the original script."""
    return Recipe(
        name="resnext101",
        model=ArchConfig(arch="resnext101_32x4d_tf"),
        data=ClassificationData(
            classes=1000,
            background="first",  # 1001 outputs, labels 1 to 1000 as stored in its TFRecords
            samples=1_281_167,
            crop="tf",
            crop_scale=(0.05, 1.0),
            crop_ratio=(0.75, 1.33),
            interpolation="legacy",
            mean=TF_MEAN,
            std=TF_STD,
        ),
        task=ClassificationConfig(label_smoothing=0.1),
        optimizer=OptimizerConfig(
            kind="sgd", lr=0.256, lr_for_batch=256, momentum=0.875, weight_decay=1 / 16384, norm_weight_decay=0.0
        ),
        schedule=ScheduleConfig(
            kind="cosine", cosine_from="start", epoch_steps="exact", warmup_epochs=8, warmup_from="zero"
        ),
        train=TrainConfig(epochs=90, global_batch=128, precision="bf16"),
    )
