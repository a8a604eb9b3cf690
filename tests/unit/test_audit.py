"""`make audit`: the licence half on what is installed here, and on what it must refuse."""

import importlib.util
import sys
from importlib import metadata
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def audit():
    spec = importlib.util.spec_from_file_location("audit", REPO / ".ci" / "audit.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def install(folder: Path, name: str, *lines: str) -> None:
    """As pip leaves it, without any files."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("\n".join(["Metadata-Version: 2.4", f"Name: {name}", "Version: 1.0", *lines, ""]))


def test_what_is_installed_here_may_be_used(audit, capsys):
    assert audit.list_licences(audit.groups(audit.PROJECT)) == 0
    out = capsys.readouterr().out
    assert "  numpy " in out and "\nextra " in out and "\ndev: " in out
    absent = [line.split()[0] for line in out.splitlines() if line.endswith(audit.ABSENT)]
    if absent:
        pytest.skip(f"{', '.join(absent)} not installed: what they require in turn cannot be followed")
    pinned = [line.split("==")[0] for line in (REPO / "constraints.txt").read_text().splitlines() if "==" in line]
    listed = {line.split()[0] for line in out.splitlines() if line.startswith("  ")}
    installed = {each.name for each in metadata.distributions()} - {"pip"}
    assert {audit.canonicalize_name(name) for name in pinned if name in installed} <= listed


@pytest.mark.parametrize(
    ("licence", "is_forbidden"),
    [
        ("GPL-3.0-only", True),
        ("AGPL-3.0-or-later", True),
        ("GNU General Public License v3 (GPLv3)", True),
        ("GNU Affero General Public License v3", True),
        ("GNU GENERAL PUBLIC LICENSE", True),
        ("MIT AND GPL-2.0-or-later", True),
        ("GPL-2.0-only AND (MIT OR BSD-3-Clause)", True),
        ("GPL-2.0-only OR AGPL-3.0-only", True),
        ("MIT OR GPL-2.0-only", False),
        ("LGPL-2.1-or-later", False),
        ("GNU Lesser General Public License v2 (LGPLv2)", False),
        ("GNU LESSER GENERAL PUBLIC LICENSE", False),
        ("GNU Library General Public License", False),
        ("MPL-2.0 AND MIT", False),
        ("LicenseRef-NVIDIA-Proprietary", False),
    ],
)
def test_gpl_and_agpl_are_refused_where_no_other_choice_is_left(audit, licence: str, is_forbidden: bool):
    assert audit.is_forbidden(licence) is is_forbidden


def test_a_licence_deep_below_an_extra_is_found(audit, tmp_path: Path, monkeypatch, capsys):
    install(tmp_path, "top", "License-Expression: MIT", 'Requires-Dist: middle[fast]; python_version >= "3"')
    install(
        tmp_path, "middle", "Classifier: License :: OSI Approved :: BSD License", 'Requires-Dist: deep; extra == "fast"'
    )
    install(tmp_path, "deep", "License: AGPL-3.0", 'Requires-Dist: elsewhere; sys_platform == "nowhere"')
    install(tmp_path, "silent", "Requires-Dist: top")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    wanted = {"runtime": ["top>=0.5"], "dev": ["silent", "top", "gone"]}
    assert audit.list_licences(wanted) == 2
    out = capsys.readouterr().out
    assert "error: deep 1.0 (runtime): AGPL-3.0; " in out and "error: silent 1.0 (dev): not stated; " in out
    assert "runtime: 3 distributions\n" in out and "dev: 2 distributions besides those above\n" in out
    assert "not installed here" in out and "elsewhere" not in out and "BSD License" in out


def test_advisories_count_and_a_service_that_knows_nothing_is_no_good_news(audit, capsys):
    bad = {"name": "old", "version": "1.0", "vulns": [{"id": "PYSEC-1", "fix_versions": ["1.1"]}]}
    good, unknown = {"name": "new", "version": "2.0", "vulns": []}, {"name": "own", "skip_reason": "not found"}
    assert audit.report_advisories([bad, good, unknown]) == 1
    out = capsys.readouterr().out
    assert "error: old 1.0: PYSEC-1, fixed in 1.1\n" in out and "1 for 2 distributions" in out and "about own" in out
    assert audit.report_advisories([unknown]) == 0 and "skipped, the service knows none" in capsys.readouterr().out
