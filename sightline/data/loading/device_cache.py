"""Whole images or volumes of a split in the memory of the device that trains; crops are cut from it there.

It is filled before the first batch, so that every epoch, also one that a stop has cut in two, sees the same pixels.
Threads read and decode: the decoders let others run meanwhile.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from sightline.data.loading.cache import SAMPLED, size
from sightline.data.loading.workers import REMEDIES
from sightline.data.sources import spread
from sightline.errors import BadSample, UsageError
from sightline.hardware.affinity import cpu_share
from sightline.hardware.devices import Device
from sightline.hardware.world import World, local_size

# Share of the device's free memory; the network, its activations and the batches need the rest.
SHARE = 0.7
_ALIGNED = 64  # bytes: each begins at a multiple, so that voxels can be read as floats

_AHEAD = 256  # samples that are read before the first of them is copied

Shape = tuple[int, ...]
Map = Callable[[Callable[[int], Any], Sequence[int]], Any]
Read = Callable[[int], tuple[np.ndarray, Any]]
"""read(index): the uint8 values of a sample, and what else its batch needs. Raises BadSample."""


def _room(shape: Shape) -> int:
    return -(-math.prod(shape) // _ALIGNED) * _ALIGNED


class DeviceCache:
    """Memory for every sample. Loader processes get the shapes and what else was read, not the values."""

    def __init__(
        self,
        device: Device,
        what: str,
        shape: Callable[[int], Shape],
        read: Read,
        count: int,
        on_bad_sample: Literal["fail", "skip"] = "fail",
    ):
        self.what, self.count, self.on_bad_sample = what, count, on_bad_sample
        self.shapes: list[Shape] = []
        self.extra: list[Any] = []
        self.bad: dict[int, BadSample] = {}  # those that cannot be read
        self._device, self._shape, self._read = device, shape, read
        self._flat: Tensor | None = None
        self._starts: list[int] = []
        found = [_room(shape) for shape in self._shapes(spread(count, SAMPLED))]
        self.note = self._arithmetic(int(np.mean(found) * count) if found else 0)

    def __getstate__(self) -> dict[str, Any]:
        left = ("_device", "_shape", "_read", "_flat")
        return {name: value for name, value in vars(self).items() if name not in left}

    def start(self, world: World, check_stop: Callable[[], None]) -> str:
        """Read all samples into the memory; return how long that took."""
        if self._flat is not None:
            return ""
        started = time.perf_counter()
        with ThreadPoolExecutor(cpu_share(local_size(world))) as threads:
            self.shapes = list(self._shapes(range(self.count), threads.map, check_stop))
            sizes = [_room(shape) for shape in self.shapes]
            self._arithmetic(sum(sizes))
            self._starts = [0, *itertools.accumulate(sizes)]
            self._flat = torch.empty(self._starts[-1], dtype=torch.uint8, device=self._device.torch_device)
            self.extra = [None] * self.count
            for index, found in self._each(range(self.count), self._read, threads.map, check_stop):
                if isinstance(found, BadSample):
                    self._note_bad(index, found)
                    continue
                values, self.extra[index] = found
                if values.shape != self.shapes[index]:
                    raise UsageError(f"{self.what}: sample {index} changed while it was read; start again")
                self.values(index).copy_(torch.from_numpy(np.require(values, requirements=("C", "W"))))
        self._device.synchronize()  # batches are cut on another stream
        return f"{self.what} took {time.perf_counter() - started:.1f} s to fill {size(self._starts[-1])}"

    def values(self, index: int) -> Tensor:
        """View a sample in the device's memory."""
        assert self._flat is not None, "the loader starts a cache before it is read"
        start, shape = self._starts[index], self.shapes[index]
        return self._flat[start : start + math.prod(shape)].view(shape)

    def memory(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the whole memory, and where samples begin in it."""
        assert self._flat is not None, "the loader starts a cache before it is read"
        return self._flat, torch.tensor([self._starts[index] for index in indices.tolist()])

    def places(self, indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the whole memory, where images (height, width, 3) begin in it, and their heights and widths."""
        assert self._flat is not None, "the loader starts a cache before it is read"
        chosen = indices.tolist()
        starts, sides = [self._starts[index] for index in chosen], [self.shapes[index][:2] for index in chosen]
        return self._flat, torch.tensor(starts), torch.tensor(sides)

    def check(self, index: int) -> None:
        """Raise BadSample for a sample that could not be read."""
        if index in self.bad:
            raise self.bad[index]

    def _shapes(
        self, indices: Sequence[int], spread_over: Map = map, check_stop: Callable[[], None] = lambda: None
    ) -> Iterator[Shape]:
        """Yield the shape of each sample; (0,) for those that cannot be read."""
        for index, found in self._each(indices, self._shape, spread_over, check_stop):
            if isinstance(found, BadSample):
                self._note_bad(index, found)
            yield (0,) if isinstance(found, BadSample) else found

    def _each(
        self, indices: Sequence[int], do: Callable[[int], Any], spread_over: Map, check_stop: Callable[[], None]
    ) -> Iterator[tuple[int, Any]]:
        """Yield what `do` returns for each sample, or its BadSample."""

        def attempt(index: int) -> Any:
            try:
                return self.bad.get(index) or do(index)
            except BadSample as error:
                return error

        for at in range(0, len(indices), _AHEAD):
            check_stop()
            chosen = indices[at : at + _AHEAD]
            yield from zip(chosen, spread_over(attempt, chosen), strict=True)

    def _note_bad(self, index: int, error: BadSample) -> None:
        if self.on_bad_sample == "fail":
            raise BadSample(error.name, f"{error.reason}. {REMEDIES}")
        self.bad[index] = error

    def _arithmetic(self, needed: int) -> str:
        """Return the memory that is needed and free in words; raise UsageError if it is too little."""
        _, free = self._device.memory_bytes()
        numbers = f"{self.count} {self.what} need {size(needed)} on {self._device.name()}, {size(free)} are free"
        if free and needed > SHARE * free:
            raise UsageError(
                f"--data.cache gpu: {numbers}, of which the cache takes {SHARE:.0%} at most; use --data.cache ram"
            )
        return f"cache ON: {numbers}"
