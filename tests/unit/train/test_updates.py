"""Keras' SGD, LARS and the forms of decay: against TensorFlow's own steps, a short NumPy version and hand examples."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from torch import nn

from sightline.train.optimizers import OptimizerConfig
from sightline.train.torch_optimizer import set_rate

CPU = torch.device("cpu")
TENSORFLOW = json.loads((Path(__file__).parents[2] / "golden" / "tensorflow_momentum.json").read_text())
OF_RULE = {
    "keras": {"kind": "sgd_keras", "weight_decay": 0.0},
    "keras l2": {"kind": "sgd_keras", "decay_form": "keras_l2"},
    "keras decoupled": {"kind": "sgd_keras", "decay_form": "decoupled"},
    "tf1": {"kind": "sgd", "weight_decay": 0.0},
}


class Values(nn.Module):
    """Just parameters."""

    def __init__(self, *values):
        super().__init__()
        self.values = nn.ParameterList([nn.Parameter(torch.tensor(v)) for v in values])


def steps(config: OptimizerConfig, model: nn.Module, gradients, rates) -> list[list[np.ndarray]]:
    """The weights after every step."""
    optimizer = config.build(model, CPU)
    seen = []
    for given, rate in zip(gradients, rates, strict=True):
        for parameter, gradient in zip(model.parameters(), given, strict=True):
            parameter.grad = torch.as_tensor(gradient).to(parameter.dtype)
        set_rate(optimizer, rate)
        optimizer.step()
        seen.append([p.detach().numpy().copy() for p in model.parameters()])
    return seen


# Where the rate stands


def test_a_moving_rate_tells_keras_sgd_from_tensorflow_1_and_torch():
    """w = 1, gradients of 1, momentum 0.9, worked out by hand for a rate of 0.1 and then 0.01."""
    last = {}
    for kind in ("sgd", "sgd_keras"):
        for second in (0.01, 0.1):
            config = OptimizerConfig(kind, weight_decay=0.0)
            got = [float(w[0][0]) for w in steps(config, Values([1.0]), [[[1.0]], [[1.0]]], [0.1, second])]
            assert got[0] == pytest.approx(0.9)
            last[kind, second] = got[1]
    assert last["sgd", 0.01] == pytest.approx(0.9 - 0.01 * (0.9 * 1 + 1))  # 0.881
    assert last["sgd_keras", 0.01] == pytest.approx(0.9 + 0.9 * -0.1 - 0.01)  # 0.8
    assert last["sgd", 0.1] == pytest.approx(last["sgd_keras", 0.1]) == pytest.approx(0.71)


@pytest.mark.parametrize(
    "case", TENSORFLOW["cases"], ids=lambda case: f"{case['rule']}, {case['momentum']}, {case['nesterov']}"
)
def test_updates_are_those_of_tensorflow(case: dict):
    fields = {"weight_decay": TENSORFLOW["decay"], **OF_RULE[case["rule"]]}
    config = OptimizerConfig(momentum=case["momentum"], nesterov=case["nesterov"], **fields)
    pulls = [[np.float32(p) for p in pull] for pull in TENSORFLOW["pulls"]]
    got = steps(config, Values(*TENSORFLOW["start"]), pulls, TENSORFLOW["rates"])
    for ours, theirs in zip(got, case["weights"], strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(mine, other, rtol=2e-6, atol=2e-7)


# Decay


@pytest.mark.parametrize("kind", ["sgd", "sgd_keras"])
@pytest.mark.parametrize(
    ("form", "penalty"),
    [("gradient", lambda w: 0.5 * w.square().sum()), ("keras_l2", lambda w: w.square().sum())],
)
def test_the_gradient_of_a_decay_is_that_of_its_penalty(kind: str, form: str, penalty):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 1, bias=False), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3, 2))
    nn.init.uniform_(model[1].weight)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    config = OptimizerConfig(kind, momentum=0.0, weight_decay=0.2, norm_weight_decay=0.0, decay_form=form)
    steps(config, model, [[torch.zeros_like(p) for p in model.parameters()]], [1.0])
    for name, parameter in model.named_parameters():
        weight = before[name].requires_grad_()
        (gradient,) = torch.autograd.grad(0.2 * penalty(weight), weight)
        expected = torch.zeros_like(gradient) if name.startswith("1.") else gradient  # the head's bias decays too
        torch.testing.assert_close(weight - parameter, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["sgd", "sgd_keras"])
def test_decoupled_decay_stays_out_of_the_velocity(kind: str):
    """By hand: w = 2, g = 1, decay 0.5, momentum 0.9, rates 0.1 and 0.2."""
    config = OptimizerConfig(kind, weight_decay=0.5, decay_form="decoupled")
    got = [float(w[0][0]) for w in steps(config, Values([2.0]), [[[1.0]], [[1.0]]], [0.1, 0.2])]
    first = 2.0 * (1 - 0.1 * 0.5) - 0.1
    moved = 0.2 * 1.9 if kind == "sgd" else 0.9 * 0.1 + 0.2
    assert got == pytest.approx([first, first * (1 - 0.2 * 0.5) - moved])


def test_decoupled_sgd_has_the_momentum_and_nesterov_of_torchs():
    given = [[np.float32([math.sin(n), math.cos(n)])] for n in range(6)]
    rates = [0.1, 0.2, 0.1, 0.3, 0.05, 0.1]
    config = OptimizerConfig("sgd", weight_decay=0.0, nesterov=True, decay_form="decoupled")
    plain = OptimizerConfig("sgd", weight_decay=0.0, nesterov=True)
    ours, theirs = (steps(c, Values([1.0, -2.0]), given, rates) for c in (config, plain))
    assert np.array_equal(ours, theirs)


def test_a_parameter_without_a_gradient_is_left_alone():
    for config in (
        OptimizerConfig("sgd", weight_decay=0.5, decay_form="decoupled"),
        OptimizerConfig("sgd_keras", weight_decay=0.5),
        OptimizerConfig("lars", weight_decay=0.5),
    ):
        model = Values([1.0], [2.0])
        optimizer = config.build(model, CPU)
        model.values[0].grad = torch.tensor([1.0])
        optimizer.step()
        assert model.values[0].item() < 1.0 and model.values[1].item() == 2.0
    model = Values([1.0])
    OptimizerConfig("lars").build(model, CPU).step()
    assert model.values[0].item() == 1.0


# LARS


def test_lars_by_hand():
    config = OptimizerConfig("lars", weight_decay=1e-4, eps=1e-7)
    first, second = steps(config, Values([1.0, 2.0, 2.0]), [[[0.1, 0.2, 0.2]]] * 2, [1.0, 1.0])
    np.testing.assert_allclose(first[0], [0.9990000003, 1.9980000007, 1.9980000007], rtol=0, atol=1e-6)
    np.testing.assert_allclose(second[0], [0.9971010010, 1.9942020019, 1.9942020019], rtol=0, atol=1e-6)
    # The velocity of the first step is lr * trust * (g + decay * w), so trust can be read from it.
    model = Values([1.0, 2.0, 2.0])
    optimizer = config.build(model, CPU)
    steps_of_buffer = []
    for _ in range(2):
        start = model.values[0].detach().clone()
        kept = optimizer.state[model.values[0]]["momentum_buffer"].clone()
        model.values[0].grad = torch.tensor([0.1, 0.2, 0.2])
        set_rate(optimizer, 1.0)
        optimizer.step()
        moved = optimizer.state[model.values[0]]["momentum_buffer"] - 0.9 * kept
        steps_of_buffer.append(float((moved / (model.values[0].grad + 1e-4 * start)).mean()))
    assert steps_of_buffer == pytest.approx([0.0099900067, 0.0099800266], abs=1e-6)


@pytest.mark.parametrize("eps", [0.0, 1e-7])
def test_lars_trusts_fully_where_a_norm_is_zero(eps: float):
    config = OptimizerConfig("lars", weight_decay=0.01, momentum=0.0, eps=eps)
    got = steps(config, Values([1.0, 2.0], [0.0, 0.0]), [[[0.0, 0.0], [3.0, 4.0]]], [0.5])
    np.testing.assert_allclose(got[0][0], [1 - 0.5 * 0.01, 2 - 0.5 * 0.02], rtol=1e-6)  # only decay is left
    np.testing.assert_allclose(got[0][1], [-1.5, -2.0], rtol=1e-6)
    without = OptimizerConfig("lars", weight_decay=0.0, eps=eps)
    assert np.array_equal(steps(without, Values([1.0, 2.0]), [[[0.0, 0.0]]], [0.5])[0][0], [1.0, 2.0])  # not 0 / 0


class Block(nn.Module):
    """A shortcut in torchvision's way: its norm has a name that tells nothing."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.downsample = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 2)


