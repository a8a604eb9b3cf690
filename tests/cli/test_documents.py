"""Every command that README.md and docs/ show is carried out, on tiny data, in the order in which it is shown.

A command that is new there is run as it stands, with what `tiny()` adds; what it needs is made by INPUTS. What cannot
be run is in EXCEPTIONS, with the reason; what takes longer than a second or two, by a word of SLOW, in `make test-all`.
"""

import contextlib
import functools
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from sightline import api, cli, config, migrate, recipes
from sightline.models.resnet import ResNetConfig
from sightline.parts import DataSpec
from sightline.recipe import store

REPO = Path(__file__).resolve().parents[2]
DOCUMENTS = {
    path.relative_to(REPO).as_posix(): path
    for path in (
        REPO / "README.md",
        *sorted((REPO / "docs").rglob("*.md")),
        *sorted((REPO / "benchmarks" / "notes").glob("*.md")),
    )
}
TINY = runpy.run_path(str(REPO / "tests/recipes/conftest.py"))["TINY"]
ARCHIVES, ZIPS, FOLDERS, LAYOUTS = (
    runpy.run_path(str(REPO / "tests/unit/data/prepare" / name))
    for name in ("archives.py", "coco_zips.py", "decathlon_folders.py", "raw_layouts.py")
)
BOXES = runpy.run_path(str(REPO / "tests/unit/data/sources/box_layouts.py"))
TOOLS = runpy.run_path(str(REPO / "tests/unit/data/sources/tool_layouts.py"))
PROGRAMS = ("sightline", "make", "python", "torchrun", "SIGHTLINE_MIGRATE=1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")

# What stands for something of the reader's own; "" leaves a word out.
PLACEHOLDERS = {
    "RECIPE": "demo_classification",
    "DIR": "images",
    "DATA": "images",
    "IMAGENET": "images",
    "N": "10",
    "IMAGE...": "photo.jpg",
    "IMAGE_OR_FOLDER": "photo.jpg",
    "...": "",
    "[options]": "",
    "args": "",
}
EXCEPTIONS = {
    "make demo": "installs 5.5 GB; its lines are those of install.md, which a test below compares",
    "make test": "this is part of it",
    "make test-all": "the same",
    "make results NAME=cifar10_94 DATA=CIFAR-10-dataset": (
        "needs 60,000 public images; tests/unit/measure/test_published.py repeats a row with drawn ones"
    ),
    "sightline train resnet50 --data DIR --weights torchvision:resnet50": (
        "fetches 100 MB; tests/unit/models/test_named_weights.py fetches from this machine"
    ),
    "sightline prepare decathlon --task 04 --download": (
        "needs a network; tests/cli/test_prepare_decathlon.py fetches from this machine"
    ),
    "sightline train classification --data pets --run.track mlflow": "needs a server; test_trackers.py starts one",
    "sightline train classification --data pets --run.track mlflow trackio tensorboard": "the same",
    "make lint": "no program of ours; test_layout.py is part of it",
    "sightline warm resnet50 --train.precision fp16": "needs a GPU; tests/unit/measure/test_warm.py warms on the CPU",
    "python train.py": "is shown to fail on a machine without a GPU",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 1:2 --nproc-per-node 8 --max-restarts 3 "
    "--rdzv-backend c10d --rdzv-id JOB --rdzv-endpoint HOST:29500 -m sightline train RECIPE --run.out SHARED/run": (
        "needs two hosts; tests/distributed/test_hosts.py starts it on two of them"
    ),
    'python tests/dockerfile.py ROOT doctor "prepare shapes --out shapes" "train demo_classification ..." "evaluate '
    'runs/demo"': "needs a root of Debian, made by debootstrap",
    "python benchmarks/migration_scripts.py --repositories repositories --only pytorch/vision --keep out": (
        "needs clones of public repositories"
    ),
}
# Exit codes other than 0, and what is said then.
EXPECTED = {
    "sightline prepare coco --source zips --out coco --download": (3, "were expected; move it away"),
    "sightline check ssd_resnet34 --data COCO --json": (3, "problems; fix what is listed above"),
}
SLOW = {
    "python": "a process that imports torch",
    "SIGHTLINE_MIGRATE=1": "a process that imports torch",
    "migrate": "a process that imports torch",
    "--run.devices": "two processes that import torch",
    "--peers": "builds and compiles four networks",
    "--scaling": "measures",
    "--loader": "starts workers of three loaders",
    "--run.profile": "30 steps, four of them traced",
    "all": "five runs",
    "runs/folds": "needs the five runs",
    "--data.rotation": "one more training of a U-Net",
    "runs/folds/fold-0": "needs the five runs",
    "runs/brats": "slices of 192x160 and six levels; README.md has a training of them",
    "export": "torch's exporter takes seconds; tests/cli/test_export.py types it",
    "runs/served/model.onnx": "needs what is exported",
    "runs/served/model.pt2": "needs what is exported",
    "LABELS": "needs what is predicted by runs/brats",
}


