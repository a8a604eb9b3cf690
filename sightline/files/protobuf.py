"""The base of TensorFlow's files: protobuf's wire format, and CRC32C in the masked form.

Read by data/formats/records.py and models/tf_checkpoint.py. Any bytes end as values or as the reader's error, and
nothing is allocated because a length in the bytes says so.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterator

import google_crc32c

# Of all levels of one record together, read in half a second. Records of ImageNet have about 50, lists of numbers
# count once.
MAX_FIELDS = 2**18

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5  # wire types; 3 and 4 (groups) are not used by proto3

Buffer = bytes | memoryview | mmap.mmap


def masked_crc32c(data: bytes) -> int:
    """Return CRC32C as TensorFlow stores it: turned by 15 bits and moved, since a checksum of checksums is weak."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


class WireReader(ABC):
    """Protobuf's wire format over a buffer; subclasses know the messages, and which error damage is."""

    def __init__(self, buffer: Buffer):
        self.buffer = buffer
        self.fields_left = MAX_FIELDS

    @abstractmethod
    def damaged(self, what: str, at: int) -> Exception:
        """Return the error for `what` at this byte of the buffer."""

    def varint(self, at: int, stop: int) -> tuple[int, int]:
        """Return (value, where it ends)."""
        if at < stop and self.buffer[at] < 0x80:  # nearly always
            return self.buffer[at], at + 1
        value = shift = 0
        for position in range(at, min(stop, at + 10)):
            byte = self.buffer[position]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if value >> 64:
                    break
                return value, position + 1
            shift += 7
        raise self.damaged("a number without an end or of more than 64 bits", at)

    def fields(self, at: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (field number, wire type, start, end) of the fields of one message; the values are not looked at."""
        buffer = self.buffer
        while at < stop:
            self.fields_left -= 1
            if self.fields_left < 0:
                raise self.damaged(f"more than {MAX_FIELDS} fields", at)
            began = at
            tag = buffer[at]
            if tag < 0x80:
                at += 1
            else:
                tag, at = self.varint(at, stop)
            number, wire = tag >> 3, tag & 7
            if number == 0 or number >= 1 << 29:
                raise self.damaged(f"field number {number}", began)
            if wire == LENGTH:
                length, at = self.varint(at, stop)
                end = at + length
            elif wire == VARINT:
                _, end = self.varint(at, stop)
            elif wire == FIXED32:
                end = at + 4
            elif wire == FIXED64:
                end = at + 8
            else:
                raise self.damaged(f"wire type {wire}", began)
            if end > stop:
                raise self.damaged(f"a field of {end - at} bytes where {stop - at} are left", began)
            yield number, wire, at, end
            at = end
