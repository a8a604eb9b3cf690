"""How a process of several ranks ends once its work is done."""

import os
import socket
import subprocess
import sys

LEAVES = """
import sys
import torch
from sightline.hardware import devices, world

sys.setswitchinterval(60)  # the other threads get the interpreter only where this one waits
device = devices.select("cpu", 0)
here = world.connect(world.detect(), device)
network = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))  # holds the group, as the step does
for _ in range(4):
    here.sum(torch.ones(3))
here.close()
"""


def test_ranks_leave_without_an_abort():
    """gloo's threads drop the tensors of the last collective in their own time, for which they need the interpreter."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    common = {**os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = [
        subprocess.Popen([sys.executable, "-c", LEAVES], env={**common, "RANK": rank, "LOCAL_RANK": rank})
        for rank in ("0", "1")
    ]
    assert [process.wait(100) for process in started] == [0, 0]
