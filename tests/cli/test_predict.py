"""`sightline predict` and `sightline evaluate --all` as a user types them."""

import csv
import json
import math
import shutil
import textwrap
from pathlib import Path
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tiny import HERE, SMALL
from torchvision.transforms import v2

from sightline import api, cli, config
from sightline.engine import checkpoint
from sightline.errors import BadData, DiskFull
from sightline.parts import DataSpec

NAME = "demo_classification"


@pytest.fixture(scope="module")
def trained(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three epochs with its initial checkpoint; for reading only."""
    out = tmp_path_factory.mktemp("trained") / "run"
    flags = [
        f"--data.path={shapes}",
        f"--run.out={out}",
        "--train.epochs=3",
        "--run.keep=9",
        "--run.checkpoint-initial",
    ]
    assert cli.main(["train", NAME, *SMALL, *HERE, *flags]) == 0
    return out


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def document(folder: Path) -> dict:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads((folder / "predictions.json").read_text(), parse_constant=refuse)


def table(folder: Path) -> list[list[str]]:
    with (folder / "predictions.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def expected_probabilities(run: Path, which: str, file: Path) -> torch.Tensor:
    """By torchvision's transforms and the weights as they lie on disk."""
    state = json.loads((run / "checkpoints" / which / "state.json").read_text())
    recipe, _ = config.of_stored(state["recipe"]).build()
    model = recipe.model.build(DataSpec.from_json(state["spec"]))
    model.load_state_dict(load_file(run / "checkpoints" / which / "model.safetensors"))
    steps = [v2.Resize(24, antialias=True), v2.CenterCrop(24), v2.ToDtype(torch.float32, scale=True)]
    pixels = v2.functional.pil_to_tensor(Image.open(file).convert("RGB"))
    image = v2.Compose([*steps, v2.Normalize(recipe.data.mean, recipe.data.std)])(pixels)
    with torch.inference_mode():
        return model.eval()(image[None])[0].softmax(0)


# predict


@pytest.mark.usefixtures("torchvision_in_bytes")
def test_probabilities_are_those_of_the_network(sightline, trained: Path, shapes: Path, tmp_path: Path):
    """RGB, resized and normalised as in evaluation."""
    val = shapes / "val"
    code, out, err = sightline("predict", trained, val, "--out", tmp_path / "out", "--checkpoint", "latest", *HERE)
    assert (code, err) == (0, "")
    told = document(tmp_path / "out")
    assert (told["recipe"], told["model"], told["step"], told["unreadable"]) == (NAME, "ResNet", 15, [])
    assert told["checkpoint"] == str(trained / "checkpoints" / "ckpt-00000015")
    files = sorted(str(path.relative_to(val)) for path in val.rglob("*.jpg"))
    assert [row["file"] for row in told["files"]] == files and len(files) == 40
    for row in told["files"][::7]:
        expected = expected_probabilities(trained, "ckpt-00000015", val / row["file"])
        scores, labels = expected.topk(5)
        assert [found["id"] for found in row["found"]] == labels.tolist()
        assert [found["score"] for found in row["found"]] == pytest.approx(scores.tolist(), abs=1e-5)
    lines = out.splitlines()
    assert len(lines) == 41 and lines[-1].startswith("40 of 40 files predicted; ")
    first = told["files"][0]
    assert lines[0] == "  ".join([first["file"], *(f"{f['class']} {f['score']:.4f}" for f in first["found"])])


def test_predictions_agree_with_evaluate(sightline, trained: Path, shapes: Path, tmp_path: Path):
    scores = api.evaluate(str(trained), [*HERE, f"--run.out={tmp_path / 'scores'}"])
    api.predict(str(trained), [str(shapes / "val")], str(tmp_path / "out"), HERE, draws=False)
    rows = document(tmp_path / "out")["files"]
    right = [row["file"].split("/")[0] == row["found"][0]["class"] for row in rows]
    assert sum(right) / len(right) == pytest.approx(scores.values["top1"])
    assert sorted(contents(tmp_path / "out")) == ["predictions.csv", "predictions.json"]  # draws=False


def test_python_gets_what_the_command_writes(sightline, run: Path, shapes: Path, tmp_path: Path, monkeypatch):
    """For paths, folders, PIL images and arrays, from the run and from its model, without writing anything."""
    folder, star = shapes / "val" / "circle", shapes / "val" / "star" / "00000.jpg"
    assert sightline("predict", run, folder, star, "--out", tmp_path / "out", "--top", 10, *HERE)[0] == 0
    written = {row["path"]: row["found"] for row in document(tmp_path / "out")["files"]}
    monkeypatch.chdir(tmp_path)
    before = contents(tmp_path)
    with Image.open(star) as image:
        given = [star, folder, str(star), image, np.asarray(image), image.convert("RGBA")]
        found = api.predict(run, given, flags=HERE)
        again = api.predict(api.model(run, "cpu", flags=HERE), given)
    paths = [str(star), *(str(path) for path in sorted(folder.iterdir())), *[str(star)] * 4]
    assert found == again and [each.file for each in found[:-3]] == paths[:-3]
    assert [each.file for each in found[-3:]] == ["inputs[3]", "inputs[4]", "inputs[5]"]
    for path, each in zip(paths, found, strict=True):
        assert list(each.probabilities.items()) == [(row["class"], row["score"]) for row in written[path]]
        assert (each.label, each.probability) == (written[path][0]["class"], written[path][0]["score"])
        assert each.labels == (each.label,)
    assert contents(tmp_path) == before
    model = api.model(run, "cpu", flags=HERE)
    logits = model(model.preprocess(star)[None])
    assert logits.softmax(1)[0].max().item() == pytest.approx(found[0].probability, rel=1e-5)  # in a batch of one
    assert model.classes[logits.argmax()] == found[0].label
    assert [len(each.probabilities) for each in api.predict(model, star, top=3)] == [3]


def test_what_python_cannot_read_is_an_error_or_left_out(run: Path, shapes: Path, tmp_path: Path):
    (tmp_path / "bad.jpg").write_text("not an image")
    given = [tmp_path / "bad.jpg", shapes / "val" / "star" / "00000.jpg"]
    with pytest.raises(BadData, match=r"1 of 2 inputs cannot be read \(.*bad.jpg: .*on-bad-sample skip"):
        api.predict(run, given, flags=HERE)
    (left,) = api.predict(run, given, flags=[*HERE, "--data.on-bad-sample", "skip"])
    assert left.file == str(given[1]) and api.predict(run, [], flags=HERE) == []


def test_python_sees_an_image_upright_as_its_file(run: Path, shapes: Path, tmp_path: Path):
    with Image.open(shapes / "val" / "arrow" / "00000.jpg") as image:
        exif = Image.Exif()
        exif[0x0112] = 6  # to be turned by a quarter
        image.save(tmp_path / "turned.jpg", exif=exif)
    with Image.open(tmp_path / "turned.jpg") as image:
        lying, upright = np.asarray(image), np.rot90(np.asarray(image), -1)
        found = api.predict(run, [tmp_path / "turned.jpg", image, upright, lying], flags=HERE)
    by_path, by_image, by_array, of_lying = (each.probabilities for each in found)
    assert by_path == by_image == by_array != of_lying


def test_images_keep_their_names_colours_and_formats(sightline, trained: Path, tmp_path: Path):
    pixels = np.zeros((360, 480, 3), np.uint8)
    pixels[:, :160], pixels[:, 160:320], pixels[:, 320:] = (250, 10, 10), (10, 250, 10), (10, 10, 250)
    (tmp_path / "in" / "a").mkdir(parents=True)
    (tmp_path / "in" / "b").mkdir()
    Image.fromarray(pixels).save(tmp_path / "in" / "a" / "x.jpg", quality=95)
    Image.fromarray(pixels).save(tmp_path / "in" / "b" / "x.jpg", quality=95)
    Image.fromarray(pixels).save(tmp_path / "in" / "b" / "x.png")
    shutil.copy(tmp_path / "in" / "b" / "x.png", tmp_path / "in" / "plain")
    inputs = [tmp_path / "in" / name for name in ("a/x.jpg", "b/x.jpg", "b/x.png", "plain")]
    before = contents(tmp_path / "in")
    code, _, err = sightline("predict", trained, *inputs, "--out", tmp_path / "out", "--top", 2, *HERE)
    assert (code, err) == (0, "") and contents(tmp_path / "in") == before
    rows = document(tmp_path / "out")["files"]
    assert [row["picture"] for row in rows] == ["a/x.jpg", "b/x.jpg", "b/x.png", "plain.png"]
    assert all(len(row["found"]) == 2 and (row["width"], row["height"]) == (480, 360) for row in rows)
    assert sorted(contents(tmp_path / "out")) == sorted(
        ["predictions.csv", "predictions.json", *(row["picture"] for row in rows)]
    )
    for row, kind in zip(rows, ("JPEG", "JPEG", "PNG", "PNG"), strict=True):
        with Image.open(tmp_path / "out" / row["picture"]) as drawn:
            assert drawn.format == kind and drawn.width == 480 and drawn.height > 360
            for x in (80, 240, 400):
                assert np.abs(np.subtract(drawn.convert("RGB").getpixel((x, 100)), pixels[100, x])).max() <= 6
    assert len({tuple(found["class"] for found in row["found"]) for row in rows[2:]}) == 1


def test_workers_and_batches_change_nothing(sightline, trained: Path, shapes: Path, tmp_path: Path):
    one = [sorted((shapes / "val").rglob("*.jpg"))[5]]
    for name, inputs, flags in (
        ("many", [shapes / "val"], ["--run.workers=2", "--train.global-batch=7"]),
        ("one", one, ["--run.workers=0"]),
    ):
        code, _, err = sightline("predict", trained, *inputs, "--out", tmp_path / name, "--no-draw", *flags, *HERE[1:])
        assert code == 0, err
    many, alone = document(tmp_path / "many")["files"], document(tmp_path / "one")["files"]
    (same,) = [row for row in many if row["path"] == alone[0]["path"]]
    assert len(many) == 40 and [f["id"] for f in same["found"]] == [f["id"] for f in alone[0]["found"]]
    assert [f["score"] for f in same["found"]] == pytest.approx([f["score"] for f in alone[0]["found"]], abs=1e-5)


def test_unreadable_files_are_listed_and_the_rest_is_predicted(sightline, trained: Path, shapes: Path, tmp_path: Path):
    folder = tmp_path / "in"
    shutil.copytree(shapes / "val" / "star", folder)
    (folder / "bad.jpg").write_text("not an image")
    (folder / "cut.jpg").write_bytes((folder / "00000.jpg").read_bytes()[:400])
    (folder / "gone.png").symlink_to("nowhere.png")
    command = ["predict", trained, folder, "--out", tmp_path / "out", *HERE]
    code, out, err = sightline(*command)
    assert code == 3 and "error: 3 of 7 files cannot be read: bad.jpg, cut" in err and "on-bad-sample skip" in err
    told = document(tmp_path / "out")
    assert [row["file"] for row in told["files"]] == [f"0000{n}.jpg" for n in range(4)]
    assert [row["file"] for row in told["unreadable"]] == ["bad.jpg", "cut.jpg", "gone.png"]
    assert "warning: bad.jpg cannot be read: starts with b'not an i'" in out and "4 of 7 files predicted" in out
    code, out, err = sightline(*command, "--data.on-bad-sample", "skip")
    assert (code, err) == (0, "") and document(tmp_path / "out") == told
    assert "skipped: 3 of 7 files cannot be read: bad.jpg, cut.jpg, gone.png (" in out.splitlines()[-1]


def test_a_run_trained_with_skip_still_reports_unreadable_files(sightline, shapes: Path, tmp_path: Path):
    """The policy of training must not hide from a script that a file it named was not predicted."""
    star, run = shapes / "val" / "star" / "00000.jpg", tmp_path / "run"
    (tmp_path / "bad.jpg").write_text("not an image")
    skip = ["--data.on-bad-sample", "skip"]
    here = [f"--data.path={shapes}", f"--run.out={run}", "--train.epochs=1", *SMALL, *HERE, *skip]
    assert cli.main(["train", NAME, *here]) == 0
    command = ["predict", run, star, tmp_path / "bad.jpg", "--out", tmp_path / "out", *HERE]
    code, _, err = sightline(*command)
    assert code == 3 and "error: 1 of 2 files cannot be read: bad.jpg (" in err
    assert [row["file"] for row in document(tmp_path / "out")["files"]] == ["00000.jpg"]
    assert sightline(*command, *skip)[0] == 0
    with pytest.raises(BadData, match="1 of 2 inputs cannot be read"):
        api.predict(api.model(run, "cpu"), [star, tmp_path / "bad.jpg"])


def test_images_are_never_drawn_over(sightline, trained: Path, shapes: Path, tmp_path: Path):
    folder = tmp_path / "in"
    shutil.copytree(shapes / "val" / "star", folder)
    before = contents(folder)
    code, _, err = sightline("predict", trained, folder, "--out", folder, *HERE)
    assert code == 2 and f"--out {folder} is also an input" in err
    code, _, err = sightline("predict", trained, folder / "00000.jpg", "--out", folder, *HERE)
    assert code == 2 and "would replace" in err
    assert contents(folder) == before
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "00000.jpg").symlink_to(tmp_path / "victim.jpg")
    (tmp_path / "victim.jpg").write_text("mine")
    assert sightline("predict", trained, folder, "--out", tmp_path / "out", *HERE)[0] == 0
    assert (tmp_path / "victim.jpg").read_text() == "mine" and not (tmp_path / "out" / "00000.jpg").is_symlink()
    assert sightline("predict", trained, folder, "--out", folder / "out", *HERE)[0] == 0
    again = sightline("predict", trained, folder, "--out", folder / "out", *HERE)
    assert again[0] == 0 and "4 of 4 files predicted" in again[1]


