"""Draw findings into their image: boxes with names and scores, or a strip of class names below.

The last station of `sightline predict`. Pillow alone; letters.py has the fonts.
"""

from __future__ import annotations

import colorsys
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

from sightline.drawing.letters import Letters, letters_of
from sightline.parts import Finding

# A photo of a camera is cut down to what a screen shows; a thumbnail is enlarged until text fits beside it.
LARGEST = 1600
SMALLEST = 320
_GOLDEN = 0.618034  # steps of this share of the colour circle never come close to an earlier one for long
_LIGHTNESS = (0.56, 0.72, 0.44)
_LEAST_LUMINANCE = 0.2  # against which dark text still has the contrast of 4.5 that WCAG asks for
GROUND, _BAR, TEXT = (24, 26, 30), (66, 108, 170), (240, 242, 245)
_DARK = (16, 16, 16)
_LONGEST = 200  # letters of a text that are tried to fit

Colour = tuple[int, int, int]
Box = tuple[int, int, int, int]  # left, top, right, bottom; the last two are outside


def draw(pixels: np.ndarray, findings: Sequence[Finding]) -> Image.Image:
    """Return the image (height, width, 3) uint8 RGB with its findings drawn in."""
    image = _on_screen(Image.fromarray(pixels))
    boxes = [finding for finding in findings if finding.box is not None]
    if boxes:
        return draw_boxes(image, boxes)
    return _with_strip(image, findings)


def colour_of(number: int) -> Colour:
    """Return the colour of a class, the same in every image; neighbours differ in hue and lightness."""
    lightness = _LIGHTNESS[number % len(_LIGHTNESS)]
    while True:
        red, green, blue = colorsys.hls_to_rgb(number * _GOLDEN % 1.0, lightness, 0.85)
        colour = round(red * 255), round(green * 255), round(blue * 255)
        if luminance(colour) >= _LEAST_LUMINANCE:
            return colour
        lightness += 0.02  # blue and violet are dark at the lightness where yellow is bright


def luminance(colour: Colour) -> float:
    """Return how bright a colour looks, 0 to 1 (WCAG's relative luminance)."""
    linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _on_screen(image: Image.Image) -> Image.Image:
    longer = max(image.size)
    if longer > LARGEST:
        sides = [max(1, round(side * LARGEST / longer)) for side in image.size]
        return image.resize((sides[0], sides[1]), Image.Resampling.LANCZOS)
    if longer < SMALLEST:
        times = -(-SMALLEST // longer)
        return image.resize((image.width * times, image.height * times), Image.Resampling.NEAREST)
    return image


def draw_boxes(
    image: Image.Image,
    findings: Sequence[Finding],
    letters_px: int = 11,
    has_scores: bool = True,
    labelled: int | None = None,
) -> Image.Image:
    """Draw boxes into the image itself and return it; the first `labelled` have their names, in letters of at least
    this height."""
    pen = ImageDraw.Draw(image)
    size = max(letters_px, round(max(image.size) / 45))
    letters = letters_of(size)
    line = max(2, size // 7)
    placed: list[Box] = []
    labels = []
    # The surest last, so that it lies on top; its label is placed first, so that it gets the best place.
    for finding in reversed(findings):
        left, top, right, bottom = _pixels(finding, image)
        # A dark line on both sides keeps the outline visible on ground of its own colour.
        pen.rectangle((left - 1, top - 1, right, bottom), outline=_DARK, width=line + 2)
        pen.rectangle((left, top, right - 1, bottom - 1), outline=colour_of(finding.class_id), width=line)
    for finding in findings[:labelled]:
        box = _pixels(finding, image)
        room = max(box[2] - box[0], image.width // 2) - size // 2
        score = f" {finding.score:.2f}" if has_scores else ""
        text = fitting(f"{letters.drawable(finding.name)}{score}", letters, room)
        width, height = round(letters.length(text)) + size // 2, round(size * 1.3)
        place = _place(box, width, height, image.size, placed)
        placed.append(place)
        labels.append((place, text, finding.class_id))
    for place, text, number in reversed(labels):
        pen.rectangle((place[0], place[1], place[2] - 1, place[3] - 1), fill=colour_of(number))
        letters.write(pen, (place[0] + size // 4, (place[1] + place[3]) / 2), text, "lm", fill=_DARK)
    return image


def _pixels(finding: Finding, image: Image.Image) -> Box:
    """Return the box in pixels of the image, at least 3 wide and high and inside."""
    assert finding.box is not None, "only findings with a box have a place"
    left, top, right, bottom = finding.box
    x = min(round(left * image.width), image.width - 3)
    y = min(round(top * image.height), image.height - 3)
    return max(x, 0), max(y, 0), max(round(right * image.width), x + 3), max(round(bottom * image.height), y + 3)


def _place(box: Box, width: int, height: int, sides: tuple[int, int], placed: Sequence[Box]) -> Box:
    """Choose the place of a label: on its box, in it, below it, wherever it covers least of the other labels."""
    left, top, right, bottom = box
    best: tuple[int, Box] | None = None
    rows = (top - height, top, bottom, bottom - height, *range(top + height, bottom - height, height))
    for y in rows:
        for x in (left, right - width):
            x, y_inside = max(0, min(x, sides[0] - width)), max(0, min(y, sides[1] - height))
            place = (x, y_inside, x + width, y_inside + height)
            covered = sum(_common_area(place, other) for other in placed)
            if best is None or covered < best[0]:
                best = covered, place
            if covered == 0:
                return place
    assert best is not None, "there is always a first candidate"
    return best[1]


def _common_area(one: Box, other: Box) -> int:
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return max(0, width) * max(0, height)


def _with_strip(image: Image.Image, findings: Sequence[Finding]) -> Image.Image:
    """Return the image above one row for each class; a bar behind the name is as long as its probability."""
    width = max(image.width, SMALLEST)
    size = max(13, round(width / 36))
    letters, row, margin = letters_of(size), round(size * 1.6), round(size * 0.6)
    strip = len(findings) or 1
    canvas = Image.new("RGB", (width, image.height + strip * row + 2 * margin), GROUND)
    canvas.paste(image, ((width - image.width) // 2, 0))
    pen = ImageDraw.Draw(canvas)
    for number, finding in enumerate(findings):
        top = image.height + margin + number * row
        percent = f"{finding.score:.1%}"
        room = width - 3 * margin - round(letters.length("100.0%"))
        pen.rectangle((margin, top + 1, margin + round(room * finding.score), top + row - 3), fill=_BAR)
        name = fitting(letters.drawable(finding.name), letters, room - margin)
        middle = top + row / 2 - 1
        letters.write(pen, (margin + size // 3, middle), name, "lm", fill=TEXT)
        letters.write(pen, (width - margin, middle), percent, "rm", fill=TEXT)
    if not findings:
        letters.write(pen, (margin, image.height + margin + row / 2), "nothing found", "lm", fill=TEXT)
    return canvas


def fitting(text: str, letters: Letters, room: float) -> str:
    """Return the text, without its middle if it is too long: scores stand at its end."""
    shown, kept = text, min(len(text), _LONGEST)
    while (len(shown) > _LONGEST or letters.length(shown) > room) and kept > 2:
        kept -= 1
        shown = f"{text[: kept // 2]}...{text[len(text) - (kept - kept // 2) :]}"
    return shown
