"""The command line of sightline-migrate, as `sightline migrate`."""

from __future__ import annotations

from sightline.migrate import AUTOLOAD as AUTOLOAD  # first: it says what to install where that is missing  # isort: split
from sightline_migrate.cli import main

__all__ = ["main"]
