"""Ranks that end as a script of a user's own ends: by the end of the interpreter, once their work is done."""

from pathlib import Path

import warm

LEAVES = """
import os
import sys
import torch
from sightline.hardware import devices, world

sys.setswitchinterval(60)  # the other threads get the interpreter only where this one waits
here = world.connect(world.detect(), devices.select("cpu", 0))
group = torch.distributed.group.WORLD  # held, as DDP does in a step
said = f"{here.rank} {here.sum(torch.full((3,), here.rank + 1.0)).tolist()}\\n"
os.write(1, said.encode())  # at once: print() writes word by word, between those of the other rank
for _ in range(3):
    here.sum(torch.ones(3))
here.close()
"""


def test_ranks_leave_without_an_abort(tmp_path: Path):
    """gloo's threads drop the tensors of the last collective in their own time, for which they need the interpreter."""
    script = tmp_path / "leaves.py"
    script.write_text(LEAVES)
    said = warm.run_words(["script", script], 2)
    assert [f"{rank} [3.0, 3.0, 3.0]" in said for rank in (0, 1)] == [True, True], said
