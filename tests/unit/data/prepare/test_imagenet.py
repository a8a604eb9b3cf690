"""`prepare imagenet` on tiny archives of the real structure, in three forms; and on archives that are damaged."""

import io
import json
import random
import runpy
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sightline import cli
from sightline.data.formats import records
from sightline.data.sources import open_source
from sightline.data.writing.forms import LabelledImages
from sightline.data.writing.repair import repair

MADE = runpy.run_path(str(Path(__file__).with_name("archives.py")))
SYNSETS, jpeg, tar_of = MADE["SYNSETS"], MADE["jpeg"], MADE["tar_of"]
SMALL = ("--shards", "5", "--val-shards", "3", "--jobs", "1")
FORMS = ("folder", "tar", "tfrecord")
# Python's shuffle of range(10) after seed(0): shards of ImageNet would change with it.
SHUFFLED_TEN = [7, 8, 1, 5, 3, 4, 2, 0, 9, 6]


@pytest.fixture(scope="session")
def archives(tmp_path_factory) -> list[str]:
    return MADE["make_archives"](tmp_path_factory.mktemp("archives"))


@pytest.fixture(scope="session")
def made(archives, tmp_path_factory):
    """made(form): the output of one start; for reading only."""
    done: dict[str, Path] = {}

    def make(form: str) -> Path:
        if form not in done:
            done[form] = tmp_path_factory.mktemp(form) / "out"
            assert run(archives, done[form], form) == 0
        return done[form]

    return make


def run(archives: list[str], out: Path, form: str, *more: str) -> int:
    return cli.main(["prepare", "imagenet", *archives, "--out", str(out), "--form", form, *SMALL, *more])


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def expected_train() -> dict[str, bytes]:
    """CLASS/FILE -> bytes as they are to be stored, in sorted order."""
    images = MADE["train_images"](12)
    return {f"{s}/{n}": repair(images[s][n], n) for s in sorted(images) for n in sorted(images[s])}


def expected_val() -> dict[str, bytes]:
    """CLASS/FILE -> bytes in the order of the file names."""
    pairs = zip(sorted(MADE["val_images"](7).items()), MADE["val_synsets"](7), strict=True)
    return {f"{synset}/{name}": data for (name, data), synset in pairs}


def read_tfrecord(path: Path) -> list[dict[str, list]]:
    data, found = path.read_bytes(), []
    for offset, length in records.scan_frames(data, path.name):
        with path.open("rb") as file:
            payload = records.read_frame(file, offset, length, path.name)
        found.append(records.parse_example(payload))
    return found


def test_folder(made):
    out = made("folder")
    train, val = (
        {n.removeprefix(f"{s}/"): d for n, d in contents(out).items() if n.startswith(f"{s}/")}
        for s in ("train", "val")
    )
    assert train == expected_train()
    assert val == expected_val()
    assert {path.name for path in out.iterdir()} == {"train", "val", "prepared.json", ".prepare.lock"}


def test_tfrecord_has_the_originals_files_and_features(made):
    out = made("tfrecord")
    names = {f"train/train-{i:05d}-of-00005" for i in range(5)}
    names |= {f"validation/validation-{i:05d}-of-00003" for i in range(3)}
    assert {n for n in contents(out) if "/" in n} == names
    shards = [read_tfrecord(out / f"train/train-{i:05d}-of-00005") for i in range(5)]
    assert [len(shard) for shard in shards] == [8, 8, 8, 8, 6], "contiguous chunks of ceil(38 / 5)"
    order = list(range(38))
    random.Random(0).shuffle(order)
    expected = list(expected_train().items())
    for features, index in zip((each for shard in shards for each in shard), order, strict=True):
        name, data = expected[index]
        synset, _, file = name.partition("/")
        with Image.open(io.BytesIO(data)) as image:
            width, height = image.size
        assert features == {
            "image/height": [height],
            "image/width": [width],
            "image/channels": [3],
            "image/colorspace": [b"RGB"],
            "image/format": [b"JPEG"],
            "image/class/label": [1 + SYNSETS.index(synset)],
            "image/class/synset": [synset.encode()],
            "image/filename": [file.encode()],
            "image/encoded": [data],
        }
    validation = [each for i in range(3) for each in read_tfrecord(out / f"validation/validation-{i:05d}-of-00003")]
    found = [(each["image/class/synset"][0].decode() + "/" + each["image/filename"][0].decode()) for each in validation]
    assert found == list(expected_val()), "by file name, not by class"


def test_shuffle_is_what_it_was():
    order = list(range(10))
    random.Random(0).shuffle(order)
    assert order == SHUFFLED_TEN


