"""The parameters that decay, and updates against torch's own optimizers in their plain form."""

import dataclasses
import math
import os

import pytest
import torch
import torchvision
import warm
from torch import nn

from sightline.errors import UsageError
from sightline.train.optimizers import OptimizerConfig
from sightline.train.torch_optimizer import set_rate, update

CPU = torch.device("cpu")
SGD = OptimizerConfig("sgd", lr=0.1, weight_decay=0.01, norm_weight_decay=0.0, bias_weight_decay=0.0)
RATES = [0.1 * (1 + step % 5) for step in range(20)]  # a moving rate, as a schedule gives it


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))


def gradients(model: nn.Module, step: int) -> None:
    torch.manual_seed(1000 + step)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)


def trained(config: OptimizerConfig, reference, steps: int = 20) -> tuple[nn.Module, nn.Module, object, object]:
    """Our optimizer and torch's plain one over the same gradients and rates."""
    ours, theirs = network(), network()
    our_optimizer = config.build(ours, CPU)
    # Written out by hand: the two Linear weights decay, everything else is a bias or belongs to the LayerNorm.
    by_name = dict(theirs.named_parameters())
    decayed = [by_name["0.weight"], by_name["3.weight"]]
    spared = [by_name[name] for name in ("0.bias", "1.weight", "1.bias", "3.bias")]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": spared, "weight_decay": 0.0}]
    their_optimizer = reference(groups)
    for step in range(steps):
        set_rate(our_optimizer, RATES[step])
        for group in their_optimizer.param_groups:
            group["lr"] = RATES[step]
        for model, optimizer in ((ours, our_optimizer), (theirs, their_optimizer)):
            gradients(model, step)
            optimizer.step()
    return ours, theirs, our_optimizer, their_optimizer


def assert_close(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
        assert not torch.equal(mine, dict(network().named_parameters())[name])


@pytest.mark.parametrize(
    ("momentum", "nesterov"), [(0.9, False), (0.9, True), (0.5, True), (0.0, False), (0.99, False)]
)
def test_sgd_is_torchs_sgd(momentum: float, nesterov: bool):
    config = dataclasses.replace(SGD, momentum=momentum, nesterov=nesterov)
    ours, theirs, *_ = trained(
        config, lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=momentum, nesterov=nesterov, foreach=True)
    )
    assert_close(ours, theirs)


@pytest.mark.parametrize(("beta1", "beta2", "eps"), [(0.9, 0.999, 1e-8), (0.5, 0.9, 1e-3)])
def test_adamw_is_torchs_adamw(beta1: float, beta2: float, eps: float):
    config = OptimizerConfig(
        "adamw",
        lr=0.1,
        weight_decay=0.05,
        norm_weight_decay=0.0,
        bias_weight_decay=0.0,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
    )
    ours, theirs, *_ = trained(
        config, lambda groups: torch.optim.AdamW(groups, lr=0.1, betas=(beta1, beta2), eps=eps, foreach=True)
    )
    assert_close(ours, theirs)


@pytest.mark.parametrize(("kind", "reference"), [("adam", torch.optim.Adam), ("radam", torch.optim.RAdam)])
def test_adam_and_radam_are_torchs(kind: str, reference):
    config = OptimizerConfig(kind, lr=0.1, weight_decay=0.05, norm_weight_decay=0.0, bias_weight_decay=0.0)
    assert_close(*trained(config, lambda groups: reference(groups, lr=0.1, foreach=True))[:2])


def test_sgd_state_from_the_start_equals_that_of_torchs_first_step():
    ours, theirs, mine, other = trained(SGD, lambda g: torch.optim.SGD(g, lr=0.1, momentum=0.9, foreach=True), steps=1)
    for parameter, reference in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine.state[parameter]["momentum_buffer"], other.state[reference]["momentum_buffer"])


