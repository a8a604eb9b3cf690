"""TensorFlow's checkpoints: files it wrote itself, a table of several blocks made by hand, and every kind of damage."""

import json
import os
import random
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sightline.errors import BadCheckpoint
from sightline.files.protobuf import masked_crc32c
from sightline.models import tf_checkpoint
from sightline.models.resnet import ResNetConfig
from sightline.models.ssd import Trunk
from sightline.models.tf_checkpoint import TensorBundle, index_of
from sightline.models.tf_weights import read_tensorflow_ssd

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "tf_checkpoint"
VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"


# A writer of a few lines, for tables that TensorFlow would not write.


def varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def message(field: int, body: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(body)) + body


def entry(shape=(2,), size=8, offset=0, shard=0, dtype=1, checksum=0) -> bytes:
    dims = b"".join(message(2, number(1, length)) for length in shape)
    parts = number(1, dtype), message(2, dims), number(3, shard), number(4, offset), number(5, size)
    return b"".join(parts) + b"\x35" + struct.pack("<I", checksum)


def block(items: list[tuple[bytes, bytes]], kind: int = 0) -> bytes:
    body, before = b"", b""
    for key, value in items:
        shared = next(
            (n for n, (a, b) in enumerate(zip(key, before, strict=False)) if a != b), min(len(key), len(before))
        )
        body += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        before = key
    body += struct.pack("<II", 0, 1) + bytes([kind])  # one key is written whole, the first
    return body + struct.pack("<I", masked_crc32c(body))


HEADER = (b"", number(1, 1))


def table(*blocks: bytes, handles: list[bytes] | None = None) -> bytes:
    data, places = b"", []
    for each in blocks:
        places.append(varint(len(data)) + varint(len(each) - 5))
        data += each
    index = block([(bytes([65 + n]), place) for n, place in enumerate(places if handles is None else handles)])
    footer = varint(0) + varint(len(blocks[0]) - 5) + varint(len(data)) + varint(len(index) - 5)
    return data + index + footer.ljust(40, b"\0") + tf_checkpoint.MAGIC


def bundle(folder: Path, index: bytes, data: bytes = b"") -> TensorBundle:
    (folder / "a.index").write_bytes(index)
    (folder / "a.data-00000-of-00001").write_bytes(data)
    return TensorBundle(folder / "a.index")


# What TensorFlow wrote


def test_every_tensor_of_the_saver_is_read():
    sums = json.loads((GOLDEN / "trunk.json").read_text())["sums"]
    found = TensorBundle(GOLDEN / "trunk.index")

    assert set(found.entries) == set(sums)
    for name, total in sums.items():
        assert found.read(name).double().sum().item() == pytest.approx(total, abs=1e-9), name
    assert found.entries["conv2d_7/kernel"].shape == (1, 1, 2, 4)


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32", "float64", "int32", "int64"])
def test_every_type_is_read(kind):
    found = TensorBundle(GOLDEN / "object.index").read(kind + VALUE)

    assert torch.equal(found, torch.tensor([[1, -2], [3, 4], [-5, 6]]).to(getattr(torch, kind)))
    assert found.dtype == getattr(torch, kind)


def test_scalars_and_empty_tensors_are_read():
    found = TensorBundle(GOLDEN / "object.index")

    assert found.read("scalar" + VALUE).item() == 2.5
    assert found.read("empty" + VALUE).shape == (0,)


def test_several_data_files_are_read():
    found = TensorBundle(GOLDEN / "shards.index")

    assert {name: found.read(name).tolist() for name in found.entries} == {"a": [1, 2], "b": [3, 4], "c": [5]}


def test_slices_and_texts_are_refused_and_the_rest_is_read():
    parts, objects = TensorBundle(GOLDEN / "parts.index"), TensorBundle(GOLDEN / "object.index")

    assert set(parts.entries) == {"split", "whole"}
    assert parts.read("whole").item() == 7
    with pytest.raises(BadCheckpoint, match="'split' is stored in slices; save the checkpoint again without"):
        parts.read("split")
    with pytest.raises(BadCheckpoint, match=f"'text{VALUE}' is text; expected floating-point numbers or integers"):
        objects.read("text" + VALUE)


