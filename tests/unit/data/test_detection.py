"""Images with boxes from their files to what the network sees; caches, static and fake batches, both forms."""

import dataclasses
import json
import shutil
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file

from sightline.config import Run
from sightline.data.detection import DetectionData
from sightline.data.detection.dataset import MOST_BOXES
from sightline.data.loading import cache
from sightline.data.loading.loader import BadSamples, Loader
from sightline.data.loading.order import EvalOrder, TrainOrder
from sightline.data.loading.static import StaticDataset, dump
from sightline.data.prepare import static as prepare_static
from sightline.errors import BadData, BadSample, UsageError
from sightline.hardware import devices
from sightline.hardware.world import World
from sightline.parts import DataSpec

CPU = devices.select("cpu")
SMALL = DetectionData(size=48, max_boxes=12)
SYNTHETIC = dataclasses.replace(SMALL, path="synthetic:classes=5,samples=40,size=60")


def nothing(*_: object) -> None:
    pass


def at(path: Path | str, **changes) -> DetectionData:
    return dataclasses.replace(SMALL, path=str(path), **changes)


@contextmanager
def opened(config: DetectionData, workers: int = 0, batch: int = 4, on_bad=nothing, check_stop=nothing, bind="bind"):
    sets = [config.open(split, seed=3) for split in ("train", "val")]
    train, val = (each.bind(CPU, batch) if bind == "bind" else each.bind_to_memory(CPU) for each in sets)
    feeds = {
        "train": (train, TrainOrder(len(train.dataset), batch, 3)),
        "val": (val, EvalOrder(len(val.dataset), batch)),
    }
    bad_samples = BadSamples(config.on_bad_sample, config.max_bad_samples, on_bad)
    loader = Loader(feeds, Run(workers=workers), CPU, World(), bad_samples, check_stop)
    try:
        yield loader
    finally:
        loader.close()


def take(loader: Loader, feed: str, count: int, start: int = 0) -> list[dict[str, torch.Tensor]]:
    """Finished batches, copied, because a batch is valid until the next one is asked for."""
    loader.seek(feed, start, start + count)
    bound = loader.feeds[feed].feed.bound
    return [{k: v.clone() for k, v in bound.finish(loader.next(feed), torch.float32).items()} for _ in range(count)]


def assert_same(some: list[dict[str, torch.Tensor]], others: list[dict[str, torch.Tensor]]) -> None:
    assert len(some) == len(others)
    for one, other in zip(some, others, strict=True):
        assert one.keys() == other.keys()
        for key in one:
            assert one[key].dtype == other[key].dtype and torch.equal(one[key], other[key]), key


# One image


@pytest.mark.parametrize("changes", [{}, {"jitter": "mlperf"}, {"jitter": "off"}, {"augment": "off"}])
def test_samples_have_the_declared_layout(drawn_boxes: Path, changes):
    for split in ("train", "val"):
        dataset = at(drawn_boxes, **changes).open(split, seed=0)
        sample = dataset.load(0, 2)
        assert {key: (value.shape, str(value.dtype)) for key, value in sample.items()} == dataset.layout
        keys = set(dataset.layout) - {"image", "boxes", "labels"}
        carried = {"": {"jitter"}, "mlperf": {"jitter", "jitter_order"}}.get(changes.get("jitter", ""), set())
        truth = {"image_id", "height", "width", "truth_boxes", "truth_labels", "truth_area", "truth_crowd"}
        assert keys == (truth if split == "val" else carried if "augment" not in changes else set())


