"""ONNX by torch's exporter on torch.export (its older one, by tracing to TorchScript, is deprecated), weights inside.

Read back by onnxruntime on the CPU.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable
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
    """Open a file for running."""
    session = _session(path)
    names = [each.name for each in session.get_outputs()]

    def run(image: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(torch.from_numpy, session.run(names, {INPUT: image.contiguous().numpy()})))

    return run


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
