"""Detection of drawn shapes, in minutes on two CPU cores: a smaller version of ssd_resnet34.

    sightline prepare shapes --out demo/images --only detection --train-pictures 4000
    sightline train demo_detection --data.path demo/images/detection --run.out demo/detection

Expected: AP50 of 0.70 and AP of 0.42 on 100 held-out images (one seed) after 7 minutes on two cores
(docs/why/results.md, row 17).
For your own images with boxes there is `sightline train detection --data DIR`.
"""

from sightline.data.detection import DetectionData
from sightline.models.config import SsdConfig
from sightline.recipe.recipe import Recipe
from sightline.tasks.config import DetectionConfig
from sightline.train.config import TrainConfig
from sightline.train.optimizers import OptimizerConfig
from sightline.train.schedules import ScheduleConfig


def recipe() -> Recipe:
    """Return an SSD with a thin trunk for 128-pixel images."""
    return Recipe(
        name="demo_detection",
        model=SsdConfig(depth=18, width=32, init="torch"),
        # No crops: they zoom in on shapes that held-out images show whole, which does not pay off in so few steps.
        data=DetectionData(classes=10, size=128, max_boxes=20, crop="off", jitter="off", resize="antialias"),
        task=DetectionConfig(),
        optimizer=OptimizerConfig(
            kind="adamw", lr=3e-3, weight_decay=0.01, norm_weight_decay=0.0, bias_weight_decay=0.0
        ),
        schedule=ScheduleConfig(kind="cosine", warmup_epochs=1),
        train=TrainConfig(epochs=14, global_batch=16, eval_every_epochs=7),
    )
