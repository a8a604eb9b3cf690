"""Text is read and written as UTF-8 wherever a user's locale says something else: each call that opens text says so."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[3]
PACKAGES = (REPO / "sightline", REPO / "packages" / "migrate" / "sightline_migrate")


def left_to_the_locale(source: str) -> Iterator[int]:
    """Yield the lines that open text without an encoding."""
    for call in ast.walk(ast.parse(source)):
        match call:
            case ast.Call(func=ast.Attribute(attr="read_text"), args=[], keywords=keywords):
                pass
            case ast.Call(func=ast.Attribute(attr="write_text"), args=[_], keywords=keywords):
                pass
            case ast.Call(func=ast.Name(id="open") | ast.Attribute(attr="fdopen"), args=[_, *more], keywords=keywords):
                mode = next((each.value for each in keywords if each.arg == "mode"), more[0] if more else None)
                if isinstance(mode, ast.Constant) and "b" in mode.value:
                    continue
            case _:
                continue
        if not any(each.arg == "encoding" for each in keywords):
            yield call.lineno


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("open(p)", [1]),
        ("open(p, 'rb')", []),
        ("open(p, mode='w')", [1]),
        ("open(p, 'a', encoding='utf-8')", []),
        ("open(p, mode)", [1]),
        ("p.read_text()", [1]),
        ("p.read_text('utf-8')", []),
        ("p.write_text(t)", [1]),
        ("p.write_text(t, 'utf-8')", []),
        ("os.fdopen(d, 'w')", [1]),
        ("os.fdopen(d, 'wb')", []),
        ("os.open(p, f)", []),
    ],
)
def test_calls_that_leave_it_to_the_locale_are_found(source: str, lines: list[int]):
    assert list(left_to_the_locale(source)) == lines


def test_every_text_has_an_encoding():
    files = [path for package in PACKAGES for path in sorted(package.rglob("*.py"))]
    texts = {path: path.read_text("utf-8") for path in files}
    named = {path: text for path, text in texts.items() if any(name in text for name in ("open(", "_text(", "fdopen("))}
    found = [f"{path.relative_to(REPO)}:{line}" for path, text in named.items() for line in left_to_the_locale(text)]
    assert len(files) > 400 and not found
