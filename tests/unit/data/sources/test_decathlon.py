"""The ten tasks, the plan of a prepared folder, and the sources of volumes."""

import dataclasses
import json
import math
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sightline.data.segmentation import SegmentationData
from sightline.data.sources import open_volumes
from sightline.data.sources.decathlon import describe_found, folds, found_fields
from sightline.data.volumes.plan import TASKS, Case, VolumePlan, read_plan, spec_of, write_plan
from sightline.errors import BadData, BadSample, UsageError
from sightline.parts import DataFacts, DataSpec

SPEC = DataSpec(("background", "a", "b"), 2, (16, 8), (), (), spacing=(1.0, 1.0))


def test_the_ten():
    assert [task.folder for task in TASKS.values()] == [
        "Task01_BrainTumour",
        "Task02_Heart",
        "Task03_Liver",
        "Task04_Hippocampus",
        "Task05_Prostate",
        "Task06_Lung",
        "Task07_Pancreas",
        "Task08_HepaticVessel",
        "Task09_Spleen",
        "Task10_Colon",
    ]
    assert [len(task.modalities) for task in TASKS.values()] == [4, 1, 1, 1, 2, 1, 1, 1, 1, 1]
    assert [len(task.classes) for task in TASKS.values()] == [4, 2, 3, 3, 3, 2, 3, 3, 2, 2]
    assert [number for number, task in TASKS.items() if task.ct] == ["03", "06", "07", "08", "09", "10"]
    assert all(task.ct is not None for task in TASKS.values() if task.modalities == ("CT",))


def test_specs():
    brain = spec_of("01", 2)
    assert (brain.size, brain.spacing, brain.channels) == ((192, 160), (1.0, 1.0), 4)
    assert (brain.mean, brain.std, brain.clip) == ((), (), ())
    colon = spec_of("10", 3)
    assert (colon.size, colon.spacing) == ((56, 192, 160), (3.0, 0.78, 0.78))
    assert (colon.clip, colon.mean, colon.std) == ((-30.0, 165.82), (62.18,), (32.65,))
    for task in TASKS:
        for dim in (2, 3):
            spec = spec_of(task, dim)
            assert len(spec.size) == len(spec.spacing) == dim
            assert DataSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    with pytest.raises(UsageError, match="task '11' is not one of"):
        spec_of("11", 2)
    with pytest.raises(UsageError, match="dim=4"):
        spec_of("01", 4)


def test_golden_folds():
    assert [part.tolist() for part in folds(10, 5)] == [[0, 7], [3, 9], [4, 6], [1, 8], [2, 5]]
    of_brains = folds(484, 5)
    assert [len(part) for part in of_brains] == [97, 97, 97, 97, 96]
    assert of_brains[0][:8].tolist() == [9, 10, 11, 17, 19, 27, 28, 31]
    assert sorted(np.concatenate(of_brains).tolist()) == list(range(484))
    for count, parts in ((3, 4), (5, 1), (1, 2)):
        with pytest.raises(UsageError, match="cannot be split"):
            folds(count, parts)


def make_case(folder, name, depth, spec=SPEC):
    random = np.random.default_rng(depth)
    np.save(folder / f"{name}_x.npy", random.normal(size=(2, depth, 16, 8)).astype(np.float32))
    np.save(folder / f"{name}_y.npy", random.integers(0, 3, (depth, 16, 8), np.uint8))
    box = ((depth, 20, 9), (0, 1, 0), (depth, 18, 9), (depth, 17, 9))
    return Case(name, (depth, 16, 8), *box, (2.0, 1.0, 1.0), f"{name}_x.npy", f"{name}_y.npy")


@pytest.fixture
def prepared(tmp_path):
    cases = tuple(make_case(tmp_path, f"liver_{number}", 3 + number) for number in range(12))
    write_plan(tmp_path, VolumePlan("own", "Mine", 2, "training", SPEC, cases, "Task77_Mine"))
    return tmp_path


def test_plan_round_trip(prepared):
    plan = read_plan(prepared)
    assert plan.to_json() == json.loads((prepared / "plan.json").read_text())
    assert plan.spec == SPEC and plan.cases[3].shape == (6, 16, 8)
    write_plan(prepared, dataclasses.replace(plan, raw="other"))
    assert read_plan(prepared) == dataclasses.replace(plan, raw="other")


