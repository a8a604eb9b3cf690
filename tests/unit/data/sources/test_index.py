"""Kept indexes: when they are used, when they are not, where they lie, and that a bad one is never believed."""

import hashlib
import json
import os
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from sightline.data.formats import records
from sightline.data.sources import folder, index_files, open_boxes, tar, tfrecord
from sightline.data.sources.shards import Shard

ARRAYS = {"a": np.arange(5, dtype=np.int64), "b": np.zeros(0, np.uint8), "c": np.asarray([7], np.int32)}


@pytest.fixture
def data(tmp_path: Path, write_records, write_tar, settle) -> Path:
    """Two records and two images in a tar, side by side."""
    root = tmp_path / "data"
    for number in (1, 2):
        features = {"image/class/label": number, "image/encoded": b"%d" % number, "image/filename": b"%d" % number}
        write_records(root / "train" / f"train-{number - 1:05d}-of-00002", [features])
        described = b'{"label": %d, "class": "c%d"}' % (number - 1, number)
        write_tar(root / f"train-{number}.tar", [(f"{number}.jpg", b"%d" % number), (f"{number}.json", described)])
    settle(root)
    return root


@pytest.fixture
def scans(monkeypatch) -> list[str]:
    """List the kinds that were scanned, not taken from an index."""
    seen: list[str] = []
    for module in (tar, tfrecord):
        build, kind = module._build_index, module.__name__.rpartition(".")[2]
        monkeypatch.setattr(module, "_build_index", lambda shards, b=build, k=kind: (seen.append(k), b(shards))[1])
    return seen


def opened(data: Path) -> list[list[tuple]]:
    """Everything both kinds give, of all samples."""
    found = []
    for module in (tar, tfrecord):
        source = module.open_source(str(data), "train")
        found.append([(source.name(i), source.read(i), source.classes, source.fingerprint) for i in range(len(source))])
    return found


def kept_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if "index-" in path.name)


# Use


def test_a_scan_is_made_once_and_gives_the_same(data: Path, scans: list[str]):
    first = opened(data)
    assert scans == ["tar", "tfrecord"]
    assert kept_files(data) == [".sightline-index-tar-train", ".sightline-index-tfrecord-train"]
    assert opened(data) == first
    assert scans == ["tar", "tfrecord"]


def test_an_index_serves_a_moved_copy(data: Path, scans: list[str], tmp_path: Path):
    """Names are relative; `cp -a` and `rsync -a` keep the times."""
    first = opened(data)
    copy = shutil.copytree(data, tmp_path / "copy")
    shutil.rmtree(data)
    assert opened(copy) == first
    assert len(scans) == 2


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(
            bytes(512) if path.suffix == ".tar" else records.frame(records.encode_example({"image/class/label": 1}))
        )
    os.utime(path, ns=(10**18, 10**18))


@pytest.mark.parametrize(
    "change",
    [
        grow,
        lambda path: os.utime(path, ns=(10**18, 10**18 + 1)),
        lambda path: (
            path.rename(path.with_name(path.name.replace("train-1", "train-0"))) if path.suffix else grow(path)
        ),
    ],
    ids=["size", "time", "name"],
)
def test_a_changed_shard_is_scanned_again(data: Path, scans: list[str], change):
    opened(data)
    change(data / "train-1.tar")
    change(data / "train" / "train-00000-of-00002")
    for module in (tar, tfrecord):
        module.open_source(str(data), "train")
    assert scans == ["tar", "tfrecord"] * 2


def test_what_changed_a_moment_ago_is_not_kept(data: Path, scans: list[str]):
    """Another change could leave the same time."""
    os.utime(data / "train-1.tar")
    os.utime(data / "train" / "train-00000-of-00002")
    assert opened(data) == opened(data)
    assert scans == ["tar", "tfrecord"] * 2
    assert kept_files(data) == []


# Places


