"""`sightline export`, and `sightline predict` with what it wrote, as a user types them."""

import contextlib
import json
import math
import re
import resource
import runpy
import shutil
import sys
from pathlib import Path

import nibabel
import numpy as np
import pytest
import tiny
import torch
from hostile_pt2 import ATTACKS, changed, hostile
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sightline import api, cli, config
from sightline.engine import checkpoint
from sightline.engine.progress import TrainProgress
from sightline.errors import UsageError
from sightline.export.formats import onnx as onnx_format
from sightline.export.formats import torch_export
from sightline.parts import DataSpec
from sightline.recipe import store

onnx = pytest.importorskip("onnx", reason="needs the extra export: onnx, onnxscript, onnxruntime")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra export")
pytest.importorskip("onnxscript", reason="needs the extra export")

REPO = Path(__file__).resolve().parents[2]
HERE = [*tiny.HERE, "--run.progress=off"]
BOXES = ["--data.path=synthetic:classes=3,samples=8,size=40", "--data.classes=3", "--data.size=32"]
SHOWN = ["--score-threshold=0.3"]
SLICES = DataSpec(("background", "disc"), 1, (16, 16), (), ())


def export(run: Path, *words: str) -> None:
    """Write one format, and what is said into said.txt."""
    with (run / "said.txt").open("a") as said, contextlib.redirect_stdout(said):
        assert cli.main(["export", str(run), *words, *HERE]) == 0


# Torch takes a second and a half to write a ResNet-18; tests/corpus exports one.
FEW_LAYERS = '''
"""demo_classification with a convolution, a norm and a linear layer."""
from dataclasses import dataclass, replace

from torch import nn

from sightline.parts import ModelConfig
from sightline.recipes import demo_classification


@dataclass(frozen=True)
class NetConfig(ModelConfig):
    def build(self, spec):
        cells = (spec.size[0] // 8) ** 2
        trunk = nn.Conv2d(3, 16, 8, 8, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten()
        return nn.Sequential(*trunk, nn.Linear(16 * cells, len(spec.classes)))


def recipe():
    return replace(demo_classification.recipe(), name="few_layers", model=NetConfig())
'''


