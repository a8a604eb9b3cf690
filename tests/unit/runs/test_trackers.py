"""--run.track: which trackers a run opens, and what each of them is told."""

from pathlib import Path

import pytest

from sightline import api, cli
from sightline.recipe.recipe import Run
from sightline.runs import trackers
from sightline.runs.trackers.tensorboard import TensorBoard

NAME = "demo_classification"
TINY = """--model.width=4 --data.path=synthetic:classes=10,samples=24,size=24 --data.size=24 --data.eval-resize=24
    --data.eval-size=24 --train.epochs=2 --train.global-batch=8 --train.precision=fp32 --run.workers=0 --run.device=cpu
    --run.log-every-steps=1 --run.progress=off""".split()


def test_a_tracker_of_no_name_is_refused_before_the_folder_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for asked in (["tensorbord"], ["tensorboard", "tensorbord"]):
        assert cli.main(["train", NAME, *TINY, f"--run.out={tmp_path / 'run'}", "--run.track", *asked]) == 2
        assert "unknown --run.track 'tensorbord'; did you mean tensorboard?; known: " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_both_spellings_of_tensorboard_open_one():
    for run in (Run(tensorboard=True), Run(track=("tensorboard",)), Run(tensorboard=True, track=("tensorboard",) * 2)):
        (made,) = trackers.opened(run)
        assert isinstance(made, TensorBoard)
    assert trackers.opened(Run()) == []


class Heard(api.Logger):
    def start(self, run: api.RunStart) -> None:
        self.run = run


def test_a_start_knows_where_its_values_come_from(tmp_path: Path):
    heard = Heard()
    api.train(*api.load(NAME, [*TINY, "--run.report=off", f"--run.out={tmp_path}"]), loggers=[heard])
    assert heard.run.origins["train.epochs"] == "flag: --train.epochs"
    assert "train.seed" not in heard.run.origins and heard.run.fields["train.seed"] == 0
    assert set(heard.run.origins) <= set(heard.run.fields)
