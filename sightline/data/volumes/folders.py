"""Folders of images and labels, found by their names."""

from __future__ import annotations

from pathlib import Path

from sightline.data.sources.layouts import subfolders
from sightline.errors import UsageError

# In any case, the preferred first.
IMAGE_FOLDERS = ("imagestr", "images", "image", "imgs", "img")
LABEL_FOLDERS = ("labelstr", "labels", "masks", "segmentations", "label", "mask", "segmentation")


def has_folders(root: Path) -> bool:
    """Return whether there are folders of images and of labels below `root`."""
    return all(_called(root))


def images_beside_labels(root: Path) -> str:
    """Return the name of the folder of images if there are folders of both kinds below `root`, else ""."""
    images, labels = _called(root)
    return images[0].name if images and labels else ""


def find_folders(root: Path) -> tuple[Path, Path] | None:
    """Return the folders of images and labels below `root`; None if there are not both. UsageError if there are
    several of one kind."""
    images, labels = _called(root)
    if not images or not labels:
        return None
    for what, found in (("images", images), ("labels", labels)):
        if len(found) > 1:
            raise UsageError(
                f"{root} has several folders of {what}: {', '.join(path.name for path in found)}; name one in a file "
                f"data.yaml (`kind: volumes`, `train: {{images: {images[0].name}, labels: {labels[0].name}}}`) and "
                "give that instead"
            )
    return images[0], labels[0]


def _called(root: Path) -> tuple[list[Path], list[Path]]:
    below = {name.lower(): root / name for name in subfolders(root)}
    images, labels = ([below[n] for n in names if n in below] for names in (IMAGE_FOLDERS, LABEL_FOLDERS))
    return images, labels
