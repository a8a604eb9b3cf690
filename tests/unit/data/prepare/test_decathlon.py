"""Decathlon folders made ready: what comes out, what is kept, and what is refused with the name of the case."""

import dataclasses
import json
import os
import runpy
import shutil
import tarfile
import tracemalloc
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import nibabel
import numpy as np
import pytest

from sightline.data.formats.nifti import read_label, read_scan
from sightline.data.prepare.decathlon import DecathlonOptions, fetched, prepare
from sightline.data.prepare.decathlon import cases as _decathlon_cases
from sightline.data.prepare.decathlon import statistics as _decathlon_statistics
from sightline.data.prepare.decathlon.raw import list_cases
from sightline.data.sources import open_volumes
from sightline.data.volumes.geometry import Geometry, to_original
from sightline.data.volumes.layouts import read_raw
from sightline.data.volumes.plan import read_plan, spec_of
from sightline.errors import BadData, SightlineError, UsageError
from sightline.files.download import Expected

MADE = runpy.run_path(str(Path(__file__).with_name("decathlon_folders.py")))
make_folder, write, write_json, pack, scan, SIZES = (
    MADE[name] for name in ("make_folder", "write", "write_json", "pack", "scan", "SIZES")
)


def quiet(what, done, total):
    assert 0 <= done <= total


def run(source, out, **options):
    return prepare(DecathlonOptions(source, out, jobs=1, **options), quiet)


@pytest.fixture
def hippocampus(tmp_path):
    """A folder like task 04: one MRI channel, three classes."""
    return make_folder(tmp_path / "Task04_Hippocampus")


def contents(out):
    return {path.name: path.read_bytes() for path in sorted(out.iterdir()) if path.is_file()}


def test_flat_training(hippocampus, tmp_path):
    out = tmp_path / "out"
    assert run(hippocampus, out) == {"cases of task 04": 3, "made now": 3}
    plan = read_plan(out)
    assert (plan.task, plan.dim, plan.mode, plan.name, plan.raw) == ("04", 2, "training", "Mine", "Task04_Hippocampus")
    assert plan.spec == spec_of("04", 2)
    for number, case in enumerate(plan.cases):
        wide, tall, deep = SIZES[number]
        assert case.name == f"case_{number:03d}"
        assert case.original == (deep, tall, wide)
        assert (case.start, case.end) == ((4, 3, 2), (deep - 1, tall - 1, wide - 1))
        assert case.shape == (deep - 5, 56, 40) and case.resampled == (deep - 5, tall - 4, wide - 3)
        image, label = np.load(out / case.image), np.load(out / case.label)
        assert image.dtype == np.float32 and image.shape == (1, *case.shape)
        assert label.dtype == np.uint8 and label.shape == case.shape
        # The z-score is over the cropped volume; what was added for the patch is zero.
        top, left = (56 - (tall - 4)) // 2, (40 - (wide - 3)) // 2
        inner = image[0, :, top : top + tall - 4, left : left + wide - 3]
        assert abs(inner.mean()) < 1e-5 and abs(inner.std() - 1) < 1e-5
        assert np.count_nonzero(image) == np.count_nonzero(inner)
        voxels, truth = scan(number, SIZES[number], 1, False)
        raw = voxels.T[case.start[0] : case.end[0], case.start[1] : case.end[1], case.start[2] : case.end[2]]
        assert np.allclose(inner, (raw - raw.mean()) / raw.std(), atol=1e-4)
        assert np.bincount(label.ravel(), minlength=3)[1:].tolist() == [
            np.count_nonzero(truth.T[4:-1] == number) for number in (1, 2)
        ]


def test_patch_smaller_than_the_volume_is_cut_from_the_centre(tmp_path):
    source = make_folder(tmp_path / "Mine")
    big = np.ones((90, 80, 6), np.float32)
    for number in range(3):
        write(source / "imagesTr" / f"case_{number:03d}.nii.gz", big)
        write(source / "labelsTr" / f"case_{number:03d}.nii.gz", np.arange(90 * 80 * 6).reshape(big.shape) % 3 * 1.0)
    run(source, tmp_path / "out", task="04")
    found = np.load(tmp_path / "out" / "case_001_y.npy")
    truth, _ = read_label(source / "labelsTr" / "case_001.nii.gz", "a")
    assert np.array_equal(found, truth[:, 12:68, 25:65])