def test_nothing_is_written_but_the_results(sightline, run: Path, shapes: Path, tmp_path: Path, monkeypatch):
    before = contents(run)
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    code, _, _ = sightline("predict", run, shapes / "val" / "star" / "00000.jpg", "--out", "results", *HERE)
    assert code == 0 and contents(run) == before
    assert sorted(contents(Path())) == ["results/00000.jpg", "results/predictions.csv", "results/predictions.json"]


def test_results_go_into_a_new_folder_of_the_run_where_no_other_is_named(sightline, run: Path, shapes: Path):
    star = shapes / "val" / "star" / "00000.jpg"
    for name in ("predictions", "predictions-2"):
        code, out, err = sightline("predict", run, star, "--top", 3, *HERE)
        assert (code, err) == (0, "") and str(run / name / "predictions.json") in out
    (run / "predictions-3").symlink_to("elsewhere")
    code, out, err = sightline("predict", run / "checkpoints" / "ckpt-00000015", star, "--top", 3, *HERE)
    assert (code, err) == (0, "") and sorted(contents(run / "predictions-4")) == sorted(contents(run / "predictions"))
    (row,) = document(run / "predictions-4")["files"]
    header, *lines = table(run / "predictions-4")
    assert header == ["file", "class", "id", "score"] and len(lines) == 3
    assert lines == [[str(star), found["class"], str(found["id"]), str(found["score"])] for found in row["found"]]


