"""The best score of `sightline runs` is the first that an evaluation returns, and that is every task's headline."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from sightline import recipes
from sightline.errors import UsageError
from sightline.overview import listing
from sightline.overview.listing import RunSummary
from sightline.parts import DataSpec


@pytest.mark.parametrize("name", recipes.names())
def test_the_headline_is_the_first_score_of_every_task(name: str):
    task = recipes.find(name).recipe().task.build()
    spec = DataSpec(("a", "b", "c", "d"), 3, (8, 8), (0.0,) * 3, (1.0,) * 3)
    assert task.metric(spec, torch.device("cpu")).names()[0] == task.headline


def summary(name: str = "a", **more: object) -> RunSummary:
    nothing = dict.fromkeys(field.name for field in dataclasses.fields(RunSummary))
    return RunSummary(**{**nothing, "name": name, "path": f"/x/{name}", "state": "finished", "reason": "", **more})


def test_runs_are_a_row_each_and_below_why_some_failed():
    full = {"recipe": "resnet50", "data": "/data/of/pets", "headline": "top1", "best": 0.75, "best_epoch": 3}
    runs = [
        summary(
            "a/b", **full, epochs_done=4, epochs=10, seconds=3661.0, state="failed", exit_code=4, reason="no\nroom"
        ),
        summary("tab\there", data="synthetic:size=3/4", epochs_done=0, state="damaged", reason="x" * 300),
        summary("c", headline="ap", best=None, epochs=7, state="stopped", reason="killed"),
    ]
    lines = listing.as_text(runs, Path("runs")).splitlines()
    assert lines[0].split() == "run recipe data best at epoch epochs time state".split()
    starts = [lines[0].index(word) for word in ("recipe", "data", "best", "at epoch", "epochs", "time", "state")]
    cells = [[line[a:b].strip() for a, b in zip([0, *starts], [*starts, None], strict=True)] for line in lines[1:4]]
    assert cells == [
        ["a/b", "resnet50", "of/pets", "top1 0.7500", "3", "4/10", "1:01:01", "failed, exit 4"],
        ["tab\\there", "-", "synthetic:size=3/4", "-", "-", "0/-", "-", "damaged"],
        ["c", "-", "-", "ap -", "-", "-/7", "-", "stopped"],
    ]
    assert lines[4:] == ["a/b: no", f"tab\\there: {'x' * 200}"]
    assert all(lines[0][start - 2 : start] == "  " for start in starts) and lines[0].endswith("state")
    assert listing.as_text([], Path("runs")) == "no runs below runs"


@pytest.mark.parametrize(
    ("columns", "recipe", "data"),
    [
        (0, "finetune_classification", "of/a_folder"),
        (102, "finetune_classification", "of/a_folder"),  # 88 letters and seven gaps
        (101, "finetune_classification", "of/a_fol.."),
        (99, "finetune_classification", "of/a_f.."),  # eight letters at least
        (98, "finetune_classificat..", "of/a_f.."),
        (84, "finetu..", "of/a_f.."),
        (20, "finetu..", "of/a_f.."),
    ],
)
def test_a_narrow_terminal_cuts_data_and_then_recipes_and_no_names(columns: int, recipe: str, data: str):
    run = summary("the-name-of-a-run", recipe="finetune_classification", data="/of/a_folder", headline="top1", best=0.5)
    _, row = listing.as_text([run], Path(), columns).splitlines()
    assert row.split()[:3] == ["the-name-of-a-run", recipe, data]
    assert len(row) == max(84, columns or 102)


def test_a_cut_cell_says_so_by_two_dots():
    assert [listing._cut("abcdefgh", width) for width in (9, 8, 7, 2)] == ["abcdefgh", "abcdefgh", "abcde..", ".."]


def test_time_at_work_is_that_of_every_start_and_epochs_are_those_of_the_last_line(tmp_path: Path):
    def read(*events: tuple[str, float, dict]) -> tuple[int | None, float | None]:
        lines = [json.dumps({"event": kind, "time": time, **more}) for kind, time, more in events]
        (tmp_path / "log.jsonl").write_text("\n".join([*lines, '{"event": "train", "time": 1e9']))
        return listing._read_log(tmp_path / "log.jsonl")

    start, end = ("start", 100.0, {}), ("exit", 130.0, {"code": 0})
    assert read() == (None, None) and read(start) == (0, 0.0)
    assert read(("warning", 1.0, {}), start, ("train", 110.0, {"epoch": 1}), ("epoch", 120.0, {"epoch": 2})) == (
        2,
        20.0,
    )
    assert read(start, end, ("exit", 900.0, {"code": 2})) == (0, 30.0), "a start that is refused later"
    again = ("start", 200.0, {}), ("evaluate_end", 205.0, {}), ("time_to_train", 206.0, {})
    assert read(start, ("train", 110.0, {"epoch": 4}), *again) == (4, 16.0), "the first was killed"
    refused = ("exit", 900.0, {"code": 2, "started": False})
    assert read(start, ("train", 110.0, {"epoch": 4}), refused, *again) == (4, 16.0)
    assert read(start, ("exit", 90.0, {})) == (0, 0.0), "a clock that was set back"
    assert read(("start", 2.0**33, {})) == (0, None) and read(("start", -1.0, {})) == (0, None)
    assert read(("start", 2.0**33 - 1, {})) == (0, 0.0)


@pytest.mark.parametrize(
    ("works", "told", "problems", "expected"),
    [
        (True, {}, ["a"], ("running", "")),
        (False, {"code": 0, "reason": "finished"}, ["a", "b"], ("damaged", "a; b")),
        (False, {}, [], ("stopped", "killed: no process is running, and there is no exit.json")),
        (False, {"code": 0, "reason": "finished"}, [], ("finished", "finished")),
        (False, {"code": 128, "reason": "odd"}, [], ("failed", "odd")),
        (False, {"code": 143, "reason": "SIGTERM"}, [], ("stopped", "SIGTERM")),
    ],
)
def test_the_state_of_a_run(works: bool, told: dict, problems: list[str], expected: tuple[str, str]):
    assert listing._state(works, told, problems) == expected


def test_runs_are_looked_for_four_folders_deep_and_not_in_checkpoints_or_hidden_folders(tmp_path: Path):
    for place in ("1/2/3/4", "1/2/3/4/5", "checkpoints/a", ".a/b", "1/checkpoints/a", "1/2"):
        folder = tmp_path / place
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text("recipe: resnet50\n")
        (folder / "exit.json").write_text('{"code": 0, "reason": "finished", "time": 1.0}')
    (tmp_path / "link").symlink_to(tmp_path / "1")
    assert [run.name for run in listing.find_runs(tmp_path)] == ["1/2", "1/2/3/4"]
    (tmp_path / "1/2/config.yaml").write_text("recipe: [3]\n")  # of another program
    assert [run.name for run in listing.find_runs(tmp_path)] == ["1/2/3/4"]
    alone = listing.read_run(tmp_path / "1/2/3/4/5")
    assert alone is not None and (alone.name, alone.state, alone.recipe) == ("5", "finished", "resnet50")
    with pytest.raises(
        UsageError, match="none is not a folder; give the one that holds your runs, e.g. `sightline runs"
    ):
        listing.find_runs(tmp_path / "none")
