"""Folders of predictions as data: their drawings are refused, and the description that the error names is read."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image

from sightline.data.sources import SourceOptions, open_boxes, open_source
from sightline.errors import BadData, UsageError
from sightline.inference.label_formats import write_labels
from sightline.inference.predictions import Predictions
from sightline.inference.reporter import PredictJob
from sightline.parts import DataSpec, Finding, PredictOptions

ALL = SourceOptions(split="all")
SPEC = DataSpec(("cat", "dog"), 3, (32, 32), (), (), (0, 255))
LABELS = [[Finding("cat", 0, 0.9, None)], [Finding("dog", 1, 0.8, None)]]
BOXES = [[Finding("cat", 0, 0.9, (0.25, 0.25, 0.5, 0.75))], [Finding("dog", 1, 0.8, (0, 0, 1, 0.5))]]


def predicted(tmp_path: Path, findings: list[list[Finding]], form: str, draws: bool = True, *names: str) -> Path:
    """Write what `predict --format` does for images in `big`, two by default."""
    files = {name: tmp_path / "big" / name for name in names or ("a.png", "b.png")}
    for file in files.values():
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (64, 48), (0, 90, 0)).save(file)
    job = PredictJob(tmp_path / "out", files, SPEC, PredictOptions(draws=draws), lambda line: None)
    reporter = Predictions(lambda *given: findings, job)
    reporter.add(list(files), {}, {})
    document = reporter.write({"recipe": "any"})
    if form:
        write_labels(form, document, tmp_path / "out", SPEC)
    return tmp_path / "out"


def described(said: str, file: Path) -> str:
    """Write the lines that an error names as a description."""
    lines = re.findall("`((?:kind|train): .*?)`", said)
    file.write_text("\n".join(lines))
    return str(file)


def in_how_to(form: str) -> str:
    """Return the description of docs/howto/predict.md, as the page changes it for a form."""
    page = (Path(__file__).resolve().parents[4] / "docs" / "howto" / "predict.md").read_text()
    [text] = re.findall("```yaml\n(.*?)```", page, re.DOTALL)
    [labels] = re.findall(f"`{form}` (?:the labels are )?`(seen/.*?)`", page) or ["seen/annotations.xml"]
    return text.replace("cvat", form).replace("seen/annotations.xml", labels)


def lie_in(files: Sequence[Path]) -> set[str]:
    return {file.parent.name for file in files}


@pytest.mark.parametrize(("form", "inside"), [("cvat", ""), ("cvat", "annotations.xml"), ("coco", ""), ("yolo", "")])
def test_drawings_are_refused_with_the_description_that_works(tmp_path, form, inside):
    path = predicted(tmp_path, BOXES, form) / inside
    with pytest.raises((BadData, UsageError), match="out is a folder of predictions: .* drawings") as refused:
        open_boxes("auto", str(path), "train")
    source = open_boxes("auto", described(str(refused.value), tmp_path / "corrected.yaml"), "val", ALL)
    assert source.classes == ("cat", "dog") and lie_in(source.files) == {"big"}
    assert [source.objects(row).boxes.tolist() for row in (0, 1)] == [[[16, 12, 16, 24]], [[0, 0, 64, 24]]]


def test_drawings_are_not_images_with_a_label_either(tmp_path):
    path = predicted(tmp_path, LABELS, "cvat")
    with pytest.raises(BadData, match="out is a folder of predictions") as refused:
        open_source("auto", str(path), "val", ALL)
    source = open_source("auto", described(str(refused.value), tmp_path / "corrected.yaml"), "val", ALL)
    assert source.labels.tolist() == [0, 1] and lie_in(source.files) == {"big"}


@pytest.mark.parametrize("form", ["labelme", ""])
def test_other_forms_and_none_say_what_the_folder_is(tmp_path, form):
    path = predicted(tmp_path, LABELS, form)
    with pytest.raises(UsageError, match="out is a folder of predictions"):
        open_source("auto", str(path), "train")


def test_class_folders_of_drawings_are_refused_and_a_description_of_them_too(tmp_path):
    path = predicted(tmp_path, LABELS, "", True, "cat/a.png", "dog/b.png")
    (tmp_path / "data.yaml").write_text("kind: folder\nval: out\n")
    for data in (path, tmp_path / "data.yaml"):
        with pytest.raises(BadData, match="out is a folder of predictions.*give the folder of the original images"):
            open_source("auto", str(data), "val", ALL)
    assert len(open_source("auto", str(tmp_path / "big"), "val", ALL)) == 2


def test_labels_written_beside_the_images_without_drawings_are_read(tmp_path):
    out = predicted(tmp_path, BOXES, "cvat", False)
    for file in list(out.iterdir()):
        file.rename(tmp_path / "big" / file.name)
    assert lie_in(open_boxes("auto", str(tmp_path / "big"), "val", ALL).files) == {"big"}


@pytest.mark.parametrize("spoilt", ["{}", "no json", '"files": [{"picture": 3}, 4]}', '"files": 5}'])
def test_other_documents_are_no_reason_to_refuse(tmp_path, spoilt):
    out = predicted(tmp_path, BOXES, "cvat")
    (out / "predictions.json").write_text(f'{{\n "format": 1, {spoilt}')
    assert len(open_boxes("auto", str(out), "val", ALL)) == 2


def test_images_of_labelme_that_lie_elsewhere_are_named_in_a_description(tmp_path):
    path = predicted(tmp_path, BOXES, "labelme") / "labelme"
    with pytest.raises(BadData, match="lacks 2 of the 2 images") as refused:
        open_boxes("auto", str(path), "val", ALL)
    lines = str(refused.value).replace("FOLDER", str(tmp_path / "big"))
    source = open_boxes("auto", described(lines, tmp_path / "corrected.yaml"), "val", ALL)
    assert len(source) == 2 and lie_in(source.files) == {"big"}


@pytest.mark.parametrize("form", ["cvat", "coco", "yolo", "labelme"])
def test_the_description_of_the_how_to_is_read(tmp_path, form):
    predicted(tmp_path, BOXES, form).rename(tmp_path / "seen")
    (tmp_path / "corrected.yaml").write_text(in_how_to(form))
    source = open_boxes("auto", str(tmp_path / "corrected.yaml"), "val", ALL)
    assert source.classes == ("cat", "dog") and lie_in(source.files) == {"big"}
