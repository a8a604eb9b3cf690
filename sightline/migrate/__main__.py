"""`python -m sightline.migrate`: the same as `sightline migrate`."""

from __future__ import annotations

import sys

from sightline.migrate.cli import main

sys.exit(main(sys.argv[1:]))
