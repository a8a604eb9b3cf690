"""The entry point of the group `torch.backends`, called by PyTorch at the end of `import torch`.

PyTorch finds it only if PYTHONPATH contains this folder. Function and entry point are in one folder, so neither is
found without the other. It never raises: an error here would break `import torch`.
"""

import os
import sys

SWITCHES = ("SIGHTLINE_MIGRATE", "PT_HPU_GPU_MIGRATION")
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def autoload() -> None:
    """Call the hook of the package that contains this file, if a variable asks for it."""
    if not any(os.environ.get(name) for name in SWITCHES):
        return
    sys.path.insert(0, ROOT)
    try:
        from sightline_migrate import hook
    except Exception as error:  # noqa: BLE001
        print(f"sightline migrate: not active, {error!r}", file=sys.stderr)
        return
    finally:
        sys.path.remove(ROOT)
    hook.autoload()