@pytest.mark.parametrize("modality", ["MRI", "CT"])
def test_deep_with_two_channels(tmp_path, modality):
    spacing = (0.62, 0.93, 1.8)
    source = make_folder(tmp_path / "Mine", channels=2, modality=modality, spacing=spacing)
    run(source, tmp_path / "out", dim=3, **({"task": "05"} if modality == "MRI" else {}))
    plan = read_plan(tmp_path / "out")
    for case in plan.cases:
        box = np.subtract(case.end, case.start)
        wanted = [int(n * mm / to + 1e-4) for n, mm, to in zip(box, spacing[::-1], plan.spec.spacing, strict=True)]
        assert case.resampled == tuple(wanted)
        assert case.shape == tuple(max(n, patch) for n, patch in zip(wanted, plan.spec.size, strict=True))
        image, label = np.load(tmp_path / "out" / case.image), np.load(tmp_path / "out" / case.label)
        assert image.shape == (2, *case.shape) and label.shape == case.shape
        found = set(np.unique(label).tolist())
        assert found == {0, 1, 2} if case.name == "case_001" else found <= {0, 1, 2}  # others keep one slice
    if modality == "MRI":
        assert plan.spec == spec_of("05", 3)
    else:
        low, high = plan.spec.clip
        mean, std = plan.spec.mean[0], plan.spec.std[0]
        assert image.min() >= (low - mean) / std - 1e-4 and image.max() <= (high - mean) / std + 1e-4


@pytest.mark.parametrize("dim", [2, 3])
def test_val_and_test_keep_the_geometry(hippocampus, tmp_path, dim):
    for mode, names in (("val", ["case_000", "case_001", "case_002"]), ("test", ["case_003", "case_004"])):
        out = tmp_path / mode
        run(hippocampus, out, mode=mode, dim=dim)
        plan = read_plan(out)
        assert plan.mode == mode and [case.name for case in plan.cases] == names
        for case in plan.cases:
            assert case.label is None and case.shape == case.resampled
            image = np.load(out / case.image)
            assert image.shape == (1, *case.shape)
            geometry = Geometry(case.original, case.start, case.end, case.resampled)
            assert to_original(image, geometry).shape[1:] == case.original
        with pytest.raises(UsageError, match=f"prepared with --mode {mode}"):
            open_volumes("auto", str(out), "train", 0, 2, plan.spec)
    assert not list(tmp_path.glob("*/*_y.npy"))


def test_dilation_closes_gaps(hippocampus, tmp_path):
    label = scan(0, SIZES[0], 1, False)[1]
    label[10, 8, 4:7] = 0  # a hole
    write(hippocampus / "labelsTr" / "case_000.nii.gz", label)
    run(hippocampus, tmp_path / "plain")
    run(hippocampus, tmp_path / "closed", dilation=True)
    plain, closed = (np.load(tmp_path / name / "case_000_y.npy") for name in ("plain", "closed"))
    assert np.count_nonzero(closed) > np.count_nonzero(plain) and not plain[(plain > 0) & (closed == 0)].size
    with pytest.raises(UsageError, match="--dilation changes labels, which --mode val"):
        DecathlonOptions(hippocampus, tmp_path, mode="val", dilation=True)


@pytest.mark.slow  # test_imagenet.py compares files of several processes by default, test_processes.py their order
def test_processes_change_nothing(hippocampus, tmp_path):
    run(hippocampus, tmp_path / "one")
    prepare(DecathlonOptions(hippocampus, tmp_path / "two", jobs=2), quiet)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


# What an earlier start has left.


def test_resumes_after_a_kill(hippocampus, tmp_path):
    whole, out = tmp_path / "whole", tmp_path / "out"
    run(hippocampus, whole)
    shutil.copytree(whole, out)
    (out / "plan.json").unlink()  # killed before the end
    (out / ".prepare" / "case-case_001.json").write_text("{")  # in the middle of the second case
    (out / "case_001_y.npy").unlink()
    (out / "case_001_x.npy").write_bytes(b"half")
    (out / ".0123.part-99").write_bytes(b"half")
    with (out / "case_002_x.npy").open("ab") as file:  # and someone was at the third
        file.write(b"more")
    first = (out / "case_000_x.npy").stat().st_ino
    assert run(hippocampus, out) == {"cases of task 04": 3, "made now": 2}
    assert contents(out) == contents(whole)
    assert (out / "case_000_x.npy").stat().st_ino == first  # writing it again would make another file
    assert run(hippocampus, out) == {"cases of task 04": 3, "made now": 0}


