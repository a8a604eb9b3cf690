"""Reader of TensorFlow checkpoints (format V2 of Saver and tf.train.Checkpoint) that does not need TensorFlow.

PREFIX.index is a sorted table from names to offsets in LevelDB's format; PREFIX.data-00000-of-00001 holds the bytes.
Models that can start from such files call it. It verifies all checksums, and compares every size in a file with the
length of the file before use.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sightline.errors import BadCheckpoint
from sightline.files.protobuf import FIXED32, LENGTH, VARINT, WireReader, masked_crc32c

# The index of an SSD trunk has 5 kB for 148 tensors. The last two limits bound hostile names to 16 MB in all.
MAX_INDEX_BYTES = 64 * 2**20
MAX_NAME_BYTES = 2**10
MAX_TENSORS = 2**14
MAX_DIMENSIONS = 254  # TensorFlow's own limit

MAGIC = bytes.fromhex("57fb808b247547db")
FOOTER_BYTES = 48  # two handles of at most 20 bytes each, and the magic
TRAILER_BYTES = 5  # after a block: its kind of compression and its checksum

DTYPES = {  # tensorflow/core/framework/types.proto
    1: torch.float32,
    2: torch.float64,
    3: torch.int32,
    9: torch.int64,
    14: torch.bfloat16,
    19: torch.float16,
}
AGAIN = "fetch the checkpoint again"
TEXT = 7
OTHER_DTYPES = {TEXT: "text", 10: "boolean", 20: "resource", 21: "variant"}


@dataclass(frozen=True)
class Entry:
    """Table entry of one tensor."""

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    checksum: int
    is_sliced: bool  # values are stored in parts under other keys


def index_of(prefix: Path) -> Path | None:
    """Return the index file of a checkpoint, given its prefix or the index file itself; None if it does not exist."""
    index = prefix if prefix.suffix == ".index" else prefix.with_name(prefix.name + ".index")
    return index if index.is_file() else None


class TensorBundle:
    """A checkpoint. All names are read at once, a tensor's bytes only on `read`."""

    def __init__(self, index: Path):
        self.index = index
        table = _Table(index)
        shards, self.entries = 0, dict[str, Entry]()
        for number, (key, at, end) in enumerate(table.items()):
            if number > MAX_TENSORS:
                raise table.damaged(f"more than {MAX_TENSORS} tensors and slices", at)
            if not key:
                shards = table.shards(at, end)
            elif b"\0" not in key:  # a key with a zero byte is a slice; its tensor has its own entry
                self.entries[table.text(key, at)] = table.entry(at, end)
        if not shards:
            raise table.damaged("no header (the entry with an empty name)", 0)
        self.shards = shards

    def read(self, name: str) -> Tensor:
        """Return the values of a tensor in `entries`, in TensorFlow's layout."""
        entry, what = self.entries[name], f"{self.index}: '{name}'"
        if entry.is_sliced:
            raise BadCheckpoint(f"{what} is stored in slices; save the checkpoint again without a partitioner")
        if entry.dtype not in DTYPES:
            kind = OTHER_DTYPES.get(entry.dtype, f"of TensorFlow's type {entry.dtype}")
            raise BadCheckpoint(f"{what} is {kind}; expected floating-point numbers or integers")
        dtype = DTYPES[entry.dtype]
        needed = math.prod(entry.shape) * dtype.itemsize
        if entry.size != needed:
            raise BadCheckpoint(
                f"{what} is damaged: {entry.size} bytes for shape {'x'.join(map(str, entry.shape)) or 'scalar'} of "
                f"{str(dtype).removeprefix('torch.')}, which takes {needed}; {AGAIN}"
            )
        data = self._bytes(name, entry)
        return (torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)).reshape(entry.shape)

    def read_text(self, name: str) -> bytes:
        """Return the value of a scalar text in `entries`: its length, a checksum of that, and its bytes."""
        entry, what = self.entries[name], f"{self.index}: '{name}'"
        if entry.dtype != TEXT or entry.shape or entry.size > MAX_INDEX_BYTES:
            raise BadCheckpoint(f"{what} is not a text of at most {MAX_INDEX_BYTES} bytes; {AGAIN}")
        data = bytes(self._bytes(name, entry, checks=False))
        place = next((at + 1 for at, byte in enumerate(data[:5]) if byte < 0x80), 0)
        length = sum((byte & 0x7F) << 7 * at for at, byte in enumerate(data[:place]))
        text = data[place + 4 :]
        stored = struct.pack("<I", length & 0xFFFFFFFF)  # as the checksums see it
        checked = struct.pack("<I", masked_crc32c(stored))
        is_whole = place and len(text) == length and data[place : place + 4] == checked
        if not is_whole or masked_crc32c(stored + checked + text) != entry.checksum:
            raise BadCheckpoint(f"{what}: its {entry.size} bytes fail their checksum; {AGAIN}")
        return text

    def _bytes(self, name: str, entry: Entry, checks: bool = True) -> bytearray:
        path = self.index.with_suffix(f".data-{entry.shard:05d}-of-{self.shards:05d}")
        if entry.shard >= self.shards:
            raise BadCheckpoint(
                f"{self.index}: '{name}' is in data file {entry.shard}; the last one is {self.shards - 1}; {AGAIN}"
            )
        if not path.is_file():
            raise BadCheckpoint(f"{self.index} needs {path.name} in its folder, which does not exist; fetch it too")
        place = f"{path}: '{name}' at byte {entry.offset}"
        with path.open("rb") as file:
            length = os.fstat(file.fileno()).st_size
            if entry.offset + entry.size > length:
                raise BadCheckpoint(f"{place} has {entry.size} bytes, but the file ends at {length}; {AGAIN}")
            file.seek(entry.offset)
            data = file.read(entry.size)
        if checks and masked_crc32c(data) != entry.checksum:
            raise BadCheckpoint(f"{place}: its {entry.size} bytes fail their checksum; {AGAIN}")
        return bytearray(data)  # torch.frombuffer warns about read-only memory


