"""Merging what processes wrote: counts add up per call site, refused calls come first, other runs stay out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sightline_migrate.options import MigrateError
from sightline_migrate.reporting import advice, report


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


def test_every_line_of_the_table(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(report.os, "getcwd", lambda: "/x")
    long, cut = "x" * 77, "x" * 73 + "..."
    one = {**site("adapted", "torch.cuda.Stream.__init__", 3, 2), "what": long, "user_source": "s = Stream()"}
    same = {**site("adapted", "torch.cuda.Stream.__init__", 3, 5), "what": "another", "user_source": "s = Stream()"}
    more = [site("adapted", "torch.cuda.Stream.__init__", 10 + n, 1) for n in range(2)]
    few = {**site("adapted", "torch.cuda.Event", 9, 1), "user_source": long}
    far = {**site("exact", "torch.ones", 7, 10), "user_file": "/a/lib/site-packages/timm/x.py"}
    near = {**site("exact", "torch.ones", 8, 1), "user_file": "/a/dist-packages/lib/site-packages/b.py"}
    answers = {f"torch.cuda.q{n}": 9 - n for n in range(5)}
    waits = [{"what": ".item()", "count": 1, "file": "/x/train.py", "line": 12, "source": long}]
    documents = [
        document(1, script="/x/train.py", sites=[one, same, *more, few, far, near], truths=answers, syncs=waits,
                 options={"log": 2}, seconds=1.25),
        document(2, rank=1, seconds=61.04),
        document(3, rank=1, parent=2, finished=False),
        document(4, rank=1, parent=2),
    ]  # fmt: skip
    assert report.as_text(report.merge(documents), shown_sites=2).splitlines() == [
        "sightline migrate: train.py on cpu, torch 2, 2 ranks with 2 child processes, 61.0 s",
        "  rank 1, process 3: killed or still running; counts as of its last new call site",
        "refused: none",
        "adapted: replaced by an equivalent; 10 calls at 5 places",
        "       9  torch.cuda.Stream --> another (and 2 more)",
        "            train.py:3  s = Stream()",
        "            train.py:10  line 10",
        "            and 1 more line",
        "       1  torch.cuda.Event --> done",
        f"            train.py:9  {cut}",
        "exact: same effect; 11 calls at 2 places",
        "      11  torch.ones --> done",
        "            timm/x.py:7  line 7",
        "            b.py:8  line 8",
        "real answers to torch itself: 35 questions (cuda.q0 9, cuda.q1 8, cuda.q2 7, cuda.q3 6, and 1 more names)",
        "sync points: the host waits for the device; 1 time",
        f"       1  .item()  train.py:12  {cut}",
    ]
    alone = report.merge([document(1, script="train.py", syncs=[], options={"log": 2}, sites=[{**one, "count": 1}])])
    assert report.as_text(alone).splitlines() == [
        "sightline migrate: train.py on cpu, torch 2, rank 0, 1.5 s",
        "refused: none",
        "adapted: replaced by an equivalent; 1 call at 1 place",
        f"       1  torch.cuda.Stream --> {cut}",
        "            train.py:3  s = Stream()",
        "sync points: none",
    ]
    four = report.merge([document(1, truths=dict(list(answers.items())[:4]), options={"log": 2})])
    assert report.as_text(four).endswith("(cuda.q0 9, cuda.q1 8, cuda.q2 7, cuda.q3 6)")
    assert report._cut("x" * 76) == "x" * 76


def test_documents_are_read_in_the_order_of_ranks_and_starts(tmp_path: Path):
    later, first, other = document(5, started="b"), document(7, started="a"), document(1, rank=1, started="0")
    write(tmp_path, later, other, first, {**document(8), "started": "b"})
    assert [each["pid"] for each in report.read(tmp_path)] == [7, 5, 8, 1]
    assert report.read(tmp_path, since=2.0**40) == [] and report.read(tmp_path / "none") == []
    with pytest.raises(MigrateError, match="holds? no|has no migrate_"):
        report.main([str(tmp_path / "none")])
    (tmp_path / "migrate_9_9.json").write_text("[]")
    with pytest.raises(MigrateError, match="has format None, this version reads 1; delete it, or run again"):
        report.read(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Found no NVIDIA driver", "?:0: RuntimeError: needs a real CUDA device, not xpu; this call has no rule"),
        ("0 active drivers", f"?:0: RuntimeError: {advice.NO_DRIVER.format(target='xpu')}"),
        ("libcudart.so.12: cannot open", f"?:0: RuntimeError: {advice.OF_CUDA.format(target='xpu')}"),
        ("something else", ""),
    ],
)  # fmt: skip
def test_an_error_outside_of_the_users_lines_has_no_place(text: str, said: str):
    assert advice.advise(RuntimeError(text), "xpu") == said