def test_a_changed_source_is_made_again_and_nothing_else(hippocampus, tmp_path):
    out = tmp_path / "out"
    run(hippocampus, out)
    before = contents(out)
    write(hippocampus / "imagesTr" / "case_001.nii.gz", scan(77, SIZES[1], 1, False)[0])
    assert run(hippocampus, out)["made now"] == 1
    after = contents(out)
    assert [name for name in before if before[name] != after[name]] == ["case_001_x.npy"]
    # A case fewer is a plan without it; its files stay.
    write_json(hippocampus, training=json.loads((hippocampus / "dataset.json").read_text())["training"][:2])
    assert run(hippocampus, out) == {"cases of task 04": 2, "made now": 0}
    assert len(read_plan(out).cases) == 2 and (out / "case_002_x.npy").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dim": 3}, "begun with dim=2, now it is 3"),
        ({"mode": "val"}, "begun with mode=training, now it is val"),
        ({"dilation": True}, "begun with dilation=False, now it is True"),
        ({"task": "own"}, "begun with task=04, now it is own"),
        ({"task": "05"}, "begun with task=04, now it is 05"),
    ],
)
def test_a_folder_of_other_options(hippocampus, tmp_path, options, said):
    out = tmp_path / "out"
    run(hippocampus, out)
    before = contents(out)
    with pytest.raises(UsageError, match=f"{said}; choose another --out"):
        run(hippocampus, out, **options)
    assert contents(out) == before


