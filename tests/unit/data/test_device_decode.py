"""Images that travel encoded and are decoded, cut and resized where the network is: the same samples, nearly the
same pixels. The CPU stands in for the device here: it decodes the same batch through the same path."""

import dataclasses
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sightline.config import Run
from sightline.data.classification import ClassificationData
from sightline.data.detection import DetectionData
from sightline.data.gpu import encoded, squares
from sightline.data.gpu.encoded import DEVICE_PIXELS, ENCODED_BYTES, Packed
from sightline.data.loading.loader import BadSamples, Loader
from sightline.data.loading.order import EvalOrder, TrainOrder
from sightline.data.loading.workers import PACKED
from sightline.errors import BadData, UsageError
from sightline.hardware import devices
from sightline.hardware.world import World
from sightline.parts import DataSpec

CPU = devices.select("cpu")
SKIP = BadSamples("skip", 100, lambda bad: None)


def stop() -> None:
    """Never asked for."""


def write(folder: Path, name: str, pixels: np.ndarray, format="JPEG", **options) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(folder / name, format, **options)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Plain JPEGs, small and one large; and what the device must not get: a PNG, a turned one."""
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for number in range(12):
            height, width = (int(side) for side in rng.integers(40, 120, 2))
            rows, columns = np.mgrid[0:height, 0:width]
            smooth = np.stack([rows * 2 % 256, columns * 2 % 256, rows + columns], axis=2).astype(np.uint8)
            write(tmp_path / split / f"c{number % 2}", f"{number:02d}.jpg", smooth, quality=95)
    square = np.zeros((64, 64, 3), np.uint8)
    write(tmp_path / "train" / "c0", "png.png", square + 7, "PNG")
    tags = Image.Exif()
    tags[0x0112] = 6
    write(tmp_path / "train" / "c1", "turned.jpg", square + 90, exif=tags.tobytes())
    write(tmp_path / "train" / "c1", "large.jpg", rng.integers(0, 256, (600, 600, 3), dtype=np.uint8), quality=98)
    return tmp_path


def batches(path: Path, split: str, on_device: bool, count: int, workers=0, **fields):
    config = ClassificationData(path=str(path), size=32, eval_resize=40, eval_size=32, decoder="cpu", **fields)
    dataset = config.open(split, seed=3)
    bound = dataset.bind_to_decoder() if on_device else dataset.bind(CPU, 5)
    order = TrainOrder(len(dataset), 5, 3, "pad") if split == "train" else EvalOrder(len(dataset), 5)
    bad_samples = BadSamples(config.on_bad_sample, config.max_bad_samples, lambda bad: None)
    loader = Loader({split: (bound, order)}, Run(workers=workers), CPU, World(), bad_samples, lambda: None)
    try:
        loader.seek(split, 0, count)
        return [{key: value.clone() for key, value in loader.next(split).items()} for _ in range(count)]
    finally:
        loader.close()


def test_a_small_file_of_many_pixels_stays_on_the_cpu(tmp_path):
    """Blank, so that its file is small: a batch of such would fill the memory of a device."""
    (tmp_path / "val" / "c0").mkdir(parents=True)
    for number, side in enumerate((4096, 4104)):
        write(tmp_path / "train" / "c0", f"{number}.jpg", np.zeros((4096, side), np.uint8))
    bound = ClassificationData(path=str(tmp_path), size=32).open("train", seed=3).bind_to_decoder()
    assert all(path.stat().st_size < ENCODED_BYTES for path in tmp_path.rglob("*.jpg"))
    assert DEVICE_PIXELS == 4096**2
    assert [bool(bound.load(0, index)["encoded_bytes"]) for index in range(2)] == [True, False]


def test_grey_with_a_sampling_stays_on_the_cpu(tmp_path):
    """nvJPEG gives it the colours of another image of its batch."""
    (tmp_path / "val" / "c0").mkdir(parents=True)
    kinds = [{"subsampling": kind} for kind in ("4:4:4", "4:2:2", "4:2:0")]
    for number, options in enumerate([{}, *kinds, {"subsampling": "4:2:2", "progressive": True}]):
        write(tmp_path / "train" / "c0", f"{number}.jpg", np.zeros((40, 50), np.uint8), **options)
    write(tmp_path / "train" / "c0", "9.jpg", np.zeros((40, 50, 3), np.uint8), subsampling="4:2:2")
    bound = ClassificationData(path=str(tmp_path), size=32).open("train", seed=3).bind_to_decoder()
    on_device = [bool(bound.load(0, index)["encoded_bytes"]) for index in range(6)]
    assert on_device == [True, True, False, False, False, True]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("split", ["train", "val"])
def test_same_samples_same_geometry(photos, split, workers):
    plain = batches(photos, split, False, 3)
    moved = batches(photos, split, True, 3, workers)
    for before, after in zip(plain, moved, strict=True):
        assert before.keys() == after.keys()  # nothing encoded reaches the step
        for key in before.keys() - {"image"}:
            assert torch.equal(before[key], after[key]), key
        difference = (before["image"].int() - after["image"].int()).abs()
        assert difference.max() <= 2 and difference.float().mean() < 0.2


@pytest.mark.parametrize("workers", [0, 1])
def test_images_lie_one_after_another_and_one_without_room_comes_all_the_same(photos, workers):
    """The room is for an average file. The large one is sixty times that, and its neighbours in a part share theirs."""
    dataset = ClassificationData(path=str(photos), size=32).open("train", seed=3)
    bound = dataset.bind_to_decoder()
    (room,), _ = bound.layout[PACKED]
    sizes = {path.name: path.stat().st_size for path in (photos / "train").rglob("*.jpg")}
    assert sorted(sizes.values())[-2] < room < sizes["large.jpg"] / 4
    loader = Loader({"train": (bound, TrainOrder(len(dataset), 15, 3))}, Run(workers=workers), CPU, World(), SKIP, stop)
    seen = []
    loader.feeds["train"].feed = dataclasses.replace(
        loader.feeds["train"].feed, bound=dataclasses.replace(bound, decode=lambda slot, batch: seen.append(slot) or {})
    )
    try:
        loader.seek("train", 0, 1)
        loader.next("train")
    finally:
        loader.close()
    (slot,) = seen
    for row, (index, length) in enumerate(zip(slot["index"].tolist(), slot["encoded_bytes"].tolist(), strict=True)):
        data = dataset.source.read(index).data
        assert length in (0, len(data))
        packed = Packed(slot, torch.tensor([row]))
        assert packed[0].numpy().tobytes() == data[:length]
        assert length == 0 or packed[0].data_ptr() == packed.addresses[0]
    assert sum(length > 0 for length in slot["encoded_bytes"].tolist()) == 13  # all but the PNG and the turned one


def test_what_does_not_fit_the_device_is_finished_on_the_cpu_to_the_bit(photos, monkeypatch):
    monkeypatch.setattr(encoded, "ENCODED_BYTES", 100_000)
    assert (photos / "train" / "c1" / "large.jpg").stat().st_size > 100_000
    for path in sorted(photos.rglob("[0-9]*.jpg")):
        path.unlink()
    write(photos / "val" / "c0", "a.png", np.zeros((9, 9, 3), np.uint8), "PNG")
    write(photos / "val" / "c1", "a.png", np.zeros((9, 9, 3), np.uint8), "PNG")
    plain, moved = batches(photos, "train", False, 1), batches(photos, "train", True, 1)
    assert torch.equal(plain[0]["image"], moved[0]["image"])


def test_a_broken_image_follows_the_policy(photos):
    """The decoder of a batch refuses it as a whole; it is then loaded as on the CPU, which names the image."""
    broken = photos / "train" / "c0" / "00.jpg"
    data = broken.read_bytes()
    start = data.index(b"\xff\xda") + 2
    broken.write_bytes(data[: start + 1] + b"\x04" + data[start + 2 : -2] + b"\xff\xd9")  # a short scan header
    with pytest.raises(BadData, match="00.jpg"):
        batches(photos, "train", True, 3)
    plain = batches(photos, "train", False, 3, on_bad_sample="skip")
    moved = batches(photos, "train", True, 3, on_bad_sample="skip")
    for before, after in zip(plain, moved, strict=True):
        assert torch.equal(before["index"], after["index"]) and torch.equal(before["label"], after["label"])
        assert (before["image"].int() - after["image"].int()).abs().max() <= 2


def test_one_that_only_the_device_refuses_is_decoded_on_the_cpu(photos, monkeypatch):
    asked = []

    def refuse(encoded, device):
        asked.append(encoded)
        raise RuntimeError("nvjpegDecode failed: 3")

    plain = batches(photos, "train", False, 2)
    monkeypatch.setattr(squares, "decode_on_device", refuse)
    moved = batches(photos, "train", True, 2)
    assert asked
    for before, after in zip(plain, moved, strict=True):
        assert torch.equal(before["image"], after["image"])


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "cpu has no JPEG engine"),
        ({"policy": "randaugment"}, "--data.policy randaugment works on the CPU"),
        ({"image_type": "fp32"}, "--data.image-type fp32 is made on the CPU"),
    ],
)
def test_gpu_that_cannot_be_had_is_an_error_and_auto_is_not(photos, fields, reason):
    wanted = {"path": str(photos), "cache": "off", **fields}
    with pytest.raises(UsageError, match=reason):
        ClassificationData(decoder="gpu", **wanted).open("train", 0).bind(CPU, 8)
    bound = ClassificationData(decoder="auto", **wanted).open("train", 0).bind(CPU, 8)
    assert bound.notes == () and bound.decode is None


@pytest.mark.parametrize(
    ("engine", "fields", "reason"),
    [
        (ImportError("No module named 'torchvision'"), {}, "does not work here (No module named 'torchvision')"),
        (RuntimeError("nvjpegCreateEx failed: 6\nmore"), {}, "does not work here (nvjpegCreateEx failed: 6)"),
        (torch.zeros(1, 32, 32), {}, "nvJPEG gave (1, 32, 32)"),
        (torch.zeros(3, 32, 32), {"path": "synthetic:classes=2,samples=4,size=8"}, "holds no JPEGs"),
        (torch.zeros(3, 32, 32), {"policy": "augmix"}, "--data.policy augmix works on the CPU"),
        (torch.zeros(3, 32, 32), {"decoder": "cpu"}, ""),
        (torch.zeros(3, 32, 32), {}, None),
    ],
    ids=["no package", "no engine", "odd engine", "no JPEGs", "policy", "switched off", "all is well"],
)
def test_a_gpu_decodes_where_nothing_is_in_the_way_and_says_what_is(photos, monkeypatch, engine, fields, reason):
    """The driver's decoder is played: here is no GPU, and one that has it cannot be made to fail."""
    from sightline.data import decode

    def played(encoded, device):
        if isinstance(engine, Exception):
            raise engine
        return [engine] * len(encoded)

    gpu = devices.KINDS["cuda"]
    monkeypatch.setattr(decode, "decode_on_device", played)
    monkeypatch.setattr(devices.Device, "name", lambda self: "a GPU")
    given = {"path": str(photos), "cache": "off", **fields}
    bound = ClassificationData(**given).open("train", 0).bind(gpu, 8)
    assert (bound.decode is not None) == bool(bound.host_keys) == (reason is None)
    if reason is None:
        assert bound.notes == ("images are decoded on a GPU",)
    elif not reason:
        assert bound.notes == ()
    else:
        (reported,) = bound.notes
        assert reported.startswith("images are decoded on the CPU: ") and reason in reported
        with pytest.raises(UsageError, match="--data.decoder gpu: .*; use --data.decoder auto or cpu"):
            ClassificationData(**given, decoder="gpu").open("train", 0).bind(gpu, 8)


