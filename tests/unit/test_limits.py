"""docs/reference/limits.md has the numbers of the code."""

import importlib
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "limits.md"


def test_the_page_has_the_limits_of_the_code():
    text = PAGE.read_text("utf-8")
    rows = re.findall(r"^\| `([\w.]+)\.(\w+)` \| ([\d.,e+-]+) \| ", text, re.MULTILINE)
    assert len(rows) == text.count("\n| `") > 100
    said = {(module, name): float(value.replace(",", "")) for module, name, value in rows}
    assert {(module, name): getattr(importlib.import_module(module), name) for module, name in said} == said
