"""The process that loader workers are forked from: when it may start before torch is imported."""

import subprocess
import sys

import pytest

from sightline import config
from sightline.data.loading.forkserver import may_start_early


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], True),
        (["--run.workers", "2"], True),
        (["--run.workers", "0"], False),  # nothing to start
        (["--run.workers=0"], False),
        (["--run.devices", "2"], False),  # the ranks start their own
        (["--run.max-cpus", "1"], False),  # processes inherit the CPUs, which are not chosen yet
        (["--run.affinity=single"], False),
    ],
)
def test_it_starts_early_where_that_changes_nothing(flags: list[str], expected: bool):
    assert may_start_early(config.load("demo_classification", flags)[1]) is expected


def test_it_is_started_without_torch():
    code = "import sys, sightline.data.loading.forkserver, sightline.config; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
