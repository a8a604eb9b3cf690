"""Whose code a file is, by its name alone."""

from __future__ import annotations

import os
import sysconfig

import pytest
import torch

from sightline_migrate import zones
from sightline_migrate.zones import MACHINERY, SCRIPT, THROUGH, TORCH

T, S = os.path.dirname(torch.__file__), sysconfig.get_paths()["stdlib"]


@pytest.mark.parametrize(
    ("file", "zone"),
    [
        ("/home/me/train.py", SCRIPT),
        ("<string>", SCRIPT),
        ("/x/site-packages/timm/models/resnet.py", SCRIPT),
        ("/x/dist-packages/triton/runtime/jit.py", MACHINERY),
        ("/x/site-packages/deepspeed/ops/op_builder/all.py", MACHINERY),
        ("/x/site-packages/deepspeed/ops/adam.py", SCRIPT),
        ("/x/site-packages/tritonclient/__init__.py", SCRIPT),
        ("/x/site-packages/typing_extensions.py", THROUGH),
        (f"{T}/nn/modules/linear.py", TORCH),
        (f"{T}/_dynamo/eval_frame.py", MACHINERY),
        (f"{T}/_dynamo/variables/torch.py", SCRIPT),
        (f"{T}/_dynamo/utils.py", TORCH),
        (f"{T}/fx/interpreter.py", TORCH),
        (f"{T}/fx/graph.py", MACHINERY),
        (f"{T}/_ops.py", MACHINERY),
        (f"{T}/_opsets.py", TORCH),
        (f"{T}/distributed/run.py", SCRIPT),
        (f"{T}/distributed/launch.py", TORCH),
        (f"{S}/contextlib.py", THROUGH),
        (f"{S}/ctypes/__init__.py", THROUGH),
        (f"{S}/subprocess.py", THROUGH),
        (f"{S}/importlib/metadata/__init__.py", THROUGH),
        (f"{S}/threading.py", SCRIPT),
        ("<frozen runpy>", THROUGH),
        (f"{os.path.dirname(zones.__file__)}/rules/cuda.py", THROUGH),
        ("<eval_with_key>.3 from a", TORCH),
        ("/tmp/torchinductor_me/ab/cab.py", MACHINERY),
        ("/cache/of/inductor/cab.py", MACHINERY),
        ("/cache/of/inductor2/cab.py", SCRIPT),
    ],
)
def test_the_zone_of_a_file(file: str, zone: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/cache/of/inductor/")
    monkeypatch.delitem(zones._zones, file, raising=False)
    assert zones.zone_of(file) == zone == zones._zones[file]
    monkeypatch.delitem(zones._zones, file, raising=False)


@pytest.mark.parametrize(
    ("file", "users", "library"),
    [
        ("/home/me/train.py", True, True),
        ("/x/site-packages/timm/models/resnet.py", False, True),
        (f"{T}/nn/modules/linear.py", False, False),
        (f"{T}/distributed/run.py", False, False),
        (f"{S}/threading.py", False, False),
        ("<eval_with_key>.7", False, False),
    ],
)
def test_files_of_the_user_and_of_libraries(file: str, users: bool, library: bool):
    assert (zones.is_users(file), zones.is_a_library(file)) == (users, library)


def _called(file: str, inside: str) -> zones.Site:
    """The user's line where code of one file calls code of another, which asks."""
    names: dict[str, object] = {"zones": zones}
    exec(compile("def ask():\n    return zones.user_site(zones._getframe())\n", inside, "exec"), names)
    exec(compile("\n\ndef call():\n    return ask()\n", file, "exec"), names)
    return names["call"]()  # type: ignore[operator]


def test_the_users_line_is_the_nearest_outside_of_installed_packages():
    assert _called("/home/me/train.py", "/x/site-packages/timm/a.py") == ("/home/me/train.py", 4, "call")
    assert _called("/home/me/train.py", "/home/me/model.py") == ("/home/me/model.py", 2, "ask")
    assert str(_called("/x/site-packages/timm/b.py", f"{T}/nn/functional.py")).startswith(__file__)
