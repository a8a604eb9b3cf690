"""Detection learns: eight images of coloured rectangles, from random weights to their boxes, on the CPU."""

import pytest
import torch
from torch import nn

from sightline.hardware.world import World
from sightline.models.anchors import default_boxes
from sightline.parts import DataSpec
from sightline.tasks.detection import Detection

SIZE, IMAGES, STEPS = 96, 8, 40
COLOURS = torch.tensor([[1.0, 0.1, 0.1], [0.1, 1.0, 0.1], [0.1, 0.1, 1.0]])  # one per class
SPEC = DataSpec(("red", "green", "blue"), 3, (SIZE, SIZE), (0.5,) * 3, (0.5,) * 3)


class TwoLevels(nn.Module):
    """The smallest network with the outputs of a single-shot detector."""

    def __init__(self, classes: int):
        super().__init__()
        self.register_buffer(
            "anchors", default_boxes(SIZE, (12, 6), (8, 16), (14, 30, 56), ((2,), (2,))), persistent=False
        )
        self.trunk = nn.Sequential()
        for inputs, outputs in ((3, 16), (16, 32), (32, 32)):
            self.trunk.append(nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False))
            self.trunk.extend([nn.BatchNorm2d(outputs), nn.ReLU()])
        self.next = nn.Sequential(nn.Conv2d(32, 48, 3, 2, 1, bias=False), nn.BatchNorm2d(48), nn.ReLU())
        self.heads = nn.ModuleList(nn.Conv2d(width, 4 * (classes + 5), 3, padding=1) for width in (32, 48))

    def forward(self, image):
        first = self.trunk(image)
        features = (first, self.next(first))
        found = [
            head(x).permute(0, 2, 3, 1).reshape(len(x), x.shape[2] * x.shape[3] * 4, -1)
            for head, x in zip(self.heads, features, strict=True)
        ]
        offsets, logits = torch.cat(found, dim=1).tensor_split([4], dim=2)
        return logits, offsets, self.anchors


def small_ssd() -> nn.Module:
    ssd = pytest.importorskip("sightline.models.ssd", reason="the network is not part of this tree")
    return ssd.SsdConfig(depth=18, width=8).build(SPEC)


def drawn() -> dict[str, torch.Tensor]:
    """Grey noise with one to three rectangles each, as a batch for training and for evaluation at once."""
    random = torch.Generator().manual_seed(0)
    image = 0.1 * torch.randn(IMAGES, 3, SIZE, SIZE, generator=random)
    boxes, labels = torch.zeros(IMAGES, 5, 4), torch.zeros(IMAGES, 5, dtype=torch.int64)
    for number in range(IMAGES):
        for place in range(number % 3 + 1):
            height, width = (int(n) for n in torch.randint(16, 40, (2,), generator=random))
            # Each in a column of its own, so that none hides another.
            top = int(torch.randint(0, SIZE - height, (1,), generator=random))
            left = place * SIZE // 3 if number % 3 else int(torch.randint(0, SIZE - width, (1,), generator=random))
            right = min(left + width, (place + 1) * SIZE // 3 - 2) if number % 3 else left + width
            label = int(torch.randint(0, 3, (1,), generator=random))
            image[number, :, top : top + height, left:right] = COLOURS[label][:, None, None]
            boxes[number, place] = torch.tensor([top, left, top + height, right]) / SIZE
            labels[number, place] = label + 1
    ymin, xmin, ymax, xmax = (boxes.double() * SIZE).unbind(2)
    return {
        "image": image,
        "boxes": boxes,
        "labels": labels,
        "index": torch.arange(IMAGES),
        "valid": torch.ones(IMAGES, dtype=torch.bool),
        "height": torch.full((IMAGES,), SIZE, dtype=torch.int32),
        "width": torch.full((IMAGES,), SIZE, dtype=torch.int32),
        "truth_boxes": torch.stack([xmin, ymin, xmax - xmin, ymax - ymin], dim=2),
        "truth_labels": labels,
        "truth_area": (xmax - xmin) * (ymax - ymin),
        "truth_crowd": torch.zeros_like(labels, dtype=torch.bool),
    }


@pytest.mark.parametrize(
    "build",
    [pytest.param(lambda: TwoLevels(3), id="two levels", marks=pytest.mark.slow), pytest.param(small_ssd, id="ssd")],
)
def test_eight_images_are_learnt(build):
    torch.manual_seed(0)
    model, task, batch = build(), Detection(), drawn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    losses = []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 0.02 * min(1, (step + 1) / 10) * (1 if step < 30 else 0.1)
        loss = task.loss(model, batch)
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
        losses.append(loss.total.item())
    assert losses[-1] < losses[0] / 5, losses[:: STEPS // 10]
    model.eval()
    metric = task.metric(SPEC, torch.device("cpu"))
    with torch.inference_mode():
        metric.update(task.predict(model, batch), batch)
    metric.merge(World())
    values = metric.result().values
    assert values["ap50"] > 0.8, values
    assert values["samples"] == IMAGES
    assert values["ap"] > 0.5, values  # boxes that fit, not only overlap