def test_results_of_other_files_in_the_folder_are_named(sightline, run: Path, shapes: Path, tmp_path: Path):
    first, *others = sorted((shapes / "val").rglob("*.jpg"))[:3]
    for file in (first, *others):
        shutil.copy(file, tmp_path / f"{file.parent.name}-{file.name}")
    one, *more = (str(tmp_path / f"{file.parent.name}-{file.name}") for file in (first, *others))
    out = tmp_path / "out"

    said = [sightline("predict", str(run), *files, "--out", str(out)).out for files in ([one], [one], more)]

    warning = f"warning: {out} also holds results of 1 other file of an earlier call; predictions.json omits them"
    assert [warning in each for each in said] == [False, False, True]
    assert Path(one).name in {file.name for file in out.iterdir()}  # nothing is deleted


def test_drawings_of_earlier_calls_are_not_predicted(sightline, run: Path, shapes: Path):
    shutil.copy(shapes / "val" / "star" / "00000.jpg", run.parent / "x.jpg")
    for _ in range(2):
        code, out, err = sightline("predict", run, run.parent, *HERE)
        assert (code, err) == (0, "") and "1 of 1 files predicted" in out
    assert (run / "predictions-2" / "x.jpg").is_file()


def test_names_in_the_table_may_hold_anything(sightline, trained: Path, shapes: Path, tmp_path: Path):
    odd = tmp_path / 'a, "b"\nü.jpg'
    shutil.copy(shapes / "val" / "star" / "00000.jpg", odd)
    assert sightline("predict", trained, odd, "--out", tmp_path / "out", "--top", 1, *HERE)[0] == 0
    assert table(tmp_path / "out")[1][0] == str(odd).replace("\n", "\\x0a")


