"""Learning rates against values worked out by hand."""

import math

import pytest
import torch

from sightline import recipes
from sightline.errors import UsageError
from sightline.train.schedules import RunLength, ScheduleConfig

PLAN = RunLength(epochs=10, steps_per_epoch=8)
LAST = 79


def rates(schedule: ScheduleConfig, lr: float = 0.4, plan: RunLength = PLAN) -> list[float]:
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
    got = rates(ScheduleConfig("cosine", warmup_epochs=4), plan=RunLength(2, 8))
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


def torchs_rates(losses: list[float], lr: float, factor: float, patience: int) -> list[float]:
    """The rate after each evaluation, as torch's own scheduler has it."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    reference = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "min", factor=factor, patience=patience)
    found = []
    for loss in losses:
        reference.step(loss)
        found.append(optimizer.param_groups[0]["lr"])
    return found


@pytest.mark.parametrize("patience", [0, 1, 3])
@pytest.mark.parametrize(
    "losses",
    [
        [1.0, 0.9, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8],
        [1.0, *[0.99995] * 5, 0.5, *[0.50001] * 7],  # a share of 1e-4 is the least that counts
        [1.0, 0.9999, 0.99989, 0.9998, 0.9997],
        [0.0] * 9,
        [math.nan, 1.0, math.nan, math.nan, 0.9, math.inf, 0.95, 0.95],
        torch.rand(60, generator=torch.Generator().manual_seed(0)).tolist(),
        [1.0] * 60,  # down to where torch no longer moves the rate
    ],
)
def test_plateau_of_the_loss_is_torchs(losses: list[float], patience: int):
    schedule = ScheduleConfig("plateau", factor=0.3, patience=patience, plateau_on="val_loss")
    got = [schedule.rate(0, 1e-3, PLAN, losses[: n + 1]) for n in range(len(losses))]
    assert got == torchs_rates(losses, 1e-3, 0.3, patience)
    assert schedule.rate(0, 1e-3, PLAN) == 1e-3


def test_plateau_of_the_score_takes_any_rise():
    schedule = ScheduleConfig("plateau", factor=0.5, patience=1)
    scores = [0.5, 0.50001, 0.50002, 0.5, 0.5, 0.5, 0.5]
    got = [schedule.rate(0, 0.4, PLAN, scores[: n + 1]) for n in range(len(scores))]
    assert got == [0.4, 0.4, 0.4, 0.4, 0.2, 0.2, 0.1]


def test_the_segmentation_schedules_are_torchs():
    """The original's multistep and cosine: MultiStepLR with factor 0.3 and CosineAnnealingLR over all epochs,
    both moved by the epoch."""
    plan = RunLength(epochs=10, steps_per_epoch=3)
    step = ScheduleConfig("step", drop_epochs=(4, 7), factor=0.3)
    cosine = ScheduleConfig("cosine", unit="epoch")
    for ours, reference in (
        (step, lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [4, 7], gamma=0.3)),
        (cosine, lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=10)),
    ):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
        theirs = reference(optimizer)
        for epoch in range(10):
            expected = pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
            assert [ours.rate(epoch * 3 + k, 1e-3, plan) for k in range(3)] == [expected] * 3
            optimizer.step()
            theirs.step()


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
        ({"kind": "cosine", "plateau_on": "val_loss"}, r"plateau_on=val_loss belongs to kind=plateau.*kind plateau"),
        ({"kind": "step"}, r"needs --schedule.drop-epochs, e.g. --schedule.drop-epochs 30 60 80"),
        ({"warmup_epochs": -1}, r"warmup_epochs=-1 must be a finite number, at least 0"),
        ({"warmup_factor": 1.01}, r"warmup_factor=1.01 must be in \[0, 1\]"),
        ({"warmup": "constant", "warmup_epochs": 1}, r"learns nothing; add --schedule.warmup-factor 0.01"),
        ({"kind": "table"}, r"needs as many table_epochs, rising, as table_rates; got \(\) and \(\)"),
        ({"kind": "table", "table_epochs": (0, 2), "table_rates": (0.1,)}, r"got \(0, 2\) and \(0.1,\)"),
        ({"kind": "table", "table_epochs": (2, 1), "table_rates": (0.1, 0.2)}, r"rising.*got \(2, 1\)"),
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
        {"warmup_factor": -0.01},
        {"warmup_factor": math.nan},
    ],
    ids=str,
)
def test_rates_that_are_no_rates_are_refused(fields: dict):
    with pytest.raises(UsageError):
        ScheduleConfig(**fields)


@pytest.mark.parametrize(
    ("name", "epochs", "warning"),
    [
        ("resnet50", 5, "the rate never drops: drops at epochs 30, 60, 80, the run ends after 5; "),
        ("resnet50", 30, "the rate never drops: drops at epochs 30, 60, 80, the run ends after 30; "),
        ("resnet50_keras", 70, "the rate does not drop as often as planned: drops at epochs 30, 60, 80, the run ends "),
        ("ssd_resnet34", 45, "the rate does not drop as often as planned: drops at epochs 40, 50, the run ends after "),
        ("resnext101", 4, "the rate only rises: warm-up takes 8 epochs, the run ends after 4; "),
    ],
)
def test_drops_and_warmup_that_do_not_fit_the_epochs_are_reported(name: str, epochs: int, warning: str):
    (text,) = recipes.find(name).recipe().schedule.warnings(epochs)
    assert text.startswith(warning) and "--schedule." in text


@pytest.mark.parametrize("name", recipes.names())
def test_no_recipe_warns_about_its_own_epochs(name: str):
    made = recipes.find(name).recipe()
    assert made.schedule.warnings(made.train.epochs) == []


def test_naming_a_kind_returns_what_only_others_read():
    steps = ScheduleConfig("step", drop_epochs=(3,), factor=0.5, warmup_epochs=1)
    implied = steps.implied({"kind": "cosine"})
    assert {"drop_epochs": (), "factor": 0.1}.items() <= implied.items()
    assert not {"kind", "warmup_epochs", "final_lr"} & set(implied)
    assert steps.implied({"factor": 0.2}) == {}


@pytest.mark.parametrize(
    ("fields", "epochs", "words"),
    [
        ({"warmup_epochs": 5}, 5, []),
        ({"warmup_epochs": 5.5}, 5, ["the rate only rises: warm-up takes 5.5 epochs, the run ends after 5"]),
        ({"kind": "step", "drop_epochs": (2, 4)}, 5, []),
        ({"kind": "step", "drop_epochs": (2, 4)}, 4, []),  # right at the end, which may be meant
        ({"kind": "step", "drop_epochs": (2, 4)}, 3, ["does not drop as often"]),
        ({"kind": "step", "drop_epochs": (2, 4)}, 2, ["never drops"]),
        ({"kind": "step", "drop_epochs": (2, 4)}, 1, ["never drops"]),
        ({"kind": "step", "drop_epochs": (4,)}, 4, ["never drops"]),
    ],
)
def test_a_rate_that_cannot_do_what_was_planned_is_reported(fields: dict, epochs: int, words: list[str]):
    found = ScheduleConfig(**fields).warnings(epochs)
    assert len(found) == len(words) and all(word in text for word, text in zip(words, found, strict=True))
