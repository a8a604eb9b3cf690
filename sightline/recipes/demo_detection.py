"""Drawn shapes found and named in minutes on two CPU cores: the same code as ssd_resnet34, smaller numbers.

    sightline prepare shapes --out demo/shapes
    sightline train demo_detection --data.path demo/shapes/detection --run.out demo/detection

Expected: TO BE MEASURED
The same recipe on other data in COCO's form: `--data.path DIR --data.classes N`.
"""

from sightline.config import Recipe, TrainConfig
from sightline.data.detection import DetectionData
from sightline.models.ssd import SsdConfig
from sightline.tasks.detection import Detection
from sightline.train.optimizers import OptimizerConfig
from sightline.train.schedules import ScheduleConfig


def recipe() -> Recipe:
    """A thin trunk on 128-pixel pictures."""
    return Recipe(
        name="demo_detection",
        model=SsdConfig(depth=18, width=16, init="torch"),
        data=DetectionData(classes=10, size=128, max_boxes=20, jitter="off", resize="antialias"),
        task=Detection(),
        optimizer=OptimizerConfig(kind="sgd", lr=0.03, momentum=0.9, weight_decay=5e-4),
        schedule=ScheduleConfig(kind="cosine", warmup_epochs=1),
        train=TrainConfig(epochs=20, global_batch=32, eval_every_epochs=5),
    )
