"""Activate with the environment's options: `import sightline.migrate.auto` as a script's first line."""

from __future__ import annotations

from sightline.migrate import AUTOLOAD as AUTOLOAD  # first: it says what to install where that is missing  # isort: split
from sightline_migrate import session

session.activate_and_announce(session.MigrateOptions.from_environment())