def test_trailing_tfrecord_shards_are_empty_where_images_are_few(archives, tmp_path):
    assert run(archives, tmp_path / "out", "tfrecord", "--shards", "20") == 0
    sizes = [(tmp_path / f"out/train/train-{i:05d}-of-00020").stat().st_size for i in range(20)]
    assert all(sizes[:19]) and sizes[19] == 0, "chunks of 2 fill 19 shards"
    assert len(open_source("auto", str(tmp_path / "out"), "train")) == 38


def test_tar_shards_as_webdataset_reads_them(made):
    out = made("tar")
    assert (out / "classes.txt").read_text().split() == list(SYNSETS)
    files = sorted((out / "train").iterdir())
    assert [file.name for file in files] == [f"train-{i:06d}.tar" for i in range(5)]
    found, members = {}, []
    for file in files:
        with tarfile.open(file) as tar:
            for info in tar:
                assert (info.mtime, info.uid, info.gid, info.uname, info.mode) == (0, 0, 0, "", 0o644)
                members.append((info.name, tar.extractfile(info).read()))
    # As WebDataset does: members of one key follow each other, the key ends at the first dot of the file name.
    for (name, data), (label_name, label) in zip(members[::2], members[1::2], strict=True):
        assert name.endswith(".jpg") and label_name == name.removesuffix(".jpg") + ".cls"
        synset, _, key = name.removesuffix(".jpg").partition("/")
        assert int(label) == SYNSETS.index(synset)
        found[f"{synset}/{key}.JPEG"] = data
    assert found == expected_train()


def test_three_forms_are_the_same_samples_in_the_same_order(made):
    for split, expected in (("train", expected_train()), ("val", expected_val())):
        for form in FORMS:
            source = open_source("auto", str(made(form)), split)
            assert source.classes == SYNSETS
            samples = [source.read(i) for i in range(len(source))]
            assert [(s.label, s.data) for s in samples] == [
                (SYNSETS.index(name.partition("/")[0]), data) for name, data in sorted(expected.items())
            ], (split, form)


def test_bytes_do_not_depend_on_jobs_or_day(archives, made, tmp_path):
    assert run(archives, tmp_path / "out", "folder", "--jobs", "2") == 0
    assert contents(tmp_path / "out") == contents(made("folder"))


def test_second_start_changes_nothing_and_another_plan_is_refused(archives, made, capsys):
    out = made("tar")
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.name != ".prepare.lock"}
    assert run(archives, out, "tar") == 0
    assert capsys.readouterr().out.endswith(f"train 38, val 7, repaired 2, unreadable 0 in {out}\n")
    assert before == {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.name != ".prepare.lock"}
    assert run(archives, out, "tar", "--shards", "6") == 2
    assert "was begun with shards.train=5, now it is 6" in capsys.readouterr().err
    assert run(archives, out, "folder") == 2


def interrupt(archives, out: Path, form: str, monkeypatch) -> None:
    """End a start by an error when three pieces are done."""
    write, done = LabelledImages.write, []

    def fails_later(plan, split, number):
        if split == "val" or len(done) >= 3:
            raise OSError(5, "Input/output error")
        done.append(number)
        return write(plan, split, number)

    with monkeypatch.context() as patch:
        patch.setattr(LabelledImages, "write", fails_later)
        assert run(archives, out, form) == 7
    assert done and (out / ".prepare" / "plan.json").exists() and not (out / "prepared.json").exists()


@pytest.mark.parametrize("form", FORMS)
def test_resumes_with_what_is_missing(archives, made, tmp_path, form, monkeypatch):
    """A file of a piece that was done is lost meanwhile, another was half written."""
    out = tmp_path / "out"
    interrupt(archives, out, form, monkeypatch)
    written = sorted(path for path in (out / "train").rglob("*") if path.is_file())
    written[0].unlink()
    for folder in (written[1].parent, out):
        (folder / ".0123456789abcdef.part-12345").write_bytes(b"half")
    assert run(archives, out, form) == 0
    assert contents(out) == contents(made(form))


@pytest.mark.parametrize("note", [lambda note: [note.pop("files"), note], lambda note: None, lambda note: {"files": 3}])
def test_pieces_with_notes_of_another_version_are_written_again(archives, made, tmp_path, monkeypatch, note):
    out = tmp_path / "out"
    interrupt(archives, out, "tar", monkeypatch)
    for path in (out / ".prepare").glob("train-*"):
        path.write_text(json.dumps(note(json.loads(path.read_text()))))
    assert run(archives, out, "tar") == 0
    assert contents(out) == contents(made("tar"))