def test_adamw_state_from_the_start_equals_that_of_torchs_first_step():
    config = OptimizerConfig("adamw", lr=0.1, weight_decay=0.05, norm_weight_decay=0.0, bias_weight_decay=0.0)
    ours, theirs, mine, other = trained(config, lambda g: torch.optim.AdamW(g, lr=0.1, foreach=True), steps=1)
    for parameter, reference in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert mine.state[parameter].keys() == other.state[reference].keys()
        for key in ("step", "exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(mine.state[parameter][key], other.state[reference][key], rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["sgd", "sgd_keras", "lars", "adamw"])
def test_state_has_the_memory_format_of_its_parameter(kind: str):
    """Else a fused update would walk two layouts at once."""
    model = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
    optimizer = OptimizerConfig(kind, lr=0.1).build(model, CPU)
    kept = {name: value.stride() for name, value in optimizer.state[model.weight].items() if name != "step"}
    assert kept and set(kept.values()) == {model.weight.stride()}


@pytest.mark.parametrize("kind", ["sgd", "sgd_keras", "lars", "adamw"])
def test_a_step_marked_as_not_finite_changes_nothing(kind: str):
    """The fused kernels and our own updates skip by themselves, on the CPU too; the first step and a later one."""
    model = network()
    optimizer = OptimizerConfig(kind, lr=0.1).build(model, CPU)
    for step in range(2):
        before = [t.clone() for t in (*model.parameters(), *(v for s in optimizer.state.values() for v in s.values()))]
        gradients(model, step)
        model[0].weight.grad[0, 0] = math.nan
        optimizer.found_inf = torch.tensor(1.0)
        optimizer.step()
        after = [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        gradients(model, step)
        optimizer.found_inf = torch.tensor(0.0)
        optimizer.step()
        assert not torch.equal(before[0], model[0].weight)


# Groups


def names(model: nn.Module, decay_norm_and_bias: bool) -> dict[float, set[str]]:
    apart = -1.0 if decay_norm_and_bias else 0.0
    groups = OptimizerConfig(weight_decay=0.1, norm_weight_decay=apart, bias_weight_decay=apart).groups(model)
    for _, group in groups:
        for name, parameter in group:
            assert model.get_parameter(name) is parameter
    return {decay: {name for name, _ in group} for decay, group in groups}


def test_norms_are_known_by_their_type_also_where_the_name_tells_nothing():
    model = torchvision.models.resnet18()
    found = names(model, decay_norm_and_bias=False)
    assert {"layer2.0.downsample.1.weight", "layer2.0.downsample.1.bias", "bn1.weight", "fc.bias"} <= found[0.0]
    # In a ResNet the vectors are exactly the norms and biases.
    assert found[0.0] == {name for name, p in model.named_parameters() if p.ndim == 1}
    assert found[0.1] == {name for name, p in model.named_parameters() if p.ndim > 1}


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(4),
        nn.BatchNorm3d(4),
        nn.SyncBatchNorm(4),
        nn.GroupNorm(2, 4),
        nn.LayerNorm(4),
        nn.LayerNorm((2, 3)),
        nn.InstanceNorm2d(4, affine=True),
    ],
    ids=lambda norm: type(norm).__name__,
)
def test_every_norm_of_torch_is_spared(norm: nn.Module):
    found = names(nn.Sequential(nn.Linear(4, 4), norm), decay_norm_and_bias=False)
    assert found == {0.1: {"0.weight"}, 0.0: {"0.bias", "1.weight", "1.bias"}}


def test_rms_norm_is_spared():
    found = names(nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4)), decay_norm_and_bias=False)
    assert found == {0.1: {"0.weight"}, 0.0: {"0.bias", "1.weight"}}


def test_everything_decays_when_asked_to():
    model = torchvision.models.resnet18()
    assert names(model, decay_norm_and_bias=True) == {0.1: {name for name, _ in model.named_parameters()}}


def test_parameters_of_the_model_itself_and_shared_ones_come_once():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2, 2))
            self.first = nn.Linear(2, 2)
            self.second = nn.Linear(2, 2)
            self.second.weight = self.first.weight

    model = Own()
    groups = OptimizerConfig(weight_decay=0.1, norm_weight_decay=0.0, bias_weight_decay=0.0).groups(model)
    found = [parameter for _, group in groups for _, parameter in group]
    assert len(found) == len({id(p) for p in found}) == len(list(model.parameters())) == 4


# The base rate


@pytest.mark.parametrize(
    ("fields", "batch", "ranks", "expected"),
    [
        ({"lr": 0.1}, 2048, 8, 0.1),
        ({"lr": 0.1, "lr_for_batch": 256}, 2048, 8, 0.8),
        ({"lr": 0.1, "lr_for_batch": 256}, 128, 1, 0.05),
        ({"lr": 0.256, "lr_for_batch": 256}, 1024, 4, 1.024),
        ({"kind": "lars", "lr": 2.5, "lr_many": 9.5}, 256, 1, 2.5),
        ({"kind": "lars", "lr": 2.5, "lr_many": 9.5}, 2048, 8, 9.5),
        ({"lr": 0.1, "lr_many": 0.2, "lr_for_batch": 256}, 512, 2, 0.4),
    ],
    ids=str,
)
def test_the_base_rate_follows_batch_and_ranks(fields: dict, batch: int, ranks: int, expected: float):
    assert OptimizerConfig(**fields).base_lr(batch, ranks) == pytest.approx(expected)


