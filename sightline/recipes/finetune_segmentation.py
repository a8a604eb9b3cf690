"""Fine-tuning of a U-Net on a few volumes, from one that was trained on similar volumes.

    sightline train finetune_segmentation --data.path DIR --model.weights runs/unet2d --run.out runs/mine

DIR is written by `sightline prepare decathlon`; `--data.task 01` to `10` if it is one of the Decathlon's. The network
must be that of the weights: same channels, patch and `--model` fields; heads for other classes are replaced. The rate
is 0.0005 for a batch of 64 slices and scales with it; layers below the heads have half of it. In the first epoch only
the heads learn. An epoch has at least 25 steps: 10 volumes make 1,000 steps in all. The run ends when the Dice has not
improved for 16 epochs. For volumes add `--data.dim 3 --train.global-batch 2 --optimizer.lr-for-batch 2`.
Expected: with 6 volumes of task 04, Dice of 0.817 from the weights of 130 other cases, 0.452 from scratch, three seeds
on an H200 (benchmarks/notes/finetuning.md); the time was not noted.
"""

from sightline.data.segmentation import SegmentationData
from sightline.models.config import UnetConfig
from sightline.recipe.recipe import Recipe
from sightline.tasks.config import SegmentationConfig
from sightline.train.config import TrainConfig
from sightline.train.optimizers import OptimizerConfig
from sightline.train.schedules import ScheduleConfig


def recipe() -> Recipe:
    """Return the U-Net of unet2d with a falling rate."""
    return Recipe(
        name="finetune_segmentation",
        model=UnetConfig(deep_supervision=True),
        data=SegmentationData(task="own"),
        task=SegmentationConfig(),
        optimizer=OptimizerConfig(kind="adamw", lr=5e-4, lr_for_batch=64, trunk_lr_scale=0.5, weight_decay=1e-4),
        schedule=ScheduleConfig(kind="cosine", warmup_epochs=1),
        train=TrainConfig(
            epochs=40,
            global_batch=64,
            ema=0.99,
            eval_every_epochs=2,
            patience=8,
            last_batch="wrap",
            min_epoch_steps=25,
            head_epochs=1,
        ),
    )
