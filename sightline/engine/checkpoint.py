"""Checkpoints that are whole or not there: safetensors and JSON, a manifest with sha256 written last, a rename.

A folder ckpt-STEP holds model, optimizer (ema, loss_scale).safetensors, state.json and manifest.json. Reading goes
from the newest to the oldest; what does not match its manifest is moved to *.corrupt and the reason is reported.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sightline.engine.progress import VAL_LOSSES, TrainProgress
from sightline.errors import DISK_FULL, BadCheckpoint, DiskFull, SightlineError, disk_error, first_of
from sightline.files.checkpoint_folder import (
    MANIFEST,
    STATE,
    NotDamaged,
    damage_is_reported,
    find,
    names_in,
    pointed_at,
    sha256_of,
    verify,
)
from sightline.files.tensors import read_tensors, write_tensors
from sightline.files.typed_json import UnknownField, read_json, typed
from sightline.files.whole import rename, replace_text, sync, unwritable
from sightline.hardware.devices import Device
from sightline.parts import DataSpec
from sightline.runs.screen import as_score

__all__ = ["MANIFEST", "Checkpoints", "HostCopies", "NotDamaged", "Tensors", "all_of", "check_fit", "find", "read"]
__all__ += ["FORMAT", "check_state", "require", "verify", "write"]
FORMAT = 1
STATE_ROOM = 2**20  # bytes that a checkpoint takes besides its tensors
MAX_STATE_BYTES = 16 * 2**20  # 100,000 classes with long names take 12 MB; without, it is some kB

Tensors = dict[str, dict[str, Tensor]]  # file stem -> name -> tensor


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(
        self, folder: Path, keep: int, say: Callable[[str], None], prove_ours: Callable[[], None] = lambda: None
    ):
        self.folder = folder
        self.keep = keep
        self.say = say
        self.prove_ours = prove_ours  # raises where another run has taken the folder over

    def prove_writable(self) -> None:
        """Fail at the start rather than after hours of training that could not be saved."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder) as file:
                is_synced = sync(file.fileno())
        except OSError as error:
            raise unwritable(self.folder, error, "give another run folder with --run.out DIR") from error
        if not is_synced:
            self.say(f"{self.folder} is on a file system that cannot sync files: a power cut may damage checkpoints")
        for parent in self.folder.parents:  # else a power cut may take a new run folder with all that is in it
            with contextlib.suppress(OSError):  # one that this user may not read is not new
                _fsync(parent)

    def prove_room(self, tensors: Tensors) -> None:
        """Raise DiskFull where no second checkpoint fits beside a first, before hours of training that could not be
        saved; warn where `keep` asks for more than fit. Quotas are not seen."""
        usage, there = shutil.disk_usage(self.folder), len(self.names())
        each = sum(tensor.nbytes for named in tensors.values() for tensor in named.values()) + STATE_ROOM
        fit = usage.free // each
        if not usage.total or fit + there > self.keep + 1:  # file systems that do not know their size have none
            return
        size, free = (f"{number / 1e6:,.1f} MB" for number in (each, usage.free))
        if fit < 2 - min(there, 1):
            needed = "one more" if there else "two, the last good one and the one that is being written"
            raise DiskFull(
                f"{self.folder} has {free} free, a checkpoint takes {size} and the run needs room for {needed}; make "
                f"room, or give a folder on another disk with --run.out DIR"
            )
        self.say(
            f"{self.folder} has {free} free, room for {fit} more checkpoints of {size}; --run.keep {self.keep}, the "
            f"best and the one that is being written may need {self.keep + 2 - there}: make room, or lower --run.keep"
        )

    def save(
        self,
        step: int,
        tensors: Tensors,
        state: dict[str, Any],
        best_step: int,
        *,
        are_copies: bool = False,
    ) -> Path:
        """Write ckpt-STEP so that a crash at any point leaves either the old checkpoints or these and the new one."""
        final = self.folder / f"ckpt-{step:08d}"
        temporary = self.folder / f"{final.name}.tmp-{os.getpid()}"
        try:
            self.folder.mkdir(exist_ok=True)  # not its parents: a run folder that was deleted stays so
            self._remove_leftovers()
            write(temporary, tensors, state, are_copies=are_copies)
            self.prove_ours()  # the write may have taken minutes
            if final.exists():  # the same step saved again, e.g. after its evaluation: aside first, never a gap
                rename(final, self.folder / f"{final.name}.old")
            rename(temporary, final)
            self._abandon_after(step)
            _replace_text(self.folder / "latest", final.name)  # flushes the folder, so that the renames last too
            # Also where an earlier save was killed before it came to this line.
            best = f"ckpt-{best_step:08d}"
            if (self.folder / best).is_dir() and pointed_at(self.folder / "best") != best:
                _replace_text(self.folder / "best", best)
        except SightlineError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            self.prove_ours()  # says so where the folder was deleted
            kept = (
                "--run.keep lowers their number" if error.errno in DISK_FULL else "the same command resumes from them"
            )
            raise disk_error(f"checkpoint {final}", error, f"earlier checkpoints are intact ({kept}); ") from error
        self._prune(final.name, best_step)
        return final

    def names(self) -> list[str]:
        """Return the names of finished checkpoints, newest first, valid or not."""
        return names_in(self.folder)

    def newest(
        self, check: Callable[[Tensors, dict[str, Any]], None] = lambda tensors, state: None
    ) -> tuple[Tensors, dict[str, Any], Path] | None:
        """Return the newest checkpoint that verifies and passes `check`, or None where there never was one.

        One that verifies but fails `check` (BadCheckpoint) is moved aside only if an older one passes: where none does,
        the program has changed, not the files.
        """
        self._recover_old()
        unfit: list[tuple[Path, BadCheckpoint]] = []
        for name in self.names():
            path = self.folder / name
            try:
                tensors, state = read(path)
            except NotDamaged:
                raise
            except BadCheckpoint as error:
                self._move_aside(path, error)
                continue
            try:
                check(tensors, state)
            except BadCheckpoint as error:
                unfit.append((path, BadCheckpoint(f"{path}: {error}")))
                continue
            for each in unfit:
                self._move_aside(*each)
            return tensors, state, path
        if unfit:
            raise unfit[0][1]
        corrupt = sorted(path.name for path in self.folder.glob("*.corrupt*"))
        if corrupt:
            raise BadCheckpoint(
                f"{self.folder} holds no checkpoint that verifies ({first_of(corrupt)}); "
                f"start again with another --run.out, or delete {self.folder}"
            )
        return None

    def damage_of_best(self, best_step: int, loaded: Path) -> BadCheckpoint | None:
        """Return why the best checkpoint cannot be used; None where it is whole, or was never in this folder, as after
        --run.resume PATH. `loaded` has been verified."""
        path = self.folder / f"ckpt-{best_step:08d}"
        if best_step < 0 or path == loaded:
            return None
        if not path.is_dir():
            is_lost = pointed_at(self.folder / "best") or any(self.folder.glob(f"{path.name}.corrupt*"))
            return BadCheckpoint(f"{path} is missing") if is_lost else None
        try:
            verify(path)
        except BadCheckpoint as error:
            return error
        return None

    def replace_best(self, best_step: int, damage: BadCheckpoint, headline: str) -> TrainProgress:
        """Move a damaged best checkpoint aside and point `best` to the best of the others that is intact; return the
        progress of that one, or an empty one where no other was evaluated: `best` then names what is not there."""
        path, best, note = self.folder / f"ckpt-{best_step:08d}", TrainProgress(), ""
        if path.is_dir():
            aside = _free_name(path, "corrupt")
            rename(path, aside)
            note = f"; moved to {aside.name}"
        for best in self._evaluated(headline):
            name = f"ckpt-{best.step:08d}"
            if self.damage_of_best(best.step, path) is None:
                _replace_text(self.folder / "best", name)
                score = f"{headline} {as_score(best.scores[headline])}"
                self.say(f"the best checkpoint is lost: {damage}{note}. The best is now {name}, {score}")
                return best
        self.say(
            f"the best checkpoint is lost: {damage}{note}. No other was evaluated: the next evaluation sets the best, "
            f"and until then evaluate, predict and export use the newest"
        )
        return TrainProgress()

    def _evaluated(self, headline: str) -> list[TrainProgress]:
        """Return the progress of each checkpoint that was evaluated, the best first, by the rule of TrainProgress."""
        found: list[tuple[tuple[float, float, int], TrainProgress]] = []
        for name in self.names():
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # damaged
                progress = TrainProgress.from_json(read_json(self.folder / name / STATE, MAX_STATE_BYTES)["progress"])
                score = float(progress.scores[headline])
                losses = [float(progress.scores[loss]) for loss in VAL_LOSSES if loss in progress.scores]
                if progress.scored_step == progress.step and not math.isnan(score):
                    found.append(((-score, (losses or [0.0])[0], progress.step), progress))
        return [progress for _, progress in sorted(found, key=lambda each: each[0])]

    def _move_aside(self, path: Path, error: BadCheckpoint) -> None:
        aside = _free_name(path, "corrupt")
        rename(path, aside)
        self.say(f"{error}; moved to {aside.name}, trying the one before")

    def _recover_old(self) -> None:
        """Rename .old back where a crash between the two renames of a second save left nothing else."""
        for old in self.folder.glob("ckpt-*.old"):
            final = old.with_suffix("")
            if final.exists():
                _remove(old)
            else:
                rename(old, final)

    def _remove_leftovers(self) -> None:
        self._recover_old()
        for leftover in (*self.folder.glob("ckpt-*.tmp-*"), *self.folder.glob(".*.part-*"), *self.folder.glob("*.tmp")):
            _remove(leftover)

    def _abandon_after(self, step: int) -> None:
        """Rename checkpoints newer than the one just written: the run went back behind them."""
        for name in self.names():
            if int(name.removeprefix("ckpt-")) > step:
                rename(self.folder / name, _free_name(self.folder / name, "abandoned"))

    def _prune(self, written: str, best_step: int) -> None:
        best = f"ckpt-{best_step:08d}"
        for name in self.names()[self.keep :]:
            if name not in (best, written):
                doomed = self.folder / f"{name}.tmp-{os.getpid()}"  # killed here, half of it must not have its name
                with contextlib.suppress(OSError):
                    rename(self.folder / name, doomed)
                    shutil.rmtree(doomed, ignore_errors=True)
        for old in self.folder.glob("ckpt-*.old"):
            shutil.rmtree(old, ignore_errors=True)


