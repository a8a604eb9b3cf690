"""What migrate has copied of the suite, since it needs torch alone: a fault mended in one is mended in the other."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType

import pytest

from sightline import terminal
from sightline.hardware import onednn
from sightline.models import norm
from sightline_migrate import norm as norm_copy
from sightline_migrate import onednn as onednn_copy
from sightline_migrate import terminal as terminal_copy


def statements(module: ModuleType) -> list[str]:
    """Every statement of a file but its docstring and its imports."""
    body = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8")).body[1:]
    return [ast.unparse(each) for each in body if not isinstance(each, ast.Import | ast.ImportFrom)]


@pytest.mark.parametrize(
    ("copy", "original", "at_least"),
    [(norm_copy, norm, 6), (onednn_copy, onednn, 6), (terminal_copy, terminal, 7)],
    ids=["norm", "onednn", "terminal"],
)
def test_a_copy_holds_what_the_original_holds(copy: ModuleType, original: ModuleType, at_least: int):
    ours = statements(copy)
    assert len(ours) >= at_least
    assert [each for each in ours if each not in statements(original)] == []
