"""Made unet_original.json: `python unet_original.py FOLDER`, where FOLDER holds the original's models/unet.py and
models/layers.py (HabanaAI/Model-References, branch 1.1.0, PyTorch/computer_vision/segmentation/Unet2D), and a module
`dropblock`. Documentation.

For three small networks: the names and shapes of the original's tensors, and what it computes with the values of
`values`, which a test can make again.
"""

import json
import sys
from pathlib import Path

import torch

VARIANTS = {"plain": {}, "residual": {"residual": True}, "attention": {"attention": True}}


def values(name: str, shape: list[int], number: int) -> torch.Tensor:
    """Return numbers that depend on the place alone; norms near 1, so that no layer dies out."""
    count = torch.Size(shape).numel()
    waves = (torch.arange(count, dtype=torch.float64) * 0.37 + number).sin()
    if len(shape) == 1:
        return ((1 + 0.2 * waves) if name.endswith("weight") else 0.1 * waves).float()
    return (waves / (count / shape[0]) ** 0.5).float().reshape(shape)


def image() -> torch.Tensor:
    return (torch.arange(2 * 16 * 16, dtype=torch.float64) * 0.37).sin().float().reshape(1, 2, 16, 16)


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    from models.unet import UNet

    found = {}
    for variant, options in VARIANTS.items():
        flags = {"deep_supervision": True, "attention": False, "drop_block": False, "residual": False, **options}
        kernels, strides = [[3, 3]] * 3, [[1, 1], [2, 2], [2, 2]]
        model = UNet(2, 3, kernels, strides, "instance", 0.01, **flags, dimension=2).eval()
        shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
        state = {name: values(name, shape, number) for number, (name, shape) in enumerate(shapes.items())}
        model.load_state_dict(state)
        with torch.no_grad():
            outputs = model(image()).flatten()[::7]
        found[variant] = {"shapes": shapes, "outputs": [round(v, 6) for v in outputs.tolist()]}
    Path(__file__).with_suffix(".json").write_text(json.dumps(found) + "\n")
