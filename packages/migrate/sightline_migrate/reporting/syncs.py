"""Count lines that wait for the device: `.item()`, `.cpu()`, `print(tensor)` and the like, per line of the user.

Active only with --syncs. On target cpu, host and device tensors cannot be told apart, so all are counted there;
elsewhere only tensors on the device.
"""

from __future__ import annotations

import inspect
import linecache
import os
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_dynamo_compiling

from sightline_migrate import patching, zones

if TYPE_CHECKING:
    from sightline_migrate.session import Session

METHODS = {
    "item": ".item()",
    "tolist": ".tolist()",
    "cpu": ".cpu()",
    "numpy": ".numpy()",
    "__array__": "numpy.asarray(tensor)",
    "__float__": "float(tensor)",
    "__int__": "int(tensor)",
    "__bool__": "bool(tensor)",
    "__index__": "tensor as an index",
    "__repr__": "print(tensor)",
    "__format__": "print(tensor)",
}
SYNCHRONIZE = "torch.cuda.synchronize()"

counts: dict[tuple[str, int, str], int] = {}
"""calls per (file, line, label)"""
_IS_CPU: Any = inspect.getattr_static(torch._C.TensorBase, "is_cpu").__get__
# Printing a tensor reads its values through these; the print is already counted.
_PRINTING = tuple(os.path.join(os.path.dirname(torch.__file__), name) for name in ("_tensor.py", "_tensor_str.py"))


def setup(session: Session) -> None:
    """Wrap the methods that wait, on top of the rules' own wrappers."""
    if not session.options.syncs:
        return
    for name, label in METHODS.items():
        original = getattr(torch.Tensor, name)
        wrapper = _watched(original, label, session.target.is_cpu)
        session.undo.set(torch.Tensor, name, patching.dress(wrapper, original, f"torch.Tensor.{name}"))
    original = torch.cuda.synchronize
    session.undo.set(torch.cuda, "synchronize", patching.dress(_counted(original), original, "torch.cuda.synchronize"))


def sites() -> list[dict[str, Any]]:
    """Return one entry per line and kind, most frequent first."""
    in_order = sorted(counts.items(), key=lambda item: -item[1])
    return [
        {"what": label, "count": n, "file": file, "line": line, "source": linecache.getline(file, line).strip()}
        for (file, line, label), n in in_order
    ]


def _watched(original: Any, label: str, is_cpu: bool) -> Any:
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_dynamo_compiling() and (is_cpu or not _IS_CPU(self)):
            _count(label, is_cpu)
        return original(self, *args, **kwargs)

    return wrapper


def _counted(original: Any) -> Any:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not is_dynamo_compiling():
            _count(SYNCHRONIZE, is_cpu=True)
        return original(*args, **kwargs)

    return wrapper


def _count(label: str, is_cpu: bool) -> None:
    """Count a wait. torch's own waits count except on cpu: there its optimizers only read step counts on the host."""
    frame = zones.caller()
    zone = zones.zone_of(frame.f_code.co_filename)
    if zone == zones.MACHINERY or frame.f_code.co_filename in _PRINTING or (is_cpu and zone != zones.SCRIPT):
        return
    user = zones.user_site(frame)
    key = (user.file, user.line, label)
    counts[key] = counts.get(key, 0) + 1


os.register_at_fork(after_in_child=counts.clear)
