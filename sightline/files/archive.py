"""Tar and zip files, checked before anything of them is used: the one place that opens archives.

`tar_members` and `zip_members` find what lies where, also in a tar within a tar; `extract` fills a folder.
`tar_entries` is for readers that look for some files and step over the rest.
Names, kinds and sizes come from strangers: nothing is written or allocated because a header says so.
"""

from __future__ import annotations

import os
import re
import stat
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, NoReturn

from sightline.errors import BadData
from sightline.files.positioned import read_at
from sightline.files.whole import check_room, written_whole
from sightline.terminal.progress import Progress

BLOCK = 512  # of a tar file
_CHUNK = 1 << 20
_MAX_NAME_BYTES = 1024
_MAX_PART_BYTES = 255  # of a name between two slashes: what file systems take
_MAX_EXTENDED_BYTES = 2**20  # of one pax or GNU header; a name and a few times are some hundred
_MAX_ZIP_DIRECTORY = 64 * 2**20  # COCO's 118,000 images take 13 MB; it is read whole
_CONTROL = re.compile(r"[\x00-\x1f\x7f\\]")
_HALF = re.compile("[\ud800-\udc7f\udd00-\udfff]")  # the surrogates in between stand for bytes that are not text
_STORED, _DEFLATED = 0, 8  # methods of a zip
_ZIP_RATIO_MATTERS_FROM = 2**20  # bytes: a small text may well shrink a thousandfold

REGULAR = (b"0", b"\0", b"7")  # kinds of entries of a tar that are files
_WITHOUT_DATA = (b"1", b"2", b"3", b"4", b"5", b"6")  # whatever their headers say of a size
_EXTENDED = (b"x", b"g", b"L", b"K")
_KINDS = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a character device",
    b"4": "a block device",
    b"6": "a pipe",
    b"S": "a sparse file",
}


@dataclass(frozen=True)
class Limits:
    """The most that an archive may hold."""

    members: int = 500_000
    """Files and folders; COCO's largest archive has 123,000."""
    member_bytes: int = 16 * 2**30
    """Bytes of one file."""
    zip_ratio: int = 200
    """Bytes that one byte of a zip may become; deflate reaches 1032, images 1 and annotations 10."""


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True)
class Member:
    """A file in an archive: its clean relative name, where its bytes start (in the archive file) and how many."""

    name: str
    offset: int
    size: int


class Packed(NamedTuple):
    """A file in a zip: its clean name, where its own header starts, its bytes as stored and unpacked, its CRC-32."""

    name: str
    offset: int
    stored: int
    size: int
    crc: int
    is_deflated: bool


class BadArchive(BadData):
    """An archive that is damaged or hostile; nothing of it is trusted."""


class Entry(NamedTuple):
    """One header of a tar as it stands there; only the place was checked."""

    name: str
    kind: bytes
    offset: int
    size: int
    header: bytes  # the block before its bytes

    @property
    def is_folder(self) -> bool:
        """Return whether it is a folder, also as tar wrote them before there were kinds."""
        return self.kind == b"5" or (self.kind == b"\0" and self.name.endswith("/"))


