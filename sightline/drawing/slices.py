"""A volume as a person looks at it: slices side by side, the outlines of classes in them, what each colour means.

Anterior (or superior) lies on top and the patient's right on the left, as radiologists look at slices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

from sightline.drawing.findings import GROUND, TEXT, Colour, colour_of, fitting
from sightline.drawing.letters import Letters, letters_of

SLICES = 8
COLUMNS = 4
TILE = 360  # pixels of the longer side of a slice
_LONGEST = 1600  # pixels of the longer side of a drawn image
_GAP = 6
_FINE = 2  # outlines are made this many times finer than the image, so that they come out smooth
_MARGIN_VOXELS = 2
_PERCENTILES = (1, 99)
_SAMPLED = 2**20  # voxels that the percentiles are taken from
# Bright against grey, and far from each other also for the colour-blind; after Okabe and Ito.
_OUTLINES: tuple[Colour, ...] = ((255, 190, 0), (60, 200, 255), (255, 95, 70), (0, 225, 150), (235, 130, 220))
_SEAM = 150  # of 255: how much of what lies below a seam it hides
_LABEL_TINT = 0.65  # the share of white in the outline of a label


@dataclass(frozen=True)
class Look:
    """A volume to look at; arrays are (depth, height, width)."""

    name: str
    image: np.ndarray
    spacing: Sequence[float]  # mm along depth, height, width
    affine: np.ndarray  # (4, 4), of the file: (x, y, z) -> mm
    classes: tuple[str, ...]  # background first
    mask: np.ndarray  # predicted
    label: np.ndarray | None = None


def contact_sheet(look: Look) -> Image.Image:
    """Draw up to eight slices through the prediction and the label, or through the middle, above a legend."""
    rows, columns, turns, marks = _view(look)
    height = (rows.stop - rows.start) * look.spacing[1]
    width = (columns.stop - columns.start) * look.spacing[2]
    scale = TILE / max(height, width)
    size = max(48, round(width * scale)), max(48, round(height * scale))
    low, high = _window(look.image)
    tiles = []
    for number in shown_slices(look.mask if look.label is None else np.maximum(look.mask, look.label)):
        cut = (number, rows, columns)
        grey = np.clip((look.image[cut].astype(np.float32) - low) / (high - low), 0, 1)
        tile = Image.fromarray((grey * 255).astype(np.uint8)[turns]).resize(size, Image.Resampling.BICUBIC)
        label = None if look.label is None else look.label[cut][turns]
        tiles.append(_captioned(outlined(tile.convert("RGB"), look.mask[cut][turns], label), number, marks))
    return _with_legend(tiles, look)


def outlined_image(pixels: np.ndarray, look: Look) -> Image.Image:
    """Draw a 2D image (height, width, 3) with outlines above a legend; `look` is its volume of one slice."""
    height, width = pixels.shape[:2]
    scale = min(max(1.0, TILE / max(height, width)), _LONGEST / max(height, width))
    size = max(48, round(width * scale)), max(48, round(height * scale))
    tile = Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)
    drawn = outlined(tile, look.mask[0], None if look.label is None else look.label[0])
    return _with_legend([drawn], look, is_image=True)


def grey_tile(plane: np.ndarray, side: int) -> Image.Image:
    """Draw a plane (height, width) of any numbers as an image of this longer side."""
    low, high = _window(plane)
    grey = np.nan_to_num(np.clip((plane.astype(np.float32) - low) / (high - low), 0, 1))
    scale = side / max(plane.shape)
    size = max(1, round(plane.shape[1] * scale)), max(1, round(plane.shape[0] * scale))
    return Image.fromarray((grey * 255).astype(np.uint8)).resize(size, Image.Resampling.BICUBIC).convert("RGB")


def outline_colour(number: int) -> Colour:
    """Return the colour of a class, the same in every image; 1 is the first after the background."""
    return _OUTLINES[number - 1] if 0 < number <= len(_OUTLINES) else colour_of(number)


def shown_slices(mask: np.ndarray) -> list[int]:
    """Choose slices evenly from the first one with a class to the last; without any, through its middle half."""
    with_class = np.flatnonzero(mask.reshape(len(mask), -1).any(1))
    if len(with_class):
        first, last = int(with_class[0]), int(with_class[-1])
    else:
        first, last = len(mask) // 4, len(mask) - 1 - len(mask) // 4
    return sorted({round(at) for at in np.linspace(first, last, SLICES)})


def millilitres(voxels: int, spacing: Sequence[float]) -> float:
    """Return the volume of so many voxels."""
    return voxels * math.prod(spacing) / 1000


def _view(look: Look) -> tuple[slice, slice, tuple[slice, slice], tuple[str, str]]:
    """Return the rows and columns that show something, how to turn them, and the names of the left and upper sides."""
    shown = (look.image > look.image.min()).any(0) | (look.mask > 0).any(0)
    edges = []
    for axis in (0, 1):
        at = np.flatnonzero(shown.any(1 - axis))
        first, last = (int(at[0]), int(at[-1]) + 1) if len(at) else (0, shown.shape[axis])
        edges.append(slice(max(0, first - _MARGIN_VOXELS), last + _MARGIN_VOXELS))
    rows, columns = (slice(edge.start, min(edge.stop, n)) for edge, n in zip(edges, shown.shape, strict=True))
    ways, marks = [], []
    for axis_of_file in (1, 0):  # rows run along y, columns along x
        direction = look.affine[:3, axis_of_file]
        world = int(np.abs(direction).argmax())
        # The names say where the axes of an affine point to. First comes what they point to, hence the turn.
        ways.append(slice(None, None, -1 if direction[world] > 0 else 1))
        marks.append("RAS"[world])
    return rows, columns, (ways[0], ways[1]), (marks[1], marks[0])


def _window(image: np.ndarray) -> tuple[float, float]:
    """Choose what becomes black and what white; of a volume with much empty ground, the ground does not count."""
    sample = image.reshape(-1)[:: max(1, image.size // _SAMPLED)]
    inside = sample[sample > sample.min()]
    low, high = np.percentile(inside if len(inside) else sample, _PERCENTILES).tolist()
    return low, max(high, low + 1e-6 * max(1.0, abs(low)))


def outlined(tile: Image.Image, mask: np.ndarray, label: np.ndarray | None) -> Image.Image:
    """Draw the prediction as lines inside its edge; a label as hairlines outside of its own, so that both show."""
    from scipy import ndimage  # half a second that runs without volumes need not wait for

    fine = tile.width * _FINE, tile.height * _FINE
    lines = []
    for number, inside in _regions(mask, fine):
        line = inside & ~ndimage.binary_erosion(inside, iterations=2 * _FINE)
        lines.append((line, outline_colour(number)))
    for number, inside in _regions(label, fine) if label is not None else []:
        line = ndimage.binary_dilation(inside, iterations=_FINE) & ~inside
        red, green, blue = (round(c + (255 - c) * _LABEL_TINT) for c in outline_colour(number))
        lines.append((line, (red, green, blue)))
    # A dark seam keeps bright lines visible on bright tissue.
    for line, _ in lines:
        _paint(tile, ndimage.binary_dilation(line, iterations=_FINE), GROUND, _SEAM)
    for line, colour in lines:
        _paint(tile, line, colour)
    return tile


def _regions(classes: np.ndarray, size: tuple[int, int]) -> list[tuple[int, np.ndarray]]:
    """Return the region of each class in an image of this size, rounded where voxels are larger than pixels."""
    numbers = np.unique(np.append(classes, 0)).tolist()
    # Between pixels of a smaller image a class of one voxel would melt away.
    way = Image.Resampling.BILINEAR if size[0] >= classes.shape[1] else Image.Resampling.NEAREST
    shares = [np.asarray(Image.fromarray((classes == n).astype(np.float32)).resize(size, way)) for n in numbers]
    strongest = np.argmax(shares, axis=0)
    return [(n, strongest == place) for place, n in enumerate(numbers) if n]


def _paint(tile: Image.Image, line: np.ndarray, colour: Colour, strength: int = 255) -> None:
    cover = Image.fromarray(line.astype(np.uint8) * strength).reduce(_FINE)
    tile.paste(colour, (0, 0, tile.width, tile.height), cover)


def _captioned(tile: Image.Image, number: int, marks: tuple[str, str]) -> Image.Image:
    pen = ImageDraw.Draw(tile)
    for place, anchor, text in (
        ((6.0, 4.0), "la", f"slice {number}"),
        ((6.0, tile.height / 2), "lm", marks[0]),
        ((tile.width / 2, 4.0), "ma", marks[1]),
    ):
        letters_of(15).write(pen, place, text, anchor, fill=TEXT, stroke_width=2, stroke_fill=GROUND)
    return tile


def _with_legend(tiles: Sequence[Image.Image], look: Look, is_image: bool = False) -> Image.Image:
    columns = min(COLUMNS, len(tiles))
    width, height = tiles[0].size
    across = max(columns * (width + _GAP) + _GAP, 480)
    rows = -(-len(tiles) // columns)
    letters, size = letters_of(17), 17
    lines = _legend_lines(look, letters, across - 4 * _GAP, is_image)
    top = rows * (height + _GAP) + _GAP
    canvas = Image.new("RGB", (across, top + round(1.7 * size * len(lines)) + 2 * _GAP), GROUND)
    left = (across - columns * (width + _GAP) + _GAP) // 2
    for place, tile in enumerate(tiles):
        row, column = divmod(place, columns)
        canvas.paste(tile, (left + column * (width + _GAP), _GAP + row * (height + _GAP)))
    pen = ImageDraw.Draw(canvas)
    for number, line in enumerate(lines):
        middle = top + round((number + 0.5) * 1.7 * size)
        for x, text, colour in line:
            if colour is not None:
                pen.rectangle((x, middle - size // 2, x + size, middle + size // 2), outline=colour, width=3)
                x += round(1.5 * size)
            letters.write(pen, (x, middle), text, "lm", fill=TEXT)
    return canvas


Item = tuple[int, str, Colour | None]


def _legend_lines(look: Look, letters: Letters, room: int, is_image: bool) -> list[list[Item]]:
    """Return the lines of the legend: the volume or image, then as many classes in a line as fit."""
    sides = " x ".join(map(str, look.mask.shape))
    spacing = " x ".join(f"{mm:.4g}" for mm in look.spacing)
    name = letters.drawable(look.name)
    about = f"{name}  slices x rows x columns {sides}, voxels of {spacing} mm"
    amount = _share if is_image else _amount
    if is_image:
        about = f"{name}  {look.mask.shape[2]} x {look.mask.shape[1]} pixels"
    lines: list[list[Item]] = [[(2 * _GAP, fitting(about, letters, room), None)]]
    x = room  # a new line
    for number in range(1, len(look.classes)):
        text = f"{letters.drawable(look.classes[number])}  {amount(look.mask, number, look.spacing)}"
        if look.label is not None:
            text += f", label {amount(look.label, number, look.spacing)}"
        text = fitting(text, letters, room - 40)
        width = round(letters.length(text)) + 70
        if x + width > room + 40:
            lines.append([])
            x = 2 * _GAP
        lines[-1].append((x, text, outline_colour(number)))
        x += width
    if look.label is not None:
        lines.append([(2 * _GAP, "bold: predicted, hairline: label", None)])
    return lines


def _amount(mask: np.ndarray, number: int, spacing: Sequence[float]) -> str:
    amount = millilitres(int(np.count_nonzero(mask == number)), spacing)
    return f"{amount:.3f} ml" if amount < 10 else f"{amount:.1f} ml"


def _share(mask: np.ndarray, number: int, spacing: Sequence[float]) -> str:
    return f"{100 * np.count_nonzero(mask == number) / mask.size:.2f} %"
