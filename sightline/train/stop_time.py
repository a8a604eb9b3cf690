"""The time that a run takes to stop: launchers kill it if it needs longer than they wait."""

from __future__ import annotations

from sightline.config import Run
from sightline.runs.log import RunLog
from sightline.train.saver import Saved
from sightline.train.signals import StopSignals

GRACE_S = 30  # after which torchrun, Kubernetes and Slurm kill, unless set otherwise


class StopTime:
    """Called after every save; reports once, as soon as the length of a step is known."""

    def __init__(self, run: Run, signals: StopSignals, log: RunLog):
        self.run = run
        self.signals = signals
        self.log = log
        self._was_reported = False

    def __call__(self, saved: Saved) -> None:
        """Report the cost of a checkpoint, and the time that a launcher must leave a run that it stops."""
        if self._was_reported or not self.signals.answer_s:
            return
        self._was_reported = True
        size = sum(file.stat().st_size for file in saved.path.glob("*")) / 1e6
        how = ", in the background," if self.run.save_in_background else ""
        needed = self.signals.answer_s + saved.copied_s + saved.written_s
        self.log.event("stop_time", seconds=round(needed, 3), copied_s=saved.copied_s, written_s=saved.written_s)
        text = (
            f"a checkpoint is {size:,.2f} MB, copied into host memory in {saved.copied_s:.2f} s and written{how} in "
            f"{saved.written_s:.2f} s; to stop takes up to {needed:.1f} s"
        )
        if needed > GRACE_S:
            self.log.warn(f"{text}, more than the {GRACE_S} s that launchers leave by default: give it more time")
        else:
            self.log.say(text)
