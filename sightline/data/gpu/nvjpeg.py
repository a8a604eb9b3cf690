"""nvJPEG by its C interface: a GPU's JPEG engines, and its decoder in software for what they do not take.

Its state stays from batch to batch, and images go where the caller says: 11,900 instead of 8,300 img/s beside a
training step, in an experiment with torchvision's decoder, which does neither (docs/why/input.md).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

DEFAULT, HARDWARE = 0, 3  # nvjpegBackend_t
RGB_PLANES, RGB_INTERLEAVED = 3, 5  # nvjpegOutputFormat_t
UNKNOWN_SAMPLING = -1  # nvjpegChromaSubsampling_t
ARCH_MISMATCH = 7  # nvjpegStatus_t: this GPU has no JPEG engines
# nvJPEG's NVJPEG_FLAGS_HW_DECODE_NO_PIPELINE: one stream for each JPEG engine instead of two. With more streams than
# CUDA_DEVICE_MAX_CONNECTIONS some would wait for the step's kernels.
NO_PIPELINE = 1
CHANNELS = 4  # of an nvjpegImage_t: addresses, then pitches
Pointer = ctypes.c_void_p
_one_at_a_time = threading.Lock()


class NvjpegError(RuntimeError):
    """nvJPEG is missing, or refuses: bytes that it does not take."""


class Decoder:
    """One decoder of one device; for one thread at a time. It lives as long as the process: nvJPEG may be unloaded
    before Python is done, so nothing is destroyed.

    It decodes beside a step to pixels, or with `planes`, when nothing else runs, to three planes of an image."""

    def __init__(self, device: torch.device, planes: bool = False):
        # The second is called with Python's lock held. To give it back for a few microseconds costs more: another
        # thread takes it, and this one queues.
        self._library, self._short = _libraries()
        self._device, self._format = device, RGB_PLANES if planes else RGB_INTERLEAVED
        self._flags = ctypes.c_uint(0 if planes else NO_PIPELINE)
        self._handle, self._batch = Pointer(), 0
        with torch.cuda.device(device):
            status = self._create(HARDWARE)
            self.has_engines = status != ARCH_MISMATCH
            if status := status if self.has_engines else self._create(DEFAULT):
                raise NvjpegError(f"nvjpegCreateEx gave status {status}")
            self._state = self._made("nvjpegJpegStateCreate")
            self._header = self._made("nvjpegJpegStreamCreate")

    def sizes(self, addresses: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (images, 2) int64, height and width, of JPEGs in host memory, and (images) bool, which of them the
        engines take: none that is progressive or of odd sampling. One that nvJPEG cannot read raises NvjpegError."""
        found, taken = np.zeros((len(addresses), 2), np.int64), np.zeros(len(addresses), bool)
        height, width, is_refused = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_int(1)
        sides, refused, short = (ctypes.byref(width), ctypes.byref(height)), ctypes.byref(is_refused), self._short
        for row, (address, length) in enumerate(zip(addresses.tolist(), lengths.tolist(), strict=True)):
            data = Pointer(address), ctypes.c_size_t(length)
            status = short.nvjpegJpegStreamParseHeader(self._handle, *data, self._header)
            if self.has_engines:
                status = status or short.nvjpegDecodeBatchedSupported(self._handle, self._header, refused)
            if not status and is_refused.value:
                self._check_sampling(*data)
            status = status or short.nvjpegJpegStreamGetFrameDimensions(self._header, *sides)
            if status:
                raise NvjpegError(f"nvJPEG gave status {status} for the header of an image")
            found[row], taken[row] = (height.value, width.value), not is_refused.value
        return found, taken

    def decode(
        self,
        addresses: np.ndarray,
        lengths: np.ndarray,
        taken: np.ndarray,
        targets: np.ndarray,
        sizes: np.ndarray,
        stream: torch.cuda.Stream,
    ) -> None:
        """Queue the decoding of JPEGs to device memory at `targets`, without gaps. The engines decode those that are
        `taken`; software the others, for which this waits.

        `stream` waits for the engines. They do not wait for `stream`: the memory must be free.
        """
        given, counts = addresses.astype(np.uint64), lengths.astype(np.uint64)
        images = np.zeros((len(addresses), 2 * CHANNELS), np.uint64)  # nvjpegImage_t
        if self._format == RGB_PLANES:
            images[:, :3] = targets[:, None] + sizes.prod(1)[:, None] * np.arange(3)
            images[:, CHANNELS : CHANNELS + 3] = sizes[:, 1:]
        else:
            images[:, 0], images[:, CHANNELS] = targets, 3 * sizes[:, 1]
        if not taken.all():
            self._decode_in_software(given[~taken], counts[~taken], images[~taken], stream)
        if taken.any():
            self._decode_by_engines(given[taken], counts[taken], images[taken], stream)

    def _decode_by_engines(
        self, addresses: np.ndarray, lengths: np.ndarray, images: np.ndarray, stream: torch.cuda.Stream
    ) -> None:
        if len(addresses) != self._batch:
            size = (len(addresses), 1, self._format)  # one thread of the CPU
            self._call("nvjpegDecodeBatchedInitialize", self._handle, self._state, *size)
            self._batch = len(addresses)
        arrays = (Pointer(array.ctypes.data) for array in (addresses, lengths, images))
        self._call("nvjpegDecodeBatched", self._handle, self._state, *arrays, _stream(stream))

    def _decode_in_software(
        self, addresses: np.ndarray, lengths: np.ndarray, images: np.ndarray, stream: torch.cuda.Stream
    ) -> None:
        """Decode one after the other: the CPU reads the codes of an image while the GPU transforms the one before."""
        decoder, state, params, headers, pinned = self._software
        for number, (address, length) in enumerate(zip(addresses.tolist(), lengths.tolist(), strict=True)):
            header = headers[number % 2]
            data = Pointer(address), ctypes.c_size_t(length)
            self._call("nvjpegJpegStreamParse", self._handle, *data, 0, 0, header)  # keep neither metadata nor bytes
            self._call("nvjpegStateAttachPinnedBuffer", state, pinned[number % 2])
            self._call("nvjpegDecodeJpegHost", self._handle, decoder, state, params, header)
            stream.synchronize()  # the image before has left the buffer on the device
            image = Pointer(images[number].ctypes.data)
            self._call("nvjpegDecodeJpegTransferToDevice", self._handle, decoder, state, header, _stream(stream))
            self._call("nvjpegDecodeJpegDevice", self._handle, decoder, state, image, _stream(stream))
        stream.synchronize()  # the next batch writes to the pinned memory

    @functools.cached_property
    def _software(self) -> tuple[Pointer, Pointer, Pointer, list[Pointer], list[Pointer]]:
        """Decoder, state, parameters, and two headers and buffers; made for the first image that engines refuse."""
        with torch.cuda.device(self._device):
            decoder = self._made("nvjpegDecoderCreate", ctypes.c_int(DEFAULT))
            state = self._made("nvjpegDecoderStateCreate", decoder)
            params = self._made("nvjpegDecodeParamsCreate")
            self._call("nvjpegDecodeParamsSetOutputFormat", params, self._format)
            headers = [self._made("nvjpegJpegStreamCreate") for _ in range(2)]
            pinned = [self._made("nvjpegBufferPinnedCreate", None) for _ in range(2)]
            self._call("nvjpegStateAttachDeviceBuffer", state, self._made("nvjpegBufferDeviceCreate", None))
        return decoder, state, params, headers, pinned

    def _check_sampling(self, *data: object) -> None:
        """Raise NvjpegError for a sampling of the colours that nvJPEG does not know."""
        components, sampling, sides = ctypes.c_int(), ctypes.c_int(), (ctypes.c_int * CHANNELS)()
        found = ctypes.byref(components), ctypes.byref(sampling), sides, (ctypes.c_int * CHANNELS)()
        self._call("nvjpegGetImageInfo", self._handle, *data, *found)
        if sampling.value == UNKNOWN_SAMPLING:
            raise NvjpegError("nvJPEG does not know how the colours of an image are sampled")

    def _create(self, backend: int) -> int:
        return self._library.nvjpegCreateEx(backend, None, None, self._flags, ctypes.byref(self._handle))

    def _made(self, function: str, *arguments: object) -> Pointer:
        made = Pointer()
        self._call(function, self._handle, *arguments, ctypes.byref(made))
        return made

    def _call(self, function: str, *arguments: object) -> None:
        if status := getattr(self._library, function)(*arguments):
            self._batch = 0  # set up again
            raise NvjpegError(f"{function} gave status {status}")


