"""Files of boxes that the system cannot read, lists that hold nothing, places that are rare: each is named or found."""

import builtins
import errno
import json
import os
from pathlib import Path

import pytest
from PIL import Image

from sightline.data.sources import open_boxes, open_masks, open_source
from sightline.data.sources.layouts import NoTestSplit
from sightline.data.sources.shards import Shard, list_folder
from sightline.errors import BadData, SightlineError, UsageError

XML = "<annotation><filename>{0}.png</filename><size><width>8</width><height>6</height></size>{1}</annotation>"
OBJECT = "<object><name>cat</name><bndbox><xmin>2</xmin><ymin>2</ymin><xmax>5</xmax><ymax>5</ymax></bndbox></object>"


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch):
    """Lets a file fail as a damaged disk does: it is listed, and reading it is an error."""

    def fail(path: Path, *calls: str) -> None:
        for owner, name in ((Path, "open"), (builtins, "open"), (os, "open"), (Path, "stat"), (os, "listdir")):
            if name in (calls or ("open",)):
                real = getattr(owner, name)

                def call(place, *more, real=real, **how):
                    if not isinstance(place, int) and Path(place) == path:
                        raise OSError(errno.EIO, os.strerror(errno.EIO), str(place))
                    return real(place, *more, **how)

                monkeypatch.setattr(owner, name, call)

    return fail


def image(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 6)).save(path.with_suffix(".png"))


def yolo(root: Path, *splits: str, **classes: int) -> Path:
    """images/SPLIT/a.png with labels/SPLIT/a.txt."""
    for split in splits or ("train", "val"):
        image(root / "images" / split / "a")
        (root / "labels" / split).mkdir(parents=True, exist_ok=True)
        (root / "labels" / split / "a.txt").write_text(f"{classes.get(split, 0)} 0.5 0.5 0.25 0.5\n")
    return root


def voc(root: Path, split: str = "", name: str = "a", objects: str = OBJECT) -> Path:
    image(root / "JPEGImages" / split / name)
    (root / "Annotations" / split).mkdir(parents=True, exist_ok=True)
    (root / "Annotations" / split / f"{name}.xml").write_text(XML.format(name, objects))
    return root


def yaml(root: Path, text: str, name: str = "data.yaml") -> Path:
    root.mkdir(exist_ok=True)
    (root / name).write_text(text)
    return root


def names_of(root: Path, split: str) -> list[str]:
    found = open_boxes("auto", str(root), split)
    return [os.path.basename(found.name(index)) for index in range(len(found))]


# YOLO


def test_labels_and_lists_of_yolo_that_cannot_be_read_are_named(tmp_path: Path, broken):
    root = yaml(yolo(tmp_path / "data"), "train: train.txt\nval: images/val\nnames: [cat]\n")
    (root / "train.txt").write_text("./images/train/a.png\n")
    assert names_of(root, "train") == ["a.png"]
    (root / "train.txt").write_text("\n  \n")
    with pytest.raises(BadData, match=r"train.txt lists no images, expected one path per line"):
        names_of(root, "train")
    broken(root / "train.txt")
    with pytest.raises(BadData, match=r"train.txt cannot be read: Input/output error"):
        names_of(root, "train")
    broken(root / "labels" / "val" / "a.txt")
    with pytest.raises(BadData, match=r"labels/val/a.txt: cannot be read: Input/output error"):
        names_of(root, "val")


def test_images_without_any_label_are_no_data_of_yolo(tmp_path: Path):
    root = yaml(yolo(tmp_path / "data"), "train: images/train\nval: images/val\nnames: [cat]\n")
    (root / "labels" / "train" / "a.txt").rename(root / "labels" / "train" / "b.txt")
    with pytest.raises(BadData, match=r"labels/train has no label \(.txt\) of any of the 1 images in .*images/train"):
        names_of(root, "train")
    (root / "labels" / "train" / "b.txt").unlink()
    with pytest.raises(BadData, match=r"images/train has no labels; expected .*labels/train/\*.txt or .*images/train"):
        names_of(root, "train")


def test_a_text_beside_the_labels_that_is_none_is_passed_over(tmp_path: Path):
    root = yaml(yolo(tmp_path / "data"), "train: images/train\nval: images/val\nnames: [cat]\n")
    (root / "labels" / "train" / "notes.txt").write_text("drawn by hand\n")
    assert names_of(root, "train") == ["a.png"]


def test_a_class_that_train_and_val_lack_is_refused_in_test(tmp_path: Path):
    root = yolo(tmp_path / "data", "train", "val", "test", test=3, val=1)
    yaml(root, "train: images/train\nval: images/val\ntest: images/test\nnc: 2\n")
    assert names_of(root, "val") == ["a.png"]
    with pytest.raises(BadData, match=r"labels/test has class 3, train and val have classes 0 to 1"):
        names_of(root, "test")


