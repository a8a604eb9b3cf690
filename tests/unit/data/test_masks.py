"""Images with masks: crops and their masks, whole images of any size, channels and bits, mean and deviation."""

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sightline.data.augment.masks import Params
from sightline.data.inputs import as_channels, decode_given
from sightline.data.masks import MaskData, dataset
from sightline.data.masks.pixels import IMAGENET
from sightline.errors import BadSample, UsageError
from sightline.hardware import devices
from sightline.parts import IGNORED, DataSpec

CPU = devices.select("cpu")


def write(folder: Path, images: dict[str, np.ndarray], masks: dict[str, np.ndarray] | None = None) -> str:
    """Write images, and masks of 0 and 255: bright pixels of the first channel, or what is given."""
    for sub in ("images", "masks"):
        (folder / sub).mkdir(parents=True, exist_ok=True)
    for name, pixels in images.items():
        Image.fromarray(pixels).save(folder / "images" / f"{name}.png")
        first = pixels[..., 0] if pixels.ndim == 3 else pixels
        mask = masks[name] if masks else np.where(first > first.mean(), 255, 0).astype(np.uint8)
        Image.fromarray(mask).save(folder / "masks" / f"{name}.png")
    return str(folder)


def noise(height: int, width: int, channels: int = 3, bits: int = 8, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    kind = np.uint16 if bits == 16 else np.uint8
    pixels = random.integers(0, 4000 if bits == 16 else 256, (height, width, channels)).astype(kind)
    return pixels[..., 0] if channels == 1 else pixels


def mixed(folder: Path, **form: int) -> str:
    sides = [(40, 30), (25, 60), (33, 33), (64, 48), (20, 20), (50, 41)]
    return write(folder, {f"im{n}": noise(*each, **form, seed=n) for n, each in enumerate(sides)})


def opened(path: str, split: str = "val", **fields) -> dataset.MaskDataset:
    return MaskData(path=path, **{"size": 32, "cache": "off", "val_fraction": 0.5, **fields}).open(split, 0)


def batch_of(data: dataset.MaskDataset, *indices: int) -> dict[str, torch.Tensor]:
    """What the loader would make of these samples."""
    bound = data.bind(CPU, 4)
    rows = []
    for index in indices:
        loaded = bound.load(0, index)
        row = {key: np.zeros(shape, kind) for key, (shape, kind) in bound.layout.items()}
        for key, value in loaded.items():
            row[key][(slice(len(value)),) if value.ndim == 1 else ...] = value
        rows.append(row)
    batch = {key: torch.from_numpy(np.stack([row[key] for row in rows])) for key in rows[0]}
    return bound.finish(batch, torch.float32)


# Crops


def crop(params: Params, pixels: np.ndarray, mask: np.ndarray, size: int = 16) -> tuple[np.ndarray, np.ndarray]:
    made = MaskData(size=size).augmentation
    return made.apply(params, pixels, mask, np.array([9, 9, 9], np.uint8))


def test_a_crop_at_its_own_scale_is_cut_out_and_flipped():
    pixels, mask = noise(30, 40), np.random.default_rng(1).integers(0, 3, (30, 40)).astype(np.uint8)
    image, label = crop(Params(5, 7, 16, flip=True), pixels, mask)
    assert np.array_equal(image, pixels[5:21, 7:23][:, ::-1]) and np.array_equal(label, mask[5:21, 7:23][:, ::-1])
    image, label = crop(Params(5, 7, 16, flip_rows=True), pixels, mask)
    assert np.array_equal(image, pixels[5:21, 7:23][::-1]) and np.array_equal(label, mask[5:21, 7:23][::-1])


def test_what_lies_beyond_the_image_has_the_mean_colour_and_does_not_count():
    pixels, mask = noise(10, 12), np.ones((10, 12), np.uint8)
    image, label = crop(Params(-3, -2, 16), pixels, mask)
    assert np.array_equal(image[3:13, 2:14], pixels) and (label[3:13, 2:14] == 1).all()
    outside = np.ones((16, 16), bool)
    outside[3:13, 2:14] = False
    assert (image[outside] == 9).all() and (label[outside] == IGNORED).all()


@pytest.mark.parametrize("bits", [8, 16])
def test_a_scaled_crop_is_resized_as_pillow_does_and_its_mask_to_the_nearest_pixel(bits: int):
    grey, mask = noise(40, 40, 1, bits), np.random.default_rng(1).integers(0, 5, (40, 40)).astype(np.uint8)
    for side in (8, 32):
        image, label = MaskData(size=16).augmentation.apply(
            Params(2, 3, side), grey[..., None], mask, np.zeros(1, grey.dtype)
        )
        box = Image.fromarray(grey[2 : 2 + side, 3 : 3 + side].astype(np.float32))
        expected = np.asarray(box.resize((16, 16), Image.Resampling.BILINEAR))
        assert np.abs(image[..., 0] - expected).max() <= (1 if bits == 8 else 0.51) and image.dtype == grey.dtype
        nearest = Image.fromarray(mask[2 : 2 + side, 3 : 3 + side]).resize((16, 16), Image.Resampling.NEAREST)
        assert np.array_equal(label, np.asarray(nearest))


def test_draws_depend_on_the_key_alone_and_stay_in_their_ranges():
    made = MaskData(size=16, oversampling=0.0).augmentation
    mask = np.zeros((40, 100), np.uint8)
    draws = [made.draw(0, epoch, index, mask) for epoch in range(4) for index in range(50)]
    assert draws == [made.draw(0, epoch, index, mask) for epoch in range(4) for index in range(50)]
    assert draws != [made.draw(1, epoch, index, mask) for epoch in range(4) for index in range(50)]
    assert {each.side for each in draws} <= set(range(8, 33)) and len({each.side for each in draws}) > 10
    assert all(0 <= each.top <= 40 - each.side and 0 <= each.left <= 100 - each.side for each in draws)
    assert 70 < sum(each.flip for each in draws) < 130 and not any(each.flip_rows for each in draws)
    small = [made.draw(0, 0, index, mask[:5, :5]) for index in range(50)]
    assert all(5 - each.side <= each.top <= 0 and 5 - each.side <= each.left <= 0 for each in small)
    assert MaskData(size=16, augment="off").augmentation.draw(3, 1, 4, mask) == Params(12, 42, 16)


def test_crops_are_centred_on_rare_classes_as_often_as_asked():
    mask = np.zeros((400, 400), np.uint8)
    mask[300, 20], mask[:50] = 2, IGNORED
    made = MaskData(size=16, scale=(1, 1), oversampling=1.0).augmentation
    draws = [made.draw(0, 0, index, mask) for index in range(60)]
    holding = [each for each in draws if each.top <= 300 < each.top + 16 and each.left <= 20 < each.left + 16]
    assert 18 < len(holding) < 42, "of two classes each is drawn half of the time"
    assert all((each.top, each.left) == (292, 12) for each in holding)
    empty = made.draw(0, 0, 0, np.full((40, 40), IGNORED, np.uint8))
    assert 0 <= empty.top <= 24


def test_colours_change_by_the_factors_that_were_drawn():
    config = MaskData(size=4, mean=(0.5, 0.4, 0.3), std=(0.1, 0.2, 0.3))
    pixels = torch.from_numpy(noise(4, 4)[None])
    values = pixels[0].double().numpy() / 255
    plain = config.augmentation.finish(pixels, None, 255.0, torch.float32)[0].permute(1, 2, 0).numpy()
    np.testing.assert_allclose(plain, (values - config.mean) / config.std, rtol=1e-4, atol=1e-5)
    factors = torch.tensor([[0.9, 1.2, 0.8]])
    found = config.augmentation.finish(pixels, factors, 255.0, torch.float32)[0].permute(1, 2, 0).numpy()
    values = values * 0.9
    values = values.mean() + (values - values.mean()) * 1.2
    grey = (values @ (0.299, 0.587, 0.114))[..., None]
    values = (grey + (values - grey) * 0.8).clip(0, 1)
    np.testing.assert_allclose(found, (values - config.mean) / config.std, rtol=1e-4, atol=1e-5)


# Datasets


def test_training_items_are_crops(tmp_path: Path):
    data = opened(mixed(tmp_path), "train")
    batch = batch_of(data, 0, 1, 2)
    assert batch["image"].shape == (3, 3, 32, 32) and batch["label"].shape == (3, 32, 32)
    assert batch["label"].dtype == torch.int64 and set(batch["label"].unique().tolist()) <= {0, 1, IGNORED}
    assert "colours" not in batch and "colours" in data.layout
    assert "colours" not in opened(str(tmp_path), "train", augment="off").layout


@pytest.mark.parametrize("form", [{}, {"channels": 1}, {"channels": 4}, {"channels": 1, "bits": 16}])
def test_whole_images_of_any_size_channels_and_bits_are_filled_up(form: dict, tmp_path: Path):
    data = opened(mixed(tmp_path, **form))
    spec, highest = data.spec, 65535 if form.get("bits") == 16 else 255
    assert (spec.channels, spec.bits) == (form.get("channels", 3), form.get("bits", 8))
    assert spec.classes == ("0", "255") and spec.class_ids == (0, 255)
    batch = batch_of(data, 0, 1, 2)
    sides = batch["extent"].tolist()
    assert list(batch["label"].shape[1:]) == [max(each) for each in zip(*sides, strict=True)]
    for row, (height, width) in enumerate(sides):
        path = tmp_path / data.name(row)
        stored = np.asarray(Image.open(path)).reshape(height, width, -1) / highest
        expected = ((stored - spec.mean) / spec.std).transpose(2, 0, 1)
        np.testing.assert_allclose(batch["image"][row, :, :height, :width], expected, rtol=1e-3, atol=1e-3)
        mask = np.asarray(Image.open(tmp_path / "masks" / path.name)) // 255
        assert np.array_equal(batch["label"][row, :height, :width], mask)
        assert (batch["label"][row, height:] == IGNORED).all() and (batch["label"][row, :, width:] == IGNORED).all()


def test_colours_of_16_bits_keep_all_of_them(tmp_path: Path):
    path, pixels = mixed(tmp_path), {}
    for file in sorted((tmp_path / "images").iterdir()):
        width, height = Image.open(file).size
        pixels[file.name] = noise(height, width, 3, 16)
        rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels[file.name])
        chunks = ((b"IHDR", struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)), (b"IDAT", zlib.compress(rows)))
        packed = [
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
            for kind, data in (*chunks, (b"IEND", b""))
        ]
        file.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(packed))
    data = opened(path)
    assert (data.spec.channels, data.spec.bits) == (3, 16)
    loaded = data.bind(CPU, 4).load(0, 1)
    expected = pixels[Path(data.name(1)).name]
    assert np.array_equal(loaded["image"].reshape(*loaded["extent"], 3), expected) and expected.max() > 255
    given = decode_given((tmp_path / data.name(1)).read_bytes(), "a.png", 3, 16)
    assert np.array_equal(given, expected)