def test_a_folder_of_someone_else(hippocampus, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("all of it")
    with pytest.raises(UsageError, match="holds thesis.txt, not written by this command"):
        run(hippocampus, tmp_path / "out")
    with pytest.raises(UsageError, match="lies in .* or around it"):
        run(hippocampus, hippocampus / "out")
    with pytest.raises(UsageError, match="lies in .* or around it"):
        run(hippocampus, tmp_path)


# Memory.


def test_memory_decides_how_many_at_once(hippocampus, tmp_path):
    cases = list_cases(read_raw(hippocampus), "training", 1, quiet)
    spec = spec_of("04", 2)
    need = {case.name: _decathlon_cases.working_bytes(case, spec) for case in cases}
    assert need["case_001"] == 18 * 24 * 12 * (4 + 8 + 4) + 4 * 12 * 56 * 40  # float32 in the file
    groups = list(_decathlon_cases.groups(cases * 4, spec, jobs=8, memory=10**12))
    assert [(count, len(some)) for count, some in groups] == [(8, 12)]
    assert [count for count, _ in _decathlon_cases.groups(cases * 4, spec, jobs=8, memory=1)] == [1]
    tight = list(_decathlon_cases.groups(cases * 4, spec, jobs=8, memory=4 * need["case_000"]))
    assert [count for count, _ in tight] == sorted(count for count, _ in tight)
    for count, some in tight:
        assert count * max(need[case.name] for case in some) <= 4 * need["case_000"]
    assert {case.name for _, some in tight for case in some} == set(need)
    assert all(_decathlon_cases.working_bytes(case, spec_of("04", 3)) > need[case.name] for case in cases)
    assert run(hippocampus, tmp_path / "out", memory_gb=1e-9)["made now"] == 3


@pytest.mark.parametrize(
    ("task", "dim"),
    [pytest.param("04", 2, marks=pytest.mark.slow), pytest.param("04", 3, marks=pytest.mark.slow), ("05", 3)],
)
def test_a_case_takes_no_more_memory_than_is_counted_for_it(tmp_path, task, dim):
    image, label = np.ones((128, 120, 48, 2), np.int16), np.ones((128, 120, 48), np.uint8)
    source = make_folder(tmp_path / "in", cases=1, channels=2)
    write(source / "imagesTr" / "case_000.nii.gz", image, (1.0, 1.0, 1.3))
    write(source / "labelsTr" / "case_000.nii.gz", label, (1.0, 1.0, 1.3))
    spec = dataclasses.replace(spec_of(task, dim), channels=2)
    (case,) = list_cases(read_raw(source), "training", 2, quiet)
    tracemalloc.start()
    _decathlon_cases._prepared(_decathlon_cases.Work(tmp_path, spec, "training", False), case)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    counted = _decathlon_cases.working_bytes(case, spec)
    assert 0.3 * counted < peak < counted + 2**21  # pieces of a file on their way


# Bad input, each with its name and exit code 3.


def break_image(root, voxels=None, **options):
    write(
        root / "imagesTr" / "case_001.nii.gz", scan(1, SIZES[1], 1, False)[0] if voxels is None else voxels, **options
    )


def nan(root):
    voxels = scan(1, SIZES[1], 1, False)[0]
    voxels[3, 3, 3] = np.nan
    break_image(root, voxels)


def strange_label(root):
    label = scan(1, SIZES[1], 1, False)[1]
    label[3, 3, 3] = 5
    write(root / "labelsTr" / "case_001.nii.gz", label)


BROKEN = {
    "nan": (nan, "1 of its 5184 voxels are NaN"),
    "label": (strange_label, "a label of 5; the classes are 0 background, 1 Anterior, 2 Posterior"),
    "shape": (lambda root: break_image(root, np.ones((18, 24, 11), np.float32)), "labelsTr/case_001.nii.gz has the sh"),
    "affine": (lambda root: break_image(root, shift=2.0), "lies elsewhere than its image, by up to 2 voxels"),
    "spacing": (lambda root: break_image(root, spacing=(1.02, 1, 1)), "lies elsewhere than its image"),
    "modalities": (
        lambda root: break_image(root, np.ones((18, 24, 12, 2), np.float32)),
        "has 2 channels, 1 modalities",
    ),
    "empty": (lambda root: break_image(root, np.zeros(SIZES[1], np.float32)), "has no voxel above 0"),
    "missing": (lambda root: (root / "imagesTr" / "case_001.nii.gz").unlink(), "is not there"),
    "no label": (lambda root: (root / "labelsTr" / "case_001.nii.gz").unlink(), "is not there"),
    "no nifti": (lambda root: (root / "imagesTr" / "case_001.nii.gz").write_bytes(b"x" * 999), "is not a NIfTI"),
    "cut off": (
        lambda root: os.truncate(root / "imagesTr" / "case_001.nii.gz", 900),
        "is damaged",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_cases(hippocampus, tmp_path, what):
    change, said = BROKEN[what]
    change(hippocampus)
    with pytest.raises(BadData, match=f"(?s)1 of 3 cases cannot be prepared.*case_001: .*{said}") as caught:
        run(hippocampus, tmp_path / "out")
    assert caught.value.exit_code == 3
    assert not (tmp_path / "out" / "plan.json").exists()


def test_a_header_cannot_ask_for_memory_by_its_spacing(hippocampus, tmp_path):
    """In 3D a case of 18 x 24 x 12 voxels of 10 cm would have 5 * 10^9 of 1 mm."""
    image, label = scan(1, SIZES[1], 1, False)
    for part, voxels in (("images", image), ("labels", label)):
        write(hippocampus / f"{part}Tr" / "case_001.nii.gz", voxels, spacing=(100.0, 100.0, 100.0))
    with pytest.raises(BadData, match=r"(?s)1 of 3 cases.*case_001: .*1200 x 2400 x 1800 voxels at .*fix the voxel"):
        run(hippocampus, tmp_path / "out", dim=3)
    assert run(hippocampus, tmp_path / "flat") == {"cases of task 04": 3, "made now": 3}  # nothing is resampled


def test_all_problems_are_reported_and_the_rest_is_kept(hippocampus, tmp_path):
    nan(hippocampus)
    voxels = np.full(SIZES[2], np.inf, np.float32)
    write(hippocampus / "imagesTr" / "case_002.nii.gz", voxels)
    with pytest.raises(BadData, match=r"(?s)2 of 3 cases.*case_001: .*case_002: "):
        run(hippocampus, tmp_path / "out")
    for number in (1, 2):
        write(hippocampus / "imagesTr" / f"case_{number:03d}.nii.gz", scan(number, SIZES[number], 1, False)[0])
    assert run(hippocampus, tmp_path / "out") == {"cases of task 04": 3, "made now": 2}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"modality": {"0": "T2", "1": "ADC"}}, r"has 2 modalities \(T2, ADC\), task 04 has 1"),
        ({"labels": {"0": "background", "1": "all"}}, r"has 2 labels \(background, all\), task 04 has 3"),
        ({"labels": ["background"]}, "labels is .* was expected"),
        ({"labels": {"0": "background", "2": "b"}}, "labels is .* was expected"),
        ({"labels": {"0": "a", "1": "a", "2": "b"}}, "a name of their own"),
        ({"modality": {}}, "modality is {}"),
        ({"training": {}}, "must be lists"),
        ({"training": []}, "lists no training cases"),
        ({"training": ["a.nii.gz"]}, "not a pair of image and label"),
        ({"training": [{"image": 1, "label": 2}]}, "is not a file name"),
        ({"test": [{"label": "x.nii.gz"}]}, "None is not a file name"),
        ({"training": [{"image": "../../a.nii.gz", "label": "b.nii.gz"}]}, "leads out of its folder"),
        ({"training": [{"image": "/a.nii.gz", "label": "b.nii.gz"}]}, "is an absolute path"),
        ({"training": [{"image": "a.nii.gz", "label": "b.nii.gz"}] * 2}, "cannot be prepared"),
    ],
)
def test_broken_dataset_json(hippocampus, tmp_path, change, said):
    write_json(hippocampus, **change)
    with pytest.raises(BadData, match=said):
        run(hippocampus, tmp_path / "out")


