"""What PyTorch calls at the end of `import torch`: the entry point of the group `torch.backends`."""

from __future__ import annotations

import os
import sys


def autoload() -> None:
    """Activates if the environment asks for it. An error here would end `import torch`, so it is told, never raised."""
    try:
        from sightline.migrate.options import is_wanted

        if not is_wanted(os.environ):
            return
        from sightline.migrate import session

        session.activate(session.Options.from_environment())
    except Exception as error:  # noqa: BLE001
        print(f"sightline migrate: not active, {type(error).__name__}: {error}", file=sys.stderr)
