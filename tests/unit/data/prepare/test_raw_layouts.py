"""Raw data for segmentation that cannot be prepared: what is said, and what to do about it."""

import json
import os
import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from sightline.data.prepare.decathlon import DecathlonOptions, prepare
from sightline.data.volumes.plan import read_plan
from sightline.errors import BadData, DiskFull, SightlineError, UsageError

MADE = runpy.run_path(str(Path(__file__).with_name("raw_layouts.py")))
save, volume, photo = (MADE[name] for name in ("save", "volume", "photo"))


def run(source, out, **options):
    return prepare(DecathlonOptions(source, out, jobs=1, **options), lambda what, done, total: None)


def edit(root: Path, **change) -> None:
    content = json.loads((root / "dataset.json").read_text())
    (root / "dataset.json").write_text(json.dumps({**content, **change}))


def save_image(path: Path, pixels: np.ndarray) -> None:
    Image.fromarray(pixels).save(path)


def set_value(root: Path, part: str, case: str, value: int) -> None:
    label = volume(1)[1]
    label[0, 0, 0] = value
    save(root / part / case, label)


def link_to_itself(path: Path, is_new: bool = False) -> None:
    if not is_new:
        path.unlink()
    path.symlink_to(path)


FOLDERS = {
    "no label": (
        lambda root: (root / "masks" / "c1.nii.gz").unlink(),
        "(?s)1 files are not part of a pair .*; add what is missing, or .*images/c1.nii.gz has no label in .*masks",
    ),
    "no image": (lambda root: (root / "images" / "c1.nii.gz").unlink(), r"masks/c1.nii.gz has no image"),
    "several": (
        lambda root: [(root / "images" / f"c{n}.nii.gz").rename(root / "images" / f"d{n}.nii.gz") for n in (0, 1)],
        "(?s)4 files .*d0.nii.gz has no label.*d1.nii.gz has no label.*masks/c0.nii.gz has no image",
    ),
    "one name twice": (
        lambda root: save(root / "images" / "c1.nii", volume(1)[0]),
        "images: c1.nii and c1.nii.gz have one name; remove all but one",
    ),
    "two labels of a name": (
        lambda root: save(root / "masks" / "c1.nii", volume(1)[1]),
        "masks: c1.nii and c1.nii.gz have one name",
    ),
    "two labels": (
        lambda root: save(root / "masks" / "c1_seg.nii.gz", volume(1)[1]),
        "masks: c1.nii.gz and c1_seg.nii.gz are both labels of c1; remove one",
    ),
    "other size": (
        lambda root: save(root / "masks" / "c1.nii.gz", volume(2)[1]),
        r"(?s)1 of 4 cases cannot.*move them out of their folders.*c1: masks/c1.nii.gz has the shape \(1, 3, 32, 32\)",
    ),
    "other place": (
        lambda root: save(root / "masks" / "c1.nii.gz", volume(1)[1], np.diag([1.0, -1.0, 1.25, 1])),
        "c1: masks/c1.nii.gz lies elsewhere than its image",
    ),
    "gap": (
        lambda root: set_value(root, "masks", "c1.nii.gz", 5),
        "masks: the labels contain the values 0, 1, 2, 5, but no 3; classes must",
    ),
    "nothing": (
        lambda root: [save(root / "masks" / f"c{n}.nii.gz", 0 * volume(n)[1]) for n in range(4)],
        "all labels are 0, so there is no class to learn",
    ),
    "loop": (lambda root: link_to_itself(root / "images" / "c1.nii.gz"), "c1: .*c1.nii.gz is not there"),
    "damaged": (lambda root: (root / "masks" / "c1.nii.gz").write_bytes(b"x" * 999), "c1: .*is not a NIfTI file"),
}


