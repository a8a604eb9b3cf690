"""`prepare convert` between class folders, tar and TFRecord: names, labels, bytes and order are the same in all."""

import io
import itertools
import runpy
import shutil
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from sightline import cli
from sightline.data.formats.records import encode_example, frame
from sightline.data.sources import open_source
from sightline.data.writing.forms import file_of, stored_name

MADE = runpy.run_path(str(Path(__file__).with_name("archives.py")))
jpeg, tar_of = MADE["jpeg"], MADE["tar_of"]
FORMS = ("folder", "tar", "tfrecord")


def convert(source: Path, out: Path, form: str, *more: str) -> int:
    return cli.main(
        ["prepare", "convert", "--source", str(source), "--out", str(out), "--form", form, "--jobs", "1", *more]
    )


def samples(path: Path, split: str) -> list[tuple[str, str, bytes]]:
    """(class, name without suffix, bytes) in the order of the source."""
    source = open_source("auto", str(path), split)
    read = [source.read(i) for i in range(len(source))]
    return [(source.classes[s.label], file_of(source, i).rpartition(".")[0], s.data) for i, s in enumerate(read)]


def contents(folder: Path) -> dict[str, bytes]:
    ours = (".prepare.lock",)
    files = (p for p in sorted(folder.rglob("*")) if p.is_file() and p.name not in ours and ".sightline" not in p.name)
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in files}


@pytest.fixture
def odd(tmp_path) -> Path:
    """Names that need care: dots, percent signs, spaces, letters beyond ASCII; several formats; unequal classes."""
    root = tmp_path / "odd"
    names = {
        "train/a b": ["x.y.jpeg", "100%.png", "2021.03.04.jpg", "2021.03.05.jpg", "ümlaut.JPG", "%2E.bmp"],
        "train/c.d": ["1.jpg", "10.jpg", "2.jpg"],
        "val/a b": ["x.jpg"],
        "val/c.d": ["1.jpg", "z.webp"],
    }
    for number, (folder, files) in enumerate(names.items()):
        (root / folder).mkdir(parents=True)
        for seed, name in enumerate(files):
            form = {"png": "PNG", "bmp": "BMP", "webp": "WEBP"}.get(name[-4:].strip("."), "JPEG")
            (root / folder / name).write_bytes(jpeg(100 * number + seed, form=form))
    return root


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(FORMS, 2)))
def test_every_form_into_every_other(shapes, odd, tmp_path, first, second):
    for start in (shapes, odd):
        expected = {split: samples(start, split) for split in ("train", "val")}
        one, two = tmp_path / f"{start.name}-1", tmp_path / f"{start.name}-2"
        assert convert(start, one, first, "--shards", "3", "--val-shards", "2") == 0
        assert convert(one, two, second) == 0
        for split, wanted in expected.items():
            assert samples(one, split) == wanted, first
            assert samples(two, split) == wanted, second


def test_folder_to_tfrecord_to_folder_is_the_same_folder(shapes, odd, tmp_path):
    for start in (shapes, odd):
        out = tmp_path / f"{start.name}-out"
        assert convert(start, tmp_path / f"{start.name}-records", "tfrecord") == 0
        assert convert(tmp_path / f"{start.name}-records", out, "folder") == 0
        before = {n: d for n, d in contents(start).items() if n.startswith(("train/", "val/"))}
        assert {n: d for n, d in contents(out).items() if n.startswith(("train/", "val/"))} == before


def test_tar_keys_of_odd_names(odd, tmp_path):
    assert convert(odd, tmp_path / "out", "tar", "--shards", "1") == 0
    with tarfile.open(tmp_path / "out/train/train-000000.tar") as tar:
        names = tar.getnames()
    assert {"a b/x%2Ey.jpg", "a b/100%25.png", "a b/2021%2E03%2E04.jpg", "a b/ümlaut.jpg", "c.d/10.cls"} <= set(names)
    assert [name.rpartition(".")[0] for name in names[::2]] == [name.removesuffix(".cls") for name in names[1::2]]


@pytest.mark.parametrize(
    ("file", "in_folder", "in_tar"),
    [
        ("n01_1.JPEG", "n01_1.JPEG", "n01_1.jpg"),
        ("a.PNG", "a.PNG", "a.png"),
        ("a.b.jpg", "a.b.jpg", "a%2Eb.jpg"),
        ("no_suffix", "no_suffix.jpg", "no_suffix.jpg"),
        ("v1.2", "v1.2.jpg", "v1%2E2.jpg"),
        ("sub/a.jpg", "sub/a.jpg", "sub%2Fa.jpg"),
        ("50%.webp", "50%.webp", "50%25.webp"),
    ],
)
def test_names_in_each_form(file, in_folder, in_tar):
    assert [stored_name(form, file) for form in FORMS] == [in_folder, in_tar, file]


@pytest.mark.parametrize(
    "pair", [("a.jpg", "a.png"), ("a.jpg", "a.JPEG"), ("a-b.jpg", "a.b.jpg"), ("x.jpg", "x.y.jpg")]
)
def test_names_that_tar_cannot_keep_apart_or_in_order_are_reported(tmp_path, capsys, pair):
    for split in ("train", "val"):
        (tmp_path / "in" / split / "only").mkdir(parents=True)
        for seed, name in enumerate(pair):
            (tmp_path / "in" / split / "only" / name).write_bytes(jpeg(seed))
    assert convert(tmp_path / "in", tmp_path / "out", "tar") == 3
    said = capsys.readouterr().err
    assert all(name in said for name in pair) and "rename one of them" in said
    assert not (tmp_path / "out" / "train").exists()
    assert convert(tmp_path / "in", tmp_path / "records", "tfrecord") == 0


