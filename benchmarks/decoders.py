"""JPEG decoders of the CPU beside each other: CPU time of one core for each of a folder's photos, and their pixels.

    python benchmarks/decoders.py DIR

Decoders take turns, the photos come from memory, and every one ends as a (height, width, 3) array. TorchCodec and
torchvision are measured where they are installed, and as long as they decode.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import io
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from sightline.hardware import devices
from sightline.measure.provenance import provenance, result_file

Decode = Callable[[bytes], np.ndarray]


def simplejpeg() -> Decode:
    import simplejpeg

    return lambda data: simplejpeg.decode_jpeg(data, colorspace="RGB")


def pillow() -> Decode:
    return lambda data: np.array(Image.open(io.BytesIO(data)).convert("RGB"))


def torchcodec() -> Decode:
    from torchcodec.decoders import decode_jpeg

    return lambda data: decode_jpeg(_tensor(data)).permute(1, 2, 0).contiguous().numpy()


def torchvision() -> Decode:
    import torchvision.io

    operator = torch.ops.image.decode_jpeg  # its wrapper warns on every call
    del torchvision
    return lambda data: operator(_tensor(data), 3, False).permute(1, 2, 0).contiguous().numpy()


MAKERS: dict[str, Callable[[], Decode]] = {
    "simplejpeg": simplejpeg,
    "torchcodec": torchcodec,
    "torchvision": torchvision,
    "pillow": pillow,
}
MODULES = {
    "simplejpeg": "simplejpeg",
    "torchcodec": "torchcodec.decoders",
    "torchvision": "torchvision.io",
    "pillow": "PIL",
}


def start_of(name: str) -> float:
    """Return the CPU seconds of the import in a fresh process that has torch; the least of three."""
    code = (
        f"import time, torch; began = time.process_time(); import {MODULES[name]}; print(time.process_time() - began)"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    return min(float(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout) for _ in range(3))


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    arguments = parser.parse_args()
    photos = [path.read_bytes() for path in sorted(arguments.folder.rglob("*")) if path.suffix.lower()[:3] == ".jp"]
    torch.set_num_threads(1)
    rows: dict[str, dict[str, Any]] = {}
    ways: dict[str, Decode] = {}
    for name, make in MAKERS.items():
        try:
            start_s = start_of(name)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ways[name] = make()
            different = sum(not np.array_equal(ways[name](data), pillow()(data)) for data in photos)
        except (ImportError, OSError, AttributeError, RuntimeError, subprocess.CalledProcessError) as error:
            ways.pop(name, None)
            print(f"{name} is left out: {str(error).partition(chr(10))[0]}")
            continue
        version = importlib.metadata.version(name)
        rows[name] = {"version": version, "start_s": start_s, "differ_from_pillow": different, "us": []}
    for turn in range(arguments.rounds):
        for name in [*ways][:: 1 if turn % 2 else -1]:
            began = time.process_time()
            for data in photos:
                ways[name](data)
            rows[name]["us"].append((time.process_time() - began) / len(photos) * 1e6)
    for name, row in rows.items():
        ratios = [theirs / ours for ours, theirs in zip(rows["simplejpeg"]["us"], row["us"], strict=True)]
        row["of_simplejpeg"] = statistics.median(ratios)
        spread = f"{statistics.median(row['us']):,.0f} us an image ({min(row['us']):,.0f} to {max(row['us']):,.0f})"
        share = f"{row['of_simplejpeg']:.2f} of simplejpeg's; {row['differ_from_pillow']} photos differ from Pillow"
        print(f"{name:12} {row['version']:8} start {row['start_s']:.2f} s, {spread}, {share}")
    now, device = datetime.now(UTC), devices.select("cpu")
    result = {"time": now.isoformat(timespec="seconds"), **provenance(device), "photos": len(photos), "decoders": rows}
    path = result_file(arguments.out, "decoders", device, now)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