def test_mean_and_deviation_are_those_of_the_training_images_unless_they_are_like_imagenets(tmp_path: Path):
    path = mixed(tmp_path / "grey", channels=1, bits=16)
    train = opened(path, "train")
    stored = [np.asarray(Image.open(Path(path, train.name(index)))) / 65535 for index in range(len(train))]
    values = np.concatenate([each.ravel() for each in stored])
    assert train.spec.mean == pytest.approx([values.mean()], rel=1e-5)
    assert train.spec.std == pytest.approx([values.std()], rel=1e-5)
    assert opened(path).spec == train.spec, "validation is normalised as training is"
    config = MaskData(path=path, val_fraction=0.5)
    facts = config.look(tmp_path / "run", set())
    assert facts.fields == {"mean": train.spec.mean, "std": train.spec.std}
    with pytest.raises(UsageError, match="have 3 numbers each, the images of .* have 1 channels"):
        MaskData(path=path, mean=(0.5,) * 3, std=(0.1,) * 3).look(tmp_path / "run", {"mean", "std"})
    colours = mixed(tmp_path / "rgb")
    assert not MaskData(path=colours).look(tmp_path / "run", set()).fields
    assert (opened(colours).spec.mean, opened(colours).spec.std) == IMAGENET


def test_one_huge_image_does_not_multiply_by_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = mixed(tmp_path)
    assert opened(path).eval_batch == 64
    monkeypatch.setattr(dataset, "AT_ONCE", 3 * 100 * 100)
    data = opened(path)
    sides = np.array([data.source.size(index) for index in range(len(data))])
    assert data.eval_batch == data.predict_batch == 3 * 100 * 100 // (3 * sides.max(0).prod())
    assert data.layout["label"][0] == (sides.prod(1).max(),)


