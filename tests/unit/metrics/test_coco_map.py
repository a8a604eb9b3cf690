"""COCO's twelve numbers against pycocotools: on real annotations, on generated ones, over batches and over ranks."""

import contextlib
import gc
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from sightline.errors import BadData
from sightline.hardware.world import World
from sightline.metrics import coco_map
from sightline.metrics.coco_map import NAMES, WORST, CocoMap
from sightline.metrics.precision_recall import CURVES
from sightline.parts import Scores

CPU = torch.device("cpu")
PLACES = 200  # detections per image


class Sample:
    """One image: its ground truth and what was found in it, as COCO writes boxes."""

    def __init__(self, height: int, width: int, truths: list[dict], found: list[dict]):
        self.height, self.width, self.truths, self.found = height, width, truths, found


def jittered(truths: list[dict], height: int, width: int, classes: int, random: np.random.Generator) -> list[dict]:
    """Make detections from ground truth: moved, missed, of another class, repeated, or of nothing at all. Many scores
    are equal."""
    found = []
    for truth in truths:
        x, y, w, h = truth["bbox"]
        for _ in range(random.integers(0, 4)):
            shift = random.normal(0, 0.12, 4) * [w, h, w, h]
            label = truth["category_id"] if random.random() < 0.85 else int(random.integers(1, classes + 1))
            box = [x + shift[0], y + shift[1], max(w + shift[2], 1), max(h + shift[3], 1)]
            found.append({"bbox": box, "category_id": label, "score": round(float(random.random()), 2)})
    for _ in range(random.integers(0, 5)):
        box = [*(random.random(2) * [width, height] * 0.7), *(random.random(2) * [width, height] * 0.3 + 1)]
        found.append(
            {"bbox": box, "category_id": int(random.integers(1, classes + 1)), "score": float(random.random())}
        )
    return sorted(found, key=lambda f: -f["score"])[:PLACES]


def generated(samples: int, classes: int, seed: int = 0) -> list[Sample]:
    """Make images with boxes of all sizes, some of them crowds; some images without boxes, some without detections."""
    random = np.random.default_rng(seed)
    made = []
    for number in range(samples):
        height, width = (int(n) for n in random.integers(200, 640, 2))
        truths = []
        for _ in range(0 if number % 7 == 3 else random.integers(1, 12)):
            size = np.exp(random.uniform(np.log(6), np.log(180), 2))
            box = [*(random.random(2) * ([width, height] - size)), *size]
            area = float(size.prod() * random.uniform(0.5, 1))  # of the mask, smaller than the box
            label = int(random.integers(1, classes))  # the last class is absent
            truths.append({"bbox": box, "area": area, "category_id": label, "iscrowd": int(random.random() < 0.1)})
        found = [] if number % 5 == 4 else jittered(truths, height, width, classes, random)
        made.append(Sample(height, width, truths, found))
    return made


def batches(samples: list[Sample], order: list[int], batch: int) -> list[tuple[dict, dict]]:
    """(predictions, batch) in steps of `batch`; the last one is filled with rows that are not valid but not empty."""
    places = max(len(s.truths) for s in samples) + 1
    made = []
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        rows += [-1] * (batch - len(rows))
        found = {
            "boxes": torch.zeros(batch, PLACES, 4, dtype=torch.float64),
            "scores": torch.zeros(batch, PLACES, dtype=torch.float64),
            "labels": torch.zeros(batch, PLACES, dtype=torch.int64),
        }
        given = {
            "index": torch.tensor(rows),
            "valid": torch.tensor(rows) >= 0,
            "height": torch.zeros(batch, dtype=torch.int32),
            "width": torch.zeros(batch, dtype=torch.int32),
            "truth_boxes": torch.zeros(batch, places, 4, dtype=torch.float64),
            "truth_labels": torch.zeros(batch, places, dtype=torch.int64),
            "truth_area": torch.zeros(batch, places, dtype=torch.float64),
            "truth_crowd": torch.zeros(batch, places, dtype=torch.bool),
        }
        for row, index in enumerate(rows):
            sample = samples[max(index, 0)]
            given["height"][row], given["width"][row] = sample.height, sample.width
            for place, one in enumerate(sample.found):
                x, y, w, h = one["bbox"]
                corners = [y / sample.height, x / sample.width, (y + h) / sample.height, (x + w) / sample.width]
                found["boxes"][row, place] = torch.tensor(corners, dtype=torch.float64)
                found["scores"][row, place], found["labels"][row, place] = one["score"], one["category_id"]
            for place, one in enumerate(sample.truths):
                given["truth_boxes"][row, place] = torch.tensor(one["bbox"], dtype=torch.float64)
                given["truth_labels"][row, place] = one["category_id"]
                given["truth_area"][row, place] = one["area"]
                given["truth_crowd"][row, place] = bool(one["iscrowd"])
        made.append((found, given))
    return made


