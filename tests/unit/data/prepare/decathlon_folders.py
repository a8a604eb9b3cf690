"""Tiny folders with the structure of a Decathlon task: dataset.json, imagesTr, labelsTr, imagesTs; by nibabel."""

import json
import tarfile
from pathlib import Path

import nibabel
import numpy as np

SIZES = ((22, 17, 9), (18, 24, 12), (26, 20, 7))  # (x, y, z)


def scan(seed: int, size: tuple[int, int, int], channels: int, ct: bool) -> tuple[np.ndarray, np.ndarray]:
    """(image (x, y, z[, channels]), label (x, y, z)): zeros around a bright block, in it a block of each class 1, 2."""
    random = np.random.default_rng(seed)
    image = np.zeros((*size, channels), np.float32)
    inner = tuple(slice(2 + axis, n - 1) for axis, n in enumerate(size))
    shape = tuple(part.stop - part.start for part in inner)
    image[inner] = random.integers(1, 900, (*shape, channels))
    if ct:
        image -= 300  # air is far below zero
    label = np.zeros(size, np.uint8)
    x, y, z = (n // 2 for n in size)
    label[x - 4 : x, y - 4 : y + 3, z - 1 : z + 2] = 1
    label[x : x + 4, y - 3 : y + 3, z - 1 : z + 2] = 2
    return (image[..., 0] if channels == 1 else image), label


def write(path: Path, voxels: np.ndarray, spacing=(1.0, 1.0, 1.0), shift: float = 0.0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    affine = np.diag([*spacing, 1.0])
    affine[:3, 3] = (5 + shift, -7, 11)
    nibabel.save(nibabel.Nifti1Image(voxels, affine), path)


def make_folder(
    root: Path,
    cases: int = 3,
    channels: int = 1,
    modality: str = "MRI",
    spacing=(1.0, 1.0, 1.0),
    labels=("background", "one", "two"),
    name: str = "Mine",
) -> Path:
    """A task of `cases` training and two test cases."""
    for number in range(cases + 2):
        image, label = scan(number, SIZES[number % len(SIZES)], channels, modality == "CT")
        part = "Tr" if number < cases else "Ts"
        write(root / f"images{part}" / f"case_{number:03d}.nii.gz", image, spacing)
        if part == "Tr":
            write(root / "labelsTr" / f"case_{number:03d}.nii.gz", label, spacing)
    pairs = [{k: f"./{k}sTr/case_{n:03d}.nii.gz" for k in ("image", "label")} for n in range(cases)]
    write_json(
        root,
        name=name,
        modality={str(n): modality for n in range(channels)},
        labels={str(n): each for n, each in enumerate(labels)},
        training=pairs,
        test=[f"./imagesTs/case_{cases + n:03d}.nii.gz" for n in range(2)],
    )
    return root


def write_json(root: Path, **change) -> None:
    """dataset.json, or changes to it."""
    path = root / "dataset.json"
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **change}))


def pack(root: Path, tar: Path) -> Path:
    """The folder as a tar, as the Decathlon is published."""
    with tarfile.open(tar, "w") as archive:
        archive.add(root, root.name)
    return tar
