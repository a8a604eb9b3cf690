"""Runs a row of the table of published scores as its protocol says, and writes what came out.

    python benchmarks/published/run.py cifar10_94 --data DIR
    python benchmarks/published/run.py cifar10_94 --data DIR --peer CLONE    # the peer of the row too

protocol.toml beside this file fixes every row: the data and their split, the command, the seeds, the metric, what is
timed, and the published figure. A row is a whole command for each seed, one after another, each a process of its own.
`--held-out` is for development: nothing is scored on the test set, a tenth of the training images is instead.
Writes the raw file after every run, so that a row which is cut short, by `--within SECONDS` too, loses nothing.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from peer import HELD_OUT, run_peer

from sightline.hardware import devices
from sightline.measure.provenance import provenance, result_file

HERE = Path(__file__).resolve().parent
SIGHTLINE = [sys.executable, "-P", "-m", "sightline"]  # the one that is imported here, whose commit is written down


def rows() -> dict[str, dict[str, Any]]:
    """Return the rows of the protocol."""
    return tomllib.loads((HERE / "protocol.toml").read_text(encoding="utf-8"))


def described(row: dict[str, Any], data: Path, held_out: bool, work: Path) -> Path:
    """Write a description of the data: which folder trains and which is scored. Returns its path."""
    places = {split: str((data / row["splits"][split]).resolve()) for split in ("train", "val")}
    if held_out:
        del places["val"]
    path = work / "data.yaml"
    path.write_text(
        "\n".join([f"kind: {row['kind']}", *(f"{split}: {json.dumps(place)}" for split, place in places.items())])
        + "\n"
    )
    return path


def trained(row: dict[str, Any], data: Path, seed: int, out: Path, extra: Sequence[str]) -> dict[str, Any]:
    """Train with a seed as a user types it; return its score and its seconds, phase by phase."""
    words = ["train", *shlex.split(row["command"].format(here=HERE)), "--data.path", str(data), *extra]
    words += ["--train.seed", str(seed), "--run.out", str(out)]
    started, began = time.perf_counter(), time.time()
    code = call([*SIGHTLINE, *words], out.with_suffix(".log"))
    seconds = time.perf_counter() - started
    if code:
        return {"seed": seed, "error": f"exit code {code}: ...{end_of(out.with_suffix('.log'))}"}
    return {"seed": seed, "seconds": seconds, **read_log(out / "log.jsonl", row["metric"], began, seconds)}


def read_log(path: Path, metric: str, began: float, seconds: float) -> dict[str, Any]:
    """Return the score of a run, and where its seconds went: before training, training (of that the epochs after the
    first, which has the first step), the last evaluation, and the rest, in which the report is written."""
    events = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    last = {event["event"]: event for event in events}
    at = {name: last[name]["time"] - began for name in ("start", "evaluate_begin", "evaluate")}
    epochs = [event for event in events if event["event"] == "epoch"]
    return {
        metric: last["evaluate"][metric],
        "setup_s": at["start"],
        "training_s": at["evaluate_begin"] - at["start"],
        "later_epochs_s": sum(event["seconds"] for event in epochs[1:]),
        "epochs": len(epochs),
        "images_per_s": epochs[-1]["images_per_s"],
        "evaluation_s": at["evaluate"] - at["evaluate_begin"],
        "end_s": seconds - at["evaluate"],
    }


def call(words: Sequence[str], log: Path, within: float | None = None, folder: Path | None = None) -> int:
    """Run a command, its output in a file; return its exit code."""
    with log.open("w", encoding="utf-8") as output:
        output.write(f"$ {shlex.join(words)}\n")
        output.flush()
        try:
            done = subprocess.run(
                words, stdout=output, stderr=output, stdin=subprocess.DEVNULL, timeout=within, cwd=folder
            )
        except subprocess.TimeoutExpired:
            return -1
    return done.returncode


def end_of(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-1000:]


def measured(args: argparse.Namespace, row: dict[str, Any], deadline: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the runs of both contenders as they come."""
    args.work.mkdir(parents=True)
    data = described(row, args.data, args.held_out, args.work)
    extra = ["--data.val-fraction", str(HELD_OUT)] if args.held_out else []
    seeds = args.seeds or range(row["seeds"])
    if args.peer:
        end, runs = min(deadline, time.monotonic() + args.peer_within), args.peer_runs or len(seeds)
        for each in run_peer(row["peer"], args.peer, data, args.work / "peer", runs, end):
            yield row["peer"]["name"], each
    for seed in seeds:
        if time.monotonic() >= deadline:
            return
        yield "sightline", trained(row, data, seed, args.work / f"seed-{seed}", [*extra, *args.flags])


