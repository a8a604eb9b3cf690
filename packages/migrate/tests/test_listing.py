"""`sightline migrate rules`: every name, its class and its effect, from the table that the run uses."""

from __future__ import annotations

import json

import pytest

from sightline_migrate import cli
from sightline_migrate.rules import cuda


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
