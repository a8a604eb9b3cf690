"""benchmarks/finetune.py: its parts are cut as it says, and it runs."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "finetune.py"


@pytest.fixture(scope="module")
def finetune():
    spec = importlib.util.spec_from_file_location("finetune_benchmark", SCRIPT)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_the_same_seed_draws_the_same_few_images_and_another_one_others(finetune, shapes: Path, tmp_path: Path):
    args = finetune.arguments(["--only", "detection", "--work", str(tmp_path)])
    job = finetune.Job(args, finetune.SMOKE, [0])
    classes = sorted(path.name for path in (shapes / "train").iterdir())[:2]
    folders = [finetune.class_folders(job, str(number), shapes, classes, 3, number // 2) for number in range(4)]
    names = [sorted(path.name for path in (folder / "train").rglob("*.jpg")) for folder in folders]
    assert names[0] == names[1] and names[2] == names[3] and names[0] != names[2] and len(names[0]) == 6
    assert all(len(list((folder / "val").rglob("*.jpg"))) == 2 * finetune.SMOKE.val_images for folder in folders)


def test_a_summary_says_whether_all_are_above_all(finetune):
    rows = [{"way": "tuned", "score": score} for score in (0.5, 0.7)]
    rows += [{"way": "scratch", "score": score} for score in (0.2, 0.4)]
    found = finetune.summary(rows)
    assert found["gain"] == pytest.approx(0.3) and found["all_above"]
    assert not finetune.summary([*rows, {"way": "scratch", "score": 0.6}])["all_above"]


def test_folders_that_a_part_needs_are_asked_for(finetune, capsys):
    with pytest.raises(SystemExit):
        finetune.arguments(["--only", "segmentation"])
    assert "segmentation needs --task04 DIR" in capsys.readouterr().err


@pytest.mark.slow
def test_it_tunes_a_trunk_and_trains_from_scratch(finetune, tmp_path: Path, capsys):
    words = f"--only detection --smoke --device cpu --workers 0 --work {tmp_path / 'work'} --out {tmp_path / 'out'}"
    result = finetune.main(words.split())
    [path] = (tmp_path / "out").iterdir()
    assert json.loads(path.read_text())["results"] == result["results"]
    assert [row["way"] for row in result["results"]["detection"]["rows"]] == ["tuned", "scratch"]
    assert "detection  first six kinds: ap" in capsys.readouterr().out