def test_images_from_memory_have_the_same_bits(tmp_path: Path):
    path = mixed(tmp_path, channels=1, bits=16)
    for split in ("train", "val"):
        plain, kept = (opened(path, split, cache=mode).bind(CPU, 4) for mode in ("off", "ram"))
        assert kept.cache is not None and "decoded images with masks" in kept.notes[0]
        for _ in range(2):
            first, second = plain.load(0, 1), kept.load(0, 1)
            assert all(np.array_equal(first[key], second[key]) for key in first)


def test_the_report_of_a_run_counts_pixels(tmp_path: Path):
    data = opened(mixed(tmp_path))
    facts = data.facts(lambda: False)
    masks = [data.source.mask(index) for index in range(len(data))]
    assert facts.counts == tuple(sum(int((mask == n).sum()) for mask in masks) for n in (0, 1))
    assert (facts.kind, facts.counted) == ("images", "pixels") and facts.sizes == tuple(mask.shape for mask in masks)


def test_a_size_that_differs_from_the_masks_is_told(tmp_path: Path):
    data = opened(mixed(tmp_path))
    whole = data.source.mask
    data.source.mask = lambda index: whole(index)[:-1]
    with pytest.raises(BadSample, match="but its mask has"):
        data.bind(CPU, 4).load(0, 0)


