"""Activate with the environment's options: `import sightline.migrate.auto` as a script's first line."""

from __future__ import annotations

from sightline_migrate import session

session.activate_and_announce(session.MigrateOptions.from_environment())
