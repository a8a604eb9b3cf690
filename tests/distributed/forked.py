"""Starts ranks that run main(out) of a test file, as torchrun would: forked, so that torch is imported only once.

python tests/distributed/forked.py FILE OUT RANKS [RANKS_PER_HOST]
"""

import importlib
import os
import runpy
import signal
import socket
import sys
import traceback
from pathlib import Path

import torch


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start(file: str, out: Path, ranks: int, per_host: int) -> int:
    """Whether all of them ended well, as an exit code."""
    main = runpy.run_path(file)["main"]
    importlib.import_module("torch._dynamo")  # the first step of an optimizer would
    common = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": per_host, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    children = set()
    for rank in range(ranks):
        if child := os.fork():
            children.add(child)
            continue
        names = {**common, "RANK": rank, "LOCAL_RANK": rank % per_host}
        os.environ.update({name: str(value) for name, value in names.items()})
        code = 1
        try:
            main(out)
            code = 0
        finally:
            if code:
                traceback.print_exc()
            os._exit(code)
    while children:
        child, status = os.wait()
        children.discard(child)
        if status:  # the others would wait for it
            for other in children:
                os.kill(other, signal.SIGKILL)
            return 1
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    count = int(sys.argv[3])
    sys.exit(start(sys.argv[1], Path(sys.argv[2]), count, int(sys.argv[4]) if len(sys.argv) > 4 else count))