def write(folder: Path, tensors: Tensors, state: dict[str, Any], *, are_copies: bool = False) -> Path:
    """Write a checkpoint into a new folder and flush it to the disk; the manifest comes last and makes it valid."""
    folder.mkdir(parents=True)
    for stem, named in tensors.items():
        write_tensors(folder / f"{stem}.safetensors", named if are_copies else _on_host(named))
    _write_json(folder / STATE, {**state, "format": FORMAT})
    files = sorted(folder.iterdir())
    for path in files:
        _fsync(path)
    entries = {path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in files}
    _write_json(folder / MANIFEST, {"format": FORMAT, "files": entries})
    _fsync(folder / MANIFEST)
    _fsync(folder)
    return folder


def read(path: Path) -> tuple[Tensors, dict[str, Any]]:
    """Return tensors and state of one checkpoint after checking every byte against the manifest.

    A manifest proves that nothing has changed, not that a checkpoint was written: what it lists is looked at as well.
    """
    names = verify(path)
    with damage_is_reported(path, STATE):
        state = read_json(path / STATE, MAX_STATE_BYTES, refuse_twice=True)
        found = typed(typed(state, dict[str, Any]).get("format"), int)
        if found > FORMAT:
            raise NotDamaged(f"{path} has format {found}, this version reads {FORMAT}; use the version that wrote it")
        if found < FORMAT:
            raise ValueError(f"its format is {found}")
        check_state(state)
    tensors = {}
    for name in names:
        if name.endswith(".safetensors"):
            with damage_is_reported(path, name):
                tensors[name.removesuffix(".safetensors")] = read_tensors(path / name)
    return tensors, state


