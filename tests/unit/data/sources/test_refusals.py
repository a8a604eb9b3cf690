"""What readers say of files that are gone or damaged, and of indexes whose parts do not fit, one by one."""

import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sightline.data import counts
from sightline.data.formats import class_table
from sightline.data.sources import (
    SourceOptions,
    annotations,
    decathlon,
    folder,
    labelme,
    layouts,
    mask_images,
    mask_places,
    mask_survey,
    metadata,
    open_boxes,
    open_masks,
    open_source,
    outlines,
    tar,
    tar_objects,
    tool_exports,
    via,
    voc,
    yolo,
)
from sightline.data.sources.shards import Shard
from sightline.data.volumes.plan import Case, VolumePlan
from sightline.errors import BadData, BadSample, UsageError

ALL = SourceOptions(split="all")
NO_FILE = "cannot be read: No such file or directory"


def shards(file: Path) -> list[Shard]:
    return [Shard(file, "x", 1, 1)]


GONE: dict[str, tuple[Callable[[Path], object], str]] = {
    "LabelMe": (lambda file: list(labelme.TOOL.entries(file)), NO_FILE),
    "metadata": (lambda file: list(metadata._lines(file)), NO_FILE),
    "metadata.csv": (lambda file: list(metadata._of_csv(file)), NO_FILE),
    "chunks": (lambda file: next(annotations.chunks_of(file)), NO_FILE),
    "outlines": (lambda file: outlines.read_outlined(file, file.parent), f"{NO_FILE}; fetch it again"),
    "names of classes": (class_table.read_table, NO_FILE),
    "a list of masks": (mask_places._listed, NO_FILE),
    "a list of images": (yolo.Pairs._listed, NO_FILE),
    "a split": (lambda file: layouts.kept_for_val([], file), "cannot be read: .*; give split.json of a run, or leave"),
    "class folders": (folder.class_folders, f"{NO_FILE}; make it readable or give another path"),
    "a tar": (lambda file: tar_objects._listed(file.parent, shards(file)), NO_FILE),
    "tars": (lambda file: tar._build_index(shards(file)), NO_FILE),
}


@pytest.mark.parametrize("reader", GONE)
def test_a_file_that_is_gone_is_named(tmp_path, reader):
    read, said = GONE[reader]
    file = tmp_path / "gone.json"
    with pytest.raises(BadData, match=f"^{file} {said}"):
        read(file)


def test_a_file_that_goes_while_it_is_used(tmp_path):
    Image.new("RGB", (8, 6)).save(tmp_path / "a.png")
    with tarfile.open(tmp_path / "train-0.tar", "w") as made:
        made.add(tmp_path / "a.png", "a.png")
    members = tar_objects.Members.of(tmp_path, "train")
    (tmp_path / "train-0.tar").unlink()
    with pytest.raises(BadSample, match="a.png: cannot be read: No such file or directory"):
        members.read(0, "image")
    (tmp_path / "a.txt").write_text("0 0.1 0.1 0.5 0.1 0.5 0.5\n")
    (tmp_path / "classes.txt").write_text("x")
    source = open_masks("yolo", str(tmp_path), "val", ALL)
    assert source.mask(0).any()
    (tmp_path / "a.txt").unlink()
    with pytest.raises(BadSample, match=r"a.txt cannot be read: No such file or directory"):
        source.mask(0)
    said = []
    assert yolo._lines(tmp_path / "a.txt", 1, lambda *each: said.append(each)) == []
    assert said == [("unreadable entry", str(tmp_path / "a.txt"), "cannot be read: No such file or directory")]


