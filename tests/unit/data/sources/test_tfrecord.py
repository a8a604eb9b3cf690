"""TFRecord files as a source: names, labels, classes, order, damage. The bytes themselves: test_records.py."""

import os
import pickle
import random
import shutil
import threading
from pathlib import Path

import pytest

from sightline.data.classification import ClassificationData
from sightline.data.formats import records
from sightline.data.sources import SourceOptions, open_source, tfrecord
from sightline.errors import BadData, BadSample

GOLDEN = Path(__file__).resolve().parents[3] / "golden" / "tfrecord"


def example(label: int, name: str = "", synset: str = "", data: bytes = b"image") -> dict:
    features = {"image/class/label": label, "image/encoded": data, "image/class/synset": synset.encode()}
    return {**features, "image/filename": name.encode()} if name else features


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """Records written by TensorFlow."""
    return Path(shutil.copytree(GOLDEN, tmp_path / "golden"))


@pytest.fixture
def write(tmp_path: Path, write_records):
    """write(train=[...], val=[...]): one file for each split, of examples."""

    def write_splits(**splits: list[dict]) -> str:
        for split, examples in splits.items():
            folder = "train" if split == "train" else "validation"
            write_records(tmp_path / "data" / folder / f"{folder}-00000-of-00001", examples)
        return str(tmp_path / "data")

    return write_splits


def rows(source) -> list[tuple[bytes, int]]:
    return [(source.read(i).data, source.read(i).label) for i in range(len(source))]


# What is found


def test_files_written_by_tensorflow(golden: Path):
    train, val = (open_source("auto", str(golden), split) for split in ("train", "val"))
    assert train.classes == val.classes == ("n01440764", "n01443537", "n01484850")
    names = [train.name(i) for i in range(len(train))]
    assert names == [
        "img_train/img_train-00000-of-00002:n01440764_20.JPEG",
        "img_train/img_train-00001-of-00002:n01440764_3.JPEG",
        "img_train/img_train-00000-of-00002:n01443537_5.JPEG",
        "img_train/img_train-00000-of-00002:n01484850_7.JPEG",
    ]
    assert [label for _, label in rows(train)] == [0, 0, 1, 2]
    assert [label for _, label in rows(val)] == [1]
    dataset = ClassificationData(path=str(golden), size=8, eval_resize=8, eval_size=8).open("train", seed=0)
    assert dataset.load(0, 3)["image"].shape == (8, 8, 3)
    for data, _ in rows(train):
        assert any(data in (golden / "img_train" / name).read_bytes() for name in os.listdir(golden / "img_train"))


@pytest.mark.parametrize("kind", ["auto", "tfrecord"])
def test_records_one_folder_deeper_are_found(write, kind: str):
    """ImageNet's README makes them in tf_records/ of the folder that it calls so."""
    path = write(train=[example(1, "a", "n1"), example(2, "b", "n2")], val=[example(2, "c", "n2")])
    direct = {split: open_source(kind, path, split) for split in ("train", "val")}
    outer = Path(path).parent / "tf_records"
    shutil.copytree(path, outer / "tf_records")
    made(outer, "img_train/n1/a.JPEG", "img_train/n2/b.JPEG", "img_val/c.JPEG", "by_class/train/n1/a.JPEG")
    for split, before in direct.items():
        source = open_source(kind, str(outer), split)
        assert (source.inner, before.inner) == ("tf_records", "")
        assert (source.fingerprint, rows(source)) == (before.fingerprint, rows(before))
    line = ClassificationData(path=str(outer), source=kind).look(outer / "run", ()).line
    assert line == "data: 2 classes, 2 + 1 images; found in tf_records/, one folder deeper"


