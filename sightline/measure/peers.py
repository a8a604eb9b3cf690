"""Contenders of a benchmark, and how they take turns: training steps and input pipelines that users would run instead.

Peers are plain code with their defaults, on the same architecture, batch and image size; where a default is open, the
choice that is faster for them. A task names its peers_*.py, which holds STEP_PEERS and steps(). Contenders take turns
(A B C A B C ...) in one process, ours first; see `measure_in_turn`.
"""

from __future__ import annotations

import gc
import itertools
import os
import signal
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import simplejpeg
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.flop_counter import FlopCounterMode
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.transforms import InterpolationMode, v2

from sightline.errors import UsageError
from sightline.hardware.devices import Device, Precision, place
from sightline.hardware.precision import DTYPES
from sightline.parts import DataSpec, ModelConfig

BATCHES = 4  # different ones that a step meets in turn, all on the device
ENDLESS = 1 << 40  # batches that nobody will ever reach
Say = Callable[[str], None]


class Contender(ABC):
    """Something that advances by one batch at a time and is timed doing so."""

    name: str
    images: int  # per batch
    settle = 2  # batches before each turn that are not timed
    first_s = 0.0  # until the first batch was through, with everything that is built or compiled for it

    @abstractmethod
    def advance(self) -> None:
        """Take one batch; may return before the device is done."""

    def waited_s(self) -> float:
        """Return how long it has waited for input so far."""
        return 0.0

    def facts(self) -> dict[str, Any]:
        """Return what else it knows at the end."""
        return {}

    def wake(self) -> None:  # noqa: B027  # most do nothing between turns anyway
        """Begin its turn."""

    def rest(self) -> None:  # noqa: B027
        """End its turn: nothing of it may work while others are timed."""

    def close(self) -> None:  # noqa: B027  # most have nothing to close
        """End what it started."""


Maker = Callable[[], Contender]


@dataclass(frozen=True)
class Peer:
    """One way to write a training step."""

    style: str
    precision: Precision
    channels_last: bool
    compile: Literal["", "default", "reduce-overhead"] = ""
    fused: bool = False
    """True if its users would ask for the fused optimizer; torchvision's and timm's scripts do not."""

    @property
    def name(self) -> str:
        """Return the name in tables."""
        return f"{self.style}, {self.precision}, {'channels_last' if self.channels_last else 'NCHW'}"

    @property
    def layout(self) -> torch.memory_format:
        """Return the memory format of images and weights."""
        return torch.channels_last if self.channels_last else torch.contiguous_format


@dataclass(frozen=True)
class Ours:
    """The network whose step is compared, and what a step takes."""

    config: ModelConfig
    model: nn.Module  # on the meta device
    image: Tensor  # (1, channels, height, width), on the meta device
    spec: DataSpec
    images: int  # per batch
    device: Device


def choose_peers(
    peers: Sequence[Peer], wanted: str, device: Device, precision: Precision
) -> tuple[list[Peer], list[str]]:
    """Return the peers that make sense here under `--run.compile`, and why others were left out.

    All have the precision of a run in fp16; beside others each has its usual one. Where the device is slow at fp16 (a
    CPU), nobody would use it: there all have the precision of our run.
    """
    # Only where our own step is compiled: elsewhere compilation takes minutes for nothing.
    compiles = wanted == "on" or (wanted == "auto" and device.compile_auto)
    follows = precision == "fp16" or not device.auto_fp16
    here = [replace(peer, precision=precision) if follows else peer for peer in peers]
    why = f"--run.compile {wanted} compiles nothing on {device.kind}; with `on` it is measured"
    chosen = [peer for peer in here if compiles or not peer.compile]
    return chosen, [f"{peer.name} ({why})" for peer in here if peer not in chosen]


