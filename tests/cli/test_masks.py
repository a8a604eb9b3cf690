"""Segmentation data in every layout, as a user types it: prepared, trained on for two steps, scored and predicted."""

import json
import runpy
import shlex
from collections.abc import Callable
from pathlib import Path

import nibabel
import numpy as np
import pytest
from PIL import Image
from tiny import HERE

from sightline.drawing.slices import outline_colour

MADE = runpy.run_path(str(Path(__file__).resolve().parents[1] / "unit/data/prepare/raw_layouts.py"))
PREPARE = ("prepare", "decathlon")
TINY = ["--model.width=4", "--train.global-batch=2", "--train.max-steps=2", "--train.epochs=1", "--data.folds=2", *HERE]


def described(root: Path) -> Path:
    """A description of two folders that lie apart."""
    MADE["folders"](root / "a", images="scans", labels="drawn", end="_seg")
    (root / "drawn").symlink_to(root / "a" / "drawn")
    file = root / "mine.yaml"
    file.write_text("kind: volumes\ntrain: {images: a/scans, labels: drawn}\nclasses: [background, left, right]\n")
    return file


LAYOUTS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "decathlon": (
        MADE["decathlon"],
        "the Decathlon's layout: 4 volumes with labels, channels T0, classes background, ",
    ),
    "nnunet": (
        lambda root: MADE["nnunet"](root, channels=2),
        "nnU-Net v2's layout: 4 volumes with labels, channels T0, T1, classes background, one, two\n",
    ),
    "folders": (
        lambda root: MADE["folders"](root, end="_seg"),
        "pairs of the same name in images and masks: 4 volumes with labels, classes background, class 1, class 2; "
        "classes by the labels' values; each volume is scaled by its own mean; ",
    ),
    "imagesTr": (
        lambda root: MADE["folders"](root, images="imagesTr", labels="labelsTr", ct=True),
        "pairs of the same name in imagesTr and labelsTr: 4 volumes with labels, classes background, class 1, class 2; "
        "classes by the labels' values; CT (values of -500 and below in all of the first 4 volumes); ",
    ),
    "yaml": (described, "pairs of the same name in scans and drawn: 4 volumes with labels, classes background, left, "),
    "masks": (
        MADE["pictures"],
        "pairs of the same name in images and masks: 5 images with labels, channels red, green, blue, classes "
        "background, class 1; 2 classes, 0 and 255 in the masks; each image is scaled by its own mean; ",
    ),
    "grey": (lambda root: MADE["pictures"](root, colours=1, scale=1), "classes by the masks' values"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_raw_data_are_refused_with_the_command_that_prepares_them(sightline, tmp_path: Path, layout: str):
    make, said = LAYOUTS[layout]
    source = make(tmp_path / "my data")
    before = {path: path.stat().st_mtime_ns for path in source.parent.rglob("*")}
    code, _, err = sightline("check", "demo_segmentation", "--data.path", source)
    assert code == 2 and f"{source} is not prepared; found " in err
    command = shlex.split(err.partition("`")[2].partition("`")[0])
    assert command == ["sightline", *PREPARE, "--source", str(source), "--out", f"{source.with_suffix('')}-prepared"]
    code, out, err = sightline(*command[1:-1], tmp_path / "data", "--jobs", 1)
    assert (code, err) == (0, "") and out.startswith("found ") and said in out
    assert {path: path.stat().st_mtime_ns for path in before} == before  # nothing is written among the user's files
    assert sightline("check", "demo_segmentation", "--data.path", tmp_path / "data", "--data.folds=2").code == 0


OTHERS = [pytest.param(layout, marks=pytest.mark.slow) for layout in LAYOUTS if layout != "masks"]


@pytest.mark.parametrize("layout", ["masks", *OTHERS])  # docs/reference/data_volumes.md has the folders
def test_every_layout_is_prepared_trained_on_and_scored(sightline, tmp_path: Path, layout: str):
    source, data, run = LAYOUTS[layout][0](tmp_path / "mine"), tmp_path / "data", tmp_path / "run"
    assert sightline(*PREPARE, "--source", source, "--out", data, "--jobs", 1).code == 0
    code, out, err = sightline("train", "demo_segmentation", "--data.path", data, "--run.out", run, *TINY)
    assert (code, err) == (0, "") and "finished: best dice " in out
    assert sightline("evaluate", run, *HERE).code == 0
    # Against the files as they were, whatever their names; again as a folder of masks.
    code, out, err = sightline("evaluate", run, "--labels", source, *HERE)
    assert (code, err) == (0, "") and "mean dice: " in out
    (folder,) = run.glob("predictions-ckpt-*")
    scores = json.loads((folder / "scores-labels.json").read_text())["values"]
    assert scores["samples"] == 2 + (layout in ("masks", "grey"))
    assert sightline("evaluate", folder, "--labels", source).code == 0
    assert json.loads((folder / "scores-labels.json").read_text())["values"] == scores


def test_nnunets_layout_gives_the_arrays_of_the_decathlons(sightline, tmp_path: Path):
    for name in ("decathlon", "nnunet"):
        source = MADE[name](tmp_path / name, channels=2)
        for dim in (2, 3):
            flags = ["--out", tmp_path / f"{name}-{dim}", "--dim", dim, "--jobs", 1]
            assert sightline(*PREPARE, "--source", source, *flags).code == 0
    for dim in (2, 3):
        arrays = [
            {path.name: path.read_bytes() for path in (tmp_path / f"{name}-{dim}").glob("*.npy")}
            for name in ("decathlon", "nnunet")
        ]
        assert len(arrays[0]) == 8 and arrays[0] == arrays[1]


def test_real_cases_give_the_same_arrays_in_every_layout(sightline, shared_data: Path, tmp_path: Path):
    given = shared_data / "Task04_Hippocampus"
    if not given.is_dir():
        pytest.skip("needs Task04_Hippocampus in ../shared/data, which is not part of the repository")
    about = json.loads((given / "dataset.json").read_text())
    cases = sorted(Path(pair["image"]).name.removesuffix(".nii.gz") for pair in about["training"])[:3]
    roots = {name: tmp_path / name for name in ("Task04_Hippocampus", "Dataset004_Hippocampus", "scans")}
    ends = {"Task04_Hippocampus": ("", ""), "Dataset004_Hippocampus": ("_0000", ""), "scans": ("", "-label")}
    for name, root in roots.items():
        for part, end in zip(("imagesTr", "labelsTr"), ends[name], strict=True):
            (root / part).mkdir(parents=True)
            for case in cases:
                (root / part / f"{case}{end}.nii.gz").symlink_to(given / part / f"{case}.nii.gz")
    pairs = [{"image": f"imagesTr/{case}.nii.gz", "label": f"labelsTr/{case}.nii.gz"} for case in cases]
    MADE["write_json"](roots["Task04_Hippocampus"], **{**about, "training": pairs, "test": []})
    labels = {name: int(number) for number, name in about["labels"].items()}
    MADE["write_json"](roots["Dataset004_Hippocampus"], channel_names={"0": "MRI"}, labels=labels, numTraining=3)
    found: dict[str, list[dict[str, bytes]]] = {"auto": [], "own": []}
    for name, root in roots.items():
        for task in ("own", "auto") if name != "scans" else ("own",):
            out = tmp_path / f"{name}-{task}"
            assert sightline(*PREPARE, "--source", root, "--out", out, "--task", task, "--jobs", 1)[0] == 0
            assert json.loads((out / "plan.json").read_text())["task"] == ("04" if task == "auto" else "own")
            found[task].append({path.name: path.read_bytes() for path in out.glob("*.npy")})
    for arrays in found.values():
        assert len(arrays[0]) == 6 and all(each == arrays[0] for each in arrays)


def test_images_with_masks_are_normalised_and_centred_by_their_definition(sightline, tmp_path: Path):
    source = MADE["pictures"](tmp_path / "cells")
    assert sightline(*PREPARE, "--source", source, "--out", tmp_path / "data", "--jobs", 1).code == 0
    plan = json.loads((tmp_path / "data" / "plan.json").read_text())
    height, width = plan["spec"]["size"]
    assert (height, width) == (48, 48)  # of sides up to 48, rounded up so that they can be halved
    for number in range(5):
        pixels, mask = MADE["photo"](number)
        expected = (pixels - pixels.mean((0, 1))) / pixels.std((0, 1))
        image, label = (np.load(tmp_path / "data" / f"p{number}_{part}.npy") for part in "xy")
        assert image.shape == (3, 1, height, width) and label.shape == (1, height, width)
        top, left = ((whole - side) // 2 for whole, side in zip((height, width), mask.shape, strict=True))
        inner = (slice(top, top + mask.shape[0]), slice(left, left + mask.shape[1]))
        np.testing.assert_allclose(image[:, 0, *inner], expected.transpose(2, 0, 1), atol=1e-4)
        np.testing.assert_array_equal(label[0, *inner], mask)
        assert label.sum() == mask.sum()


def test_the_dataset_json_that_is_written_names_classes_when_it_is_copied(sightline, tmp_path: Path):
    source = MADE["pictures"](tmp_path / "cells")
    flags = [*PREPARE, "--source", source, "--jobs", 1, "--out"]
    assert sightline(*flags, tmp_path / "a").code == 0
    written = (tmp_path / "a" / "dataset.json").read_text()
    (source / "dataset.json").write_text(written.replace("class 1", "nucleus"))
    code, out, _ = sightline(*flags, tmp_path / "b")
    assert code == 0 and "found the Decathlon's layout: 5 images with labels" in out and "background, nucleus" in out
    for path in (tmp_path / "a").glob("*.npy"):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """cells/ and run/, which has learnt them; for reading only."""
    from sightline import cli

    home = tmp_path_factory.mktemp("masks")
    MADE["pictures"](home / "cells", 6)
    prepare = ["prepare", "decathlon", f"--source={home / 'cells'}", f"--out={home / 'data'}", "--jobs=1"]
    assert cli.main(prepare) == 0
    flags = ["--train.epochs=12", "--train.global-batch=2", "--train.eval-every-epochs=12", "--model.width=4", *HERE]
    command = ["train", "demo_segmentation", f"--data.path={home / 'data'}", f"--run.out={home / 'run'}", *flags]
    assert cli.main(command) == 0
    return home


def test_predict_writes_masks_of_the_size_of_the_image_and_drawings(sightline, trained: Path, tmp_path: Path):
    grey = tmp_path / "grey.jpg"
    Image.fromarray(MADE["photo"](1, 1)[0]).save(grey)  # where three channels were learnt
    out = tmp_path / "out"
    code, said, err = sightline("predict", trained / "run", trained / "cells", grey, "--out", out, *HERE)
    assert (code, err) == (0, "") and "7 of 7 files predicted" in said and "only its images is taken" in said
    rows = {row["file"]: row for row in json.loads((out / "predictions.json").read_text())["files"]}
    scores = []
    for number in range(6):
        row, truth = rows[f"p{number}.png"], MADE["photo"](number)[1]
        with Image.open(out / row["mask"]) as mask, Image.open(out / row["picture"]) as drawing:
            assert mask.mode == "P" and drawing.mode == "RGB" and drawing.width > mask.width
            found = np.asarray(mask)
            assert (np.asarray(drawing) == outline_colour(1)).all(-1).any() == bool(found.any())
        assert row["mask"] == f"p{number}_mask.png" and found.shape == truth.shape and found.max() <= 1
        assert [each["voxels"] for each in row["found"]] == np.bincount(found.ravel(), minlength=2).tolist()
        assert row["found"][1]["percent"] == pytest.approx(100 * found.mean(), abs=1e-3)
        scores.append(2 * (found & truth).sum() / (found.sum() + truth.sum()))
    assert np.mean(scores) > 0.7, "a network that finds nothing tests nothing"
    code, said, err = sightline("evaluate", out, "--labels", trained / "cells")  # grey.jpg has no mask
    assert code == 3 and "grey: has no label" in err
    (out / "grey_mask.png").unlink()
    assert f"mean dice: {np.mean(scores):.4f} " in sightline("evaluate", out, "--labels", trained / "cells").out


def test_predict_of_images_refuses_what_it_cannot_mean(sightline, trained: Path, tmp_path: Path):
    (tmp_path / "in").mkdir()
    for name in ("a.png", "a.jpg"):
        Image.fromarray(MADE["photo"](0)[0]).save(tmp_path / "in" / name)
    command = ["predict", trained / "run", tmp_path / "in"]
    code, _, err = sightline(*command, "--out", tmp_path / "out", *HERE)
    assert code == 2 and "a.jpg and a.png would both become a_mask.png" in err
    scan = tmp_path / "scan.nii.gz"
    nibabel.save(nibabel.Nifti1Image(MADE["volume"](0)[0][..., 0], MADE["AFFINE"]), scan)
    code, _, err = sightline("predict", trained / "run", scan, "--out", tmp_path / "out", *HERE)
    assert code == 3 and "none of the 1 files could be predicted" in err


def test_predict_stacks_the_channels_of_a_case(sightline, tmp_path: Path):
    source = MADE["nnunet"](tmp_path / "raw", channels=2)
    assert sightline(*PREPARE, "--source", source, "--out", tmp_path / "data", "--jobs", 1).code == 0
    flags = ["--data.path", tmp_path / "data", "--run.out", tmp_path / "run", *TINY]
    assert sightline("train", "demo_segmentation", *flags).code == 0
    command = ["predict", tmp_path / "run", source, "--no-draw", *HERE, "--out"]
    code, said, err = sightline(*command, tmp_path / "out")
    assert (code, err) == (0, "") and "4 of 4 files predicted" in said
    names = sorted(path.name for path in (tmp_path / "out").glob("*.nii.gz"))
    assert names == [f"c{number}.nii.gz" for number in range(4)]
    # The same volumes with a fourth axis give the same masks.
    again = MADE["decathlon"](tmp_path / "again", channels=2)
    assert sightline("predict", tmp_path / "run", again, "--no-draw", *HERE, "--out", tmp_path / "b").code == 0
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_folder_of_other_dimensions_is_refused_with_both_remedies(sightline, tmp_path: Path):
    source = MADE["folders"](tmp_path / "mine")
    flags = ["--out", tmp_path / "deep", "--dim", 3, "--jobs", 1]
    assert sightline(*PREPARE, "--source", source, *flags).code == 0
    code, _, err = sightline("train", "demo_segmentation", "--data.path", tmp_path / "deep", *HERE)
    assert code == 3 and "give --data.dim 3 --data.task own, or prepare another folder with" in err
    assert "--dim 2`" in err
    code, _, err = sightline(
        "train", "demo_segmentation", "--data.path", source, "--data.dim=3", "--data.nvol=1", *HERE
    )
    assert code == 2 and f"--out {source}-prepared --dim 3`" in err and "--data.dim 3`" in err
