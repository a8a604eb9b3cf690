"""What a recipe reaches on a folder of one's own, beside other recipes and a plain loop of equal time, seed by seed.

    python benchmarks/own_data.py classification SET ... --weights tf_efficientnet_lite0.safetensors --parallel 4
    python benchmarks/own_data.py segmentation SET --recipe demo_segmentation
    python benchmarks/own_data.py classification SET --runs new="classification --weights FILE" a="loop --lr 3e-4"

SET has `train` and `test`: class folders; `annotations.json` and `images` (COCO); or `images` and `masks`. All train on
SET/train alone; a recipe that selects takes its val split from there. The checkpoint that `evaluate` takes, or the last
weights of a loop (plain_loops.py), are scored on SET/test. Each command runs as it is typed, and the loop has the
seconds that the first contender's command took with the same seed. `--parallel N` runs N at a time, each on its share
of the cores; loops start as soon as their time is known, so that both have about as many neighbours. `--warm` gives
each contender one process for all its runs (warm.py), with its share of the cores, and all work at once, seed after
seed. A short run before them, which does not count, imports, starts CUDA and loads what it needs. Prints a table, and
writes the result after every run, so that a benchmark which is cut short, by `--within SECONDS` or otherwise, loses
nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from sightline.hardware import devices
from sightline.measure.provenance import provenance, result_file

LOOP, MASK = "loop", "_mask.png"
# The first is measured, the second has its time. {prepared} is what `prepare decathlon` makes of SET/train.
RUNS = {
    "classification": {
        "{recipe}": "{recipe} --weights {weights}",
        "timm loop": LOOP + " --weights {weights}",
        "finetune_classification": "finetune_classification --model.arch timm:{network} --weights {weights}",
        "{recipe}, no weights": "{recipe} --weights none",
        "demo_classification": "demo_classification",
    },
    "detection": {
        "{recipe}": "{recipe}",
        "torchvision loop": LOOP,
        "finetune_detection": "finetune_detection",
        "demo_detection": "demo_detection",
    },
    "segmentation": {
        "{recipe}": "{recipe} --weights {weights}",
        "FCN loop": LOOP + " --weights {weights}",
        "torchvision loop": LOOP,
        "demo_segmentation": "demo_segmentation --data {prepared} --data.task own",
    },
}
SCORES = {"classification": "top1", "detection": "ap", "segmentation": "miou"}
SMOKE = ["--epochs", "2", "--train.min-epoch-steps", "0"]
LOOP_WARM_UP_S = 20.0  # imports are in it


@dataclass(eq=False)
class Job:
    """One training and its score."""

    data: Path
    name: str
    words: list[str]
    seed: int
    folder: Path
    after: Job | None  # whose seconds a loop has
    row: dict[str, Any] = field(default_factory=dict)
    process: subprocess.Popen[str] | None = None  # that carries out all commands of a contender

    @property
    def is_ready(self) -> bool:
        return self.after is None or bool(self.after.row)


def run(job: Job, task: str, smoke: bool, cores: list[int]) -> None:
    """Train, score and fill the row; what goes wrong stands in it, because the other runs are worth their time."""
    job.folder.mkdir(parents=True)
    try:
        if job.words[0] == LOOP:
            job.row = {"seed": job.seed, **loop(job, task, cores)}
        else:
            job.row = {"seed": job.seed, **recipe(job, task, smoke, cores)}
    except (OSError, ValueError, KeyError) as error:
        job.row = {"seed": job.seed, "error": str(error)}


def recipe(job: Job, task: str, smoke: bool, cores: list[int]) -> dict[str, Any]:
    """Train as a user types it, then score."""
    words, out, test = list(job.words), job.folder / "run", job.data / "test"
    if "{prepared}" in words:
        prepared = job.folder / "prepared"
        call(
            job,
            [*SIGHTLINE, "prepare", "decathlon", "--source", str(job.data / "train"), "--out", str(prepared)],
            cores,
        )
        words[words.index("{prepared}")] = str(prepared)
    elif "--data" not in words:  # else it has a form of SET/train that was made before
        words += ["--data", str(job.data / "train")]
    words += ["--train.seed", str(job.seed), "--run.out", str(out), *(SMOKE if smoke else [])]
    seconds = call(job, [*SIGHTLINE, "train", *words], cores)
    said = [line for line in (job.folder / "log.txt").read_text(encoding="utf-8").splitlines() if "chosen:" in line]
    if task == "segmentation":
        seen = job.folder / "seen"
        call(job, [*SIGHTLINE, "predict", str(out), str(test / "images"), "--out", str(seen)], cores)
        scores = overlap(test / "masks", seen)
    else:
        call(job, [*SIGHTLINE, "evaluate", str(out), "--data.path", str(test), "--run.progress", "off"], cores)
        [path] = out.glob("scores-ckpt-*.json")
        scores = json.loads(path.read_text(encoding="utf-8"))["values"]
    return {"seconds": seconds, **scores, "said": said}


def loop(job: Job, task: str, cores: list[int]) -> dict[str, Any]:
    """Train with a plain loop for as long as another took."""
    assert job.after is not None
    if "seconds" not in job.after.row:
        raise ValueError(f"no time is known, because {job.after.name} failed")
    given, out, seen = job.after.row["seconds"], job.folder / "scores.json", job.folder / "seen"
    words = [*PLAIN_LOOPS, task, *job.words[1:]]
    words += [f"--data={job.data / 'train'}", f"--test={job.data / 'test'}", f"--seed={job.seed}"]
    words += [f"--workers={max(1, len(cores) - 1)}", f"--out={out}", f"--masks={seen}"]
    words += [f"--seconds={given}", f"--started={time.time()}"]
    whole = call(job, words, cores)
    scores = json.loads(out.read_text(encoding="utf-8"))
    if task == "segmentation":
        scores |= overlap(job.data / "test/masks", seen)
    return {"seconds": given, "seconds_with_score": whole, **scores}


SIGHTLINE = [sys.executable, "-P", "-m", "sightline"]  # the one that is imported here, whose commit is written down
PLAIN_LOOPS = [sys.executable, str(Path(__file__).with_name("plain_loops.py"))]


def call(job: Job, words: Sequence[str], cores: list[int]) -> float:
    """Run a command on some cores; return its seconds. ValueError with the end of its output."""
    started, path = time.perf_counter(), job.folder / "log.txt"
    with path.open("a", encoding="utf-8") as log:
        log.write(f"$ {shlex.join(words)}\n")
        log.flush()
        if job.process:
            code = asked(job.process, words, path)
        else:
            process = subprocess.Popen(words, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            keep_to(process, cores)
            code = process.wait()
    if code:
        raise ValueError(f"exit code {code}: ...{path.read_text(encoding='utf-8', errors='replace')[-1000:]}")
    return time.perf_counter() - started


def asked(process: subprocess.Popen[str], words: Sequence[str], log: Path) -> int:
    """Let warm.py carry out a command; return its exit code."""
    assert process.stdin and process.stdout
    is_loop = list(words[: len(PLAIN_LOOPS)]) == PLAIN_LOOPS
    own = [LOOP, *words[len(PLAIN_LOOPS) :]] if is_loop else words[len(SIGHTLINE) :]
    process.stdin.write(json.dumps({"words": list(own), "log": str(log)}) + "\n")
    process.stdin.flush()
    return int(process.stdout.readline() or 1)


def keep_to(process: subprocess.Popen[Any], cores: list[int]) -> None:
    """Give a process its cores before it looks at them."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(process.pid, cores)


