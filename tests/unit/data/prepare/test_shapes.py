"""`sightline prepare shapes`: equal bits, real formats, safe re-runs, and images that have to be learnt."""

import gzip
import json
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import nibabel
import numpy as np
import pytest
from PIL import Image, ImageDraw

from sightline.data.prepare.shapes import ShapesOptions, draw_parts, outlines, prepare
from sightline.data.prepare.shapes.images import CATEGORY_IDS, annotation, classification_image, detection_image
from sightline.data.prepare.shapes.nifti import encode_nifti
from sightline.data.prepare.shapes.volumes import volume
from sightline.errors import UsageError

TINY = {
    "train_per_class": 2,
    "val_per_class": 1,
    "train_pictures": 12,
    "val_pictures": 4,
    "train_volumes": 2,
    "test_volumes": 1,
}
SHEET = Path(__file__).parent / "shapes.png"
COUNTS = {"classification/train": 20, "classification/val": 10, "detection/train": 12, "detection/val": 4}


def silent(what: str, done: int, total: int) -> None:
    pass


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def write_times(folder: Path) -> dict[Path, int]:
    return {p: p.stat().st_mtime_ns for p in [folder, *folder.rglob("*")]}


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> ShapesOptions:
    return ShapesOptions(out=tmp_path_factory.mktemp("shapes") / "set", **TINY)


@pytest.fixture(scope="module")
def drawn(options) -> Path:
    draw_parts(options, silent, processes=1)
    return options.out


@pytest.fixture(scope="module", params=["train", "val"])
def coco(request, drawn) -> tuple[Path, dict]:
    content = json.loads((drawn / f"detection/annotations/instances_{request.param}2017.json").read_text())
    return drawn / f"detection/{request.param}2017", content


# Bits


@pytest.mark.slow  # test_imagenet.py compares files of several processes by default, test_processes.py their order
def test_two_processes_draw_the_same_bytes_as_one(drawn, options, tmp_path):
    draw_parts(replace(options, out=tmp_path), silent, processes=2)
    assert files(tmp_path) == files(drawn)


def test_another_seed_draws_other_images(drawn, options, tmp_path):
    draw_parts(replace(options, out=tmp_path, seed=1, only=("classification",)), silent, processes=1)
    mine, theirs = files(tmp_path / "classification"), files(drawn / "classification")
    assert mine.keys() == theirs.keys()
    assert all(mine[name] != theirs[name] for name in mine)


def test_a_larger_set_begins_with_the_images_of_a_smaller_one(drawn, options, tmp_path):
    draw_parts(replace(options, out=tmp_path, train_per_class=3, only=("classification",)), silent, processes=1)
    larger, smaller = files(tmp_path / "classification/train"), files(drawn / "classification/train")
    assert smaller.items() < larger.items()


def test_no_image_is_drawn_twice(drawn):
    images = [content for name, content in files(drawn).items() if name.endswith((".jpg", ".nii.gz"))]
    assert len(set(images)) == len(images)


def test_importing_the_command_needs_neither_torch_nor_tyro():
    check = "import sys, sightline.data.prepare.shapes; assert not {'torch', 'tyro', 'nibabel'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)


# Formats


def test_class_folders(drawn):
    for split, count in (("train", 2), ("val", 1)):
        folders = sorted((drawn / "classification" / split).iterdir())
        assert [folder.name for folder in folders] == sorted(CATEGORY_IDS)
        for folder in folders:
            assert [p.name for p in sorted(folder.iterdir())] == [f"{i:05d}.jpg" for i in range(count)]
            with Image.open(folder / "00000.jpg") as image:
                assert (image.format, image.mode, image.size) == ("JPEG", "RGB", (64, 64))


def test_coco_images_are_the_files_with_the_stated_size(coco):
    folder, content = coco
    assert {p.name for p in folder.iterdir()} == {image["file_name"] for image in content["images"]}
    assert len({image["id"] for image in content["images"]}) == len(content["images"])
    for image in content["images"]:
        assert image["file_name"] == f"{image['id']:012d}.jpg"
        with Image.open(folder / image["file_name"]) as opened:
            opened.load()
            assert opened.size == (image["width"], image["height"])