@pytest.mark.parametrize(
    ("given", "found"), [("trunk", "trunk.index"), ("trunk.index", "trunk.index"), ("nothing", None), ("", None)]
)
def test_a_checkpoint_is_named_by_its_prefix(given, found):
    assert index_of(GOLDEN / given) == (GOLDEN / found if found else None)


def test_a_number_after_a_dot_belongs_to_the_prefix(tmp_path):
    (tmp_path / "model.ckpt-28152.index").touch()
    assert index_of(tmp_path / "model.ckpt-28152") == tmp_path / "model.ckpt-28152.index"


# Tables by hand


def test_a_table_of_several_blocks(tmp_path):
    values = torch.arange(6, dtype=torch.float32)
    data = values.numpy().tobytes()
    places = [entry(offset=8 * n, checksum=masked_crc32c(data[8 * n : 8 * n + 8])) for n in range(3)]
    blocks = block([HEADER, (b"layer/a", places[0])]), block([(b"layer/b", places[1]), (b"layer/bc", places[2])])

    found = bundle(tmp_path, table(*blocks), data)

    assert {name: found.read(name).tolist() for name in found.entries} == {
        "layer/a": [0, 1],
        "layer/b": [2, 3],
        "layer/bc": [4, 5],
    }


def renamed_trunk(folder: Path, rename: Callable[[str], str]) -> Path:
    """The trunk that TensorFlow wrote, with other names; without what has none."""
    items = [
        (rename(name).encode(), entry(e.shape, e.size, e.offset, e.shard, e.dtype, e.checksum))
        for name, e in TensorBundle(GOLDEN / "trunk.index").entries.items()
        if rename(name)
    ]
    data = (GOLDEN / "trunk.data-00000-of-00001").read_bytes()
    return bundle(folder, table(block([HEADER, *sorted(items)])), data).index


def trunk_of(index: Path) -> dict[str, torch.Tensor]:
    trunk = Trunk(ResNetConfig(depth=34, width=2), 3).state_dict()
    return read_tensorflow_ssd(index, trunk | {f"trunk.{key}": tensor for key, tensor in trunk.items()}, []).tensors


def test_the_trunk_of_a_whole_detector_is_the_one_in_its_scope(tmp_path):
    index = renamed_trunk(tmp_path, lambda name: f"resnet34/{name}")

    found, expected = trunk_of(index), trunk_of(GOLDEN / "trunk.index")

    assert len(found) == 5 * 29
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("missing", ["conv2d_28/kernel", "batch_normalization/moving_mean", "conv2d_7/kernel"])
def test_a_trunk_without_one_of_its_tensors_is_refused(tmp_path, missing):
    index = renamed_trunk(tmp_path, lambda name: "" if name == missing else name)

    with pytest.raises(BadCheckpoint, match=f"lacks 1 of the 145 tensors of this trunk, {missing} first"):
        trunk_of(index)