@pytest.mark.parametrize("what", FOLDERS)
def test_volumes_in_two_folders_that_cannot_be_used(tmp_path, what):
    change, said = FOLDERS[what]
    source = MADE["folders"](tmp_path / "mine")
    change(source)
    with pytest.raises(BadData, match=said):
        run(source, tmp_path / "out")
    assert not (tmp_path / "out" / "plan.json").exists()


def empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def other_labels(root: Path) -> None:
    empty(root / "masks")
    (root / "masks" / "a.txt").write_text("0 0.5 0.5 1 1")


def loop_of_folders(root: Path) -> None:
    empty(root / "images")
    (root / "images").rmdir()
    link_to_itself(root / "images", is_new=True)


USAGE = {
    "empty images": (
        lambda root: empty(root / "images"),
        r"images holds no images \(.nii.gz, .*; found there: nothing",
    ),
    "empty labels": (lambda root: empty(root / "masks"), r"masks holds no labels \(.nii.gz, .nii\) for .*: nothing"),
    "other labels": (other_labels, "masks holds no labels .* found there: files: 1 .txt"),
    "folders": (lambda root: (root / "labels").mkdir(), "several folders of labels: labels, masks; name one in a file"),
    "loop": (loop_of_folders, "holds no dataset.json and no images beside labels .*; found there: folders masks"),
}


@pytest.mark.parametrize("what", USAGE)
def test_folders_that_are_not_what_they_seem(tmp_path, what):
    change, said = USAGE[what]
    source = MADE["folders"](tmp_path / "mine")
    change(source)
    with pytest.raises(UsageError, match=said):
        run(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_listed(tmp_path, monkeypatch):
    source, scandir = MADE["folders"](tmp_path / "mine"), os.scandir

    def refuse(path="."):  # as without permission, which root always has
        if not isinstance(path, int) and Path(path) == source / "masks":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UsageError, match="masks cannot be listed: Permission denied; fix that, or give another folder"):
        run(source, tmp_path / "out")


NNUNET = {
    "channel": (
        lambda root: (root / "imagesTr" / "c1_0001.nii.gz").unlink(),
        BadData,
        "c1: c1_0001 of its 2 channels is missing; add it or remove the case",
    ),
    "channel too many": (
        lambda root: save(root / "imagesTr" / "c1_0002.nii.gz", volume(1)[0][..., 0]),
        BadData,
        "c1: c1_0002.nii.gz is beyond the 2 channels of dataset.json",
    ),
    "name": (
        lambda root: (root / "imagesTr" / "c1_0000.nii.gz").rename(root / "imagesTr" / "c1.nii.gz"),
        BadData,
        "c1.nii.gz: the name of a channel was expected, such as c1_0000",
    ),
    "grid": (
        lambda root: save(root / "imagesTr" / "c1_0001.nii.gz", volume(2)[0][..., 0]),
        BadData,
        "c1: c1_0001.nii.gz has 3 x 32 x 32 voxels or another place than c1_0000.nii.gz with 3 x 33 x 31",
    ),
    "pair": (lambda root: (root / "labelsTr" / "c1.nii.gz").unlink(), BadData, "c1_0000.nii.gz has no label"),
    "value": (
        lambda root: set_value(root, "labelsTr", "c1.nii.gz", 3),
        BadData,
        "(?s)take them out of dataset.json.*c1: a label of 3; the classes are 0 background, 1 one, 2 two",
    ),
    "number": (
        lambda root: edit(root, numTraining=5),
        BadData,
        "numTraining is 5, but imagesTr and labelsTr hold 4 cases; add the missing ones or correct the number",
    ),
    "regions": (
        lambda root: edit(root, labels={"background": 0, "whole": [1, 2], "core": 2}),
        BadData,
        r"'whole' is a region of several numbers \(\[1, 2\]\), which is not supported; give every number a name",
    ),
    "ignore": (
        lambda root: edit(root, labels={"background": 0, "a": 1, "ignore": 2}),
        BadData,
        "the label 'ignore' is not supported; label these voxels",
    ),
    "gap": (
        lambda root: edit(root, labels={"background": 0, "a": 2}),
        BadData,
        "labels is .* without gaps was expected",
    ),
    "text": (lambda root: edit(root, labels={"background": "0", "a": "1"}), BadData, "without gaps was expected"),
    "ending": (
        lambda root: edit(root, file_ending=".nrrd"),
        BadData,
        "file_ending is '.nrrd'; .nii.gz, .nii, .* are read, so convert the files",
    ),
    "no labels": (
        lambda root: (root / "labelsTr").rename(root / "labels"),
        BadData,
        "is nnU-Net v2's, but .*labelsTr is not a folder",
    ),
}


