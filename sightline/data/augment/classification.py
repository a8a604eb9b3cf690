"""Random crops, flips, policies, erasing and mixing for classification, and the fixed geometry of evaluation.

`draw` turns a key into numbers, `apply` turns numbers and pixels into the square the network sees (CPU, uint8), and
`pack` converts it for the copy to the device. `finish` is the batched half there: unpack (normalise), erase, mix.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from sightline.data.augment import policies, tensorflow
from sightline.data.augment.fields import ClassificationFields
from sightline.data.draws import generator
from sightline.parts import Batch, DataSpec, ServedInput

# Pillow has no legacy filter; a policy's rotations are plain bilinear then.
_RESAMPLING = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "legacy": Image.Resampling.BILINEAR,
}
# Reach of Pillow's filters, in pixels of the coarser grid.
_FILTER_REACH = {"bilinear": 1, "bicubic": 2}
# A 30000x1 strip with its short side resized to 256 would be 2 Gpix, of which the window shows 224x224. Above this
# many pixels (sides of 256:1 at 256) only the visible part is computed; below, all of it, as in torchvision.
_MAX_RESIZED_PIXELS = 2**24
_CROP_TRIES = 10
# RandomErasing's shares of the area, and height over width.
_ERASE_SCALE = (0.02, 0.33)
_ERASE_RATIO = (0.3, 3.3)
_ERASE_TRIES = 10

Box = tuple[int, int, int, int]  # top, left, bottom, right; the last two are outside
Place = tuple[int, int, int, int, int, int, int, int]  # the first eight of Params
_NOWHERE: Box = (0, 0, 0, 0)
_PACKED_TYPES = {"uint8": "uint8", "bf16": "int16", "fp32": "float32"}  # NumPy has no bf16: its bits as int16
# Scalars, because they belong to the whole batch; tensors with a first dimension are split with the samples.
CUT_KEYS = ("cut_top", "cut_left", "cut_bottom", "cut_right")


@dataclass(frozen=True)
class Params:
    """The operations on one image: cut out a box, resize it, cut out a square window, flip, apply the policy."""

    top: int
    left: int
    height: int
    width: int
    resized_height: int
    resized_width: int
    window_top: int  # negative if the resized box is smaller than the window: black border
    window_left: int
    size: int
    flip: bool
    policy: policies.Policy = ()
    erase: Box = _NOWHERE  # done on the device, after normalisation

    def most_downscale(self) -> int:
        """Return 8, 4 or 2 if the box is at least that many times larger than what it is resized to; else 1."""
        times = min(self.height // self.resized_height, self.width // self.resized_width)
        return next((factor for factor in (8, 4, 2) if factor <= times), 1)

    def downscaled(self, factor: int) -> "Params":
        """Return the same operations on an image that many times smaller; edges are rounded to whole pixels."""
        top, left = round(self.top / factor), round(self.left / factor)
        height, width = round((self.top + self.height) / factor) - top, round((self.left + self.width) / factor) - left
        return replace(self, top=top, left=left, height=height, width=width) if factor > 1 else self


@dataclass(frozen=True)
class Augmentation(ClassificationFields):
    """Draws and applies the operations that the fields choose; a dataset holds one."""

    @property
    def packed_type(self) -> str:
        """NumPy type of images after `pack`."""
        return _PACKED_TYPES[self.image_type]

    @property
    def erases(self) -> bool:
        """True if a training sample carries a box to erase."""
        return self.augment == "on" and self.random_erase > 0

    def draw(self, seed: int, epoch: int, index: int, height: int, width: int) -> Params:
        """Draw the operations on a training image of this size; the same key gives the same numbers on any machine."""
        if self.augment == "off":
            return self._unmoved(height, width)
        flip = bool(generator(seed, epoch, index, "flip").random() < self.flip)
        policy: policies.Policy = ()
        if self.policy != "none":
            random = generator(seed, epoch, index, "policy")
            policy = policies.draw(self.policy, random, self.size, self.policy_magnitude, self.augmix_severity)
        erased = self._draw_erased(generator(seed, epoch, index, "erase")) if self.erases else _NOWHERE
        random = generator(seed, epoch, index, "crop")
        place: Place
        if self.crop == "shift":
            place = self._draw_shift(random, height, width)
        else:
            place = (*self._draw_box(random, height, width), self.size, self.size, 0, 0)
        return Params(*place, size=self.size, flip=flip, policy=policy, erase=erased)

    def draw_mix(self, seed: int, epoch: int, index: int) -> dict[str, np.ndarray]:
        """Draw the numbers that one training sample adds to the mixing of its batch."""
        numbers = {}
        if self.augment == "on" and self.mixup > 0 and self.mixup_per == "sample":
            share = generator(seed, epoch, index, "mixup of a sample").beta(self.mixup, self.mixup)
            numbers["mix"] = np.asarray(share, dtype=np.float32)
        if self.augment == "on" and self.mixup + self.cutmix > 0 and self.mixup_partner == "random":
            # Sorted on the device: a permutation of the samples that are together there.
            rank = generator(seed, epoch, index, "mixup partner").random()
            numbers["mix_rank"] = np.asarray(rank, dtype=np.float32)
        return numbers

    def draw_batch(self, seed: int, epoch: int, step: int) -> dict[str, np.ndarray]:
        """Draw the numbers that a training batch shares. They are part of the batch, so that a step draws nothing."""
        if self.augment == "off" or self.mixup == self.cutmix == 0 or self.mixup_per == "sample":
            return {}
        cuts = self.cutmix > 0 and (self.mixup == 0 or generator(seed, epoch, step, "cut or mix").random() < 0.5)
        share, label_share, box = 1.0, 1.0, _NOWHERE
        if cuts:
            box = self._draw_cut(generator(seed, epoch, step, "cutmix"))
            label_share = 1 - (box[2] - box[0]) * (box[3] - box[1]) / self.size**2
        else:
            share = label_share = generator(seed, epoch, step, "mixup").beta(self.mixup, self.mixup)
        numbers = {"mix": np.asarray(share, dtype=np.float32)}
        if self.cutmix:  # in every batch, so that one captured step fits all
            numbers["label_share"] = np.asarray(label_share, dtype=np.float32)
            numbers |= {key: np.asarray(edge, dtype=np.int32) for key, edge in zip(CUT_KEYS, box, strict=True)}
        return numbers

    def evaluation_params(self, height: int, width: int) -> Params:
        """Resize to `eval_resize`, keep the middle `eval_size` square; rounded as in torchvision or TensorFlow."""
        return self._centre(height, width, self.eval_resize, self.eval_size)

    def apply(self, params: Params, pixels: np.ndarray) -> np.ndarray:
        """Apply `params` to (height, width, 3) uint8 pixels. Returns (size, size, 3) uint8, equal to torchvision's or,
        with legacy interpolation, to TensorFlow's."""
        # Cut before resizing: resize(box=...) would let the filter see beyond the box.
        box = pixels[params.top : params.top + params.height, params.left : params.left + params.width]
        if self.interpolation == "legacy":
            resized_sides = (params.resized_height, params.resized_width)
            corner = (params.window_top, params.window_left)
            square = tensorflow.resize_legacy(box, resized_sides, corner, params.size, params.flip)
        else:
            square = _resize_and_flip(box, params, self.interpolation)
        if params.policy:
            image = Image.fromarray(square)
            return np.array(policies.apply(params.policy, image, _RESAMPLING[self.interpolation]))
        return square

    def pack(self, square: np.ndarray) -> np.ndarray:
        """Convert (size, size, 3) uint8 to `image_type`, normalised unless that is uint8."""
        if self.image_type == "uint8":
            return square
        dtype = torch.bfloat16 if self.image_type == "bf16" else torch.float32
        values = normalize(torch.from_numpy(square)[None], self.mean, self.std, dtype)[0].permute(1, 2, 0)
        return (values.view(torch.int16) if self.image_type == "bf16" else values).numpy()

    def unpack(self, images: Tensor, dtype: torch.dtype) -> Tensor:
        """Turn packed images (batch, height, width, 3) into normalised (batch, 3, height, width) in channels_last."""
        if images.dtype == torch.uint8:
            return normalize(images, self.mean, self.std, dtype)
        values = images.view(torch.bfloat16) if images.dtype == torch.int16 else images
        return values.permute(0, 3, 1, 2).to(dtype)

    def finish(self, batch: Batch, dtype: torch.dtype) -> Batch:
        """Normalise, erase and mix a batch on its device, with the numbers in it."""
        image = self.unpack(batch["image"], dtype)
        if "erase" in batch:
            image = erase(image, batch["erase"])
        if "mix" in batch:
            box = tuple(batch[key] for key in CUT_KEYS) if CUT_KEYS[0] in batch else None
            partner = partner_of(self.mixup_partner, len(image), batch.get("mix_rank"), image.device)
            image = mix(image, batch["mix"], box, partner)
            if partner is not None:
                batch = {**batch, "partner": partner}
        return {**batch, "image": image}

    def _draw_box(self, random: np.random.Generator, height: int, width: int) -> tuple[int, int, int, int]:
        """Draw RandomResizedCrop's (top, left, height, width): uniform area, log-uniform ratio, else the middle."""
        if self.crop == "tf":
            return tensorflow.draw_box(random, height, width, self.crop_scale, self.crop_ratio)
        narrowest, widest = self.crop_ratio
        for _ in range(_CROP_TRIES):
            area = height * width * random.uniform(*self.crop_scale)
            ratio = math.exp(random.uniform(math.log(narrowest), math.log(widest)))
            box_width, box_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < box_width <= width and 0 < box_height <= height:
                top = int(random.integers(height - box_height + 1))
                left = int(random.integers(width - box_width + 1))
                return top, left, box_height, box_width
        box_height, box_width = height, width
        if width / height < narrowest:
            box_height = max(1, round(width / narrowest))
        elif width / height > widest:
            box_width = max(1, round(height * widest))
        return (height - box_height) // 2, (width - box_width) // 2, box_height, box_width

    def _draw_shift(self, random: np.random.Generator, height: int, width: int) -> Place:
        """Draw RandomCrop's window, uniformly over all places within the padded image."""
        whole = self._unmoved(height, width)

        def corner(side: int) -> int:
            first, last = sorted((-self.crop_padding, side - self.size + self.crop_padding))
            return int(random.integers(first, last + 1))

        top, left = corner(whole.resized_height), corner(whole.resized_width)
        return 0, 0, height, width, whole.resized_height, whole.resized_width, top, left

    def _unmoved(self, height: int, width: int) -> Params:
        """Return the same field of view as in evaluation, whatever the size of the square."""
        return self._centre(height, width, max(1, round(self.size * self.eval_resize / self.eval_size)), self.size)

    def _centre(self, height: int, width: int, side: int, size: int) -> Params:
        """Resize to `side`, keep the middle square of `size`."""
        if self.eval_geometry == "stretch":
            resized = (side, side)
        elif self.crop == "tf":
            resized = tensorflow.resized_sides(height, width, side)
        elif width <= height:  # torchvision truncates the longer side
            resized = (int(side * height / width), side)
        else:
            resized = (side, int(side * width / height))
        down = self.crop == "tf"
        corner = (_centre_offset(resized[0], size, down), _centre_offset(resized[1], size, down))
        return Params(0, 0, height, width, *resized, *corner, size=size, flip=False)

    def _draw_erased(self, random: np.random.Generator) -> Box:
        """Draw RandomErasing's box; empty by chance, or if no try gave one smaller than the image."""
        if random.random() >= self.random_erase:
            return _NOWHERE
        flattest, steepest = _ERASE_RATIO
        for _ in range(_ERASE_TRIES):
            area = self.size**2 * random.uniform(*_ERASE_SCALE)
            ratio = math.exp(random.uniform(math.log(flattest), math.log(steepest)))
            height, width = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if height < self.size and width < self.size:
                top = int(random.integers(self.size - height + 1))
                left = int(random.integers(self.size - width + 1))
                return top, left, top + height, left + width
        return _NOWHERE

    def _draw_cut(self, random: np.random.Generator) -> Box:
        """Draw CutMix's box: sides of sqrt(1 - Beta), its centre anywhere, clipped to the image."""
        half = int(0.5 * math.sqrt(1 - random.beta(self.cutmix, self.cutmix)) * self.size)
        x, y = int(random.integers(self.size)), int(random.integers(self.size))
        return max(y - half, 0), max(x - half, 0), min(y + half, self.size), min(x + half, self.size)


