"""ONNX by torch's exporter on torch.export (its older one, by tracing to TorchScript, is deprecated), weights inside.

Read back by onnxruntime on the CPU.
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sightline.errors import BadData
from sightline.evaluate import nms_in_graph
from sightline.export.formats import require
from sightline.export.served import INPUT, TRACED_BATCH, Runs, Served

SUFFIX = ".onnx"
RUNS = True
OPSET = 18  # the exporter's own; onnxruntime 1.14 and newer run it
KEY = "sightline"
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
            custom_translation_table=nms_in_graph.for_onnx(),
            verbose=False,
        )
    assert program is not None
    program.model.metadata_props[KEY] = about
    program.model.graph.name = "sightline"
    program.save(path, external_data=False)


def load(path: Path, served: Served | None = None) -> Runs:
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
