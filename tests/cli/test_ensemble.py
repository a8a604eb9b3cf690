"""`predict FOLDS INPUT` and largest-component post-processing of volumes, as a user types them."""

import json
import runpy
import shutil
from pathlib import Path

import nibabel
import numpy as np
import pytest
from scipy import ndimage

from sightline import api, cli
from sightline.data.segmentation import SegmentationData

VOLUMES = runpy.run_path(str(Path(__file__).with_name("test_predict_volumes.py")))
HERE = VOLUMES["HERE"]
CASES = {f"hippo_{n:03d}": (24 + n, 30 - n, 9 + n) for n in range(6)}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """raw/, data/ (prepared), thin.py, folds/ of two runs that learnt little, and new.nii.gz, which none has seen."""
    home = tmp_path_factory.mktemp("folds")
    raw = home / "Task04_Hippocampus"
    for seed, (case, sides) in enumerate(CASES.items()):
        VOLUMES["draw_case"](raw, case, sides, seed)
    VOLUMES["draw_case"](home / "new", "new", (26, 31, 10), 99)
    rows = [{"image": f"./imagesTr/{case}.nii.gz", "label": f"./labelsTr/{case}.nii.gz"} for case in CASES]
    about = {"name": "Hippocampus", "modality": {"0": "MRI"}, "numTraining": len(rows), "training": rows}
    labels = {"0": "background", "1": "Anterior", "2": "Posterior"}
    (raw / "dataset.json").write_text(json.dumps({**about, "labels": labels, "numTest": 0, "test": []}))
    (home / "thin.py").write_text(VOLUMES["RECIPE"])
    assert cli.main(["prepare", "decathlon", "--source", str(raw), "--out", str(home / "data"), "--jobs=1"]) == 0
    flags = [f"--data.path={home / 'data'}", f"--run.out={home / 'folds'}", *HERE, "--data.fold=all", "--data.folds=2"]
    assert cli.main(["train", str(home / "thin.py"), *flags, "--optimizer.lr=0.01", "--train.epochs=4"]) == 0
    return home


@pytest.fixture
def predict(home: Path, tmp_path: Path, capsys):
    """Predict the new case; return its probabilities, its mask and what was said."""

    def call(*words: str) -> tuple[np.ndarray, np.ndarray, str]:
        capsys.readouterr()
        out = tmp_path / "out"
        flags = ["--save-probabilities", "--no-draw", "--out", str(out), "--recipe", str(home / "thin.py"), *HERE]
        assert cli.main(["predict", *words, *flags]) == 0
        shares, mask = np.load(out / "new.npy"), np.asarray(nibabel.load(out / "new.nii.gz").dataobj).T
        shutil.rmtree(out)
        return shares, mask, capsys.readouterr().out

    return call


def largest_alone(mask: np.ndarray, number: int) -> np.ndarray:
    parts, count = ndimage.label(mask == number)
    sizes = ndimage.sum_labels(mask == number, parts, range(1, count + 1))
    return np.where((mask == number) & ~np.isin(parts, 1 + np.flatnonzero(sizes == sizes.max())), 0, mask)


def dice(mask: np.ndarray, label: np.ndarray, number: int) -> float:
    found, truth = mask == number, label == number
    return 2 * (found & truth).sum() / (found.sum() + truth.sum()) if (found | truth).any() else 1.0


def test_the_folder_of_all_folds_predicts_the_mean_of_its_runs(home: Path, predict):
    case = str(home / "new/imagesTr/new.nii.gz")
    alone = [predict(str(home / f"folds/fold-{fold}"), case)[0] for fold in range(2)]
    shares, mask, said = predict(str(home / "folds"), case)
    np.testing.assert_allclose(shares, (alone[0] + alone[1]) / 2, atol=1e-6)
    np.testing.assert_array_equal(mask, shares.argmax(0))
    assert "the probabilities of 2 runs are averaged" in said
    assert np.abs(alone[0] - alone[1]).max() > 0.01 and set(np.unique(mask)) > {0}
    found = api.predict(
        [home / "folds/fold-0", home / "folds/fold-1"], case, flags=HERE, recipe_file=str(home / "thin.py")
    )
    np.testing.assert_array_equal(found[0].mask, mask)


