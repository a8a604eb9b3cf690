"""Implicit placement: torch.load, generators, the default device and the default tensor type."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import serialization
from torch.compiler import is_dynamo_compiling

from sightline_migrate import patching, zones
from sightline_migrate.reporting import record
from sightline_migrate.rules.table import Rule, dressed
from sightline_migrate.virtual import classes, places

if TYPE_CHECKING:
    from sightline_migrate.session import Session

PRIORITY = 17  # torch's own reader of CUDA storages has 20; the lowest number wins


def rules() -> list[Rule]:
    of_target = "on the target"
    return [
        Rule("torch.Generator", "exact", classes.generator, of_target),
        Rule("torch.utils._device.DeviceContext.__init__", "exact", dressed(_make_context), of_target),
        Rule("torch.get_default_device", "adapted", dressed(_make_get_default), "shown as cuda"),
        Rule("torch.set_default_tensor_type", "adapted", dressed(_make_tensor_type), "its dtype, on the target"),
        LOAD,
    ]


def _make_load(rule: Rule, original: Any, session: Session) -> Any:
    """Let a map_location that names cuda also match files written on the target, which carry its name.

    With --legacy-load, weights_only=True of the script itself is dropped, too.
    """
    is_cpu, legacy = session.target.is_cpu, session.options.legacy_load
    if is_cpu and not legacy:
        return original
    get, name = session.devices.get, session.target.name

    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if legacy and kwargs.get("weights_only"):
            record.hit(rule, (), kwargs, "weights_only=False because of --legacy-load")
            kwargs["weights_only"] = False
        if is_cpu:
            return original(f, map_location, *args, **kwargs)
        if isinstance(map_location, dict):
            map_location = {get(here): there for here, there in map_location.items()} | map_location
        elif callable(map_location):
            place = map_location

            def map_location(storage: Any, location: str) -> Any:
                is_target = location.split(":")[0] == name
                return place(storage, "cuda" + location[len(name) :] if is_target else location)

        return original(f, map_location, *args, **kwargs)

    return patching.dress(load, original, rule.name)


LOAD = Rule("torch.load", "exact", _make_load, "storages tagged cuda are loaded to the target")


def setup(session: Session) -> None:
    """Register a reader for storages tagged cuda; torch.load asks its readers for every storage.

    This covers map_location as a string, a device or a dict, and GPU checkpoints loaded without one. A function as
    map_location calls storage.cuda(), which has its own rule.
    """

    def tag(storage: Any) -> None:
        return None

    def restore(storage: Any, location: str) -> Any:
        if not (location == "cuda" or location.startswith("cuda:")):
            return None
        record.hit(LOAD, (location,))
        there = session.devices.get(location)
        if session.target.is_cpu:
            setattr(storage, places.MARK, places.DEVICE)
            return storage
        return storage.to(device=torch.device(there))

    serialization.register_package(PRIORITY, tag, restore)
    entry = next(each for each in serialization._package_registry if each[2] is restore)
    session.undo.on_undo(lambda: serialization._package_registry.remove(entry))


def _make_context(rule: Rule, original: Any, session: Session) -> Any:
    """Map the device of set_default_device and `with torch.device("cuda"):`; C++ enters both through this class."""

    def __init__(self: Any, device: Any) -> None:
        there = session.devices.get(device)
        if there is not device:
            record.hit(rule, (device,))
        original(self, there)
        setattr(self, places.MARK, places.asked(device, there is not device)[0])

    return __init__


def _make_get_default(rule: Rule, original: Any, session: Session) -> Any:
    if not session.target.tells_apart:
        return original

    def get_default_device() -> torch.device:
        real = original()
        if real.type != session.target.name or is_dynamo_compiling() or zones.zone() != zones.SCRIPT:
            return real
        record.hit(rule)
        return torch.device("cuda", real.index or 0)

    return get_default_device


def _make_tensor_type(rule: Rule, original: Any, session: Session) -> Any:
    is_set = False

    def set_default_tensor_type(t: Any, /) -> None:
        nonlocal is_set
        name = t.rpartition(".")[2] if isinstance(t, str) else t.__name__
        is_cuda = t.startswith("torch.cuda.") if isinstance(t, str) else getattr(t, "is_cuda_type", False)
        if not is_cuda:
            if is_set:
                torch.set_default_device(None)
                is_set = False
            session.default_place = places.HOST
            original(t)
            return
        record.hit(rule, (t,))
        torch.set_default_dtype(getattr(torch, name).dtype)
        session.default_place = places.DEVICE
        if not session.target.is_cpu:
            torch.set_default_device(session.target.name)
            is_set = True

    return set_default_tensor_type