@pytest.mark.parametrize("content", ["", "{", "[]", "[" * 100_000, "\udcff"])
def test_dataset_json_that_is_none(hippocampus, tmp_path, content):
    (hippocampus / "dataset.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(BadData, match="dataset.json"):
        run(hippocampus, tmp_path / "out")


def test_the_same_case_twice(hippocampus, tmp_path):
    training = json.loads((hippocampus / "dataset.json").read_text())["training"]
    write_json(hippocampus, training=[*training, training[0]])
    with pytest.raises(BadData, match="case_000: is listed twice"):
        run(hippocampus, tmp_path / "out")


# Which task it is.


@pytest.mark.parametrize(
    ("folder", "name", "task"),
    [("Task04_Hippocampus", "?", "04"), ("x", "hippocampus", "04"), ("Task04_Other", "Mine", "own"), ("x", "x", "own")],
)
def test_which_task(tmp_path, folder, name, task):
    source = make_folder(tmp_path / "in" / folder, name=name)
    for given, out in ((source, "a"), (tmp_path / "in", "b")):
        run(given, tmp_path / out)
        assert read_plan(tmp_path / out).task == task


def test_source_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match="is not there; give a Decathlon folder or its tar"):
        run(tmp_path / "none", tmp_path / "out")
    with pytest.raises(UsageError, match="holds no dataset.json"):
        run(tmp_path, tmp_path / "out")
    make_folder(tmp_path / "Task04_Hippocampus"), make_folder(tmp_path / "Mine")
    with pytest.raises(UsageError, match="holds Task04_Hippocampus, Mine; give one of them"):
        run(tmp_path, tmp_path / "out")


# Statistics of one's own data.


def test_own_ct_numbers(tmp_path):
    source = make_folder(tmp_path / "Mine", modality="CT", labels=("background", "organ", "tumour"))
    run(source, tmp_path / "out")
    spec = read_plan(tmp_path / "out").spec
    values = []
    for number in range(3):
        image = nibabel.load(source / "imagesTr" / f"case_{number:03d}.nii.gz").get_fdata()
        values.append(image[nibabel.load(source / "labelsTr" / f"case_{number:03d}.nii.gz").get_fdata() > 0])
    found = np.concatenate(values)
    assert spec.clip == pytest.approx(tuple(np.percentile(found, [0.5, 99.5])), abs=1e-3)
    assert spec.mean == pytest.approx((found.mean(),), abs=1e-3) and spec.std == pytest.approx((found.std(),), abs=1e-3)
    assert spec.classes == ("background", "organ", "tumour") and spec.size == (20, 24)
    # The same for images without labels, and after a repaired case.
    run(source, tmp_path / "test", mode="test")
    assert read_plan(tmp_path / "test").spec == spec