def normalize(
    images: Tensor, mean: tuple[float, ...], std: tuple[float, ...], dtype: torch.dtype, highest: float = 255
) -> Tensor:
    """Compute (x / highest - mean) / std of (batch, height, width, channels), as (batch, channels, height, width) in
    channels_last.

    The permuted view already is channels_last, so no pixel moves. The constants are filled on the device: a copy from
    the host would make the host wait, and could not be captured in a graph.
    """
    scale = [1 / (highest * deviation) for deviation in std]
    shift = [-average / deviation for average, deviation in zip(mean, std, strict=True)]
    values = images.permute(0, 3, 1, 2).float()
    return torch.addcmul(_per_channel(shift, values), values, _per_channel(scale, values)).to(dtype)


def served_pixels(spec: DataSpec, preprocessing: Mapping[str, Any], **fields: Any) -> ServedInput:
    """Describe an exported network that normalises pixels itself; `fields` of the data config load such pixels."""
    finish = partial(normalize, mean=spec.mean, std=spec.std, dtype=torch.float32)
    return ServedInput("NHWC", (*spec.size, spec.channels), "uint8", preprocessing, finish, fields)


def erase(images: Tensor, boxes: Tensor) -> Tensor:
    """Set each image to 0, the mean colour, inside its own box: (batch, 4) of top, left, bottom, right."""
    # masked_fill would lose channels_last.
    return torch.where(_inside(boxes.unbind(1), images).unsqueeze(1), 0.0, images)


