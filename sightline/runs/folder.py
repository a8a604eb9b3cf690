"""The run folder and who may write into it: a lock with a heartbeat, files replaced as a whole, exit.json.

Only rank 0 of a training run holds the lock. An evaluation adds files without it, also while the run is at work.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import platform
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from sightline.errors import DISK_FULL, DiskFull, PeerLost, UsageError, disk_error
from sightline.files.typed_json import read_json
from sightline.files.whole import no_link, open_text, rename, replace_text, unwritable
from sightline.runs.attempts import EXIT, Attempt, is_in_vain, read_exit

LOCK = ".lock"
LOG = "log.jsonl"
SCORES, BEST_SCORES = "scores.json", "scores-best.json"  # the last evaluation, and the best
BAD_SAMPLES = "bad_samples.jsonl"
SUSPICIOUS = "suspicious.json"  # labels that the network contradicts, from `check RUN`
DRAWINGS = "drawings.json"  # of the worst samples in the best scores
MAX_SCORES_BYTES = 64 * 2**20  # 100,000 classes take 10 MB, 30 MB with long names
TAKE_OVER_S = 10.0  # a lock of an earlier attempt of the same command is taken over after this long without heartbeat
HEARTBEAT_S = 1.0
NOT_THERE = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}  # ESTALE: another host deleted it from a file server


class RunFolder:
    """One rank's view of its run folder. `attempt` is None where it only adds to a run, as an evaluation does."""

    def __init__(self, path: Path, rank: int, attempt: Attempt | None, warn: Callable[[str], None]):
        self.path = path
        self.rank = rank
        self.attempt = attempt
        self._warn = warn
        self._lock: IO[str] | None = None
        self._claimed: os.stat_result | None = None
        self._beaten_at = 0.0
        self._told_full = False

    @property
    def is_main(self) -> bool:
        """True if this rank writes the log and the files of the run."""
        return self.rank == 0

    def claim(self) -> None:
        """Create the folder, prove that it can be written, and refuse a second run in it."""
        assert self.is_main and self.attempt is not None
        with self.must_be_writable():
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = self._take_lock(self.attempt.command)
            self._claimed = os.stat(self.path)
            (self.path / EXIT).unlink(missing_ok=True)  # tells how an earlier start ended; this one is at work

    @contextlib.contextmanager
    def must_be_writable(self, rank_logs: Path | None = None) -> Iterator[None]:
        """Raise UsageError, or DiskError, for an OSError inside, of this folder or of that for the logs of ranks."""
        try:
            yield
        except OSError as error:
            place, flag = (f"folder {rank_logs}", "rank-logs") if rank_logs else (f"run folder {self.path}", "out")
            raise unwritable(place, error, f"give another one with --run.{flag} DIR") from error

    @contextlib.contextmanager
    def may_lack_room(self, name: str | Path) -> Iterator[None]:
        """Warn once where the disk is full: that costs lines of the log, not the run. Raise DiskError if it fails."""
        try:
            yield
        except OSError as error:
            if error.errno in NOT_THERE:
                self.prove_there()
            if error.errno not in DISK_FULL:
                raise disk_error(self.path / name, error) from error
            if not self._told_full:
                self._told_full = True
                self._warn(f"{self.path} cannot be written: {error.strerror}; the log may lack lines")

    def _take_lock(self, command: str) -> IO[str]:
        """Open and hold .lock. The kernel frees a lock when its process dies, but that of a host that was cut off may
        live on: a lock from an earlier attempt of the same command without a recent heartbeat is taken over."""
        path = self.path / LOCK
        deadline = time.monotonic() + TAKE_OVER_S
        lock = open_text(path, "a+")
        last_beat = os.fstat(lock.fileno()).st_mtime_ns
        while not _locked(lock):
            lock.seek(0)
            holder, _, its_command = lock.read().partition("\n")
            in_use = f"is using {self.path} ({holder.strip() or 'unknown process'})"
            if not command or its_command.strip() != command:
                lock.close()
                raise UsageError(f"another run {in_use}; wait for it, or give another folder with --run.out DIR")
            if time.monotonic() > deadline:
                is_alive = os.fstat(lock.fileno()).st_mtime_ns != last_beat
                lock.close()
                if is_alive:  # two groups of hosts that do not see each other: the first continues
                    raise PeerLost(f"another attempt of this command {in_use}; this one leaves it alone")
                fresh = self.path / f".lock.{secrets.token_hex(8)}"
                lock = fresh.open("x+")
                assert _locked(lock), "nobody else knows this file"
                rename(fresh, path)
                self._warn(f"{self.path} is taken over from {holder}, an earlier attempt of this command")
                break
            time.sleep(0.05)
        if not os.path.samestat(os.fstat(lock.fileno()), os.stat(path)):  # somebody else was faster
            lock.close()
            return self._take_lock(command)
        lock.truncate(0)
        lock.write(f"pid {os.getpid()} on {platform.node()}\n{command}\n")
        lock.flush()
        return lock

    def beat(self) -> None:
        """Heartbeat: touch the lock, at most once per second. A later attempt looks at it before it takes over."""
        if self._lock is not None and time.monotonic() - self._beaten_at > HEARTBEAT_S:
            self._beaten_at = time.monotonic()
            self.prove_there()
            with self.may_lack_room(LOCK):
                os.utime(self._lock.fileno())

    def is_gone(self) -> bool:
        """Return whether the folder that was claimed is no longer at its path, or nothing that the run wrote is in it:
        whoever deletes it while a save is under way leaves an empty folder."""
        if self._claimed is None:
            return False
        try:
            if not os.path.samestat(self._claimed, os.stat(self.path)):
                return True
            return not any(os.path.lexists(self.path / name) for name in (LOCK, "config.yaml"))
        except OSError as error:
            return error.errno in NOT_THERE

    def prove_there(self) -> None:
        """Raise DiskFull where the run folder was deleted."""
        if self.is_gone():
            raise DiskFull(
                f"run folder {self.path} was deleted or moved while this run was running, so nothing more can be saved "
                f"there; move it back and give the same command to resume, or start again"
            )

    def is_ours(self) -> bool:
        """Return False where a later attempt of the same command has taken the folder over."""
        if self._lock is None or self._lock.closed:
            return True
        with contextlib.suppress(FileNotFoundError):  # deleted by a person, not taken over
            return os.path.samestat(os.fstat(self._lock.fileno()), os.stat(self.path / LOCK))
        return True

    def prove_ours(self) -> None:
        """Raise PeerLost before anything is written over the files of a later attempt, DiskFull if all was deleted."""
        self.prove_there()
        if not self.is_ours():
            raise PeerLost(f"a later attempt of this command has taken {self.path} over; this one leaves it alone")

    def write(self, name: str, text: str, durable: bool = False) -> None:
        """Replace a file of the run folder as a whole; rank 0 only. `durable`: also through a power cut."""
        if self.is_main:
            self._replace(name, text, durable)

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        """Replace a JSON file; numbers that are not finite become null."""
        self.write(name, json.dumps(finite(value), indent=1) + "\n")

    def read_scores(self, name: str) -> dict[str, Any]:
        """Return a file of scores or drawings; {} if it is missing or damaged."""
        try:
            found = read_json(self.path / name, MAX_SCORES_BYTES)
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _replace(self, name: str, text: str, durable: bool = False) -> None:
        with self.may_lack_room(name):
            replace_text(self.path / name, text, durable)

    def write_exit(self, code: int, reason: str, speaks_for_all: bool, **more: Any) -> None:
        """Write how the run ended to exit.json, also where a launcher turns every exit code into 1.

        Rank 0 writes it. Another rank does for an end that a next attempt must not repeat, and where it speaks for all
        because rank 0 no longer answers.
        """
        if self.is_main:
            # Another rank knows better than the one that has lost it.
            if code == PeerLost.exit_code and is_in_vain(read_exit(self.path).get("code", 0)):
                return
        elif not (self.attempt and (is_in_vain(code) or speaks_for_all)):
            return
        if self.is_ours() and not self.is_gone():
            about = self.attempt.facts() if self.attempt else {}
            told = {"code": code, "reason": reason, "time": time.time(), **about, **more}
            self._replace(EXIT, json.dumps(told) + "\n")

    def release(self) -> None:
        """Free the lock."""
        if self._lock:
            self._lock.close()


def finite(value: Any) -> Any:
    """Return value with null for NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def is_at_work(folder: Path) -> bool:
    """Return whether a run holds the lock of its folder. Shared, so that two who ask do not see each other."""
    try:
        with open(folder / LOCK, encoding="utf-8", opener=no_link) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (OSError, UsageError):  # none, not ours to read, or a link
        return False
    return False


def _locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