def test_headers_are_counted_one_by_one(hippocampus, tmp_path):
    told = []
    prepare(DecathlonOptions(hippocampus, tmp_path / "out", jobs=1), lambda *now: told.append(now))
    assert [now[1:] for now in told if now[0] == "reading headers"] == [(1, 3), (2, 3), (3, 3)]


def test_own_statistics_are_taken_once(tmp_path, monkeypatch):
    source = make_folder(tmp_path / "Mine", modality="CT")
    run(source, tmp_path / "out")
    monkeypatch.setattr("sightline.data.prepare.decathlon.measure", None)
    assert run(source, tmp_path / "out")["made now"] == 0


@pytest.mark.parametrize(("modality", "dim"), [("T2", 2), ("CT", 3)])
def test_own_statistics_of_other_questions_are_not_taken(tmp_path, modality, dim):
    source = make_folder(tmp_path / "Mine", modality="CT")
    run(source, tmp_path / "out")
    write_json(source, modality={"0": modality})
    statistics = ".prepare/statistics.json"
    (tmp_path / "again" / statistics).parent.mkdir(parents=True)
    shutil.copy(tmp_path / "out" / statistics, tmp_path / "again" / statistics)
    for name in ("again", "fresh"):
        run(source, tmp_path / name, dim=dim)
    specs = [read_plan(tmp_path / name).spec for name in ("out", "again", "fresh")]
    assert specs[1] == specs[2] != specs[0]


def test_own_data_repaired_before_it_was_finished(tmp_path):
    source = make_folder(tmp_path / "Mine", modality="CT")
    label = scan(1, SIZES[1], 1, True)[1]
    label[3, 3, 3] = 5
    write(source / "labelsTr" / "case_001.nii.gz", label)
    with pytest.raises(BadData, match="case_001: a label of 5"):
        run(source, tmp_path / "out")
    write(source / "labelsTr" / "case_001.nii.gz", scan(1, SIZES[1], 1, True)[1])
    assert run(source, tmp_path / "out")["cases"] == 3
    write(source / "imagesTr" / "case_001.nii.gz", scan(9, SIZES[1], 1, True)[0])
    with pytest.raises(UsageError, match="begun with spec.(mean|std|clip)="):
        run(source, tmp_path / "out")


def test_own_ct_with_a_broken_case_is_refused_before_a_case_is_made(tmp_path):
    """Clipping and mean of the other cases alone would be wrong for all."""
    source = make_folder(tmp_path / "Mine", modality="CT")
    nan(source)
    with pytest.raises(BadData, match=r"(?s)1 of 3 cases.*case_001: .*NaN"):
        run(source, tmp_path / "out")
    assert not list((tmp_path / "out").glob("case*"))


def test_own_ct_without_labels(tmp_path):
    source = make_folder(tmp_path / "Mine", modality="CT")
    for number in range(3):
        write(source / "labelsTr" / f"case_{number:03d}.nii.gz", np.zeros(SIZES[number], np.uint8))
    with pytest.raises(BadData, match="no voxel of the training set is labelled"):
        run(source, tmp_path / "out")


def test_target_spacing():
    spacings = np.array([[z, 0.7 + z / 100, 0.7] for z in (2.0, 3.0, 5.0, 5.0, 5.0, 6.0)])
    found = _decathlon_statistics._target_spacing(spacings)
    # The slices lie far apart: that axis takes its 10th percentile, not the one with the shortest spacing.
    assert found.tolist() == [2.5, 0.75, 0.7]
    assert _decathlon_statistics._target_spacing(spacings / [3, 1, 1]).tolist() == [1.6667, 0.75, 0.7]


@pytest.mark.parametrize(
    ("wanted", "side"), [(3, 3), (7, 7), (9, 10), (33, 40), (56, 56), (57, 64), (161, 192), (900, 512)]
)
def test_flat_side(wanted, side):
    assert _decathlon_statistics.flat_side(wanted) == side


