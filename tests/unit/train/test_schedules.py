"""Learning rates against values worked out by hand."""

import math

import pytest

from sightline.errors import UsageError
from sightline.train.schedules import Plan, ScheduleConfig

PLAN = Plan(epochs=10, steps_per_epoch=8)
LAST = 79


def rates(schedule: ScheduleConfig, lr: float = 0.4, plan: Plan = PLAN) -> list[float]:
    return [schedule.rate(step, lr, plan) for step in range(plan.epochs * plan.steps_per_epoch)]


def test_constant_stays():
    assert rates(ScheduleConfig("constant")) == [0.4] * 80


def test_warmup_rises_in_equal_steps_to_the_full_rate():
    got = rates(ScheduleConfig("constant", warmup_epochs=2))
    assert got[:16] == pytest.approx([0.4 * k / 16 for k in range(1, 17)])
    assert got[0] == pytest.approx(0.025) and got[15] == pytest.approx(0.4) and got[16] == 0.4


def test_warmup_may_be_a_fraction_of_an_epoch():
    got = rates(ScheduleConfig("constant", warmup_epochs=0.5))
    assert got[:5] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])
    assert rates(ScheduleConfig("constant", warmup_epochs=0.01)) == [0.4] * 80  # less than a step


def test_a_run_shorter_than_its_warmup_never_reaches_the_full_rate():
    got = rates(ScheduleConfig("cosine", warmup_epochs=4), plan=Plan(2, 8))
    assert got == pytest.approx([0.4 * k / 32 for k in range(1, 17)])


def test_cosine_goes_from_the_full_rate_to_the_final_one():
    got = rates(ScheduleConfig("cosine", final_lr=0.1))
    assert got[0] == 0.4
    assert got[20] == pytest.approx(0.1 + 0.3 * (0.5 + math.sqrt(2) / 4))  # a quarter of the way
    assert got[40] == pytest.approx(0.25)
    assert got[LAST] == pytest.approx(0.1 + 0.3 * (1 + math.cos(math.pi * 79 / 80)) / 2)
    assert got == sorted(got, reverse=True)
    after = ScheduleConfig("cosine", final_lr=0.1).rate(80, 0.4, PLAN)
    assert after == pytest.approx(0.1)
    assert ScheduleConfig("cosine", final_lr=0.1).rate(500, 0.4, PLAN) == pytest.approx(0.1)  # it does not come back


def test_cosine_begins_where_the_warmup_ends():
    got = rates(ScheduleConfig("cosine", warmup_epochs=2))
    assert got[15] == pytest.approx(0.4) and got[16] == 0.4
    assert got[48] == pytest.approx(0.2)  # half of the 64 steps that are left
    assert got[LAST] == pytest.approx(0.4 * (1 + math.cos(math.pi * 63 / 64)) / 2)


def test_step_drops_at_the_start_of_its_epochs():
    got = rates(ScheduleConfig("step", drop_epochs=(3, 6), factor=0.5))
    assert got == pytest.approx([0.4] * 24 + [0.2] * 24 + [0.1] * 32)
    got = rates(ScheduleConfig("step", drop_epochs=(1,), warmup_epochs=2))
    assert got[15] == pytest.approx(0.4) and got[16] == pytest.approx(0.04)


def test_a_rate_depends_on_its_step_alone():
    schedule = ScheduleConfig("cosine", warmup_epochs=1)
    forwards = rates(schedule)
    assert [schedule.rate(step, 0.4, PLAN) for step in reversed(range(80))] == forwards[::-1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "constant", "final_lr": 0.1}, r"final_lr=0.1 belongs to kind=cosine, not to kind=constant"),
        ({"kind": "step", "drop_epochs": (1,), "final_lr": 0.1}, r"final_lr=0.1 belongs to kind=cosine"),
        ({"kind": "cosine", "drop_epochs": (3,)}, r"drop_epochs=\(3,\) belongs to kind=step.*--schedule.kind step"),
        ({"kind": "cosine", "factor": 0.5}, r"factor=0.5 belongs to kind=step"),
        ({"kind": "step"}, r"needs --schedule.drop-epochs, e.g. --schedule.drop-epochs 30 60 80"),
        ({"warmup_epochs": -1}, r"warmup_epochs=-1 must not be negative"),
    ],
    ids=str,
)
def test_refusals(fields: dict, message: str):
    with pytest.raises(UsageError, match=message):
        ScheduleConfig(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"warmup_epochs": math.nan},
        {"warmup_epochs": math.inf},
        {"kind": "cosine", "final_lr": math.nan},
        {"kind": "cosine", "final_lr": -0.1},
        {"kind": "step", "drop_epochs": (1,), "factor": math.nan},
        {"kind": "step", "drop_epochs": (1,), "factor": -0.1},
    ],
    ids=str,
)
def test_rates_that_are_no_rates_are_refused(fields: dict):
    with pytest.raises(UsageError):
        ScheduleConfig(**fields)