def sgd(parameters: Iterable[nn.Parameter], options: dict[str, Any]) -> torch.optim.Optimizer:
    """Build torchvision's optimizer: momentum 0.9, weight decay 1e-4."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-4, **options)


class PeerStep(Contender):
    """One peer's training step on random batches that already are on the device, and without any logging."""

    def __init__(
        self,
        peer: Peer,
        network: nn.Module,
        loss_of: Callable[[Callable[..., Any], tuple[Any, ...]], Tensor],
        batches: Sequence[tuple[Any, ...]],
        images: int,
        device: Device,
        optimizer: Callable[[Iterable[nn.Parameter], dict[str, Any]], torch.optim.Optimizer] = sgd,
    ):
        started = time.perf_counter()
        self.name = peer.name
        self.images = images
        self.peer = peer
        self.device = device
        self.batches = batches
        self.loss_of = loss_of
        network = place(network, device, peer.channels_last).train()
        self.optimizer = optimizer(network.parameters(), {"fused": True} if peer.fused else {})
        self.scaler = torch.amp.GradScaler(device.kind, enabled=peer.precision == "fp16")
        self.forward = torch.compile(network, mode=peer.compile) if peer.compile else network
        self.number = 0
        self.advance()
        device.synchronize()
        self.first_s = time.perf_counter() - started

    def advance(self) -> None:
        batch = self.batches[self.number % len(self.batches)]
        self.number += 1
        if self.peer.compile == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        precision = self.peer.precision
        with torch.autocast(self.device.kind, DTYPES[precision], enabled=precision != "fp32"):
            loss = self.loss_of(self.forward, batch)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


def forward_flop(model: nn.Module, image: Tensor) -> int:
    """Count multiplications and additions of one forward pass of (1, channels, height, width), on the meta device."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(image)
    return counter.get_total_flops()


def _read_uint8(path: str) -> Tensor:
    """Decode as `decode_image` did, which torchvision is going to drop: to the same pixels, a little faster."""
    data = Path(path).read_bytes()
    try:
        pixels = simplejpeg.decode_jpeg(data, colorspace="RGB")
    except ValueError:  # no JPEG, or a rare one
        pixels = np.array(Image.open(path).convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1)  # (3, height, width)


class PeerLoader(Contender):
    """torch's DataLoader over class folders: torchvision v2 on uint8 tensors, or PIL with the v1 transforms."""

    def __init__(self, kind: Literal["v2", "pil"], data: Any, images: int, workers: int, device: Device):
        started = time.perf_counter()
        self.name = {"v2": "DataLoader, torchvision v2, uint8", "pil": "DataLoader, PIL, torchvision v1, float"}[kind]
        self.images = images
        self.device = device.torch_device
        folder = ImageFolder(str(Path(data.path) / "train"), **_pipeline(kind, data))
        # As torchvision's script; drawn with replacement only so that no epoch ends while the clock runs.
        loader = DataLoader(
            folder,
            images,
            sampler=RandomSampler(folder, replacement=True, num_samples=ENDLESS),
            num_workers=workers,
            pin_memory=device.can_pin,
            drop_last=True,
        )
        self.batches: Iterator[list[Tensor]] = iter(loader)
        # Every batch that was prepared while others had their turn must be gone before the clock starts.
        self.settle = 2 * workers + 1  # DataLoader's prefetch_factor is 2
        self.advance()
        device.synchronize()
        self.first_s = time.perf_counter() - started
        self.rest()

    def advance(self) -> None:
        for tensor in next(self.batches):
            tensor.to(self.device, non_blocking=True)

    def rest(self) -> None:
        """Stop the workers: DataLoader would keep filling its queues in another contender's turn."""
        self._signal_workers(signal.SIGSTOP)

    def wake(self) -> None:
        self._signal_workers(signal.SIGCONT)

    def _signal_workers(self, number: int) -> None:
        for process in getattr(self.batches, "_workers", []):
            os.kill(process.pid, number)

    def close(self) -> None:
        self.wake()
        del self.batches  # its workers leave with it


def _pipeline(kind: Literal["v2", "pil"], data: Any) -> dict[str, Any]:
    """Return ImageFolder's transform and loader for the crops and flips that `data` describes."""
    crop: dict[str, Any] = {
        "scale": data.crop_scale,
        "ratio": data.crop_ratio,
        "interpolation": InterpolationMode(data.interpolation),
        "antialias": True,
    }
    if kind == "v2":  # normalised on the device, as ours
        steps = [v2.RandomResizedCrop(data.size, **crop), v2.RandomHorizontalFlip(data.flip)]
        return {"transform": v2.Compose(steps), "loader": _read_uint8}
    reference = [
        transforms.RandomResizedCrop(data.size, **crop),
        transforms.RandomHorizontalFlip(data.flip),
        transforms.PILToTensor(),
        transforms.ConvertImageDtype(torch.float),
        transforms.Normalize(data.mean, data.std),
    ]
    return {"transform": transforms.Compose(reference)}


