"""Classification of ten kinds of drawn shapes, in minutes on two CPU cores: a smaller version of the large recipes.

    sightline prepare shapes --out demo/shapes
    sightline train demo_classification --data.path demo/shapes/classification --run.out demo/run

Expected: top-1 of 0.949 on 1,000 held-out images after 3 minutes on two cores (docs/why/results.md, row 16).
For your own images there is `sightline train classification --data DIR`.
"""

from sightline.data.classification import ClassificationData
from sightline.models.config import ResNetConfig
from sightline.recipe.recipe import Recipe
from sightline.tasks.config import ClassificationConfig
from sightline.train.config import TrainConfig
from sightline.train.optimizers import OptimizerConfig
from sightline.train.schedules import ScheduleConfig


def recipe() -> Recipe:
    """Return a thin ResNet-18 for 64-pixel images."""
    return Recipe(
        name="demo_classification",
        model=ResNetConfig(depth=18, width=32),
        data=ClassificationData(classes=10, size=64, eval_resize=64, eval_size=64, crop_scale=(0.5, 1.0)),
        task=ClassificationConfig(label_smoothing=0.1),
        optimizer=OptimizerConfig(
            kind="sgd", lr=0.2, weight_decay=5e-4, nesterov=True, norm_weight_decay=0.0, bias_weight_decay=0.0
        ),
        schedule=ScheduleConfig(kind="cosine", warmup_epochs=1),
        train=TrainConfig(epochs=20, global_batch=64),
    )
