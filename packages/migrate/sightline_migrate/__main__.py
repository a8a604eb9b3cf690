"""`sightline-migrate`, or `python -m sightline_migrate`."""

from __future__ import annotations

import os
import sys

from sightline_migrate.cli import main


def run() -> None:
    """Run what was typed, and end the process as the script does."""
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # `report | head` closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)


if __name__ == "__main__":
    run()
