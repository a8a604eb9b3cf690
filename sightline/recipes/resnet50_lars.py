"""ResNet-50 on ImageNet with LARS as in the Keras reference: 40 epochs, label smoothing, quadratic decay.

    sightline train resnet50_lars --data.path IMAGENET --run.out runs/resnet50_lars

The base learning rate is 2.5 on one device and 9.5 on several, for any batch; the start of the run prints which one.
An epoch has 5,004 steps at batch 256. For eight devices with 256 images each use `--train.global-batch 2048`: 625 steps
per epoch, 25,000 in all.
Expected: 76.06 % top-1 on one accelerator, 76.11 % on eight (the vendor's page for release 1.0.0); not reproduced by us
(no ImageNet here), the time was not measured. docs/reference/recipes.md lists the deliberate differences from the
original.
"""

from dataclasses import replace

from sightline.recipe.recipe import Recipe
from sightline.recipes import resnet50_keras
from sightline.tasks.config import ClassificationConfig
from sightline.train.optimizers import OptimizerConfig
from sightline.train.schedules import ScheduleConfig


def recipe() -> Recipe:
    """Return the Keras recipe with the launcher's LARS preset."""
    sgd = resnet50_keras.recipe()
    return replace(
        sgd,
        name="resnet50_lars",
        task=ClassificationConfig(label_smoothing=0.1),
        optimizer=OptimizerConfig(
            kind="lars", lr=2.5, lr_many=9.5, momentum=0.9, weight_decay=1e-4, eta=0.001, eps=1e-7
        ),
        schedule=ScheduleConfig(kind="polynomial", power=2.0, final_lr=1e-4, warmup_epochs=3, warmup_from="zero"),
        train=replace(sgd.train, epochs=40),
    )
