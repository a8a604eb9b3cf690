"""JPEGs that travel to the device as they are: which ones do, where they lie in a slot, and a batch of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import overload

import numpy as np
import torch
from torch import Tensor

from sightline.data.decode import Header
from sightline.data.loading.workers import LEFT_OVER, PACKED, PACKED_AT
from sightline.data.sources import spread
from sightline.errors import BadSample
from sightline.parts import Batch, Layout

# Largest file that the device decodes, and the room that one has in shared memory on average; the rest takes a detour.
ENCODED_BYTES = 8 * 2**20
ENCODED_ROOM = (16 * 1024, 512 * 1024)
ROOM_SHARE = 1.25  # of the mean of some files: a few that are larger still fit
# Most pixels of an image that the device decodes, 48 MB: blank images have 500 pixels per byte, and a batch of them
# would fill the device's memory.
DEVICE_PIXELS = 2**24
SIZED = 32  # files whose mean decides the room of one
LENGTH = "encoded_bytes"  # key of a slot; 0: the image was finished on the CPU


def lengths_of(read: Callable[[int], bytes | np.ndarray], count: int) -> Iterator[int]:
    """Yield the sizes in bytes of some of `count` images. Skip images that are unreadable or not encoded."""
    for index in spread(count, SIZED):
        with contextlib.suppress(BadSample):
            data = read(index)
            if isinstance(data, bytes) and data:
                yield len(data)


def layout_of(lengths: Iterable[int]) -> Layout:
    """Return the keys of a slot that encoded images need; the bytes of some files decide its room, for speed alone."""
    found = list(lengths)
    wanted = ROOM_SHARE * float(np.mean(found)) if found else 0.0
    room = int(min(max(wanted, ENCODED_ROOM[0]), ENCODED_ROOM[1])) // 4096 * 4096
    return {PACKED: ((room,), "uint8"), PACKED_AT: ((), "int64"), LENGTH: ((), "int32")}


def fits_device(data: bytes | np.ndarray, header: Header) -> bool:
    """Return whether the device's decoder may get this image; the CPU decodes rotated ones, and grey
    ones with a sampling: beside others nvJPEG gave them the colours of another image (H200, 4:2:2)."""
    if not header.is_plain_jpeg or header.orientation != 1 or header.is_sampled_grey:
        return False
    return len(data) <= ENCODED_BYTES and header.width * header.height <= DEVICE_PIXELS


class Packed(Sequence[Tensor]):
    """Encoded images of a slot: one by one as tensors, or the addresses of all at once."""

    def __init__(self, slot: Batch, rows: Tensor):
        self._packed, self._left_over = slot[PACKED].view(-1), slot.get(LEFT_OVER)
        self._at, self.lengths = slot[PACKED_AT][rows].numpy(), slot[LENGTH][rows].numpy()

    @property
    def addresses(self) -> np.ndarray:
        """Where the images begin in the memory of the host."""
        behind = self._at - len(self._packed)
        others = self._left_over.data_ptr() if self._left_over is not None else 0
        return np.where(behind < 0, self._packed.data_ptr() + self._at, others + behind)

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, row: int) -> Tensor: ...
    @overload
    def __getitem__(self, row: slice) -> list[Tensor]: ...
    def __getitem__(self, row: int | slice) -> Tensor | list[Tensor]:
        if isinstance(row, slice):
            return [self[each] for each in range(*row.indices(len(self)))]
        start, length = int(self._at[row]), int(self.lengths[row])
        behind = start - len(self._packed)
        if behind < 0:
            return self._packed[start : start + length]
        assert self._left_over is not None, "an image without room in the slot lies behind it"
        return self._left_over[behind : behind + length]


Fill = Callable[[Tensor, Tensor, Packed], None]


def squares_of(slot: Batch, device: torch.device, fill: Fill) -> Tensor | None:
    """Return the images of a batch on the device; None if its decoder refuses one of them.

    `fill(images, rows, encoded)` decodes those that are encoded. The others were finished on the CPU.
    """
    host, lengths = slot["image"], slot[LENGTH]
    rows = lengths.nonzero().flatten()
    if len(rows) == 0:
        return host.to(device, non_blocking=True)
    images = torch.empty_like(host, device=device)
    for row in (lengths == 0).nonzero().flatten().tolist():
        images[row].copy_(host[row], non_blocking=True)
    try:
        fill(images, rows, Packed(slot, rows))
    except RuntimeError:  # one broken image fails all; libjpeg may take it, and names it if not
        return None
    return images