@pytest.mark.parametrize("what", NNUNET)
def test_nnunets_layout_that_cannot_be_used(tmp_path, what):
    change, kind, said = NNUNET[what]
    source = MADE["nnunet"](tmp_path / "Dataset007_Mine", channels=2)
    change(source)
    with pytest.raises(kind, match=said):
        run(source, tmp_path / "out")


IMAGES = {
    "jpeg": (
        lambda root: save_image(root / "masks" / "p1.jpg", photo(1)[1] * 255) or (root / "masks" / "p1.png").unlink(),
        "p1: .*p1.jpg is a mask stored as JPEG, which changes its numbers at edges; store masks as PNG",
    ),
    "jpeg called png": (
        lambda root: Image.fromarray(photo(1)[1] * 255).save(root / "masks" / "p1.png", format="JPEG"),
        "p1: .*p1.png is a mask stored as JPEG",
    ),
    "colours": (
        lambda root: save_image(root / "masks" / "p1.png", np.dstack([photo(1)[1] * 200] + [photo(1)[1]] * 2)),
        r"p1: .*is a mask of 2 colours \(\(0, 0, 0\), \(200, 1, 1\)\); the number of its class was expected",
    ),
    "size": (
        lambda root: save_image(root / "masks" / "p1.png", photo(2)[1]),
        r"p1: masks/p1.png has the shape \(1, 1, 42, 40\), its image \(3, 1, 39, 44\)",
    ),
    "soft edges": (
        lambda root: save_image(root / "masks" / "p1.png", photo(1)[1] * 200),
        "masks: the masks contain the values 0, 200, 255, but no 1; .*: renumber them",
    ),
    "16 bits": (
        lambda root: save_image(root / "masks" / "p1.png", photo(1)[1].astype(np.uint16) * 999),
        "is a mask with a 999; numbers from 0 to 255 were expected",
    ),
    "two images": (lambda root: save_image(root / "images" / "p1.jpg", photo(1)[0]), "p1.jpg and p1.png have one name"),
    "no mask": (lambda root: (root / "masks" / "p1.png").unlink(), "images/p1.png has no label"),
    "loop": (lambda root: link_to_itself(root / "masks" / "p1.png"), "p1: cannot be read: Too many levels of symbolic"),
    "black": (lambda root: save_image(root / "images" / "p1.png", photo(1)[0] * 0), "p1: has no voxel above 0"),
}


@pytest.mark.parametrize("what", IMAGES)
def test_images_with_masks_that_cannot_be_used(tmp_path, what):
    change, said = IMAGES[what]
    source = MADE["pictures"](tmp_path / "cells")
    change(source)
    with pytest.raises(BadData, match=said):
        run(source, tmp_path / "out")


def test_images_have_no_depth(tmp_path):
    with pytest.raises(UsageError, match="holds 2D images, which have no depth for --dim 3"):
        run(MADE["pictures"](tmp_path / "cells"), tmp_path / "out", dim=3)