ONE = block([HEADER, (b"a", entry())])
BAD_TABLES = {
    "empty": (b"", "wrong magic number at byte 0"),
    "other file": (b"\x89HDF" * 20, "wrong magic number at byte 72"),
    "cut": (table(ONE)[:-1], "wrong magic number"),
    "no names": (table(block([HEADER]), handles=[]), "no header"),
    "no header": (table(block([(b"a", entry())])), r"no header \(the entry with an empty name\)"),
    "snappy": (table(block([HEADER], kind=1)), r"is compressed \(kind 1 at byte \d+\), which TensorFlow does not do"),
    "order": (table(block([HEADER, (b"b", entry()), (b"a", entry())])), "a name out of order"),
    "twice the same block": (
        table(ONE, handles=[varint(0) + varint(len(ONE) - 5)] * 2),
        "a block out of order",
    ),
    "far block": (table(ONE, handles=[varint(2**40) + varint(9)]), f"a handle to 9 bytes at {2**40}, beyond the end"),
    "huge block": (table(ONE, handles=[varint(0) + varint(2**60)]), f"a handle to {2**60} bytes at 0, beyond the end"),
    "data files": (table(block([(b"", number(1, 10**6))])), "a count of 1000000 data files at byte 3"),
    "big-endian": (table(block([(b"", number(1, 1) + number(2, 1))])), "big-endian machine"),
    "name": (table(block([HEADER, (b"\xff\xfe", entry())])), "a name that is not UTF-8"),
    "long name": (table(block([HEADER, (b"a" * 2000, entry())])), r"a name of 0\+2000 bytes"),
    "huge shape": (table(block([HEADER, (b"a", entry(shape=(2**40, 2**40)))])), "an entry of shape "),
    "hidden huge shape": (table(block([HEADER, (b"a", entry(shape=(0, 2**62), size=0))])), "an entry of shape "),
    "negative": (table(block([HEADER, (b"a", entry(offset=2**64 - 1))])), "bytes at 18446744073709551615"),
    "many dimensions": (table(block([HEADER, (b"a", entry(shape=(1,) * 300))])), "a tensor of 300 dimensions"),
    "protobuf": (table(block([HEADER, (b"a", b"\x0a\x7f")])), "a field of 127 bytes where 0 are left"),
}


@pytest.mark.parametrize("name", BAD_TABLES)
def test_a_bad_table_is_refused(tmp_path, name):
    content, expected = BAD_TABLES[name]
    with pytest.raises(BadCheckpoint, match=expected) as error:
        bundle(tmp_path, content)
    assert str(tmp_path / "a.index") in str(error.value)


def test_a_block_that_is_all_restarts_is_refused(tmp_path):
    body = struct.pack("<I", 2**31) + b"\0"
    with pytest.raises(BadCheckpoint, match=f"a block of 4 bytes with {2**31} restarts at byte 0"):
        bundle(tmp_path, table(body + struct.pack("<I", masked_crc32c(body))))


def test_more_names_than_anybody_has_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tf_checkpoint, "MAX_TENSORS", 3)
    with pytest.raises(BadCheckpoint, match="more than 3 tensors"):
        bundle(tmp_path, table(block([HEADER, *((b"%d" % n, entry()) for n in range(4))])))


def test_slices_count_as_names_do(tmp_path, monkeypatch):
    monkeypatch.setattr(tf_checkpoint, "MAX_TENSORS", 3)
    slices = [(b"a\0%d" % n, b"") for n in range(3)]
    assert set(bundle(tmp_path, table(block([HEADER, *slices]))).entries) == set()
    with pytest.raises(BadCheckpoint, match="more than 3 tensors and slices"):
        bundle(tmp_path, table(block([HEADER, *slices, (b"b", entry())])))


def test_a_text_as_large_as_data_is_refused_unread(tmp_path):
    size = tf_checkpoint.MAX_INDEX_BYTES + 1
    found = bundle(tmp_path, table(block([HEADER, (b"a", entry(shape=(), size=size, dtype=7))])))
    os.truncate(tmp_path / "a.data-00000-of-00001", size)
    tracemalloc.start()
    with pytest.raises(BadCheckpoint, match=f"'a' is not a text of at most {size - 1} bytes; fetch"):
        found.read_text("a")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2**20


def test_an_index_as_large_as_data_is_refused(tmp_path):
    with (tmp_path / "a.index").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(BadCheckpoint, match=f"a.index has {2**40} bytes; expected a table of names"):
        TensorBundle(tmp_path / "a.index")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"offset": 4}, r"a.data-00000-of-00001: 'a' at byte 4 has 8 bytes, but the file ends at 8"),
        ({"offset": 2**47}, f"'a' at byte {2**47} has 8 bytes, but the file ends at 8"),
        ({"size": 2**40}, f"is damaged: {2**40} bytes for shape 2 of float32, which takes 8"),
        ({"shape": (2**40,), "size": 2**42}, f"'a' at byte 0 has {2**42} bytes, but the file ends at 8"),
        ({"shape": ()}, "8 bytes for shape scalar of float32, which takes 4"),
        ({"shard": 1}, "'a' is in data file 1; the last one is 0"),
        ({"dtype": 7}, "'a' is text"),
        ({"dtype": 99}, "'a' is of TensorFlow's type 99"),
        ({"checksum": 5}, "'a' at byte 0: its 8 bytes fail their checksum"),
    ],
)
def test_bad_places_are_refused_without_allocating(tmp_path, fields, message):
    found = bundle(tmp_path, table(block([HEADER, (b"a", entry(**fields))])), bytes(8))

    tracemalloc.start()
    with pytest.raises(BadCheckpoint, match=message):
        found.read("a")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert most < 2**20


