"""Predicted volumes: masks where their files have them, probabilities, millilitres; nothing of the user's is lost."""

import csv
import json
import os
import threading
import time
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from PIL import Image

from sightline.data.formats.nifti import read_scan
from sightline.data.volumes.geometry import Geometry, prepare_image, prepare_label
from sightline.data.volumes.inputs import VolumeFiles
from sightline.errors import UsageError
from sightline.inference import volume_files
from sightline.inference.reporter import PredictJob
from sightline.inference.volume_files import VolumePredictions
from sightline.parts import DataSpec, PredictOptions

CLASSES = ("background", "one", "two")
FLAT = DataSpec(CLASSES, 1, (16, 16), (), (), spacing=(1.0, 1.0))
DEEP = DataSpec(CLASSES, 1, (8, 8, 8), (), (), spacing=(1.0, 1.0, 1.0))
TURNED = np.array([[0, -1.5, 0, 40], [0.75, 0, 0, -30], [0, 0, 2.5, 12], [0, 0, 0, 1]])  # x runs along y


def write_pair(folder: Path, name: str = "case", sides=(20, 26, 9)) -> tuple[Path, np.ndarray]:
    """A scan with an empty border, and a label of (x, y, z), of which no axis mirrors another."""
    scan = np.zeros(sides, np.int16)
    scan[2:18, 3:24, 1:8] = np.random.default_rng(1).integers(1, 900, scan[2:18, 3:24, 1:8].shape)
    label = np.zeros(sides, np.uint8)
    label[4:9, 6:20, 2:6] = 1
    label[6:8, 8:12, 3:7] = 2
    label[15, 22, 1] = 2  # one voxel, far away
    image = nibabel.Nifti1Image(scan, TURNED)
    image.header.set_zooms((0.75, 1.5, 2.5))
    nibabel.save(image, folder / f"{name}.nii.gz")
    return folder / f"{name}.nii.gz", label


def perfect_logits(path: Path, label: np.ndarray, spec: DataSpec) -> torch.Tensor:
    """Return the logits of a network that knows the label, in the geometry that it sees."""
    scan = read_scan(path, "case")
    _, geometry = prepare_image(scan, spec, "case")
    known = prepare_label(np.ascontiguousarray(label.T), geometry, scan.spacing, spec)
    return torch.nn.functional.one_hot(torch.from_numpy(known).long(), len(CLASSES)).movedim(-1, 0)[None] * 8.0 - 3


def report(folder: Path, files: dict[str, Path], logits: dict[str, torch.Tensor], spec=FLAT, **options):
    """predictions.json, and the lines, of these logits."""
    lines: list[str] = []
    dataset = VolumeFiles(files, spec)
    reporter = VolumePredictions(PredictJob(folder, files, spec, PredictOptions(**options), lines.append))
    for index, name in enumerate(files):
        loaded = {key: torch.from_numpy(value)[None] for key, value in dataset.load(0, index).items()}
        reporter.add([name], {"logits": logits[name]}, dataset.finish(loaded, torch.float32))
    return reporter.write({"recipe": "r"}), lines


def test_results_that_are_a_pipe_are_not_waited_for(tmp_path: Path):
    path, label = write_pair(tmp_path)
    (tmp_path / "out").mkdir()
    os.mkfifo(tmp_path / "out" / "predictions.json")  # nobody writes to it: opening it would wait
    with pytest.raises(UsageError, match=r"predictions\.json is a device or a pipe"):
        report(tmp_path / "out", {"case.nii.gz": path}, {"case.nii.gz": perfect_logits(path, label, FLAT)})


