"""torch.export's archive (.pt2): torch runs it without the code of the network; detectors also need torchvision.

torch.export.load unpickles where an archive asks for it, so `load` first looks whether this one does.
"""

from __future__ import annotations

import io
import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from sightline.errors import BadData
from sightline.evaluate import nms_in_graph
from sightline.export.served import TRACED_BATCH, Runs, Served
from sightline.files.archive import Limits, Packed, packed_chunks, zip_members

SUFFIX = ".pt2"
RUNS = True
FILE = "sightline.json"
ABOUT = "torch.export archive"
LIMITS = Limits(members=200_000, member_bytes=2**40, zip_ratio=1)
MAX_READ_BYTES = 2**28  # of what is looked at: descriptions, and the input that was traced
# Files of an archive that `write` makes. torch finds names whatever their case, and unpickles some of the others.
MEMBER = re.compile(
    r"[^/]+/(data/weights/(weight_\d+|model_weights_config\.json)|data/constants/(tensor_\d+|model_constants_config\.json)"
    r"|models/model\.json|data/sample_inputs/model\.pt|(data/)?extra/sightline\.json|archive_format|archive_version"
    r"|byteorder|version|\.data/\w+|\.format_version|\.storage_alignment)"
)
# A size such as Mul(Integer(2), Symbol('s77', positive=True)): sympy evaluates these texts.
WORDS = re.compile(
    r"Symbol\('[su]\d+'|\b(Integer|Add|Mul|Pow|Max|Min|FloorDiv|Mod|Eq|Ne|GreaterThan|LessThan|StrictGreaterThan"
    r"|StrictLessThan|positive|integer|nonnegative|True|False|[su]\d+)\b"
)
SIGNS = re.compile(r"[\d\s()+*/,=<>-]*")
# Operations of a network. Some of aten read and write files.
TARGET = re.compile(
    r"torch\.ops\.aten\.(?!from_file|save)\w+\.\w+|torch\.ops\.torchvision\.nms\.default|torch\.sym_\w+|_operator\.\w+"
)


def check_installed() -> None:
    """Do nothing: torch is there."""


def write(served: Served, about: str, path: Path) -> None:
    """Write the network with a batch of any size."""
    example = served.random_input(TRACED_BATCH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch and torchvision about their own parts
        program = torch.export.export(served, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
        program = program.run_decompositions(nms_in_graph.for_torch())
        torch.export.save(program, path, extra_files={FILE: about})


def load(path: Path, served: Served | None = None) -> Runs:
    """Open a file for running."""
    import torchvision  # noqa: F401  # registers its nms

    try:
        _refuse_code(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.load(path).module().forward  # not a module: its train() and eval() raise
    except Exception as error:  # torch raises many types for a damaged or hostile archive
        raise BadData(f"{path} cannot be opened by torch.export ({str(error)[:200]}); export it again") from error


def about(path: Path) -> str:
    """Return the description in a file; "" if it has none."""
    return next((_read(path, member).decode() for member in _members(path, f"/extra/{FILE}")), "")


def _refuse_code(path: Path) -> None:
    """Raise ValueError if loading this archive could run code: pickled objects, compiled libraries, odd expressions."""
    for member in _members(path, ""):
        if not MEMBER.fullmatch(member.name):
            raise ValueError(f"{member.name} could run code")
    for member in _members(path, ".pt"):
        torch.load(io.BytesIO(_read(path, member)), weights_only=True)  # if this fails, torch would load it without
    for member in _members(path, ".json"):
        for key, value in _leaves(json.loads(_read(path, member))):
            if (key == "use_pickle" and value) or not _is_harmless(key, value):
                raise ValueError(f"{member.name} holds {key} {str(value)[:50]!r}, which could run code")


def _is_harmless(key: str, value: Any) -> bool:
    """Return whether a value is what a network of ours has there: a plain size, a known operation."""
    if key == "expr_str":
        return isinstance(value, str) and bool(SIGNS.fullmatch(WORDS.sub("", value)))
    return key != "target" or value is None or (isinstance(value, str) and bool(TARGET.fullmatch(value)))


def _members(path: Path, ending: str) -> list[Packed]:
    return [member for member in zip_members(path, LIMITS) if member.name.endswith(ending)]


def _read(path: Path, member: Packed) -> bytes:
    if member.size > MAX_READ_BYTES:
        raise BadData(f"{path}: {member.name} has {member.size} bytes, at most {MAX_READ_BYTES} are read")
    with path.open("rb") as file:
        return b"".join(packed_chunks(file, member, str(path)))


def _leaves(values: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(values, dict):
        for name, value in values.items():
            yield from _leaves(value, name)
    elif isinstance(values, list):
        for value in values:
            yield from _leaves(value, key)
    else:
        yield key, values
