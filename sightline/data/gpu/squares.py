"""Encoded images of a batch -> squares of pixels on the device: decode, cut, resize and flip.

On a GPU with JPEG engines and Triton: nvJPEG into a buffer, one kernel out of it. Elsewhere torchvision's decoder and
plain torch (augment/batched.py).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from sightline import kernels
from sightline.data.augment import batched
from sightline.data.decode import decode_on_device
from sightline.data.gpu.nvjpeg import HardwareDecoder, NvjpegError

# Threads with a decoder each that share a batch. Beside a ResNet-50 step one reaches 11,900 img/s, two 15,500 (H200).
DECODERS = 2
ALIGNED = 256  # bytes: where an image may begin in the buffer
GROWTH = 1.25  # a buffer that is too small grows beyond need, so that it soon stays


def fill_squares(out: Tensor, targets: Tensor, encoded: Sequence[Tensor], geometry: Tensor, interpolation: str) -> None:
    """Decode plain JPEGs (1-d uint8 on the host) into rows `targets` of `out` (batch, size, size, 3) uint8.

    `geometry` has the numbers of `batched.FIELDS` for each. Raises RuntimeError if the device refuses one of them.
    """
    if engines := _engines_of(out.device):
        engines.fill(out, targets, encoded, geometry, interpolation)
        return
    planes = decode_on_device(encoded, out.device)
    out[targets.to(out.device)] = batched.cut_and_resize(planes, geometry, out.shape[1], interpolation)


def _engines_of(device: torch.device) -> Engines | None:
    """Return the JPEG engines of a device, if they and Triton are there and kernels are allowed."""
    if device.type != "cuda" or not kernels.are_allowed() or find_spec("triton") is None:
        return None
    return _engines(device)


@functools.cache
def _engines(device: torch.device) -> Engines | None:
    try:
        return Engines(device)
    except (NvjpegError, AttributeError):  # no engines, as in consumer GPUs, or a library without these functions
        return None


class Engines:
    """The JPEG engines of one device, driven by a few threads. Calls take turns."""

    def __init__(self, device: torch.device):
        self._parts = [_Part(device) for _ in range(DECODERS)]
        self._threads = ThreadPoolExecutor(DECODERS, "sightline-jpeg", _begin, (device,))
        self._lock = threading.Lock()

    def fill(
        self, out: Tensor, targets: Tensor, encoded: Sequence[Tensor], geometry: Tensor, interpolation: str
    ) -> None:
        """Do what `fill_squares` does; the current stream waits for it."""
        current = torch.cuda.current_stream(out.device)
        is_ready = current.record_event()
        with self._lock:
            working = []
            for part, rows in zip(self._parts, np.array_split(np.arange(len(encoded)), DECODERS), strict=True):
                if len(rows):
                    images = [encoded[row] for row in rows]
                    work = (out, targets[rows], images, geometry[rows], interpolation, is_ready)
                    working.append(self._threads.submit(part.fill, *work))
            wait(working)  # also if one fails: the others write to their buffers
            for part in self._parts:
                current.wait_stream(part.stream)
            for done in working:
                done.result()


def _begin(device: torch.device) -> None:
    """Bind a thread to the device: without a context of their own the engines report that they have no memory."""
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)


class _Part:
    """A decoder with its stream and the buffer that it writes to."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._decoder = HardwareDecoder(device)
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)

    def fill(
        self,
        out: Tensor,
        targets: Tensor,
        encoded: list[Tensor],
        geometry: Tensor,
        interpolation: str,
        is_ready: torch.cuda.Event,
    ) -> None:
        from sightline.kernels import resize_triton

        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            sizes = self._decoder.sizes(encoded)
            self.stream.synchronize()  # decoders do not wait for what still reads the buffer
            refused = np.flatnonzero(sizes[:, 0] == 0).tolist()
            planes = decode_on_device([encoded[row] for row in refused], self.device) if refused else []
            for row, image in zip(refused, planes, strict=True):
                sizes[row] = image.shape[1:]
            _refuse_boxes_outside(geometry.numpy(), sizes)
            places = self._places(sizes, targets)
            for row, image in zip(refused, planes, strict=True):
                self._buffer[places[row, 0] :][: image.numel()].copy_(image.flatten())
                places[row, 1:4] = image.shape[2], 1, image.shape[1] * image.shape[2]
            taken = np.setdiff1d(np.arange(len(encoded)), refused)
            if len(taken):
                addresses = self._buffer.data_ptr() + places[taken, 0]
                images = [encoded[row] for row in taken]
                self._decoder.decode(images, addresses, places[taken, 1], self.stream.cuda_stream)
            numbers = (torch.from_numpy(places).to(self.device), geometry.to(self.device))
            self.stream.wait_event(is_ready)
            resize_triton.resize(self._buffer, *numbers, out, interpolation)

    def _places(self, sizes: np.ndarray, targets: Tensor) -> np.ndarray:
        """Give every image its place in the buffer: (images, 5) int64, see resize_triton.PLACE."""
        rooms = -(-3 * sizes.prod(1) // ALIGNED) * ALIGNED
        ends = rooms.cumsum()
        if ends[-1] > len(self._buffer):
            self._buffer = torch.empty(int(ends[-1] * GROWTH), dtype=torch.uint8, device=self.device)
        places = np.empty((len(sizes), 5), np.int64)
        places[:, 0], places[:, 1], places[:, 2], places[:, 3] = ends - rooms, 3 * sizes[:, 1], 3, 1
        places[:, 4] = targets.numpy()
        return places


def _refuse_boxes_outside(geometry: np.ndarray, sizes: np.ndarray) -> None:
    """Raise if a box, drawn from the size that our guard has read, does not lie in the image that the decoder reads."""
    corners = geometry[:, :2] + geometry[:, 2:4]
    if (corners > sizes).any():
        raise NvjpegError("an image is smaller than its header says")
