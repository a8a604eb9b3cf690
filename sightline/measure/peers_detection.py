"""Steps that a user would run instead of our detector's: our network with a plain loss, and torchvision's SSD.

The plain loss is what one writes first without a loop over images: all overlaps at once, hard negatives by sorting
twice. Boxes are random and as many for every image, which is to the peers' advantage.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

from sightline.hardware.devices import Device
from sightline.measure.peers import BATCHES, Maker, Ours, Peer, PeerStep
from sightline.parts import DataSpec

BOXES = 8  # of every image
SHIPPED = "torchvision ssd300_vgg16: eager"  # resizes images to 300 pixels by itself
STEP_PEERS = (
    Peer("our network, plain loss: torch.compile", "bf16", True, "default", fused=True),
    Peer("our network, plain loss: eager", "bf16", True, fused=True),
    Peer(SHIPPED, "bf16", channels_last=False),
)


def steps(peers: Sequence[Peer], ours: Ours) -> list[Maker]:
    """Return each peer's step on images of the size and with the classes of our spec."""
    spec, images, device = ours.spec, ours.images, ours.device

    def step(peer: Peer) -> PeerStep:
        if peer.style == SHIPPED:
            shipped = torchvision.models.detection.ssd300_vgg16(
                weights=None, weights_backbone=None, num_classes=len(spec.classes) + 1
            )
            batches = [_as_torchvision(*_batch(spec, images, device, peer)) for _ in range(BATCHES)]
            return PeerStep(peer, shipped, _shipped_loss, batches, images, device, _sgd)
        plain = [_batch(spec, images, device, peer) for _ in range(BATCHES)]
        return PeerStep(peer, PlainLoss(ours.config.build(spec)), lambda net, b: net(*b), plain, images, device, _sgd)

    return [functools.partial(step, peer) for peer in peers]


class PlainLoss(nn.Module):
    """A detector with its loss, so that a compiler sees both."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, image: Tensor, boxes: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss for boxes (batch, n, 4) as ymin, xmin, ymax, xmax in 0..1 and labels (batch, n) from 1."""
        logits, offsets, anchors = self.network(image)
        return plain_loss(logits.float(), offsets.float(), anchors, boxes, labels)


def plain_loss(logits: Tensor, offsets: Tensor, anchors: Tensor, boxes: Tensor, labels: Tensor) -> Tensor:
    """Compute SSD's loss for images that all have as many boxes."""
    corners = torch.cat([anchors[:, :2] - anchors[:, 2:] / 2, anchors[:, :2] + anchors[:, 2:] / 2], 1)
    low = torch.maximum(corners[None, :, None, :2], boxes[:, None, :, :2])
    high = torch.minimum(corners[None, :, None, 2:], boxes[:, None, :, 2:])
    shared = (high - low).clamp(min=0).prod(3)  # (batch, anchors, n)
    areas = (boxes[..., 2:] - boxes[..., :2]).prod(2)
    overlap = shared / (anchors[:, 2:].prod(1)[None, :, None] + areas[:, None] - shared)
    best, owner = overlap.max(2)  # (batch, anchors)
    claimed = overlap.argmax(1)  # (batch, n)
    owner = owner.scatter(1, claimed, torch.arange(boxes.shape[1], device=boxes.device).expand_as(claimed))
    best = best.scatter(1, claimed, 1.0)
    classes = torch.where(best >= 0.5, labels.gather(1, owner), 0)
    is_positive = classes > 0
    matched = boxes.gather(1, owner[..., None].expand(-1, -1, 4))
    centre, size = (matched[..., :2] + matched[..., 2:]) / 2, matched[..., 2:] - matched[..., :2]
    places = 10 * (centre - anchors[:, :2]) / anchors[:, 2:]
    targets = torch.cat([places, 5 * (size / anchors[:, 2:]).clamp(min=1e-6).log()], 2)
    entropy = F.cross_entropy(logits.transpose(1, 2), classes, reduction="none")
    rank = entropy.masked_fill(is_positive, 0).argsort(1, descending=True).argsort(1)
    count = is_positive.sum(1, keepdim=True)
    class_loss = (entropy * (is_positive | (rank < 3 * count))).sum(1)
    box_loss = (F.smooth_l1_loss(offsets, targets, reduction="none").sum(2) * is_positive).sum(1)
    return ((class_loss + box_loss) / count.squeeze(1).clamp(min=1)).mean()


def _batch(spec: DataSpec, images: int, device: Device, peer: Peer) -> tuple[Tensor, Tensor, Tensor]:
    place = device.torch_device
    image = torch.randn(images, spec.channels, *spec.size, device=place).to(memory_format=peer.layout)
    sides = torch.rand(images, BOXES, 2, device=place) * 0.4 + 0.1
    corner = torch.rand(images, BOXES, 2, device=place) * (1 - sides)
    labels = torch.randint(1, len(spec.classes) + 1, (images, BOXES), device=place)
    return image, torch.cat([corner, corner + sides], 2), labels


def _as_torchvision(image: Tensor, boxes: Tensor, labels: Tensor) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Convert to lists of images in 0..1 and of boxes in pixels, left first."""
    height, width = image.shape[2:]
    scale = torch.tensor([width, height, width, height], device=image.device)
    pixels = boxes[..., [1, 0, 3, 2]] * scale
    targets = [{"boxes": b, "labels": n} for b, n in zip(pixels, labels, strict=True)]
    return list(image.sigmoid()), targets


def _shipped_loss(network: Any, batch: tuple[Any, ...]) -> Tensor:
    return torch.stack(list(network(*batch).values())).sum()


def _sgd(parameters: Iterable[nn.Parameter], options: dict[str, Any]) -> torch.optim.Optimizer:
    """Build SGD with the recipe's rate of its first steps: no peer diverges on random boxes."""
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, weight_decay=5e-4, **options)
