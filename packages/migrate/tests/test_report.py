"""Merging what processes wrote: counts add up per call site, refused calls come first, other runs stay out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sightline_migrate.options import MigrateError
from sightline_migrate.reporting import report


def site(kind: str, api: str, line: int, count: int, file: str = "/x/train.py") -> dict[str, Any]:
    user = {"user_file": "/x/train.py", "user_line": line, "user_source": f"line {line}"}
    return {
        "kind": kind,
        "api": api,
        "what": "done",
        "arguments": "",
        "count": count,
        "file": file,
        "line": line,
    } | user


def document(pid: int, rank: int = 0, parent: int | None = None, run: str = "a", **more: Any) -> dict[str, Any]:
    made = {
        "format": report.FORMAT, "run": run, "host": "h", "pid": pid, "parent": parent, "rank": rank,
        "script": "train.py", "arguments": [], "target": "cpu", "torch": "2", "python": "3", "options": {},
        "started": f"2026-01-01T00:00:{pid:02}", "seconds": 1.5, "finished": True, "error": None,
        "sites": [], "truths": {}, "syncs": None,
    }  # fmt: skip
    return made | more


def write(folder: Path, *documents: dict[str, Any]) -> None:
    for each in documents:
        (folder / f"migrate_{each['rank']}_{each['pid']}.json").write_text(json.dumps(each))


def test_counts_add_up_per_place():
    exact, refused = site("exact", "torch.ones", 3, 5), site("refused", "torch.cuda.graph", 9, 1)
    merged = report.merge(
        [
            document(1, 0, sites=[exact], truths={"a": 1}, syncs=[]),
            document(2, 1, sites=[dict(exact), refused], truths={"a": 2, "b": 4}),
            document(3, 1, parent=2, sites=[site("exact", "torch.ones", 4, 7)]),
        ]
    )
    assert [(s["kind"], s["line"], s["count"]) for s in merged["sites"]] == [
        ("refused", 9, 1),
        ("exact", 3, 10),
        ("exact", 4, 7),
    ]
    assert merged["truths"] == {"b": 4, "a": 3} and merged["syncs"] == []
    assert [process["calls"] for process in merged["processes"]] == [5, 6, 7]
    assert exact["count"] == 5  # what was given is not changed


def test_table_is_in_the_order_of_importance():
    kinds = ("exact", "ignored", "adapted", "refused")
    syncs = [{"what": ".item()", "count": 3, "file": "/x/train.py", "line": 12, "source": "loss.item()"}]
    sites = [site(kind, f"torch.cuda.{kind}", at, at + 1) for at, kind in enumerate(kinds)]
    text = report.as_text(
        report.merge([document(1, sites=sites, truths={"torch.cuda.is_available": 8}, syncs=syncs, options={"log": 2})])
    )
    order = [text.index(word) for word in ("\nrefused:", "\nadapted:", "\nignored:", "\nexact:", "\nreal", "\nsync")]
    assert order == sorted(order)
    assert "       4  torch.cuda.refused --> done\n            /x/train.py:3  line 3\n" in text
    quiet = report.merge([document(1, sites=sites, truths={"torch.cuda.is_available": 8}, options={"log": 1})])
    assert "questions" not in report.as_text(quiet)
    assert "8 questions (cuda.is_available 8)" in text and "       3  .item()  /x/train.py:12  loss.item()" in text


def test_many_lines_of_one_api_are_cut_on_request_only():
    merged = report.merge([document(1, sites=[site("exact", "torch.ones", line, 1) for line in range(9)])])
    assert "and 6 more lines" in report.as_text(merged, shown_sites=3)
    assert "more" not in report.as_text(merged)
    assert "       9  torch.ones" in report.as_text(merged, shown_sites=3)


def test_worker_has_the_rank_of_its_parent():
    merged = report.merge([document(1, rank=3), document(2, rank=0, parent=1)])
    assert [process["rank"] for process in merged["processes"]] == [3, 3]
    assert "rank 3 with a child process" in report.as_text(merged)


def test_who_crashed_and_who_was_killed():
    documents = [document(1, 0, finished=False), document(2, 1, error="ValueError: fish")]
    text = report.as_text(report.merge(documents))
    assert (
        "rank 0, process 1: killed or still running" in text and "rank 1, process 2 ended with ValueError: fish" in text
    )


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    sites = [site("exact", "torch.ones", 3, 5)]
    write(tmp_path, document(1, sites=sites, run="old"), document(2, sites=sites), document(3, rank=1, sites=sites))
    assert report.main([str(tmp_path), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["sites"][0]["count"] == 10 and "1 file of earlier runs skipped" in err
    assert report.main([str(tmp_path), "--all"]) == 0
    assert "      15  torch.ones" in capsys.readouterr().out


def test_files_that_are_none_of_ours_are_named(tmp_path: Path):
    (tmp_path / "migrate_0_1.json").write_text('{"format": 99}')
    with pytest.raises(MigrateError, match="migrate_0_1.json has format 99, this version reads 1"):
        report.read(tmp_path)
    (tmp_path / "migrate_0_1.json").write_text('{"format": ')
    with pytest.raises(MigrateError, match="migrate_0_1.json is not valid JSON"):
        report.read(tmp_path)
