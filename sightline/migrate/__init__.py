"""`sightline migrate` and `import sightline.migrate`: the names that Sightline gives to the package sightline-migrate.

That package, packages/migrate in the repository, needs torch alone and nothing of Sightline; Sightline works without it
but for these names.
"""

from __future__ import annotations

import os
from typing import NoReturn

from sightline.errors import UsageError


class NotInstalled(UsageError, ModuleNotFoundError):
    """What these names stand for is a package of its own, which is not there."""


try:
    from sightline_migrate import AUTOLOAD, FOLDERS, activate, deactivate, migrate
except ModuleNotFoundError as error:
    if error.name != "sightline_migrate":
        raise

    # Not at once: metadata of old installations name hook.py below, which `import torch` must find.
    def __getattr__(name: str) -> NoReturn:
        if name in (*__all__, "auto", "cli"):
            raise NotInstalled(
                "sightline-migrate is a package of its own, which is not installed here; in a checkout of Sightline's "
                "repository run `pip install ./packages/migrate`"
            )
        raise AttributeError(name)

else:
    FOLDERS.append(os.path.dirname(os.path.abspath(__file__)))

__all__ = ["AUTOLOAD", "NotInstalled", "activate", "deactivate", "migrate"]