def test_a_description_may_name_folders_of_images_and_labels(tmp_path: Path):
    for split in ("train", "val"):
        image(tmp_path / split / "images" / split)
        (tmp_path / split / "labels").mkdir()
        (tmp_path / split / "labels" / f"{split}.txt").write_text("0 0.5 0.5 0.25 0.5\n")
    yaml(tmp_path, "kind: yolo\ntrain: train\nval: val\nclasses: [cat]\n", "mine.yaml")
    found = open_boxes("auto", str(tmp_path / "mine.yaml"), "val")
    assert found.name(0).endswith("val.png") and found.objects(0).boxes.tolist() == [[3, 1.5, 2, 3]]
    assert found.annotations.area.tolist() == [6]


def test_the_one_yaml_of_another_name_is_found(tmp_path: Path):
    root = yaml(yolo(tmp_path / "data"), "train: images/train\nval: images/val\nnames: [cat]\n", "cats.yaml")
    yaml(root, "lr: 0.1\n", "a_training.yaml")
    yaml(root, "train: [", "broken.yaml")
    assert open_boxes("auto", str(root), "train").classes == ("cat",)
    yaml(root, "train: images/train\nval: images/val\nnames: [dog]\n", "dogs.yaml")
    assert open_boxes("auto", str(root), "train").classes == ("0",), "of two none is chosen: images/ and labels/ are"


def test_half_a_character_in_a_name_is_refused(tmp_path: Path):
    root = yaml(yolo(tmp_path / "data"), 'train: images/train\nval: images/val\nnames: ["\\ud83d"]\n')
    with pytest.raises(SightlineError, match="data.yaml"):
        names_of(root, "train")


# Pascal VOC


def test_lists_and_files_of_voc_that_cannot_be_read_are_named(tmp_path: Path, broken):
    root = voc(voc(tmp_path / "data"), name="b")
    lists = root / "ImageSets" / "Main"
    lists.mkdir(parents=True)
    (lists / "train.txt").write_text("a\n")
    (lists / "val.txt").write_text("b\n")
    assert names_of(root, "train") == ["a.png"]
    (lists / "val.txt").write_text("\n")
    with pytest.raises(BadData, match=r"Main/val.txt names no images, expected one name per line"):
        names_of(root, "train")
    (lists / "val.txt").write_text("b\n")
    (lists / "test.txt").write_text("b\n")
    broken(lists / "test.txt")
    with pytest.raises(NoTestSplit, match=r"none of the images that .*Main/test.txt names has an annotation"):
        names_of(root, "test")
    broken(lists / "val.txt")
    with pytest.raises(BadData, match=r"Main/val.txt cannot be read: Input/output error"):
        names_of(root, "train")


def test_an_xml_file_that_cannot_be_read_is_named(tmp_path: Path, broken):
    root = voc(voc(tmp_path / "data"), name="b")
    broken(root / "Annotations" / "a.xml")
    with pytest.raises(BadData, match=r"Annotations/a.xml: cannot be read: Input/output error"):
        names_of(root, "train")


def test_folders_of_splits_below_the_annotations_hold_images_of_the_same_name(tmp_path: Path):
    root = tmp_path / "data"
    for split in ("train", "val", "test"):
        voc(root, split, f"of_{split}")
    assert {split: names_of(root, split) for split in ("train", "val", "test")} == {
        split: [f"of_{split}.png"] for split in ("train", "val", "test")
    }
    together = tmp_path / "together"  # all images in one folder
    for split in ("train", "val"):
        voc(together, split, f"of_{split}")
        (together / "JPEGImages" / split / f"of_{split}.png").rename(together / "JPEGImages" / f"of_{split}.png")
        (together / "JPEGImages" / split).rmdir()
    assert names_of(together, "val") == ["of_val.png"]


def test_a_folder_without_xml_is_no_data_of_voc(tmp_path: Path):
    with pytest.raises(BadData, match=r"has no xml files of Pascal VOC; expected Annotations/\*.xml with JPEGImages/"):
        open_boxes("voc", str(tmp_path), "train")


# COCO, and shards


def test_a_json_file_that_cannot_be_read_is_named(tmp_path: Path, broken):
    for split in ("train", "val"):
        image(tmp_path / f"{split}2017" / "a")
        (tmp_path / "annotations").mkdir(exist_ok=True)
        content = {
            "images": [{"id": 1, "file_name": "a.png", "width": 8, "height": 6}],
            "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 1, 3, 3]}],
            "categories": [{"id": 1, "name": "cat"}],
        }
        (tmp_path / "annotations" / f"instances_{split}2017.json").write_text(json.dumps(content))
    assert names_of(tmp_path, "val") == ["a.png"]
    file = tmp_path / "annotations" / "instances_train2017.json"
    broken(file)
    with pytest.raises(BadData, match=r"instances_train2017.json cannot be read: Input/output error"):
        open_boxes("coco", str(tmp_path), "train")


