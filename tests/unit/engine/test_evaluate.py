"""An evaluation as a whole: every sample once for any batch size, names of the worst, and what cannot be scored."""

import dataclasses
from pathlib import Path

import pytest
import torch

from sightline import config
from sightline.config import Run, TrainConfig
from sightline.data.classification import ClassificationData
from sightline.data.loading.loader import BadSamples, Loader
from sightline.data.loading.order import EvalOrder
from sightline.data.prepare.shapes import ShapesOptions, prepare
from sightline.engine.evaluate import _file_of, evaluate
from sightline.errors import BadData
from sightline.hardware import devices
from sightline.hardware.world import World
from sightline.metrics.topk import TopK
from sightline.models.resnet import ResNetConfig
from sightline.recipes import demo_classification
from sightline.tasks.classification import Classification

CPU = devices.select("cpu")
DATA = ClassificationData(size=16, eval_resize=16, eval_size=16)


def scored(
    path: Path | str,
    batch: int,
    on_batch=lambda done, total: None,
    precision: str = "fp32",
    world: World = World(),  # noqa: B008  # frozen
    **changes,
):
    config = dataclasses.replace(DATA, path=str(path), **changes)
    dataset = config.open("val", seed=0)
    torch.manual_seed(0)
    model = ResNetConfig(depth=18, width=4).build(dataset.spec)
    bound = dataset.bind(CPU, batch)
    bad_samples = BadSamples(config.on_bad_sample, config.max_bad_samples, lambda bad: None)
    feeds = {"val": (bound, EvalOrder(len(dataset), batch))}
    loader = Loader(feeds, Run(workers=0), CPU, World(), bad_samples, lambda: None)
    recipe = dataclasses.replace(
        demo_classification.recipe(),
        task=Classification(0.1),
        train=TrainConfig(epochs=1, global_batch=batch, precision=precision),
    )
    scores = evaluate(model, recipe, bound, loader, CPU, world, on_batch)
    return scores, model, dataset


def test_every_batch_size_gives_the_same_scores_as_one_by_one(shapes: Path):
    whole, model, dataset = scored(shapes, 40)
    hits = 0
    for index in range(len(dataset)):
        sample = {key: torch.as_tensor(value)[None] for key, value in dataset.load(0, index).items()}
        hits += int(model(dataset.finish(sample, torch.float32)["image"]).argmax(1) == sample["label"])
    assert whole.values["top1"] == hits / 40
    for batch in (1, 7, 16, 39, 64):
        other, *_ = scored(shapes, batch)
        assert other.values == pytest.approx(whole.values, rel=1e-5)
        assert other.values["samples"] == 40
        assert other.tables == whole.tables


def test_worst_samples_have_names(shapes: Path):
    scores, _, dataset = scored(shapes, 16)
    assert scores.worst
    for row in scores.worst:
        assert row["name"] == dataset.name(row["index"])
        assert row["name"].startswith(f"{row['class']}/")


def test_progress_is_reported_between_batches(shapes: Path):
    told = []
    scored(shapes, 16, lambda done, total: told.append((done, total)))
    assert told == [(0, 3), (1, 3), (2, 3)]


def test_the_model_is_left_as_it_was_but_for_its_mode(shapes: Path):
    dataset_spec = dataclasses.replace(DATA, path=str(shapes)).open("val", 0).spec
    torch.manual_seed(0)
    fresh = ResNetConfig(depth=18, width=4).build(dataset_spec).state_dict()
    _, model, _ = scored(shapes, 16)
    assert not model.training
    assert all(torch.equal(value, fresh[name]) for name, value in model.state_dict().items())
    assert not any(value.is_inference() for value in model.state_dict().values())


def test_precision_is_used(shapes: Path):
    exact, coarse = (scored(shapes, 16, precision=precision)[0].values["loss"] for precision in ("fp32", "bf16"))
    assert exact != coarse and exact == pytest.approx(coarse, rel=0.05)


@pytest.fixture
def spoilt(shapes: Path, tmp_path: Path) -> Path:
    """The shapes, with links in place of copies and some val files that are not images."""
    root = tmp_path / "spoilt"
    for path in shapes.rglob("*"):
        if path.is_file() and path.suffix != ".json":
            target = root / path.relative_to(shapes)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(path)
    return root


def spoil(root: Path, count: int) -> None:
    for path in sorted(p for p in (root / "val").rglob("*") if p.is_symlink())[:count]:
        path.unlink()
        path.write_text("not an image")


def test_skipped_samples_are_reported_and_not_counted(spoilt: Path, shapes: Path):
    spoil(spoilt, 3)
    scores, *_ = scored(spoilt, 16, on_bad_sample="skip")
    assert scores.values["samples"] == 37 and scores.values["skipped"] == 3
    whole, *_ = scored(shapes, 16)
    # Their own samples decide the accuracy of classes; their precision and F1 also those of others.
    own, of_whole = ([{**row, "precision": None, "f1": None} for row in s.tables["classes"]] for s in (scores, whole))
    assert own[1:] == of_whole[1:] and own[0]["samples"] == 1
    assert "skipped" not in whole.values


def test_a_split_without_one_readable_sample_is_bad_data(spoilt: Path):
    spoil(spoilt, 40)
    with pytest.raises(BadData):
        scored(spoilt, 16, on_bad_sample="skip")


def test_scores_that_take_long_are_announced_to_the_watchdog(shapes: Path, monkeypatch: pytest.MonkeyPatch):
    """After the last batch COCO's figures take minutes, in which no rank does a step."""
    happened = []

    def noted(call):
        def noting(self, *arguments):
            happened.append(call.__name__)
            return call(self, *arguments)

        return noting

    for name in ("update", "merge", "result"):
        monkeypatch.setattr(TopK, name, noted(getattr(TopK, name)))
    world = World(beat=lambda is_long=False: happened.append("long" if is_long else "beat"))
    scored(shapes, 20, lambda done, total: world.beat(), world=world)
    assert happened == ["beat", "update", "beat", "update", "long", "merge", "result"]


def test_worst_samples_have_the_path_that_predict_takes(shapes: Path, tmp_path: Path):
    """Class folders name their images within the split, COCO from the folder of the split on."""
    amounts = {"only": ("detection",), "train_pictures": 2, "val_pictures": 2}
    prepare(ShapesOptions(tmp_path, **amounts), lambda what, done, total: None)
    for recipe, path in (("demo_classification", shapes), ("demo_detection", tmp_path / "detection")):
        dataset = config.load(recipe, ["--data.path", str(path)])[0].data.open("val", 0)
        found = Path(_file_of(dataset, dataset.name(1)))
        assert found.is_absolute() and found.is_file() and found.is_relative_to(path) and found.name in dataset.name(1)
        assert _file_of(dataset, "absent.jpg") == ""
    synthetic = config.load("demo_classification", ["--data.path", "synthetic:classes=10,samples=24,size=24"])[0]
    dataset = synthetic.data.open("val", 0)
    assert _file_of(dataset, dataset.name(0)) == ""
