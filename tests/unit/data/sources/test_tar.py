"""Tar shards as a source: keys, labels, classes, order, what is never opened, damage."""

import gzip
import json
import os
import pickle
import random
import shutil
import tarfile
import tracemalloc
from pathlib import Path

import pytest

from sightline.data.classification import ClassificationData
from sightline.data.sources import SourceOptions, open_source, tar
from sightline.errors import BadData, BadSample

Members = list[tuple[str, bytes]]


def numbered(key: str, label: int, data: bytes = b"image", extension: str = "jpg") -> Members:
    return [(f"{key}.{extension}", data), (f"{key}.cls", str(label).encode())]


def described(key: str, name: str) -> Members:
    return [(f"{key}.jpg", b""), (f"{key}.json", json.dumps({"label": 0, "class": name}).encode())]


@pytest.fixture
def write(tmp_path: Path, write_tar):
    """write(train=members, val=members): one shard for each split."""

    def write_splits(**splits) -> str:
        for split, members in splits.items():
            write_tar(tmp_path / "data" / split / "000000.tar", members)
        return str(tmp_path / "data")

    return write_splits


def rows(source) -> list[tuple[bytes, int]]:
    return [(source.read(i).data, source.read(i).label) for i in range(len(source))]


def names(source) -> list[str]:
    return [source.name(i).partition(":")[2] for i in range(len(source))]


# What is found


def test_numbered_samples_and_their_order(write):
    path = write(
        train=[*numbered("b", 1, b"one"), *numbered("c", 0, b"two", "PNG"), *numbered("./x/a", 1, b"three", "jpeg")],
        val=numbered("v", 1),
    )
    train, val = (open_source("auto", path, split) for split in ("train", "val"))
    assert rows(train) == [(b"two", 0), (b"three", 1), (b"one", 1)]
    assert names(train) == ["c.PNG", "x/a.jpeg", "b.jpg"]  # by label, then by the name without its folders
    assert train.name(0) == "train/000000.tar:c.PNG"
    assert train.classes == val.classes == ("class0000", "class0001")
    assert rows(val) == [(b"image", 1)]


@pytest.mark.parametrize(
    "files",
    [
        ("train/a.tar", "train/b.tar", "val/a.tar"),
        ("train/train-000000.tar", "train/train-000001.tar", "validation/x.tar"),
        ("train-000000.tar", "train-000001.tar", "val-000000.tar"),
        ("imagenet-train-000000.tar", "imagenet-train-000001.tar", "imagenet-val-000000.tar"),
        ("train-0.tar", "train-1.tar", "validation.tar"),
    ],
    ids=lambda files: files[0],
)
def test_every_place_of_shards_is_known(tmp_path: Path, write_tar, files: tuple[str, ...]):
    for number, file in enumerate(files):
        write_tar(tmp_path / file, numbered(f"k{number}", number % 2))
    (tmp_path / "constrained-0.tar").write_bytes(b"no shard: only its name contains one")
    train, val = (open_source("auto", str(tmp_path), split) for split in ("train", "val"))
    assert type(train) is tar.TarSource
    assert (names(train), names(val)) == (["k0.jpg", "k1.jpg"], ["k2.jpg"])


def test_a_tar_of_class_folders(write):
    """Images of one stem but other endings are separate samples; other files, and .hidden, are left out."""
    folder = tarfile.TarInfo("train/cat")
    folder.type = tarfile.DIRTYPE
    path = write(
        train=[
            (folder, b""),
            ("train/cat/2.jpg", b"c2"),
            ("train/cat/1.a.jpg", b"c1a"),
            ("train/cat/1.b.jpg", b"c1b"),
            ("train/ant/x.webp", b"ax"),
            ("train/ant/x.bmp", b"ax2"),
            ("train/ant/notes.txt", b""),
            ("train/ant/._x.jpg", b"left by a Mac"),
        ],
        val=[("val/cat/9.jpg", b"c9")],
    )
    train, val = (tar.open_source(path, split) for split in ("train", "val"))
    assert train.classes == val.classes == ("ant", "cat")
    assert rows(train) == [(b"ax2", 0), (b"ax", 0), (b"c1a", 1), (b"c1b", 1), (b"c2", 1)]
    assert rows(val) == [(b"c9", 1)]
    with pytest.raises(BadData, match="data/val has classes that train lacks: dog; remove or rename them"):
        tar.open_source(write(val=[("dog/9.jpg", b"")]), "val")