def test_records_in_two_folders_are_an_error_that_names_them(write):
    path = Path(write(train=[example(1), example(2)]))
    shutil.copytree(path, path.parent / "both" / "old")
    shutil.copytree(path, path.parent / "both" / "new")
    with pytest.raises(BadData, match="both holds TFRecord files in new, old; give one of these folders, .*both/new"):
        open_source("tfrecord", str(path.parent / "both"), "train")
    assert not tfrecord.detect(str(path.parent / "both"))


def test_images_are_not_read_where_records_are_asked_for(tmp_path: Path):
    made(tmp_path, "img_train/n1/a.JPEG", "img_train/n2/b.JPEG", "img_val/c.JPEG")
    with pytest.raises(BadData, match="no TFRecord files of the train split, found there: folders img_train, img_val"):
        open_source("tfrecord", str(tmp_path), "train")


def made(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")


@pytest.mark.parametrize(
    ("train", "val", "folders"),
    [
        ("img_train", "img_val", True),
        ("train", "validation", True),
        ("imagenet_train_subset", "imagenet_val_subset", True),
        ("train", "validation", False),
    ],
)
def test_every_convention_of_names_is_known(tmp_path: Path, write_records, train: str, val: str, folders: bool):
    for prefix, counts in ((train, (2, 0, 1)), (val, (1,))):
        for number, count in enumerate(counts):
            path = tmp_path / (prefix if folders else "") / f"{prefix}-{number:05d}-of-{len(counts):05d}"
            write_records(path, [example(1 + number % 2, f"{number}-{i}.JPEG", f"n{number % 2}") for i in range(count)])
    sources = [open_source("auto", str(tmp_path), split) for split in ("train", "val")]
    assert [type(source) for source in sources] == [tfrecord.TFRecordSource] * 2
    assert [len(source) for source in sources] == [3, 1]


def test_names_and_places_decide_nothing_but_the_fingerprint(golden: Path, tmp_path: Path):
    copy = shutil.copytree(golden, tmp_path / "copy")
    for path in copy.rglob("img_*"):
        os.utime(path, (1, 1))
    before = [tfrecord.open_source(str(golden), split).fingerprint for split in ("train", "val")]
    assert [tfrecord.open_source(str(copy), split).fingerprint for split in ("train", "val")] == before
    assert before[0] != before[1]
    with (copy / "img_train" / "img_train-00001-of-00002").open("ab") as file:
        file.write(records.frame(records.encode_example(example(1, "z.JPEG"))))
    assert tfrecord.open_source(str(copy), "train").fingerprint != before[0]


def test_samples_come_by_label_and_file_name(write):
    path = write(train=[example(2, "b"), example(1, "z"), example(2, "a"), example(1, "B")])
    source = tfrecord.open_source(path, "train")
    assert [source.name(i)[-1] for i in range(4)] == ["B", "z", "a", "b"]
    assert [label for _, label in rows(source)] == [0, 0, 1, 1]


def test_records_without_file_names_keep_their_order(write):
    given = [example(label, data=bytes([number])) for number, label in enumerate((2, 1, 3, 1, 2))]
    source = tfrecord.open_source(write(train=given), "train")
    assert rows(source) == [(bytes([number]), label) for number, label in enumerate((1, 0, 2, 0, 1))]
    assert source.name(1) == f"train/train-00000-of-00001:byte {source.index.offset[1]}"


def test_a_class_without_a_synset_has_a_number_for_a_name(write):
    path = write(train=[example(1, "a", "n1"), example(2, "b"), example(3, "c", "n3")], val=[example(2, "d", "n2")])
    assert tfrecord.open_source(path, "train").classes == ("n1", "class0001", "n3")
    assert tfrecord.open_source(path, "val").classes == ("n1", "class0001", "n3")


def test_val_alone_has_its_own_classes(write):
    path = write(val=[example(1, "a", "n1"), example(2, "b", "n2")])
    assert tfrecord.open_source(path, "val").classes == ("n1", "n2")
    with pytest.raises(BadData, match="data has no TFRecord files of the train split, .*; expected PATH/train/"):
        tfrecord.open_source(path, "train")


# Labels


def test_first_label_is_taken_from_the_labels(write):
    """Through the configuration, as a user sets it."""
    from_one = write(train=[example(label, f"{label}", f"n{label}") for label in (1, 2, 3)])
    source = ClassificationData(path=from_one).open("train", seed=0).source
    assert ([label for _, label in rows(source)], source.classes) == ([0, 1, 2], ("n1", "n2", "n3"))
    with pytest.raises(BadData, match="no sample of label 0; give --data.first-label 1 if .*declare"):
        ClassificationData(path=from_one, first_label=0).open("train", seed=0)
    # As the original ResNeXt counts them: 1..1000 of 1001, none of class 0.
    source = ClassificationData(path=from_one, first_label=0, classes=4).open("train", seed=0).source
    assert ([label for _, label in rows(source)], source.classes) == ([1, 2, 3], ("class0000", "n1", "n2", "n3"))

    from_zero = write(train=[example(label, f"{label}") for label in (0, 1)])
    assert [x for _, x in rows(tfrecord.open_source(from_zero, "train", SourceOptions(0)))] == [0, 1]
    with pytest.raises(BadData, match=r"at byte 0 \(0\) has label 0, expected 1 to 1; give --data.first-label 0 if"):
        tfrecord.open_source(from_zero, "train")


def test_gaps_between_labels_need_a_declared_number(write):
    path = write(train=[example(label, f"{label}") for label in (1, 2, 5)], val=[example(3, "v")])
    with pytest.raises(BadData, match="labels from 1 to 5, but no sample of label 3, 4; .*declare --data.classes 5 if"):
        tfrecord.open_source(path, "train")
    source = tfrecord.open_source(path, "train", SourceOptions(classes=1000))
    assert len(source.classes) == 1000
    assert rows(tfrecord.open_source(path, "val", SourceOptions(classes=1000))) == [(b"image", 2)]
    with pytest.raises(BadData, match=r"\(5\) has label 5, expected 1 to 4; .*the right --data.classes"):
        tfrecord.open_source(path, "train", SourceOptions(classes=4))


def test_a_smaller_data_set_than_declared_is_refused(write):
    """Without gaps there is no doubt how many classes there are."""
    path = write(train=[example(1, "a"), example(2, "b")])
    with pytest.raises(BadData, match="has 2 classes, the recipe declares 1000"):
        ClassificationData(path=path, classes=1000).open("train", seed=0)


def test_a_val_label_that_train_has_not_is_refused(write):
    path = write(train=[example(1, "a"), example(2, "b")], val=[example(3, "v")])
    with pytest.raises(BadData, match=r"validation-00000-of-00001: .* at byte 0 \(v\) has label 3, expected 1 to 2"):
        tfrecord.open_source(path, "val")


def test_labels_and_synsets_must_agree(write):
    one = example(1, "a", "n1")
    with pytest.raises(BadData, match=r"label 1 has synset n2, but n1 in train/train-00000-of-00001: record at byte 0"):
        tfrecord.open_source(write(train=[one, example(1, "b", "n2")]), "train")
    with pytest.raises(BadData, match=r"synset n1 has label 2, but 1 in train/train-00000-of-00001: record at byte 0"):
        tfrecord.open_source(write(train=[one, example(2, "b", "n1")]), "train")
    path = write(train=[one, example(2, "b", "n2")], val=[example(2, "v", "n7")])
    with pytest.raises(BadData, match="label 2 is called n7, the training files call it n2"):
        tfrecord.open_source(path, "val")


@pytest.mark.parametrize(
    "label", [[], [1, 2], [b"1"], [1.0], -1, 2**40, 2**63 - 1], ids=lambda value: repr(value).replace(" ", "")
)
def test_a_record_without_one_small_number_for_a_label_is_refused(write, label):
    features = {**example(1, "a"), "image/class/label": label}
    with pytest.raises(BadData, match=r"train-00000-of-00001: record at byte \d+: expected one integer"):
        tfrecord.open_source(write(train=[example(1, "z"), features]), "train")


def test_names_of_absurd_length_are_refused(write):
    with pytest.raises(BadData, match="record at byte 0: a file name or synset of more than 4096 bytes"):
        tfrecord.open_source(write(train=[example(1, "a" * 5000)]), "train")


# Files


def test_missing_shards_are_named(golden: Path, write_records):
    folder = golden / "img_train"
    (folder / "img_train-00000-of-00002").rename(folder / "img_train-00003-of-00004")
    (folder / "img_train-00001-of-00002").rename(folder / "img_train-00000-of-00004")
    with pytest.raises(BadData, match="img_train/img_train-00001-of-00004 is missing; 2 of 4 shards are there"):
        tfrecord.open_source(str(golden), "train")
    with pytest.raises(BadData, match="img_train-00001-of-00004 is missing"):  # its classes would be wrong
        tfrecord.open_source(str(golden), "val")
    write_records(folder / "img_train-00001-of-00008", [])
    with pytest.raises(BadData, match="img_train-00001-of-00008 is not one of the 4 files that img_train-00000-of"):
        tfrecord.open_source(str(golden), "train")


def test_files_without_a_record_are_refused(write):
    with pytest.raises(BadData, match="train holds 1 TFRecord files and no record"):
        tfrecord.open_source(write(train=[]), "train")


def test_an_unreadable_shard_is_named(golden: Path):
    (golden / "img_train" / "img_train-00001-of-00002").unlink()
    (golden / "img_train" / "img_train-00001-of-00002").mkdir()
    with pytest.raises(BadData, match="img_train-00001-of-00002 cannot be read: Is a directory"):
        tfrecord.open_source(str(golden), "train")


def test_a_truncated_or_foreign_file_is_refused_with_the_offset(golden: Path):
    path = golden / "img_train" / "img_train-00000-of-00002"
    whole = path.read_bytes()
    starts = [at for at, _ in records.scan_frames(whole, "")]
    for cut in (1, 8, 11, 12, 13, starts[1] - 5, starts[1] - 4, starts[1] - 1, starts[1] + 3, starts[2] + 12, -1):
        path.write_bytes(whole[:cut])
        record = max(at for at in starts if at < cut % len(whole))
        with pytest.raises(BadData, match=f"img_train-00000-of-00002: record at byte {record}: .*fetch the file again"):
            tfrecord.open_source(str(golden), "train")
    path.write_bytes(b"\x1f\x8b" + whole)
    with pytest.raises(BadData, match="record at byte 0: its length fails its checksum; .*a compressed one: unpack it"):
        tfrecord.open_source(str(golden), "train")


# Reading


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def test_damage_found_when_reading_is_a_bad_sample(golden: Path):
    """The run may then continue without it."""
    path = golden / "img_train" / "img_train-00000-of-00002"
    whole, source = path.read_bytes(), tfrecord.open_source(str(golden), "train")
    start = int(source.index.offset[3])
    for at, problem in ((start + 3, "length fails"), (start + 9, "length fails"), (start + 400, r"\d+ bytes fail")):
        flip(path, at)
        with pytest.raises(
            BadSample, match=f"n01484850_7.JPEG: record at byte {start}: its {problem} the?ir|its"
        ) as error:
            source.read(3)
        assert error.value.name == source.name(3)
        path.write_bytes(whole)
    os.truncate(path, start + 500)
    with pytest.raises(BadSample, match=rf"record at byte {start}: \d+ bytes long, but the file ends at {start + 500}"):
        source.read(3)
    path.unlink()
    fresh = pickle.loads(pickle.dumps(source))  # `source` still holds the file open
    with pytest.raises(BadSample, match="n01484850_7.JPEG: cannot be read: No such file"):
        fresh.read(3)
    assert fresh.read(1) == source.read(1)


def test_damage_among_the_features_spoils_one_record_and_not_the_index(write):
    """Whatever byte of a record's payload is flipped, the others are read and this one is a bad sample."""
    path = Path(write(train=[example(label, f"{label}.JPEG", f"n{label}") for label in (1, 2, 2, 3)]))
    file = path / "train" / "train-00000-of-00001"
    whole = file.read_bytes()
    (start, length) = list(records.scan_frames(whole, ""))[2]
    for at in range(start + 12, start + 12 + length + 4):
        flip(file, at)
        source = tfrecord.open_source(str(path), "train")
        assert source.classes == ("n1", "n2", "n3")
        bad = [i for i in range(4) if int(source.index.offset[i]) == start]
        with pytest.raises(BadSample, match=f"record at byte {start}: its {length} bytes fail their checksum"):
            source.read(bad[0])
        assert [source.read(i).label for i in range(4) if i != bad[0]] == [0, 1, 2]
        file.write_bytes(whole)


def test_random_damage_ends_as_our_errors(golden: Path):
    rng = random.Random(4)
    path = golden / "img_train" / "img_train-00000-of-00002"
    whole = path.read_bytes()
    read = refused = 0
    for _ in range(600):
        damaged = bytearray(whole[: rng.choice((len(whole), len(whole), rng.randrange(len(whole))))])
        for _ in range(rng.randrange(4)):
            at = rng.randrange(len(damaged) + 1)
            damaged[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
        path.write_bytes(damaged)
        try:
            source = tfrecord.open_source(str(golden), "train", SourceOptions(classes=3))
        except BadData:
            refused += 1
            continue
        for index in range(len(source)):
            try:
                read += len(source.read(index).data) > 0
            except BadSample:
                refused += 1
    assert read > 100 and refused > 100


@pytest.mark.parametrize("image", [{}, {"image/encoded": [b"a", b"b"]}, {"image/encoded": [7]}], ids=["no", "two", "7"])
def test_a_record_without_one_image_is_a_bad_sample(write, image: dict):
    features = {"image/class/label": 1, "image/filename": b"a", **image}
    source = tfrecord.open_source(write(train=[features, example(1, "b")]), "train")
    with pytest.raises(
        BadSample, match="train-00000-of-00001:a: record at byte 0: image/encoded holds .*expected one image"
    ):
        source.read(0)
    assert source.read(1).data == b"image"


def test_a_rewritten_record_does_not_pass_under_the_old_label(write):
    source = tfrecord.open_source(write(train=[example(1, "a"), example(2, "b")]), "train")
    write(train=[example(2, "a"), example(2, "b")])
    with pytest.raises(BadSample, match="label is 2, and was 1 when the file was indexed; remove the .sightline"):
        source.read(0)


def test_a_source_travels_without_its_files_and_is_read_by_threads(golden: Path):
    source = tfrecord.open_source(str(golden), "train")
    expected = rows(source)
    again = pickle.loads(pickle.dumps(source))
    assert not again._open._files and source._open._files
    found: dict[int, list] = {}
    threads = [threading.Thread(target=lambda n=n: found.update({n: rows(again) * 20})) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(4), expected * 20)


def test_many_shards_do_not_use_up_the_files_a_process_may_open(tmp_path: Path, write_records, monkeypatch):
    monkeypatch.setattr("sightline.data.sources.shards.MAX_OPEN_FILES", 4)
    for number in range(12):
        write_records(tmp_path / "train" / f"train-{number:05d}-of-00012", [example(1, f"{number:02d}")])
    source = tfrecord.open_source(str(tmp_path), "train")
    before = len(os.listdir("/proc/self/fd"))
    assert len([source.read(i) for _ in range(3) for i in range(12)]) == 36
    assert len(os.listdir("/proc/self/fd")) == before + 4
    del source
    assert len(os.listdir("/proc/self/fd")) == before
