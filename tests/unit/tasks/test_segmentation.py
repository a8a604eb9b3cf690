"""Segmentation: the loss against NumPy and MONAI, deep supervision, mirror images, whole volumes; blobs are learnt."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

from sightline.errors import UsageError
from sightline.hardware.world import World
from sightline.parts import DataSpec
from sightline.report.by_task import tiles
from sightline.report.tiles import masks_beside
from sightline.tasks.segmentation import Segmentation

CPU = torch.device("cpu")
SPACES = [(6, 5), (4, 6, 5)]


class Answers(nn.Module):
    """A model that answers what it was given."""

    def __init__(self, *outputs: Tensor, alone: bool = False):
        super().__init__()
        self.outputs = nn.ParameterList(outputs)
        self.alone = alone

    def forward(self, image):
        return self.outputs[0] if self.alone else tuple(self.outputs)


def random_case(*space: int, samples: int = 3, classes: int = 4, seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    """Return logits and batch; class 2 is nowhere in the labels."""
    random = torch.Generator().manual_seed(seed)
    label = torch.randint(0, classes, (samples, *space), generator=random)
    label[label == 2] = 1
    logits = 2 * torch.randn(samples, classes, *space, generator=random)
    return logits, {"image": torch.zeros(samples, 1, *space), "label": label}


def by_hand(logits: np.ndarray, label: np.ndarray, focal: bool) -> tuple[float, float]:
    """Dice loss over batch and space per class without the background, and the mean voxel loss, in 64 bits."""
    odds = np.exp(logits.astype(np.float64))
    probability = odds / odds.sum(1, keepdims=True)
    dice = []
    for number in range(1, logits.shape[1]):
        p, g = probability[:, number], (label == number).astype(float)
        dice.append(1 - (2 * (p * g).sum() + 1e-5) / (p.sum() + g.sum() + 1e-5))
    true = np.take_along_axis(probability, label[:, None], 1)
    return float(np.mean(dice)), float(np.mean(-np.log(true) * ((1 - true) ** 2 if focal else 1)))


def of_plain(task: Segmentation, logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return task.loss(Answers(logits, alone=True), batch).total


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("kind", ["ce", "focal"])
def test_loss_equals_numpy(space: tuple[int, ...], kind):
    logits, batch = random_case(*space)
    loss = Segmentation(voxel_loss=kind).loss(Answers(logits, alone=True), batch)
    dice, voxel = by_hand(logits.numpy(), batch["label"].numpy(), kind == "focal")
    assert loss.total.item() == pytest.approx(dice + voxel, abs=1e-6)
    # Sums over the three samples, whose means the log shows.
    shown = {name: value.item() / 3 for name, value in loss.sums.items()}
    assert shown == pytest.approx({"dice_loss": dice, f"{kind}_loss": voxel}, abs=1e-6)
    assert not any(value.requires_grad for value in loss.sums.values())


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("kind", ["ce", "focal"])
def test_loss_and_gradient_equal_monai(space: tuple[int, ...], kind):
    from monai.losses import DiceLoss, FocalLoss

    logits, batch = random_case(*space)
    model = Answers(logits.clone(), alone=True)
    loss = Segmentation(voxel_loss=kind).loss(model, batch).total
    (gradient,) = torch.autograd.grad(loss, list(model.parameters()))
    wanted, label = logits.clone().requires_grad_(), batch["label"][:, None]
    dice = DiceLoss(
        include_background=False, to_onehot_y=True, softmax=True, batch=True, smooth_nr=1e-5, smooth_dr=1e-5
    )(wanted, label)
    if kind == "ce":
        voxel = F.cross_entropy(wanted, batch["label"])
    else:  # MONAI's mean is now also one over the four classes, all but one of them 0; the original's was not
        voxel = 4 * FocalLoss(gamma=2, to_onehot_y=True, use_softmax=True)(wanted, label)
    (dice + voxel).backward()
    assert loss.item() == pytest.approx((dice + voxel).item(), abs=1e-6)
    torch.testing.assert_close(gradient, wanted.grad, rtol=0, atol=1e-6)


def test_loss_of_half_precision_logits_is_made_in_full():
    logits, batch = random_case(16, 12)
    half = logits.bfloat16().contiguous(memory_format=torch.channels_last)
    found = of_plain(Segmentation(), half, batch)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, of_plain(Segmentation(), half.float(), batch), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("rule", "outputs", "expected"),
    [
        ("original", 3, [8 / 15, 4 / 15, 2 / 15]),
        ("exact", 3, [4 / 7, 2 / 7, 1 / 7]),
        ("original", 1, [2 / 3]),
        ("exact", 1, [1.0]),
    ],
)
def test_deep_supervision_weighs_each_output_against_the_label_at_its_size(rule, outputs: int, expected: list[float]):
    _, batch = random_case(16, 24)
    random = torch.Generator().manual_seed(5)
    answers = [torch.randn(3, 4, 16 // 2**n, 24 // 2**n, generator=random) for n in range(outputs)]
    parts = []
    for logits in answers:
        small = F.interpolate(batch["label"][:, None].float(), logits.shape[2:], mode="nearest")[:, 0].long()
        parts.append(by_hand(logits.numpy(), small.numpy(), focal=False))
    loss = Segmentation(supervision=rule).loss(Answers(*answers), batch)
    assert loss.total.item() == pytest.approx(np.dot(expected, np.sum(parts, axis=1)), abs=1e-6)
    shown = [loss.sums[name].item() / 3 for name in ("dice_loss", "ce_loss")]
    assert shown == pytest.approx(np.dot(expected, parts).tolist(), abs=1e-6)


@pytest.mark.parametrize("size", [(5, 8), (4, 7), (7, 12), (15, 23)])
def test_sizes_that_do_not_divide_take_the_voxels_that_interpolation_takes(size: tuple[int, int]):
    logits, batch = random_case(15, 24)
    small = torch.randn(3, 4, *size, generator=torch.Generator().manual_seed(6))
    reduced = F.interpolate(batch["label"][:, None].float(), size, mode="nearest")[:, 0].long()
    parts = [by_hand(logits.numpy(), batch["label"].numpy(), False), by_hand(small.numpy(), reduced.numpy(), False)]
    total = Segmentation(supervision="exact").loss(Answers(logits, small), batch).total
    assert total.item() == pytest.approx((2 * sum(parts[0]) + sum(parts[1])) / 3, abs=1e-6)


def test_one_tensor_is_not_deep_supervision():
    logits, batch = random_case(6, 5)
    assert of_plain(Segmentation(), logits, batch) == of_plain(Segmentation(supervision="exact"), logits, batch)


def test_dice_sums_over_the_batch():
    """Not the mean of the Dice of each sample; for one device `world` is the same."""
    logits, batch = random_case(6, 5)
    batch["label"][0] = 0
    whole = of_plain(Segmentation(), logits, batch)
    each = [of_plain(Segmentation(), logits[n : n + 1], {k: v[n : n + 1] for k, v in batch.items()}) for n in range(3)]
    assert abs(whole - sum(each) / 3) > 0.01
    assert of_plain(Segmentation(dice_over="world"), logits, batch) == whole


# Dynamo finds what breaks a graph; what AOTAutograd makes of it costs as much again.
@pytest.mark.parametrize("ranks", [1, 3])
def test_dice_over_ranks_has_the_gradient_of_this_ranks_part_times_their_number(ranks: int):
    """In torch's stand-in for a group the other ranks add nothing; DDP would divide by their number."""
    drawn, batch = random_case(6, 5)
    logits = nn.Parameter(drawn)

    def gradient(loss: Tensor) -> Tensor:
        return torch.autograd.grad(loss, logits, retain_graph=True)[0]

    local, voxels = of_plain(Segmentation(), logits, batch), F.cross_entropy(logits, batch["label"])
    of_dice = gradient(local - voxels)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        world = of_plain(Segmentation(dice_over="world"), logits, batch)
    finally:
        dist.destroy_process_group()
    assert torch.equal(world, of_plain(Segmentation(), logits, batch))
    torch.testing.assert_close(gradient(world - voxels), ranks * of_dice)


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager_default_partitioner", marks=pytest.mark.slow)])
def test_one_graph_without_breaks(backend):
    random = torch.Generator().manual_seed(0)
    _, batch = random_case(8, 12)
    batch["image"] = torch.randn(3, 2, 8, 12, generator=random)
    model = nn.Conv2d(2, 4, 3, padding=1)
    small = nn.Conv2d(4, 4, 2, 2)
    weights = [*model.parameters(), *small.parameters()]

    def loss_of(batch):
        loss = Segmentation(voxel_loss="focal").loss(lambda x: (model(x), small(model(x))), batch)
        return loss.total, loss.sums

    expected, _ = loss_of(batch)
    found, sums = torch.compile(loss_of, fullgraph=True, dynamic=False, backend=backend)(batch)
    torch.testing.assert_close(found, expected)
    assert set(sums) == {"dice_loss", "focal_loss"}
    for one, other in zip(torch.autograd.grad(found, weights), torch.autograd.grad(expected, weights), strict=True):
        torch.testing.assert_close(one, other)