def test_large_images_are_cut_to_their_centre_and_that_is_said(tmp_path, capsys):
    source = MADE["pictures"](tmp_path / "cells")
    image, mask = np.full((600, 530, 3), 9, np.uint8), np.zeros((600, 530), np.uint8)
    image[100:200] += 80
    mask[250:350, 200:300] = 255
    save_image(source / "images" / "p9.png", image)
    save_image(source / "masks" / "p9.png", mask)
    run(source, tmp_path / "out")
    height, width = read_plan(tmp_path / "out").spec.size
    assert f"1 of 6 images are larger than {height} x {width} pixels: training sees" in capsys.readouterr().out
    top, left = 300 - height // 2, 265 - width // 2
    expected = mask[top : top + height, left : left + width] // 255
    np.testing.assert_array_equal(np.load(tmp_path / "out" / "p9_y.npy")[0], expected)


def test_a_class_that_no_label_has_is_reported(tmp_path, capsys):
    source = MADE["nnunet"](tmp_path / "mine")
    edit(source, labels={"background": 0, "one": 1, "two": 2, "three": 3})
    for _ in range(2):  # also when nothing is left to do
        run(source, tmp_path / "out")
        assert "warning: no label has class 3 (three), so it cannot be learnt" in capsys.readouterr().out


def test_names_of_other_files_are_counted_not_read(tmp_path, capsys):
    source = MADE["folders"](tmp_path / "mine")
    for name in ("notes.txt", "preview.png", ".DS_Store"):
        (source / "images" / name).write_text("x")
    (source / "images" / "older").mkdir()
    run(source, tmp_path / "out")
    assert "ignored: 1 .txt, 1 .png" in capsys.readouterr().out
    assert [case.name for case in read_plan(tmp_path / "out").cases] == ["c0", "c1", "c2", "c3"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kind: coco\ntrain: {images: images, labels: masks}\n", "kind is 'coco'; .* `kind: volumes`"),
        ("kind: volumes\ntrain: images\n", "expected `train: {images: FOLDER, labels: FOLDER}`"),
        ("kind: volumes\ntrain: {images: images, labels: masks}\nval: {images: images, labels: masks}\n", "and no val"),
        ("kind: volumes\ntrain: {images: images, labels: images}\n", "is given for images and for labels; move"),
        ("kind: volumes\ntrain: {images: images, labels: a.json}\n", "a.json is not a folder; give one of images"),
        ("kind: volumes\ntrain: {images: none, labels: masks}\n", "none, which does not exist"),
        ("kind: volumes\ntrain: {images: images, labels: masks}\nclasses: [background, one]\n", "a label of 2; the cl"),
    ],
)
def test_descriptions_that_do_not_describe_volumes(tmp_path, text, said):
    source = MADE["folders"](tmp_path / "mine")
    (source / "a.json").write_text("{}")
    (source / "data.yaml").write_text(text)
    with pytest.raises(SightlineError, match=said):
        run(source / "data.yaml", tmp_path / "out")


def test_nothing_is_written_into_described_folders(tmp_path):
    source = MADE["folders"](tmp_path / "mine")
    (tmp_path / "data.yaml").write_text("kind: volumes\ntrain: {images: mine/images, labels: mine/masks}\n")
    with pytest.raises(UsageError, match="lies in .*images or around it"):
        run(tmp_path / "data.yaml", source / "images" / "out")


def test_a_survey_is_taken_once_and_again_when_files_change(tmp_path, monkeypatch):
    source = MADE["folders"](tmp_path / "mine")
    run(source, tmp_path / "out")
    plan = (tmp_path / "out" / "plan.json").read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr("sightline.data.prepare.decathlon.survey._look", None)
        assert run(source, tmp_path / "out")["made now"] == 0
    assert (tmp_path / "out" / "plan.json").read_bytes() == plan
    set_value(source, "masks", "c1.nii.gz", 3)
    with pytest.raises(UsageError, match="begun with spec.classes="):
        run(source, tmp_path / "out")


