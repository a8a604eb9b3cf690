"""`python -m sightline.migrate`: the same as `sightline migrate`."""

from __future__ import annotations

import os
import sys

from sightline.migrate.cli import main

try:
    code = main(sys.argv[1:])
    sys.stdout.flush()
except BrokenPipeError:  # `report | head` closed the pipe
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    code = 0
sys.exit(code)