def test_json_names_and_numbers_the_classes(write):
    path = write(
        train=[
            ("a.jpg", b"a"),
            ("a.json", b'{"label": 1, "synset": "n1", "width": 3}'),
            ("b.json", b'{"label": 7, "class": "n0"}'),
            ("b.cls", b"0\n"),  # goes before the number in the JSON
            ("b.jpg", b"b"),
        ]
    )
    source = tar.open_source(path, "train")
    assert (source.classes, rows(source)) == (("n0", "n1"), [(b"b", 0), (b"a", 1)])
    path = write(
        train=[("x.jpg", b"x"), ("x.json", b'{"class": "dog"}'), ("y.jpg", b"y"), ("y.json", b'{"label": "ant"}')]
    )
    source = tar.open_source(path, "train")
    assert (source.classes, rows(source)) == (("ant", "dog"), [(b"y", 0), (b"x", 1)])


def test_folders_name_numbered_classes_where_each_has_one(write):
    assert tar.open_source(write(train=[*numbered("b/1", 0), *numbered("a/2", 1)]), "train").classes == ("b", "a")
    mixed = [*numbered("b/1", 0), *numbered("a/2", 1), *numbered("a/3", 0)]
    assert tar.open_source(write(train=mixed), "train").classes == ("class0000", "class0001")


def test_classes_txt_names_and_orders(write):
    path = write(train=[*numbered("a", 0), *numbered("b", 2)])
    (Path(path) / "train" / "classes.txt").write_text("cat\nant\ndog\n")
    assert tar.open_source(path, "train").classes == ("cat", "ant", "dog")
    with pytest.raises(BadData, match=r"\(b.jpg\) has label 9, expected 0 to 2; fix the label or classes.txt"):
        tar.open_source(write(train=[*numbered("a", 0), *numbered("b", 9)]), "train")
    path = write(train=[("ant/1.jpg", b"ant"), ("cat/2.jpg", b"cat")], val=[("cat/1.jpg", b"c"), ("ant/1.jpg", b"a")])
    for split, expected in (("train", [(b"cat", 0), (b"ant", 1)]), ("val", [(b"c", 0), (b"a", 1)])):
        source = tar.open_source(path, split)
        assert (source.classes, rows(source)) == (("cat", "ant", "dog"), expected)
        assert names(source)[0].startswith("cat/")
    with pytest.raises(BadData, match="data/train has classes that classes.txt lacks: bee"):
        tar.open_source(write(train=[("bee/1.jpg", b"")]), "train")


@pytest.mark.parametrize("content", [b"", b"a\n\nb\n", b"a\nb\na\n", b"\xff\n"], ids=["empty", "gap", "twice", "latin"])
def test_a_bad_classes_txt_is_refused(write, content: bytes):
    path = write(train=numbered("a", 0))
    (Path(path) / "classes.txt").write_bytes(content)
    with pytest.raises(BadData, match="data/classes.txt (has an empty line or a name twice|is not UTF-8)"):
        tar.open_source(path, "train")


def test_a_labelled_key_may_hold_more_than_its_image(write):
    """As WebDataset reads it, KEY.seg.png is another part of the sample."""
    beside = [("a.seg.png", b"mask"), ("a.tif", b"a TIFF beside an image is none")]
    path = write(train=[("a.jpg", b"a"), *beside, ("a.cls", b"0"), ("b.2.jpg", b"b"), ("b.cls", b"1")])
    assert rows(tar.open_source(path, "train")) == [(b"a", 0), (b"b", 1)]