def test_nothing_predicted_is_never_a_success(sightline, trained: Path, tmp_path: Path):
    (tmp_path / "bad.jpg").write_text("not an image")
    command = ["predict", trained, tmp_path / "bad.jpg", "--out", tmp_path / "out", *HERE]
    for policy in ("skip", "fail"):
        code, out, err = sightline(*command, "--data.on-bad-sample", policy)
        assert code == 3 and "error: none of the 1 files could be predicted" in err and "0 of 1 files" in out
    assert [row["file"] for row in document(tmp_path / "out")["unreadable"]] == ["bad.jpg"]


def test_predict_refuses_what_it_cannot_understand(sightline, run: Path, shapes: Path, tmp_path: Path):
    star = shapes / "val" / "star"
    for arguments, code, message in (
        ([run, "--out", tmp_path / "out"], 2, "INPUT"),
        ([run, tmp_path / "nix.jpg", "--out", tmp_path / "out"], 2, "nix.jpg does not exist"),
        ([run.parent, star, "--out", tmp_path / "out"], 4, f"give one of them, e.g. {run}"),
        ([shapes, star, "--out", tmp_path / "out"], 4, "is neither a run folder nor a checkpoint"),
        ([run, star, "--out", tmp_path / "out", "--top", 0], 2, "--top 0 must be at least 1"),
        ([run, star, "--out", tmp_path / "out", "--score-threshold", 50], 2, "--score-threshold 50.0 must be in 0..1"),
        ([run, star, "--out", tmp_path / "out", "--data.eval-size=16"], 2, "flags must not change what the network is"),
        (["--run.workers", 0, run, star, "--out", tmp_path / "out"], 2, "'0' comes after --run.workers"),
        ([run, "--run.device", "cpu", star, "--out", tmp_path / "out"], 2, "'cpu' comes after --run.device"),
        ([run, star, "--out", run / "config.yaml"], 2, "cannot be made"),
    ):
        got, _, err = sightline("predict", *arguments)
        assert got == code and message in err, err
        assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


