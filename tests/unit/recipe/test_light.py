"""A recipe is data: choosing and building one imports nothing that takes long."""

import subprocess
import sys

HEAVY = ("PIL", "numpy", "timm", "torch", "torchvision", "tyro")
BUILD_ALL = f"""
import sys
from sightline import recipes
for name in recipes.names():
    made = recipes.find(name).recipe()
    assert made.name == name and len(made.parts) == 6
for name in ("resnet50", "ssd_resnet34", "unet2d"):  # of each kind of data
    recipes.find(name).recipe().data.declared()
print(*sorted(set({HEAVY}) & set(sys.modules)))
"""


def test_building_every_recipe_leaves_torch_and_numpy_out():
    done = subprocess.run([sys.executable, "-c", BUILD_ALL], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
