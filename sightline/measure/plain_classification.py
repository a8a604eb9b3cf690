"""A classifier trained as torchvision's users write it: ImageFolder, DataLoader, autocast, SGD. A process of its own.

`benchmark --whole` runs it beside `sightline train`: same network, images, batch, epochs, precision and workers. It
imports nothing else of sightline; it reads its options from a JSON file and writes times to another.
"""

import json
import sys
import time
from pathlib import Path

import torch
import torchvision
from torch import nn
from torchvision.transforms import v2


def main(options: dict) -> None:  # type: ignore[type-arg]
    """Train and evaluate; write when each phase ended, in seconds since 1970."""
    marks: list[dict[str, object]] = []

    def mark(phase: str) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()
        marks.append({"phase": phase, "time": time.time()})

    device = torch.device(options["device"])
    mark("import")
    size, batch = options["size"], options["batch"]
    tail = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(options["mean"], options["std"])]
    crop = v2.RandomResizedCrop(size, options["crop_scale"])
    squares = [v2.Resize(options["eval_resize"]), v2.CenterCrop(options["eval_size"])]
    seen = torchvision.datasets.ImageFolder(
        f"{options['path']}/train", v2.Compose([crop, v2.RandomHorizontalFlip(), *tail])
    )
    held_out = torchvision.datasets.ImageFolder(f"{options['path']}/val", v2.Compose([*squares, *tail]))
    how = {"num_workers": options["workers"], "pin_memory": device.type == "cuda"}
    how["persistent_workers"] = options["workers"] > 0
    train = torch.utils.data.DataLoader(seen, batch, shuffle=True, drop_last=True, **how)
    val = torch.utils.data.DataLoader(held_out, batch, **how)
    mark("listing")
    network = torchvision.models.get_model(options["network"], weights=None, num_classes=len(seen.classes))
    network = network.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options["epochs"] * len(train))
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[options["precision"]]
    scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)

    def answer(images: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, dtype, enabled=dtype is not torch.float32):
            return network(images.to(device, memory_format=torch.channels_last, non_blocking=True))

    for epoch in range(options["epochs"]):
        network.train()
        for step, (images, labels) in enumerate(train):
            loss = criterion(answer(images).float(), labels.to(device, non_blocking=True))
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            if epoch == step == 0:
                mark("first step")
        mark("training")
        network.eval()
        right = 0
        with torch.no_grad():
            for images, labels in val:
                right += int((answer(images).argmax(1) == labels.to(device)).sum())
        mark("evaluation")
        marks[-1]["top1"] = right / len(held_out)
        torch.save({"model": network.state_dict(), "optimizer": optimizer.state_dict()}, options["checkpoint"])
        mark("checkpoints")
    Path(options["marks"]).write_text(json.dumps(marks), encoding="utf-8")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