class Network(nn.Module):
    """Small, for slices or volumes; `equivariant` makes its answers turn with the image."""

    def __init__(self, patch: tuple[int, ...], equivariant: bool = False):
        super().__init__()
        torch.manual_seed(len(patch))
        self.patch = patch
        convolution = {2: nn.Conv2d, 3: nn.Conv3d}[len(patch)]
        self.layers = nn.Sequential(
            convolution(2, 4, 1 if equivariant else 3, padding="same"), nn.Tanh(), convolution(4, 3, 1)
        )
        self.seen: list[Tensor] = []

    def forward(self, image):
        self.seen.append(image.clone())
        return self.layers(image)


def random_images(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(9))


@torch.no_grad()
@pytest.mark.parametrize("space", [(8, 6), (4, 8, 6)])
def test_mirror_images(space: tuple[int, ...]):
    """An equivariant network says the same; any other network the mean, over flips of the last axes only."""
    image = random_images(2, 2, *space)
    network = Network(space, equivariant=True)
    plain = Segmentation().predict(network, {"image": image})
    turned = Segmentation(tta=True).predict(network, {"image": image})
    torch.testing.assert_close(turned["logits"], plain["logits"])
    network = Network(space)
    found = Segmentation(tta=True).predict(network, {"image": image})["logits"]
    last = range(2, 2 + len(space))
    flips = [[], *([axis] for axis in last), *([a, b] for a in last for b in last if a < b)]
    flips += [[2, 3, 4]] if len(space) == 3 else []
    assert len(network.seen) == len(flips) == 2 ** len(space)
    assert all(any(torch.equal(seen, image.flip(axes)) for seen in network.seen) for axes in flips)
    expected = torch.stack([network(image.flip(axes)).flip(axes) for axes in flips]).mean(0)
    torch.testing.assert_close(found, expected)
    assert (found - Segmentation().predict(network, {"image": image})["logits"]).abs().max() > 1e-3


