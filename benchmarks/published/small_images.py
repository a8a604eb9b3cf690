"""ResNet-18 for images of 32 pixels: shifted crops, flips, label smoothing, SGD with Nesterov's momentum, 16 epochs.

    sightline train benchmarks/published/small_images.py --data.path DIR

The network, crop and flip are those of common training scripts for such images; a straight line down to 0, and a rate
four times as high as theirs for a batch four times as large, make it short. What it reaches is in
benchmarks/notes/published.md.
"""

from sightline.data.classification import ClassificationData
from sightline.models.config import ResNetConfig
from sightline.recipe.recipe import Recipe
from sightline.tasks.config import ClassificationConfig
from sightline.train.config import TrainConfig
from sightline.train.optimizers import OptimizerConfig
from sightline.train.schedules import ScheduleConfig


def recipe() -> Recipe:
    """Return the recipe; only the last epoch is evaluated."""
    return Recipe(
        name="small_images",
        model=ResNetConfig(depth=18, stem="3x3", zero_init_residual=True),
        data=ClassificationData(crop="shift", size=32, eval_resize=32, eval_size=32, decoder="cpu"),
        task=ClassificationConfig(label_smoothing=0.1, tta=True),
        optimizer=OptimizerConfig(
            kind="sgd",
            lr=0.1,
            lr_for_batch=128,
            nesterov=True,
            weight_decay=5e-4,
            norm_weight_decay=0.0,
            bias_weight_decay=0.0,
        ),
        schedule=ScheduleConfig(kind="polynomial", power=1.0, warmup_epochs=2),
        train=TrainConfig(epochs=16, global_batch=512, precision="bf16", eval_every_epochs=1000),
    )
