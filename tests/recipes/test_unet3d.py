"""The 3D recipe has the numbers of the original; what all recipes promise is in test_recipes.py."""

import torch

from sightline import recipes


def test_its_network_is_that_of_the_original_for_patches_of_128_voxels():
    recipe = recipes.find("unet3d").recipe()
    spec, volumes = recipe.data.declared()
    assert spec.size == (128, 128, 128) and spec.spacing == (1.0, 1.0, 1.0)
    with torch.device("meta"):
        model = recipe.model.build(spec)
        outputs = model.train()(torch.zeros(recipe.train.global_batch, spec.channels, *spec.size))
    strided = [layer for layer in model.modules() if isinstance(layer, torch.nn.Conv3d) and max(layer.stride) == 2]
    assert [layer.out_channels for layer in strided] == [64, 128, 256, 320, 320]
    assert [tuple(output.shape) for output in outputs] == [(2, 4, side, side, side) for side in (128, 64, 32)]
    assert (volumes, recipe.train.global_batch, recipe.task.window_batch) == (387, 2, 4)