def test_post_processing_is_chosen_by_the_validation_cases_of_all_folds(home: Path, capsys, request):
    # Other tests predict with these folds, too.
    request.addfinalizer(lambda: (home / "folds/postprocessing.json").unlink(missing_ok=True))
    words = ["--choose-postprocessing", "--recipe", str(home / "thin.py"), *HERE]
    assert cli.main(["evaluate", str(home / "folds"), *words]) == 0
    document = json.loads((home / "folds/postprocessing.json").read_text())
    best = [json.loads((home / f"folds/fold-{fold}/scores-best.json").read_text()) for fold in range(2)]
    for number, row in enumerate(document["classes"]):  # as prepared: the scores of the folds, three volumes each
        assert row["dice"] == pytest.approx(np.mean([each["tables"]["classes"][number]["dice"] for each in best]))
    capsys.readouterr()
    assert cli.main(["evaluate", str(home / "folds"), *words, "--labels", str(home / "Task04_Hippocampus")]) == 0
    shown = capsys.readouterr().out
    document = json.loads((home / "folds/postprocessing.json").read_text())
    assert document["volumes"] == len(CASES) and len(document["checkpoints"]) == 2
    plain: dict[int, list[float]] = {1: [], 2: []}
    largest: dict[int, list[float]] = {1: [], 2: []}
    for fold in range(2):
        data = SegmentationData(path=str(home / "data"), task="04", fold=fold, folds=2).source("val")
        for case in (data.name(index) for index in range(len(data))):
            files = [home / "Task04_Hippocampus" / part / f"{case}.nii.gz" for part in ("imagesTr", "labelsTr")]
            label = np.asarray(nibabel.load(files[1]).dataobj).T
            run = home / f"folds/fold-{fold}"
            mask = api.predict(run, files[0], flags=HERE, recipe_file=str(home / "thin.py"))[0].mask
            for number in (1, 2):
                plain[number].append(dice(mask, label, number))
                largest[number].append(dice(largest_alone(mask, number), label, number))
    for number, row in enumerate(document["classes"], start=1):
        assert row["dice"] == pytest.approx(np.mean(plain[number]))
        assert row["dice_largest"] == pytest.approx(np.mean(largest[number]))
        assert row["largest"] == (row["dice_largest"] > row["dice"])
        verdict = "chosen" if row["largest"] else "not better"
        assert f"{row['class']:9}  {row['dice']:.4f}  {row['dice_largest']:.4f}  {verdict}" in shown
    assert plain != largest, "masks of one component test nothing"


def test_predict_keeps_the_largest_component_where_that_was_chosen(home: Path, predict):
    """The stored decision is what counts, so one is written here; the run of a fold has its own."""
    case, run = str(home / "new/imagesTr/new.nii.gz"), home / "folds/fold-0"
    before = predict(str(run), case)[1]
    rows = [{"class": "Anterior", "largest": True}, {"class": "Posterior", "largest": False}]
    (run / "postprocessing.json").write_text(json.dumps({"classes": rows}))
    try:
        _, mask, said = predict(str(run), case)
        np.testing.assert_array_equal(mask, largest_alone(before, 1))
        assert (mask != before).any(), "a mask of one component tests nothing"
        assert "only the largest connected component of Anterior is kept, as " in said
        _, mask, said = predict(str(run), case, "--no-postprocessing")
        assert (mask == before).all() and "largest connected" not in said
        # Of runs named one by one, what every one of them chose: the other has chosen nothing.
        assert "largest connected" not in predict(str(run), str(home / "folds/fold-1"), case)[2]
        (run / "postprocessing.json").write_text('{"classes": [{"class": "Liver", "largest": true}]}')
        words = ["predict", str(run), case, "--out", str(home / "none"), "--recipe", str(home / "thin.py"), *HERE]
        assert cli.main(words) == 3
    finally:
        (run / "postprocessing.json").unlink()


