"""`import sightline.migrate.auto` as a script's first line activates with the options of the environment."""

from __future__ import annotations

from sightline.migrate import session

session.activate(session.MigrateOptions.from_environment())