@pytest.mark.parametrize(
    ("medians", "sides"),
    [((36, 50, 35), (40, 56, 40)), ((20, 319, 250), (20, 320, 256)), ((480, 512, 512), (128, 128, 128))],
)
def test_deep_sides(medians, sides):
    assert _decathlon_statistics.deep_sides(medians) == sides
    for side in sides:
        assert side % 2 ** _decathlon_statistics.halvings(side) == 0


# Tars.


def test_tar(hippocampus, tmp_path, monkeypatch):
    tar = pack(hippocampus, tmp_path / "given.tar")
    run(hippocampus, tmp_path / "whole")
    out = tmp_path / "out"
    assert run(tar, out) == {"cases of task 04": 3, "made now": 3}
    assert contents(out) == contents(tmp_path / "whole")
    assert not (out / ".prepare" / "raw").exists()
    with monkeypatch.context() as patched:  # ready: not unpacked again
        patched.setattr("sightline.data.prepare.decathlon.raw.extract", None)
        assert run(tar, out) == {"cases of task 04": 3, "made now": 0}
    (out / "case_001_x.npy").unlink()
    assert run(tar, out) == {"cases of task 04": 3, "made now": 1}
    assert contents(out) == contents(tmp_path / "whole")


def test_tar_beside_its_folder(hippocampus, tmp_path):
    pack(hippocampus, tmp_path / "Task04_Hippocampus.tar")
    run(tmp_path, tmp_path / "out" / "a")
    shutil.rmtree(hippocampus)
    run(tmp_path, tmp_path / "out" / "b", task="04")
    assert contents(tmp_path / "out" / "a") == contents(tmp_path / "out" / "b")


def test_a_tar_that_leads_out(hippocampus, tmp_path):
    tar = pack(hippocampus, tmp_path / "given.tar")
    with tarfile.open(tar, "a") as archive:
        archive.add(hippocampus / "dataset.json", "../../escaped.json")
    with pytest.raises(SightlineError, match="leads out of its folder") as caught:
        run(tar, tmp_path / "out")
    assert caught.value.exit_code == 3
    assert not list(tmp_path.rglob("escaped.json")) and not list((tmp_path / "out").rglob("*.nii.gz"))


def test_a_tar_of_something_else(tmp_path):
    (tmp_path / "thing").mkdir()
    (tmp_path / "thing" / "a.txt").write_text("a")
    with pytest.raises(BadData, match="holds 0 dataset.json at its top"):
        run(pack(tmp_path / "thing", tmp_path / "given.tar"), tmp_path / "out")


# The real ones.


def test_real_cases(shared_data, tmp_path):
    given = shared_data / "Task04_Hippocampus"
    if not given.is_dir():
        pytest.skip("needs Task04_Hippocampus in ../shared/data, which is not part of the repository")
    source = tmp_path / "Task04_Hippocampus"
    source.mkdir()
    for name in ("imagesTr", "labelsTr"):
        (source / name).symlink_to(given / name)
    content = json.loads((given / "dataset.json").read_text())
    write_json(source, **{**content, "training": content["training"][:4]})
    for dim in (2, 3):
        out = tmp_path / f"out{dim}"
        run(source, out, dim=dim)
        plan = read_plan(out)
        assert plan.task == "04" and len(plan.cases) == 4
        for case in plan.cases:
            image, label = np.load(out / case.image), np.load(out / case.label)
            assert np.isfinite(image).all() and set(np.unique(label)) == {0, 1, 2}
            taken = read_scan(given / "imagesTr" / f"{case.name}.nii.gz", case.name)
            truth, _ = read_label(given / "labelsTr" / f"{case.name}.nii.gz", case.name)
            # All spacings are 1 mm: nothing is resampled, and the foreground box holds all that is labelled.
            assert case.resampled == tuple(np.subtract(case.end, case.start))
            if dim == 3:
                assert np.count_nonzero(label) == np.count_nonzero(truth)
            assert taken.voxels.shape[1:] == case.original


