"""Options from keywords and from the environment, under our names and under the vendor's."""

from __future__ import annotations

import os

import pytest

from sightline_migrate import options
from sightline_migrate.options import MigrateError, MigrateOptions, is_wanted

SWITCHES = [
    ({}, False),
    ({"SIGHTLINE_MIGRATE": "1"}, True),
    ({"SIGHTLINE_MIGRATE": "0"}, False),
    ({"PT_HPU_GPU_MIGRATION": "1"}, True),
    ({"PT_HPU_GPU_MIGRATION": "0"}, False),
    ({"SIGHTLINE_MIGRATE": "0", "PT_HPU_GPU_MIGRATION": "1"}, False),
]


@pytest.mark.parametrize(("environment", "expected"), SWITCHES, ids=str)
def test_switch(environment: dict[str, str], expected: bool):
    assert is_wanted(environment) is expected


def test_vendors_names_are_left_to_the_vendors_stack(monkeypatch: pytest.MonkeyPatch):
    values = {"PT_HPU_CONVERT_FP16_TO_BF16_FOR_MIGRATION": "1", "GPU_MIGRATION_LOG_LEVEL": "1"}
    found = MigrateOptions.from_environment(values)
    assert found.fp16_to_bf16 and found.log == 1
    monkeypatch.setattr(options, "VENDOR_PACKAGE", "json")  # any package that can be imported
    found = MigrateOptions.from_environment(values)
    assert not found.fp16_to_bf16 and found.log == MigrateOptions().log
    assert not is_wanted({"PT_HPU_GPU_MIGRATION": "1"}) and is_wanted({"SIGHTLINE_MIGRATE": "1"})


def test_environment_carries_every_option():
    given = MigrateOptions(
        target="cpu", fp16_to_bf16=True, amp="off", strict=True, device_count=3, cuda_version="12.4", log=2
    )
    written: dict[str, str] = {}
    given.write_environment(written)
    assert is_wanted(written) and MigrateOptions.from_environment(written) == given
    assert all(name.startswith("SIGHTLINE_MIGRATE") for name in written)


def test_keywords_stand_above_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(os.environ, "SIGHTLINE_MIGRATE_AMP", "off")
    assert MigrateOptions.from_keywords().amp == "off" and MigrateOptions.from_keywords(amp="keep").amp == "keep"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"SIGHTLINE_MIGRATE_STRICT": "maybe"}, "SIGHTLINE_MIGRATE_STRICT=maybe is neither yes nor no; use 1 or 0"),
        ({"SIGHTLINE_MIGRATE_DEVICE_COUNT": "two"}, "SIGHTLINE_MIGRATE_DEVICE_COUNT=two is not an integer; use e.g. 2"),
        ({"SIGHTLINE_MIGRATE_CAPABILITY": "ampere"}, "capability='ampere' is not a version; use e.g. 8.0"),
        ({"SIGHTLINE_MIGRATE_DEVICE_COUNT": "-1"}, "device_count=-1 must not be negative"),
        ({"SIGHTLINE_MIGRATE_COMPILE": "fast"}, "compile='fast' is not known; use one of keep, default, off"),
    ],
    ids=str,
)
def test_wrong_values_are_told(environment: dict[str, str], message: str):
    with pytest.raises(MigrateError, match=message):
        MigrateOptions.from_environment(environment)
