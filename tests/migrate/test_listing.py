"""`sightline migrate rules`: every name, its class and its effect, from the table that the run uses; and the page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from sightline_migrate import cli
from sightline_migrate.reporting import listing
from sightline_migrate.rules import cuda

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migration_rules.md"


def test_one_name(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["rules", "is_initialized"]) == 0
    assert capsys.readouterr().out == "torch.cuda.is_initialized  exact: True\n"
    assert cli.main(["rules", "fusedlamb", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["rules"]
    assert found["name"].startswith("apex.optimizers") and found["class"] == "adapted"
    assert cli.main(["rules", "torch.wonder"]) == 2
    assert "no rule for 'torch.wonder'" in capsys.readouterr().err


def test_every_public_name_of_torch_cuda_is_listed(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["rules"]) == 0
    names = {line.split("  ")[0] for line in capsys.readouterr().out.splitlines()}
    assert {name for name in cuda.public_names() if name not in names} == set()


def test_page_is_what_the_command_writes():
    """Other releases of torch have a few other names; what both have is the same."""
    written, now = PAGE.read_text(encoding="utf-8"), listing.page(listing.known_rules()) + "\n"
    version = re.search(r"for torch (\d+\.\d+);", written)
    if version is not None and torch.__version__.startswith(version[1] + "."):
        assert written == now, f"{listing.COMMAND} > docs/migration_rules.md"
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
