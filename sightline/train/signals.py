"""SIGTERM and SIGINT: note the signal, let all ranks agree at the end of a step, then save and leave."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any

from torch import Tensor

from sightline.errors import Interrupted
from sightline.hardware.world import World

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopSignals:
    """Use as a context manager. A second SIGINT leaves at once; checkpoints are whole or absent, so nothing is lost."""

    def __init__(self, world: World):
        self.world = world
        self._pending = 0
        self._previous: dict[int, Any] = {}
        self._flag: tuple[Tensor, Any] | None = None

    def __enter__(self) -> StopSignals:
        for number in HANDLED:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raises at once where there is one rank; several ranks must leave together, see agree()."""
        if self._pending and self.world.size == 1:
            raise Interrupted(self._pending)

    def agree(self) -> None:
        """At the end of a step: raises on all ranks in the same step, one step after any of them was told to stop."""
        if self.world.size == 1:
            self.check()
            return
        if self._flag is not None:
            flag, work = self._flag
            work.wait()
            if int(flag):
                raise Interrupted(int(flag))
        self._flag = self.world.start_max(self._pending)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._pending and number == signal.SIGINT:
            os._exit(128 + number)
        self._pending = number
