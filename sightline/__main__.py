"""`python -m sightline`, and the command `sightline`."""

import multiprocessing
import sys

from sightline import terminal
from sightline.cli import main
from sightline.hardware import early_cuda


def run() -> None:
    """Run the command that was typed, and end the process. A migrated script ends as Python does, and so does a process
    of somebody's multiprocessing, which waits for word from it."""
    code = main()
    is_heavy = "torch" in sys.modules or early_cuda.has_begun()
    if is_heavy and sys.argv[1:2] != ["migrate"] and multiprocessing.parent_process() is None:
        terminal.leave(code)
    sys.exit(code)


if __name__ == "__main__":
    run()
