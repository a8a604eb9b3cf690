"""Train for long, and write down once a minute what the run holds: a leak shows as a number that keeps growing.

    .venv/bin/python tests/soak.py runs/soak 60    # folder, minutes

One `sightline train` with a loader worker, an evaluation and a background save per epoch of a fraction of a second.
soak.csv in the folder has a row per minute: memory of all processes, descriptors, threads, processes, shared memory.
"""

from __future__ import annotations

import contextlib
import csv
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

FLAGS = """--data.path synthetic:classes=4,samples=64,size=24 --data.classes 4 --data.size 24 --data.eval-size 24
    --data.eval-resize 24 --model.width 4 --train.global-batch 8 --train.precision fp32 --train.epochs 10000000
    --run.threads 1 --run.device cpu --run.workers 1 --run.progress off""".split()
COLUMNS = ("minute", "epochs", "rss_mb", "trainer_rss_mb", "descriptors", "threads", "processes", "shm_files", "run_mb")


def row(minute: float, trainer: psutil.Process, run: Path) -> dict[str, float]:
    """Add up what the trainer and its processes hold now."""
    family = [each for each in (trainer, *trainer.children(recursive=True)) if each.status() != psutil.STATUS_ZOMBIE]
    log = (run / "log.jsonl").read_text() if (run / "log.jsonl").exists() else ""
    mapped = {m.path for p in family for m in p.memory_maps() if "/dev/shm" in m.path or "/torch_" in m.path}
    # log.jsonl grows with every epoch, and must; everything else stays.
    size = sum(path.stat().st_size for path in run.rglob("*") if path.is_file() and path.name != "log.jsonl")
    numbers = (
        round(minute, 1),
        log.count('"event": "evaluate"'),
        round(sum(p.memory_info().rss for p in family) / 2**20, 1),
        round(trainer.memory_info().rss / 2**20, 1),
        sum(p.num_fds() for p in family),
        sum(p.num_threads() for p in family),
        len(family),
        len(mapped),
        round(size / 2**20, 2),
    )
    return dict(zip(COLUMNS, numbers, strict=True))


def main(folder: Path, minutes: float) -> int:
    """Train, look once a minute, stop the run by SIGTERM; return 0 if it ends as it should."""
    folder.mkdir(parents=True, exist_ok=True)
    run = folder / "run"
    words = [sys.executable, "-m", "sightline", "train", "demo_classification", *FLAGS, "--run.out", str(run)]
    process = subprocess.Popen(words)
    began = time.monotonic()
    with (folder / "soak.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        while (passed := (time.monotonic() - began) / 60) < minutes and process.poll() is None:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(psutil.NoSuchProcess):  # one that ended meanwhile: this minute has no row
                    table.writerow(row((time.monotonic() - began) / 60, psutil.Process(process.pid), run))
                file.flush()
    process.send_signal(signal.SIGTERM)
    code = process.wait(120)
    print(f"ended with exit {code} after {passed:.0f} minutes; {folder / 'soak.csv'}")
    return 0 if code == 128 + signal.SIGTERM else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), float(sys.argv[2])))