def without_room(folder: Path, error: OSError) -> Callable[..., int]:
    """os.open, which makes no file in `folder`; the tests may run as root, whom no mode stops."""

    def refuse(path: str | Path, flags: int, *rest: object, call=os.open, **options: object) -> int:
        if flags & os.O_CREAT and Path(path).is_relative_to(folder):
            raise error
        return call(path, flags, *rest, **options)

    return refuse


def test_read_only_data_are_indexed_in_the_cache_folder(data: Path, scans: list[str], cache_home: Path, monkeypatch):
    monkeypatch.setattr(os, "open", without_room(data, PermissionError(13, "Permission denied")))
    first = opened(data)
    assert kept_files(data) == []
    assert [name.rpartition("-")[0] for name in kept_files(cache_home)] == ["index-tar-train", "index-tfrecord-train"]
    assert opened(data) == first
    assert len(scans) == 2
    other = shutil.copytree(data, data.parent / "other")  # other data do not share it by chance
    (other / "train-1.tar").unlink()
    tar.open_source(str(other), "train", tar.SourceOptions(classes=2))
    assert len(scans) == 3


def test_nowhere_to_keep_an_index_is_not_an_error(data: Path, scans: list[str], monkeypatch):
    monkeypatch.setattr(os, "open", without_room(data, OSError(28, "No space left")))
    for home in ("/dev/null/none", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", home)
        monkeypatch.setenv("HOME", "/dev/null/home")
        assert opened(data) == opened(data)
    assert len(scans) == 8


def test_an_interrupted_write_leaves_the_old_index_and_no_rest(tmp_path: Path, monkeypatch):
    index_files.save(tmp_path, "x", "key", ARRAYS)

    def stop(*_: object, **__: object) -> None:
        assert len(os.listdir(tmp_path)) == 2, "the new one is not there yet"
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", stop)
        with pytest.raises(KeyboardInterrupt):
            index_files.save(tmp_path, "x", "another", ARRAYS)
    assert os.listdir(tmp_path) == [".sightline-index-x"]
    assert index_files.load(tmp_path, "x", "key") is not None


# Belief


def test_arrays_are_kept_as_they_are(tmp_path: Path):
    index_files.save(tmp_path, "x", "key", ARRAYS)
    found = index_files.load(tmp_path, "x", "key")
    assert found is not None and found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert found[name].dtype == array.dtype and np.array_equal(found[name], array)
    assert index_files.load(tmp_path, "x", "another key") is None
    assert index_files.load(tmp_path, "y", "key") is None


def test_an_index_cut_or_changed_anywhere_counts_as_absent(tmp_path: Path):
    index_files.save(tmp_path, "x", "key", ARRAYS)
    path = tmp_path / ".sightline-index-x"
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at])
        assert index_files.load(tmp_path, "x", "key") is None
        damaged = bytearray(whole)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        assert index_files.load(tmp_path, "x", "key") is None
    path.write_bytes(whole + b"\0")
    assert index_files.load(tmp_path, "x", "key") is None


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{",
        b"[" * 100000,
        b'{"key": "key"}',
        b'{"key": "key", "arrays": [["a", "|O", 1]]}',
        b'{"key": "key", "arrays": [["a", "<i8", 1000000000000]]}',
        b'{"key": "key", "arrays": [["a", "<i8", -1], ["b", "<i8", -5]]}',
        b'{"key": "key", "arrays": [["a", "<i8", 1.5]]}',
        b'{"key": "key", "arrays": [[["a"], "<i8", 1]]}',
        b'{"key": "key", "arrays": [["a", "<i8", 1000000000000000000000000]]}',
        b'{"key": "key", "arrays": 7}',
    ],
)
def test_a_well_formed_file_of_nonsense_counts_as_absent(tmp_path: Path, header: bytes):
    body = struct.pack("<I", len(header)) + header + bytes(80)
    (tmp_path / ".sightline-index-x").write_bytes(index_files._MAGIC + hashlib.sha256(body).digest() + body)
    assert index_files.load(tmp_path, "x", "key") is None