class Shown(NamedTuple):
    """A fenced block."""

    language: str
    text: str

    def commands(self) -> list[str]:
        """Without comments, each in one line; of a block with prompts what follows them."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if any(line.startswith("$ ") for line in lines):
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        lines = [" ".join(re.sub(r"\s#.*", "", line).split()) for line in lines]
        return [line for line in lines if line.partition(" ")[0] in PROGRAMS] if not self.language else []

    def told(self, command: str) -> list[str]:
        """Return the lines of train.py that are shown behind a prompt with this command."""
        told = f"{self.text}\n$ ".partition(f"$ {command}\n")[2].partition("\n$ ")[0]
        return [line.strip() for line in told.splitlines() if "train.py:" in line]


def blocks(name: str) -> list[Shown]:
    text = DOCUMENTS[name].read_text(encoding="utf-8")
    return [Shown(*found) for found in re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)]


def commands(name: str) -> list[str]:
    return [command for block in blocks(name) for command in block.commands()]


# What the commands read


def images(path: Path) -> None:
    """Write class folders: ten classes, four and two images each."""
    for name, data in drawn_images().items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)


@functools.cache
def drawn_images() -> dict[Path, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        amounts = ["--only", "classification", "--train-per-class=4", "--val-per-class=2"]
        assert cli.main(["prepare", "shapes", "--out", folder, *amounts]) == 0
        root = Path(folder, "classification")
        return {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def pets(path: Path) -> None:
    """Write class folders without a split."""
    images(Path(f"{path}.split"))
    Path(f"{path}.split", "train").rename(path)


def garden(path: Path) -> None:
    """Write class folders of train, val and test."""
    images(path)
    shutil.copytree(path / "val", path / "test")


def birds(path: Path) -> None:
    """Write a table with one label per image, of four classes."""
    table(path, lambda number: f"bird{number % 4}")


def scans(path: Path) -> None:
    """Write a table with up to two labels per image."""
    table(path, lambda number: ("a;b", "a", "b", "")[number % 4])


def table(path: Path, label: Callable[[int], str]) -> None:
    (path / "images").mkdir(parents=True)
    for number in range(20):
        photo(path / "images" / f"{number}.jpg", number)
    lines = "".join(f"{number}.jpg,{label(number)}\n" for number in range(20))
    (path / "labels.csv").write_text(f"file,label\n{lines}")


def posters(path: Path) -> None:
    """Write a table with a list in a cell, which three columns of 0 and 1 repeat."""
    lines = ["Id,Genre,Action,Comedy,Drama"]
    (path / "Images").mkdir(parents=True)
    for number in range(50):
        photo(path / "Images" / f"tt{number:07d}.jpg", number)
        shown = [genre for place, genre in enumerate(("Action", "Comedy", "Drama")) if number >> place & 1]
        lines.append(f'tt{number:07d},"{shown}",{number & 1},{number >> 1 & 1},{number >> 2 & 1}')
    (path / "train.csv").write_text("\n".join(lines))


def photo(path: Path, seed: int = 0) -> None:
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (60, 80, 3), np.uint8)).save(path)


def archive(name: str) -> Callable[[Path], None]:
    """One of ImageNet's files."""

    def make(path: Path) -> None:
        ARCHIVES["make_archives"](path.parent / "archives", 4, 3)
        shutil.copy(path.parent / "archives" / name, path)

    return make


def coco(path: Path, train: int = 20) -> None:
    """As `prepare coco` leaves it."""
    zips = ZIPS["make_zips"](path.with_name(f"{path.name}.zips"), train, 10)
    assert cli.main(["prepare", "coco", "--source", str(zips), "--out", str(path), "--jobs", "1"]) == 0