def read_of_run(run: Path, which: str) -> tuple[Path, Tensors, dict[str, Any]]:
    """Find and read the checkpoint of a run that `which` names; if it is damaged, the error names one that is not."""
    path = find(run, which)
    try:
        return path, *read(path)
    except BadCheckpoint as error:
        if instead := _intact_beside(run, path):
            raise type(error)(f"{error}; use --checkpoint {instead}") from error
        raise


def _intact_beside(run: Path, damaged: Path) -> str:
    """Return what to give to --checkpoint instead of a damaged one; "" where there is nothing."""
    if damaged == run:  # a checkpoint was given, not a run
        return ""
    for name in names_in(damaged.parent):
        with contextlib.suppress(BadCheckpoint, KeyError):
            if name != damaged.name and (step := int(read(damaged.parent / name)[1]["progress"]["step"])):
                return f"{'latest' if find(run, 'latest').name == name else name} (step {step}, intact)"
    return ""


def check_state(state: dict[str, Any]) -> None:
    """Raise ValueError, or UnknownField, where a part that is there cannot have been written by a run."""
    readers: dict[str, Callable[[Any], object]] = {
        "progress": TrainProgress.from_json,
        "spec": DataSpec.from_json,
        "recipe": lambda values: typed(values, dict[str, str | dict[str, Any]]),
        "fingerprints": lambda values: typed(values, dict[str, str]),
        "contents": lambda values: typed(values, dict[str, dict[str, str]]),
        "environment": lambda values: [
            typed(typed(values, dict[str, Any]).get(name, {}), dict[str, str] | None)
            for name in ("packages", "plugins")
        ],
        "choices": lambda values: typed(values, dict[str, str]),
        "stopwatch": lambda values: typed(values, dict[str, float | None]),
    }
    for name, reader in readers.items():
        if name in state:  # else who needs it says so, by `require`
            try:
                reader(state[name])
            except UnknownField as error:
                raise UnknownField(f"{name}.{error}") from None
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None