def test_a_first_image_that_is_not_a_jpeg_keeps_the_cpu(tmp_path):
    stream = io.BytesIO()
    Image.new("RGB", (8, 8)).save(stream, "PNG")
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        (tmp_path / split / "a" / "0.jpg").write_bytes(stream.getvalue())
    assert not ClassificationData(path=str(tmp_path)).open("train", 0).starts_with_jpeg()
    assert not ClassificationData(path="synthetic:classes=2,samples=4,size=8").open("train", 0).starts_with_jpeg()


def test_a_first_image_that_is_one_does_not(photos):
    assert ClassificationData(path=str(photos)).open("train", 0).starts_with_jpeg()


@pytest.fixture
def boxes(tmp_path: Path, photos: Path) -> Path:
    """The photos as COCO."""
    (tmp_path / "annotations").mkdir()
    for split in ("train", "val"):
        images, annotations = [], []
        for number, path in enumerate(sorted(p for p in (photos / split).rglob("*") if p.is_file())):
            with Image.open(path) as image:
                width, height = image.size
            moved = photos / f"{split}2017" / path.name
            moved.parent.mkdir(exist_ok=True)
            path.rename(moved)
            images.append({"id": number, "file_name": path.name, "height": height, "width": width})
            box = {"bbox": [4, 5, width / 2, height / 2], "area": width * height / 4, "iscrowd": 0}
            annotations.append({"id": number, "image_id": number, "category_id": 1, **box})
        found = {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "thing"}]}
        (tmp_path / "annotations" / f"instances_{split}2017.json").write_text(json.dumps(found))
    return tmp_path


