"""Segmentation of images with masks: a U-Net on a pretrained classifier, for any images, classes and sizes.

    sightline train segmentation --data.path DIR --model.weights torchvision:resnet34 --run.out runs/mine

DIR holds images and a mask for each (docs/data_masks.md): images/ beside masks/, X.jpg beside X_mask.png, Pascal
VOC's folders, or the outlines of COCO or YOLO. Training sees random crops, predictions see all of an image. The rate is
0.0005 for a batch of 16 and scales with it; the pretrained layers have a fifth of it, and stay as they are in the first
epoch. An epoch has at least 50 steps. The run ends when the mean IoU has not improved for 16 epochs.
Expected: tests/cli/test_segmentation.py, 30 drawn images, a thin ResNet-18 from scratch: a mean IoU of 0.97 on the six
that validate, after 250 steps and 12 s of one core.
"""

from sightline.data.masks import MaskData
from sightline.models.config import EncoderUnetConfig
from sightline.recipe.recipe import Recipe
from sightline.tasks.config import MaskConfig
from sightline.train.config import TrainConfig
from sightline.train.optimizers import OptimizerConfig
from sightline.train.schedules import ScheduleConfig


def recipe() -> Recipe:
    """Return a U-Net with a lower rate for its way down."""
    return Recipe(
        name="segmentation",
        model=EncoderUnetConfig(arch="resnet34"),
        data=MaskData(size=384),
        task=MaskConfig(),
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
            patience=16,
            last_batch="wrap",
            min_epoch_steps=50,
            head_epochs=1,
        ),
    )
