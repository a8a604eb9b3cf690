"""The command itself: what stops it becomes an exit code and a line, whatever became of the terminal."""

import io
import os
import sys
from pathlib import Path

import pytest
import torch

from sightline import api, cli
from sightline.commands import doctor_checks as doctor
from sightline.commands.doctor_checks import Check
from sightline.errors import OutOfMemory, UsageError


def ended(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    def stop(flags: list[str]) -> None:
        raise error

    monkeypatch.setitem(cli.COMMANDS, "doctor", stop)
    return cli.main(["doctor"])


def test_what_nobody_foresaw_is_raised_and_a_full_disk_is_told(monkeypatch, capsys):
    with pytest.raises(OSError, match="of another kind"):
        ended(OSError(9999, "of another kind"), monkeypatch)
    code = ended(OSError(28, "No space left on device", "/runs/a"), monkeypatch)
    said = capsys.readouterr().err
    assert code not in (0, 1) and said.startswith("error: ") and "/runs/a" in said
    assert ended(KeyboardInterrupt(), monkeypatch) == 130
    assert "stopped by Ctrl-C; the same command starts again" in capsys.readouterr().err
    assert ended(UsageError("so"), monkeypatch) == 2 and capsys.readouterr().err == "error: so\n"


def test_a_closed_terminal_leaves_the_exit_code(monkeypatch: pytest.MonkeyPatch):
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    places: list[int] = []
    monkeypatch.setattr(sys, "stderr", Closed())
    monkeypatch.setattr(os, "dup2", lambda _, place: places.append(place))
    assert ended(UsageError("so"), monkeypatch) == 2
    assert places == [2], "what else would be written goes nowhere"


def test_a_machine_that_cannot_train_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda folder, every: [Check("torch", "fail", "is missing", "install it")])
    assert cli.main(["doctor"]) == 2
    said = capsys.readouterr()
    assert "install it" in said.out and said.err.endswith(
        "this machine cannot train; the lines marked `fail` say why\n"
    )
    monkeypatch.setattr(doctor, "examine", lambda folder, every: [Check("torch", "warn", "is old", "get another")])
    assert cli.main(["doctor"]) == 0


def test_averaged_checkpoints_are_named(monkeypatch, capsys, tmp_path: Path):
    from sightline.engine import checkpoint
    from sightline.train import averaging

    made: list[tuple[list[Path], Path]] = []
    monkeypatch.setattr(checkpoint, "all_of", lambda given: [given / "ckpt-1", given / "ckpt-2"])
    monkeypatch.setattr(averaging, "average_checkpoints", lambda paths, out: made.append((paths, out)))
    assert cli.main(["average", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "c")]) == 0
    assert made == [([tmp_path / run / f"ckpt-{n}" for run in "ab" for n in (1, 2)], tmp_path / "c")]
    assert capsys.readouterr().out == f"averaged ckpt-1, ckpt-2, ckpt-1, ckpt-2 into {tmp_path / 'c'}\n"


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (torch.OutOfMemoryError("no room"), "lower --train.global-batch or use --run.device cpu, unless"),
        (MemoryError("no room"), "lower --train.global-batch, unless the network alone"),
    ],
)
def test_out_of_memory_in_a_call_is_one_error_with_a_remedy(error: Exception, remedy: str):
    def call() -> None:
        raise error

    with pytest.raises(OutOfMemory) as raised:
        api._called()(call)()
    assert str(raised.value).startswith(f"no room; {remedy}")


def test_runs_are_named_by_their_folders():
    for given, kinds in (([], "none"), ([1, "a", 2.0], "int, float")):
        with pytest.raises(UsageError, match=f"^runs are {kinds}; name one or several folders, e.g. runs/resnet50"):
            api._opened(given, "best", (), "", False)
