"""ONNX by torch's exporter on torch.export (its older one, by tracing to TorchScript, is deprecated), weights inside.

Read back by onnxruntime on the CPU.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sightline.errors import BadData
from sightline.export import nms_in_graph
from sightline.export.formats import require
from sightline.export.served import INPUT, TRACED_BATCH, Runs, Served

SUFFIX = ".onnx"
RUNS = True
RUNS_CODE = False  # operations of onnxruntime alone: no library of others is registered
OPSET = 18  # the exporter's own, so that nothing has to be converted
KEY = "sightline"
# Voxels from which on an instance norm is written as means of means: onnxruntime sums all of them in one float, which
# costs 2.5e-5 of a patch of 128^3 in every layer.
MANY_VOXELS = 2**18
ABOUT = f"ONNX, opset {OPSET}"
# A stranger's graph may loop for ever. A batch gets a minute; a large one a second for so many numbers of its input,
# which a 224 px image about has.
LEAST_S, NUMBERS_PER_S = 60.0, 2**17


def check_installed() -> None:
    """Raise UsageError unless the packages that write and compare are installed."""
    require(["onnx", "onnxscript", "onnxruntime"], "--format onnx")


def write(served: Served, about: str, path: Path) -> None:
    """Write the network with a batch of any size."""
    for noisy in ("onnxscript", "onnx_ir", "torch.onnx"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    example = served.random_input(TRACED_BATCH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch about its own parts
        program = torch.onnx.export(
            served,
            (example,),
            input_names=[INPUT],
            output_names=list(served.names),
            opset_version=OPSET,
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            custom_translation_table={**nms_in_graph.for_onnx(), **_norms()},
            verbose=False,
        )
    assert program is not None
    program.model.metadata_props[KEY] = about
    program.model.graph.name = "sightline"
    program.save(path, external_data=False)


def _norms() -> dict[Any, Callable[..., Any]]:
    from onnxscript import opset18

    op: Any = opset18

    def mean(rows: Any) -> Any:
        for axis in (3, 2):
            rows = op.ReduceMean(rows, op.Constant(value_ints=[axis]), keepdims=1)
        return rows

    def instance_norm(x: Any, weight: Any, bias: Any, *unused: Any, **more: Any) -> Any:
        eps = more.get("eps", unused[4] if len(unused) > 4 else 1e-5)
        sides = [int(side) for side in x.shape[2:]]
        if math.prod(sides) < MANY_VOXELS:
            return op.InstanceNormalization(x, weight, bias, epsilon=eps)
        rows = op.Reshape(x, op.Constant(value_ints=[0, 0, -1, sides[-1]]))
        centred = op.Sub(rows, mean(rows))
        deviation = op.Sqrt(op.Add(mean(op.Mul(centred, centred)), op.Constant(value_float=eps)))
        per_channel = op.Constant(value_ints=[1, -1, 1, 1])
        scale = op.Div(op.Reshape(weight, per_channel), deviation)
        normed = op.Add(op.Mul(centred, scale), op.Reshape(bias, per_channel))
        return op.Reshape(normed, op.Constant(value_ints=[0, 0, *sides]))

    return {torch.ops.aten.instance_norm.default: instance_norm}


def load(path: Path, served: Served | None = None, trust: bool = False) -> Runs:
    """Open a file for running; one that this process did not write may not take for ever."""
    session = _session(path)
    names = [each.name for each in session.get_outputs()]

    def run(image: Tensor) -> tuple[Tensor, ...]:
        limit_s = math.inf if served else max(LEAST_S, image.numel() / NUMBERS_PER_S)
        with _ended_after(limit_s) as options:
            try:
                found = session.run(names, {INPUT: image.contiguous().numpy()}, options)
                return tuple(map(torch.from_numpy, found))
            except Exception as error:  # onnxruntime has a type for every status; TypeError: an output of texts
                if options.terminate:
                    raise BadData(
                        f"{path} has not answered within {limit_s:.0f} s for a batch of {len(image)}; its graph may be "
                        f"without end. For a slow one give fewer at once: --train.global-batch 1, for windows "
                        f"--task.window-batch 1"
                    ) from error
                said = f"{type(error).__name__}: {str(error)[:200]}"
                raise BadData(f"{path} cannot be run by onnxruntime ({said}); export it again") from error

    return run


@contextlib.contextmanager
def _ended_after(limit_s: float) -> Iterator[Any]:
    """Yield options of a run that onnxruntime ends after the limit, between two operations of the graph or of a loop
    in it."""
    import onnxruntime

    options = onnxruntime.RunOptions()
    timer = threading.Timer(limit_s, setattr, (options, "terminate", True))
    timer.daemon = True
    if limit_s < math.inf:
        timer.start()
    try:
        yield options
    finally:
        timer.cancel()


def about(path: Path) -> str:
    """Return the description in a file; "" if it has none."""
    return _session(path).get_modelmeta().custom_metadata_map.get(KEY, "")


def _session(path: Path) -> Any:
    require(["onnxruntime"], str(path))
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has a type for every status, and no base of its own
        raise BadData(f"{path} cannot be opened by onnxruntime ({str(error)[:200]}); export it again") from error
