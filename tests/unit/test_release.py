"""What must agree before a version is tagged: both packages, the changelog, the image, the CI's commands."""

import re
import tomllib
from pathlib import Path

import yaml

import sightline
import sightline_migrate

REPO = Path(__file__).resolve().parents[2]
VERSION = sightline.__version__


def test_both_packages_and_the_changelog_have_one_version():
    assert sightline_migrate.__version__ == VERSION
    newest = re.findall(r"^## (.*)$", (REPO / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)[0]
    assert re.fullmatch(rf"Unreleased|{re.escape(VERSION)}, 20\d\d-\d\d-\d\d", newest)


def test_documents_and_the_dockerfile_name_the_image_of_this_version():
    files = [REPO / "Dockerfile", *(REPO / "docs").rglob("*.md")]
    tags = {tag for path in files for tag in re.findall(r"sightline:(\d[\w.]*\w)", path.read_text("utf-8"))}
    assert tags == {VERSION}


def test_both_packages_name_the_same_places():
    ours, its = (
        tomllib.loads((REPO / folder / "pyproject.toml").read_text("utf-8"))["project"]["urls"]
        for folder in (".", "packages/migrate")
    )
    assert ours == its and {"Homepage", "Documentation", "Source", "Changelog"} <= ours.keys()


def test_ci_runs_the_two_commands():
    [job] = yaml.safe_load((REPO / ".github/workflows/ci.yml").read_text("utf-8"))["jobs"].values()
    made = [word for step in job["steps"] for word in re.findall(r"^make (\w+)", step.get("run", ""))]
    asked = (REPO / ".ci/run").read_text("utf-8").splitlines()[-1].removeprefix("make ").split()
    assert made == asked == ["lint", "test"]
