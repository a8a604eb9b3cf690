"""Children whose PYTHONPATH is not their parent's: migrated where the parent can, announced where it cannot."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sightline_migrate import AUTOLOAD
from sightline_migrate.reporting import record
from sightline_migrate.rules import children

SHOW = ["sh", "-c", "echo $PYTHONPATH"]


@pytest.mark.parametrize("own", ["/mine", "", None])
def test_a_child_with_its_own_path_finds_migration(own: str | None, on_cpu: Callable[..., Any]):
    on_cpu()
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {} if own is None else {"PYTHONPATH": own}
    given = dict(env)
    shown = subprocess.run(SHOW, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    assert shown == os.pathsep.join([AUTOLOAD, own] if own else [AUTOLOAD]) and env == given
    (found,) = record.records.values()
    assert found.what == children.ADDED and found.user.file == __file__


@pytest.mark.parametrize("own", [Path("/mine"), b"/mine"])
def test_the_path_may_be_all_that_popen_takes(own: Any, on_cpu: Callable[..., Any]):
    on_cpu()
    wanted = os.pathsep.join([AUTOLOAD, "/mine"])
    env = {**os.environ, "PYTHONPATH": own}
    assert subprocess.check_output(SHOW, env=env, text=True).strip() == wanted
    by_position = [-1, None, None, subprocess.PIPE, None, None, True, False, None, env]
    with subprocess.Popen(SHOW, *by_position) as child:
        assert child.communicate()[0].decode().strip() == wanted


def test_an_environment_that_is_not_ours_to_read_reaches_popen_as_it_is(on_cpu: Callable[..., Any]):
    on_cpu()
    assert subprocess.check_output(SHOW, env=os.environb, text=True).strip() == os.environ["PYTHONPATH"]
    odd = {**os.environ, "PYTHONPATH": "/mine", "SIGHTLINE_MIGRATE": "perhaps"}
    assert subprocess.check_output(SHOW, env=odd, text=True) == "/mine\n"
    for wrong in ({**os.environ, "PYTHONPATH": None}, {**os.environ, "PYTHONPATH": "/mine", "A": 3}, 7):
        with pytest.raises((TypeError, AttributeError)):
            subprocess.check_output(SHOW, env=wrong)


def test_other_environments_are_left_alone(on_cpu: Callable[..., Any]):
    on_cpu()
    off = {"PATH": os.environ["PATH"], "PYTHONPATH": "/mine"}
    for env in (off, off | {"SIGHTLINE_MIGRATE": "0"}):
        assert subprocess.check_output(SHOW, env=env, text=True) == "/mine\n"
    assert subprocess.check_output(SHOW, text=True).strip() == os.environ["PYTHONPATH"]
    assert AUTOLOAD in os.environ["PYTHONPATH"] and not record.records


COMMANDS: dict[str, tuple[Any, bool]] = {
    "shell": ("PYTHONPATH=. python3 train.py", True),
    "after another": ("cd src && PYTHONPATH=$PWD:lib python train.py", True),
    "env": (["env", "PYTHONPATH=.", "python", "train.py"], True),
    "sh -c": (["bash", "-c", "export PYTHONPATH=/x; python train.py"], True),
    "script": (["bash", "own.sh"], True),
    "script in a shell": ("bash ./own.sh --fast", True),
    "kept": ("PYTHONPATH=.:$PYTHONPATH python train.py", False),
    "kept in braces": ('PYTHONPATH="/x:${PYTHONPATH}" python train.py', False),
    "script that keeps it": (["./kept.sh"], False),
    "no Python": ("PYTHONPATH=. make", False),
    "plain": (["python", "train.py"], False),
    "nothing": ([], False),
    "path": (Path("train.py"), False),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_commands_that_set_the_path(case: str, tmp_path: Path):
    command, is_own = COMMANDS[case]
    (tmp_path / "own.sh").write_text("set -e\nexport PYTHONPATH=.\npython train.py\n")
    (tmp_path / "kept.sh").write_text("export PYTHONPATH=.:$PYTHONPATH\npython train.py\n")
    assert children.sets_its_own_path(command, tmp_path) is is_own


def test_words_that_can_be_read_once_reach_the_child(on_cpu: Callable[..., Any]):
    on_cpu()
    assert subprocess.check_output(map(str, ["echo", "all", 3]), text=True) == "all 3\n"


def test_it_is_said_once_per_line(on_cpu: Callable[..., Any], capsys: pytest.CaptureFixture[str]):
    on_cpu()
    for _ in range(2):
        assert os.system("PYTHONPATH=. true python") == 0
    subprocess.run("PYTHONPATH=. true python", shell=True, check=True)
    subprocess.check_call("PYTHONPATH=. true python", shell=True)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and all(__file__ in line and line.endswith(children.NOT_MIGRATED) for line in lines)
    assert sorted(record.counts.values()) == [1, 1, 2] and {each.kind for each in record.records.values()} == {
        "refused"
    }
