"""Folds that scored nothing that is a number; the ordinary ones are in tests/cli/test_folds.py."""

import json
from pathlib import Path

from sightline.evaluate import folds


def test_a_fold_without_a_best_score_tells_its_last(tmp_path: Path):
    for fold, (name, score) in enumerate([("scores-best.json", 0.5), ("scores.json", None)]):
        folder = tmp_path / f"fold-{fold}"
        folder.mkdir()
        told = {"epoch": 3, "step": 9, "values": {"dice": score}, "tables": {}}
        (folder / name).write_text(json.dumps(told))
    rows = [folds.read_fold(tmp_path / f"fold-{fold}", fold, "dice") for fold in range(2)]
    assert [row["dice"] for row in rows] == [0.5, None]
    assert folds.summary("r", "dice", rows)["mean"]["dice"] is None