def test_a_mask_lies_where_its_file_does(tmp_path: Path):
    path, label = write_pair(tmp_path)
    logits = perfect_logits(path, label, FLAT)
    padded = torch.nn.functional.pad(logits, (0, 5, 0, 2, 0, 1), value=99)  # as for a larger volume of the same run
    document, lines = report(tmp_path / "out", {"case.nii.gz": path}, {"case.nii.gz": padded})
    found = nibabel.load(tmp_path / "out" / "case.nii.gz")
    np.testing.assert_array_equal(np.asarray(found.dataobj), label)
    np.testing.assert_array_equal(found.affine, nibabel.load(path).affine)
    assert found.get_data_dtype() == np.uint8
    np.testing.assert_allclose(found.header.get_zooms(), (0.75, 1.5, 2.5))
    (row,) = document["files"]
    voxel = 0.75 * 1.5 * 2.5 / 1000
    ones, twos = int((label == 1).sum()), int((label == 2).sum())
    assert row == {
        "file": "case.nii.gz",
        "path": str(path),
        "shape": [9, 26, 20],
        "spacing": [2.5, 1.5, 0.75],
        "found": [
            {"class": "background", "id": 0, "voxels": label.size - ones - twos, "ml": row["found"][0]["ml"]},
            {"class": "one", "id": 1, "voxels": ones, "ml": pytest.approx(ones * voxel, abs=1e-6)},
            {"class": "two", "id": 2, "voxels": twos, "ml": pytest.approx(twos * voxel, abs=1e-6)},
        ],
        "mask": "case.nii.gz",
        "picture": "case.png",
    }
    assert lines == [f"case.nii.gz  9x26x20  one {ones * voxel:.3f} ml  two {twos * voxel:.3f} ml"]
    assert json.loads((tmp_path / "out" / "predictions.json").read_text()) == document
    assert document["classes"] == list(CLASSES) and document["unreadable"] == []
    with Image.open(tmp_path / "out" / "case.png") as image:
        assert image.format == "PNG" and image.width > 480
    written = ["case.nii.gz", "case.png", "predictions.csv", "predictions.json"]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == written
    with (tmp_path / "out" / "predictions.csv").open(newline="") as file:
        (line,) = csv.DictReader(file)
    assert list(line) == ["file", "mask", "one ml", "one voxels", "two ml", "two voxels"]
    assert (line["file"], line["mask"], line["one voxels"]) == (document["files"][0]["path"], "case.nii.gz", str(ones))
    assert float(line["two ml"]) == pytest.approx(twos * voxel, abs=1e-6)


def test_probabilities_of_every_voxel(tmp_path: Path):
    path, _ = write_pair(tmp_path)
    logits = torch.randn(1, 3, 7, 21, 16, generator=torch.Generator().manual_seed(1)) * 50  # of the box
    document, _ = report(tmp_path, {"c": path}, {"c": logits}, draws=False, probabilities=True)
    assert document["files"][0]["probabilities"] == "c.npy" and "picture" not in document["files"][0]
    found = np.load(tmp_path / "c.npy", allow_pickle=False)
    assert found.dtype == np.float32 and found.shape == (3, 9, 26, 20)
    np.testing.assert_allclose(found.sum(0), 1, atol=1e-6)
    inside = (slice(None), slice(1, 8), slice(3, 24), slice(2, 18))
    np.testing.assert_allclose(found[inside], logits[0].softmax(0).numpy(), atol=1e-6)
    outside = np.ones(found.shape[1:], bool)
    outside[inside[1:]] = False
    np.testing.assert_allclose(found[:, outside], 1 / 3)  # all classes are equal where nothing was looked at
    mask = np.asarray(nibabel.load(tmp_path / "c.nii.gz").dataobj).T
    np.testing.assert_array_equal(found.argmax(0), mask)
    assert not mask[outside].any()


