"""How a process of several ranks ends once its work is done."""

import runpy
import sys
from pathlib import Path

finished = runpy.run_path(str(Path(__file__).with_name("started.py")))["finished"]
LEAVES = """
import sys
import torch
from sightline.hardware import devices, world

sys.setswitchinterval(60)  # the other threads get the interpreter only where this one waits
here = world.connect(world.detect(), devices.select("cpu", 0))
network = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))  # holds the group, as the step does
for _ in range(4):
    here.sum(torch.ones(3))
here.close()
"""


def test_ranks_leave_without_an_abort(tmp_path: Path):
    """gloo's threads drop the tensors of the last collective in their own time, for which they need the interpreter."""
    script = tmp_path / "leaves.py"
    script.write_text(LEAVES)
    finished([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)])
