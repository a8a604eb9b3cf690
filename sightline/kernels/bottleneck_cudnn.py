"""The steps of kernels/bottleneck.py on CUDA: for each layer the faster of cuDNN's fused engines and plain torch.

What is faster is measured, and checked against plain torch, on random numbers at the first call with a shape, which is
before a CUDA graph is captured; a later start reads it from a file. Nothing here is measured during capture.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sightline.kernels import bottleneck_steps, cudnn, self_check
from sightline.kernels import bottleneck_triton as passes
from sightline.kernels.bottleneck_steps import Norm
from sightline.kernels.cudnn import graphs, plans, records
from sightline.kernels.cudnn.backend import CudnnError
from sightline.kernels.cudnn.graphs import Convolution, Graph
from sightline.kernels.cudnn.plans import Engine, Plan

end, end_gradients, finish = passes.end, passes.end_gradients, passes.finish
MOST_PLANS = 10  # timed for each operation; cuDNN proposes about as many
LARGEST_ERROR = 1e-2  # relative, beside plain torch in fp16; right engines are near 4e-4


@dataclass(frozen=True)
class Backward:
    """How a convolution below a batch norm is differentiated: a plan where cuDNN's fused engine is faster."""

    dgrad: Plan | None
    wgrad: Plan | None


_forwards: dict[tuple[int, Convolution, bool], Plan | None] = {}
_backwards: dict[tuple[int, Convolution], Backward] = {}
_adders: dict[tuple[int, Convolution], Plan | None] = {}
_is_checking = False  # while a plan is checked, memory for its results holds NaN: what it does not write is seen


