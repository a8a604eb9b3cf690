"""The entry point of the group `torch.backends`: PyTorch calls it at the end of `import torch`.

PyTorch finds it only where PYTHONPATH names this folder. It lies beside its entry point, so neither is found without
the other, and it raises nothing: an error here would end `import torch`.
"""

import os
import sys

SWITCHES = ("SIGHTLINE_MIGRATE", "PT_HPU_GPU_MIGRATION")
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))


def autoload() -> None:
    """Hand over to sightline.migrate.hook of the copy of Sightline that holds this file, if a variable asks for it."""
    if not any(os.environ.get(name) for name in SWITCHES):
        return
    sys.path.insert(0, ROOT)
    try:
        from sightline.migrate import hook
    except Exception as error:  # noqa: BLE001
        print(f"sightline migrate: not active, {error!r}", file=sys.stderr)
        return
    finally:
        sys.path.remove(ROOT)
    hook.autoload()
