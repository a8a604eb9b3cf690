"""TFRecord bytes against those TensorFlow wrote, tf.train.Example against protobuf, and every kind of damage."""

import io
import json
import random
import struct
import tracemalloc
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from sightline.data.formats import records
from sightline.errors import BadData, BadSample
from sightline.files import protobuf
from sightline.files.positioned import read_at

GOLDEN = Path(__file__).resolve().parents[3] / "golden" / "tfrecord"
SMALL = 1000


def payloads(name: str) -> list[bytes]:
    data = (GOLDEN / name).read_bytes()
    return [data[at + 12 : at + 12 + length] for at, length in records.scan_frames(data, name)]


def with_hex(features: dict) -> dict:
    return {key: [v.hex() if isinstance(v, bytes) else v for v in values] for key, values in features.items()}


SCHEMA = """
name: "example.proto" package: "r" syntax: "proto3"
message_type { name: "B" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
message_type { name: "F" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT } }
message_type { name: "I" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 } }
message_type {
  name: "Feature"
  field { name: "b" number: 1 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".r.B" oneof_index: 0 }
  field { name: "f" number: 2 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".r.F" oneof_index: 0 }
  field { name: "i" number: 3 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".r.I" oneof_index: 0 }
  oneof_decl { name: "kind" }
}
message_type {
  name: "Features"
  field { name: "feature" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: ".r.Features.FeatureEntry" }
  nested_type {
    name: "FeatureEntry" options { map_entry: true }
    field { name: "key" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
    field { name: "value" number: 2 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".r.Feature" }
  }
}
message_type {
  name: "Example"
  field { name: "features" number: 1 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".r.Features" }
}
"""


@pytest.fixture(scope="module")
def example_class():
    """tf.train.Example as protobuf itself reads it."""
    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(SCHEMA, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("r.Example"))


def read_by_protobuf(example_class, payload: bytes) -> dict:
    found = {}
    for key, feature in example_class.FromString(payload).features.feature.items():
        kind = feature.WhichOneof("kind")
        found[key] = list(getattr(feature, kind).value) if kind else []
    return found


def drawn_features(rng: random.Random) -> dict:
    makers = (
        lambda: rng.randbytes(rng.choice((0, 1, 127, 128, 300))),
        lambda: rng.choice((0, 1, 127, 128, -1, 2**63 - 1, -(2**63), rng.getrandbits(40))),
        lambda: struct.unpack("<f", struct.pack("<f", rng.uniform(-9, 9)))[0],
    )
    features = {}
    for _ in range(rng.randrange(8)):
        make, name = rng.choice(makers), "".join(rng.choice("ab/ä漢") for _ in range(rng.randrange(6)))
        features[name] = [make() for _ in range(rng.randrange(5))]
    return features


# What TensorFlow wrote


def test_odd_examples_read_as_tensorflow_reads_them():
    expected = json.loads((GOLDEN / "odd.json").read_text())
    assert [with_hex(records.parse_example(payload)) for payload in payloads("odd")] == expected


def test_frames_are_tensorflows_bytes():
    for name in ("odd", "img_train/img_train-00000-of-00002"):
        found = payloads(name)
        assert len(found) > 2
        assert b"".join(map(records.frame, found)) == (GOLDEN / name).read_bytes()


def test_a_written_example_has_tensorflows_bytes():
    """Those of the odd ones that TensorFlow wrote in order of their names, and whose lists all have a kind."""
    for payload in payloads("odd")[:3]:
        assert records.encode_example(records.parse_example(payload)) == payload


def test_crc32c_is_the_castagnoli_one():
    """The check value of RFC 3720, masked by hand."""
    crc = 0xE3069283
    assert records.masked_crc32c(b"123456789") == ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32


# Against protobuf


def test_examples_round_trip_through_protobuf(example_class):
    rng = random.Random(1)
    for _ in range(200):
        features = drawn_features(rng)
        payload = records.encode_example(features)
        assert records.parse_example(payload) == features == read_by_protobuf(example_class, payload)
        again = example_class.FromString(payload)
        assert records.parse_example(again.SerializeToString()) == features