@pytest.fixture(scope="module")
def classifier(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with model.onnx; for reading only."""
    file = tmp_path_factory.mktemp("classifier") / "few_layers.py"
    file.write_text(FEW_LAYERS)
    out = file.with_name("run")
    flags = [
        f"--data.path={shapes}",
        f"--run.out={out}",
        "--train.epochs=3",
        "--train.global-batch=16",
        "--data.size=24",
    ]
    assert cli.main(["train", str(file), *HERE, *flags, "--data.eval-resize=24", "--data.eval-size=24"]) == 0
    export(out, *recipe_of(out), "--format", "onnx")
    return out


FEW_BOXES = '''
"""demo_detection with two convolutions: the graph of its SSD takes five times as long to write."""
from dataclasses import dataclass, replace

from torch import nn

from sightline.models.anchors import default_boxes
from sightline.parts import ModelConfig
from sightline.recipes import demo_detection


class Net(nn.Module):
    def __init__(self, size, classes):
        super().__init__()
        cells = size // 8
        anchors = default_boxes(size, [cells], [8], [size / 3, size / 2], [[2]])
        self.answers = len(anchors) // cells**2, classes + 4
        self.trunk = nn.Conv2d(3, 8, 8, 8)
        self.head = nn.Conv2d(8, self.answers[0] * self.answers[1], 3, padding=1)
        self.register_buffer("anchors", anchors, persistent=False)

    def forward(self, pixels):
        found = self.head(self.trunk(pixels).relu()).permute(0, 2, 3, 1)
        found = found.reshape(pixels.shape[0], -1, self.answers[1])
        logits, offsets = found.split([self.answers[1] - 4, 4], dim=2)
        return logits, offsets, self.anchors


@dataclass(frozen=True)
class NetConfig(ModelConfig):
    def build(self, spec):
        return Net(spec.size[0], len(spec.classes) + 1)


def recipe():
    base = demo_detection.recipe()
    return replace(base, name="few_layers", model=NetConfig())
'''


@pytest.fixture(scope="module")
def detector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with model.onnx and model-raw.pt2; for reading only."""
    file = tmp_path_factory.mktemp("detector") / "few_layers.py"
    file.write_text(FEW_BOXES)
    out = file.with_name("run")
    flags = [f"--run.out={out}", "--train.global-batch=4", "--train.epochs=1", "--train.eval-every-epochs=1"]
    flags += ["--task.candidates=20", "--task.score-threshold=0.3"]  # random weights give each of four classes 1/4
    assert cli.main(["train", str(file), *BOXES, *HERE, *flags]) == 0
    export(out, *recipe_of(out))
    export(out, *recipe_of(out), "--raw", "--format=torch-export")
    return out


def recipe_of(run: Path) -> tuple[str, str]:
    return "--recipe", f"{run.parent}/few_layers.py"


@pytest.fixture(scope="module")
def segmenter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a U-Net with deep supervision and an average that is not its weights, without its data."""
    recipe, _ = config.load("demo_segmentation", ["--model.width=4", "--model.aux-heads=1"])
    stems = {}
    for seed, stem in enumerate(("model", "ema")):
        torch.manual_seed(seed)
        stems[stem] = recipe.model.build(SLICES).state_dict()
    run = tmp_path_factory.mktemp("segmenter") / "run"
    state = {"recipe": store.to_json(recipe), "spec": SLICES.to_json(), "progress": vars(TrainProgress(step=3))}
    checkpoint.write(run / "checkpoints" / "ckpt-00000003", stems, state)
    return run


def findings(folder: Path) -> list[dict]:
    return json.loads((folder / "predictions.json").read_text())["files"]


def same(ours: list[dict], theirs: list[dict]) -> None:
    """Compare files, classes, scores and boxes of two predictions."""
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["file"] == other["file"]
        assert [found["class"] for found in mine["found"]] == [found["class"] for found in other["found"]]
        for a, b in zip(mine["found"], other["found"], strict=True):
            assert b["score"] == pytest.approx(a["score"], abs=1e-5)
            assert b.get("box") == pytest.approx(a.get("box"), abs=0.02)


@pytest.mark.parametrize("words", [HERE[:3], [*HERE[:3], "--task.tta"]], ids=["", "tta"])
def test_predict_says_the_same_of_a_classifier(
    words: list[str], classifier: Path, shapes: Path, tmp_path: Path, sightline
):
    words = [*words, *recipe_of(classifier)]
    run = sightline("predict", classifier, shapes / "val", "--out", tmp_path / "a", *words)
    file = sightline("predict", classifier / "model.onnx", shapes / "val", "--out", tmp_path / "b", *words)
    assert run.code == file.code == 0, file
    same(findings(tmp_path / "a"), findings(tmp_path / "b"))
    assert [line.split() for line in run.out.splitlines()[:-1]] == [line.split() for line in file.out.splitlines()[:-1]]
    assert sorted(p.name for p in (tmp_path / "a").rglob("*")) == sorted(p.name for p in (tmp_path / "b").rglob("*"))


def test_export_reports_the_difference_and_describes_the_file(classifier: Path):
    said = (classifier / "said.txt").read_text().splitlines()
    assert re.fullmatch(r"3 random inputs: largest relative difference of logits \S+e-0[678]", said[0])
    assert re.fullmatch(r"2 inputs of the val split: largest relative difference of logits \S+e-0[678]", said[1])
    assert re.fullmatch(r"wrote \S+/model.onnx: 0.\d MB, ONNX, opset 18, weights of ckpt-\d+", said[2])
    session = onnxruntime.InferenceSession(classifier / "model.onnx")
    about = json.loads(session.get_modelmeta().custom_metadata_map["sightline"])
    assert (about["task"], about["activation"], about["outputs"]) == ("classification", "softmax", ["logits"])
    assert about["input"] == {"name": "image", "axes": "NHWC", "shape": ["batch", 24, 24, 3], "dtype": "uint8"}
    assert session.get_inputs()[0].shape == ["batch", 24, 24, 3]
    assert {key: about["preprocessing"][key] for key in ("resize", "crop", "interpolation")} == {
        "resize": 24,
        "crop": 24,
        "interpolation": "bilinear",
    }
    assert about["recipe"]["data"]["path"] == ""
    manifest = json.loads((classifier / "checkpoints" / about["checkpoint"]["name"] / "manifest.json").read_text())
    assert about["checkpoint"]["sha256"] == manifest["files"]["model.safetensors"]["sha256"]
    assert about["classes"] == sorted(about["classes"]) and len(about["classes"]) == 10
    for batch in (1, 5):
        [logits] = session.run(None, {"image": np.zeros((batch, 24, 24, 3), np.uint8)})
        assert logits.shape == (batch, 10)


def test_the_serving_example_names_the_class_that_predict_names(
    classifier: Path, shapes: Path, tmp_path: Path, sightline, monkeypatch: pytest.MonkeyPatch, capsys
):
    [program] = re.findall(
        r"^```python\n(.*?)^```", (REPO / "docs/howto/export.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert "sightline" not in re.sub(r'\["sightline"\]', "", program)
    (tmp_path / "serve.py").write_text(program)
    words = ["predict", classifier, shapes / "val", "--out", tmp_path / "out", "--no-draw"]
    assert sightline(*words, *HERE, *recipe_of(classifier)).code == 0
    sure = [row for row in findings(tmp_path / "out") if row["found"][0]["score"] > row["found"][1]["score"] + 0.05]
    assert len(sure) >= 5
    for row in sure:
        monkeypatch.setattr(sys, "argv", ["serve.py", str(classifier / "model.onnx"), row["path"]])
        capsys.readouterr()
        runpy.run_path(str(tmp_path / "serve.py"))
        name, score = capsys.readouterr().out.split()
        assert name == row["found"][0]["class"]
        assert float(score) == pytest.approx(row["found"][0]["score"], abs=0.05)  # Pillow's filter rounds otherwise


@pytest.mark.parametrize("name", ["model.onnx", "model-raw.pt2"])
def test_predict_says_the_same_of_a_detector(
    name: str, detector: Path, shapes: Path, tmp_path: Path, sightline, boxes_of_run: list[dict]
):
    words = ["predict", detector / name, shapes / "val", "--out", tmp_path, *recipe_of(detector)]
    file = sightline(*words, *SHOWN, "--no-draw", *HERE, *(["--trust"] if name.endswith(".pt2") else []))
    assert file.code == 0, file
    same(boxes_of_run, findings(tmp_path))


@pytest.fixture(scope="module")
def boxes_of_run(detector: Path, shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    out = tmp_path_factory.mktemp("boxes")
    words = ["predict", str(detector), str(shapes / "val"), f"--out={out}", *recipe_of(detector)]
    assert cli.main([*words, *SHOWN, "--no-draw", *HERE]) == 0
    assert sum(len(row["found"]) for row in findings(out)) > 50
    return findings(out)


def test_a_detector_chooses_boxes_inside_the_graph_unless_raw(detector: Path):
    said = (detector / "said.txt").read_text()
    pairs, total = re.findall(r"after NMS: (\d+) of (\d+) boxes match, scores and corners to \S+e-0[678]\n", said)[0]
    assert pairs == total and int(total) > 0
    whole = onnx.load(detector / "model.onnx").graph
    assert [output.name for output in whole.output] == ["boxes", "scores", "labels", "count"]
    assert "NonMaxSuppression" in {node.op_type for node in whole.node}
    raw = torch_export.load(detector / "model-raw.pt2", trust=True)
    logits, offsets, anchors = raw(torch.zeros(5, 32, 32, 3, dtype=torch.uint8))
    assert logits.shape == (5, len(anchors), 4) and offsets.shape == (5, len(anchors), 4) and anchors.shape[1] == 4
    session = onnxruntime.InferenceSession(detector / "model.onnx")
    image = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), np.uint8)
    _, scores, labels, count = session.run(None, {"image": image})
    assert (count == (labels > 0).sum(1)).all() and (scores[labels > 0] > 0.3).all() and count.max() > 0


@pytest.mark.parametrize("flags", [["--score-threshold=0.1"], ["--top=900"], ["--task.nms-iou=0.3"]])
def test_a_file_refuses_to_show_boxes_that_it_does_not_keep(
    flags: list[str], detector: Path, shapes: Path, tmp_path: Path, sightline
):
    words = ["predict", detector / "model.onnx", shapes / "val", "--out", tmp_path / "out", *recipe_of(detector)]
    said = sightline(*words, *flags, *HERE)
    assert said.code == 2 and "model.onnx" in said.err and not (tmp_path / "out").exists()


def test_a_unet_is_its_average_without_the_heads_of_deep_supervision(segmenter: Path, tmp_path: Path, sightline):
    shutil.copytree(segmenter, tmp_path / "run")
    said = sightline("export", tmp_path / "run", *HERE)
    assert said.code == 0 and "averaged weights of ckpt-00000003" in said.out
    assert "compared on random input only: " in said.out and "--data.path" in said.out
    graph = onnx.load(tmp_path / "run" / "model.onnx").graph
    names = {each.name for each in graph.initializer}
    assert [output.name for output in graph.output] == ["logits"]
    assert any("heads.0" in name for name in names) and not any("heads.1" in name for name in names)
    recipe, _ = config.load("demo_segmentation", ["--model.width=4", "--model.aux-heads=1"])
    model = recipe.model.build(SLICES)
    model.load_state_dict(load_file(segmenter / "checkpoints" / "ckpt-00000003" / "ema.safetensors"))
    image = torch.randn(3, 1, 16, 16)
    with torch.inference_mode():
        expected = model.eval()(image)
    [logits] = onnxruntime.InferenceSession(tmp_path / "run" / "model.onnx").run(None, {"image": image.numpy()})
    np.testing.assert_allclose(logits, expected, atol=1e-4)

    scan = np.random.default_rng(0).normal(100, 20, (20, 24, 3)).astype(np.float32)  # larger than the patch
    nibabel.save(nibabel.Nifti1Image(scan, np.eye(4)), tmp_path / "scan.nii.gz")
    masks = []
    for number, given in enumerate(("run", "run/model.onnx")):
        out = tmp_path / f"out{number}"
        said = sightline("predict", tmp_path / given, tmp_path / "scan.nii.gz", "--out", out, "--no-draw", *HERE)
        assert said.code == 0, said
        masks.append(np.asarray(nibabel.load(out / "scan.nii.gz").dataobj))
    assert masks[0].any() and (masks[0] == masks[1]).mean() > 0.99


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["onnx", "torch-export"])
def test_a_run_that_loads_normalised_images_is_exported_for_pixels(kind: str, shapes: Path, tmp_path: Path, sightline):
    recipe, _ = config.load("demo_classification", [*tiny.SMALL, "--data.image-type=fp32", f"--data.path={shapes}"])
    spec = recipe.data.open("val", 0).spec
    state = {"recipe": store.to_json(recipe), "spec": spec.to_json(), "progress": vars(TrainProgress(step=1))}
    checkpoint.write(tmp_path / "run", {"model": recipe.model.build(spec).state_dict()}, state)
    assert sightline("export", tmp_path / "run", "--format", kind, *HERE).code == 0
    [file] = (tmp_path / "run").glob("model.[op]*")
    for given, out in ((tmp_path / "run", "a"), (file, "b")):
        words = ["predict", given, shapes / "val", "--out", tmp_path / out, "--no-draw", "--trust", *HERE]
        assert sightline(*words).code == 0
    same(findings(tmp_path / "a"), findings(tmp_path / "b"))


@pytest.fixture(scope="module")
def archive(classifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The classifier as .pt2; for reading only."""
    path = tmp_path_factory.mktemp("archive") / "net.pt2"
    export(classifier, *recipe_of(classifier), "--format=torch-export", f"--out={path}")
    return path


def test_a_pt2_of_anyone_predicts_only_with_trust(
    classifier: Path, archive: Path, shapes: Path, tmp_path: Path, sightline
):
    more = [shapes / "val", "--no-draw", *HERE, *recipe_of(classifier)]
    words = ["predict", archive, *more, "--out", tmp_path / "a"]
    said = sightline(*words)
    assert said.code == 2 and f"{archive} is an exported program: loading it can run code" in said.err, said
    assert "add --trust" in said.err and "export to ONNX, or use the run folder" in said.err
    assert not (tmp_path / "a").exists()
    assert sightline(*words, "--trust").code == 0
    assert sightline("predict", classifier, *more, "--out", tmp_path / "b").code == 0
    same(findings(tmp_path / "b"), findings(tmp_path / "a"))
    image = findings(tmp_path / "a")[0]["path"]
    with pytest.raises(UsageError, match="in Python trust=True"):
        api.predict(archive, image)
    [found] = api.predict(archive, image, trust=True, recipe_file=recipe_of(classifier)[1])
    assert found.label == findings(tmp_path / "a")[0]["found"][0]["class"]


@pytest.mark.parametrize("kind", ["pt2", "onnx"])
def test_the_folder_of_all_folds_names_no_exported_file(
    kind: str, classifier: Path, archive: Path, shapes: Path, tmp_path: Path, sightline
):
    """With --trust for one's own file, folds.json of a stranger must not add another."""
    (tmp_path / "set").mkdir()
    strange = shutil.copy(archive if kind == "pt2" else classifier / "model.onnx", tmp_path / "set" / f"fold-0.{kind}")
    (tmp_path / "set" / "folds.json").write_text(json.dumps({"folds": [{"folder": f"fold-0.{kind}"}]}))
    words = ["predict", archive, next(shapes.glob("val/*/*.jpg")), tmp_path / "set"]
    said = sightline(*words, "--out", tmp_path / "out", "--no-draw", "--trust", *HERE, *recipe_of(classifier))
    assert said.code == 4 and f"{strange} is neither a run folder nor a checkpoint" in said.err, said


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("place", ["first", "--with", "input"])
def test_the_code_of_a_hostile_pt2_never_runs(
    attack: str, place: str, classifier: Path, archive: Path, shapes: Path, tmp_path: Path, sightline, monkeypatch
):
    (tmp_path / "folder").mkdir()
    image = shutil.copy(next(shapes.glob("val/*/*.jpg")), tmp_path / "folder" / "a.jpg")
    evil, ran = hostile(archive, tmp_path, attack, monkeypatch)
    given = {
        "first": [evil, image],
        "--with": [classifier, "--with", evil, image],
        "input": [classifier, image, evil],  # as `predict RUN folder/*` becomes
    }[place]
    said = sightline("predict", *given, "--out", tmp_path / "out", "--no-draw", *HERE, *recipe_of(classifier))
    if place == "input":
        assert said.code == 3 and "1 of 2 files cannot be read: evil.pt2" in said.err, said
        assert "evil.pt2 is read as an input, not as a network" in said.out
        assert [row["file"] for row in findings(tmp_path / "out")] == ["a.jpg"]
    else:
        assert said.code == 2 and "evil.pt2 is an exported program" in said.err, said
    assert not ran()


def test_exported_files_among_images_are_inputs_like_any_other_file(
    classifier: Path, archive: Path, shapes: Path, tmp_path: Path, sightline
):
    """What a stranger's folder holds beside images does not change what is said of them."""
    shutil.copytree(shapes / "val" / "ring", tmp_path / "folder")
    more = ["--no-draw", *HERE, *recipe_of(classifier)]
    alone = sightline("predict", classifier, tmp_path / "folder", "--out", tmp_path / "a", *more)
    shutil.copy(classifier / "model.onnx", tmp_path / "folder" / "a.onnx")
    changed(archive, tmp_path / "folder" / "z.pt2")
    (tmp_path / "folder" / "notes.txt").write_text("by a stranger")
    words = ["predict", classifier, *sorted((tmp_path / "folder").iterdir()), "--trust", *more]
    said = sightline(*words, "--out", tmp_path / "b")
    assert said.code == 3 and "3 of 7 files cannot be read: a.onnx, notes.txt, z.pt2" in said.err, said
    assert sightline(*words, "--out", tmp_path / "c", "--data.on-bad-sample=skip").code == 0
    assert alone.code == 0
    assert findings(tmp_path / "a") == findings(tmp_path / "b") == findings(tmp_path / "c")


def test_with_averages_exported_files_and_runs(
    classifier: Path, archive: Path, shapes: Path, tmp_path: Path, sightline
):
    tensors, state = checkpoint.read(checkpoint.find(classifier, "best"))
    torch.manual_seed(0)
    tensors["model"] = {
        name: value + torch.randn_like(value) * 0.3 if name.endswith("weight") else value
        for name, value in tensors["model"].items()
    }
    checkpoint.write(tmp_path / "other", {"model": tensors["model"]}, state)
    image, shares = next(shapes.glob("val/*/*.jpg")), []
    names = [classifier / "model.onnx", tmp_path / "other", archive]
    together = [names[0], "--with", names[1], "--with", names[2]]
    for number, given in enumerate([*([name] for name in names), together]):
        out = tmp_path / str(number)
        words = ["predict", *given, image, "--out", out, "--no-draw", "--trust", "--top=10", *HERE[:4]]
        said = sightline(*words, *recipe_of(classifier))
        assert said.code == 0, said
        shares.append({found["class"]: found["score"] for found in findings(out)[0]["found"]})
    assert "the probabilities of 3 runs are averaged: " + ", ".join(map(str, names)) in said.out.replace("\n", "")
    for name, mean in shares[3].items():
        assert mean == pytest.approx(sum(alone[name] for alone in shares[:3]) / 3, abs=1e-4)
    assert max(abs(shares[0][name] - shares[1][name]) for name in shares[0]) > 0.01


@pytest.mark.parametrize("kind", ["safetensors", "pth"])
def test_weights_files_load_into_the_recipe_and_carry_the_description(kind: str, tmp_path: Path, sightline):
    run, file = tmp_path / "run", tmp_path / f"net.{kind}"
    recipe, _ = config.load("demo_classification", tiny.SMALL)
    spec = recipe.data.declared()[0]
    state = {"recipe": store.to_json(recipe), "spec": spec.to_json(), "progress": vars(TrainProgress(step=1))}
    checkpoint.write(run / "checkpoints" / "ckpt-00000001", {"model": recipe.model.build(spec).state_dict()}, state)
    said = sightline("export", run, "--format", kind, "--out", file, *HERE)
    assert said.code == 0 and "largest relative difference of logits 0.0e+00" in said.out
    if kind == "pth":
        held = torch.load(file, weights_only=True)
        state, about = held["state_dict"], held["sightline"]
    else:
        with safe_open(file, "pt") as opened:
            about = opened.metadata()["sightline"]
        state = load_file(file)
    assert json.loads(about)["checkpoint"]["name"].startswith("ckpt-")
    best = load_file(run / "checkpoints" / "ckpt-00000001" / "model.safetensors")
    assert state.keys() == best.keys() and all(torch.equal(state[name], best[name]) for name in best)
    loaded = sightline("inspect", "demo_classification", *tiny.SMALL, "--model.weights", file)
    assert loaded.code == 0 and f"loaded all {len(best)} tensors" in loaded.out


def test_weights_that_are_not_finite_are_refused(segmenter: Path, tmp_path: Path, sightline):
    source = segmenter / "checkpoints" / "ckpt-00000003"
    tensors, state = checkpoint.read(source)
    tensors["ema"]["heads.0.bias"][0] = math.nan
    checkpoint.write(tmp_path / "bad", tensors, state)
    said = sightline("export", tmp_path / "bad", "--format", "pth", *HERE)
    assert said.code == 4 and "not finite: heads.0.bias" in said.err and not (tmp_path / "bad" / "model.pth").exists()


OTHER_WHEN_EXPORTED = '''
"""A network whose graph adds what the network does not."""
from dataclasses import dataclass, replace

import torch

from sightline.parts import ModelConfig
from sightline.recipes import demo_classification


class Odd(torch.nn.Linear):
    def forward(self, pixels):
        found = super().forward(pixels.mean((2, 3)))
        return found * 1.01 if torch.compiler.is_exporting() else found


@dataclass(frozen=True)
class OddConfig(ModelConfig):
    def build(self, spec):
        return Odd(spec.channels, len(spec.classes))


def recipe():
    return replace(demo_classification.recipe(), name="odd", model=OddConfig())
'''


BY_VALUES = OTHER_WHEN_EXPORTED.replace("* 1.01 if torch.compiler.is_exporting()", "* 2 if found.sum() > 0")


@pytest.mark.parametrize(
    ("recipe_text", "code", "told"),
    [
        (OTHER_WHEN_EXPORTED, 1, "relative difference 1.0e-02 on 3 random inputs, at most 1e-04"),
        (BY_VALUES, 2, "torch cannot export Odd as torch.export archive"),
    ],
)
def test_a_network_that_a_graph_cannot_follow_is_refused_and_leaves_no_file(
    recipe_text: str, code: int, told: str, tmp_path: Path, sightline
):
    (tmp_path / "odd.py").write_text(recipe_text)
    recipe, _ = config.load(str(tmp_path / "odd.py"))
    spec = recipe.data.declared()[0]
    state = {"recipe": store.to_json(recipe), "spec": spec.to_json(), "progress": vars(TrainProgress(step=1))}
    checkpoint.write(tmp_path / "ckpt", {"model": recipe.model.build(spec).state_dict()}, state)
    before = [path for path in sorted(tmp_path.rglob("*")) if "__pycache__" not in path.parts]
    said = sightline("export", tmp_path / "ckpt", "--recipe", tmp_path / "odd.py", "--format", "torch-export", *HERE)
    assert said.code == code and told in said.err, said
    assert sorted(path for path in tmp_path.rglob("*") if "__pycache__" not in path.parts) == before


def test_export_refuses_what_it_cannot_do(classifier: Path, tmp_path: Path, sightline, monkeypatch):
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    before = (classifier / "model.onnx").read_bytes()
    for words, code, told in [
        ([classifier], 2, "model.onnx exists; choose another --out"),
        ([classifier, "--format", "coreml"], 2, "--format coreml is unknown; use one of onnx, pth, safetensors"),
        ([classifier, "--out", tmp_path / "net.pt"], 2, "must end in .onnx"),
        ([classifier, "--raw", "--out", tmp_path / "net.onnx"], 2, "--raw changes nothing for few_layers"),
        ([tmp_path / "empty"], 4, "holds no checkpoint"),
        ([tmp_path / "none"], 4, "does not exist"),
        ([classifier, "--run.device=cuda"], 2, "--run.device cuda: export runs the network on the CPU"),
    ]:
        said = sightline("export", *words, *recipe_of(classifier))
        assert said.code == code and told in said.err, said
    monkeypatch.setitem(sys.modules, "onnxscript", None)  # as if it were not installed
    said = sightline("export", classifier, "--out", tmp_path / "net.onnx", *recipe_of(classifier))
    assert said.code == 2 and "--format onnx needs onnxscript: `pip install sightline[export]`" in said.err
    assert (classifier / "model.onnx").read_bytes() == before and not (tmp_path / "net.onnx").exists()


@pytest.mark.parametrize(
    ("kind", "suffix", "room"),
    [
        pytest.param("onnx", "onnx", 5000, marks=pytest.mark.slow),  # a second to make, then written as pth is
        ("torch-export", "pt2", 0),
        ("pth", "pth", 5000),
    ],
)
def test_a_full_disk_is_exit_7_and_leaves_what_was_there(
    classifier: Path, tmp_path: Path, sightline, kind: str, suffix: str, room: int
):
    """RLIMIT_FSIZE stands in for the full disk; with no room at all, torch cannot write temporary files either."""
    (tmp_path / f"before.{suffix}").write_text("an earlier export")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        words = ["export", classifier, *recipe_of(classifier), "--format", kind]
        said = sightline(*words, "--out", tmp_path / f"model.{suffix}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert said.code == 7, said
    no_room = f"{tmp_path / 'model'}.{suffix} could not be written: File too large; free some space"
    assert no_room in said.err or (room == 0 and "needs room for temporary files" in said.err), said
    assert [path.name for path in tmp_path.iterdir()] == [f"before.{suffix}"]
    assert (tmp_path / f"before.{suffix}").read_text() == "an earlier export"


def test_predict_refuses_other_files(classifier: Path, shapes: Path, tmp_path: Path, sightline):
    foreign = onnx.load(classifier / "model.onnx")
    del foreign.metadata_props[:]
    onnx.save(foreign, tmp_path / "foreign.onnx")
    damaged = onnx.load(classifier / "model.onnx")
    damaged.metadata_props[0].value = damaged.metadata_props[0].value.replace('"raw"', '"cooked"')
    onnx.save(damaged, tmp_path / "damaged.onnx")
    for name, change in (
        ("large", lambda about: about + " " * 2**24),  # which JSON allows
        ("future", lambda about: re.sub(r'"format": \d+', '"format": 99', about)),
    ):
        changed = onnx.load(classifier / "model.onnx")
        changed.metadata_props[0].value = change(changed.metadata_props[0].value)
        onnx.save(changed, tmp_path / f"{name}.onnx")
    custom = onnx.load(classifier / "model.onnx")
    custom.graph.node[-1].domain, custom.graph.node[-1].op_type = "ai.onnx.contrib", "PyOp"  # Python code in a graph
    custom.opset_import.append(onnx.helper.make_opsetid("ai.onnx.contrib", 1))
    onnx.save(custom, tmp_path / "custom.onnx")
    (tmp_path / "text.onnx").write_text("no graph")
    (tmp_path / "text.pt2").write_text("no archive")
    save_file({"a": torch.zeros(1)}, tmp_path / "net.safetensors")
    for name, code, told in [
        ("foreign.onnx", 3, "was not written by `sightline export`"),
        ("damaged.onnx", 4, "its description is damaged"),
        ("large.onnx", 4, "bytes, at most 16777216 are read"),
        ("future.onnx", 2, "has format 99, this version reads"),
        ("text.onnx", 3, "cannot be opened by onnxruntime"),
        ("custom.onnx", 3, "cannot be opened by onnxruntime"),
        ("text.pt2", 3, "is not a zip file"),
        ("net.safetensors", 2, "ends in .onnx or .pt2"),
    ]:
        words = ["predict", tmp_path / name, shapes / "val", "--out", tmp_path / "out", "--trust"]
        said = sightline(*words, *HERE, *recipe_of(classifier))
        assert said.code == code and told in said.err, said
    words = ["predict", classifier / "model.onnx", shapes / "val", "--checkpoint", "latest"]
    said = sightline(*words, *HERE, *recipe_of(classifier))
    assert said.code == 2 and "is one network" in said.err


def constant(graph, output: str, value: np.ndarray) -> None:
    """Let a graph answer this, whatever it is fed."""
    [place] = [at for at, each in enumerate(graph.output) if each.name == output]
    for node in graph.node:
        node.output[:] = [f"former {output}" if name == output else name for name in node.output]
    graph.node.append(onnx.helper.make_node("Constant", [], [output], value=onnx.numpy_helper.from_array(value)))
    kind = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
    graph.output[place].CopyFrom(onnx.helper.make_tensor_value_info(output, kind, None))


def huge(graph) -> None:
    """A tensor of 16 TB, which every memory refuses."""
    constant(graph, "logits", np.array([2**42], np.int64))
    graph.node[-1].output[:] = ["many"]
    graph.node.append(onnx.helper.make_node("ConstantOfShape", ["many"], ["logits"]))
    graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, None))


