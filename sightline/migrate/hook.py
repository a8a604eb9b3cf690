"""What metadata of installations name that are older than autoload/: `import torch` fails where it is missing."""

from __future__ import annotations

from sightline_migrate.hook import autoload

__all__ = ["autoload"]
