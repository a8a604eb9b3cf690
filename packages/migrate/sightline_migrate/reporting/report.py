"""Merge the JSON files of a run into one table: refused, adapted, ignored and exact calls, sync points.

`sightline migrate report DIR` merges all ranks and workers; a process prints its own part when it ends.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sightline_migrate import terminal
from sightline_migrate.options import MigrateError, command

FORMAT = 1
KINDS = ("refused", "converted", "adapted", "ignored", "exact")
MEANING = {
    "refused": "not possible on this target",
    "converted": "computed in another type than the script asks for",
    "adapted": "replaced by an equivalent",
    "ignored": "skipped, harmless",
    "exact": "same effect",
}
SITES_AT_EXIT = 3
TEXT_WIDTH = 76
OF_SITE = ("kind", "api", "what", "file", "line", "user_file", "user_line")
OF_SYNC = ("what", "file", "line")


def main(argv: Sequence[str]) -> int:
    """Run the command `report`."""
    what = "merge the log files of all processes of a run into one table, refused calls first"
    parser = argparse.ArgumentParser(f"{command()} report", description=what, allow_abbrev=False)
    parser.add_argument("folder", metavar="DIR", help="the folder given to --log; migrate_log by default")
    parser.add_argument("--json", action="store_true", help="print JSON")
    every = "include all runs in the folder, not only the latest; also for nodes that share a folder"
    parser.add_argument("--all", action="store_true", help=every)
    arguments = parser.parse_args(argv)
    documents = read(Path(arguments.folder))
    if not documents:
        raise MigrateError(f"{arguments.folder} has no migrate_*.json; run `{command()} script.py` first")
    if not arguments.all:
        latest = max(documents, key=lambda document: (document["started"], document["run"]))["run"]
        kept = [document for document in documents if document["run"] == latest]
        if len(kept) < len(documents):
            skipped = _number(len(documents) - len(kept), "file")
            terminal.say(f"sightline migrate: {skipped} of earlier runs skipped; --all includes them", "stderr")
        documents = kept
    merged = merge(documents)
    terminal.say(json.dumps(merged, indent=1) if arguments.json else as_text(merged))
    return 0


def read(folder: Path, since: float = 0.0) -> list[dict[str, Any]]:
    """Read every process's JSON, ordered by rank and start; the error for an unreadable file names it."""
    found = []
    for path in sorted(folder.glob("migrate_*.json")):
        try:
            if path.stat().st_mtime < since:
                continue
            document = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:  # renamed meanwhile, when its rank became known
            continue
        except ValueError as error:
            raise MigrateError(f"{path} is not valid JSON ({error}); delete it, or use an empty folder") from error
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            came = document.get("format") if isinstance(document, dict) else None
            raise MigrateError(f"{path} has format {came!r}, this version reads {FORMAT}; delete it, or run again")
        found.append(document)
    return sorted(found, key=lambda document: (document["rank"], document["started"], document["pid"]))


