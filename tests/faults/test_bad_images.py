"""Images that cannot be read, and folders with odd things in them (B5: 20, 21, 29)."""

import json
import os
import shutil
import signal
import struct
import zlib
from pathlib import Path

import pytest

from sightline.data.sources import folder
from sightline.errors import BadData

IMAGES = ("--data.classes", "10")


@pytest.fixture
def data(shapes: Path, tmp_path: Path) -> Path:
    return shutil.copytree(shapes, tmp_path / "data")


@pytest.fixture
def bad(data: Path) -> dict[str, str]:
    """Four damaged training images and the reasons to be reported."""
    victims = sorted((data / "train").glob("*/*.jpg"))[::20]
    whole = [path.read_bytes() for path in victims]
    victims[0].write_bytes(whole[0][: len(whole[0]) // 2])
    victims[1].write_bytes(b"")
    victims[2].write_bytes(b"<!DOCTYPE html><html><body>404 Not Found</body></html>")
    victims[3].write_bytes(whole[3][: len(whole[3]) // 2] + bytes(len(whole[3]) - len(whole[3]) // 2))
    reasons = ("cut off", "empty file", "HTML", "end marker")
    return {str(path.relative_to(data / "train")): reason for path, reason in zip(victims, reasons, strict=True)}


def listed(out: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (out / "bad_samples.jsonl").read_text().splitlines()]


def test_fail_ends_with_exit_3_and_the_path(sightline, data, bad, tmp_path):
    ended = sightline.run(tmp_path / "run", "--data.path", str(data), *IMAGES)
    assert ended.code == ended.exit_code_in_folder == 3, ended
    assert any(f"error: {name}: " in ended.stderr and reason in ended.stderr for name, reason in bad.items())


def test_skip_ends_well_lists_them_and_repeats_its_bits(sightline, data, bad, tmp_path):
    flags = ("--data.path", str(data), *IMAGES, "--data.on-bad-sample", "skip")
    first = sightline.run(tmp_path / "first", *flags, "--run.report=auto")
    assert first.code == 0, first
    found = listed(first.out)
    assert {record["name"]: record["feed"] for record in found} == dict.fromkeys(bad, "train")
    assert len(found) == 4, "each is reported once, although there were two epochs"
    assert all(bad[record["name"]] in record["reason"] for record in found)
    assert first.warnings.count("sample skipped: ") == len(first.warnings.splitlines()) == 4
    # Again, and stopped on the way: the same replacements, the same bits.
    second = tmp_path / "second"
    assert sightline.run(second, *flags, FAULT="term@train:7").code == 143
    again = sightline.run(second, *flags)
    assert again.code == 0, again
    assert again.bits == first.bits
    assert {record["name"] for record in listed(second)} == set(bad)


def test_skip_in_evaluation_leaves_them_out_of_the_count(sightline, data, tmp_path):
    victim = sorted((data / "val").glob("*/*.jpg"))[3]
    victim.write_bytes(b"")
    flags = ("--data.path", str(data), *IMAGES)
    ended = sightline.run(tmp_path / "fail", *flags)
    assert ended.code == 3 and str(victim.relative_to(data / "val")) in ended.stderr
    ended = sightline.run(tmp_path / "skip", *flags, "--data.on-bad-sample", "skip")
    assert ended.code == 0, ended
    assert [(line["samples"], line["skipped"]) for line in ended.events("evaluate")] == [(39, 1), (39, 1)]
    assert [(record["feed"], record["index"]) for record in listed(ended.out)] == [("val", 3)]


def test_more_than_allowed_ends_with_exit_3_and_a_summary(sightline, data, bad, tmp_path):
    flags = ("--data.path", str(data), *IMAGES, "--data.on-bad-sample", "skip", "--data.max-bad-samples", "3")
    ended = sightline.run(tmp_path / "run", *flags)
    assert ended.code == ended.exit_code_in_folder == 3, ended
    assert "4 samples cannot be read" in ended.stderr
    assert "bad_samples.jsonl" in ended.stderr and "--data.max-bad-samples" in ended.stderr
    assert {record["name"] for record in listed(ended.out)} == set(bad)


def test_images_that_hide_their_size_are_skipped_and_named(sightline, data, tmp_path):
    """A guard that read the one header while the decoder read the other let them take gigabytes."""
    png_victim, jpeg_victim = sorted((data / "train").glob("*/*.jpg"))[:2]
    jpeg = jpeg_victim.read_bytes()
    at = jpeg.index(b"\xff\xc0")
    frame = jpeg[at : at + 19]
    huge = frame[:5] + struct.pack(">HH", 13000, 13000) + frame[9:]
    # 0xFF01 has no length; who believes in one jumps over the true frame, into the one of the segment after it.
    hidden = b"\xff\x01" + struct.pack(">H", 2 + len(huge) + 4) + huge + b"\xff\xef" + struct.pack(">H", 21) + frame
    jpeg_victim.write_bytes(jpeg[:at] + hidden + jpeg[at + 19 :])
    sizes = [struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0) for side in (8, 13000)]
    chunks = [(b"IHDR", sizes[0]), (b"IHDR", sizes[1]), (b"IDAT", zlib.compress(bytes(200))), (b"IEND", b"")]
    png_victim.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in chunks
    ))  # fmt: skip
    ended = sightline.run(tmp_path / "run", "--data.path", str(data), *IMAGES, "--data.on-bad-sample", "skip")
    assert ended.code == 0, ended
    found = {record["name"]: record["reason"] for record in listed(ended.out)}
    assert "second header" in found.pop(str(png_victim.relative_to(data / "train")))
    assert "marker 0xFF01" in found.pop(str(jpeg_victim.relative_to(data / "train")))
    assert not found


def test_image_that_vanishes_while_training(sightline, data, tmp_path):
    """Listed at the start, gone when its turn comes."""
    flags = ("--data.path", str(data), *IMAGES)
    started = sightline.start(tmp_path / "run", *flags, FAULT="stop@train:1")
    started.until_stopped()
    shutil.rmtree(data / "train")
    os.kill(started.pid, signal.SIGCONT)
    ended = started.wait()
    assert ended.code == 3, ended
    assert "cannot be read: No such file or directory" in ended.stderr


# Folders


@pytest.fixture
def few(shapes: Path, tmp_path: Path) -> Path:
    """Two classes of a few images each."""
    root = tmp_path / "few"
    for split in ("train", "val"):
        for name in sorted(os.listdir(shapes / split))[:2]:
            shutil.copytree(shapes / split / name, root / split / name)
    return root


def test_odd_names_are_trained_on(sightline, few, tmp_path):
    """Unicode, blanks, newlines, markup, bytes that are not UTF-8; one of them cannot be read and is reported."""
    first, second = sorted((few / "train").iterdir())
    odd = "süß 猫\n[bold]x <script>"
    for split in ("train", "val"):
        (few / split / first.name).rename(few / split / odd)
    images = sorted((few / "train" / odd).iterdir())
    images[0].rename(images[0].with_name("new\nline.jpg"))
    os.rename(images[1], os.fsencode(images[1].parent) + b"/\xff\xfe.jpg")
    shutil.copytree(second, few / "train" / ".hidden")
    (few / "train" / odd / ".hidden.jpg").write_bytes(b"not looked at")
    (few / "train" / odd / "notes.txt").write_text("not looked at")
    os.symlink(few / "train" / odd, few / "train" / odd / "loop")
    (few / "train" / second.name / os.fsdecode(b"broken\xff\n.jpg")).write_bytes(b"")
    flags = ("--data.path", str(few), "--data.classes", "2", "--data.on-bad-sample", "skip")
    ended = sightline.run(tmp_path / "run", *flags, progress="plain")
    assert ended.code == 0, ended
    assert [record["name"] for record in listed(ended.out)] == [f"{second.name}/broken\udcff\n.jpg"]
    assert "17 training and 8 evaluation samples" in ended.stdout
    state = json.loads((ended.out / "checkpoints" / "ckpt-00000004" / "state.json").read_text())
    assert set(state["spec"]["classes"]) == {odd, second.name}


def test_link_to_itself_is_passed_over_or_named(few):
    """`ln -s x x` cannot be followed at all (ELOOP)."""
    os.symlink("self", few / "train" / "self")
    os.symlink("self.jpg", sorted((few / "train").glob("*/*.jpg"))[0].with_name("self.jpg"))
    source = folder.open_source(str(few), "train")
    assert len(source.classes) == 2
    names = [source.name(index) for index in range(len(source))]
    assert len(names) in (16, 17)
    if len(names) == 17:  # listed for the bad-sample policy to decide
        with pytest.raises(BadData, match="self.jpg"):
            source.read([name.endswith("self.jpg") for name in names].index(True))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("empty class", "train/nothing holds no images"),
        ("class of val only", "val has class folders that .*train lacks: nothing"),
        ("no train", "val is a val split without a train split"),
        ("no images", "train/.* holds no images"),
    ],
)
def test_folders_that_cannot_work_are_refused_by_name(sightline, few, tmp_path, damage, message):
    if damage == "empty class":
        (few / "train" / "nothing").mkdir()
    elif damage == "class of val only":
        shutil.copytree(sorted((few / "val").iterdir())[0], few / "val" / "nothing")
    elif damage == "no train":
        shutil.rmtree(few / "train")
    else:
        for path in (few / "train").glob("*/*.jpg"):
            path.unlink()
    split = "val" if "val" in damage else "train"
    with pytest.raises(BadData, match=message):
        folder.open_source(str(few), split)
    if damage == "empty class":
        ended = sightline.run(tmp_path / "run", "--data.path", str(few), "--data.classes", "0")
        assert ended.code == 3, ended
        assert str(few / "train" / "nothing") in ended.stderr
        assert not (tmp_path / "run").exists(), "a first start that is refused leaves nothing behind"


def test_empty_class_in_val_is_allowed(few):
    """Few samples may leave a class without one to evaluate on."""
    for path in sorted((few / "val").iterdir())[0].iterdir():
        path.unlink()
    assert len(folder.open_source(str(few), "val").classes) == 2