def test_what_is_not_there_at_all(tmp_path):
    with pytest.raises(BadData, match=r"has no data.yaml of YOLO and no images/ with labels/\*.txt beside it"):
        yolo.layout_at(str(tmp_path))
    assert not yolo.detect(str(tmp_path)) and not voc.detect(str(tmp_path))
    with pytest.raises(BadData, match=r"holds no class folders; expected .*/CLASS/\*.jpg"):
        folder.class_folders(tmp_path)
    (tmp_path / "none").mkdir()
    with pytest.raises(BadData, match=r"none holds no export of VIA; docs/reference/data_tools.md shows the layouts"):
        tool_exports._read_place(via.TOOL, layouts.Place(tmp_path, tmp_path / "none"))
    assert not via.TOOL.exports(tmp_path / "gone") and not metadata.TOOL.is_export(b"a\rb,file_name\n")
    assert metadata.TOOL.value(b'{"a": 1}') == {"a": 1}
    assert layouts.contents(tmp_path / "gone") == "cannot be read: No such file or directory"
    (tmp_path / "a.csv").touch()
    (tmp_path / "b").touch()
    assert [layouts.contents(tmp_path / name) for name in ("a.csv", "b", "none")] == [
        "a .csv file", "a plain file", "nothing"
    ]  # fmt: skip
    assert layouts._files_in(tmp_path / "gone") == []


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("kind: coco\nclass: x\ntrian: y\n", "has unknown entries class, trian; expected kind"),
        ("train: .\n", "kind is None, expected the name of a source"),
        ("kind: 3\ntrain: .\n", "kind is 3, expected the name of a source"),
        ("kind: coco\ntrain: .\nclasses: x\n", "classes is 'x', expected a list of names"),
        ("kind: coco\ntrain: .\nclasses: [x, '']\n", r"classes is \['x', ''\], expected a list of names"),
        ("kind: coco\n", "names no train and no val, e.g."),
        ("kind: coco\ntest: .\n", "names no train and no val, e.g."),
        ("kind: coco\ntrain: 3\n", r"train is 3, expected a folder, or \{images: FOLDER, labels: PATH\}"),
        ("kind: coco\ntrain: {labels: x}\n", "train is .*, expected a folder"),
        ("kind: coco\ntrain: {images: ., masks: .}\n", "train is .*, expected a folder"),
        ("kind: coco\ntrain: {images: 3}\n", "images of train is 3, expected a path"),
        ("kind: coco\ntrain: ''\n", "images of train is '', expected a path"),
        ("kind: coco\ntrain: gone\n", "images of train is .*gone, which does not exist; paths count from"),
        ("kind: coco\nval: {images: ., labels: gone}\n", "labels of val is .*gone, which does not exist"),
    ],
)
def test_descriptions_that_are_none(tmp_path, said, expected):
    (tmp_path / "data.yaml").write_text(said)
    with pytest.raises(UsageError, match=expected):
        layouts.read_description(str(tmp_path / "data.yaml"))


def test_splits_that_are_none(tmp_path):
    file = tmp_path / "split.json"
    for content in ([], {}, {"val": "a"}, {"val": [1]}):
        file.write_text(json.dumps(content))
        with pytest.raises(BadData, match=r'split.json is not a split; expected \{"val": \[names of samples\]\}'):
            layouts.kept_for_val([b"a"], file)
    file.write_text('{"val": ["a", "b", "x"]}')
    with pytest.raises(BadData, match="lists all of the 2 samples for validation; give the split of these data"):
        layouts.kept_for_val([b"a", b"b"], file)
    assert layouts.kept_for_val([b"a", b"c"], file).tolist() == [True, False]
    assert layouts.kept_for_val([], file).tolist() == []
    assert layouts.chosen_for_val([], [], 0.5).tolist() == []


def test_names_of_classes_in_a_tar_have_a_limit(tmp_path, monkeypatch):
    (tmp_path / "classes.txt").write_text("a\nb\n")
    given = shards(tmp_path / "x.tar")
    monkeypatch.setattr(tar, "MAX_CLASSES_BYTES", 4)
    assert tar._read_classes(tmp_path, given) == ("a", "b")
    monkeypatch.setattr(tar, "MAX_CLASSES_BYTES", 3)
    with pytest.raises(BadData, match="classes.txt has more than 3 bytes; expected one class name a line"):
        tar._read_classes(tmp_path, given)


# Indexes


