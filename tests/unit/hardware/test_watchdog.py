"""The time after which a rank counts as hung; tests/distributed/test_hang.py tests what happens then."""

import time

import pytest

from sightline.hardware.watchdog import Watchdog
from sightline.hardware.world import CONNECT_TIMEOUT, World


@pytest.mark.parametrize("timeout_s", [5.0, 3600.0])
def test_what_is_announced_as_long_has_never_less_time_than_a_step(timeout_s: float):
    watchdog = Watchdog(World(), timeout_s, print, print, "")
    watchdog.beat()
    assert watchdog._limit_s == timeout_s
    watchdog.beat(is_long=True)
    assert watchdog._limit_s == max(timeout_s, CONNECT_TIMEOUT.total_seconds())


def test_time_in_which_the_process_stood_still_does_not_count():
    watchdog = Watchdog(World(), 5.0, print, print, "")
    before = watchdog._last = time.monotonic() - 100
    watchdog._forgive(1.0)  # a busy machine
    assert watchdog._last == before
    watchdog._forgive(30.0)
    assert watchdog._last == before + 30
    watchdog._forgive(1000.0)
    assert before + 100 <= watchdog._last <= time.monotonic(), "never into the future"
