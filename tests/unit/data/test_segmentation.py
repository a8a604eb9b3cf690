"""Volumes from their arrays to what the network sees: crops that share a batch, slices, whole volumes, bad files."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sightline.config import Run
from sightline.data.augment.segmentation import CARRIED, TOLERANCE
from sightline.data.loading import cache
from sightline.data.loading.loader import BadSamples, Loader
from sightline.data.loading.order import EvalOrder, TrainOrder
from sightline.data.segmentation import SegmentationData
from sightline.data.segmentation.dataset import SegmentationDataset
from sightline.data.sources.decathlon import folds
from sightline.data.volumes.plan import Case, VolumePlan, spec_of, write_plan
from sightline.errors import BadData, BadSample, UsageError
from sightline.hardware import devices
from sightline.hardware.world import World
from sightline.measure.benchmark import synthetic_data
from sightline.parts import DataSpec
from sightline.recipes import unet2d

CPU = devices.select("cpu")
DEPTHS = (9, 5, 12, 7, 10, 6, 8, 11, 9, 14)
CLASSES = ("background", "near", "far")
SPECS = {
    2: DataSpec(CLASSES, 2, (12, 10), (), (), spacing=(1.0, 1.0)),
    3: DataSpec(CLASSES, 2, (4, 8, 6), (), (), spacing=(1.0, 1.0, 1.0)),
}
# Much happens to few crops.
BUSY = dict.fromkeys(("zoom", "rotation", "noise", "blur", "brightness", "contrast", "gamma", "gamma_inverted"), 0.5)


def nothing(*_: object) -> None:
    pass


def write_folder(folder: Path, dim: int, task: str = "04", spec: DataSpec | None = None) -> Path:
    """Ten volumes as `sightline prepare decathlon` leaves them; every voxel is unlike 0."""
    folder.mkdir()
    cases = []
    for number, depth in enumerate(DEPTHS):
        random = np.random.default_rng(number)
        shape = (depth, 12, 10) if dim == 2 else (depth, 12 + number % 3, 10)
        np.save(folder / f"case{number}_x.npy", random.uniform(1, 2, (2, *shape)).astype(np.float32))
        np.save(folder / f"case{number}_y.npy", random.integers(0, 3, shape, dtype=np.uint8))
        files = f"case{number}_x.npy", f"case{number}_y.npy"
        cases.append(Case(f"case{number}", shape, shape, (0, 0, 0), shape, shape, (1.0, 1.0, 1.0), *files))
    write_plan(folder, VolumePlan(task, "Blobs", dim, "training", spec or SPECS[dim], tuple(cases), "raw"))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """For reading only."""
    root = tmp_path_factory.mktemp("volumes")
    return {dim: write_folder(root / str(dim), dim) for dim in (2, 3)}


@pytest.fixture
def data(folders: dict[int, Path]) -> SegmentationData:
    return SegmentationData(path=str(folders[2]), task="04", cache="off")


@pytest.fixture
def deep(folders: dict[int, Path]) -> SegmentationData:
    return SegmentationData(path=str(folders[3]), task="04", dim=3, cache="off")


@contextmanager
def opened(config: SegmentationData, workers: int = 0, batch: int = 8, on_bad=nothing, bind="bind") -> Iterator[Loader]:
    train, val = (getattr(config.open(split, seed=3), bind)(CPU, batch) for split in ("train", "val"))
    feeds: Any = {
        "train": (train, TrainOrder(len(train.dataset), batch, 3, samples_per_item=train.samples_per_item)),
        "val": (val, EvalOrder(len(val.dataset), batch)),
    }
    bad_samples = BadSamples(config.on_bad_sample, config.max_bad_samples, on_bad)
    loader = Loader(feeds, Run(workers=workers), CPU, World(), bad_samples, nothing)
    try:
        yield loader
    finally:
        loader.close()


def take(loader: Loader, feed: str, count: int) -> list[dict[str, torch.Tensor]]:
    """Finished batches, copied, because a batch is valid until the next one is asked for."""
    loader.seek(feed, 0, count)
    bound = loader.feeds[feed].feed.bound
    return [{k: v.clone() for k, v in bound.finish(loader.next(feed), torch.float32).items()} for _ in range(count)]


def arrays(folder: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    return np.load(folder / f"{name}_x.npy"), np.load(folder / f"{name}_y.npy")


# Training: crops that share a batch


@pytest.mark.parametrize(("nvol", "slices"), [(1, 8), (2, 4), (4, 2)])
def test_a_batch_is_shared_by_nvol_volumes(data: SegmentationData, nvol: int, slices: int):
    """The shallowest of these volumes has 5 slices, so that 8 of one are only had where all others are left out."""
    source = data.source("train")
    source.cases = [case for case in source.cases if case.shape[0] >= 8]
    dataset = SegmentationDataset(replace(data, nvol=nvol), source, "train", 0)
    bound = dataset.bind(CPU, 8)
    assert dataset.samples_per_item(8) == bound.samples_per_item == slices
    assert bound.layout["image"][0] == (2, slices, 12, 10)
    order = TrainOrder(len(dataset), 8, 0, samples_per_item=bound.samples_per_item)
    assert order.steps_per_epoch == len(source) // nvol
    assert order.local_batch == nvol


@pytest.mark.parametrize(
    ("batch", "nvol", "found"), [(8, 1, 2), (8, 2, 2), (8, 3, 4), (4, 1, 1), (64, 1, 16), (7, 1, 7), (1, 1, 1)]
)
def test_nvol_rises_until_no_slice_is_padding(data: SegmentationData, batch: int, nvol: int, found: int):
    """Fold 0 leaves the volume of 5 slices in training: no volume gives more than these."""
    dataset = replace(data, nvol=nvol).open("train", 0)
    bound = dataset.bind(CPU, batch)
    assert dataset.shapes[:, 0].min() == 5
    assert bound.samples_per_item * found == batch
    note = " ".join(bound.notes)
    assert (f"takes {found} volumes, more than data.nvol={nvol}:" in note) == (found != nvol)
    assert ("case1 has only 5" in note) == (batch % nvol == 0 and found != nvol)
    plain = replace(data, nvol=nvol, augment="off").open("train", 0).bind(CPU, batch)
    assert all((plain.load(0, index)["image"] > 0).all() for index in range(len(dataset)))


def test_more_volumes_than_slices_are_refused(data: SegmentationData):
    with pytest.raises(UsageError, match="nvol=9 volumes cannot share a batch of 8 slices; use --data.nvol 8"):
        replace(data, nvol=9).open("train", 0).bind(CPU, 8)


@pytest.mark.parametrize("augment_on", ["host", "device"])
@pytest.mark.parametrize("dim", [2, 3])
def test_samples_have_the_declared_layout(data, deep, dim: int, augment_on: str):
    config = replace(data if dim == 2 else deep, augment_on=augment_on)
    for split in ("train", "val"):
        bound = config.open(split, 0).bind(CPU, 4)
        for index in (0, len(bound.dataset) - 1):
            sample = bound.load(0, index)
            assert {key: (value.shape, str(value.dtype)) for key, value in sample.items()} == bound.layout
        travels = split == "train" and augment_on == "device"
        assert set(CARRIED).issubset(bound.layout) == travels


def test_without_augmentation_a_crop_is_part_of_its_volume(data: SegmentationData, folders):
    bound = replace(data, augment="off", augment_on="device").open("train", 0).bind(CPU, 8)
    starts = set()
    for epoch in range(12):
        sample = bound.load(epoch, 7)
        image, label = arrays(folders[2], bound.dataset.name(7))
        start = int(np.flatnonzero((image[0] == sample["image"][0, 0]).all((1, 2)))[0])
        starts.add(start)
        assert np.array_equal(sample["image"], image[:, start : start + 4])
        assert np.array_equal(sample["label"], label[start : start + 4])
    assert len(starts) > 2


def test_finish_makes_slices_of_crops(data: SegmentationData):
    bound = replace(data, augment="off").open("train", 0).bind(CPU, 8)
    samples = [bound.load(0, index) for index in (3, 5)]
    batch = {key: torch.from_numpy(np.stack([s[key] for s in samples])) for key in samples[0]}
    found = bound.finish({**batch, "index": torch.tensor([3, 5])}, torch.bfloat16)
    assert found["image"].shape == (8, 2, 12, 10) and found["image"].dtype == torch.bfloat16
    assert found["image"].is_contiguous(memory_format=torch.channels_last)
    assert found["label"].shape == (8, 12, 10) and found["label"].dtype == torch.int64
    for number in range(8):
        item, place = divmod(number, 4)
        assert torch.equal(found["image"][number], torch.from_numpy(samples[item]["image"][:, place]).bfloat16())
        assert np.array_equal(found["label"][number], samples[item]["label"][place])


def test_finish_of_patches(deep: SegmentationData):
    bound = deep.open("train", 0).bind(CPU, 2)
    assert bound.samples_per_item == 1 and bound.layout["image"][0] == (2, 4, 8, 6)
    sample = bound.load(0, 0)
    batch = {key: torch.from_numpy(value)[None].repeat_interleave(2, 0) for key, value in sample.items()}
    found = bound.finish(batch, torch.float32)
    assert found["image"].is_contiguous(memory_format=torch.channels_last_3d)
    assert np.array_equal(found["image"][1], sample["image"]) and np.array_equal(found["label"][1], sample["label"])


@pytest.mark.parametrize("dim", [2, 3])
def test_the_device_sees_what_the_host_makes(data, deep, dim: int):
    """Batches of both ways, from loader to network, under the autocast region that the step opens."""
    found = {}
    for augment_on in ("host", "device"):
        config = replace(data if dim == 2 else deep, augment_on=augment_on, **BUSY)
        bound = config.open("train", 1).bind(CPU, 16)
        samples = [bound.load(epoch, index) for epoch in range(4) for index in range(len(bound.dataset))]
        batch = {key: torch.from_numpy(np.stack([s[key] for s in samples])) for key in samples[0]}
        with torch.autocast("cpu", torch.bfloat16):
            found[augment_on] = bound.finish(batch, torch.float32)
    host, device = found["host"], found["device"]
    assert host.keys() == device.keys() == {"image", "label"}
    assert torch.equal(host["label"], device["label"])
    assert (host["image"] - device["image"]).abs().max() <= TOLERANCE * host["image"].abs().max()


def test_finish_compiles_to_one_graph(data: SegmentationData):
    bound = replace(data, augment_on="device", **BUSY).open("train", 1).bind(CPU, 8)
    samples = [bound.load(0, index) for index in (0, 4)]
    batch = {key: torch.from_numpy(np.stack([s[key] for s in samples])) for key in samples[0]}

    def finish(batch):
        with torch.autocast("cpu", torch.bfloat16):
            return bound.finish(batch, torch.float32)

    expected, found = finish(batch), torch.compile(finish, fullgraph=True, dynamic=False, backend="eager")(batch)
    assert torch.equal(found["label"], expected["label"])
    torch.testing.assert_close(found["image"], expected["image"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("augment_on", ["host", "device"])
def test_loader_processes_change_no_bit(data: SegmentationData, augment_on: str):
    config = replace(data, augment_on=augment_on, **BUSY)
    seen = []
    for workers in (0, 2):
        with opened(config, workers) as loader:
            seen.append([*take(loader, "train", 6), *take(loader, "val", 3)])
    for one, other in zip(*seen, strict=True):
        assert one.keys() == other.keys()
        for key in one:
            assert torch.equal(one[key], other[key]), key


def test_augmentation_moves_to_accelerators_by_itself(data: SegmentationData):
    class Accelerator(devices.Device):
        def name(self) -> str:
            return "a GPU"

    gpu = Accelerator(kind="cuda")
    for augment_on, expected in (("auto", (False, True)), ("host", (False, False)), ("device", (True, True))):
        for device, on_device in zip((CPU, gpu), expected, strict=True):
            bound = replace(data, augment_on=augment_on).open("train", 0).bind(device, 8)
            said = f"augmented on {device.name()}" in " ".join(bound.notes)
            assert set(CARRIED).issubset(bound.layout) == on_device == said
    for other in (replace(data, augment="off").open("train", 0), data.open("val", 0)):
        assert not set(CARRIED) & set(other.bind(gpu, 8).layout)


# Evaluation


def test_every_slice_once_and_as_it_is(data: SegmentationData, folders):
    expected = [f"case{number}" for number in folds(10, 5)[0]]
    with opened(replace(data, **BUSY), batch=4) as loader:
        dataset = loader.feeds["val"].feed.bound.dataset
        batches = take(loader, "val", loader.feeds["val"].order.steps_per_epoch)
    assert len(dataset) == sum(DEPTHS[int(name[4:])] for name in expected)
    place = dict.fromkeys(expected, 0)
    seen = 0
    for batch in batches:
        assert batch["image"].is_contiguous(memory_format=torch.channels_last) and batch["label"].dtype == torch.int64
        for row in np.flatnonzero(batch["valid"]):
            name = expected[batch["volume"][row]]
            image, label = arrays(folders[2], name)
            assert np.array_equal(batch["image"][row], image[:, place[name]])
            assert np.array_equal(batch["label"][row], label[place[name]])
            assert dataset.name(int(batch["index"][row])) == f"{name} slice {place[name]}"
            place[name] += 1
            seen += 1
    assert seen == len(dataset) and all(place[name] == DEPTHS[int(name[4:])] for name in expected)


def test_whole_volumes_with_their_extent(deep: SegmentationData, folders):
    dataset = deep.open("val", 0)
    names = [dataset.name(index) for index in range(len(dataset))]
    assert names == [f"case{number}" for number in folds(10, 5)[0]]
    sides = np.array([arrays(folders[3], name)[1].shape for name in names]).max(0)
    for index, name in enumerate(names):
        image, label = arrays(folders[3], name)
        sample = dataset.bind(CPU, 2).load(5, index)
        assert sample["image"].shape == (2, *sides) and sample["extent"].tolist() == list(label.shape)
        z, y, x = label.shape
        assert np.array_equal(sample["image"][:, :z, :y, :x], image) and sample["image"].sum() == image.sum()
        assert np.array_equal(sample["label"][:z, :y, :x], label) and sample["label"].sum() == label.sum()
        assert sample["volume"] == index


def test_folds_share_nothing(data: SegmentationData):
    held_out = []
    for fold in range(5):
        sets = [replace(data, fold=fold).source(split) for split in ("train", "val")]
        train, val = ({source.name(i) for i in range(len(source))} for source in sets)
        assert not train & val and len(train | val) == 10
        held_out += sorted(val)
    assert sorted(held_out) == [f"case{n}" for n in range(10)]


# What is declared


@pytest.mark.parametrize(("task", "fold", "count"), [("01", 0, 387), ("01", 4, 388), ("04", 2, 208), ("09", 0, 32)])
def test_the_recipe_knows_its_task_without_data(task: str, fold: int, count: int):
    config = SegmentationData(task=task, fold=fold)
    assert config.declared() == (spec_of(task, 2), count)
    assert (config.declared_per_item(64), replace(config, nvol=4).declared_per_item(64)) == (64, 16)
    assert replace(config, dim=3).declared_per_item(2) == 1
    assert replace(config, path="synthetic:samples=8").declared() is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"task": "01"}, r"for task 04 \(Blobs\), the recipe is made for task 01; give --data.task 04, or"),
        ({"dim": 3}, "with dim 2, the recipe is made for dim 3; give --data.dim 2 --data.task 04, or .* --dim 3`"),
    ],
)
def test_a_folder_of_another_task_is_refused(data: SegmentationData, changes, said):
    with pytest.raises(BadData, match=said) as error:
        replace(data, **changes).open("train", 0)
    assert error.value.exit_code == 3


def test_own_tasks_are_known_from_their_folder(tmp_path: Path, data: SegmentationData):
    own = replace(data, task="own", path=str(write_folder(tmp_path / "own", 2, "own")))
    assert own.open("train", 0).spec == SPECS[2]
    with pytest.raises(UsageError, match="none with --data.path=''; give --data.path DIR .*needs --data real"):
        replace(own, path="").declared()
    with pytest.raises(BadData, match=r"empty holds no plan\.json.* run `sightline prepare decathlon"):
        replace(own, path=str(tmp_path / "empty")).open("train", 0)


@pytest.mark.parametrize("task", ["04", "own"])
@pytest.mark.parametrize("given", ["around", "around/Task04_Hippocampus"])
def test_a_task_that_was_not_prepared_is_distinguished_from_other_folders(tmp_path: Path, task: str, given: str):
    raw = tmp_path / "around" / "Task04_Hippocampus"
    raw.mkdir(parents=True)
    (raw / "dataset.json").write_text("{}")
    config = SegmentationData(task=task, dim=3, path=str(tmp_path / given))
    with pytest.raises(UsageError, match=f"`sightline prepare decathlon --source {raw} --out {raw}-prepared --dim 3`"):
        config.open("train", 0)


def test_drawn_volumes_are_offered_where_they_can_be_had():
    with pytest.raises(UsageError, match="no data: .* or --data.path synthetic:samples=64"):
        SegmentationData(task="04").open("train", 0)
    with pytest.raises(UsageError, match="no data: .*prepare decathlon`\\)$"):
        SegmentationData(task="own").open("train", 0)


def test_a_benchmark_of_an_own_task_on_drawn_volumes_names_the_way_out(tmp_path: Path, data: SegmentationData):
    """The shape of the data is known here, but not to the volumes that would be drawn."""
    own = replace(data, task="own", path=str(write_folder(tmp_path / "own", 2, "own")))
    recipe = replace(unet2d.recipe(), data=own)
    with pytest.raises(UsageError, match=r"none with --data.path='synthetic:samples=\d+'.*needs --data real"):
        synthetic_data(recipe, CPU)


def test_slices_that_are_not_patches_are_refused(tmp_path: Path, data: SegmentationData):
    other = dataclasses.replace(SPECS[2], size=(12, 12))
    folder = write_folder(tmp_path / "odd", 2, spec=other)
    with pytest.raises(BadData, match=r"case\d of .* has slices of \(12, 10\), expected \(12, 12\)"):
        replace(data, path=str(folder)).open("train", 0)


def test_drawn_volumes_take_the_shape_of_the_task():
    config = SegmentationData(task="04", path="synthetic:samples=16")
    bound = config.open("train", 0).bind(CPU, 64)
    assert bound.dataset.spec == spec_of("04", 2) and bound.samples_per_item == 64
    assert bound.notes == ()  # drawn, so there is nothing to keep in memory
    sample = bound.load(0, 3)
    assert sample["image"].shape == (1, 64, 56, 40) and set(np.unique(sample["label"])) <= {0, 1, 2}
    assert config.synthetic(bound.dataset.spec, 8) == replace(config, path="synthetic:samples=8")


@pytest.mark.parametrize(
    "changes",
    [{"task": "11"}, {"dim": 4}, {"fold": 5}, {"folds": 0}, {"nvol": -1}, {"nvol": 2, "dim": 3}, {"cache": "x"}],
)
def test_fields_that_cannot_work_are_refused(changes):
    with pytest.raises(UsageError, match=next(iter(changes))):
        SegmentationData(**changes)


def test_what_to_do_about_nvol_in_3d_is_said():
    """A recipe may have it, then only another flag helps."""
    with pytest.raises(UsageError, match=r"--data\.nvol 1"):
        SegmentationData(nvol=2, dim=3)


# Bad volumes


def damaged(folder: Path, name: str, how: str) -> None:
    image, label = arrays(folder, name)
    if how == "truncated":
        file = folder / f"{name}_x.npy"
        file.write_bytes(file.read_bytes()[:-7])
    elif how == "class":
        label[:, 3, 3] = 9
        np.save(folder / f"{name}_y.npy", label)
    else:
        image[0, 2, 2, 2] = np.nan
        np.save(folder / f"{name}_x.npy", image)


@pytest.mark.parametrize("how", ["truncated", "class"])
def test_a_bad_volume_is_named_or_left_out(tmp_path: Path, data: SegmentationData, how: str):
    folder = write_folder(tmp_path / "bad", 2)
    config = replace(data, path=str(folder), oversampling=0.0)
    names = {split: [s.name(i) for i in range(len(s))] for split in ("train", "val") for s in [config.source(split)]}
    bad = {"train": names["train"][2], "val": names["val"][1]}
    for name in bad.values():
        damaged(folder, name, how)
    for split, index in (("train", 2), ("val", DEPTHS[int(names["val"][0][4:])])):
        with pytest.raises(BadSample, match=bad[split]):
            config.open(split, 0).bind(CPU, 8).load(0, index)
    reported: list[Any] = []
    with opened(replace(config, on_bad_sample="skip"), on_bad=reported.append) as loader:
        batches = take(loader, "train", 4)
        assert all((batch["image"] > 0).all() for batch in batches)  # another volume came in its place
        evaluated = take(loader, "val", loader.feeds["val"].order.steps_per_epoch)
    assert sorted(each.name for each in reported) == sorted(bad.values())
    valid = torch.cat([batch["volume"][batch["valid"]] for batch in evaluated])
    assert len(valid) == DEPTHS[int(names["val"][0][4:])] and (valid == 0).all()


@pytest.mark.parametrize("is_label", [True, False], ids=["class 9", "NaN"])
def test_a_volume_with_one_bad_slice_is_left_out_whole(tmp_path: Path, data: SegmentationData, is_label: bool):
    """Else its Dice would be that of the other slices, or of a network that saw NaN."""
    folder = write_folder(tmp_path / "bad", 2)
    config = replace(data, path=str(folder), on_bad_sample="skip")
    source = config.source("val")
    image, label = arrays(folder, source.name(1))
    if is_label:
        label[-1, 3, 3] = 9
        np.save(folder / f"{source.name(1)}_y.npy", label)
    else:
        image[0, -1, 3, 3] = np.nan
        np.save(folder / f"{source.name(1)}_x.npy", image)
    reported: list[Any] = []
    with opened(config, on_bad=reported.append) as loader:
        evaluated = take(loader, "val", loader.feeds["val"].order.steps_per_epoch)
    valid = torch.cat([batch["volume"][batch["valid"]] for batch in evaluated])
    assert valid.tolist() == [0] * source.shape(0)[0]
    reason = "holds class 9" if is_label else "voxels are NaN or infinite; prepare it again"
    assert len(reported) == 1 and reason in reported[0].reason  # once, not once for each of its slices


def test_check_lists_all_that_is_wrong(tmp_path: Path, data: SegmentationData):
    assert data.check_samples(True, 1, nothing).problems == []
    facts = data.check_samples(True, 1, nothing).facts
    assert facts["train"]["volumes"] == 8 and facts["train"]["volumes with"] == dict.fromkeys(CLASSES, 8)
    folder = write_folder(tmp_path / "bad", 2)
    for name, how in (("case1", "truncated"), ("case2", "class"), ("case3", "nan")):
        damaged(folder, name, how)
    config = replace(data, path=str(folder))
    found = {(p.kind, p.where) for p in config.check_samples(True, 1, nothing).problems}
    assert found == {("unreadable", "case1"), ("label out of range", "case2"), ("not finite", "case3")}
    assert {p.where for p in config.check_samples(False, 1, nothing).problems} == {"case1"}  # others: inside
    (folder / "plan.json").unlink()
    with pytest.raises(
        UsageError, match="holds nothing that this recipe can read: files: .*expected a folder with plan.json"
    ):
        config.check_samples(True, 1, nothing)
    with pytest.raises(UsageError, match="no data"):
        SegmentationData().check_samples(True, 1, nothing)


# In memory


def test_volumes_in_memory_are_the_same_and_need_no_files(tmp_path: Path, data: SegmentationData):
    folder = write_folder(tmp_path / "kept", 2)
    plain = replace(data, path=str(folder))
    with opened(plain) as loader:
        expected = [*take(loader, "train", 4), *take(loader, "val", 3)]
    with opened(replace(plain, cache="ram"), workers=2) as loader:
        assert any("cache ON: 8 volumes of train" in note for note in loader.notes)
        for _ in range(3):  # both processes have met every volume
            take(loader, "train", 4), take(loader, "val", 3)
        for file in folder.glob("*.npy"):
            file.unlink()
        found = [*take(loader, "train", 4), *take(loader, "val", 3)]
    for one, other in zip(found, expected, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in expected[0])


@pytest.mark.parametrize("dim", [2, 3])
@pytest.mark.parametrize("augment", ["on", "off"])
def test_volumes_of_a_devices_memory_make_the_same_batches(dim, augment, data, deep):
    """The CPU stands in for the device."""
    config = replace(data if dim == 2 else deep, augment=augment, augment_on="device")
    with opened(config) as plain, opened(config, workers=2, bind="bind_to_memory") as loader:
        assert any("cache ON: 8 volumes of train need" in note for note in loader.notes)
        for feed, count in (("train", 6), ("val", 2)):
            for one, other in zip(take(plain, feed, count), take(loader, feed, count), strict=True):
                assert one.keys() == other.keys()
                assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_devices_memory_that_is_too_small_is_named_before_it_is_filled(data: SegmentationData, monkeypatch):
    monkeypatch.setattr(type(CPU), "memory_bytes", lambda device: (0, 2**16))
    with pytest.raises(UsageError, match=r"8 volumes of train need .*0.1 MiB are free, of which the cache takes 70%"):
        data.open("train", 0).bind_to_memory(CPU, 8)
    with pytest.raises(UsageError, match="data.augment_on=host cannot be combined with data.cache=gpu"):
        replace(data, cache="gpu", augment_on="host")


def test_volumes_that_do_not_fit_are_not_kept(data: SegmentationData, monkeypatch):
    monkeypatch.setattr(cache, "available_bytes", lambda: 1000)
    bound = replace(data, cache="auto").open("train", 0).bind(CPU, 4)
    assert bound.notes[0].startswith("cache OFF: 8 volumes of train need")
    reader = bound.load.args[0]
    assert reader.cache is None
    with pytest.raises(UsageError, match="--data.cache ram: 8 volumes of train need"):
        replace(data, cache="ram").open("train", 0).bind(CPU, 4)


def test_the_report_of_a_run_counts_voxels(data: SegmentationData, folders, monkeypatch):
    dataset = data.open("train", seed=3)
    source = dataset.source
    labels = [np.load(folders[2] / f"{source.name(index)}_y.npy") for index in range(len(source))]
    counts = np.stack([np.bincount(label.ravel(), minlength=3) for label in labels])
    facts = dataset.facts(lambda: False)
    assert (facts.kind, facts.counted, facts.sizes) == ("volumes", "voxels", tuple(label.shape for label in labels))
    assert facts.counts == tuple(counts.sum(0)) and facts.counted_in == len(labels)
    assert dataset.facts(lambda: True).counts == (0, 0, 0)
    for most, counted in ((counts[:2].sum(), 2), (counts[:2].sum() - 1, 1), (1, 1)):
        monkeypatch.setattr("sightline.data.segmentation.dataset._MOST_VOXELS", most)
        facts = dataset.facts(lambda: False)
        assert facts.counts == tuple(counts[:counted].sum(0)) and facts.counted_in == counted
