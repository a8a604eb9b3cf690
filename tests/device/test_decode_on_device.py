"""The GPU's JPEG engines in the real loader: same samples and geometry as the CPU path, pixels within stated bounds."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter

from sightline.config import Run
from sightline.data.classification import ClassificationData
from sightline.data.decode import decode_on_device, read_header
from sightline.data.loading.loader import BadSamples, Loader
from sightline.data.loading.order import TrainOrder
from sightline.errors import BadSample
from sightline.hardware import devices
from sightline.hardware.world import World

pytestmark = pytest.mark.device
PHOTOS = Path(__file__).resolve().parents[2] / "../shared/data/imagenet-photos"


def jpegs(count: int) -> list[bytes]:
    """Real photos where they are, else soft noise, which is as coloured as a photo; 4:2:0 both."""
    if PHOTOS.is_dir():
        return [path.read_bytes() for path in sorted(PHOTOS.iterdir())[:count]]
    rng = np.random.default_rng(0)
    found = []
    for _ in range(count):
        noise = rng.integers(0, 256, (*rng.integers(200, 500, 2), 3), dtype=np.uint8)
        stream = io.BytesIO()
        Image.fromarray(noise).filter(ImageFilter.GaussianBlur(4)).save(stream, "JPEG", quality=90)
        found.append(stream.getvalue())
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, data in enumerate(jpegs(64)):
        for split in ("train", "val"):
            place = tmp_path / split / f"c{number % 4}"
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{number:03d}.jpg").write_bytes(data)
    return tmp_path


def load(folder: Path, decoder: str, overlap: bool = True, workers: int = 2) -> tuple[list[dict], list[str]]:
    config = ClassificationData(path=str(folder), decoder=decoder)
    device = devices.select()
    bound = config.open("train", 3).bind(device, 16)
    feeds = {"train": (bound, TrainOrder(len(bound.dataset), 16, 3))}
    run, bad_samples = Run(workers=workers, device_prefetch=overlap), BadSamples("fail", 0, lambda bad: None)
    loader = Loader(feeds, run, device, World(), bad_samples, lambda: None)
    try:
        loader.seek("train", 0, 8)
        return [{k: v.clone() for k, v in loader.next("train").items()} for _ in range(8)], loader.notes
    finally:
        loader.close()


@pytest.fixture(autouse=True)
def cuda_with_jpeg_engines():
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")


def test_the_gpu_decodes_by_itself_and_says_so(folder):
    _, notes = load(folder, "auto")
    assert notes == [f"images are decoded on {devices.select().name()}"]


def test_same_samples_and_nearly_the_same_pixels(folder):
    plain, moved = load(folder, "cpu")[0], load(folder, "gpu")[0]
    means = []
    for before, after in zip(plain, moved, strict=True):
        assert before.keys() == after.keys()
        assert torch.equal(before["index"], after["index"]) and torch.equal(before["label"], after["label"])
        difference = (before["image"].float() - after["image"].float()).abs()
        means.append(float(difference.mean()))
        assert float(difference.quantile(0.99) if difference.numel() < 1e7 else difference[:2].quantile(0.99)) <= 16
    print(f"mean difference {sum(means) / len(means):.3f} levels")
    assert sum(means) / len(means) < 3


@pytest.mark.shows("run.device_prefetch")
@pytest.mark.parametrize("decoder", ["cpu", "gpu"])
def test_batches_are_the_same_without_a_stream_of_their_own(folder, decoder):
    for before, after in zip(load(folder, decoder)[0], load(folder, decoder, overlap=False)[0], strict=True):
        assert all(torch.equal(before[key], after[key]) for key in before)


def test_an_image_the_engines_refuse_is_decoded_on_the_cpu(folder):
    first = folder / "train" / "c0" / "000.jpg"
    data = first.read_bytes()
    scan = data.index(b"\xff\xda")
    first.write_bytes(data[: scan + 200] + b"\xff\xd9")  # all but the first rows missing: libjpeg fills them with grey
    batches, _ = load(folder, "gpu")
    assert len(batches) == 8


def test_the_gpu_reads_the_size_that_the_guard_reads():
    """Another image of another size hides wherever the guard passes over bytes."""
    jpeg, other = (made_jpeg(width, height) for width, height in ((64, 48), (128, 96)))
    at, other_at = jpeg.index(b"\xff\xc0"), other.index(b"\xff\xc0")
    odd = (
        jpeg[:at] + b"\xff\xff\xff" + jpeg[at:],  # padding
        jpeg[:at] + b"\xff\x00" + jpeg[at:],
        jpeg[:at] + b"between segments" + jpeg[at:],
        jpeg[:2] + b"\xff\xef" + len(other).to_bytes(2, "big") + other[2:] + jpeg[2:],  # inside a segment
        jpeg[:-2] + b"\xff\xdc\x00\x04\x00\x60" + jpeg[-2:],  # another number of lines
        jpeg + other,
    )
    for data in odd:
        assert read_header(data, "odd.jpg").shape == (48, 64, 3)
        (planes,) = decode_on_device([torch.frombuffer(bytearray(data), dtype=torch.uint8)], torch.device("cuda"))
        assert planes.shape == (3, 48, 64)
    second = jpeg[:at] + other[other_at : other_at + 19] + jpeg[at:]
    restart = jpeg[:2] + b"\xff\xd0\x00\x06\xff\xef" + len(other).to_bytes(2, "big") + other[2:] + jpeg[2:]
    for data in (second, restart):
        with pytest.raises(BadSample):
            read_header(data, "odd.jpg")


def made_jpeg(width: int, height: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (width, height), (9, 99, 200)).save(stream, "JPEG")
    return stream.getvalue()