def endless(graph) -> None:
    """A loop whose condition stays true."""
    value = onnx.helper.make_tensor_value_info
    body = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", ["on"], ["still"]), onnx.helper.make_node("Neg", ["x"], ["y"])],
        "body",
        [value("turn", onnx.TensorProto.INT64, []), value("on", onnx.TensorProto.BOOL, []), value("x", 1, None)],
        [value("still", onnx.TensorProto.BOOL, []), value("y", 1, None)],
    )
    for node in graph.node:
        node.output[:] = ["former" if name == "logits" else name for name in node.output]
    graph.node.append(
        onnx.helper.make_node("Constant", [], ["yes"], value=onnx.numpy_helper.from_array(np.array(True)))
    )
    graph.node.append(onnx.helper.make_node("Loop", ["", "yes", "former"], ["logits"], body=body))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda graph: constant(graph, "logits", np.zeros((2, 3), np.float32)), "logits of shape (2, 3), expected ("),
        (lambda graph: constant(graph, "logits", np.zeros(3, np.float32)), "logits of shape (3), expected ("),
        (lambda graph: constant(graph, "logits", np.array(["a"])), "cannot be run by onnxruntime"),
        (huge, "cannot be run by onnxruntime"),
        (endless, "has not answered within 1 s for a batch of"),
    ],
    ids=["classes", "axes", "texts", "huge", "endless"],
)
def test_a_graph_that_is_not_what_its_description_says_is_refused(
    change, told: str, classifier: Path, shapes: Path, tmp_path: Path, sightline, monkeypatch
):
    hostile = onnx.load(classifier / "model.onnx")
    change(hostile.graph)
    onnx.save(hostile, tmp_path / "hostile.onnx")
    if change is endless:  # a minute otherwise
        monkeypatch.setattr(onnx_format, "LEAST_S", 0.6)
        monkeypatch.setattr(onnx_format, "NUMBERS_PER_S", 2**30)
    words = ["predict", tmp_path / "hostile.onnx", shapes / "val", "--out", tmp_path / "out", *HERE]
    said = sightline(*words, *recipe_of(classifier))
    assert said.code == 3 and f"{tmp_path}/hostile.onnx " in said.err and told in said.err, said


