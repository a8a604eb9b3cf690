"""Fine-tuning of an SSD on 50 to 50,000 images with boxes, from a pretrained trunk or detector.

    sightline train finetune_detection --data.path DIR --model.weights resnet34.pth --run.out runs/mine

DIR is in COCO's format (docs/reference/data.md). The weights are a ResNet-34 with torchvision's names, whose first
stages become the trunk, or those of an SSD, whose heads are replaced if it has other classes. The rate is 0.0005 for a
batch of 16 and scales with it; the trunk has a fifth of it. In the first epoch the trunk is frozen. An epoch has at
least 50 steps: 50 images make 2,000 steps in all, 50,000 images 125,000. The run ends when AP has not improved for 16
epochs.
Expected: with 200 drawn images and 2,000 steps, AP of 0.205 from the weights of a detector of other shapes, 0.031 from
scratch, three seeds on an H200 (benchmarks/notes/finetuning.md); the time was not noted.
"""

from sightline.data.detection import DetectionData
from sightline.models.config import SsdConfig
from sightline.recipe.recipe import Recipe
from sightline.tasks.config import DetectionConfig
from sightline.train.config import TrainConfig
from sightline.train.optimizers import OptimizerConfig
from sightline.train.schedules import ScheduleConfig


def recipe() -> Recipe:
    """Return an SSD with a lower rate for its trunk."""
    return Recipe(
        name="finetune_detection",
        model=SsdConfig(depth=34, init="torch"),
        data=DetectionData(size=300, resize="antialias"),
        task=DetectionConfig(),
        optimizer=OptimizerConfig(
            kind="adamw",
            lr=5e-4,
            lr_for_batch=16,
            trunk_lr_scale=0.2,
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
            patience=8,
            last_batch="wrap",
            min_epoch_steps=50,
            head_epochs=1,
        ),
    )
