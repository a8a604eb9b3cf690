"""Fine-tuning of a pretrained classifier on 50 to 50,000 images: head first, then all layers, in minutes on one GPU.

    sightline train finetune_classification --data.path DIR --model.weights resnet50.pth --run.out runs/mine

DIR holds class folders (docs/reference/data.md). `--model.arch` chooses the network of the weights: ours, torchvision's
or `timm:NAME`. The rate is 0.001 for a batch of 64 and scales with it; layers below the head have a fifth of it. In the
first epoch only the head learns. An epoch has at least 50 steps, so that 50 images make 1,000 steps in all and 50,000
images 31,240. The run ends when top-1 has not improved for 8 epochs. docs/howto/finetuning.md has the reasons.
Expected: with 24 images of each of 8 classes and a ResNet-18, top-1 of 0.607 from weights of 12 other classes, 0.491
from scratch, three seeds on an H200 (benchmarks/notes/finetuning.md); the time was not noted. With weights that have
learnt little there is little to gain, or less than nothing.
"""

from sightline.data.classification import ClassificationData
from sightline.models.config import ArchConfig
from sightline.recipe.recipe import Recipe
from sightline.tasks.config import ClassificationConfig
from sightline.train.config import TrainConfig
from sightline.train.optimizers import OptimizerConfig
from sightline.train.schedules import ScheduleConfig


def recipe() -> Recipe:
    """Return a ResNet-50 with rates that keep what its weights have learnt."""
    return Recipe(
        name="finetune_classification",
        model=ArchConfig(arch="resnet50"),
        data=ClassificationData(crop_scale=(0.35, 1.0)),
        task=ClassificationConfig(label_smoothing=0.1),
        optimizer=OptimizerConfig(
            kind="adamw",
            lr=1e-3,
            lr_for_batch=64,
            trunk_lr_scale=0.2,
            weight_decay=0.05,
            norm_weight_decay=0.0,
            bias_weight_decay=0.0,
        ),
        schedule=ScheduleConfig(kind="cosine", warmup_epochs=1),
        train=TrainConfig(
            epochs=20,
            global_batch=32,
            ema=0.99,
            clip=1.0,
            patience=8,
            last_batch="wrap",
            min_epoch_steps=50,
            head_epochs=1,
        ),
    )