@torch.no_grad()
def test_slices_are_predicted_in_one_pass():
    image, network = random_images(5, 2, 8, 6), Network((8, 6))
    found = Segmentation(window_batch=2).predict(network, {"image": image.bfloat16().float()})
    assert [len(seen) for seen in network.seen] == [5]
    assert found["logits"].dtype == torch.float32 and found["classes"].dtype == torch.uint8
    assert torch.equal(found["classes"], network(image.bfloat16().float()).argmax(1).to(torch.uint8))


@pytest.mark.parametrize(("extents", "worst"), [(None, (3, 1)), ([[3, 6, 5], [4, 6, 5]], (2, 1))])
def test_a_volume_is_drawn_where_most_voxels_inside_it_are_wrong(extents, worst: tuple[int, int]):
    label = torch.randint(0, 2, (3, 4, 6, 5), generator=torch.Generator().manual_seed(0))
    found = label.clone()
    for volume, plane, wrong in ((0, 1, 2), (0, 2, 3), (0, 3, 5), (1, 1, 4), (1, 2, 3)):
        found[volume, plane, 0, :wrong] = 1 - found[volume, plane, 0, :wrong]
    image = torch.linspace(0, 1, 3 * 2 * 4 * 6 * 5).view(3, 2, 4, 6, 5)
    batch = {"image": image, "label": label}
    if extents:
        batch["extent"] = torch.tensor([*extents, [4, 6, 5]])
    drawn = tiles(Segmentation(), batch, lambda: {"classes": found}, DataSpec(("a", "b"), 2, (6, 5), (), ()), 2)
    assert drawn.drawings == [
        masks_beside(*(each[volume, plane].numpy() for each in (image[:, 0], label, found)))
        for volume, plane in enumerate(worst)
    ]