def test_gaps_between_numbers_need_a_declared_number(write):
    path = write(train=[*numbered("a", 0), *numbered("b", 3)])
    with pytest.raises(BadData, match="labels from 0 to 3, but no sample of label 1, 2; declare --data.classes 4 if"):
        tar.open_source(path, "train")
    assert len(tar.open_source(path, "train", SourceOptions(classes=10)).classes) == 10
    assert len(ClassificationData(path=path, classes=10).open("train", seed=0).spec.classes) == 10


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("a.jpg", b"")], "a.jpg has no label; expected a.cls with a number, a.json or a class folder"),
        ([("a.cls", b"1"), ("a.gif", b"")], "a has a label and 0 images; expected one of a.jpg"),
        ([("a.jpg", b""), ("a.png", b""), ("a.cls", b"1")], "a has a label and 2 images"),
        ([*numbered("a", 0), ("cat/b.jpg", b"")], "cat/b.jpg has label 'cat' where a.jpg has 0; use numbers or names"),
        ([("a.jpg", b""), ("a.cls", b"-1")], "a.cls holds b'-1'; expected a number from 0 to 100000"),
        ([("a.jpg", b""), ("a.cls", b"1_0")], "a.cls holds b'1_0'"),
        ([("a.jpg", b""), ("a.cls", b"999999999")], "a.cls holds b'999999999'"),
        ([("a.jpg", b""), ("a.cls", b"")], "a.cls holds b''"),
        ([("a.jpg", b""), ("a.cls", b"1" * 70000)], "a.cls has 70000 bytes, more than the 65536 allowed for a label"),
        ([("a.jpg", b""), ("a.json", b"{")], "a.json is not JSON"),
        ([("a.jpg", b""), ("a.json", b"[" * 60000)], "a.json is not JSON"),
        ([("a.jpg", b""), ("a.json", b'{"label": -3}')], "a.json has label -3; expected a number from 0"),
        ([("a.txt", b"")], "data/train holds no images"),
        ([], "data/train holds no images"),
        (
            [
                ("a.jpg", b""),
                ("a.json", b'{"label": 0, "class": "x"}'),
                ("b.jpg", b""),
                ("b.json", b'{"label": 0, "class": "y"}'),
            ],
            "b.jpg: label 0 is called y, before x",
        ),
    ],
)
def test_what_is_not_a_sample_is_refused_by_name(write, members: Members, message: str):
    with pytest.raises(BadData) as error:
        tar.open_source(write(train=members), "train")
    assert message in str(error.value)


def test_splits_must_be_labelled_alike(write):
    with pytest.raises(BadData, match="one split has numbers for labels .*, the other names of folders"):
        tar.open_source(write(train=numbered("a", 0), val=[("cat/a.jpg", b"")]), "val")
    with pytest.raises(BadData, match="label 0 is called bee, the training files call it ant"):
        tar.open_source(write(train=described("a", "ant"), val=described("a", "bee")), "val")


def test_val_alone_has_its_own_classes(write):
    path = write(val=numbered("a", 0))
    assert tar.open_source(path, "val").classes == ("class0000",)
    with pytest.raises(BadData, match="has no tar files of the train split; expected .*train-0.tar"):
        tar.open_source(path, "train")


# What may lie in a tar


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_every_format_with_long_and_foreign_names(tmp_path: Path, write_tar, form: int):
    long = "x" * 90 + "/" + "y" * (95 if form == tarfile.USTAR_FORMAT else 300)
    name = "caf\udce9" if form == tarfile.GNU_FORMAT else "käfer"
    write_tar(tmp_path / "train" / "0.tar", [*numbered(f"ant/{name}", 0, b"1"), *numbered(long, 1, b"2")], format=form)
    source = tar.open_source(str(tmp_path), "train")
    assert rows(source) == [(b"1", 0), (b"2", 1)]
    assert names(source) == [f"ant/{name}.jpg", f"{long}.jpg"]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
@pytest.mark.parametrize("name", ["cat/a.jpg", "cat/b.cls"])
def test_an_image_or_label_that_is_not_a_file_is_refused(write, kind: bytes, name: str):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, "/etc/hostname"
    with pytest.raises(BadData, match=f"train/000000.tar: {name} is a link or a device; pack the file itself"):
        tar.open_source(write(train=[*numbered("cat/b", 0), (info, b"")]), "train")
    other = tarfile.TarInfo("cat/notes.txt")
    other.type, other.linkname = kind, "/etc/hostname"
    assert len(tar.open_source(write(train=[*numbered("cat/b", 0), (other, b"")]), "train")) == 1