def test_what_is_accepted_of_damaged_bytes_is_what_protobuf_reads(example_class):
    rng = random.Random(2)
    accepted = refused = 0
    for _ in range(3000):
        damaged = bytearray(records.encode_example(drawn_features(rng)))
        for _ in range(rng.randrange(1, 4)):
            if damaged:
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        damaged = damaged[: rng.randrange(len(damaged) + 1)] if rng.random() < 0.3 else damaged
        try:
            found = records.parse_example(bytes(damaged))
        except BadData:
            refused += 1
            continue
        # protobuf's Python puts a map entry aside as a whole for an unknown field in it; its C++ does not, nor do we.
        if len(UnknownFieldSet(example_class.FromString(bytes(damaged)).features)):
            continue
        accepted += 1
        assert repr(sorted(found.items())) == repr(sorted(read_by_protobuf(example_class, bytes(damaged)).items()))
    assert accepted > 500 and refused > 500


@pytest.mark.parametrize(
    "payload",
    [
        b"\x0a",  # no length
        b"\x0a\x05\x00",  # a length beyond the end
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f",  # of more than 64 bits
        b"\x0a" + b"\x80" * 12,  # without an end
        b"\x0a\x80",
        b"\x02\x00",  # field 0
        b"\x0b\x0c",  # a group
        b"\x0d\x00\x00\x00",  # three of four bytes
        b"\x0a\x05\x0a\x03\x0a\x01\xff",  # a name that is not text
        records.encode_example({"a": [1.0]}).replace(b"\x04\x00\x00\x80\x3f", b"\x03\x00\x00\x80\x3f"),
    ],
)
def test_malformed_examples_are_refused_as_protobuf_does(example_class, payload: bytes):
    with pytest.raises(BadData, match="not a tf.train.Example: .* at byte [0-9]+ of the record"):
        records.parse_example(payload)
    if payload[0] != 0x0B:  # of an unknown group protobuf skips all, proto3 has none
        with pytest.raises(DecodeError):
            example_class.FromString(payload)


def test_lists_of_absurd_length_are_refused(monkeypatch):
    monkeypatch.setattr(records, "MAX_NUMBERS", 1000)
    monkeypatch.setattr(protobuf, "MAX_FIELDS", 3000)
    for value in (1, 1.0):
        assert len(records.parse_example(records.encode_example({"a": [value] * 1000}))["a"]) == 1000
        with pytest.raises(BadData, match="more than 1000 numbers in one feature|floats in 4004 bytes"):
            records.parse_example(records.encode_example({"a": [value] * 1001}))
    with pytest.raises(BadData, match="more than 3000 fields at byte 6000"):
        records.parse_example(b"\x10\x00" * 3001)
    monkeypatch.setattr(records, "MAX_NUMBERS_OF_ALL", 2000)
    both = {"a": [1] * 1000, "b": [2.0] * 1000}
    assert len(records.parse_example(records.encode_example(both))) == 2
    with pytest.raises(BadData, match="more than 2000 numbers in all features"):
        records.parse_example(records.encode_example({**both, "c": [3]}))


class Watched:
    """A buffer that remembers which bytes were asked for."""

    def __init__(self, data: bytes):
        self.data = data
        self.touched: set[int] = set()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, at):
        self.touched.update(range(*at.indices(len(self.data))) if isinstance(at, slice) else [at])
        return self.data[at]


@pytest.mark.parametrize("name", ["an image", "z image"], ids=["before the label", "after it"])
def test_peeking_leaves_the_image_alone(name: str):
    image = b"\xff" * 5000
    data = b"before" + records.encode_example({"label": [7], "synset": b"n1", name: image}) + b"after"
    buffer = Watched(data)
    found = records.peek_example(buffer, 6, len(data) - 5, {"label", "synset", "absent"})
    assert found == {"label": [7], "synset": [b"n1"]}
    start = data.index(image)
    assert not buffer.touched & set(range(start, start + len(image)))
    assert records.peek_example(data, 6, len(data) - 5, {name}) == {name: [image]}


