"""Triton kernels of instance norm that read every value from memory once, for images too large for one program.

The programs of an image reduce a chunk each, write what they found, wait for each other, and apply the whole image's
statistics to their chunk, which is still in the cache. Programs start in the order of their numbers, so
an image's programs wait only for programs that run or start next: see `runs_at_once`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sightline.kernels.instance_norm_triton import _normalise, _place, choose_tiling

# Elements of a program, elements that it reads at once, most channels and warps, timed on the H200 on the U-Net of
# 192 x 160.
FORWARD = (32768, 4096, 32, 8)
BACKWARD = (16384, 2048, 64, 4)
MOST_PROGRAMS = 64  # of an image: they must run at once, and each joins the results of all
LEAST_PROGRAMS = 264  # two for each of 132 processors; below, smaller chunks use the GPU better
PROCESSORS = 100  # a GPU with fewer, or an older one than Hopper, was not tried
TOGETHER, REDUCE, APPLY = 0, 1, 2  # what a launch does


class Sizes(NamedTuple):
    """Split of an image into `chunks` chunks of `tiles` tiles of `rows` x `channels` elements."""

    channels: int
    rows: int
    tiles: int
    chunks: int
    warps: int

    def options(self, phase: int) -> dict[str, int | bool]:
        """Return the keyword arguments of a launch."""
        sizes = {"ROWS": self.rows, "CHANNELS": self.channels, "TILES": self.tiles, "PHASE": phase}
        joined = {"CHUNKS": triton.next_power_of_2(self.chunks)}
        return {**sizes, **joined, "num_warps": self.warps, "enable_fp_fusion": True}


def choose_sizes(images: int, rows: int, channels: int, numbers: tuple[int, int, int, int]) -> Sizes | None:
    """Return the sizes for a shape from FORWARD or BACKWARD; None if one program holds an image, if those of an image
    are too many to wait for each other, or all of them too few."""
    chunk, tile, widest, warps = numbers
    block = min(triton.next_power_of_2(channels), widest if channels % 64 == 0 else 32)
    chunks = triton.cdiv(rows, chunk // block)
    programs = chunks * triton.cdiv(channels, block)
    is_held = choose_tiling(images, rows, channels).chunks == 0
    if is_held or programs > MOST_PROGRAMS or images * programs < LEAST_PROGRAMS:
        return None
    return Sizes(block, tile // block, chunk // tile, chunks, warps)


def runs_at_once(device: torch.device) -> bool:
    """Return whether a GPU runs all programs of an image at the same time: a Hopper or newer, not a part of one."""
    if torch.version.hip is not None or device.type != "cuda":
        return False
    found = torch.cuda.get_device_properties(device)
    return found.major >= 9 and found.multi_processor_count >= PROCESSORS


def forward(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, slope: float, sizes: Sizes, is_together: bool = True
) -> tuple[Tensor, Tensor]:
    """Return what instance_norm_triton.forward does; not `is_together`: in two launches, in which no program waits."""
    images, channels, rows = len(x), x.shape[1], x[0, 0].numel()
    y = torch.empty_like(x)
    statistics = torch.empty((2, images, channels), dtype=torch.float32, device=x.device)
    parts, arrived, programs = _made(x, sizes)
    size = (rows, channels, sizes.chunks)
    with torch.cuda.device_of(x):
        for phase in (TOGETHER,) if is_together else (REDUCE, APPLY):
            instance_norm_once[(programs,)](
                x, weight, bias, y, *statistics, *parts, arrived, *size, eps, slope, **sizes.options(phase)
            )
    return y, statistics


def backward(
    grad_y: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    statistics: Tensor,
    slope: float,
    sizes: Sizes,
    is_together: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return what instance_norm_triton.backward does."""
    channels, rows = x.shape[1], x[0, 0].numel()
    grad_x, sums = torch.empty_like(x), torch.empty_like(statistics)
    parts, arrived, programs = _made(x, sizes)
    given, size = (x, grad_y, weight, bias, *statistics), (rows, channels, sizes.chunks)
    with torch.cuda.device_of(x):
        for phase in (TOGETHER,) if is_together else (REDUCE, APPLY):
            instance_norm_once_backward[(programs,)](
                *given, grad_x, *sums, *parts, arrived, *size, slope, **sizes.options(phase)
            )
    return grad_x, sums