def measured(samples: list[Sample], classes: int, batch: int = 4, order: list[int] | None = None) -> CocoMap:
    metric = CocoMap(tuple(f"class{n}" for n in range(classes)), CPU)
    for found, given in batches(samples, list(range(len(samples))) if order is None else order, batch):
        metric.update(found, given)
    metric.merge(World())
    return metric


def by_pycocotools(samples: list[Sample], classes: int) -> COCOeval:
    """With the dummy row of the original in images where nothing is found, which changes no number."""
    truths, found = COCO(), []
    rows = []
    for index, sample in enumerate(samples):
        rows += [{**t, "id": len(rows) + n, "image_id": index} for n, t in enumerate(sample.truths, start=1)]
        found += [{**f, "image_id": index} for f in sample.found]
        if not sample.found:
            found.append({"bbox": [0, 0, 0, 0], "category_id": 0, "score": -1e5, "image_id": index})
    images = [{"id": n, "height": s.height, "width": s.width} for n, s in enumerate(samples)]
    categories = [{"id": n + 1, "name": str(n)} for n in range(classes)]
    with contextlib.redirect_stdout(io.StringIO()):
        truths.dataset = {"images": images, "annotations": rows, "categories": categories, "info": {}}
        truths.createIndex()
        evaluation = COCOeval(truths, truths.loadRes(found), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation


def check(samples: list[Sample], classes: int, batch: int = 4) -> None:
    scores = measured(samples, classes, batch).result()
    reference = by_pycocotools(samples, classes)
    assert tuple(scores.values) == measured(samples, classes, batch).names()
    assert {*scores.values} == {*NAMES, "f1", "precision", "recall", "score_threshold", "samples"}
    assert list(scores.values)[:3] == ["ap", "ap50", "f1"]
    for name, expected in zip(NAMES, reference.stats, strict=True):
        assert scores.values[name] == pytest.approx(expected, abs=1e-12), name
    assert scores.values["samples"] == len(samples)
    precision = reference.eval["precision"][:, :, :, 0, 2]
    for number, row in enumerate(scores.tables["classes"]):
        truths = sum(t["category_id"] == number + 1 and not t["iscrowd"] for s in samples for t in s.truths)
        assert row["class"] == f"class{number}" and row["truths"] == truths
        if truths:
            assert row["ap"] == pytest.approx(precision[:, :, number].mean(), abs=1e-12)
            assert row["ap50"] == pytest.approx(precision[0, :, number].mean(), abs=1e-12)
        else:
            assert row["ap"] is None and row["ap50"] is None
    check_curves(scores, precision[0])
    check_f1(scores, reference)


def check_f1(scores: Scores, reference: COCOeval) -> None:
    """Compare F1 with pycocotools' matches at IoU 0.5, one threshold after another."""
    found, truths = [], np.zeros(len(scores.tables["classes"]) + 1)  # (class, score, finds a ground truth)
    for one in reference.evalImgs:
        if one is not None and one["aRng"] == [0, 1e10]:
            outcomes = zip(one["dtScores"], one["dtMatches"][0], one["dtIgnore"][0], strict=True)
            found += [(one["category_id"], score, match > 0) for score, match, ignored in outcomes if not ignored]
            truths[one["category_id"]] += len(one["gtIds"]) - np.sum(one["gtIgnore"])

    def counted(threshold: float, number: int | None = None) -> tuple[float, float, float]:
        """Right, found and true, of one class or of all."""
        shown = [row for row in found if row[1] >= threshold and number in (None, row[0])]
        return sum(row[2] for row in shown), len(shown), truths.sum() if number is None else truths[number]

    def f1(right: float, shown: float, true: float) -> float:
        return 2 * right / (shown + true)

    values = scores.values
    if not found:
        assert values["f1"] == values["recall"] == 0 and values["precision"] == values["score_threshold"] == -1
        return
    best = max(sorted({row[1] for row in found}, reverse=True), key=lambda threshold: f1(*counted(threshold)))
    right, shown, true = counted(best)
    assert values["score_threshold"] == best
    expected = f1(right, shown, true), right / shown, right / true
    assert [values[name] for name in ("f1", "precision", "recall")] == pytest.approx(expected, abs=1e-12)
    for number, row in enumerate(scores.tables["classes"], start=1):
        right, shown, true = counted(best, number)
        assert row["precision"] == (pytest.approx(right / shown) if shown else None)
        assert row["recall"] == (pytest.approx(right / true) if true else None)
        assert row["f1"] == (pytest.approx(2 * right / (shown + true)) if shown + true else None)


def check_curves(scores: Scores, precision: np.ndarray) -> None:
    """Compare the mean and the worst classes with pycocotools' precision (recalls, classes) at IoU 0.5."""
    known = [number for number, row in enumerate(scores.tables["classes"]) if row["truths"]]
    mean, *worst = scores.tables["precision_recall"]
    assert mean["class"] is None
    np.testing.assert_allclose(mean["precision"], precision[:, known].mean(1), atol=6e-5)
    assert len(worst) == min(CURVES, len(known)) * (len(known) > 1)
    for row in worst:
        np.testing.assert_allclose(row["precision"], precision[:, int(row["class"][5:])], atol=6e-5)
    areas = [sum(row["precision"]) for row in worst]
    left = {f"class{number}" for number in known} - {row["class"] for row in worst}
    assert areas == sorted(areas)
    assert all(precision[:, int(name[5:])].sum() >= areas[-1] - 0.01 for name in left if areas)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_all_numbers_are_those_of_pycocotools(seed: int):
    samples = generated(60, 6, seed)
    check(samples, 6)
    values = measured(samples, 6).result().values
    assert all(0.02 < values[name] < 0.98 for name in NAMES), values


@pytest.mark.parametrize("split", [pytest.param("train2017", marks=pytest.mark.slow), "val2017"])
def test_real_annotations(shared_data: Path, split: str):
    path = shared_data / "coco-tiny" / "annotations" / f"instances_{split}.json"
    if not path.is_file():
        pytest.skip(f"needs {path.relative_to(shared_data)} in the sample data sets")
    known = json.loads(path.read_text())
    labels = {category["id"]: number for number, category in enumerate(known["categories"], start=1)}
    random = np.random.default_rng(5)
    samples = {image["id"]: Sample(image["height"], image["width"], [], []) for image in known["images"]}
    for one in known["annotations"]:
        kept = {key: one[key] for key in ("bbox", "area", "iscrowd")}
        samples[one["image_id"]].truths.append({**kept, "category_id": labels[one["category_id"]]})
    for sample in samples.values():
        sample.found = jittered(sample.truths, sample.height, sample.width, len(labels), random)
    assert sum(len(s.truths) for s in samples.values()) > 300
    check(list(samples.values()), len(labels), batch=16)


def test_more_detections_than_cocos_limit():
    """150 in one image: COCO counts the best 100 per class."""
    random = np.random.default_rng(2)
    truths = [{"bbox": [20 * n, 20, 15, 15], "area": 225, "category_id": 1, "iscrowd": 0} for n in range(20)]
    found = [
        {"bbox": [20 * (n % 20) + random.normal(), 20, 15, 15], "category_id": 1, "score": float(random.random())}
        for n in range(150)
    ]
    check([Sample(100, 420, truths, sorted(found, key=lambda f: -f["score"]))], 1, batch=1)


def test_thirteen_images_in_batches_of_four():
    """The last batch holds one image and three that are not valid and would be counted again."""
    samples = generated(13, 4)
    metric = measured(samples, 4)
    scores = metric.result()
    assert scores.values["samples"] == 13
    assert scores.values == measured(samples, 4, batch=13).result().values
    check(samples, 4)


@pytest.mark.parametrize("ranks", [2, 3])
def test_any_number_of_ranks_counts_the_same(ranks: int):
    """In whatever order their rows come together; that real ranks bring them together: tests/distributed."""
    samples = generated(23, 5)
    parts = [list(range(rank, 23, ranks)) for rank in range(ranks)]
    metrics = [CocoMap(tuple(f"class{n}" for n in range(5)), CPU) for _ in parts]
    for metric, part in zip(metrics, parts, strict=True):
        for found, given in batches(samples, part, 4):
            metric.update(found, given)
    joined = CocoMap(metrics[0].classes, CPU)
    for name in ("_images", "_detections", "_truths"):
        getattr(joined, name).extend(t for metric in reversed(metrics) for t in getattr(metric, name))
    got, expected = joined.result(), measured(samples, 5).result()
    assert got == expected


def test_no_ground_truth_at_all():
    samples = generated(5, 3)
    for sample in samples:
        sample.truths = []
    scores = measured(samples, 3).result()
    # As COCO says that there is nothing to measure.
    assert {scores.values[name] for name in (*NAMES, "f1", "precision", "recall", "score_threshold")} == {-1.0}
    assert [row["ap"] for row in scores.tables["classes"]] == [None] * 3
    assert scores.values["samples"] == 5


def test_no_detections_at_all():
    samples = generated(5, 3)
    for sample in samples:
        sample.found = []
    scores = measured(samples, 3).result()
    assert {scores.values[name] for name in NAMES} == {0.0}
    check(samples, 3)


def test_one_class_and_one_image():
    [sample] = generated(1, 2, seed=4)
    sample.found = [{**one, "category_id": 1} for one in sample.found]
    assert sample.found and sample.truths
    check([sample], 1, batch=1)


def test_by_hand_the_threshold_leaves_out_what_is_less_sure_and_wrong():
    box = {"bbox": [10, 10, 50, 50], "area": 2500, "category_id": 1, "iscrowd": 0}
    far = {**box, "bbox": [300, 10, 50, 50]}
    crowd = {**box, "bbox": [600, 10, 200, 80], "iscrowd": 1}
    inside = {"bbox": [620, 20, 30, 30], "category_id": 1}
    found = [{**box, "score": 0.9}, {**inside, "score": 0.85}, {**box, "score": 0.5}, {**far, "score": 0.4}]
    found += [{"bbox": [0, 200, 20, 20], "category_id": 2, "score": 0.3}]
    values = measured([Sample(400, 900, [box, far, crowd], found)], 2, batch=1).result().values
    # Two of two objects, one of three answers wrong: the second box of the same object. The crowd counts nowhere.
    assert (values["score_threshold"], values["recall"]) == (0.4, 1.0)
    assert (values["precision"], values["f1"]) == pytest.approx((2 / 3, 0.8))


def test_nothing_readable_is_an_error():
    metric = CocoMap(("a", "b"), CPU)
    with pytest.raises(BadData, match="not one sample"):
        metric.result()
    found, given = batches(generated(2, 2), [0, 1], 2)[0]
    metric.update(found, {**given, "valid": torch.zeros(2, dtype=torch.bool)})
    metric.merge(World())
    with pytest.raises(BadData, match="not one sample"):
        metric.result()


@pytest.mark.parametrize("is_on", [True, False])
def test_the_collector_is_left_as_it_was(is_on: bool, monkeypatch: pytest.MonkeyPatch):
    def fail(*given: object, **named: object) -> None:
        raise MemoryError

    metric = measured(generated(2, 2), 2)
    try:
        (gc.enable if is_on else gc.disable)()
        metric.result()
        assert gc.isenabled() == is_on
        monkeypatch.setattr(coco_map, "COCOeval_faster", fail)
        with pytest.raises(MemoryError):
            metric.result()
        assert gc.isenabled() == is_on
    finally:
        gc.enable()


def test_infinite_boxes_match_nothing():
    samples = generated(6, 2)
    for sample in samples:
        sample.found = []
    metric = CocoMap(("a", "b"), CPU)
    for found, given in batches(samples, list(range(6)), 3):
        found["boxes"][:, 0] = torch.tensor([-torch.inf, -torch.inf, torch.inf, torch.inf])
        found["boxes"][:, 1] = torch.nan
        found["labels"][:, :2], found["scores"][:, :2] = 1, 0.9
        metric.update(found, given)
    metric.merge(World())
    assert {metric.result().values[name] for name in NAMES} == {0.0}


def test_the_worst_images_have_the_most_mistakes():
    """By hand: what is missed, and what is said with confidence and is not there."""

    def box(x: float, label: int, **more) -> dict:
        return {"bbox": [x, 10, 50, 50], "category_id": label, "area": 2500, "iscrowd": 0, **more}

    samples = [
        Sample(100, 900, [box(0, 1), box(200, 2)], [box(2, 1, score=0.9), box(203, 2, score=0.2)]),  # all found
        Sample(100, 900, [box(0, 1), box(200, 2)], [box(2, 1, score=0.9)]),  # one missed
        Sample(100, 900, [box(0, 1), box(200, 2)], [box(2, 2, score=0.9), box(200, 1, score=0.6)]),  # both confused
        Sample(
            100, 900, [], [box(0, 1, score=0.7), box(300, 1, score=0.4)]
        ),  # one made up, the other not with confidence
        Sample(100, 900, [box(0, 1, iscrowd=1)], [box(600, 1, score=0.7)]),  # a crowd is never missed and excuses
        Sample(100, 900, [box(0, 1), box(100, 1), box(200, 1)], []),  # three missed
    ]
    worst = measured(samples, 2).result().worst
    assert worst == [
        {"index": 2, "truths": 2, "missed": 2, "wrong": 2},
        {"index": 5, "truths": 3, "missed": 3, "wrong": 0},
        {"index": 1, "truths": 2, "missed": 1, "wrong": 0},
        {"index": 3, "truths": 0, "missed": 0, "wrong": 1},
    ]
    many = [Sample(100, 900, [box(0, 1)], [])] * 50
    assert [row["index"] for row in measured(many, 2).result().worst] == list(range(WORST))


@pytest.mark.parametrize("cells", [1, 3000])
def test_mistakes_are_the_same_piece_by_piece(cells: int, monkeypatch: pytest.MonkeyPatch):
    samples = generated(40, 5)
    whole = measured(samples, 5).result()
    monkeypatch.setattr(coco_map, "CELLS", cells)
    assert measured(samples, 5).result() == whole and whole.worst


def test_places_without_a_box_are_not_kept(monkeypatch: pytest.MonkeyPatch):
    """One image of many boxes makes as many places in all others."""
    samples = generated(40, 5)
    metric = CocoMap(("a",) * 5, CPU)
    for found, given in batches(samples, list(range(len(samples))), 4):
        metric.update(found, given)
    assert sum(map(len, metric._truths)) == sum(len(each.truths) for each in samples)
    assert sum(map(len, metric._detections)) == sum(len(each.found) for each in samples)


def test_what_lies_exactly_on_a_border():
    """An overlap of one half finds an object, and a score of one half is a confident mistake."""
    truth = {"bbox": [0, 0, 64, 64], "area": 4096, "category_id": 1, "iscrowd": 0}
    half = {"bbox": [0, 0, 64, 32], "category_id": 1, "score": 0.5}
    crowd = {**truth, "iscrowd": 1}
    inside = {"bbox": [32, 0, 64, 64], "category_id": 1, "score": 0.9}  # half of it; COCO counts it nowhere
    samples = [Sample(128, 128, [truth], [half]), Sample(128, 128, [crowd], [inside])]
    scores = measured(samples, 1, batch=1).result()
    assert (scores.values["recall"], scores.values["precision"], scores.values["f1"]) == (1, 1, 1)
    assert scores.tables["classes"][0]["ap50"] == pytest.approx(1) and scores.values["score_threshold"] == 0.5
    assert scores.worst == []
    nothing = [Sample(128, 128, [], [half]), Sample(128, 128, [], [{**half, "score": 0.499}])]
    worst = measured([*samples, *nothing], 1, batch=2).result().worst
    assert worst == [{"index": 2, "truths": 0, "missed": 0, "wrong": 1}]