@functools.cache
def drawn_boxes() -> dict:
    """Return images with at most eight boxes each, for BOXES to write in any layout."""
    with tempfile.TemporaryDirectory() as folder:
        amounts = ["--only", "detection", "--train-pictures=8", "--val-pictures=4"]
        assert cli.main(["prepare", "shapes", "--out", folder, *amounts]) == 0
        data = BOXES["read"](Path(folder, "detection"))
    return {split: [entry._replace(boxes=entry.boxes[:8]) for entry in entries] for split, entries in data.items()}


def boxes(layout: str) -> Callable[[Path], None]:
    """One of the layouts of docs/reference/data_boxes.md."""
    return lambda path: BOXES["LAYOUTS"][layout](drawn_boxes(), path)


def described_boxes(path: Path) -> None:
    """Write the description of docs/reference/data_boxes.md, and what it describes."""
    [tree] = [block.text for block in blocks("docs/reference/data_boxes.md") if "gulls.yaml" in block.text]
    lines = [line[tree.splitlines()[0].index("gulls.yaml") :].strip() for line in tree.splitlines()[1:4]]
    path.write_text("\n".join(lines))
    for split, name in (("train", "a.json"), ("val", "b.json")):
        BOXES["images"](path.parent / "photos", drawn_boxes()[split])
        BOXES["coco_json"](path.parent / name, drawn_boxes()[split], BOXES["classes_of"](drawn_boxes()))


def coco_by_heart(path: Path) -> None:
    """Training images that are those of the evaluation too, as docs/reference/recipes_ssd.md says."""
    coco(path, 80)
    shutil.rmtree(path / "val2017")
    (path / "val2017").symlink_to("train2017")
    shutil.copy(path / "annotations" / "instances_train2017.json", path / "annotations" / "instances_val2017.json")


def hippocampi(path: Path) -> None:
    FOLDERS["make_folder"](path, 6)


def packed(path: Path) -> None:
    FOLDERS["make_folder"](path.with_suffix(""), 6)
    FOLDERS["pack"](path.with_suffix(""), path)