def test_a_sparse_image_is_refused(tmp_path: Path, write_tar):
    info = tarfile.TarInfo("cat/a.jpg")
    info.pax_headers = {"GNU.sparse.major": "0", "GNU.sparse.size": "100000", "GNU.sparse.map": "0,10"}
    write_tar(tmp_path / "train" / "0.tar", [(info, b"0123456789")], format=tarfile.PAX_FORMAT)
    with pytest.raises(BadData, match="train/0.tar: holds a sparse file; make the archive without --sparse"):
        tar.open_source(str(tmp_path), "train")


@pytest.mark.parametrize("name", ["/etc/a.jpg", "../a.jpg", "cat/../../a.jpg"])
def test_names_that_lead_outside_are_refused(write, name: str):
    with pytest.raises(BadData, match="train/000000.tar: member '.*a.jpg' leads outside; pack it with a plain name"):
        tar.open_source(write(train=[(name, b"")]), "train")


def test_pickles_are_never_opened(write, tmp_path: Path):
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "marker"), "w"))

    payload = pickle.dumps(Bomb())
    pickle.loads(payload).close()
    (tmp_path / "marker").unlink()  # it works
    hidden = [(f"a.{ending}", payload) for ending in ("pyd", "pkl", "pickle", "pt", "pth")]
    source = tar.open_source(write(train=[*numbered("a", 0), *hidden]), "train")
    assert rows(source) == [(b"image", 0)]
    assert not (tmp_path / "marker").exists()


def test_compressed_shards_are_refused_with_the_remedy(tmp_path: Path, write_tar):
    plain = write_tar(tmp_path / "train" / "0.tar", numbered("a", 0))
    packed = gzip.compress(plain.read_bytes())
    for name in ("0.tar.gz", "0.tgz"):
        (plain.parent / name).write_bytes(packed)
        with pytest.raises(BadData, match=f"train/{name} is compressed, .*unpack it to a plain .tar"):
            open_source("auto", str(tmp_path), "train")
        (plain.parent / name).unlink()
    plain.write_bytes(packed)
    with pytest.raises(BadData, match="train/0.tar: is compressed; run `gunzip` on it first"):
        tar.open_source(str(tmp_path), "train")


# Damage


@pytest.fixture
def shard(tmp_path: Path, write_tar) -> Path:
    """Four members: a.jpg and b.jpg of 700 bytes, each with its label."""
    return write_tar(tmp_path / "train" / "0.tar", [*numbered("a", 0, b"a" * 700), *numbered("b", 1, b"b" * 700)])


def test_a_cut_shard_is_refused_with_the_place(shard: Path, tmp_path: Path):
    """At every block and around it; the whole ends with zeros from byte 5120 on, and needs one of them."""
    whole = shard.read_bytes()
    for cut in sorted(
        {block * 512 + around for block in range(11) for around in (-1, 0, 1, 200) if block or around > 0}
    ):
        shard.write_bytes(whole[:cut])
        if cut > 5120:
            assert len(tar.open_source(str(tmp_path), "train")) == 2
        else:
            with pytest.raises(BadData, match="train/0.tar: .* at byte .*cut off[,;] fetch it again"):
                tar.open_source(str(tmp_path), "train")


def test_a_damaged_header_does_not_end_the_shard_in_silence(shard: Path, tmp_path: Path):
    """Python's tarfile takes one in the middle for the end of the archive."""
    whole = shard.read_bytes()
    damaged = bytearray(whole)
    damaged[2560 + 10] ^= 1
    shard.write_bytes(damaged)
    with pytest.raises(BadData, match="train/0.tar: at byte 2560 there is no tar header; it is damaged"):
        tar.open_source(str(tmp_path), "train")
    shard.write_bytes(whole + whole)
    with pytest.raises(BadData, match="holds more behind its end at byte 5120: several tars in one file"):
        tar.open_source(str(tmp_path), "train")


