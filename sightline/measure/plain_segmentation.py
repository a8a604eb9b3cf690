"""A U-Net trained as MONAI's users write it: its transforms, DataLoader, DynUNet and loss. A process of its own.

`benchmark --whole` runs it beside `sightline train`: same network, prepared arrays, batch, steps, epochs, precision and
workers. It imports nothing else of sightline; it reads its options from a JSON file and writes times to another.
"""

import json
import sys
import time
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from monai.data import DataLoader, Dataset
from monai.inferers import sliding_window_inference
from monai.losses import DiceCELoss
from monai.networks.nets import DynUNet
from monai.transforms import (
    Compose,
    EnsureChannelFirstd,
    LoadImaged,
    RandFlipd,
    RandGaussianNoised,
    RandScaleIntensityd,
    RandSpatialCropd,
    SpatialPadd,
)

KEYS = ["image", "label"]


def transforms(options: dict[str, Any], is_training: bool) -> Compose:
    """Read arrays; in training also pad, cut a crop, flip, scale and add noise."""
    load = [LoadImaged(KEYS, reader="NumpyReader"), EnsureChannelFirstd("image", channel_dim=0)]
    load.append(EnsureChannelFirstd("label", channel_dim="no_channel"))
    if not is_training:
        return Compose(load)
    crop = options["crop"]
    augment = [SpatialPadd(KEYS, crop), RandSpatialCropd(KEYS, crop, random_size=False)]
    augment += [RandFlipd(KEYS, 0.5, axis) for axis in range(3)]
    return Compose([*load, *augment, RandScaleIntensityd("image", 0.3, prob=0.15), RandGaussianNoised("image", 0.15)])


def as_slices(tensor: torch.Tensor) -> torch.Tensor:
    """Turn (batch, channels, depth, height, width) into (batch * depth, channels, height, width)."""
    return tensor.movedim(2, 1).flatten(0, 1)


def main(options: dict[str, Any]) -> None:
    """Train and evaluate; write when each phase ended, in seconds since 1970."""
    marks: list[dict[str, object]] = []
    device = torch.device(options["device"])

    def mark(phase: str) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()
        marks.append({"phase": phase, "time": time.time()})

    mark("import")
    how = {"num_workers": options["workers"], "pin_memory": device.type == "cuda"}
    how["persistent_workers"] = options["workers"] > 0
    seen = Dataset(options["train"], transforms(options, is_training=True))
    train = DataLoader(seen, batch_size=options["items"], shuffle=True, drop_last=True, **how)
    val = DataLoader(Dataset(options["val"], transforms(options, is_training=False)), **how)
    mark("listing")
    network = DynUNet(**options["network"], norm_name=("instance", {"affine": True}), trans_bias=True).to(device)
    optimizer = torch.optim.AdamW(network.parameters(), 1e-3, weight_decay=1e-4)
    criterion = DiceCELoss(include_background=False, to_onehot_y=True, softmax=True, batch=True)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[options["precision"]]
    scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)
    is_2d = options["dim"] == 2

    def laid(tensor: torch.Tensor) -> torch.Tensor:
        moved = tensor.as_tensor().to(device, non_blocking=True)  # type: ignore[attr-defined]  # MONAI's MetaTensor
        return as_slices(moved) if is_2d else moved

    def answer(images: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, dtype, enabled=dtype is not torch.float32):
            return network(images)

    for epoch in range(options["epochs"]):
        network.train()
        for step, batch in enumerate(islice(cycle(train), options["steps"])):
            outputs, label = answer(laid(batch["image"])), laid(batch["label"])
            stacked = outputs.unbind(1) if outputs.dim() > label.dim() else (outputs,)
            loss = sum(0.5**n * criterion(each.float(), label) for n, each in enumerate(stacked))
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if epoch == step == 0:
                mark("first step")
        mark("training")
        if (epoch + 1) % options["eval_every"] == 0 or epoch + 1 == options["epochs"]:
            network.eval()
            shared = total = 0.0
            with torch.no_grad():
                for batch in val:
                    images, label = laid(batch["image"]), laid(batch["label"])
                    logits: Any = (
                        answer(images) if is_2d else sliding_window_inference(images, options["crop"], 2, answer)
                    )
                    found, wanted = logits.argmax(1) > 0, label[:, 0] > 0
                    shared += 2 * float((found & wanted).sum())
                    total += float(found.sum() + wanted.sum())
            mark("evaluation")
            marks[-1]["dice"] = shared / max(1.0, total)
        torch.save({"model": network.state_dict(), "optimizer": optimizer.state_dict()}, options["checkpoint"])
        mark("checkpoints")
    Path(options["marks"]).write_text(json.dumps(marks), encoding="utf-8")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
