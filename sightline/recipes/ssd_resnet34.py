"""SSD with a ResNet-34 trunk on COCO 2017 at 300 pixels: 50 epochs, learning rate drops at epochs 40 and 50.

    sightline train ssd_resnet34 --data.path COCO --model.weights resnet34.pth --run.out runs/ssd_resnet34

COCO holds annotations/, train2017/ and val2017/, or TFRecords (docs/reference/data.md). The weights are torchvision's
ResNet-34 or a TensorFlow checkpoint (`--model.weights model.ckpt-28152 --model.padding same`). An epoch of the 117,266
images with boxes has 917 steps at batch 128. For eight devices with 128 images each use `--train.global-batch 1024`
(115 steps). The learning rate is 0.003 for a batch of 32 and scales with it. The original's `--k K` multiplies both
drop epochs by 1 + K / 10: its 5 is `--schedule.drop-epochs 60 75`. For its 64-epoch runs use `--train.epochs 64`, for
the cosine schedule of its later release `--schedule.kind cosine --schedule.drop-epochs --schedule.warmup-epochs 7
--schedule.hold-epochs 15 --schedule.decay-epochs 55 --schedule.floor 0.01 --optimizer.norm-weight-decay 0
--model.freeze first_block`.
Expected: 0.2297 mAP after 50 epochs (the vendor's page for release 1.0.0); MLPerf's target is 0.23; not reproduced by
us (the full COCO is not here). About half an hour of steps on one H200, computed from 3,822 img/s with JPEGs decoded on
it (benchmarks/notes/input.md), not run. docs/reference/recipes_ssd.md lists the deliberate differences from the
original.
"""

from sightline.data.detection import DetectionData
from sightline.models.config import SsdConfig
from sightline.recipe.recipe import Recipe
from sightline.tasks.config import DetectionConfig
from sightline.train.config import TrainConfig
from sightline.train.optimizers import OptimizerConfig
from sightline.train.schedules import ScheduleConfig


def recipe() -> Recipe:
    """Return the recipe with the numbers of the original script."""
    return Recipe(
        name="ssd_resnet34",
        model=SsdConfig(depth=34),
        data=DetectionData(classes=80, samples=117_266, size=300),
        task=DetectionConfig(),
        optimizer=OptimizerConfig(kind="sgd", lr=3e-3, lr_for_batch=32, momentum=0.9, weight_decay=5e-4),
        schedule=ScheduleConfig(kind="step", drop_epochs=(40, 50), warmup_epochs=5, warmup_from="zero"),
        # The original rounds an epoch up to whole batches and evaluates every fifth epoch's checkpoint separately.
        train=TrainConfig(epochs=50, global_batch=128, precision="bf16", last_batch="pad", eval_every_epochs=5),
    )