def test_coco_annotations_are_consistent(coco):
    _, content = coco
    assert {"info", "licenses", "images", "annotations", "categories"} == content.keys()
    images = {image["id"]: image for image in content["images"]}
    categories = {category["id"] for category in content["categories"]}
    assert len(categories) == 10 and categories != set(range(1, 11))
    assert len({a["id"] for a in content["annotations"]}) == len(content["annotations"]) > 0
    for a in content["annotations"]:
        assert a["category_id"] in categories and a["iscrowd"] == 0
        x, y, width, height = a["bbox"]
        image = images[a["image_id"]]
        assert x >= 0 and y >= 0 and x + width <= image["width"] + 1e-6 and y + height <= image["height"] + 1e-6
        assert width > 5 and height > 5 and 0 < a["area"] <= width * height
        points = np.array(a["segmentation"]).reshape(-1, 2)
        extent = [*points.min(axis=0), *(points.max(axis=0) - points.min(axis=0))]
        assert np.abs(np.array(extent) - a["bbox"]).max() <= 0.02


def test_some_coco_images_show_nothing_and_none_shows_more_than_six(drawn):
    content = json.loads((drawn / "detection/annotations/instances_train2017.json").read_text())
    shown = [sum(a["image_id"] == image["id"] for a in content["annotations"]) for image in content["images"]]
    assert min(shown) == 0 and 2 <= max(shown) <= 6
    assert sum(n == 0 for n in shown) == 1


def test_ids_differ_between_the_coco_splits(drawn):
    train, val = (
        json.loads((drawn / f"detection/annotations/instances_{split}2017.json").read_text())
        for split in ("train", "val")
    )
    for kind in ("images", "annotations"):
        assert not {entry["id"] for entry in train[kind]} & {entry["id"] for entry in val[kind]}


def test_decathlon_table_lists_exactly_the_files(drawn):
    task = drawn / "segmentation/Task01_Shapes"
    table = json.loads((task / "dataset.json").read_text())
    listed = [entry[kind] for entry in table["training"] for kind in ("image", "label")] + table["test"]
    assert all(name.startswith("./") for name in listed)
    assert sorted(task / name for name in listed) == sorted(task.rglob("*.nii.gz"))
    assert (table["numTraining"], table["numTest"]) == (len(table["training"]), len(table["test"])) == (2, 1)
    assert table["tensorImageSize"] == "4D" and table["modality"]["0"] == "FLAIR"
    assert list(table["labels"]) == ["0", "1", "2", "3"] and table["labels"]["0"] == "background"


def test_nibabel_reads_the_volumes_as_drawn(drawn):
    task = drawn / "segmentation/Task01_Shapes"
    for index, entry in enumerate(json.loads((task / "dataset.json").read_text())["training"]):
        image, label, affine = volume(0, "train", index)
        for name, expected in ((entry["image"], image), (entry["label"], label)):
            read = nibabel.load(task / name)
            assert read.get_data_dtype() == expected.dtype
            assert np.array_equal(np.asanyarray(read.dataobj), expected)
            np.testing.assert_allclose(read.affine, affine, atol=1e-5)
            spacing = np.abs(np.diag(affine)[:3])
            np.testing.assert_allclose(read.header.get_zooms()[:3], spacing, atol=1e-6)
            assert read.header.get_xyzt_units()[0] == "mm"


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.float32])
@pytest.mark.parametrize("shape", [(3, 4, 5), (3, 4, 5, 2)])
def test_nifti_writer_against_nibabel(tmp_path, dtype, shape):
    voxels = np.random.default_rng(0).uniform(0, 200, shape).astype(dtype)
    turn = np.array([[0.8, -0.6, 0, 5], [0.6, 0.8, 0, -7], [0, 0, 2.5, 9], [0, 0, 0, 1]])
    (tmp_path / "v.nii.gz").write_bytes(encode_nifti(voxels, turn, "v.nii.gz"))
    read = nibabel.load(tmp_path / "v.nii.gz")
    assert np.array_equal(np.asanyarray(read.dataobj), voxels) and read.get_data_dtype() == dtype
    np.testing.assert_allclose(read.affine, turn, atol=1e-6)
    theirs = nibabel.Nifti1Image(voxels, turn).header
    theirs.set_xyzt_units("mm")
    theirs.set_sform(turn, 1)
    theirs["descrip"], theirs["regular"], theirs["magic"] = "sightline prepare shapes", "r", "n+1"
    theirs["vox_offset"], theirs["scl_slope"], theirs["scl_inter"] = 352, 1, 0
    raw = gzip.decompress((tmp_path / "v.nii.gz").read_bytes())
    ours = nibabel.Nifti1Header(raw[:348])
    for name in theirs:
        if not name.startswith(("q", "pixdim")):  # of the other way to give the geometry, which is not used
            np.testing.assert_array_equal(ours[name], theirs[name], name)
    np.testing.assert_allclose(ours["pixdim"][1:], [1, 1, 2.5, 1, 1, 1, 1], atol=1e-6)
    assert ours["qform_code"] == 0 and raw[348:352] == bytes(4)


