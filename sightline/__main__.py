"""`python -m sightline`, and the command `sightline`."""

import sys

from sightline import terminal
from sightline.cli import main


def run() -> None:
    """Run the command that was typed, and end the process; a migrated script ends it as Python does."""
    code = main()
    if "torch" in sys.modules and sys.argv[1:2] != ["migrate"]:
        terminal.leave(code)
    sys.exit(code)


if __name__ == "__main__":
    run()
