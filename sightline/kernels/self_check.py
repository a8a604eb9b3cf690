"""Let a kernel compute once what plain torch computes before a run uses it, and remember that it was right.

A result holds for the process; a pass is kept in the user's cache folder, so that a later start does not check again.
Users: batch_norm_check.py, instance_norm_check.py, bottleneck_check.py at the start of a run; taps.py, overlaps.py and
data/gpu/resize_check.py at their first use; bottleneck_cudnn.py, whose engines are checked shape by shape.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import json
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sightline.files.typed_json import read_json
from sightline.files.whole import cache_folder, replace_text
from sightline.kernels.gradients import gradients

FORMAT = 1
MOST_BYTES = 1 << 16
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_reasons: dict[str, str] = {}  # of this process, by key; "" is a pass
_answers: dict[tuple[str, torch.device], bool] = {}  # of `passes`
_checking = threading.Lock()  # threads of a loader may ask at the same time


class Limits(NamedTuple):
    """Largest relative errors of a use of kernels; that of running statistics is an absolute one too."""

    result: float
    inputs: float
    parameters: float
    statistics: float = 1e-5


# Some roundings, and in fp32 the rare ReLU that float64 sees on the other side of its bend. Gradients of parameters are
# sums in fp32.
OF_NORMS = {
    torch.bfloat16: Limits(4e-3, 8e-3, 2e-3),
    torch.float16: Limits(1e-3, 3e-3, 1e-3),
    torch.float32: Limits(1e-5, 3e-3, 1e-3),
}


class Case(NamedTuple):
    """A use of kernels, the same in plain torch, and their input; each may have several results.

    Both functions take the inputs and then the modules.
    """

    name: str
    ours: Callable[..., tuple[Tensor, ...]]
    plain: Callable[..., tuple[Tensor, ...]]
    inputs: list[Tensor]
    modules: list[nn.Module]
    outers: list[Tensor]

    def rehearse(self) -> None:
        """Run the kernels on copies of the modules, for `compile_ahead`."""
        _parts(self.ours, self.inputs, [copy.deepcopy(module) for module in self.modules], self.outers)

    def why_wrong(self, limits: Limits) -> str:
        """Return which part of a training step deviates from plain torch in float64; "" if none."""
        wide = [x.double() for x in self.inputs], [copy.deepcopy(module).double() for module in self.modules]
        expected = _parts(self.plain, *wide, [outer.double() for outer in self.outers])
        with poisoned_memory():
            found = _parts(self.ours, self.inputs, self.modules, self.outers)
        if any(not x.is_contiguous(memory_format=torch.channels_last) for x in (found.result, *found.of_inputs)):
            return "a result is not in channels_last"
        named = [("the result", found.result, expected.result, limits.result)]
        for name, limit, mine, theirs in (
            ("the gradient of an input", limits.inputs, found.of_inputs, expected.of_inputs),
            ("the gradient of a parameter", limits.parameters, found.of_parameters, expected.of_parameters),
        ):
            named += [(name, a, b, limit) for a, b in zip(mine, theirs, strict=True)]
        errors = [(name, _error(mine, theirs), limit) for name, mine, theirs, limit in named]
        for own, exact in zip(found.statistics, expected.statistics, strict=True):
            if not torch.allclose(own.double(), exact.double(), rtol=limits.statistics, atol=limits.statistics):
                return f"running statistics differ by up to {float((own - exact).abs().max()):.1e}"
        return why_wrong(errors)


class Draw:
    """Random numbers that are the same on every device and leave torch's own generators alone."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator().manual_seed(0)

    def normal(self, shape: Sequence[int], mean: float) -> Tensor:
        """Return numbers around `mean`, so that sums of them are not rounding alone."""
        return self.laid(torch.randn(tuple(shape), generator=self.generator) + mean)

    def laid(self, x: Tensor) -> Tensor:
        """Return x on the device, in the precision and in channels_last."""
        return x.to(self.device, self.dtype).contiguous(memory_format=torch.channels_last)


class _Parts(NamedTuple):
    """All that a training step takes from a layer."""

    result: Tensor
    of_inputs: list[Tensor]
    of_parameters: list[Tensor]
    statistics: list[Tensor]


