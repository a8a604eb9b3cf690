"""`make audit`: the licences of all that Sightline needs, then known vulnerabilities of these versions.

The licences come from the metadata of what is installed, followed from pyproject.toml; GPL and AGPL fail, and so does a
missing licence. pip-audit finds the vulnerabilities; it is not a dependency, and needs an advisory service.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
FORBIDDEN = re.compile(r"(?<![A-Za-z])A?GPL|(?<!Lesser )(?<!Library )General Public License", re.IGNORECASE)
# What metadata do not say, with the reason why it is that.
STATED = {"cuda-toolkit": "LicenseRef-NVIDIA-Proprietary (holds no files; it requires the nvidia-* wheels)"}
UNSTATED = "not stated"
ABSENT = "not installed here"


def licence_of(found: metadata.Distribution) -> str:
    """Return what the metadata say, from the most exact field to the least exact."""
    return next((each.strip() for each in _statements(found) if each.strip()), UNSTATED)


def _statements(found: metadata.Distribution) -> Iterator[str]:
    about = found.metadata
    yield about.get("License-Expression") or STATED.get(canonicalize_name(found.name), "")
    classifiers = [each for each in about.get_all("Classifier") or () if each.startswith("License ::")]
    yield " AND ".join(each.split(" :: ")[-1] for each in classifiers)
    yield next(iter((about.get("License") or "").strip().splitlines()), "")
    for name in about.get_all("License-File") or ():  # its title
        yield next(iter((found.read_text(f"licenses/{name}") or "").strip().splitlines()), "")


def is_forbidden(licence: str) -> bool:
    """Whether no choice is left but GPL or AGPL; an expression in brackets counts as a whole, for a person to judge."""
    choices = [licence] if "(" in licence else re.split(r"\bOR\b", licence)
    return all(FORBIDDEN.search(choice) for choice in choices)


def groups(project: Path) -> dict[str, list[str]]:
    """Return the requirements of each group: runtime, the extras, and dev last."""
    table = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    extras = {f"extra {name}": needed for name, needed in table["optional-dependencies"].items() if name != "dev"}
    return {"runtime": table["dependencies"], **extras, "dev": table["optional-dependencies"]["dev"]}


def needed(requirements: Iterable[str], seen: set[str]) -> Iterator[tuple[str, str, str]]:
    """Yield (name, version, licence) of all that these need, also indirectly; `seen` holds names with their extras."""
    for text in requirements:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        key = f"{name}[{','.join(sorted(requirement.extras))}]"
        if key in seen:
            continue
        is_new = not any(each.startswith(f"{name}[") for each in seen)
        seen.add(key)
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            yield name, "", ABSENT
            continue
        if is_new:
            yield name, found.version, licence_of(found)
        yield from needed(_applying(found.requires or (), requirement.extras), seen)


def _applying(requirements: Iterable[str], extras: set[str]) -> list[str]:
    """Those whose markers hold on this machine with these extras."""
    parsed = [Requirement(each) for each in requirements]
    return [
        str(each)
        for each in parsed
        if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in extras or {""})
    ]


def list_licences(wanted: Mapping[str, Iterable[str]]) -> int:
    """Print a table per group; return how many licences are forbidden or unknown."""
    seen: set[str] = set()
    refused = []
    for group, requirements in wanted.items():
        rows = sorted(needed(requirements, seen))
        print(f"{group}: {len(rows)} distributions" + ("" if group == "runtime" else " besides those above"))
        for name, version, licence in rows:
            print(f"  {name:28} {version:14} {licence}")
            if licence == UNSTATED or is_forbidden(licence):
                refused.append(f"{name} {version} ({group}): {licence}")
    for each in refused:
        print(f"error: {each}; GPL and AGPL cannot be used: replace it, or state its licence in {Path(__file__).name}")
    return len(refused)


def find_advisories() -> int:
    """Let pip-audit look at what is installed; return the number of known vulnerabilities, 0 if it cannot be asked."""
    command = shutil.which("pip-audit", path=sysconfig.get_path("scripts")) or shutil.which("pip-audit")
    if command is None:
        print("advisories: skipped, there is no pip-audit; `pipx install pip-audit`, then `make audit` again")
        return 0
    options = ["--format", "json", "--progress-spinner", "off", "--path", sysconfig.get_path("purelib")]
    done = subprocess.run([command, *options], capture_output=True, text=True, check=False)
    try:
        found = json.loads(done.stdout)["dependencies"]
    except ValueError:
        said = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        print(f"advisories: skipped, pip-audit cannot ask its service: {said[0][:200]}")
        return 0
    return report_advisories(found)


def report_advisories(found: Sequence[Mapping[str, Any]]) -> int:
    """Print a line per vulnerability, and how much was looked at: a mirror may know no advisories at all."""
    known = {each["name"]: each for each in found if "vulns" in each}
    unknown = [each["name"] for each in found if "vulns" not in each]
    if not known:
        print(f"advisories: skipped, the service knows none of these {len(unknown)} distributions; a mirror may not")
        return 0
    lines = [
        f"error: {name} {each['version']}: {one['id']}, fixed in {', '.join(one['fix_versions']) or 'no version'}"
        for name, each in known.items()
        for one in each["vulns"]
    ]
    print("\n".join([*lines, f"advisories: {len(lines)} for {len(known)} distributions"]))
    if unknown:
        print(f"advisories: nothing is known about {', '.join(unknown)}")
    return len(lines)


if __name__ == "__main__":
    counts = list_licences(groups(PROJECT)), find_advisories()
    sys.exit(1 if any(counts) else 0)
