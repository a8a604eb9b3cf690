"""Results in a notebook: bounded, escaped, in a style of their own, and drawn as long as their images exist."""

import base64
import gc
import io
import pickle
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sightline.parts import DataSpec, Prediction
from sightline.report import inline as _shows_results  # noqa: F401  # as api does
from sightline.results import (
    Classification,
    Detection,
    EvaluateResult,
    Origin,
    Predictions,
    ReportPage,
    Segmentation,
    TrainResult,
)

HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(1)>'
SPEC = DataSpec(("none", "cat"), 3, (32, 32), (0.5,) * 3, (0.25,) * 3)
VALUES = {"top1": 0.8765432, "loss": 0.5}


class Tags(HTMLParser):
    """Tags and attributes as a browser reads them."""

    def __init__(self, html: str):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs


def photo(width: int = 64, height: int = 48) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 255, (height, width, 3), np.uint8)


def cat(given: Any, spec: DataSpec = SPEC, **more: Any) -> Classification:
    fields = {"label": "cat", "probability": 0.75, "probabilities": {"cat": 0.75, "dog": 0.25}, "labels": ("cat",)}
    return Classification("inputs[0]", **{**fields, **more}, origin=Origin(given, spec))


def images(html: str) -> list[np.ndarray]:
    found = re.findall(r'src="data:image/jpeg;base64,([^"]+)"', html)
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))) for data in found]


def said(html: str) -> list[str]:
    return re.findall(r'alt="([^"]*)"', html)


def worst_named(name: str) -> dict[str, Any]:
    return {"index": 0, "name": name, "class": name, "predicted": name, "loss": 2.0}


@pytest.mark.parametrize(
    "result",
    [
        EvaluateResult(VALUES, {"classes": [{"class": HOSTILE, "top1": 0.5}]}, [worst_named(HOSTILE)], HOSTILE),
        TrainResult({HOSTILE: 0.5}, {}, [], Path(HOSTILE), None, -1, HOSTILE),
        cat(photo(), label=HOSTILE, probabilities={HOSTILE: 1.0}, labels=(HOSTILE,)),
        Predictions([Prediction(HOSTILE), Classification(HOSTILE, HOSTILE, 1.0, {HOSTILE: 1.0}, (HOSTILE,))]),
        Segmentation(HOSTILE, np.zeros((4, 4), np.uint8), (HOSTILE,), {HOSTILE: 16}, origin=Origin(photo(), SPEC)),
    ],
    ids=lambda result: type(result).__name__,
)
def test_names_in_data_are_text(result: Any):
    html = result._repr_html_()
    found = Tags(html)
    assert HOSTILE not in html and "alert(1)" in html
    assert "script" not in found.tags and not any(name.startswith("on") for name, _ in found.attributes)
    assert all((value or "").startswith("data:image/jpeg;") for name, value in found.attributes if name == "src")


def test_a_page_stays_in_its_frame(tmp_path: Path):
    (tmp_path / "report.html").write_text(f'<p class="a">{HOSTILE} & é</p>', encoding="utf-8")
    found = Tags(ReportPage(tmp_path / "report.html")._repr_html_())
    assert found.tags == ["iframe"] and ("sandbox", None) in found.attributes
    assert ("srcdoc", f'<p class="a">{HOSTILE} & é</p>') in found.attributes


def test_the_style_holds_below_one_class_alone():
    html = EvaluateResult(VALUES, {}, [], "a")._repr_html_()
    [style] = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    depth, outside = 0, ""
    for letter in style:
        outside += letter if depth == 0 else ""
        depth += {"{": 1, "}": -1}.get(letter, 0)
    assert depth == 0 and outside == ".sightline.sightline{"
    assert html.startswith('<div class="sightline">') and html.endswith("</div>")
    assert not re.search(r"url\(|@import|:root|body", style)


def test_an_image_in_memory_is_drawn_as_long_as_it_is_there():
    image = photo(40, 30).repeat(10, 0).repeat(10, 1)
    [drawn] = images(cat(image)._repr_html_())
    assert drawn.shape[1] == 400 and drawn.shape[0] > 300, "a strip with the classes below"
    assert np.abs(drawn[:290].astype(int) - image[:290]).mean() < 25, "as JPEG"
    gone = cat(photo())
    gc.collect()
    html = gone._repr_html_()
    assert images(html) == [] and "cat 0.7500, dog 0.2500" in html
    found = Predictions([cat(image)], [image])
    del image
    gc.collect()
    assert len(images(found._repr_html_())) == 1, "the list keeps what it was made of"
    assert pickle.loads(pickle.dumps(found))[0].probabilities == found[0].probabilities