@pytest.mark.parametrize("begin", [b"", index_files._MAGIC, index_files._MAGIC + bytes(32) + b"\xff\xff\xff\xff"])
def test_what_is_not_an_index_is_not_read_whole(tmp_path: Path, begin: bytes):
    path = tmp_path / ".sightline-index-x"
    path.write_bytes(begin)
    os.truncate(path, 2**40)  # takes no room on the disk
    assert index_files.load(tmp_path, "x", "key") is None


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("shard", 2),
        ("shard", -1),
        ("offset", -1),
        ("offset", 2**40),
        ("length", 2**40),
        ("length", -1),
        ("names_ends", 99),
        ("label", -1),
        ("class_labels", 5),
    ],
)
def test_an_index_that_points_outside_is_made_again(data: Path, scans: list[str], column: str, value: int):
    """Its checksum and key may be right: whoever wrote the data may have written it."""
    first = opened(data)
    shards = [Shard.at(data, data / f"train-{n}.tar") for n in (1, 2)]
    key = index_files.digest("tar", 1, [(shard.name, shard.size, shard.changed_ns) for shard in shards])
    arrays = index_files.load(data, "tar-train", key)
    assert arrays is not None
    forged = arrays[column].copy()
    forged[-1] = value
    without = {name: array for name, array in arrays.items() if name != column}
    for broken in ({**arrays, column: forged}, without, {**arrays, column: forged[1:]}):
        index_files.save(data, "tar-train", key, broken)
        scans.clear()
        assert opened(data) == first
        assert scans == ["tar"]


# Folders


@pytest.fixture
def images(tmp_path: Path, settle, monkeypatch) -> Path:
    monkeypatch.setattr(folder, "MIN_KEPT", 3)
    monkeypatch.setattr(index_files, "SETTLED_S", 0)  # no call sets when a folder itself was changed
    root = tmp_path / "images"
    for name in ("train/ant/1.jpg", "train/ant/deep/2.jpg", "train/bee/3.jpg", "val/ant/4.jpg"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())
    settle(root)
    return root


@pytest.fixture
def listings(monkeypatch) -> list[str]:
    """List the roots that were listed, not taken from an index."""
    seen: list[str] = []
    walk = folder.Walk.list

    def recorded(self: folder.Walk, *given, **named):
        seen.append(self.root.name)
        return walk(self, *given, **named)

    monkeypatch.setattr(folder.Walk, "list", recorded)
    return seen


def listed(root: Path, split: str = "train") -> tuple:
    source = folder.open_source(str(root), split)
    return source.classes, source.fingerprint, [(source.name(i), source.read(i)) for i in range(len(source))]


def test_a_large_folder_is_listed_once(images: Path, listings: list[str]):
    first = listed(images)
    assert listed(images) == first
    assert listings == ["train"]
    listed(images, "val"), listed(images, "val")
    assert listings == ["train", "val", "val"]  # a small one every time
    assert kept_files(images) == [".sightline-index-folder-train"]


OUTSIDE = ["../secret.jpg", "ant/../../../secret.jpg", "/etc/secret.jpg", "a\0b"]


def forge(place: Path, change: Callable[[index_files.Arrays], None]) -> None:
    """Change what an index holds; its checksum and key are right again, and so is the time of its folder."""
    before = place.parent.stat().st_mtime_ns
    data = place.read_bytes()
    at = index_files._PREFIX
    key = json.loads(data[at : at + int.from_bytes(data[at - 4 : at], "little")])["key"]
    name = place.name.removeprefix(".sightline-index-")
    arrays = {name: array.copy() for name, array in (index_files.load(place.parent, name, key) or {}).items()}
    change(arrays)
    index_files.save(place.parent, name, key, arrays)
    os.utime(place.parent, ns=(before, before))


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_of_a_folder_names_nothing_outside(images: Path, listings: list[str], name: str):
    first = listed(images)
    names = index_files.Names.of([name.encode()] * 3).arrays("names")
    forge(images / ".sightline-index-folder-train", lambda arrays: arrays.update(names))
    assert listed(images) == first
    assert listings == ["train", "train"]


