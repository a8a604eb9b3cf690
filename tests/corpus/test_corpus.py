"""The corpus: commands, Python calls and lines of the originals, with what each must answer however the code changes.

A case of tests/corpus/*.txt is a command behind `$ `, behind `$$ ` with all that it says and every file that it writes,
or a Python expression behind `>>> `, and below it the answer:

    exit 2                                     the exit code; of Python the error's class, or nothing
    | error: train.epochs is 0, ...            the first line that was printed, and the error if that comes later
    file out/index.json 120 3e25960a           of `$$`: bytes and digest, of a picture its mode, size and pixels
    config train.epochs 3                      where settings are decided: each that differs from the recipe's own

`{pets}` is a folder of world.py, `{out}` a new one. An expected line is changed by
`CORPUS=record make test PYTEST_ARGS=tests/corpus`, in a commit of its own that gives the reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import warm
import yaml
from PIL import Image

from sightline import api, cli
from sightline.errors import SightlineError

HERE = Path(__file__).resolve().parent
GOLDEN = HERE.parent / "golden"
RECORDS = os.environ.get("CORPUS") == "record"
WORLD = runpy.run_path(str(HERE / "world.py"))
OF_RUNS = re.compile(r"\{(runs?|copy|drawn|labels|boxes|slices|prepared)\}|\{world\}/runs|run\.onnx")  # trained
FILES = sorted(HERE.glob("*.txt"))
AT_ONCE = 10**6 if RECORDS else 5  # cases in a test


def cases(file: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield every case of a file: its command, and the expected lines."""
    blocks = re.split(r"\n\s*\n", file.read_text("utf-8").strip())
    for block in blocks:
        lines = [line for line in block.splitlines() if not line.startswith("#")]
        if lines:
            yield lines[0], lines[1:]


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of world.py; read only, commands that write get a copy."""
    return warm.once(tmp_path_factory, "corpus", lambda folder: WORLD["make"](folder / "world")) / "world"


@pytest.fixture(scope="session")
def trained(world: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Its runs, which take longer than most cases."""

    def fill(_: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(world)
            WORLD["train"](world, lambda line: _must(*_run_command(line)))

    warm.once(tmp_path_factory, "corpus-runs", fill)


def _must(code: object, said: str) -> None:
    assert code == 0, said


PARTS = [(file, first) for file in FILES for first in range(0, len(list(cases(file))), AT_ONCE)]


@pytest.mark.parametrize(("file", "first"), PARTS, ids=lambda part: getattr(part, "stem", part))
def test_every_case_answers_as_before(
    file: Path, first: int, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
):
    part = list(cases(file))[first : first + AT_ONCE]
    if any(OF_RUNS.search(command) for command, _ in part):
        request.getfixturevalue("trained")
    monkeypatch.setenv("COLUMNS", "120")
    wrong, recorded = [], []
    for i, (command, expected) in enumerate(part):
        place = tmp_path / str(i)
        place.mkdir()
        monkeypatch.chdir(place)
        began = time.monotonic()
        answer = answered(command, world, place)
        if RECORDS and time.monotonic() - began > 2:
            print(f"{time.monotonic() - began:.1f} s: {command}")
        recorded.append("\n".join([command, *answer]))
        if answer != expected:
            wrong.append("\n  ".join([command, *(f"- {line}" for line in expected), *(f"+ {line}" for line in answer)]))
    if RECORDS:
        comments = [line for line in file.read_text("utf-8").splitlines() if line.startswith("#")]
        file.write_text("\n".join(comments) + "\n\n" + "\n\n".join(recorded) + "\n", "utf-8")
    else:
        assert not wrong, f"{len(wrong)} of {len(recorded)} cases of {file.name}:\n\n" + "\n\n".join(wrong)


def answered(command: str, world: Path, place: Path) -> list[str]:
    """Run a case in an empty folder; return its lines."""
    out = place / "out"
    names = {path.stem: path for path in [*world.iterdir(), *(world / "runs").glob("*")]}
    names |= {"out": out, "world": world, "copy": place / "copy"}
    if "{copy}" in command:  # of a run that the command changes
        shutil.copytree(world / "runs" / "run", names["copy"])
    for name in re.findall(r"\{old_(\w+)\}", command):  # a run of an earlier commit
        names[f"old_{name}"] = place / name
        if not (place / name).exists():
            shutil.copytree(world / "stored" / name, place / name)
    line = re.sub(r"\{(\w+)\}", lambda match: str(names[match[1]]), command)
    with own_environment():
        if line.startswith("$$ "):
            lines = _whole_command(line[3:], place, world)
        else:
            lines = _call(line[4:]) if line.startswith(">>> ") else _command(line[2:], place)
    return [_without_places(each, world, place) for each in lines]


@contextlib.contextmanager
def own_environment() -> Iterator[None]:
    """A command runs as in a process of its own: what it sets in the environment is undone."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _without_places(line: str, world: Path, place: Path) -> str:
    """Write the folders of this machine as the corpus does."""
    return line.replace(str(place), "{here}").replace(str(world), "{world}").replace(str(HERE.parents[1]), "{repo}")


def _command(line: str, place: Path) -> list[str]:
    code, said = _run_command(line)
    lines = [f"exit {code}"]
    printed = [each.strip() for each in said.splitlines() if each.strip()]
    errors = [each for each in printed if each.startswith("error: ")]
    shown = dict.fromkeys([*printed[:1], *errors[:1]])
    for each in shown:
        if line.startswith("launch ") and code == 0:
            each = each.split()[0]  # the rest is this machine's environment
        elif code == 0 and not each.startswith(("data: ", "sightline ")):
            each = re.sub(r"\d+\.\d+\S*", "#", each)  # scores, sizes and versions of this machine
        lines.append(f"| {each}")
    if line.startswith("train "):
        for stored in sorted(place.glob("*/config.yaml")):
            lines += _differences(yaml.safe_load(stored.read_text("utf-8")))
    return lines


def _whole_command(line: str, place: Path, world: Path) -> list[str]:
    before = set(place.rglob("*"))
    code, said = _run_command(line)
    written = sorted(path for path in place.rglob("[!.]*") if path.is_file() and path not in before)
    written = [path for path in written if not any(part.startswith(".") for part in path.relative_to(place).parts)]
    said = re.sub(r"(?<=-)[0-9a-f]{12}\b", "#", said)  # an id of the job, of its folder among others
    printed = [f"| {each}".rstrip() for each in said.splitlines() if each.strip()]
    if line.startswith("benchmark "):  # what names this machine
        printed = [each for each in printed if not each.startswith(("| written to ", "| torch "))]
        printed = [re.sub(r" on .*: batch", " on #: batch", each) for each in printed]
        written = []
    return [
        f"exit {code}",
        *printed,
        *(f"file {path.relative_to(place)} {_digest(path, place, world)}" for path in written),
    ]


def _digest(path: Path, place: Path, world: Path) -> str:
    """What is in a file; of a picture what it shows, and numbers without their last digits, where processors differ."""
    if path.suffix == ".png":
        with Image.open(path) as image:
            return f"{image.mode} {image.width}x{image.height} {zlib.crc32(image.tobytes()):08x}"
    if path.suffix == ".npy" and (values := np.load(path)).dtype.kind == "f":
        facts = (values.min(), values.std(), values.max())
        return " ".join([f"{values.dtype} {values.shape}", *(f"{fact:.2f}" for fact in facts)])
    content = path.read_bytes().replace(str(place).encode(), b"{here}").replace(str(world).encode(), b"{world}")
    if path.suffix == ".html":  # when it was written, and when things were in the zone of this machine
        content = re.sub(rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", b"#", content)
    if path.suffix == ".json":
        content = re.sub(rb"-?\d+\.\d+(?:e-?\d+)?", lambda match: b"%.5g" % float(match[0]), content)
    return f"{len(content)} {zlib.crc32(content):08x}"


def _run_command(line: str) -> tuple[object, str]:
    """Run a command in this process; return its exit code and what it printed, in order."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            code: object = cli.main(shlex.split(line))
        except SystemExit as end:
            code = end.code
        except Exception as error:  # noqa: BLE001  # a traceback for the user
            code = type(error).__name__
    return code, printed.getvalue()


def _call(expression: str) -> list[str]:
    """Evaluate an expression; show the error, the settings, or the value."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            value = eval(expression, {"api": api, "dataclasses": dataclasses, "own": _own_recipe})
        except (SightlineError, TypeError, ValueError, KeyError) as error:
            return [f"exit {type(error).__name__}", f"| {str(error).splitlines()[0]}"]
    if isinstance(value, tuple) and len(value) == 2 and dataclasses.is_dataclass(value[0]):
        recipe, run = value
        parts = {name: getattr(recipe, name) for name in ("model", "data", "task", "optimizer", "schedule", "train")}
        stored = {name: _plain(part) for name, part in parts.items()} | {"run": _plain(run), "recipe": recipe.name}
        return _differences(stored)
    if hasattr(value, "best_score"):
        return _differences(yaml.safe_load((Path(value.folder) / "config.yaml").read_text("utf-8")))
    return [f"| {value}"]


def _own_recipe(path: str) -> Any:
    return runpy.run_path(path)["recipe"]()


def _plain(part: Any) -> dict[str, Any]:
    return {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}


def _differences(stored: dict[str, Any]) -> list[str]:
    """List the stored settings that differ from the recipe's own: those of tests/golden/flags_RECIPE.txt."""
    name = stored["recipe"]
    golden = GOLDEN / f"flags_{name}.txt"
    if not golden.exists():
        golden = GOLDEN / "flags_demo_classification.txt"
    rows = (line.partition(" ") for line in golden.read_text("utf-8").splitlines())
    usual = {flag[2:].replace("-", "_"): _comparable(text) for flag, _, text in rows}
    lines = [f"config recipe {name}"]
    for part, fields in stored.items():
        if part == "origins":  # tests/unit/recipe/test_resolve.py
            continue
        for field, value in fields.items() if isinstance(fields, dict) else ():
            key, value = f"{part}.{field}", _comparable(value)
            if key not in usual or usual[key] != value:
                lines.append(f"config {key} {value}".rstrip())
    return lines


def _comparable(value: Any) -> str:
    """Write a value as one text, whatever kind of list holds it and however a number is spelled."""
    if isinstance(value, list | tuple):
        return " ".join(_comparable(each) for each in value)
    if isinstance(value, dict):
        return " ".join(f"{key}={_comparable(each)}" for key, each in value.items())
    if isinstance(value, str):
        return " ".join(map(_word, value.split()))
    return _word(str(value))


def _word(text: str) -> str:
    try:
        return f"{float(text):.15g}"
    except ValueError:
        return text


def test_a_command_answers_in_a_process_of_its_own_as_in_this_one(world: Path, tmp_path: Path):
    plain = [case for name in ("words", "flags") for case in cases(HERE / f"{name}.txt") if "{" not in case[0]]
    for command, expected in plain[:6]:
        words = [sys.executable, "-m", "sightline", *shlex.split(command[2:])]
        environ = os.environ | {"COLUMNS": "120", "PYTHONPATH": str(HERE.parents[1])}
        ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env=environ)
        first = next(line.strip() for line in (ended.stdout + ended.stderr).splitlines() if line.strip())
        assert [f"exit {ended.returncode}", f"| {_without_places(first, world, tmp_path)}"] == expected