def mix(images: Tensor, share: Tensor, box: tuple[Tensor, ...] | None = None, partner: Tensor | None = None) -> Tensor:
    """Mixup: blend each image (`share`, one for all or one each) with its partner: the image before it (the last for
    the first), or number `partner`. Cutmix: take `box` (top, left, bottom, right, one for all) from the partner.

    Labels are mixed by the task with the same partner, `labels.roll(1, 0)` or `labels[partner]`.
    """
    if partner is None:
        # Equal to images.roll(1, 0), which would lose channels_last on CUDA.
        partners = torch.cat((images[-1:], images[:-1]))
    else:
        # Permuted as they lie in memory, for the same reason.
        partners = images.permute(0, 2, 3, 1).index_select(0, partner).permute(0, 3, 1, 2)
    if share.ndim:
        share = share.view(-1, 1, 1, 1)
    # A share for each image would promote the result to its own type.
    mixed = (images * share + partners * (1 - share)).to(images.dtype)
    return mixed if box is None else torch.where(_inside(box, images), partners, mixed)


def partner_of(kind: str, samples: int, ranks: Tensor | None, device: torch.device) -> Tensor | None:
    """Return the index of each image's partner, for `mixup_partner`; None for the previous one."""
    if kind == "previous":
        return None
    if kind == "reversed":
        return torch.arange(samples - 1, -1, -1, device=device)
    assert ranks is not None, "a batch with random partners brings its numbers"
    return ranks.argsort(stable=True)  # stable, so that equal numbers always sort the same way


