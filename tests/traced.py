"""Tells tests/random_mutants.py which lines a test runs, also in the processes that it forks or starts.

MUTANTS_TRACE is the folder of what was found, MUTANTS_TEST a file with the name of the test that runs now.
"""

import atexit
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import coverage

REPO = Path(__file__).resolve().parents[1]
PACKAGES = (REPO / "sightline", REPO / "packages" / "migrate" / "sightline_migrate")


def trace() -> "coverage.Coverage":
    """Trace this process and its forks from here on; each writes a file of its own where it ends, unless killed."""
    import coverage

    if tracer := coverage.Coverage.current():
        name_test(tracer)
        return tracer
    data = Path(os.environ["MUTANTS_TRACE"], "data")
    tracer = coverage.Coverage(str(data), data_suffix=True, source=[*map(str, PACKAGES)], config_file=False)
    tracer.set_option("run:patch", ["_exit", "execv"])
    tracer.set_option("run:disable_warnings", ["no-data-collected", "module-not-measured"])
    tracer.start()
    name_test(tracer)
    os.register_at_fork(after_in_child=lambda: name_test(tracer))  # a forkserver started by another test
    atexit.register(tracer.save)
    return tracer


def name_test(tracer: "coverage.Coverage") -> None:
    """What runs from here on is run by the test that MUTANTS_TEST names."""
    test = Path(os.environ["MUTANTS_TEST"])
    tracer.switch_context(test.read_text("utf-8") if test.exists() else "")
