"""Masks against label files: Dice and IoU of NumPy and torchmetrics; an error for everything that is not a pair."""

import json
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch

from sightline import api, cli
from sightline.errors import BadData, BadSample, UsageError
from sightline.inference import label_files
from sightline.inference.label_files import DOCUMENT_OF_SCORES, evaluate_folder

AFFINE = np.diag([-1.5, 0.75, 2.5, 1.0])
SIDES = (9, 7, 5)


def write(path: Path, voxels: np.ndarray, affine: np.ndarray = AFFINE) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(voxels.astype(np.uint8), affine), path)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Six cases of random classes 0..3, of which labels have a seventh; class 3 is absent here and there."""
    draws = np.random.default_rng(0)
    for number in range(7):
        truth = draws.integers(0, 4 if number % 3 else 3, SIDES)
        found = np.where(draws.random(SIDES) < 0.3, draws.integers(0, 4 if number % 2 else 3, SIDES), truth)
        write(tmp_path / "raw" / "labelsTr" / f"case{number}.nii.gz", truth)
        if number < 6:
            write(tmp_path / "masks" / f"case{number}.nii.gz", found)
    labels = {"0": "background", "1": "edema", "2": "core", "3": "enhancing"}
    (tmp_path / "raw" / "dataset.json").write_text(json.dumps({"labels": labels}))
    return tmp_path / "masks", tmp_path / "raw" / "labelsTr"


def voxels(path: Path) -> np.ndarray:
    return np.asarray(nibabel.load(path).dataobj)


def expected_iou(masks: Path, labels: Path, classes: int) -> np.ndarray:
    """(cases, classes - 1)"""
    rows = []
    for path in sorted(masks.glob("*.nii.gz")):
        masked = [(voxels(path) == n, voxels(labels / path.name) == n) for n in range(1, classes)]
        rows.append([(a & b).sum() / (a | b).sum() if (a | b).any() else 1.0 for a, b in masked])
    return np.array(rows)


def expected(masks: Path, labels: Path, classes: int) -> np.ndarray:
    """(cases, classes - 1)"""
    rows = []
    for path in sorted(masks.glob("*.nii.gz")):
        found, truth = voxels(path), voxels(labels / path.name)
        row = []
        for number in range(1, classes):
            size = (found == number).sum() + (truth == number).sum()
            row.append(2 * ((found == number) & (truth == number)).sum() / size if size else 1.0)
        rows.append(row)
    return np.array(rows)


def test_dice_of_every_case_and_class(folders, capsys):
    masks, labels = folders
    scores = evaluate_folder(masks, labels)
    dice = expected(masks, labels, 4)
    assert (dice == 1).any() and (dice == 0).any()  # both absent, and in one of them only
    means = dice.mean(0)
    iou = expected_iou(masks, labels, 4)
    by_class = iou.mean(0)
    sums = {"dice": means.mean(), "iou": by_class.mean(), "dice_sum": means.sum(), "samples": 6}
    assert scores.values == pytest.approx(sums)
    np.testing.assert_allclose([row["iou"] for row in scores.tables["classes"]], by_class)
    np.testing.assert_allclose([row["iou"] for row in scores.tables["volumes"]], iou.mean(1))
    assert [row["class"] for row in scores.tables["classes"]] == ["edema", "core", "enhancing"]
    np.testing.assert_allclose([row["dice"] for row in scores.tables["classes"]], means)
    by_case = scores.tables["volumes"]
    assert [row["name"] for row in by_case] == [f"case{n}" for n in range(6)]
    np.testing.assert_allclose([[row["L1"], row["L2"], row["L3"]] for row in by_case], dice)
    lowest = int(dice.mean(1).argmin())
    assert scores.worst[0]["name"] == f"case{lowest}"
    assert [row["dice"] for row in scores.worst] == sorted(row["dice"] for row in by_case)
    line = f"mean dice: {means.mean():.4f} - " + " ".join(f"L{n} {m:.4f}" for n, m in enumerate(means, start=1))
    missing = "1 of 7 labels have no mask: case6.nii.gz"
    other = f"mean iou: {by_class.mean():.4f} - " + " ".join(f"L{n} {m:.4f}" for n, m in enumerate(by_class, start=1))
    assert capsys.readouterr().out.splitlines() == [missing, "scored cases: 6", line, other]
    written = json.loads((masks / DOCUMENT_OF_SCORES).read_text())
    assert written["values"] == scores.values and written["tables"] == scores.tables


def test_masks_may_bear_the_names_of_nnunets_images(folders):
    masks, labels = folders
    plain = evaluate_folder(masks, labels)
    first = masks / "case0.nii.gz"
    first.rename(named := masks / "case0_0000.nii.gz")
    assert evaluate_folder(masks, labels).values == plain.values
    assert evaluate_folder(masks, labels.parent).values == plain.values
    first.write_bytes(named.read_bytes())
    with pytest.raises(UsageError, match="case0.nii.gz and .*case0_0000.nii.gz are both masks of case0.nii.gz"):
        evaluate_folder(masks, labels)


def test_torchmetrics_agrees(folders):
    """Only with every class present in every case: there its rules and ours are the same."""
    from torchmetrics.segmentation import DiceScore, MeanIoU

    masks, labels = folders
    metric = DiceScore(num_classes=4, include_background=False, average="none", input_format="index")
    for path in sorted(masks.glob("*.nii.gz")):
        pair = [torch.from_numpy(voxels(each).astype(np.int64))[None] for each in (path, labels / path.name)]
        metric.update(*pair)
    found = [row["dice"] for row in evaluate_folder(masks, labels).tables["classes"]]
    np.testing.assert_allclose(found[:2], metric.compute()[:2].numpy(), atol=1e-6)
    for path in sorted(masks.glob("*.nii.gz")):
        case = path.name.removesuffix(".nii.gz")
        pair = [torch.from_numpy(voxels(each).astype(np.int64))[None] for each in (path, labels / path.name)]
        mean = MeanIoU(num_classes=4, include_background=False, per_class=True, input_format="index")(*pair)
        [row] = [row for row in evaluate_folder(masks, labels).tables["volumes"] if row["name"] == case]
        if (expected_iou(masks, labels, 4)[int(case[4:])] < 1).all():  # torchmetrics leaves out what is nowhere
            assert row["iou"] == pytest.approx(float(mean.mean()), abs=1e-6)


def test_probabilities_count_by_their_largest(folders):
    masks, labels = folders
    scores = evaluate_folder(masks, labels)
    for path in masks.glob("*.nii.gz"):
        classes = voxels(path).T
        shares = np.random.default_rng(1).uniform(0, 0.4, (4, *classes.shape)).astype(np.float32)
        np.put_along_axis(shares, classes[None].astype(np.int64), 0.5, axis=0)
        np.save(masks / path.name.replace(".nii.gz", ".npy"), shares)
        if path.name != "case0.nii.gz":  # beside a mask, the mask counts
            path.unlink()
    np.save(masks / "case0.npy", np.zeros((4, 1, 1, 1), np.float32))
    assert evaluate_folder(masks, labels.parent) == scores  # the folder above labelsTr is understood too


def test_names_come_from_the_predictions_or_nowhere(folders):
    masks, labels = folders
    (masks / "predictions.json").write_text(json.dumps({"classes": ["bg", "a", "b", "c", "d"]}))
    scores = evaluate_folder(masks, labels)
    assert [row["class"] for row in scores.tables["classes"]] == ["a", "b", "c", "d"]
    assert scores.tables["classes"][3]["dice"] == 1  # nowhere, and nobody says so
    (masks / "predictions.json").write_text("[{")
    (labels.parent / "dataset.json").write_text('{"labels": {"1": "one", "7": "seven"}}')
    scores = evaluate_folder(masks, labels)
    assert [row["class"] for row in scores.tables["classes"]] == ["L1", "L2", "L3"]


def test_files_without_a_partner_are_named(folders):
    masks, labels = folders

    def message() -> str:
        with pytest.raises(BadSample) as caught:
            evaluate_folder(masks, labels)
        assert caught.value.name == "case2" and caught.value.exit_code == 3
        return caught.value.reason

    mask, label = masks / "case2.nii.gz", labels / "case2.nii.gz"
    whole, truth = mask.read_bytes(), label.read_bytes()
    write(mask, np.zeros((9, 7, 6)))
    assert message() == "its mask has 6 x 7 x 9 voxels and its label 5 x 7 x 9; give its own label"
    write(mask, np.zeros(SIDES), np.diag([-1.5, 0.75, -2.5, 1.0]))
    assert "its mask lies at [[-1.5" in message()
    write(mask, np.full(SIDES, 4))
    assert message() == "its mask holds a 4; there are 4 classes, 0 to 3"
    mask.write_bytes(whole)
    write(label, np.full(SIDES, 9))
    assert message() == "its label holds a 9; there are 4 classes, 0 to 3"
    label.unlink()
    assert message().startswith("has no label: ")
    label.write_bytes(truth)
    mask.write_bytes(whole[:50])
    assert "case2.nii.gz" in message()
    mask.unlink()
    for content, part in (
        (np.zeros((4, 5, 7)), "holds float64 of shape (4, 5, 7); floats of (classes, depth, height, width)"),
        (np.zeros((4, 5, 7, 9), np.int64), "holds int64 of shape"),
        (np.full((4, 5, 7, 9), np.nan), "holds values that are not finite"),
        (np.zeros((300, 5, 7, 9)), "has 300 classes"),
        (np.array([{}], dtype=object), "cannot be read"),
    ):
        np.save(masks / "case2.npy", content)
        assert part in message()
    (masks / "case2.npy").write_bytes(b"no array")
    assert "cannot be read" in message()


def test_small_differences_of_affines_are_those_of_the_format(folders):
    masks, labels = folders
    before = evaluate_folder(masks, labels)
    for path in masks.glob("*.nii.gz"):
        write(path, voxels(path), AFFINE * (1 + 1e-6))
    assert evaluate_folder(masks, labels) == before


def test_folders_that_hold_nothing(tmp_path: Path, folders):
    masks, labels = folders
    (tmp_path / "none").mkdir()
    with pytest.raises(UsageError, match=r"holds no file that ends in \.nii\.gz, \.nii, \.npy"):
        evaluate_folder(tmp_path / "none", labels)
    with pytest.raises(UsageError, match="is not a folder; give one that holds CASE.nii.gz"):
        evaluate_folder(masks, tmp_path / "missing")
    with pytest.raises(UsageError, match="is not a run, so there is no recipe for --data.path x"):
        api.evaluate_labels(str(masks), str(labels), ["--data.path", "x"])


def test_the_command(folders, capsys):
    masks, labels = folders
    assert cli.main(["evaluate", str(masks), "--labels", str(labels)]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    dice = expected(masks, labels, 4)
    assert lines[0].startswith(f"mean dice: {dice.mean():.4f} - L1 ") and len(lines) == 6
    iou = expected_iou(masks, labels, 4)
    assert lines[1].startswith(f"mean iou: {iou.mean():.4f} - L1 ")
    of_first = ["dice", f"{dice[:, 0].mean():.4f}", "iou", f"{iou[:, 0].mean():.4f}"]
    assert lines[2].split() == ["edema", "label", "L1", *of_first]
    assert lines[5].startswith("  lowest: case") and lines[5].count(",") == 4
    assert cli.main(["evaluate", str(masks), "--labels", str(labels), "--all"]) == 2
    (labels / "case1.nii.gz").unlink()
    assert cli.main(["evaluate", str(masks), "--labels", str(labels)]) == 3
    assert "error: case1: has no label" in capsys.readouterr().err
    assert cli.main(["evaluate", str(masks / "gone"), "--labels", str(labels)]) == 4


def test_a_label_is_known_by_nnunets_name_of_its_image(tmp_path: Path):
    known = {"case": tmp_path / "elsewhere.nii.gz"}
    assert label_files._label_of(tmp_path, "case_0000", known) == label_files._label_of(tmp_path, "case", known)
    with pytest.raises(BadSample, match="has no label: .*other_0000.nii.gz does not exist; add it or remove the mask"):
        label_files._label_of(tmp_path, "other_0000", known)
    with pytest.raises(UsageError, match="is not a folder; give one that holds CASE.nii.gz for every CASE"):
        label_files._label_of(tmp_path / "none", "other", known)


def test_without_a_case_there_is_no_score():
    with pytest.raises(BadData, match="not one case could be compared; fix the files that are listed above"):
        label_files.scores_of([], ["background", "organ"])


@pytest.mark.parametrize(
    ("document", "numbered", "names"),
    [
        (["a", "b"], None, ["a", "b"]),
        (["a"], None, []),
        (["a", 1], {"0": "x", "1": "y"}, ["x", "y"]),
        (None, {"x": 0, "y": 1}, ["x", "y"]),
        (None, {"0": "x", "2": "y"}, []),
        (None, {"0": "x"}, []),
        (None, ["x", "y"], []),
    ],
)
def test_classes_are_named_by_the_predictions_or_else_by_the_data(tmp_path: Path, document, numbered, names):
    (tmp_path / "masks").mkdir()
    (tmp_path / "data" / "labelsTr").mkdir(parents=True)
    if document:
        (tmp_path / "masks" / label_files.DOCUMENT).write_text(json.dumps({"classes": document}))
    if numbered:
        (tmp_path / "data" / "dataset.json").write_text(json.dumps({"labels": numbered}))
    assert label_files._class_names(tmp_path / "masks", tmp_path / "data" / "labelsTr") == names