def boxes_of(root: Path) -> list[tuple]:
    source = open_boxes("auto", str(root), "train")
    found = [source.objects(row) for row in range(len(source))]
    return [(source.name(row), each.boxes.tolist(), each.height) for row, each in enumerate(found)]


@pytest.mark.parametrize(
    "change",
    [
        *[
            lambda a, n=n: a.update(index_files.Names.of([n.encode()] * len(a["heights"])).arrays("names"))
            for n in OUTSIDE
        ],
        lambda a: a["heights"].__setitem__(0, -1),
        lambda a: a["widths"].__setitem__(0, 2**40),
        lambda a: a["boxes"].view(np.float64).__setitem__(0, np.nan),
        lambda a: a["area"].view(np.float64).__setitem__(0, np.inf),
    ],
)
def test_an_index_of_boxes_holds_what_their_files_may(drawn_boxes: Path, tmp_path: Path, settle, change):
    root = shutil.copytree(drawn_boxes, tmp_path / "boxes")
    settle(root)
    first = boxes_of(root)
    forge(next(root.glob(".sightline-index-*train*")), change)
    assert boxes_of(root) == first


@pytest.mark.parametrize(
    "change",
    [
        lambda train: (train / "ant" / "0.jpg").write_bytes(b"new"),
        lambda train: (train / "ant" / "deep" / "2.jpg").unlink(),
        lambda train: (train / "bee" / "3.jpg").rename(train / "bee" / "4.jpg"),
        lambda train: (train / "bee").rename(train / "wasp"),
        lambda train: shutil.copytree(train / "bee", train / "cat"),
        lambda train: shutil.rmtree(train / "ant" / "deep"),
    ],
    ids=["added", "removed", "renamed", "class renamed", "class added", "folder removed"],
)
def test_a_changed_folder_is_listed_again(images: Path, listings: list[str], change):
    first = listed(images)
    change(images / "train")
    again = listed(images)
    assert again != first
    assert listings == ["train", "train"]
    (images / ".sightline-index-folder-train").unlink()
    assert listed(images) == again


@pytest.mark.parametrize(
    "change",
    [
        lambda train: (train / "ant" / "0.jpg").write_bytes(b"new"),
        lambda train: shutil.copytree(train / "bee", train / "cat"),
        lambda train: (shutil.copytree(train, new := train.with_name("new")), shutil.rmtree(train), new.rename(train)),
    ],
    ids=["added", "class added", "replaced"],
)
def test_a_folder_whose_time_was_set_back_is_listed_again(images: Path, listings: list[str], settle, change):
    """As tar, rsync and images of file systems do, some with one time for everything."""
    listed(images)
    time.sleep(0.05)  # longer than a tick of the system's clock
    change(images / "train")
    settle(images)
    again = listed(images)
    assert listings == ["train", "train"]
    (images / ".sightline-index-folder-train").unlink()
    assert listed(images) == again


@pytest.mark.parametrize("change", [lambda s: s._replace(st_ino=7), lambda s: s._replace(st_size=7)])
def test_another_folder_with_the_same_times_is_told_apart(change):
    """In read-only images of file systems both times may be those of the first version."""

    class Status(NamedTuple):
        st_mtime_ns: int = 0
        st_ctime_ns: int = 0
        st_ino: int = 2**64 - 1
        st_size: int = 0

    assert folder._state(Status()) != folder._state(change(Status()))
    np.asarray(folder._state(Status()), np.int64)


def test_class_folders_are_compared_by_name_too(images: Path, listings: list[str], monkeypatch):
    """A read-only image of a file system may give all folders the same times, sizes and numbers."""
    monkeypatch.setattr(folder, "_state", lambda status: (0, 0, 0, 0))
    assert listed(images) == listed(images) and listings == ["train"]
    shutil.copytree(images / "train" / "bee", images / "train" / "cat")
    assert listed(images)[0] == ("ant", "bee", "cat")


