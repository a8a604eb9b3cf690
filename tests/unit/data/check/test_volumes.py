"""`check` of volumes: each thing that can be wrong with one is found, named and nothing else."""

from pathlib import Path

import numpy as np
import pytest

from sightline.data.check import boxes, images
from sightline.data.check.images import Report
from sightline.data.check.volumes import check_volumes
from sightline.data.formats.coco import Image
from sightline.errors import BadData, BadSample
from sightline.parts import DataSpec

SPEC = DataSpec(("background", "organ", "tumour"), 2, (4, 4, 4), (), ())


class Volumes:
    """A split in memory: (image, label) of each volume, which should be of 3 x 4 x 5 voxels."""

    spec = SPEC

    def __init__(self, *pairs):
        self.pairs = pairs

    def __len__(self) -> int:
        return len(self.pairs)

    def name(self, index: int) -> str:
        return f"case {index}"

    def shape(self, index: int) -> tuple[int, int, int]:
        return (3 + index, 4, 5)

    def image(self, index: int) -> np.ndarray:
        if self.pairs[index] is None:
            raise BadSample(self.name(index), "its file is cut")
        return self.pairs[index][0]

    def label(self, index: int) -> np.ndarray:
        return self.pairs[index][1]


def volume(index: int, label: int = 0, nan: int = 0, channels: int = 2, depth: int = 0):
    image = np.zeros((channels, 3 + index, 4, 5), np.float32)
    image.reshape(-1)[:nan] = (np.nan, np.inf)[index % 2]
    classes = np.zeros((3 + index + depth, 4, 5), np.uint8)
    classes[0, 0, 0] = label
    return image, classes


def checked(train, val, decode: bool = True) -> tuple[Report, list[tuple[str, ...]], list]:
    done: list[tuple[str, int, int]] = []

    def open_split(split):
        if split == "train":
            return train
        if val is None:
            raise BadData("there is none")
        return val

    report = check_volumes(open_split, decode, 1, lambda *step: done.append(step))
    return report, [(each.kind, each.split, each.where, each.text) for each in report.problems], done


def test_good_volumes_have_no_problem():
    report, problems, done = checked(Volumes(volume(0, 1), volume(1, 2)), Volumes(volume(0, 2), volume(1, 1)))
    assert problems == []
    assert done == [(f"reading {split}", n, 2) for split in ("train", "val") for n in (1, 2)]
    assert report.facts["train"] == {
        "volumes": 2,
        "unreadable": 0,
        "channels": 2,
        "depth": {"min": 3, "median": 3.5, "max": 4},
        "height": {"min": 4, "median": 4.0, "max": 4},
        "width": {"min": 5, "median": 5.0, "max": 5},
        "volumes with": {"background": 2, "organ": 1, "tumour": 1},
    }


def test_what_is_wrong_with_a_volume_is_named():
    train = Volumes(volume(0, 1), volume(1, nan=3), volume(2, 7), volume(3, channels=1), volume(4, depth=1), None)
    _, problems, _ = checked(train, Volumes(volume(0, 2)))
    assert problems == [
        ("not finite", "train", "case 1", "3 voxels are NaN or infinite"),
        ("label out of range", "train", "case 2", "its label holds class 7, expected 0 to 2"),
        ("shape", "train", "case 3", "its image is (1, 6, 4, 5), expected (2, 6, 4, 5)"),
        ("shape", "train", "case 4", "its label is (8, 4, 5), expected (7, 4, 5)"),
        ("unreadable", "train", "case 5", "its file is cut"),
        ("class without training", "train", "tumour", "no voxel of it in 3 volumes"),
        ("class without validation", "val", "organ", "no voxel of it in 1 volumes"),
    ]


def test_without_a_look_at_voxels_only_files_and_shapes_are_checked():
    report, problems, done = checked(Volumes(volume(0, nan=3), volume(1, 7), None), Volumes(volume(0)), decode=False)
    assert problems == [("unreadable", "train", "case 2", "its file is cut")]
    assert done[0] == ("opening train", 1, 3)
    assert report.facts["train"]["unreadable"] == 1 and "volumes with" not in report.facts["train"]


def test_empty_and_missing_splits_are_named():
    _, problems, _ = checked(Volumes(), None)
    assert problems == [
        ("no volumes", "train", "train", "the split is empty"),
        ("cannot be opened", "val", "val", "there is none"),
    ]


# Files of images


def test_files_that_cannot_be_looked_at_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert boxes._look_at_file(tmp_path, Image(1, "a.jpg", 4, 4), True).bad == "No such file or directory"
    (tmp_path / "a.jpg").write_bytes(b"12345")
    monkeypatch.setattr(boxes, "MAX_BYTES", 4)
    seen = boxes._look_at_file(tmp_path, Image(1, "a.jpg", 4, 4), True)
    assert seen.bad == "5 bytes, more than the 4 allowed for one image"
    report = Report()
    assert boxes._frames(tmp_path / "none", "val", report) == []
    [problem] = report.problems
    assert (problem.kind, problem.split, problem.where) == ("cannot be opened", "val", "none")
    assert problem.text == "No such file or directory"


def test_sizes_and_repeated_files_are_counted():
    assert images.spread([]) == {}
    assert images.spread([4, 1, 3, 2]) == {"min": 1, "median": 2.5, "max": 4}
    files = [("a", b"1"), ("b", b"2"), ("c", b"1"), ("d", b"1"), ("e", b""), ("f", b"")]
    assert images.same_bytes(files) == {"duplicate files": 2, "e.g.": "a and c; a and d"}
    many = [(name, b"1") for name in "abcdef"]
    assert images.same_bytes(many) == {"duplicate files": 5, "e.g.": "a and b; a and c; a and d; 2 more"}
    assert images.same_bytes([("a", b"1"), ("b", b"2")]) == {"duplicate files": 0}
