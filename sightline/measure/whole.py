"""`sightline benchmark RECIPE --whole`: the wall clock of a whole run, from the start of its process to its exit.

Ours and a plain loop (measure/plain_*.py) run in turn as processes of their own, each twice. The first time nothing is
in our cache of compiled code, the second time what the first one left there.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sightline.data.loading.loader import worker_count
from sightline.errors import SightlineError, UsageError
from sightline.files.whole import replace_text
from sightline.hardware import devices
from sightline.hardware.devices import Device
from sightline.hardware.world import World
from sightline.measure.provenance import provenance, result_file
from sightline.recipe import store
from sightline.recipe.recipe import Recipe, Run

Say = Callable[[str], None]
Phases = dict[str, float]  # seconds
ROUNDS = ("first time", "second time")
OURS, PLAIN = "sightline", "plain loop"
# In the order in which they come. The first one ends where the network is built, the second where workers are started.
PHASES = ("import, listing", "workers", "first step", "training", "evaluation", "checkpoints", "report", "leaving")
FILES = ("environment.json", "report.html")  # of a run, written once each
FIRST_STEP = re.compile(r"first step after ([\d.]+) s")


def measure(recipe: Recipe, run: Run, words: Sequence[str], out: Path, say: Say) -> dict[str, Any]:
    """Run `sightline train` with these words, and its peer, in turn; write the times to a file under `out`."""
    out.mkdir(parents=True, exist_ok=True)
    device = devices.select(run.device)
    recipe, run = store.at_absolute_paths(recipe, run)
    peer, why_none = _peer_of(recipe, run, device)
    if why_none:
        say(f"no plain loop beside it: {why_none}")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="sightline-whole-") as folder:
        for number, name in enumerate(ROUNDS):
            rows.append({"name": OURS, "round": name, **_our_run(words, Path(folder), number)})
            say(_as_row(rows[-1]))
            if peer:
                rows.append({"name": PLAIN, "round": name, **_plain_run(peer, Path(folder), number)})
                say(_as_row(rows[-1]))
    now = datetime.now(UTC)
    result = {
        "schema": 1,
        "time": now.isoformat(timespec="seconds"),
        "recipe": recipe.name,
        "device": device.name(),
        "words": list(words),
        "peer": peer or why_none,
        "whole": rows,
        **provenance(device),
    }
    path = result_file(out, f"{recipe.name}-whole", device, now)
    replace_text(path, json.dumps(result, indent=1) + "\n")
    say(f"written to {path}")
    return result


def as_text(result: Mapping[str, Any]) -> str:
    """Format the result for people: a column per run, a row per phase."""
    rows = result["whole"]
    lines = [f"{result['recipe']} on {result['device']}, whole runs, seconds from start to exit of the process"]
    lines.append(f"{'':<16}" + "".join(f"{row['name']:>14}" for row in rows))
    lines.append(f"{'':<16}" + "".join(f"{row['round']:>14}" for row in rows))
    sums = {"to first step": [sum(row["phases"].get(phase, 0.0) for phase in PHASES[:3]) for row in rows]}
    sums["whole"] = [row["whole_s"] for row in rows]
    for phase in (*PHASES, *sums):
        cells = sums.get(phase) or [row["phases"].get(phase) for row in rows]
        lines.append(f"{phase:<16}" + "".join(f"{'' if cell is None else format(cell, '.2f'):>14}" for cell in cells))
    for name in ROUNDS:
        ours, *others = [row["whole_s"] for row in rows if row["round"] == name]
        lines += [f"{name}: ours takes {ours / other:.2f} of the plain loop's time" for other in others]
    return "\n".join(lines)


def _as_row(row: Mapping[str, Any]) -> str:
    parts = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in row["phases"].items())
    return f"{row['name']}, {row['round']}: {row['whole_s']:.2f} s ({parts})"


def _finished(command: Sequence[str], environ: Mapping[str, str], out: Path) -> tuple[float, float, str]:
    """Run a process to its end; return when it started, when it was gone, and what it printed."""
    started = time.time()
    with out.open("w+", encoding="utf-8") as file:
        # To a file: a pipe would also wait for what the process leaves behind.
        code = subprocess.run(command, env=environ, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
        ended = time.time()
        file.seek(0)
        text = file.read()
    if code:
        raise SightlineError(f"`{' '.join(command)}` ended with exit code {code}: {text[-2000:]}")
    return started, ended, text


def _our_run(words: Sequence[str], folder: Path, number: int) -> dict[str, Any]:
    run = folder / f"run-{number}"
    flags = ["--run.out", str(run), "--run.progress", "plain", "--run.resume", "auto"]
    command = [sys.executable, "-m", "sightline", "train", *words, *flags]
    environ = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    started, ended, text = _finished(command, environ, folder / "ours.txt")
    events = [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    written = {name: (run / name).stat().st_mtime for name in FILES if (run / name).exists()}
    return {"whole_s": ended - started, "phases": our_phases(events, written, text, started, ended)}


def our_phases(
    events: Sequence[Mapping[str, Any]], written: Mapping[str, float], printed: str, started: float, ended: float
) -> Phases:
    """Return where the time went, from the log of a run, when it wrote FILES, what it printed, and when its process
    began and ended."""
    built, reported = written["environment.json"], written.get("report.html")
    at = {event["event"]: event["time"] for event in reversed(events)}  # the first of each
    last = events[-1]["time"]
    found = FIRST_STEP.search(printed)
    first_s = float(found[1]) if found else 0.0
    training = sum(event["seconds"] for event in events if event["event"] == "epoch")
    begun = [event["time"] for event in events if event["event"] == "evaluate_begin"]
    evaluated = [event["time"] for event in events if event["event"] == "evaluate_end"]
    evaluation = sum(evaluated) - sum(begun)
    return {
        "import, listing": built - started,
        "workers": at["start"] - built,
        "first step": first_s,
        "training": training - first_s,
        "evaluation": evaluation,
        "checkpoints": last - at["start"] - training - evaluation,
        "report": reported - last if reported else 0.0,
        "leaving": ended - (reported or last),
    }


def _plain_run(options: Mapping[str, Any], folder: Path, number: int) -> dict[str, Any]:
    marks = folder / f"marks-{number}"
    given = {**options, "marks": str(marks), "checkpoint": str(folder / "plain.pt")}
    (folder / "options.json").write_text(json.dumps(given), encoding="utf-8")
    command = [sys.executable, "-m", options["module"], str(folder / "options.json")]
    started, ended, _ = _finished(command, os.environ, folder / "plain.txt")
    seen = json.loads(marks.read_text(encoding="utf-8"))
    return {"whole_s": ended - started, "phases": plain_phases(seen, started, ended)}


def plain_phases(marks: Sequence[Mapping[str, Any]], started: float, ended: float) -> Phases:
    """Return where the time of a plain loop went, from the ends of its phases."""
    phases: Phases = {}
    before = started
    for mark in marks:
        phase = PHASES[0] if mark["phase"] in ("import", "listing") else mark["phase"]
        phases[phase] = phases.get(phase, 0.0) + mark["time"] - before
        before = mark["time"]
    return {**phases, "leaving": ended - before}


def _peer_of(recipe: Recipe, run: Run, device: Device) -> tuple[dict[str, Any], str]:
    """Return the arguments of the plain loop of such a recipe; or {} and why there is none."""
    named = importlib.import_module(f"sightline.measure.peers_{recipe.task.peers}") if recipe.task.peers else None
    plain_loop = getattr(named, "plain_loop", None)
    if plain_loop is None:
        return {}, f"there is none for {type(recipe.task.build()).__name__}"
    try:
        options = plain_loop(recipe)
    except UsageError as error:
        return {}, str(error)
    return {
        **options,
        "module": f"sightline.measure.plain_{recipe.task.peers}",
        "epochs": recipe.train.epochs,
        "precision": device.precision_of(recipe),
        "device": str(device.torch_device),
        "workers": worker_count(run.workers, device, World()),
    }, ""
