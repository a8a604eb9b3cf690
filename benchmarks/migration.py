"""The cost of migration: nanoseconds per call that is replaced and that is not, and a ResNet-50 step, on and off.

    python benchmarks/migration.py                                  # about two minutes on one core
    python benchmarks/migration.py --rounds 5 --size 64 --batch 2   # a quick look

Migration is turned on and off in turn in one process, so that both sides see the same machine; medians of the rounds
with the smallest and the largest. The clock is the process's own CPU time, without other processes. "off" asks
for the device "cpu", "on" for "cuda"; all work is done by the CPU, in one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torchvision

from sightline import migrate
from sightline.hardware import devices
from sightline.measure.provenance import provenance, result_file

CALLS_PER_ROUND = 20_000
X = torch.ones(4)
Call = Callable[[str], Any]

# Named as users write them; each looks its function up on every call, as a script does.
REPLACED: dict[str, Call] = {
    "torch.ones(4)": lambda device: torch.ones(4),
    "torch.ones(4, device=...)": lambda device: torch.ones(4, device=device),
    "x.to(device)": lambda device: X.to(device),  # a host tensor: a copy, as on a GPU
    "x.to(x.device)": lambda device: X.to(X.device),
    "x.to(torch.float32)": lambda device: X.to(torch.float32),
    "torch.cuda.is_available()": lambda device: torch.cuda.is_available(),
}
UNTOUCHED: dict[str, Call] = {
    "torch.add(x, x)": lambda device: torch.add(X, X),
    "x.relu()": lambda device: X.relu(),
    "torch.nn.functional.relu(x)": lambda device: torch.nn.functional.relu(X),
    "x.item()": lambda device: X[0].item(),
}


def ns_per_call(call: Call, device: str, calls: int) -> float:
    begin = time.process_time_ns()
    for _ in range(calls):
        call(device)
    return (time.process_time_ns() - begin) / calls


def build_step(size: int, batch: int) -> Callable[[str], None]:
    """Build a plain training step in torchvision's reference style, moves to the device included."""
    torch.manual_seed(0)
    model = torchvision.models.resnet50()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images, labels = torch.randn(batch, 3, size, size), torch.randint(0, 1000, (batch,))
    criterion = torch.nn.CrossEntropyLoss()

    def step(device: str) -> None:
        model.to(device)
        there, target = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        loss = criterion(model(there), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()

    return step


def measure(rounds: int, calls: int, size: int, batch: int) -> list[dict[str, Any]]:
    """Return every row with all its rounds, off and on in turn; the first round warms up and does not count."""
    rows: dict[str, dict[str, Any]] = {}
    step = build_step(size, batch)
    for at in range(rounds + 1):
        # Which side comes first changes from round to round.
        for is_on in (False, True) if at % 2 else (True, False):
            if is_on:
                migrate.activate(target="cpu")
            device = "cuda" if is_on else "cpu"
            timed = {name: ns_per_call(call, device, calls) for name, call in (REPLACED | UNTOUCHED).items()}
            step(device)  # the first one copies the model, and writes the records
            timed["step"] = ns_per_call(step, device, 1)
            if is_on:
                migrate.deactivate()
            for name, ns in timed.items():
                row = rows.setdefault(name, {"what": name, "is_replaced": name in REPLACED, "off": [], "on": []})
                if at:
                    row["on" if is_on else "off"].append(ns)
    return list(rows.values())


def as_row(row: dict[str, Any]) -> str:
    """Format a line of the table in docs/reference/migration_reference.md; the step in milliseconds."""
    scale, digits = (1e6, 1) if row["what"] == "step" else (1, 0)
    off, on = ([value / scale for value in row[side]] for side in ("off", "on"))
    cells = [
        f"{statistics.median(side):.{digits}f} [{min(side):.{digits}f}, {max(side):.{digits}f}]" for side in (off, on)
    ]
    change = statistics.median(on) - statistics.median(off)
    return f"| {row['what']} | {' | '.join(cells)} | {change:+.{digits}f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--calls", type=int, default=CALLS_PER_ROUND, help="calls per round and row")
    parser.add_argument("--size", type=int, default=128, help="height and width of the step's images")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    if torch.cuda.is_available():
        parser.error("measures target cpu beside plain cpu; hide the CUDA devices: CUDA_VISIBLE_DEVICES= (empty)")
    torch.set_num_threads(1)
    device, now = devices.select("cpu"), datetime.now(UTC)
    found = provenance(device)
    rows = measure(args.rounds, args.calls, args.size, args.batch)
    print("| call, ns | off | on | more |\n|---|---|---|---|")
    for row in rows[:-1]:
        print(as_row(row))
    print(f"\n| ResNet-50 step, batch {args.batch}, {args.size} px, ms | off | on | more |\n|---|---|---|---|")
    print(as_row(rows[-1]))
    result = {"time": now.isoformat(timespec="seconds"), "device": device.name(), **vars(args), "rows": rows, **found}
    args.out.mkdir(parents=True, exist_ok=True)
    path = result_file(args.out, "migration", device, now)
    path.write_text(json.dumps(result | {"out": str(args.out)}, indent=1) + "\n", encoding="utf-8")
    print(f"\nwritten to {path}")


if __name__ == "__main__":
    main()