# Refusals


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "sgd", "beta1": 0.8}, r"optimizer.beta1=0.8 belongs to kind=adam.*--optimizer.kind adam"),
        ({"kind": "sgd", "eps": 1e-5}, r"optimizer.eps=1e-05 belongs to kind=rmsprop"),
        ({"kind": "adamw", "momentum": 0.5}, r"optimizer.momentum=0.5 belongs to kind=sgd"),
        ({"kind": "adamw", "nesterov": True}, r"optimizer.nesterov=True belongs to kind=sgd"),
        ({"kind": "adamw", "decay_form": "decoupled"}, r"optimizer.decay_form=decoupled belongs to kind=sgd"),
        ({"kind": "adam", "decay_form": "keras_l2"}, r"optimizer.decay_form=keras_l2 belongs to kind=sgd"),
        ({"kind": "lars", "decay_form": "decoupled"}, r"decay_form=decoupled belongs to kind=sgd, not to kind=lars"),
        ({"kind": "lars", "nesterov": True}, r"optimizer.nesterov=True belongs to kind=sgd, not to kind=lars"),
        ({"kind": "lars", "norm_weight_decay": 0.1}, r"norm_weight_decay=0.1 belongs to kind=sgd, not to kind=lars"),
        ({"kind": "sgd_keras", "eta": 0.01}, r"optimizer.eta=0.01 belongs to kind=lars"),
        ({"lr": -0.1}, r"optimizer.lr=-0.1 must be a finite number, at least 0"),
        ({"lr_for_batch": -256}, r"optimizer.lr_for_batch=-256 must be at least 0"),
        ({"weight_decay": -1}, r"weight_decay=-1 must be a finite number"),
        ({"norm_weight_decay": -0.5}, r"norm_weight_decay=-0.5 must be a finite number, at least 0; -1 means: as"),
        ({"bias_weight_decay": math.inf}, r"bias_weight_decay=inf must be a finite number"),
        ({"trunk_lr_scale": 0.0}, r"trunk_lr_scale=0.0 must be a finite number, above 0; to train the head alone use"),
        ({"lr": math.nan}, r"optimizer.lr=nan must be a finite number, at least 0"),
    ],
    ids=str,
)
def test_refusals(fields: dict, message: str):
    with pytest.raises(UsageError, match=message):
        OptimizerConfig(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"lr": math.nan},
        {"lr": math.inf},
        {"weight_decay": math.nan},
        {"momentum": -0.1},
        {"momentum": math.nan},
        {"momentum": 0.0, "nesterov": True},
        {"kind": "sgd_keras", "momentum": 0.0, "nesterov": True},
        {"kind": "lars", "eta": math.nan},
        {"kind": "lars", "momentum": 1.0},
        {"lr_many": math.inf},
        {"kind": "adamw", "beta1": 1.0},
        {"kind": "adamw", "beta2": -0.5},
        {"kind": "adamw", "eps": -1.0},
    ],
    ids=str,
)
def test_numbers_no_optimizer_takes_are_refused_as_usage(fields: dict):
    """Not by a ValueError out of torch once the data are open and the model is built."""
    with pytest.raises(UsageError):
        OptimizerConfig(**fields)


@pytest.mark.parametrize("kind", ["sgd", "sgd_keras", "lars", "rmsprop", "radam", "adam", "adamw"])
def test_an_update_is_the_step_that_torch_makes(kind):
    def updated(make) -> list[torch.Tensor]:
        model = network()
        optimizer = OptimizerConfig(kind=kind).build(model, CPU)
        for step in range(3):
            gradients(model, step)
            with torch.no_grad():
                make(optimizer)
        return [p.detach().clone() for p in model.parameters()]

    expected = updated(lambda optimizer: optimizer.step())
    assert all(torch.equal(a, b) for a, b in zip(updated(update), expected, strict=True))


@pytest.mark.parametrize(
    ("recipe", "network"),
    [("resnet50", "arch=resnet18"), pytest.param("demo_classification", "width=4", marks=pytest.mark.slow)],
)
def test_a_run_that_is_not_compiled_imports_no_compiler(tmp_path, recipe: str, network: str):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nif __name__ == '__main__':\n    from sightline import cli\n    assert not cli.main(sys.argv[1:])\n"
        "    sys.exit([m for m in ('torch._dynamo', 'sympy', 'scipy.ndimage') if m in sys.modules])"
    )
    flags = "--data.path synthetic:classes=4,samples=16,size=24 --data.size 24 --train.epochs 1 --run.device cpu"
    flags += f" --data.classes 4 --model.{network} --train.global-batch 8 --train.max-steps 1 --run.workers 0"
    words = [script, "train", recipe, *flags.split(), "--data.eval-size", "24", "--run.out", tmp_path / "run"]
    done = warm.python(tmp_path, *words, environ=os.environ)
    assert done.stderr.strip() == "[]", done.stderr


def test_naming_a_kind_returns_what_only_others_read_and_lr_disables_lr_many():
    config = OptimizerConfig("lars", lr=2.5, lr_many=9.5, eta=0.01)
    foreign = config.implied({"kind": "adamw"})
    assert {"momentum": 0.9, "eta": 0.001}.items() <= foreign.items() and not {"beta1", "eps", "lr"} & set(foreign)
    assert config.implied({"lr": 1.0}) == {"lr_many": 0.0}
    assert config.implied({"lr": 1.0, "lr_many": 4.0}) == config.implied({"weight_decay": 0.0}) == {}