def test_volumes_at_another_spacing_come_back_to_their_own(tmp_path: Path):
    path, _ = write_pair(tmp_path, sides=(60, 52, 20))
    scan = np.asarray(nibabel.load(path).dataobj).copy()
    scan[1:58, 2:50, 1:19] = 7
    nibabel.save(nibabel.Nifti1Image(scan, nibabel.load(path).affine), path)
    x, y, z = np.ogrid[:60, :52, :20]
    distance = ((x - 25) * 0.75) ** 2 + ((y - 30) * 1.5) ** 2 + ((z - 9) * 2.5) ** 2
    label = np.where(distance < 8**2, 2, np.where(distance < 15**2, 1, 0)).astype(np.uint8)
    logits = perfect_logits(path, label, DEEP)
    assert logits.shape[2:] == (45, 72, 42)  # the network sees voxels of 1 mm
    report(tmp_path / "out", {"case": path}, {"case": logits}, DEEP, draws=False)
    found = np.asarray(nibabel.load(tmp_path / "out" / "case.nii.gz").dataobj)
    for number in (1, 2):
        is_found, is_true = found == number, label == number
        assert 2 * (is_found & is_true).sum() / (is_found.sum() + is_true.sum()) > 0.94
        centres = [np.argwhere(each).mean(0) for each in (is_found, is_true)]
        np.testing.assert_allclose(*centres, atol=0.15)  # voxels: it is not shifted


@pytest.mark.parametrize(
    "fit", [0, pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
)
def test_so_many_volumes_are_written_at_once_as_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fit: int):
    files = {}
    for number in range(4):
        path, label = write_pair(tmp_path, f"case{number}")
        files[path.name] = path
    dataset = VolumeFiles(files, FLAT)
    reporter = VolumePredictions(PredictJob(tmp_path / "out", files, FLAT, PredictOptions(), lambda line: None))
    loaded = [dataset.load(0, number) for number in range(4)]
    batch = {key: torch.from_numpy(np.stack([each[key] for each in loaded])) for key in loaded[0]}
    logits = perfect_logits(path, label, FLAT).expand(4, -1, -1, -1, -1)
    monkeypatch.setattr(volume_files, "AT_ONCE_BYTES", fit * len(CLASSES) * label.size * 4)
    meet, counting, now = threading.Barrier(max(1, fit)), threading.Lock(), [0]
    seen, to_original = [], volume_files.to_original

    def watched(*given):
        with counting:
            now[0] += 1
            seen.append(now[0])
        meet.wait(30)
        time.sleep(0.02)
        whole = to_original(*given)
        with counting:
            now[0] -= 1
        return whole

    monkeypatch.setattr(volume_files, "to_original", watched)
    reporter.add(list(files), {"logits": logits}, dataset.finish(batch, torch.float32))
    assert len(seen) == 4 and max(seen) == max(1, fit)
    for path in files.values():
        np.testing.assert_array_equal(np.asarray(nibabel.load(tmp_path / "out" / path.name).dataobj), label)


def test_rows_without_a_file_are_passed_over(tmp_path: Path):
    path, _ = write_pair(tmp_path)
    reporter = VolumePredictions(PredictJob(tmp_path / "out", {"case": path}, FLAT, PredictOptions(), print))
    reporter.add([None], {"logits": torch.zeros(1, 3, 1, 1, 1)}, {})
    assert reporter.write({})["files"] == []
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["predictions.csv", "predictions.json"]
    assert (tmp_path / "out" / "predictions.csv").read_text() == "file,mask\n"


def test_a_file_that_has_changed_is_reported(tmp_path: Path):
    path, label = write_pair(tmp_path)
    dataset = VolumeFiles({"case": path}, FLAT)
    batch = dataset.finish({k: torch.from_numpy(v)[None] for k, v in dataset.load(0, 0).items()}, torch.float32)
    predictions = {"logits": perfect_logits(path, label, FLAT)}
    lines: list[str] = []
    reporter = VolumePredictions(PredictJob(tmp_path / "out", {"case": path}, FLAT, PredictOptions(), lines.append))
    write_pair(tmp_path, sides=(22, 26, 9))
    reporter.add(["case"], predictions, batch)
    path.write_text("gone")
    reporter.add(["case"], predictions, batch)
    reasons = [each["reason"] for each in reporter.write({})["unreadable"]]
    assert "has changed since it was predicted" in reasons[0] and "is not a NIfTI file" in reasons[1]
    assert not (tmp_path / "out" / "case.nii.gz").exists() and lines[0].startswith("warning: case cannot be read: ")