EXTENTS = [[9, 11, 13], [9, 14, 7], [3, 5, 4]]


@torch.no_grad()
@pytest.mark.parametrize("blend", ["gaussian", "constant"])
def test_whole_volumes_go_through_windows(blend):
    """Each as if it were alone, without its padding: so says MONAI."""
    from monai.inferers import sliding_window_inference

    image, network = random_images(3, 2, 9, 14, 13), Network((4, 8, 6))
    task = Segmentation(blend=blend, window_batch=3, overlap=0.25)
    found = task.predict(network, {"image": image, "extent": torch.tensor(EXTENTS)})
    assert max(len(seen) for seen in network.seen) == 3
    assert found["logits"].shape == (3, 3, 9, 14, 13) and found["classes"].dtype == torch.uint8
    for number, (d, h, w) in enumerate(EXTENTS):
        one = image[number : number + 1, :, :d, :h, :w]
        expected = sliding_window_inference(one, (4, 8, 6), 3, network, 0.25, blend, sigma_scale=0.125)[0]
        logits, classes = found["logits"][number], found["classes"][number]
        torch.testing.assert_close(logits[:, :d, :h, :w], expected, rtol=0, atol=1e-5)
        assert torch.equal(classes[:d, :h, :w], logits[:, :d, :h, :w].argmax(0).to(torch.uint8))
        for outside in (
            logits[:, d:],
            logits[:, :, h:],
            logits[..., w:],
            classes[d:],
            classes[:, h:],
            classes[..., w:],
        ):
            assert not outside.any()


@torch.no_grad()
@pytest.mark.parametrize("tta", [False, True])
def test_network_for_slices_on_volumes_equals_slice_by_slice(tta: bool):
    """Whatever the depth and however many windows go at once; mirrored in height and width, never in depth."""
    image, network = random_images(2, 2, 7, 14, 13), Network((8, 6))
    task = Segmentation(window_batch=4, tta=tta)
    found = task.predict(network, {"image": image, "extent": torch.tensor([[7, 14, 13], [5, 9, 13]])})
    for number, (d, h, w) in enumerate([(7, 14, 13), (5, 9, 13)]):
        for z in range(d):
            one = image[number, :, z : z + 1, :h, :w]  # a volume of one slice
            alone = task.predict(network, {"image": one[None], "extent": torch.tensor([[1, h, w]])})
            torch.testing.assert_close(found["logits"][number, :, z, :h, :w], alone["logits"][0, :, 0])
    if tta:
        flips = [(), (-2,), (-1,), (-2, -1)]
        whole = image[:1]
        each = [sliding(network, whole.flip(axes)).flip(axes) for axes in flips]
        torch.testing.assert_close(found["logits"][:1], torch.stack(each).mean(0), rtol=0, atol=1e-5)


def sliding(network: Network, volume: Tensor) -> Tensor:
    """Return slices (1, channels, depth, ...) as MONAI sees them."""
    from monai.inferers import sliding_window_inference

    found = sliding_window_inference(volume[0].movedim(1, 0), network.patch, 4, network, 0.5, "gaussian")
    return found.movedim(0, 1)[None]


