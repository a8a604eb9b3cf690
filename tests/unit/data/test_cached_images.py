"""Images with a label that are kept in memory, or in that of the device: the same batches as without."""

import shutil
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sightline import cli
from sightline import config as configs
from sightline.config import Run
from sightline.data.classification import ClassificationData
from sightline.data.loading import cache
from sightline.data.loading.loader import BadSamples, Loader
from sightline.data.loading.order import EvalOrder, TrainOrder
from sightline.errors import BadSample, UsageError
from sightline.hardware import devices
from sightline.hardware.world import World
from sightline.train.batch_size import measure_batch

CPU = devices.select("cpu")


def nothing(*_) -> None:
    pass


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Smooth JPEGs of many sizes, a PNG among them."""
    root = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for split, count in (("train", 19), ("val", 7)):
        for number in range(count):
            height, width = (int(side) for side in rng.integers(30, 90, 2))
            rows, columns = np.mgrid[0:height, 0:width]
            smooth = np.stack([rows * 2 % 256, columns * 2 % 256, rows + columns + number], 2).astype(np.uint8)
            folder = root / split / f"c{number % 3}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(smooth).save(folder / f"{number:02d}.{'png' if number == 4 else 'jpg'}")
    return root


def at(path: Path, **fields) -> ClassificationData:
    return ClassificationData(path=str(path), size=32, eval_resize=40, eval_size=32, **{"cache": "off", **fields})


@contextmanager
def opened(config: ClassificationData, workers: int = 0, bind="bind", on_bad=nothing):
    sets = [config.open(split, seed=3) for split in ("train", "val")]
    how = {"bind": lambda each: each.bind(CPU, 5), "memory": lambda each: each.bind_to_memory(CPU)}
    how["decoder"] = lambda each: each.bind_to_decoder()
    train, val = map(how[bind], sets)
    orders = {"train": (train, TrainOrder(len(train.dataset), 5, 3)), "val": (val, EvalOrder(len(val.dataset), 5))}
    bad_samples = BadSamples(config.on_bad_sample, config.max_bad_samples, on_bad)
    loader = Loader(orders, Run(workers=workers), CPU, World(), bad_samples, nothing)
    try:
        yield loader
    finally:
        loader.close()


def take(loader: Loader, feed: str, count: int, start: int = 0) -> list[dict[str, torch.Tensor]]:
    loader.seek(feed, start, start + count)
    return [{key: value.clone() for key, value in loader.next(feed).items()} for _ in range(count)]


def assert_same(some: list[dict[str, torch.Tensor]], others: list[dict[str, torch.Tensor]]) -> None:
    for one, other in zip(some, others, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)


def forms(config: ClassificationData) -> tuple[cache.Form, cache.Form]:
    decoded, encoded = config.open("train", 3).forms(keeps_decoded=True)
    return decoded, encoded


@pytest.mark.parametrize("kept", ["decoded", "encoded"])
@pytest.mark.parametrize("bind", ["bind", "decoder"])
def test_the_cache_changes_no_bit_and_is_read_instead_of_the_files(photos, tmp_path, monkeypatch, kept, bind):
    (tmp_path / "data").symlink_to(photos)
    plain, config = at(photos), at(tmp_path / "data", cache="ram")
    decoded, encoded = forms(plain)
    assert decoded.needed > 1.5 * encoded.needed > 0
    available = 2 * decoded.needed + 2 if kept == "decoded" else 2 * decoded.needed - 2
    monkeypatch.setattr(cache, "available_bytes", lambda: available)
    with opened(plain, bind=bind) as without, opened(config, bind=bind) as loader:
        what = "encoded" if bind == "decoder" else kept  # the device decodes, so only bytes can be kept
        assert loader.notes[0].startswith(f"cache ON: 19 {what} images of train need")
        assert_same(take(loader, "train", 8), take(without, "train", 8))
        assert_same(take(loader, "val", 2), take(without, "val", 2))
        take(loader, "train", 8, start=8)  # now every image was read
        (tmp_path / "data").unlink()
        assert_same(take(loader, "train", 6), take(without, "train", 6))


def test_processes_share_the_cache_and_a_resumed_run_sees_the_same(photos):
    with opened(at(photos)) as without, opened(at(photos, cache="auto"), workers=2) as loader:
        assert loader.notes[0].startswith("cache ON: 19 decoded images of train need")
        assert_same(take(loader, "train", 6), take(without, "train", 6))
        kept = loader.feeds["train"].feed.bound.cache
        assert sum(kept.get(index) is not None for index in range(19)) >= 15
        assert_same(take(loader, "train", 4, start=6), take(without, "train", 4, start=6))
    with opened(at(photos, cache="auto")) as again:
        assert_same(take(again, "train", 4, start=6), take_plain(photos, 4, 6))


def take_plain(photos: Path, count: int, start: int) -> list[dict[str, torch.Tensor]]:
    with opened(at(photos)) as without:
        return take(without, "train", count, start)


def test_several_labels_are_kept_with_their_image(photos, tmp_path):
    table = tmp_path / "labels.csv"
    names = sorted(path.relative_to(photos) for path in (photos / "train").rglob("*.jpg"))
    rows = [f"{photos / name},{'a;b' if number % 2 else 'b'}" for number, name in enumerate(names)]
    table.write_text("\n".join(["file,label", *rows]) + "\n")
    with opened(at(tmp_path)) as without, opened(at(tmp_path, cache="ram")) as loader:
        for _ in range(2):
            assert_same(take(loader, "train", 4), take(without, "train", 4))
    assert without.feeds["train"].feed.bound.dataset.spec.multi_label


def test_auto_keeps_nothing_where_it_does_not_fit_and_ram_says_what_is_missing(photos, monkeypatch):
    _, encoded = forms(at(photos))
    monkeypatch.setattr(cache, "available_bytes", lambda: encoded.needed - 1)
    with opened(at(photos, cache="auto")) as loader:
        assert loader.notes[0].startswith("cache OFF: 19 encoded images of train need")
        assert loader.notes[0].endswith("of which auto takes 50%")
        assert loader.feeds["train"].feed.bound.cache is None
    with pytest.raises(UsageError, match=r"--data.cache ram: 19 encoded images of train need .* are available; use"):
        at(photos, cache="ram").open("train", 3).bind(CPU, 5)


def test_an_image_that_is_damaged_below_its_crop_is_used_as_without_a_cache(photos, tmp_path):
    """Bytes are lost near the end of the scan, which decoders report only if they read that far."""
    names = ("c0/00.jpg", "c1/01.jpg", "c2/02.jpg")
    for name in (f"{split}/{name}" for split in ("train", "val") for name in names):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        data = bytearray((photos / name).read_bytes())
        data[-40:-2] = b"\x55" * 38
        (tmp_path / name).write_bytes(data)
    dataset = at(tmp_path, cache="ram").open("train", 3)
    kept = dataset.bind(CPU, 3)
    for epoch in range(4):
        for index in range(3):
            assert np.array_equal(kept.load(epoch, index)["image"], dataset.load(epoch, index)["image"])


# The memory of the device; the CPU stands in for it


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "legacy"])
def test_crops_from_a_devices_memory_are_those_of_the_loader(photos, interpolation):
    config = at(photos, interpolation=interpolation, random_erase=0.5, mixup=0.2, class_weights="balanced")
    with opened(config) as without, opened(config, workers=1, bind="memory") as loader:
        assert "cache ON: 19 decoded images of train need" in loader.notes[0]
        assert "s to fill" in loader.notes[-1]
        for feed, count in (("train", 7), ("val", 2)):
            for one, other in zip(take(without, feed, count), take(loader, feed, count), strict=True):
                assert one.keys() == other.keys()
                levels = (one.pop("image").int() - other.pop("image").int()).abs()
                assert levels.max() <= 2 and levels.float().mean() < 0.3
                assert_same([one], [other])


def test_a_resumed_run_sees_the_same_from_a_devices_memory(photos):
    with opened(at(photos), bind="memory") as first:
        batches = take(first, "train", 9)
    with opened(at(photos), workers=1, bind="memory") as second:
        assert_same(take(second, "train", 4, start=5), batches[5:])


def test_a_damaged_image_never_reaches_a_devices_memory(photos, tmp_path):
    for split in ("train", "val"):
        for number in range(3):
            place = tmp_path / split / f"c{number}" / f"0{number}.jpg"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(
                (photos / split / f"c{number}" / f"0{number}.jpg").read_bytes()[: 200 if number else None]
            )
    for number in range(4):
        (tmp_path / "train" / "c0" / f"more{number}.jpg").write_bytes((photos / "train/c0/00.jpg").read_bytes())
    bad: list = []
    config = at(tmp_path, on_bad_sample="skip")
    with opened(config) as without, opened(config, bind="memory", on_bad=bad.append) as loader:
        for feed in ("train", "val"):
            for one, other in zip(take(without, feed, 1), take(loader, feed, 1), strict=True):
                assert torch.equal(one["label"], other["label"]) and torch.equal(one["index"], other["index"])
                assert (one["image"].int() - other["image"].int()).abs().max() <= 2
    assert {record.reason.partition(" ")[0] for record in bad} == {"JPEG"}
    with (
        pytest.raises(BadSample, match="--data.on-bad-sample skip"),
        opened(replace(config, on_bad_sample="fail"), bind="memory"),
    ):
        pass


def test_what_cannot_work_with_a_devices_memory_is_refused(photos, monkeypatch):
    with pytest.raises(UsageError, match="trains on the CPU; use --data.cache ram"):
        at(photos, cache="gpu").open("train", 3).bind(CPU, 5)
    cuda = devices.KINDS["cuda"]
    for fields, reason in (
        ({"policy": "augmix"}, "--data.policy augmix works on the CPU"),
        ({"image_type": "bf16"}, "--data.image-type bf16 is made on the CPU"),
        ({"downscale": "dct"}, "--data.downscale dct works on the CPU"),
    ):
        with pytest.raises(UsageError, match=f"--data.cache gpu: {reason}; use --data.cache ram"):
            at(photos, cache="gpu", **fields).open("train", 3).bind(cuda, 5)
    with pytest.raises(UsageError, match=r"cache='disk' is unknown; use one of auto, off, ram, gpu"):
        at(photos, cache="disk")
    monkeypatch.setattr(type(CPU), "memory_bytes", lambda device: (0, 2**17))
    with pytest.raises(
        UsageError, match=r"--data.cache gpu: 19 decoded images of train need 0.2 MiB on .*, 0.1 MiB are"
    ):
        at(photos).open("train", 3).bind_to_memory(CPU)


def test_a_batch_is_not_measured_where_the_cache_takes_the_memory(photos):
    recipe = configs.load("demo_classification", [f"--data.path={photos}", "--data.cache=gpu"])[0]
    with pytest.raises(UsageError, match="global_batch=auto cannot be combined with data.cache=gpu"):
        measure_batch(recipe, Run(), CPU, World())


# As a user types it


def test_a_run_learns_the_same_with_a_cache_and_resumes_in_it_to_the_same_bits(photos, tmp_path, capsys):
    shown = [f"--data.path={photos}", "--data.size=32", "--train.global-batch=4", "--train.epochs=2"]
    how = ["--run.workers=0", "--run.keep=9"]

    def weights(name: str, *flags: str) -> list[bytes]:
        assert not cli.main(["train", "demo_classification", *shown, *how, f"--run.out={tmp_path / name}", *flags])
        found = sorted((tmp_path / name).glob("checkpoints/ckpt-*"))
        return [(folder / "model.safetensors").read_bytes() for folder in found]

    plain = weights("off", "--data.cache=off")
    assert len(plain) == 2 and weights("ram", "--data.cache=ram") == plain
    assert "cache ON: 19 decoded images of train need" in capsys.readouterr().out
    shutil.rmtree(sorted((tmp_path / "ram").glob("checkpoints/ckpt-*"))[-1])
    (tmp_path / "ram" / "log.jsonl").unlink()
    assert weights("ram", "--data.cache=ram") == plain
    assert "resuming from step 4" in capsys.readouterr().out
