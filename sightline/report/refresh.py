"""Keep the page of a run at work fresh: a process of its own writes it, at the lowest priority, without torch.

`python -m sightline.report.refresh RUN` is that process. It cannot fail the run: its errors go nowhere.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from sightline.runs.page import EVERY_S

MOST_S = 120  # after which the process ends itself: a dead file server, or nobody who would end it
END_S = 10.0  # for the process to remove what it has half written
LOWEST_PRIORITY = 19


class Refresh:
    """The process of one run; rank 0 has it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._child: subprocess.Popen[bytes] | None = None
        self._opened_at = self._started_at = time.monotonic()

    @property
    def has_begun(self) -> bool:
        """True once the run is so old that a page shows it at work."""
        return time.monotonic() - self._opened_at >= EVERY_S

    def look(self) -> None:
        """Start to write the page if the last one is old enough; do not wait for it. A short run starts no process."""
        if time.monotonic() - self._started_at < EVERY_S or (self._child and self._child.poll() is None):
            return
        self._started_at = time.monotonic()
        command = [sys.executable, "-m", __name__, str(self.folder.absolute())]
        nowhere = subprocess.DEVNULL
        try:
            # A session of its own: Ctrl-C is for the run, which ends the process itself.
            self._child = subprocess.Popen(
                command,
                stdin=nowhere,
                stdout=nowhere,
                stderr=nowhere,
                start_new_session=True,
                env=_environment(),
            )
        except OSError:  # no memory or no process left: the next look tries again
            self._child = None

    def close(self) -> None:
        """End the process."""
        if self._child is None:
            return
        self._child.terminate()
        try:
            self._child.wait(END_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._child = None


def _environment() -> dict[str, str]:
    """Let the process import this copy of Sightline, and nothing from the current folder."""
    places = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(places), "PYTHONSAFEPATH": "1"}


def write_if_possible(folders: Sequence[Path], out: Path | None = None) -> None:
    """Write a page, unless that fails, which is no reason to fail a run."""
    from sightline.report.page import write_report

    try:
        write_report(folders, out)
    except Exception:  # noqa: BLE001  # of a damaged folder
        return


def main(folder: str) -> None:
    """Write the page of a run."""
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, lambda *_: sys.exit(0))  # as an exception, which removes a file half written
    signal.alarm(MOST_S)
    os.nice(LOWEST_PRIORITY)
    from sightline.report.page import write_report

    write_report([Path(folder)])


if __name__ == "__main__":
    main(sys.argv[1])
