"""Tar and zip files, checked before anything of them is used: the one place that opens archives.

`tar_members` and `zip_members` find what lies where, also in a tar within a tar; `extract` fills a folder.
Names, kinds and sizes come from strangers: nothing is written or allocated because a header says so.
"""

from __future__ import annotations

import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, NoReturn, Protocol

from sightline.data.progress import Progress
from sightline.data.whole_files import check_room, folder_below, written_whole
from sightline.errors import BadData

BLOCK = 512  # of a tar file
_CHUNK = 1 << 20
_MAX_NAME_BYTES = 1024
_MAX_PART_BYTES = 255  # of a name between two slashes: what file systems take
_MAX_EXTENDED_BYTES = 64 * 1024  # of one pax or GNU header; a name and a few times are some hundred
_MAX_ZIP_DIRECTORY = 64 * 2**20  # COCO's 118,000 pictures take 13 MB; it is read whole
_ZIP_RATIO_MATTERS_FROM = 2**20  # bytes: a small text may well shrink a thousandfold

_REGULAR, _FOLDER, _EXTENDED = (b"0", b"\0", b"7"), b"5", (b"x", b"g", b"L", b"K")
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
    """What an archive may hold at most."""

    members: int = 500_000
    """Files and folders; COCO's largest archive has 123,000."""
    member_bytes: int = 16 * 2**30
    """Of one file."""
    zip_ratio: int = 200
    """Bytes that one byte of a zip may become; deflate reaches 1032, pictures 1 and annotations 10."""


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


def tar_members(
    file: BinaryIO, archive: str, limits: Limits = DEFAULT_LIMITS, start: int = 0, end: int | None = None
) -> Iterator[Member]:
    """The files of an uncompressed tar in `file` (or in its bytes start..end), in order; `archive` is for messages."""
    end = os.fstat(file.fileno()).st_size if end is None else end
    names: set[str] = set()
    position, count, extended = start, 0, _Extended()
    while True:
        header = _read_at(file, position, BLOCK)
        if position + BLOCK > end or len(header) < BLOCK:
            _refuse(archive, f"ends at byte {position} without its end marker, it was cut off; fetch it again")
        if header == bytes(BLOCK):
            return
        _check_sum(header, archive, position)
        kind = header[156:157]
        size = _number(header[124:136], archive, position)
        if extended.size is not None and kind not in _EXTENDED:
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
        count += 1
        if count > limits.members:
            _refuse(archive, f"holds more than the {limits.members} files allowed; check where it is from")
        name = clean_name(extended.path or _ustar_name(header), archive)
        extended = _Extended()
        if kind == _FOLDER or (kind == b"\0" and header[:100].rstrip(b"\0").endswith(b"/")):
            continue
        if kind not in _REGULAR:
            what = _KINDS.get(kind, f"an entry of unknown kind {kind!r}")
            _refuse(archive, f"'{name}' is {what}; only files and folders are unpacked, make the archive without it")
        _check_new(name, names, size, archive, limits)
        yield Member(name, data, size)


def extract(
    path: Path, target: Path, progress: Progress = lambda what, done, total: None, limits: Limits = DEFAULT_LIMITS
) -> int:
    """Writes the files of a tar or zip below `target`; all headers are checked first. Returns how many there are.

    Each file gets its name when it is whole, in the place of one that was there.
    """
    with _open_checked(path) as file:
        if _is_zip(file):
            with _open_zip(file, path) as packed:
                infos = _zip_members(packed, path, limits)
                members = [Member(clean_name(info.filename, str(path)), 0, info.file_size) for info in infos]
                streams: Iterator[_Readable] = (packed.open(info) for info in infos)
                return _write_all(members, streams, path, target, progress)
        _refuse_compressed(file, path)
        members = list(tar_members(file, str(path), limits))
        return _write_all(members, (_Slice(file, m) for m in members), path, target, progress)


def read_member(file: BinaryIO, member: Member, archive: str) -> bytes:
    """The bytes of a file of a tar."""
    data = _read_at(file, member.offset, member.size)
    if len(data) < member.size:
        _refuse(archive, f"ends inside '{member.name}'; it has changed since it was listed, fetch it again")
    return data


def zip_members(path: Path, limits: Limits = DEFAULT_LIMITS) -> list[Packed]:
    """The files of a zip, to be read in any order by `packed_chunks`."""
    with _open_checked(path) as file:
        if not _is_zip(file):
            _refuse(str(path), "is no zip file; fetch it again")
        with _open_zip(file, path) as packed:
            infos = _zip_members(packed, path, limits)
    names = (clean_name(info.filename, str(path)) for info in infos)
    return [
        Packed(name, i.header_offset, i.compress_size, i.file_size, i.CRC, i.compress_type == zipfile.ZIP_DEFLATED)
        for name, i in zip(names, infos, strict=True)
    ]


