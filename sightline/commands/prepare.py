"""`sightline prepare KIND`: data for training from raw files, or drawn; data/prepare/ does the work."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from pathlib import Path
from typing import get_type_hints

from sightline import plugins
from sightline.commands.words import parser_of
from sightline.errors import UsageError

PREPARE = Path(__file__).parents[1] / "data" / "prepare"


def prepare(flags: Sequence[str]) -> None:
    """Prepare, convert or draw data for training: `sightline prepare shapes --out DIR`"""
    known = sorted(m.name for m in pkgutil.iter_modules([str(PREPARE)]) if not m.name.startswith("_"))
    if flags and flags[0] in ("-h", "--help"):
        parser_of("prepare", prepare, f"{{{','.join(known)}}} [options]").print_help()
        return
    is_ours = flags[:1] and flags[0] in known
    if not flags or not (is_ours or plugins.has("preparations", flags[0])):
        available = ", ".join(known) + plugins.also_known("preparations")
        raise UsageError(f"prepare what? Available: {available}; e.g. `sightline prepare shapes --out DIR`")
    from sightline.recipe.options import parse_options

    ours = f"sightline.data.prepare.{flags[0]}"
    module = importlib.import_module(ours) if is_ours else plugins.load("preparations", flags[0])
    options = parse_options(get_type_hints(module.prepare)["options"], flags[1:], prog=f"sightline prepare {flags[0]}")
    from sightline.terminal.progress import shown_progress

    with shown_progress() as progress:
        counts = module.prepare(options, progress)
    if describe := getattr(module, "describe", None):
        print(describe(counts, options.out))
        return
    told = ", ".join(f"{name} {count}" for name, count in counts.items())
    print(f"{flags[0]}: {told} in {options.out}")