def check_comparable(data: Any) -> None:
    """Refuse data that the two reference pipelines cannot read, or that ours augments more than they do."""
    fields = ("path", "augment", "crop", "crop_scale", "crop_ratio", "interpolation", "size", "flip", "mean", "std")
    if not all(hasattr(data, field) for field in fields):
        raise UsageError(f"--loader compares classification pipelines; {type(data).__name__} describes none")
    if not (Path(data.path) / "train").is_dir() or not data.path:
        raise UsageError(
            f"--loader reads images from class folders, and --data.path '{data.path}' has no train/CLASS/*.jpg; give "
            f"some, best the photographs you train on (`sightline prepare shapes --out DIR` draws some)"
        )
    if data.augment != "on" or getattr(data, "policy", "none") != "none":
        raise UsageError("--loader compares random crops and flips; add --data.augment on --data.policy none")
    if data.crop != "area" or data.interpolation not in {mode.value for mode in InterpolationMode}:
        raise UsageError(
            f"--loader compares with torchvision's crops and filters, which do not have crop={data.crop} with "
            f"interpolation={data.interpolation}; add --data.crop area --data.interpolation bilinear"
        )


# Turns.


@dataclass
class Timing:
    """Measurements of one contender."""

    name: str
    images: int  # per repeat
    first_s: float
    seconds: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def rates(self) -> list[float]:
        """Return images per second of each repeat."""
        return [self.images / seconds for seconds in self.seconds]

    def row(self) -> dict[str, Any]:
        """Return the row of the result."""
        rates = self.rates()
        return {
            "name": self.name,
            "images_per_s": {"median": statistics.median(rates), "min": min(rates), "max": max(rates), "all": rates},
            "seconds": self.seconds,
            "images": self.images,
            "first_s": self.first_s,
            "data_wait": sum(self.waited) / sum(self.seconds),
            **self.facts,
        }


def measure_in_turn(
    makers: Sequence[Maker], batches: int, warmup: int, repeats: int, device: Device, say: Say
) -> tuple[list[Timing], str]:
    """Time all contenders round by round; one after the other where they do not fit into memory together."""
    left = iter(makers)
    try:
        return _take_turns(left, batches, warmup, repeats, device, say), "in turn"
    except torch.OutOfMemoryError:
        if len(list(left)) == len(makers) - 1:  # the first does not fit alone
            raise
    # Out of the except block, so that the error no longer holds on to the contenders.
    say("memory does not hold all contenders at once: they are measured one after the other")
    timings = []
    for maker in makers:
        free(device)
        timings += _take_turns([maker], batches, warmup, repeats, device, say)
    return timings, "one after the other"


def _take_turns(
    makers: Iterable[Maker], batches: int, warmup: int, repeats: int, device: Device, say: Say
) -> list[Timing]:
    running: list[tuple[Contender, Timing]] = []
    try:
        for maker in makers:
            contender = maker()
            contender.wake()
            running.append((contender, Timing(contender.name, batches * contender.images, contender.first_s)))
            for _ in range(warmup):
                contender.advance()
            device.synchronize()
            contender.rest()
            say(f"{contender.name}: ready, first batch after {contender.first_s:.1f} s")
        for _, (contender, timing) in itertools.product(range(repeats), running):
            contender.wake()
            for _ in range(contender.settle):
                contender.advance()
            device.synchronize()
            started, waited = time.perf_counter(), contender.waited_s()
            for _ in range(batches):
                contender.advance()
            device.synchronize()
            timing.seconds.append(time.perf_counter() - started)
            contender.rest()
            timing.waited.append(contender.waited_s() - waited)
            say(f"{contender.name}: {timing.rates()[-1]:,.0f} img/s")
        for contender, timing in running:
            timing.facts = contender.facts()
    finally:
        for contender, _ in running:
            contender.close()
    return [timing for _, timing in running]


def free(device: Device) -> None:
    """Free what the last contender held, compiled code and captured graphs too."""
    torch.compiler.reset()
    gc.collect()
    if hasattr(device.api, "empty_cache"):
        device.api.empty_cache()


def rows(timings: list[Timing]) -> list[dict[str, Any]]:
    """Return one row per contender; peers with how many times faster ours, the first, is."""
    ours, *others = timings
    rows = [ours.row()]
    for timing in others:
        by_round = [mine / theirs for mine, theirs in zip(ours.rates(), timing.rates(), strict=True)]
        ratio = statistics.median(ours.rates()) / statistics.median(timing.rates())
        rows.append({**timing.row(), "ratio": ratio, "ratio_by_round": by_round})
    return rows
