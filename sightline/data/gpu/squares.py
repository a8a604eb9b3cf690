"""Images of a batch -> squares of pixels on the device: decode those that are encoded, cut, resize and flip.

On a GPU with JPEG engines and Triton: nvJPEG into a buffer, one kernel out of it. Elsewhere nvJPEG and plain torch
(augment/batched.py), as if the kernel fails its check at the first batch (resize_check.py).
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from sightline import kernels
from sightline.data.augment import batched
from sightline.data.decode import decode_on_device
from sightline.data.gpu import nvjpeg, resize_check
from sightline.data.gpu.encoded import Packed
from sightline.data.gpu.nvjpeg import NvjpegError
from sightline.data.loading import ahead

# In an experiment beside a ResNet-50 step one reached 11,900 img/s, two 15,500, three 14,900 (H200).
DECODERS = ahead.THREADS
ALIGNED = 256  # bytes: where an image may begin in the buffer
GROWTH = 1.25  # a buffer that is too small grows beyond need, so that it soon stays
_once = threading.Lock()  # several threads fill batches; one of them checks the kernel and makes the engines


def fill_squares(out: Tensor, targets: Tensor, encoded: Sequence[Tensor], geometry: Tensor, interpolation: str) -> None:
    """Decode plain JPEGs (1-d uint8 on the host) into rows `targets` of `out` (batch, size, size, 3) uint8.

    `geometry` has the numbers of `batched.FIELDS` for each, or with interpolation "grid", TensorFlow's crop, a row of
    `batched.grid_row`. Raises RuntimeError if the device refuses an image.
    """
    if engines := _engines_of(out.device, interpolation):
        engines.fill(out, targets, encoded, geometry, interpolation)
        return
    _cut_planes(out, targets, decode_on_device(encoded, out.device), geometry, interpolation)


def cut_squares(
    out: Tensor,
    targets: Tensor,
    memory: Tensor,
    starts: Tensor,
    sides: Tensor,
    geometry: Tensor,
    interpolation: str,
) -> None:
    """Cut images (height, width, 3) that lie decoded in `memory` into rows `targets` of `out`, as `fill_squares` does.

    `starts` (images) says where each begins, `sides` (images, 2) its height and width.
    """
    if _has_kernel(out.device, interpolation):
        from sightline.kernels import resize_triton

        ones = torch.ones_like(starts)
        places = torch.stack([starts, 3 * sides[:, 1], 3 * ones, ones, targets], dim=1)
        resize_triton.resize(memory, places.to(out.device), geometry.to(out.device), out, interpolation)
        return
    if interpolation == batched.GRID:
        out[targets.to(out.device)] = batched.between_pixels(memory, starts, geometry)
        return
    planes = [
        memory[start : start + 3 * height * width].view(height, width, 3).permute(2, 0, 1)
        for start, (height, width) in zip(starts.tolist(), sides.tolist(), strict=True)
    ]
    _cut_planes(out, targets, planes, geometry, interpolation)


def _cut_planes(out: Tensor, targets: Tensor, planes: list[Tensor], geometry: Tensor, interpolation: str) -> None:
    """Cut images (3, height, width) with plain torch."""
    if interpolation == batched.GRID:
        squares = batched.between_planes(planes, geometry)
    else:
        squares = batched.cut_and_resize(planes, geometry, out.shape[1], interpolation)
    out[targets.to(out.device)] = squares


def _has_kernel(device: torch.device, interpolation: str) -> bool:
    can_run = device.type == "cuda" and kernels.may_compile() and find_spec("triton") is not None
    with _once:
        return can_run and resize_check.is_right(device, interpolation)


def _engines_of(device: torch.device, interpolation: str) -> Engines | None:
    """Return the JPEG engines of a device, if they and Triton are there and the kernel is allowed and right."""
    if not _has_kernel(device, interpolation):
        return None
    with _once:
        return _engines(device)


@functools.cache
def _engines(device: torch.device) -> Engines | None:
    try:
        return Engines(device)
    except (NvjpegError, AttributeError):  # no engines, as in consumer GPUs, or no library with these functions
        return None


class Engines:
    """The JPEG engines of one device. As many threads as there are decoders may fill batches side by side."""

    def __init__(self, device: torch.device):
        self._idle: queue.SimpleQueue[_Decoder] = queue.SimpleQueue()
        for _ in range(DECODERS):
            self._idle.put(_Decoder(device))

    def fill(
        self, out: Tensor, targets: Tensor, encoded: Sequence[Tensor], geometry: Tensor, interpolation: str
    ) -> None:
        """Do what `fill_squares` does, on the current stream."""
        decoder = self._idle.get()
        try:
            decoder.fill(out, targets, encoded, geometry, interpolation)
        except RuntimeError:
            torch.cuda.synchronize(out.device)  # what it has begun still writes to its buffer
            raise
        finally:
            self._idle.put(decoder)


class _Decoder:
    """A decoder with the buffer that it writes to."""

    def __init__(self, device: torch.device):
        self.device = device
        self._decoder = nvjpeg.Decoder(device)
        if not self._decoder.has_engines:
            raise NvjpegError("this GPU has no JPEG engines")
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._is_read = torch.cuda.Event()  # the buffer, by the kernel

    def fill(
        self, out: Tensor, targets: Tensor, encoded: Sequence[Tensor], geometry: Tensor, interpolation: str
    ) -> None:
        from sightline.kernels import resize_triton

        addresses, lengths = _memory(encoded)
        sizes, taken = self._decoder.sizes(addresses, lengths)
        _refuse_other_sizes(geometry.numpy(), sizes, interpolation)
        self._is_read.synchronize()  # the engines do not wait for it
        places = self._places(sizes, targets)
        # Before the engines, and from pinned memory, so that nothing waits for them here.
        numbers = self._sent(torch.from_numpy(places)), self._sent(geometry)
        at, stream = self._buffer.data_ptr() + places[:, 0], torch.cuda.current_stream(self.device)
        self._decoder.decode(addresses, lengths, taken, at, sizes, stream)
        resize_triton.resize(self._buffer, *numbers, out, interpolation)
        self._is_read.record()

    def _sent(self, numbers: Tensor) -> Tensor:
        return numbers.pin_memory().to(self.device, non_blocking=True)

    def _places(self, sizes: np.ndarray, targets: Tensor) -> np.ndarray:
        """Give every image its place in the buffer: (images, 5) int64, see resize_triton.PLACE."""
        rooms = -(-3 * sizes.prod(1) // ALIGNED) * ALIGNED
        ends = rooms.cumsum()
        if ends[-1] > len(self._buffer):
            self._buffer = torch.empty(int(ends[-1] * GROWTH), dtype=torch.uint8, device=self.device)
            torch.cuda.current_stream(self.device).synchronize()  # torch may give memory that queued work still uses
        places = np.empty((len(sizes), 5), np.int64)
        places[:, 0], places[:, 1], places[:, 2], places[:, 3] = ends - rooms, 3 * sizes[:, 1], 3, 1
        places[:, 4] = targets.numpy()
        return places


def _memory(encoded: Sequence[Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Return where images begin in the memory of the host, and their bytes."""
    if isinstance(encoded, Packed):
        return encoded.addresses, encoded.lengths
    return np.asarray([data.data_ptr() for data in encoded]), np.asarray([len(data) for data in encoded])


def _refuse_other_sizes(geometry: np.ndarray, sizes: np.ndarray, interpolation: str) -> None:
    """Raise if what is cut, drawn from the size that our guard has read, does not lie in the image that the decoder
    reads."""
    corners = geometry[:, :2] if interpolation == batched.GRID else geometry[:, :2] + geometry[:, 2:4]
    if (corners > sizes).any():
        raise NvjpegError("an image is smaller than its header says")