def test_an_index_of_masks_whose_parts_do_not_fit():
    seen = [
        mask_survey.SeenMask(6, 8, 0, 3, 8, tuple(np.asarray(each) for each in ([0, 1], [0, 0x010101], [40, 8]))),
        mask_survey.SeenMask(fault="unreadable: x"),
    ]
    kept = mask_survey.together(seen).arrays()
    kept |= {"channels": np.asarray([3, 1]), "bits": np.asarray([8, 8])}
    found = mask_survey.Survey.loaded(kept, 2)
    assert found.heights.tolist() == [6, 0] and found.faults.all() == [b"", b"unreadable: x"]
    one = np.zeros(1, np.int64)
    for wrong, said in (
        *(({name: one}, "columns of different lengths") for name in ("heights", "widths", "kinds", "channels", "bits")),
        ({"ends": np.asarray([2, 1])}, "columns of different lengths"),
        ({"ends": np.asarray([-1, 2])}, "columns of different lengths"),
        *(({name: one}, "values of no mask") for name in ("values", "colours", "counts")),
        ({"ends": np.asarray([2, 3])}, "values of no mask"),
        ({"heights": np.asarray([-1, 0])}, "heights beyond 178956970"),
        ({"widths": np.asarray([178956971, 0])}, "widths beyond 178956970"),
        ({"kinds": np.asarray([3, 0])}, "kinds beyond 2"),
        ({"channels": np.asarray([0, 1])}, "channels beyond 4"),
        ({"channels": np.asarray([5, 1])}, "channels beyond 4"),
        ({"bits": np.asarray([7, 8])}, "bits beyond 16"),
        ({"bits": np.asarray([17, 8])}, "bits beyond 16"),
        ({"values": np.asarray([0, 2**24])}, "values beyond 16777215"),
        ({"values": np.asarray([-1, 0])}, "values beyond 16777215"),
        ({"colours": np.asarray([-2, 0])}, "colours beyond 16777215"),
        ({"colours": np.asarray([0, 2**24])}, "colours beyond 16777215"),
        ({"counts": np.asarray([0, 1])}, "counts beyond 178956970"),
    ):
        with pytest.raises(ValueError, match=said):
            mask_survey.Survey.loaded(kept | wrong, 2)
    with pytest.raises(ValueError, match="columns of different lengths"):
        mask_survey.Survey.loaded(kept, 3)
    edge = {"kinds": np.asarray([2, 0]), "bits": np.asarray([16, 8]), "channels": np.asarray([4, 1])}
    edge |= {"values": np.asarray([0, 2**24 - 1]), "colours": np.asarray([-1, 2**24 - 1]), "counts": np.asarray([1, 1])}
    assert len(mask_survey.Survey.loaded(kept | edge, 2).values) == 2


def test_an_index_of_boxes_whose_parts_do_not_fit():
    made = annotations.assembled(
        {1: (6, 8, b"a"), 2: (6, 8, b"b")}, {1: "x"}, np.asarray([1, 2]), np.asarray([[0.0, 0, 1, 1]] * 2),
        np.ones(2), np.zeros(2, bool), np.ones(2, np.int64),
    )  # fmt: skip
    kept = made.arrays()
    assert annotations.Annotations.loaded(kept).ends.tolist() == [1, 2]
    for wrong in (
        {"heights": np.asarray([6])},
        {"widths": np.asarray([8])},
        {"ends": np.asarray([1])},
        {"ends": np.asarray([1, 3])},
        {"ends": np.asarray([3, 2])},
        {"area": kept["area"][:1]},
        {"boxes": kept["boxes"][:4]},
        {"crowd": kept["crowd"][:1]},
        {"categories": kept["categories"][:1]},
        {"categories": np.asarray([1, 2])},
        {"class_ids": np.asarray([1, 2])},
        {"heights": np.asarray([6, -1])},
        {"area": np.asarray([1, np.nan]).view(np.int64)},
        {"boxes": np.asarray([0, 0, 1, 1, 0, 0, 1, np.inf]).view(np.int64)},
    ):
        assert wrong.keys() <= kept.keys()
        with pytest.raises(ValueError):  # noqa: PT011  # then the file is read again
            annotations.Annotations.loaded(kept | wrong)


