"""Samples of a training batch and their sheet: shares of mixed labels, chosen slices, channels, captions."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from sightline.drawing.findings import GROUND, colour_of
from sightline.drawing.slices import outline_colour
from sightline.errors import UsageError
from sightline.parts import DataSpec, Finding
from sightline.report import samples
from sightline.report.by_task import SeenSample, seen
from sightline.report.samples import Drawn, pixels_of, sheet
from sightline.tasks.classification import Classification, MultiLabel
from sightline.tasks.detection import Detection
from sightline.tasks.segmentation import Segmentation

SPEC = DataSpec(("cat", "dog", "owl"), 3, (4, 4), (0.5, 0.4, 0.3), (0.2, 0.1, 0.3))


def shares(samples: list[SeenSample]) -> list[dict[str, float]]:
    return [{label.name: round(label.score, 3) for label in sample.labels} for sample in samples]


def test_mixed_labels_have_their_shares():
    batch = {"image": torch.zeros(3, 3, 4, 4), "label": torch.tensor([0, 1, 1]), "mix": torch.tensor(0.7)}
    task = Classification()
    assert shares(seen(task, batch, SPEC)) == [{"cat": 0.7, "dog": 0.3}, {"dog": 0.7, "cat": 0.3}, {"dog": 1.0}]
    batch["partner"], batch["mix"] = torch.tensor([2, 1, 0]), torch.tensor([0.25, 0.5, 1.0])
    assert shares(seen(task, batch, SPEC)) == [{"dog": 0.75, "cat": 0.25}, {"dog": 1.0}, {"dog": 1.0}]
    batch["label_share"] = torch.tensor(0.9)  # cutmix: the share of the label, not of the pixels outside of the box
    assert shares(seen(task, batch, SPEC))[0] == {"cat": 0.9, "dog": 0.1}


def test_several_labels_and_none():
    batch = {"image": torch.zeros(2, 3, 4, 4), "label": torch.tensor([[1, 0, 1], [0, 0, 0]], dtype=torch.uint8)}
    assert shares(seen(MultiLabel(), batch, SPEC)) == [{"cat": 1.0, "owl": 1.0}, {}]


def test_boxes_without_padding():
    boxes = torch.tensor([[[0.1, 0.2, 0.3, 0.4], [0.0, 0.0, 0.0, 0.0]]])
    batch = {"image": torch.zeros(1, 3, 4, 4), "boxes": boxes, "labels": torch.tensor([[2, 0]])}
    [sample] = seen(Detection(), batch, DataSpec(("a", "b"), 3, (4, 4), SPEC.mean, SPEC.std, (7, 9)))
    [label] = sample.labels
    assert (label.name, label.class_id) == ("b", 9) and label.box == pytest.approx((0.2, 0.1, 0.4, 0.3))


def test_a_volume_is_seen_by_its_middle_slice_or_the_one_with_most_labels():
    label = torch.zeros(3, 5, 4, 4, dtype=torch.int64)
    label[0, 2, 0, 0] = label[0, 4] = 1  # the middle one has some
    label[1, 1, 0, 0] = label[1, 3, 0] = 1
    image = torch.arange(5.0)[None, None, :, None, None].expand(3, 2, 5, 4, 4)
    drawn = seen(Segmentation(), {"image": image, "label": label}, SPEC)
    assert [sample.note for sample in drawn] == ["slice 2", "slice 3", "slice 2"]
    assert [sample.image[0, 0, 0] for sample in drawn] == [2, 3, 2] and drawn[1].mask.sum() == 4


def test_the_normalisation_is_undone():
    pixels = np.random.default_rng(0).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    image = ((pixels / 255 - SPEC.mean) / SPEC.std).transpose(2, 0, 1).astype(np.float32)
    assert np.array_equal(pixels_of(image, SPEC), pixels)


def test_channels_that_are_no_colours_lie_side_by_side():
    spec = DataSpec(("none", "some"), 3, (2, 8, 6), (), ())
    image = np.stack([np.full((8, 6), value, np.float32) for value in (-1, 0, 1)])
    pixels = pixels_of(image, spec, (-1.0, 1.0))
    assert pixels.shape == (16, 12, 3)
    assert [pixels[y, x, 0] for y, x in ((0, 0), (0, 6), (8, 0), (8, 6))] == [0, 128, 255, 0]


@pytest.mark.parametrize(
    "name", ["x" * 999, "名前" * 20, "<script>alert(1)</script>" * 3, "a\nb\u202e\udcff", ""], ids=range(5)
)
def test_captions_stay_below_their_own_tile(name: str):
    label = Finding(name, 0, 1.0)
    sample = SeenSample(np.full((3, 4, 4), 50, np.float32), (label, label, label))
    spec = DataSpec((name,), 3, (4, 4), SPEC.mean, SPEC.std)
    drawn = np.asarray(sheet(Drawn(spec, samples=[sample] * 2, names=[name] * 2), f"title; {name}"))
    inside = (drawn[:, 8:208] == 255).all(2).all(1)  # the tile is white
    bottom = int(np.flatnonzero(inside)[-1]) + 1
    for left, right in ((0, 7), (209, 215), (417, drawn.shape[1])):  # letters may reach a pixel over their place
        assert (drawn[bottom:, left:right] == GROUND).all()


def test_a_sheet_is_an_image_of_all_its_rows():
    samples = [SeenSample(np.zeros((3, 4, 4), np.float32), (Finding("cat", 0, 1.0),))] * 7
    both = sheet(Drawn(SPEC, samples[:2], samples, ["a"] * 7), "title")
    one = sheet(Drawn(SPEC, [], samples[:1], ["a"]), "title")
    assert isinstance(both, Image.Image) and both.width == one.width
    assert both.height > 600 > 300 > one.height > 200  # three rows and one


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[float, float]]]:
    """Every text that Pillow is asked to draw, with the places of its left end."""
    found: dict[str, list[tuple[float, float]]] = {}
    text = ImageDraw.ImageDraw.text

    def write(pen, place, words, **more) -> None:
        assert more["anchor"] == "lm"
        found.setdefault(words, []).append(place)
        text(pen, place, words, **more)

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", write)
    return found


def plain(colour: tuple[int, int, int], *labels: Finding, sides=(4, 4), **more) -> SeenSample:
    image = (np.array(colour) / 255 - SPEC.mean) / SPEC.std
    return SeenSample(np.tile(image[:, None, None], (1, *sides)).astype(np.float32), labels, **more)


def place_of(colour: tuple[int, int, int], drawn: np.ndarray) -> tuple[int, int, int, int]:
    rows, columns = np.nonzero((drawn == colour).all(-1))
    return int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1


def test_tiles_stand_in_rows_of_six_with_their_words_below(written):
    colours = [(255 - 20 * n, 20 * n, 100) for n in range(10)]
    samples = [plain(colour, Finding(f"class {n}", 0, 1.0), sides=(4, 2)) for n, colour in enumerate(colours)]
    names = [f"{n}.jpg" for n in range(7)]
    drawn = np.asarray(sheet(Drawn(SPEC, samples[7:], samples[:7], names), "one; two"))
    boxes = [place_of(colour, drawn) for colour in colours]
    assert all((right - left, bottom - top) == (100, 200) for left, top, right, bottom in boxes)
    draws, first, second = boxes[7:], boxes[:6], boxes[6]
    assert [box[0] for box in first] == [first[0][0] + 208 * n for n in range(6)] and second[0] == first[0][0]
    assert [box[0] for box in draws] == [box[0] for box in first[:3]]
    assert len({box[1] for box in draws}) == len({box[1] for box in first}) == 1
    assert first[0][0] - 50 == drawn.shape[1] - first[5][2] - 50 == 8, "in the middle of places of 200, 8 apart"
    assert first[0][1] - draws[0][1] == second[1] - first[0][1] > 200, "rows are equally far from each other"
    [(title_left, title_y)], [(second_left, _)] = written["one;"], written["two"]
    assert title_left == 8 < second_left and title_y < draws[0][1]
    for number, (left, _, _, bottom) in enumerate(boxes):
        name = names[number] if number < 7 else f"variant {number - 6}"
        [(label_x, label_y)], [(name_x, name_y)] = written[f"class {number}"], written[name]
        assert label_x == name_x == left - 50 and bottom < label_y < name_y < bottom + 60
    assert drawn.shape[0] - second[3] == second[1] - first[0][3], "the last row has as much room as the others"


@pytest.mark.parametrize(
    ("labels", "spec", "mask", "words"),
    [
        (["cat", "dog"], SPEC, None, ["cat", "dog"]),
        ([("cat", 0.7), ("dog", 0.3)], SPEC, None, ["cat 0.70", "dog 0.30"]),
        ([], SPEC, None, ["no label"]),
        ([], DataSpec(("cat",), 3, (4, 4), SPEC.mean, SPEC.std, (7,)), None, ["no boxes"]),
        ([], SPEC, [[0, 1], [2, 9]], ["dog", "owl"]),
        ([], SPEC, [[0, 0], [0, 9]], ["cat only"]),
        (["wwwwwwwwwwww"] * 2, SPEC, None, ["wwwwwwwwwwww", "wwwwwwwwwwww"]),
        (["wwwwwwwwwwww"] * 5, SPEC, None, ["wwwwwwwwwwww", "wwwwwwwwwwww", "+3"]),
    ],
    ids=range(8),
)
def test_captions_say_what_is_seen(written, labels: list, spec: DataSpec, mask: list | None, words: list[str]):
    pairs = [label if isinstance(label, tuple) else (label, 1.0) for label in labels]
    found = [Finding(name, n, share) for n, (name, share) in enumerate(pairs)]
    of_mask = None if mask is None else np.repeat(np.repeat(np.array(mask, np.uint8), 2, 0), 2, 1)
    sheet(Drawn(spec, samples=[plain((9, 9, 9), *found, mask=of_mask, note="slice 3")], names=["a"]), "title")
    told = [text for text, places in written.items() for _ in places if text not in ("title", "a, slice 3")]
    assert told == words and "a, slice 3" in written
    rows = [y for text in dict.fromkeys(words) for _, y in written[text]]
    assert len(set(rows)) == (2 if "wwwwwwwwwwww" in words else 1)
    [(_, name_y)] = written["a, slice 3"]
    assert len(set(rows)) == 1 or name_y - max(rows) == max(rows) - min(rows), "lines are equally far from each other"
    places = [place for text in dict.fromkeys(words) for place in written[text]]
    is_marked = mask is not None and words != ["cat only"]
    for row in set(rows):  # a line begins at the left edge of its tile, a mark before the word takes 13
        assert min(x for x, y in places if y == row) == (21 if is_marked else 8) and max(x for x, _ in places) < 208


def test_a_long_title_takes_three_lines_and_counts_what_it_lacks(written):
    parts = [f"part {n} {'of a title ' * 5}" for n in range(20)]
    drawn = sheet(Drawn(SPEC, samples=[plain((9, 9, 9))], names=["a"]), "; ".join(parts))
    lines: dict[float, list[str]] = {}
    for text, [(_, y), *_] in written.items():
        if text.startswith(("part", "+")):
            lines.setdefault(y, []).append(text)
    assert len(lines) == 3 and place_of((9, 9, 9), np.asarray(drawn))[1] > max(lines)
    *shown, more = [text for line in lines.values() for text in line]
    assert more == f"+{20 - len(shown)}" and [text.split()[1] for text in shown] == [str(n) for n in range(len(shown))]


def test_boxes_are_counted_and_outlined_in_the_colours_of_their_words(written):
    labels = [Finding("cat", 3, 1.0, (0.1, 0.2, 0.5, 0.6)), Finding("cat", 3, 1.0, (0.6, 0.6, 0.9, 0.9))]
    labels += [Finding("dog", 4, 1.0, (0.1, 0.7, 0.4, 0.95))]
    drawn = np.asarray(sheet(Drawn(SPEC, samples=[plain((9, 9, 9), *labels)], names=["a"]), "title"))
    [(cat_x, cat_y)], [(dog_x, _)] = written["2 cat"], written["dog"]
    assert 8 < cat_x < dog_x
    tile = drawn[: int(cat_y) - 10]
    top = place_of((9, 9, 9), tile)[1]
    left, upper, right, lower = place_of(colour_of(3), tile)
    assert (left, right) == (8 + 20, 8 + 180) and (upper - top, lower - top) == (40, 180), "around both of its boxes"
    assert place_of(colour_of(4), tile)[:2] == (8 + 20, top + 140)
    for number, x in ((3, cat_x), (4, dog_x)):  # a mark before each word
        mark = (drawn[round(cat_y), int(x) - 14 : int(x)] == colour_of(number)).all(-1)
        assert 6 <= mark.sum() <= 10


def test_a_mask_is_outlined_in_every_channel(written):
    mask = np.zeros((8, 8), np.uint8)
    mask[1:5, 2:6] = 1
    brain = DataSpec(("background", "organ"), 2, (8, 8), (), ())
    seen = SeenSample(np.random.default_rng(0).random((2, 8, 8), np.float32), (), mask=mask)
    drawn = np.asarray(sheet(Drawn(brain, samples=[seen], names=["a"]), "title"))
    [(_, said_at)] = written["organ"]
    line = np.abs(drawn[: int(said_at) - 10] - np.array(outline_colour(1), int)).max(-1) < 60
    for channel in range(2):  # two squares of 100, side by side
        left, upper, right, lower = place_of((1,), line[:, 8 + 100 * channel : 108 + 100 * channel, None])
        assert abs(left - 25) <= 1 and abs(right - 75) <= 1 and abs(lower - upper - 50) <= 2


def test_a_sheet_says_what_it_shows():
    mixed = plain((9, 9, 9), Finding("cat", 0, 0.7), Finding("dog", 1, 0.3), sides=(4, 6))
    whole = plain((9, 9, 9), Finding("cat", 0, 1.0), sides=(4, 6))
    volume = DataSpec(("none", "some"), 1, (2, 8, 6), (), ())
    assert Drawn(SPEC, samples=[whole] * 2).words() == "2 training images of 6 x 4"
    assert Drawn(SPEC, [whole] * 3, [mixed], about_labels="label smoothing 0.1").words() == (
        "1 training images of 6 x 4; the first row is one image augmented 3 times; images are mixed (mixup, cutmix), "
        "with the share of each label behind its name; label smoothing 0.1"
    )
    assert Drawn(volume, [whole] * 2, [whole]).words() == (
        "1 training patches of 2 x 8 x 6; the first row is one volume cropped and augmented 2 times"
    )
    assert Drawn(SPEC, samples=[whole], has_slices=True).words() == "1 training slices of 6 x 4"


def test_one_brightness_holds_for_all_scans():
    """Of clipped ones black and white are the ends of the clip; of others nearly all values lie between."""
    clipped = DataSpec(("none", "some"), 1, (2, 2), (10.0,), (5.0,), clip=(-20.0, 80.0))
    values = (-20.0, 30.0, 80.0)
    samples = [SeenSample(np.full((1, 2, 2), (value - 10) / 5, np.float32), ()) for value in values]
    drawn = np.asarray(sheet(Drawn(clipped, samples=samples, names=["a"] * 3), "title"))
    assert [int(drawn[drawn.shape[0] // 2 - 10, 108 + 208 * n, 0]) for n in range(3)] == [0, 128, 255]
    ramp = np.linspace(3.0, 4.0, 1000, dtype=np.float32).reshape(1, 25, 40)
    open_ = DataSpec(("none", "some"), 1, (25, 40), (0.0,), (1.0,))
    drawn = np.asarray(sheet(Drawn(open_, samples=[SeenSample(ramp, ())], names=["a"]), "title"))
    shades = np.unique(drawn[36:170, 8:208, 0])
    assert shades.min() == 0 and shades.max() == 255 and len(shades) > 150
    even = SeenSample(np.full((1, 2, 2), 7.0, np.float32), ())
    sheet(Drawn(open_, samples=[even], names=["a"]), "title")


def test_every_row_is_as_high_as_the_longest_caption_needs():
    short, long = plain((9, 9, 9)), plain((9, 9, 9), *[Finding("w" * 12, 0, 0.5)] * 2)
    alone = sheet(Drawn(SPEC, samples=[long], names=["a"]), "title").height
    assert sheet(Drawn(SPEC, samples=[short], names=["a"]), "title").height < alone
    for some in ([short, long], [long, short]):
        assert sheet(Drawn(SPEC, samples=some, names=["a"] * 2), "title").height == alone


def scan(values: np.ndarray) -> SeenSample:
    return SeenSample(np.asarray(values, np.float32).reshape(1, 1, -1), ())


def test_brightness_is_that_of_all_values_or_of_some_of_very_many(monkeypatch: pytest.MonkeyPatch):
    spec = DataSpec(("none", "some"), 1, (1, 4), (0.0,), (1.0,))
    every = np.tile([0.0, 10.0], 500)
    assert samples._window(Drawn(spec, samples=[scan(every)])) == (0.0, 10.0)
    assert samples._window(Drawn(spec, [scan(every * 9)], [scan(every)])) == (0.0, 90.0), "of drawn ones too"
    ramp = np.arange(1000.0)
    assert samples._window(Drawn(spec, samples=[scan(ramp)])) == pytest.approx((4.995, 994.005))
    monkeypatch.setattr(samples, "_SAMPLED", 500)
    assert samples._window(Drawn(spec, samples=[scan(every)])) == (0.0, 1e-6)  # every second one
    monkeypatch.setattr(samples, "_SAMPLED", 501)
    assert samples._window(Drawn(spec, samples=[scan(every)])) == (0.0, 10.0)
    assert samples._window(Drawn(spec, samples=[scan(np.full(9, 2e6))])) == pytest.approx((2e6, 2e6 + 2), abs=1e-3)
    clipped = DataSpec(("none", "some"), 1, (1, 4), (10.0,), (5.0,), clip=(-20.0, 80.0))
    assert samples._window(Drawn(clipped, samples=[scan(every)])) == (-6.0, 14.0)


@pytest.mark.parametrize(
    ("sides", "size"), [((4, 2), (100, 200)), ((2, 4), (200, 100)), ((1, 900), (200, 1)), ((900, 1), (1, 200))]
)
def test_a_tile_has_two_hundred_pixels_on_its_longer_side(sides: tuple[int, int], size: tuple[int, int]):
    assert samples._tile(plain((9, 9, 9), sides=sides), SPEC, (0.0, 1.0)).size == size


def test_outlines_of_boxes_are_two_pixels_between_dark_ones(monkeypatch: pytest.MonkeyPatch):
    drawn = []
    monkeypatch.setattr(
        ImageDraw.ImageDraw, "rectangle", lambda self, box, outline, width: drawn.append((box, outline, width))
    )
    boxes = (0.1, 0.2, 0.6, 0.7), (0.5, 0.5, 0.5, 0.5)
    labels = [Finding("dog", 2, 1.0, boxes[0]), Finding("none", 1, 1.0), Finding("cat", 1, 1.0, boxes[1])]
    samples._draw_boxes(Image.new("RGB", (200, 100)), labels)
    assert drawn == [
        ((pytest.approx(19.0), 19.0, 120.0, pytest.approx(70.0)), (16, 16, 16), 4),
        ((pytest.approx(20.0), 20.0, 119.0, pytest.approx(69.0)), colour_of(2), 2),
        ((99.0, 49.0, 103.0, 53.0), (16, 16, 16), 4),  # at least three pixels
        ((100.0, 50.0, 102.0, 52.0), colour_of(1), 2),
    ]


def test_planes_side_by_side_are_about_as_wide_as_high():
    planes = np.arange(1, 6)[:, None, None] * np.ones((5, 1, 2), int)
    assert samples._side_by_side(planes).tolist() == [[1, 1, 2, 2, 3, 3], [4, 4, 5, 5, 0, 0]]
    assert samples._side_by_side(planes[:4]).tolist() == [[1, 1, 2, 2], [3, 3, 4, 4]]
    assert samples._side_by_side(planes[:1]).tolist() == [[1, 1]]


def test_only_a_sheet_of_ours_is_replaced_and_only_names_of_images_are_taken(tmp_path: Path):
    path = tmp_path / "a.png"
    samples.refuse_other_file(path)
    path.write_bytes(b"an image" + samples.MARK)
    samples.refuse_other_file(path)
    path.write_bytes(b"an image" + samples.MARK + b"of another")
    with pytest.raises(UsageError, match="a.png exists and is not a sheet of `sightline show`; delete it, or"):
        samples.refuse_other_file(path)
    assert samples.encoder_of(Path("A.JPG")) is samples.encoder_of(Path("b.jpg")) and samples.encoder_of(path)
    with pytest.raises(UsageError, match="^--out a.txt is not a name of an image; give one that ends in .*png"):
        samples.encoder_of(Path("a.txt"))


def test_a_sheet_loads_what_fills_it_and_fewer_of_what_is_large():
    def items(*sides: int) -> int:
        return samples._affordable(SimpleNamespace(layout={"image": (sides, "float32")}), 1000)

    assert [
        items(1, 1, 1),
        items(4, 10),
        items(10, 10),
        items(
            125,
        ),
        items(200, 9),
        items(0),
    ] == [24, 24, 10, 8, 6, 24]
    assert samples._FirstRows(SimpleNamespace(batch=lambda step: (np.arange(5), 9 - np.arange(5))), 2).batch(0)[
        1
    ].tolist() == [9, 8]
    assert [each.tolist() for each in samples._Draws(7).batch(3)] == [[3], [7]] and samples.never() is False