def test_nifti_writer_refuses_what_it_cannot_store():
    with pytest.raises(TypeError, match="float64"):
        encode_nifti(np.zeros((2, 2, 2)), np.eye(4), "v.nii.gz")
    with pytest.raises(ValueError, match="3D or 4D"):
        encode_nifti(np.zeros((2, 2), np.uint8), np.eye(4), "v.nii.gz")


# What is drawn


def test_a_seed_draws_what_it_drew_in_earlier_versions():
    """The means of 8 x 8 parts of 60 images and two volumes: a set that is resumed or enlarged stays one set.

    The sheet was looked at before it was stored; `python FILE` of this file draws it again.
    """
    with Image.open(SHEET) as stored:
        difference = np.abs(sheet().astype(int) - np.asarray(stored))
    assert difference.max() <= 2, np.argwhere(difference.max(axis=2) > 2)[:10] // 8


def sheet() -> np.ndarray:
    shown = [classification_image(0, "train", name, index) for index in range(4) for name in CATEGORY_IDS]
    shown += [detection_image(0, "val", index)[0] for index in range(20)]
    for image, label, _ in (volume(0, "train", 0), volume(0, "test", 3)):
        seen = [image[..., channel].mean(axis=2) / 5 for channel in range(4)]
        seen += [(label == part).mean(axis=2) * 255 for part in range(4)]
        shown += [np.repeat(each[:, :, None], 3, axis=2) for each in (*seen, *[np.zeros((8, 8))] * 2)]
    rows = [np.concatenate([in_parts(each) for each in shown[i : i + 10]], axis=1) for i in range(0, len(shown), 10)]
    return np.concatenate(rows).astype(np.uint8)


def in_parts(image: np.ndarray, parts: int = 8) -> np.ndarray:
    rows = [rows.mean(axis=0) for rows in np.array_split(image.astype(np.float64), parts)]
    columns = [columns.mean(axis=1) for columns in np.array_split(np.stack(rows), parts, axis=1)]
    return np.stack(columns, axis=1)


def test_lesions_are_nested_inside_the_brain():
    for index in range(6):
        image, label, _ = volume(3, "train", index)
        assert image.shape == (*label.shape, 4)
        assert set(np.unique(label)) == {0, 1, 2, 3}
        brain = image.any(axis=3)
        assert 0.2 < brain.mean() < 0.6 and not label[~brain].any()
        assert (image[brain] > 0).all()
        whole, core, enhancing = label >= 1, label >= 2, label >= 3
        assert whole.sum() > core.sum() > enhancing.sum() >= 8
        for axis in range(3):
            # Neither side of an enhancing voxel lies outside the lesion: the core's shell is in between.
            a, b = np.moveaxis(label, axis, 0)[:-1], np.moveaxis(label, axis, 0)[1:]
            assert not ((a == 3) & (b == 0)).any() and not ((a == 0) & (b == 3)).any()


def test_channels_distinguish_different_parts():
    image, label, _ = volume(0, "train", 0)
    healthy = (label == 0) & image.any(axis=3)
    brightness = np.array([image[mask].mean(axis=0) for mask in (healthy, label == 1, label == 2, label == 3)])
    flair, _, t1gd, _ = (brightness / brightness[0]).T
    assert flair[1] > 1.3, "edema is bright in FLAIR"
    assert t1gd[3] > 1.3 > 1 > t1gd[2], "only the enhancing part is bright in t1gd"


