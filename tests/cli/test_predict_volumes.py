"""`sightline predict` of NIfTI volumes and `sightline evaluate --labels`, as a user types them."""

import json
import shutil
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tiny import HERE

from sightline import api, cli, config
from sightline.errors import UsageError
from sightline.parts import DataSpec

RECIPE = '''
"""A thin network for hippocampi."""
from sightline.config import Recipe, TrainConfig
from sightline.data.segmentation import SegmentationData
from sightline.models.unet import UnetConfig
from sightline.tasks.segmentation import Segmentation
from sightline.train.optimizers import OptimizerConfig
from sightline.train.schedules import ScheduleConfig


def recipe():
    return Recipe(
        name="thin",
        model=UnetConfig(width=8, max_filters=16),
        data=SegmentationData(task="04", augment="off"),
        task=Segmentation(),
        optimizer=OptimizerConfig(kind="adamw", lr=2e-2),
        schedule=ScheduleConfig(kind="constant"),
        train=TrainConfig(epochs=8, global_batch=8, eval_every_epochs=8),
    )
'''
AFFINE = np.array([[-1.0, 0, 0, 40], [0, -1.0, 0, 30], [0, 0, 1.25, -12], [0, 0, 0, 1]])
SIDES = {f"hippo_{n:03d}": (24 + n, 36 - 2 * n, 9 + n) for n in range(5)}  # (x, y, z), all below the patch


def draw_case(folder: Path, case: str, sides: tuple[int, int, int], seed: int) -> None:
    """Two bright blobs in noise, in an empty border on one side of each axis."""
    draws = np.random.default_rng(seed)
    x, y, z = np.ogrid[tuple(slice(n) for n in sides)]
    middle = [n / 2 + shift for n, shift in zip(sides, draws.uniform(-2, 2, 3), strict=True)]
    squared = ((x - middle[0]) / 7) ** 2 + ((y - middle[1]) / 9) ** 2 + ((z - middle[2]) / 4) ** 2
    label = np.where(squared < 1, np.where(y < middle[1], 1, 2), 0).astype(np.uint8)
    image = draws.uniform(20, 60, sides) + 80 * (label == 1) + 150 * (label == 2)
    image[:2], image[:, :3], image[:, :, -1:] = 0, 0, 0
    for part, voxels in (("imagesTr", image.astype(np.float32)), ("labelsTr", label)):
        (folder / part).mkdir(parents=True, exist_ok=True)
        nibabel.save(nibabel.Nifti1Image(voxels, AFFINE), folder / part / f"{case}.nii.gz")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """raw/ (a folder of the Decathlon), data/ (prepared), thin.py and run/ (trained for seconds); for reading only."""
    home = tmp_path_factory.mktemp("volumes")
    raw = home / "Task04_Hippocampus"
    for seed, (case, sides) in enumerate(SIDES.items()):
        draw_case(raw, case, sides, seed)
    rows = [{"image": f"./imagesTr/{case}.nii.gz", "label": f"./labelsTr/{case}.nii.gz"} for case in SIDES]
    about = {"name": "Hippocampus", "modality": {"0": "MRI"}, "numTraining": len(rows), "training": rows}
    labels = {"0": "background", "1": "Anterior", "2": "Posterior"}
    (raw / "dataset.json").write_text(json.dumps({**about, "labels": labels, "numTest": 0, "test": []}))
    (home / "thin.py").write_text(RECIPE)
    prepared = ["--source", raw, "--out", home / "data", "--dim", 2, "--jobs", 1]
    assert cli.main(["prepare", "decathlon", *map(str, prepared)]) == 0
    flags = [f"--data.path={home / 'data'}", f"--run.out={home / 'run'}", *HERE]
    assert cli.main(["train", str(home / "thin.py"), *flags]) == 0
    return home


def with_recipe(home: Path) -> list[str]:
    return ["--recipe", str(home / "thin.py"), *HERE]


def voxels(path: Path) -> np.ndarray:
    return np.asarray(nibabel.load(path).dataobj)