DETECTOR = '''
"""A network that always sees the same two boxes."""
import dataclasses

import torch
from sightline.recipes import demo_classification
from sightline.inference.by_task import boxes_in, reporter
from sightline.inference.predictions import Predictions
from sightline.tasks.classification import Classification


@dataclasses.dataclass(frozen=True)
class Boxes(Classification):
    def predict(self, model, batch):
        count = len(super().predict(model, batch)["logits"])
        boxes = torch.tensor([[0.1, 0.2, 0.5, 0.6], [0.5, 0.5, 1.2, 1.0], [0.0, 0.0, 1.0, 1.0]])
        scores, labels = torch.tensor([0.9, 0.6, 0.2]), torch.tensor([3, 1, 2])
        found = {"boxes": boxes, "scores": scores, "labels": labels}
        return {name: torch.stack([value] * count) for name, value in found.items()}


@reporter.register(Boxes)
def boxes_in_files(task, job):
    return Predictions(boxes_in, job)


def recipe():
    return dataclasses.replace(demo_classification.recipe(), name="boxes", task=Boxes())
'''


def test_boxes_are_drawn_printed_and_told_in_pixels_of_the_file(sightline, run: Path, tmp_path: Path):
    (tmp_path / "boxes.py").write_text(textwrap.dedent(DETECTOR))
    Image.new("RGB", (640, 400), (90, 90, 90)).save(tmp_path / "street.png")
    command = ["predict", run, tmp_path / "street.png", "--out", tmp_path / "out", "--recipe", tmp_path / "boxes.py"]
    code, out, err = sightline(*command, *HERE)
    assert (code, err) == (0, "")
    classes = json.loads((run / "checkpoints" / "ckpt-00000005" / "state.json").read_text())["spec"]["classes"]
    assert out.splitlines()[:3] == [
        "street.png  640x400  2 found",
        f"  0.900 (3) {classes[2]}  (128, 40) (384, 200)",
        f"  0.600 (1) {classes[0]}  (320, 200) (640, 400)",
    ]
    assert table(tmp_path / "out") == [
        ["file", "class", "id", "score", "x", "y", "width", "height"],
        [str(tmp_path / "street.png"), classes[2], "3", ANY, "128.0", "40.0", "256.0", "160.0"],
        [str(tmp_path / "street.png"), classes[0], "1", ANY, "320.0", "200.0", "320.0", "200.0"],
    ]
    (row,) = document(tmp_path / "out")["files"]
    assert [found["box"] for found in row["found"]] == [[128, 40, 256, 160], [320, 200, 320, 200]]
    assert [(found["class"], found["id"]) for found in row["found"]] == [(classes[2], 3), (classes[0], 1)]
    drawn = np.asarray(Image.open(tmp_path / "out" / "street.png"))
    assert drawn.shape == (400, 640, 3) and not (drawn[40, 128:384] == 90).any() and (drawn[60:80, 140:300] == 90).all()
    all_three = sightline(*command, *HERE, "--score-threshold", "0.1")
    assert all_three[0] == 0 and "  3 found" in all_three[1]
    best = sightline(*command, *HERE, "--top", 1)
    assert "  1 found" in best[1]
    nothing = sightline(*command, *HERE, "--score-threshold", "0.95")
    assert nothing[0] == 0 and nothing[1].splitlines()[0] == "street.png  nothing found"
    assert table(tmp_path / "out") == [["file", "class", "id", "score"]]


