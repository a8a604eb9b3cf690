"""NIfTI files as whole volumes: prepared like the data of a run, whatever their sizes."""

from dataclasses import replace
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch

from sightline.config import Run
from sightline.data.formats.nifti import read_scan
from sightline.data.loading.loader import BadSamples, Loader
from sightline.data.loading.order import EvalOrder
from sightline.data.volumes import inputs
from sightline.data.volumes.files import case_name
from sightline.data.volumes.geometry import prepare_image
from sightline.data.volumes.inputs import VolumeFiles
from sightline.data.volumes.layouts import labelled_files
from sightline.errors import BadData, BadSample, UsageError
from sightline.hardware import devices
from sightline.hardware.world import World
from sightline.parts import DataSpec

FLAT = DataSpec(("background", "one", "two"), 1, (16, 16), (), (), spacing=(1.0, 1.0))
DEEP = DataSpec(("background", "one"), 2, (8, 8, 8), (), (), spacing=(2.0, 1.0, 1.0))
AFFINE = np.array([[-1.5, 0, 0, 40], [0, 0.75, 0, -30], [0, 0, 2.5, 12], [0, 0, 0, 1]])


def write(path: Path, sides: tuple[int, ...], box=((2, 9), (1, 7), (3, 5)), affine=AFFINE, seed=0) -> np.ndarray:
    """A file with values above 0 inside a box of (x, y, z) only; returns them in this order."""
    voxels = np.zeros(sides, np.float32)
    inside = tuple(slice(*edges) for edges in box)
    voxels[inside] = np.random.default_rng(seed).uniform(1, 100, voxels[inside].shape)
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(voxels, affine), path)
    return voxels


def volumes(dataset: VolumeFiles, workers: int = 0) -> tuple[list[dict], list[str]]:
    """Each volume as the loader hands it out, finished, and what could not be read."""
    bad: list[str] = []
    order = EvalOrder(len(dataset), dataset.predict_batch)
    device = devices.select("cpu", 0)
    bad_samples = BadSamples("skip", 99, lambda each: bad.append(f"{each.name}: {each.reason}"))
    feeds = {"files": (dataset.bind(device, 1), order)}
    loader = Loader(feeds, Run(workers=workers, prefetch=1), device, World(), bad_samples, lambda: None)
    try:
        loader.seek("files", 0, order.steps_per_epoch)
        found = []
        for _ in range(order.steps_per_epoch):
            batch = dataset.finish(loader.next("files"), torch.float32)
            for row in batch["valid"].nonzero().flatten().tolist():
                volume = {key: value[row].clone() for key, value in batch.items()}
                sides = [slice(side) for side in volume["extent"].tolist()]
                inside = volume["image"][:, *sides].clone()
                volume["image"][:, *sides] = 0
                assert not volume["image"].any(), "padding is not zero"
                found.append({**volume, "image": inside})
        return found, bad
    finally:
        loader.close()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("most_bytes", [inputs.AT_ONCE_BYTES, 1, 4 * 23 * 40 * 12 * 2])
def test_files_of_any_size_come_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, most_bytes: int):
    """All in a batch, each in its own, two in one: padded to the largest sides of their batch."""
    monkeypatch.setattr(inputs, "AT_ONCE_BYTES", most_bytes)
    boxes = {"large": ((1, 21), (0, 30), (2, 12)), "small": ((2, 9), (1, 7), (3, 5)), "long": ((0, 3), (0, 40), (0, 2))}
    sides = {"large": (24, 30, 12), "small": (10, 8, 7), "long": (3, 40, 4)}
    files = {name: tmp_path / f"{name}.nii.gz" for name in sides}
    stored = {name: write(files[name], sides[name], boxes[name]) for name in files}
    found, bad = volumes(VolumeFiles(files, FLAT), workers)
    assert not bad and len(found) == 3
    for name, volume in zip(files, found, strict=True):
        inside = stored[name][tuple(slice(*edges) for edges in boxes[name])].T  # the file's (x, y, z) is (width, ...)
        expected = (inside - inside.mean(dtype=np.float64)) / inside.std(dtype=np.float64)
        assert volume["image"].shape == (1, *inside.shape) and volume["extent"].tolist() == list(inside.shape)
        np.testing.assert_allclose(volume["image"][0].numpy(), expected, atol=1e-5)
        assert volume["original"].tolist() == list(reversed(sides[name]))
        assert volume["start"].tolist() == [a for a, _ in reversed(boxes[name])]
        assert volume["end"].tolist() == [b for _, b in reversed(boxes[name])]


