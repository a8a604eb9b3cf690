"""The rates of the systems these recipes come from, over ImageNet's true size, against numbers worked out beforehand
and against their formulas written out step by step."""

import math

import pytest

from sightline.errors import UsageError
from sightline.train.optimizers import OptimizerConfig
from sightline.train.schedules import RunLength, ScheduleConfig

SAMPLES = 1_281_167
PER_256 = OptimizerConfig(lr=0.1, lr_for_batch=256)
KERAS_LARS = OptimizerConfig("lars", lr=2.5, lr_many=9.5)
RESNEXT = OptimizerConfig(lr=0.256, lr_for_batch=256, momentum=0.875)

PIECEWISE = ScheduleConfig("step", warmup_epochs=5, warmup_from="zero", drop_epochs=(30, 60, 80), drop_after=True)
POLYNOMIAL = ScheduleConfig("polynomial", warmup_epochs=3, warmup_from="zero", final_lr=1e-4)
COSINE = ScheduleConfig("cosine", warmup_epochs=8, warmup_from="zero", cosine_from="start", epoch_steps="exact")


def plan(epochs: int, batch: int) -> RunLength:
    return RunLength(epochs, SAMPLES // batch, SAMPLES, batch)


def rate(schedule: ScheduleConfig, optimizer: OptimizerConfig, epochs: int, batch: int, step: int) -> float:
    ranks = batch // 256
    return schedule.rate(step, optimizer.base_lr(batch, ranks), plan(epochs, batch))


@pytest.mark.parametrize(("batch", "steps"), [(256, 5004), (1024, 1251), (2048, 625), (8192, 156)])
def test_steps_per_epoch(batch: int, steps: int):
    assert plan(1, batch).steps_per_epoch == steps


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 0.0),
        (1, 0.000256),
        (625, 0.16),
        (3124, 0.799744),
        (3125, 0.8),
        (18750, 0.8),  # the first step of epoch 30 still has the rate before
        (18751, 0.08),
        (37500, 0.08),
        (37501, 0.008),
        (50001, 0.0008),
    ],
)
def test_piecewise_of_keras(step: int, expected: float):
    assert rate(PIECEWISE, PER_256, 90, 2048, step) == pytest.approx(expected, abs=1e-6, rel=1e-6)


def test_piecewise_of_keras_on_one_device():
    assert rate(PIECEWISE, PER_256, 90, 256, 25_020) == pytest.approx(0.1)
    assert rate(PIECEWISE, PER_256, 90, 256, 25_019) == pytest.approx(0.1 * 25_019 / 25_020) != 0.1


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 0.0),
        (1, 0.0050667),
        (625, 3.1666667),
        (1875, 9.5),
        (1876, 9.4991784),
        (5000, 7.1060379),
        (12500, 2.7760236),
        (20000, 0.4443544),
        (24999, 0.0001001),
    ],
)
def test_polynomial_of_keras(step: int, expected: float):
    assert rate(POLYNOMIAL, KERAS_LARS, 40, 2048, step) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("step", "expected"), [(15012, 2.5), (15013, 2.499973), (100080, 0.7305377)])
def test_polynomial_of_keras_on_one_device(step: int, expected: float):
    assert rate(POLYNOMIAL, KERAS_LARS, 40, 256, step) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("batch", "step", "expected"),
    [
        (1024, 0, 0.0),
        (1024, 1, 0.0001023),
        (1024, 10008, 1.0238977),
        (1024, 10009, 1.0041663),  # the cosine has been running since step 0
        (1024, 56295, 0.5120857),
        (8192, 14039, 0.0001322),
    ],
)
def test_cosine_of_resnext(batch: int, step: int, expected: float):
    assert rate(COSINE, RESNEXT, 90, batch, step) == pytest.approx(expected, abs=1e-6)