def test_evaluation_brings_the_annotations_to_the_last_digit(shared_data: Path):
    root = shared_data / "coco-tiny"
    content = json.loads((root / "annotations" / "instances_val2017.json").read_text())
    dataset = at(root, max_boxes=200).open("val", seed=0)
    assert dataset.spec.class_ids == tuple(sorted(c["id"] for c in content["categories"]))
    assert dataset.spec.classes[:2] == ("person", "bicycle") and len(dataset.spec.classes) == 80
    for index in range(0, 80, 7):
        sample = dataset.load(0, index)
        image = next(i for i in content["images"] if i["id"] == sample["image_id"])
        expected = [a for a in content["annotations"] if a["image_id"] == image["id"]]
        count = len(expected)
        assert (sample["height"], sample["width"]) == (image["height"], image["width"])
        assert sample["truth_boxes"][:count].tolist() == [a["bbox"] for a in expected]
        assert sample["truth_area"][:count].tolist() == [a["area"] for a in expected]
        assert sample["truth_crowd"][:count].tolist() == [bool(a["iscrowd"]) for a in expected]
        ids = [dataset.spec.class_ids[label - 1] for label in sample["truth_labels"][:count]]
        assert ids == [a["category_id"] for a in expected]
        assert not sample["truth_labels"][count:].any() and not sample["truth_boxes"][count:].any()
        # The network gets the same boxes as shares of the image.
        x, y, w, h = sample["truth_boxes"][:count].T
        edges = np.stack(
            [y / image["height"], x / image["width"], (y + h) / image["height"], (x + w) / image["width"]], 1
        )
        np.testing.assert_allclose(sample["boxes"][:count], edges, rtol=0, atol=1e-7)
        assert np.array_equal(sample["labels"][:count], sample["truth_labels"][:count])


def test_boxes_that_cannot_be_trained_on_stay_in_the_truth(drawn_boxes: Path, tmp_path: Path):
    root = shutil.copytree(drawn_boxes, tmp_path / "data")
    file = root / "annotations" / "instances_val2017.json"
    content = json.loads(file.read_text())
    image = content["images"][0]
    flat = {**content["annotations"][0], "id": 10**9, "image_id": image["id"], "bbox": [1.5, 2.5, 0.0, 7.0]}
    content["annotations"].append(flat)
    file.write_text(json.dumps(content))
    dataset = at(root).open("val", seed=0)
    index = next(i for i in range(len(dataset)) if dataset.load(0, i)["image_id"] == image["id"])
    sample = dataset.load(0, index)
    count = int((sample["truth_labels"] > 0).sum())
    assert sample["truth_boxes"][count - 1].tolist() == [1.5, 2.5, 0.0, 7.0]
    assert (sample["labels"] > 0).sum() == count - 1


def test_images_without_a_box_are_evaluated_and_not_trained_on(drawn_boxes: Path):
    """Every 16th drawn image shows nothing."""
    train, val = (at(drawn_boxes).open(split, seed=0) for split in ("train", "val"))
    assert len(train) == 19 and len(val) == 13
    assert all((train.load(0, index)["labels"] > 0).any() for index in range(19))


def test_training_depends_on_seed_epoch_and_index_alone(drawn_boxes: Path):
    dataset = at(drawn_boxes).open("train", seed=1)
    first = dataset.load(2, 3)
    dataset.load(0, 0)
    again = at(drawn_boxes).open("train", seed=1).load(2, 3)
    assert all(np.array_equal(first[key], again[key]) for key in first)
    for other in (dataset.load(3, 3), at(drawn_boxes).open("train", seed=2).load(2, 3)):
        assert not np.array_equal(first["jitter"], other["jitter"])


def test_augment_off_is_evaluations_view(drawn_boxes: Path):
    dataset = at(drawn_boxes, augment="off").open("train", seed=1)
    one, other = dataset.load(0, 3), dataset.load(9, 3)
    assert one.keys() == {"image", "boxes", "labels"} and all(np.array_equal(one[k], other[k]) for k in one)


@pytest.mark.parametrize("turned", [1, 3, 6])
def test_annotations_decide_which_way_up_an_image_is(drawn_boxes: Path, tmp_path: Path, turned: int):
    """A tag that says "turn me" is believed only where the annotations have the sides of the turned image."""
    root = shutil.copytree(drawn_boxes, tmp_path / "data")
    plain = at(root).open("val", seed=0)
    path = root / plain.name(1)
    expected = plain.load(0, 1)["image"]
    with Image.open(path) as image:
        exif = Image.Exif()
        exif[0x0112] = turned
        stored = image.copy()
        stored.save(path, "JPEG", quality=95, exif=exif)
    with Image.open(path) as image:
        assert image.size[::-1] != image.size and image.getexif()[0x0112] == turned
    found = at(root).open("val", seed=0).load(0, 1)["image"]
    assert np.abs(found.astype(int) - expected).mean() < 8  # encoded again, not turned
    file = root / "annotations" / "instances_val2017.json"
    content = json.loads(file.read_text())
    for entry in content["images"]:
        if path.name == entry["file_name"]:
            entry["height"], entry["width"] = entry["width"], entry["height"]
    file.write_text(json.dumps(content))
    swapped = at(root).open("val", seed=0)
    if turned == 6:
        upright = swapped.load(0, 1)["image"]
        assert upright.shape == (48, 48, 3) and np.abs(upright.astype(int) - expected).mean() > 8
    else:
        with pytest.raises(BadSample, match="pixels, but annotated as"):
            swapped.load(0, 1)