def convolve(x: Tensor, weight: Tensor, stride: int, half: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the convolution of `x`, or of relu(x * scale + bias), with its sums and sums of squares per channel."""
    if not bottleneck_steps.has_engines:
        return _plain_forward(x, weight, stride, half)
    shape = Convolution.of(x, weight, stride)
    key = (x.device.index, shape, half is not None)
    if key not in _forwards and not torch.cuda.is_current_stream_capturing():
        _forwards[key] = _choose_forward(x.device, shape, half is not None)
    if plan := _forwards.get(key):
        try:
            return _fused_forward(plan, shape, x, weight, half)
        except CudnnError as error:  # it ran before: from now on plainly
            _tell(f"convolution {shape}", str(error))
            _forwards[key] = None
    return _plain_forward(x, weight, stride, half)


def _fused_forward(
    plan: Plan, shape: Convolution, x: Tensor, weight: Tensor, half: Tensor | None
) -> tuple[Tensor, Tensor]:
    y = _fresh(_empty(x, shape.output))
    sums = _fresh(torch.empty((2, shape.channels_out), dtype=torch.float32, device=x.device))
    given = {"x": x, "weight": weight, "y": y, "sum": sums[0], "squares": sums[1]}
    plan.run(given if half is None else {**given, "scale": half[0], "bias": half[1]})
    return y, sums


def _plain_forward(x: Tensor, weight: Tensor, stride: int, half: Tensor | None) -> tuple[Tensor, Tensor]:
    given, padding = x if half is None else passes.activate(x, half), weight.shape[2] // 2
    y = torch.ops.aten.convolution(given, weight, None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1)
    y = _laid(y)
    return y, passes.statistics(y)


def end_sums(grad: Tensor, bits: Tensor, y: Tensor, norm: Norm, shortcut: Tensor | None, other: Norm | None) -> None:
    """Compute the gradients of gamma and beta of the last batch norm and, where there is one, the projection's."""
    passes.end_sums(grad, bits, y, norm, shortcut, other)
    if other:
        other.dbeta.copy_(norm.dbeta)


def convolve_backward(
    dy: Tensor, weight: Tensor, stride: int, y: Tensor, half: Tensor, norm: Norm, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of y and of the weight, where dy is that of convolution(relu(norm(y))); fill `norm`'s."""
    if not bottleneck_steps.has_engines:
        return _backward(Backward(None, None), dy, weight, stride, y, half, norm, beta)
    shape = Convolution.of(y, weight, stride)
    key = (y.device.index, shape)
    if key not in _backwards and not torch.cuda.is_current_stream_capturing():
        _backwards[key] = _choose_backward(y.device, shape)
    chosen = _backwards.get(key, Backward(None, None))
    try:
        return _backward(chosen, dy, weight, stride, y, half, norm, beta)
    except CudnnError as error:  # it ran before: from now on plainly
        _tell(f"the gradient of convolution {shape}", str(error))
        _backwards[key] = Backward(None, None)
        return _backward(_backwards[key], dy, weight, stride, y, half, norm, beta)


def _backward(
    chosen: Backward, dy: Tensor, weight: Tensor, stride: int, y: Tensor, half: Tensor, norm: Norm, beta: Tensor
) -> tuple[Tensor, Tensor]:
    active = None
    if chosen.dgrad:
        grad = _fused_dgrad(chosen.dgrad, dy, weight, y, norm, beta)
        if not chosen.wgrad:
            active = passes.activate(y, half)
    else:
        grad = dgrad(dy, weight, stride, y)
        active = passes.inner_sums(grad, y, half, norm, wants_input=chosen.wgrad is None)
    if chosen.wgrad:
        dweight = _fused_wgrad(chosen.wgrad, dy, weight, y, half)
    else:
        assert active is not None
        dweight = wgrad(dy, weight, stride, active)
    return passes.inner_gradient(grad, y, half, norm, is_masked=chosen.dgrad is not None), dweight


def _fused_dgrad(plan: Plan, dy: Tensor, weight: Tensor, y: Tensor, norm: Norm, beta: Tensor) -> Tensor:
    """Return the gradient behind the ReLU."""
    grad, factors = _fresh(torch.empty_like(y)), torch.empty((3, y.shape[1]), dtype=torch.float32, device=y.device)
    given = {"dy": dy, "weight": weight, "x": y, "gradient": grad, "beta": beta, **norm._asdict()}
    plan.run({**given, "of_gradient": factors[0], "of_x": factors[1], "constant": factors[2]})
    return grad


def _fused_wgrad(plan: Plan, dy: Tensor, weight: Tensor, y: Tensor, half: Tensor) -> Tensor:
    dweight = _fresh(torch.empty_like(weight))
    plan.run({"x": y, "dy": dy, "dweight": dweight, "scale": half[0], "bias": half[1]})
    return dweight


def wgrad(dy: Tensor, weight: Tensor, stride: int, x: Tensor) -> Tensor:
    """Return the gradient of the weight of a convolution of `x`."""
    return _laid(_plain_backward(dy, weight, stride, x, [False, True, False])[1])


def dgrad(dy: Tensor, weight: Tensor, stride: int, x: Tensor) -> Tensor:
    """Return the gradient of the input `x` of a convolution."""
    return _laid(_plain_backward(dy, weight, stride, x, [True, False, False])[0])


def _plain_backward(dy: Tensor, weight: Tensor, stride: int, x: Tensor, wanted: list[bool]) -> tuple[Tensor, ...]:
    sizes = ([stride] * 2, [weight.shape[2] // 2] * 2, [1, 1])
    found: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
        dy, x, weight, None, *sizes, False, [0, 0], 1, wanted
    )
    return found


def add_dgrad(dx: Tensor, dy: Tensor, weight: Tensor) -> Tensor:
    """Add the gradient of the input of a 1x1 convolution to `dx`, in place."""
    if not bottleneck_steps.has_engines:
        return _add_product(dx, dy, weight)
    shape = Convolution.of(dx, weight, 1)
    key = (dx.device.index, shape)
    if key not in _adders and not torch.cuda.is_current_stream_capturing():
        _adders[key] = _choose_adder(dx.device, shape)
    plan = _adders.get(key)
    if plan:
        plan.run({"dx": dx, "dy": dy, "weight": weight})
        return dx
    return _add_product(dx, dy, weight)


def _add_product(dx: Tensor, dy: Tensor, weight: Tensor) -> Tensor:
    rows = dx.permute(0, 2, 3, 1).view(-1, dx.shape[1])
    rows.addmm_(dy.permute(0, 2, 3, 1).view(-1, dy.shape[1]), weight.view(weight.shape[:2]))
    return dx


def _laid(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _empty(x: Tensor, shape: list[int]) -> Tensor:
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def _fresh(memory: Tensor) -> Tensor:
    return memory.fill_(float("nan")) if _is_checking else memory


# The choice.


class _Trial:
    """Random input of a layer, the results of plain torch on it, and the times of contenders."""

    def __init__(self, device: torch.device, shape: Convolution):
        self.device = device
        self.shape = shape
        self.times: dict[str, float] = {}
        generator = torch.Generator(device).manual_seed(0)  # of its own: a run's random numbers stay as they are

        def draw(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=device)

        channels = shape.channels_in
        self.x = _laid((draw(*shape.input) + 0.25).half())  # sums of a mean of 0 would be rounding alone
        self.dy = _laid(draw(*shape.output).half())
        fan_in = channels * shape.kernel**2
        self.weight = _laid((draw(*shape.weight) * (2 / fan_in) ** 0.5).half())
        self.half = torch.stack([draw(channels).abs() * 0.5 + 0.5, draw(channels) * 0.3]).half()
        self.mean, self.rstd = draw(channels) * 0.3, draw(channels).abs() * 0.5 + 0.5
        # The batch norm whose scale and bias these are, so that all paths see the same ReLU.
        scale, bias = self.half.float()
        self.gamma, self.beta = scale / self.rstd, bias + self.mean * scale

    def norm(self) -> Norm:
        """Return the batch norm, without gradients yet."""
        nan = torch.full((2, len(self.gamma)), float("nan"), device=self.device)
        return Norm(self.mean, self.rstd, self.gamma, nan[0], nan[1])

    def time(self, name: str, work: Callable[[], object]) -> float:
        """Return the milliseconds of `work`, and note them."""
        self.times[name] = records.time_ms(work, self.device)
        return self.times[name]

    def fastest(
        self, name: str, graph: Graph, run: Callable[[Plan], tuple[Tensor, ...]], expected: tuple[Tensor, ...]
    ) -> tuple[Plan | None, float]:
        """Return the fastest plan whose results are right and its time; None where there is none, which is told. Where
        the first one is enough, its time is 0."""
        best: tuple[Plan | None, float] = (None, float("inf"))
        wrong = ""
        try:
            found = plans.candidates(graph, MOST_PLANS)
        except CudnnError as error:
            _tell(f"{name} {self.shape}", str(error))
            return best
        for plan in found:
            if why := _wrong(run, plan, expected):
                wrong = f"engine {plan.engine.number} {why}"
                continue
            if bottleneck_steps.takes_first:
                return plan, 0.0
            ms = records.time_ms(lambda plan=plan: run(plan), self.device)  # type: ignore[misc]
            best = min(best, (plan, ms), key=lambda pair: pair[1])
        if best[0] is None:
            _tell(f"{name} {self.shape}", wrong)
        self.times[f"fused {name}"] = best[1]
        return best


def _wrong(run: Callable[[Plan], tuple[Tensor, ...]], plan: Plan, expected: tuple[Tensor, ...]) -> str:
    """Return what is wrong with the results of a plan; "" if nothing."""
    global _is_checking
    _is_checking = True
    try:
        found = run(plan)
    except CudnnError as error:
        return f"does not run: {error}"
    finally:
        _is_checking = False
    errors = [self_check.relative_error(a.float(), b.float()) for a, b in zip(found, expected, strict=True)]
    wrong = self_check.why_wrong((f"result {number}", error, LARGEST_ERROR) for number, error in enumerate(errors))
    return f"is wrong: {wrong}" if wrong else ""


def _tell(what: str, why: str) -> None:
    self_check.warn_plain(f"{what} runs", why)


_Part = tuple[Graph, Callable[[Plan], tuple[Tensor, ...]], tuple[Tensor, ...]]  # with a plan's results, and plain ones


def _choose(
    device: torch.device,
    shape: Convolution,
    operation: str,
    describe: Callable[[_Trial], tuple[_Part, Callable[[], object]]],
) -> Plan | None:
    """Return the fastest plan of an operation; None where plain torch is faster, or the only one that works.

    `describe` returns the operation, and the same in plain torch."""
    try:
        cudnn.library(device.index)
        trial = _Trial(device, shape)
        with self_check.untried_convolutions():
            part, plainly = describe(trial)
        key = records.key_of(device, f"{operation} {shape}")
        if known := _from_record(key, {"plan": part}):
            return known["plan"]
        plan, fused = trial.fastest(operation, *part)
        if bottleneck_steps.takes_first:
            return plan
        plan = plan if fused < trial.time("plain", plainly) else None
    except (CudnnError, torch.OutOfMemoryError) as error:
        _tell(f"{operation} {shape}", str(error)[:200])
        return None
    records.write(records.Record(key, {"plan": plan.engine if plan else None}, trial.times))
    return plan


def _choose_forward(device: torch.device, shape: Convolution, normed: bool) -> Plan | None:
    def describe(trial: _Trial) -> tuple[_Part, Callable[[], object]]:
        half = trial.half if normed else None

        def run(plan: Plan) -> tuple[Tensor, ...]:
            y, sums = _fused_forward(plan, shape, trial.x, trial.weight, half)
            return y, *sums

        def plainly() -> tuple[Tensor, Tensor]:
            return _plain_forward(trial.x, trial.weight, shape.stride, half)

        y, sums = plainly()
        return (graphs.forward(cudnn.library(device.index), shape, normed), run, (y, *sums)), plainly

    return _choose(device, shape, "convolution of a norm" if normed else "convolution", describe)


def _choose_adder(device: torch.device, shape: Convolution) -> Plan | None:
    def describe(trial: _Trial) -> tuple[_Part, Callable[[], object]]:
        def run(plan: Plan) -> tuple[Tensor, ...]:
            dx = trial.x.clone()  # which both contenders pay for
            plan.run({"dx": dx, "dy": trial.dy, "weight": trial.weight})
            return (dx,)

        def plainly() -> Tensor:
            return _add_product(trial.x.clone(), trial.dy, trial.weight)

        return (graphs.added_dgrad(cudnn.library(device.index), shape), run, (plainly(),)), plainly

    return _choose(device, shape, "gradient added to another", describe)


def _choose_backward(device: torch.device, shape: Convolution) -> Backward:
    """Return the fastest way to the gradients below and of the weight; one pass may serve both."""
    operation = "gradients of a convolution of a norm"
    try:
        opened = cudnn.library(device.index)
        trial = _Trial(device, shape)
        norm = trial.norm()
        with self_check.untried_convolutions():
            plain_grad = dgrad(trial.dy, trial.weight, shape.stride, trial.x)
            active = passes.inner_sums(plain_grad, trial.x, trial.half, norm, wants_input=True)
            assert active is not None
            plain_wgrad = wgrad(trial.dy, trial.weight, shape.stride, active)
        passed = plain_grad.where(active > 0, 0)

        def run_dgrad(plan: Plan) -> tuple[Tensor, ...]:
            own = trial.norm()
            grad = _fused_dgrad(plan, trial.dy, trial.weight, trial.x, own, trial.beta)
            return grad, own.dgamma, own.dbeta

        def run_wgrad(plan: Plan) -> tuple[Tensor, ...]:
            return (_fused_wgrad(plan, trial.dy, trial.weight, trial.x, trial.half),)

        parts: dict[str, _Part] = {
            "dgrad": (graphs.dgrad(opened, shape), run_dgrad, (passed, norm.dgamma, norm.dbeta)),
            "wgrad": (
                graphs.wgrad(opened, shape),
                run_wgrad,
                (plain_wgrad,),
            ),
        }
        key = records.key_of(device, f"{operation} {shape}")
        if known := _from_record(key, parts):
            return Backward(**known)
        best = {name: trial.fastest(name, *part) for name, part in parts.items()}
        if bottleneck_steps.takes_first:
            return Backward(best["dgrad"][0], best["wgrad"][0])
        chosen = _cheapest(trial, norm, active, best)
    except (CudnnError, torch.OutOfMemoryError) as error:
        _tell(f"{operation} {shape}", str(error)[:200])
        return Backward(None, None)
    engines = {name: plan.engine if plan else None for name, plan in vars(chosen).items()}
    records.write(records.Record(key, engines, trial.times))
    return chosen


def _cheapest(trial: _Trial, norm: Norm, active: Tensor, best: dict[str, tuple[Plan | None, float]]) -> Backward:
    """Return the pair of ways with the smallest sum of times."""
    dy, weight, stride, x, half = trial.dy, trial.weight, trial.shape.stride, trial.x, trial.half
    fused_d, fused_w = best["dgrad"][1], best["wgrad"][1]
    plain_d = trial.time("plain dgrad", lambda: dgrad(dy, weight, stride, x))
    plain_w = trial.time("plain wgrad", lambda: wgrad(dy, weight, stride, active))
    sums = trial.time("sums", lambda: passes.inner_sums(active, x, half, norm, wants_input=False))
    both = trial.time("sums and input", lambda: passes.inner_sums(active, x, half, norm, wants_input=True))
    again = trial.time("input", lambda: passes.activate(x, half))
    costs = {
        (True, True): fused_d + fused_w,
        (True, False): fused_d + again + plain_w,
        (False, True): plain_d + sums + fused_w,
        (False, False): plain_d + both + plain_w,
    }
    is_fused_d, is_fused_w = min(costs, key=lambda pair: costs[pair])
    return Backward(best["dgrad"][0] if is_fused_d else None, best["wgrad"][0] if is_fused_w else None)


def _from_record(key: str, parts: dict[str, _Part]) -> dict[str, Plan | None] | None:
    """Return the plans of a record, checked again; None if there is no record, or one that does not hold."""
    record = records.read(key)
    if record is None or record.engines.keys() != parts.keys():
        return None
    found: dict[str, Plan | None] = {}
    for name, (graph, run, expected) in parts.items():
        engine: Engine | None = record.engines[name]
        if engine is None:
            found[name] = None
            continue
        try:
            plan = plans.rebuild(graph, engine)
        except CudnnError:
            return None  # measured again
        if _wrong(run, plan, expected):
            return None
        found[name] = plan
    return found
