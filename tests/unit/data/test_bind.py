"""Binding a dataset to a device and a batch decides everything at once and leaves the dataset as it was."""

import dataclasses
import pickle

import numpy as np
import pytest

from sightline.data.classification import ClassificationData
from sightline.data.detection import DetectionData
from sightline.data.segmentation import SegmentationData
from sightline.hardware import devices


class Accelerator(devices.Device):
    """Has no hardware here; binding only asks for its kind and its name."""

    def name(self) -> str:
        return "a GPU"


CPU, GPU = devices.select("cpu"), Accelerator(kind="cuda")
CONFIGS = {
    "classification": ClassificationData(path="synthetic:classes=4,samples=16,size=20", size=16, mixup=0.2),
    "detection": DetectionData(path="synthetic:classes=4,samples=16,size=40", size=32, fake=True),
    "segmentation": SegmentationData(path="synthetic:samples=8", task="04"),
}
every_task = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


@every_task
@pytest.mark.parametrize("split", ["train", "val"])
def test_the_dataset_stays_as_it_was_opened(config, split):
    dataset = config.open(split, seed=3)
    before = {name: (id(value), pickle.dumps(value)) for name, value in vars(dataset).items()}
    first = dataset.bind(CPU, 8)
    dataset.bind(GPU, 16)
    assert {name: (id(value), pickle.dumps(value)) for name, value in vars(dataset).items()} == before
    again = dataset.bind(CPU, 8)
    assert (again.layout, again.notes, again.samples_per_item) == (first.layout, first.notes, first.samples_per_item)
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.layout = {}


@every_task
def test_a_worker_loads_from_its_copy_what_we_load(config):
    bound = config.open("train", seed=3).bind(CPU, 8)
    copy = pickle.loads(pickle.dumps(bound))
    ours, theirs = bound.load(1, 2), copy.load(1, 2)
    assert ours.keys() == theirs.keys() == bound.layout.keys()
    assert all(np.array_equal(ours[key], theirs[key]) for key in ours)


def test_only_training_repeats_its_first_batch():
    config = CONFIGS["detection"]
    assert [config.open(split, 0).bind(CPU, 8).repeats_first for split in ("train", "val")] == [True, False]


@every_task
def test_the_dataset_holds_the_augmentation_that_the_config_describes(config):
    changed = dataclasses.replace(config, flip=0.125)
    augmentation = changed.open("train", 0).augmentation
    assert augmentation.flip == 0.125 and not isinstance(changed, type(augmentation))
    for field in dataclasses.fields(augmentation):
        assert getattr(augmentation, field.name) == getattr(changed, field.name)
