"""`sightline report`: what the page says of good, odd and damaged runs, and what a browser makes of it."""

import base64
import io
import json
import math
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from sightline.report import refresh
from sightline.report.charts import line_chart
from sightline.report.html import anchor

SMALL = ["--model.width=4", "--data.size=24", "--data.eval-resize=24", "--data.eval-size=24", "--run.workers=0"]
TITLES = (
    "Curves",
    "Worst predictions",
    "Classes",
    "Confusion matrix",
    "Scores",
    "Data",
    "Command",
    "Events",
    "Environment",
)
TITLES += ("Configuration",)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page(HTMLParser):
    """Text, tags and attributes of a page; every tag must be closed by its own name."""

    VOID = frozenset({"meta", "img", "br", "line", "polyline", "!doctype"})

    def __init__(self, path: Path):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.texts: list[str] = []
        self.refreshes = False
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.refreshes |= dict(attrs).get("http-equiv") == "refresh"
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "action")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def images(self) -> list[Image.Image]:
        """Decode the images; all are JPEGs in the page itself."""
        start = "data:image/jpeg;base64,"
        data = [base64.b64decode(link.removeprefix(start)) for link in self.links if link.startswith(start)]
        return [Image.open(io.BytesIO(each)).convert("RGB") for each in data]

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, shapes: Path) -> Path:
    """A run of two epochs on class folders of which one is called <script>; for reading only."""
    from sightline import cli

    work = tmp_path_factory.mktemp("report")
    data = work / "data"
    shutil.copytree(shapes, data)
    for split in ("train", "val"):
        sorted((data / split).iterdir())[0].rename(data / split / "<script>alert(1)<")
    flags = ["--data", str(data), "--out", str(work / "run"), "--epochs=2", *SMALL, "--run.device=cpu"]
    assert cli.main(["train", "demo_classification", *flags]) == 0
    return work / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    shutil.copytree(trained, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    return tmp_path / "run"


def test_a_page_tells_the_run_and_refers_to_nothing_outside(sightline, run: Path):
    said = sightline("report", run)
    assert said.code == 0 and said.out == f"wrote {run / 'report.html'}; open it in a browser\n"
    page = Page(run / "report.html")
    scores = json.loads((run / "scores-best.json").read_text())
    assert f"top1 {scores['values']['top1']:.4f}" in page.text
    for title in TITLES:
        assert f"#{anchor(title)}" in page.links and title in page.text
    assert "Command sightline " in page.text and "ended with exit 0: finished" in page.text
    for chart in (
        "Loss",
        "Score: top1",
        "Other scores",
        "Learning rate",
        "Images per second",
        "Time spent waiting for data (fraction)",
    ):
        assert chart in page.text
    assert page.tags.count("svg") == 8 and "script" not in page.tags
    assert page.tags.count("img") == len(page.images) == min(12, len(scores["worst"])) + 1 > 1  # and samples.jpg
    assert len(page.links) == len(page.images) + len(TITLES)
    assert not page.refreshes and "running when" not in page.text
    assert not re.search(r"https?://|url\(|@import", (run / "report.html").read_text())


def test_names_stay_text(sightline, run: Path):
    assert sightline("report", run).code == 0
    page = Page(run / "report.html")
    assert "<script>alert(1)<" in page.text and "script" not in page.tags


def test_folders_of_the_page_are_made_and_one_that_cannot_be_is_an_error(sightline, run: Path, tmp_path: Path):
    assert sightline("report", run, "--out", tmp_path / "new" / "pages" / "r.html").code == 0
    assert "</html>" in (tmp_path / "new" / "pages" / "r.html").read_text()
    (tmp_path / "file").write_text("")
    for out, reason in ((tmp_path / "file" / "r.html", "File exists"), (tmp_path / "new", "Is a directory")):
        said = sightline("report", run, "--out", out)
        assert (said.code, said.err) == (
            2,
            f"error: {out} cannot be written: {reason}; give another folder for results\n",
        )
    os.mkfifo(tmp_path / "pipe")
    said = sightline("report", run, "--out", tmp_path / "pipe")
    assert said.code == 2 and "is a device or a pipe" in said.err and (tmp_path / "pipe").is_fifo()


def test_several_runs_stand_side_by_side_with_what_differs(sightline, run: Path, tmp_path: Path):
    other = tmp_path / "other"
    shutil.copytree(run, other)
    config = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(config.replace("momentum: 0.9", "momentum: 0.5"))
    said = sightline("report", run, other, "--out", tmp_path / "both.html")
    assert said.code == 0, said
    text = Page(tmp_path / "both.html").text
    assert "2 runs" in text and "optimizer.momentum 0.9 0.5" in text and "optimizer.lr" in text
    differing = text.partition("What differs")[2].partition("the whole page")[0]
    assert "optimizer.lr" not in differing


def test_a_page_is_replaced_and_another_file_is_not(sightline, run: Path, tmp_path: Path):
    command = ["report", run, "--out", tmp_path / "page.html"]
    for _ in range(2):
        assert sightline(*command).code == 0
    (tmp_path / "page.html").write_text("<html>my thesis</html>")
    said = sightline(*command)
    assert said.code == 2 and "page.html exists and is not a page of `sightline report`" in said.err, said
    assert (tmp_path / "page.html").read_text() == "<html>my thesis</html>"
    (run / "report.html").write_text("half a pa")  # a page has this name in a run
    assert sightline("report", run).code == 0


def rewritten(path: Path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def many_classes(scores: dict) -> None:
    scores["tables"]["classes"] = [{"class": f"c{i}", "top1": i / 1000, "samples": 5} for i in range(1000)]


def hostile(drawings: dict) -> None:
    tiles = {'"><script>': "AAAA", "truth": '"><script>alert(1)</script>', "prediction": 5}
    drawings["drawings"] = dict.fromkeys(drawings["drawings"], tiles) | {"x": 5}
    drawings["colours"] = {"a": "red;background:url(http://x)", "<b>": "#ff0000", "c": 1}


def odd_curves(scores: dict) -> None:
    rows = [{"class": 5, "precision": [None, 1]}, {"class": "a", "precision": {}}, {"class": "b", "precision": [0, 0]}]
    scores["tables"].update(
        precision_recall=rows, matrix=[{"class": "a", "predicted": [1, "x"]}, {"predicted": [1, 2]}]
    )


DOUBTED = {"name": "<script>alert(1)</script>", "class": 5, "predicted": None, "confidence": "<b>", "path": 3}
ODD = {
    "suspicious labels are odd": lambda run: (run / "suspicious.json").write_text(
        json.dumps({"checkpoint": ["<script>"], "rows": [5, DOUBTED, {**DOUBTED, "path": "/dev/null"}]})
    ),
    "suspicious labels are no list": lambda run: (run / "suspicious.json").write_text('{"rows": {"a": 1}}'),
    "suspicious labels are garbage": lambda run: (run / "suspicious.json").write_text("{"),
    "log.jsonl is gone": lambda run: (run / "log.jsonl").unlink(),
    "log.jsonl is garbage": lambda run: (run / "log.jsonl").write_bytes(b"\xff\x00{]\n" * 5),
    "scores are gone": lambda run: [path.unlink() for path in run.glob("scores*.json")],
    "scores are a list": lambda run: (run / "scores-best.json").write_text("[1]"),
    "scores are half a file": lambda run: (run / "scores-best.json").write_text('{"values": {"top1"'),
    "scores are NaN": lambda run: rewritten(run / "scores-best.json", lambda s: s["values"].update(top1=None)),
    "tables are odd": lambda run: rewritten(run / "scores-best.json", lambda s: s.update(tables=5, worst={"a": 1})),
    "1,000 classes": lambda run: rewritten(run / "scores-best.json", many_classes),
    "config.yaml is garbage": lambda run: (run / "config.yaml").write_text("a: [b"),
    "environment is gone": lambda run: (run / "environment.json").unlink(),
    "the images are gone": lambda run: (run / "config.yaml").write_text(
        re.sub(r"path: .*", "path: /nowhere/at/all", (run / "config.yaml").read_text())
    ),
    "drawings are garbage": lambda run: (run / "drawings.json").write_text("{"),
    "drawings are hostile": lambda run: rewritten(run / "drawings.json", hostile),
    "drawings are of other scores": lambda run: rewritten(run / "drawings.json", lambda s: s.update(step=-1)),
    "a sample is half a line": lambda run: (run / "bad_samples.jsonl").write_text('{"name": "<b>", "reason": "x"}\n{'),
    "names are hostile": lambda run: (run / "scores-best.json").write_text(
        (run / "scores-best.json").read_text().replace("bolt", r"\"'></style></title><script>alert(1)</script>")
    ),
    "curves are odd": lambda run: rewritten(run / "scores-best.json", odd_curves),
    "times are odd": lambda run: (run / "log.jsonl").write_text('{"event": "exit", "time": 1e300, "code": 0}\n' * 3),
}


@pytest.mark.parametrize("odd", ODD)
def test_an_odd_or_damaged_run_still_gets_a_page(sightline, run: Path, odd: str):
    ODD[odd](run)
    said = sightline("report", run)
    assert said.code == 0, said
    page = Page(run / "report.html")
    assert "run " in page.texts and len(page.text) > 100 and "script" not in page.tags
    if odd == "names are hostile":
        assert page.text.count("<script>alert(1)</script>") > 2
    if odd in ("log.jsonl is garbage", "scores are half a file", "scores are a list", "config.yaml is garbage"):
        assert "cannot be read" in page.text or "does not hold an object" in page.text
    if odd == "scores are gone":
        assert "#classes" not in page.links and "Classes" not in page.texts
    if odd == "1,000 classes":
        assert "980 more" in page.text and (run / "report.html").stat().st_size < 1_000_000
    if odd in ("drawings are hostile", "drawings are of other scores"):
        assert "script" not in page.tags and page.images  # thumbnails of the files


READ = ["config.yaml", "log.jsonl", "scores.json", "scores-best.json", "drawings.json", "data.json", "environment.json"]
READ += ["bad_samples.jsonl", "suspicious.json", "exit.json", "scores-ckpt-00000001-test.json", "samples.jpg"]


@pytest.mark.parametrize("name", READ)
def test_a_pipe_in_place_of_a_file_of_the_run_does_not_hold_up_its_page(sightline, run: Path, name: str):
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)  # nobody writes to it: opening it would wait
    said = sightline("report", run)
    assert said.code == 0, said
    if name not in ("exit.json", "data.json", "samples.jpg"):
        assert f"{name} cannot be read: " in Page(run / "report.html").text


SMALL_BOXES = ["--data.path=synthetic:classes=3,samples=24,size=60", "--model.width=4", "--data.size=48"]
SMALL_BOXES += ["--data.max-boxes=8", "--data.classes=3", "--train.global-batch=8"]
SMALL_SLICES = [
    "--data.path=synthetic:samples=10",
    "--data.task=04",
    "--model.width=4",
    "--train.global-batch=8",
    "--train.max-steps=2",
]


@pytest.mark.parametrize(
    ("recipe", "flags", "tiles"),
    [
        ("demo_detection", SMALL_BOXES, ["truth", "prediction"]),
        ("unet2d", SMALL_SLICES, ["image", "truth", "prediction"]),
    ],
)
def test_truth_stands_beside_prediction(sightline, tmp_path: Path, recipe: str, flags: list[str], tiles: list[str]):
    run = tmp_path / "run"
    said = sightline("train", recipe, *flags, "--out", run, "--epochs=1", "--run.workers=0", "--run.device=cpu")
    assert said.code == 0, said
    worst = json.loads((run / "scores-best.json").read_text())["worst"]
    drawn = json.loads((run / "drawings.json").read_text())
    indices = [str(row["index"]) for row in worst]
    assert drawn["drawings"] and indices[: len(drawn["drawings"])] == list(drawn["drawings"])
    assert {tuple(each) for each in drawn["drawings"].values()} == {tuple(tiles)}
    page = Page(run / "report.html")
    images = page.images[:-1]  # samples.jpg comes last
    assert len(images) == len(tiles) * len(drawn["drawings"])
    for place in range(0, len(images), len(tiles)):
        assert len({image.size for image in images[place : place + len(tiles)]}) == 1  # the same scale
    assert (run / "report.html").stat().st_size < 3_000_000
    if recipe == "demo_detection":
        assert "Parts of the loss" in page.text and "IoU 0.5" not in page.text  # nothing was found
        curve = {"class": None, "precision": [1.0, 0.5, 0.0]}
        rewritten(run / "scores-best.json", lambda scores: scores["tables"].update(precision_recall=[curve]))
        assert sightline("report", run).code == 0
        assert "Precision-recall curve at IoU 0.5" in Page(run / "report.html").text
    else:
        assert set(drawn["colours"]) <= set(page.text.split()) and "recall" in page.text


def test_a_run_that_fails_has_a_page_that_says_so(sightline, shapes: Path, tmp_path: Path):
    flags = [
        "--data",
        shapes,
        "--out",
        tmp_path / "run",
        "--epochs=1",
        *SMALL,
        "--run.device=cpu",
        "--lr=1e30",
        "--batch-size=8",
    ]
    assert sightline("train", "demo_classification", *flags).code == 5
    page = Page(tmp_path / "run" / "report.html")
    assert "failed" in page.texts and "was not finite" in page.text and "ended with exit 5" in page.text
    assert not page.refreshes


def test_a_page_that_is_refreshed_ends_as_that_of_a_finished_run(sightline, shapes: Path, tmp_path: Path, monkeypatch):
    started: list[subprocess.Popen] = []

    class Recorded(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(refresh, "EVERY_S", 0)
    monkeypatch.setattr(subprocess, "Popen", Recorded)
    run = tmp_path / "run"
    flags = ["--data", shapes, "--out", run, "--epochs=2", *SMALL, "--run.device=cpu", "--run.log-every-steps=1"]
    assert sightline("train", "demo_classification", *flags).code == 0
    assert started and all(child.returncode is not None for child in started)
    page = Page(run / "report.html")
    assert "finished" in page.texts and not page.refreshes
    assert not [path.name for path in run.iterdir() if ".part" in path.name]


def test_skipped_samples_are_counted_and_named(sightline, run: Path):
    rows = [{"feed": "train", "name": f"bad{n}.jpg", "reason": "it is empty"} for n in range(30)]
    rows += [{"feed": "val", "name": "faraway.jpg", "reason": "it is empty", "data": "/elsewhere"}]  # by `evaluate`
    (run / "bad_samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    warning = {"event": "warning", "time": 1.0, "text": "sample skipped: bad0.jpg: it is empty"}
    with (run / "log.jsonl").open("a") as log:
        log.write((json.dumps(warning) + "\n") * 300)
    assert sightline("report", run).code == 0
    text = Page(run / "report.html").text
    assert "30 samples skipped" in text and "bad0.jpg it is empty" in text and "and 10 more" in text
    assert text.count("bad0.jpg") == 1 and "ended with exit 0" in text and "faraway" not in text


def test_what_is_not_a_run_is_refused(sightline, tmp_path: Path):
    said = sightline("report", tmp_path)
    assert said.code == 2 and "is not a run folder; give one that `sightline train` wrote" in said.err


def test_lines_are_drawn_where_the_numbers_are():
    drawn = line_chart({"a": [(0, 1.0), (5, 3.0), (10, 2.0)]})
    ((points,),) = [re.findall(r'<polyline points="([^"]*)"', drawn)]
    xs, ys = zip(*(map(float, pair.split(",")) for pair in points.split()), strict=True)
    assert drawn.count("<title>step 5: 3</title>") == 1
    assert (xs[1] - xs[0]) == pytest.approx(xs[2] - xs[1], abs=0.11) and xs[0] == 64 and xs[2] == 628
    assert (ys[0] - ys[1]) == pytest.approx(2 * (ys[0] - ys[2]), abs=0.21) and ys[1] < ys[2] < ys[0]


def test_gaps_single_points_and_wide_ranges():
    broken = line_chart({"a": [(0, 1.0), (1, 2.0), (2, math.nan), (3, 1.0), (4, 3.0)]})
    assert broken.count("<polyline") == 2
    assert line_chart({"a": [(3, 0.5)]}).count("<circle") == 1
    assert line_chart({"a": [(0, math.inf)]}) == "" and line_chart({}) == ""
    wide = line_chart({"a": [(0, 1e-3), (1, 1.0), (2, 1e3)]})
    ys = [float(pair.split(",")[1]) for pair in re.findall(r'points="([^"]*)"', wide)[0].split()]
    assert ys[0] - ys[1] == pytest.approx(ys[1] - ys[2], abs=0.2)  # logarithmic
    long = line_chart({"a": [(i, 1.0 + i % 2) for i in range(100_000)]})
    assert len(long) < 20_000


@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium (Debian: apt install chromium)")
def test_a_browser_shows_it_without_errors_and_without_sideways_scrolling(sightline, run: Path, tmp_path):
    assert sightline("report", run).code == 0
    page, widths = run / "report.html", (1280, 375)
    # An iframe has the width of a phone; windows of headless Chromium are at least 500 pixels wide.
    frames = [f'<iframe style="width:{width}px;height:800px" src="{page.as_uri()}"></iframe>' for width in widths]
    probe = tmp_path / "probe.html"
    probe.write_text(
        f"{''.join(frames)}<script>onload = () => {{ document.title = JSON.stringify("
        "[...document.getElementsByTagName('iframe')].map((frame) => { const d = frame.contentDocument;"
        "const images = [...d.images]; return {"
        "wide: d.documentElement.scrollWidth, seen: images.filter(i => i.naturalWidth > 0).length,"
        "all: images.length, scripts: d.scripts.length}; })); }</script>"
    )
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--enable-logging=stderr"]
    flags += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=4000", "--dump-dom"]
    shown = subprocess.run([CHROMIUM, *flags, probe.as_uri()], capture_output=True, text=True, timeout=60)
    for width, found in zip(widths, json.loads(re.search(r"<title>(.*?)</title>", shown.stdout)[1]), strict=True):
        assert found["wide"] <= width and found["seen"] == found["all"] > 0 and found["scripts"] == 0, (width, found)
    assert not re.search(r"CONSOLE.*(error|refused|violat)", shown.stderr, re.IGNORECASE), shown.stderr


def test_worst_samples_are_drawn_once_at_the_end_with_the_weights_of_the_best_step(sightline, tmp_path: Path):
    """Short epochs do not wait for drawings; the weights of later steps must not draw them either."""
    flags = [*SMALL_SLICES[:-1], "--train.steps-per-epoch=2", "--train.seed=2", "--optimizer.lr=1", "--epochs=2"]
    train = ["train", "unet2d", *flags, "--run.workers=0", "--run.device=cpu"]
    first, whole = tmp_path / "first", tmp_path / "whole"
    assert sightline(*train, "--out", whole).code == 0
    best = json.loads((whole / "scores-best.json").read_text())["step"]  # 2 on most CPUs: the rate is far too high
    assert sightline(*train, "--out", first, f"--train.max-steps={best}").code == 0  # ends at that evaluation
    drawn, of_first = (json.loads((run / "drawings.json").read_text()) for run in (whole, first))
    assert json.loads((whole / "scores.json").read_text())["step"] == 4
    assert drawn["step"] == best and drawn == of_first
    (whole / "drawings.json").unlink()  # as if the start that had the best evaluation was killed
    assert sightline(*train, "--out", whole, "--epochs=3").code == 0
    best, drawn = (json.loads((whole / name).read_text()) for name in ("scores-best.json", "drawings.json"))
    assert drawn["step"] == best["step"] and drawn["drawings"]
