"""What docs/ say of migration: options with their defaults, the lines of Python, the page of all rules."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sightline_migrate import deactivate
from sightline_migrate.options import MigrateOptions
from sightline_migrate.reporting import listing

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_defaults_are_those_of_the_documentation():
    """A value behind an option of the table is its default; a switch without one is off."""
    text = (DOCS / "reference" / "migration_reference.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`--.*?) \|", text, re.MULTILINE)
    told = {word[0].replace("-", "_"): word[1] for word in re.findall(r"`--([\w-]+) ?([\w.]*)`", " ".join(rows))}
    told["log_dir"] = "migrate_log"  # of --log DIR
    told["log"] = "0"  # --log-level: the command's default is 1, that of migrate() is no log
    del told["log_level"]
    found = vars(MigrateOptions())
    assert {name: "" if value is False else str(value) for name, value in found.items()} == told


def test_lines_of_the_documentation_run_as_written(on_cpu: Any, monkeypatch: pytest.MonkeyPatch):
    text = (DOCS / "howto" / "migration.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert "import sightline.migrate.auto" in text
    for code in (block, "import sightline.migrate.auto"):
        monkeypatch.delitem(sys.modules, "sightline.migrate.auto", raising=False)
        exec(compile(code, "script.py", "exec"), {})
        assert torch.ones(1, device="cuda").device.type == "cpu"
        deactivate()


def test_page_is_what_the_command_writes():
    """Other releases of torch have a few other names; what both have is the same."""
    written, now = (
        (DOCS / "reference" / "migration_rules.md").read_text(encoding="utf-8"),
        listing.page(listing.known_rules()) + "\n",
    )
    version = re.search(r"for torch (\d+\.\d+);", written)
    if version is not None and torch.__version__.startswith(version[1] + "."):
        assert written == now, f"{listing.COMMAND} > docs/reference/migration_rules.md"
    here, there = classes(now), classes(written)
    assert len(here.keys() & there.keys()) > 150
    assert {name: here[name] for name in here if here[name] != there.get(name, here[name])} == {}


def classes(page: str) -> dict[str, str]:
    parts = re.split(r"^## (\w+):.*$", page, flags=re.MULTILINE)[1:]
    return {
        name: kind
        for kind, text in zip(parts[::2], parts[1::2], strict=True)
        for name in re.findall(r"`([^`]+)`", text)
    }
