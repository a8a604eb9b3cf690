"""One image from its file to what the network sees, and what is said of the data set as a whole."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from sightline.data.classification import ClassificationData
from sightline.errors import BadData, BadSample, UsageError
from sightline.parts import DataSpec

SMALL = ClassificationData(size=24, eval_resize=28, eval_size=20)


def at(path: Path | str, **changes) -> ClassificationData:
    return dataclasses.replace(SMALL, path=str(path), **changes)


def test_evaluation_is_torchvisions_own(shapes: Path):
    """Decode, resize, crop, normalise: bit for bit what torchvision makes of the same file."""
    dataset = at(shapes).open("val", seed=0)
    geometry = v2.Compose([v2.Resize(28), v2.CenterCrop(20), v2.PILToTensor()])
    normalise = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(SMALL.mean, SMALL.std)])
    for index in (0, 17, len(dataset) - 1):
        sample = dataset.load(3, index)
        with Image.open(shapes / "val" / dataset.name(index)) as image:
            expected = geometry(image.convert("RGB"))
        assert np.array_equal(sample["image"], expected.permute(1, 2, 0).numpy())
        batch = {"image": torch.from_numpy(sample["image"])[None], "label": torch.tensor([1])}
        finished = dataset.finish(batch, torch.float32)
        torch.testing.assert_close(finished["image"][0], normalise(expected), rtol=0, atol=1e-5)
        assert finished["label"] is batch["label"]


def test_samples_have_the_declared_layout(shapes: Path):
    for split, side in (("train", 24), ("val", 20)):
        dataset = at(shapes).open(split, seed=0)
        assert dataset.layout == {"image": ((side, side, 3), "uint8"), "label": ((), "int64")}
        sample = dataset.load(0, 5)
        assert {key: (value.shape, str(value.dtype)) for key, value in sample.items()} == dataset.layout


def test_labels_are_the_folders(shapes: Path):
    dataset = at(shapes).open("val", seed=0)
    assert len(dataset) == 40 and len(dataset.spec.classes) == 10
    for index in range(len(dataset)):
        assert dataset.spec.classes[int(dataset.load(0, index)["label"])] == dataset.name(index).split("/")[0]


def test_training_depends_on_seed_epoch_and_index_alone(shapes: Path):
    dataset = at(shapes).open("train", seed=1)
    first = dataset.load(2, 3)["image"]
    dataset.load(0, 0)
    assert np.array_equal(first, at(shapes).open("train", seed=1).load(2, 3)["image"])
    assert not np.array_equal(first, dataset.load(3, 3)["image"])
    assert not np.array_equal(first, at(shapes).open("train", seed=2).load(2, 3)["image"])


def test_augment_off_repeats_every_epoch(shapes: Path):
    dataset = at(shapes, augment="off", mixup=0.2).open("train", seed=1)
    assert np.array_equal(dataset.load(0, 3)["image"], dataset.load(9, 3)["image"])
    assert dataset.draw_batch(0, 0) == {}


def test_mixup_numbers_belong_to_the_batch_and_to_training(shapes: Path):
    train, val = (at(shapes, mixup=0.4).open(split, seed=1) for split in ("train", "val"))
    shares = [float(train.draw_batch(epoch, step)["mix"]) for epoch in range(3) for step in range(3)]
    assert len(set(shares)) == 9 and all(0 <= share <= 1 for share in shares)
    assert float(train.draw_batch(1, 2)["mix"]) == shares[5]
    assert val.draw_batch(1, 2) == {}
    assert at(shapes).open("train", seed=1).draw_batch(1, 2) == {}


def test_finish_mixes_each_image_with_the_one_before(shapes: Path):
    dataset = at(shapes, mixup=0.4).open("train", seed=1)
    image = torch.from_numpy(np.stack([dataset.load(0, index)["image"] for index in range(4)]))
    batch = {"image": image, "label": torch.arange(4)}
    plain = dataset.finish(batch, torch.float32)["image"]
    mixed = dataset.finish({**batch, "mix": torch.tensor(0.3)}, torch.float32)["image"]
    for index in range(4):
        torch.testing.assert_close(mixed[index], 0.3 * plain[index] + 0.7 * plain[index - 1])


def test_a_file_that_is_not_an_image_is_a_bad_sample_with_its_name(tmp_path: Path):
    for split in ("train", "val"):
        (tmp_path / split / "ant").mkdir(parents=True)
        (tmp_path / split / "ant" / "1.jpg").write_text("no image")
    with pytest.raises(BadSample, match="ant/1.jpg"):
        at(tmp_path).open("train", seed=0).load(0, 0)


def test_what_was_declared_must_be_found(shapes: Path):
    assert len(at(shapes, classes=10).open("train", 0).spec.classes) == 10
    with pytest.raises(BadData, match=r"has 10 classes, the recipe declares 7; .*--data.classes 10"):
        at(shapes, classes=7).open("train", 0)
    with pytest.raises(UsageError, match=r"no data: give --data.path DIR \(draw some with"):
        SMALL.open("train", 0)


def test_spec_is_the_same_for_both_splits_and_survives_json(shapes: Path):
    spec = at(shapes).open("train", 0).spec
    assert spec == at(shapes).open("val", 0).spec
    assert (spec.channels, spec.size, spec.mean) == (3, (20, 20), SMALL.mean)
    assert DataSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize(("background", "first"), [("first", 1), ("last", 0)])
def test_a_background_class_shifts_labels_and_widens_the_head(shapes: Path, background: str, first: int):
    plain, wide = at(shapes).open("val", 0), at(shapes, background=background, classes=10).open("val", 0)
    assert len(wide.spec.classes) == 11 and wide.spec.classes[0 if first else -1] == "background"
    assert wide.spec.classes[first : first + 10] == plain.spec.classes
    for index in (0, 17, len(plain) - 1):
        label = int(wide.load(0, index)["label"])
        assert label == int(plain.load(0, index)["label"]) + first
        assert wide.spec.classes[label] == wide.name(index).split("/")[0]
    declared, _ = dataclasses.replace(SMALL, classes=1000, background=background).declared()
    assert len(declared.classes) == 1001 and declared.classes[first] == "class0"
    assert declared.classes[0 if first else -1] == "background"


def test_a_background_class_must_be_new_and_known(tmp_path: Path, shapes: Path):
    shutil.copytree(shapes, tmp_path / "images")
    for split in ("train", "val"):
        folder = min((tmp_path / "images" / split).iterdir())
        folder.rename(folder.with_name("background"))
    with pytest.raises(BadData, match="has a class 'background' already; use --data.background none"):
        at(tmp_path / "images", background="first").open("train", 0)
    with pytest.raises(UsageError, match="background='middle' is unknown; use one of none, first, last"):
        at(shapes, background="middle")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("split", ["train", "val"])
def test_images_normalised_by_the_loader_are_those_of_the_device(shapes: Path, split: str, dtype: torch.dtype):
    """fp32 to the bit on the same processor, bf16 after one rounding, whatever the network computes in."""
    finished = {}
    for image_type in ("uint8", "bf16", "fp32"):
        dataset = at(shapes, image_type=image_type, random_erase=1.0).open(split, seed=0)
        samples = [dataset.load(1, index) for index in range(3)]
        for sample in samples:
            assert {key: (value.shape, str(value.dtype)) for key, value in sample.items()} == dataset.layout
        batch = {key: torch.from_numpy(np.stack([sample[key] for sample in samples])) for key in samples[0]}
        assert batch["image"].element_size() == {"uint8": 1, "bf16": 2, "fp32": 4}[image_type]
        image = finished[image_type] = dataset.finish(batch, dtype)["image"]
        assert image.dtype == dtype and image.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(finished["fp32"], finished["uint8"])
    assert torch.equal(finished["bf16"], finished["uint8"].bfloat16().to(dtype))
    assert finished["uint8"].float().std() > 0.1


def test_without_data_the_recipe_speaks_for_them(shapes: Path):
    declared, samples = dataclasses.replace(SMALL, classes=4, samples=99).declared()
    assert samples == 99
    assert len(declared.classes) == 4 and declared.size == (20, 20)
    assert at(shapes, classes=10).declared() is None
    with pytest.raises(UsageError, match="give --data.path DIR or --data.classes N"):
        SMALL.declared()
