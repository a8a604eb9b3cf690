"""The command line of sightline-migrate, as `sightline migrate`."""

from __future__ import annotations

from sightline_migrate.cli import main

__all__ = ["main"]
