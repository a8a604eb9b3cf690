"""U-Net 2D on the Medical Decathlon, nnU-Net style: slices, deep supervision, Dice and cross entropy, five folds.

    sightline prepare decathlon --source Task01_BrainTumour.tar --out brats
    sightline train unet2d --data.path brats --run.out runs/unet2d

`--data.fold 1` to `4` choose another fold, `--data.fold all` trains all five in turn. `--data.task 02` to `10` choose
another task, `--data.task own` your own data in the same format (docs/reference/data_volumes.md). A batch of 64 slices
comes from one volume, or from several if they have fewer slices; an epoch on fold 0 of task 01 has 387 steps. The
learning rate does not depend on the number of devices. The run ends when the Dice has not improved for 100 epochs.
Expected: on task 04 a Dice of 0.871 over five folds, 25 to 30 s each, with 100 epochs and a cosine on one H200
(benchmarks/notes/results.md, row 14). On task 01 73.0 % (mean of five folds, NVIDIA's code with AMP, one A100, 98 min);
not reproduced by us (task 01 is not here). docs/reference/recipes_unet.md lists the deliberate differences from the
original.
"""

from sightline.data.segmentation import SegmentationData
from sightline.models.config import UnetConfig
from sightline.recipe.recipe import Recipe
from sightline.tasks.config import SegmentationConfig
from sightline.train.config import TrainConfig
from sightline.train.optimizers import OptimizerConfig
from sightline.train.schedules import ScheduleConfig


def recipe() -> Recipe:
    """Return the recipe with the numbers of the original script's README."""
    return Recipe(
        name="unet2d",
        model=UnetConfig(deep_supervision=True),
        data=SegmentationData(task="01"),
        task=SegmentationConfig(),
        optimizer=OptimizerConfig(kind="adamw", lr=1e-3, weight_decay=1e-4),
        schedule=ScheduleConfig(kind="constant"),
        train=TrainConfig(
            epochs=10_000, min_epochs=30, patience=100, global_batch=64, precision="bf16", last_batch="pad"
        ),
    )
