"""Images with masks in every layout: the same data give the same masks; the classes follow from the values."""

import json
import os
import pickle
import re
import runpy
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sightline.data.decode import decode_rgb
from sightline.data.sources import (
    IGNORED,
    Opener,
    SourceOptions,
    index_files,
    mask_classes,
    mask_places,
    open_boxes,
    open_masks,
)
from sightline.data.sources.layouts import NoTestSplit, kept_of
from sightline.data.sources.masks import indices_in
from sightline.errors import BadData, BadSample, UsageError

MADE = runpy.run_path(str(Path(__file__).with_name("mask_layouts.py")))
LAYOUTS, NAMED, CLASSES, COLOURS = (MADE[name] for name in ("LAYOUTS", "NAMED", "CLASSES", "COLOURS"))
Entry = MADE["Entry"]
SPLITS = ("train", "val", "test")


@pytest.fixture(scope="session")
def data():
    return MADE["drawn"]()


def write(root: Path, masks: dict[str, np.ndarray], folders: tuple[str, str] = ("images", "masks"), suffix: str = ""):
    """Pairs of these masks in two folders, or in one if both are called alike."""
    for folder in folders:
        (root / folder).mkdir(parents=True, exist_ok=True)
    for number, (stem, mask) in enumerate(masks.items()):
        pixels = np.random.default_rng(number).integers(0, 256, (*mask.shape[:2], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / folders[0] / f"{stem}.png")
        Image.fromarray(mask).save(root / folders[1] / f"{stem}{suffix}.png")
    return root


def some(*values: int, count: int = 5, side: int = 12) -> dict[str, np.ndarray]:
    """Masks that hold all of these values."""
    rng = np.random.default_rng(3)
    found = {}
    for number in range(count):
        mask = rng.choice(np.asarray(values, np.uint8), (side, side))
        mask.flat[: len(values)] = values
        found[f"x{number}"] = mask
    return found


def opened(root: Path, part: str = "train", **options):
    return open_masks("auto", str(root), part, SourceOptions(**options))


# The same data


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_masks(data, tmp_path, layout):
    path = LAYOUTS[layout](data, tmp_path / "data") or tmp_path / "data"
    for split in SPLITS:
        source = opened(path, split)
        assert len(source) == len(data[split])
        assert source.classes == (CLASSES if layout in NAMED else ("0", "1", "2", "3"))
        for index, entry in enumerate(data[split]):
            assert entry.stem in source.name(index)
            assert source.size(index) == entry.pixels.shape[:2]
            found = source.mask(index)
            assert found.dtype == np.uint8 and np.array_equal(found, entry.mask), (layout, split, index)
            pixels = decode_rgb(source.image(index), "x")
            if ".jpg" not in source.name(index):
                assert np.array_equal(pixels, entry.pixels)
        assert (source.channels, source.bits) == (3, 8)
        again = pickle.loads(pickle.dumps(source))
        assert np.array_equal(again.mask(0), source.mask(0)) and again.image(0) == source.image(0)
        assert source.files[0].name.startswith(data[split][0].stem)
    assert source.layout.val is not None and source.held_out is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_run_keeps_of_its_data_opens_them_again(data, tmp_path, layout):
    path = LAYOUTS[layout](data, tmp_path / "data") or tmp_path / "data"
    kept = tmp_path / "run" / "data.yaml"
    kept.parent.mkdir()
    for split in SPLITS:
        source = opened(path, split)
        kept.write_text(kept_of(source)["data.yaml"])
        again = opened(kept, split)
        assert (again.fingerprint, again.classes) == (source.fingerprint, source.classes)


def test_values_say_what_the_files_hold(data, tmp_path):
    coloured = LAYOUTS["named_folders"](data, tmp_path / "c") or opened(tmp_path / "c")
    assert coloured.is_coloured
    assert coloured.values == tuple(r << 16 | g << 8 | b for r, g, b in COLOURS)
    LAYOUTS["split_outside"](data, tmp_path / "i")
    indexed = opened(tmp_path / "i")
    assert not indexed.is_coloured and indexed.values == (0, 1, 2, 3)


@pytest.mark.parametrize("layout", ["split_inside", "voc", "coco", "yolo"])
def test_a_val_split_is_drawn_where_there_is_none(data, tmp_path, layout):
    only = {"train": data["train"]}
    LAYOUTS[layout](only, tmp_path / "data")
    train, val = (opened(tmp_path / "data", split) for split in ("train", "val"))
    assert (len(train), len(val)) == (5, 1)
    assert train.held_out.all() == val.held_out.all() == val.names.all()
    names = {train.name(index) for index in range(5)} | {val.name(0)}
    assert len(names) == 6
    kept = tmp_path / "split.json"
    kept.write_text(json.dumps({"val": [os.fsdecode(train.names.all()[0])]}))
    assert opened(tmp_path / "data", "val", split=str(kept)).name(0) == train.name(0)
    assert len(opened(tmp_path / "data", "val", split="all")) == 6


def test_the_fingerprint_follows_the_files_and_not_the_place(data, tmp_path):
    LAYOUTS["split_inside"](data, tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert opened(tmp_path / "a").fingerprint == opened(tmp_path / "b").fingerprint
    mask = tmp_path / "b" / "masks" / "train" / "train_0.png"
    Image.fromarray(np.asarray(Image.open(mask))[::-1] * 0 + 1).save(mask)
    assert opened(tmp_path / "a").fingerprint != opened(tmp_path / "b").fingerprint


# Independent readers


def test_voc_masks_are_those_of_torchvision(data, tmp_path):
    from torchvision.datasets import VOCSegmentation

    LAYOUTS["voc"](data, tmp_path)
    for split in ("train", "val"):
        reference = VOCSegmentation(str(tmp_path), image_set=split)
        masks = {Path(reference.masks[at]).stem: np.asarray(reference[at][1]) for at in range(len(reference))}
        source = opened(tmp_path, split)
        assert len(source) == len(reference)
        for index in range(len(source)):
            assert np.array_equal(source.mask(index), masks[Path(source.name(index)).stem])


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # of pycocotools
@pytest.mark.parametrize("split", [pytest.param("train", marks=pytest.mark.slow), "val"])
def test_coco_masks_are_those_of_pycocotools(shared_data, tmp_path, split, capsys):
    from pycocotools.coco import COCO

    root = tmp_path / "coco"
    shutil.copytree(shared_data / "coco-tiny", root, ignore=shutil.ignore_patterns(".sightline*"))
    reference = COCO(str(root / "annotations" / f"instances_{split}2017.json"))
    numbers = {category: at for at, category in enumerate(sorted(reference.getCatIds()), 1)}
    crowds = 0
    for source in (opened(root, split), opened(root, split)):  # the second from the index
        assert source.classes[0] == "background" and len(source.classes) == 81
        for index, image in enumerate(sorted(reference.getImgIds())):
            found = reference.loadAnns(reference.getAnnIds(image))
            info = reference.imgs[image]
            expected = np.zeros((info["height"], info["width"]), np.uint8)
            for each in sorted(found, key=lambda each: not each["iscrowd"]):
                number = IGNORED if each["iscrowd"] else numbers[each["category_id"]]
                expected[reference.annToMask(each) > 0] = number
                crowds += each["iscrowd"]
            assert np.array_equal(source.mask(index), expected)
    assert crowds


def inside(corners: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return which centres of pixels lie in a polygon: an edge count to the right of them, by the even-odd rule."""
    y, x = np.mgrid[:height, :width] + 0.5
    found = np.zeros((height, width), bool)
    for (x0, y0), (x1, y1) in zip(corners, np.roll(corners, -1, 0), strict=True):
        crosses = (y0 > y) != (y1 > y)
        found ^= crosses & (x < (x1 - x0) * (y - y0) / np.where(crosses, y1 - y0, 1) + x0)
    return found


@pytest.mark.filterwarnings("ignore:__array__ implementation")
def test_yolo_polygons_are_those_of_pycocotools_and_of_geometry(tmp_path):
    from pycocotools import mask as coco_mask

    rng, expected, shapes = np.random.default_rng(5), {}, {}
    for folder in ("images", "labels"):
        (tmp_path / folder / "train").mkdir(parents=True)
    (tmp_path / "data.yaml").write_text("train: images/train\nnames: [cat, dog]\n")
    for number in range(12):
        height, width = rng.integers(30, 80, 2).tolist()
        Image.new("RGB", (width, height)).save(tmp_path / "images" / "train" / f"{number:02}.png")
        mask, lines = np.zeros((height, width), np.uint8), []
        for kind in rng.integers(0, 2, 3).tolist():
            count = int(rng.integers(3, 12))  # a star around the centre, of which some reaches beyond the image
            angles, far = np.sort(rng.uniform(0, 2 * np.pi, count)), rng.uniform(0.1, 0.5, count)
            shares = np.clip(
                rng.uniform(0.2, 0.8, 2) + np.stack([np.cos(angles), np.sin(angles)], 1) * far[:, None], 0, 1
            )
            lines.append(" ".join(map(repr, [kind, *shares.ravel().tolist()])))
            corners = shares * (width, height)
            mask[coco_mask.decode(coco_mask.frPyObjects([corners.ravel().tolist()], height, width))[..., 0] > 0] = (
                kind + 1
            )
            shapes.setdefault(number, []).append((kind + 1, inside(corners, height, width)))
        expected[f"{number:02}"] = mask
        (tmp_path / "labels" / "train" / f"{number:02}.txt").write_text("\n".join(lines))
    source = opened(tmp_path, "val", split="all")
    assert len(source) == 12
    differs = total = 0
    for index in range(12):
        found = source.mask(index)
        assert np.array_equal(found, expected[Path(source.name(index)).stem])
        plain = np.zeros_like(found)
        for kind, where in shapes[index]:
            plain[where] = kind
        differs, total = differs + int((plain != found).sum()), total + int((plain > 0).sum())
    assert differs < 0.03 * total  # pixels that an edge cuts


def test_categories_of_one_name_are_one_class(data, tmp_path):
    """Roboflow lists its project as a category too, which may be called like a class of it."""
    LAYOUTS["coco"](data, tmp_path)
    before = opened(tmp_path)
    for file in (tmp_path / "annotations").iterdir():
        content = json.loads(file.read_text())
        content["categories"].insert(0, {"id": 0, "name": CLASSES[2], "supercategory": "none"})
        file.write_text(json.dumps(content))
    after = opened(tmp_path)
    assert after.classes == ("background", CLASSES[2], CLASSES[1], CLASSES[3])
    for index in range(len(before)):
        assert np.array_equal(after.mask(index), np.asarray([0, 2, 1, 3])[before.mask(index)])


@pytest.mark.filterwarnings("ignore:__array__ implementation")
def test_compressed_runs_are_read_as_pycocotools_reads_them(data, tmp_path):
    from pycocotools import mask as coco_mask

    LAYOUTS["coco"](data, tmp_path)
    expected = [opened(tmp_path).mask(index) for index in range(len(data["train"]))]
    file = tmp_path / "annotations" / "instances_train.json"
    content = json.loads(file.read_text())
    sides = {each["id"]: (each["height"], each["width"]) for each in content["images"]}
    for number, each in enumerate(content["annotations"]):
        (runs,) = coco_mask.frPyObjects(each["segmentation"], *sides[each["image_id"]])
        counts = runs["counts"].decode()
        if number % 2:
            inside = coco_mask.decode(runs).T.ravel()
            edges = np.flatnonzero(np.diff(inside, prepend=0, append=0))
            counts = np.diff([0, *edges, inside.size]).tolist()
        each["segmentation"] = {"size": list(sides[each["image_id"]]), "counts": counts}
    file.write_text(json.dumps(content))
    found = opened(tmp_path)
    assert all(np.array_equal(found.mask(index), each) for index, each in enumerate(expected))


@pytest.mark.parametrize("palettes", ["alike", "of each file"])
def test_palettes(tmp_path, palettes):
    """Indices are the classes if each has one colour in all files; else, as after `quantize`, the colours are."""
    masks = some(0, 1, 2)
    write(tmp_path, masks)
    colours = np.asarray([(9, 0, 0), (0, 9, 0), (0, 0, 9)], np.uint8)
    for number, (stem, mask) in enumerate(masks.items()):
        order = np.roll(np.arange(3), number if palettes != "alike" else 0)
        image = Image.fromarray(np.argsort(order).astype(np.uint8)[mask], "P")
        image.putpalette(colours[order].ravel().tolist())
        image.save(tmp_path / "masks" / f"{stem}.png")
        assert np.array_equal(np.asarray(image.convert("RGB")), colours[mask])
    source = opened(tmp_path)
    assert source.is_coloured == (palettes != "alike")
    assert source.values == ((0, 1, 2) if palettes == "alike" else (0x000009, 0x000900, 0x090000))
    for index in range(len(source)):
        expected = masks[Path(source.name(index)).stem]
        assert np.array_equal(source.mask(index), expected if palettes == "alike" else 2 - expected)


def test_splits_come_before_all_images_together(data, tmp_path):
    """Some publish all images, and once more by their splits."""
    LAYOUTS["split_outside"](data, tmp_path)
    write(tmp_path, some(0, 1, count=9), ("Images", "Masks"))
    assert [len(opened(tmp_path, split)) for split in SPLITS] == [len(data[split]) for split in SPLITS]
    shutil.rmtree(tmp_path / "val")
    shutil.rmtree(tmp_path / "test")
    assert opened(tmp_path, "val", split="all").layout.train.images.name == "Images"


# Values


@pytest.mark.parametrize(
    ("values", "ignore", "classes", "ignored"),
    [
        ((0, 255), "", (0, 255), ()),
        ((0, 1), "", (0, 1), ()),
        ((0, 1, 255), "", (0, 1), (255,)),
        ((0, 128, 255), "", (0, 128, 255), ()),
        ((0, 85, 170, 255), "", (0, 85, 170, 255), ()),
        ((0, 100, 255), "", (0, 100), (255,)),
        ((0, 1, 255), "none", (0, 1, 255), ()),
        ((0, 5, 6, 7, 9, 15, 18, 255), "", (0, 5, 6, 7, 9, 15, 18), (255,)),
        ((0, 1, 2, 3), "0,3", (1, 2), (0, 3)),
        ((0, 1, 2, 255), "0", (1, 2, 255), (0,)),
        ((1, 2), "", (1, 2), ()),
    ],
)
def test_values_become_classes(tmp_path, values, ignore, classes, ignored):
    masks = some(*values)
    source = opened(write(tmp_path, masks), ignore=ignore)
    assert source.values == classes and source.classes == tuple(map(str, classes))
    for index in range(len(source)):
        stored = masks[Path(source.name(index)).stem]
        found = source.mask(index)
        assert np.array_equal(found == IGNORED, np.isin(stored, ignored))
        back = np.asarray(source.values)[np.where(found == IGNORED, 0, found)]
        assert np.array_equal(back[found != IGNORED], stored[found != IGNORED])


def test_the_line_says_what_became_of_the_values(tmp_path):
    assert opened(write(tmp_path / "a", some(0, 5, 9, 255))).notes == ("values 0, 5, 9 renumbered", "255 ignored")
    assert opened(write(tmp_path / "b", some(0, 1))).notes == ()


def test_numbers_beyond_a_byte(tmp_path):
    masks = {name: mask.astype(np.uint16) * 1000 for name, mask in some(0, 1, 2).items()}
    source = opened(write(tmp_path, masks))
    assert source.values == (0, 1000, 2000)
    assert np.array_equal(source.mask(0), masks[Path(source.name(0)).stem] // 1000)


def test_colours_without_a_table_are_sorted(tmp_path):
    colours = np.asarray([(0, 0, 0), (255, 0, 0), (0, 0, 255), (0xE0, 0xE0, 0xC0)], np.uint8)
    masks = some(0, 1, 2, 3)
    source = opened(write(tmp_path, {name: colours[mask] for name, mask in masks.items()}))
    assert source.values == (0, 0x0000FF, 0xFF0000) and source.classes == ("#000000", "#0000ff", "#ff0000")
    expected = np.asarray([0, 2, 1, IGNORED])[masks[Path(source.name(0)).stem]]  # the last is VOC's border
    assert np.array_equal(source.mask(0), expected)


def test_grey_that_is_stored_as_colours(tmp_path):
    masks = some(0, 255)
    source = opened(write(tmp_path, {name: np.repeat(mask[..., None], 3, 2) for name, mask in masks.items()}))
    assert source.values == (0, 255) and not source.is_coloured
    assert np.array_equal(source.mask(0) * 255, masks[Path(source.name(0)).stem])


TABLES = {
    "_classes.csv": ("Pixel Value, Class\n0, sky\n1, tree\n2, road\n", (0, 1, 2)),
    "classes.txt": ("sky\ntree\nroad\n", (0, 1, 2)),
    "labels.txt": ("__ignore__\nsky\ntree\nroad\n", (0, 1, 2)),
    "label_colors.txt": ("0 0 0\tsky\n1 1 1\ttree\n2 2 2\troad\n", (0, 0x010101, 0x020202)),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_name_the_classes(tmp_path, name):
    text, values = TABLES[name]
    (write(tmp_path, some(0, 1)) / name).write_text(text)
    source = opened(tmp_path)
    assert source.classes == ("sky", "tree", "road") and source.values == values
    assert opened(tmp_path, ignore="tree").classes == ("sky", "road")
    with pytest.raises(UsageError, match="--data.ignore lake: the masks have sky, tree, road"):
        opened(tmp_path, ignore="lake")


def test_a_table_above_the_data_is_of_other_data(tmp_path):
    write(tmp_path / "data", some(0, 1), ("all", "all"), suffix="_mask")
    write(tmp_path / "data", {f"{stem}": mask for stem, mask in some(0, 1).items()}, ("all", "other"))
    (tmp_path / "data" / "classes.txt").write_text("sky\ntree\n")
    assert opened(tmp_path / "data" / "all").classes == ("0", "1")
    shutil.move(tmp_path / "data" / "all", tmp_path / "data" / "train")
    assert opened(tmp_path / "data" / "train").classes == ("sky", "tree")


def test_two_names_for_0_and_255(tmp_path):
    (write(tmp_path, some(0, 255)) / "classes.txt").write_text("ground\nbuilding\n")
    source = opened(tmp_path)
    assert source.classes == ("ground", "building") and source.values == (0, 255)


def test_a_table_of_colours_for_numbers(tmp_path):
    (write(tmp_path, some(0, 1)) / "class_dict.csv").write_text("name,r,g,b\nsky,9,9,9\ntree,0,200,0\n")
    source = opened(tmp_path)
    assert source.classes == ("sky", "tree") and source.values == (0, 1) and not source.is_coloured


# Names


@pytest.mark.parametrize(
    ("image", "mask", "pattern"),
    [
        ("{}.png", "{}_mask.png", ""),
        ("{}.png", "{}-label.png", ""),
        ("{}_sat.png", "{}_mask.png", ""),
        ("image_{}.png", "{}_seg.png", ""),
        ("{}_T2w.png", "{}_T2w_labels.png", "{}_labels"),
        ("{}_T2w.png", "{}_T2w_labels.png", "{}_T2w_labels"),
        ("{}.png", "m-{}-1.png", "m-{}-1"),
    ],
)
@pytest.mark.parametrize("folders", [("a", "a"), ("images", "masks")])
def test_names_of_masks(tmp_path, image, mask, pattern, folders):
    masks = some(0, 1)
    for folder in folders:
        (tmp_path / folder).mkdir(exist_ok=True)
    for stem, found in masks.items():
        Image.fromarray(found).convert("RGB").save(tmp_path / folders[0] / image.format(stem))
        Image.fromarray(found).save(tmp_path / folders[1] / mask.format(stem))
    source = opened(tmp_path / "a" if folders[0] == "a" else tmp_path, mask_pattern=pattern)
    for index in range(len(source)):
        stem = next(stem for stem in masks if stem in source.name(index))
        assert np.array_equal(source.mask(index), masks[stem])


@pytest.mark.parametrize(
    "folders",
    [
        ("original_image", "segmentation_image"),  # lisawen0707/soybean
        ("frames", "frames_gt"),
        ("image_2", "semantic masks"),
        ("CXR_png", "ManualMask"),
    ],
)
def test_other_names_of_folders(tmp_path, folders):
    write(tmp_path, some(0, 1, 2), folders)
    (tmp_path / "notes").mkdir()
    source = opened(tmp_path, "val", split="all")
    assert (
        len(source) == 5
        and (source.place.images.name, source.place.labels.name) == folders
        and source.values == (0, 1, 2)
    )


@pytest.mark.parametrize("third", ["old_masks", "frames2"])
def test_folders_that_may_be_either_are_refused(tmp_path, third):
    write(tmp_path, some(0, 1), ("frames", "frames_gt"))
    write(tmp_path, some(0, 1), (third, third))
    with pytest.raises(UsageError, match="holds images with a label.*`kind: masks` that names folders"):
        opened(tmp_path)


def test_cityscapes(tmp_path):
    for split in ("train", "val"):
        images, masks = tmp_path / "leftImg8bit" / split / "bonn", tmp_path / "gtFine" / split / "bonn"
        images.mkdir(parents=True)
        masks.mkdir(parents=True)
        for number in range(3):
            stem = f"bonn_{number:06d}_000019"
            found = np.arange(64, dtype=np.uint8).reshape(8, 8) % 19
            found[0, 0] = 255
            Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(images / f"{stem}_leftImg8bit.png")
            Image.fromarray(found).save(masks / f"{stem}_gtFine_labelTrainIds.png")
            Image.fromarray(found + 7).save(masks / f"{stem}_gtFine_labelIds.png")
            Image.fromarray(np.zeros((8, 8, 4), np.uint8)).save(masks / f"{stem}_gtFine_color.png")
    source = opened(tmp_path)
    assert len(source) == 3 and source.values == tuple(range(19))
    assert source.mask(0)[0, 0] == IGNORED and np.array_equal(source.mask(0).flat[1:], found.flat[1:])
    assert opened(tmp_path, mask_pattern="{}_gtFine_labelIds").values == (6, *range(7, 26))


# Images


@pytest.mark.parametrize(("channels", "bits"), [(1, 8), (1, 16), (3, 8), (3, 16), (4, 8), (4, 16)])
def test_channels_and_bits(tmp_path, channels, bits):
    masks = some(0, 1)
    write(tmp_path, masks)
    pixels = np.random.default_rng(0).integers(0, 2**bits, (12, 12, channels)).astype(f"uint{bits}")
    for stem in masks:
        png16(tmp_path / "images" / f"{stem}.png", pixels) if bits == 16 else Image.fromarray(
            pixels if channels > 1 else pixels[..., 0]
        ).save(tmp_path / "images" / f"{stem}.png")
    source = opened(tmp_path)
    assert (source.channels, source.bits) == (channels, bits)
    found = source.image(0)
    assert isinstance(found, bytes) == (bits == 8 and channels != 4)  # which loaders decode by their own means
    if isinstance(found, bytes):
        found = decode_rgb(found, "x")[..., :channels]
    assert found.dtype == pixels.dtype and np.array_equal(found, pixels)


def png16(file: Path, pixels: np.ndarray) -> None:
    """A PNG of 16 bits by its format, as Pillow writes none with colours."""
    import struct
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width, channels = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 16, {1: 0, 3: 2, 4: 6}[channels], 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + chunks)


def test_opaque_alpha_is_no_channel(tmp_path):
    write(tmp_path, masks := some(0, 1))
    for stem in masks:
        Image.new("RGBA", (12, 12), (1, 2, 3, 255)).save(tmp_path / "images" / f"{stem}.png")
    assert opened(tmp_path).channels == 3


def test_8_and_16_bits_are_not_mixed(tmp_path):
    write(tmp_path, some(0, 1))
    png16(tmp_path / "images" / "x0.png", np.zeros((12, 12, 3), np.uint16))
    with pytest.raises(BadData, match=r"1 of 5 images have 16 bits a channel \(x0.png\), the others 8"):
        opened(tmp_path)


@pytest.mark.parametrize("is_upright", [True, False])
def test_turned_photos_fit_their_masks(tmp_path, is_upright):
    """A mask may have been drawn on the photo as it is stored, or as people see it."""
    write(tmp_path, some(0, 1))
    pixels = np.zeros((40, 64, 3), np.uint8)
    pixels[:8] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    Image.fromarray(pixels).save(tmp_path / "images" / "x0.jpg", exif=exif, quality=95)
    os.remove(tmp_path / "images" / "x0.png")
    mask = (pixels[..., 0] > 0).astype(np.uint8)
    mask = np.rot90(mask, -1) if is_upright else mask
    Image.fromarray(np.ascontiguousarray(mask)).save(tmp_path / "masks" / "x0.png")
    source = opened(tmp_path, "val", split="all")
    index = next(at for at in range(len(source)) if "x0" in source.name(at))
    found = source.image(index)
    found = decode_rgb(found, "x") if isinstance(found, bytes) else found
    assert found.shape[:2] == source.size(index) == mask.shape
    assert np.array_equal(found[..., 0] > 128, source.mask(index) == 1)


# What is wrong


def test_all_problems_come_in_one_answer(tmp_path):
    write(tmp_path, some(0, 1, count=9))
    os.remove(tmp_path / "masks" / "x0.png")
    os.remove(tmp_path / "masks" / "x1.png")
    os.remove(tmp_path / "images" / "x2.png")
    Image.fromarray(np.zeros((5, 6), np.uint8)).save(tmp_path / "masks" / "x3.png")
    Image.fromarray(np.zeros((12, 12), np.uint8)).save(tmp_path / "masks" / "x4.jpg")
    os.remove(tmp_path / "masks" / "x4.png")
    (tmp_path / "masks" / "x5.png").write_bytes(b"no image")
    with pytest.raises(BadData) as caught:
        opened(tmp_path)
    said = str(caught.value)
    for part in (
        "mask without an image: x2.png",
        "image without a mask (2): images/x0.png: no mask in",
        "; also images/x1.png",
        "size differs: masks/x3.png: is 6x5, its image x3.png is 12x12",
        "soft edges: masks/x4.jpg: is stored as JPEG",
        "unreadable: masks/x5.png",
        "`sightline check` lists all of them",
    ):
        assert part in said


def test_single_images_can_be_skipped(tmp_path):
    write(tmp_path, some(0, 1, count=9))
    os.remove(tmp_path / "masks" / "x0.png")
    Image.fromarray(np.zeros((5, 6), np.uint8)).save(tmp_path / "masks" / "x1.png")
    source = opened(tmp_path, "val", split="all", skips_missing=True)
    assert len(source) == 9
    for index, text in ((0, "its mask is not usable: there is none"), (1, "size differs: is 6x5")):
        for read in (source.mask, source.size, source.image):
            with pytest.raises(BadSample, match=text):
                read(index)
    assert source.mask(2).shape == (12, 12)


def test_soft_edges(tmp_path):
    masks = {}
    for stem, mask in some(0, 255, side=8).items():
        masks[stem] = np.asarray(
            Image.fromarray(mask * 0 + 255 * (np.arange(8) > 3).astype(np.uint8)).resize((400, 400))
        )
    assert len(np.unique(masks["x0"])) > 20
    with pytest.raises(BadData, match="soft edges: .*resize masks with nearest neighbour"):
        opened(write(tmp_path, masks))


def test_too_many_classes(tmp_path):
    masks = {f"x{n}": np.arange(300, dtype=np.uint16).reshape(15, 20) for n in range(3)}
    with pytest.raises(BadData, match=r"the masks hold 299 values \(0, 1, .*\), at most 255 are possible"):
        opened(write(tmp_path, masks))  # 255 is ignored
    write(tmp_path / "b", {name: mask % 256 for name, mask in masks.items()})
    with pytest.raises(BadData, match="soft edges"):  # as a photo has them, unless all have names
        opened(tmp_path / "b")
    (tmp_path / "b" / "classes.txt").write_text("".join(f"class {number}\n" for number in range(255)))
    source = opened(tmp_path / "b")
    assert source.values == tuple(range(255)) and source.mask(0).max() == IGNORED


def test_one_class_is_none(tmp_path):
    with pytest.raises(BadData, match="the masks hold 0 alone, 2 classes are needed"):
        opened(write(tmp_path, some(0)))


def test_colours_that_a_table_lacks(tmp_path):
    colours = np.asarray([(0, 0, 0), (255, 0, 0), (0, 1, 255)], np.uint8)
    write(tmp_path, {name: colours[mask] for name, mask in some(0, 1, 2).items()})
    (tmp_path / "class_dict.csv").write_text("name,r,g,b\nsky,0,0,0\ntree,255,0,0\n")
    with pytest.raises(
        BadData, match=r"class_dict.csv lacks the colours #0001ff; .* \(images: x0.png, x1.png and 3 more\)"
    ):
        opened(tmp_path)


def test_values_that_only_a_test_split_has(data, tmp_path):
    LAYOUTS["split_inside"](data, tmp_path)
    file = tmp_path / "masks" / "test" / "test_0.png"
    mask = np.array(Image.open(file))
    mask[0, 0] = 9
    Image.fromarray(mask).save(file)
    assert opened(tmp_path).values == (0, 1, 2, 3)
    with pytest.raises(
        BadData, match=r"unknown values: .*the values 9, which no mask of train and val has \(test_0.png\)"
    ):
        opened(tmp_path, "test")


def test_colours_that_only_a_test_split_has(data, tmp_path):
    LAYOUTS["named_folders"](data, tmp_path)
    file = tmp_path / "test_labels" / "test_1_L.png"
    mask = np.array(Image.open(file))
    mask[0, :2] = (2, 2, 0), (2, 3, 0)
    Image.fromarray(mask).save(file)
    text = "has the colours #020200, #020300, which no mask of train and val has (test_1_L.png)"
    with pytest.raises(BadData, match=re.escape(text)):
        opened(tmp_path, "test")


def test_boxes_are_not_outlines(data, tmp_path):
    LAYOUTS["coco"](data, tmp_path / "coco")
    file = tmp_path / "coco" / "annotations" / "instances_train.json"
    content = json.loads(file.read_text())
    content["annotations"][0]["segmentation"] = []
    file.write_text(json.dumps(content))
    with pytest.raises(BadData, match=r"1 of 18 objects have no outline \(segmentation\), those of train_0.png"):
        opened(tmp_path / "coco")
    source = opened(tmp_path / "coco", skips_missing=True)
    with pytest.raises(BadSample, match="no outline"):
        source.mask(0)
    LAYOUTS["yolo"](data, tmp_path / "yolo")
    (tmp_path / "yolo" / "train" / "labels" / "train_1.txt").write_text("0 0.5 0.5 0.2 0.2")
    with pytest.raises(BadSample, match=r"object 1 of .*train_1.txt is a box, expected its outline"):
        opened(tmp_path / "yolo")


@pytest.mark.parametrize(
    ("outline", "text"),
    [
        ([[1, 2, 3, 4, "a", 6]], "a polygon"),
        ([[1, 2, 3, 4, 1e400, 6]], "a polygon"),
        ({"size": [1, 1], "counts": [1]}, "an outline of size"),
        ({"size": None, "counts": [-1, 2]}, "run lengths"),
        ({"size": None, "counts": [10**7]}, "run lengths"),
        ({"size": None, "counts": "zzzzzzzzzzzzzzzz"}, "run lengths"),
        ({"size": None, "counts": "\u20ac"}, "run lengths"),
        ("polygon", "expected polygons or run lengths"),
    ],
)
def test_outlines_that_are_wrong(data, tmp_path, outline, text):
    LAYOUTS["coco"](data, tmp_path)
    file = tmp_path / "annotations" / "instances_train.json"
    content = json.loads(file.read_text())
    image = content["images"][0]
    if isinstance(outline, dict) and outline["size"] is None:
        outline = outline | {"size": [image["height"], image["width"]]}
    content["annotations"][0]["segmentation"] = outline
    file.write_text(json.dumps(content))
    with pytest.raises(BadSample, match=text):
        opened(tmp_path).mask(0)


def test_a_file_that_changes_is_noticed(data, tmp_path):
    LAYOUTS["coco"](data, tmp_path / "coco")
    source = opened(tmp_path / "coco")
    file = tmp_path / "coco" / "annotations" / "instances_train.json"
    file.write_text(file.read_text().replace('"images": [', '"images":    ['))
    with pytest.raises(BadSample, match="has changed since it was indexed"):
        source.mask(0)
    root = write(tmp_path / "pairs", some(0, 1))
    pairs = opened(root)
    Image.fromarray(np.full((12, 12), 7, np.uint8)).save(root / "masks" / Path(pairs.name(0)).name)
    with pytest.raises(BadSample, match="has other values than when it was indexed"):
        pairs.mask(0)


def test_pairs_in_one_folder_are_complete(data, tmp_path):
    LAYOUTS["roboflow"](data, tmp_path)
    os.remove(tmp_path / "train" / "train_0.jpg")
    os.remove(tmp_path / "train" / "train_1_mask.png")
    with pytest.raises(
        BadData, match="mask without an image: train_0_mask.png.*image without a mask: train/train_1.jpg"
    ):
        opened(tmp_path)


def test_without_a_test_split_it_is_said_what_one_looks_like(tmp_path):
    with pytest.raises(NoTestSplit, match="looked for a folder test beside train, test_masks beside train_masks"):
        opened(write(tmp_path, some(0, 1)), "test")


def test_a_list_of_images_without_masks_is_no_test_split(data, tmp_path):
    LAYOUTS["voc"](data, tmp_path)
    for entry in data["test"]:
        os.remove(tmp_path / "VOCdevkit" / "VOC2012" / "SegmentationClass" / f"{entry.stem}.png")
    with pytest.raises(NoTestSplit, match="none of the images that .*test.txt names has a mask"):
        opened(tmp_path, "test")
    assert len(opened(tmp_path)) == len(data["train"])


def test_other_recipes_say_what_they_found(data, tmp_path):
    LAYOUTS["split_outside"](data, tmp_path)
    with pytest.raises(UsageError, match="holds images with masks"):
        open_boxes("auto", str(tmp_path), "train")


@pytest.mark.parametrize("pattern", ["mask", "{}_{}"])
def test_patterns_that_are_none(tmp_path, pattern):
    with pytest.raises(UsageError, match="with one {}"):
        opened(write(tmp_path, some(0, 1)), mask_pattern=pattern)


def test_several_masks_of_one_image(tmp_path):
    write(tmp_path, some(0, 1), suffix="_mask")
    shutil.copy(tmp_path / "masks" / "x0_mask.png", tmp_path / "masks" / "x0_seg.png")
    with pytest.raises(BadData, match=r"x0_mask.png and x0_seg.png could be its mask; say which with --data.mask-patt"):
        opened(tmp_path)
    assert len(opened(tmp_path, "val", mask_pattern="{}_mask", split="all")) == 5


def test_of_several_masks_that_of_the_images_name_is_its_own():
    found = mask_places.paired(["x/a.jpg", "x/b.jpg"], ["x/a.png", "x/a_mask.png", "x/b_mask.png", "x/b_seg.png"])
    assert found.masks == {"x/a.jpg": "x/a.png"} and found.alone == []
    assert [(kind, name) for kind, name, _ in found.problems] == [("several masks of one image", "x/b.jpg")]
    found = mask_places.paired(["a.jpg", "b.jpg"], ["a.png", "c.png"])
    assert found.masks == {"a.jpg": "a.png"} and found.alone == ["b.jpg"]
    assert found.problems == [("mask without an image", "c.png", "no image has its name")]
    found = mask_places.paired(["x/a.jpg", "y/a.jpg"], ["z/a.png"])
    assert found.problems == [("several images of one mask", "z/a.png", "could be of x/a.jpg and y/a.jpg")]


def test_what_is_no_data_of_masks(tmp_path, data):
    with pytest.raises(UsageError, match="holds nothing that this recipe can read"):
        opened(tmp_path)
    for name in ("images", "other"):
        write(tmp_path / "x", some(0, 1), (name, name))
    with pytest.raises(UsageError, match="expected images/ with masks/"):
        opened(tmp_path / "x")


def test_values_of_a_mask_are_those_of_the_classes(tmp_path):
    def indices(values: object, known: tuple[int, ...], ignored: tuple[int, ...] = (), is_coloured: bool = False):
        found = np.asarray(values)
        if found.max() > 255:
            png16(tmp_path / "a.png", found.astype(np.uint16)[..., None])
        else:
            Image.fromarray(found.astype(np.uint8)).save(tmp_path / "a.png")
        return indices_in((tmp_path / "a.png").read_bytes(), "a", known, ignored, is_coloured)

    assert indices([[0, 7, 255]], (0, 7), (255,)).tolist() == [[0, 1, 255]]
    assert indices([[[0] * 3, [7] * 3]], (7, 0)).tolist() == [[1, 0]]  # grey that is stored as RGB
    assert indices([[0, 8]], (0, 7)) is None
    assert indices([[0, 300]], (0, 300)).tolist() == [[0, 1]]
    for beyond in (256, 257, 299, 301, 302):
        assert indices([[0, beyond]], (0, 300 if beyond > 257 else 7)) is None
    assert indices([[[1, 2, 3], [0, 0, 9]]], (0x010203, 9), (), True).tolist() == [[0, 1]]
    assert indices([[1, 2]], (0x020202, 0x010101), (), True).tolist() == [[1, 0]]


# The index


def test_masks_are_looked_at_once(tmp_path, settle, monkeypatch):
    from sightline.data.sources import mask_survey

    root = write(tmp_path / "data", some(0, 3, 255))
    settle(root)
    opener = Opener()
    looked = []
    look = mask_survey._look
    monkeypatch.setattr(mask_survey, "_look", lambda *words: looked.append(words) or look(*words))
    both = [opener.open(open_masks, "auto", str(root), split, SourceOptions()) for split in ("train", "val")]
    assert len(looked) == 5
    again = opened(root)
    assert len(looked) == 5 and again.fingerprint == both[0].fingerprint
    for file in root.rglob(".sightline-index-*"):
        file.write_bytes(file.read_bytes()[:-3])  # damaged
    assert opened(root).values == (0, 3) and len(looked) == 10
    os.utime(root / "masks" / "x0.png")
    opened(root)
    assert len(looked) == 15
    assert index_files.load(root / "masks", "masks-images", "another key") is None


@pytest.mark.parametrize("folder", ["masks", "images"])
def test_names_may_lie_beside_the_masks_or_the_images_however_deep_they_are(tmp_path: Path, folder: str):
    """Further below the folder of both than a file of other data would be looked for."""
    root = write(tmp_path, some(0, 1))
    (root / folder / "classes.txt").write_text("sky\ntree\n")
    assert opened(tmp_path).classes == ("sky", "tree")


@pytest.mark.parametrize(
    ("masks", "images", "expected"),
    [
        ("d/masks", "d/images", ["d/masks", "d/images", "d"]),
        ("d/masks/train", "d/images/train", ["d/masks/train", "d/images/train", "d"]),
        ("d/a/masks/train", "d/images", ["d/a/masks/train", "d/images"]),  # too far apart to be one's own
        ("d/train/masks", "d/train/images", ["d/train/masks", "d/train/images", "d/train", "d"]),
        ("d/all", "d/all", ["d/all"]),
        ("d/val", "d/val", ["d/val", "d"]),
    ],
)
def test_class_names_may_lie_in_these_folders(tmp_path: Path, masks: str, images: str, expected: list[str]):
    found = mask_classes.table_folders([(tmp_path / masks, tmp_path / images)] * 2)
    assert [path.relative_to(tmp_path).as_posix() for path in found] == expected
