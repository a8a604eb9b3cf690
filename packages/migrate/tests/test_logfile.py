"""The text of a log, line by line, and who prints what at the end; tests/migrate/test_log.py runs scripts."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sightline_migrate.reporting import logfile, record, report
from sightline_migrate.rules.table import Rule
from sightline_migrate.session import Session
from sightline_migrate.zones import Site

Start = Callable[..., Session]
AT = time.mktime((2026, 3, 4, 5, 6, 7, 0, 0, -1))


def rule(kind: str, name: str) -> Rule:
    return Rule(name, kind, lambda rule, original, session: original, "as it is")


def test_a_record_names_its_line_and_that_of_the_user(tmp_path: Path):
    (tmp_path / "a.py").write_text("import torch\n  x = torch.ones(2)  \n")
    site, user = Site(f"{tmp_path}/a.py", 2, "f"), Site(f"{tmp_path}/a.py", 1, "g")
    new = record.Record(rule("exact", "torch.ones"), "exact", site, site, "2", "the same", AT)
    lines = [
        f"[2026-03-04 05:06:07] {tmp_path}/a.py:2",
        "    [context]: x = torch.ones(2)",
        "    [exact]: torch.ones(2) --> the same",
    ]
    assert logfile._as_text(new) == "\n".join([*lines, "", ""])
    new = record.Record(new.rule, "exact", site, user, "2", "the same", AT)
    assert logfile._as_text(new) == "\n".join([*lines, f"    [user]: {tmp_path}/a.py:1: import torch", "", ""])
    assert logfile._site(new, 5) == {
        "kind": "exact", "api": "torch.ones", "what": "the same", "arguments": "2", "count": 5,
        "file": site.file, "line": 2, "user_file": user.file, "user_line": 1, "user_source": "import torch",
    }  # fmt: skip


def test_counts_are_in_the_order_of_importance_and_then_of_number(monkeypatch: pytest.MonkeyPatch):
    record.reset()
    rules = {kind: rule(kind, f"torch.{kind}") for kind in report.KINDS}
    for line, (kind, count) in enumerate((("exact", 9), ("adapted", 2), ("exact", 10), ("refused", 1))):
        record.counts["/a.py", line, rules[kind]] = count
    record.truths.update({"b": 3, "a": 4})
    try:
        text = logfile._counts_as_text(with_truths=True).splitlines()
        assert text[0].endswith("] counts") and text[0].startswith(f"[{time.strftime('%Y-')}")
        assert text[1:] == [
            "    [refused]: 1 x torch.refused at /a.py:3",
            "    [adapted]: 2 x torch.adapted at /a.py:1",
            "    [exact]: 10 x torch.exact at /a.py:2",
            "    [exact]: 9 x torch.exact at /a.py:0",
            "    [truth to torch]: 4 x a",
            "    [truth to torch]: 3 x b",
            "",
        ]
        assert logfile._counts_as_text(with_truths=False).splitlines()[1:] == [*text[1:5], ""]
    finally:
        record.reset()


def test_an_error_is_its_first_line_without_colours():
    assert logfile._as_line(ValueError("\x1b[31mred\x1b[0m fish\nmore")) == "ValueError: red fish"
    assert logfile._as_line(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert logfile._as_line(ValueError("\n")) == "ValueError"
    assert logfile._as_line(OSError("x" * 400)) == f"OSError: {'x' * 291}"


@pytest.fixture
def log(tmp_path: Path, on_cpu: Start) -> logfile.ProcessLog:
    session = on_cpu(log=1, log_dir=str(tmp_path / "log"))
    [found] = [each for each in logfile._logs if each.session is session]
    return found


def put(log: logfile.ProcessLog, pid: int, **more: Any) -> None:
    mine = {**log.document(True), "pid": pid, "parent": None, "sites": [], **more}
    (log.folder / f"migrate_0_{pid}.json").write_text(json.dumps(mine))


def test_a_process_prints_itself_and_the_workers_that_it_started(log: logfile.ProcessLog):
    me = os.getpid()
    put(log, 1, parent=me)
    put(log, 2, parent=1)
    put(log, 3, parent=me, host="elsewhere")
    put(log, 4, parent=me, run="another")
    put(log, 5)
    assert [each["pid"] for each in log._documents()] == [me, 1, 2]
    assert log._pointer().startswith("all ranks and workers, line by line: ")
    assert log._pointer().endswith(f" report {log.folder}")


def test_a_process_that_only_starts_others_leaves_the_table_to_them(log: logfile.ProcessLog):
    assert not log._only_launches()
    put(log, 1, sites=[{"count": 1}], parent=7)
    put(log, 2, sites=[{"count": 1}], run="another")
    put(log, 3)
    put(log, os.getpid(), sites=[{"count": 1}])
    assert not log._only_launches()
    put(log, 4, sites=[{"count": 1}])
    assert log._only_launches()
    torch.zeros(1, device="cuda")
    assert not log._only_launches(), "it made a call itself"


def test_the_table_at_the_end_shows_three_lines_of_a_name_and_is_printed_once(
    log: logfile.ProcessLog, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    for line in range(5):
        exec(compile("\n" * line + "import torch; torch.ones(1, device='cuda')", "/home/me/train.py", "exec"))
    monkeypatch.setattr(logfile.sys, "orig_argv", ["python", "train.py"])
    log.close()
    said = capsys.readouterr().err
    assert "and 2 more lines" in said and said.count("/home/me/train.py:") == report.SITES_AT_EXIT == 3
    assert said.rstrip().endswith(log._pointer())
    log.close()
    assert capsys.readouterr().err == "" and log.is_closed
    text = next(log.folder.glob("gpu_migration_*.log")).read_text()
    assert text.count("] counts") == 1 and text.count("[exact]: torch.ones") == 5
    [file] = log.folder.glob("migrate_*.json")
    document = json.loads(file.read_text())
    assert document["finished"] and [site["count"] for site in document["sites"]] == [1] * 5
    assert not list(log.folder.glob("*.partial"))


def test_the_json_moves_to_its_rank_and_is_not_written_all_the_time(
    log: logfile.ProcessLog, monkeypatch: pytest.MonkeyPatch
):
    log._write_json(is_finished=False)
    assert [path.name for path in log.folder.glob("*.json")] == [f"migrate_0_{os.getpid()}.json"]
    monkeypatch.setenv("RANK", "3")
    now = [100.0]
    monkeypatch.setattr(logfile.time, "monotonic", lambda: now.append(now[-1] + 0.5) or now[-1])
    log._write_json(is_finished=False)
    assert [path.name for path in log.folder.glob("*.json")] == [f"migrate_3_{os.getpid()}.json"]
    assert log._write_next == now[-1] + 0.5 / 0.05, "a twentieth of the time at most"
    monkeypatch.setenv("RANK", "no number")
    assert log._rank() == 3 and log.rank == 3, "remembered"


def test_a_log_whose_folder_has_gone_says_so_and_ends_without_an_error(
    log: logfile.ProcessLog, capsys: pytest.CaptureFixture[str]
):
    log.folder.rmdir()
    torch.ones(1, device="cuda")
    assert capsys.readouterr().err.startswith(f"sightline migrate: logging stopped, {log.folder}: ")
    assert log.is_closed and log.listen not in record.listeners
    log.end()
    assert log not in logfile._logs