def test_cosine_of_resnext_at_the_largest_batch():
    assert RESNEXT.base_lr(8192, 32) == pytest.approx(8.192)
    assert rate(COSINE, RESNEXT, 90, 8192, 1250) == pytest.approx(8.192 * 1250 / 1251)
    assert rate(COSINE, RESNEXT, 90, 8192, 1251) < 8.192 * 0.99  # warm-up took 1251 steps
    assert rate(COSINE, RESNEXT, 90, 8192, 14_075) == rate(COSINE, RESNEXT, 90, 8192, 20_000) == 0.0


def test_piecewise_of_resnext_counts_fractions_of_steps():
    """bpe = 156.392: 30 epochs are 4691 steps, not 30 * 156 = 4680."""
    schedule = ScheduleConfig("step", drop_epochs=(30, 60, 80), drop_after=True, epoch_steps="exact")
    assert [rate(schedule, RESNEXT, 90, 8192, step) for step in (4680, 4691, 4692)] == pytest.approx(
        [8.192, 8.192, 0.8192]
    )


def pytorch_polynomial(first_epochs: int, decay_epochs: int, per_epoch: int, base: float, end: float):
    """The originals' PyTorch form, as a loop whose count begins at 1 and whose epochs are a step short."""
    warm = first_epochs * (per_epoch - 1)
    span = decay_epochs * (per_epoch - 1) - warm + 1
    t = 1
    while True:
        if t <= warm:
            yield base * t / warm
        else:
            yield (base - end) * (1 - min(max(t - warm, 1), span) / span) ** 2 + end
        t += 1


@pytest.mark.parametrize("decay_epochs", [6, 4])
def test_polynomial_of_pytorch(decay_epochs: int):
    schedule = ScheduleConfig(
        "polynomial", warmup_epochs=3, decay_epochs=decay_epochs, final_lr=1e-4, epoch_steps="less_one"
    )
    reference = pytorch_polynomial(3, decay_epochs, 11, 9.0, 1e-4)
    expected = [next(reference) for _ in range(55)]
    assert [schedule.rate(step, 9.0, RunLength(5, 11)) for step in range(55)] == pytest.approx(expected, rel=1e-12)
    assert expected.count(9.0) == 1 and (expected[-1] == 1e-4) is (decay_epochs == 4)  # frozen once it is there


@pytest.mark.parametrize(("epochs", "decay", "batch"), [(40, 41, 2048), (5, 0, 65536), (3, 2, 131072)])
def test_polynomial_of_keras_step_by_step(epochs: int, decay: int, batch: int):
    per_epoch = SAMPLES // batch
    warm = per_epoch
    span = (decay or epochs) * per_epoch - warm + 1
    schedule = ScheduleConfig("polynomial", warmup_epochs=1, warmup_from="zero", decay_epochs=decay, final_lr=1e-4)
    for t in range(epochs * per_epoch):
        left = 1 - min(max(t - warm, 1), span) / span
        expected = 9.0 * t / warm if t <= warm else (9.0 - 1e-4) * left**2 + 1e-4
        assert schedule.rate(t, 9.0, plan(epochs, batch)) == pytest.approx(expected, rel=1e-12), t


@pytest.mark.parametrize("warmup_from", ["next", "zero"])
def test_polynomial_without_warmup_does_not_divide_by_zero(warmup_from: str):
    schedule = ScheduleConfig("polynomial", warmup_from=warmup_from, power=1.0)
    got = [schedule.rate(step, 0.9, RunLength(2, 4)) for step in range(8)]
    first = 0 if warmup_from == "zero" else 1
    assert got == pytest.approx([0.9 * (1 - (step + first) / 9) for step in range(8)])


def test_epochs_of_one_step_can_be_a_step_short_only_in_name():
    schedule = ScheduleConfig("polynomial", warmup_epochs=2, epoch_steps="less_one")
    assert schedule.rate(0, 1.0, RunLength(4, 1)) == 0.5