# Numbers of a split


def test_what_a_report_counts(tmp_path):
    for number, size in enumerate([(8, 6), (10, 12), (9, 9)]):
        for name in ("images", "masks"):
            (tmp_path / "m" / name).mkdir(parents=True, exist_ok=True)
            mode = "RGB" if name == "images" else "L"
            Image.new(mode, size, number % 2).save(tmp_path / "m" / name / f"{number}.png")
        for root in ("f/a", "f/b"):
            (tmp_path / root).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size).save(tmp_path / "f" / "ab"[number % 2] / f"{number}.png")
    said = {
        "images": [{"id": n, "file_name": f"{n}.png", "width": 8, "height": 6 + n} for n in range(3)],
        "annotations": [
            {"id": n, "image_id": n // 2, "category_id": 5 + n % 2, "bbox": [0, 0, 2, 2]} for n in range(3)
        ],
        "categories": [{"id": 5, "name": "x"}, {"id": 6, "name": "y"}],
    }
    (tmp_path / "m" / "train.json").write_text(json.dumps(said))
    source = open_boxes("coco", str(tmp_path / "m"), "val", ALL)
    found = counts.of_boxes(source)
    assert (found.items, found.kind, found.counted, found.counts, found.counted_in) == (3, "images", "boxes", (2, 1), 3)
    assert found.sizes == ((6, 8), (7, 8), (8, 8)) and found.boxes == (2, 1, 0)
    late = iter([False, True])
    assert counts.of_boxes(source, lambda: next(late)).boxes == (2,)
    masked = open_masks("masks", str(tmp_path / "m"), "val", ALL)
    found = counts.of_masks(masked)
    assert (found.kind, found.counted, found.counts, found.counted_in) == ("images", "pixels", (129, 120), 3)
    assert found.sizes == ((6, 8), (12, 10), (9, 9))
    assert counts.of_masks(masked, lambda: True).counts == (48, 0)  # one at least
    assert counts.of_masks(masked, most=1).counted_in == 1
    labelled = open_source("folder", str(tmp_path / "f"), "val", ALL)
    found = counts.of_labels(labelled)
    assert (found.items, found.counts, found.counted_in) == (3, (2, 1), 3)
    assert sorted(found.sizes) == [(6, 8), (9, 9), (12, 10)]
    assert counts.of_labels(labelled, lambda: True).sizes == () and len(counts.of_labels(labelled, most=2).sizes) == 2


def test_images_whose_form_is_looked_at(tmp_path):
    Image.new("L", (8, 6)).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"broken")
    assert mask_images.pixels_of([tmp_path / "b.png", tmp_path / "gone.png"]) == mask_images.Pixels()
    assert mask_images.pixels_of([tmp_path / "b.png", tmp_path / "a.png"]) == mask_images.Pixels(1, 8)


def test_folds_of_volumes():
    cases = [Case(f"c{n}", *[(1, 1, 1)] * 5, (1.0, 1.0, 1.0), f"c{n}.npy", None) for n in (2, 10, 1)]
    plan = VolumePlan("own", "x", 3, "training", None, tuple(cases), "raw")  # type: ignore[arg-type]
    names = [case.name for case in decathlon._chosen(plan, "val", 0, 1)]
    assert names == ["c1", "c10", "c2"]
    with pytest.raises(UsageError, match="--data.folds 1 leaves no volumes to train on; use 2 or more, e.g. 5"):
        decathlon._chosen(plan, "train", 0, 1)
    for fold in (-1, 3):
        with pytest.raises(UsageError, match=f"--data.fold {fold}: with 3 folds use 0 to 2"):
            decathlon._chosen(plan, "train", fold, 3)
    split = [[case.name for case in decathlon._chosen(plan, which, 2, 3)] for which in ("train", "val")]
    assert sorted(split[0] + split[1]) == ["c1", "c10", "c2"] and len(split[1]) == 1