GONE = object()


@pytest.mark.parametrize(
    ("where", "value", "said"),
    [
        (("format",), 2, "its format is 2"),
        (("mode",), "train", "its mode is 'train'"),
        (("dim",), 4, "dim is 4"),
        (("dim",), 3, "does not have 3 axes"),
        (("task",), "11", "its task is '11'"),
        (("name",), None, "name is not a text"),
        (("cases",), [], "lists no cases"),
        (("cases", 0, "name"), "../x", "a case is called '../x'"),
        (("cases", 0, "name"), "liver_1", "the same name"),
        (("cases", 0, "image"), "../x.npy", "the image of liver_0 is"),
        (("cases", 0, "image"), "\ud800.npy", "the image of liver_0 is"),
        (("cases", 0, "image"), "/etc/passwd", "the image of liver_0 is"),
        (("cases", 0, "label"), None, "liver_0 has no label in training"),
        (("cases", 0, "shape"), [3, 16], r"shape of liver_0 is \[3, 16\]"),
        (("cases", 0, "shape"), [3, 16, 10**9], "shape of liver_0 is"),
        (("cases", 0, "shape"), [True, 16, 8], "shape of liver_0 is"),
        (("cases", 0, "shape"), [3, 0, 8], "liver_0 has a side of 0"),
        (("cases", 0, "resampled"), [0, 16, 8], "liver_0 has a side of 0"),
        (("cases", 0, "end"), [3, 21, 9], "box of liver_0 does not lie"),
        (("cases", 0, "spacing"), [1, 1, math.nan], "spacing of liver_0"),
        (("spec", "channels"), 0, "0 channels"),
        (("spec", "clip"), [1.0], r"clip, mean and std of \(1, 0, 0\)"),
        (("spec", "size"), [0, 8], r"its spec: size is \(0, 8\), expected sides of 1 to"),
        (("spec", "flavour"), 1, "flavour"),
        (("spec",), [], r"its spec: \[\] where an object was expected"),
        (("dim",), GONE, "'dim' is missing"),
        (("cases", 0, "end"), GONE, "'end' is missing"),
    ],
)
def test_plans_that_cannot_be(prepared, where, value, said):
    content = json.loads((prepared / "plan.json").read_text())
    *path, last = where
    target = content
    for key in path:
        target = target[key]
    target[last] = value
    if value is GONE:
        del target[last]
    (prepared / "plan.json").write_text(json.dumps(content))
    with pytest.raises(BadData, match=f"plan.json is not a plan of format 1: .*{said}.*; prepare it again") as error:
        read_plan(prepared)
    assert ("is missing" in str(error.value)) == (value is GONE)


def test_plans_that_are_not_json(prepared):
    for content in ("", "{", "[]", "[" * 100_000, '{"format": 1}'):
        (prepared / "plan.json").write_text(content)
        with pytest.raises(BadData, match="prepare it again"):
            read_plan(prepared)
    (prepared / "plan.json").unlink()
    with pytest.raises(BadData, match="holds no plan.json.*sightline prepare decathlon"):
        read_plan(prepared)


def test_source(prepared):
    val = open_volumes("auto", str(prepared), "val", 1, 5, SPEC)
    train = pickle.loads(pickle.dumps(open_volumes("decathlon", str(prepared), "train", 1, 5, SPEC)))
    # Twelve files in the order of their names: liver_0, liver_10, liver_11, liver_1, liver_2, ...
    order = ["liver_0", "liver_10", "liver_11", *(f"liver_{number}" for number in range(1, 10))]
    held_out = [order[index] for index in folds(12, 5)[1]]
    assert [val.name(i) for i in range(len(val))] == held_out
    assert [train.name(i) for i in range(len(train))] == [name for name in order if name not in held_out]
    for source in (val, train):
        assert source.spec == SPEC
        for index in range(len(source)):
            name = source.name(index)
            image, label = source.image(index), source.label(index)
            assert isinstance(image, np.memmap) and isinstance(label, np.memmap)
            assert np.array_equal(image, np.load(prepared / f"{name}_x.npy"))
            assert np.array_equal(label, np.load(prepared / f"{name}_y.npy"))
            assert image.shape == (2, *source.shape(index)) and label.shape == source.shape(index)