@pytest.mark.parametrize(
    ("happens", "code", "done"),
    [("signal.raise_signal(signal.SIGINT)", 130, 8), ("raise errors.DiskFull('no room')", DiskFull.exit_code, 4)],
)
def test_tables_list_what_was_predicted_before_a_stop(sightline, run, shapes, tmp_path, happens, code, done):
    start = "import signal\nfrom sightline import errors\nBATCHES = iter([0, 1, 0])\n"
    source = start + DETECTOR.replace("batch):\n", f"batch):\n        if next(BATCHES):\n            {happens}\n", 1)
    (tmp_path / "stops.py").write_text(source)
    command = ["predict", run, shapes / "val", "--out", tmp_path / "out", "--recipe", tmp_path / "stops.py", *HERE]
    said = sightline(*command, "--train.global-batch=4")
    assert said.code == code and f"stopped after {done} of 40 files; {tmp_path / 'out'}" in said.out, said
    assert len(document(tmp_path / "out")["files"]) == len(table(tmp_path / "out")[1:]) // 2 == done


def test_boxes_in_python_are_those_of_the_command(sightline, tmp_path: Path):
    data = "synthetic:classes=10,samples=8,size=60"
    small = {"model.depth": 18, "model.width": 4, "data.size": 48, "data.max_boxes": 8, "train.max_steps": 1}
    small |= {"train.precision": "fp32", "data.cache": "off", "run.progress": "off"}
    out = tmp_path / "run"
    api.train("demo_detection", data=data, batch_size=4, workers=0, device="cpu", out=out, flags=small)
    pixels = np.random.default_rng(0).integers(0, 255, (70, 90, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "street.png")
    how = ["--top", 7, "--score-threshold", 0.01, *HERE]
    assert sightline("predict", out, tmp_path / "street.png", "--out", tmp_path / "seen", *how)[0] == 0
    (row,) = document(tmp_path / "seen")["files"]
    found = api.predict(out, [tmp_path / "street.png", pixels], flags=HERE, top=7, threshold=0.01)
    assert row["found"], "a network that finds nothing tests nothing"
    for each in found:
        assert (each.width, each.height) == (row["width"], row["height"]) == (90, 70)
        assert each.labels == tuple(box["class"] for box in row["found"])
        assert each.ids == tuple(box["id"] for box in row["found"])
        assert each.scores.tolist() == pytest.approx([box["score"] for box in row["found"]], rel=1e-5)
        left_top, right_bottom = each.boxes[:, :2], each.boxes[:, 2:]
        sides = np.concatenate([left_top, right_bottom - left_top], 1)
        np.testing.assert_allclose(sides, [box["box"] for box in row["found"]], atol=0.006)  # rounded to two digits
    (nothing,) = api.predict(out, pixels, flags=HERE, threshold=1.0)
    assert nothing.boxes.shape == (0, 4) and nothing.labels == ()


# evaluate --all


def rows(folder: Path) -> list[dict]:
    return json.loads((folder / "evaluation.json").read_text())["checkpoints"]


def evaluations(run: Path) -> list[int]:
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if line["event"] == "evaluate" and "checkpoint" in line]


