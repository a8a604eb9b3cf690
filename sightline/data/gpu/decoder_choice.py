"""`--data.decoder auto` on a device with a JPEG decoder: choose it, or the CPU, by rate or by the size of the images.

The device's decoder pays for every image, so the CPU is faster for small ones: 64 px on the H200 with 16 cores, 25,000
against 10,500 img/s. For photographs (500x375) it is the other way round, 6,200 against 20,000.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from sightline.data.decode import Header, read_header, why_not_on_device
from sightline.data.loading.workers import PACKED, PACKED_AT
from sightline.data.sources import spread
from sightline.errors import BadSample

if TYPE_CHECKING:
    from sightline.data.classification.dataset import ClassificationDataset
    from sightline.hardware.devices import Device

TIMED_S = 0.05  # of decoding on one core
SAMPLES = 128  # images that are looked at, all over the data: a folder's first images are all of one class
# Images per second of the CPU from which the device's decoder, which takes a second to start, is not tried.
ENOUGH = 15_000
SHARE = 0.8  # of one process's rate that each of many reaches
SMALL_PIXELS = 128 * 128  # mean size up to which the CPU decodes where time must not decide


def by_size(dataset: ClassificationDataset) -> tuple[bool, str]:
    """Return whether images are so small that the CPU decodes them, from their headers, and a line that says so."""
    headers = (_header(dataset, index) for index in spread(len(dataset), SAMPLES))
    sizes = [np.prod(header.shape[:2]) for header in headers if header]
    mean = float(np.mean(sizes)) if sizes else 0.0
    if mean > SMALL_PIXELS:
        return False, ""  # bind() says so
    return True, f"images are decoded on the CPU: {mean:,.0f} pixels on average, at most {SMALL_PIXELS:,} are its share"


def by_rate(dataset: ClassificationDataset, device: Device, workers: int) -> tuple[bool, str]:
    """Return whether the CPU decodes at least as many images per second, and a line with both numbers."""
    host = host_rate(dataset) * (1 if workers == 1 else SHARE * workers)
    ours = f"about {host:,.0f} img/s by {workers} loader process{'es' * (workers > 1)}"
    if host >= ENOUGH:
        return True, f"images are decoded on the CPU: {ours}"
    if why_not_on_device(device.torch_device):
        return False, ""  # bind() says why
    there = device_rate(dataset, device)
    if host >= there:
        return True, f"images are decoded on the CPU: {ours}, {there:,.0f} on {device.name()}"
    return False, f"decoding: {there:,.0f} img/s on {device.name()}, {ours}"


def host_rate(dataset: ClassificationDataset) -> float:
    """Return images per second that one process reads, decodes and augments, with one thread as loader processes do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        count, started = -1, 0.0
        for index in spread(len(dataset), SAMPLES):
            try:
                dataset.load(0, index)
            except BadSample:
                continue
            count += 1
            if count == 0:
                started = time.perf_counter()  # after the first, which looks for a decoder
            elif time.perf_counter() - started > TIMED_S:
                break
        return count / (time.perf_counter() - started) if count > 0 else 0.0
    finally:
        torch.set_num_threads(threads)


def device_rate(dataset: ClassificationDataset, device: Device) -> float:
    """Return images per second that the device decodes, crops and resizes; 0 if it refuses them."""
    rows = []
    for index in spread(len(dataset), SAMPLES):
        try:
            row = dataset.load_encoded(0, index)
        except BadSample:
            continue
        if row["encoded_bytes"] > 0:
            rows.append(row)
    if not rows:
        return 0.0
    slot = {key: torch.from_numpy(np.stack([row[key] for row in rows])) for key in ("encoded_bytes", "geometry")}
    slot[PACKED] = torch.from_numpy(np.concatenate([row[PACKED] for row in rows]))
    slot[PACKED_AT] = slot["encoded_bytes"].cumsum(0) - slot["encoded_bytes"]
    shape, _ = dataset.layout["image"]
    slot["image"] = torch.empty((len(rows), *shape), dtype=torch.uint8)
    batch = {"label": torch.zeros(len(rows), device=device.torch_device)}
    seconds = []
    for _ in range(3):  # the first starts the decoder
        started = time.perf_counter()
        if dataset.decode(slot, batch) is None:
            return 0.0
        device.synchronize()
        seconds.append(time.perf_counter() - started)
    return len(rows) / min(seconds)


def _header(dataset: ClassificationDataset, index: int) -> Header | None:
    try:
        data = dataset.source.read(index).data
        return read_header(data, dataset.name(index)) if isinstance(data, bytes) else None
    except BadSample:
        return None
