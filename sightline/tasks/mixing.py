"""What mixup and cutmix leave in a batch of images: the share of each label, and whose the rest is."""

from __future__ import annotations

from torch import Tensor

from sightline.parts import Batch


def share_of(batch: Batch) -> Tensor | None:
    """Return the share of an image's own label against its partner's; None without mixup and cutmix."""
    return batch.get("label_share", batch.get("mix"))


def partners_of(label: Tensor, batch: Batch) -> Tensor:
    """Return the labels of the images that each one is mixed with."""
    return label[batch["partner"]] if "partner" in batch else label.roll(1, 0)
