"""Print one line of advice when a script fails on a call that cannot be replaced."""

from __future__ import annotations

import ast
import linecache
import re
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from sightline_migrate import terminal, zones
from sightline_migrate.options import MigrateError
from sightline_migrate.reporting import record
from sightline_migrate.stand_ins import missing

if TYPE_CHECKING:
    from sightline_migrate.session import Session

NO_RULE = "needs a real CUDA device, not {target}; this call has no rule"
FLEX = "FlexAttention cannot train on {target}; use the script's switch for scaled_dot_product_attention"
OF_CUDA = "this extension was built for CUDA and cannot be loaded without it; use a build for {target}, or none"
NO_DRIVER = (
    "Triton has no driver for {target}; TRITON_INTERPRET=1 emulates kernels, slowly, but not autotuning, benchmarks "
    "and other questions to the driver"
)
NO_DRIVER_FOR_DEVICE = (
    "Triton has no driver for {target}, nor with TRITON_INTERPRET=1; write torch.device('cuda') here, then "
    "TRITON_INTERPRET=1 emulates the kernels, slowly"
)
NO_NVIDIA_SMI = "nvidia-smi needs NVIDIA's driver; torch.cuda.device_count() and pynvml answer here"
ACTIVE_DEVICE = "get_active_torch_device"
CLAIM = "tensors report cpu as their device; with --claim they report cuda:0"
DEVICE_OF_TENSOR = re.compile(r"(\w*)\W*\.(?:device\b(?!\()|is_cuda\b|is_cpu\b|get_device\()")
OPTIONS = ("args", "cfg", "config", "flags", "hparams", "opt", "options", "settings")
"""their `.device` is what the user asked for"""
# (text of torch's error, what to say)
KNOWN = (
    (
        "Cannot access accelerator device when none is available",
        "needs a real CUDA device, not {target}; use torch.device('cuda', 0), not torch.device(0)",
    ),
    ("Torch not compiled with CUDA enabled", NO_RULE),
    ("Found no NVIDIA driver", NO_RULE),
    ("No CUDA GPUs are available", NO_RULE),
    ("CUDA driver version is insufficient", NO_RULE),
    ("without ATen_cuda library", NO_RULE),
    ("arguments from the 'CUDA' backend", NO_RULE),
    ("0 active drivers", NO_DRIVER),
    ("nvidia-smi", NO_NVIDIA_SMI),
    *((library, OF_CUDA) for library in ("libcudart.so", "libc10_cuda.so", "libtorch_cuda.so", "libcuda.so")),
    (
        "Weights only load failed",
        "torch.load reads only tensors since torch 2.6; --legacy-load reads whole pickles, for files you trust",
    ),
    ("FlexAttention does not support backward on CPU", FLEX),
    ("torch.compile on CPU only supports inference", FLEX),
)
# texts of torch's errors about tensors of two types
MIXED = (
    "same dtype", "dtypes match", "dtype to be equal", "scalar type", "should be the same",
    "does not match weight dtype",
)  # fmt: skip


def advise_on_types(error: BaseException, session: Session) -> str:
    """Return advice on mixed types outside of an autocast that ran in float32: a GPU's results are float16 there."""
    is_in_float32 = torch.float32 in session.autocast_to and not session.options.float32
    if not is_in_float32 or not any(sign in str(error) for sign in MIXED):
        return ""
    return (
        f"{_line_of(error)}: {type(error).__name__}: autocast ran in float32, so its results are float32; use "
        "--float32, which also turns the script's other float16 into float32, or --amp keep, which is slow"
    )


def advise(error: BaseException, target: str, may_claim: bool = False) -> str:
    """Return `file:line: error; remedy`, or '' for other errors and for a refused call, which was printed already.

    `may_claim`: --claim would change the device that tensors report.
    """
    if isinstance(error, MigrateError):
        return str(error)
    line = _line_of(error)
    said = _remedy(error, linecache.getline(line.file, line.line), may_claim)
    if not said or (said == NO_RULE and _is_refused(line)):
        return ""
    return f"{line}: {type(error).__name__}: {said.format(target=target)}"


def _remedy(error: BaseException, source: str, may_claim: bool) -> str:
    text = str(error)
    if isinstance(error, ModuleNotFoundError):
        # Without any package of NVIDIA, the import of nvidia.dali fails at nvidia.
        names = [error.name or "", *(re.findall(r"nvidia\.\w+", source) if error.name == "nvidia" else ())]
        package = next((found for found in map(missing.find, names) if found), "")
        return f"{package} is not installed: {missing.PACKAGES[package]}" if package else ""
    for sign, said in KNOWN:
        if sign in text:
            return NO_DRIVER_FOR_DEVICE if said == NO_DRIVER and ACTIVE_DEVICE in source else said
    return CLAIM if may_claim and _compares_devices(error, text) else ""


def _compares_devices(error: BaseException, text: str) -> bool:
    """Return True if a script or a library raised it itself, because of a device: by its words, or by its `if`."""
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    if step is None or not zones.is_a_library(step.tb_frame.f_code.co_filename):
        return False
    if re.search(r"\bcpu\b", text) and re.search(r"\bcuda\b", text):
        return True
    lines = linecache.getlines(step.tb_frame.f_code.co_filename, step.tb_frame.f_globals)
    asked = [name for test in _tests_of("".join(lines), step.tb_lineno) for name in DEVICE_OF_TENSOR.findall(test)]
    return any(name.lower() not in OPTIONS for name in asked)


def _tests_of(source: str, line: int) -> Iterator[str]:
    """Yield the conditions under which a `raise` or `assert` at a line raises."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and node.lineno <= line <= (node.end_lineno or node.lineno):
            yield ast.unparse(node.test)
        if isinstance(node, ast.If) and any(
            isinstance(each, ast.Raise) and each.lineno <= line <= (each.end_lineno or each.lineno)
            for each in (*node.body, *node.orelse)
        ):
            yield ast.unparse(node.test)


def _is_refused(line: zones.Site) -> bool:
    return any(
        each.kind == "refused" and (each.user.file, each.user.line) == (line.file, line.line)
        for each in record.records.values()
    )


def _line_of(error: BaseException) -> zones.Site:
    """Return the last of the user's own lines in the traceback."""
    found = zones.Site("?", 0, "?")
    step = error.__traceback__
    while step is not None:
        if zones.is_users(step.tb_frame.f_code.co_filename):
            found = zones.Site(step.tb_frame.f_code.co_filename, step.tb_lineno, step.tb_frame.f_code.co_name)
        step = step.tb_next
    return found


def install(session: Session) -> None:
    """Print the advice after the traceback of an error that ends the program."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        before(kind, error, traceback)
        may_claim = session.target.is_cpu and not session.options.claim
        line = advise(error, session.target.name, may_claim) or advise_on_types(error, session)
        if line:
            terminal.say(f"sightline migrate: {line}", "stderr")

    def restore() -> None:
        if sys.excepthook is hook:  # keep a hook that the script set since
            sys.excepthook = before

    sys.excepthook = hook
    session.undo.on_undo(restore)