def test_the_size_of_an_image_and_of_its_mask(tmp_path):
    for name, size in (("images", (8, 6)), ("masks", (8, 6))):
        (tmp_path / name).mkdir()
        for stem in "ab":
            Image.new("L", size, stem == "b").save(tmp_path / name / f"{stem}.png")
    source = open_masks("masks", str(tmp_path), "val", ALL)
    Image.new("L", (6, 8)).save(tmp_path / "images" / "a.png")
    Image.new("L", (6, 8)).save(tmp_path / "masks" / "b.png")
    with pytest.raises(BadSample, match=r"^images/a.png: 6x8 pixels, its mask 8x6; store both at one size$"):
        source.image(0)
    with pytest.raises(
        BadSample, match=r"^images/b.png: .*b.png has another size than when it was indexed; start again"
    ):
        source.mask(1)
    Image.new("L", (8, 6), 7).save(tmp_path / "masks" / "b.png")
    with pytest.raises(BadSample, match=r"b.png has other values than when it was indexed; start again"):
        source.mask(1)


def test_outlines_have_limits(tmp_path, monkeypatch):
    (tmp_path / "images").mkdir()
    Image.new("RGB", (8, 6)).save(tmp_path / "images" / "a.png")
    said = {
        "images": [{"id": 1, "file_name": "a.png", "width": 8, "height": 6}],
        "annotations": [
            {"id": n, "image_id": 1, "category_id": n, "bbox": [0, 0, 2, 2], "segmentation": [[0, 0, 3, 0, 3, 3]]}
            for n in (1, 2)
        ],
        "categories": [{"id": n, "name": f"c{n}"} for n in (1, 2)],
    }
    (tmp_path / "train.json").write_text(json.dumps(said))
    monkeypatch.setattr(outlines, "MAX_PIXELS", 48)
    source = open_masks("coco", str(tmp_path), "val", ALL)
    assert source.mask(0).max() == 2
    monkeypatch.setattr(outlines, "MAX_PIXELS", 47)
    with pytest.raises(BadSample, match="a.png: annotated as 8x6, more than the 47 pixels allowed"):
        source.mask(0)
    monkeypatch.setattr(outlines, "MOST_CLASSES", 3)
    open_masks("coco", str(tmp_path), "val", ALL)
    monkeypatch.setattr(outlines, "MOST_CLASSES", 2)
    with pytest.raises(BadData, match="train.json has 2 classes, at most 1 and background are possible"):
        open_masks("coco", str(tmp_path), "val", ALL)
    (tmp_path / "train.json").unlink()
    with pytest.raises(BadSample, match="train.json cannot be read: No such file or directory"):
        list(source.outlines(0))


def test_two_images_of_one_label_and_labels_without_an_image(tmp_path):
    for split in ("images", "labels"):
        (tmp_path / split).mkdir()
    for name in ("a.png", "a.jpg", "b.png"):
        Image.new("RGB", (8, 6)).save(tmp_path / "images" / name)
    for name in ("a", "c"):
        (tmp_path / "labels" / f"{name}.txt").write_text("0 0.5 0.5 0.25 0.5\n")
    place = layouts.Place(tmp_path / "images", tmp_path / "labels")
    said = []
    pairs = yolo.Pairs.at(layouts.Splits("yolo", place, None), place, lambda *each: said.append(each)).pairs
    assert [(each.name, bool(each.image), bool(each.label)) for each in pairs] == [
        ("a.jpg", True, True), ("b.png", True, False), ("c.txt", False, True)
    ]  # fmt: skip
    text = "has the label of a.jpg, a.txt; rename one of them"
    assert said == [("two images of one label", str(tmp_path / "images" / "a.png"), text)]
    (tmp_path / "labels" / "a.txt").unlink()
    with pytest.raises(BadData, match=r"labels has no label \(.txt\) of any of the 3 images in .*images"):
        yolo.Pairs.at(layouts.Splits("yolo", place, None), place, lambda *_: None)