def overlap(truth: Path, seen: Path) -> dict[str, float]:
    """Return the mean over classes of intersection over union, and of Dice but for the background, of all pixels that
    count: 255 does not, except beside 0 alone."""
    counts = np.zeros((256, 256), dtype=np.int64)
    for path in sorted(truth.glob("*.png")):
        wanted, found = (np.array(Image.open(each)) for each in (path, seen / f"{path.stem}{MASK}"))
        np.add.at(counts, (wanted.ravel(), found.ravel()), 1)
    if counts[1:255].any():
        counts[255] = 0
    both, sums = counts.diagonal(), counts.sum(0) + counts.sum(1)
    there = counts.sum(1) > 0
    dice = 2 * both[there] / sums[there]
    return {"miou": float((dice / (2 - dice)).mean()), "dice": float(dice[1:].mean())}


def jobs_of(args: argparse.Namespace) -> list[Job]:
    """Return the jobs in the order in which they may start: those that give others their time first, then these."""
    given: dict[str, str] = {}
    known = {"recipe": args.recipe or args.task, "prepared": "{prepared}"}
    known |= {"weights": args.weights or "none", "network": Path(args.weights or "").stem}
    if args.runs:
        given = dict(each.split("=", 1) for each in args.runs)
    else:
        for name, words in RUNS[args.task].items():
            given.setdefault(name.format(**known), words.format(**known))
    waves: list[list[Job]] = [[], [], []]
    for data in args.sets:
        firsts: dict[int, Job] = {}
        for place, (name, words) in enumerate(given.items()):
            for seed in args.seeds:
                folder = args.work / data.name / f"{place}-{seed}"
                split = shlex.split(words)
                after = firsts[seed] if split[0] == LOOP else None
                job = Job(data, name, split, seed, folder, after)
                firsts.setdefault(seed, job)
                waves[0 if place == 0 else 1 if after else 2].append(job)
    return [job for wave in waves for job in wave]


