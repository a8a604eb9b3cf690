"""Mixup with a share per sample and with other partners, label smoothing and a background class, from the drawn
numbers to the loss: against soft targets in 64 bits."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from sightline.data.augment.classification import CUT_KEYS, mix, partner_of
from sightline.data.classification import ClassificationData
from sightline.errors import UsageError
from sightline.metrics.topk import TopK
from sightline.tasks.classification import Classification
from sightline.train.step import _split

CLASSES, SIDE, BATCH = 10, 12, 6
BASE = ClassificationData(
    path="synthetic:classes=10,samples=24,size=16", size=SIDE, eval_resize=SIDE, eval_size=SIDE, mixup=0.4
)
PARTNERS = ("previous", "reversed", "random")


def opened(split: str = "train", **fields):
    return dataclasses.replace(BASE, **fields).open(split, seed=1)


def batch_of(dataset, step: int = 0, rows: int = BATCH) -> dict[str, torch.Tensor]:
    """Return a batch of a dataset as the loader makes it, without workers."""
    samples = [dataset.load(0, index) for index in range(rows)]
    for key, (shape, dtype) in dataset.layout.items():
        assert all(sample[key].shape == shape and sample[key].dtype == dtype for sample in samples)
    batch = {key: torch.from_numpy(np.stack([sample[key] for sample in samples])) for key in dataset.layout}
    numbers = {key: torch.as_tensor(value) for key, value in dataset.draw_batch(0, step).items()}
    return {**batch, "index": torch.arange(rows), **numbers}


def model(outputs: int = CLASSES) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, outputs))


def partners_by_hand(kind: str, batch: dict[str, torch.Tensor]) -> list[int]:
    rows = range(len(batch["label"]))
    if kind == "previous":
        return [row - 1 for row in rows]
    if kind == "reversed":
        return [len(rows) - 1 - row for row in rows]
    return sorted(rows, key=lambda row: float(batch["mix_rank"][row]))


def loss_by_hand(logits: torch.Tensor, label, partner, share, smoothing: float) -> float:
    """Return the cross entropy of mixed, smoothed one-hot targets in 64 bits."""
    scores = logits.detach().double().numpy()
    scores = scores - scores.max(1, keepdims=True)
    log_probabilities = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    hot = np.eye(scores.shape[1])[label.numpy()] * (1 - smoothing) + smoothing / scores.shape[1]
    share = np.broadcast_to(share.double().numpy(), len(hot))[:, None]
    target = share * hot + (1 - share) * hot[partner]
    np.testing.assert_allclose(target.sum(1), 1)
    return float(-(target * log_probabilities).sum(1).mean())


@pytest.mark.parametrize("background", ["none", "first", "last"])
@pytest.mark.parametrize("partner", PARTNERS)
@pytest.mark.parametrize("per", ["batch", "sample"])
def test_images_and_labels_are_mixed_alike(per: str, partner: str, background: str):
    """With smoothing, which spreads over the background class too, and with erasing."""
    fields = {"mixup_partner": partner, "mixup_per": per, "background": background, "random_erase": 1.0}
    dataset, plain_dataset = opened(**fields), opened(mixup=0.0, random_erase=1.0)
    outputs = CLASSES + (background != "none")
    assert len(dataset.spec.classes) == outputs
    network = model(outputs)
    batch = batch_of(dataset)
    assert batch["mix"].shape == ((BATCH,) if per == "sample" else ())
    assert ("mix_rank" in batch) == (partner == "random")
    plain = plain_dataset.finish(batch_of(plain_dataset), torch.float32)["image"]
    other = partners_by_hand(partner, batch)
    share = batch["mix"].view(-1, 1, 1, 1)
    finished = dataset.finish(batch, torch.float32)
    torch.testing.assert_close(finished["image"], share * plain + (1 - share) * plain[other], atol=1e-6, rtol=0)
    assert finished["image"].is_contiguous(memory_format=torch.channels_last)
    loss = Classification(0.1).loss(network, finished)
    logits = network(finished["image"])
    expected = loss_by_hand(logits, batch["label"], other, batch["mix"], 0.1)
    assert float(loss.total.detach()) == pytest.approx(expected, rel=1e-6)
    named = torch.where(batch["mix"] >= 0.5, batch["label"], batch["label"][other])
    assert int(loss.sums["top1"]) == int((logits.argmax(1) == named).sum())


def test_smoothing_spreads_over_the_background_class():
    """0.1 over 1001 outputs: .9000999 for the label, .0000999001 for every other, as the originals print."""
    logits = torch.randn(4, 1001, generator=torch.Generator().manual_seed(0))
    label = torch.tensor([1, 7, 1000, 3])
    target = torch.full((4, 1001), 0.0000999001, dtype=torch.float64)
    target[torch.arange(4), label] = 0.9000999
    expected = -(target * logits.double().log_softmax(1)).sum(1).mean()
    loss = Classification(0.1).loss(nn.Identity(), {"image": logits, "label": label}).total
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("partner", PARTNERS)
def test_cutmix_has_partners_too(partner: str):
    dataset, plain_dataset = opened(mixup=0.0, cutmix=1.0, mixup_partner=partner), opened(mixup=0.0)
    plain = plain_dataset.finish(batch_of(plain_dataset), torch.float32)["image"]
    for step in range(4):
        batch = batch_of(dataset, step)
        other = partners_by_hand(partner, batch)
        top, left, bottom, right = (int(batch[key]) for key in CUT_KEYS)
        expected = plain.clone()
        expected[:, :, top:bottom, left:right] = plain[other][:, :, top:bottom, left:right]
        finished = dataset.finish(batch, torch.float32)
        assert torch.equal(finished["image"], expected)
        loss = Classification().loss(model(), finished).total
        by_hand = loss_by_hand(model()(expected), batch["label"], other, batch["label_share"], 0.0)
        assert float(loss.detach()) == pytest.approx(by_hand, rel=1e-6)


@pytest.mark.parametrize("partner", PARTNERS)
@pytest.mark.parametrize("per", ["batch", "sample"])
def test_a_part_of_an_accumulated_batch_mixes_within_itself(per: str, partner: str):
    dataset = opened(mixup_per=per, mixup_partner=partner)
    batch = batch_of(dataset)
    for number, part in enumerate(_split(batch, 2)):
        rows = slice(number * 3, number * 3 + 3)
        alone = {key: value[rows] if value.ndim else value for key, value in batch.items()}
        finished = dataset.finish(part, torch.float32)
        assert torch.equal(finished["image"], dataset.finish(alone, torch.float32)["image"])
        if partner != "previous":
            assert sorted(finished["partner"].tolist()) == [0, 1, 2]
            assert finished["partner"].tolist() == partners_by_hand(partner, part)
        assert Classification().loss(model(), finished).total.isfinite()


@pytest.mark.parametrize("alpha", [0.2, 1.0, 2.0])
def test_shares_are_drawn_from_beta(alpha: float):
    from scipy import stats

    per_sample = dataclasses.replace(BASE, mixup=alpha, mixup_per="sample").augmentation
    each = np.array([per_sample.draw_mix(0, 1, index)["mix"] for index in range(3000)], np.float64)
    per_batch = dataclasses.replace(BASE, mixup=alpha).augmentation
    shared = np.array([per_batch.draw_batch(0, 1, step)["mix"] for step in range(3000)], np.float64)
    for shares in (each, shared):
        assert stats.kstest(shares, stats.beta(alpha, alpha).cdf).pvalue > 0.01
        assert stats.kstest(shares, stats.beta(alpha * 1.5, alpha * 1.5).cdf).pvalue < 0.01  # the test can fail
    assert abs(np.corrcoef(each, shared)[0, 1]) < 0.06


def test_random_partners_are_another_permutation_each_epoch():
    drawn = dataclasses.replace(BASE, mixup_partner="random").augmentation
    orders = []
    for epoch in range(200):
        ranks = torch.tensor([float(drawn.draw_mix(3, epoch, index)["mix_rank"]) for index in range(4)])
        partner = partner_of("random", 4, ranks, torch.device("cpu"))
        assert sorted(partner.tolist()) == [0, 1, 2, 3]
        orders.append(tuple(partner.tolist()))
    assert len(set(orders)) == 24, "every order comes up"
    assert drawn.draw_mix(3, 1, 2) == drawn.draw_mix(3, 1, 2) != drawn.draw_mix(4, 1, 2)
    assert partner_of("random", 3, torch.tensor([0.5, 0.1, 0.5]), torch.device("cpu")).tolist() == [1, 0, 2]


def test_numbers_of_a_sample_travel_only_where_they_are_used():
    every = {"mixup_per": "sample", "mixup_partner": "random"}
    assert set(opened(**every).layout) == {"image", "label", "mix", "mix_rank"}
    assert opened(**every).draw_batch(0, 0) == {}
    for dataset in (opened("val", **every), opened(augment="off", **every), opened(**{**every, "mixup": 0.0})):
        assert set(dataset.layout) == set(dataset.load(0, 0)) == {"image", "label"}
        assert dataset.draw_batch(0, 0) == {}
    assert set(opened(mixup=0.0, cutmix=1.0, mixup_partner="random").layout) == {"image", "label", "mix_rank"}
    with pytest.raises(UsageError, match=r"data.mixup_per=sample cannot be combined with data.cutmix=0.3"):
        opened(mixup_per="sample", cutmix=0.3)


def test_a_share_for_each_image_keeps_the_type_and_rounds_once():
    images = torch.randn(5, 3, 4, 6).contiguous(memory_format=torch.channels_last)
    share = torch.tensor([0.0, 0.1, 0.5, 0.93, 1.0])
    for partner in (None, torch.tensor([4, 3, 2, 1, 0])):
        half = mix(images.bfloat16(), share, None, partner)
        assert half.dtype == torch.bfloat16 and half.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(half, mix(images.bfloat16().float(), share, None, partner).bfloat16())


@pytest.mark.parametrize("image_type", ["uint8", "bf16", "fp32"])
@pytest.mark.parametrize("partner", PARTNERS)
def test_loss_and_finish_are_one_graph(partner: str, image_type: str):
    """make_fx stands in for the compiler: a branch on a value, or a number fetched from the device, would fail it."""
    dataset, network = opened(mixup_per="sample", mixup_partner=partner, image_type=image_type), model()

    def loss_of(batch):
        return Classification(0.1).loss(network, dataset.finish(batch, torch.float32)).total

    batch = batch_of(dataset)
    other_numbers = {key: value.flip(0) for key, value in batch.items() if key.startswith("mix")}
    traced = make_fx(loss_of, tracing_mode="fake", _allow_non_fake_inputs=True)(batch)
    for numbers in ({}, other_numbers):
        torch.testing.assert_close(traced({**batch, **numbers}), loss_of({**batch, **numbers}))


@pytest.mark.parametrize("background", ["first", "last"])
def test_evaluation_knows_that_no_image_shows_the_background(background: str):
    """It has a row without a score, and an image taken for it is a mistake like any other."""
    dataset = opened("val", background=background)
    metric = Classification().metric(dataset.spec, torch.device("cpu"))
    assert isinstance(metric, TopK)
    batch = batch_of(dataset)
    logits = torch.nn.functional.one_hot(batch["label"], 11).float()
    empty = dataset.spec.classes.index("background")
    logits[0] = 0
    logits[0, empty] = 1
    metric.update({"logits": logits}, {**batch, "valid": torch.ones(BATCH, dtype=torch.bool)})
    scores = metric.result()
    assert scores.values["top1"] == pytest.approx((BATCH - 1) / BATCH) and scores.values["samples"] == BATCH
    row = scores.tables["classes"][empty]
    assert row == {"class": "background", "top1": None, "precision": 0, "f1": 0, "samples": 0}
    wrong = dataset.spec.classes[int(batch["label"][0])]
    assert scores.tables["confusion"] == [{"class": wrong, "predicted": "background", "samples": 1}]
    assert [(row["class"], row["predicted"]) for row in scores.worst] == [(wrong, "background")]