# Writing


def test_written_examples_do_not_depend_on_the_order_of_their_features():
    one = {"b": 1, "a": b"x", "ä": [1.5, 2]}
    assert records.encode_example(one) == records.encode_example(dict(reversed(one.items())))
    assert records.parse_example(records.encode_example(one)) == {"a": [b"x"], "b": [1], "ä": [1.5, 2.0]}


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("text", TypeError),
        ([b"x", 1], TypeError),
        ([None], TypeError),
        (2**63, ValueError),
        ([-(2**63) - 1], ValueError),
    ],
)
def test_what_no_feature_can_hold_is_refused(value, error: type[Exception]):
    with pytest.raises(error, match="feature 'a'"):
        records.encode_example({"a": value})


# Damaged files


@pytest.fixture
def two(tmp_path: Path) -> Path:
    path = tmp_path / "two"
    path.write_bytes(records.frame(b"first") + records.frame(b"second one"))
    return path


def read_all(path: Path, limit: int = SMALL) -> list[bytes]:
    found = []
    with path.open("rb") as file:
        at = 0
        while at < path.stat().st_size:
            found.append(records.read_frame(file, at, limit, path.name))
            at += 16 + len(found[-1])
    return found


def test_frames_are_read_back(two: Path):
    assert read_all(two) == [b"first", b"second one"]
    with two.open("rb") as file:
        file.seek(3)
        assert records.read_frame(file.fileno(), 21, SMALL, "two") == b"second one"
        assert file.tell() == 3  # other readers of the file are not disturbed
    assert list(records.scan_frames(two.read_bytes(), "two")) == [(0, 5), (21, 10)]


def test_a_cut_at_any_byte_is_noticed(two: Path):
    whole = two.read_bytes()
    for cut in range(1, len(whole)):
        two.write_bytes(whole[:cut])
        if cut == 21:
            assert read_all(two) == [b"first"]
            continue
        for read in (lambda: read_all(two), lambda: list(records.scan_frames(two.read_bytes(), "two"))):
            with pytest.raises(
                BadSample, match=rf"^two: record at byte {21 if cut > 21 else 0}: .*fetch the file again"
            ):
                read()


def test_a_flip_of_any_bit_is_noticed(two: Path):
    whole = two.read_bytes()
    for bit in range(21 * 8, len(whole) * 8):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        two.write_bytes(damaged)
        with pytest.raises(
            BadSample, match="^two: record at byte 21: its (length fails its|10 bytes fail their) checksum"
        ):
            read_all(two)


@pytest.mark.parametrize("length", [2**60, 2**63, 2**64 - 1, 2**40, SMALL])
def test_an_absurd_length_is_refused_before_anything_is_allocated(tmp_path: Path, length: int):
    path = tmp_path / "absurd"
    header = struct.pack("<Q", length)
    path.write_bytes(records.frame(b"x") + header + struct.pack("<I", records.masked_crc32c(header)) + b"few bytes")
    tracemalloc.start()
    with pytest.raises(BadSample, match=rf"^absurd: record at byte 17: {length} bytes long, but the file ends at 38"):
        read_all(path)
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()


def test_a_record_beyond_the_limit_is_refused_though_the_file_is_long_enough(tmp_path: Path):
    path = tmp_path / "long"
    header = struct.pack("<Q", 2**40)
    with path.open("wb") as file:
        file.write(header + struct.pack("<I", records.masked_crc32c(header)))
        file.truncate(2**40 + 16)  # takes no room: never written
    tracemalloc.start()
    with pytest.raises(BadSample, match=f"^long: record at byte 0: {2**40} bytes, more than the {2**28} allowed"):
        read_all(path, 2**28)
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()


def test_parts_of_a_read_are_put_together(monkeypatch):
    data = io.BytesIO(b"0123456789")
    monkeypatch.setattr(records.os, "pread", lambda _, count, at: data.getbuffer()[at : at + min(count, 3)].tobytes())
    assert read_at(0, 8, 1) == b"12345678"
    assert read_at(0, 8, 5) == b"56789"
