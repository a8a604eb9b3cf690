"""Folders called like splits (img_train, val2017) are splits or an error, never classes; bullet_train is a class."""

from pathlib import Path

import pytest

from sightline.data.classification import ClassificationData
from sightline.data.sources import folder, layouts, open_source, recognised
from sightline.errors import BadData, UsageError

CLASSES = ("cat/1.jpg", "cat/2.jpg", "dog/3.jpg", "dog/4.jpg")
FLAT = ("1.jpg", "2.jpg", "3.jpg")


def made(root: Path, folders: dict[str, tuple[str, ...]]) -> str:
    for name, files in folders.items():
        (root / name).mkdir(parents=True)
        for file in files:
            (root / name / file).parent.mkdir(exist_ok=True)
            (root / name / file).write_bytes(b"")
    return str(root)


def of(contents: tuple[str, ...], *names: str) -> dict[str, tuple[str, ...]]:
    return dict.fromkeys(names, contents)


@pytest.mark.parametrize(
    ("folders", "train", "val"),
    [
        (of(CLASSES, "train", "val"), "train", "val"),
        (of(CLASSES, "img_train", "img_val"), "img_train", "img_val"),
        (of(CLASSES, "IMG_TRAIN", "IMG_Val"), "IMG_TRAIN", "IMG_Val"),
        (of(CLASSES, "train2017", "val2017"), "train2017", "val2017"),
        (of(CLASSES, "train2017", "val2017", "test2017"), "train2017", "val2017"),
        (of(CLASSES, "train2017", "val2017") | of(FLAT, "test2017"), "train2017", "val2017"),
        (of(CLASSES, "training_set", "test_set"), "training_set", "test_set"),
        (of(CLASSES, "imagenet_train_subset", "imagenet_val_subset"), "imagenet_train_subset", "imagenet_val_subset"),
        (of(CLASSES, "Train-Images", "validation-images"), "Train-Images", "validation-images"),
        (of(CLASSES, "petsTrain", "petsVal"), "petsTrain", "petsVal"),
        (of(CLASSES, "img_train", "img_val") | of((), "logs", ".cache"), "img_train", "img_val"),
        (of(CLASSES, "img_train") | of(FLAT, "img_test"), "img_train", None),  # as train/ beside an unsorted test/
    ],
)
def test_splits_that_differ_in_that_word_alone_are_recognised(tmp_path: Path, folders: dict, train: str, val: str):
    path = made(tmp_path / "data", folders)
    layout = folder.find(path)
    assert recognised("open_source", path) == "folder"
    assert (layout.train.images.name, layout.val and layout.val.images.name) == (train, val)
    assert open_source("auto", path, "train").classes == open_source("auto", path, "val").classes == ("cat", "dog")


@pytest.mark.parametrize(
    "folders",
    [
        of(FLAT, "img_train", "img_val"),
        of(FLAT, "train2017", "val2017", "test2017"),
        of(FLAT, "Training_Set", "Test_Set"),
        of(FLAT, "img_train", "img_val", "misc"),
        of(FLAT, "train", "img_val"),
        of(FLAT, "val_images", "test_images"),
        of(FLAT, "img_train") | of(CLASSES, "img_val"),
        of(CLASSES, "img_train", "photos_val"),
        of(CLASSES, "trainA", "trainB", "testA", "testB"),
        of(FLAT, "train_cat", "train_dog", "test_cat", "test_dog"),
        of(CLASSES, "img_train", "img_val", "by_class"),
        of(FLAT, "bullet_train", "test_tube"),  # nothing else says that these are classes
    ],
)
@pytest.mark.parametrize("split", ["train", "val"])
def test_what_may_be_splits_is_an_error_that_says_what_to_type(tmp_path: Path, folders: dict, split: str):
    path = made(tmp_path / "data", folders)
    with pytest.raises(BadData) as refused:
        open_source("auto", path, split)
    text = str(refused.value)
    assert all(name in text for name in (path, "called like splits", "PATH/train/CLASS", f"`train: {path}`"))
    assert all(name in text for name in list(folders)[:4])


def test_an_unsorted_val_folder_is_named(tmp_path: Path):
    path = made(tmp_path / "data", of(CLASSES, "img_train") | of(FLAT, "img_val"))
    with pytest.raises(BadData, match="img_val holds no class folders; expected .*/img_val/CLASS/"):
        open_source("auto", path, "val")


@pytest.mark.parametrize(
    "folders",
    [
        of(FLAT, "bullet_train", "car", "plane"),
        of(FLAT, "bullet_train", "test_tube", "car"),
        of(FLAT, "bullet_train", "steam_train", "freight_train"),
        of(FLAT, "train", "car", "plane"),
        of(FLAT, "training_certificate", "test_certificate", "invoice"),
        of(FLAT, "valid", "invalid"),
        of(FLAT, "trainer", "tester", "validator"),
        of(CLASSES, "bullet_train", "test_tube", "car"),
    ],
)
def test_classes_may_have_such_a_word_in_their_names(tmp_path: Path, folders: dict):
    path = made(tmp_path / "data", folders)
    assert open_source("auto", path, "train").classes == tuple(sorted(folders))


def test_a_description_takes_any_folders_for_classes(tmp_path: Path):
    path = made(tmp_path / "data", of(FLAT, "bullet_train", "test_tube"))
    (tmp_path / "pets.yaml").write_text(f"kind: folder\ntrain: {path}\n")
    assert open_source("auto", str(tmp_path / "pets.yaml"), "train").classes == ("bullet_train", "test_tube")


def test_images_of_a_table_may_lie_in_such_folders(tmp_path: Path):
    path = made(tmp_path / "data", of(FLAT, "train_images", "test_images"))
    (tmp_path / "data" / "labels.csv").write_text("file,label\ntrain_images/1.jpg,cat\ntrain_images/2.jpg,dog\n")
    assert recognised("open_source", path) == "table"


def test_the_line_about_the_data_names_the_folder_that_validates(tmp_path: Path):
    path = made(tmp_path / "data", of(CLASSES, "img_train", "img_val"))
    line = ClassificationData(path=path).look(tmp_path / "run", ()).line
    assert line == "data: 2 classes, 4 + 4 images; img_val validates"


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("img_train", ("train", "img_*")),
        ("TRAIN2017", ("train", "*2017")),
        ("petsVal", ("val", "pets*")),
        ("train_val", ("train", "*_val")),
        ("steam train", ("train", "steam *")),
        ("strain", ("", "")),
        ("invalid", ("", "")),
        ("contest", ("", "")),
    ],
)
def test_the_split_is_a_whole_word_of_the_name(name: str, split: tuple[str, str]):
    assert layouts.split_in(name) == split


def test_an_unknown_folder_is_still_a_usage_error(tmp_path: Path):
    path = made(tmp_path / "data", of((), "img_train", "img_val"))
    with pytest.raises(UsageError, match="holds nothing that this recipe can read"):
        open_source("auto", path, "train")
