"""Folders and synthetic images: what is found, how it is numbered, when it counts as changed, what is refused."""

import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from sightline.data.sources import folder, index_files, kinds, open_source, synthetic
from sightline.errors import BadData, BadSample, UsageError


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Contents do not matter to a source: it lists names and hands out bytes."""
    root = tmp_path / "images"
    for name in (
        "train/ant/1.jpg",
        "train/ant/2.JPEG",
        "train/bee/deep/er/3.png",
        "train/bee/a.webp",
        "train/cat/x.bmp",
        "val/ant/v.jpg",
        "val/cat/w.jpg",
    ):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return root


def fingerprints(root: Path) -> tuple[str, str]:
    return folder.open_source(str(root), "train").fingerprint, folder.open_source(str(root), "val").fingerprint


# Folders


def test_folder_lists_names_labels_and_bytes(images: Path):
    source = folder.open_source(str(images), "train")
    assert source.classes == ("ant", "bee", "cat")
    rows = [(source.name(i), source.read(i).label, source.read(i).data) for i in range(len(source))]
    names = ["ant/1.jpg", "ant/2.JPEG", "bee/a.webp", "bee/deep/er/3.png", "cat/x.bmp"]
    assert rows == [(n, "abc".index(n[0]), f"train/{n}".encode()) for n in names]


def test_val_keeps_the_numbers_of_train(images: Path):
    source = folder.open_source(str(images), "val")  # it has no bee
    assert source.classes == ("ant", "bee", "cat")
    assert [source.read(i).label for i in range(len(source))] == [0, 2]


def test_val_alone_has_its_own_classes(images: Path):
    shutil.rmtree(images / "train")
    assert folder.open_source(str(images), "val").classes == ("ant", "cat")


def test_what_is_not_an_image_is_left_out(images: Path):
    before = fingerprints(images)
    (images / "train" / "README.txt").write_text("")
    (images / "train" / "ant" / "notes.txt").write_text("")
    (images / "train" / "ant" / ".1.jpg.swp.jpg").write_text("")
    (images / "train" / ".cache").mkdir()
    (images / "train" / "loose.jpg").write_text("")
    assert fingerprints(images) == before


def made(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b'{\n "format": 1,' if name.endswith("predictions.json") else b"")


RUN = ("config.yaml", "log.jsonl", "samples.jpg", "checkpoints/best", "drawings/1.png")


@pytest.mark.parametrize(
    ("files", "ignored"),
    [
        ([f"run/{name}" for name in RUN], "run"),
        (["run/config.yaml", "run/checkpoints/best", "run/1.jpg"], "run"),
        (["early/.lock", "early/log.jsonl"], "early"),
        ([f"runs/{run}/{name}" for run in ("a", "b") for name in RUN] + ["runs/a.log"], "runs"),
        ([f"runs/folds/fold-{fold}/{name}" for fold in (0, 1) for name in RUN] + ["runs/folds/folds.json"], "runs"),
        (["pred/predictions.json", "pred/1.jpg"], "pred"),
        (["config.yaml", "log.jsonl", "checkpoints/best"], "checkpoints"),
        (["ant/pred/predictions.json", "ant/pred/1.jpg"], "ant/pred"),
    ],
)
def test_runs_and_predictions_among_the_data_are_not_data(images: Path, files: list[str], ignored: str):
    before = fingerprints(images / "train")
    made(images / "train", *files)
    assert fingerprints(images / "train") == before
    assert folder.open_source(str(images / "train"), "train").ignored == {f"folder of results ({ignored})": 1}


@pytest.mark.parametrize(
    "files",
    [
        ["dog/config.yaml", "dog/1.jpg"],
        ["dog/a/config.yaml", "dog/a/log.jsonl", "dog/1.jpg"],
        ["dog/a/log.jsonl", "dog/b/1.jpg"],
        ["checkpoints/1.jpg"],
    ],
)
def test_a_class_folder_that_only_resembles_a_run_stays_a_class(images: Path, files: list[str]):
    made(images / "train", *files)
    assert len(folder.open_source(str(images), "train").classes) == 4


def test_predictions_of_other_programs_are_data(images: Path):
    made(images / "train", "dog/1.jpg")
    (images / "train" / "dog" / "predictions.json").write_text("[]")
    assert folder.open_source(str(images), "train").classes == ("ant", "bee", "cat", "dog")


def test_images_beside_the_class_folders_are_counted(images: Path):
    made(images / "train", "loose.jpg", "b.JPG", "c.png", ".d.png", "README.md", "ant/notes.txt")
    loose = {".jpg outside class folders": 2, ".png outside class folders": 1}
    assert folder.open_source(str(images), "train").ignored == {".txt": 1, **loose}


def test_a_link_back_to_its_own_folder_is_followed_once(images: Path):
    count = len(folder.open_source(str(images), "train"))
    (images / "train" / "ant" / "again").symlink_to(images / "train" / "ant", target_is_directory=True)
    assert len(folder.open_source(str(images), "train")) == count


def test_a_dangling_link_is_listed_and_reading_it_is_a_bad_sample(images: Path):
    (images / "train" / "ant" / "3.jpg").symlink_to(images / "nowhere.jpg")
    source = folder.open_source(str(images), "train")
    assert source.name(2) == "ant/3.jpg"
    with pytest.raises(BadSample, match="ant/3.jpg: cannot be read: No such file"):
        source.read(2)


def test_names_that_are_not_utf8_are_read(images: Path):
    name = os.fsdecode(b"train/ant/caf\xe9.jpg")
    (images / name).write_bytes(b"here")
    source = folder.open_source(str(images), "train")
    (index,) = (i for i in range(len(source)) if source.read(i).data == b"here")
    assert os.fsencode(source.name(index)) == b"ant/caf\xe9.jpg"


def test_fingerprint_does_not_depend_on_the_place_or_the_time(images: Path, tmp_path: Path):
    copy = tmp_path / "elsewhere" / "copy"
    shutil.copytree(images, copy)
    for path in copy.rglob("*.jpg"):
        os.utime(path, (1, 1))
    assert fingerprints(copy) == fingerprints(images)
    assert fingerprints(copy)[0] != fingerprints(copy)[1]


@pytest.mark.parametrize(
    "change",
    [
        lambda train: (train / "ant" / "0.jpg").write_bytes(b"new"),
        lambda train: (train / "ant" / "2.JPEG").unlink(),
        lambda train: (train / "ant" / "1.jpg").rename(train / "ant" / "1a.jpg"),
        lambda train: (train / "ant" / "1.jpg").rename(train / "bee" / "1.jpg"),
        lambda train: (train / "ant" / "1.jpg").write_bytes(b"longer than before"),
        lambda train: (train / "ant").rename(train / "aunt"),
        lambda train: shutil.copytree(train / "cat", train / "dog"),
    ],
    ids=["added", "removed", "renamed", "moved to another class", "another size", "class renamed", "class added"],
)
def test_fingerprint_notices(images: Path, change):
    before = folder.open_source(str(images), "train").fingerprint
    change(images / "train")
    assert folder.open_source(str(images), "train").fingerprint != before


def test_fingerprint_shows_where_one_name_ends_and_the_next_begins(tmp_path: Path):
    """The same letters, cut elsewhere."""
    found = []
    for number, names in enumerate((("a/1.jpg", "a/1.jpga/2.jpg"), ("a/1.jpga/1.jpg", "a/2.jpg"))):
        for name in names:
            path = tmp_path / str(number) / "train" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"")
        found.append(folder.open_source(str(tmp_path / str(number)), "train").fingerprint)
    assert found[0] != found[1]


def test_folder_refusals_name_the_place(images: Path, tmp_path: Path):
    with pytest.raises(BadData, match="gone holds no class folders with images.*expected PATH/train/CLASS"):
        folder.open_source(str(tmp_path / "gone"), "train")

    (images / "val" / "dog").mkdir()
    with pytest.raises(BadData, match=r"val has class folders that .*/train lacks: dog"):
        folder.open_source(str(images), "val")

    (images / "train" / "empty").mkdir()
    with pytest.raises(BadData, match="train/empty holds no images"):
        folder.open_source(str(images), "train")

    (tmp_path / "bare" / "train").mkdir(parents=True)
    with pytest.raises(BadData, match="bare holds no class folders with images, found there: folders train"):
        folder.open_source(str(tmp_path / "bare"), "train")

    (tmp_path / "hollow" / "val" / "ant").mkdir(parents=True)
    with pytest.raises(BadData, match="hollow/val holds no images"):
        folder.open_source(str(tmp_path / "hollow"), "val")


def test_an_empty_class_folder_is_told_with_its_own_files(images: Path):
    made(images / "train", "ant/1.gif", "empty/2.heic")
    with pytest.raises(BadData, match=r"train/empty holds no images .*; it has 1 \.heic$"):
        folder.open_source(str(images), "train")
    (images / "train" / "empty" / "2.heic").unlink()
    with pytest.raises(BadData, match=r"train/empty holds no images .* or remove it$"):
        folder.open_source(str(images), "train")


def test_a_folder_source_travels_to_a_worker_small(images: Path):
    source = folder.open_source(str(images), "train")
    again = pickle.loads(pickle.dumps(source))
    assert [again.name(i) for i in range(len(again))] == [source.name(i) for i in range(len(source))]
    names = index_files.Names.of([b"ant/%07d.jpg" % i for i in range(10_000)])
    many = folder.FolderSource(images, ("ant",), names, np.zeros(10_000), np.ones(10_000))
    assert len(pickle.dumps(many)) < 10_000 * (15 + 8 + 4) + 2_000  # name, offset, label; no object per file


# Synthetic


def test_synthetic_reads_its_sizes_and_has_defaults():
    source = synthetic.open_source("synthetic:classes=3,samples=20,size=10", "train")
    assert (len(source.classes), len(source), source.read(0).data.shape) == (3, 20, (10, 10, 3))
    assert len(synthetic.open_source("synthetic:classes=3,samples=20,size=10", "val")) == 20 // 8
    assert len(synthetic.open_source("synthetic:classes=3,samples=2,size=10", "val")) == 1
    default = synthetic.open_source("synthetic:", "train")
    assert (len(default.classes), len(default), default.size) == (1000, 12800, 256)


def test_synthetic_is_deterministic_and_its_splits_differ():
    path = "synthetic:classes=3,samples=24,size=10"
    train, again, val = (synthetic.open_source(path, split) for split in ("train", "train", "val"))
    for index in range(3):
        assert train.read(index).label == index % 3
        assert np.array_equal(train.read(index).data, again.read(index).data)
        assert not np.array_equal(train.read(index).data, val.read(index).data)
    assert train.fingerprint == again.fingerprint != val.fingerprint
    assert train.read(1).data.dtype == np.uint8


def test_synthetic_classes_differ_by_more_than_noise():
    """Nearest mean image of the training split names every val image: the classes can be learnt."""
    path = "synthetic:classes=5,samples=80,size=16"
    train, val = (synthetic.open_source(path, split) for split in ("train", "val"))
    pixels = np.stack([train.read(i).data.astype(float) for i in range(80)])
    means = np.stack([pixels[label::5].mean(0) for label in range(5)])
    for index in range(len(val)):
        sample = val.read(index)
        assert np.abs(means - sample.data).mean((1, 2, 3)).argmin() == sample.label


def test_synthetic_pixels_do_not_wrap_around():
    """Images of one class differ by their noise alone, which spans 80; a wrapped byte would differ by 176 or more."""
    source = synthetic.open_source("synthetic:classes=40,samples=80,size=8", "train")
    for index in range(40):
        one, other = source.read(index).data.astype(int), source.read(index + 40).data.astype(int)
        assert 0 < np.abs(one - other).max() < 80


@pytest.mark.parametrize("part", ["colours=3", "classes=0", "classes=-1", "classes=two", "classes", "size=1.5", "=3"])
def test_synthetic_refuses_what_it_cannot_read(part: str):
    with pytest.raises(UsageError, match=r"cannot read '.*'; write synthetic:classes=10,samples=1000,size=64"):
        synthetic.open_source(f"synthetic:samples=4,{part}", "train")


@pytest.mark.parametrize("part", ["size=99999999", "classes=" + "9" * 5000, "samples=1000000001"], ids=lambda p: p[:8])
def test_synthetic_refuses_what_would_only_fill_memory(part: str):
    with pytest.raises(UsageError, match=r"is more than \w+=\d+; give that or less"):
        synthetic.open_source(f"synthetic:{part}", "train")


# Choosing one


def test_auto_recognises_each_kind(images: Path):
    assert type(open_source("auto", str(images), "train")) is folder.FolderSource
    assert type(open_source("auto", "synthetic:samples=4", "train")) is synthetic.SyntheticSource
    shutil.rmtree(images / "train")
    assert len(open_source("auto", str(images), "val")) == 2
    tools = ["cvat", "folder", "labelme", "labelstudio", "metadata", "parquet"]
    assert kinds() == [*tools, "synthetic", "table", "tar", "tfrecord", "via"]  # and not the modules they share


def test_what_no_source_reads_is_refused(tmp_path: Path):
    for path, found in (("", "holds nothing that this recipe can read: nothing"), ("missing", "does not exist")):
        with pytest.raises(UsageError, match=f"{found}.*; expected two or more folders, one per class.*prepare shapes"):
            open_source("auto", str(tmp_path / path), "train")
    with pytest.raises(UsageError, match=r"unknown --data.source 'zip'; known: auto, .*folder"):
        open_source("zip", str(tmp_path), "train")


def test_a_named_kind_is_taken_at_its_word(images: Path):
    assert len(open_source("folder", str(images), "train")) == 5
    with pytest.raises(BadData, match="synthetic:samples=4 holds no class folders"):
        open_source("folder", "synthetic:samples=4", "train")
