"""U-Net 3D on the Medical Decathlon, nnU-Net style: patches of volumes, deep supervision, five folds.

    sightline prepare decathlon --source Task01_BrainTumour.tar --dim 3 --out brats3d
    sightline train unet3d --data.path brats3d --run.out runs/unet3d

unet2d on volumes, with the original's batch of 2 patches and windows by fours in evaluation, which slides them over
whole volumes. Task 01 has patches of 128x128x128 at 1 mm: six levels with 32, 64, 128, 256, 320 and 320 filters. An
epoch on fold 0 has 194 steps. Folds, tasks and your own data: as unet2d.
Expected: 74.4 % Dice (mean of five folds, NVIDIA's code on task 01 with AMP, one A100, 118 min); not reproduced by us
(task 01 is not here), the time was not measured.
"""

from dataclasses import replace

from sightline.recipe.recipe import Recipe
from sightline.recipes import unet2d
from sightline.tasks.config import SegmentationConfig


def recipe() -> Recipe:
    """Return unet2d with the numbers of the original script's 3D form."""
    flat = unet2d.recipe()
    return replace(
        flat,
        name="unet3d",
        data=replace(flat.data, dim=3),  # type: ignore[type-var]  # all are dataclasses
        task=SegmentationConfig(window_batch=4),
        train=replace(flat.train, global_batch=2),
    )