def test_killed_between_the_record_and_the_end(archives, made, tmp_path):
    out = shutil.copytree(made("tar"), tmp_path / "out")
    (out / ".prepare").mkdir()
    (out / ".prepare" / "plan.json").write_text("{}")
    assert run(archives, out, "tar") == 0
    assert contents(out) == contents(made("tar"))


def test_full_disk_is_exit_7_and_a_later_start_finishes(archives, made, tmp_path, capsys):
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9_000, before[1]))
    try:
        assert run(archives, tmp_path / "out", "tfrecord") == 7
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = capsys.readouterr().err
    assert "could not be written: File too large; finished files are kept" in said and "train-0000" in said
    assert not list((tmp_path / "out").rglob("*.part-*"))
    assert run(archives, tmp_path / "out", "tfrecord") == 0
    assert contents(tmp_path / "out") == contents(made("tfrecord"))


def test_too_little_room_is_reported_before_the_first_file(archives, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(LabelledImages, "room", lambda self: 10**15)
    assert run(archives, tmp_path / "out", "folder") == 7
    assert "needs 1000000.0 GB" in capsys.readouterr().err
    assert not (tmp_path / "out" / "train").exists()


# Repairs


@pytest.mark.parametrize("name", ["n02105855_2933.JPEG", "anything_else.jpg"])
def test_png_becomes_a_jpeg_by_content(name):
    stored = jpeg(8, form="PNG")
    repaired = repair(stored, name)
    with Image.open(io.BytesIO(repaired)) as image, Image.open(io.BytesIO(stored)) as before:
        assert (image.format, image.mode, image.size) == ("JPEG", "RGB", before.size)
        assert np.abs(np.asarray(image, int) - np.asarray(before, int)).mean() < 8  # colour has half the resolution


@pytest.mark.parametrize("name", ["n03018349_4028.JPEG", "not_on_the_list.JPEG"])
def test_cmyk_becomes_rgb_by_content(name):
    stored = jpeg(9, "CMYK")
    repaired = repair(stored, name)
    with Image.open(io.BytesIO(stored)) as before:
        cmyk = np.asarray(before).astype(float) / 255  # ink, 1 is full
    naive = 255 * (1 - cmyk[..., :3]) * (1 - cmyk[..., 3:])
    with Image.open(io.BytesIO(repaired)) as image:
        assert (image.format, image.mode) == ("JPEG", "RGB")
        assert np.abs(np.asarray(image) - naive).mean() < 4
        assert max(max(table) for table in image.quantization.values()) == 1, "quality 100"


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_good_jpegs_keep_their_bytes(mode):
    stored = jpeg(1, mode)
    assert repair(stored, "n02105855_2933.JPEG") is stored


def test_broken_images_are_kept_and_counted_in_folders_and_named_for_records(archives, tmp_path, capsys):
    images = MADE["train_images"](12)
    images["n01440764"]["n01440764_0.JPEG"] = b"<html>gone</html>"
    outer = {f"{synset}.tar": tar_of(files) for synset, files in images.items()}
    (tmp_path / "train.tar").write_bytes(tar_of(outer))
    flags = ["--train", str(tmp_path / "train.tar"), *archives[2:]]
    assert run(flags, tmp_path / "folder", "folder") == 0
    assert "repaired 2, unreadable 1" in capsys.readouterr().out
    assert (tmp_path / "folder/train/n01440764/n01440764_0.JPEG").read_bytes() == b"<html>gone</html>"
    assert run(flags, tmp_path / "tfrecord", "tfrecord") == 3
    said = capsys.readouterr().err
    assert "n01440764/n01440764_0.JPEG: an HTML or XML page" in said and "write --form folder, fix it there" in said


# What is not as it should be


def replaced(archives: list[str], flag: str, path: Path) -> list[str]:
    at = archives.index(flag)
    return [*archives[: at + 1], str(path), *archives[at + 2 :]]


def test_a_synset_list_out_of_all_proportion_is_not_read(archives, tmp_path, capsys):
    """In memory each of its words takes sixty bytes."""
    (tmp_path / "labels.txt").write_text("a " * 2**21 + "a")
    assert run(replaced(archives, "--labels", tmp_path / "labels.txt"), tmp_path / "out", "folder") == 3
    assert "has 4194305 bytes; a list of 50,000 synsets has 500,000" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("n01440764\n" * 6, "has 6 lines, .* has 7 images; expected one synset per image"),
        ("n01440764\n" * 8, "has 8 lines"),
        ("n01440764\n" * 6 + "n09999999\n", r":7: 'n09999999' is not one of the 3 training classes \(n01440764, "),
        ("", "has 0 lines"),
    ],
)
def test_wrong_synset_list(archives, tmp_path, capsys, text, said):
    (tmp_path / "labels.txt").write_text(text)
    assert run(replaced(archives, "--labels", tmp_path / "labels.txt"), tmp_path / "out", "folder") == 3
    import re

    assert re.search(said, capsys.readouterr().err)


