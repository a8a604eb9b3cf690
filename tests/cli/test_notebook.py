"""notebooks/first_model.ipynb runs from top to bottom, and what it shows is what the files of its run hold."""

import ast
import base64
import io
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sightline import api, cli, config

REPO = Path(__file__).resolve().parents[2]
NOTEBOOK = REPO / "notebooks" / "first_model.ipynb"
# The notebook's own values are those of a person with five minutes.
SMALL = "--model.width 4 --data.size 24 --data.eval-resize 24 --data.eval-size 24 --data.classes 10"
SMALL += " --run.workers 0 --run.device cpu --run.progress off --run.log-every-steps 1"
FEW = ["--train-per-class=4", "--val-per-class=2"]
EXPORT = "!sightline export runs/first_model --format torch-export"


def cells() -> Iterator[str]:
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            yield "".join(cell["source"])


def carried_out(source: str, names: dict[str, Any]) -> Any:
    """Run a cell, a command of the shell or Python; return the value of its last line if that is an expression."""
    if source.startswith("!"):
        program, command, *words = shlex.split(source.removeprefix("!"))
        assert program == "sightline" and "\n" not in source
        assert cli.main([command, *words, *(FEW if command == "prepare" else [])]) == 0
        return None
    tree = ast.parse(source)
    last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return eval(compile(last, "cell", "eval"), names) if last else None


