"""Pieces of HTML for the report. All text is escaped here; cells of tables are HTML already."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from sightline.runs.screen import as_score

MOST = 1e100  # larger numbers are not drawn: sums, differences and slopes of these stay finite


def text(value: Any) -> str:
    """Return any value as text that is safe in HTML."""
    return escape(str(value).encode("utf-8", "backslashreplace").decode())  # names of files may not be text


# Titles that were called otherwise: links to the sections of older pages stay.
ANCHORS = {"Worst predictions": "most-wrong-samples", "Confusion matrix": "confusions"}


def section(title: str, content: str, is_linked: bool = True) -> str:
    """Return a section, with the name that the list of contents links to; "" without content."""
    name = f' id="{anchor(title)}"' if is_linked else ""
    return f"<section{name}><h2>{text(title)}</h2>{content}</section>" if content else ""


def anchor(title: str) -> str:
    """Return the name of a section in links."""
    return ANCHORS.get(title) or re.sub("[^a-z]+", "-", title.lower())


def folded(title: str, content: str) -> str:
    """Return content that is hidden until the reader opens it; "" without content."""
    return f"<details><summary>{text(title)}</summary>{content}</details>" if content else ""


def card(title: str, content: str) -> str:
    """Return content in a frame; "" without content."""
    return f'<div class="card"><h3>{text(title)}</h3>{content}</div>' if content else ""


def pairs(rows: Iterable[tuple[str, Any]]) -> str:
    """Return a table of names and values."""
    lines = [f'<tr><td class="name">{text(key)}</td><td class="wrap">{text(value)}</td></tr>' for key, value in rows]
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>' if lines else ""


def table(header: Sequence[str], rows: Sequence[Sequence[str]], numbers: bool = False) -> str:
    """Return a table of cells made by the functions here; with `numbers` all but the first column are numbers."""
    kind = ' class="n"' if numbers else ""
    first, *rest = header
    head = f"<th>{text(first)}</th>" + "".join(f"<th{kind}>{text(name)}</th>" for name in rest)
    lines = [f"<tr><td>{row[0]}</td>" + "".join(f"<td{kind}>{cell}</td>" for cell in row[1:]) + "</tr>" for row in rows]
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(lines)}</table></div>'


def number(value: Any) -> str:
    """Return a score or a count as the content of a cell."""
    return text(as_score(value) if isinstance(value, float) or value is None else value)


def bar(value: Any) -> str:
    """Return a score between 0 and 1 on a bar of that length."""
    if not (is_score(value) and 0 <= value <= 1):
        return number(value)
    return f'<span class="bar" style="--v:{100 * value:.0f}%">{number(float(value))}</span>'


def is_score(value: Any) -> bool:
    """Return whether a value out of a file is a number that can be drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -MOST <= value <= MOST