def _inside(box: tuple[Tensor, ...], images: Tensor) -> Tensor:
    """Return a mask of the box: (height, width) for scalar edges, (batch, height, width) for one box per image."""
    top, left, bottom, right = (edge.unsqueeze(-1) for edge in box)
    rows = torch.arange(images.shape[2], device=images.device)
    columns = torch.arange(images.shape[3], device=images.device)
    in_rows, in_columns = (rows >= top) & (rows < bottom), (columns >= left) & (columns < right)
    return in_rows.unsqueeze(-1) & in_columns.unsqueeze(-2)


def _per_channel(numbers: list[float], like: Tensor) -> Tensor:
    filled = [torch.full((1, 1, 1, 1), number, dtype=like.dtype, device=like.device) for number in numbers]
    return torch.cat(filled, dim=1)  # (1, channels, 1, 1)


def _centre_offset(length: int, size: int, rounds_down: bool) -> int:
    if length < size:
        return -((size - length) // 2)
    # torchvision rounds half to even.
    return (length - size) // 2 if rounds_down else round((length - size) / 2)


def _resize_and_flip(box: np.ndarray, params: Params, interpolation: str) -> np.ndarray:
    """Resize the box, cut out its window, flip it if `params` say so: (size, size, 3)."""
    if params.resized_height * params.resized_width > _MAX_RESIZED_PIXELS:
        resized, top, left = _resize_visible_part(box, params, interpolation)
    else:
        resized = _resize(box, params.resized_height, params.resized_width, interpolation)
        top, left = params.window_top, params.window_left
    square = _window(resized, top, left, params.size)  # (3, size, size)
    return (square.flip(2) if params.flip else square).permute(1, 2, 0).contiguous().numpy()


def _resize(box: np.ndarray, height: int, width: int, interpolation: str) -> Tensor:
    """Resize to (3, height, width), antialiased, equal to torchvision v2 on uint8 tensors: Pillow's filter at more than
    three times its speed; bilinear is within two grey levels of Pillow."""
    sides = (height, width)
    return functional.interpolate(as_planes(box), sides, mode=interpolation, align_corners=False, antialias=True)[0]


def as_planes(box: np.ndarray) -> Tensor:
    """View pixels (height, width, 3) as (1, 3, height, width) in channels_last: torch then resizes and flips whole
    pixels in half the time that planes take, and what it returns lies as a batch does. The bits are the same."""
    # torch warns about arrays that are not writable.
    pixels = torch.from_numpy(box if box.flags.writeable and min(box.strides) > 0 else box.copy())
    # Not [None], with which the first stride would not be that of channels_last.
    return pixels.unsqueeze(0).permute(0, 3, 1, 2)


def _window(planes: Tensor, top: int, left: int, size: int) -> Tensor:
    """Cut out the square of `size` at (top, left); black beyond the image."""
    shown = planes[:, max(top, 0) : top + size, max(left, 0) : left + size]
    if shown.shape[1:] == (size, size):
        return shown
    square = planes.new_zeros(len(planes), size, size)
    down, across = max(-top, 0), max(-left, 0)
    square[:, down : down + shown.shape[1], across : across + shown.shape[2]] = shown
    return square


def _resize_visible_part(box: np.ndarray, params: Params, interpolation: str) -> tuple[Tensor, int, int]:
    """Compute the part of the resized box that its window shows, and where the window starts in it.

    Equal to resizing everything up to the rounding of the filter's weights.
    """
    reach = _FILTER_REACH[interpolation]
    rows = _visible_range(params.height, params.resized_height, params.window_top, params.size, reach)
    columns = _visible_range(params.width, params.resized_width, params.window_left, params.size, reach)
    (row_start, row_stop, from_row, to_row, shown_rows) = rows
    (column_start, column_stop, from_column, to_column, shown_columns) = columns
    source = Image.fromarray(np.ascontiguousarray(box[row_start:row_stop, column_start:column_stop]))
    edges = (from_column, from_row, to_column, to_row)
    resized = source.resize((shown_columns, shown_rows), _RESAMPLING[interpolation], box=edges)
    planes = torch.from_numpy(np.array(resized)).permute(2, 0, 1)
    return planes, min(params.window_top, 0), min(params.window_left, 0)


def _visible_range(length: int, resized: int, offset: int, size: int, reach: int) -> tuple[int, int, float, float, int]:
    """Along one axis, return the source pixels needed (start, stop), exact edges within them, the output length."""
    first, last = max(offset, 0), min(offset + size, resized)
    scale = length / resized
    margin = math.ceil(reach * max(scale, 1)) + 1
    start = max(math.floor(first * scale) - margin, 0)
    stop = min(math.ceil(last * scale) + margin, length)
    return start, stop, first * scale - start, min(last * scale, length) - start, last - first