def test_shards_by_default_and_as_asked_for(shapes, tmp_path):
    assert convert(shapes, tmp_path / "one", "tar") == 0
    assert sorted(n for n in contents(tmp_path / "one") if n.endswith(".tar")) == [
        "train/train-000000.tar",
        "val/val-000000.tar",
    ]
    assert convert(shapes, tmp_path / "four", "tfrecord", "--shards", "4", "--val-shards", "2") == 0
    assert len(list((tmp_path / "four" / "train").iterdir())) == 4
    assert len(list((tmp_path / "four" / "validation").iterdir())) == 2


@pytest.mark.slow  # test_imagenet.py compares files of several processes by default, test_processes.py their order
def test_jobs_change_no_byte(shapes, tmp_path):
    shards = ("--shards", "7", "--val-shards", "3")
    assert convert(shapes, tmp_path / "one", "tar", *shards) == 0
    assert convert(shapes, tmp_path / "two", "tar", *shards, "--jobs", "2") == 0
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_repair_only_when_asked_for(odd, tmp_path):
    assert convert(odd, tmp_path / "out", "folder", "--repair") == 0
    for name, data in contents(odd).items():
        stored = (tmp_path / "out" / name).read_bytes()
        with Image.open(io.BytesIO(stored)) as image:
            assert image.format == "JPEG"
        assert (stored == data) == (name.rpartition(".")[2].lower() in ("jpg", "jpeg"))


def record(filename: bytes, label: int = 1, synset: bytes = b"one") -> bytes:
    features = {"image/encoded": jpeg(label), "image/class/label": label, "image/class/synset": synset}
    return frame(encode_example(features | ({"image/filename": filename} if filename else {})))


def tfrecords(folder: Path, data: bytes) -> Path:
    for split in ("train", "validation"):
        (folder / split).mkdir(parents=True)
        (folder / split / f"{split}-00000-of-00001").write_bytes(data)
    return folder


@pytest.mark.parametrize("name", [b"../../outside.jpg", b"/etc/cron.d/x.jpg", b"a/../../../b.jpg", b"x\0y.jpg"])
def test_names_in_records_do_not_lead_out(tmp_path, capsys, name):
    source = tfrecords(tmp_path / "in", record(name))
    assert convert(source, tmp_path / "out", "folder") == 3
    assert "nothing is written under it" in capsys.readouterr().err
    assert not [path for path in (tmp_path / "out").rglob("*") if path.name != ".prepare.lock"]


@pytest.mark.parametrize("synset", [b"../up", b"/abs", b"a/b", b".hidden", b".."])
def test_classes_in_records_do_not_lead_out(tmp_path, capsys, synset):
    source = tfrecords(tmp_path / "in", record(b"x.jpg", 1, synset))
    assert convert(source, tmp_path / "out", "folder") == 3
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out"}
    assert not (tmp_path / "out" / "train").exists()


def test_hidden_file_names_are_reported(tmp_path, capsys):
    source = tfrecords(tmp_path / "in", record(b".hidden.jpg"))
    assert convert(source, tmp_path / "out", "folder") == 3
    assert "starts with a dot is hidden" in capsys.readouterr().err


def test_two_records_of_one_name_are_reported(tmp_path, capsys):
    source = tfrecords(tmp_path / "in", record(b"x.jpg") + record(b"x.jpg"))
    assert convert(source, tmp_path / "out", "folder") == 3
    assert "x.jpg and x.jpg of one class would have one name" in capsys.readouterr().err


def test_records_without_names_keep_their_order(tmp_path):
    images = [jpeg(i) for i in range(12)]
    features = ({"image/encoded": p, "image/class/label": 1 + i % 2} for i, p in enumerate(images))
    source = tfrecords(tmp_path / "in", b"".join(frame(encode_example(each)) for each in features))
    before = samples(source, "train")
    assert convert(source, tmp_path / "out", "folder") == 0
    assert [(c, d) for c, _, d in samples(tmp_path / "out", "train")] == [
        (c, d) for c, _, d in sorted(before, key=lambda row: row[0])
    ]


def test_first_label(tmp_path):
    source = tfrecords(tmp_path / "in", record(b"x.jpg", 0, b"zero") + record(b"y.jpg", 1, b"one"))
    assert convert(source, tmp_path / "out", "folder", "--first-label", "0") == 0
    assert {n.split("/")[1] for n in contents(tmp_path / "out") if n.startswith("train/")} == {"zero", "one"}


def test_damage_in_the_source_is_reported_and_repaired_by_a_second_start(shapes, tmp_path, capsys):
    source = tmp_path / "in"
    assert convert(shapes, source, "tfrecord", "--shards", "4") == 0
    shard = source / "train" / "train-00002-of-00004"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:2000] + bytes([whole[2000] ^ 1]) + whole[2001:])
    assert convert(source, tmp_path / "out", "tar", "--shards", "8") == 3
    assert "fail their checksum" in capsys.readouterr().err
    shard.write_bytes(whole)
    assert convert(source, tmp_path / "out", "tar", "--shards", "8") == 0
    assert samples(tmp_path / "out", "train") == samples(shapes, "train")


def test_places_that_cannot_be(shapes, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(shapes, copy)
    for out in (copy, copy / "below", tmp_path):
        assert convert(copy, out, "tar") == 2
        assert "choose another --out" in capsys.readouterr().err
    assert convert(tmp_path / "nothing", tmp_path / "out", "tar") == 2
    assert convert(copy, tmp_path / "out2", "tar", "--shards", "-1") == 2