@pytest.mark.parametrize("name", list(CATEGORY_IDS))
def test_pixels_agree_with_the_polygon(name):
    """Against Pillow's polygon fill at eight times the size, an independent rasteriser."""
    rng = np.random.default_rng(1)
    outline = outlines.clipped(outlines.moved(outlines.pose(rng, name, 22.0), 24.0, 28.0), 64, 52)
    patch = outlines.rasterise(outline, 64, 52)
    coverage, distance = np.zeros((64, 52)), np.full((64, 52), 9.0)
    coverage[patch.window], distance[patch.window] = patch.coverage, patch.distance
    points = outlines.polygon(outline)
    large = Image.new("L", (52 * 8, 64 * 8))
    ImageDraw.Draw(large).polygon([tuple(p * 8 - 0.5) for p in points], fill=1)
    reference = np.asarray(large).reshape(64, 8, 52, 8).mean(axis=(1, 3))
    assert np.abs(coverage - reference).mean() < 0.01
    assert ((coverage > 0.9) | (distance > -1.5)).all() and ((coverage < 0.1) | (distance < 1.5)).all()
    assert abs(coverage.sum() - outlines.area(points)) < 0.02 * outlines.area(points)


def test_boxes_follow_the_whole_outline_and_end_at_the_borders():
    """The extent of the outline alone decides, whatever is drawn over the object."""
    checked = 0
    for index in range(12):
        pixels, objects = detection_image(5, "train", index)
        height, width = pixels.shape[:2]
        for shown in objects:
            left, top, right, bottom = outlines.extent(shown.outline)
            assert 0 <= left < right <= width and 0 <= top < bottom <= height
            written = annotation(shown, 1, 1)
            np.testing.assert_allclose(written["bbox"], [left, top, right - left, bottom - top], atol=0.02)
            x, y = np.reshape(written["segmentation"], (-1, 2)).T  # box and area are of the polygon as it is written
            assert written["bbox"] == [round(v, 2) for v in (x.min(), y.min(), np.ptp(x), np.ptp(y))]
            assert abs(abs(x @ np.roll(y, -1) - y @ np.roll(x, -1)) / 2 - written["area"]) < 0.0051
            checked += 1
    assert checked > 15


@pytest.mark.slow  # test_a_seed_draws_what_it_drew_in_earlier_versions notices any change of the drawings
def test_a_linear_classifier_on_pixels_fails():
    """Ridge regression to the classes and the nearest class mean both stay below one in two."""
    names, per_class = list(CATEGORY_IDS), {"train": 40, "val": 12}
    pixels, classes = {}, {}
    for split, count in per_class.items():
        drawn = [classification_image(0, split, name, i)[::2, ::2] for name in names for i in range(count)]
        pixels[split] = np.stack(drawn).reshape(len(drawn), -1) / 255
        classes[split] = np.repeat(np.arange(len(names)), count)
    mean = pixels["train"].mean(axis=0)
    x, held_out = pixels["train"] - mean, pixels["val"] - mean
    targets = np.eye(len(names))[classes["train"]]
    weights = x.T @ np.linalg.solve(x @ x.T + 100 * np.eye(len(x)), targets)
    linear = ((held_out @ weights).argmax(axis=1) == classes["val"]).mean()
    centroids = np.stack([x[classes["train"] == c].mean(axis=0) for c in range(len(names))])
    distance = ((held_out[:, None] - centroids) ** 2).sum(axis=2)
    nearest = (distance.argmin(axis=1) == classes["val"]).mean()
    assert linear < 0.5 and nearest < 0.5


# Calling it again


def test_progress_and_counts(options, tmp_path):
    calls = []
    counts = prepare(replace(options, out=tmp_path), lambda *call: calls.append(call))
    assert counts.items() >= COUNTS.items()
    assert counts["segmentation/train"] == 2 and counts["segmentation/test"] == 1
    assert counts["detection/train objects"] > 12
    for part, total in (("classification", 30), ("detection", 16), ("segmentation", 3)):
        done = [call[1] for call in calls if call[0] == f"writing {part}"]
        assert done == sorted(done) and (done[0], done[-1]) == (0, total)
        assert {call[2] for call in calls if call[0] == f"writing {part}"} == {total}


def test_second_call_does_nothing(drawn, options):
    before = write_times(drawn)
    first = draw_parts(options, silent, processes=1)
    assert prepare(options, lambda *call: pytest.fail(f"drew again: {call}")) == first
    assert write_times(drawn) == before
    assert not list(drawn.rglob(".prepare"))


