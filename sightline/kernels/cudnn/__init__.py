"""cuDNN's fused convolutions, which torch does not offer: a layer over its backend graph API.

backend.py holds descriptors, graphs.py the fused operations, plans.py engines and their runs, records.py what was
measured. kernels/bottleneck_cudnn.py uses them; whether they can run here is `unavailable_because`.
"""

from __future__ import annotations

import torch

from sightline.kernels.cudnn import backend, graphs, plans
from sightline.kernels.cudnn.backend import CudnnError, Library

HOPPER = (9, 0)
MAJOR = 9  # of cuDNN: the engines and their numbers were read there
_libraries: dict[int, Library | str] = {}  # by device: the library, or why there is none


def unavailable_because(index: int | None = None) -> str:
    """Return why the engines cannot run on this CUDA device (None: the current one); "" if they can."""
    found = _open(torch.cuda.current_device() if index is None else index) if torch.cuda.is_available() else "no CUDA"
    return found if isinstance(found, str) else ""


def library(index: int) -> Library:
    """Return the library for a device; CudnnError if the engines cannot run there."""
    found = _open(index)
    if isinstance(found, str):
        raise CudnnError(found)
    return found


def _open(index: int) -> Library | str:
    if index not in _libraries:
        _libraries[index] = _try(index)
    return _libraries[index]


def _try(index: int) -> Library | str:
    capability = torch.cuda.get_device_capability(index)
    if torch.version.hip or capability != HOPPER:
        return f"they need a Hopper GPU, {torch.cuda.get_device_name(index)} is not one"
    version = torch.backends.cudnn.version() or 0  # loads the library
    if version // 10_000 != MAJOR:
        return f"they need cuDNN {MAJOR}, torch has {version}"
    path = backend.find_library()
    if not path:
        return "the libcudnn that torch uses was not found"
    try:
        with torch.cuda.device(index):
            opened = Library(path)
    except (OSError, AttributeError, CudnnError) as error:
        return f"{path}: {error}"
    if opened.version != version:
        return f"{path} is cuDNN {opened.version}, torch uses {version}"
    return opened


def probe(index: int | None = None) -> str:
    """Build and run a small fused convolution beside torch's own; return why it does not work, "" if it does."""
    if reason := unavailable_because(index):
        return reason
    place = torch.device("cuda", torch.cuda.current_device() if index is None else index)
    layout = {"memory_format": torch.channels_last}
    x = torch.randn(8, 64, 14, 14, device=place).half().contiguous(**layout)
    weight = torch.randn(64, 64, 1, 1, device=place).half().contiguous(**layout)
    y, sums = torch.full_like(x, float("nan")), torch.full((2, 64), float("nan"), device=place)
    shape = graphs.Convolution.of(x, weight, 1)
    try:
        plan = plans.candidates(graphs.forward(library(place.index), shape, normed=False), 1)[0]
        plan.run({"x": x, "weight": weight, "y": y, "sum": sums[0], "squares": sums[1]})
    except CudnnError as error:
        return str(error)
    expected = torch.nn.functional.conv2d(x.double(), weight.double())
    wrong = (
        (y - expected).norm() / expected.norm(),
        (sums[1] - expected.square().sum((0, 2, 3))).norm() / sums[1].norm(),
    )
    return "" if all(float(error) < 1e-2 for error in wrong) else f"a small convolution is wrong: {wrong}"