def tar_entries(file: BinaryIO, archive: str, start: int = 0, end: int | None = None) -> Iterator[Entry]:
    """Yield all entries of an uncompressed tar in `file` (or in its bytes start..end), in order, links and devices too;
    `archive` is for messages. Reads headers alone; any bytes end as entries or as BadArchive."""
    end = os.fstat(file.fileno()).st_size if end is None else end
    _refuse_compressed(file, archive, start)
    position, extended = start, _Extended()
    while True:
        header = read_at(file.fileno(), max(0, min(BLOCK, end - position)), position)
        if header and header.count(0) == len(header):
            _check_end(file, archive, position, end)
            return
        if len(header) < BLOCK:
            _refuse(archive, f"ends at byte {position} without its end marker, it was cut off; fetch it again")
        _check_sum(header, archive, position)
        kind = header[156:157]
        size = 0 if kind in _WITHOUT_DATA else _number(header[124:136], archive, position)
        if extended.size is not None and kind not in (*_EXTENDED, *_WITHOUT_DATA):
            size = extended.size
        data, position = position + BLOCK, position + BLOCK + -(-size // BLOCK) * BLOCK
        if size < 0 or data + size > end:
            _refuse(
                archive,
                f"a file of {size} bytes begins at byte {data - BLOCK} of {end}; it was cut off, fetch it again",
            )
        if kind in _EXTENDED:
            extended = extended.and_more(file, kind, data, size, archive)
            continue
        if kind == b"S":  # what lies behind its header has no size of its own
            _refuse(archive, f"'{_ustar_name(header)}' is a sparse file; make the archive without --sparse")
        yield Entry(extended.path or _ustar_name(header), kind, data, size, header)
        extended = _Extended()


def tar_members(
    file: BinaryIO, archive: str, limits: Limits = DEFAULT_LIMITS, start: int = 0, end: int | None = None
) -> Iterator[Member]:
    """Yield the files of an uncompressed tar in `file` (or in its bytes start..end), in order; anything but files and
    folders with clean names of their own is refused."""
    names: set[str] = set()
    for count, entry in enumerate(tar_entries(file, archive, start, end), start=1):
        if count > limits.members:
            _refuse(archive, f"holds more than the {limits.members} files allowed; check where it is from")
        name = clean_name(entry.name, archive)
        if entry.is_folder:
            continue
        if entry.kind not in REGULAR:
            what = _KINDS.get(entry.kind, f"an entry of unknown kind {entry.kind!r}")
            _refuse(archive, f"'{name}' is {what}; only files and folders are unpacked, make the archive without it")
        _check_new(name, names, entry.size, archive, limits)
        yield Member(name, entry.offset, entry.size)


def extract(
    path: Path, target: Path, progress: Progress = lambda what, done, total: None, limits: Limits = DEFAULT_LIMITS
) -> int:
    """Write the files of a tar or zip below `target`; all headers are checked first. Return how many there are.

    Each file gets its name when it is whole, in the place of one that was there.
    """
    with _open_checked(path) as file:
        if _is_zip(file):
            packed = _zip_members(file, str(path), limits)
            members = [Member(each.name, each.offset, each.size) for each in packed]
            return _write_all(members, (packed_chunks(file, p, str(path)) for p in packed), path, target, progress)
        members = list(tar_members(file, str(path), limits))
        return _write_all(members, (_chunks(file, m.offset, m.size) for m in members), path, target, progress)


def read_member(file: BinaryIO, member: Member, archive: str) -> bytes:
    """Return the bytes of a file of a tar."""
    data = read_at(file.fileno(), member.size, member.offset)
    if len(data) < member.size:
        _refuse(archive, f"ends inside '{member.name}'; it has changed since it was listed, fetch it again")
    return data


def zip_members(path: Path, limits: Limits = DEFAULT_LIMITS) -> list[Packed]:
    """Return the files of a zip, to be read in any order by `packed_chunks`."""
    with _open_checked(path) as file:
        if not _is_zip(file):
            _refuse(str(path), "is not a zip file; fetch it again")
        return _zip_members(file, str(path), limits)


def packed_chunks(file: BinaryIO, member: Packed, archive: str) -> Iterator[bytes]:
    """Yield the bytes of a file of a zip, about a megabyte at a time; BadArchive if they are not what the zip's list
    says."""
    header = read_at(file.fileno(), 30, member.offset)
    if len(header) < 30 or not header.startswith(b"PK\x03\x04"):
        _refuse(archive, f"'{member.name}' is not where its list says; it is damaged, fetch it again")
    begin = member.offset + 30 + sum(struct.unpack("<HH", header[26:]))
    chunks = _chunks(file, begin, member.stored)
    size = crc = 0
    try:
        for chunk in _inflated(chunks) if member.is_deflated else chunks:
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
            if size > member.size:
                break
            yield chunk
    except zlib.error as error:
        _refuse(archive, f"'{member.name}' cannot be unpacked ({error}); it is damaged, fetch it again")
    if size != member.size or crc != member.crc:
        _refuse(archive, f"'{member.name}' is not the {member.size} bytes its list says; it is damaged, fetch it again")


def _inflated(stored: Iterator[bytes]) -> Iterator[bytes]:
    unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
    for chunk in stored:
        while chunk:
            yield unpacker.decompress(chunk, _CHUNK)
            chunk = unpacker.unconsumed_tail
    yield unpacker.flush()


def clean_name(name: str, archive: str) -> str:
    """Return a member's name as a relative path of plain parts, or BadArchive: nothing may be written outside of a
    folder."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    reason = ""
    if name.startswith("/") or (len(name) > 1 and name[1] == ":"):
        reason = "is an absolute path"
    elif ".." in parts:
        reason = "leads out of its folder"
    elif _CONTROL.search(name):
        reason = "holds a control character or a backslash"
    elif _HALF.search(name):
        reason = "holds half a character, which JSON can spell and no file name can hold"
    elif len(os.fsencode(name)) > _MAX_NAME_BYTES or any(len(os.fsencode(part)) > _MAX_PART_BYTES for part in parts):
        reason = f"is longer than {_MAX_PART_BYTES} bytes a part or {_MAX_NAME_BYTES} in all"
    elif not parts and name not in (".", "./"):
        reason = "is not a name"
    if reason:
        _refuse(archive, f"the name {name[:200]!r} {reason}; nothing is written under it, check where it is from")
    return "/".join(parts)


def _refuse(archive: str, reason: str) -> NoReturn:
    raise BadArchive(f"{archive}: {reason}")


def _check_new(name: str, names: set[str], size: int, archive: str, limits: Limits) -> None:
    if not name:
        _refuse(archive, "holds a file without a name; check where it is from")
    if name in names:
        _refuse(archive, f"'{name}' is in it twice, the second would overwrite the first; check where it is from")
    if size > limits.member_bytes:
        _refuse(archive, f"'{name}' has {size} bytes, more than the {limits.member_bytes} allowed; unpack it by hand")
    names.add(name)


# Tar headers.


@dataclass(frozen=True)
class _Extended:
    """The claims of pax and GNU headers about the next file."""

    path: str | None = None
    size: int | None = None

    def and_more(self, file: BinaryIO, kind: bytes, offset: int, size: int, archive: str) -> _Extended:
        if size > _MAX_EXTENDED_BYTES:
            _refuse(
                archive, f"a header of {size} bytes at byte {offset}, {_MAX_EXTENDED_BYTES} are allowed; it is damaged"
            )
        text = read_at(file.fileno(), size, offset)
        if kind == b"K":  # the target of a link, which is refused when it comes
            return self
        if kind == b"L":
            return _Extended(os.fsdecode(text.partition(b"\0")[0]), self.size)
        records = _pax_records(text, archive, offset)
        if kind == b"g" and records.keys() & {"path", "size"}:
            _refuse(archive, f"the header at byte {offset} gives all files one name or size; it is damaged")
        if any(key.startswith("GNU.sparse") for key in records):
            _refuse(archive, "holds a sparse file; make the archive without --sparse")
        length = records.get("size")
        if length is not None and not (length.isascii() and length.isdecimal() and len(length) < 20):
            _refuse(
                archive, f"the header at byte {offset} gives {length[:40]!r} as size; it is damaged, fetch it again"
            )
        path = records["path"].rstrip("/") if "path" in records else self.path
        return _Extended(path, int(length) if length else self.size)


def _pax_records(text: bytes, archive: str, offset: int) -> dict[str, str]:
    """Read `LENGTH KEY=VALUE\\n` records."""
    records, at = {}, 0
    while at < len(text):
        digits, _, _ = text[at : at + 20].partition(b" ")
        length = int(digits) if digits.isdigit() else 0
        record = text[at + len(digits) + 1 : at + length]
        key, equals, value = record.partition(b"=")
        if length <= len(digits) + 1 or at + length > len(text) or not equals or not value.endswith(b"\n"):
            _refuse(archive, f"the extended header at byte {offset} cannot be read; it is damaged, fetch it again")
        records[os.fsdecode(key)] = os.fsdecode(value[:-1])
        at += length
    return records


def _check_sum(header: bytes, archive: str, position: int) -> None:
    field = header[148:156].replace(b"\0", b" ").strip()
    stored = int(field, 8) if field and not field.strip(b"01234567") else -1
    if stored != sum(header) - sum(header[148:156]) + 8 * 32:
        signed = sum(struct.unpack("512b", header[:148] + b" " * 8 + header[156:]))  # by some writers of the eighties
        if stored != signed:
            _refuse(archive, f"at byte {position} there is no tar header; it is damaged or not a tar, fetch it again")


def _check_end(file: BinaryIO, archive: str, position: int, end: int) -> None:
    """Refuse an end that is not zeros up to the end, of which we look at a megabyte."""
    if read_at(file.fileno(), min(_CHUNK, end - position), position).strip(b"\0"):
        _refuse(archive, f"holds more behind its end at byte {position}: several tars in one file; pack it again")


def _number(field: bytes, archive: str, position: int) -> int:
    if field[0] & 0x80:  # GNU's form for what eleven octal digits cannot say
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big") if field[0] == 0x80 else -1
    digits = field.replace(b"\0", b" ").strip()
    if any(c not in b"01234567" for c in digits):
        _refuse(archive, f"the size in the header at byte {position} is {digits!r}; it is damaged, fetch it again")
    return int(digits or b"0", 8)


def _ustar_name(header: bytes) -> str:
    name, prefix = header[:100].partition(b"\0")[0], header[345:500].partition(b"\0")[0]
    is_posix = header[257:263] == b"ustar\0"  # GNU puts times where POSIX puts the prefix
    return os.fsdecode(prefix + b"/" + name if is_posix and prefix else name)


def _chunks(file: BinaryIO, offset: int, size: int) -> Iterator[bytes]:
    """Yield the bytes of one file of an archive, about a megabyte at a time; fewer where the archive ends."""
    end = offset + size
    while offset < end and (chunk := read_at(file.fileno(), min(_CHUNK, end - offset), offset)):
        offset += len(chunk)
        yield chunk


# Zip.


def _is_zip(file: BinaryIO) -> bool:
    return read_at(file.fileno(), 4, 0) in (b"PK\x03\x04", b"PK\x05\x06")


def _zip_directory(file: BinaryIO, archive: str) -> bytes:
    """Return the list of files at the end of a zip. Where two records give its length, zip64's holds, as for any
    reader."""
    size = os.fstat(file.fileno()).st_size
    tail = read_at(file.fileno(), 66_000, max(0, size - 66_000))
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or at + 22 > len(tail):
        _refuse(archive, "a zip without its list of files: it was cut off; fetch it again")
    length, offset = struct.unpack_from("<II", tail, at + 12)
    end = size - len(tail) + at
    locator = tail[max(0, at - 20) : at]
    if locator.startswith(b"PK\x06\x07"):
        end = int.from_bytes(locator[8:16], "little")
        wide = read_at(file.fileno(), 56, end) if end < size else b""
        if len(wide) < 56 or not wide.startswith(b"PK\x06\x06"):
            _refuse(archive, f"a zip whose list of files is not described at byte {end}; it is damaged, fetch it again")
        length, offset = struct.unpack_from("<QQ", wide, 40)
    if length > _MAX_ZIP_DIRECTORY or offset + length > end:
        _refuse(archive, f"a zip whose list of files claims {length} bytes at byte {offset}; check where it is from")
    return read_at(file.fileno(), length, offset)


class _Listed(NamedTuple):
    """An entry of the list of files of a zip."""

    packed: Packed  # its name as it stands there
    flags: int
    method: int
    mode: int  # of a file on Unix


def _zip_entries(file: BinaryIO, archive: str) -> Iterator[_Listed]:
    directory, at = _zip_directory(file, archive), 0
    while at < len(directory):
        if directory[at : at + 4] != b"PK\x01\x02" or at + 46 > len(directory):
            _refuse(archive, f"its list of files is damaged at byte {at}; fetch it again")
        flags, method, crc, stored, size = struct.unpack_from("<HH4xIII", directory, at + 8)
        name_bytes, extra_bytes, comment_bytes = struct.unpack_from("<HHH", directory, at + 28)
        attributes, offset = struct.unpack_from("<II", directory, at + 38)
        extra = at + 46 + name_bytes
        raw, at = directory[at + 46 : extra], extra + extra_bytes + comment_bytes
        if at > len(directory):
            _refuse(archive, "its list of files was cut off; fetch it again")
        wide = iter(_zip64_numbers(directory[extra : extra + extra_bytes]))
        numbers = [next(wide, n) if n == 0xFFFFFFFF else n for n in (size, stored, offset)]
        try:
            name = raw.decode("utf-8" if flags & 0x800 else "cp437")
        except UnicodeDecodeError:
            _refuse(archive, f"the name {raw[:200]!r} is not text; it is damaged, fetch it again")
        packed = Packed(name, numbers[2], numbers[1], numbers[0], crc, method == _DEFLATED)
        yield _Listed(packed, flags, method, attributes >> 16)


def _zip64_numbers(extra: bytes) -> tuple[int, ...]:
    """Return the numbers that 32 bits cannot hold, in the order of an entry's own."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            body = extra[at + 4 : at + 4 + length]
            return struct.unpack_from(f"<{len(body) // 8}Q", body)
        at += 4 + length
    return ()


def _zip_members(file: BinaryIO, archive: str, limits: Limits) -> list[Packed]:
    names = set[str]()
    files = []
    for count, (packed, flags, method, mode) in enumerate(_zip_entries(file, archive), start=1):
        if count > limits.members:
            _refuse(archive, f"holds more than the {limits.members} files allowed; check where it is from")
        name = clean_name(packed.name, archive)
        if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
            _refuse(archive, f"'{name}' is a link or a device; only files and folders are unpacked")
        if packed.name.endswith("/"):
            continue
        if flags & 0x61:  # encrypted, weakly or strongly, or a patch of another file
            _refuse(archive, f"'{name}' is encrypted; unpack it by hand")
        if method not in (_STORED, _DEFLATED):
            _refuse(archive, f"'{name}' is packed by method {method}; only stored and deflated are read")
        _check_new(name, names, packed.size, archive, limits)
        if packed.size > max(_ZIP_RATIO_MATTERS_FROM, limits.zip_ratio * packed.stored):
            _refuse(
                archive,
                f"'{name}' grows from {packed.stored} to {packed.size} bytes, over {limits.zip_ratio}-fold; "
                "check where it is from",
            )
        files.append(packed._replace(name=name))
    _check_zip_whole(files, archive, os.fstat(file.fileno()).st_size, limits)
    return files


def _check_zip_whole(files: list[Packed], archive: str, size: int, limits: Limits) -> None:
    """Refuse files that share packed bytes, which make terabytes of a few; honest ones lie side by side."""
    total, end, before = 0, 0, ""
    for packed in sorted(files, key=lambda packed: packed.offset):
        if packed.offset < end:
            _refuse(archive, f"'{before}' and '{packed.name}' lie over each other; check where it is from")
        end, before = packed.offset + 30 + packed.stored, packed.name
        total += packed.size
    if end > size:
        _refuse(archive, f"'{before}' would end at byte {end} of {size}; it was cut off, fetch it again")
    if total > max(64 * _ZIP_RATIO_MATTERS_FROM, limits.zip_ratio * size):
        _refuse(archive, f"its {size} bytes would become {total}; check where it is from")


# Files of archives, and files written.


@contextmanager
def _open_checked(path: Path) -> Iterator[BinaryIO]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise BadData(f"{path}: {error.strerror}; give the path of an archive that can be read") from error
    with file:
        yield file


def _refuse_compressed(file: BinaryIO, archive: str, start: int) -> None:
    begin = read_at(file.fileno(), 6, start)
    for magic, tool in ((b"\x1f\x8b", "gunzip"), (b"BZh", "bunzip2"), (b"\xfd7zXZ", "unxz"), (b"(\xb5/\xfd", "unzstd")):
        if begin.startswith(magic):
            _refuse(archive, f"is compressed; run `{tool}` on it first, a plain tar or a zip is read")


def _write_all(
    members: list[Member], contents: Iterator[Iterator[bytes]], path: Path, target: Path, progress: Progress
) -> int:
    check_room(target, sum(member.size for member in members), f"unpacking {path.name}")
    target.mkdir(parents=True, exist_ok=True)
    for done, (member, chunks) in enumerate(zip(members, contents, strict=True), start=1):
        _write_one(target, chunks, member, path)
        progress(f"unpacking {path.name}", done, len(members))
    return len(members)


def _write_one(target: Path, chunks: Iterator[bytes], member: Member, path: Path) -> None:
    written = 0
    with written_whole(target, member.name, f"{path}: '{member.name}'") as out:
        for chunk in chunks:
            written += len(chunk)
            out.write(chunk)
        if written < member.size:
            _refuse(str(path), f"'{member.name}' holds {written} of the {member.size} bytes it claims; fetch it again")
