"""torchrun itself, as it is started by hand: ranks find each other, and leave once their work is done."""

import os
import runpy
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
finished = runpy.run_path(str(Path(__file__).with_name("started.py")))["finished"]
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
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    path = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))
    said = finished([sys.executable, *words], PYTHONPATH=path)
    assert [f"{rank} [3.0, 3.0, 3.0]" in said for rank in (0, 1)] == [True, True], said