def summary(runs: list[dict[str, Any]], metric: str) -> dict[str, Any]:
    """Return mean and spread of the score and of what is timed."""
    found: dict[str, Any] = {"runs": len(runs)}
    for name in (metric, "seconds", "training_s"):
        values = [each[name] for each in runs if name in each]
        if values:
            found[name] = {"mean": statistics.mean(values), "min": min(values), "max": max(values)}
            found[name] |= {"sd": statistics.stdev(values)} if len(values) > 1 else {}
    return found


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; what is not known here are flags of `sightline train`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ready = [name for name, row in rows().items() if "command" in row]
    parser.add_argument("row", choices=ready)
    parser.add_argument("--data", type=Path, required=True, help="the folder that `data` of the row describes")
    parser.add_argument("--peer", type=Path, help="a clone of the peer's repository: it runs on the same data")
    parser.add_argument("--peer-runs", type=int, default=0, help="runs of the peer; 0: as many as seeds")
    parser.add_argument("--peer-within", type=float, default=float("inf"), help="seconds after which the peer is ended")
    parser.add_argument("--seeds", type=int, nargs="+", help="instead of those of the row")
    parser.add_argument("--held-out", action="store_true", help="score a tenth of the training images")
    parser.add_argument("--within", type=float, default=float("inf"), help="seconds after which nothing is started")
    parser.add_argument("--work", type=Path, default=Path("runs/published"), help="folder for runs; must be new")
    parser.add_argument("--out", type=Path, default=HERE.parent / "results")
    args, flags = parser.parse_known_args(argv)
    args.flags = flags
    if args.work.exists():
        parser.error(f"--work {args.work} exists; its runs would be resumed")
    for split in rows()[args.row]["splits"].values():
        if not (args.data / split).exists():
            parser.error(f"{args.data / split} does not exist; --data is {rows()[args.row]['data']}")
    return args


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Carry out a row, print it beside the published figures, and write the raw file."""
    args = arguments(argv)
    row, now, started = rows()[args.row], datetime.now(UTC), time.perf_counter()
    device = devices.select("auto")
    args.out.mkdir(parents=True, exist_ok=True)
    path = result_file(args.out, f"published-{args.row}", device, now)
    result: dict[str, Any] = {"time": now.isoformat(timespec="seconds"), "row": args.row, "protocol": row}
    result |= {"held_out": args.held_out, "flags": args.flags, **provenance(device), "results": {}}
    runs: dict[str, list[dict[str, Any]]] = {}
    for name, each in measured(args, row, time.monotonic() + args.within):
        runs.setdefault(name, []).append(each)
        result["results"] = {who: {**summary(its, row["metric"]), "each": its} for who, its in runs.items()}
        result["seconds"] = time.perf_counter() - started
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(
            name,
            *(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in each.items()),
        )
        sys.stdout.flush()
    show(row, result["results"])
    print(f"{result.get('seconds', 0):.0f} s on {device.name()}; written to {path}")
    return result


def show(row: dict[str, Any], results: dict[str, Any]) -> None:
    """Print the published figures, and what was measured beside them."""
    for each in row["published"]:
        print(f"published: {each['who']}  {each['score']}  {each.get('seconds', '-')} s  {each['on']}")
    for name, found in results.items():
        if score := found.get(row["metric"]):
            command = f", {found['seconds']['mean']:.1f} s the whole command" if "seconds" in found else ""
            trained_s = f"{found['training_s']['mean']:.2f} s of training"
            print(f"{name}: {score['mean']:.4f} ± {score.get('sd', 0):.4f} of {found['runs']}, {trained_s}{command}")


if __name__ == "__main__":
    sys.exit(any("error" in each for found in main()["results"].values() for each in found["each"]))
