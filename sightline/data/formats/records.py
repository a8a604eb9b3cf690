"""TFRecord files without TensorFlow: framing with masked CRC32C, and tf.train.Example read and written.

Used by the tfrecord source and by what prepares such files. Any bytes end as values or as BadData, and nothing is
allocated because a length in the bytes says so.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

from sightline.errors import BadData, BadSample
from sightline.files.positioned import read_at
from sightline.files.protobuf import FIXED32, LENGTH, VARINT, Buffer, WireReader, masked_crc32c

# decode.py takes images up to 256 MiB; the other features of a record are small.
MAX_RECORD_BYTES = 257 * 2**20
# Of one feature: the pixels of a 512x512 image. An int64 of one byte becomes 36 in Python; this many take 38 MB.
MAX_NUMBERS = 2**20
MAX_NUMBERS_OF_ALL = 2**21  # of all features of a record

HEADER_BYTES, FOOTER_BYTES = 12, 4  # u64 length and its checksum; the checksum of the payload

Values = list[bytes] | list[int] | list[float]
Spans = list[tuple[int, int]]  # (start, end) in the buffer
_Number = TypeVar("_Number", int, float)

_BYTES, _FLOAT, _INT64 = 1, 2, 3  # field numbers of tf.train.Feature


class HasDescriptor(Protocol):
    """An open file."""

    def fileno(self) -> int: ...


def frame(payload: bytes) -> bytes:
    """Return one record as it stands in a file."""
    length = struct.pack("<Q", len(payload))
    checksums = struct.pack("<I", masked_crc32c(length)), struct.pack("<I", masked_crc32c(payload))
    return b"".join((length, checksums[0], payload, checksums[1]))


def read_frame(file: HasDescriptor | int, offset: int, limit: int, name: str) -> bytes:
    """Return the payload of the record at `offset`, both checksums checked, at most `limit` bytes of it.

    The next record starts at `offset + 16 + len(payload)`. The file's position is neither used nor moved. Raises
    BadData; as BadSample of `name`, so that a loader may skip the record.
    """
    descriptor = file if isinstance(file, int) else file.fileno()
    header = read_at(descriptor, HEADER_BYTES, offset)
    length = frame_length(header, offset, os.fstat(descriptor).st_size, name)
    if length > limit:
        raise BadSample(name, f"record at byte {offset}: {length} bytes, more than the {limit} allowed for one record")
    # Read apart, so that the payload needs no copy: the checksum wants bytes, not a view of them.
    payload = read_at(descriptor, length, offset + HEADER_BYTES)
    crc = read_at(descriptor, FOOTER_BYTES, offset + HEADER_BYTES + length)
    if masked_crc32c(payload) != int.from_bytes(crc, "little"):
        raise BadSample(name, f"record at byte {offset}: its {length} bytes fail their checksum; fetch the file again")
    return payload


def frame_length(header: bytes, offset: int, file_bytes: int, name: str) -> int:
    """Return the length in a record's 12-byte header, checked; the record fits into the file."""
    if len(header) < HEADER_BYTES:
        raise BadSample(
            name, f"record at byte {offset}: only {len(header)} of its 16 or more bytes are there; fetch the file again"
        )
    length, crc = struct.unpack("<QI", header)
    if masked_crc32c(header[:8]) != crc:
        raise BadSample(
            name,
            f"record at byte {offset}: its length fails its checksum; fetch the file again "
            f"(or it is not a TFRecord file, or a compressed one: unpack it)",
        )
    if offset + HEADER_BYTES + length + FOOTER_BYTES > file_bytes:
        raise BadSample(
            name,
            f"record at byte {offset}: {length} bytes long, but the file ends at {file_bytes}; fetch the file again",
        )
    return length


def scan_frames(buffer: Buffer, name: str) -> Iterator[tuple[int, int]]:
    """Yield (offset, payload length) of every record of a file, looking at the headers alone."""
    offset = 0
    while offset < len(buffer):
        length = frame_length(bytes(buffer[offset : offset + HEADER_BYTES]), offset, len(buffer), name)
        yield offset, length
        offset += HEADER_BYTES + length + FOOTER_BYTES


# Reading tf.train.Example


def parse_example(payload: bytes | memoryview) -> dict[str, Values]:
    """Return all features of a serialised tf.train.Example, as protobuf reads it: of two with one name the later
    counts."""
    return peek_example(payload, 0, len(payload))


def peek_example(buffer: Buffer, start: int, stop: int, keys: Collection[str] | None = None) -> dict[str, Values]:
    """Return the features named in `keys` (None: all) of the Example in `buffer[start:stop]`.

    Other features are stepped over by their lengths: in a mapped file the pages of an image that is not asked for
    are never touched, and damage inside it is not seen.
    """
    reader = _Reader(buffer, start)
    found: dict[str, Values] = {}
    for number, wire, at, end in reader.fields(start, stop):
        if number == 1 and wire == LENGTH:
            for entry_number, entry_wire, entry_at, entry_end in reader.fields(at, end):
                if entry_number == 1 and entry_wire == LENGTH:
                    key, spans = reader.entry(entry_at, entry_end)
                    if keys is None or key in keys:
                        found[key] = reader.feature(spans)
    return found


