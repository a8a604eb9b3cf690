"""Runs cifar10-airbench on the images of a row: an adapter, outside of its code.

Its scripts take train.pt and test.pt from a folder `cifar10` if they are there, else torchvision's CIFAR10. Here both
are made of the images that the row describes. The one change to a script is its number of runs, in it 200.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from sightline.data.classification import ClassificationData

HELD_OUT = 0.1  # of the training images, where the description names no others
RUNS = "range(200)"
LAST_ROW = re.compile(r"\|\s+(?P<run>\w*)\s+\|\s+eval\s+\|.*\|\s+(?P<top1>[\d.]+)\s+\|\s+(?P<seconds>[\d.]+)\s+\|")


def run_peer(
    peer: dict[str, Any], clone: Path, data: Path, work: Path, runs: int, deadline: float
) -> Iterator[dict[str, Any]]:
    """Yield the score and the seconds of each of its runs; the last of them also has those of the whole process."""
    (work / "cifar10").mkdir(parents=True)
    for split, name in (("train", "train.pt"), ("val", "test.pt")):
        write_images(data, split, work / "cifar10" / name)
    source = (clone / peer["script"]).read_text(encoding="utf-8")
    if source.count(RUNS) != 1:
        yield {"error": f"{peer['script']} has no {RUNS}: another version than {peer['commit']}?"}
        return
    script = work / Path(peer["script"]).name
    script.write_text(source.replace(RUNS, f"range({runs})"), encoding="utf-8")
    started, log = time.perf_counter(), work / "log.txt"
    with log.open("w", encoding="utf-8") as output:
        try:
            code = subprocess.run(
                [sys.executable, script.name],
                cwd=work,
                env={**os.environ, **peer["env"]},
                stdout=output,
                stderr=output,
                timeout=max(1.0, deadline - time.monotonic()) if deadline < float("inf") else None,
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
    seconds = time.perf_counter() - started
    text = log.read_text(encoding="utf-8", errors="replace")
    found: list[dict[str, Any]] = [
        {"run": number, "top1": float(each["top1"]), "training_s": float(each["seconds"])}
        for number, each in enumerate(LAST_ROW.finditer(text))
    ]
    found = found[peer["warm_up_runs"] :]
    if code:
        found.append({"error": f"exit code {code} after {seconds:.0f} s: ...{text[-1500:]}"})
    if found:
        found[-1]["process_of_all_runs_s"] = seconds
    yield from found


def write_images(data: Path, split: Any, out: Path) -> None:
    """Decode a split into the file that the scripts read."""
    opened: Any = ClassificationData(path=str(data), val_fraction=HELD_OUT).open(split, seed=0)
    with ThreadPoolExecutor() as threads:
        found = list(threads.map(opened.stored, range(len(opened))))
    images = np.stack([np.asarray(Image.open(io.BytesIO(stored)).convert("RGB")) for stored, _ in found])
    labels = torch.tensor([label for _, label in found])
    torch.save({"images": torch.from_numpy(images), "labels": labels, "classes": list(opened.source.classes)}, out)