def expected_probabilities(home: Path, case: str) -> np.ndarray:
    """(classes, depth, height, width) by hand: crop, z-score, every slice padded with zeros to the patch."""
    (path,) = (home / "run" / "checkpoints").glob((home / "run" / "checkpoints" / "best").read_text().strip())
    state = json.loads((path / "state.json").read_text())
    recipe, _ = config.of_stored(state["recipe"], str(home / "thin.py")).build()
    model = recipe.model.build(DataSpec.from_json(state["spec"]))
    model.load_state_dict(load_file(path / "model.safetensors"))
    scan = voxels(home / "Task04_Hippocampus" / "imagesTr" / f"{case}.nii.gz").T
    box = tuple(slice(at.min(), at.max() + 1) for at in np.nonzero(scan))
    inside = scan[box]
    normal = torch.from_numpy((inside - inside.mean()) / inside.std())[:, None]
    down, across = 56 - inside.shape[1], 40 - inside.shape[2]
    sides = (across // 2, across - across // 2, down // 2, down - down // 2)
    with torch.inference_mode():
        logits = model.eval()(torch.nn.functional.pad(normal, sides))
    logits = logits[:, :, sides[2] : 56 - sides[3], sides[0] : 40 - sides[1]]
    whole = np.full((3, *scan.shape), 1 / 3)
    whole[(slice(None), *box)] = logits.softmax(1).movedim(0, 1).numpy()
    return whole


def test_masks_and_probabilities_are_those_of_the_network(sightline, home: Path, tmp_path: Path):
    images = home / "Task04_Hippocampus" / "imagesTr"
    arguments = [images, "--out", tmp_path / "out", "--save-probabilities", *with_recipe(home)]
    code, out, err = sightline("predict", home / "run", *arguments)
    assert (code, err) == (0, "")
    document = json.loads((tmp_path / "out" / "predictions.json").read_text())
    assert [row["file"] for row in document["files"]] == [f"{case}.nii.gz" for case in SIDES]
    assert document["classes"] == ["background", "Anterior", "Posterior"] and document["model"] == "Unet"
    seen = 0
    for row, (case, sides) in zip(document["files"], SIDES.items(), strict=True):
        shares = np.load(tmp_path / "out" / f"{case}.npy", allow_pickle=False)
        assert shares.dtype == np.float32 and row["shape"] == list(reversed(sides)) and row["spacing"] == [1.25, 1, 1]
        np.testing.assert_allclose(shares.sum(0), 1, atol=1e-5)
        np.testing.assert_allclose(shares, expected_probabilities(home, case), atol=1e-4)
        mask = nibabel.load(tmp_path / "out" / f"{case}.nii.gz")
        np.testing.assert_array_equal(mask.affine, AFFINE)
        np.testing.assert_array_equal(np.asarray(mask.dataobj).T, shares.argmax(0))
        counts = [int((shares.argmax(0) == number).sum()) for number in range(3)]
        assert [each["voxels"] for each in row["found"]] == counts
        assert [each["ml"] for each in row["found"]] == pytest.approx([n * 1.25 / 1000 for n in counts], abs=1e-6)
        seen += counts[1] + counts[2]
        with Image.open(tmp_path / "out" / row["picture"]) as image:
            assert image.format == "PNG" and min(image.size) > 200
    assert seen > 0, "a network that finds nothing tests nothing"
    lines = out.splitlines()
    assert len(lines) == 6 and lines[0].startswith("hippo_000.nii.gz  9x36x24  Anterior ")
    assert lines[-1].startswith("5 of 5 files predicted; ")


def test_masks_in_python_are_those_of_the_command(sightline, home: Path, tmp_path: Path):
    """Of a file, and of its voxels as an array, which the network of slices takes at any spacing."""
    case = home / "Task04_Hippocampus" / "imagesTr" / "hippo_002.nii.gz"
    arguments = [case, "--out", tmp_path / "out", "--save-probabilities", "--no-draw", *with_recipe(home)]
    assert sightline("predict", home / "run", *arguments)[0] == 0
    mask = voxels(tmp_path / "out" / "hippo_002.nii.gz").T
    shares = np.load(tmp_path / "out" / "hippo_002.npy", allow_pickle=False)
    image = np.random.default_rng(0).integers(1, 255, (20, 30), np.uint8)
    model = api.model(home / "run", "cpu", recipe_file=str(home / "thin.py"), flags=HERE)
    given = [case, voxels(case).T, image, Image.fromarray(image)]
    found = api.predict(model, given, probabilities=True)
    for each in found[:2]:
        np.testing.assert_array_equal(each.mask, mask)
        np.testing.assert_allclose(each.probabilities, shares, rtol=0, atol=1e-6)  # other slices share a batch
        assert list(each.voxels.values()) == np.bincount(mask.reshape(-1), minlength=3).tolist()
        assert each.classes == model.classes == ("background", "Anterior", "Posterior")
    for each in found[2:]:
        assert each.mask.shape == (20, 30) and each.probabilities.shape == (3, 20, 30)
        np.testing.assert_array_equal(each.mask, found[2].mask)
    assert model.preprocess(case).shape[:1] == (1,) and api.predict(model, case)[0].probabilities is None
    with pytest.raises(UsageError, match=r"inputs\[0\] is an array of shape \(5,\) .*give numbers as"):
        api.predict(model, np.zeros(5))


def test_one_file_alone_with_workers_gives_the_same_mask(sightline, home: Path, tmp_path: Path):
    case = home / "Task04_Hippocampus" / "imagesTr" / "hippo_003.nii.gz"
    shutil.copy(case, tmp_path / "other.nii.gz")
    nibabel.save(nibabel.load(case), tmp_path / "plain.nii")
    files = [case, tmp_path / "other.nii.gz", tmp_path / "plain.nii"]
    flags = ["--no-draw", "--recipe", home / "thin.py", "--run.workers=1", *HERE[1:]]
    code, _, err = sightline("predict", home / "run", *files, "--out", tmp_path / "out", *flags)
    assert (code, err) == (0, "")
    names = ["hippo_003.nii.gz", "other.nii.gz", "plain.nii.gz"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [*names, "predictions.csv", "predictions.json"]
    for name in names:
        np.testing.assert_array_equal(
            voxels(tmp_path / "out" / name).T, expected_probabilities(home, "hippo_003").argmax(0)
        )


def test_a_folder_gives_each_volume_what_it_gets_alone(sightline, home: Path, tmp_path: Path):
    """Volumes of all sizes go through the network together; a broken one among fourteen loses only itself."""
    many = tmp_path / "many"
    for number in range(14):
        draw_case(many, f"hippo_{number:03d}", (15 + 7 * number % 40, 18 + 11 * number % 33, 5 + number % 13), number)
    scans = sorted((many / "imagesTr").iterdir())
    scans[7].write_bytes(scans[7].read_bytes()[:100])
    words = [home / "run", *with_recipe(home), "--no-draw"]
    code, _, err = sightline("predict", *words, many / "imagesTr", "--out", tmp_path / "together")
    assert code == 3 and "1 of 14 files cannot be read" in err and scans[7].name in err
    document = json.loads((tmp_path / "together" / "predictions.json").read_text())
    readable = [scan for scan in scans if scan != scans[7]]
    assert [row["path"] for row in document["files"]] == [str(scan) for scan in readable]
    assert [row["path"] for row in document["unreadable"]] == [str(scans[7])]
    for scan, row in list(zip(readable, document["files"], strict=True))[::3]:
        code, _, _ = sightline("predict", *words, scan, "--out", tmp_path / scan.name)
        (alone,) = json.loads((tmp_path / scan.name / "predictions.json").read_text())["files"]
        assert code == 0 and alone == row
        mask = (tmp_path / "together" / row["mask"]).read_bytes()
        assert mask == (tmp_path / scan.name / row["mask"]).read_bytes()


def test_bad_files_are_listed_and_the_rest_is_predicted(sightline, home: Path, tmp_path: Path):
    images = tmp_path / "in"
    shutil.copytree(home / "Task04_Hippocampus" / "imagesTr", images)
    (images / "bad.nii.gz").write_text("no volume")
    whole = (images / "hippo_001.nii.gz").read_bytes()
    (images / "hippo_001.nii.gz").write_bytes(whole[: len(whole) // 2])
    nibabel.save(nibabel.Nifti1Image(np.full((4, 4, 4), np.nan, np.float32), AFFINE), images / "nan.nii.gz")
    command = ["predict", home / "run", images, "--out", tmp_path / "out", "--no-draw", *with_recipe(home)]
    code, out, err = sightline(*command)
    assert code == 3 and "error: 3 of 7 files cannot be read" in err and "4 of 7 files predicted" in out
    document = json.loads((tmp_path / "out" / "predictions.json").read_text())
    assert [row["file"] for row in document["unreadable"]] == ["bad.nii.gz", "hippo_001.nii.gz", "nan.nii.gz"]
    assert not (tmp_path / "out" / "bad.nii.gz").exists()
    assert sightline(*command, "--data.on-bad-sample=skip")[0] == 0


def test_predict_refuses_what_it_cannot_mean(sightline, home: Path, tmp_path: Path):
    case = home / "Task04_Hippocampus" / "imagesTr" / "hippo_000.nii.gz"
    before = case.read_bytes()
    for arguments, message in (
        (["--out", tmp_path / "out", "--top", 3], "--top 3: every voxel gets its most probable class"),
        (["--out", case.parent], "would replace"),
    ):
        code, _, err = sightline("predict", home / "run", case, *arguments, *with_recipe(home))
        assert code == 2 and message in err, err
    assert case.read_bytes() == before and not (tmp_path / "out").exists()


def dice_by_hand(masks: Path, labels: Path, cases: list[str]) -> np.ndarray:
    """(cases, classes)"""
    rows = []
    for case in cases:
        found, truth = voxels(masks / f"{case}.nii.gz"), voxels(labels / f"{case}.nii.gz")
        sizes = [((found == n).sum() + (truth == n).sum(), ((found == n) & (truth == n)).sum()) for n in (1, 2)]
        rows.append([2 * shared / size if size else 1.0 for size, shared in sizes])
    return np.array(rows)


def test_a_run_is_scored_against_label_files(sightline, home: Path, tmp_path: Path):
    raw = home / "Task04_Hippocampus"
    out = ["--run.out", tmp_path / "scores"]
    code, told, err = sightline("evaluate", home / "run", "--labels", raw, *with_recipe(home), *out)
    assert (code, err) == (0, "")
    (folder,) = (tmp_path / "scores").iterdir()
    assert folder.name.startswith("predictions-ckpt-")
    scores = json.loads((folder / "scores-labels.json").read_text())
    names = [row["name"] for row in scores["tables"]["volumes"]]
    assert len(names) == 1 and names[0] in SIDES  # of five volumes, fold 0 holds out one
    dice = dice_by_hand(folder, raw / "labelsTr", names)
    assert dice.mean() > 0.5, "a network that finds nothing tests nothing"
    assert scores["values"]["dice"] == pytest.approx(dice.mean()) and scores["checkpoint"].startswith(str(home))
    assert f"mean dice: {dice.mean():.4f} - L1 {dice[0, 0]:.4f} L2 {dice[0, 1]:.4f}" in told.splitlines()
    assert (folder / f"{names[0]}.png").is_file()  # the worst case, with its label
    # The same masks as a folder, and the same number as on prepared slices: here the patch holds all of a volume.
    code, again, err = sightline("evaluate", folder, "--labels", raw / "labelsTr")
    assert (code, err) == (0, "") and f"mean dice: {dice.mean():.4f} - " in again
    assert sightline("evaluate", home / "run", *with_recipe(home), "--run.out", tmp_path / "prepared")[0] == 0
    (prepared,) = (tmp_path / "prepared").glob("scores-ckpt-*.json")
    assert json.loads(prepared.read_text())["values"]["dice"] == pytest.approx(dice.mean(), abs=1e-3)
    # Another fold into the same folder leaves no mask of the first behind.
    code, _, err = sightline("evaluate", home / "run", "--labels", raw, *with_recipe(home), *out, "--data.fold", "1")
    masks = {path.name for path in folder.glob("*.nii.gz")}
    assert code == 0 and len(masks) == 1 and f"{names[0]}.nii.gz" not in masks


def test_cases_without_files_are_named(sightline, home: Path, tmp_path: Path):
    shutil.copytree(home / "Task04_Hippocampus", tmp_path / "raw")
    for path in (tmp_path / "raw" / "labelsTr").iterdir():
        path.unlink()
    command = ["evaluate", home / "run", "--labels", tmp_path / "raw", *with_recipe(home)]
    code, _, err = sightline(*command, "--run.out", tmp_path / "out")
    assert code == 3 and "the label of 1 of the 1 cases of the val split: hippo_" in err
    (tmp_path / "empty").mkdir()
    code, _, err = sightline("evaluate", home / "run", "--labels", tmp_path / "empty", *with_recipe(home))
    assert code == 2 and "holds no dataset.json and no images beside labels" in err
    assert not (tmp_path / "out").exists()


def test_networks_of_volumes_answer_at_the_spacing_of_the_file(sightline, home: Path, tmp_path: Path):
    """They see 1 mm, the files have slices 1.25 mm apart: sizes come back exactly, and places do."""
    raw = home / "Task04_Hippocampus"
    prepared = ["--source", raw, "--out", tmp_path / "data", "--dim", 3, "--jobs", 1]
    assert sightline("prepare", "decathlon", *prepared)[0] == 0
    deep = ["--data.dim=3", "--model.width=2", "--train.global-batch=2", "--train.epochs=1", "--task.overlap=0"]
    flags = [f"--data.path={tmp_path / 'data'}", f"--run.out={tmp_path / 'run'}", *deep, *HERE]
    code, _, err = sightline("train", home / "thin.py", *flags)
    assert code == 0, err
    code, out, err = sightline("evaluate", tmp_path / "run", "--labels", raw, *with_recipe(home))
    assert (code, err) == (0, "") and "mean dice: " in out
    (folder,) = (tmp_path / "run").glob("predictions-ckpt-*")
    (row,) = json.loads((folder / "predictions.json").read_text())["files"]
    mask = nibabel.load(folder / row["mask"])
    assert mask.shape == SIDES[row["file"]]
    np.testing.assert_array_equal(mask.affine, AFFINE)