def test_missing_data_is_reported(tmp_path):
    shutil.copy(GOLDEN / "trunk.index", tmp_path)
    with pytest.raises(BadCheckpoint, match="needs trunk.data-00000-of-00001 in its folder, which does not exist"):
        TensorBundle(tmp_path / "trunk.index").read("conv2d/kernel")


# Damage


def read_all(index: Path) -> dict[str, torch.Tensor]:
    found = TensorBundle(index)
    return {name: found.read(name) for name in found.entries}


def test_every_changed_byte_of_the_table_is_noticed(tmp_path):
    """But for those of the footer's padding, and of the block that nothing is read from."""
    index = (GOLDEN / "shards.index").read_bytes()
    for shard in (0, 1):
        shutil.copy(GOLDEN / f"shards.data-0000{shard}-of-00002", tmp_path)
    expected = read_all(GOLDEN / "shards.index")
    silent = []
    for at in range(len(index)):
        (tmp_path / "shards.index").write_bytes(index[:at] + bytes([index[at] ^ 0x11]) + index[at + 1 :])
        try:
            found = read_all(tmp_path / "shards.index")
        except BadCheckpoint:
            continue
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        silent.append(at)
    footer = len(index) - tf_checkpoint.FOOTER_BYTES
    meta_start = index[footer]  # small enough to be one byte here
    unread = {*range(meta_start, meta_start + index[footer + 1] + 5), *range(footer, len(index) - 8)}
    assert set(silent) <= unread


@pytest.mark.parametrize("length", [0, 1, 39, 47, 48, 100, 162])
def test_every_cut_table_is_noticed(tmp_path, length):
    (tmp_path / "a.index").write_bytes((GOLDEN / "shards.index").read_bytes()[:length])
    with pytest.raises(BadCheckpoint, match="a.index is not a complete index of a TensorFlow checkpoint"):
        TensorBundle(tmp_path / "a.index")


def test_changed_and_cut_data_are_noticed(tmp_path):
    shutil.copy(GOLDEN / "trunk.index", tmp_path)
    data = (GOLDEN / "trunk.data-00000-of-00001").read_bytes()
    entry = TensorBundle(GOLDEN / "trunk.index").entries["conv2d_28/kernel"]
    for at in (entry.offset, entry.offset + entry.size - 1):
        (tmp_path / "trunk.data-00000-of-00001").write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(
            BadCheckpoint, match=f"'conv2d_28/kernel' at byte {entry.offset}: its .* fail their checksum"
        ):
            TensorBundle(tmp_path / "trunk.index").read("conv2d_28/kernel")
    (tmp_path / "trunk.data-00000-of-00001").write_bytes(data[: entry.offset + 5])
    with pytest.raises(BadCheckpoint, match=f"but the file ends at {entry.offset + 5}"):
        TensorBundle(tmp_path / "trunk.index").read("conv2d_28/kernel")


def test_bytes_with_right_checksums_are_values_or_our_error(tmp_path):
    """Past the checksums, as a hostile file comes: random changes of every block, with new checksums."""
    rng = random.Random(0)
    body = bytearray(ONE[:-5])
    tracemalloc.start()
    refused = 0
    for _ in range(600):
        changed = bytearray(body)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        sealed = bytes(changed) + b"\0"
        try:
            found = bundle(tmp_path, table(sealed + struct.pack("<I", masked_crc32c(sealed))), bytes(64))
            for name in found.entries:
                found.read(name)
        except BadCheckpoint:
            refused += 1
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert refused > 200
    assert most < 2**22
