"""`python -m sightline.migrate`: the same as `sightline migrate`."""

from __future__ import annotations

from sightline_migrate.__main__ import run

run()
