"""Steps that a user would run instead of our classifier's: the same network from torchvision, in four ways."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

from sightline.errors import UsageError
from sightline.measure.peers import BATCHES, Maker, Ours, Peer, PeerStep, forward_flop
from sightline.recipe.recipe import Recipe

ARCHITECTURES = (
    *("resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "wide_resnet50_2", "wide_resnet101_2"),
    *("resnext50_32x4d", "resnext101_32x4d", "resnext101_32x8d", "resnext101_64x4d"),
)
STEP_PEERS = (
    Peer("torchvision: eager AMP", "fp16", channels_last=False),
    Peer("timm style: eager AMP", "fp16", channels_last=True),
    Peer("torch.compile", "bf16", True, "default", fused=True),
    Peer("reduce-overhead", "bf16", True, "reduce-overhead", fused=True),
)


def steps(peers: Sequence[Peer], ours: Ours) -> list[Maker]:
    """Return each peer's step of the same network from torchvision."""
    classes, place = len(ours.spec.classes), ours.device.torch_device
    twin = torchvision_twin(ours.model, ours.image, classes)
    criterion = nn.CrossEntropyLoss()

    def step(peer: Peer) -> PeerStep:
        batches = [
            (
                torch.randn(ours.images, *ours.image.shape[1:], device=place).to(memory_format=peer.layout),
                torch.randint(classes, (ours.images,), device=place),
            )
            for _ in range(BATCHES)
        ]
        network = torchvision_network(twin, classes)
        loss_of = lambda net, batch: criterion(net(batch[0]), batch[1])  # noqa: E731
        return PeerStep(peer, network, loss_of, batches, ours.images, ours.device)

    return [functools.partial(step, peer) for peer in peers]


def plain_loop(recipe: Recipe) -> dict[str, Any]:
    """Return what measure/plain_classification.py needs to train such a network on such images."""
    data: Any = recipe.data
    if not (Path(data.path) / "train").is_dir():
        raise UsageError(f"torchvision reads folders of classes below train and val, and {data.path} has none")
    spec = data.open("train", recipe.train.seed).spec
    with torch.device("meta"):
        model, image = recipe.model.build(spec), torch.zeros(1, spec.channels, data.size, data.size)
    fields = ("path", "size", "eval_size", "eval_resize", "mean", "std", "crop_scale")
    network = torchvision_twin(model, image, len(spec.classes))
    return {**{name: getattr(data, name) for name in fields}, "network": network, "batch": recipe.train.global_batch}


def torchvision_network(name: str, classes: int) -> nn.Module:
    """Build one of ARCHITECTURES with random weights."""
    if name == "resnext101_32x4d":  # which torchvision can build but has no name for
        block = torchvision.models.resnet.Bottleneck
        return torchvision.models.ResNet(block, [3, 4, 23, 3], classes, groups=32, width_per_group=4)
    return torchvision.models.get_model(name, num_classes=classes)


def torchvision_twin(model: nn.Module, image: Tensor, classes: int) -> str:
    """Name torchvision's network with the same weights, by name and shape, and the same work as `model`."""
    with torch.no_grad():
        if not isinstance(model.eval()(image), Tensor):
            raise UsageError(
                f"--peers compares with torchvision's classifiers, and {type(model).__name__} is not one; leave --peers"
                f" out"
            )
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    flop = forward_flop(model, image)
    for name in ARCHITECTURES:
        with torch.device("meta"):
            twin = torchvision_network(name, classes)
        same_shapes = {key: tensor.shape for key, tensor in twin.state_dict().items()} == shapes
        if same_shapes and forward_flop(twin, image) == flop:
            return name
    raise UsageError(
        f"--peers compares with the same network in torchvision, and none of {', '.join(ARCHITECTURES)} has the "
        f"weights and the work of this one; use the published form, e.g. --model.width 64 --model.stem 7x7"
    )
