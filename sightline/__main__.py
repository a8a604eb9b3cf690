"""`python -m sightline`, and the command `sightline`."""

import os
import sys

try:  # an earlier Ctrl-C meets Python, which is still starting and prints its own traceback
    import multiprocessing

    from sightline import terminal
    from sightline.cli import main
    from sightline.hardware import early_cuda
except KeyboardInterrupt:  # later ones are answered by main()
    try:
        os.write(2, b"stopped by Ctrl-C\n")
    finally:  # also where stderr is closed
        os._exit(130)  # sys.exit may end by the signal instead: Python remembers one that came within exec()


def run() -> None:
    """Run the command that was typed, and end the process. A migrated script ends as Python does, and so does a process
    of somebody's multiprocessing, which waits for word from it."""
    code = main()
    leaves = code == 130 or "torch" in sys.modules or early_cuda.has_begun()
    if leaves and sys.argv[1:2] != ["migrate"] and multiprocessing.parent_process() is None:
        terminal.leave(code)
    sys.exit(code)


if __name__ == "__main__":
    run()