def _parts(
    function: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor], modules: list[nn.Module], outers: list[Tensor]
) -> _Parts:
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in inputs]
        results = function(*leaves, *modules)
        learnt = [parameter for module in modules for parameter in module.parameters()]
        grads = gradients(results, [*leaves, *learnt], outers)
    of_inputs, of_parameters = list(grads[: len(leaves)]), list(grads[len(leaves) :])
    statistics = [each for module in modules for each in module.buffers()]
    return _Parts(results[0].detach(), of_inputs, of_parameters, statistics)


def _error(found: Tensor, expected: Tensor) -> float:
    return relative_error(found.double(), expected, least=1e-3 * expected.numel() ** 0.5)


def say_plain(what: str, why: str) -> str:
    """Return the line for the user about kernels that are not used; `what` is a subject with its verb."""
    return f"kernels: {what} as plain torch: {why}"


def warn_plain(what: str, why: str) -> None:
    """Warn with that line, where a run has already started."""
    warnings.warn(say_plain(what, why), RuntimeWarning, stacklevel=3)


def why_not(what: str, device: torch.device, check: Callable[[], str]) -> str:
    """Return why kernels must not be used; "" if `check` passed, in this process or in an earlier one.

    `check` returns what is wrong, "" if nothing. What it raises counts as wrong, whatever it is.
    """
    key = _key(what, device)
    with _checking:
        if key not in _reasons:
            _reasons[key] = "" if _has_passed(key) else _run(key, check)
        return _reasons[key]


def passes(what: str, device: torch.device, check: Callable[[], str]) -> bool:
    """Return whether kernels that are checked at their first use may be used; warn once if not."""
    if (what, device) not in _answers:
        reason = why_not(what, device, check)
        if reason:
            warn_plain(f"{what} runs", reason)
        _answers[what, device] = not reason
    return _answers[what, device]


def _run(key: str, check: Callable[[], str]) -> str:
    try:
        with untried_convolutions():
            reason = check()
    except Exception as error:  # noqa: BLE001  a compiler, a driver or memory: plain torch may still run
        reason = f"{type(error).__name__}: {str(error).strip()[:200] or 'no message'}".replace("\n", " ")
    if not reason:
        _keep_pass(key)
    return reason


def relative_error(found: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """Return the error of a whole tensor as a vector, relative to its length, or to `least` where that is larger."""
    return float((found - expected).norm() / expected.norm().clamp(min=least))


def why_wrong(errors: Iterable[tuple[str, float, float]]) -> str:
    """Return which of (name, error, limit) is beyond its limit first, NaN included; "" if none."""
    for name, error, limit in errors:
        if not error < limit:
            return f"{name} has a relative error of {error:.1e}, expected less than {limit:.0e}"
    return ""


@contextlib.contextmanager
def untried_convolutions() -> Iterator[None]:
    """Let cuDNN take its first choice for convolutions that nothing times, instead of trying ten for each shape."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Let torch fill new memory with NaN, so that what a kernel does not write is seen."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")  # fills memory; use_deterministic_algorithms would import the compiler
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*deterministic", UserWarning)  # of matrix products: no run asked
            yield
    finally:
        torch.set_deterministic_debug_mode(before)


def _key(what: str, device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    versions = f"torch {torch.__version__}, Triton {_triton()}, cuDNN {torch.backends.cudnn.version()}"
    return f"{what} on {name} with {versions}, kernels {_sources()}"


def _triton() -> str:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:  # built from source, or another name of the package
        return "of unknown version"


@functools.cache
def _sources() -> str:
    """Return a hash of all files of kernels: a pass holds for these alone."""
    whole = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        whole.update(path.name.encode() + b"\0" + path.read_bytes())
    return whole.hexdigest()


def _file_of(key: str) -> Path | None:
    folder = cache_folder("kernels")
    return folder / f"{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}.json" if folder else None


def _has_passed(key: str) -> bool:
    path = _file_of(key)
    if path is None or not path.exists():
        return False
    try:
        return bool(read_json(path, MOST_BYTES) == {"format": FORMAT, "passed": key})
    except (OSError, ValueError):
        return False  # damaged: checked again, and replaced


def _keep_pass(key: str) -> None:
    path = _file_of(key)
    if path is None:
        return
    with contextlib.suppress(OSError):  # a full disk: the next start checks again
        replace_text(path, json.dumps({"format": FORMAT, "passed": key}) + "\n")