def test_large_volumes_come_one_at_a_time(tmp_path: Path):
    """A batch of them would take more memory than the largest alone; scores of many classes count too."""
    sides = {"a": (40, 40, 40), "b": (20, 20, 20)}
    files = {name: tmp_path / f"{name}.nii.gz" for name in sides}
    for name, path in files.items():
        write(path, sides[name])
    many = replace(FLAT, classes=tuple(map(str, range(inputs.AT_ONCE_BYTES // (4 * 40**3)))))
    assert VolumeFiles(files, FLAT).predict_batch == inputs.AT_ONCE and VolumeFiles(files, many).predict_batch == 1


def test_networks_of_volumes_get_them_at_their_own_spacing(tmp_path: Path):
    path = tmp_path / "x.nii.gz"
    write(path, (12, 10, 8, 2))  # the channel comes last in a file
    dataset = VolumeFiles({"x": path}, DEEP)
    (volume,), bad = volumes(dataset)
    image, geometry = prepare_image(read_scan(path, "x"), DEEP, "x")
    assert not bad and geometry.shape == (2, 4, 10)  # of a box of 2, 6, 7 voxels at 2.5, 0.75, 1.5 mm
    assert volume["extent"].tolist() == list(geometry.shape) and dataset.spec == DEEP
    np.testing.assert_array_equal(volume["image"].numpy(), image)
    row = {"extent": volume["extent"][None], "image": volume["image"].reshape(1, -1)}
    for rows in (1, 2):
        several = {key: value.expand(rows, -1) for key, value in row.items()}
        halved = dataset.finish(several, torch.bfloat16)["image"]
        assert len(halved) == rows and all(each.equal(volume["image"].bfloat16()) for each in halved)


def test_files_that_cannot_be_read_do_not_keep_the_others_back(tmp_path: Path):
    write(tmp_path / "good.nii.gz", (10, 8, 7))
    write(tmp_path / "two.nii.gz", (10, 8, 7, 2))
    write(tmp_path / "empty.nii.gz", (10, 8, 7), box=((0, 0), (0, 0), (0, 0)))
    (tmp_path / "text.nii.gz").write_text("no volume")
    whole = (tmp_path / "good.nii.gz").read_bytes()
    (tmp_path / "cut.nii.gz").write_bytes(whole[: len(whole) // 2])
    names = ["text", "good", "two", "empty", "cut", "gone"]
    found, bad = volumes(VolumeFiles({name: tmp_path / f"{name}.nii.gz" for name in names}, FLAT))
    assert len(found) == 1 and found[0]["index"].item() == 1
    assert [line.split(":")[0] for line in bad] == ["text", "two", "empty", "cut", "gone"]
    assert "is not a NIfTI file" in bad[0] and "has 2 channels, the network expects 1" in bad[1]


def test_nothing_is_made_as_large_as_a_header_says(tmp_path: Path):
    """Ten metres from voxel to voxel would become a volume of 10^12 voxels at the network's spacing."""
    path = tmp_path / "far.nii.gz"
    write(path, (12, 10, 8, 2), affine=np.diag([9999.0, 9999.0, 9999.0, 1]))
    dataset = VolumeFiles({"far": path}, DEEP)
    assert dataset.layout["image"] == ((1,), "float32")
    with pytest.raises(BadSample, match=r"far: would have 39996 x 99990 x 119988 voxels at the spacing"):
        dataset.load(0, 0)


def test_a_file_that_grows_meanwhile_is_refused(tmp_path: Path):
    path = tmp_path / "x.nii.gz"
    write(path, (10, 8, 7))
    dataset = VolumeFiles({"x": path}, FLAT)
    write(path, (30, 30, 30), box=((0, 30), (0, 30), (0, 30)))
    with pytest.raises(BadSample, match="has grown while it was read"):
        dataset.load(0, 0)


def test_cases_are_called_by_their_file():
    assert [case_name(name) for name in ("a/x.nii.gz", "x.NII", "x.1.nii.gz", "x.gz", ".nii.gz")] == [
        "a/x", "x", "x.1", "x.gz", ".nii.gz",
    ]  # fmt: skip


def test_raw_files_of_a_split(tmp_path: Path):
    for case in ("b", "a", "c"):
        write(tmp_path / "imagesTr" / f"{case}.nii.gz", (10, 8, 7))
        write(tmp_path / "labelsTr" / (f"{case}.nii" if case == "c" else f"{case}.nii.gz"), (10, 8, 7))
    found = labelled_files(["c", "a"], tmp_path)
    assert list(found) == ["c", "a"] and labelled_files(["c", "a"], tmp_path / "labelsTr") == found
    assert found["c"] == (tmp_path / "imagesTr" / "c.nii.gz", tmp_path / "labelsTr" / "c.nii")
    (tmp_path / "labelsTr" / "a.nii.gz").unlink()
    with pytest.raises(BadData, match=r"the image or the label of 2 of the 3 cases of the val split: a, nix; give"):
        labelled_files(["a", "nix", "b"], tmp_path)
    with pytest.raises(UsageError, match="holds no dataset.json and no images beside labels"):
        labelled_files(["a"], tmp_path / "imagesTr")


def test_the_fingerprint_of_files_is_that_of_their_places_and_of_arrays_their_number(tmp_path: Path):
    """Results that an earlier call left are taken where the files are the same ones."""
    for name in ("a", "b"):
        write(tmp_path / name / "case.nii.gz", (10, 8, 6))
    a, b = (tmp_path / name / "case.nii.gz" for name in ("a", "b"))
    pixels = np.zeros((4, 5), np.uint8)
    given = [{"case": a}, {"case": b}, {"one": a, "two": b}, {"case": pixels}, {"one": pixels, "two": pixels}]
    found = [VolumeFiles(files, DEEP if Path in map(type, files.values()) else FLAT).fingerprint for files in given[3:]]
    one = replace(DEEP, channels=1)
    found += [VolumeFiles(files, one).fingerprint for files in given[:3]]
    assert len(set(found)) == 5
    assert VolumeFiles({"other name": a}, one).fingerprint == VolumeFiles({"case": a}, one).fingerprint
    assert VolumeFiles({"case": pixels + 1}, FLAT).fingerprint == found[0]


@pytest.mark.parametrize(
    ("room", "most", "expected"),
    [(1, 16, 1), (4 * 3 * 20 * 5, 16, 5), (4 * 3 * 20 * 5 - 1, 16, 4), (10**9, 16, 16), (10**9, 3, 3)],
)
def test_so_many_volumes_come_together_as_their_scores_have_room(monkeypatch, room: int, most: int, expected: int):
    """The largest has 20 pixels, each with a score for three classes of four bytes."""
    monkeypatch.setattr(inputs, "AT_ONCE_BYTES", room)
    monkeypatch.setattr(inputs, "AT_ONCE", most)
    files = {str(side): np.zeros((4, side), np.uint8) for side in (5, 2, 3)}
    assert VolumeFiles(files, FLAT).predict_batch == expected
