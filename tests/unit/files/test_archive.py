"""Archives: honest ones as Python's own tarfile and zipfile write them, hostile ones made by hand (B5: 25)."""

import contextlib
import io
import json
import os
import resource
import shutil
import struct
import tarfile
import tracemalloc
import zipfile
from collections import namedtuple
from pathlib import Path

import pytest

from sightline.errors import BadData, DiskFull
from sightline.files import archive
from sightline.files.archive import (
    BadArchive,
    Limits,
    Member,
    clean_name,
    extract,
    packed_chunks,
    read_member,
    tar_entries,
    tar_members,
    zip_members,
)

FILES = {
    "a.txt": b"one",
    "deep/er/b.bin": bytes(range(256)) * 9,
    "empty": b"",
    "n" * 120 + "/" + "m" * 130 + ".txt": b"a name that needs an extended header",
    "unicode/ümläut-中.txt": b"two",
}


def tar_bytes(files: dict[str, bytes], form: int = tarfile.GNU_FORMAT, change=lambda info: None) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            change(info)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def written(tmp_path: Path, data: bytes, name: str = "some.tar") -> Path:
    path = tmp_path / name
    path.write_bytes(data)
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() or p.is_symlink()}


def with_header(name: bytes, kind: bytes = b"0", size: bytes = b"00000000003\0", link: bytes = b"") -> bytes:
    """One member by hand: fields that tarfile would not write."""
    header = bytearray(512)
    header[: len(name)] = name
    header[100:108], header[108:116], header[116:124] = b"0000644\0", b"0000000\0", b"0000000\0"
    header[124:136], header[136:148], header[156:157] = size, b"00000000000\0", kind
    header[157 : 157 + len(link)] = link
    header[257:265] = b"ustar\x0000"
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + b"abc".ljust(512, b"\0") + bytes(1024)


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT], ids=["gnu", "pax"])
def test_tar_is_listed_read_and_unpacked(tmp_path, form):
    path = written(tmp_path, tar_bytes(FILES, form))
    with path.open("rb") as file:
        members = list(tar_members(file, str(path)))
        assert {m.name: read_member(file, m, str(path)) for m in members} == FILES
    shown = []
    assert extract(path, tmp_path / "out", lambda *what: shown.append(what)) == len(FILES)
    assert contents(tmp_path / "out") == FILES
    assert shown[-1] == ("unpacking some.tar", len(FILES), len(FILES))