class Read(HTMLParser):
    """What a browser reads in a piece of HTML: words outside of the style, rows of tables, images, a frame."""

    def __init__(self, shown: Any):
        super().__init__()
        self.html = shown._repr_html_()
        self.images: dict[str, Image.Image] = {}  # by what is said of them
        self.rows: list[list[str]] = []
        self.titles: list[str] = []  # of points of a curve
        self.words: list[str] = []
        self.page = ""
        self._tag = ""
        self.feed(self.html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._tag = tag
        found = {name: value or "" for name, value in attrs}
        self.page += found.get("srcdoc", "")
        if tag == "img":
            data = base64.b64decode(found["src"].removeprefix("data:image/jpeg;base64,"), validate=True)
            self.images[f"{len(self.images)} {found['alt']}"] = Image.open(io.BytesIO(data))
        if tag == "tr":
            self.rows.append([])

    def handle_data(self, data: str) -> None:
        if self._tag == "title":
            self.titles.append(data)
        elif self._tag in ("td", "th"):
            self.rows[-1].append(data)
        if self._tag not in ("style", "title"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[type, Any]]:
    """What the cells show, by type, in the folder where they ran."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("notebook"))
        named = config.named
        patch.setattr(config, "named", lambda name, *given: named(name, *given, SMALL.split()))
        names: dict[str, Any] = {"__name__": "__main__"}
        *others, last = cells()
        assert last == EXPORT
        shown = [carried_out(source, names) for source in others]
        yield {type(value): value for value in shown if value is not None}


def read(name: str) -> dict[str, Any]:
    return json.loads(Path("runs/first_model", name).read_text(encoding="utf-8"))


def wrong(rows: Sequence[dict[str, Any]]) -> list[str]:
    return [f"{row['class']} predicted as {row['predicted']} , loss {row['loss']:.4f} {row['name']}" for row in rows]


def test_a_training_shows_scores_curves_and_worst_predictions(notebook: dict[type, Any]):
    page, best, last = Read(notebook[api.TrainResult]), read("scores-best.json"), read("scores.json")
    columns = [best] if best["step"] == last["step"] else [best, last]
    scores = [f"{each['values']['top1']:.4f}" for each in columns]
    assert ["top1", *scores] in page.rows and ["samples", *["20"] * len(columns)] in page.rows
    assert f"top1 {scores[0]} best, epoch {best['epoch']}" in page.text and "10 of 10 epochs" in page.text
    events = [json.loads(line) for line in Path("runs/first_model/log.jsonl").read_text().splitlines()]
    for kind, name in (("train", "loss"), ("train", "top1"), ("evaluate", "loss"), ("evaluate", "top1")):
        points = [(event["step"], event[name]) for event in events if event["event"] == kind]
        titles = [(int(re.findall(r"step (\d+)", title)[0]), title.rpartition(" ")[2]) for title in page.titles]
        assert len(points) >= 10 and {(step, f"{value:.4g}") for step, value in points} <= set(titles), (kind, name)
    assert all(said in page.text for said in wrong(best["worst"][:6])) and len(page.images) == 6
    assert "The run is in runs/first_model, the report runs/first_model/report.html" in page.text
    assert len(page.html) < 300_000


def test_an_evaluation_shows_its_scores_with_the_drawings_of_the_run(notebook: dict[type, Any]):
    page, best = Read(notebook[api.EvaluateResult]), read("scores-best.json")
    [found] = Path("runs/first_model").glob("scores-ckpt-*.json")
    scores = json.loads(found.read_text())
    assert ["top1", f"{scores['values']['top1']:.4f}"] in page.rows and scores["step"] == best["step"]
    rows = sorted(scores["tables"]["classes"], key=lambda row: row["top1"])
    assert page.rows[-10][0] == rows[0]["class"] and len(page.rows) > 12, "the lowest first"
    assert all(said in page.text for said in wrong(scores["worst"][:6]))
    drawn = read("drawings.json")["drawings"]
    shown = [drawn[str(row["index"])]["image"] for row in scores["worst"][:6]]
    assert all(f'base64,{data}"' in page.html for data in shown) and len(page.images) == 6
    assert f"runs/first_model/checkpoints/{found.stem.removeprefix('scores-')} on the val split" in page.text


def test_an_evaluation_of_other_images_does_not_show_the_drawings_of_the_run(notebook: dict[type, Any]):
    scores, drawn = notebook[api.EvaluateResult], read("drawings.json")["drawings"]
    others = [{**row, "name": f"other {row['name']}"} for row in scores.worst]
    for other in (replace(scores, worst=others), replace(scores, step=scores.step + 1)):
        page = Read(other)
        assert len(page.images) == 6, "thumbnails of the files"
        assert not any(tiles["image"] in page.html for tiles in drawn.values())


def test_predictions_show_the_drawings_that_predict_writes(notebook: dict[type, Any]):
    found = notebook[api.Predictions]
    page = Read(found)
    files = [each.file for each in found]
    assert cli.main(["predict", "runs/first_model", *files, "--out", "seen", "--run.progress=off"]) == 0
    written = json.loads(Path("seen/predictions.json").read_text())["files"]
    assert len(written) == len(page.images) == 3
    for row, (said, image) in zip(written, page.images.items(), strict=True):
        assert said.partition(" ")[2] == ", ".join(f"{each['class']} {each['score']:.4f}" for each in row["found"])
        drawn = np.asarray(Image.open(Path("seen", row["picture"])).convert("RGB"), np.float32)
        assert np.abs(drawn - np.asarray(image, np.float32)).mean() < 6, "as JPEG of another quality"
    assert all(file in page.text for file in files)


def test_the_report_is_shown_whole_in_a_frame(notebook: dict[type, Any]):
    page = Read(notebook[api.ReportPage])
    before, base, after = page.page.partition('<base href="about:srcdoc">')
    assert base and before + after == Path("runs/first_model/report.html").read_text(encoding="utf-8")
    assert page.text == "", "nothing of the page lies outside of the frame"


def test_the_notebook_leaves_a_run(notebook: dict[type, Any]):
    assert read("exit.json")["code"] == 0


@pytest.mark.slow  # torch's exporter takes two seconds; test_export.py types the same
def test_the_notebook_leaves_an_exported_file(notebook: dict[type, Any]):
    carried_out(EXPORT, {})
    assert Path("runs/first_model/model.pt2").stat().st_size > 10_000


def test_the_notebook_in_the_repository_has_no_outputs():
    whole = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    code = [cell for cell in whole["cells"] if cell["cell_type"] == "code"]
    assert len(code) == len(list(cells())) > 5
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert whole["nbformat"] == 4 and {"kernelspec", "language_info"} == whole["metadata"].keys()
