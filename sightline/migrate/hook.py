"""What metadata of installations name that are older than autoload/: `import torch` fails where it is missing."""

from __future__ import annotations

import os

from sightline import terminal


def autoload() -> None:
    """Activate at the end of `import torch`, if the environment asks for it and sightline-migrate is there."""
    try:
        from sightline_migrate import hook
    except ModuleNotFoundError:
        if any(name.startswith("SIGHTLINE_MIGRATE") for name in os.environ):
            terminal.say("sightline migrate: not active, sightline-migrate is not installed", "stderr")
        return
    hook.autoload()
