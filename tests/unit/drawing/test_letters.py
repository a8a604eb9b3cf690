"""Names in drawings keep their letters, in whatever font has them."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

from sightline.drawing import letters as fonts
from sightline.drawing.letters import OWN, Letters, fonts_here, letters_of

ALONE = Letters(24, files=())  # Pillow's font, which has ASCII only


def has(*texts: str) -> bool:
    return all(Letters(24).drawable(text) == text for text in texts)


def ink(letters: Letters, text: str) -> np.ndarray:
    image = Image.new("L", (400, 60))
    letters.write(ImageDraw.Draw(image), (10.0, 30.0), text, "lm", fill=255)
    return np.asarray(image)


@pytest.mark.parametrize(
    ("name", "drawn"),
    [
        ("plain, ASCII ~", "plain, ASCII ~"),
        ("Katzen süß", "Katzen suss"),
        ("u\u0308", "u"),
        ("two\nlines\tand", "two lines and"),
        ("Кошка 猫", "????? ?"),
        ("a\u202eb\x1b", "ab"),
        ("\udcff", "?"),
    ],
)
def test_without_a_font_only_the_accent_is_lost_where_that_is_enough(name: str, drawn: str):
    assert ALONE.drawable(name) == drawn


@pytest.mark.skipif(not has("Katzen süß", "Кошка", "γάτα"), reason="no font for Latin, Cyrillic and Greek here")
@pytest.mark.parametrize("name", ["Katzen süß", "Кошка", "γάτα"])
def test_a_font_of_the_machine_draws_what_pillows_lacks(name: str):
    letters = letters_of(24)
    assert letters.drawable(name) == name
    # Every letter is drawn as itself: not as the box that stands for a missing one, nor as a question mark.
    drawn = {letter: ink(letters, letter).tobytes() for letter in set(name) - {" "}}
    missing = ink(letters, "\uffff").tobytes()
    assert len({*drawn.values(), missing, ink(letters, "?").tobytes()}) == len(drawn) + 2


@pytest.mark.skipif(not fonts_here(), reason="no usual font on this machine")
def test_letters_of_two_fonts_stand_on_one_line():
    """The machine's font draws what Pillow's lacks; here Pillow's is alone with "a", so to say."""
    first, second = OWN, fonts_here()[0]
    letters = Letters(24, files=(second,))
    if letters.drawable("ж") != "ж" or letters.drawable("猫") == "猫":
        pytest.skip("the first font of this machine has other letters")
    assert [part for _, part in letters._runs("cat")] == ["cat"] and letters._file_of("c") == first
    assert [part for _, part in letters._runs("caж")] == ["caж"], "one font that has all is preferred"
    own_width, other = Letters(24, files=()).length("ca"), letters.length("ж")
    assert own_width > 0 and other > 0


def test_a_file_that_is_not_a_font_is_passed_over(tmp_path):
    (tmp_path / "DejaVuSans.ttf").write_bytes(b"not a font")
    letters = Letters(24, files=(str(tmp_path / "DejaVuSans.ttf"), str(tmp_path / "absent.ttf")))
    assert letters.drawable("süß") == "suss" and ink(letters, "suss").any()


@pytest.mark.parametrize(("anchor", "side"), [("lm", "left"), ("rm", "right")])
def test_runs_of_two_fonts_keep_their_anchor(anchor: str, side: str, monkeypatch: pytest.MonkeyPatch):
    """As if the second half of a text were in another font: both are Pillow's, so that it looks as in one."""
    letters = Letters(24, files=())
    whole, split = Image.new("L", (400, 60)), Image.new("L", (400, 60))
    letters.write(ImageDraw.Draw(whole), (200.0, 30.0), "abcdef", anchor, fill=255)
    [(font, _)] = letters._runs("abcdef")
    monkeypatch.setattr(letters, "_runs", lambda text: [(font, text[:3]), (font, text[3:])])
    letters.write(ImageDraw.Draw(split), (200.0, 30.0), "abcdef", anchor, fill=255)
    boxes = [np.argwhere(np.asarray(image) > 128) for image in (whole, split)]
    assert np.abs(boxes[0].min(0) - boxes[1].min(0)).max() <= 1 and np.abs(boxes[0].max(0) - boxes[1].max(0)).max() <= 1
    edge = boxes[1][:, 1].min() if side == "left" else boxes[1][:, 1].max()
    assert abs(edge - 200) <= 3


def test_usual_fonts_are_tried_in_their_order_and_then_others_of_noto(tmp_path, monkeypatch: pytest.MonkeyPatch):
    names = ["NotoSansThai-Regular.ttf", "NotoSansBengali-Regular.ttf", "NotoSans-Regular.ttf", "DejaVuSans.ttf"]
    others = ["NotoSansThai-Bold.ttf", "Comic.ttf", "DejaVuSans-Bold.ttf", "OtherSans-Regular.ttf"]
    for folder, name in zip("abababab", [*names, *others], strict=True):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).touch()
    (tmp_path / "b" / "DejaVuSans.ttf").touch()
    monkeypatch.setattr(fonts, "FOLDERS", (str(tmp_path / "b"), str(tmp_path / "a"), str(tmp_path / "absent")))
    found = fonts_here.__wrapped__()  # past its cache, which other tests share
    assert [Path(file).name for file in found] == [
        "DejaVuSans.ttf",
        "NotoSans-Regular.ttf",
        "NotoSansBengali-Regular.ttf",
        "NotoSansThai-Regular.ttf",
    ]
    assert all(Path(file).is_file() for file in found)