def carry_out(jobs: list[Job], args: argparse.Namespace, write: Any) -> None:
    """Run N jobs at a time, each on its own cores."""
    cores = available_cores()
    share = max(1, len(cores) // args.parallel)
    free = [cores[place * share % len(cores) :][:share] for place in range(args.parallel)]
    waiting, running = list(jobs), dict[Future[None], tuple[Job, list[int]]]()
    with ThreadPoolExecutor(args.parallel) as pool:
        while waiting or running:
            while free and (job := next((each for each in waiting if each.is_ready), None)):
                waiting.remove(job)
                slot = free.pop()
                running[pool.submit(run, job, args.task, args.smoke, slot)] = (job, slot)
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                job, slot = running.pop(done)
                done.result()
                free.append(slot)
                report(job, args.task)
                write()


def carry_out_warm(jobs: list[Job], args: argparse.Namespace, write: Any) -> None:
    """Run the contenders side by side, each in one process on its share of the cores, seed after seed."""
    cores, end = available_cores(), time.monotonic() + (args.within or float("inf"))
    names = list(dict.fromkeys(job.name for job in jobs))
    share, lock = max(1, len(cores) // len(names)), threading.Lock()
    processes = []

    def warm_up(name: str, process: subprocess.Popen[str]) -> Job:
        like = next(job for job in jobs if job.name == name)
        known = Job(like.data, name, [], 0, like.folder, None, {"seconds": LOOP_WARM_UP_S})
        folder = args.work / "warm_up" / like.folder.name
        return Job(like.data, name, like.words, like.seed, folder, known, process=process)

    def work(name: str, own: list[int]) -> None:
        words = [sys.executable, str(Path(__file__).with_name("warm.py"))]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        keep_to(process, own)
        processes.append(process)
        run(warm_up(name, process), args.task, True, own)
        for job in sorted((job for job in jobs if job.name == name), key=lambda job: job.seed):
            while not job.is_ready and time.monotonic() < end:
                time.sleep(0.1)
            if time.monotonic() >= end:
                break
            job.process = process
            run(job, args.task, args.smoke, own)
            if time.monotonic() >= end and "error" in job.row:  # its process was killed
                job.row = {}
                break
            with lock:
                report(job, args.task)
                write()

    pool = [
        threading.Thread(target=work, args=(name, cores[place * share % len(cores) :][:share]), daemon=True)
        for place, name in enumerate(names)
    ]
    for each in pool:
        each.start()
    for each in pool:
        each.join(max(0.0, end - time.monotonic()) if args.within else None)
    for process in processes:
        process.kill()


def available_cores() -> list[int]:
    """Return the numbers of the cores that may be used."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def report(job: Job, task: str) -> None:
    """Print a line about a finished run."""
    score = job.row.get(SCORES[task])
    shown = f"{score:.4f}  {job.row['seconds']:6.1f} s" if score is not None else job.row["error"]
    print(f"{job.data.name:16} {job.name:28} seed {job.seed}  {shown}", flush=True)


def results(jobs: list[Job], score: str) -> dict[str, Any]:
    """Return for every set and contender its rows, the mean of the score, its standard deviation, and mean seconds."""
    found: dict[str, Any] = {}
    for job in jobs:
        group = found.setdefault(job.data.name, {}).setdefault(job.name, {"words": shlex.join(job.words), "rows": []})
        if job.row:
            group["rows"].append(job.row)
    for group in (each for groups in found.values() for each in groups.values()):
        rows = [row for row in group["rows"] if score in row]
        values = [row[score] for row in rows]
        if rows:
            group["mean"], group["sd"] = statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0
            group["seconds"] = statistics.mean(row["seconds"] for row in rows)
    return found


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=list(RUNS))
    parser.add_argument("sets", type=Path, nargs="+", metavar="SET", help="folder with train and test")
    parser.add_argument("--weights", help="file of pretrained weights, named as timm names their network")
    parser.add_argument("--recipe", help="the contender that gives the loop its time; without: the task's name")
    parser.add_argument(
        "--runs", nargs="+", metavar="NAME=WORDS", help="other contenders: a recipe and flags, or `loop` and its flags"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time")
    parser.add_argument("--warm", action="store_true", help="one process for each contender, all at once")
    parser.add_argument("--within", type=float, default=0.0, help="seconds after which a --warm benchmark ends")
    parser.add_argument("--device", default="auto", help="for the record; the runs choose theirs")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/own_data"), help="folder for runs and logs; must be new"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--smoke", action="store_true", help="two epochs and the first seed: shows that it runs")
    args = parser.parse_args(argv)
    if args.smoke:
        args.seeds = args.seeds[:1]
    if args.work.exists():
        parser.error(f"--work {args.work} exists; its runs would be resumed")
    return args


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Carry out the runs, print a table and write the results."""
    args = arguments(argv)
    device, now, started = devices.select(args.device), datetime.now(UTC), time.perf_counter()
    jobs, score = jobs_of(args), SCORES[args.task]
    args.out.mkdir(parents=True, exist_ok=True)
    path = result_file(args.out, f"own_data-{args.task}", device, now)
    settings = {**vars(args), "sets": list(map(str, args.sets)), "work": str(args.work), "out": str(args.out)}
    result = {"time": now.isoformat(timespec="seconds"), "settings": settings, **provenance(device)}

    def write() -> None:
        result.update(seconds=time.perf_counter() - started, results=results(jobs, score))
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    (carry_out_warm if args.warm else carry_out)(jobs, args, write)
    print(f"{'':16} {'':28} {score + ', mean and sd of ' + str(len(args.seeds)):>24} {'seconds':>8}")
    for name, groups in result["results"].items():
        for contender, group in groups.items():
            if "mean" in group:
                mean = f"{group['mean']:.4f} ± {group['sd']:.4f}"
                print(f"{name:16} {contender:28} {mean:>24} {group['seconds']:>8.1f}")
    print(f"{result['seconds']:.0f} s on {device.name()}; written to {path}")
    return result


if __name__ == "__main__":
    sys.exit(any("error" in job for each in main()["results"].values() for g in each.values() for job in g["rows"]))
