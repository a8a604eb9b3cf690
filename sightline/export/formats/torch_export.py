"""torch.export's archive (.pt2): torch runs it without the code of the network; detectors also need torchvision.

An archive is a program: torch.export.load can run code that its author put in. `load` takes what this process wrote
itself, and other archives only if the user trusts them.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from sightline.errors import BadData, UsageError
from sightline.export import nms_in_graph
from sightline.export.served import TRACED_BATCH, Runs, Served
from sightline.files.archive import Limits, Packed, packed_chunks, zip_members

SUFFIX = ".pt2"
RUNS = True
RUNS_CODE = True
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
# Texts that torch keeps as they are: where a node comes from, and arguments of operations.
TEXTS = {"stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "from_node", "custom"}
TEXTS |= {"as_string", "as_strings"}
PLAIN = re.compile(r"[\w.+-]*", re.ASCII)  # names, which torch writes into Python source, and versions
TREE = re.compile(r'(null|"(type|context|children_spec)"|"builtins\.(tuple|list|dict)"|"\[\]"|"null"|[\d\s\[\]{},:])*')
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
_written: set[str] = set()  # sha256 of the archives that this process wrote


def check_installed() -> None:
    """Do nothing: torch is there."""


def write(served: Served, about: str, path: Path) -> None:
    """Write the network with a batch of any size."""
    example = served.random_input(TRACED_BATCH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch and torchvision about their own parts
        program = torch.export.export(served, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
        program = program.run_decompositions(nms_in_graph.for_torch())
        archive = io.BytesIO()  # torch's own writer of files crashes the process on a full disk
        torch.export.save(program, archive, extra_files={FILE: about})
    content = archive.getvalue()
    path.write_bytes(content)
    _written.add(hashlib.sha256(content).hexdigest())


def load(path: Path, served: Served | None = None, trust: bool = False) -> Runs:
    """Open a file for running, if this process wrote these bytes or the user trusts them."""
    import torchvision  # noqa: F401  # registers its nms

    content = path.read_bytes()  # read once: what is loaded below are the bytes whose sha256 is compared here
    if not trust and hashlib.sha256(content).hexdigest() not in _written:
        raise not_trusted(path)
    try:
        _refuse_code(path)
        return torch.export.load(io.BytesIO(content)).module().forward  # not a module: its train() and eval() raise
    except Exception as error:  # torch raises many types for a damaged or hostile archive
        raise BadData(f"{path} cannot be opened by torch.export ({str(error)[:200]}); export it again") from error


def not_trusted(path: Path) -> UsageError:
    """Return the error for a file whose author may be anyone."""
    return UsageError(
        f"{path} is an exported program: loading it can run code that its author put in. Load it only if you trust "
        "where it comes from: add --trust (in Python trust=True); or export to ONNX, or use the run folder"
    )


def about(path: Path) -> str:
    """Return the description in a file; "" if it has none."""
    return next((_read(path, member).decode() for member in _members(path, f"/extra/{FILE}")), "")


def _refuse_code(path: Path) -> None:
    """Raise ValueError if this archive holds what `write` never writes: pickled objects, compiled libraries, odd texts.

    A second fence behind the user's trust, not a promise: torch does not say all that it runs.
    """
    for member in _members(path, ""):
        if not MEMBER.fullmatch(member.name):
            raise ValueError(f"{member.name} could run code")
    for member in _members(path, ".pt"):
        torch.load(io.BytesIO(_read(path, member)), weights_only=True)  # if this fails, torch would load it without
    for member in _members(path, ".json"):
        if member.name.endswith(f"/extra/{FILE}"):
            continue  # our own description, which torch does not look into
        for key, value in _leaves(json.loads(_read(path, member))):
            if not _is_harmless(key, value):
                raise ValueError(f"{member.name} holds {key[:50]} {str(value)[:50]!r}, which could run code")


def _is_harmless(key: str, value: Any) -> bool:
    """Return whether a value is what a network of ours has there: a plain name or size, a known operation."""
    if key in ("guards_code", "treespec_namedtuple_fields"):
        return False  # ours are empty
    if key == "use_pickle":
        return not value
    if not isinstance(value, str) or key in TEXTS:
        return True
    if key == "expr_str":
        return bool(SIGNS.fullmatch(WORDS.sub("", value)))
    how = {"target": TARGET, "in_spec": TREE, "out_spec": TREE}.get(key, PLAIN)
    return bool(how.fullmatch(value))


def _members(path: Path, ending: str) -> list[Packed]:
    return [member for member in zip_members(path, LIMITS) if member.name.endswith(ending)]


def _read(path: Path, member: Packed) -> bytes:
    if member.size > MAX_READ_BYTES:
        raise BadData(f"{path}: {member.name} has {member.size} bytes, at most {MAX_READ_BYTES} are read")
    with path.open("rb") as file:
        return b"".join(packed_chunks(file, member, str(path)))


def _leaves(values: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all values with the nearest key, and all keys with none: some are names too."""
    if isinstance(values, dict):
        for name, value in values.items():
            yield "", name
            yield from _leaves(value, name)
    elif isinstance(values, list):
        for value in values:
            yield from _leaves(value, key)
    else:
        yield key, values
