"""Build the site: `make docs`, or `python docs/site.py` where Zensical is installed. The result is build/site.

docs/index.md says which pages there are, in which order and under which names. Pages are copied first: links to
files of the repository that are no pages become their paths, and what is written for GitHub's Markdown is adapted.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
DOCS, BUILD = REPO / "docs", REPO / "build"
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]*)(#[^)\s]*)?\)")
BESIDE = {"SECURITY.md": "why/security.md", "CHANGELOG.md": "changelog.md"}  # pages that lie in the repository's root


def pages() -> dict[str, Path]:
    """Every page of the site by its place there."""
    own = {path.relative_to(DOCS).as_posix(): path for path in sorted(DOCS.rglob("*.md"))}
    return own | {place: REPO / name for name, place in BESIDE.items()}


def text_of(place: str, path: Path) -> str:
    """Return a page as the site has it."""
    found = {source.resolve(): where for where, source in pages().items()}

    def linked(match: re.Match[str]) -> str:
        image, text, target, anchor = match[1], match[2], match[3], match[4] or ""
        if not target or "://" in target:
            return match[0]
        file = (path.parent / target).resolve()
        if file in found:
            return f"[{text}]({os.path.relpath(found[file], Path(place).parent)}{anchor})"
        if image:
            return f"![{text}]({os.path.relpath(file.relative_to(DOCS), Path(place).parent)})"
        return f"{text} (`{file.relative_to(REPO).as_posix()}` in the repository)"

    parts = re.split(r"(^```.*?^```[^\n]*\n)", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return "".join(part if number % 2 else _lists(LINK.sub(linked, part)) for number, part in enumerate(parts))


def _lists(text: str) -> str:
    """Put an empty line before each list and table that follows a line of text, as this Markdown wants it."""
    return re.sub(r"^(?!\||[-*] |\d+\. |\s|$)(.*)\n(?=- |1\. |\|)", r"\1\n\n", text, flags=re.MULTILINE)


def navigation() -> list[object]:
    """Return sections and pages in the order of docs/index.md, by the names that it links them with."""
    listed: set[str] = set()
    sections: list[object] = [{"Sightline": "index.md"}]
    for part in re.split(r"^## ", (DOCS / "index.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        found = []
        for _, text, target, _ in LINK.findall(body):
            place = BESIDE.get(os.path.normpath(os.path.join("docs", target)), target)
            if place not in listed:
                listed.add(place)
                name = " ".join(text.split())
                found.append({name[0].upper() + name[1:]: place})
        sections.append({title.strip(): found})
    return sections


def unlisted() -> list[str]:
    """Return pages that docs/index.md leaves out; pages of one original README are linked from that of all."""
    listed = re.findall(r"'([\w/]+\.md)'", str(navigation()))
    return [place for place in pages() if place not in listed and not place.startswith("reference/legacy_")]


def stage() -> Path:
    """Write the pages and the settings below build/; return the settings."""
    folder = BUILD / "docs"
    shutil.rmtree(folder, ignore_errors=True)
    for place, path in pages().items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text(text_of(place, path), encoding="utf-8")
    shutil.copytree(DOCS / "images", folder / "images")
    nav = json.dumps(navigation()).replace('": ', '" = ')  # as TOML writes tables
    settings = (DOCS / "site.toml").read_text(encoding="utf-8").replace("[project]\n", f"[project]\nnav = {nav}\n", 1)
    (BUILD / "zensical.toml").write_text(settings, encoding="utf-8")
    return BUILD / "zensical.toml"


if __name__ == "__main__":
    config = stage()
    zensical = Path(sys.executable).with_name("zensical")
    if not zensical.exists():
        sys.exit("zensical is not installed: pip install zensical, or `make docs`")
    done = subprocess.run([zensical, "build", "--clean", "--strict", "-f", config.name], cwd=BUILD, check=False)
    if done.returncode == 0:
        print(f"{BUILD / 'site' / 'index.html'}: open it in a browser")
    sys.exit(done.returncode)