# SSD on 117,266 images: 115 steps of 1024 in an epoch, the last one filled up; the rate is 0.003 for 32.
SSD_COSINE = ScheduleConfig("cosine", warmup_epochs=7, warmup_from="zero", hold_epochs=15, decay_epochs=55, floor=0.01)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 0.0),
        (1, 0.096 / 805),
        (804, 0.096 * 804 / 805),
        (805, 0.09696),  # warm-up ends at 1, and what comes begins at 1.01
        (1724, 0.09696),
        (1725, 0.09696),
        (2875, 0.0829011),  # a quarter of the way, epoch 25: 0.096 * (0.5 + sqrt(2) / 4 + 0.01)
        (4025, 0.04896),  # half of it, epoch 35
        (6324, 0.00096),
        (6325, 0.00096),
        (7359, 0.00096),
    ],
)
def test_cosine_of_ssd(step: int, expected: float):
    assert SSD_COSINE.rate(step, 0.096, RunLength(64, 115)) == pytest.approx(expected, abs=1e-7)


def test_cosine_of_ssd_is_its_formula_at_every_step():
    begin, end = 15 * 1.5, 55 * 1.5  # stretched by half
    schedule = ScheduleConfig("cosine", warmup_epochs=7, hold_epochs=begin, decay_epochs=end, floor=0.01)
    for step in range(7 * 10, 90 * 10):
        epoch = step / 10
        share = 0.5 * (1 + math.cos(math.pi * (epoch - begin) / (end - begin))) + 0.01
        expected = 1.01 if epoch < begin else share if epoch < end else 0.01
        assert schedule.rate(step, 0.2, RunLength(90, 10)) == pytest.approx(0.2 * expected)


def test_a_hold_by_the_epoch():
    schedule = ScheduleConfig("cosine", unit="epoch", hold_epochs=2, decay_epochs=4)
    assert [schedule.rate(2 * epoch, 1.0, RunLength(6, 2)) for epoch in range(6)] == pytest.approx([1, 1, 1, 0.5, 0, 0])


def test_exact_epochs_need_to_know_the_data():
    with pytest.raises(UsageError, match="samples and global_batch"):
        COSINE.rate(0, 0.1, RunLength(90, 1251))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "cosine", "power": 1.0}, r"power=1.0 belongs to kind=polynomial"),
        ({"kind": "polynomial", "cosine_from": "start"}, r"cosine_from=start belongs to kind=cosine"),
        ({"kind": "cosine", "drop_after": True}, r"drop_after=True belongs to kind=step"),
        ({"kind": "constant", "decay_epochs": 3.0}, r"decay_epochs=3.0 belongs to kind=cosine"),
        ({"kind": "polynomial", "decay_epochs": 3.0, "warmup_epochs": 3.0}, r"decay_epochs=3.0 must be more than the"),
        (
            {"kind": "cosine", "decay_epochs": 15.0, "hold_epochs": 15.0},
            r"decay_epochs=15.0 must be more than hold_epo",
        ),
        ({"kind": "cosine", "hold_epochs": 1.0, "warmup_epochs": 2.0}, r"hold_epochs=1.0 must be at least the 2.0 epo"),
        ({"kind": "cosine", "hold_epochs": 1.0, "cosine_from": "start"}, r"hold_epochs=1.0 .* cosine_from=warmup"),
        ({"kind": "cosine", "hold_epochs": float("nan")}, r"hold_epochs=nan must be a finite number, at least 0"),
        ({"kind": "step", "drop_epochs": (1,), "floor": 0.1}, r"floor=0.1 belongs to kind=cosine"),
        ({"kind": "polynomial", "power": float("nan")}, r"power=nan must be a finite number, at least 0"),
        ({"unit": "epoch", "epoch_steps": "exact"}, r"epoch_steps=exact and .* add --schedule.unit step"),
        ({"unit": "epoch", "warmup_from": "zero"}, r"warmup_from=zero count steps"),
    ],
    ids=str,
)
def test_refusals(fields: dict, message: str):
    with pytest.raises(UsageError, match=message):
        ScheduleConfig(**fields)
