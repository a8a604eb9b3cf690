"""The options, as flags, keyword arguments and environment variables. Does not import torch."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, fields
from typing import Any

SWITCH = "SIGHTLINE_MIGRATE"
PREFIX = "SIGHTLINE_MIGRATE_"
# Names of the vendor's own toolkit, so that commands written for it work here too.
VENDOR_SWITCH = "PT_HPU_GPU_MIGRATION"
VENDOR_NAMES = {"fp16_to_bf16": "PT_HPU_CONVERT_FP16_TO_BF16_FOR_MIGRATION", "log": "GPU_MIGRATION_LOG_LEVEL"}
VENDOR_PACKAGE = "habana_frameworks"


def command() -> str:
    """Return what is typed here: where Sightline is installed too, the command is one of its own."""
    found = importlib.util.find_spec("sightline")
    return "sightline migrate" if found is not None and found.origin else "sightline-migrate"


class MigrateError(RuntimeError):
    """A request that cannot be met; the text says what came, what was expected and what to do."""

    exit_code = 2


@dataclass(frozen=True)
class MigrateOptions:
    """All options; each field is `--name` on the command line and SIGHTLINE_MIGRATE_NAME in the environment."""

    target: str = "auto"
    """device to run on: auto, cpu, hpu, xpu, npu, musa, mps, or the name of another PyTorch backend"""
    fp16_to_bf16: bool = False
    """use bfloat16 wherever the script asks for float16"""
    float32: bool = False
    """use float32 wherever the script asks for float16 or bfloat16: fast on a CPU that emulates 16 bits"""
    amp: str = "auto"
    """autocast: keep, off, or auto = in float32 on a CPU that only emulates the 16-bit type, keep elsewhere"""
    strict: bool = False
    """raise an error for a refused call instead of logging it"""
    claim: bool = False
    """target cpu: tensors report cuda:0 as their device to the script"""
    compile: str = "keep"
    """torch.compile: keep its mode; default = without a mode; off = do not compile"""
    cuda_version: str = ""
    """value of torch.version.cuda, e.g. 12.4; empty leaves it unchanged"""
    capability: str = "8.0"
    """value of get_device_capability"""
    device_count: int = 0
    """number of devices that target cpu reports; 0 = LOCAL_WORLD_SIZE, else 1"""
    legacy_load: bool = False
    """let torch.load read whole pickles, even with weights_only=True; only for checkpoints you trust"""
    log: int = 0
    """0 no log files, 1 one record per call site, 2 also questions from torch itself"""
    log_dir: str = "migrate_log"
    """folder for the log files"""
    syncs: bool = False
    """also list lines that wait for the device: .item(), .cpu(), .tolist()"""
    quiet: bool = False
    """print no table when the script ends; refused calls are still printed"""

    def __post_init__(self) -> None:
        for name, known in (("amp", ("auto", "keep", "off")), ("compile", ("keep", "default", "off"))):
            if getattr(self, name) not in known:
                raise MigrateError(f"{name}={getattr(self, name)!r} is not known; use one of {', '.join(known)}")
        if not all(part.isdigit() for part in self.capability.split(".")) or self.capability.count(".") != 1:
            raise MigrateError(f"capability={self.capability!r} is not a version; use e.g. 8.0")
        if self.float32 and self.fp16_to_bf16:
            raise MigrateError("--float32 cannot be combined with --fp16-to-bf16; choose one of them")
        if self.device_count < 0:
            raise MigrateError(f"device_count={self.device_count} must not be negative; 0 means LOCAL_WORLD_SIZE")

    @classmethod
    def from_keywords(cls, **given: Any) -> MigrateOptions:
        """Read keyword arguments on top of the environment; the error for an unknown name lists the known ones."""
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
        """Write all options, so that workers, spawned and launched processes start with the same ones."""
        environment[SWITCH] = "1"
        for field in fields(self):
            value = getattr(self, field.name)
            environment[PREFIX + field.name.upper()] = str(int(value)) if isinstance(value, bool) else str(value)


def is_wanted(environment: Mapping[str, str]) -> bool:
    """Return True if the environment turns migration on."""
    own = environment.get(SWITCH, "")
    if own:
        return _parse(SWITCH, own, bool)
    vendors = environment.get(VENDOR_SWITCH, "")
    return bool(vendors) and not vendor_stack_is_here() and _parse(VENDOR_SWITCH, vendors, bool)


def vendor_stack_is_here() -> bool:
    """Return True if the vendor's own toolkit is installed, which then reads its variables itself."""
    return importlib.util.find_spec(VENDOR_PACKAGE) is not None


def _parse(name: str, text: str, kind: type) -> Any:
    if kind is bool:
        if text.lower() not in ("0", "1", "true", "false", "on", "off", "yes", "no"):
            raise MigrateError(f"{name}={text} is neither yes nor no; use 1 or 0")
        return text.lower() in ("1", "true", "on", "yes")
    if kind is int:
        if not text.lstrip("-").isdigit():
            raise MigrateError(f"{name}={text} is not an integer; use e.g. 2")
        return int(text)
    return text