def test_what_became_a_folder_a_moment_ago_is_not_kept(images: Path, listings: list[str], monkeypatch):
    """Its content is old by its time, which whoever unpacked it has set."""
    monkeypatch.setattr(index_files, "SETTLED_S", 60)
    assert listed(images) == listed(images)
    assert listings == ["train", "train"] and kept_files(images) == []


def test_class_folders_without_splits_are_listed_once(images: Path, listings: list[str], cache_home: Path):
    """An index among the class folders would change the folder whose state it holds."""
    root = images / "train"
    first = listed(root)
    assert listed(root) == first and listings == ["train"]
    assert kept_files(images) == []
    assert [name.rpartition("-")[0] for name in kept_files(cache_home)] == ["index-folder"]
    (root / "ant" / "0.jpg").write_bytes(b"new")
    assert listed(root) != first


def test_a_folder_of_results_that_becomes_a_class_is_seen(images: Path, listings: list[str], settle):
    run = images / "train" / "run"
    run.mkdir()
    for name in ("config.yaml", "log.jsonl"):
        (run / name).touch()
    settle(images)
    assert listed(images)[0] == ("ant", "bee") == listed(images)[0]
    assert listings == ["train"]
    (run / "config.yaml").unlink()
    (run / "5.jpg").write_bytes(b"5")
    assert listed(images)[0] == ("ant", "bee", "run")


def test_a_link_beside_the_classes_that_leads_nowhere_yet_may_become_one(images: Path, tmp_path: Path):
    (images / "train" / "cat").symlink_to(tmp_path / "cats")
    assert listed(images)[0] == listed(images)[0] == ("ant", "bee")
    shutil.copytree(images / "train" / "bee", tmp_path / "cats")
    assert listed(images)[0] == ("ant", "bee", "cat")


def test_kept_lists_of_both_splits_number_classes_as_train_does(images: Path, listings: list[str], settle, monkeypatch):
    monkeypatch.setattr(folder, "MIN_KEPT", 1)
    (images / "val" / "ant").rename(images / "val" / "bee")
    settle(images)
    first = [listed(images, split) for split in ("train", "val")]
    assert [listed(images, split) for split in ("train", "val")] == first and listings == ["train", "val"]
    assert [sample.label for _, sample in first[1][2]] == [1]


@pytest.mark.parametrize(
    ("column", "value"),
    [("labels", 2), ("labels", -1), ("names_ends", 99), ("sizes", None), ("classes_ends", 99), ("folders_bytes", 0)],
)
def test_a_kept_list_that_contradicts_itself_is_made_again(
    images: Path, listings: list[str], column: str, value: int | None
):
    """Its checksum and key may be right: whoever wrote the data may have written it."""
    first = listed(images)
    arrays = index_files.load(images, "folder-train", folder._INDEX_KEY)
    assert arrays is not None
    forged = arrays[column][:-1].copy() if value is None else arrays[column].copy()
    if value is not None:
        forged[-1] = value
    for broken in ({**arrays, column: forged}, {key: array for key, array in arrays.items() if key != column}):
        index_files.save(images, "folder-train", folder._INDEX_KEY, broken)
        listings.clear()
        assert listed(images) == first
        assert listings == ["train"]


def test_a_list_that_came_with_the_data_is_not_believed(images: Path, listings: list[str]):
    """Without a folder whose state is compared it would give every image another label."""
    first = listed(images)
    nothing = {"states": np.empty(0, np.int64), **index_files.Names.of([]).arrays("folders")}
    place = images / ".sightline-index-folder-train"
    forge(place, lambda arrays: arrays.update(nothing, labels=1 - arrays["labels"]))
    listings.clear()
    assert listed(images) == first
    assert listings == ["train"]


