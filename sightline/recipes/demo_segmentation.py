"""Segmentation of drawn lesions, in minutes on two CPU cores: a smaller version of unet2d.

    sightline prepare shapes --out demo/volumes --only segmentation --train-volumes 60
    sightline prepare decathlon --source demo/volumes/segmentation --out demo/slices
    sightline train demo_segmentation --data.path demo/slices --run.out demo/segmentation

Expected: a mean Dice of 0.92 on 12 held-out volumes (one seed) after 1.5 minutes on two cores (docs/why/results.md, row
18).
"""

from sightline.data.segmentation import SegmentationData
from sightline.models.config import UnetConfig
from sightline.recipe.recipe import Recipe
from sightline.tasks.config import SegmentationConfig
from sightline.train.config import TrainConfig
from sightline.train.optimizers import OptimizerConfig
from sightline.train.schedules import ScheduleConfig


def recipe() -> Recipe:
    """Return a thin U-Net with two volumes per batch."""
    return Recipe(
        name="demo_segmentation",
        model=UnetConfig(width=8, deep_supervision=True),
        data=SegmentationData(task="own", nvol=2),
        task=SegmentationConfig(),
        optimizer=OptimizerConfig(kind="adamw", lr=3e-3, weight_decay=1e-4),
        schedule=ScheduleConfig(kind="cosine", warmup_epochs=1),
        train=TrainConfig(epochs=20, global_batch=16, eval_every_epochs=5),
    )
