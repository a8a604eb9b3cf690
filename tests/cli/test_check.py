"""`sightline check` as a user types it: exit 0 on good data, exit 3 and the whole list on bad data."""

import json
import os
import shutil
from pathlib import Path

import pytest

from sightline import cli
from sightline.data.formats.records import encode_example, frame

NAME = "demo_classification"


@pytest.fixture
def check(capsys):
    """check(path, *flags) -> (exit code, stdout, stderr)"""

    def run(path: object, *flags: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main(["check", NAME, f"--data.path={path}", "--run.workers=0", *flags])
        return (code, *capsys.readouterr())

    return run


@pytest.fixture
def data(shapes: Path, tmp_path: Path) -> Path:
    return shutil.copytree(shapes, tmp_path / "data")


def problems(out: str) -> set[tuple[str, str, str]]:
    return {(each["kind"], each["split"], each["where"]) for each in json.loads(out)["problems"]}


def test_everything_that_is_wrong_is_listed_at_once(check, data):
    train = sorted((data / "train").iterdir())
    names = [path.name for path in train]
    half = sorted(train[0].iterdir())[0]
    half.write_bytes(half.read_bytes()[:300])
    sorted(train[0].iterdir())[1].write_bytes(b"")
    shutil.rmtree(train[1])
    train[1].mkdir()  # an empty class, which a run refuses
    shutil.rmtree(data / "val" / names[2])  # no validation images
    (data / "val" / "stranger").mkdir()  # a class that train has not, which a run refuses
    shutil.copy(sorted(train[3].iterdir())[0], data / "val" / "stranger" / "leak.jpg")
    for number in range(5):
        shutil.copy(train[4] / "00000.jpg", train[4] / f"again{number}.jpg")
    code, out, err = check(data, "--json")
    assert code == 3 and err == "error: 6 problems; fix what is listed above\n"
    assert problems(out) == {
        ("unreadable", "train", f"{names[0]}/00000.jpg"),
        ("unreadable", "train", f"{names[0]}/00001.jpg"),
        ("class without training", "train", names[1]),
        ("class without validation", "val", names[2]),
        ("class without training", "train", "stranger"),
        ("same image in train and val", "train", f"{names[3]}/00000.jpg"),
    }
    train_facts = json.loads(out)["splits"]["train"]
    assert train_facts["duplicate files"] == 5
    first = f"{names[4]}/00000.jpg"
    assert train_facts["e.g."] == "; ".join([*(f"{first} and {names[4]}/again{i}.jpg" for i in range(3)), "2 more"])
    code, text, _ = check(data)
    assert code == 3
    for _, split, where in problems(out):
        assert f"  {split}: {where}: " in text
    assert "unreadable: 2\n" in text and text.endswith("problems: 6\n")


def test_no_decode_reads_headers_only(check, data):
    """Damage in a PNG's pixels that its header does not show: found by decoding, and only so."""
    from PIL import Image

    path = data / "train" / sorted(p.name for p in (data / "train").iterdir())[0] / "x.png"
    Image.effect_noise((32, 32), 50).save(path)
    stored = bytearray(path.read_bytes())
    stored[len(stored) // 2] ^= 0xFF
    path.write_bytes(bytes(stored))
    assert check(data)[0] == 3
    assert check(data, "--no-decode")[0] == 0
    path.write_bytes(stored[:500])
    assert check(data, "--no-decode")[0] == 3


def test_missing_train(check, data):
    shutil.rmtree(data / "train")
    code, out, _ = check(data, "--json")
    assert code == 3
    assert ("cannot be opened", "train", str(data / "val")) in problems(out)
    assert list(json.loads(out)["splits"]) == ["val"], "it is looked at all the same"


def test_declared_classes(check, shapes):
    code, out, _ = check(shapes, "--data.classes=12")
    assert code == 3 and "10 classes, the recipe declares 12" in out


def test_classes_that_nobody_declared_are_no_problem_beside_a_real_one(check, data, tmp_path):
    """Data that train refuses leave the classes unknown; the recipe's 10 is not theirs."""
    shutil.rmtree(data / "train" / "circle")
    code, out, _ = check(data, "--json")
    assert code == 3 and problems(out) == {("class without training", "train", "circle")}
    config = tmp_path / "own.yaml"
    config.write_text("recipe: demo_classification\ndata: {classes: 12}\n")
    for declared in (["--data.classes", "12"], ["--config", str(config)]):
        code, out, _ = check(data, *declared)
        assert code == 3 and "9 classes, the recipe declares 12" in out


@pytest.mark.slow  # tests/unit/data/check/test_boxes.py has the same of boxes
def test_processes_change_nothing(check, shapes, monkeypatch):
    from sightline.data.check import images as checking

    monkeypatch.setattr(checking, "_WORTH_PROCESSES", 0)
    assert check(shapes, "--run.workers=2", "--no-decode") == check(shapes, "--no-decode")


@pytest.mark.parametrize("form", ["tar", "tfrecord"])
def test_other_forms(check, data, tmp_path, form):
    victim = sorted((data / "train").rglob("*.jpg"))[5]
    victim.write_bytes(victim.read_bytes() + b"\0")  # bytes of its own, so that it can be found in the shards
    stored = victim.read_bytes()
    code = cli.main(
        ["prepare", "convert", "--source", str(data), "--out", str(tmp_path / form), "--form", form, "--jobs=1"]
    )
    assert code == 0
    code, out, _ = check(tmp_path / form, "--json")
    assert code == 0 and json.loads(out)["splits"]["train"]["images"] == 80
    [shard] = [path for path in (tmp_path / form / "train").iterdir() if path.name.startswith("train")]
    whole = shard.read_bytes()
    assert whole.count(stored) == 1
    shard.write_bytes(whole.replace(stored, bytes(len(stored))))
    code, out, _ = check(tmp_path / form, "--json")
    assert code == 3
    [(kind, split, where)] = problems(out)
    assert (kind, split) == ("unreadable", "train") and victim.stem in where


def test_same_name_twice_in_records(check, data, tmp_path):
    images = sorted((data / "train").rglob("*.jpg"))
    for split, some in (("train", images[:2]), ("validation", images[2:3])):
        (tmp_path / "records" / split).mkdir(parents=True)
        features = {"image/class/label": 1, "image/class/synset": b"one", "image/filename": b"x.jpg"}
        records = b"".join(frame(encode_example(features | {"image/encoded": p.read_bytes()})) for p in some)
        (tmp_path / "records" / split / f"{split}-00000-of-00001").write_bytes(records)
    code, out, _ = check(tmp_path / "records", "--json", "--data.classes=1")
    assert code == 3
    assert [each[:2] for each in problems(out)] == [("same name twice", "train")]


def test_shards_that_cannot_be_opened(check, tmp_path):
    for split in ("train", "val"):
        (tmp_path / "tars" / split).mkdir(parents=True)
        (tmp_path / "tars" / split / f"{split}-000000.tar").write_bytes(b"no tar" * 1000)
    code, out, _ = check(tmp_path / "tars", "--json")
    assert code == 3
    assert {each[:2] for each in problems(out)} == {("cannot be opened", "train"), ("cannot be opened", "val")}


def test_usage(check, tmp_path, capsys):
    assert cli.main(["check", NAME]) == 2
    assert "--data.path" in capsys.readouterr().err
    assert cli.main(["check"]) == 2
    assert "check: which recipe?" in capsys.readouterr().err
    assert check(tmp_path / "nothing")[0] == 2


def test_synthetic_images_have_no_files(check):
    code, out, _ = check("synthetic:classes=10,samples=80,size=8")
    assert code == 0 and "images                 80" in out


@pytest.fixture(scope="module")
def boxes(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images with YOLO labels; for reading only."""
    root = tmp_path_factory.mktemp("yolo")
    for split in ("train", "val"):
        (root / "labels" / split).mkdir(parents=True)
        (root / "images" / split).mkdir(parents=True)
        for number, image in enumerate(sorted((shapes / split).glob("*/*"))[::10][:4]):
            shutil.copy(image, root / "images" / split / f"{number}{image.suffix}")
            (root / "labels" / split / f"{number}.txt").write_text("0 0.5 0.5 0.4 0.4\n")
    return root


@pytest.mark.parametrize(
    ("name", "code", "told"),
    [
        ("labels/train/1.txt", 3, "labels/train/1.txt: cannot be read: a pipe or a device, expected a file; remove it"),
        ("images/train/1", 3, "image 2 is not there"),
        ("images/train/more.jpg", 3, "image 5 is not there"),
        ("classes.txt", 2, "classes.txt is a pipe or a device, expected a file; remove it"),
        ("data.yaml", 2, "data.yaml is a pipe or a device, expected a file; remove it"),
        ("train.txt", 0, ""),
    ],
)
def test_a_pipe_among_data_does_not_hold_up_a_check(
    boxes: Path, tmp_path: Path, name: str, code: int, told: str, capsys
):
    """Nobody writes to it: opening it would wait."""
    data = tmp_path / "data"
    shutil.copytree(boxes, data)
    path = next((data / name).parent.glob(f"{(data / name).name}.*"), data / name)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    assert cli.main(["check", "demo_detection", f"--data.path={data}", "--run.workers=0"]) == code
    said = capsys.readouterr()
    assert told in said.out + said.err, said


def test_labels_that_are_a_pipe_are_refused(check, data: Path):
    labels = data / "train" / "labels.csv"
    os.mkfifo(labels)
    code, _, err = check(labels)
    assert code == 2 and "holds nothing that this recipe can read" in err


@pytest.mark.skipif(not os.access("/proc/kmsg", os.R_OK), reason="needs root and /proc/kmsg")
def test_labels_that_link_to_news_of_the_system_are_empty(check, tmp_path: Path):
    (tmp_path / "labels.csv").symlink_to("/proc/kmsg")
    code, out, _ = check(tmp_path)
    assert code == 3 and "labels.csv is empty; expected a CSV file with a header" in out
