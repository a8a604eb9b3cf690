"""ResNet-50 on ImageNet as in the vendor's MLPerf runs: LARS, batch 2048, stops at 75.9 % top-1, at most 35 epochs.

    sightline train resnet50_mlperf --data.path IMAGENET --run.out runs/resnet50_mlperf

Made for eight devices with 256 images each: give them `--train.accumulation 1`. One device splits its 2,048 images into
eight parts (`--train.accumulation 8`, the default here). An epoch has 626 steps; the last batch is padded. Evaluation
follows epochs 3, 7, 11, ...; a score of 0.2 % or less ends the run as diverged.
Expected: 75.9 % within 35 epochs, 16.6 minutes on eight accelerators (MLPerf v2.1); neither was reproduced by us (no
ImageNet here). docs/reference/recipes.md lists the deliberate differences from the original.
"""

from dataclasses import replace

from sightline.recipe.recipe import Recipe
from sightline.recipes import resnet50_lars


def recipe() -> Recipe:
    """Return the LARS recipe with the numbers of the second-generation configuration."""
    lars = resnet50_lars.recipe()
    return replace(
        lars,
        name="resnet50_mlperf",
        optimizer=replace(lars.optimizer, lr=9.0, lr_many=0.0, weight_decay=5e-5),
        schedule=replace(lars.schedule, decay_epochs=36),
        train=replace(
            lars.train,
            epochs=35,
            global_batch=2048,
            accumulation=8,
            last_batch="pad",
            eval_from_epoch=3,
            eval_every_epochs=4,
            target_score=0.759,
            diverged_score=0.002,
        ),
    )