def test_a_description_of_another_input_is_refused(classifier: Path, shapes: Path, tmp_path: Path, sightline):
    changed = onnx.load(classifier / "model.onnx")
    changed.metadata_props[0].value = changed.metadata_props[0].value.replace('"uint8"}', '"float32"}')
    onnx.save(changed, tmp_path / "other.onnx")
    words = ["predict", tmp_path / "other.onnx", shapes / "val", "--out", tmp_path / "out", *HERE]
    said = sightline(*words, *recipe_of(classifier))
    assert said.code == 4 and "(input of float32, not of uint8); export it again" in said.err, said


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("labels", np.full((1, 1), 7, np.int64), "labels of shape (1, 1), expected ("),
        ("labels", None, "labels beyond its 3 classes"),
        ("scores", None, "scores that are not finite"),
        ("boxes", np.zeros((1, 3), np.float32), "boxes of shape (1, 3), expected ("),
    ],
)
def test_boxes_that_are_not_what_a_description_says_are_refused(
    name: str, value, told: str, detector: Path, shapes: Path, tmp_path: Path, sightline
):
    hostile = onnx.load(detector / "model.onnx")
    if value is None:  # all others as they are
        for node in hostile.graph.node:
            node.output[:] = [f"former {name}" if each == name else each for each in node.output]
        add = np.array(4, np.int64) if name == "labels" else np.array(np.inf, np.float32)
        hostile.graph.node.append(
            onnx.helper.make_node("Constant", [], ["more"], value=onnx.numpy_helper.from_array(add))
        )
        hostile.graph.node.append(onnx.helper.make_node("Add", [f"former {name}", "more"], [name]))
    else:
        constant(hostile.graph, name, value)
    onnx.save(hostile, tmp_path / "hostile.onnx")
    words = ["predict", tmp_path / "hostile.onnx", shapes / "val", "--out", tmp_path / "out", *recipe_of(detector)]
    said = sightline(*words, *HERE)
    assert said.code == 3 and told in said.err and "hostile.onnx answers" in said.err, said