def test_the_numbers_of_a_data_set_are_those_of_numpy():
    draws = np.random.default_rng(0)
    voxels = [draws.normal(40, 300, 5000) for _ in range(3)]
    cases = []
    for each, box, spacing in zip(
        voxels,
        [(20, 150, 140), (30, 160, 200), (25, 170, 180)],
        [(5.0, 0.78125, 0.74219), (2.5, 0.97656, 0.85938), (3.0, 0.70312, 0.66406)],
        strict=True,
    ):
        rounded, counts = np.unique(np.rint(each).astype(np.int64), return_counts=True)
        sums = (each.size, float(each.sum()), float(np.square(each).sum()))
        cases.append(_decathlon_statistics.Measured(box, spacing, rounded, counts, sums))
    flat = _decathlon_statistics.find_spec(cases, 2, ("background", "organ"), ("CT",), "here")
    together = np.concatenate(voxels)
    low, high = np.percentile(np.rint(together), (0.5, 99.5))
    assert flat.clip == (round(low, 4), round(high, 4))
    assert (flat.mean, flat.std) == ((round(together.mean(), 4),), (round(together.std(), 4),))
    assert flat.spacing[-2:] == (0.7812, 0.7422), "medians of rows and columns, to a ten thousandth"
    assert flat.size == tuple(
        _decathlon_statistics.flat_side(side) for side in np.percentile([case.box[1:] for case in cases], 95, axis=0)
    )
    mri = _decathlon_statistics.find_spec(cases, 3, ("background", "organ"), ("T1", "T2"), "here")
    assert (mri.channels, mri.clip, len(mri.size)) == (2, (), 3)
    same = [case._replace(values=np.array([7]), counts=np.array([5])) for case in cases]
    with pytest.raises(BadData, match="here: all labelled voxels have the value 7, so CT cannot be scaled"):
        _decathlon_statistics.find_spec(same, 2, ("background", "organ"), ("CT",), "here")


def halved(side: int) -> int:
    """How often a network of at most five halvings halves a side, which it does from eight voxels on."""
    return sum(side >= 8 * 2**number for number in range(5))


def test_sides_are_the_shortest_that_can_be_halved_as_often_as_the_network_does():
    for wanted in range(1, 700):
        least = next(side for side in range(wanted, 2000) if side % 2 ** halved(side) == 0)
        assert _decathlon_statistics.halvings(wanted) == halved(wanted)
        assert _decathlon_statistics.flat_side(wanted) == min(least, 512)
        assert _decathlon_statistics.flat_side(wanted - 0.5) == min(least, 512)


@pytest.mark.parametrize(
    ("medians", "sides"),
    [
        ((128, 128, 128), (128, 128, 128)),  # just as many as are allowed
        ((128, 128, 129), (128, 128, 128)),
        ((512, 64, 64), (512, 64, 64)),
        ((512, 64, 65), (384, 64, 80)),  # the longest is shortened
        ((160, 160, 160), (128, 128, 128)),
        ((1, 9, 17), (1, 10, 20)),
    ],
)
def test_deep_sides_have_at_most_128_to_the_third_voxels(medians, sides):
    found = _decathlon_statistics.deep_sides(medians)
    assert all(side % 2 ** halved(side) == 0 for side in found) and np.prod(found) <= 128**3
    assert found == sides


@pytest.mark.parametrize("is_same", [True, False])
def test_room_is_asked_for_before_a_tar_is_fetched(tmp_path, monkeypatch, is_same):
    """For the rest of the tar, and for what unpacking takes: together where both lie on one disk."""
    asked = []
    monkeypatch.setattr(fetched, "check_room", lambda folder, size, what: asked.append((folder, size, what)))
    monkeypatch.setattr(fetched, "fetch", lambda *words, room, **more: room(1000, 300))
    if not is_same:
        disk = namedtuple("Disk", "st_dev")
        places = lambda path: SimpleNamespace(stat=lambda: disk(path.name))  # noqa: E731
        monkeypatch.setattr(fetched, "nearest", places)
    source, out = tmp_path / "raw", tmp_path / "out"
    tar = fetched.fetch_tar(source, out, "04", "", Expected(sha256="0" * 64), quiet)
    assert tar == source / "Task04_Hippocampus.tar"
    together = f"{tar}, to be unpacked in {out},"
    assert asked == ([(source, 1300, together)] if is_same else [(source, 300, str(tar)), (out, 1000, together)])