def hostile_inner(member: str, kind: bytes = tarfile.REGTYPE) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        info = tarfile.TarInfo(member)
        info.type, info.linkname = kind, "/etc/passwd"
        tar.addfile(info)
    return tar_of({"n01440764.tar": out.getvalue()})


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (hostile_inner("../n01440764_1.JPEG"), "n01440764.tar: the name '../n01440764_1.JPEG' leads out of its folder"),
        (hostile_inner("/n01440764_1.JPEG"), "is an absolute path"),
        (hostile_inner("x.JPEG", tarfile.SYMTYPE), "'x.JPEG' is a symbolic link"),
        (hostile_inner("x.JPEG", tarfile.CHRTYPE), "'x.JPEG' is a character device"),
        (hostile_inner("deep/x.JPEG"), "'deep/x.JPEG' is not an image"),
        (hostile_inner("x.sh"), "'x.sh' is not an image"),
        (hostile_inner(".x.JPEG"), "'.x.JPEG' is not an image"),
        (tar_of({"n01440764.tar": tar_of({})}), "n01440764.tar: holds no images"),
        (tar_of({"n01440764.tar": b"nonsense" * 100}), "n01440764.tar: at byte 512 there is no tar header"),
        (
            tar_of({"n01440764.tar": tar_of({"x.JPEG": b"1" * 2000})[:1024]}),
            "n01440764.tar: a file of 2000 bytes begins",
        ),
        (tar_of({"some.JPEG": jpeg(1)}), "'some.JPEG' is not a SYNSET.tar"),
        (tar_of({"a/n01440764.tar": tar_of({"x.JPEG": jpeg(1)})}), "'a/n01440764.tar' is not a SYNSET.tar"),
        (tar_of({}), "holds nothing"),
        (tar_of({"n01440764.tar": tar_of({"x.JPEG": jpeg(1)})})[:-2000], "cut off"),
        (b"\x1f\x8b\x08" + b"z" * 2000, "is compressed; run `gunzip` on it first"),
        (b"", "cut off"),
    ],
)
def test_hostile_or_damaged_training_archive(archives, tmp_path, capsys, data, said):
    (tmp_path / "train.tar").write_bytes(data[:-9000] if said == "cut off" and data else data)
    assert run(replaced(archives, "--train", tmp_path / "train.tar"), tmp_path / "out", "folder") == 3
    error = capsys.readouterr().err
    assert said in error and str(tmp_path / "train.tar") in error
    assert not [path for path in (tmp_path / "out").rglob("*") if path.name != ".prepare.lock"]
    assert {path.name for path in tmp_path.iterdir()} == {"train.tar", "out"}


def test_archives_that_are_not_there_and_folders_of_others(archives, tmp_path, capsys):
    assert run(replaced(archives, "--val", tmp_path / "no.tar"), tmp_path / "out", "folder") == 2
    assert "no.tar is not there" in capsys.readouterr().err
    assert run(replaced(archives, "--val", tmp_path), tmp_path / "out", "folder") == 2
    assert f"{tmp_path} is not a file; give --train and --val the two archives" in capsys.readouterr().err
    (tmp_path / "out").mkdir(exist_ok=True)
    (tmp_path / "out" / "mine.txt").write_text("precious")
    assert run(archives, tmp_path / "out", "folder") == 2
    assert "holds mine.txt, not written by this command" in capsys.readouterr().err
    (tmp_path / "file").write_text("x")
    assert run(archives, tmp_path / "file", "folder") == 2
    assert run(archives, tmp_path / "elsewhere", "folder", "--shards", "0") == 2
    assert run(archives, tmp_path / "elsewhere", "folder", "--jobs", "-1") == 2


def test_other_archives_are_not_mixed_into_a_begun_folder(archives, made, tmp_path, capsys):
    MADE["make_archives"](tmp_path, per_class=13)
    flags = ["--train", f"{tmp_path}/train.tar", *archives[2:]]
    assert run(flags, made("folder"), "folder") == 2
    assert "was begun with other data: its train " in capsys.readouterr().err


def test_what_is_recorded_names_no_place(made, tmp_path):
    record = (made("tfrecord") / "prepared.json").read_text()
    assert json.loads(record)["counts"] == {"train": 38, "val": 7, "repaired": 2, "unreadable": 0}
    assert "/" not in record