def test_shards_that_cannot_be_read_are_named(tmp_path: Path, broken):
    assert list_folder(tmp_path / "none") == [] and list_folder(tmp_path) == []
    (tmp_path / "b").touch()
    (tmp_path / "a").write_bytes(b"12")
    assert list_folder(tmp_path) == ["a", "b"]
    shard = Shard.at(tmp_path, tmp_path / "a")
    assert (shard.name, shard.size, shard.changed_ns) == ("a", 2, os.stat(tmp_path / "a").st_mtime_ns)
    broken(tmp_path, "listdir")
    with pytest.raises(BadData, match=r"cannot be read: Input/output error"):
        list_folder(tmp_path)
    with pytest.raises(BadData, match=r"gone cannot be read: No such file or directory"):
        Shard.at(tmp_path, tmp_path / "gone")


# Files that say what the data mean


def masks(root: Path) -> Path:
    for number in range(3):
        image(root / "images" / str(number))
        (root / "masks").mkdir(exist_ok=True)
        Image.frombytes("L", (8, 6), bytes(number % 2 for number in range(48))).save(root / "masks" / f"{number}.png")
    return root


def class_folders(root: Path) -> Path:
    for name in ("cat/a", "cat/b", "dog/a", "dog/b"):
        image(root / name)
    return root


def of_image(number: int) -> str:
    listed = [{"id": 1, "file_name": "a.png", "width": 8, "height": 6}]
    boxes = [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [number, 1, 2, 2]}]
    return json.dumps({"images": listed, "annotations": boxes, "categories": [{"id": 1, "name": "cat"}]})


def coco(root: Path) -> Path:
    """train.json with train/a.png and val.json with val/a.png: the images of both splits are called alike."""
    for number, split in enumerate(("train", "val")):
        image(root / split / "a")
        (root / f"{split}.json").write_text(of_image(number))
    return root


def listed_yolo(root: Path) -> Path:
    yaml(yolo(root), "train: train.txt\nval: images/val\nnames: [cat]\n")
    (root / "train.txt").write_text("./images/train/a.png\n")
    return root


def listed_voc(root: Path) -> Path:
    for name in "abc":
        voc(root, name=name)
    (root / "ImageSets" / "Main").mkdir(parents=True)
    for name, split in zip("abc", ("train", "val", "test"), strict=True):
        (root / "ImageSets" / "Main" / f"{split}.txt").write_text(f"{name}\n")
    return root


@pytest.mark.parametrize("kind", ["a pipe", "a link"])
@pytest.mark.parametrize(
    ("write", "name", "open_one"),
    [
        (masks, "classes.txt", open_masks),
        (masks, "masks/_classes.csv", open_masks),
        (yolo, "data.yaml", open_boxes),
        (yolo, "labels/classes.txt", open_boxes),
        (listed_yolo, "labels/train/a.txt", open_boxes),
        (listed_voc, "ImageSets/Main/train.txt", open_boxes),
        (listed_voc, "ImageSets/Main/val.txt", open_boxes),
        (listed_voc, "ImageSets/Main/test.txt", open_boxes),
        (coco, "train.json", open_boxes),
        (coco, "val.json", open_boxes),
        (class_folders, "labels.csv", open_source),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_list_that_is_no_file_is_not_as_if_there_were_none(tmp_path: Path, write, name: str, open_one, kind: str):
    """Without it the data mean something else: other classes, other splits."""
    root = write(tmp_path / "data")
    (root / name).unlink(missing_ok=True)
    if kind == "a pipe":
        os.mkfifo(root / name)  # nobody writes to it: opening it would wait
    else:
        (root / name).symlink_to("nowhere")
    said = "is a pipe or a device" if kind == "a pipe" else "is a link that leads nowhere"
    with pytest.raises(UsageError, match=f"{name} {said}.*remove it"):
        open_one("auto", str(root), "train")


@pytest.mark.parametrize("split", ["train", "val"])
def test_an_image_that_one_split_misses_is_not_taken_from_the_other(tmp_path: Path, split: str):
    root = coco(tmp_path / "data")
    image(root / split / "b")
    content = json.loads((root / f"{split}.json").read_text())
    content["images"].append({"id": 2, "file_name": "b.png", "width": 8, "height": 6})
    (root / f"{split}.json").write_text(json.dumps(content))
    (root / split / "a.png").unlink()
    with pytest.raises(BadData, match=rf"{split} lacks 1 of .*, the first one a\.png"):
        open_boxes("auto", str(root), split)
    (root / split / "b.png").unlink()
    with pytest.raises(BadData, match=rf"none of them in .*{split}"):
        open_boxes("auto", str(root), split)


def test_the_one_json_file_of_a_split_is_of_the_folder_of_that_split(tmp_path: Path):
    root = coco(tmp_path / "data")
    (root / "train.json").unlink()
    assert open_boxes("auto", str(root), "val").layout.val.images == root / "val"
