"""The time that a run takes to stop: launchers kill it if it needs longer than they wait."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

from sightline.engine.signals import StopSignals
from sightline.hardware.launch import detect
from sightline.hardware.launch.place import is_pod
from sightline.runs.log import RunLog
from sightline.train.saver import Saved

GRACE_S = 30  # after which torchrun, Kubernetes and Slurm kill, unless set otherwise


def is_launched(environ: Mapping[str, str]) -> bool:
    """Return whether something else started this process, which stops it with SIGTERM and waits no longer than it says:
    torchrun, MPI, Slurm or Kubernetes. A person waits."""
    return detect(environ) is not None or "SLURM_JOB_ID" in environ or is_pod(environ)


class StopTime:
    """Called after every save; logs it once, as soon as the length of a step is known."""

    def __init__(self, signals: StopSignals, log: RunLog):
        self.signals = signals
        self.log = log
        self._was_reported = False

    def __call__(self, saved: Saved) -> None:
        """Log the cost of a checkpoint, and the time that a run takes to stop; warn if launchers would not wait."""
        if self._was_reported or not self.signals.answer_s:
            return
        self._was_reported = True
        size = sum(file.stat().st_size for file in saved.path.glob("*"))
        needed = self.signals.answer_s + saved.copied_s + saved.written_s
        took = {"copied_s": saved.copied_s, "written_s": saved.written_s, "bytes": size}
        self.log.event("stop_time", seconds=round(needed, 3), **took)
        if needed > GRACE_S and is_launched(os.environ):
            self.log.warn(
                f"a stop (SIGTERM) takes up to {needed:.1f} s, since the step in progress is finished and "
                f"{size / 1e6:,.0f} MB are saved; launchers kill after {GRACE_S} s by default, and the steps since "
                f"the last checkpoint are repeated: leave {math.ceil(needed * 1.5)} s (torchrun --shutdown-timeout, "
                f"Kubernetes terminationGracePeriodSeconds, Slurm --signal)"
            )