SCALED = {"conv.weight", "downsample.0.weight", "head.weight"}  # written out by hand


def numpy_steps(names, weights, gradients, rates, *, momentum, scaled, decay, eta=0.0, eps=0.0, nesterov=False):
    """Compute Keras' SGD over named arrays; those of `scaled` decay, and with eta above 0 they have their own rate."""
    weights, velocities = [w.copy() for w in weights], [np.zeros_like(w) for w in weights]
    for given, rate in zip(gradients, rates, strict=True):
        for i, (name, g) in enumerate(zip(names, given, strict=True)):
            w, scale, d = weights[i], rate, decay if name in scaled else 0.0
            size, slope = np.linalg.norm(w), np.linalg.norm(g)
            if name in scaled and eta and size > 0 and slope > 0:
                scale = rate * eta * size / (slope + d * size + eps)
            move = scale * (g + d * w)
            velocities[i] = momentum * velocities[i] - move
            weights[i] = w + (momentum * velocities[i] - move if nesterov else velocities[i])
    return weights


@pytest.mark.parametrize(
    ("fields", "reference"),
    [
        ({"kind": "lars", "eta": 0.02, "eps": 1e-7}, {"eta": 0.02, "eps": 1e-7}),
        ({"kind": "lars", "eta": 0.001, "eps": 0.0}, {"eta": 0.001, "eps": 0.0}),
        ({"kind": "sgd_keras", "norm_weight_decay": 0.0, "bias_weight_decay": 0.0}, {}),
        (
            {"kind": "sgd_keras", "norm_weight_decay": 0.0, "bias_weight_decay": 0.0, "nesterov": True},
            {"nesterov": True},
        ),
    ],
    ids=["lars", "lars without eps", "sgd_keras", "sgd_keras with nesterov"],
)
def test_a_hundred_steps_are_those_of_numpy(fields: dict, reference: dict):
    torch.manual_seed(3)
    model = Block().double()
    names = [name for name, _ in model.named_parameters()]
    start = [p.detach().numpy().copy() for p in model.parameters()]
    random = np.random.default_rng(5)
    given = [[random.normal(size=w.shape) for w in start] for _ in range(100)]
    given[7][names.index("head.weight")][:] = 0.0
    rates = [float(np.float32(0.1 * (1 + n % 7))) for n in range(100)]  # a rate is kept as a float32
    config = OptimizerConfig(momentum=0.8, weight_decay=0.03, **fields)
    got = steps(config, model, given, rates)[-1]
    expected = numpy_steps(names, start, given, rates, momentum=0.8, scaled=SCALED, decay=0.03, **reference)
    for name, mine, other, first in zip(names, got, expected, start, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-9, atol=1e-10, err_msg=name)
        assert not np.allclose(mine, first), name


