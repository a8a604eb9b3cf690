"""`sightline check` of images with labels: every number of a split, and every kind of problem, of small data."""

from pathlib import Path

from PIL import Image

from sightline.data.check.images import Look, Report, check_images, same_bytes, spread
from sightline.data.sources import SourceOptions


def photo(file: Path, colour: int, size: tuple[int, int] = (8, 6)) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (colour, 9, 9)).save(file)


def checked(path: Path, decode: bool = False, classes: int = 0) -> Report:
    return check_images(str(path), "auto", SourceOptions(), classes, decode, 0, lambda *_: None)


def test_facts_and_problems_of_each_split(tmp_path):
    for number, size in enumerate([(8, 6), (10, 6), (12, 20)]):
        photo(tmp_path / "train" / "a" / f"{number}.png", number, size)
    photo(tmp_path / "train" / "b" / "0.png", 0)
    photo(tmp_path / "train" / "c" / "0.png", 7)
    (tmp_path / "train" / "b" / "1.png").write_bytes(b"")
    (tmp_path / "train" / "b" / "notes.txt").write_text("x")
    photo(tmp_path / "val" / "a" / "x.png", 0)
    photo(tmp_path / "val" / "b" / "x.png", 9)
    (tmp_path / "val" / "d").mkdir()
    photo(tmp_path / "val" / "d" / "x.png", 8)
    report = checked(tmp_path, classes=5)
    train, val = report.facts["train"], report.facts["val"]
    assert train == {
        "images": 6,
        "unreadable": 1,
        "classes": 4,
        "images per class": {"min": 0, "median": 1.5, "max": 3},
        "classes without any": 1,
        "width": {"min": 8, "median": 8.0, "max": 12},
        "height": {"min": 6, "median": 6.0, "max": 20},
        "duplicate files": 1,
        "e.g.": "a/0.png and b/0.png",
        "ignored": "1 .txt",
    }
    assert (val["images"], val["unreadable"], val["classes without any"], val["duplicate files"]) == (3, 0, 1, 0)
    found = [(each.kind, each.split, each.where, each.text.partition(":")[0]) for each in report.problems]
    assert found == [
        ("number of classes", "train", str(tmp_path / "train"), "3 classes, the recipe declares 5"),
        ("unreadable", "train", "b/1.png", "empty file (0 bytes); fetch it again or remove it"),
        ("class without validation", "val", "c", "no validation image, 1 in train"),
        ("class without training", "train", "d", "no training image, 1 in val"),
        ("same image in train and val", "train", "a/0.png",
         "identical to a/x.png in val; the validation score would be inflated"),
        ("same image in train and val", "train", "b/0.png",
         "identical to a/x.png in val; the validation score would be inflated"),
    ]  # fmt: skip


def test_decoding_finds_what_headers_do_not_say(tmp_path):
    for split in ("train", "val"):
        for number, name in enumerate("ab"):
            photo(tmp_path / split / name / f"{split}.png", 10 * number + len(split))
    file = tmp_path / "train" / "a" / "train.png"
    data = bytearray(file.read_bytes())
    data[data.index(b"IDAT") + 10] ^= 255
    file.write_bytes(bytes(data))
    assert not checked(tmp_path).problems
    report = checked(tmp_path, decode=True)
    assert [(each.kind, each.where) for each in report.problems] == [("unreadable", "a/train.png")]
    assert report.facts["train"]["unreadable"] == 1


def test_pairs_of_equal_files_are_named_up_to_three():
    for count, more in ((3, ""), (4, "; 1 more")):
        pairs = [(f"{number}{side}", bytes([number])) for number in range(count) for side in "ab"]
        said = "; ".join(f"{number}a and {number}b" for number in range(3)) + more
        assert same_bytes([*pairs, ("c", b""), ("d", b"")]) == {"duplicate files": count, "e.g.": said}
    assert same_bytes([("a", b"1"), ("b", b"")]) == {"duplicate files": 0}
    assert spread([]) == {} and spread([4, 1]) == {"min": 1, "median": 2.5, "max": 4}


def test_samples_are_looked_at_in_jobs_of_64():
    said = []
    look = Look(True, 1, lambda *each: said.append(each))
    found = look.at(lambda shared, job: [(*shared, n) for n in range(*job)], "shared", 130, "train")
    assert found == [("shared", True, number) for number in range(130)]
    assert said == [("decoding train", 64, 130), ("decoding train", 128, 130), ("decoding train", 130, 130)]
    Look(False, 1, lambda *each: said.append(each)).at(lambda *_: [1], None, 1, "val")
    assert said[-1] == ("reading val", 1, 1)


def test_a_report_as_text():
    report = Report(facts={"train": {"images": 3, "width": {"min": 1, "max": 2}, "nothing": ""}})
    assert report.as_text() == (
        "train\n  images                 3\n  width                  min 1, max 2\n  nothing\nno problems"
    )
    report.add("odd", "train", "a", "x")
    report.add("unreadable", "val", "b", "y")
    report.add("odd", "val", "c", "z")
    assert report.as_text().splitlines()[4:] == [
        "odd: 2", "  train: a: x", "  val: c: z", "unreadable: 1", "  val: b: y", "problems: 3",
    ]  # fmt: skip
    assert [each.kind for each in report.unsolved] == ["odd", "odd"]