# What a user gives


def encoded(pixels: np.ndarray, tmp_path: Path) -> bytes:
    Image.fromarray(pixels).save(tmp_path / "a.png")
    return (tmp_path / "a.png").read_bytes()


def test_masks_beside_their_images_are_not_predicted(capsys: pytest.CaptureFixture[str]):
    names = ["a.jpg", "a_mask.png", "b/c.jpg", "b/c_seg.png", "d_mask.png", "e.png"]
    spec = DataSpec(("0", "1"), 3, (8, 8), (0.5,), (0.5,))
    files = {name: Path("/x", name) for name in names}
    assert list(MaskData().first_files(files, spec)) == ["a.jpg", "b/c.jpg", "d_mask.png", "e.png"]
    assert "left out 2 masks beside their images, e.g. a_mask.png" in capsys.readouterr().out
    files = {"x_T2w.png": Path("/x_T2w.png"), "x_T2w_lesion.png": Path("/x_T2w_lesion.png")}
    assert MaskData().first_files(files, spec) == files
    assert list(MaskData(mask_pattern="{}_lesion").first_files(files, spec)) == ["x_T2w.png"]


def test_a_given_file_comes_with_the_channels_and_bits_of_the_network(tmp_path: Path):
    grey, deep, rgb, rgba = noise(6, 5, 1), noise(6, 5, 1, 16), noise(6, 5), noise(6, 5, 4)
    cases = [
        (grey, 1, 8, grey[..., None]),
        (grey, 1, 16, grey[..., None].astype(np.uint16) * 257),
        (deep, 1, 16, deep[..., None]),
        (deep, 1, 8, (deep >> 8)[..., None].astype(np.uint8)),
        (grey, 3, 8, grey[..., None].repeat(3, 2)),
        (rgb, 3, 8, rgb),
        (rgba, 3, 8, rgba[..., :3]),
        (rgba, 4, 8, rgba),
    ]
    for pixels, channels, bits, expected in cases:
        found = decode_given(encoded(pixels, tmp_path), "a.png", channels, bits)
        assert np.array_equal(found, expected) and found.dtype == expected.dtype, (channels, bits)
        found = as_channels(pixels, "image", channels, bits)
        assert np.array_equal(found, expected) and found.dtype == expected.dtype, (channels, bits)
    for pixels, channels in ((rgb, 1), (grey, 4), (rgb, 4)):
        with pytest.raises(BadSample, match=f"the network expects {channels}"):
            decode_given(encoded(pixels, tmp_path), "a.png", channels, 8)
        with pytest.raises(UsageError, match=rf"give \(height, width, {channels}\)"):
            as_channels(pixels, "image", channels, 8)