def packed_chunks(file: BinaryIO, member: Packed, archive: str) -> Iterator[bytes]:
    """The bytes of a file of a zip, about a megabyte at a time; BadArchive if they are not what the zip's list says."""
    header = _read_at(file, member.offset, 30)
    if len(header) < 30 or not header.startswith(b"PK\x03\x04"):
        _refuse(archive, f"'{member.name}' is not where its list says; it is damaged, fetch it again")
    begin = member.offset + 30 + sum(struct.unpack("<HH", header[26:]))
    stored = _Slice(file, Member(member.name, begin, member.stored))
    chunks = iter(lambda: stored.read(_CHUNK), b"")
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
    """A member's name as a relative path of plain parts, or BadArchive: nothing may be written outside of a folder."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    reason = ""
    if name.startswith("/") or (len(name) > 1 and name[1] == ":"):
        reason = "is an absolute path"
    elif ".." in parts:
        reason = "leads out of its folder"
    elif any(ord(letter) < 32 or letter in "\\\x7f" for letter in name):
        reason = "holds a control character or a backslash"
    elif len(os.fsencode(name)) > _MAX_NAME_BYTES or any(len(os.fsencode(part)) > _MAX_PART_BYTES for part in parts):
        reason = f"is longer than {_MAX_PART_BYTES} bytes a part or {_MAX_NAME_BYTES} in all"
    elif not parts and name not in (".", "./"):
        reason = "is no name"
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
    """What pax and GNU headers say of the next file."""

    path: str | None = None
    size: int | None = None

    def and_more(self, file: BinaryIO, kind: bytes, offset: int, size: int, archive: str) -> _Extended:
        if size > _MAX_EXTENDED_BYTES:
            _refuse(
                archive, f"a header of {size} bytes at byte {offset}, {_MAX_EXTENDED_BYTES} are allowed; it is damaged"
            )
        text = _read_at(file, offset, size)
        if kind == b"K":  # the target of a link, which is refused when it comes
            return self
        if kind == b"L":
            return _Extended(os.fsdecode(text.rstrip(b"\0")), self.size)
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
        return _Extended(records.get("path", self.path), int(length) if length else self.size)


def _pax_records(text: bytes, archive: str, offset: int) -> dict[str, str]:
    """`LENGTH KEY=VALUE\\n` records."""
    records = {}
    while text:
        digits, _, _ = text[:20].partition(b" ")
        length = int(digits) if digits.isdigit() else 0
        record = text[len(digits) + 1 : length]
        key, equals, value = record.partition(b"=")
        if length <= len(digits) + 1 or length > len(text) or not equals or not value.endswith(b"\n"):
            _refuse(archive, f"the extended header at byte {offset} cannot be read; it is damaged, fetch it again")
        records[os.fsdecode(key)] = os.fsdecode(value[:-1])
        text = text[length:]
    return records


def _check_sum(header: bytes, archive: str, position: int) -> None:
    field = header[148:156].replace(b"\0", b" ").strip()
    blank = header[:148] + b" " * 8 + header[156:]
    signed = sum(struct.unpack("512b", blank))  # as some writers of the eighties did
    if not field or any(c not in b"01234567" for c in field) or int(field, 8) not in (sum(blank), signed):
        _refuse(archive, f"at byte {position} there is no tar header; it is damaged or no tar file, fetch it again")


def _number(field: bytes, archive: str, position: int) -> int:
    if field[0] & 0x80:  # GNU's form for what eleven octal digits cannot say
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big") if field[0] == 0x80 else -1
    digits = field.replace(b"\0", b" ").strip()
    if any(c not in b"01234567" for c in digits):
        _refuse(archive, f"the size in the header at byte {position} is {digits!r}; it is damaged, fetch it again")
    return int(digits or b"0", 8)


def _ustar_name(header: bytes) -> str:
    name, prefix = header[:100].split(b"\0", 1)[0], header[345:500].split(b"\0", 1)[0]
    is_posix = header[257:263] == b"ustar\0"  # GNU puts times where POSIX puts the prefix
    return os.fsdecode(prefix + b"/" + name if is_posix and prefix else name)


def _read_at(file: BinaryIO, offset: int, size: int) -> bytes:
    return os.pread(file.fileno(), size, offset)


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...

    def close(self) -> None: ...


class _Slice:
    """The bytes of one file of a tar, to be read in chunks."""

    def __init__(self, file: BinaryIO, member: Member):
        self._file, self._at, self._end = file, member.offset, member.offset + member.size

    def read(self, size: int) -> bytes:
        chunk = _read_at(self._file, self._at, min(size, self._end - self._at))
        self._at += len(chunk)
        return chunk

    def close(self) -> None:
        """Nothing is held: the archive stays open for the next file."""


# Zip.


def _is_zip(file: BinaryIO) -> bool:
    return _read_at(file, 0, 4) in (b"PK\x03\x04", b"PK\x05\x06")


@contextmanager
def _open_zip(file: BinaryIO, path: Path) -> Iterator[zipfile.ZipFile]:
    _check_zip_directory(file, path)
    try:
        with zipfile.ZipFile(file) as packed:
            yield packed
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, ValueError, struct.error) as error:
        _refuse(str(path), f"{str(error) or type(error).__name__}; it is damaged, fetch it again")


def _check_zip_directory(file: BinaryIO, path: Path) -> None:
    """zipfile reads the list of files whole; here its length is known before."""
    size = os.fstat(file.fileno()).st_size
    tail = _read_at(file, max(0, size - 66_000), 66_000)
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or at + 22 > len(tail):
        _refuse(str(path), "a zip without its list of files: it was cut off; fetch it again")
    length = int.from_bytes(tail[at + 12 : at + 16], "little")
    wide = tail.rfind(b"PK\x06\x06", 0, at)
    if length == 0xFFFFFFFF and wide >= 0:
        length = int.from_bytes(tail[wide + 40 : wide + 48], "little")
    if length > min(size, _MAX_ZIP_DIRECTORY):
        _refuse(str(path), f"a zip whose list of files claims {length} bytes; check where it is from")


def _zip_members(packed: zipfile.ZipFile, path: Path, limits: Limits) -> list[zipfile.ZipInfo]:
    archive, names = str(path), set[str]()
    infos = packed.infolist()
    if len(infos) > limits.members:
        _refuse(archive, f"holds {len(infos)} files, more than the {limits.members} allowed; check where it is from")
    files = []
    for info in infos:
        name = clean_name(info.orig_filename, archive)
        kind = stat.S_IFMT(info.external_attr >> 16)
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            _refuse(archive, f"'{name}' is a link or a device; only files and folders are unpacked")
        if info.is_dir():
            continue
        if info.flag_bits & 1:
            _refuse(archive, f"'{name}' is encrypted; unpack it by hand")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            _refuse(archive, f"'{name}' is packed by method {info.compress_type}; only stored and deflated are read")
        _check_new(name, names, info.file_size, archive, limits)
        if info.file_size > max(_ZIP_RATIO_MATTERS_FROM, limits.zip_ratio * info.compress_size):
            _refuse(
                archive,
                f"'{name}' grows from {info.compress_size} to {info.file_size} bytes, over {limits.zip_ratio}-fold; "
                "check where it is from",
            )
        files.append(info)
    _check_zip_whole(files, path, limits)
    return files


def _check_zip_whole(files: list[zipfile.ZipInfo], path: Path, limits: Limits) -> None:
    """Files that share packed bytes make terabytes of a few; honest ones lie side by side."""
    total, end, before = 0, 0, ""
    for info in sorted(files, key=lambda info: info.header_offset):
        if info.header_offset < end:
            _refuse(str(path), f"'{before}' and '{info.filename}' lie over each other; check where it is from")
        end, before = info.header_offset + 30 + info.compress_size, info.filename
        total += info.file_size
    size = path.stat().st_size
    if end > size:
        _refuse(str(path), f"'{before}' would end at byte {end} of {size}; it was cut off, fetch it again")
    if total > max(64 * _ZIP_RATIO_MATTERS_FROM, limits.zip_ratio * size):
        _refuse(str(path), f"its {size} bytes would become {total}; check where it is from")


# Files of archives, and files written.


@contextmanager
def _open_checked(path: Path) -> Iterator[BinaryIO]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise BadData(f"{path}: {error.strerror}; give the path of an archive that can be read") from error
    with file:
        yield file


def _refuse_compressed(file: BinaryIO, path: Path) -> None:
    start = _read_at(file, 0, 6)
    for magic, tool in ((b"\x1f\x8b", "gunzip"), (b"BZh", "bunzip2"), (b"\xfd7zXZ", "unxz"), (b"(\xb5/\xfd", "unzstd")):
        if start.startswith(magic):
            _refuse(str(path), f"is compressed; run `{tool}` on it first, a plain tar or a zip is read")


def _write_all(
    members: list[Member], streams: Iterator[_Readable], path: Path, target: Path, progress: Progress
) -> int:
    check_room(target, sum(member.size for member in members), f"unpacking {path.name}")
    target.mkdir(parents=True, exist_ok=True)
    for done, (member, stream) in enumerate(zip(members, streams, strict=True), start=1):
        try:
            with folder_below(target, member.name) as (folder, name):
                _write_one(folder, name, stream, member, path)
        finally:
            stream.close()
        progress(f"unpacking {path.name}", done, len(members))
    return len(members)


def _write_one(folder: int, name: str, stream: _Readable, member: Member, path: Path) -> None:
    written = 0
    with written_whole(folder, name, f"{path}: '{member.name}'") as out:
        while chunk := stream.read(_CHUNK):
            written += len(chunk)
            if written > member.size:
                _refuse(str(path), f"'{member.name}' holds more than the {member.size} bytes it claims; fetch it again")
            out.write(chunk)
        if written < member.size:
            _refuse(str(path), f"'{member.name}' holds {written} of the {member.size} bytes it claims; fetch it again")
