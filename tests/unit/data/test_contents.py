"""Content fingerprints: which files are read, what a change of one byte does, how many changes a sample misses."""

import hashlib
import itertools
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

from sightline.data import contents
from sightline.data.contents import Contents, digests
from sightline.data.sources import coco as coco_source
from sightline.data.sources import decathlon, open_source
from sightline.data.volumes.plan import Case, VolumePlan, write_plan
from sightline.parts import DataSpec


def nothing() -> None:
    """Nobody asks to stop."""


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.fixture
def many(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{number:04d}" for number in range(1100)]
    for path in paths:
        path.write_bytes(path.name.encode())
    return paths


# Every kind of data names its files


def class_folders(root: Path, **_) -> tuple:
    for number in range(8):
        path = root / ("train", "val")[number % 2] / f"class{number // 4}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"image %d" % number)
    return open_source("folder", str(root), "train"), root.glob("train/*/*.jpg")


def table(root: Path, **_) -> tuple:
    (root / "train.csv").write_text("file,label\na.jpg,x\nb.jpg,y\n")
    (root / "val.csv").write_text("file,label\nc.png,x\nd.png,y\n")
    for name in ("a.jpg", "b.jpg", "c.png", "d.png"):
        (root / name).write_bytes(name.encode())
    return open_source("table", str(root), "train"), root.glob("*.jpg")


def tar(root: Path, write_tar, **_) -> tuple:
    for number in range(2):
        write_tar(root / "train" / f"{number}.tar", [("a.jpg", b"image"), ("a.cls", b"%d" % number)])
    return open_source("tar", str(root), "train"), root.rglob("*.tar")


def tfrecord(root: Path, write_records, **_) -> tuple:
    for number in (1, 2):
        features = {"image/class/label": number, "image/encoded": b"%d" % number, "image/filename": b"%d" % number}
        write_records(root / "train" / f"train-{number - 1:05d}-of-00002", [features])
    return open_source("tfrecord", str(root), "train"), root.glob("train/*")


def coco(root: Path, drawn_boxes: Path, **_) -> tuple:
    shutil.copytree(drawn_boxes, root, dirs_exist_ok=True)
    return coco_source.open_boxes(str(root), "val"), (root / "val2017").iterdir()


def volumes(root: Path, **_) -> tuple:
    spec = DataSpec(("background", "a"), 1, (4, 4), (), (), spacing=(1.0, 1.0))
    cases = []
    for number in range(4):
        name, shape = f"case_{number}", (3, 4, 4)
        np.save(root / f"{name}_x.npy", np.full((1, *shape), number, np.float32))
        np.save(root / f"{name}_y.npy", np.zeros(shape, np.uint8))
        cases.append(
            Case(name, shape, shape, (0, 0, 0), shape, shape, (1.0, 1.0, 1.0), f"{name}_x.npy", f"{name}_y.npy")
        )
    write_plan(root, VolumePlan("own", "Mine", 2, "training", spec, tuple(cases), "Task77_Mine"))
    source = decathlon.open_volumes(str(root), "train", spec, 0, 4)
    return source, [root / f"{case.name}_{part}.npy" for case in source.cases for part in "xy"]


@pytest.mark.parametrize("make", [class_folders, table, tar, tfrecord, coco, volumes])
def test_every_file_of_the_samples_is_read(make, tmp_path, write_tar, write_records, drawn_boxes):
    root = tmp_path / "data"
    root.mkdir()
    source, on_disk = make(root, write_tar=write_tar, write_records=write_records, drawn_boxes=drawn_boxes)
    assert sorted(source.files) == sorted(on_disk)
    before = Contents({"train": source}, "sampled").to_json()
    for path in source.files:
        flip(path)
        told = Contents({"train": source}, "sampled").changed(before, nothing)
        assert told == f"{path} is not what it was then (train data, sampled fingerprint)"
        flip(path)
    assert Contents({"train": source}, "sampled").changed(before, nothing) == ""


# Of many files, some


def test_a_sample_is_the_same_files_each_time_and_no_more_than_promised(many, monkeypatch):
    monkeypatch.setattr(contents, "MAX_FILES", 40)
    chosen = [group[0] for group in contents._groups(len(many), "sampled", "key")]
    assert len(set(chosen)) == 40 and chosen == sorted(chosen)
    before = digests(many, "sampled", "key", nothing)
    for path in set(many) - {many[number] for number in chosen}:
        path.unlink()  # what is not sampled is not read
    assert digests(many, "sampled", "key", nothing) == before
    flip(many[chosen[7]])
    assert [a == b for a, b in zip(before, digests(many, "sampled", "key", nothing), strict=True)].index(False) == 7


def test_a_sample_misses_changed_files_as_often_as_the_documents_say():
    count, replaced, keys = 5000, 50, 400
    missed = sum(
        not any(group[0] < replaced for group in contents._groups(count, "sampled", f"data {key}"))
        for key in range(keys)
    )
    expected = math.comb(count - replaced, 256) / math.comb(count, 256)  # 7.2 %; (1 - 1 %) ** 256 is 7.6 %
    assert abs(missed / keys - expected) < 4 * math.sqrt(expected * (1 - expected) / keys)


def test_a_large_file_is_read_in_pieces_and_no_more_than_its_share(tmp_path, monkeypatch):
    monkeypatch.setattr(contents, "MAX_BYTES", 8 * contents.PIECE)
    large = tmp_path / "large"
    large.write_bytes(bytes(40 * contents.PIECE))
    before = digests([large], "sampled", "key", nothing)
    noticed = 0
    for piece in range(40):
        flip(large, piece * contents.PIECE + contents.PIECE // 2)
        noticed += digests([large], "sampled", "key", nothing) != before
        flip(large, piece * contents.PIECE + contents.PIECE // 2)
    assert 4 <= noticed <= 8, "eight pieces, of which some may overlap"
    large.write_bytes(b"\1" * 40 * contents.PIECE)
    assert digests([large], "sampled", "key", nothing) != before


def test_full_notices_every_file_and_names_few(many):
    data = SimpleNamespace(files=many, fingerprint="key")
    before = Contents({"train": data}, "full").to_json()
    assert len(before["train"]["full"].split()) == contents.MAX_DIGESTS
    flip(many[600])
    told = Contents({"train": data}, "full").changed(before, nothing)
    named = [int(Path(word).name) for word in told.split() if str(many[0].parent) in word]
    first, last = named[0], named[-1]
    assert first <= 600 <= last < first + 2


def test_a_file_that_cannot_be_read_is_a_change(many):
    before = digests(many[:3], "sampled", "key", nothing)
    many[1].unlink()
    assert [a == b for a, b in zip(before, digests(many[:3], "sampled", "key", nothing), strict=True)] == [1, 0, 1]


def test_reading_ends_when_the_run_is_asked_to_stop(many):
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        digests(many, "full", "key", stop)


@pytest.mark.parametrize(
    ("how", "stored", "is_noticed"),
    [
        ("names", "sampled", False),
        ("sampled", "sampled", True),
        ("full", "sampled", True),
        ("sampled", "full", False),  # would read every byte, which nobody asked for now
        ("full", "full", True),
        ("sampled", None, False),  # a run saved by an older version
    ],
)
def test_what_is_compared_costs_no_more_than_what_is_asked_for(many, how, stored, is_noticed):
    data = SimpleNamespace(files=many[:5], fingerprint="key")
    before = Contents({"train": data}, stored).to_json() if stored else {}
    flip(many[2])
    now = Contents({"train": data}, how)
    assert bool(now.changed(before, nothing)) == is_noticed
    if not is_noticed and stored:
        assert now.to_json()["train"][stored] == before["train"][stored], "a later start can still compare"


def test_the_files_of_a_fingerprint_are_chosen_as_in_every_version(monkeypatch: pytest.MonkeyPatch):
    """By hashes of the key and a running number, until there are enough different ones: stored runs have them."""
    monkeypatch.setattr(contents, "MAX_FILES", 20)
    wanted: dict[int, None] = {}
    for number in itertools.count():
        if len(wanted) == 20:
            break
        wanted[int.from_bytes(hashlib.sha256(f"key {number}".encode()).digest(), "big") % 30] = None
    assert [list(group) for group in contents._groups(30, "sampled", "key")] == [[at] for at in sorted(wanted)]
    assert [list(group) for group in contents._groups(3, "sampled", "key")] == [[0], [1], [2]]
    monkeypatch.setattr(contents, "MAX_DIGESTS", 4)
    assert [list(group) for group in contents._groups(6, "full", "key")] == [[0], [1, 2], [3], [4, 5]]


# Leaks between the splits


class Split(NamedTuple):
    """The files of a split, of which the first `images` are its samples."""

    files: list[Path]
    fingerprint: str
    images: int

    def __len__(self) -> int:
        return self.images


def leak_of(train: list[Path], val: list[Path], how: str = "sampled", images: int = 10**6) -> str:
    sets = {"train": Split(train, "a", images), "val": Split(val, "b", images)}
    seen = Contents(sets, how)
    assert seen.leak() == "", "nothing was read yet"
    for split in sets:
        seen.read(split, how)
    return seen.leak()


def test_equal_images_of_both_splits_are_a_leak(tmp_path: Path):
    paths = {split: [tmp_path / f"{split}{number}.jpg" for number in range(20)] for split in ("train", "val")}
    for split, some in paths.items():
        for number, path in enumerate(some):
            path.write_bytes(b"both" if number == 7 else f"{split}{number}".encode())
    for split in ("train", "val"):
        paths[split].append(tmp_path / f"{split}.npy")  # labels of volumes may be alike
        paths[split][-1].write_bytes(b"zeros")
        paths[split].append(tmp_path / f"gone-{split}.jpg")  # neither can be read
    pair = f"{paths['val'][7]} and {paths['train'][7]}"
    text = f"1 of 20 validation images that were compared are training images too, e.g. {pair};"
    assert leak_of(**paths).startswith(text)


def test_masks_which_come_after_the_images_may_be_alike(tmp_path: Path):
    names = ["image", "mask"]
    paths = {split: [tmp_path / f"{split}-{name}.png" for name in names] for split in ("train", "val")}
    for split, (image, mask) in paths.items():
        image.write_bytes(split[:2].encode())
        mask.write_bytes(b"empty")
    assert leak_of(**paths, images=1) == ""
    assert leak_of(**paths, images=2).startswith("1 of 2 ")


@pytest.mark.parametrize("how", ["sampled", "full"])
def test_a_few_leaks_among_many_images_are_found(tmp_path: Path, how: str):
    """Of photos, which are larger than what a fingerprint reads of each."""
    rng = np.random.default_rng(0)
    made = []
    for number in range(600):
        made.append(tmp_path / f"{number}.jpg")
        made[-1].write_bytes(rng.bytes(2_000 + number) + bytes(300_000 if number in (5, 6) else 0))
    val = [shutil.copy(path, tmp_path / f"copy{path.name}") for path in made[5:8]]
    train, val = made[:400], [*made[400:], *map(Path, val)]
    assert leak_of(train, val, how).startswith("3 of 203 validation images")
    assert leak_of(made[:400], made[400:], how) == ""


def test_images_of_one_size_are_compared_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = [tmp_path / f"{number:03}.bmp" for number in range(60)]
    for number, path in enumerate(made):
        path.write_bytes(b"%03d" % (number % 30))
    assert leak_of(made[:30], made[30:]).startswith("30 of 30 ")
    monkeypatch.setattr(contents, "MOST_COMPARED", 10)
    assert leak_of(made[:30], made[30:]).startswith("10 of 10 ")
    monkeypatch.setattr(contents, "MOST_LISTED", 5)
    assert leak_of(made[:30], made[30:]).startswith("5 of 5 ")