@pytest.mark.parametrize(("air", "is_ct"), [(-500, True), (-499, False)])
def test_volumes_of_a_ct_all_hold_air(tmp_path: Path, air: int, is_ct: bool, capsys: pytest.CaptureFixture[str]):
    source = MADE["folders"](tmp_path / "mine", ct=True)
    image = volume(1)[0][..., 0]
    image[0, 0, 0] = air
    save(source / "images" / "c1.nii.gz", image)
    run(source, tmp_path / "out")
    told = "CT (values of -500 and below in all of the first 4 volumes)"
    assert (told in " ".join("".join(capsys.readouterr()).split())) is is_ct
    assert (json.loads((tmp_path / "out" / "dataset.json").read_text())["modality"]["0"] == "CT") is is_ct


def test_cases_that_the_disk_has_no_room_for_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Four cases of (3, 34, 33) floats and labels, of which no byte is written."""
    source = MADE["folders"](tmp_path / "mine")
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10**6))
    with pytest.raises(DiskFull, match=r"out needs \d\.\d GB, .* has 0.0 GB free; make room"):
        run(source, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.npy"))


def test_channels_in_files_of_their_own_need_no_dataset_json(tmp_path):
    source = MADE["nnunet"](tmp_path / "mine", channels=2)
    run(source, tmp_path / "named")
    (source / "dataset.json").unlink()
    run(source, tmp_path / "found")
    plan = read_plan(tmp_path / "found")
    assert plan.spec.channels == 2 and plan.spec.classes == ("background", "class 1", "class 2")
    for case in plan.cases:
        for file in (case.image, case.label):
            assert (tmp_path / "found" / file).read_bytes() == (tmp_path / "named" / file).read_bytes()
    # What is written for the user is nnU-Net's own form, and is read as such.
    (source / "dataset.json").write_bytes((tmp_path / "found" / "dataset.json").read_bytes())
    run(source, tmp_path / "again")
    assert read_plan(tmp_path / "again").spec == plan.spec


def test_numbered_cases_of_one_channel_are_not_channels(tmp_path):
    """scan_0000 and scan_0001 are two cases where labels bear these names, too."""
    for number in range(3):
        image, label = volume(number)
        save(tmp_path / "mine" / "images" / f"scan_{number:04d}.nii.gz", image[..., 0])
        save(tmp_path / "mine" / "labels" / f"scan_{number:04d}.nii.gz", label)
    assert run(tmp_path / "mine", tmp_path / "out")["made now"] == 3
    assert [case.name for case in read_plan(tmp_path / "out").cases] == [f"scan_{n:04d}" for n in range(3)]


def test_nnunets_first_version_lists_cases_without_their_channels(tmp_path, capsys):
    """Its dataset.json is the Decathlon's, its files are CASE_0000.nii.gz, CASE_0001.nii.gz, ..."""
    source = MADE["decathlon"](tmp_path / "four axes", channels=2)
    run(source, tmp_path / "expected")
    old = MADE["nnunet"](tmp_path / "Task500_Mine", channels=2)
    (old / "dataset.json").write_bytes((source / "dataset.json").read_bytes())
    run(old, tmp_path / "out")
    assert "found nnU-Net v1's layout: 4 volumes with labels, channels T0, T1" in capsys.readouterr().out
    for path in (tmp_path / "expected").glob("*.npy"):
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()
    (old / "imagesTr" / "c1_0001.nii.gz").unlink()
    with pytest.raises(BadData, match=r"c1: .*c1_0001.nii.gz is not there"):
        run(old, tmp_path / "out")


def test_an_unfinished_folder_is_not_taken_for_raw_data(tmp_path):
    run(MADE["folders"](tmp_path / "mine"), tmp_path / "out")
    (tmp_path / "out" / "plan.json").unlink()  # killed, with a dataset.json of an earlier start
    with pytest.raises(UsageError, match="out holds no dataset.json and no images beside labels"):
        run(tmp_path / "out", tmp_path / "again")