def test_damaged_images_are_bad_samples_and_may_be_skipped(drawn_boxes: Path, tmp_path: Path):
    root = shutil.copytree(drawn_boxes, tmp_path / "data")
    name = at(root).open("train", seed=0).name(4)
    path = root / name
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(BadSample, match=name):
        at(root).open("train", seed=0).load(0, 4)
    bad = []
    with opened(at(root, on_bad_sample="skip", cache="ram"), on_bad=bad.append) as loader:
        take(loader, "train", 4)
    assert [(record.feed, record.index) for record in bad] == [("train", 4)]
    with (
        opened(at(root, on_bad_sample="skip", max_bad_samples=0)) as loader,
        pytest.raises(BadData, match="raise --data.max-bad-samples"),
    ):
        take(loader, "train", 4)


# What is said of the whole


def test_the_spec_says_how_images_are_fed(drawn_boxes: Path):
    spec = at(drawn_boxes).open("train", seed=0).spec
    assert spec.size == (48, 48) and spec.mean == SMALL.mean and spec.std == SMALL.std and spec.channels == 3
    assert spec.class_ids == (1, 2, 4, 7, 13, 16, 25, 46, 70, 90) and len(spec.classes) == 10
    assert DataSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    old = {key: value for key, value in spec.to_json().items() if key != "class_ids"}
    assert DataSpec.from_json(old).class_ids == ()  # checkpoints from before


def test_what_is_declared_stands_in_for_a_path():
    spec, samples = DetectionData(classes=80, samples=117_266).declared()
    assert len(spec.classes) == 80 and samples == 117_266 and spec.size == (300, 300)
    assert SYNTHETIC.declared() is None
    with pytest.raises(UsageError, match="--data.classes N"):
        DetectionData().declared()


def test_too_many_boxes_and_other_classes_are_refused(drawn_boxes: Path):
    with pytest.raises(BadData, match=r"has \d+ boxes, more than max_boxes=1; use --data.max-boxes"):
        at(drawn_boxes, max_boxes=1).open("train", seed=0)
    with pytest.raises(BadData, match="has 10 classes, the recipe declares 80"):
        at(drawn_boxes, classes=80).open("train", seed=0)
    with pytest.raises(UsageError, match="no data: give --data.path"):
        SMALL.open("train", seed=0)


def test_an_image_of_too_many_boxes_is_named(tmp_path: Path):
    for split in ("train", "val"):
        (tmp_path / "images" / split).mkdir(parents=True)
        (tmp_path / "labels" / split).mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (64, 48)).save(tmp_path / "images" / split / f"{number}.png")
            line = "0 0.5 0.5 0.4 0.4\n"
            (tmp_path / "labels" / split / f"{number}.txt").write_text(line * (MOST_BOXES + (number == 1)))
    with pytest.raises(BadData, match=r"train/1.png of .* has 10001 boxes, at most 10000 are trained on; .* Cut it"):
        at(tmp_path, max_boxes=20_000).open("train", seed=0)
    (tmp_path / "labels" / "train" / "1.txt").write_text(line)
    assert len(at(tmp_path, max_boxes=MOST_BOXES).open("train", seed=0)) == 3


