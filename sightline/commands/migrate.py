"""`sightline migrate`: an unmodified CUDA script on another device; packages/migrate does the work."""

from __future__ import annotations

from collections.abc import Sequence


def migrate(flags: Sequence[str]) -> None:
    """Run an unmodified CUDA script on another device: `sightline migrate --target cpu script.py`"""
    from sightline.migrate import cli

    code = cli.main(flags)
    if code:
        raise SystemExit(code)