@pytest.mark.parametrize("decay", [1e-4, 0.0])
def test_lars_spares_norms_by_their_type_and_all_biases(decay: float):
    model = torchvision.models.resnet18()
    optimizer = OptimizerConfig("lars", weight_decay=decay).build(model, CPU)
    names = {p: name for name, p in model.named_parameters()}
    found = {group["trusts"]: {names[p] for p in group["params"]} for group in optimizer.param_groups}
    assert {g["trusts"]: g["weight_decay"] for g in optimizer.param_groups} == {True: decay, False: 0.0}
    assert {"layer2.0.downsample.1.weight", "layer2.0.downsample.1.bias", "bn1.weight", "fc.bias"} <= found[False]
    assert found[False] == {name for name, p in model.named_parameters() if p.ndim == 1}
    assert found[True] == {name for name, p in model.named_parameters() if p.ndim > 1}


# What all of them keep to


OURS = [
    OptimizerConfig("sgd_keras"),
    OptimizerConfig("sgd_keras", nesterov=True, decay_form="decoupled"),
    OptimizerConfig("sgd_keras", momentum=0.0),
    OptimizerConfig("lars"),
    OptimizerConfig("lars", momentum=0.0),
    OptimizerConfig("sgd", decay_form="decoupled"),
]


@pytest.mark.parametrize("config", OURS, ids=lambda c: f"{c.kind} {c.momentum} {c.decay_form}")
@pytest.mark.parametrize("value", [math.nan, math.inf, 1.0])
def test_a_step_marked_as_bad_keeps_every_bit(config: OptimizerConfig, value: float):
    """Also those of a zero with a minus sign, in a weight or a velocity."""
    model = Values([1.0, -0.0, 0.0, -3e-45], [2.0, -0.0])
    optimizer = config.build(model, CPU)
    tensors = [*model.parameters(), *(v for state in optimizer.state.values() for v in state.values())]
    for state in optimizer.state.values():
        for velocity in state.values():
            velocity.detach()[:2] = torch.tensor([-0.0, 0.5])
    before = [t.detach().numpy().tobytes() for t in tensors]
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    assert [t.detach().numpy().tobytes() for t in tensors] == before
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.found_inf = torch.tensor(0.0)
    optimizer.step()
    assert all(t.detach().numpy().tobytes() != b for t, b in zip(tensors, before, strict=True))


@pytest.mark.parametrize("config", OURS, ids=lambda c: f"{c.kind} {c.momentum} {c.decay_form}")
def test_asking_whether_a_step_is_finite_changes_no_bit_of_a_good_one(config: OptimizerConfig):
    ends = []
    for asked in (True, False):
        torch.manual_seed(0)
        model = Block()
        optimizer = config.build(model, CPU)
        for number in range(5):
            torch.manual_seed(number)
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            if asked:
                optimizer.found_inf = torch.tensor(0.0)
            set_rate(optimizer, 0.1 * (number + 1))
            optimizer.step()
        ends.append([p.detach().numpy().tobytes() for p in model.parameters()])
    assert ends[0] == ends[1]


@pytest.mark.parametrize("config", OURS, ids=lambda c: f"{c.kind} {c.momentum} {c.decay_form}")
def test_gradients_are_read_only(config: OptimizerConfig):
    model = Values([1.0, 2.0])
    optimizer = config.build(model, CPU)
    model.values[0].grad = torch.tensor([0.3, 0.4])
    optimizer.step()
    assert model.values[0].grad.tolist() == torch.tensor([0.3, 0.4]).tolist()
