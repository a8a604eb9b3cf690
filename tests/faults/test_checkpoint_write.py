"""A save that is killed at any of its system calls leaves the old checkpoints or the new one, whole (B5: 4)."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
import warm

from sightline.engine import checkpoint
from sightline.engine.checkpoint import Checkpoints, verify

BOUNDARIES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}  # audit events, raised before the call


def save(folder: Path, step: int, value: float, best_step: int) -> None:
    tensors = {stem: {"w": torch.full((64,), value), "b": torch.tensor(step)} for stem in ("model", "optimizer")}
    state = {"value": value, "best_step": best_step, "progress": {"step": step}}
    Checkpoints(folder, 2, print).save(step, tensors, state, best_step)


def die_in_call(number: int, folder: Path) -> None:
    """SIGKILL before call `number` that touches the folder. Every file is also met with only half of it written."""
    left = [number]

    def is_last() -> bool:
        left[0] -= 1
        return left[0] == 0

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def on_event(event: str, arguments: tuple[object, ...]) -> None:
        if event in BOUNDARIES and str(folder) in str(arguments[0]) and is_last():
            die()

    def fsync(descriptor: int, call=os.fsync) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_file() and is_last():
            os.truncate(path, path.stat().st_size // 2)
            die()
        if is_last():
            die()
        call(descriptor)

    def on_host(named, call=checkpoint._on_host):
        if is_last():
            die()
        return call(named)

    os.fsync = fsync
    checkpoint._on_host = on_host
    sys.addaudithook(on_event)  # cannot be removed again, but its process does not live long


def is_killed_in_call(number: int, folder: Path, step: int, value: float, best_step: int) -> bool:
    """Save in a child that dies in call `number`; return False if the save has fewer calls."""
    pid = os.fork()
    if pid == 0:
        try:
            die_in_call(number, folder)
            save(folder, step, value, best_step)
            os._exit(0)
        except BaseException as error:  # noqa: BLE001  # nothing may get out of the child into pytest
            os.write(2, f"{error!r}\n".encode())
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0


@pytest.mark.parametrize(
    ("step", "best_step"),
    [
        pytest.param(3, 3, id="next step, best"),
        pytest.param(2, 2, id="same step again, best", marks=pytest.mark.slow),
        pytest.param(3, 1, id="next step", marks=pytest.mark.slow),
        pytest.param(2, 1, id="same step again", marks=pytest.mark.slow),
    ],
)
def test_save_killed_at_every_call(tmp_path, step, best_step):
    (tmp_path / "case.json").write_text(json.dumps([step, best_step]))
    ended = warm.start("function", __file__, "kill_at_every_call", tmp_path).wait()
    assert ended.code == 0, ended


def kill_at_every_call(tmp_path: Path) -> None:
    """In a process that is half the size of one of tests, which takes half as long to fork."""
    step, best_step = json.loads((tmp_path / "case.json").read_text())
    before = tmp_path / "before"
    save(before, 1, 1.0, best_step=1)
    save(before, 2, 2.0, best_step=1)
    number, found = 0, []
    while True:
        number += 1
        folder = tmp_path / f"killed{number}"
        shutil.copytree(before, folder)
        killed = is_killed_in_call(number, folder, step, 10.0, best_step)

        said: list[str] = []
        tensors, state, path = Checkpoints(folder, 2, said.append).newest()
        assert not said, "half a checkpoint was taken for one"
        assert (path.name, state["value"]) in (("ckpt-00000002", 2.0), (f"ckpt-{step:08d}", 10.0))
        assert all(bool((named["w"] == state["value"]).all()) for named in tensors.values())
        found.append(state["value"])
        for each in Checkpoints(folder, 2, print).names():
            verify(folder / each)  # the older ones are whole as well, or gone

        # The next save of the resumed run removes what the killed one left.
        save(folder, 4, 4.0, state["best_step"])
        best = f"ckpt-{state['best_step']:08d}"
        assert {path.name for path in folder.iterdir()} == {"best", "latest", "ckpt-00000004", path.name, best}
        assert (folder / "latest").read_text() == "ckpt-00000004\n"
        assert (folder / "best").read_text() == f"{best}\n"
        shutil.rmtree(folder)
        if not killed:
            break
    assert number > 25, "the save must have been cut in many places"
    assert found == sorted(found) and found[0] == 2.0 and found[-1] == 10.0, "once the new one is there, it stays"
