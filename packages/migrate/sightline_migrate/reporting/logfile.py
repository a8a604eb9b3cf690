"""Log files: `gpu_migration_<pid>.log` while a process runs, `migrate_<rank>_<pid>.json` and a table at exit.

Ranks, spawned and forked workers each write their own files; launchers and compile workers write none.
"""

from __future__ import annotations

import json
import linecache
import multiprocessing
import os
import platform
import re
import socket
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing import util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sightline_migrate import terminal, zones
from sightline_migrate.options import PREFIX, MigrateError, command
from sightline_migrate.reporting import record, report, syncs

if TYPE_CHECKING:
    from sightline_migrate.session import Session

RUN = PREFIX + "RUN"
"""environment variable that all processes of one run share, so that a folder can hold several runs"""
LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "deepspeed")
COMPILE_WORKER = os.path.join("torch", "_inductor", "compile_worker")
FORKSERVER = "from multiprocessing.forkserver import"
SPAWNED = "from multiprocessing.spawn import"
# A killed process leaves the JSON of its last new call site. Writing may take at most this share of the time.
SHARE_FOR_WRITING = 0.05
ERROR_TEXT = 300
COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""escape codes that some libraries put into their error messages"""


def setup(session: Session) -> None:
    """Start the log of this process if the options ask for one; workers of a fork server inherit it."""
    session.is_first = not os.environ.get(RUN)
    if session.is_first:
        session.undo.set_item(os.environ, RUN, f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    if not session.options.log:
        return
    folder = Path(session.options.log_dir).absolute()
    session.undo.set_item(os.environ, PREFIX + "LOG_DIR", str(folder))  # a child process may start in another folder
    log = ProcessLog(session, folder)
    log.begin()
    session.undo.on_undo(log.end)


def announce(session: Session) -> None:
    """Print once, in the first process of a run, that migration is on."""
    if session.is_first and not session.options.quiet:
        session.is_first = False
        log = f"; log in {report.short(os.path.abspath(session.options.log_dir))}" if session.options.log else ""
        record.say(f"CUDA calls run on {session.target.name}{log}")


def is_launcher() -> bool:
    """Return True if this process only starts others: torchrun, a fork server, a compile worker of inductor."""
    if multiprocessing.parent_process() is not None:
        return False
    program = _program(sys.orig_argv[1:])
    return (
        becomes_launcher
        or os.path.basename(program) in LAUNCHERS
        or COMPILE_WORKER in program
        or program.startswith(FORKSERVER)
    )


becomes_launcher = False
"""set by the command line before it becomes torchrun"""


def _program(words: Sequence[str]) -> str:
    """Return the script, module or code that an interpreter with these arguments runs."""
    rest = iter(words)
    for word in rest:
        if word in ("-m", "-c"):
            return next(rest, "")
        if word in ("-W", "-X"):
            next(rest, "")
        elif not word.startswith("-"):
            return word
    return ""


class ProcessLog:
    """Writes new records; `close()` may be called more than once, the last call writes the final counts."""

    def __init__(self, session: Session, folder: Path) -> None:
        self.session = session
        self.folder = folder
        self.rank = 0
        self.forked_by: int | None = None
        self._reset()

    def _reset(self) -> None:
        self.started = time.time()
        self.is_closed = False
        self._file: int | None = None
        self._json: Path | None = None
        self._is_writing = threading.Lock()
        self._write_next = 0.0

    def begin(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._give_up(error)
            return
        record.listeners.append(self.listen)
        self._close_at_exit()
        # The start of a forked worker clears finalizers, then calls this.
        util.register_after_fork(self, ProcessLog._close_at_exit)
        _logs.append(self)
        announce(self.session)

    def end(self) -> None:
        """Close the log when migration is turned off before the process ends."""
        if self in _logs:
            self.close()
            self._at_exit.cancel()
            self._stop_listening()
            _logs.remove(self)
            self._close_file()

    def after_fork(self) -> None:
        """Start new files in a forked child; the parent keeps its own."""
        self.forked_by = os.getppid()
        self._close_file()
        self._reset()
        self._close_at_exit()

    def _close_at_exit(self) -> None:
        """Close after multiprocessing has joined the processes that the script started and did not wait for.

        It does so at exit, too, in main processes and workers; finalizers of a negative priority run after that.
        """
        self._at_exit = util.Finalize(None, self.close, exitpriority=-1)

    def _prints(self) -> bool:
        # A spawned process imports the script, and so torch, before multiprocessing knows its parent.
        is_child = self.parent() is not None or _program(sys.orig_argv[1:]).startswith(SPAWNED)
        return not self.session.options.quiet and not is_child and not is_launcher() and self._rank() == 0

    def parent(self) -> int | None:
        """Return the process that started this one as its worker; a fork server does not count."""
        known = multiprocessing.parent_process()
        return known.pid if known is not None else self.forked_by

    def _rank(self) -> int:
        """Return the rank; remembered after the process group is gone."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.rank = torch.distributed.get_rank()
        elif not self.rank:
            text = os.environ.get("RANK", "")
            self.rank = int(text) if text.isdigit() else 0
        return self.rank

    def listen(self, new: record.Record) -> None:
        """Write a record; a full disk ends the log, never the script."""
        if is_launcher():
            return
        try:
            self._append(_as_text(new))
            self._rank()
            if time.monotonic() >= self._write_next:
                self._write_json(is_finished=False)
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Write the counts to the log, write the JSON, and print the table in the main process."""
        if is_launcher():
            return
        try:
            if self._file is not None and not self.is_closed:
                self._append(_counts_as_text(with_truths=self.session.options.log > 1))
            self._write_json(is_finished=True)
            if not self.is_closed and self._prints() and not self._only_launches():
                text = report.as_text(report.merge(self._documents()), shown_sites=report.SITES_AT_EXIT)
                terminal.say(f"\n{text}\n{self._pointer()}", "stderr")
        except (OSError, MigrateError) as error:
            self._give_up(error)
        self.is_closed = True

    def _only_launches(self) -> bool:
        """Return True if this process made no call, but others of the run did and print their own tables."""
        if record.counts:
            return False
        others = [d for d in report.read(self.folder, since=self.started) if d["pid"] != os.getpid()]
        return any(d["run"] == os.environ.get(RUN) and d["parent"] is None and d["sites"] for d in others)

    def _documents(self) -> list[dict[str, Any]]:
        """Return the documents of this process and of the workers it started that have ended."""
        mine = [self.document(is_finished=True)]
        family = {os.getpid()}
        read = report.read(self.folder, since=self.started)
        others = [d for d in read if d["run"] == mine[0]["run"] and d["pid"] != os.getpid()]
        while found := [d for d in others if d["parent"] in family and d["host"] == mine[0]["host"]]:
            mine += found
            family |= {d["pid"] for d in found}
            others = [d for d in others if d not in found]
        return mine

    def _pointer(self) -> str:
        return f"all ranks and workers, line by line: {command()} report {report.short(str(self.folder))}"

    def _append(self, text: str) -> None:
        """Append a record in one write, so that threads do not interleave and nothing stays in a buffer."""
        if self._file is None:
            path = self.folder / f"gpu_migration_{os.getpid()}.log"
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
        os.write(self._file, terminal.visible(text).encode("utf-8"))

    def _close_file(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write_json(self, is_finished: bool) -> None:
        """Replace the JSON in one move, so that a reader never sees half of it; only one thread writes at a time."""
        if not self._is_writing.acquire(blocking=is_finished):
            return
        try:
            begin = time.monotonic()
            path = self.folder / f"migrate_{self._rank()}_{os.getpid()}.json"
            partial = path.with_suffix(f".{os.urandom(8).hex()}.partial")  # nobody can plant a link there
            with partial.open("x", encoding="utf-8") as file:
                file.write(json.dumps(self.document(is_finished), indent=1))
            partial.replace(path)
            if self._json is not None and self._json != path:
                self._json.unlink(missing_ok=True)  # written before the rank was known
            self._json = path
            now = time.monotonic()
            self._write_next = now + (now - begin) / SHARE_FOR_WRITING
        finally:
            self._is_writing.release()

    def document(self, is_finished: bool) -> dict[str, Any]:
        """Return everything known, in the schema of report.FORMAT."""
        error = getattr(sys, "last_value", None)
        return {
            "format": report.FORMAT,
            "run": os.environ.get(RUN, ""),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "parent": self.parent(),
            "rank": self.rank,
            "script": sys.argv[0] if sys.argv else "",
            "arguments": sys.argv[1:],
            "target": self.session.target.name,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "options": vars(self.session.options),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(self.started)),
            "seconds": round(time.time() - self.started, 3),
            "finished": is_finished,
            "error": _as_line(error) if error is not None else None,
            "sites": [_site(each, record.counts.get(key, 0)) for key, each in list(record.records.items())],
            "truths": dict(record.truths),
            "syncs": syncs.sites() if self.session.options.syncs else None,
        }

    def _give_up(self, error: Exception) -> None:
        record.say(f"logging stopped, {self.folder}: {error}")
        self._stop_listening()
        self.is_closed = True

    def _stop_listening(self) -> None:
        if self.listen in record.listeners:  # it has not given up before
            record.listeners.remove(self.listen)


_logs: list[ProcessLog] = []


def _after_fork() -> None:
    for log in _logs:
        log.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def _as_line(error: BaseException) -> str:
    first = next(iter(COLOURS.sub("", str(error)).splitlines()), "")
    return f"{type(error).__name__}: {first}"[:ERROR_TEXT] if first else type(error).__name__


def source(site: zones.Site) -> str:
    return linecache.getline(site.file, site.line).strip()


def _as_text(new: record.Record) -> str:
    """Format as the reference toolkit does, with our classes; a fourth line names the user's line if it differs."""
    lines = [
        f"[{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(new.time))}] {new.site}",
        f"    [context]: {source(new.site)}",
        f"    [{new.kind}]: {new.rule.name}({new.arguments}) --> {new.what}",
    ]
    if (new.user.file, new.user.line) != (new.site.file, new.site.line):
        lines.append(f"    [user]: {new.user}: {source(new.user)}")
    return "\n".join([*lines, "", ""])


def _counts_as_text(with_truths: bool) -> str:
    lines = [f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] counts"]
    in_order = sorted(record.counts.items(), key=lambda item: (report.KINDS.index(item[0][2].kind), -item[1]))
    lines += [f"    [{rule.kind}]: {n} x {rule.name} at {file}:{line}" for (file, line, rule), n in in_order]
    if with_truths:
        lines += [f"    [truth to torch]: {n} x {name}" for name, n in sorted(record.truths.items())]
    return "\n".join([*lines, "", ""])


def _site(each: record.Record, count: int) -> dict[str, Any]:
    return {
        "kind": each.kind,
        "api": each.rule.name,
        "what": each.what,
        "arguments": each.arguments,
        "count": count,
        "file": each.site.file,
        "line": each.site.line,
        "user_file": each.user.file,
        "user_line": each.user.line,
        "user_source": source(each.user),
    }
