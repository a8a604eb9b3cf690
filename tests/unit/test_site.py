"""docs/site.py: every page is on the site, and its links lead to pages of the site."""

import importlib.util
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
SITE = runpy.run_path(str(REPO / "docs" / "site.py"))


def test_the_index_lists_every_page():
    assert SITE["unlisted"]() == []


def test_links_of_a_page_lead_to_pages_and_pictures_of_the_site():
    places = {*SITE["pages"](), *(f"images/{path.name}" for path in (REPO / "docs" / "images").iterdir())}
    lost = []
    for place, path in SITE["pages"]().items():
        for _, _, target, _ in SITE["LINK"].findall(SITE["text_of"](place, path)):
            if target and "://" not in target:
                at = os.path.normpath(os.path.join(os.path.dirname(place), target))
                lost += [f"{place}: {target}"] if at not in places else []
    assert lost == []


@pytest.mark.slow
def test_the_site_is_built_without_a_warning():
    if importlib.util.find_spec("zensical") is None:
        pytest.skip("zensical is not installed; `make docs` installs it")
    done = subprocess.run([sys.executable, REPO / "docs" / "site.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (REPO / "build" / "site" / "search.json").stat().st_size > 100_000