def decode(encoded: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Decode JPEGs (1-d uint8 on the host) to planes (3, height, width) on the device, and wait for it."""
    with _one_at_a_time, torch.cuda.device(device):
        decoder, stream = _shared(device), torch.cuda.current_stream(device)
        addresses = np.asarray([data.data_ptr() for data in encoded])
        lengths = np.asarray([len(data) for data in encoded])
        sizes, taken = decoder.sizes(addresses, lengths)
        planes = [torch.empty(3, *size, dtype=torch.uint8, device=device) for size in sizes.tolist()]
        stream.synchronize()  # torch may give memory that queued work still uses
        targets = np.asarray([image.data_ptr() for image in planes])
        decoder.decode(addresses, lengths, taken, targets, sizes, stream)
        stream.synchronize()
    return planes


def begin(device: torch.device) -> None:
    """Make the decoder of `decode` on a thread of its own, beside what comes before it is asked for: 0.65 s on an H200.
    What fails is met again by `decode`."""

    def make() -> None:
        with contextlib.suppress(RuntimeError, AttributeError, OSError), _one_at_a_time, torch.cuda.device(device):
            _shared(device)

    threading.Thread(target=make, name="nvJPEG").start()  # awaited at exit: no process ends while a library starts


@functools.cache
def _shared(device: torch.device) -> Decoder:
    return Decoder(device, planes=True)


def _stream(stream: torch.cuda.Stream) -> Pointer:
    return Pointer(stream.cuda_stream)


@functools.cache
def _libraries() -> tuple[ctypes.CDLL, ctypes.PyDLL]:
    """Return libnvjpeg, to be called without and with Python's lock."""
    if torch.version.cuda is None:
        raise NvjpegError("this torch is built without CUDA")
    major = torch.version.cuda.partition(".")[0]
    for path in _places(major):
        try:
            return ctypes.CDLL(path), ctypes.PyDLL(path)
        except OSError:  # the loader knows none, or it does not fit this system
            continue
    package = "nvidia-nvjpeg" if int(major) > 12 else f"nvidia-nvjpeg-cu{major}"
    raise NvjpegError(f"no libnvjpeg.so.{major} was found; pip install {package}")


def _places(major: str) -> Iterator[str]:
    """Yield where libnvjpeg may lie: NVIDIA's wheel, the loader's folders, the CUDA toolkit, torchvision's wheel."""
    name = f"libnvjpeg.so.{major}"
    if found := importlib.util.find_spec("nvidia"):
        for folder in found.submodule_search_locations or ():
            yield from map(str, sorted(Path(folder).glob(f"*/lib/{name}")))
    yield name
    for folder in (os.environ.get("CUDA_HOME", "/usr/local/cuda"), sys.prefix):
        yield from map(str, sorted(Path(folder).glob(f"lib*/{name}")))
    if (found := importlib.util.find_spec("torchvision")) and found.origin:  # its wheel brings one; not imported
        yield from map(str, sorted(Path(found.origin).parents[1].glob(f"torchvision.libs/libnvjpeg*.so.{major}*")))