class _Reader(WireReader):
    """The messages inside a tf.train.Example; the buffer may hold more than this one."""

    def __init__(self, buffer: Buffer, start: int):
        super().__init__(buffer)
        self.start = start
        self.numbers_left = MAX_NUMBERS_OF_ALL

    def damaged(self, what: str, at: int) -> BadData:
        return BadData(f"not a tf.train.Example: {what} at byte {at - self.start} of the record")

    def entry(self, start: int, stop: int) -> tuple[str, Spans]:
        """Return the key of a map entry, and where its value lies: in several parts, where it was written twice."""
        key, spans = "", []
        for number, wire, at, end in self.fields(start, stop):
            if wire == LENGTH and number == 1:
                key = self._text(at, end)
            elif wire == LENGTH and number == 2:
                spans.append((at, end))
        return key, spans

    def _text(self, start: int, stop: int) -> str:
        try:
            return str(self.buffer[start:stop], "utf-8")
        except UnicodeDecodeError:
            raise self.damaged("a feature's name that is not UTF-8", start) from None

    def feature(self, spans: Spans) -> Values:
        """Return the values of a feature; one of no kind has none."""
        kind = 0
        lists: Spans = []
        for start, stop in spans:
            for number, wire, at, end in self.fields(start, stop):
                if wire != LENGTH or number not in (_BYTES, _FLOAT, _INT64):
                    continue
                if number != kind:  # of the kinds of a oneof the last counts
                    kind, lists = number, []
                lists.append((at, end))
        if kind == _BYTES:
            return [
                bytes(self.buffer[at:end])
                for start, stop in lists
                for number, wire, at, end in self.fields(start, stop)
                if number == 1 and wire == LENGTH
            ]
        return self._numbers(lists, self._floats) if kind == _FLOAT else self._numbers(lists, self._integers)

    def _numbers(
        self, lists: list[tuple[int, int]], read: Callable[[int, int, int], Sequence[_Number]]
    ) -> list[_Number]:
        found: list[_Number] = []
        for start, stop in lists:
            for number, wire, at, end in self.fields(start, stop):
                if number == 1:
                    found += read(wire, at, end)
                if len(found) > MAX_NUMBERS:
                    raise self.damaged(f"more than {MAX_NUMBERS} numbers in one feature", start)
        self.numbers_left -= len(found)
        if self.numbers_left < 0:
            raise self.damaged(f"more than {MAX_NUMBERS_OF_ALL} numbers in all features", start)
        return found

    def _floats(self, wire: int, at: int, end: int) -> Sequence[float]:
        if wire not in (LENGTH, FIXED32):
            return ()
        count, rest = divmod(end - at, 4)
        if rest or count > MAX_NUMBERS:
            raise self.damaged(f"floats in {end - at} bytes", at)
        return struct.unpack(f"<{count}f", bytes(self.buffer[at:end]))

    def _integers(self, wire: int, at: int, end: int) -> list[int]:
        found: list[int] = []
        if wire not in (LENGTH, VARINT):
            return found
        while at < end and len(found) <= MAX_NUMBERS:
            value, at = self.varint(at, end)
            found.append(value - (1 << 64) if value >> 63 else value)
        return found


# Writing tf.train.Example


def encode_example(features: Mapping[str, bytes | int | Sequence[bytes] | Sequence[int] | Sequence[float]]) -> bytes:
    """Return a serialised tf.train.Example, names in order: equal features give equal bytes, those TensorFlow itself
    writes.

    A list of no values has no kind, and is read back as empty.
    """
    entries = []
    for key in sorted(features, key=str.encode):
        entries.append(_field(1, _field(1, key.encode()) + _field(2, _encode_feature(key, features[key]))))
    return _field(1, b"".join(entries))


def _encode_feature(key: str, value: bytes | int | Sequence[bytes] | Sequence[int] | Sequence[float]) -> bytes:
    values: Sequence[object] = [value] if isinstance(value, bytes | int) else value
    if len(values) == 0:
        return b""
    texts = [each for each in values if isinstance(each, bytes)]
    integers = [each for each in values if isinstance(each, int)]
    numbers = [each for each in values if isinstance(each, int | float)]
    if len(texts) == len(values):
        return _field(_BYTES, b"".join(_field(1, text) for text in texts))
    if len(integers) == len(values):
        return _field(_INT64, _field(1, b"".join(_encode_int64(key, integer) for integer in integers)))
    if len(numbers) == len(values):
        return _field(_FLOAT, _field(1, struct.pack(f"<{len(numbers)}f", *numbers)))
    kinds = sorted({type(each).__name__ for each in values})
    raise TypeError(f"feature {key!r}: expected bytes, integers or floats, got {' and '.join(kinds)}")


def _encode_int64(key: str, value: int) -> bytes:
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"feature {key!r}: {value} does not fit into 64 bits")
    return _encode_varint(value & (1 << 64) - 1)


def _encode_varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _field(number: int, body: bytes) -> bytes:
    return b"".join((_encode_varint(number << 3 | LENGTH), _encode_varint(len(body)), body))