def _made(x: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor, int]:
    """Return room for the chunks' results, the counts of programs that wrote theirs, and the number of programs."""
    images, channels = x.shape[:2]
    parts = torch.empty((2, images, sizes.chunks, channels), dtype=torch.float32, device=x.device)
    blocks = images * triton.cdiv(channels, sizes.channels)
    return parts, torch.zeros(blocks, dtype=torch.int32, device=x.device), blocks * sizes.chunks


@triton.jit
def _wait_for_all(arrived: tl.tensor, chunks: tl.tensor) -> None:
    """Say that this program has written its results; return when all programs of the image have."""
    tl.debug_barrier()  # the results of all threads come before the count
    tl.atomic_add(arrived, 1, sem="release")
    while tl.atomic_add(arrived, 0, sem="acquire") < chunks:
        pass


@triton.jit
def _load(
    x: tl.tensor, first: tl.tensor, rows: tl.tensor, channels: tl.tensor, channel: tl.tensor, ROWS: tl.constexpr
) -> tl.tensor:
    """Return a tile of an image; 0 outside."""
    at, inside = _at(first, rows, channels, channel, ROWS)
    return tl.load(x + at, mask=inside, other=0.0)


@triton.jit
def _at(
    first: tl.tensor, rows: tl.tensor, channels: tl.tensor, channel: tl.tensor, ROWS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the places of a tile in an image, and which of them are inside."""
    row = first + tl.arange(0, ROWS)[:, None]
    return row * channels + channel, (row < rows) & (channel < channels)


@triton.jit
def instance_norm_once(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    mean: tl.tensor,
    rstd: tl.tensor,
    means: tl.tensor,
    spreads: tl.tensor,
    arrived: tl.tensor,
    rows: tl.tensor,
    channels: tl.tensor,
    chunks: tl.tensor,
    eps: tl.tensor,
    slope: tl.tensor,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TILES: tl.constexpr,
    CHUNKS: tl.constexpr,
    PHASE: tl.constexpr,
) -> None:
    """Compute each chunk's mean and squared deviations (Welford), join them (Chan), normalise the chunk."""
    image, chunk, channel = _place(tl.program_id(0), channels, chunks, CHANNELS)
    known = channel < channels
    first = chunk * (TILES * ROWS)
    end = tl.minimum(first + TILES * ROWS, rows)
    x += image * rows * channels
    y += image * rows * channels
    of_image = image * chunks * channels + channel
    if PHASE != 2:
        centre = tl.zeros((ROWS, CHANNELS), tl.float32)
        spread = tl.zeros((ROWS, CHANNELS), tl.float32)
        count = 0.0
        for tile in range(TILES):
            value = _load(x, first + tile * ROWS, end, channels, channel, ROWS).to(tl.float32)
            _, inside = _at(first + tile * ROWS, end, channels, channel, ROWS)
            count += 1.0
            centred = tl.where(inside, value - centre, 0.0)
            centre += centred * (1.0 / count)
            spread += centred * (value - centre)
        # Each position of the tile saw one row per round, except some in the last round.
        seen = ((end - first - tl.arange(0, ROWS) + ROWS - 1) // ROWS).to(tl.float32)[:, None]
        own = tl.sum(centre * seen, 0) / (end - first)
        centred = centre - own
        tl.store(means + of_image + chunk * channels, own, mask=known)
        tl.store(spreads + of_image + chunk * channels, tl.sum(spread + seen * centred * centred, 0), mask=known)
    if PHASE == 0:
        blocks = tl.cdiv(channels, CHANNELS)
        _wait_for_all(arrived + image * blocks + tl.program_id(0) % blocks, chunks)
    if PHASE != 1:
        part = tl.arange(0, CHUNKS)[:, None]
        is_part = (part < chunks) & known
        lengths = tl.minimum(rows - part * (TILES * ROWS), TILES * ROWS).to(tl.float32)
        origin = tl.load(means + of_image, mask=known, other=0.0)
        found = tl.load(means + of_image + part * channels, mask=is_part, other=0.0)
        within = tl.load(spreads + of_image + part * channels, mask=is_part, other=0.0)
        whole = origin + tl.sum(tl.where(is_part, (found - origin) * lengths, 0.0), 0) / rows
        apart = found - whole
        scale = 1.0 / tl.sqrt(tl.sum(tl.where(is_part, within + lengths * apart * apart, 0.0), 0) / rows + eps)
        if chunk == 0:
            tl.store(mean + image * channels + channel, whole, mask=known)
            tl.store(rstd + image * channels + channel, scale, mask=known)
        gain = scale * tl.load(weight + channel, mask=known, other=0.0).to(tl.float32)
        b = tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)
        for tile in range(TILES):
            value = _load(x, first + tile * ROWS, end, channels, channel, ROWS).to(tl.float32)
            _, before = _normalise(value, whole, gain, b)
            after = tl.where(before > 0, before, before * slope)
            at, inside = _at(first + tile * ROWS, end, channels, channel, ROWS)
            tl.store(y + at, after.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _before(
    value: tl.tensor, grad: tl.tensor, centre: tl.tensor, gain: tl.tensor, b: tl.tensor, slope: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Return x - mean and the gradient before the leaky ReLU."""
    centred, before = _normalise(value.to(tl.float32), centre, gain, b)
    grad = grad.to(tl.float32)
    return centred, tl.where(before > 0, grad, grad * slope)


@triton.jit
def instance_norm_once_backward(
    x: tl.tensor,
    grad_y: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    mean: tl.tensor,
    rstd: tl.tensor,
    grad_x: tl.tensor,
    sums: tl.tensor,
    dots: tl.tensor,
    sum_parts: tl.tensor,
    dot_parts: tl.tensor,
    arrived: tl.tensor,
    rows: tl.tensor,
    channels: tl.tensor,
    chunks: tl.tensor,
    slope: tl.tensor,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TILES: tl.constexpr,
    CHUNKS: tl.constexpr,
    PHASE: tl.constexpr,
) -> None:
    """Sum each chunk's gradient before the leaky ReLU and its product with the normalised x, join, apply.

    Tiles are read one ahead, so that a program does not wait for each: a sixth faster here, slower in forward.
    """
    image, chunk, channel = _place(tl.program_id(0), channels, chunks, CHANNELS)
    known = channel < channels
    first = chunk * (TILES * ROWS)
    end = tl.minimum(first + TILES * ROWS, rows)
    centre = tl.load(mean + image * channels + channel, mask=known, other=0.0)
    scale = tl.load(rstd + image * channels + channel, mask=known, other=0.0)
    gain = scale * tl.load(weight + channel, mask=known, other=0.0).to(tl.float32)
    b = tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)
    x += image * rows * channels
    grad_y += image * rows * channels
    grad_x += image * rows * channels
    of_image = image * chunks * channels + channel
    if PHASE != 2:
        total = tl.zeros((ROWS, CHANNELS), tl.float32)
        dot = tl.zeros((ROWS, CHANNELS), tl.float32)
        ahead = _load(x, first, end, channels, channel, ROWS)
        grad_ahead = _load(grad_y, first, end, channels, channel, ROWS)
        for tile in range(TILES):
            centred, grad = _before(ahead, grad_ahead, centre, gain, b, slope)
            ahead = _load(x, first + (tile + 1) * ROWS, end, channels, channel, ROWS)
            grad_ahead = _load(grad_y, first + (tile + 1) * ROWS, end, channels, channel, ROWS)
            total += grad
            dot += grad * centred
        tl.store(sum_parts + of_image + chunk * channels, tl.sum(total, 0), mask=known)
        tl.store(dot_parts + of_image + chunk * channels, tl.sum(dot, 0) * scale, mask=known)
    if PHASE == 0:
        blocks = tl.cdiv(channels, CHANNELS)
        _wait_for_all(arrived + image * blocks + tl.program_id(0) % blocks, chunks)
    if PHASE != 1:
        ahead = _load(x, first, end, channels, channel, ROWS)
        grad_ahead = _load(grad_y, first, end, channels, channel, ROWS)
        part = tl.arange(0, CHUNKS)[:, None]
        is_part = (part < chunks) & known
        whole = tl.sum(tl.load(sum_parts + of_image + part * channels, mask=is_part, other=0.0), 0)
        whole_dot = tl.sum(tl.load(dot_parts + of_image + part * channels, mask=is_part, other=0.0), 0)
        if chunk == 0:
            tl.store(sums + image * channels + channel, whole, mask=known)
            tl.store(dots + image * channels + channel, whole_dot, mask=known)
        offset, factor = whole / rows * gain, whole_dot / rows * scale * gain
        for tile in range(TILES):
            centred, grad = _before(ahead, grad_ahead, centre, gain, b, slope)
            ahead = _load(x, first + (tile + 1) * ROWS, end, channels, channel, ROWS)
            grad_ahead = _load(grad_y, first + (tile + 1) * ROWS, end, channels, channel, ROWS)
            result = grad * gain - offset - centred * factor
            at, inside = _at(first + tile * ROWS, end, channels, channel, ROWS)
            tl.store(grad_x + at, result.to(grad_x.dtype.element_ty), mask=inside)