@pytest.mark.parametrize("wrong", [{"cache": "disk"}, {"max_boxes": 0}, {"static": "x", "fake": True}, {"crop": "x"}])
def test_fields_that_cannot_work_are_refused(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        DetectionData(**wrong)


# Batches


def test_every_image_is_evaluated_once(drawn_boxes: Path):
    """13 images in batches of 4: the last batch is filled up, and what fills it is not valid."""
    with opened(at(drawn_boxes)) as loader:
        batches = take(loader, "val", 4)
    ids = torch.cat([batch["image_id"][batch["valid"]] for batch in batches]).tolist()
    content = json.loads((drawn_boxes / "annotations" / "instances_val2017.json").read_text())
    assert len(ids) == 13 and sorted(ids) == sorted(image["id"] for image in content["images"])
    assert batches[3]["valid"].tolist() == [True, False, False, False]


@pytest.mark.parametrize("cached", ["off", "ram"])
def test_batches_are_the_same_from_workers(drawn_boxes: Path, cached: str):
    with opened(at(drawn_boxes, cache="off")) as here, opened(at(drawn_boxes, cache=cached), workers=2) as there:
        for feed, count in (("train", 12), ("val", 4)):  # three epochs of training
            assert_same(take(here, feed, count), take(there, feed, count))
        assert len(there.notes) == (2 if cached == "ram" else 0)


def test_both_forms_make_the_same_batches(shared_data: Path, as_records, tmp_path: Path):
    root = shared_data / "coco-tiny"
    out = as_records(root, tmp_path / "records")
    shutil.copytree(root / "annotations", out / "annotations", copy_function=shutil.copyfile)
    big = {"max_boxes": 60}
    with opened(at(root, **big), batch=8) as files, opened(at(out, **big), batch=8) as records:
        for feed in ("train", "val"):
            assert_same(take(files, feed, 2, start=3), take(records, feed, 2, start=3))


def test_records_alone_make_the_same_training_batches(drawn_boxes: Path, as_records, tmp_path: Path):
    """Without the json boxes are 32-bit shares, so the draws, and with them the pixels, are the same or nearly so."""
    out = as_records(drawn_boxes, tmp_path / "records")
    with opened(at(drawn_boxes)) as files, opened(at(out)) as records:
        for one, other in zip(take(files, "train", 4), take(records, "train", 4), strict=True):
            assert torch.equal(one["labels"], other["labels"]) and torch.equal(one["image"], other["image"])
            torch.testing.assert_close(one["boxes"], other["boxes"], rtol=0, atol=1e-6)


def test_the_cache_is_filled_once_and_then_read(drawn_boxes: Path, tmp_path: Path):
    root = shutil.copytree(drawn_boxes, tmp_path / "data")
    with opened(at(root, cache="ram"), workers=2) as loader:
        first = take(loader, "train", 4)  # all but the last three images
        kept = loader.feeds["train"].feed.bound.load.keywords["cache"]
        assert sum(kept.get(index) is not None for index in range(19)) >= 16
        for path in (root / "train2017").iterdir():
            path.write_bytes(b"gone")
        assert_same(take(loader, "train", 4), first)
        assert loader.notes[0].startswith("cache ON: 19 decoded images of train need") and "of val" in loader.notes[1]


def test_auto_says_why_it_is_off(drawn_boxes: Path, tmp_path: Path, monkeypatch):
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\n")
    monkeypatch.setattr(cache, "MEMINFO", tmp_path / "meminfo")
    with opened(at(drawn_boxes)) as loader:
        assert loader.notes[0].startswith("cache OFF: 19 encoded images of train need")
        assert loader.feeds["train"].feed.bound.load.keywords == {"cache": None}
    with pytest.raises(UsageError, match="--data.cache ram"), opened(at(drawn_boxes, cache="ram")):
        pass


def test_encoded_images_are_kept_where_decoded_ones_do_not_fit(drawn_boxes: Path, monkeypatch):
    dataset = at(drawn_boxes).open("train", seed=0)
    decoded, encoded = dataset.forms(keeps_decoded=True)
    monkeypatch.setattr(cache, "available_bytes", lambda: 2 * decoded.needed - 1)
    with opened(at(drawn_boxes, cache="off")) as plain, opened(at(drawn_boxes, cache="ram")) as loader:
        assert loader.notes[0].startswith("cache ON: 19 encoded images of train need") and encoded.needed > 0
        assert_same(take(loader, "train", 12), take(plain, "train", 12))


@pytest.mark.parametrize(("resize", "jitter"), [("tf", "tf"), ("antialias", "off")])
def test_images_of_a_devices_memory_make_the_same_batches(drawn_boxes: Path, resize, jitter):
    """The CPU stands in for the device: equal up to the antialiased filter's rounding."""
    config = at(drawn_boxes, resize=resize, jitter=jitter, cache="off")
    with opened(config) as plain, opened(config, workers=2, bind="bind_to_memory") as loader:
        assert loader.notes[0].startswith("cache ON: 19 decoded images of train need")
        for feed, count in (("train", 12), ("val", 4)):
            for one, other in zip(take(plain, feed, count), take(loader, feed, count), strict=True):
                assert one.keys() == other.keys()
                levels = (one.pop("image") - other.pop("image")).abs() * 255 * config.std[0]
                assert levels.max() <= (0.01 if resize == "tf" else 2.6)
                assert_same([one], [other])


def test_a_damaged_image_is_skipped_before_it_reaches_a_devices_memory(drawn_boxes: Path, tmp_path: Path):
    root = shutil.copytree(drawn_boxes, tmp_path / "data")
    path = root / at(root).open("train", seed=0).name(4)
    path.write_bytes(path.read_bytes()[:300])
    bad: list = []
    config = at(root, on_bad_sample="skip", cache="off")
    with opened(config) as plain, opened(config, on_bad=bad.append, bind="bind_to_memory") as loader:
        assert_same(take(loader, "train", 4), take(plain, "train", 4))
    assert [(record.feed, record.index) for record in bad] == [("train", 4)]
    with pytest.raises(BadSample, match="--data.on-bad-sample skip"), opened(at(root), bind="bind_to_memory"):
        pass


def test_a_device_is_needed_for_its_memory(drawn_boxes: Path):
    with (
        pytest.raises(UsageError, match="trains on the CPU; use --data.cache ram"),
        opened(at(drawn_boxes, cache="gpu")),
    ):
        pass


def test_nothing_is_cached_where_nothing_is_read():
    with opened(SYNTHETIC) as loader:
        assert loader.notes == []


# Fake and static batches


@pytest.mark.parametrize("workers", [0, 2])
def test_fake_repeats_the_first_real_batch(workers: int):
    with opened(SYNTHETIC) as real, opened(dataclasses.replace(SYNTHETIC, fake=True), workers) as fake:
        (first,) = take(real, "train", 1)
        assert_same(take(fake, "train", 14), [first] * 14)  # over the end of the epoch
        assert_same(take(fake, "val", 2), take(real, "val", 2))  # evaluation is real


def test_fake_stops_loading_once_it_has_its_batch():
    asked = []  # whether to stop: before each sample that is loaded, else once per batch
    with opened(dataclasses.replace(SYNTHETIC, fake=True), check_stop=lambda: asked.append(1)) as loader:
        take(loader, "train", 1)
        assert len(asked) == 4
        take(loader, "train", 3, start=5)
        assert len(asked) == 4 + 3


@pytest.fixture
def batches(tmp_path: Path) -> Path:
    dump(SYNTHETIC, tmp_path / "batches", batch=4, steps=3, seed=3, progress=nothing)
    return tmp_path / "batches"


@pytest.mark.parametrize("workers", [0, 1])
def test_static_batches_are_replayed_bit_by_bit(batches: Path, workers: int):
    """The batches that a run of that seed would have seen, then the same again."""
    with opened(SYNTHETIC) as real:
        expected = take(real, "train", 3)
    with opened(dataclasses.replace(SYNTHETIC, static=str(batches)), workers) as replay:
        found = take(replay, "train", 6)
        assert replay.feeds["train"].order.steps_per_epoch == 3
    assert_same(found[:3], expected)
    assert_same(found[3:], expected)
    assert found[0]["image"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "change",
    [{"batch": "2"}, {"batches": 0}, {"batches": 10**30}, {"spec": 3}, {"spec": {}}, {"format": None}, {"batch": [2]}],
    ids=str,
)
def test_static_batches_that_cannot_be_are_refused(batches: Path, tmp_path: Path, change: dict):
    folder = shutil.copytree(batches, tmp_path / "copy")
    facts = json.loads((folder / "batches.json").read_text()) | change
    (folder / "batches.json").write_text(json.dumps(facts))
    with pytest.raises(BadData, match="batches.json is (damaged|of another format)"):
        StaticDataset(folder)


def test_static_batches_say_what_they_are(batches: Path):
    dataset = dataclasses.replace(SMALL, static=str(batches)).open("train", seed=9)
    assert dataset.spec == SYNTHETIC.open("train", seed=3).spec and len(dataset) == 12
    assert dataset.name(5) == "batch-000001.safetensors:1"
    meta = {k: torch.empty((1, *s), dtype=getattr(torch, d), device="meta") for k, (s, d) in dataset.layout.items()}
    assert dataset.finish(meta, torch.bfloat16)["image"].shape == (1, 3, 48, 48)


def test_static_batches_of_another_size_or_damaged_are_refused(batches: Path):
    config = dataclasses.replace(SYNTHETIC, static=str(batches))
    reported = "has batches of 4 samples, this run takes 3 .* --train.global-batch 4"
    with pytest.raises(UsageError, match=reported), opened(config, batch=3):
        pass
    fingerprint = config.open("train", 0).fingerprint
    with pytest.raises(UsageError, match="is not empty"):
        dump(SYNTHETIC, batches, batch=4, steps=1, seed=3, progress=nothing)
    last = batches / "batch-000002.safetensors"
    last.write_bytes(last.read_bytes()[:-8])
    dataset = config.open("train", 0)
    assert dataset.fingerprint != fingerprint
    with pytest.raises(BadData, match="batch-000002.safetensors cannot be read"):
        dataset.draw_batch(0, 2)
    last.unlink()
    with pytest.raises(BadData, match="batch-000002.safetensors is missing; batches.json lists 3"):
        config.open("train", 0)
    for text in ("[]", "{", '{"format": 2, "batch": 1, "batches": 1, "spec": {}}'):
        (batches / "batches.json").write_text(text)
        with pytest.raises(BadData, match="batches.json"):
            config.open("train", 0)
    (batches / "batches.json").unlink()
    with pytest.raises(BadData, match="write batches with `sightline prepare static`"):
        config.open("train", 0)


@pytest.mark.parametrize("last", ["drop", "pad", "wrap"])
def test_static_batches_continue_into_the_next_epoch_as_the_run_would(tmp_path: Path, last: str):
    samples = len(SYNTHETIC.open("train", seed=3))
    batch = samples - 1  # one is left over
    dump(SYNTHETIC, tmp_path / "batches", batch=batch, steps=3, seed=3, progress=nothing, last=last)
    order = TrainOrder(samples, batch, 3, last)
    for step in range(3):
        found = load_file(tmp_path / "batches" / f"batch-{step:06d}.safetensors")
        assert found["index"].tolist() == order.batch(step)[1].tolist()


@pytest.mark.parametrize(
    ("changes", "split", "reported"),
    [
        ({"size": 56}, "train", r"size is \(48, 48\) there, \(56, 56\) here"),
        ({"mean": (0.0, 0.0, 0.0)}, "train", r"mean is \(0.485, .* \(0.0, 0.0, 0.0\) here"),
        ({"classes": 9}, "train", "it has .* classes, the recipe declares 9"),
        ({"path": "synthetic:classes=3,samples=4,size=50"}, "val", r"classes \(.*has 3 \(.*both must be of the same"),
    ],
    ids=str,
)
def test_static_batches_of_another_recipe_are_refused(batches: Path, changes: dict, split: str, reported: str):
    """Else evaluation would see other images than training."""
    with pytest.raises(BadData, match=reported):
        dataclasses.replace(SYNTHETIC, static=str(batches), **changes).open(split, 0)


def test_prepare_static_takes_the_data_of_the_command_line(tmp_path: Path, batches: Path):
    from sightline.recipe.options import parse_options

    flags = ["--out", str(tmp_path / "again"), "--batch", "4", "--steps", "3", "--seed", "3"]
    flags += ["--data.path", SYNTHETIC.path, "--data.size", "48", "--data.max-boxes", "12"]
    options = parse_options(prepare_static.StaticOptions, flags, prog="sightline prepare static")
    assert prepare_static.prepare(options, nothing) == {"batches": 3, "samples": 12}
    for file in sorted(batches.iterdir()):
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()
    for wrong in (["--batch", "0"], ["--data.static", "x"]):
        with pytest.raises(UsageError):
            parse_options(prepare_static.StaticOptions, [*flags, *wrong], prog="sightline prepare static")
