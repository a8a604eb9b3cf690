"""`sightline average`: one checkpoint from several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sightline.commands.words import parser_of


def average(flags: Sequence[str]) -> None:
    """Average the weights of checkpoints into a new one: `sightline average runs/resnet50 --out DIR`"""
    parser = parser_of("average", average)
    parser.add_argument("checkpoints", type=Path, nargs="+", help="ckpt-* folders, or a run folder for all it keeps")
    parser.add_argument("--out", type=Path, required=True, help="folder of the new checkpoint")
    arguments = parser.parse_args(flags)
    from sightline.engine import checkpoint
    from sightline.train import averaging

    paths = [path for given in arguments.checkpoints for path in checkpoint.all_of(given)]
    averaging.average_checkpoints(paths, arguments.out)
    print(f"averaged {', '.join(path.name for path in paths)} into {arguments.out}")
