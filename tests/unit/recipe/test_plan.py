"""What the recipes for anybody's data decide, what they say of it, and that a run keeps it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from sightline import config, recipes
from sightline.errors import UsageError
from sightline.hardware import early_cuda
from sightline.models import named_weights
from sightline.parts import DataSpec, ModelConfig
from sightline.recipe import store
from sightline.recipe.plan import Purpose
from sightline.recipe.recipe import MEASURED
from sightline.recipe.resolve import Resolved

FETCHED = b"weights as a server would send them"


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty caches, no GPU, and a network in which nobody answers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCH_HOME", raising=False)
    monkeypatch.setattr(named_weights, "PYTORCH", "http://127.0.0.1:9/")  # nobody listens there
    monkeypatch.setattr(early_cuda, "NODE", str(tmp_path / "no-driver"))


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of every trunk in the cache, under names that hold their checksum."""
    digest = hashlib.sha256(FETCHED).hexdigest()
    for name in named_weights.FILES:
        file = tmp_path / "cache/sightline/weights" / f"{name}-{digest[:8]}.pth"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(FETCHED)
        monkeypatch.setitem(named_weights.FILES, name, file.name)


def draw(folder: Path, counts: dict[str, int], size: tuple[int, int] = (40, 30)) -> Path:
    """Write class folders of noise; sizes are width and height."""
    random = np.random.default_rng(0)
    for name, count in counts.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = random.integers(0, 256, (size[1], size[0], 3), np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png", compress_level=0)
    return folder


def resolved(recipe: str, data: Path, *flags: str, purpose: Purpose = "train") -> Resolved:
    """Resolve what `sightline train` would."""
    asked = config.asked("train", [recipe, "--data", str(data), "--out", str(data.parent / "run"), *flags])
    return asked.resolved(needs_data=True, purpose=purpose)


def started(run: Path, found: Resolved, checkpoint: bool = True) -> None:
    """Leave what a start leaves that comes to its first checkpoint, or does not."""
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text(store.dump(found.recipe, found.run))
    if checkpoint:
        (run / "checkpoints/ckpt-00000001").mkdir(exist_ok=True)


def why(found: Resolved, name: str) -> str:
    return found.recipe.origins.get(name, "")


def test_weights_in_the_cache_are_tuned_head_first(tmp_path: Path, cached: None):
    found = resolved("classification", draw(tmp_path / "data", {"a": 12, "b": 12}))
    made = found.recipe
    assert (made.model.arch, made.model.weights) == ("resnet18", "torchvision:resnet18")
    assert made.train.head_epochs == 1 and made.optimizer.trunk_lr_scale < 1
    assert why(found, "model.weights").startswith("decided: ") and why(found, "train.epochs").endswith(" images")
    assert "torchvision:resnet18" in found.lines[-1] and "96 px" in found.lines[-1]
    assert (made.data.size, made.data.eval_size) == (96, 96)  # 30 pixels, enlarged


def test_without_weights_one_line_says_what_that_costs_and_how_to_get_them(tmp_path: Path):
    found = resolved("classification", draw(tmp_path / "data", {"a": 12, "b": 12}))
    made = found.recipe
    (line,) = (line for line in found.lines if "no pretrained weights" in line)
    place = tmp_path / "cache/sightline/weights" / named_weights.FILES["resnet18"]
    url = f"http://127.0.0.1:9/{named_weights.FILES['resnet18']}"
    assert "learns much less" in line and f"put {url} at {place}, or give `--weights FILE`, or `--weights none`" in line
    assert "weights (Connection refused): " in line
    assert (made.model.weights, made.train.head_epochs, made.optimizer.trunk_lr_scale) == ("", 0, 1.0)
    tuned_epochs = resolved("classification", tmp_path / "data", "--weights", "resnet18.pth").recipe.train.epochs
    assert made.train.epochs > tuned_epochs


@pytest.mark.parametrize("recipe", ["classification", "finetune_classification"])
def test_weights_none_means_random_ones_without_a_word(tmp_path: Path, recipe: str):
    found = resolved(recipe, draw(tmp_path / "data", {"a": 12, "b": 12}), "--weights", "none")
    assert found.recipe.model.weights == "" and not any("pretrained" in line for line in found.lines)


def test_given_weights_are_scored_on_images_of_their_own_size(tmp_path: Path):
    data = draw(tmp_path / "data", {"a": 12, "b": 30})
    made = resolved("classification", data, "--weights", "timm:tf_efficientnet_lite0", purpose="score").recipe
    assert made.model.arch == "timm:tf_efficientnet_lite0" and made.data.eval_size == 224
    assert made.data.class_weights == "none"
    made = resolved("detection", boxes(tmp_path / "boxes", 6, (64, 64)), "--weights", "x.pth", purpose="score").recipe
    assert made.data.size == 300


def test_a_command_that_does_not_train_asks_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fetch(*_: Any) -> None:
        raise AssertionError("asked")

    monkeypatch.setattr(named_weights, "fetch_by_name", fetch)
    found = resolved("classification", draw(tmp_path / "data", {"a": 12, "b": 12}), purpose="look")
    assert any("fetches torchvision:resnet18 first" in line for line in found.lines)
    assert found.recipe.train.head_epochs == 1  # as the training will have it


@pytest.mark.parametrize(
    ("weights", "arch"),
    [
        ("torchvision:resnet34", "resnet34"),
        ("torchvision:resnet34.IMAGENET1K_V1", "resnet34"),
        ("timm:test_vit.r160_in1k", "timm:test_vit.r160_in1k"),
        ("some/where/resnet101-63fe2227.pth", "resnet101"),
        ("tf_efficientnet_lite0.safetensors", "timm:tf_efficientnet_lite0"),
        ("best.pth", "resnet18"),  # the name tells nothing
    ],
)
def test_weights_that_were_typed_choose_their_network(tmp_path: Path, weights: str, arch: str):
    found = resolved("classification", draw(tmp_path / "data", {"a": 12, "b": 12}), "--weights", weights)
    assert (found.recipe.model.arch, found.recipe.model.weights) == (arch, weights)
    assert found.recipe.train.head_epochs == 1


@pytest.mark.parametrize(("arch", "size"), [("tf_efficientnet_lite0", 96), ("test_vit", 160)])
def test_small_images_stay_small_unless_the_network_has_one_size(tmp_path: Path, arch: str, size: int):
    data = draw(tmp_path / "data", {"a": 12, "b": 12})
    made = resolved("classification", data, "--weights", f"timm:{arch}").recipe
    assert (made.data.size, made.data.eval_size) == (size, size)
    assert made.data.mean == (0.5, 0.5, 0.5)  # as timm has it
    typed = resolved("classification", data, "--weights", f"timm:{arch}", "--data.eval-size", "192").recipe
    assert (typed.data.size, typed.data.eval_size) == (size, 192)


def test_a_run_as_weights_chooses_its_network(tmp_path: Path):
    earlier = resolved("classification", draw(tmp_path / "data", {"a": 12, "b": 12}), "--model.arch", "resnet34")
    (tmp_path / "earlier").mkdir()
    (tmp_path / "earlier/config.yaml").write_text(store.dump(earlier.recipe, earlier.run))
    found = resolved("classification", tmp_path / "data", "--weights", str(tmp_path / "earlier"))
    assert found.recipe.model.arch == "resnet34"


def test_what_was_typed_stays(tmp_path: Path, cached: None):
    flags = "--model.arch resnet34 --epochs 1 --lr 0.5 --data.size 64 --train.patience 0 --data.class-weights none"
    made = resolved("classification", draw(tmp_path / "data", {"a": 30, "b": 4}), *flags.split()).recipe
    assert (made.model.arch, made.model.weights) == ("resnet34", "torchvision:resnet34")
    assert (made.train.epochs, made.optimizer.lr, made.data.size, made.train.patience) == (1, 0.5, 64, 0)
    assert made.data.class_weights == "none" and made.train.head_epochs == 0  # which would be all of one epoch


@pytest.mark.parametrize(("counts", "weighted"), [((6, 17), "none"), ((5, 15), "balanced"), ((30, 6), "balanced")])
def test_classes_are_weighted_where_the_largest_has_three_times_the_smallest(
    tmp_path: Path, counts: tuple[int, int], weighted: str
):
    for split, share in (("train", counts), ("val", (2, 2))):
        draw(tmp_path / "data" / split, dict(zip("ab", share, strict=True)))
    found = resolved("classification", tmp_path / "data", "--weights", "none")
    assert found.recipe.data.class_weights == weighted
    assert ("classes weighted" in found.lines[-1]) == (weighted == "balanced")


def test_several_labels_per_image_are_not_weighted(tmp_path: Path):
    draw(tmp_path / "data/images", {"": 20})
    rows = [f"{n}.png,{'a;b' if n % 2 else 'a'}" for n in range(20)]
    (tmp_path / "data/labels.csv").write_text("\n".join(["file,label", *rows]))
    found = resolved("classification", tmp_path / "data", "--weights", "none")
    assert found.recipe.data.class_weights == "none" and "several labels per image" in found.lines[0]


@pytest.mark.parametrize(
    ("flags", "size"),
    [
        ("--weights tf_efficientnet_lite0.safetensors", 96),  # of timm, which would have 224
        ("--model.arch timm:tf_efficientnet_lite0 --weights none", 96),
        ("--weights timm:test_vit", 160),  # the only one that it takes
        ("--weights timm:tf_efficientnet_lite0 --data.size 64", 64),
    ],
)
def test_a_run_keeps_the_sizes_that_were_decided_against_its_networks_own(tmp_path: Path, flags: str, size: int):
    data = draw(tmp_path / "data", {"a": 12, "b": 12})
    first = resolved("classification", data, *flags.split())
    started(tmp_path / "run", first)
    again = resolved("classification", data, *flags.split())
    assert again.recipe == first.recipe and again.recipe.data.size == size
    assert again.recipe.origins == first.recipe.origins
    assert again.lines[1:] == first.lines[-1:]  # behind one on the data


def test_a_run_keeps_what_was_decided_at_its_start(tmp_path: Path, cached: None):
    data = draw(tmp_path / "data", {"a": 12, "b": 12})
    first = resolved("classification", data)
    started(tmp_path / "run", first)
    draw(data, {"a": 60, "b": 6}, (400, 300))  # as new data would be: larger, uneven
    for file in (tmp_path / "cache").rglob("*.pth"):
        file.unlink()

    again = resolved("classification", data)

    assert again.recipe == first.recipe
    assert again.recipe.origins == first.recipe.origins
    assert again.lines[1:] == first.lines[-1:] and not any("pretrained" in line for line in again.lines)
    another = resolved("classification", data, "--out", str(tmp_path / "another")).recipe
    assert another.data.class_weights == "balanced" and another.data.size == 160


@pytest.mark.parametrize(("val_images", "has_patience"), [(8, False), (99, False), (100, True)])
def test_patience_needs_enough_validation_images_to_tell_scores_apart(
    tmp_path: Path, val_images: int, has_patience: bool
):
    draw(tmp_path / "data/train", {"a": 12, "b": 12}, (4, 3))
    draw(tmp_path / "data/val", {"a": val_images // 2, "b": val_images - val_images // 2}, (4, 3))
    found = resolved("classification", tmp_path / "data", "--weights", "none", "--epochs", "20")
    assert found.recipe.train.patience == (8 if has_patience else 0)
    assert (f"{val_images} validation images are too few" in why(found, "train.patience")) is not has_patience


@pytest.mark.parametrize(("epochs", "warmup"), [(1, 0.05), (3, 0.15), (10, 0.5), (20, 1), (40, 1)])
def test_the_rate_rises_for_a_twentieth_of_a_short_run(tmp_path: Path, epochs: int, warmup: float):
    data = draw(tmp_path / "data", {"a": 12, "b": 12}, (4, 3))
    made = resolved("classification", data, "--weights", "none", "--epochs", str(epochs)).recipe
    assert made.schedule.warmup_epochs == warmup


def test_a_typed_value_of_the_resumed_run_still_wins(tmp_path: Path):
    data = draw(tmp_path / "data", {"a": 12, "b": 12})
    first = resolved("classification", data, "--weights", "none")
    started(tmp_path / "run", first)
    again = resolved("classification", data, "--weights", "none", "--epochs", "7").recipe
    assert again.train.epochs == 7 and again.train.patience == first.recipe.train.patience


def test_a_run_keeps_what_was_typed_at_its_start(tmp_path: Path, cached: None):
    data = draw(tmp_path / "data", {"a": 12, "b": 12}, (400, 300))
    config_file = tmp_path / "own.yaml"
    config_file.write_text("optimizer: {weight_decay: 0.25}\nrun: {workers: 3}\n")
    flags = "--epochs 3 --data.size 128 --model.arch resnet34 --data.mean 0.1 0.2 0.3".split()
    first = resolved("classification", data, "--config", str(config_file), *flags)
    ended = resolved("classification", data, "--config", str(config_file), *flags, "--train.max-steps", "5")
    started(tmp_path / "run", ended)

    again = resolved("classification", data)

    assert again.recipe == first.recipe
    assert again.recipe.train.max_steps == 0  # goes on
    assert {"run.workers": f"file: {config_file}", **again.recipe.origins} == first.recipe.origins
    assert (first.run.workers, again.run.workers) == (3, -1)  # how it is carried out is that of one start
    [line] = (line for line in again.lines if "was typed" in line)
    kept = "--model.arch resnet34, --data.size 128, --data.mean 0.1 0.2 0.3, --epochs 3"
    assert line == f"the run keeps what was typed when it was started: optimizer.weight_decay 0.25, {kept}"
    changed = resolved("classification", data, "--epochs", "9", "--lr", "0.5")
    assert (changed.recipe.train.epochs, changed.recipe.optimizer.lr, changed.recipe.data.size) == (9, 0.5, 128)
    shortest = resolved("classification", data, "--epochs", "1").recipe.train
    assert (first.recipe.train.head_epochs, shortest.head_epochs, shortest.epochs) == (1, 0, 1)
    assert not any("--epochs" in line for line in changed.lines)


@pytest.mark.parametrize("name", ["train.global_batch", "train.accumulation"])
def test_a_number_that_was_measured_for_auto_is_kept(tmp_path: Path, cached: None, name: str):
    data = draw(tmp_path / "data", {"a": 12, "b": 12}, (400, 300))
    flag = f"--{name}".replace("_", "-")
    first = resolved("classification", data, flag, "auto")
    measured = first.recipe.decided({name: 6}, MEASURED)
    started(tmp_path / "run", replace(first, recipe=measured))
    for start in range(3):  # also of a run that was resumed
        again = resolved("classification", data)
        assert getattr(again.recipe.train, name.partition(".")[2]) == 6, start
        assert f"the run keeps what was typed when it was started: {name} 6" in again.lines, start
        started(tmp_path / "run", again)
    assert resolved("classification", data, flag, "3").recipe.origins[name] == f"flag: {flag}"


def test_what_was_chosen_is_said_at_every_start(tmp_path: Path, cached: None):
    data = draw(tmp_path / "data", {"a": 60, "b": 12}, (400, 300))
    first = resolved("classification", data)
    [said] = (line for line in first.lines if line.startswith("chosen: "))
    assert "resnet18, weights torchvision:resnet18, 160 px, classes weighted (" in said
    started(tmp_path / "run", first)
    assert said in resolved("classification", data).lines
    less = resolved("classification", data, "--data.class-weights", "none")
    assert not any("weighted" in line for line in less.lines)
    assert not any("chosen" in line for line in resolved("classification", data, purpose="score").lines)


def test_what_belongs_to_one_start_is_not_kept_nor_what_no_recipe_has_now(tmp_path: Path, cached: None):
    data = draw(tmp_path / "data", {"a": 12, "b": 12}, (400, 300))
    first = resolved("classification", data, "--epochs", "3")
    flags = (
        "--train.patience 1 --train.min-epochs 2 --data.cache ram --data.decoder cpu --data.max-bad-samples 5".split()
    )
    started(tmp_path / "run", resolved("classification", data, "--epochs", "3", *flags))
    stored = tmp_path / "run/config.yaml"
    stored.write_text(stored.read_text().replace("origins:\n", "origins:\n  train.gone: 'flag: --gone'\n"))
    assert resolved("classification", data).recipe == first.recipe


def test_an_object_in_python_is_whole(tmp_path: Path, cached: None):
    data = draw(tmp_path / "data", {"a": 12, "b": 12}, (400, 300))
    words = ["--data", str(data), "--out", str(tmp_path / "run")]
    loaded, run = config.load("classification", [*words, "--optimizer.weight-decay", "0.3"])
    fresh = config.of_object(loaded, run)
    assert (fresh.recipe.model.arch, fresh.recipe.train.ema) == (loaded.model.arch, loaded.train.ema)
    assert "set in Python" not in " ".join(fresh.recipe.origins.values())
    started(tmp_path / "run", fresh)
    back = replace(loaded, optimizer=replace(loaded.optimizer, weight_decay=0.0))
    assert config.of_object(back, run).recipe.optimizer.weight_decay == 0  # not what was typed
    again = config.load("classification", words)[0]
    assert again.optimizer.weight_decay == 0.3
    assert config.of_object(again, run).recipe == fresh.recipe


def test_nothing_typed_is_kept_of_a_start_without_checkpoint_and_of_another_recipe(tmp_path: Path, cached: None):
    data = draw(tmp_path / "data", {"a": 12, "b": 12}, (400, 300))
    first = resolved("classification", data, "--data.size", "512")  # for which memory did not suffice
    started(tmp_path / "run", first, checkpoint=False)
    assert resolved("classification", data).recipe.data.size == 160
    typed = resolved("finetune_classification", data, "--epochs", "2")
    started(tmp_path / "finetuned", typed)
    for recipe, usual in (("finetune_classification", 20), ("classification", 10)):
        words = [recipe, "--data", str(data), "--out", str(tmp_path / "finetuned")]
        assert config.asked("train", words).resolved(purpose="train").recipe.train.epochs == usual


def test_a_look_at_a_recipe_leaves_out_the_run_that_has_its_name(
    tmp_path: Path, cached: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    data = draw(tmp_path / "data", {"a": 12, "b": 12}, (400, 300))
    asked = config.asked("inspect", ["classification", "--data", "data"])
    fresh = asked.resolved()
    started(Path("runs/classification"), resolved("classification", data, "--epochs", "3", "--data.size", "64"))
    names = [f"{name}/{number}.png" for name in "ab" for number in range(11)]  # all but two
    Path("runs/classification/split.json").write_text(json.dumps({"val": names}))

    assert (asked.resolved().recipe, asked.resolved().lines) == (fresh.recipe, fresh.lines)
    assert (fresh.recipe.data.size, fresh.facts.val_items) == (160, 4)
    named = config.asked("inspect", ["classification", "--data", "data", "--out", "runs/classification"])
    for found in (named.resolved(), asked.resolved(starts=True), asked.resolved(purpose="train")):
        assert (found.recipe.data.size, found.recipe.train.epochs, found.facts.val_items) == (64, 3, 22)


def test_a_recipe_that_was_loaded_before_decides_again(tmp_path: Path):
    """`api.load` asks no server, so a plan of the training may find that there are no weights."""
    data = draw(tmp_path / "data", {"a": 12, "b": 12})
    words = ["--data", str(data), "--out", str(tmp_path / "run")]
    loaded, run = config.load("classification", words)
    assert loaded.train.head_epochs == 1
    trained = config.of_object(loaded, run).recipe
    assert trained.train.head_epochs == 0 and trained.optimizer.trunk_lr_scale == 1
    changed = config.of_object(replace(loaded, train=replace(loaded.train, epochs=3)), run).recipe
    assert changed.train.epochs == 3  # replaced in Python: as if typed


@pytest.mark.parametrize(("images", "least", "most"), [(1, 100, 1_000), (50, 100, 1_000), (3_000, 400, 10_000)])
def test_steps_are_neither_few_nor_endless(tmp_path: Path, images: int, least: int, most: int):
    data = draw(tmp_path / "data/train", {"a": 1, "b": images - 1} if images > 1 else {"a": 1}, (4, 4)).parent
    draw(data / "val", {"a": 1, "b": 1} if images > 1 else {"a": 1}, (4, 4))
    made = resolved("classification", data, "--weights", "resnet18.pth").recipe
    steps = max(made.train.min_epoch_steps, images // made.train.global_batch) * made.train.epochs
    assert least <= steps <= most and made.train.epochs >= 4


@pytest.mark.parametrize(
    ("flags", "decay"),
    [
        ("", 1 - 1 / 15),
        ("--epochs 40", 1 - 1 / 60),
        ("--epochs 1", 0.5),
        ("--batch-size auto", 0.99),
        ("--epochs 9000", 0.999),
    ],
)
def test_weights_are_averaged_over_a_tenth_of_the_steps(tmp_path: Path, flags: str, decay: float):
    """Ten epochs of 15 steps; of one step nearly the last weights, of endless ones a thousand."""
    data = draw(tmp_path / "data", {"a": 12, "b": 12})
    words = ["--weights", "resnet18.pth", *flags.split()]
    assert resolved("classification", data, *words).recipe.train.ema == pytest.approx(decay, abs=1e-4)


def test_a_gpu_takes_a_larger_network_and_larger_images(tmp_path: Path):
    data = draw(tmp_path / "data", {"a": 6, "b": 6}, (600, 500))
    on_cpu = resolved("classification", data, purpose="look").recipe
    on_gpu = resolved("classification", data, "--device", "cuda", purpose="look").recipe
    assert (on_cpu.model.arch, on_cpu.data.size) == ("resnet18", 160)
    assert (on_gpu.model.arch, on_gpu.data.size) == ("resnet50", 224)


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, True), ("", False), ("-1", False), ("NONE", False), ("0", True)]
)
def test_a_gpu_is_expected_where_a_driver_is_and_nobody_hides_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: bool
):
    (tmp_path / "driver").touch()
    monkeypatch.setattr(early_cuda, "NODE", str(tmp_path / "driver"))
    monkeypatch.setattr(early_cuda, "_libraries", lambda: [tmp_path / "libtorch_cuda.so"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert early_cuda.is_expected("auto") == expected
    assert early_cuda.is_expected("cuda:1") and not early_cuda.is_expected("cpu")


@dataclass(frozen=True)
class Own(ModelConfig):
    """A network of one's own, which has no name and takes no weights."""

    def build(self, spec: DataSpec) -> torch.nn.Module:
        return torch.nn.Linear(1, len(spec.classes))


def test_a_network_of_ones_own_takes_what_the_data_decide(tmp_path: Path, cached: None):
    made = replace(recipes.find("classification").recipe(), name="own", model=Own())
    data = draw(tmp_path / "data", {"a": 5, "b": 30})
    found = config.of_object(made, config.Run(out=str(tmp_path / "run")), {"data": str(data)})
    assert found.recipe.data.class_weights == "balanced" and "your network, random weights" in found.lines[-1]


def test_files_of_weights_are_those_that_torchvision_names():
    for name, file in named_weights.FILES.items():
        weights = torchvision.models.get_model_weights(name)["DEFAULT"]
        assert weights.url == f"https://download.pytorch.org/models/{file}"


def test_weights_of_torchs_own_cache_are_taken_if_they_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    digest = hashlib.sha256(FETCHED).hexdigest()
    monkeypatch.setitem(named_weights.FILES, "resnet18", f"resnet18-{digest[:8]}.pth")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    file = tmp_path / "torch/hub/checkpoints" / named_weights.FILES["resnet18"]
    file.parent.mkdir(parents=True)
    file.write_bytes(FETCHED)
    assert named_weights.fetch_named("torchvision:resnet18") == file
    file.write_bytes(FETCHED[:-1])  # cut short
    assert not named_weights.is_cached("torchvision:resnet18")


def boxes(folder: Path, images: int, size: tuple[int, int]) -> Path:
    """Write noise with one box each, as COCO has it; both splits."""
    for split, count in (("train", images), ("val", 2)):
        draw(folder, {split: count}, size)
        listed = {
            "images": [{"id": n, "file_name": f"{n}.png", "width": size[0], "height": size[1]} for n in range(count)],
            "annotations": [
                {"id": n + 1, "image_id": n, "category_id": 1, "bbox": [1, 1, 9, 9], "area": 81, "iscrowd": 0}
                for n in range(count)
            ],
            "categories": [{"id": 1, "name": "thing"}],
        }
        (folder / split / "_annotations.coco.json").write_text(json.dumps(listed))
    return folder


@pytest.mark.parametrize(("side", "device", "size"), [(100, "cpu", 160), (300, "cpu", 300), (640, "cuda", 512)])
def test_a_detector_takes_its_size_from_the_images(tmp_path: Path, side: int, device: str, size: int):
    data = boxes(tmp_path / "data", 6, (side + 40, side))
    found = resolved("detection", data, "--device", device, purpose="look")
    assert found.recipe.data.size == size and f"{size} px" in found.lines[-1]
    assert found.recipe.model.depth == (34 if device == "cuda" else 18)


def test_a_detector_takes_the_trunk_of_its_weights(tmp_path: Path):
    data = boxes(tmp_path / "data", 6, (64, 64))
    assert resolved("detection", data, "--weights", "torchvision:resnet34").recipe.model.depth == 34
    for other in ("torchvision:resnet50", "tf_efficientnet_lite0.safetensors"):
        with pytest.raises(UsageError, match=f"{other} are those of .*; a detector starts from a ResNet-18"):
            resolved("detection", data, "--weights", other)
    earlier = resolved("detection", data, "--weights", "none")
    (tmp_path / "earlier").mkdir()
    (tmp_path / "earlier/config.yaml").write_text(store.dump(earlier.recipe, earlier.run))
    assert resolved("detection", data, "--weights", str(tmp_path / "earlier")).recipe.model.depth == 18
    found = resolved("detection", data)
    assert any("no pretrained weights" in line for line in found.lines)
    assert found.recipe.train.head_epochs == 0 and found.recipe.model.depth == 18


def masks(folder: Path, images: int, size: tuple[int, int]) -> Path:
    """Write noise with a mask of two classes for each image."""
    random = np.random.default_rng(0)
    for name, most, shape in (("images", 256, (size[1], size[0], 3)), ("masks", 2, (size[1], size[0]))):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(images):
            Image.fromarray(random.integers(0, most, shape, np.uint8)).save(
                folder / name / f"{number}.png", compress_level=0
            )
    return folder


@pytest.mark.parametrize(
    ("side", "device", "size"), [(50, "cpu", 64), (200, "cpu", 192), (400, "cpu", 256), (600, "cuda", 512)]
)
def test_crops_of_segmentation_lie_within_the_images(tmp_path: Path, side: int, device: str, size: int):
    data = masks(tmp_path / "data", 5, (side + 40, side))
    found = resolved("segmentation", data, "--device", device, purpose="look")
    assert found.recipe.data.size == size and f"crops of {size} px" in found.lines[-1]
    assert found.recipe.model.arch == ("resnet34" if device == "cuda" else "resnet18")


def test_segmentation_is_tuned_from_a_classifier_or_learns_from_scratch(tmp_path: Path, cached: None):
    data = masks(tmp_path / "data", 5, (64, 64))
    tuned = resolved("segmentation", data).recipe
    assert (tuned.model.weights, tuned.train.head_epochs) == ("torchvision:resnet18", 1)
    scratch = resolved("segmentation", data, "--weights", "none").recipe
    assert scratch.optimizer.trunk_lr_scale == 1 and scratch.train.head_epochs == 0
    assert scratch.train.epochs == 2 * tuned.train.epochs
    named = resolved("segmentation", data, "--weights", "tf_efficientnet_lite0.safetensors").recipe
    assert named.model.arch == "timm:tf_efficientnet_lite0"