def tumours(path: Path) -> None:
    FOLDERS["make_folder"](path, 6, 4, labels=("background", "edema", "non-enhancing", "enhancing"), name="BRATS")
    for number, file in enumerate(sorted((path / "labelsTr").iterdir())):
        _, label = FOLDERS["scan"](number, FOLDERS["SIZES"][number % 3], 4, False)
        label[label.shape[0] // 2, label.shape[1] // 2] *= 2  # the third class, in place of some of the second
        FOLDERS["write"](file, np.where(label == 4, 3, label))


def prepared_tumours(path: Path) -> None:
    tumours(path.with_name("Task01_BrainTumour"))
    assert cli.main(["prepare", "decathlon", "--source", "Task01_BrainTumour", "--out", str(path), "--jobs", "1"]) == 0


def labels_of_test_cases(path: Path) -> None:
    for number in (6, 7):
        _, label = FOLDERS["scan"](number, FOLDERS["SIZES"][number % 3], 4, False)
        FOLDERS["write"](path / f"case_{number:03d}.nii.gz", label)


def folders_apart(path: Path) -> None:
    """Write the description of docs/reference/data_volumes.md, and the folders that it names."""
    [text] = [block.text for block in blocks("docs/reference/data_volumes.md") if block.language == "yaml"]
    path.write_text(text)
    LAYOUTS["folders"](path.parent, 6, "photos/scans", "labels/drawn")


def backbone(path: Path) -> None:
    """Write weights of the small network that stands in for ResNet-34."""
    spec = DataSpec(("a", "b"), 3, (48, 48), (0.5,) * 3, (0.2,) * 3)
    torch.save(ResNetConfig(depth=18, width=4).build(spec).state_dict(), path)


def classifier(path: Path) -> None:
    """Write weights of the demo's network, for other classes than the images have."""
    spec = DataSpec(("a", "b", "c"), 3, (64, 64), (0.5,) * 3, (0.2,) * 3)
    torch.save({"model": ResNetConfig(depth=18, width=32).build(spec).state_dict(), "epoch": 1}, path)


def stand_in(path: Path) -> None:
    """Write weights, for ten classes, of the small network that stands in for ResNet-50."""
    [arch] = [flag.partition("=")[2] for flag in TINY["ArchConfig"]]
    torch.save(torchvision.models.get_model(arch, num_classes=10).state_dict(), path)


def own_recipe() -> str:
    """Return the recipe of docs/howto/recipe.md."""
    [source] = [block.text for block in blocks("docs/howto/recipe.md") if "def recipe()" in block.text]
    return source


def own_config() -> str:
    """Return the YAML of docs/howto/recipe.md."""
    [text] = [block.text for block in blocks("docs/howto/recipe.md") if block.language == "yaml"]
    return text


def cuda_script(path: Path) -> None:
    """20 lines with AMP, pinned loader and two workers, on the lines that docs/howto/migration.md names."""
    path.write_text(CUDA_SCRIPT)


CUDA_SCRIPT = """import torch
from torch import nn
from torch.amp import GradScaler, autocast
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(256, 8), torch.randint(0, 2, (256,)))
loader = DataLoader(data, batch_size=32, num_workers=2, pin_memory=True)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler()
for epoch in range(2):
    for x, y in loader:
        x, y = x.cuda(non_blocking=True), y.to("cuda")
        with autocast("cuda"):
            loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    print(f"epoch {epoch} loss {loss.item():.4f} on {torch.cuda.get_device_name()}")
"""

INPUTS: dict[str, Callable[[Path], None]] = {
    "images": images,
    "PHOTOS": garden,
    "MASKS": lambda path: LAYOUTS["pictures"](path, 10) and None,
    "BOXES": boxes("coco"),
    "pets": pets,
    "animals": pets,
    "strays": pets,
    "garden": garden,
    "flowers": birds,
    "posters": posters,
    "xrays": scans,
    "photo.jpg": photo,
    "ILSVRC2012_img_train.tar": archive("train.tar"),
    "ILSVRC2012_img_val.tar": archive("val.tar"),
    "synset_labels.txt": archive("labels.txt"),
    "zips": lambda path: ZIPS["make_zips"](path, 20, 10) and None,
    "COCO": coco,
    "COCO80": coco_by_heart,
    "birds": boxes("coco"),
    "crows": boxes("coco_export"),
    "owls": boxes("coco_one"),
    "gulls.yaml": described_boxes,
    "cats": boxes("yolo"),
    "dogs": boxes("yolo_export"),
    "foxes": boxes("yolo_plain"),
    "ants": boxes("voc"),
    "bees": boxes("voc_export"),
    "flies": boxes("voc_plain"),
    "yard": TOOLS["cvat"],
    "resnet34.pth": backbone,
    "weights.pth": classifier,
    "resnet50.pth": stand_in,
    "Task04_Hippocampus": hippocampi,
    "Task04_Hippocampus.tar": packed,
    "Task01_BrainTumour": tumours,
    "Dataset027_ACDC": lambda path: LAYOUTS["nnunet"](path, 6, 2) and None,
    "scans": lambda path: LAYOUTS["folders"](path, 6, end="_seg") and None,
    "cells": lambda path: LAYOUTS["pictures"](path, 10) and None,
    "data.yaml": folders_apart,
    "BRATS": prepared_tumours,
    "LABELS": labels_of_test_cases,
    "my_recipe.py": lambda path: path.write_text(own_recipe()) and None,
    "mine.yaml": lambda path: path.write_text(own_config()) and None,
    "script.py": cuda_script,
    "train.py": cuda_script,
}

# How they are run

PREPARE = {
    "shapes": """--train-per-class=4 --val-per-class=2 --train-pictures=4 --val-pictures=2 --train-volumes=2
        --test-volumes=1""".split(),
    "imagenet": ["--jobs=1"],
    "coco": ["--jobs=1"],
    "decathlon": ["--jobs=1"],
    "convert": ["--jobs=1"],
    "static": ["--steps=2", "--data.size=48", "--data.max-boxes=8", "--data.classes=0"],
}
SCRIPTS = {"ranks": ["--steps=1", "--rounds=2", "--train.global-batch=8"], "published": []}
HERE = ["--run.device=cpu", "--run.workers=0"]


def tiny(words: list[str]) -> list[str]:
    """Return flags that make a command of sightline fast; the last of two values counts."""
    if words[0] == "prepare":
        shards = ["--shards=2", "--val-shards=1"] if "tfrecord" in words else []
        return PREPARE[words[1]] + shards
    if words[0] in ("evaluate", "predict") and words[1] not in recipes.names():
        return HERE if Path(words[1], "config.yaml").exists() else []
    if words[0] not in ("train", "evaluate", "check", "show", "benchmark") or "--help" in words:
        return []
    if words[0] in ("check", "show"):
        return ["--data.classes=0", "--run.workers=0"] if "unet2d" not in words else ["--run.workers=0"]
    recipe = recipes.find(words[1]).recipe() if not words[1].startswith("--") else None
    parts = [getattr(recipe, part.name) for part in fields(recipe)[1:]] if recipe else []
    flags = [flag for part in [*parts, config.Run()] for flag in TINY.get(type(part).__name__, [])]
    if recipe and recipe.plan and "--weights" not in words:
        flags += ["--model.weights=none"]  # no test asks a server
    kept = {"--train.global-batch", "--train.epochs", "--train.precision"} & set(words)
    flags = [flag for flag in flags if flag.partition("=")[0] not in {"--data.path", "--data.task", *kept}]
    if words[0] == "benchmark":
        if "--peers" in words and "demo_classification" in words:
            flags += ["--model.width=64", "--model.stem=7x7"]  # torchvision's ResNet-18, with which it is compared
        return [*flags, "--steps=1", "--warmup=1", "--repeats=1"]
    flags += ["--train.max-steps=2"] if "--run.profile" not in words else ["--train.epochs=6"]  # of five steps
    return [*flags, *(["--data.classes=0"] if "--data.classes=10" in flags else [])]


def carried_out(command: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """In this folder, with what it needs: the exit code, and what was said."""
    command, _, file = command.partition(" > ")
    words = [PLACEHOLDERS.get(word, word) for word in shlex.split(command)]
    words = [word for word in words if word]
    for name in {word.partition("/")[0] for word in words} & set(INPUTS):
        if not Path(name).exists():
            INPUTS[name](Path.cwd() / name)
    program = words.index("python") if "python" in words else 0
    if words[program] == "python":
        script = REPO / words[program + 1] if (REPO / words[program + 1]).exists() else words[program + 1]
        rest = [*words[program + 2 :], *SCRIPTS.get(words[-1], [])]
        return as_process([sys.executable, str(script), *rest], *words[:program])
    if "--run.devices" in words:
        words[words.index("--run.devices") + 1] = "2"
    words += tiny(words[1:])
    if "--run.devices" in words or words[1] == "migrate":
        return as_process([sys.executable, "-m", *words])
    capsys.readouterr()
    try:
        code = cli.main(words[1:])
    except SystemExit as end:  # --help
        code = end.code
    told = capsys.readouterr()
    if file:
        Path(file).write_text(told.out)
    return code, told.out + told.err


def as_process(words: list[str], *settings: str) -> tuple[int, str]:
    # docs/howto/migration.md exports the last.
    path = os.pathsep.join([str(REPO), str(REPO / "packages/migrate"), migrate.AUTOLOAD])
    environ = {**os.environ, "PYTHONPATH": path, **dict(each.split("=", 1) for each in settings)}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


def carry_out(shown: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for command in shown:
        code, said = carried_out(command, capsys)
        expected, message = EXPECTED.get(command, (0, ""))
        assert code == expected and message in said, f"{command}\nexit {code}\n{said}"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An empty folder to be in."""
    threads = torch.get_num_threads()
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    torch.set_num_threads(threads)


def is_slow(command: str) -> bool:
    return not SLOW.keys().isdisjoint(command.split())


RUN = {name: [command for command in commands(name) if command not in EXCEPTIONS] for name in DOCUMENTS}


@pytest.mark.parametrize("name", [name for name in RUN if not all(map(is_slow, RUN[name]))])
def test_commands_run(name: str, here: Path, capsys: pytest.CaptureFixture[str]):
    carry_out([command for command in RUN[name] if not is_slow(command)], capsys)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RUN if any(map(is_slow, RUN[name]))])
def test_all_commands_run(name: str, here: Path, capsys: pytest.CaptureFixture[str]):
    carry_out(RUN[name], capsys)


@pytest.mark.slow
def test_the_output_of_a_script_is_as_shown(here: Path, capsys: pytest.CaptureFixture[str]):
    if torch.cuda.is_available():
        pytest.skip("shows a machine without a GPU")
    [shown] = [block for block in blocks("docs/howto/migration.md") if "$ " in block.text]
    for command in ("sightline migrate scan train.py", "sightline migrate --syncs train.py"):
        said = carried_out(command, capsys)[1]
        assert len(shown.told(command)) >= 4 and [line for line in shown.told(command) if line not in said] == []


def test_what_is_excepted_is_still_shown():
    shown = {command for name in DOCUMENTS for command in commands(name)}
    assert {*EXCEPTIONS, *EXPECTED} - shown == set()
    assert {word for word in SLOW if not any(word in command.split() for command in shown)} == set()


def test_make_demo_is_that_of_the_page():
    makefile = (REPO / "Makefile").read_text(encoding="utf-8")
    recipe = makefile.partition("\ndemo:")[2].partition("\n\n")[0]
    lines = [line.strip().removeprefix("$(BIN)/") for line in recipe.splitlines()]
    assert [line for line in lines if line.startswith("sightline")] == blocks("docs/start/install.md")[1].commands()
    told = recipe.partition("printf")[2]
    assert "report: demo/run/report.html" in told
    following = re.findall(r"\$\(BIN\)/sightline (\w+) (\w+)", told)
    assert following == [("predict", "demo"), ("train", "classification")]


# What is not a command


class Wandb:
    """What docs/howto/trackers.md uses of Weights & Biases; keeps what it is given."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, str]] = []
        self.about: dict[str, Any] = {}
        self.alerts: list[str] = []

    def init(self, **about: Any) -> "Wandb":
        self.about = about
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged += [(step, name) for name in values]

    def alert(self, title: str, text: str) -> None:
        self.alerts.append(f"{title}: {text}")

    def finish(self, exit_code: int) -> None:
        self.about["exit_code"] = exit_code


@pytest.fixture
def tiny_api(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Here, where recipes of sightline.api are small, with what the examples read."""
    images(here / "demo" / "shapes" / "classification")
    (here / "pets").symlink_to(here / "demo" / "shapes" / "classification" / "train")
    photo(here / "photo.jpg")
    flags = [*tiny(["train", "demo_classification"]), "--data.classes=10", "--run.progress=off"]
    named = config.named

    def loaded(name: str, given: Any, file: None) -> Any:
        found = named(name, given, flags)
        return found.recipe, found.run

    monkeypatch.setattr(config, "named", lambda name, *given: named(name, *given, flags))
    monkeypatch.setattr(api, "load_named", loaded)
    return here


def test_the_examples_of_the_api_run_one_after_the_other(tiny_api: Path, monkeypatch, capsys):
    tracked = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", tracked)
    pages = ("docs/start/python.md", "docs/howto/trackers.md")
    scripts = [block.text for name in pages for block in blocks(name) if block.language == "python"]
    assert len(scripts) == 10 and sum(map(len, scripts)) > 2000
    capsys.readouterr()
    names = {"__name__": "__main__"}
    for script in scripts:
        exec(compile(script, "docs/start/python.md", "exec"), names)
    said = capsys.readouterr().out
    assert "steps are done runs/demo_classification\n" in said and "0.002 -> 0.1" in said
    assert [str(each.file) for each in names["found"][:2]] == ["photo.jpg", "pets/arrow/00000.jpg"]
    label = names["found"][0].label
    assert f"\n{label}\n[Classification(file='photo.jpg', label='{label}', " in said, "of the network, and of predict"
    assert (tracked.about["id"], tracked.about["exit_code"]) == ("tracked", 0)
    assert tracked.about["config"]["train.epochs"] and {(2, "train/loss"), (2, "evaluate/top1")} <= set(tracked.logged)
    assert any(text.startswith("warning: ") and "images are few" in text for text in tracked.alerts)
    logged = [json.loads(line) for line in (tiny_api / "runs/steps/log.jsonl").read_text().splitlines()]
    lines = [line for line in logged if line["event"] == "train"]
    assert names["hook"].rows == [(line["step"], line["loss"], line["lr"], line["images_per_s"]) for line in lines]
    assert [line["step"] for line in lines] == [1, 2] and f"step 2: loss {lines[1]['loss']:.3f}, rate " in said
    example = next(script for script in scripts if "wandb" in script)
    assert len([line for line in example.splitlines() if line.strip()]) <= 20


def test_the_smallest_json_of_boxes_is_read(here: Path, capsys: pytest.CaptureFixture[str]):
    [described] = [block.text for block in blocks("docs/reference/data_boxes.md") if block.language == "json"]
    for split in ("train", "val"):
        (here / "mine" / f"{split}2017").mkdir(parents=True)
        image = json.loads(described)["images"][0]
        noise = np.random.default_rng(len(split)).integers(0, 255, (image["height"], image["width"], 3), np.uint8)
        Image.fromarray(noise).save(here / "mine" / f"{split}2017" / image["file_name"])
        (here / "mine" / "annotations").mkdir(exist_ok=True)
        (here / "mine" / "annotations" / f"instances_{split}2017.json").write_text(described)
    assert cli.main(["check", "ssd_resnet34", "--data.path=mine", "--data.classes=0", "--run.workers=0"]) == 0
    assert "boxes per class        dog 1" in capsys.readouterr().out


def test_the_dataset_json_of_ones_own_is_prepared(here: Path, capsys: pytest.CaptureFixture[str]):
    [described] = [block.text for block in blocks("docs/reference/data_volumes.md") if block.language == "json"]
    about = json.loads(described)
    (here / "mine").mkdir()
    (here / "mine" / "dataset.json").write_text(described)
    image, label = FOLDERS["scan"](0, FOLDERS["SIZES"][0], 1, True)
    for part in about["training"]:
        FOLDERS["write"](here / "mine" / part["image"], image)
        FOLDERS["write"](here / "mine" / part["label"], np.minimum(label, 1))
    for name in about["test"]:
        FOLDERS["write"](here / "mine" / name, image)
    assert cli.main(["prepare", "decathlon", "--source=mine", "--out=out", "--task=own", "--jobs=1"]) == 0
    assert "prepared 1 case in " in capsys.readouterr().out


# Commands within sentences and tables are parsed


def inline(name: str) -> list[str]:
    """Those of sightline and of the scripts in benchmarks/; `... --flag` continues the one before."""
    text = re.sub(r"^```.*?^```", "", DOCUMENTS[name].read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found: list[str] = []
    for span in re.findall(r"`([^`]+)`", text):
        words = " ".join(span.split())
        if words.startswith("... --") and found:
            found.append(f"{found[-1]} {words[4:]}")
        elif words.startswith(("sightline ", "python benchmarks/")):
            found.append(words)
    return found


class Parsed(Exception):
    """Raised in the place of what would come next."""


WORDS = PLACEHOLDERS | {"TAR": "x.tar", "TXT": "x.txt", "STEP": "3", "CASE.nii.gz...": "x.nii.gz", "RUN": "run"}


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if inline(name)])
def test_commands_in_sentences_can_be_typed(name: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    (here / "demo" / "run").mkdir(parents=True)
    (here / "demo" / "run" / "config.yaml").write_text(store.dump(*config.load("demo_classification")))
    (here / "run").mkdir()
    said = config.asked

    def said_only(*words: Any) -> None:
        said(*words)
        raise Parsed

    def of_run(*_: Any) -> None:
        raise Parsed

    monkeypatch.setattr(config, "asked", said_only)
    monkeypatch.setattr(config, "of_run", of_run)
    for command in inline(name):
        words = [WORDS.get(word, word) for word in command.replace("[", "").replace("]", "").split()]
        words = [word for word in words if word]
        if words[0] == "python":
            source = (REPO / words[1]).read_text(encoding="utf-8")
            own = [word for word in words if word.startswith("--") and "." not in word]
            assert [word for word in own if f'"{word}"' not in source] == [], command
            continue
        if words[1:] == ["--help"]:
            with contextlib.suppress(SystemExit):
                cli.main(["--help"])
            listed = capsys.readouterr().out
            assert [each for each in cli.COMMANDS if f"\n  {each} " not in listed] == []
            continue
        assert words[1] in cli.COMMANDS, command
        if words[1] == "train" and words[-1] == "--help":
            assert cli.main(words[1:]) == 0, command
            continue
        takes_recipe = words[1] in ("train", "check", "benchmark", "inspect", "launch") and len(words) > 2
        if takes_recipe and words[1:3] != ["check", "run"]:
            with pytest.raises((Parsed, SystemExit)) as end:
                cli.main(words[1:])
            assert end.type is Parsed or end.value.code == 0, f"{command}\n{capsys.readouterr().err}"
            continue
        capsys.readouterr()
        with contextlib.suppress(SystemExit):
            cli.main([*words[1 : 3 if words[1] == "prepare" else 2], "--help"])
        own = [word for word in words if word.startswith("--") and "." not in word]
        known = capsys.readouterr().out
        assert [word for word in own if not re.search(rf"{word}\b", known)] == [], command