class _Table(WireReader):
    """The .index file: blocks of sorted keys with values, and one block with the offsets of the others."""

    def __init__(self, path: Path):
        self.path = path
        if (length := path.stat().st_size) > MAX_INDEX_BYTES:
            raise BadCheckpoint(f"{path} has {length} bytes; expected a table of names of at most {MAX_INDEX_BYTES}")
        super().__init__(path.read_bytes())

    def damaged(self, what: str, at: int) -> BadCheckpoint:
        return BadCheckpoint(
            f"{self.path} is not a complete index of a TensorFlow checkpoint: {what} at byte {at}; {AGAIN}"
        )

    def items(self) -> Iterator[tuple[bytes, int, int]]:
        """Yield (key, start of the value, end of the value) in order."""
        footer = len(self.buffer) - FOOTER_BYTES
        if footer < 0 or self.buffer[-len(MAGIC) :] != MAGIC:
            raise self.damaged("wrong magic number", max(len(self.buffer) - len(MAGIC), 0))
        _, at = self._handle(footer, len(self.buffer))  # the metaindex block, which TensorFlow leaves empty
        (start, stop), _ = self._handle(at, len(self.buffer))
        before: bytes | None = None
        last = 0
        for _, value, end in self._block(start, stop):
            place, _ = self._handle(value, end)
            if place[0] < last:  # one block, named a million times, would be read as often
                raise self.damaged("a block out of order", value)
            last = place[1]
            for key, at, value_end in self._block(*place):
                if before is not None and key <= before:
                    raise self.damaged("a name out of order", at)
                before = key
                yield key, at, value_end

    def _handle(self, at: int, stop: int) -> tuple[tuple[int, int], int]:
        """Read a block handle; return ((start, end) of the block, end of the handle)."""
        offset, after = self.varint(at, stop)
        size, after = self.varint(after, stop)
        if offset + size + TRAILER_BYTES > len(self.buffer) - FOOTER_BYTES:
            raise self.damaged(f"a handle to {size} bytes at {offset}, beyond the end,", at)
        return (offset, offset + size), after

    def _block(self, start: int, stop: int) -> Iterator[tuple[bytes, int, int]]:
        """Yield (key, start of the value, end of the value). An entry stores how much of the previous key it shares."""
        (checksum,) = struct.unpack_from("<I", self.buffer, stop + 1)
        if masked_crc32c(bytes(self.buffer[start : stop + 1])) != checksum:
            raise self.damaged(f"a block of {stop - start} bytes that fails its checksum", start)
        if self.buffer[stop] != 0:
            raise BadCheckpoint(
                f"{self.path} is compressed (kind {self.buffer[stop]} at byte {stop}), which TensorFlow does not do; "
                f"load it in TensorFlow and save it again"
            )
        # A block ends with the offsets of keys stored whole and their number. Only a search needs the offsets.
        restarts = int.from_bytes(self.buffer[max(stop - 4, start) : stop], "little")
        end = stop - 4 * (restarts + 1)
        if end < start:
            raise self.damaged(f"a block of {stop - start} bytes with {restarts} restarts", start)
        key, at = b"", start
        while at < end:
            began = at
            shared, at = self.varint(at, end)
            unshared, at = self.varint(at, end)
            length, at = self.varint(at, end)
            if shared > len(key) or shared + unshared > MAX_NAME_BYTES or at + unshared + length > end:
                raise self.damaged(f"a name of {shared}+{unshared} bytes with a value of {length}", began)
            key = key[:shared] + bytes(self.buffer[at : at + unshared])
            at += unshared
            yield key, at, at + length
            at += length

    def text(self, key: bytes, at: int) -> str:
        """Decode a tensor's name."""
        try:
            return key.decode()
        except UnicodeDecodeError:
            raise self.damaged("a name that is not UTF-8", at) from None

    def shards(self, start: int, stop: int) -> int:
        """Return the number of data files from a BundleHeaderProto."""
        values = {number: at for number, wire, at, _ in self.fields(start, stop) if wire == VARINT}
        if 2 in values and self.varint(values[2], stop)[0] != 0:
            raise BadCheckpoint(
                f"{self.path} was written by a big-endian machine; load and save it on a little-endian one"
            )
        found = self.varint(values[1], stop)[0] if 1 in values else 0
        if not 0 < found <= 99999:  # five digits in the names of the files
            raise self.damaged(f"a count of {found} data files", start)
        return found

    def entry(self, start: int, stop: int) -> Entry:
        """Parse a BundleEntryProto."""
        numbers: dict[int, int] = {}
        shape: list[int] = []
        checksum, is_sliced = 0, False
        for number, wire, at, end in self.fields(start, stop):
            if wire == VARINT:
                numbers[number] = self.varint(at, end)[0]
            elif wire == LENGTH and number == 2:
                shape += self._shape(at, end)
            elif wire == FIXED32 and number == 6:
                checksum = int.from_bytes(self.buffer[at:end], "little")
            elif wire == LENGTH and number == 7:
                is_sliced = True
        if len(shape) > MAX_DIMENSIONS:
            raise self.damaged(f"a tensor of {len(shape)} dimensions", start)
        dtype, shard, offset, size = (numbers.get(number, 0) for number in (1, 3, 4, 5))
        if max(shard, offset, size, math.prod(max(length, 1) for length in shape)) >= 2**48:
            raise self.damaged(f"an entry of shape {shape} with {size} bytes at {offset}", start)
        return Entry(dtype, tuple(shape), shard, offset, size, checksum, is_sliced)

    def _shape(self, start: int, stop: int) -> Iterator[int]:
        """Yield the sizes in a TensorShapeProto."""
        for number, wire, at, end in self.fields(start, stop):
            if number == 2 and wire == LENGTH:  # one dimension; a size of 0 is not stored
                sizes = [self.varint(place, end)[0] for n, w, place, _ in self.fields(at, end) if (n, w) == (1, VARINT)]
                yield sizes[-1] if sizes else 0