def detection_batches(path: Path, split: str, on_device: bool, resize: str, **fields):
    dataset = DetectionData(path=str(path), size=48, max_boxes=3, resize=resize, **fields).open(split, 3)
    bound = dataset.bind_to_decoder() if on_device else dataset.bind(CPU, 5)
    order = TrainOrder(len(dataset), 5, 3) if split == "train" else EvalOrder(len(dataset), 5)
    loader = Loader({split: (bound, order)}, Run(workers=0), CPU, World(), SKIP, stop)
    try:
        loader.seek(split, 0, 3)
        return [{key: value.clone() for key, value in loader.next(split).items()} for _ in range(3)]
    finally:
        loader.close()


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize(("resize", "levels"), [("tf", 1), ("antialias", 2)])
def test_a_detector_gets_the_same_samples_boxes_and_nearly_the_same_pixels(boxes, split, resize, levels):
    plain = detection_batches(boxes, split, False, resize, cache="off")
    for cache in ("off", "ram"):
        moved = detection_batches(boxes, split, True, resize, cache=cache)
        for before, after in zip(plain, moved, strict=True):
            assert before.keys() == after.keys()  # nothing encoded reaches the step
            for key in before.keys() - {"image"}:
                assert torch.equal(before[key], after[key]), key
            difference = (before["image"].int() - after["image"].int()).abs()
            assert difference.max() <= levels and difference.float().mean() < 0.2


