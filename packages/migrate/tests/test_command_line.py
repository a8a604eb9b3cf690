"""The command line: what belongs to it and what to the script, and how it becomes a launcher."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from sightline_migrate import cli, session
from sightline_migrate.options import MigrateError, MigrateOptions
from sightline_migrate.reporting import logfile


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("train.py --amp off", ([], "", "train.py", ["--amp", "off"])),
        ("--amp off train.py -m x", (["--amp", "off"], "", "train.py", ["-m", "x"])),
        ("--strict train.py", (["--strict"], "", "train.py", [])),
        ("--amp=off train.py", (["--amp=off"], "", "train.py", [])),
        ("--log logs --log-level 2 train.py a", (["--log", "logs", "--log-level", "2"], "", "train.py", ["a"])),
        ("--quiet -m pkg.train --quiet", (["--quiet"], "pkg.train", "", ["--quiet"])),
        ("-m", ([], "", "", [])),
        ("--claim -- -odd.py b", (["--claim"], "", "-odd.py", ["b"])),
        ("--claim --", (["--claim", "--"], "", "", [])),
        ("--amp", (["--amp"], "", "", [])),
        ("", ([], "", "", [])),
    ],
)
def test_what_stands_behind_the_script_belongs_to_it(line: str, expected: tuple):
    assert cli.split(line.split()) == expected


@pytest.fixture
def became(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The words that replaced this process, and the options that it was migrated with."""
    made: list[Any] = []

    def execv(path: str, words: list[str]) -> None:
        made.append((path, words, logfile.becomes_launcher))
        raise SystemExit(77)

    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(session, "activate_and_announce", made.append)
    monkeypatch.setattr(logfile, "becomes_launcher", False)
    monkeypatch.delenv(cli.AUTOLOAD_SWITCH, raising=False)
    return made


def test_it_becomes_torchrun_of_this_interpreter_or_another_command(
    became: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    options = MigrateOptions(amp="off")
    (tmp_path / "mylauncher").write_text("#!/bin/sh\n")
    (tmp_path / "mylauncher").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    own = [sys.executable, "-m"]
    for module, script, words in (
        ("", "torchrun", [*own, "torch.distributed.run", "--n", "2"]),
        ("torch.distributed.launch", "", [*own, "torch.distributed.launch", "--n", "2"]),
        ("", "mylauncher", [str(tmp_path / "mylauncher"), "--n", "2"]),
    ):
        became.clear()
        with pytest.raises(SystemExit):
            cli._launch(options, module, script, ["--n", "2"])
        assert became == [options, (words[0], words, True)]
    for script in ("nothing_here", "mine.py"):
        with pytest.raises(MigrateError, match=f"^'{script}' is neither a file nor a command on PATH; give a"):
            cli._launch(options, "", script, [])
    monkeypatch.setenv(cli.AUTOLOAD_SWITCH, "0")
    became.clear()
    for args in (["--n", "2"], []):
        with pytest.raises(MigrateError, match="=0 keeps child processes of torch.distributed.run from"):
            cli._launch(options, "", "torchrun", args)
    assert became == []


def test_a_module_that_is_not_there_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(sys, "path", ["first", *sys.path])
    monkeypatch.chdir(tmp_path)
    cli._check("", "")
    assert sys.path[0] == "first"
    with pytest.raises(MigrateError, match="^-m no_such_module: no such module; to run a file, omit -m$"):
        cli._check("no_such_module", "")
    assert sys.path[0] == str(tmp_path), "as python -m searches"
    (tmp_path / "here_alone.py").touch()
    cli._check("here_alone", "")
    with pytest.raises(MigrateError, match="^-m no_such_module.train: No module named 'no_such_module'$"):
        cli._check("no_such_module.train", "")


def test_an_interrupted_script_ends_by_the_signal(monkeypatch: pytest.MonkeyPatch):
    done: list[Any] = []
    monkeypatch.setattr(cli.signal, "signal", lambda *given: done.append(given))
    monkeypatch.setattr(cli.os, "kill", lambda *given: done.append(given))
    monkeypatch.setattr(cli, "_pending", [])
    cli._end_by_signal()
    assert done == []
    monkeypatch.setattr(cli, "_pending", [signal.SIGINT])
    cli._end_by_signal()
    assert done == [(signal.SIGINT, signal.SIG_DFL), (os.getpid(), signal.SIGINT)]


@pytest.mark.parametrize(
    ("start", "is_source"),
    [
        (b"", True),
        (b"impo", True),
        (b"PK\x03\x04", False),
        (b"PK", False),
        (b"P", True),
        (cli.importlib.util.MAGIC_NUMBER + b"x", False),
    ],
    ids=range(6),
)
def test_archives_and_compiled_code_are_told_from_sources_by_their_first_bytes(start: bytes, is_source: bool, tmp_path):
    (tmp_path / "a").write_bytes(start)
    assert cli._is_source(str(tmp_path / "a")) is is_source
