"""The choices a user has, as flags, as keyword arguments and as environment variables. Imports no torch."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, fields
from typing import Any

SWITCH = "SIGHTLINE_MIGRATE"
PREFIX = "SIGHTLINE_MIGRATE_"
# The names of the vendor's own toolkit, so that commands written for it work here too.
VENDOR_SWITCH = "PT_HPU_GPU_MIGRATION"
VENDOR_NAMES = {"fp16_to_bf16": "PT_HPU_CONVERT_FP16_TO_BF16_FOR_MIGRATION", "log": "GPU_MIGRATION_LOG_LEVEL"}
VENDOR_PACKAGE = "habana_frameworks"
TARGETS = ("auto", "cpu", "hpu", "xpu", "mps", "npu")


class MigrateError(RuntimeError):
    """What a user asked for and cannot have; the text says what came, what was expected and what to do."""

    exit_code = 2


@dataclass(frozen=True)
class MigrateOptions:
    """Every field is `--name` on the command line and SIGHTLINE_MIGRATE_NAME in the environment."""

    target: str = "auto"
    """where the work runs: auto, cpu, hpu, xpu, mps, npu, or the name of another PyTorch backend"""
    fp16_to_bf16: bool = False
    """what asks for float16 gets bfloat16; GradScaler is then off"""
    amp: str = "auto"
    """autocast: keep; off; auto = off on a CPU that has no 16-bit arithmetic, kept elsewhere"""
    strict: bool = False
    """a call that cannot be honoured is an error instead of a line in the log"""
    claim: bool = False
    """target cpu: tensors say they are on cuda:0 when the script asks"""
    compile: str = "keep"
    """torch.compile: keep its mode; default = without a mode; off = run as written"""
    cuda_version: str = ""
    """what torch.version.cuda says, e.g. 12.4; empty leaves it alone"""
    capability: str = "8.0"
    """what get_device_capability says"""
    device_count: int = 0
    """how many devices target cpu shows; 0 = LOCAL_WORLD_SIZE, else 1"""
    legacy_load: bool = False
    """torch.load reads whole pickles again, as before torch 2.6; only for checkpoints you trust"""
    log: int = 0
    """0 no log files, 1 one record per call site, 2 also what torch asked itself"""
    log_dir: str = "migrate_log"
    """folder of the log files"""
    syncs: bool = False
    """also list the lines that wait for the device: .item(), .cpu(), .tolist()"""
    quiet: bool = False
    """no table when the script ends; calls that cannot be honoured are told all the same"""

    def __post_init__(self) -> None:
        for name, known in (("amp", ("auto", "keep", "off")), ("compile", ("keep", "default", "off"))):
            if getattr(self, name) not in known:
                raise MigrateError(f"{name}={getattr(self, name)!r} is not known; use one of {', '.join(known)}")
        if not all(part.isdigit() for part in self.capability.split(".")) or self.capability.count(".") != 1:
            raise MigrateError(f"capability={self.capability!r} is no version; write e.g. 8.0")
        if self.device_count < 0:
            raise MigrateError(f"device_count={self.device_count} must not be negative; 0 lets it be derived")

    @classmethod
    def from_keywords(cls, **given: Any) -> MigrateOptions:
        """From keyword arguments, on top of the environment; an unknown name is told with those that are known."""
        names = [field.name for field in fields(cls)]
        unknown = [name for name in given if name not in names]
        if unknown:
            raise MigrateError(f"unknown option {unknown[0]!r}; known: {', '.join(names)}")
        return cls(**{**vars(cls.from_environment()), **given})

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> MigrateOptions:
        environment = os.environ if environment is None else environment
        vendors = not vendor_stack_is_here()
        values: dict[str, Any] = {}
        for field in fields(cls):
            name = PREFIX + field.name.upper()
            text = environment.get(name, "")
            if not text and vendors and field.name in VENDOR_NAMES:
                name = VENDOR_NAMES[field.name]
                text = environment.get(name, "")
            if text:
                values[field.name] = _parse(name, text, type(field.default))
        return cls(**values)

    def write_environment(self, environment: MutableMapping[str, str]) -> None:
        """So that workers, spawned and launched processes start with the same choices."""
        environment[SWITCH] = "1"
        for field in fields(self):
            value = getattr(self, field.name)
            environment[PREFIX + field.name.upper()] = str(int(value)) if isinstance(value, bool) else str(value)


def is_wanted(environment: Mapping[str, str]) -> bool:
    """Whether the environment turns migration on."""
    own = environment.get(SWITCH, "")
    if own:
        return _parse(SWITCH, own, bool)
    vendors = environment.get(VENDOR_SWITCH, "")
    return bool(vendors) and not vendor_stack_is_here() and _parse(VENDOR_SWITCH, vendors, bool)


def vendor_stack_is_here() -> bool:
    """Its variables are then its own business."""
    return importlib.util.find_spec(VENDOR_PACKAGE) is not None


def _parse(name: str, text: str, kind: type) -> Any:
    if kind is bool:
        if text.lower() not in ("0", "1", "true", "false", "on", "off", "yes", "no"):
            raise MigrateError(f"{name}={text} is neither yes nor no; use 1 or 0")
        return text.lower() in ("1", "true", "on", "yes")
    if kind is int:
        if not text.lstrip("-").isdigit():
            raise MigrateError(f"{name}={text} is no whole number")
        return int(text)
    return text