def test_a_detectors_files_travel_encoded_unless_the_device_must_not_get_them(boxes):
    dataset = DetectionData(path=str(boxes), size=48, cache="off").open("train", 3)
    bound = dataset.bind_to_decoder("images are decoded on a GPU")
    assert bound.notes == ("images are decoded on a GPU",)
    lengths = {dataset.name(index): int(bound.load(0, index)["encoded_bytes"]) for index in range(len(dataset))}
    # COCO annotates images as stored, so the turned one is not turned.
    assert [Path(name).name for name, length in lengths.items() if not length] == ["png.png"]


def test_a_detectors_gpu_that_cannot_be_had_is_an_error(boxes):
    with pytest.raises(UsageError, match="--data.decoder gpu: cpu has no JPEG engine .*; use --data.decoder cpu"):
        DetectionData(path=str(boxes), decoder="gpu").open("train", 0).bind(CPU, 8)
    with pytest.raises(UsageError, match="data.decoder='auto' is unknown; use one of cpu, gpu"):
        DetectionData(path=str(boxes), decoder="auto")


def test_files_are_predicted_where_the_gpu_that_decoded_the_training_images_is_not(boxes):
    (path, *_) = sorted((boxes / "train2017").glob("*.jpg"))
    spec = DataSpec(("thing",), 3, (48, 48), (0.5,) * 3, (0.5,) * 3, (1,))
    for config in (DetectionData(size=48), ClassificationData(eval_size=48)):
        plain, typed = (
            dataclasses.replace(config, decoder=decoder).open_files({"a": path}, spec).bind(CPU, 1)
            for decoder in ("cpu", "gpu")
        )
        assert np.array_equal(plain.load(0, 0)["image"], typed.load(0, 0)["image"])


def test_an_export_is_compared_on_a_detectors_images_where_that_gpu_is_not(boxes):
    config = DetectionData(path=str(boxes), size=48, decoder="gpu")
    fields = config.served(DataSpec(("thing",), 3, (48, 48), (0.5,) * 3, (0.5,) * 3, (1,))).fields
    assert dataclasses.replace(config, **fields).open("val", 0).bind(CPU, 1).load(0, 0)["image"].shape == (48, 48, 3)