def test_a_class_that_val_gains_is_seen(images: Path, settle, monkeypatch):
    monkeypatch.setattr(folder, "MIN_KEPT", 1)
    listed(images, "val")
    shutil.copytree(images / "train" / "bee", images / "val" / "bee")
    assert [name for name, _ in listed(images, "val")[2]] == ["ant/4.jpg", "bee/3.jpg"]


def test_long_scans_report_their_progress(data: Path, images: Path, capsys, monkeypatch):
    opened(data)
    assert capsys.readouterr().err == ""  # short ones do not
    monkeypatch.setattr(index_files, "PROGRESS_EVERY_S", 0)
    for path in data.glob(".sightline-index-*"):
        path.unlink()
    opened(data), listed(images)
    reported = capsys.readouterr().err
    assert f"indexing {data}/train: 1 of 2 files (once; later runs use the index)" in reported
    assert f"indexing {data}: 1 of 2 files" in reported and "1 of 2 class folders" in reported
    monkeypatch.setenv("RANK", "1")
    listed(images, "val")
    assert capsys.readouterr().err == ""


def test_an_index_is_as_long_as_it_says(monkeypatch):
    def described(arrays: object, length: int, key: str = "k") -> object:
        return index_files._described(json.dumps({"key": "k", "arrays": arrays}).encode(), key, length)

    for arrays, length in (([], 0), ([["a", "<i8", 2], ["b", "|u1", 3]], 19), ([["a", "<i4", 0]], 0)):
        assert described(arrays, length) == [tuple(each) for each in arrays]
        assert described(arrays, length + 1) is None and described(arrays, length, "other") is None
    for arrays, length in (([["a", "|u1", -1], ["b", "|u1", 1]], 0), ([["a", "|u1", 2]], 1), ([["a", "<f8", 1]], 8)):
        assert described(arrays, length) is None
    monkeypatch.setattr(index_files, "_MAX_BYTES", 19)
    assert described([["a", "|u1", 19]], 19) and described([["a", "|u1", 20]], 20) is None


def test_the_header_of_an_index_has_a_limit(tmp_path: Path, monkeypatch):
    for name, is_read in (("a" * 100, True), ("a" * 101, False)):
        index_files.save(tmp_path, "x", "k", {name: np.arange(3)})
        monkeypatch.setattr(index_files, "_MAX_HEADER_BYTES", len('{"key": "k", "arrays": [["", "<i8", 3]]}') + 100)
        assert (index_files.load(tmp_path, "x", "k") is not None) == is_read


def test_names_keep_their_order_and_their_places():
    names = index_files.Names.of([b"a", b"", b"ccc", b"dd"])
    assert len(names) == 4 and [names[place] for place in range(4)] == ["a", "", "ccc", "dd"]
    taken = names.take(np.asarray([3, 0, 0, 1]))
    assert taken.all() == [*taken.each()] == [b"dd", b"a", b"a", b""] and names.all() == [b"a", b"", b"ccc", b"dd"]
    assert [*names.each(np.asarray([2, 0]))] == [b"ccc", b"a"] and index_files.Names.of([]).all() == []
    again = index_files.Names.loaded(names.arrays("n"), "n")
    assert again.all() == names.all()
    for ends in ([1, 1, 4, 7], [1, 1, 4, 5], [1, 0, 4, 6], [-1, 1, 4, 6]):
        with pytest.raises(ValueError, match="n: the ends of 4 names do not fit 6 bytes"):
            index_files.Names.loaded(names.arrays("n") | {"n_ends": np.asarray(ends)}, "n")
    for fine in ([b"a", b"b/c", b"..a", b"a..", b""], [b""], []):
        assert index_files.Names.of(fine).below().all() == fine
    for wrong in ([b"a", b"/b"], [b"", b"/b"], [b"a/../b"], [b".."], [b"a\0"]):
        with pytest.raises(ValueError, match="a name that leads out of its folder"):
            index_files.Names.of(wrong).below()
