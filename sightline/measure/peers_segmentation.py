"""Steps that a user would run instead of our U-Net's: MONAI's DynUNet of the same form with MONAI's own loss."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sightline.engine.orders import train_order
from sightline.errors import UsageError
from sightline.measure.peers import BATCHES, Maker, Ours, Peer, PeerStep
from sightline.parts import DataSpec
from sightline.recipe.recipe import Recipe

STEP_PEERS = (
    Peer("MONAI DynUNet: torch.compile", "bf16", False, "default", fused=True),
    Peer("MONAI DynUNet: torch.compile", "bf16", True, "default", fused=True),
    Peer("MONAI DynUNet: eager", "bf16", False, fused=True),
)


def dynunet(model: Any, spec: DataSpec) -> nn.Module:
    """Build MONAI's network with the levels, filters and heads of our U-Net `model`."""
    try:
        from monai.networks.nets import DynUNet
    except ImportError as error:
        raise UsageError(f"--peers compares with MONAI, which is missing ({error}); `pip install monai`") from error
    return DynUNet(**_form(model, spec), norm_name=("instance", {"affine": True}), trans_bias=True)


def _form(model: Any, spec: DataSpec) -> dict[str, Any]:
    """Return the levels, filters and heads of our U-Net as DynUNet takes them."""
    heads = len(model.heads) - 1
    return {
        "spatial_dims": len(spec.size),
        "in_channels": spec.channels,
        "out_channels": len(spec.classes),
        "kernel_size": model.kernels,
        "strides": model.strides,
        "upsample_kernel_size": model.strides[1:],
        "filters": model.filters,
        "deep_supervision": heads > 0,
        "deep_supr_num": max(1, heads),
    }


def plain_loop(recipe: Recipe) -> dict[str, Any]:
    """Return what measure/plain_segmentation.py needs to train such a network on such volumes."""
    data: Any = recipe.data
    sets = {split: data.open(split, recipe.train.seed) for split in ("train", "val")}
    if not all(hasattr(each.source, "cases") for each in sets.values()):
        raise UsageError(f"MONAI's loop reads what `prepare decathlon` wrote, and {data.path} is something else")
    dataset, batch = sets["train"], recipe.train.global_batch
    each = dataset.samples_per_item(batch)
    with torch.device("meta"):
        model = recipe.model.build(dataset.spec)
    dynunet(model, dataset.spec)  # says if MONAI is missing
    arrays = {
        split: [
            {key: str(Path(data.path, getattr(case, key))) for key in ("image", "label")} for case in found.source.cases
        ]
        for split, found in sets.items()
    }
    return {
        **arrays,
        "network": _form(model, dataset.spec),
        "dim": data.dim,
        "crop": [each, *dataset.spec.size] if data.dim == 2 else list(dataset.spec.size),
        "items": batch // each,
        "steps": train_order(recipe.train, len(dataset), each).steps_per_epoch,
        "eval_every": recipe.train.eval_every_epochs,
    }


def steps(peers: Sequence[Peer], ours: Ours) -> list[Maker]:
    """Return each peer's step on slices or patches as our U-Net, of which only the form is read, takes them."""
    model, spec, images, device = ours.model, ours.spec, ours.images, ours.device
    dynunet(model, spec)  # before anything slow: says what is missing

    def step(peer: Peer) -> PeerStep:
        place = device.torch_device
        shape = (images, spec.channels, *spec.size)
        batches = [
            (
                _laid(torch.randn(shape, device=place), peer),
                torch.randint(len(spec.classes), (images, 1, *spec.size), device=place),
            )
            for _ in range(BATCHES)
        ]
        return PeerStep(peer, dynunet(model, spec), dice_and_cross_entropy(), batches, images, device, _adamw)

    # Volumes have no channels_last here: MONAI's users do not have it either.
    return [functools.partial(step, peer) for peer in peers if len(spec.size) == 2 or not peer.channels_last]


def dice_and_cross_entropy() -> Callable[[Callable[..., Any], tuple[Any, ...]], Tensor]:
    """Return MONAI's loss over the batch, without background; coarser outputs weigh half as much each."""
    from monai.losses import DiceCELoss

    criterion = DiceCELoss(include_background=False, to_onehot_y=True, softmax=True, batch=True)

    def loss_of(network: Callable[..., Any], batch: tuple[Any, ...]) -> Tensor:
        image, label = batch
        answer = network(image)
        # With deep supervision DynUNet enlarges every output and stacks them: (batch, outputs, classes, ...).
        outputs = answer.unbind(1) if answer.dim() > image.dim() else (answer,)
        weights = [0.5**number for number in range(len(outputs))]
        losses = [criterion(logits, label) * weight for logits, weight in zip(outputs, weights, strict=True)]
        return torch.stack(losses).sum() / sum(weights)

    return loss_of


def _laid(image: Tensor, peer: Peer) -> Tensor:
    return image.to(memory_format=peer.layout) if image.dim() == 4 else image


def _adamw(parameters: Iterable[nn.Parameter], options: dict[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=1e-4, **options)
