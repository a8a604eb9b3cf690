"""Triton kernels of instance norm that read every value from memory once, for images too large for one program.

The programs of an image reduce a chunk each, write what they found, wait for each other, and apply the whole image's
statistics to their chunk, which is still in registers or in the cache. Programs start in the order of their numbers, so
an image's programs wait only for programs that run or start next: see `runs_at_once`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sightline.kernels.instance_norm_triton import _normalise, _place, choose_tiling

CHUNK = 16384  # elements of a program
TILE = 4096  # elements that it reads at once
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
    warps: int = 8

    def options(self, phase: int) -> dict[str, int | bool]:
        """Return the keyword arguments of a launch."""
        sizes = {"ROWS": self.rows, "CHANNELS": self.channels, "TILES": self.tiles, "PHASE": phase}
        joined = {"CHUNKS": triton.next_power_of_2(self.chunks)}
        return {**sizes, **joined, "num_warps": self.warps, "enable_fp_fusion": True}


def choose_sizes(images: int, rows: int, channels: int) -> Sizes | None:
    """Return the sizes for a shape; None if one program holds an image, or if an image's programs are too many."""
    block = min(triton.next_power_of_2(channels), 64 if channels % 64 == 0 else 32)
    tile_rows, tiles = TILE // block, CHUNK // TILE
    chunks = triton.cdiv(rows, tile_rows * tiles)
    programs = chunks * triton.cdiv(channels, block)
    is_held = choose_tiling(images, rows, channels).chunks == 0
    if is_held or programs > MOST_PROGRAMS or images * programs < LEAST_PROGRAMS:
        return None
    return Sizes(block, tile_rows, tiles, chunks)


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
    images, channels, rows = len(x), x.shape[1], x[0, 0].numel()
    grad_x, sums = torch.empty_like(x), torch.empty_like(statistics)
    parts, arrived, programs = _made(x, sizes)
    given, size = (x, grad_y, weight, bias, *statistics), (rows, channels, sizes.chunks)
    with torch.cuda.device_of(x):
        for phase in (TOGETHER,) if is_together else (REDUCE, APPLY):
            instance_norm_once_backward[(programs,)](
                *given, grad_x, *sums, *parts, arrived, *size, slope, **sizes.options(phase)
            )
    return grad_x, sums.sum(1)


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
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return a tile of an image, its places in it, and which of them are inside."""
    row = first + tl.arange(0, ROWS)[:, None]
    at, inside = row * channels + channel, (row < rows) & (channel < channels)
    return tl.load(x + at, mask=inside, other=0.0), at, inside


@triton.jit
def _moments(
    x: tl.tensor,
    first: tl.tensor,
    rows: tl.tensor,
    channels: tl.tensor,
    channel: tl.tensor,
    length: tl.tensor,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TILES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return mean and sum of squared deviations of a chunk by Welford's method: one pass, no cancellation."""
    centre = tl.zeros((ROWS, CHANNELS), tl.float32)
    spread = tl.zeros((ROWS, CHANNELS), tl.float32)
    count = 0.0
    for tile in range(TILES):
        value, _, inside = _load(x, first + tile * ROWS, rows, channels, channel, ROWS)
        value = value.to(tl.float32)
        count += 1.0
        centred = tl.where(inside, value - centre, 0.0)
        centre += centred * (1.0 / count)
        spread += centred * (value - centre)
    # Each position of the tile saw one row per round, except some in the last round.
    seen = ((length - tl.arange(0, ROWS) + ROWS - 1) // ROWS).to(tl.float32)[:, None]
    own = tl.sum(centre * seen, 0) / length
    centred = centre - own
    return own, tl.sum(spread + seen * centred * centred, 0)


@triton.jit
def _activate(
    y: tl.tensor,
    value: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    centre: tl.tensor,
    gain: tl.tensor,
    b: tl.tensor,
    slope: tl.tensor,
) -> None:
    _, before = _normalise(value.to(tl.float32), centre, gain, b)
    after = tl.where(before > 0, before, before * slope)
    tl.store(y + at, after.to(y.dtype.element_ty), mask=inside)


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
    """Compute each chunk's mean and squared deviations, join them by Chan's method, normalise the chunk."""
    image, chunk, channel = _place(tl.program_id(0), channels, chunks, CHANNELS)
    known = channel < channels
    first = chunk * (TILES * ROWS)
    length = tl.minimum(rows - first, TILES * ROWS)
    x += image * rows * channels
    y += image * rows * channels
    of_image = image * chunks * channels + channel
    if TILES == 1:
        held, at, inside = _load(x, first, rows, channels, channel, ROWS)
    if PHASE != 2:
        if TILES == 1:
            own = tl.sum(held.to(tl.float32), 0) / length
            centred = tl.where(inside, held.to(tl.float32) - own, 0.0)
            spread = tl.sum(centred * centred, 0)
        else:
            own, spread = _moments(x, first, rows, channels, channel, length, ROWS, CHANNELS, TILES)
        tl.store(means + of_image + chunk * channels, own, mask=known)
        tl.store(spreads + of_image + chunk * channels, spread, mask=known)
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
        centre = origin + tl.sum(tl.where(is_part, (found - origin) * lengths, 0.0), 0) / rows
        apart = found - centre
        scale = 1.0 / tl.sqrt(tl.sum(tl.where(is_part, within + lengths * apart * apart, 0.0), 0) / rows + eps)
        if chunk == 0:
            tl.store(mean + image * channels + channel, centre, mask=known)
            tl.store(rstd + image * channels + channel, scale, mask=known)
        gain = scale * tl.load(weight + channel, mask=known, other=0.0).to(tl.float32)
        b = tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)
        if TILES == 1:
            _activate(y, held, at, inside, centre, gain, b, slope)
        else:
            for tile in range(TILES):
                value, to, is_inside = _load(x, first + tile * ROWS, rows, channels, channel, ROWS)
                _activate(y, value, to, is_inside, centre, gain, b, slope)


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
    """Sum each chunk's gradient before the leaky ReLU and its product with the normalised x, join, apply."""
    image, chunk, channel = _place(tl.program_id(0), channels, chunks, CHANNELS)
    known = channel < channels
    first = chunk * (TILES * ROWS)
    centre = tl.load(mean + image * channels + channel, mask=known, other=0.0)
    scale = tl.load(rstd + image * channels + channel, mask=known, other=0.0)
    gain = scale * tl.load(weight + channel, mask=known, other=0.0).to(tl.float32)
    b = tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)
    x += image * rows * channels
    grad_y += image * rows * channels
    grad_x += image * rows * channels
    of_image = image * chunks * channels + channel
    if TILES == 1:
        held, at, inside = _load(x, first, rows, channels, channel, ROWS)
        held_grad = tl.load(grad_y + at, mask=inside, other=0.0)
    if PHASE != 2:
        if TILES == 1:
            centred, grad = _before(held, held_grad, centre, gain, b, slope)
            total, dot = tl.sum(grad, 0), tl.sum(grad * centred, 0)
        else:
            totals = tl.zeros((ROWS, CHANNELS), tl.float32)
            products = tl.zeros((ROWS, CHANNELS), tl.float32)
            for tile in range(TILES):
                value, to, is_inside = _load(x, first + tile * ROWS, rows, channels, channel, ROWS)
                outer = tl.load(grad_y + to, mask=is_inside, other=0.0)
                apart, inner = _before(value, outer, centre, gain, b, slope)
                totals += inner
                products += inner * apart
            total, dot = tl.sum(totals, 0), tl.sum(products, 0)
        tl.store(sum_parts + of_image + chunk * channels, total, mask=known)
        tl.store(dot_parts + of_image + chunk * channels, dot * scale, mask=known)
    if PHASE == 0:
        blocks = tl.cdiv(channels, CHANNELS)
        _wait_for_all(arrived + image * blocks + tl.program_id(0) % blocks, chunks)
    if PHASE != 1:
        part = tl.arange(0, CHUNKS)[:, None]
        is_part = (part < chunks) & known
        whole = tl.sum(tl.load(sum_parts + of_image + part * channels, mask=is_part, other=0.0), 0)
        whole_dot = tl.sum(tl.load(dot_parts + of_image + part * channels, mask=is_part, other=0.0), 0)
        if chunk == 0:
            tl.store(sums + image * channels + channel, whole, mask=known)
            tl.store(dots + image * channels + channel, whole_dot, mask=known)
        offset, factor = whole / rows * gain, whole_dot / rows * scale * gain
        for tile in range(TILES):
            if TILES > 1:
                value, to, is_inside = _load(x, first + tile * ROWS, rows, channels, channel, ROWS)
                outer = tl.load(grad_y + to, mask=is_inside, other=0.0)
                apart, inner = _before(value, outer, centre, gain, b, slope)
                result = inner * gain - offset - apart * factor
                tl.store(grad_x + to, result.to(grad_x.dtype.element_ty), mask=is_inside)
        if TILES == 1:
            centred, grad = _before(held, held_grad, centre, gain, b, slope)
            result = grad * gain - offset - centred * factor
            tl.store(grad_x + at, result.to(grad_x.dtype.element_ty), mask=inside)