def test_labels_that_do_not_fit_choose_no_post_processing(home: Path, tmp_path: Path, capsys):
    words = ["--choose-postprocessing", "--recipe", str(home / "thin.py"), *HERE]
    raw = shutil.copytree(home / "Task04_Hippocampus", tmp_path / "raw")
    case = SegmentationData(path=str(home / "data"), task="04", fold=0, folds=2).source("val").name(0)
    label = raw / f"labelsTr/{case}.nii.gz"
    whole = nibabel.load(label)
    for values, said in (
        (np.asarray(whole.dataobj)[1:], "voxels and its label"),
        (np.full(whole.shape, 7), "holds a 7"),
    ):
        nibabel.save(nibabel.Nifti1Image(values.astype(np.uint8), whole.affine), label)
        assert cli.main(["evaluate", str(home / "folds/fold-0"), *words, "--labels", str(raw)]) == 3
        assert f"{case}: its " in (told := capsys.readouterr().err) and said in told
    for image in (raw / "imagesTr").iterdir():
        image.write_bytes(b"no scan")
    words += ["--data.on-bad-sample=skip"]
    assert cli.main(["evaluate", str(home / "folds/fold-0"), *words, "--labels", str(raw)]) == 3
    assert "not one volume of the val split could be read" in capsys.readouterr().err
    assert not (home / "folds/fold-0/postprocessing.json").exists()


def test_the_choice_for_all_folds_lies_where_the_user_says(home: Path, tmp_path: Path, capsys):
    words = ["--choose-postprocessing", "--labels", str(home / "Task04_Hippocampus"), "--recipe", str(home / "thin.py")]
    before = {path.name for path in (home / "folds").iterdir()}
    assert cli.main(["evaluate", str(home / "folds"), *words, *HERE, "--run.out", str(tmp_path / "a/b")]) == 0
    assert json.loads((tmp_path / "a/b/postprocessing.json").read_text())["volumes"] == len(CASES)
    assert f"wrote the choice to {tmp_path / 'a/b/postprocessing.json'}" in capsys.readouterr().out.replace("\n", "")
    del words[1:3]  # of prepared volumes too, whose Dice are no scores of the run
    assert cli.main(["evaluate", str(home / "folds"), *words, *HERE, "--run.out", str(tmp_path / "c")]) == 0
    said = capsys.readouterr().out.replace("\n", "")
    assert f"wrote the choice to {tmp_path / 'c/postprocessing.json'}" in said and "scores are in" not in said
    (tmp_path / "file").touch()
    assert cli.main(["evaluate", str(home / "folds"), *words, *HERE, "--run.out", str(tmp_path / "file/b")]) == 2
    assert "file/b cannot be written: Not a directory" in capsys.readouterr().err
    assert {path.name for path in (home / "folds").iterdir()} == before


@pytest.mark.parametrize("names", [[".."], [""], ["fold-0", ".."], ["../folds"], ["fold-0", "fold-0"], []], ids=str)
def test_a_document_of_folds_leads_nowhere_else(tmp_path: Path, capsys, names: list[str]):
    (tmp_path / "folds.json").write_text(json.dumps({"folds": [{"folder": name} for name in names]}))
    assert cli.main(["predict", str(tmp_path), "scan.nii.gz"]) == 3
    assert f"its folders are {names}" in capsys.readouterr().err


def test_all_checkpoints_of_all_folds_are_not_scored(home: Path, capsys):
    assert cli.main(["evaluate", str(home / "folds"), "--all"]) == 2
    assert "holds the runs of all folds" in capsys.readouterr().err
