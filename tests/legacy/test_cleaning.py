"""--clean deletes a folder that is a run, and nothing else."""

import fcntl
from pathlib import Path

import pytest

from sightline.errors import UsageError
from sightline.legacy.cleaning import delete_run


def make_run(folder: Path) -> Path:
    (folder / "checkpoints" / "ckpt-00000002").mkdir(parents=True)
    for name in ("config.yaml", "log.jsonl", "exit.json", "rank_1.log", "scores.json", "scores-best.json", ".lock"):
        (folder / name).write_text("x")
    (folder / "checkpoints" / "ckpt-00000002" / "model.safetensors").touch()
    return folder


def test_a_run_is_deleted_and_its_neighbours_stay(tmp_path: Path):
    make_run(tmp_path / "model")
    (tmp_path / "other").touch()
    delete_run(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_folders_of_workers_are_deleted_with_their_parent(tmp_path: Path):
    make_run(tmp_path / "model" / "worker_0")
    make_run(tmp_path / "model" / "worker_1")
    delete_run(tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_nothing_to_delete_is_not_an_error(tmp_path: Path, name: str):
    (tmp_path / "empty").mkdir()
    delete_run(tmp_path / name)
    assert (tmp_path / "empty").is_dir()


@pytest.mark.parametrize(
    "left",
    [
        [".lock", "exit.json", "log.jsonl"],
        ["rank_1.log"],
        ["rank_1.log", ".lock"],
        ["worker_0/"],
        ["worker_0/log.jsonl", "worker_1/rank_1.log"],
        ["log.jsonl", "checkpoints/ckpt-00000002.tmp-77/", "checkpoints/ckpt-00000001.corrupt/", "checkpoints/best"],
        ["log.jsonl", "profile/trace.json.gz", "profile/time.txt", "tensorboard/events.out.tfevents.1.host"],
    ],
)
def test_leftovers_of_runs_and_of_failed_starts_are_deleted(tmp_path: Path, left: list[str]):
    for name in left:
        path = tmp_path / "model" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            path.mkdir()
        else:
            path.touch()
    delete_run(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("given", [".", "..", "../.."])
def test_the_current_folder_and_those_above_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str):
    run = make_run(tmp_path / "model")
    monkeypatch.chdir({".": run, "..": run / "checkpoints"}.get(given, run / "checkpoints" / "ckpt-00000002"))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match="is the current folder or above it"):
        delete_run(Path(given))
    assert sorted(tmp_path.rglob("*")) == before


def test_an_error_of_the_file_system_is_one_of_usage(tmp_path: Path):
    run = make_run(tmp_path / ("m" * 250))  # what it is renamed to is too long
    with pytest.raises(UsageError, match="cannot be deleted"):
        delete_run(run)
    assert (run / "config.yaml").exists()


def spoil_by_file(run: Path) -> Path:
    (run / "thesis.tex").touch()
    return run


def spoil_by_weights(run: Path) -> Path:
    (run / "checkpoints" / "my_weights.pth").touch()
    return run


def spoil_by_notes(run: Path) -> Path:
    (run / "tensorboard").mkdir()
    (run / "tensorboard" / "notes.txt").touch()
    return run


def spoil_by_another_trace(run: Path) -> Path:
    (run / "profile").mkdir()
    (run / "profile" / "comparison.xlsx").touch()
    return run


def spoil_by_missing_log(run: Path) -> Path:
    (run / "log.jsonl").unlink()
    (run / "exit.json").unlink()
    return run


def spoil_by_link(run: Path) -> Path:
    link = run.with_name("link")
    link.symlink_to(run)
    return link


def spoil_by_linked_worker(run: Path) -> Path:
    (run.parent / "parent").mkdir()
    (run.parent / "parent" / "worker_0").symlink_to(run)
    return run.parent / "parent"


def spoil_by_stray_beside_workers(run: Path) -> Path:
    make_run(run.parent / "parent" / "worker_0")
    (run.parent / "parent" / "data").mkdir()
    return run.parent / "parent"


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (spoil_by_file, "thesis.tex"),
        (spoil_by_weights, "checkpoints/my_weights.pth"),
        (spoil_by_notes, "tensorboard/notes.txt"),
        (spoil_by_another_trace, "profile/comparison.xlsx"),
        (spoil_by_missing_log, "not recognised as a run"),
        (spoil_by_link, "link"),
        (spoil_by_linked_worker, "worker_0"),
        (spoil_by_stray_beside_workers, "data"),
    ],
)
def test_what_is_not_a_run_is_left_alone_and_named(tmp_path: Path, spoil, named: str):
    run = make_run(tmp_path / "model")
    target = spoil(run)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match=named):
        delete_run(target)
    assert sorted(tmp_path.rglob("*")) == before


def test_links_inside_a_run_are_deleted_and_not_followed(tmp_path: Path):
    run = make_run(tmp_path / "model")
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    (run / "tensorboard").symlink_to(tmp_path / "precious")
    delete_run(run)
    assert (tmp_path / "precious" / "file").exists() and not run.exists()


def test_a_run_at_work_is_left_alone(tmp_path: Path):
    run = make_run(tmp_path / "model")
    with (run / ".lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="another run is using"):
            delete_run(run)
    assert run.is_dir()
