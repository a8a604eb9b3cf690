"""Carry out the commands that benchmarks/own_data.py --warm sends, one after another in this process.

A line of stdin is {"words": [...], "log": FILE}: words of `sightline`, or `loop` and those of plain_loops.py. The
answer is the exit code in a line of stdout. What the first command loads and tunes is there for the next.
"""

from __future__ import annotations

import json
import os
import sys
import traceback

import plain_loops

from sightline import cli


def carry_out(words: list[str]) -> int:
    """Run one command; return its exit code."""
    try:
        if words[0] == "loop":
            plain_loops.main(words[1:])
            return 0
        return cli.main(words)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    except Exception:  # noqa: BLE001  # of any kind: the next command is another
        traceback.print_exc()
        return 1


def main() -> None:
    """Answer until there is no further line."""
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        asked = json.loads(line)
        log = os.open(asked["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        code = carry_out(asked["words"])
        sys.stdout.flush()
        sys.stderr.flush()
        print(code, file=answers, flush=True)


if __name__ == "__main__":
    main()
