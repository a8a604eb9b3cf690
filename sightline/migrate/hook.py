"""Activate at the end of `import torch`, where autoload/ is on the path and the environment asks for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

GROUP = "torch.backends"
# The second is that of installations before autoload/ held it; `import torch` fails there if it is not found.
OWN = ("sightline_migrate_autoload:autoload", "sightline.migrate.hook:autoload")


def autoload() -> None:
    """Activate if the environment asks for it. An error is printed: raised, it would end `import torch`."""
    try:
        from sightline.migrate.options import is_wanted

        if not is_wanted(os.environ):
            return
        _load_later_backends()
        from sightline.migrate import session

        session.activate(session.MigrateOptions.from_environment())
    except Exception as error:  # noqa: BLE001
        print(f"sightline migrate: not active, {error!r}", file=sys.stderr)


def _load_later_backends() -> None:
    """torch calls the hooks of all backends in the order of sys.path: the device's own may come after ours.

    Those are called here, and once more by torch, which then finds that nothing is left to do.
    """
    from importlib.metadata import entry_points

    found = list(entry_points(group=GROUP))
    own = [at for at, entry in enumerate(found) if entry.value in OWN]
    for entry in found[own[0] + 1 :] if own else ():
        if entry.value in OWN:
            continue
        function = entry.load()
        function()
        _call_no_more(entry.module, entry.attr, function)


def _call_no_more(module: str, attribute: str, function: Callable[[], None]) -> None:
    """Until torch has called it: then it is itself again."""
    owner: Any = sys.modules[module]
    *path, last = attribute.split(".")
    for name in path:
        owner = getattr(owner, name)

    def once() -> None:
        setattr(owner, last, function)

    setattr(owner, last, once)
