"""Activate at the end of `import torch`, if autoload/ is on the path and the environment asks for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

GROUP = "torch.backends"
# The second belongs to installations older than autoload/, where `import torch` fails if it is missing.
OWN = ("sightline_migrate_autoload:autoload", "sightline.migrate.hook:autoload")


def autoload() -> None:
    """Activate if the environment asks for it. Print errors instead of raising, which would break `import torch`."""
    try:
        from sightline_migrate.options import is_wanted

        if not is_wanted(os.environ) or _is_being_imported("sightline_migrate.session"):
            return
        _load_later_backends()
        from sightline_migrate import session

        session.activate_and_announce(session.MigrateOptions.from_environment())
    except Exception as error:  # noqa: BLE001
        print(f"sightline migrate: not active, {error!r}", file=sys.stderr)


def _is_being_imported(name: str) -> bool:
    """Return True if `import sightline_migrate.auto` or activate() imports torch for us, and activates afterwards."""
    return getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False)


def _load_later_backends() -> None:
    """Call the hooks of backends that torch would load after ours: the device's own may be among them.

    torch calls hooks in the order of sys.path. It calls these a second time, which then has no effect.
    """
    from importlib.metadata import entry_points

    found = list(entry_points(group=GROUP))
    own = [at for at, entry in enumerate(found) if entry.value in OWN]
    for entry in found[own[0] + 1 :] if own else ():
        if entry.value in OWN:
            continue
        function = entry.load()
        function()
        _skip_next_call(entry.module, entry.attr, function)


def _skip_next_call(module: str, attribute: str, function: Callable[[], None]) -> None:
    """Replace a hook by a no-op that restores it when torch calls it."""
    owner: Any = sys.modules[module]
    *path, last = attribute.split(".")
    for name in path:
        owner = getattr(owner, name)

    def once() -> None:
        setattr(owner, last, function)

    setattr(owner, last, once)
