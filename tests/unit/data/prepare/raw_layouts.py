"""Tiny data for segmentation in the layouts that users have: the same volumes for each, or 2D images with masks."""

import json
from pathlib import Path

import nibabel
import numpy as np
from PIL import Image

AFFINE = np.diag([-1.0, -1.0, 1.25, 1.0])
CLASSES = ("background", "one", "two")


def volume(number: int, channels: int = 1, ct: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """(image (x, y, z, channels) int16, label (x, y, z)): two blocks in noise, in an empty border."""
    random = np.random.default_rng(number)
    size = (30 + number, 34 - number, 3)
    label = np.zeros(size, np.uint8)
    label[8:15, 10:20], label[15:22, 10:20] = 1, 2
    image = random.integers(20, 60, (*size, channels)) + 70 * label[..., None].astype(int)
    image[:2], image[:, :1] = 0, 0
    if ct:
        image[:2], image[:, :1] = -1000, -1000
    return image.astype(np.int16), label


def save(path: Path, voxels: np.ndarray, affine: np.ndarray = AFFINE) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(voxels, affine), path)


def write_json(root: Path, **content) -> None:
    (root / "dataset.json").write_text(json.dumps(content))


def decathlon(root: Path, cases: int = 4, channels: int = 1) -> Path:
    """Several channels are a fourth axis."""
    for number in range(cases):
        image, label = volume(number, channels)
        save(root / "imagesTr" / f"c{number}.nii.gz", image if channels > 1 else image[..., 0])
        save(root / "labelsTr" / f"c{number}.nii.gz", label)
    pairs = [{"image": f"./imagesTr/c{n}.nii.gz", "label": f"./labelsTr/c{n}.nii.gz"} for n in range(cases)]
    modality = {str(channel): f"T{channel}" for channel in range(channels)}
    write_json(root, name="Mine", modality=modality, labels=dict(zip("012", CLASSES, strict=True)), training=pairs)
    return root


def nnunet(root: Path, cases: int = 4, channels: int = 1) -> Path:
    """Several channels are several files."""
    for number in range(cases):
        image, label = volume(number, channels)
        for channel in range(channels):
            save(root / "imagesTr" / f"c{number}_{channel:04d}.nii.gz", image[..., channel])
        save(root / "labelsTr" / f"c{number}.nii.gz", label)
    write_json(
        root,
        channel_names={str(channel): f"T{channel}" for channel in range(channels)},
        labels={name: number for number, name in enumerate(CLASSES)},
        numTraining=cases,
        file_ending=".nii.gz",
    )
    return root


def folders(
    root: Path, cases: int = 4, images: str = "images", labels: str = "masks", end: str = "", ct: bool = False
) -> Path:
    """Two folders without a dataset.json."""
    for number in range(cases):
        image, label = volume(number, ct=ct)
        save(root / images / f"c{number}.nii.gz", image[..., 0])
        save(root / labels / f"c{number}{end}.nii.gz", label)
    return root


def photo(number: int, colours: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """(image (height, width[, 3]) uint8, mask (height, width) of 0 and 1): a bright disc in noise; sizes differ."""
    height, width = 36 + 3 * (number % 6), 48 - 4 * (number % 6)
    y, x = np.ogrid[:height, :width]
    mask = ((y - height / 2) ** 2 + (x - width / 2) ** 2 < 9**2).astype(np.uint8)
    image = np.random.default_rng(number).integers(20, 90, (height, width, colours)).astype(np.uint8)
    image += 120 * mask[..., None]
    return (image if colours == 3 else image[..., 0]), mask


def pictures(root: Path, cases: int = 5, colours: int = 3, scale: int = 255) -> Path:
    """2D images with PNG masks of 0 and `scale`."""
    for part in ("images", "masks"):
        (root / part).mkdir(parents=True)
    for number in range(cases):
        image, mask = photo(number, colours)
        Image.fromarray(image).save(root / "images" / f"p{number}.png")
        Image.fromarray(mask * np.uint8(scale)).save(root / "masks" / f"p{number}.png")
    return root