@pytest.mark.parametrize("change", [{"seed": 1}, {"train_per_class": 3}, {"val_pictures": 5}, {"test_volumes": 2}])
def test_other_options_are_refused(drawn, options, change):
    before = write_times(drawn)
    (field, value), *_ = change.items()
    with pytest.raises(UsageError, match=f"{field}={getattr(options, field)}, now it is {value}; choose another --out"):
        prepare(replace(options, **change), silent)
    assert write_times(drawn) == before


def test_parts_can_be_added_later(drawn, options, tmp_path):
    for part in ("segmentation", "classification", "detection"):
        counts = prepare(replace(options, out=tmp_path, only=(part,)), silent)
        assert {name.split("/")[0] for name in counts} == {part}
    assert files(tmp_path) == files(drawn)


def test_an_interrupted_draw_is_resumed_and_gives_the_same_bytes(drawn, options, tmp_path):
    def interrupt(what, done, total):
        if what == "writing detection" and done > 0:
            raise KeyboardInterrupt

    again = replace(options, out=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        draw_parts(again, interrupt, processes=1)
    assert (tmp_path / "classification/shapes.json").exists() and not (tmp_path / "detection/shapes.json").exists()
    with pytest.raises(UsageError, match="seed=0"):
        prepare(replace(again, seed=1), silent)
    [first, *_] = sorted((tmp_path / "detection/train2017").iterdir())
    before = first.stat().st_ino  # drawing it again would make another file
    steps = []
    prepare(again, lambda what, done, total: steps.append((what, done)))
    assert {what for what, _ in steps} == {"writing detection", "writing segmentation"} and steps[0][1] == 10
    assert files(tmp_path) == files(drawn) and first.stat().st_ino == before


def test_what_an_earlier_version_left_is_kept_or_drawn_again(drawn, options, tmp_path):
    """It drew each part under a hidden name, with a summary and another lock beside the parts."""
    again = replace(options, out=tmp_path)
    shutil.copytree(drawn / "classification", tmp_path / "classification")
    (tmp_path / ".detection.drawing" / "train2017").mkdir(parents=True)
    (tmp_path / ".detection.drawing" / "train2017" / "000000000001.jpg").write_bytes(b"half")
    (tmp_path / ".shapes.lock").touch()
    before = write_times(tmp_path / "classification")
    prepare(again, silent)
    (tmp_path / ".shapes.lock").unlink()
    assert files(tmp_path) == files(drawn) and write_times(tmp_path / "classification") == before


def test_a_folder_of_other_origin_is_left_alone(options, tmp_path):
    (tmp_path / "detection").mkdir()
    (tmp_path / "detection/mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="detection holds mine.txt, not written by this command"):
        prepare(replace(options, out=tmp_path, only=("detection",)), silent)
    assert files(tmp_path) == {"detection/mine.txt": b"mine", ".prepare.lock": b""}


@pytest.mark.parametrize("record", ["", "{", "[]", "{}", '{"counts": 3}', '{"counts": {"train": "many"}}'])
def test_a_record_that_is_not_ours_is_not_a_finished_part(drawn, options, tmp_path, record):
    shutil.copytree(drawn / "classification", tmp_path / "classification")
    (tmp_path / "classification/shapes.json").write_text(record)
    with pytest.raises(UsageError, match="classification holds shapes.json, train, val, not written by this command"):
        prepare(replace(options, out=tmp_path, only=("classification",)), silent)


def test_out_must_be_a_folder(options, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file is a file"):
        prepare(replace(options, out=tmp_path / "file"), silent)


AMOUNTS = [field.name for field in fields(ShapesOptions) if field.name not in ("out", "only", "seed")]


@pytest.mark.parametrize(
    "bad",
    [{"seed": -1}, {"seed": 2**63}, {"only": ()}, {"only": ("sound",)}, *({name: 0} for name in AMOUNTS)],
)
def test_options_that_cannot_work_are_refused_at_once(tmp_path, bad):
    with pytest.raises(UsageError, match=next(iter(bad))):
        ShapesOptions(out=tmp_path, **bad)


def test_the_smallest_options_and_the_largest_seed_are_taken(tmp_path):
    least = ShapesOptions(out=tmp_path, seed=2**63 - 1, **dict.fromkeys(AMOUNTS, 1))
    assert len(AMOUNTS) >= 6 and {getattr(least, name) for name in AMOUNTS} == {1}


if __name__ == "__main__":
    Image.fromarray(sheet()).save(SHEET)
