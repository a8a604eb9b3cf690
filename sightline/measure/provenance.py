"""The origin of a number: commit, versions, machine and command it was measured with, and the file it goes to."""

from __future__ import annotations

import re
import subprocess
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torchvision

from sightline.hardware.devices import Device
from sightline.runs.environment import environment


def provenance(device: Device) -> dict[str, Any]:
    """Return what a number depends on besides the recipe: commit, versions, machine, command."""
    found = {"commit": commit_of(Path(__file__).resolve().parent.parent), "environment": environment(device, ranks=1)}
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    found["environment"]["versions"] = {
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        "triton": triton,
    }
    return found


def commit_of(package: Path) -> dict[str, Any]:
    """Return the commit of a package's folder and whether it was changed since; "unknown" outside a git checkout."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(package), *arguments], capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # An installed copy may lie in somebody else's checkout, whose commit says nothing about us.
    if git("ls-files", "--error-unmatch", "__init__.py") is None:
        return {"id": "unknown", "dirty": False}
    return {"id": git("rev-parse", "HEAD") or "unknown", "dirty": bool(git("status", "--porcelain", "."))}


def result_file(folder: Path, what: str, device: Device, now: datetime) -> Path:
    """Return the file of a result; the time makes its name unique."""

    def plain(text: str) -> str:
        return re.sub(r"[^a-z0-9._]+", "-", text.lower()).strip("-")

    return folder / f"{plain(what)}-{plain(device.name())}-{now:%Y%m%d-%H%M%S-%f}.json"