def merge(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge several documents into one: counts are added per call site."""
    truths: dict[str, int] = {}
    for document in documents:
        for name, count in document["truths"].items():
            truths[name] = truths.get(name, 0) + count
    watched = [document["syncs"] for document in documents if document["syncs"] is not None]
    ranks = {(d["host"], d["pid"]): d["rank"] for d in documents}
    processes = [
        {name: d[name] for name in ("host", "pid", "parent", "seconds", "finished", "error")}
        # A spawned worker does not know the rank of its parent process.
        | {"rank": ranks.get((d["host"], d["parent"]), d["rank"]), "calls": sum(s["count"] for s in d["sites"])}
        for d in documents
    ]
    names = ("script", "arguments", "target", "torch", "python", "options", "started")
    return {
        "format": FORMAT,
        **{name: documents[0][name] for name in names},
        "processes": sorted(processes, key=lambda process: (process["rank"], process["parent"] is not None)),
        "sites": _added((site for d in documents for site in d["sites"]), OF_SITE),
        "truths": dict(sorted(truths.items(), key=lambda item: -item[1])),
        "syncs": _added((site for sites in watched for site in sites), OF_SYNC) if watched else None,
    }


def _added(sites: Iterable[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """Merge sites that agree in `names`; refused ones first, then by count."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for site in sites:
        key = tuple(site[name] for name in names)
        if key in found:
            found[key]["count"] += site["count"]
        else:
            found[key] = dict(site)
    return sorted(found.values(), key=lambda site: (KINDS.index(site.get("kind", "exact")), -site["count"]))


def as_text(merged: dict[str, Any], shown_sites: int = sys.maxsize) -> str:
    """Format the table for a terminal."""
    lines = [_headline(merged)]
    for process in merged["processes"]:
        if process["error"] is not None:
            lines.append(f"  rank {process['rank']}, process {process['pid']} ended with {process['error']}")
        elif not process["finished"]:
            was = "killed or still running; counts as of its last new call site"
            lines.append(f"  rank {process['rank']}, process {process['pid']}: {was}")
    for kind in KINDS:
        lines += _section(kind, [site for site in merged["sites"] if site["kind"] == kind], shown_sites)
    if merged["options"].get("log", 0) > 1:
        lines += _truths(merged["truths"])
    if merged["syncs"] is not None:
        lines += _syncs(merged["syncs"])
    return "\n".join(lines)


def _headline(merged: dict[str, Any]) -> str:
    processes = merged["processes"]
    ranks = len({process["rank"] for process in processes})
    workers = sum(process["parent"] is not None for process in processes)
    who = f"{ranks} ranks" if ranks > 1 else f"rank {processes[0]['rank']}"
    who += f" with {workers} child processes" if workers > 1 else " with a child process" if workers else ""
    seconds = max(process["seconds"] for process in processes)
    script = short(merged["script"]) if os.path.isabs(merged["script"]) else merged["script"]
    return f"sightline migrate: {script} on {merged['target']}, torch {merged['torch']}, {who}, {seconds:.1f} s"


def _section(kind: str, sites: Sequence[dict[str, Any]], shown: int) -> list[str]:
    """Format one class of calls: per API the count, the name and the effect, then the user's lines."""
    if not sites:
        return ["refused: none"] if kind == "refused" else []
    calls = sum(site["count"] for site in sites)
    lines = [f"{kind}: {MEANING[kind]}; {_number(calls, 'call')} at {_number(len(sites), 'place')}"]
    apis: dict[str, list[dict[str, Any]]] = {}
    for site in sites:
        apis.setdefault(site["api"], []).append(site)
    for api, of_api in sorted(apis.items(), key=lambda item: -sum(site["count"] for site in item[1])):
        whats = list(dict.fromkeys(site["what"] for site in of_api))
        more = f" (and {len(whats) - 1} more)" if len(whats) > 1 else ""
        lines.append(
            f"{sum(site['count'] for site in of_api):8}  {api.removesuffix('.__init__')} --> {_cut(whats[0])}{more}"
        )
        users: dict[tuple[str, int, str], int] = {}
        for site in of_api:
            at = (site["user_file"], site["user_line"], site["user_source"])
            users[at] = users.get(at, 0) + site["count"]
        for file, line, source in list(users)[:shown]:
            lines.append(f"            {short(file)}:{line}  {_cut(source)}")
        if len(users) > shown:
            lines.append(f"            and {len(users) - shown} more {'line' if len(users) - shown == 1 else 'lines'}")
    return lines


def _truths(truths: dict[str, int]) -> list[str]:
    if not truths:
        return []
    calls = sum(truths.values())
    named = ", ".join(f"{name.removeprefix('torch.')} {count}" for name, count in list(truths.items())[:4])
    more = f", and {len(truths) - 4} more names" if len(truths) > 4 else ""
    return [f"real answers to torch itself: {_number(calls, 'question')} ({named}{more})"]


def _syncs(sites: Sequence[dict[str, Any]]) -> list[str]:
    if not sites:
        return ["sync points: none"]
    lines = [f"sync points: the host waits for the device; {_number(sum(s['count'] for s in sites), 'time')}"]
    for site in sites:
        at = f"{short(site['file'])}:{site['line']}"
        lines.append(f"{site['count']:8}  {site['what']}  {at}  {_cut(site['source'])}")
    return lines


def _number(count: int, word: str) -> str:
    return f"{count} {word}" + ("" if count == 1 else "s")


def _cut(text: str) -> str:
    return text if len(text) <= TEXT_WIDTH else text[: TEXT_WIDTH - 3] + "..."


def short(path: str) -> str:
    """Shorten a path: relative to the current folder, or from the package name on in installed packages."""
    for folder in (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}"):
        if folder in path:
            return path.rsplit(folder, 1)[1]
    here = os.getcwd() + os.sep
    return path[len(here) :] if path.startswith(here) else path