def test_fingerprint_follows_files_and_plan(prepared):
    def fingerprint(fold=0):
        return open_volumes("auto", str(prepared), "val", fold, 5, SPEC).fingerprint

    first = fingerprint()
    assert fingerprint() == first and fingerprint(1) != first
    name = open_volumes("auto", str(prepared), "val", 0, 5, SPEC).name(0)
    with (prepared / f"{name}_x.npy").open("ab") as file:
        file.write(b"more")
    second = fingerprint()
    plan = read_plan(prepared)
    write_plan(prepared, dataclasses.replace(plan, spec=dataclasses.replace(SPEC, spacing=(2.0, 1.0))))
    assert len({first, second, fingerprint()}) == 3


def test_source_with_damaged_files(prepared):
    source = open_volumes("auto", str(prepared), "val", 0, 5, SPEC)
    path = prepared / f"{source.name(0)}_x.npy"
    whole = path.read_bytes()
    for content in (whole[:-1], whole[:60], b"", b"PK\x03\x04" + whole, b"no such thing" * 50):
        path.write_bytes(content)
        with pytest.raises(BadSample, match=f"^{source.name(0)}: .*prepare"):
            source.image(0)
    np.save(path, np.load(prepared / f"{source.name(0)}_y.npy"))
    with pytest.raises(BadSample, match="is uint8 of shape .* the plan says float32"):
        source.image(0)
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(BadSample, match="prepare"):
        source.image(0)
    path.unlink()
    with pytest.raises(BadSample, match="cannot be read"):
        source.image(0)
    with pytest.raises(BadData, match="_x.npy cannot be read"):
        open_volumes("auto", str(prepared), "val", 0, 5, SPEC)


def test_source_of_a_folder_without_labels(prepared):
    plan = read_plan(prepared)
    cases = tuple(dataclasses.replace(case, label=None) for case in plan.cases)
    write_plan(prepared, dataclasses.replace(plan, mode="val", cases=cases))
    with pytest.raises(UsageError, match="prepared with --mode val.*--mode training"):
        open_volumes("auto", str(prepared), "train", 0, 5, SPEC)


def test_source_of_nothing(prepared, tmp_path):
    with pytest.raises(UsageError, match="none' does not exist.*expected a folder with plan.json"):
        open_volumes("auto", str(tmp_path / "none"), "train", 0, 5, SPEC)
    with pytest.raises(UsageError, match="unknown --data.source 'folder'"):
        open_volumes("folder", str(prepared), "train", 0, 5, SPEC)
    with pytest.raises(UsageError, match="--data.fold 5: with 5 folds use 0 to 4"):
        open_volumes("auto", str(prepared), "train", 5, 5, SPEC)


@pytest.mark.parametrize(("spec", "shape"), [(SPEC, (64, 16, 8)), (spec_of("04", 3), (40, 56, 40))])
def test_synthetic_volumes(spec, shape):
    train = open_volumes("auto", "synthetic:samples=16", "train", 0, 5, spec)
    val = open_volumes("synthetic", "synthetic:samples=16", "val", 0, 5, spec)
    assert (len(train), len(val)) == (16, 2) and train.fingerprint != val.fingerprint
    image, label = train.image(3), train.label(3)
    assert image.shape == (spec.channels, *shape) and image.dtype == np.float32 and train.shape(3) == shape
    assert label.shape == shape and label.dtype == np.uint8
    assert np.array_equal(image, train.image(3)) and np.array_equal(label, train.label(3))
    assert not np.array_equal(label, train.label(4)) and not np.array_equal(label, val.label(3))
    # Every class is there, and shows.
    counts = np.bincount(label.ravel(), minlength=len(spec.classes))
    assert len(counts) == len(spec.classes) and counts.min() > 20
    levels = [image[0][label == number].mean() for number in range(len(spec.classes))]
    assert abs(levels[0]) < 0.05 and min(abs(levels[1]), abs(levels[2])) > 0.1


def test_synthetic_volumes_take_their_sizes_from_the_recipe():
    assert len(open_volumes("auto", "synthetic:", "train", 0, 5, SPEC)) == 64
    with pytest.raises(UsageError, match="take classes and size from the recipe"):
        open_volumes("auto", "synthetic:size=32", "train", 0, 5, SPEC)