def test_all_checkpoints_but_the_initial_one_are_evaluated_in_order(sightline, run: Path):
    code, out, err = sightline("evaluate", run, "--all", *HERE)
    assert (code, err) == (0, "") and (run / "checkpoints" / "ckpt-00000000").is_dir()
    trained_with = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    expected = {e["step"]: e["top1"] for e in trained_with if e["event"] == "evaluate" and "epoch" in e}
    assert {row["step"]: row["values"]["top1"] for row in rows(run)} == pytest.approx(expected)
    assert [row["checkpoint"] for row in rows(run)] == ["ckpt-00000005", "ckpt-00000010", "ckpt-00000015"]
    table = [line.split() for line in out.splitlines()[-4:]]
    assert table[0] == ["step", "top1", "top5", "balanced_accuracy", "macro_f1", "loss"]
    assert [line[0] for line in table[1:]] == ["5", "10", "15"]
    assert float(table[3][1]) == pytest.approx(expected[15], abs=1e-4)


def test_all_resumes_with_what_is_missing(sightline, run: Path, tmp_path: Path):
    for name in ("ckpt-00000010", "ckpt-00000015"):
        shutil.move(run / "checkpoints" / name, tmp_path / name)
    assert sightline("evaluate", run, "--all", *HERE)[0] == 0
    assert [row["step"] for row in rows(run)] == [5] and evaluations(run) == [5]
    for name in ("ckpt-00000010", "ckpt-00000015"):
        shutil.move(tmp_path / name, run / "checkpoints" / name)
    code, out, _ = sightline("evaluate", run, "--all", *HERE)
    assert code == 0 and evaluations(run) == [5, 10, 15] and "ckpt-00000005 is in " in out
    assert len(out.splitlines()[-4:]) == 4 and [row["step"] for row in rows(run)] == [5, 10, 15]
    assert sightline("evaluate", run, "--all", *HERE)[0] == 0 and evaluations(run) == [5, 10, 15]  # each once
    # Other numbers, or other bytes, are another question.
    assert sightline("evaluate", run, "--all", *HERE[:2], "--train.precision=bf16")[0] == 0
    assert evaluations(run) == [5, 10, 15] * 2