@torch.no_grad()
def test_volumes_that_could_not_be_read_cost_nothing():
    image, network = random_images(3, 2, 9, 14, 13), Network((4, 8, 6))
    extent = torch.tensor([[0, 0, 0], EXTENTS[1], [99, 99, 99]])
    batch = {"image": image, "extent": extent, "valid": torch.tensor([False, True, False])}
    found = Segmentation().predict(network, batch)
    assert found["logits"].shape == (3, 3, 9, 14, 13)
    alone = Segmentation().predict(network, {"image": image[1:2], "extent": extent[1:2]})
    assert torch.equal(found["logits"][1:2], alone["logits"]) and torch.equal(found["classes"][1:2], alone["classes"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"overlap": 1.0}, "task.overlap=1.0 must be in"),
        ({"overlap": -0.1}, "task.overlap=-0.1 must be in"),
        ({"window_batch": 0}, "task.window_batch=0 must be at least 1"),
    ],
)
def test_values_that_mean_nothing_are_refused(fields, message: str):
    with pytest.raises(UsageError, match=message):
        Segmentation(**fields)


def test_regions_need_the_labels_of_brain_tumours():
    spec = DataSpec(("background", "anterior", "posterior"), 1, (56, 40), (), ())
    with pytest.raises(UsageError, match="here are 3 classes: background, anterior, posterior; use none"):
        Segmentation(regions="brats").metric(spec, CPU)
    tumours = replace(spec, classes=("background", "edema", "non-enhancing tumour", "enhancing tumour"))
    Segmentation(regions="brats").metric(tumours, CPU)


def blobs(volumes: int, depth: int, size: int) -> dict[str, Tensor]:
    """Return slices of noisy volumes with a bright and a dark ball, as a batch for training and evaluation at once."""
    random = torch.Generator().manual_seed(2)
    grid = torch.stack(torch.meshgrid(torch.arange(depth), torch.arange(size), torch.arange(size), indexing="ij"), -1)
    image = 0.4 * torch.randn(volumes, depth, size, size, generator=random)
    label = torch.zeros(volumes, depth, size, size, dtype=torch.int64)
    for volume in range(volumes):
        for number, brightness in ((1, 1.0), (2, -1.0)):
            middle = torch.rand(3, generator=random) * torch.tensor([depth, size / 2, size / 2]) + size / 4 * number - 4
            ball = ((grid - middle) ** 2 * torch.tensor([4, 1, 1])).sum(-1) < 30
            image[volume][ball] += brightness
            label[volume][ball] = number
    count = volumes * depth
    return {
        "image": image.view(count, 1, size, size),
        "label": label.view(count, size, size),
        "volume": torch.arange(volumes).repeat_interleave(depth),
        "index": torch.arange(count),
        "valid": torch.ones(count, dtype=torch.bool),
    }


@pytest.mark.parametrize("kind", [pytest.param("ce", marks=pytest.mark.slow), "focal"])
def test_blobs_are_learnt(kind):
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs in (1, 12, 12):
        layers += [nn.Conv2d(inputs, 12, 3, padding=1), nn.InstanceNorm2d(12, affine=True), nn.LeakyReLU(0.01)]
    model, batch = nn.Sequential(*layers, nn.Conv2d(12, 3, 1)), blobs(4, 6, 24)
    spec = DataSpec(("background", "bright", "dark"), 1, (24, 24), (), (), spacing=(1.0, 1.0))
    task = Segmentation(voxel_loss=kind)

    def scores() -> dict[str, float]:
        metric = task.metric(spec, CPU)
        with torch.inference_mode():
            metric.update(task.predict(model.eval(), batch), batch)
        metric.merge(World())
        return metric.result().values

    before = scores()
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=0.01)
    for _ in range(50):
        optimizer.zero_grad()
        task.loss(model, batch).total.backward()
        optimizer.step()
    after = scores()
    assert before["dice"] < 0.5 and after["dice"] > 0.8, (before, after)
    assert after["val_loss"] < before["val_loss"] / 2, (before, after)
    assert after["samples"] == 24 and after["volumes"] == 4
