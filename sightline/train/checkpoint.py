"""Checkpoints that are whole or not there: safetensors and JSON, a manifest with sha256 written last, a rename.

A folder ckpt-STEP holds model, optimizer (ema, loss_scale).safetensors, state.json and manifest.json. Reading goes
from the newest to the oldest; what does not match its manifest is moved to *.corrupt and the reason is told.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sightline.errors import BadCheckpoint, DiskFull

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state.json"
NAME = re.compile(r"ckpt-(\d{8,})")
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(self, folder: Path, keep: int, say: Callable[[str], None]):
        self.folder = folder
        self.keep = keep
        self.say = say

    def save(self, step: int, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any], best_step: int) -> Path:
        """Writes ckpt-STEP so that a crash at any point leaves either the old checkpoints or these and the new one."""
        final = self.folder / f"ckpt-{step:08d}"
        temporary = self.folder / f"{final.name}.tmp-{os.getpid()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            temporary.mkdir()
            for stem, named in tensors.items():
                save_file(_on_host(named), temporary / f"{stem}.safetensors")
            _write_json(temporary / STATE, {"format": FORMAT, **state})
            files = sorted(temporary.iterdir())
            for path in files:
                _fsync(path)
            entries = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in files}
            _write_json(temporary / MANIFEST, {"format": FORMAT, "files": entries})
            _fsync(temporary / MANIFEST)
            _fsync(temporary)
            if final.exists():  # the same step saved again, e.g. after its evaluation: aside first, never a gap
                os.rename(final, self.folder / f"{final.name}.old")
            os.rename(temporary, final)
            _fsync(self.folder)
            _replace_text(self.folder / "latest", final.name)
            if best_step == step:
                _replace_text(self.folder / "best", final.name)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if error.errno in FULL:
                raise DiskFull(
                    f"checkpoint {final} could not be written: {error.strerror}; earlier checkpoints are intact. "
                    f"Free some space, or lower --run.keep"
                ) from error
            raise
        self._prune(best_step)
        return final

    def names(self) -> list[str]:
        """Finished checkpoints, newest first, valid or not."""
        if not self.folder.is_dir():
            return []
        found = (NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return [match.group() for match in sorted(filter(None, found), key=lambda m: -int(m.group(1)))]

    def newest(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any], Path] | None:
        """The newest checkpoint that verifies, or None where there never was one."""
        self._recover_old()
        for name in self.names():
            path = self.folder / name
            try:
                return (*read(path), path)
            except BadCheckpoint as error:
                aside = _free_name(path)
                os.rename(path, aside)
                self.say(f"{error}; moved to {aside.name}, trying the one before")
        corrupt = sorted(path.name for path in self.folder.glob("*.corrupt*"))
        if corrupt:
            raise BadCheckpoint(
                f"{self.folder} holds no checkpoint that verifies ({', '.join(corrupt[:5])}); "
                f"start afresh with another --run.out, or delete {self.folder}"
            )
        return None

    def _recover_old(self) -> None:
        """A crash between the two renames of a second save leaves only the .old one: it goes back to its place."""
        for old in self.folder.glob("ckpt-*.old"):
            final = old.with_suffix("")
            if final.exists():
                shutil.rmtree(old)
            else:
                os.rename(old, final)

    def _remove_leftovers(self) -> None:
        self._recover_old()
        for leftover in self.folder.glob("ckpt-*.tmp-*"):
            shutil.rmtree(leftover)

    def _prune(self, best_step: int) -> None:
        best = f"ckpt-{best_step:08d}"
        for name in self.names()[self.keep :]:
            if name != best:
                shutil.rmtree(self.folder / name, ignore_errors=True)
        for old in self.folder.glob("ckpt-*.old"):
            shutil.rmtree(old, ignore_errors=True)


def read(path: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Tensors and state of one checkpoint after every byte has been checked against the manifest."""
    verify(path)
    state = json.loads((path / STATE).read_text(encoding="utf-8"))
    if state.get("format") != FORMAT:
        raise BadCheckpoint(f"{path} has format {state.get('format')}, this version reads {FORMAT}")
    return {file.stem: load_file(file) for file in sorted(path.glob("*.safetensors"))}, state


def verify(path: Path) -> None:
    """Raises BadCheckpoint with the file and the reason unless every file is as it was written."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        entries = manifest["files"]
        for name, entry in entries.items():
            file = path / name
            if "/" in name or not file.is_file():
                raise BadCheckpoint(f"{path} is damaged: {name} is missing")
            if file.stat().st_size != entry["bytes"]:
                raise BadCheckpoint(f"{file} is damaged: {file.stat().st_size} bytes instead of {entry['bytes']}")
            if _sha256(file) != entry["sha256"]:
                raise BadCheckpoint(f"{file} is damaged: its sha256 is not the one in {MANIFEST}")
        if STATE not in entries or "model.safetensors" not in entries:
            raise BadCheckpoint(f"{path} is damaged: {MANIFEST} lists no {STATE} or no model")
    except FileNotFoundError:
        raise BadCheckpoint(f"{path} is damaged: {MANIFEST} is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise BadCheckpoint(f"{path} is damaged: {MANIFEST} cannot be read ({error})") from error


def find(run: Path, which: str) -> Path:
    """The checkpoint of a run folder that `which` names: best, latest, or a folder name; or `run` itself is one."""
    if (run / MANIFEST).is_file():
        return run
    folder = run / "checkpoints"
    if not folder.is_dir():
        raise BadCheckpoint(f"{run} is neither a run folder nor a checkpoint: it has no checkpoints/ and no {MANIFEST}")
    names = Checkpoints(folder, 1, lambda _: None).names()
    if not names:
        raise BadCheckpoint(f"{folder} holds no checkpoint; has the run reached its first save?")
    if which in ("best", "latest"):
        pointer = folder / which
        named = pointer.read_text(encoding="utf-8").strip() if pointer.is_file() else ""
        return folder / (named if named in names else names[0])
    if which not in names:
        raise BadCheckpoint(f"{folder} holds no '{which}'; there are {', '.join(names)}")
    return folder / which


def _on_host(named: dict[str, Tensor]) -> dict[str, Tensor]:
    # Plain contiguous copies: safetensors stores no strides, and the run may go on changing the originals.
    return {n: t.detach().to("cpu", copy=True, memory_format=torch.contiguous_format) for n, t in named.items()}


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def _replace_text(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text + "\n", encoding="utf-8")
    _fsync(temporary)
    os.replace(temporary, path)
    _fsync(path.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _free_name(path: Path) -> Path:
    number = 0
    while (aside := path.with_name(f"{path.name}.corrupt{number or ''}")).exists():
        number += 1
    return aside
