"""The GPU's JPEG engines in the real loader: same samples and geometry as the CPU path, pixels within stated bounds."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from exact_resize import KINDS, worst_difference, worst_of_grids
from PIL import Image, ImageFilter

from sightline import kernels
from sightline.config import Run
from sightline.data.augment import batched
from sightline.data.augment.classification import Augmentation
from sightline.data.classification import ClassificationData
from sightline.data.decode import decode_on_device, read_header
from sightline.data.detection import DetectionData
from sightline.data.gpu import nvjpeg, squares
from sightline.data.gpu.nvjpeg import Decoder
from sightline.data.loading.loader import BadSamples, Loader
from sightline.data.loading.order import EvalOrder, TrainOrder
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
    assert notes[0] == f"images are decoded on {devices.select().name()}"


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
        (planes,) = decode_on_device([as_tensor(data)], torch.device("cuda"))
        assert planes.shape == (3, 48, 64)
        held = as_tensor(data)
        where = np.asarray([held.data_ptr()]), np.asarray([len(held)])
        sizes, taken = Decoder(devices.select().torch_device).sizes(*where)
        assert sizes.tolist() == [[48, 64]] and len(taken) == 1
    second = jpeg[:at] + other[other_at : other_at + 19] + jpeg[at:]
    restart = jpeg[:2] + b"\xff\xd0\x00\x06\xff\xef" + len(other).to_bytes(2, "big") + other[2:] + jpeg[2:]
    for data in (second, restart):
        with pytest.raises(BadSample):
            read_header(data, "odd.jpg")


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_is_within_half_a_level_of_an_exact_resize(kind):
    pytest.importorskip("triton")
    found = [worst_difference(kind, size, sides, 24, "cuda") for size, sides in ((224, (40, 1000)), (65, (5, 90)))]
    print(f"{kind}: at most {max(found):.4f} levels from float64")
    assert max(found) < 0.52


def test_places_between_pixels_are_within_half_a_level_of_the_exact_ones():
    pytest.importorskip("triton")
    found = [worst_of_grids(size, sides, 24, "cuda") for size, sides in ((300, (40, 1000)), (65, (2, 90)))]
    print(f"grid: at most {max(found):.4f} levels from float64")
    assert max(found) < 0.51


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("resize", ["tf", "antialias"])
def test_a_detector_gets_the_same_boxes_and_nearly_the_same_pixels(tmp_path, split, resize):
    write_coco(tmp_path, jpegs(48))
    means = []
    both = [detector_batches(tmp_path, split, resize, decoder) for decoder in ("cpu", "gpu")]
    for before, after in zip(*both, strict=True):
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before.keys() - {"image"})
        difference = (before["image"].float() - after["image"].float()).abs()
        means.append(float(difference.mean()))
        assert float(difference[:2].quantile(0.99)) <= 16
    print(f"{resize}, {split}: mean difference {sum(means) / len(means):.3f} levels")
    assert sum(means) / len(means) < 3


def all_kinds() -> list[bytes]:
    """Photos, and what only software decodes: progressive ones and one of odd sampling."""
    noise = np.random.default_rng(1).integers(0, 256, (70, 90, 3), dtype=np.uint8)
    soft = Image.fromarray(noise).filter(ImageFilter.GaussianBlur(2))
    kinds = [{"subsampling": kind} for kind in ("4:4:4", "4:2:2", "4:2:0", "4:1:1")]
    kinds += [{"progressive": True}, {"progressive": True, "subsampling": "4:4:4"}, {"restart_marker_blocks": 2}]
    made = [as_jpeg(soft, quality=90, **kind) for kind in kinds]
    made += [as_jpeg(soft.convert("L"), quality=90, **kind) for kind in ({}, {"progressive": True})]
    return [*jpegs(20), *made, made_jpeg(1, 1), made_jpeg(90, 60, progressive=True)]


def test_pixels_are_those_of_torchvisions_decoder():
    """It sets nvJPEG up in the same way; newer ones may come without it."""
    pytest.importorskip("torchvision")
    if not hasattr(torch.ops.image, "decode_jpegs_cuda"):
        pytest.skip("this torchvision has no decoder for CUDA")
    device, encoded = devices.select().torch_device, [as_tensor(data) for data in all_kinds()]
    for number, data in enumerate(encoded):
        (expected,) = torch.ops.image.decode_jpegs_cuda([data], 3, device)
        assert torch.equal(decode_on_device([data], device)[0], expected), number
    photos = encoded[:20] * 3
    theirs = torch.ops.image.decode_jpegs_cuda(photos, 3, device)
    for planes, expected in zip(decode_on_device(photos, device), theirs, strict=True):
        assert torch.equal(planes, expected)


def test_software_decodes_where_the_gpu_has_no_engines(monkeypatch):
    """Made by a handle that asks for none: software for all."""
    monkeypatch.setattr(nvjpeg, "HARDWARE", nvjpeg.DEFAULT)
    device = devices.select().torch_device
    decoder = Decoder(device, planes=True)
    decoder.has_engines = False
    monkeypatch.setattr(nvjpeg, "_shared", lambda device: decoder)
    for data in all_kinds():
        (planes,) = decode_on_device([as_tensor(data)], device)
        expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)
        difference = abs(planes.permute(1, 2, 0).cpu().numpy() - expected)
        assert difference.mean() < 3


def test_the_engines_and_the_kernel_give_the_squares_of_plain_torch():
    """Two runs give equal bits."""
    device = devices.select().torch_device
    photos = all_kinds()
    encoded = [as_tensor(data) for data in photos]
    augment = Augmentation(size=96)
    shapes = [read_header(data, "photo").shape for data in photos]
    rows = [batched.as_row(augment.draw(3, 0, number, *shape[:2])) for number, shape in enumerate(shapes)]
    geometry, targets = torch.from_numpy(np.stack(rows)), torch.arange(len(photos)) + 1
    filled = []
    for choice in ("off", "auto", "auto"):
        kernels.use(choice)
        assert bool(squares._engines_of(device, "bilinear")) == (choice == "auto")
        out = torch.full((len(photos) + 2, 96, 96, 3), 77, dtype=torch.uint8, device=device)
        squares.fill_squares(out, targets, encoded, geometry, "bilinear")
        assert (out[[0, -1]] == 77).all()
        filled.append(out[1:-1].int())
    plain, moved, again = filled
    assert torch.equal(moved, again)
    assert (plain - moved).abs().max() <= 2 and (plain - moved).abs().float().mean() < 0.3


def test_engines_that_refuse_an_image_decode_the_next_ones():
    device = devices.select().torch_device
    good, bad = as_tensor(made_jpeg(64, 48)), as_tensor(made_jpeg(64, 48)[:200])
    geometry = torch.tensor([batched.as_row(Augmentation(size=32).evaluation_params(48, 64)).tolist()] * 2)
    out = torch.zeros(2, 224, 224, 3, dtype=torch.uint8, device=device)
    with pytest.raises(RuntimeError):
        squares.fill_squares(out, torch.arange(2), [good, bad], geometry, "bilinear")
    squares.fill_squares(out, torch.arange(2), [good, good], geometry, "bilinear")
    assert torch.equal(out[0], out[1]) and out[0].any()


def test_a_box_outside_the_image_is_refused():
    device = devices.select().torch_device
    geometry = torch.tensor([batched.as_row(Augmentation().evaluation_params(48, 65)).tolist()])
    out = torch.zeros(1, 224, 224, 3, dtype=torch.uint8, device=device)
    with pytest.raises(RuntimeError, match="smaller than its header says"):
        squares.fill_squares(out, torch.arange(1), [as_tensor(made_jpeg(64, 48))], geometry, "bilinear")


def write_coco(folder: Path, images: list[bytes]) -> None:
    (folder / "annotations").mkdir()
    for split in ("train", "val"):
        (folder / f"{split}2017").mkdir()
        listed, boxes = [], []
        for number, data in enumerate(images):
            (folder / f"{split}2017" / f"{number:03d}.jpg").write_bytes(data)
            height, width, _ = read_header(data, "photo").shape
            listed.append({"id": number, "file_name": f"{number:03d}.jpg", "height": height, "width": width})
            box = {"bbox": [4, 5, width / 2, height / 2], "area": width * height / 4, "iscrowd": 0}
            boxes.append({"id": number, "image_id": number, "category_id": 1, **box})
        found = {"images": listed, "annotations": boxes, "categories": [{"id": 1, "name": "thing"}]}
        (folder / "annotations" / f"instances_{split}2017.json").write_text(json.dumps(found))


def detector_batches(folder: Path, split: str, resize: str, decoder: str) -> list[dict]:
    device, config = devices.select(), DetectionData(path=str(folder), resize=resize, decoder=decoder, cache="off")
    bound = config.open(split, 3).bind(device, 16)
    order = TrainOrder(len(bound.dataset), 16, 3) if split == "train" else EvalOrder(len(bound.dataset), 16)
    bad_samples = BadSamples("fail", 0, lambda bad: None)
    loader = Loader({split: (bound, order)}, Run(workers=2), device, World(), bad_samples, lambda: None)
    try:
        loader.seek(split, 0, 3)
        return [{key: value.clone() for key, value in loader.next(split).items()} for _ in range(3)]
    finally:
        loader.close()


def as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def made_jpeg(width: int, height: int, **options) -> bytes:
    return as_jpeg(Image.new("RGB", (width, height), (9, 99, 200)), **options)


def as_jpeg(image: Image.Image, **options) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "JPEG", **options)
    return stream.getvalue()