def test_all_leaves_damaged_checkpoints_out(sightline, run: Path):
    for name in ("ckpt-00000010", "ckpt-00000015"):
        file = run / "checkpoints" / name / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
    code, out, err = sightline("evaluate", run, "--all", *HERE)
    assert (code, err) == (0, "") and evaluations(run) == [5]
    assert out.count("is skipped: ") == 2 and "warning: ckpt-00000010 is skipped: " in out and "is damaged" in out
    assert (run / "checkpoints" / "ckpt-00000010").is_dir()  # for whoever wants to repair it
    shutil.rmtree(run / "checkpoints" / "ckpt-00000005")
    (run / "evaluation.json").write_text('{"checkpoints": [{"step": 3}, 7')
    code, _, err = sightline("evaluate", run, "--all", *HERE)
    assert code == 4 and "holds no checkpoint that verifies and has made a step" in err


def test_all_wants_a_run(sightline, run: Path, tmp_path: Path):
    code, _, err = sightline("evaluate", run / "checkpoints" / "ckpt-00000005", "--all")
    assert code == 2 and "--all needs a run folder" in err
    assert sightline("evaluate", tmp_path / "missing", "--all")[0] == 4


def test_a_value_is_not_taken_for_the_run(sightline, run: Path):
    code, _, err = sightline("evaluate", "--run.workers", 0, run)
    assert code == 2 and "'0' comes after --run.workers; begin with `sightline evaluate RUN`" in err
    code, _, err = sightline("evaluate", "--checkpoint", "latest", run, "--run.workers", 0, *HERE[1:])
    assert (code, err) == (0, "")
    code, _, err = sightline("evaluate", "--run.workers=0", run, *HERE[1:])
    assert (code, err) == (0, "")


def test_scores_that_are_not_numbers_leave_the_table_readable(sightline, run: Path):
    path = run / "checkpoints" / "ckpt-00000015"
    tensors, state = checkpoint.read(path)
    tensors["model"]["fc.bias"][:] = math.inf  # what is infinite everywhere has no softmax
    shutil.rmtree(path)
    checkpoint.write(path, tensors, state)
    for _ in range(2):  # made, and read again
        code, out, err = sightline("evaluate", run, "--all", *HERE)
        assert (code, err) == (0, "") and rows(run)[-1]["values"]["loss"] is None
        assert out.splitlines()[-1].split()[-1] in ("nan", "-")
    assert "NaN" not in (run / "evaluation.json").read_text()
    assert evaluations(run) == [5, 10, 15]


def test_labels_for_a_tool_are_written_beside_predictions(trained: Path, shapes: Path, tmp_path: Path, capsys):
    image = str(next(shapes.glob("val/*/*")))
    words = ["predict", str(trained), image, "--no-draw", *HERE]
    assert cli.main([*words, "--out", str(tmp_path / "out"), "--format", "cvat"]) == 0
    best = document(tmp_path / "out")["files"][0]["found"][0]["class"]
    assert f'<tag label="{best}"' in (tmp_path / "out" / "annotations.xml").read_text()
    assert "annotations.xml can be imported as annotations (cvat)" in capsys.readouterr().out
    assert cli.main([*words, "--out", str(tmp_path / "none"), "--format", "coco"]) == 2
    assert "no classes of whole images" in capsys.readouterr().err and not (tmp_path / "none").exists()
