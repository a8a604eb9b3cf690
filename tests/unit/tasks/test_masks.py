"""The task of images with masks: its loss by hand, windows and whole images, drawings and results."""

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from sightline.inference.by_task import results
from sightline.parts import IGNORED, DataSpec, PredictOptions
from sightline.report.by_task import seen, tiles
from sightline.tasks.config import MaskConfig

SPEC = DataSpec(("ground", "road", "car"), 3, (16, 16), (0.5,) * 3, (0.25,) * 3, (0, 128, 255))


class Pointwise(nn.Module):
    """A network that sees one pixel at a time: windows cannot change its answer."""

    patch = (16, 16)
    any_size = True

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Conv2d(3, 3, 1)
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, image: Tensor) -> Tensor:
        self.shapes.append(tuple(image.shape))
        return self.layer(image)


def batch_of(sides: list[tuple[int, int]], seed: int = 0) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    most = [max(each) for each in zip(*sides, strict=True)]
    label = torch.full((len(sides), *most), IGNORED)
    for row, (height, width) in enumerate(sides):
        label[row, :height, :width] = torch.randint(0, 3, (height, width), generator=random)
    count = torch.arange(len(sides))
    image = torch.randn(len(sides), 3, *most, generator=random)
    return {"image": image, "label": label, "extent": torch.tensor(sides), "index": count, "valid": count >= 0}


def test_the_loss_is_cross_entropy_and_dice_of_the_pixels_that_count():
    task, model, batch = MaskConfig(dice_weight=0.5).build(), Pointwise(), batch_of([(16, 16), (9, 12)])
    loss = task.loss(model, batch)
    logits = model(batch["image"])
    kept = batch["label"] != IGNORED
    chances = logits.softmax(1).movedim(1, 3)[kept]
    truth = F.one_hot(batch["label"][kept], 3).float()
    dice = (1 - 2 * (chances * truth).sum(0) / (chances.sum(0) + truth.sum(0))).mean()
    entropy = F.cross_entropy(logits, batch["label"], ignore_index=IGNORED)
    torch.testing.assert_close(loss.total, entropy + 0.5 * dice)
    torch.testing.assert_close(loss.sums, {"ce_loss": 2 * entropy.detach(), "dice_loss": 2 * dice.detach()})
    ours, theirs = (torch.autograd.grad(total, model.layer.weight)[0] for total in (loss.total, entropy + 0.5 * dice))
    torch.testing.assert_close(ours, theirs)


def test_a_class_that_no_mask_of_the_batch_has_does_not_weigh_on_the_dice():
    task, model, batch = MaskConfig().build(), Pointwise(), batch_of([(16, 16)])
    batch["label"][batch["label"] == 2] = 1
    logits = model(batch["image"])
    chances, truth = logits.softmax(1), F.one_hot(batch["label"], 3).movedim(3, 1).float()
    shared, total = (chances * truth).sum((0, 2, 3)), (chances + truth).sum((0, 2, 3))
    dice = (1 - 2 * shared / total)[:2].mean()
    torch.testing.assert_close(task.loss(model, batch).total, F.cross_entropy(logits, batch["label"]) + dice)


def test_a_batch_of_which_no_pixel_counts_has_no_loss_and_no_gradient():
    task, model, batch = MaskConfig().build(), Pointwise(), batch_of([(16, 16)])
    batch["label"][:] = IGNORED
    total = task.loss(model, batch).total
    assert total.item() == 0
    assert not torch.autograd.grad(total, model.layer.weight)[0].any()


@torch.no_grad()
@pytest.mark.parametrize("flags", [{}, {"whole_pixels": 0}, {"whole_pixels": 0, "blend": "constant", "overlap": 0.5}])
def test_windows_and_whole_images_give_the_answer_of_the_network(flags: dict):
    task, model = MaskConfig(**flags).build(), Pointwise()
    batch = batch_of([(40, 50), (16, 16), (40, 50), (7, 90)])
    found = task.predict(model, batch)
    expected = model.layer(batch["image"])
    for row, (height, width) in enumerate(batch["extent"].tolist()):
        inside = (row, slice(None), slice(height), slice(width))
        torch.testing.assert_close(found["logits"][inside], expected[inside])
        assert torch.equal(found["classes"][row, :height, :width], expected[inside].argmax(0).to(torch.uint8))
        assert not found["logits"][row, :, height:].any() and not found["logits"][row, :, :, width:].any()
    if flags:
        assert {shape[2:] for shape in model.shapes} == {(16, 16)}
    else:  # two of one size go through together
        assert sorted(model.shapes) == [(1, 3, 7, 90), (1, 3, 16, 16), (2, 3, 40, 50)]


@torch.no_grad()
def test_images_of_one_size_share_a_pass_as_far_as_windows_do():
    model = Pointwise()
    MaskConfig(window_batch=2).build().predict(model, batch_of([(16, 16)] * 5))
    assert [shape[0] for shape in model.shapes] == [2, 2, 1]


@torch.no_grad()
def test_a_row_that_could_not_be_read_does_no_harm():
    batch = batch_of([(8, 8), (16, 16)])
    batch["extent"][0] = 0
    batch["valid"][0] = False
    found = MaskConfig().build().predict(Pointwise(), batch)
    assert found["logits"].shape == (2, 3, 16, 16)


@torch.no_grad()
def test_the_worst_images_are_drawn_beside_their_masks():
    task, model, batch = MaskConfig().build(), Pointwise(), batch_of([(16, 16), (9, 12)])
    drawn = tiles(task, batch, lambda: task.predict(model, batch), SPEC, 2)
    shown = {name: Image.open(io.BytesIO(base64.b64decode(text))) for name, text in drawn.drawings[1].items()}
    assert list(shown) == ["image", "truth", "prediction"]
    assert {tile.size for tile in shown.values()} == {(240, 180)}, "without its padding"
    assert list(drawn.colours) == ["road", "car"]


@torch.no_grad()
def test_results_are_masks_of_numbers_of_classes():
    task, model, batch = MaskConfig().build(), Pointwise(), batch_of([(16, 16), (9, 12)])
    found = task.predict(model, batch)
    [result] = results(task, [None, "b.png"], found, batch, SPEC, PredictOptions(probabilities=True))
    assert result.file == "b.png" and result.mask.shape == (9, 12) and result.mask.dtype == np.uint8
    expected = model.layer(batch["image"])[1, :, :9, :12]
    assert np.array_equal(result.mask, expected.argmax(0).numpy())
    assert result.voxels == {name: int((result.mask == n).sum()) for n, name in enumerate(SPEC.classes)}
    np.testing.assert_allclose(result.probabilities, expected.softmax(0).numpy(), rtol=1e-5)


def test_pixels_that_do_not_count_are_seen_as_the_first_class():
    batch = batch_of([(16, 16), (9, 12)])
    first, second = seen(MaskConfig().build(), batch, SPEC)
    assert np.array_equal(first.mask, batch["label"][0].numpy())
    assert second.mask.max() < 3 and not second.mask[9:].any()