def require(state: dict[str, Any], *parts: str) -> None:
    """Raise BadCheckpoint unless a state that was read holds these parts."""
    for part in parts:
        if part not in state:
            raise BadCheckpoint(f"the checkpoint is damaged: its {STATE} holds no {part}")


def check_fit(stem: str, wanted: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Raise BadCheckpoint unless both have the same names, shapes and types."""
    if wanted.keys() != given.keys():
        odd = first_of(sorted(wanted.keys() ^ given.keys()))
        raise BadCheckpoint(f"the checkpoint's {stem} does not fit this model: {odd} on one side only")
    for name, tensor in wanted.items():
        if (tensor.shape, tensor.dtype) != (given[name].shape, given[name].dtype):
            raise BadCheckpoint(
                f"the checkpoint's {stem}/{name} has shape {tuple(given[name].shape)} of {given[name].dtype}, "
                f"this model has {tuple(tensor.shape)} of {tensor.dtype}; a new run can start from these weights, with "
                f"a new head for other classes: --model.weights RUN --run.out NEW"
            )


def all_of(path: Path) -> list[Path]:
    """Return the checkpoint itself, or all that a run folder keeps, oldest first."""
    if (path / MANIFEST).is_file():
        return [path]
    folder = path / "checkpoints"
    names = names_in(folder)
    if not names:
        raise BadCheckpoint(f"{path} is neither a checkpoint nor a run folder that holds some")
    return [folder / name for name in reversed(names)]


def stored_recipe(run: Path, elsewhere: Path | None) -> dict[str, Any]:
    """Return the recipe of the checkpoint that a run will resume from, by part; {} for a new run. `elsewhere` is where
    a run without checkpoints begins. Nothing is verified: resuming does that, and compares."""
    folder = run / "checkpoints"
    names = Checkpoints(folder, 1, lambda _: None).names()
    paths = [folder / name for name in names] or sorted(folder.glob("ckpt-*.old"), reverse=True)
    if not paths and elsewhere:
        paths = [find(elsewhere, "latest")]
    for path in paths:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # damaged: the one before has it too
            return typed(read_json(path / STATE, MAX_STATE_BYTES)["recipe"], dict[str, Any])
    return {}


class HostCopies:
    """Copies of all tensors in host memory, so that a thread can write them while training changes the originals.

    A device with streams makes them in its own time, into pinned memory that the next save takes again: the host does
    not wait for 200 small copies. Call `wait` before they are read."""

    def __init__(self, device: Device):
        self._device = device if device.has_streams and device.can_pin else None
        self._copied: Any = None
        self.tensors: Tensors = {}

    def make(self, tensors: Tensors) -> None:
        """Copy the tensors as they are now; the copies before must have been written."""
        if self._device is None:
            self.tensors = {stem: _on_host(named) for stem, named in tensors.items()}
            return
        if not self.tensors:
            self.tensors = {stem: {n: _pinned_like(t) for n, t in named.items()} for stem, named in tensors.items()}
        for stem, named in tensors.items():
            for name, tensor in named.items():
                self.tensors[stem][name].copy_(tensor.detach(), non_blocking=True)
        self._copied = self._device.api.Event()
        self._copied.record()

    def wait(self) -> None:
        """Wait until the device has made the copies."""
        if self._copied is not None:
            self._copied.synchronize()


def _pinned_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def _on_host(named: dict[str, Tensor]) -> dict[str, Tensor]:
    # Plain contiguous copies: safetensors stores no strides, and the run may keep changing the originals.
    return {n: t.detach().to("cpu", copy=True, memory_format=torch.contiguous_format) for n, t in named.items()}


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def _replace_text(path: Path, text: str) -> None:
    replace_text(path, text + "\n", durable=True)
    _fsync(path.parent)


def _remove(path: Path) -> None:
    """Remove a folder with its contents, or a file; of a link, only the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def _free_name(path: Path, why: str) -> Path:
    number = 0
    while (aside := path.with_name(f"{path.name}.{why}{number or ''}")).exists():
        number += 1
    return aside
