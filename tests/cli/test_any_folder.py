"""Class folders as people have them: without a split, with splits of other names, with files nobody reads."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from sightline.data.sources import folder
from sightline.data.sources.layouts import chosen_for_val
from sightline.errors import BadData, BadSample

SMALL = [
    "--model.width=4",
    "--data.size=24",
    "--data.eval-resize=24",
    "--data.eval-size=24",
    "--run.workers=0",
    "--run.report=off",
]
SHORT = [*SMALL, "--train.epochs=1", "--train.global-batch=8", "--run.device=cpu"]
CLASSES = 4


@pytest.fixture
def pets(shapes: Path, tmp_path: Path) -> Path:
    """`my pets` of four classes with ten images each, without a split."""
    root = tmp_path / "my pets"
    for name in sorted(os.listdir(shapes / "train"))[:CLASSES]:
        (root / name).mkdir(parents=True)
        for split, count in (("train", 8), ("val", 2)):
            for file in sorted((shapes / split / name).iterdir())[:count]:
                shutil.copy(file, root / name / f"{split}-{file.name}")
    return root


def found(said) -> str:
    """The first line."""
    return said.out.splitlines()[0]


def names_of(source) -> list[str]:
    return [source.name(index) for index in range(len(source))]


# Without a split


def test_class_folders_without_a_split_train_resume_and_are_evaluated(sightline, pets: Path, tmp_path: Path):
    (pets / sorted(os.listdir(pets))[0] / "IMG_0001.HEIC").write_bytes(b"")
    out = tmp_path / "run"
    said = sightline("train", "demo_classification", "--data", pets, "--out", out, *SHORT)
    assert said.code == 0, said
    assert found(said) == (
        "data: 4 classes, 32 + 8 images; no val split, so 8 images validate (about 20%, by name); ignored: 1 .heic"
    )
    kept = json.loads((out / "split.json").read_text())["val"]
    assert len(kept) == 8 and all((pets / name).is_file() for name in kept)
    assert yaml.safe_load((out / "data.yaml").read_text()) == {"kind": "folder", "train": {"images": str(pets)}}
    scores = json.loads((out / "scores.json").read_text())
    again = sightline("evaluate", out)
    assert again.code == 0 and f"top1 {scores['values']['top1']:.4f}" in again.out, again


def test_a_run_inside_its_data_resumes_and_one_among_the_images_is_refused(sightline, pets: Path):
    before = sorted(pets.rglob("*"))
    train = ["train", "demo_classification", "--data", pets, *SHORT, "--out"]
    for out, why in ((pets, "is the folder of the data"), (before[0], "holds samples of the data")):
        said = sightline(*train, out)
        assert said.code == 2 and f"--run.out {out} {why}" in said.err, said
    assert sorted(pets.rglob("*")) == before
    for said in (sightline(*train, pets / "runs" / "a"), sightline(*train, pets / "runs" / "a", "--train.epochs=2")):
        assert said.code == 0 and "data: 4 classes, 32 + 8 images" in found(said), said
    assert "ignored: 1 folder of results (runs)" in found(said)


@pytest.mark.shows("data.split")
def test_a_run_keeps_its_split_when_images_are_added(sightline, pets: Path, tmp_path: Path):
    out = tmp_path / "run"
    assert sightline("train", "demo_classification", "--data", pets, "--out", out, *SHORT).code == 0
    before = (out / "split.json").read_bytes()
    first = sorted(path for path in pets.rglob("*.*"))[0]
    for number in range(30):
        shutil.copy(first, first.with_name(f"new-{number}{first.suffix}"))
    more = ["--train.epochs=2", "--run.override"]
    said = sightline("train", "demo_classification", "--data", pets, "--out", out, *SHORT, *more)
    assert said.code == 0 and "62 + 8 images" in found(said) and "split.json lists" in found(said), said
    assert (out / "split.json").read_bytes() == before
    other = sightline("train", "demo_classification", "--data", pets, "--out", tmp_path / "other", *SHORT)
    assert other.code == 0 and "56 + 14 images" in found(other), other
    third = ["--out", tmp_path / "third", "--data.split", out / "split.json"]
    assert "62 + 8 images" in found(sightline("train", "demo_classification", "--data", pets, *third, *SHORT))


@pytest.mark.shows("data.val_fraction")
def test_the_share_that_validates_is_a_flag(sightline, pets: Path, tmp_path: Path):
    flags = ["--data", pets, "--out", tmp_path / "run", "--data.val-fraction", "0.5"]
    assert "20 + 20 images" in found(sightline("train", "demo_classification", *flags, *SHORT))
    for wrong in ("0", "1", "-0.1", "nan"):
        flags[-1] = wrong
        said = sightline("train", "demo_classification", *flags, *SHORT)
        assert said.code == 2 and "must be in (0, 1); 0.2 is usual" in said.err, said


def test_every_class_gives_its_share_and_neither_order_nor_other_classes_matter():
    names = [f"{'ab'[i % 2]}/{i}".encode() for i in range(40)] + [b"c/0", b"d/0", b"d/1"]
    labels = [i % 2 for i in range(40)] + [2, 3, 3]
    chosen = chosen_for_val(names, labels, 0.2)
    picked = {name for name, out in zip(names, chosen, strict=True) if out}
    assert [sum(name[:1] == each for name in picked) for each in (b"a", b"b", b"c", b"d")] == [4, 4, 0, 1]
    turned = chosen_for_val(names[::-1], labels[::-1], 0.2)
    assert picked == {name for name, out in zip(names[::-1], turned, strict=True) if out}
    assert chosen_for_val(names, labels, 0.2, seed=1).tolist() != chosen.tolist()
    fewer = chosen_for_val(names[:40], labels[:40], 0.2)
    assert fewer.tolist() == chosen[:40].tolist()
    assert chosen_for_val([], [], 0.2).tolist() == []


@pytest.mark.parametrize("val", ["valid", "validation", "test", "Val"])
def test_splits_of_other_names_are_read(sightline, pets: Path, tmp_path: Path, val: str):
    root = tmp_path / "split"
    shutil.copytree(pets, root / "train")
    shutil.copytree(pets, root / val)
    train, held_out = (folder.open_source(str(root), split) for split in ("train", "val"))
    assert names_of(train) == names_of(held_out) and held_out.root == root / val and train.held_out is None


def test_valid_is_preferred_to_test_and_a_lone_train_is_split(pets: Path, tmp_path: Path):
    root = tmp_path / "split"
    for name in ("train", "valid", "test"):
        shutil.copytree(pets, root / name)
    assert folder.open_source(str(root), "val").root == root / "valid"
    for name in ("valid", "test"):
        shutil.rmtree(root / name)
    train, val = (folder.open_source(str(root), split) for split in ("train", "val"))
    assert (len(train), len(val)) == (32, 8) and set(names_of(train)).isdisjoint(names_of(val))


def test_exports_of_detection_tools_are_not_class_folders(pets: Path, tmp_path: Path):
    images = sorted(pets.rglob("*.jpg"))[:4]
    for number, layout in enumerate(("{}/images", "{}")):
        for split in ("train", "valid", "test"):
            place = tmp_path / str(number) / layout.format(split)
            (place.parent / "labels").mkdir(parents=True, exist_ok=True)
            place.mkdir(exist_ok=True)
            for image in images:
                shutil.copy(image, place)
        assert folder.find(str(tmp_path / str(number))) is None


def test_a_description_names_folders_that_lie_apart(sightline, pets: Path, tmp_path: Path):
    shutil.copytree(pets, tmp_path / "held out")
    file = tmp_path / "pets.yaml"
    file.write_text('kind: folder\ntrain: my pets\nval: {images: "held out"}\n')
    said = sightline("train", "demo_classification", "--data", file, "--out", tmp_path / "run", *SHORT)
    assert said.code == 0 and "40 + 40 images; held out validates" in found(said), said
    (tmp_path / "run" / "data.yaml").rename(tmp_path / "found.yaml")
    again = sightline("check", "demo_classification", "--data.path", tmp_path / "found.yaml", "--no-decode")
    assert again.code == 3 and "same image in train and val: 40" in again.out, again


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind: folder\ntrain: nowhere\n", "images of train is .*nowhere, which does not exist"),
        ("kind: pictures\ntrain: my pets\n", "kind 'pictures' is unknown; known: .*folder"),
        ("train: my pets\n", "kind is None, expected the name of a source"),
        ("kind: folder\n", "names no train and no val"),
        ("kind: folder\ntrain: 5\n", "train is 5, expected a folder"),
        ("kind: folder\ntrain: my pets\nextra: 1\n", "unknown entries extra; expected kind, train, val, test, classes"),
        ("kind: folder\ntrain: !!python/object/apply:os.system [exit]\n", "cannot be read as YAML"),
    ],
)
def test_a_description_that_is_wrong_is_refused(sightline, pets: Path, tmp_path: Path, text: str, message: str):
    file = tmp_path / "pets.yaml"
    file.write_text(text)
    said = sightline("train", "demo_classification", "--data", file, "--out", tmp_path / "run")
    assert said.code == 2 and not (tmp_path / "run").exists(), said
    assert re.search(message, said.err), said


@pytest.mark.parametrize("split", [True, False])
def test_classes_may_be_called_like_splits_and_folders_of_other_layouts(pets: Path, tmp_path: Path, split: bool):
    names = ["train", "test", "images"] if split else ["train", "test"]
    for old, new in zip(sorted(os.listdir(pets)), names, strict=False):
        (pets / old).rename(pets / new)
    root = pets
    if split:
        root = tmp_path / "split"
        shutil.copytree(pets, root / "train")
        shutil.copytree(pets, root / "val")
    assert folder.detect(str(root)) and set(names) < set(folder.open_source(str(root), "train").classes)


def test_a_val_folder_without_classes_is_an_error_and_an_unsorted_test_set_is_not(pets: Path, tmp_path: Path):
    root = tmp_path / "split"
    shutil.copytree(pets, root / "train")
    (root / "test").mkdir()
    shutil.copy(sorted(pets.rglob("*.*"))[0], root / "test")
    assert folder.open_source(str(root), "val").held_out is not None
    (root / "test").rename(root / "val")
    with pytest.raises(BadData, match="split/val holds no class folders; expected"):
        folder.open_source(str(root), "val")


def test_train_is_preferred_to_train_in_other_letters(pets: Path, tmp_path: Path):
    for name in ("Train", "train"):
        shutil.copytree(pets, tmp_path / "both" / name)
    assert folder.open_source(str(tmp_path / "both"), "train").root.name == "train"


def test_reading_is_bounded(pets: Path):
    source = folder.open_source(str(pets), "train")
    (pets / source.name(0)).unlink()
    (pets / source.name(0)).symlink_to("/dev/zero")
    with pytest.raises(BadSample, match="is not a regular file"):
        source.read(0)


def test_the_split_that_a_run_keeps_decides_from_any_directory(sightline, pets: Path, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [folder.open_source(str(pets), "train").name(i) for i in (0, 9)]
    (tmp_path / "mine.json").write_text(json.dumps({"val": names}))
    flags = ["--data", pets, "--data.split", "mine.json", *SHORT]
    assert "38 + 2 images" in found(sightline("train", "demo_classification", *flags, "--out", tmp_path / "run"))
    (tmp_path / "mine.json").unlink()
    monkeypatch.chdir("/")
    assert "on 2 samples" in sightline("evaluate", tmp_path / "run").out
    # A run that begins with another one's checkpoint validates on the images that the other did not train on.
    flags = ["--data", pets, *SHORT, "--train.epochs=2", "--out", tmp_path / "next", "--resume", tmp_path / "run"]
    assert sightline("train", "demo_classification", *flags).code == 0
    assert json.loads((tmp_path / "next" / "split.json").read_text())["val"] == names


def test_a_start_that_failed_before_its_first_checkpoint_decides_no_split(sightline, pets: Path, tmp_path: Path):
    image = pets / folder.open_source(str(pets), "train").name(0)
    whole = image.read_bytes()
    image.write_bytes(b"broken")
    out = tmp_path / "run"
    assert sightline("train", "demo_classification", "--data", pets, "--out", out, *SHORT).code == 3
    image.write_bytes(whole)
    said = sightline("train", "demo_classification", "--data", pets, "--out", out, *SHORT, "--data.val-fraction=0.5")
    assert said.code == 0 and "20 + 20 images" in found(said), said
    assert len(json.loads((out / "split.json").read_text())["val"]) == 20


@pytest.mark.parametrize(
    "text", ['{"val": ["\\ud800"]}', '{"val": []}', "[]", '{"val": [1]}', "{", '{"val": ["no such"]}']
)
def test_a_split_file_that_cannot_be_one_is_refused(sightline, pets: Path, tmp_path: Path, text: str):
    (tmp_path / "split.json").write_text(text)
    said = sightline("train", "demo_classification", "--data", pets, "--data.split", tmp_path / "split.json")
    assert (said.code == 3 and "split" in said.err and "give" in said.err) or "expected" in said.err, said


def test_new_data_are_evaluated_whole_and_not_trained_on_in_an_old_run(sightline, pets: Path, tmp_path: Path):
    flags = ["--out", tmp_path / "run", *SHORT]
    assert sightline("train", "demo_classification", "--data", pets, *flags).code == 0
    new = tmp_path / "new"
    for file in sorted(pets.rglob("*.*")):
        (new / file.parent.name).mkdir(parents=True, exist_ok=True)
        shutil.copy(file, new / file.parent.name / f"new-{file.name}")
    said = sightline("evaluate", tmp_path / "run", "--data.path", new)
    assert said.code == 0 and "on 40 samples" in said.out, said
    said = sightline("train", "demo_classification", "--data", new, *flags)
    assert said.code == 3 and "its run belongs to other data" in said.err and "another --run.out" in said.err, said


def test_a_batch_larger_than_the_data_becomes_smaller_unless_it_was_typed(sightline, pets: Path, tmp_path: Path):
    few = [flag for flag in SHORT if not flag.startswith("--train.global-batch")]
    flags = ["demo_classification", "--data", pets, *few, "--out"]
    said = sightline("train", *flags, tmp_path / "run")
    assert said.code == 0, said
    assert found(said).endswith("; batch 16 and rate 0.05, as the recipe's 64 is more than there are")
    stored = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (stored["train"]["global_batch"], stored["optimizer"]["lr"]) == (16, 0.05)
    again = sightline("train", *flags, tmp_path / "run", "--lr=0.2")
    assert again.code == 2 and "optimizer.lr: 0.05 -> 0.2" in again.err, again
    said = sightline("train", *flags, tmp_path / "other", "--batch-size", 64)
    assert said.code == 2 and "global_batch=64 is larger than the 32 training samples" in said.err, said


def test_a_batch_that_leaves_one_step_in_an_epoch_becomes_smaller(sightline, pets: Path, tmp_path: Path):
    for file in sorted(pets.rglob("*.*")):
        shutil.copy(file, file.with_name(f"more-{file.name}"))
    few = [flag for flag in SHORT if not flag.startswith("--train.global-batch")]
    said = sightline("train", "demo_classification", "--data", pets, *few, "--out", tmp_path / "run")
    assert found(said).startswith("data: 4 classes, 64 + 16 images"), said
    assert found(said).endswith("; batch 32 and rate 0.1, as the recipe's 64 leaves one step in an epoch"), said
    assert said.code == 0 and "of 2 steps, batch 32" in said.out, said
    flags = ["demo_classification", "--data", pets, *few, "--out", tmp_path / "before"]
    assert sightline("train", *flags, "--batch-size", 64).code == 0
    said = sightline("train", *flags, "--epochs", 2)  # a run that has one step in an epoch resumes with it
    assert said.code == 0 and "; batch" not in found(said) and "2 epochs of 1 step" in said.out, said


def test_a_table_of_rates_is_scaled_with_the_batch(sightline, pets: Path, tmp_path: Path):
    few = [flag for flag in SHORT[1:] if not flag.startswith("--train.global-batch")]
    own = tmp_path / "table.py"
    own.write_text(
        "from dataclasses import replace\nfrom sightline.recipes import resnet50\n"
        "from sightline.train.optimizers import OptimizerConfig\nfrom sightline.train.schedules import ScheduleConfig\n"
        "def recipe():\n    rates = (0.275, 0.45, 0.625, 0.8, 0.08, 0.008, 0.0008)\n"
        "    table = ScheduleConfig('table', table_epochs=(1, 2, 3, 4, 30, 60, 80), table_rates=rates)\n"
        "    return replace(resnet50.recipe(), name='table', optimizer=OptimizerConfig(lr=0.1), schedule=table)\n"
    )
    flags = [own, "--data", pets, "--model.arch=resnet18", *few, "--train.max-steps=1"]
    said = sightline("train", *flags, "--out", tmp_path / "run")
    assert "; batch 16 and rate 0.00625 (later up to 0.05), as the recipe's 256" in found(said), said
    stored = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["schedule"]["table_rates"]
    assert stored == pytest.approx([rate / 16 for rate in (0.275, 0.45, 0.625, 0.8, 0.08, 0.008, 0.0008)])


def test_the_sizes_of_evaluation_follow_a_typed_size(sightline, pets: Path, tmp_path: Path):
    flags = ["demo_classification", "--data", pets, "--data.size=40", "--batch-size=8", "--train.max-steps=1"]
    said = sightline("train", *flags, "--out", tmp_path / "run")
    assert said.code == 0, said
    assert "evaluation size set to 40 to match --data.size\n" in said.out, said
    stored = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["data"]
    assert (stored["eval_size"], stored["eval_resize"]) == (40, 40)
    said = sightline("train", *flags, "--data.eval-size=64", "--out", tmp_path / "other")
    assert said.code == 0 and "to match --data.size" not in said.out, said
    assert "warning: images are 40 pixels wide in training and 64 in evaluation; --data.eval-size 40" in said.out, said
    said = sightline("evaluate", tmp_path / "run", "--data.eval-size=32")
    assert said.code == 3 and "it was trained on size (40, 40), found (32, 32)" in said.err, said


# Classes


def test_the_classes_of_the_data_replace_those_of_the_recipe(sightline, pets: Path, tmp_path: Path):
    flags = ["--data", pets, "--out", tmp_path / "run", "--model.arch=resnet18", "--train.max-steps=1"]
    said = sightline("train", "resnet50", *flags, *SHORT[1:])
    assert said.code == 0 and found(said).startswith("data: 4 classes, 32 + 8 images"), said
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["data"]["classes"] == CLASSES
    typed = sightline("train", "resnet50", *flags, *SHORT[1:], "--data.classes=1000", "--out", tmp_path / "other")
    assert typed.code == 3 and "has 4 classes, the recipe declares 1000; give" in typed.err, typed


def test_what_is_found_is_said_before_torch_is_imported(pets: Path, tmp_path: Path):
    code = (
        "import sys\nfrom sightline import config\n"
        f"found = config.named('resnet50', ['--data.path', {str(pets)!r}])\n"
        "decided = {name: value for name, (value, own, why) in found.settings.differing().items() if 'pets' in why}\n"
        "print(found.lines[0], decided, 'torch' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    decided = {
        "data.classes": 4,
        "train.global_batch": 16,
    }
    assert said.stdout.startswith("data: 4 classes, 32 + 8 images") and said.stdout.endswith(f"{decided} False\n")


# Refusals


def refused(said) -> str:
    assert said.code in (2, 3), said
    return said.err


def test_refusals_say_what_was_found_and_what_to_do(sightline, pets: Path, tmp_path: Path):
    def train(path: object) -> str:
        return refused(sightline("train", "demo_classification", "--data", path, "--out", tmp_path / "run"))

    assert f"use --data.path '{pets}'" in train(tmp_path)  # one folder deeper
    flat = tmp_path / "other" / "flat"
    flat.mkdir(parents=True)
    for number in range(3):
        (flat / f"{number}.jpg").write_bytes(b"")
    assert "nothing that this recipe can read: files: 3 .jpg; expected two or more folders, one per class" in train(
        flat
    )
    (flat / "cat").mkdir()
    (flat / "cat" / "a.jp2").write_bytes(b"")
    assert "folders cat (with 1 .jp2 files); files: 3 .jpg; expected two or more folders" in train(flat)
    (pets / "zebra").mkdir()
    assert "my pets/zebra holds no images" in train(pets)
    (pets / "zebra" / "a.heic").write_bytes(b"")
    assert "fill the class folder or remove it; it has 1 .heic" in train(pets)
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert "a link that leads to itself; give the folder" in train(loop)
    assert not (tmp_path / "run").exists()


def test_boxes_and_classes_name_the_recipe_that_reads_them(sightline, pets: Path, tmp_path: Path):
    for split in ("train", "val"):
        (tmp_path / "yolo/images" / split).mkdir(parents=True)
        (tmp_path / "yolo/labels" / split).mkdir(parents=True)
        shutil.copy(sorted(pets.rglob("*.*"))[0], tmp_path / f"yolo/images/{split}/{split}.png")
        (tmp_path / f"yolo/labels/{split}/{split}.txt").write_text("0 0.5 0.5 0.5 0.5\n")
    (tmp_path / "yolo/data.yaml").write_text("train: images/train\nval: images/val\nnames: [cat]\n")
    said = sightline("train", "classification", "--data", tmp_path / "yolo")
    assert said.code == 2 and "holds images with boxes (for `sightline train detection`)" in said.err, said
    for recipe in ("detection", "segmentation"):
        said = sightline("train", recipe, "--data", pets)
        assert said.code == 2 and "holds images with a label (for `sightline train classification`)" in said.err, said


def test_a_class_of_one_image_trains_and_check_says_that_nothing_validates_it(sightline, pets: Path, tmp_path: Path):
    (pets / "zebra").mkdir()
    shutil.copy(sorted(pets.rglob("*.*"))[0], pets / "zebra" / "only.png")
    said = sightline("check", "demo_classification", "--data.path", pets)
    assert said.code == 3 and "val: zebra: no validation image, 1 in train" in said.out, said
    for name in os.listdir(pets):
        for file in sorted((pets / name).iterdir())[1:]:
            file.unlink()
    said = sightline("train", "demo_classification", "--data", pets, "--out", tmp_path / "run")
    assert "none of the 5 samples can validate: no class has two" in refused(said)


def test_a_folder_that_cannot_be_read_is_named(sightline, pets: Path, tmp_path: Path, not_root):
    hidden = pets / sorted(os.listdir(pets))[0] / "hidden"
    hidden.mkdir(mode=0)
    with not_root():
        said = sightline("train", "demo_classification", "--data", pets, "--out", tmp_path / "run")
    hidden.chmod(0o755)
    assert "hidden cannot be read: Permission denied; make it readable or remove it" in refused(said)


def test_a_bad_image_names_skip_and_check(sightline, pets: Path, tmp_path: Path):
    train = folder.open_source(str(pets), "train")
    (pets / train.name(0)).write_bytes(b"<html>gone</html>")
    said = sightline("train", "demo_classification", "--data", pets, "--out", tmp_path / "run", *SHORT)
    assert said.code == 3 and "--data.on-bad-sample skip" in said.err and "sightline check" in said.err, said


def test_two_data_sets_in_one_folder_are_said_to_look_like_it(sightline, pets: Path, tmp_path: Path):
    both = tmp_path / "both"
    shutil.copytree(pets, both / "PHOTOS")
    shutil.copytree(pets, both / "TESTPHOTOS")
    said = sightline("train", "demo_classification", "--data", both, "--out", tmp_path / "run", *SHORT)
    assert said.code == 0, said
    assert said.out.splitlines()[1] == (
        f"warning: 2 classes (PHOTOS, TESTPHOTOS), each with folders {', '.join(sorted(os.listdir(pets)))}: "
        "if those are the classes, give one of the folders"
    )


@pytest.mark.parametrize("change", ["image", "other folder", "one folder"])
def test_folders_within_classes_alone_are_no_reason_to_warn(pets: Path, tmp_path: Path, change: str):
    both = tmp_path / "both"
    for name in ("cats", "dogs"):
        shutil.copytree(pets, both / name)
    assert folder.inner_classes(both, ["cats", "dogs"]) == sorted(os.listdir(pets))
    first = min((both / "dogs").iterdir())
    if change == "image":
        shutil.copy(next(first.iterdir()), both / "dogs")
    elif change == "other folder":
        first.rename(both / "dogs" / "another")
    else:
        for each in (each for name in ("cats", "dogs") for each in sorted((both / name).iterdir())[1:]):
            shutil.rmtree(each)
    assert folder.inner_classes(both, ["cats", "dogs"]) == []
