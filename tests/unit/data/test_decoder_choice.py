"""`--data.decoder auto`: the CPU for small images, the device for photographs, no clock where bits must be equal."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sightline import api, config
from sightline.data.classification import ClassificationData
from sightline.data.gpu import decoder_choice
from sightline.hardware import devices
from sightline.hardware.world import World
from sightline.recipe import store
from sightline.runs.log import RunLog
from sightline.train import start

CUDA = devices.KINDS["cuda"]  # nothing below touches it


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """64 px images in one folder, 200 px images in another."""
    root = tmp_path_factory.mktemp("images")
    pixels = np.random.default_rng(0).integers(0, 255, (200, 200, 3), dtype=np.uint8)
    for side in (64, 200):
        for split in ("train", "val"):
            for name in ("a", "b"):
                (root / str(side) / split / name).mkdir(parents=True)
                for number in range(3):
                    image = Image.fromarray(pixels[:side, :side])
                    image.save(root / str(side) / split / name / f"{number}.jpg")
    return root


def opened(folder: Path, **fields):
    return ClassificationData(path=str(folder), **fields).open("train", 0)


def test_without_a_clock_the_mean_size_decides(folder):
    is_host, line = opened(folder / "64").prefers_host(CUDA, 8, deterministic=True)
    assert is_host and "4,096 pixels on average, at most 16,384" in line
    assert opened(folder / "200").prefers_host(CUDA, 8, deterministic=True) == (False, "")


def test_a_fast_cpu_is_chosen_before_the_devices_decoder_is_started(folder, monkeypatch):
    monkeypatch.setattr(decoder_choice, "ENOUGH", 1)
    is_host, line = opened(folder / "64").prefers_host(CUDA, 8, deterministic=False)
    assert is_host and "img/s by 8 loader processes" in line


def test_the_rate_of_one_process_is_that_of_reading_and_decoding(folder):
    assert 10 < decoder_choice.host_rate(opened(folder / "200")) < 1e6


@pytest.mark.parametrize("fields", [{"decoder": "gpu"}, {"decoder": "cpu"}, {"policy": "trivialaugment"}])
def test_a_typed_decoder_and_what_only_the_cpu_can_do_leave_no_choice(folder, fields):
    assert opened(folder / "64", **fields).prefers_host(CUDA, 8, deterministic=True) == (False, "")


def test_a_cpu_has_no_choice(folder):
    assert opened(folder / "64").prefers_host(devices.KINDS["cpu"], 8, deterministic=True) == (False, "")


def test_the_choice_is_one_of_the_run_that_a_typed_decoder_overrules(folder):
    dataset = opened(folder / "64")
    assert dataset.on_host().config.decoder == "cpu"
    assert dataset.on_host().fingerprint == dataset.fingerprint
    typed = dataclasses.replace(dataset.config, decoder="gpu")
    assert typed.on_host() is typed
    recipe, _ = config.load("demo_classification", ["--data.path", str(folder / "64")])
    changed = dataclasses.replace(recipe, data=recipe.data.on_host())
    assert store.diff(store.to_json(recipe), changed) == []  # it does not refuse to resume


@pytest.mark.parametrize(("stored", "expected"), [("cpu", True), ("auto", False)])
def test_a_resumed_run_keeps_its_decoder_without_measuring(folder, tmp_path, stored, expected):
    small = "--model.width=4 --data.size=24 --data.eval-size=24 --train.epochs=1 --train.max-steps=1 --run.workers=0"
    flags = [*small.split(), "--run.device=cpu", "--train.global-batch=4", f"--data.path={folder / '64'}"]
    api.train(*api.load("demo_classification", [*flags, f"--run.out={tmp_path}", f"--data.decoder={stored}"]))
    recipe, run = api.load("demo_classification", [*flags, f"--run.out={tmp_path}"])
    log = RunLog(tmp_path, attempt=None)
    assert start._decodes_on_host(opened(folder / "64"), recipe, run, CUDA, World(), log) is expected


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        (1.0, (True, "images are decoded on the CPU: about 40 img/s by 4 loader processes, 1 on ")),
        (40.0, (True, "images are decoded on the CPU: about 40 img/s by 4 loader processes, 40 on ")),
        (2000.0, (False, "decoding: 2,000 img/s on ")),
    ],
)
def test_the_faster_of_both_decodes(folder, monkeypatch, there: float, expected: tuple[bool, str]):
    monkeypatch.setattr(decoder_choice, "host_rate", lambda dataset: 40 / 4 / decoder_choice.SHARE)
    monkeypatch.setattr(decoder_choice, "device_rate", lambda dataset, device: there)
    monkeypatch.setattr(decoder_choice, "why_not_on_device", lambda device: "")
    is_host, line = decoder_choice.by_rate(opened(folder / "200"), devices.select("cpu"), 4)
    assert is_host == expected[0] and line.startswith(expected[1])
    monkeypatch.setattr(decoder_choice, "why_not_on_device", lambda device: "no decoder")
    assert decoder_choice.by_rate(opened(folder / "200"), devices.select("cpu"), 4) == (False, "")


def test_the_device_is_timed_with_the_encoded_images_of_the_data(folder, monkeypatch):
    dataset, seen = opened(folder / "200"), []

    def decode(self, slot, batch):
        seen.append(slot)
        assert len(slot["image"]) == len(batch["label"]) == 6
        return batch if len(seen) < 4 else None

    monkeypatch.setattr(type(dataset), "decode", decode)
    assert decoder_choice.device_rate(dataset, devices.select("cpu")) > 0 and len(seen) == 3
    packed = seen[0][decoder_choice.PACKED].numpy()
    files = {(folder / "200" / "train" / name).read_bytes() for name in ("a/0.jpg", "b/2.jpg")}
    pieces = set()
    for at, size in zip(seen[0][decoder_choice.PACKED_AT], seen[0]["encoded_bytes"], strict=True):
        pieces.add(packed[int(at) : int(at + size)].tobytes())
    assert pieces == files, "all are the same image"
    assert decoder_choice.device_rate(dataset, devices.select("cpu")) == 0.0, "the device refuses them"