def with_size(info: tarfile.TarInfo, size: int) -> bytes:
    """A header that claims this size."""
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize("size", [-512, -(2**40), 2**33, 2**40, 2**60])
@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE])
def test_absurd_sizes_are_refused_before_anything_is_allocated(shard: Path, tmp_path: Path, size: int, kind: bytes):
    info = tarfile.TarInfo("c.jpg")
    info.type = kind
    shard.write_bytes(shard.read_bytes()[:5120] + with_size(info, size) + bytes(20000))
    tracemalloc.start()
    with pytest.raises(BadData, match="train/0.tar: a file of .* bytes begins at byte 5120"):
        tar.open_source(str(tmp_path), "train")
    assert tracemalloc.get_traced_memory()[1] < 5e6
    tracemalloc.stop()


def test_an_extended_header_of_digits_is_refused_at_once(shard: Path, tmp_path: Path):
    """Python's tarfile looks at them with a regular expression that takes their number squared."""
    record = b"1" * 20_000
    info = tarfile.TarInfo("c.jpg")
    info.type, info.size = tarfile.XHDTYPE, len(record)
    header = info.tobuf(tarfile.USTAR_FORMAT) + record.ljust(-(-len(record) // 512) * 512, b"\0")
    shard.write_bytes(header + shard.read_bytes())
    with pytest.raises(BadData, match="train/0.tar: the extended header at byte 512 cannot be read"):
        tar.open_source(str(tmp_path), "train")


def test_random_damage_ends_as_our_errors(shard: Path, tmp_path: Path):
    rng = random.Random(3)
    whole = shard.read_bytes()
    outcomes = set()
    for _ in range(1500):
        damaged = bytearray(whole[:5632])
        for _ in range(rng.randrange(1, 6)):
            # Headers: the fields of numbers and types, with a checksum that fits, else nothing gets past it.
            block = 512 * rng.choice((0, 3, 5, 8))
            damaged[block + rng.choice((0, 1, 2, 124, 130, 135, 148, 156, 257, 345))] = rng.randrange(256)
            head = bytes(damaged[block : block + 148]) + b" " * 8 + bytes(damaged[block + 156 : block + 512])
            damaged[block + 148 : block + 156] = b"%06o\0 " % sum(head)
        shard.write_bytes(damaged)
        try:
            outcomes.add(len(rows(tar.open_source(str(tmp_path), "train"))))
        except BadData:
            outcomes.add(0)
    assert outcomes >= {0, 2}


def test_damage_found_when_reading_is_a_bad_sample(shard: Path, tmp_path: Path):
    source = tar.open_source(str(tmp_path), "train")
    whole = shard.read_bytes()
    os.truncate(shard, 3100)
    with pytest.raises(BadSample, match="0.tar:b.jpg: member at byte 2560: 700 bytes long, but the file ends at 3100"):
        source.read(1)
    assert source.read(0).data == b"a" * 700
    shard.write_bytes(whole[2560:] + whole[:2560])
    with pytest.raises(BadSample, match="b.jpg: member at byte 2560: not the one that was indexed; remove the"):
        source.read(1)
    shard.unlink()
    with pytest.raises(BadSample, match="train/0.tar:b.jpg: cannot be read: No such file"):
        pickle.loads(pickle.dumps(source)).read(1)


def test_an_image_beyond_the_limit_is_a_bad_sample(shard: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(tar, "MAX_BYTES", 699)
    with pytest.raises(BadSample, match="b.jpg: member at byte 3072: 700 bytes, more than the 699 allowed"):
        tar.open_source(str(tmp_path), "train").read(1)


def test_fingerprint_is_of_names_sizes_and_classes(shard: Path, tmp_path: Path, write_tar):
    before = tar.open_source(str(tmp_path), "train").fingerprint
    copy = shutil.copytree(tmp_path, tmp_path / "copy")
    assert tar.open_source(str(copy), "train").fingerprint == before
    (copy / "classes.txt").write_text("x\ny\n")
    assert tar.open_source(str(copy), "train").fingerprint != before
    (copy / "classes.txt").unlink()
    write_tar(copy / "train" / "1.tar", numbered("c", 1))
    assert tar.open_source(str(copy), "train").fingerprint != before