def test_ustar_prefix_and_folders(tmp_path):
    name = "p" * 90 + "/" + "q" * 60
    data = tar_bytes({name: b"x"}, tarfile.USTAR_FORMAT)
    folder = io.BytesIO()
    with tarfile.open(fileobj=folder, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        info = tarfile.TarInfo("./just/a/folder")
        info.type = tarfile.DIRTYPE
        tar.addfile(info)
    extract(written(tmp_path, data), tmp_path / "out")
    extract(written(tmp_path, folder.getvalue()), tmp_path / "out")
    assert contents(tmp_path / "out") == {name: b"x"}


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_entries_are_those_that_python_finds(tmp_path, form):
    """Names, kinds, places and sizes of everything, of links with a size and of long names too."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for number, kind in enumerate((b"0", b"5", b"1", b"2", b"7", b"0", b"6", b"3", b"\0", b"0")):
            info = tarfile.TarInfo(f"{'d' * 80}/{'e' * 40 * (number % 3)}ä{number}.jpg")
            info.type, info.linkname, info.size = kind, "target", 700 * number
            if form == tarfile.PAX_FORMAT and number == 5:
                info.pax_headers = {"LIBARCHIVE.xattr.user": "x" * 300_000, "comment": "a=b\nc"}
            tar.addfile(info, io.BytesIO(bytes([65 + number]) * 7000) if info.isreg() else None)
    path = written(tmp_path, out.getvalue())
    with tarfile.open(path) as tar, path.open("rb") as file:
        expected = [(m.name, m.type, m.offset_data, m.size if m.isreg() else 0) for m in tar]
        found = [(e.name.rstrip("/"), *e[1:4]) for e in tar_entries(file, "some.tar")]
    assert found == expected and len(found) == 10


def test_tar_in_a_tar_is_read_in_place(tmp_path):
    inner = tar_bytes({"x.JPEG": b"image", "y.JPEG": b"another"})
    path = written(tmp_path, tar_bytes({"first.tar": inner, "second.tar": tar_bytes({"z.JPEG": b"third"})}))
    with path.open("rb") as file:
        outer = list(tar_members(file, "outer"))
        found = {
            f"{tar.name}/{m.name}": read_member(file, m, "inner")
            for tar in outer
            for m in tar_members(file, "inner", start=tar.offset, end=tar.offset + tar.size)
        }
    assert found == {"first.tar/x.JPEG": b"image", "first.tar/y.JPEG": b"another", "second.tar/z.JPEG": b"third"}


def test_a_file_inside_a_tar_does_not_end_beyond_it(tmp_path):
    """The inner tar claims bytes of the outer one that lie behind it."""
    inner = with_header(b"x", size=b"00000010000\0")
    path = written(tmp_path, tar_bytes({"inner.tar": inner, "secret": b"s" * 9000}))
    with path.open("rb") as file:
        tar = next(tar_members(file, "outer"))
        with pytest.raises(BadArchive, match="inner: a file of 4096 bytes begins at byte 512 of"):
            list(tar_members(file, "inner", start=tar.offset, end=tar.offset + tar.size))


def test_large_sizes_in_both_forms(tmp_path):
    """9 GB in a sparse file: GNU's binary number and pax's decimal."""
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        info = tarfile.TarInfo("large")
        info.size = 9 * 2**30
        header = info.tobuf(form)
        path = written(tmp_path, header)
        os.truncate(path, len(header) + info.size + 1024)
        with path.open("rb") as file:
            assert list(tar_members(file, "large")) == [Member("large", len(header), info.size)]


HOSTILE_NAMES = {
    "../outside": "leads out of its folder",
    "a/../../outside": "leads out of its folder",
    "/etc/passwd": "is an absolute path",
    "C:/windows": "is an absolute path",
    "a\\..\\b": "control character or a backslash",
    "new\nline": "control character or a backslash",
    "x" * 256: "longer than 255",
    "/".join("x" * 9 for _ in range(200)): "or 1024 in all",
    "": "is not a name",
}


@pytest.mark.parametrize("name", HOSTILE_NAMES, ids=lambda name: name[:20])
def test_names_that_are_refused(tmp_path, name):
    with pytest.raises(BadArchive, match=HOSTILE_NAMES[name]) as error:
        clean_name(name, "some.tar")
    assert str(error.value).startswith("some.tar: the name ") and "check where it is from" in str(error.value)
    if name:
        data = tar_bytes({"good": b"1", name: b"2"}, tarfile.PAX_FORMAT)
        with pytest.raises(BadArchive):
            extract(written(tmp_path, data), tmp_path / "out")
        assert not (tmp_path / "out").exists(), "all names are looked at before anything is written"
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as zipped:
            zipped.writestr("good", b"1")
            zipped.writestr(name, b"2")
        with pytest.raises(BadArchive):
            extract(written(tmp_path, packed.getvalue(), "some.zip"), tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_half_a_character_is_not_a_name():
    with pytest.raises(BadArchive, match="holds half a character"):
        clean_name(json.loads('"a\\ud800"'), "dataset.json")
    assert clean_name("caf\udce9", "some.tar") == "caf\udce9"  # a byte that is not text


def test_plain_names_are_cleaned():
    assert clean_name("./a//b/./c", "t") == "a/b/c"
    assert clean_name("..a/b..", "t") == "..a/b.."


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (tarfile.SYMTYPE, "a symbolic link"),
        (tarfile.LNKTYPE, "a hard link"),
        (tarfile.CHRTYPE, "a character device"),
        (tarfile.BLKTYPE, "a block device"),
        (tarfile.FIFOTYPE, "a pipe"),
        (tarfile.GNUTYPE_SPARSE, "a sparse file"),
        (b"Z", "unknown kind"),
    ],
)
def test_links_and_devices_are_refused(tmp_path, kind, said):
    path = written(tmp_path, with_header(b"evil", kind, b"00000000000\0", b"/etc/passwd"))
    with pytest.raises(BadArchive, match=f"some.tar: 'evil' is .*{said}"):
        extract(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nul_in_a_pax_name(tmp_path):
    record = b"16 path=a\0.jpeg\n"
    assert len(record) == 16
    header = with_header(b"x", b"x", b"%011o\0" % len(record))[:512]
    path = written(tmp_path, header + record.ljust(512, b"\0") + with_header(b"plain"))
    with pytest.raises(BadArchive, match="control character"):
        extract(path, tmp_path / "out")


@pytest.mark.parametrize("record", [b"99 path=a\n", b"0 path=a\n", b"path=a\n", b"10 path a\n", b"9999999999999999999"])
def test_damaged_pax_records(tmp_path, record):
    header = with_header(b"x", b"x", b"%011o\0" % len(record))[:512]
    path = written(tmp_path, header + record.ljust(512, b"\0") + with_header(b"plain"))
    with pytest.raises(BadArchive, match="extended header at byte 512"):
        extract(path, tmp_path / "out")


@pytest.mark.parametrize("size", [b"1" * 40, b"-1", "²".encode()])
def test_absurd_pax_size(tmp_path, size):
    record = b"%d size=" % (9 + len(size)) + size + b"\n"
    record = b"%d size=" % len(record) + size + b"\n"
    header = with_header(b"x", b"x", b"%011o\0" % len(record))[:512]
    path = written(tmp_path, header + record.ljust(512, b"\0") + with_header(b"plain"))
    with pytest.raises(BadArchive, match="as size"):
        extract(path, tmp_path / "out")


def test_same_name_twice(tmp_path):
    data = tar_bytes({"a": b"1"})[:1024] + tar_bytes({"./a": b"2"})
    with pytest.raises(BadArchive, match="'a' is in it twice"):
        extract(written(tmp_path, data), tmp_path / "out")


@pytest.mark.parametrize("keep", [0, 100, 512, 700, 1024, 1536])
def test_cut_tar(tmp_path, keep):
    with pytest.raises(BadArchive, match="fetch it again"):
        extract(written(tmp_path, tar_bytes({"a": b"1", "b": b"2"})[:keep]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_every_flipped_header_byte_is_noticed_or_harmless(tmp_path):
    """No byte of a header can be changed without its checksum telling; blanks in the checksum field aside."""
    whole = bytearray(tar_bytes({"a": b"1"}))
    for at in range(512):
        if 148 <= at < 156:
            continue
        flipped = bytearray(whole)
        flipped[at] ^= 0x15
        with pytest.raises(BadArchive, match="no tar header"):
            extract(written(tmp_path, bytes(flipped)), tmp_path / "out")


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (b"77777777777\0", "a file of 8589934591 bytes begins"),
        (b"\x80" + bytes(2) + b"\xff" * 9, "a file of [0-9]+ bytes begins"),
        (b"\xff" * 12, "a file of -1 bytes begins"),
        (b"hello\0\0\0\0\0\0\0", "the size in the header at byte 0 is b'hello'"),
    ],
)
def test_absurd_sizes_allocate_nothing(tmp_path, size, said):
    for kind in (b"0", b"L", b"x"):
        path = written(tmp_path, with_header(b"big", kind, size))
        tracemalloc.start()
        with pytest.raises(BadArchive, match=said):
            extract(path, tmp_path / "out")
        assert tracemalloc.get_traced_memory()[1] < 2**20
        tracemalloc.stop()


def test_long_name_header_is_limited_even_when_the_file_could_hold_it(tmp_path):
    path = written(tmp_path, with_header(b"big", b"L", b"%011o\0" % (2**30)))
    os.truncate(path, 2**30 + 4096)
    tracemalloc.start()
    with pytest.raises(BadArchive, match="a header of 1073741824 bytes"):
        extract(path, tmp_path / "out")
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_limits(tmp_path):
    path = written(tmp_path, tar_bytes({str(i): b"12345" for i in range(20)}))
    with pytest.raises(BadArchive, match="more than the 19 files allowed"):
        extract(path, tmp_path / "out", limits=Limits(members=19))
    with pytest.raises(BadArchive, match="'0' has 5 bytes, more than the 4 allowed"):
        extract(path, tmp_path / "out", limits=Limits(member_bytes=4))
    assert extract(path, tmp_path / "out", limits=Limits(members=20, member_bytes=5)) == 20


def test_limits_of_a_zip(tmp_path):
    path = written(tmp_path, zip_bytes({str(i): b"12345" for i in range(20)}), "some.zip")
    assert len(zip_members(path, Limits(members=20, member_bytes=5))) == 20
    with pytest.raises(BadArchive, match="holds more than the 19 files allowed; check where it is from"):
        zip_members(path, Limits(members=19))
    with pytest.raises(BadArchive, match="'0' has 5 bytes, more than the 4 allowed; unpack it by hand"):
        zip_members(path, Limits(member_bytes=4))


def test_files_without_a_name_and_headers_for_all_files(tmp_path):
    for name in (".", "./"):
        with pytest.raises(BadArchive, match="holds a file without a name; check where it is from"):
            zip_members(written(tmp_path, zip_bytes({name.rstrip("/"): b"x"}), "some.zip"))
    for key in ("path", "size", "comment"):
        record = f" {key}=7\n"
        record = f"{len(record) + 2}{record}".encode()
        data = with_header(b"x", b"g", b"%011o\0" % len(record))[:512] + record.ljust(512, b"\0")
        path = written(tmp_path, data + tar_bytes({"a": b"1234567"}))
        if key == "comment":
            assert extract(path, tmp_path / "out") == 1
            continue
        with pytest.raises(BadArchive, match="the header at byte 512 gives all files one name or size; it is damaged"):
            extract(path, tmp_path / "out")


def test_a_link_in_the_target_is_not_followed(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "victim").write_text("mine")
    target = tmp_path / "out"
    target.mkdir()
    (target / "folder").symlink_to(outside)
    (target / "file").symlink_to(tmp_path / "victim")
    with pytest.raises(BadData, match="folder is a link or a file"):
        extract(written(tmp_path, tar_bytes({"folder/a": b"1"})), target)
    assert not list(outside.iterdir())
    extract(written(tmp_path, tar_bytes({"file": b"new"})), target)
    assert (target / "file").read_bytes() == b"new" and not (target / "file").is_symlink()
    assert (tmp_path / "victim").read_text() == "mine"


def test_file_in_the_place_of_a_folder(tmp_path):
    with pytest.raises(BadData, match="a is a link or a file"):
        extract(written(tmp_path, tar_bytes({"a": b"1", "a/b": b"2"})), tmp_path / "out")


@pytest.mark.parametrize(
    ("magic", "tool"), [(b"\x1f\x8b\x08", "gunzip"), (b"BZh9", "bunzip2"), (b"\xfd7zXZ\0", "unxz")]
)
def test_compressed_tars_are_named(tmp_path, magic, tool):
    with pytest.raises(BadArchive, match=f"run `{tool}` on it first"):
        extract(written(tmp_path, magic.ljust(600, b"\0")), tmp_path / "out")


def test_what_is_not_there(tmp_path):
    with pytest.raises(BadData, match="no.tar: No such file"):
        extract(tmp_path / "no.tar", tmp_path / "out")


# Zip


def zip_bytes(files: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED, change=lambda info: None) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as packed:
        for name, data in files.items():
            info = zipfile.ZipInfo(name)
            info.compress_type = method
            change(info)
            packed.writestr(info, data)
    return out.getvalue()


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_zip_is_unpacked(tmp_path, method):
    path = written(tmp_path, zip_bytes({**FILES, "folder/": b""}, method), "some.zip")
    assert extract(path, tmp_path / "out") == len(FILES)
    assert contents(tmp_path / "out") == FILES


def test_zip_links_are_refused(tmp_path):
    def link(info):
        info.external_attr = 0o120777 << 16

    with pytest.raises(BadArchive, match="'evil' is a link"):
        extract(written(tmp_path, zip_bytes({"evil": b"/etc/passwd"}, change=link), "some.zip"), tmp_path / "out")


def test_zip_bomb(tmp_path):
    path = written(tmp_path, zip_bytes({"zeros": bytes(50 * 2**20)}), "some.zip")
    with pytest.raises(BadArchive, match="'zeros' grows from .* to 52428800 bytes, over 200-fold"):
        extract(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert extract(path, tmp_path / "out", limits=Limits(zip_ratio=1100)) == 1


def test_zip_bomb_of_many_small_files(tmp_path):
    path = written(tmp_path, zip_bytes({str(i): bytes(2**20) for i in range(70)}), "some.zip")
    with pytest.raises(BadArchive, match="bytes would become 73400320"):
        extract(path, tmp_path / "out")


def test_zip_that_lies_about_its_size(tmp_path):
    """A bomb that claims to be small in both of its headers."""
    data = zip_bytes({"zeros": bytes(2 * 2**20)})
    true, false = struct.pack("<I", 2 * 2**20), struct.pack("<I", 5000)
    assert data.count(true) == 2
    with pytest.raises(BadArchive, match="fetch it again"):
        extract(written(tmp_path, data.replace(true, false), "some.zip"), tmp_path / "out")
    assert not contents(tmp_path / "out")


@pytest.mark.parametrize("lost", [1, 900])
def test_a_tar_that_is_cut_while_it_is_unpacked(tmp_path, lost):
    path = tmp_path / "some.tar"
    with tarfile.open(path, "w") as packed:
        for name in ("a", "b"):
            packed.addfile(_sized(name, 1000), io.BytesIO(os.urandom(1000)))
    with path.open("rb") as file:
        [_, last] = tar_members(file, "some.tar", Limits())

    def cut(what: str, done: int, total: int) -> None:
        os.truncate(path, last.offset + last.size - lost)

    with pytest.raises(BadArchive, match=rf"'b' holds {1000 - lost} of the 1000 bytes it claims; fetch it again"):
        extract(path, tmp_path / "out", cut)
    assert [each.name for each in (tmp_path / "out").iterdir()] == ["a"]


def _sized(name: str, size: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size = size
    return info


def test_zip_files_over_each_other(tmp_path):
    """Many entries of the list that name the same packed bytes."""
    data = zip_bytes({"a": os.urandom(4000), "b": os.urandom(4000)}, zipfile.ZIP_STORED)
    with zipfile.ZipFile(io.BytesIO(data)) as packed:
        second = packed.getinfo("b").header_offset
    at = data.rfind(b"PK\x01\x02")
    assert struct.unpack("<I", data[at + 42 : at + 46])[0] == second
    path = written(tmp_path, data[: at + 42] + struct.pack("<I", 0) + data[at + 46 :], "some.zip")
    with pytest.raises(BadArchive, match="lie over each other"):
        extract(path, tmp_path / "out")


def test_zip_same_name_twice(tmp_path):
    with pytest.warns(UserWarning, match="Duplicate"):
        data = _twice()
    with pytest.raises(BadArchive, match="'a' is in it twice"):
        extract(written(tmp_path, data, "some.zip"), tmp_path / "out")


def _twice() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as packed:
        packed.writestr("a", b"1")
        packed.writestr("a", b"2")
    return out.getvalue()


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.99])
def test_cut_zip(tmp_path, keep):
    data = zip_bytes({"a": os.urandom(5000)})
    with pytest.raises(BadArchive, match="fetch it again"):
        extract(written(tmp_path, data[: int(keep * len(data))], "some.zip"), tmp_path / "out")


@pytest.mark.parametrize(("at", "what"), [(28, "name"), (30, "extra field"), (32, "comment")])
def test_a_zip_whose_list_ends_within_an_entry(tmp_path, at, what):
    """The last entry claims a longer name, extra field or comment than there is."""
    data = bytearray(zip_bytes({"a.txt": b"one", "b.txt": b"two"}))
    struct.pack_into("<H", data, data.rindex(b"PK\x01\x02") + at, 999)
    (tmp_path / "x.zip").write_bytes(data)
    with pytest.raises(BadArchive, match="its list of files was cut off; fetch it again"):
        extract(tmp_path / "x.zip", tmp_path / "out")
    assert not (tmp_path / "out").exists(), what


def test_damaged_zip_content_leaves_no_file(tmp_path):
    data = bytearray(zip_bytes({"good": b"fine", "a": os.urandom(5000)}, zipfile.ZIP_STORED))
    data[2500] ^= 1
    with pytest.raises(BadArchive, match="'a' is not the 5000 bytes its list says"):
        extract(written(tmp_path, bytes(data), "some.zip"), tmp_path / "out")
    assert contents(tmp_path / "out") == {"good": b"fine"}


def test_zip_that_is_encrypted_or_packed_otherwise(tmp_path):
    data = bytearray(zip_bytes({"a": b"12345"}))
    at = data.rfind(b"PK\x01\x02")
    data[at + 8] |= 1
    with pytest.raises(BadArchive, match="'a' is encrypted"):
        extract(written(tmp_path, bytes(data), "some.zip"), tmp_path / "out")
    data = zip_bytes({"a": b"12345"}, zipfile.ZIP_LZMA)
    with pytest.raises(BadArchive, match="packed by method 14"):
        extract(written(tmp_path, data, "some.zip"), tmp_path / "out")


def test_zip_list_of_absurd_length(tmp_path):
    data = bytearray(zip_bytes({"a": b"1"}))
    at = data.rfind(b"PK\x05\x06")
    data[at + 12 : at + 16] = struct.pack("<I", 2**31)
    with pytest.raises(BadArchive, match="claims 2147483648 bytes"):
        extract(written(tmp_path, bytes(data), "some.zip"), tmp_path / "out")


def listed(count: int, name: bytes = b"a") -> bytes:
    """A list of that many empty files."""
    numbers = (0x02014B50, 20, 20, 0, 0, 0, 0, 0, 0, 0, len(name), 0, 0, 0, 0, 0, 0)
    return (struct.pack("<IHHHHHHIIIHHHHHII", *numbers) + name) * count


def test_zip_of_too_many_files_is_refused_before_they_take_memory(tmp_path):
    """A list of 64 MB, as long as is read, had 1.4 million of them: 560 MB and half a minute."""
    files = listed(200_000)
    end = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 9, 9, len(files), 4, 0)
    path = written(tmp_path, b"PK\x03\x04" + files + end, "some.zip")
    tracemalloc.start()
    with pytest.raises(BadArchive, match="more than the 500 files allowed|'a' is in it twice"):
        zip_members(path, Limits(members=500))
    assert tracemalloc.get_traced_memory()[1] < 1.5 * len(files)
    tracemalloc.stop()


def test_zip64_does_not_get_around_the_limit_of_the_list(tmp_path, monkeypatch):
    """The record of 32 bits counts one file, that of 64 bits, which holds, a hundred."""
    monkeypatch.setattr(archive, "_MAX_ZIP_DIRECTORY", 2000)
    files = listed(100)
    wide = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, 100, 100, len(files), 4)
    wide += struct.pack("<IIQI", 0x07064B50, 0, 4 + len(files), 1)
    end = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 1, 1, 47, 4, 0)
    path = written(tmp_path, b"PK\x03\x04" + files + wide + end, "some.zip")
    with pytest.raises(BadArchive, match="claims 4700 bytes at byte 4"):
        zip_members(path)


def test_zip64_is_read(tmp_path):
    """As Python writes it when it does not know the size before, and with sizes that stand in the extra field alone."""
    path = tmp_path / "some.zip"
    with zipfile.ZipFile(path, "w") as packed, packed.open("a", "w", force_zip64=True) as out:
        out.write(b"one")
    data = path.read_bytes()
    at, end = data.rfind(b"PK\x01\x02"), data.rfind(b"PK\x05\x06")
    extra = struct.pack("<HHQQQ", 1, 24, 3, 3, 0)
    entry = data[at : at + 20] + b"\xff" * 8 + data[at + 28 : at + 30] + struct.pack("<H", len(extra))
    entry += data[at + 32 : at + 42] + b"\xff" * 4 + b"a" + extra
    wide = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, 1, 1, len(entry), at)
    wide += struct.pack("<IIQI", 0x07064B50, 0, at + len(entry), 1)
    last = data[end : end + 8] + b"\xff" * 12 + b"\0\0"
    path.write_bytes(data[:at] + entry + wide + last)
    with zipfile.ZipFile(path) as packed:
        assert packed.read("a") == b"one"
    assert unpacked(path) == {"a": b"one"}


# Disk


def test_too_little_room_is_reported_before_writing(tmp_path, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10**6))
    with pytest.raises(DiskFull, match=r"unpacking some.tar needs 0.0 GB, .* has 0.0 GB free; make room"):
        extract(written(tmp_path, tar_bytes(FILES)), tmp_path / "deep" / "out")
    assert not (tmp_path / "deep").exists()


def test_disk_that_fills_up_leaves_whole_files_only(tmp_path):
    path = written(tmp_path, tar_bytes({"small": b"1" * 100, "large": b"2" * 100_000}))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(DiskFull, match="'large' could not be written: File too large; finished files are kept"):
            extract(path, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert contents(tmp_path / "out") == {"small": b"1" * 100}


def test_random_damage_gives_our_error_or_the_files(tmp_path):
    """Fixed seed; whatever is flipped, the outcome is a BadData or files below the folder (B5: 41)."""
    import numpy as np

    random = np.random.default_rng(0)
    for whole, name in ((tar_bytes(FILES, tarfile.PAX_FORMAT), "some.tar"), (zip_bytes(FILES), "some.zip")):
        for turn in range(150):
            data = bytearray(whole)
            for at in random.integers(0, len(data), 3):
                data[at] = random.integers(0, 256)
            path = written(tmp_path, bytes(data), name)
            with contextlib.suppress(BadData):  # any other error fails the test
                extract(path, tmp_path / f"{name}-out" / str(turn))
    assert {path.name for path in tmp_path.iterdir()} == {"some.tar", "some.zip", "some.tar-out", "some.zip-out"}


# Files of a zip, read in any order.


def zipped(path: Path, files: dict[str, bytes], method: int) -> Path:
    with zipfile.ZipFile(path, "w", method) as packed:
        for name, data in files.items():
            packed.writestr(name, data)
    return path


def unpacked(path: Path) -> dict[str, bytes]:
    with path.open("rb") as file:
        members = reversed(zip_members(path))
        return {member.name: b"".join(packed_chunks(file, member, str(path))) for member in members}


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_zip_members_in_any_order(tmp_path, method):
    files = FILES | {"large": os.urandom(1000) * 3000, "dull": bytes(150_000)}
    path = zipped(tmp_path / "a.zip", files, method)
    assert unpacked(path) == files
    with path.open("rb") as file:
        [large] = [member for member in zip_members(path) if member.name == "large"]
        assert max(map(len, packed_chunks(file, large, "a"))) <= 1 << 20


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_damage_in_a_zip_member_is_noticed(tmp_path, method):
    """Every byte of a member's own header and data in turn: either it does not matter or it is reported."""
    whole = {"x": bytes(range(256)) * 3}
    path = zipped(tmp_path / "a.zip", whole, method)
    stored = path.read_bytes()
    [member] = zip_members(path)
    reported = 0
    for at in range(member.offset, member.offset + 31 + member.stored):
        path.write_bytes(stored[:at] + bytes([stored[at] ^ 0x41]) + stored[at + 1 :])
        try:
            with path.open("rb") as file:
                assert b"".join(packed_chunks(file, member, "a")) == whole["x"]
        except BadArchive:
            reported += 1
    assert reported >= member.stored


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_zip_cut_off_after_it_was_listed(tmp_path, method):
    path = zipped(tmp_path / "a.zip", {"x": os.urandom(5000)}, method)
    stored = path.read_bytes()
    [member] = zip_members(path)
    for length in (0, 10, 29, 40, 2000):
        path.write_bytes(stored[:length])
        with path.open("rb") as file, pytest.raises(BadArchive, match="fetch it again"):
            list(packed_chunks(file, member, "a"))


def test_a_zip_member_larger_than_its_list_says(tmp_path):
    path = zipped(tmp_path / "a.zip", {"x": bytes(200_000_000)}, zipfile.ZIP_DEFLATED)
    [member] = zip_members(path, Limits(zip_ratio=2000))
    tracemalloc.start()
    with path.open("rb") as file, pytest.raises(BadArchive, match="is not the 1000 bytes"):
        list(packed_chunks(file, member._replace(size=1000), "a"))
    assert tracemalloc.get_traced_memory()[1] < 2**23
    tracemalloc.stop()


def test_hostile_zips_are_not_listed(tmp_path):
    for name in ("../x", "/x"):
        with pytest.raises(BadArchive):
            zip_members(zipped(tmp_path / "a.zip", {name: b""}, zipfile.ZIP_STORED))
    (tmp_path / "b.zip").write_bytes(b"no zip")
    with pytest.raises(BadArchive, match="is not a zip file"):
        zip_members(tmp_path / "b.zip")


def test_an_empty_zip_has_no_members(tmp_path):
    """All of it is the list of its files."""
    zipfile.ZipFile(tmp_path / "some.zip", "w").close()
    assert (tmp_path / "some.zip").stat().st_size == 22
    assert list(zip_members(tmp_path / "some.zip")) == []