def test_a_prepared_folder_decides_the_task_unless_one_was_typed(prepared):
    data = SegmentationData(path=str(prepared), task="01")
    found = data.look(Path("runs/none"), ())
    assert found.fields == {"task": "own"} and found.line == f"data: {describe_found(str(prepared))}"
    assert found.said == f"12 cases of task own in {prepared.name}"
    assert found.steps is not None and found.steps(4) == 9  # each has four slices or more
    assert data.look(Path("runs/none"), {"task"}).fields == {}
    assert SegmentationData(path="synthetic:samples=8").look(Path("runs/none"), ()) == DataFacts()


def test_what_was_found_is_told_without_torch(prepared, tmp_path):
    """In a process of its own, since other tests import torch into this one."""
    raw = tmp_path / "raw"
    for part in ("images", "masks"):
        (raw / part).mkdir(parents=True)
        (raw / part / "a.png").touch()
    script = (
        "import sys; from sightline.data.sources.decathlon import describe_found, found_fields\n"
        "for path in sys.argv[1:]: print(found_fields(path), describe_found(path))\n"
        "print('torch' in sys.modules)"
    )
    paths = [str(prepared), str(raw), str(tmp_path / "none"), "synthetic:samples=8"]
    told = subprocess.run([sys.executable, "-c", script, *paths], capture_output=True, text=True, check=True)
    plan = read_plan(prepared)
    assert told.stdout.splitlines() == [
        f"{{'task': '{plan.task}'}} {describe_found(str(prepared))}",
        "{} pairs of the same name in images and masks: 1 image with labels; not prepared",
        "{} ",
        "{} ",
        "False",
    ]


def test_cases_of_a_fold_are_counted(prepared):
    plan = read_plan(prepared)
    count = len(plan.cases)
    held_out = len(open_volumes("auto", str(prepared), "val", 0, 5, SPEC))
    about = f"volumes: 3 classes, {count - held_out} + {held_out} cases (fold 0 of 5), task {plan.task}"
    assert describe_found(str(prepared)) == about
    assert describe_found(str(prepared), 1, count + 1) == f"volumes: 3 classes, {count} cases, task {plan.task}"
    write_plan(prepared, dataclasses.replace(plan, task="own"))
    assert found_fields(str(prepared)) == {"task": "own"}


# Of configs.py of NVIDIA's nnU-Net (DeepLearningExamples): patch and spacing of slices, of volumes, and CT's lowest and
# highest value, mean and deviation. Spacings of equal sides are written once.
PUBLISHED = """
01 | 192 160 | 1 1 | 128 128 128 | 1 1 1 |
02 | 320 256 | 1.25 1.25 | 80 192 160 | 1.37 1.25 1.25 |
03 | 512 512 | 0.7676 0.7676 | 128 128 128 | 1 0.7676 0.7676 | -17 201 99.4 39.36
04 | 56 40 | 1 1 | 40 56 40 | 1 1 1 |
05 | 320 320 | 0.62 0.62 | 20 320 256 | 3.6 0.62 0.62 |
06 | 512 512 | 0.79 0.79 | 80 192 160 | 1.24 0.79 0.79 | -1024 325 -158.58 324.7
07 | 512 512 | 0.8 0.8 | 40 224 224 | 2.5 0.8 0.8 | -96 215 77.9 75.4
08 | 512 512 | 0.8 0.8 | 64 192 192 | 1.5 0.8 0.8 | -3 243 104.37 52.62
09 | 512 512 | 0.79 0.79 | 64 192 160 | 1.6 0.79 0.79 | -41 176 99.29 39.47
10 | 512 512 | 0.78 0.78 | 56 192 160 | 3 0.78 0.78 | -30 165.82 62.18 32.65
"""


@pytest.mark.parametrize("line", PUBLISHED.strip().splitlines(), ids=lambda line: line[:2])
def test_patches_spacings_and_ct_numbers_are_the_published_ones(line: str):
    _, *numbers = (tuple(float(each) for each in cell.split()) for cell in line.split("|"))
    task = TASKS[line[:2]]
    ct = () if task.ct is None else (task.ct.low, task.ct.high, task.ct.mean, task.ct.std)
    assert (task.flat.size, task.flat.spacing, task.deep.size, task.deep.spacing, ct) == tuple(numbers)