def test_a_file_that_has_gone_leaves_the_words(tmp_path: Path):
    Image.fromarray(photo()).save(tmp_path / "a.png")
    found = cat(tmp_path / "a.png")
    assert len(images(found._repr_html_())) == len(images(pickle.loads(pickle.dumps(found))._repr_html_())) == 1
    (tmp_path / "a.png").unlink()
    html = found._repr_html_()
    assert images(html) == [] and "cat 0.7500" in html and "cannot be read" in html


def test_classes_are_those_that_predict_draws():
    several = DataSpec(("a", "b", "c"), 3, (32, 32), (0.5,) * 3, (0.25,) * 3, multi_label=True)
    many = {f"class {number}": 0.1 for number in range(10)}
    image = photo()
    assert said(cat(image, probabilities=many, labels=("class 0",))._repr_html_())[0].count("class") == 5
    chosen = cat(image, several, probabilities={"a": 0.9, "b": 0.8, "c": 0.1}, labels=("a", "b"))
    assert said(chosen._repr_html_()) == ["a 0.9000, b 0.8000"]
    assert said(cat(image, labels=())._repr_html_()) == ["nothing found"], "none reaches the threshold"


def test_boxes_are_drawn_where_they_are():
    image = np.full((200, 400, 3), 255, np.uint8)
    boxes = np.array([[100.0, 50.0, 300.0, 150.0]])
    found = Detection("a", boxes, np.array([0.5]), ("cat",), (3,), 400, 200, origin=Origin(image, SPEC))
    html = found._repr_html_()
    [drawn] = images(html)
    assert said(html) == ["cat 0.5000"] and drawn.shape == (200, 400, 3)
    coloured = np.argwhere(np.ptp(drawn.astype(int), axis=2) > 60)
    (top, left), (bottom, right) = coloured.min(0), coloured.max(0)
    assert abs(left - 100) <= 2 and abs(right - 300) <= 2 and abs(bottom - 150) <= 2
    assert 50 - 20 < top < 50, "the name stands on the box"


@pytest.mark.parametrize("shape", [(30, 40), (6, 30, 40)])
@pytest.mark.parametrize("channels", [1, 3])
def test_masks_are_drawn_into_images_and_volumes_in_memory(shape: tuple[int, ...], channels: int):
    spec = DataSpec(("none", "lung"), channels, (32, 32), (), (), spacing=(1.0, 1.0))
    mask = np.zeros(shape, np.uint8)
    mask[..., 10:20, 10:20] = 1
    plane = np.random.default_rng(0).integers(0, 255, shape, np.uint8)
    image = np.repeat(plane[None], channels, 0).astype(np.float32) if len(shape) == 3 else plane
    voxels = {"none": int((mask == 0).sum()), "lung": int((mask == 1).sum())}
    found = Segmentation("a", mask, spec.classes, voxels, origin=Origin(image, spec))
    html = found._repr_html_()
    [drawn] = images(html)
    share = (mask == 1).mean()
    assert said(html) == [f"none {1 - share:.2%}, lung {share:.2%}"] and max(drawn.shape) <= 960
    yellow = (drawn[..., 0] > 180) & (drawn[..., 1] > 130) & (drawn[..., 2] < 110)
    assert yellow.sum() > 300, "the outline of class 1"


def test_many_predictions_stay_small():
    image = photo(2000, 1500)
    html = Predictions([cat(image)] * 500)._repr_html_()
    shown = len(images(html))
    assert 1 <= shown <= 12 and f"and {500 - shown} more" in html and len(html) < 300_000


def test_scores_of_a_folder_that_has_gone_are_still_shown(tmp_path: Path):
    html = TrainResult(VALUES, {}, [], tmp_path / "moved", 0.5, 3, "1 epoch is done")._repr_html_()
    assert '<td class="n">0.8765</td>' in html
    html = EvaluateResult(VALUES, {}, [], "a", str(tmp_path / "moved"), 3)._repr_html_()
    assert '<td class="n">0.8765</td>' in html
