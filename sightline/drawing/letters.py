"""Text in drawings, in the script it is written in: the font that Pillow brings along, which has ASCII only, then fonts
that are usual on machines, and a question mark only for a letter that none of them has.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from PIL import ImageDraw, ImageFont

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

OWN = ""  # in place of a file: Pillow's
FOLDERS = (
    "/usr/share/fonts",
    "/usr/local/share/fonts",
    "~/.local/share/fonts",
    "~/.fonts",
    "/System/Library/Fonts",
    "/Library/Fonts",
)
# Many scripts, then Chinese, Japanese and Korean; behind these one of Noto's per script.
USUAL = (
    "DejaVuSans.ttf",
    "NotoSans-Regular.ttf",
    "LiberationSans-Regular.ttf",
    "FreeSans.ttf",
    "Arial Unicode.ttf",
    "NotoSansCJK-Regular.ttc",
    "NotoSansCJK-VF.otf.ttc",
    "wqy-microhei.ttc",
    "wqy-zenhei.ttc",
    "DroidSansFallbackFull.ttf",
    "PingFang.ttc",
    "Hiragino Sans GB.ttc",
    "ipag.ttf",
)
_TRIED_AT = 32  # pixels
_NO_LETTER = "\uffff"  # what a font draws for it, it draws for every letter that it lacks


@cache
def fonts_here() -> tuple[str, ...]:
    """Return the files of usual fonts on this machine, in the order in which they are tried."""
    found: dict[str, str] = {}
    for folder in FOLDERS:
        for place, _, names in os.walk(Path(folder).expanduser()):
            for name in names:
                if name in USUAL or (name.startswith("NotoSans") and "-Regular." in name):
                    found.setdefault(name, os.path.join(place, name))
    return tuple(found[name] for name in sorted(found, key=lambda name: (_rank(name), name)))


def _rank(name: str) -> int:
    return USUAL.index(name) if name in USUAL else len(USUAL)


@cache
def _font(file: str, size: int) -> Font | None:
    """Load a font; None where the file cannot be read as one."""
    if file == OWN:
        return ImageFont.load_default(size=size)
    try:
        return ImageFont.FreeTypeFont(file, size)  # truetype() would look for the name in other folders too
    except (OSError, ValueError):
        return None


@cache
def _has(file: str, letter: str) -> bool:
    """Return whether a font has a letter: it draws something, and not what it draws for letters that it lacks."""
    if file == OWN and not " " <= letter <= "~":
        return False
    font = _font(file, _TRIED_AT)
    if font is None:
        return False
    if letter.isspace():
        return True
    drawn, lacking = (font.getmask(each) for each in (letter, _NO_LETTER))
    return drawn.getbbox() is not None and (drawn.size, bytes(drawn)) != (lacking.size, bytes(lacking))


class Letters:
    """Text of one size. `files` are fonts to use besides Pillow's; by default those of the machine."""

    def __init__(self, size: int, files: Sequence[str] | None = None):
        self.size = size
        self.files = (OWN, *(fonts_here() if files is None else files))

    def drawable(self, name: str) -> str:
        """Return what can be drawn of a name, on one line: a letter that no font has loses its accent, or becomes a
        question mark."""
        letters = (self._drawable(letter) for letter in unicodedata.normalize("NFC", name))
        return "".join(letters)

    def _drawable(self, letter: str) -> str:
        if letter.isspace():
            return " "
        if unicodedata.category(letter) in ("Cc", "Cf"):  # controls and marks of direction
            return ""
        if unicodedata.category(letter) == "Cs":  # a byte of a file name that is not text
            return "?"
        if self._file_of(letter) is not None:
            return letter
        for spelled in (letter, letter.casefold()):  # é is e and its accent; ß is ss
            parts = [part for part in unicodedata.normalize("NFKD", spelled) if not unicodedata.combining(part)]
            if parts and all(_has(OWN, part) for part in parts):
                return "".join(parts)
        return "" if unicodedata.combining(letter) else "?"

    def _file_of(self, letter: str) -> str | None:
        return next((file for file in self.files if _has(file, letter)), None)

    def length(self, text: str) -> float:
        """Return how wide a drawable text is, in pixels."""
        return sum(font.getlength(part) for font, part in self._runs(text))

    def write(self, pen: ImageDraw.ImageDraw, place: tuple[float, float], text: str, anchor: str, **ink: Any) -> None:
        """Draw a drawable text at a place; anchors are Pillow's: l, m or r, then a or m."""
        runs = self._runs(text)
        if len(runs) == 1:
            pen.text(place, text, font=runs[0][0], anchor=anchor, **ink)
            return
        x, y = place
        x -= self.length(text) * {"l": 0, "m": 0.5, "r": 1}[anchor[0]]
        ascent, descent = _metrics(runs[0][0], self.size)
        baseline = y + (ascent if anchor[1] == "a" else (ascent - descent) / 2)
        for font, part in runs:
            pen.text((x, baseline), part, font=font, anchor="ls", **ink)
            x += font.getlength(part)

    def _runs(self, text: str) -> list[tuple[Font, str]]:
        """Split a text where its font changes; a single font that has all of it is preferred."""
        for file in self.files:
            if all(_has(file, letter) for letter in text):
                return [(self._loaded(file), text)]
        runs: list[tuple[str, str]] = []
        for file, letters in groupby(text, key=lambda letter: self._file_of(letter) or OWN):
            runs.append((file, "".join(letters)))
        return [(self._loaded(file), part) for file, part in runs]

    def _loaded(self, file: str) -> Font:
        font = _font(file, self.size)
        assert font is not None, "it was loaded before, to see what it has"
        return font


def _metrics(font: Font, size: int) -> tuple[float, float]:
    """Return how far letters reach above and below their line."""
    if isinstance(font, ImageFont.FreeTypeFont):
        return font.getmetrics()
    return size, 0


@cache
def letters_of(size: int) -> Letters:
    """Return the letters of a size, in the fonts of this machine."""
    return Letters(size)