@pytest.mark.parametrize(
    ("files", "masks"),
    [
        (["a_0000.nii.gz", "b_0000.nii.gz"], ["a.nii.gz", "b.nii.gz"]),
        (["a_0000.nii.gz", "a_0001.nii.gz"], ["a_0000.nii.gz", "a_0001.nii.gz"]),
        (["a.nii.gz", "a_0000.nii.gz"], ["a.nii.gz", "a_0000.nii.gz"]),
    ],
)
def test_only_nnunets_number_of_the_one_channel_is_left_out(tmp_path: Path, files: list[str], masks: list[str]):
    path, label = write_pair(tmp_path)
    logits = perfect_logits(path, label, FLAT)
    document, _ = report(tmp_path / "out", dict.fromkeys(files, path), dict.fromkeys(files, logits), draws=False)
    assert [row["mask"] for row in document["files"]] == masks
    assert sorted(path.name for path in (tmp_path / "out").glob("*.nii.gz")) == masks


def test_files_of_the_user_are_never_written_over(tmp_path: Path):
    path, _ = write_pair(tmp_path)
    with pytest.raises(UsageError, match=r"would replace .*case\.nii\.gz; give another folder"):
        VolumePredictions(PredictJob(tmp_path, {"case.nii.gz": path}, FLAT, PredictOptions(), print))
    files = {"x.nii.gz": path, "x.nii": path}
    with pytest.raises(UsageError, match=r"x\.nii\.gz and x\.nii would both become x\.nii\.gz"):
        VolumePredictions(PredictJob(tmp_path / "out", files, FLAT, PredictOptions(), print))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("options", "flag"), [({"top": 3}, "--top 3"), ({"threshold": 0.5}, "--score-threshold 0.5")])
def test_what_belongs_to_images_is_refused(tmp_path: Path, options: dict, flag: str):
    with pytest.raises(UsageError, match=flag):
        VolumePredictions(PredictJob(tmp_path / "out", {}, FLAT, PredictOptions(**options), print))


def test_every_class_is_counted_and_the_largest_component_kept():
    scores = np.full((4, 1, 2, 5), -1.0, np.float32)
    numbers = np.array([[[1, 1, 0, 1, 0], [0, 0, 0, 2, 2]]])
    np.put_along_axis(scores, numbers[None], 3.0, axis=0)
    mask, counts = volume_files.mask_of(scores, ("none", "a", "b", "c"), ())
    assert mask.dtype == np.uint8 and mask.tolist() == numbers.tolist() and counts == [5, 3, 2, 0]
    mask, counts = volume_files.mask_of(scores, ("none", "a", "b", "c"), (1,))
    assert counts == [6, 2, 2, 0] and mask[0, 0].tolist() == [1, 1, 0, 0, 0]


def test_probabilities_are_a_softmax_and_equal_where_nothing_was_predicted():
    draws = np.random.default_rng(0).normal(size=(3, 2, 2, 3)).astype(np.float32) * 5
    geometry = Geometry((2, 2, 3), (0, 0, 1), (2, 2, 3), (2, 2, 2))
    shares = volume_files.probabilities(draws.copy(), geometry)
    expected = torch.from_numpy(draws).softmax(0).numpy()
    np.testing.assert_allclose(shares[..., 1:], expected[..., 1:], rtol=1e-6)
    assert (shares[..., 0] == np.float32(1 / 3)).all()


def test_a_line_has_millilitres_or_percent_of_every_class_but_the_background():
    found = [{"class": "none", "ml": 9.0}, {"class": "a", "ml": 1.23456}, {"class": "b", "percent": 45.678}]
    assert volume_files.as_line({"file": "a.nii", "shape": [2, 3, 4], "found": found}) == (
        "a.nii  2x3x4  a 1.235 ml  b 45.68 %"
    )
