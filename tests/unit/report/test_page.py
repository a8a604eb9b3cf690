"""The page of runs whose files were written by hand: every number stands where a reader looks for it."""

import base64
import io
import itertools
import json
import math
import re
from html import unescape
from pathlib import Path

import pytest
from PIL import Image

from sightline.report.charts import line_chart, short
from sightline.report.page import write_report
from sightline.report.story import read_story

CONFIG = """recipe: demo_classification
data:
  path: /data/pets
train:
  epochs: {epochs}
run:
  out: {out}
"""


def write_run(folder: Path, epochs: int = 4, top1: float = 0.75, more: list[dict] | None = None) -> Path:
    """A finished run of two epochs; its second evaluation is worse than the first."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG.format(epochs=epochs, out=folder))
    (folder / "environment.json").write_text(
        json.dumps({"command": ["/bin/sightline", "train", "a b"], "ranks": 2, "packages": {"torch": "2.9", "x": "1"}})
    )
    train = [
        {"event": "train", "time": 1003.0 + n, "epoch": n // 3, "step": n, "loss": 3.0 - n, "images_per_s": speed}
        for n, speed in enumerate((100.0, 3000.4, 200.0, 50.0, 4000.0))
    ]
    log = [
        {"event": "start", "time": 1000.0, "step": 0},
        *train,
        {"event": "evaluate", "time": 1010.0, "epoch": 1, "step": 3, "top1": top1, "loss": 0.5, "apl": -1.0},
        {"event": "evaluate", "time": 1011.0, "epoch": 2, "step": 5, "top1": 0.5, "loss": None, "apl": -1.0},
        *(more or []),
        {"event": "epoch", "time": 1012.0, "epoch": 2, "step": 5},
        {"event": "exit", "time": 4661.0, "code": 0, "reason": "finished"},
    ]
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    (folder / "exit.json").write_text(json.dumps({"code": 0, "reason": "finished", "time": 4661.0}))
    classes = [
        {"class": "cat", "top1": 0.25, "samples": 4, "precision": None},
        {"class": "dog", "top1": top1, "samples": 12, "precision": 1.5},
    ]
    matrix = [{"class": "cat", "predicted": [1, 3]}, {"class": "dog", "predicted": [0, 12]}]
    curve = [{"class": None, "precision": [1.0, 0.5, 0.0]}, {"class": "cat", "precision": [1.0, 1.0, 0.5, 0.25, 0.0]}]
    best = {
        "epoch": 1,
        "step": 3,
        "values": {"top1": top1, "loss": 0.5, "apl": -1.0, "samples": 16.0},
        "tables": {"classes": classes, "matrix": matrix, "precision_recall": curve},
        "worst": [{"index": 7, "name": "cat/7.jpg", "class": "cat", "predicted": "dog", "loss": 2.5}],
    }
    last = {**best, "epoch": 2, "step": 5, "values": {"top1": 0.5, "loss": None, "samples": 16.0}}
    (folder / "scores-best.json").write_text(json.dumps(best))
    (folder / "scores.json").write_text(json.dumps(last))
    return folder


def page_of(*folders: Path, out: Path | None = None) -> str:
    return write_report(folders, out).read_text(encoding="utf-8")


def tables(html: str) -> list[list[list[str]]]:
    """The text of every cell of every table."""
    rows = [re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL) for table in re.findall(r"<table.*?</table>", html)]
    cells = [[re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in found] for found in rows]
    return [[[unescape(re.sub("<[^>]*>", "", cell)) for cell in row] for row in found] for found in cells]


def table_of(html: str, first: str) -> list[list[str]]:
    """The one table whose header begins so."""
    [found] = [table for table in tables(html) if table and table[0] and table[0][0] == first]
    return found


def boxes(html: str) -> list[tuple[str, str]]:
    """The big numbers and what they are."""
    return re.findall(r"<div><b>(.*?)</b><small>(.*?)</small></div>", html)


def test_the_numbers_of_a_run(tmp_path: Path):
    html = page_of(write_run(tmp_path / "run"))
    assert boxes(html) == [
        ("top1 0.7500", "best, epoch 1"),
        ("top1 0.5000", "last, epoch 2"),
        ("2 of 4", "epochs"),
        ("1:01:01", "training time"),
        ("200", "images per second"),  # the median of five
    ]
    assert table_of(html, "score") == [
        ["score", "best, epoch 1", "last, epoch 2"],
        ["top1", "0.7500", "0.5000"],
        ["loss", "0.5000", "-"],
        ["AP of large objects", "-", "-"],
        ["samples", "16", "16"],
    ]
    assert table_of(html, "class") == [
        ["class", "recall", "precision", "images"],
        ["cat", "0.2500", "-", "4"],
        ["dog", "0.7500", "1.5000", "12"],
    ]
    assert re.findall(r'class="bar" style="--v:(\d+)%">([^<]*)<', html) == [("25", "0.2500"), ("75", "0.7500")]
    curves = html[html.index('aria-label="all classes, cat"') :]
    lines = [[float(at) for at in re.split("[ ,]", line)] for line in re.findall(r'points="([^"]*)"', curves)[:2]]
    [left, top, half, middle], [_, _, _, _, _, _, quarters, low] = lines
    assert quarters - left == pytest.approx(1.5 * (half - left), abs=0.2), "to recalls of 0.5 and 0.75, where they end"
    assert low - top == pytest.approx(1.5 * (middle - top), abs=0.2) and low > middle > top
    assert "demo_classification on /data/pets<" in html and "<pre>sightline train &#x27;a b&#x27;</pre>" in html
    assert [row for row in tables(html)[-2] if row[0] != "command"] == [["ranks", "2"], ["packages", "torch 2.9, x 1"]]


def test_the_speed_is_that_of_the_last_line_of_the_run(tmp_path: Path):
    exits = [{"event": "exit", "time": 1011.5, "code": 130, "reason": "stopped", "images_per_s": 41.0}]
    run = write_run(tmp_path / "run", more=exits)
    assert ("200", "images per second") in boxes(page_of(run)), "another start has ended since, without a number"
    with (run / "log.jsonl").open("a") as log:
        log.write(
            json.dumps({"event": "exit", "time": 4662.0, "code": 0, "reason": "finished", "images_per_s": 1234.4})
        )
    assert ("1,234", "images per second") in boxes(page_of(run))


def test_scores_of_the_test_split_stand_beside_those_of_val(tmp_path: Path):
    run = write_run(tmp_path / "run")
    for step, top1, data in ((3, 0.625, "/data/pets"), (5, 0.25, "/data/pets"), (9, 0.125, "/other")):
        scores = {"step": step, "split": "test", "data": data, "values": {"top1": top1, "samples": 8.0}}
        (run / f"scores-ckpt-0000000{step}-test.json").write_text(json.dumps(scores))
    html = page_of(run)
    assert boxes(html)[2] == ("top1 0.6250", "test split")  # of the best checkpoint
    assert table_of(html, "score")[0] == ["score", "best, epoch 1", "last, epoch 2", "test split, step 3"]
    assert table_of(html, "score")[1] == ["top1", "0.7500", "0.5000", "0.6250"]
    (run / "scores-ckpt-00000003-test.json").unlink()
    assert ("top1 0.2500", "test split") in boxes(page_of(run))  # of the run's own data


BOXES = {
    "values": {
        "ap": 0.25,
        "ap50": 0.5,
        "f1": 0.6,
        "precision": 0.75,
        "recall": 0.5,
        "score_threshold": 0.31,
        "ap75": 0.2,
    }
    | {"apl": -1.0, "samples": 16.0},
    "tables": {
        "classes": [
            {"class": "cat", "ap": 0.25, "ap50": 0.5, "recall": 0.5, "precision": 0.75, "f1": 0.6, "truths": 4},
            {"class": "dog", "ap": None, "ap50": None, "recall": None, "precision": None, "f1": None, "truths": 0},
        ]
    },
    "worst": [],
}
MASKS = {
    "values": {"dice": 0.8, "iou": 0.7, "dice_sum": 0.8, "val_loss": 0.5, "samples": 16.0, "volumes": 4.0},
    "tables": {
        "classes": [{"class": "organ", "label": "L1", "dice": 0.8, "iou": 0.7, "precision": 0.5, "recall": 1.0}]
    },
    "worst": [],
}
TAGS = {
    "values": {"map": 0.5, "macro_f1": 0.4, "f1": 0.4, "exact": 0.1, "loss": 0.5, "samples": 16.0},
    "tables": {"classes": [{"class": "red", "map": 0.5, "recall": 0.5, "precision": 0.5, "f1": 0.4, "samples": 3}]},
    "worst": [],
}


def page_with(folder: Path, scores: dict) -> str:
    run = write_run(folder)
    for name in ("scores-best.json", "scores.json"):
        (run / name).write_text(json.dumps({"epoch": 1, "step": 3, **scores}))
    return page_of(run)


def test_detectors_show_ap_and_ap50_first_and_the_threshold_of_f1(tmp_path: Path):
    html = page_with(tmp_path / "run", BOXES)
    assert boxes(html)[:2] == [("AP 0.2500", "best, epoch 1"), ("AP50 0.5000", "best, epoch 1")]
    first, more = ([row[0] for row in table] for table in tables(html) if table[0][0] == "score")
    assert first == ["score", "AP", "AP50", "F1", "precision", "recall", "score threshold", "samples"]
    assert more == ["score", "AP75", "AP of large objects"]
    assert "<details><summary>2 more of COCO&#x27;s scores</summary>" in html
    assert table_of(html, "class") == [
        ["class", "AP", "AP50", "recall", "precision", "F1", "objects"],
        ["cat", "0.2500", "0.5000", "0.5000", "0.7500", "0.6000", "4"],
        ["dog", "-", "-", "-", "-", "-", "0"],
    ]
    assert "those of boxes with a score of at least 0.3100, where F1" in html


def test_masks_show_iou_beside_dice(tmp_path: Path):
    html = page_with(tmp_path / "run", MASKS)
    assert boxes(html)[:2] == [("Dice 0.8000", "best, epoch 1"), ("IoU 0.7000", "best, epoch 1")]
    assert table_of(html, "class")[0] == ["class", "Dice", "IoU", "precision", "recall"]
    names = ["score", "Dice", "IoU", "sum of Dice", "loss", "volumes", "samples"]
    assert [row[0] for row in table_of(html, "score")] == names and "at least" not in html


def test_one_of_several_labels_has_ap_and_their_f1_is_shown_once(tmp_path: Path):
    html = page_with(tmp_path / "run", TAGS)
    assert boxes(html)[0] == ("mAP 0.5000", "best, epoch 1")
    assert table_of(html, "class")[0] == ["class", "AP", "recall", "precision", "F1", "images"]
    names = ["score", "mAP", "macro F1", "exact matches", "loss", "samples"]
    assert [row[0] for row in table_of(html, "score")] == names


def test_the_only_evaluation_is_not_shown_twice(tmp_path: Path):
    run = write_run(tmp_path / "run")
    (run / "scores.json").write_text((run / "scores-best.json").read_text())
    html = page_of(run)
    assert table_of(html, "score")[0] == ["score", "best, epoch 1"]
    assert [what for _, what in boxes(html)][:2] == ["best, epoch 1", "epochs"]
    (run / "scores-best.json").unlink()
    assert table_of(page_of(run), "score")[0] == ["score", "last, epoch 1"]


def test_sections_that_were_renamed_keep_their_links(tmp_path: Path):
    html = page_of(write_run(tmp_path / "run"))
    assert '<a href="#most-wrong-samples">Worst predictions</a>' in html and '<section id="confusions"' in html
    assert '<a href="#curves">Curves</a>' in html and '<section id="most-wrong-samples"' in html


def test_confusions_are_shares_of_the_true_class(tmp_path: Path):
    run = write_run(tmp_path / "run")
    html = page_of(run)
    cells = re.findall(r'<td class="(good|wrong)" style="--v:(\d+)%" title="([^"]*)">(\d*)</td>', html)
    assert cells == [
        ("good", "25", "cat predicted as cat: 1", "1"),
        ("wrong", "75", "cat predicted as dog: 3", "3"),
        ("good", "100", "dog predicted as dog: 12", "12"),
    ]
    scores = json.loads((run / "scores-best.json").read_text())
    pairs = [{"class": f"c{n}", "predicted": "dog", "samples": 99 - n} for n in range(21)]
    scores["tables"] = {"confusion": [*pairs[:3], {"class": "?", "predicted": "?", "samples": None}, *pairs[3:]]}
    (run / "scores-best.json").write_text(json.dumps(scores))
    shown = next(table for table in tables(page_of(run)) if table[0] == ["class", "predicted as", "samples"])
    assert shown[1:] == [[f"c{n}", "dog", str(99 - n)] for n in range(20)]


@pytest.mark.parametrize(("classes", "numbered"), [(20, True), (21, False)])
def test_a_large_matrix_has_colours_only(tmp_path: Path, classes: int, numbered: bool):
    run = write_run(tmp_path / "run")
    scores = json.loads((run / "scores-best.json").read_text())
    rows = [{"class": f"c{n}", "predicted": [int(n == m) for m in range(classes)]} for n in range(classes)]
    scores["tables"] = {"matrix": rows}
    (run / "scores-best.json").write_text(json.dumps(scores))
    cells = re.findall(r'<td class="good"[^>]*>(\d*)</td>', page_of(run))
    assert cells == ["1" if numbered else ""] * classes


def test_many_classes_are_folded_and_very_many_are_left_to_the_file(tmp_path: Path):
    run = write_run(tmp_path / "run")
    scores = json.loads((run / "scores-best.json").read_text())
    rows = [{"class": f"c{n}", "top1": n / 2000 if n else None} for n in range(1003)]
    scores["tables"] = {"classes": rows}
    (run / "scores-best.json").write_text(json.dumps(scores))
    html = page_of(run)
    first, rest = (table for table in tables(html) if table[0][0] == "class")
    names = [row[0] for row in first[1:] + rest[1:]]
    assert names == [f"c{n}" for n in range(1, 1001)] and len(first) == 21, "lowest first, those without a score last"
    assert "<summary>980 more</summary>" in html and "3 more in the scores file" in html


def test_events_are_told_in_sentences_and_unknown_ones_by_their_kind(tmp_path: Path):
    told = [
        {"event": "resume", "time": 1011.1, "step": 5, "checkpoint": "step-5"},
        {"event": "resume", "time": 1011.2},
        {"event": "warning", "time": 1011.3, "text": "the disk is slow"},
        {"event": "warning", "time": 1011.4, "text": "sample skipped: a.jpg: no image"},
        {"event": "bad_step", "time": 1011.5, "step": 6},
    ]
    rows = table_of(page_of(write_run(tmp_path / "run", more=told)), "time")
    assert [row[1] for row in rows[1:]] == [
        "started at step 0",
        "resumed from step-5, step 5",
        "resume",
        "warning: the disk is slow",
        "step 6 was not finite",
        "ended with exit 0: finished",
    ]
    assert all(re.fullmatch(r"19(69|70)-\d\d-\d\d \d\d:\d\d:\d\d", row[0]) for row in rows[1:])


def test_the_middle_of_many_events_is_left_out(tmp_path: Path):
    told = [{"event": "warning", "time": 1011.0 + n, "text": f"number {n}"} for n in range(300)]
    rows = [row[1] for row in table_of(page_of(write_run(tmp_path / "run", more=told)), "time")[1:]]
    assert len(rows) == 201 and rows[100] == "102 events are left out here"
    assert rows[1] == "warning: number 0" and rows[99] == "warning: number 98"
    assert rows[101] == "warning: number 201" and rows[-1] == "ended with exit 0: finished"


def test_lines_that_cannot_be_read_are_counted_but_for_half_a_line(tmp_path: Path):
    run = write_run(tmp_path / "run")
    for added, problems in (("{", []), ('\n{"time": 1}\n', ["2 lines of log.jsonl cannot be read"])):
        with (run / "log.jsonl").open("a") as file:
            file.write(added)
        assert read_story(run).problems == problems


FIELDS = ["time", "step", "epoch", "loss", "images_per_s"]
ODD_NUMBERS = [10**400, -(10**400), 1e308, -1e308, math.inf, -math.inf, math.nan]


@pytest.mark.parametrize(
    ("field", "value"),
    list(zip(FIELDS * 2, [*ODD_NUMBERS, math.inf, 10**400, math.nan], strict=True)),
    ids=lambda value: value if isinstance(value, str) else f"{value:.9}" if isinstance(value, float) else "huge",
)
def test_numbers_that_no_training_has_are_left_out(tmp_path: Path, field: str, value: float):
    lines = [
        {"event": kind, "time": 1010.5, "epoch": 1, "step": 4, "loss": 1.0, "top1": 0.5, "images_per_s": 9.0, **more}
        for kind in ("train", "evaluate", "exit", "start")
        for more in ({field: value}, {field: 7}, {field: -value})
    ]
    run = write_run(tmp_path / "run", more=lines)
    story, html = read_story(run), page_of(run)
    lines = re.findall(r'points="[^"]*"', html)
    assert lines and not any("nan" in line or "inf" in line for line in lines) and "Events" in html
    assert all(math.isnan(y) or abs(y) < 1e9 for points in story.curves.values() for _, y in points)
    points = dict(story.curves["train/loss"])
    assert points[0] == 3.0 and points[3] == 0.0  # the others are shown
    assert len(page_of(run, run, out=tmp_path / "both.html")) > len(html)


def test_a_time_that_no_clock_shows_is_no_training_time(tmp_path: Path):
    more = [{"event": "start", "time": -1e308, "step": 0}, {"event": "train", "time": 1e308, "epoch": 0, "step": 1}]
    summary = read_story(write_run(tmp_path / "run", more=more)).summary
    assert (summary.state, summary.seconds) == ("finished", None)


def test_steps_that_were_taken_again_count_once(tmp_path: Path):
    again = [{"event": "train", "time": 1011.5, "epoch": 1, "step": 4, "loss": 9.0, "is_new": True, "note": "x"}]
    curves = read_story(write_run(tmp_path / "run", more=again)).curves
    assert curves["train/loss"] == [(0, 3.0), (1, 2.0), (2, 1.0), (3, 0.0), (4, 9.0)]
    assert set(curves) == {f"train/{name}" for name in ("loss", "images_per_s")} | {
        f"evaluate/{name}" for name in ("top1", "loss", "apl")
    }


def test_skipped_samples_are_counted_and_twenty_are_named(tmp_path: Path):
    run = write_run(tmp_path / "run")
    lines = [json.dumps({"name": f"{n:02}.jpg", "reason": "cut off"}) for n in range(23)]
    (run / "bad_samples.jsonl").write_text("\n".join([*lines, '{"na']))
    html = page_of(run)
    assert "23 samples could not be read and were skipped" in html and "<p>and 3 more</p>" in html
    assert "19.jpg" in html and "20.jpg" not in html and ("23", "samples skipped") in boxes(html)


def test_several_runs_beside_each_other(tmp_path: Path):
    runs = [write_run(tmp_path / "a" / "run"), write_run(tmp_path / "b" / "run", epochs=9, top1=0.9)]
    html = page_of(*runs, out=tmp_path / "both.html")
    assert table_of(html, "run") == [
        ["run", "recipe", "best", "at epoch", "epochs", "time", "img/s", "state"],
        ["a/run", "demo_classification", "top1 0.7500", "1", "2 of 4", "1:01:01", "200", "finished"],
        ["b/run", "demo_classification", "top1 0.9000", "1", "2 of 9", "1:01:01", "200", "finished"],
    ]
    assert re.findall("<b>(top1 [^<]*)</b></td>", html) == ["top1 0.9000"], "the best of all is bold"
    assert table_of(html, "field") == [["field", "a/run", "b/run"], ["train.epochs", "4", "9"]]
    compared = next(table for table in tables(html) if table[0] == ["class", "a/run", "b/run"])
    assert compared[1:] == [["dog", "0.7500", "0.9000"], ["cat", "0.2500", "0.2500"]], "what differs most comes first"
    charts = html.partition(">Classes that differ most<")[0]
    assert re.findall(r'aria-label="([^"]*)"', charts) == [
        "a/run training, a/run validation, b/run training, b/run validation",  # loss
        "a/run, b/run",  # top1, which only evaluations have
        "a/run, b/run",  # images per second
    ]
    faint = re.findall(r'stroke="var\(--c(\d)\)" class="(\w*)"', charts)
    assert faint[:3] == [("0", "faint"), ("1", "faint"), ("0", "")], "a colour per run; training behind validation"


def test_the_worst_samples_are_drawn_as_far_as_the_page_has_room(tmp_path: Path):
    run = write_run(tmp_path / "run")
    packed = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(packed, "JPEG")
    tile = base64.b64encode(packed.getvalue()).decode()
    scores = json.loads((run / "scores-best.json").read_text())
    scores["worst"] = [
        {"index": 7, "name": "a.jpg", "class": "cat", "predicted": "", "loss": 2.5, "samples": 3},
        {"index": 8, "name": "b.jpg", "missed": 2, "truths": 5, "wrong": 1},
        {"index": 9, "name": "c.jpg"},
    ]
    (run / "scores-best.json").write_text(json.dumps(scores))
    drawings = {"7": {"truth": tile, "prediction": tile}, "8": {"image": tile, "odd": "<b>"}, "9": {"image": "<b>"}}
    colours = {"cat": "#00ff00", "bad": "red;x"}
    (run / "drawings.json").write_text(json.dumps({"step": 3, "drawings": drawings, "colours": colours}))
    html = page_of(run)
    figures = re.findall("<figure>(.*?)</figure>", html)
    assert [figure.count("<img") for figure in figures] == [2, 1], "a sample without a drawing is left out"
    said = [
        re.sub("<br>|<[^>]*>", lambda tag: " " * (tag[0] == "<br>"), figure.split("figcaption")[1])
        for figure in figures
    ]
    assert said == [
        ">cat predicted as no class, loss 2.5000, samples 3 a.jpg</",
        ">2 of 5 objects missed, 1 wrong b.jpg</",
    ]
    assert re.findall("<small>(truth|prediction|image)</small>", html) == ["truth", "prediction"]
    assert '<i style="background:#00ff00"></i>cat</span></p>' in html and '<div class="samples wide">' in html
    (run / "drawings.json").write_text(json.dumps({"step": 4, "drawings": drawings}))  # of other scores
    html = page_of(run)
    assert (
        "<img" not in html and html.count("<figure>") == 3 and 'class="legend"' not in html.partition("Curves</h2>")[0]
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1500, "1.5k"), (999, "999"), (1000, "1k"), (-2e6, "-2M"), (3e9, "3G"), (0.02, "0.02"), (3e-5, "3e-05")],
)
def test_numbers_of_axes_are_short(value: float, text: str):
    assert short(value) == text


def test_a_tick_lies_where_its_number_is():
    chart = line_chart({"loss": [(0, 0.0), (100, 10.0)]})
    line = [float(at) for at in re.search(r'points="([\d., ]*)"', chart)[1].replace(",", " ").split()]
    across = {float(n): float(x) for x, n in re.findall(r'x="([\d.]+)" y="\d+" text-anchor="middle">(\d+)<', chart)}
    down = {float(n): float(y) - 4 for y, n in re.findall(r'y="([\d.]+)" text-anchor="end">([\d.]+)<', chart)}
    assert set(across) == {0, 20, 40, 60, 80} and set(down) == {0, 5, 10}, "100 would lie on the axis' name"
    left, low, right, high = line
    for value, x in across.items():
        assert x == pytest.approx(left + (right - left) * value / 100, abs=0.2)
    for value, y in down.items():
        assert y == pytest.approx(low + (high - low) * value / 10, abs=0.2)
    assert left < right and high < low


def test_epochs_lie_below_the_steps_that_end_them():
    chart = line_chart({"loss": [(10, 0.0), (100, 10.0)]}, epochs=[(25, 1), (50, 2)])
    assert re.findall(r'class="dim">(\w+)<', chart) == ["step", "epoch"]
    steps, epochs = (
        {float(n): float(x) for x, n in re.findall(rf'x="([\d.]+)" y="{y}" text-anchor="middle">(\d+)<', chart)}
        for y in (230, 252)
    )
    assert set(steps) == {20, 40, 60, 80} and set(epochs) == {1, 2, 3}, "4 would lie on the axis' name"
    each = (steps[80] - steps[20]) / 60
    for epoch, x in epochs.items():
        assert x == pytest.approx(steps[60] + each * (25 * epoch - 60), abs=0.2)
    assert "<title>step 10, epoch 0.4: 0</title>" in chart and "<title>step 100, epoch 4: 10</title>" in chart
    longer = line_chart({"loss": [(0, 0.0), (100, 10.0)]}, epochs=[(50, 1), (60, 2)])  # with another batch
    assert "<title>step 100, epoch 6: 10</title>" in longer and "<title>step 0, epoch 0: 0</title>" in longer
    assert "epoch" not in line_chart({"loss": [(0, 0.0), (100, 10.0)]})


def test_curves_have_the_epochs_of_their_run(tmp_path: Path):
    run = write_run(tmp_path / "run")
    assert read_story(run).epochs == [(3, 1), (5, 2)]
    assert page_of(run).count('class="dim">epoch</text>') == 3, "below loss, score, and speed"
    fallen = [{"event": "evaluate", "time": 1011.5, "epoch": 3, "step": 4, "top1": 0.1}]
    fallen += [
        {"event": "evaluate", "time": 1011.6, "epoch": value, "step": 9, "top1": 0.1} for value in (None, -1, "x")
    ]
    assert read_story(write_run(tmp_path / "fallen", more=fallen)).epochs == [(3, 1), (4, 3)]


def test_runs_side_by_side_have_epochs_where_theirs_are_alike(tmp_path: Path):
    runs = [write_run(tmp_path / name) for name in ("one", "other")]

    def has_epochs() -> bool:
        html = write_report(runs, tmp_path / "both.html").read_text()
        return 'class="dim">epoch</text>' in html[: html.index("the whole page of this run")]

    assert has_epochs()
    log = (runs[1] / "log.jsonl").read_text().replace('"epoch": 1, "step": 3, "top1"', '"epoch": 1, "step": 4, "top1"')
    (runs[1] / "log.jsonl").write_text(log)
    assert not has_epochs()


def test_a_range_of_orders_of_magnitude_has_an_axis_of_powers():
    points = [(n, 10.0 ** (n - 4)) for n in range(8)]
    chart = line_chart({"loss": points})
    line = re.search(r'points="([^"]*)"', chart)[1].split()
    ys = [float(point.split(",")[1]) for point in line]
    steps = [above - below for above, below in itertools.pairwise(ys)]
    assert steps == pytest.approx([steps[0]] * 7, abs=0.2) and steps[0] > 0
    assert re.findall(r'text-anchor="end">([^<]*)<', chart) == ["0.0001", "0.01", "1", "100"]


def test_a_long_line_is_averaged_and_a_short_one_has_dots_with_their_values():
    chart = line_chart({"loss": [(n, float(n % 2)) for n in range(1000)]})
    points = re.search(r'points="([^"]*)"', chart)[1].split()
    assert len(points) == 334 and "<circle" not in chart
    few = line_chart({"loss": [(n, n / 3) for n in range(40)]})
    assert few.count("<circle") == 40 and "<title>step 39: 13</title>" in few
    assert line_chart({"loss": [(n, n / 3) for n in range(41)]}).count("<circle") == 0


def noise(size: int) -> str:
    """A JPEG of about so many letters in base64, whose noise cannot be packed; never more."""
    side = int((size / 1.4) ** 0.5)
    while True:
        packed = io.BytesIO()
        Image.effect_noise((side, side), 200).convert("RGB").save(packed, "JPEG", quality=95, subsampling=0)
        letters = base64.b64encode(packed.getvalue()).decode()
        if len(letters) <= size:
            return letters
        side = int(side * 0.97)


def test_samples_and_drawings_have_half_of_the_bytes_of_a_page_each(tmp_path: Path):
    run = write_run(tmp_path / "run")
    facts = {"format": 1, "fingerprint": "f", "classes": [], "network": "8 x 6", "splits": {}, "drawn": "all"}
    (run / "data.json").write_text(json.dumps(facts))
    scores = json.loads((run / "scores-best.json").read_text())
    scores["worst"] = [{"index": number, "name": f"{number}.jpg"} for number in (1, 2, 3)]
    (run / "scores-best.json").write_text(json.dumps(scores))
    sheet, large, small = noise(1_000_000), noise(800_000), noise(240_000)
    assert min(map(len, (sheet, large, small))) > 200_000 and len(sheet) > 2**21 // 3 and len(large) > 2**21 // 3
    (run / "samples.jpg").write_bytes(base64.b64decode(sheet))
    drawings = {"1": {"image": large}, "2": {"image": large}, "3": {"image": small}}
    (run / "drawings.json").write_text(json.dumps({"step": 3, "drawings": drawings}))
    html = page_of(run)
    assert [html.count(each) for each in (sheet, large, small)] == [1, 1, 1], "what no longer fits is left out"
    assert len(html) < 3 * 2**20
    both = page_of(run, write_run(tmp_path / "other"), out=tmp_path / "both.html")
    assert [both.count(each) for each in (sheet, large, small)] == [0, 0, 1], "of two runs each has half"
