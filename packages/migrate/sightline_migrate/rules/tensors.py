"""Move tensors, modules and storages, and report their devices."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.nn import parameter

from sightline_migrate import patching, zones
from sightline_migrate.reporting import record
from sightline_migrate.rules.conversion import Conversions, convert_of, converts_here, dtype_of
from sightline_migrate.rules.makers import maps
from sightline_migrate.rules.table import Maker, Rule, dressed, in_doubt
from sightline_migrate.targets import HOST_MEMORY
from sightline_migrate.virtual import places

if TYPE_CHECKING:
    from sightline_migrate.session import Session


def rules() -> list[Rule]:
    moved, shown = "moved to the target", "shown as cuda"
    return [
        Rule("torch.Tensor.to", "exact", dressed(_make_to), moved),
        Rule("torch.Tensor.cuda", "exact", dressed(_make_cuda), moved),
        Rule("torch.Tensor.cpu", "adapted", dressed(_make_cpu), COPIED, targets=("cpu",)),
        *(
            Rule(f"torch.{kind}.{name}", "converted", dressed(make), "the type that an option asks for")
            for kind, make in (("Tensor", _make_half), ("nn.Module", _make_module_half))
            for name in ("half", "bfloat16")
        ),
        Rule("torch.Tensor.type", "adapted", dressed(_make_type), "converted and moved to the target"),
        Rule("torch.Tensor.type_as", "exact", dressed(_make_type_as), "moved to the other's place", targets=("cpu",)),
        Rule("torch.Tensor.pin_memory", "ignored", dressed(_make_not_pinned), NOT_PINNED, targets=HOST_MEMORY),
        Rule("torch.Tensor.pin_memory", "exact", dressed(_make_pin), "pinned for the target"),
        Rule("torch.Tensor.is_pinned", "adapted", dressed(_make_is_pinned), "called without a device"),
        Rule("torch.Tensor.record_stream", "ignored", dressed(_make_nothing), NO_STREAMS, targets=HOST_MEMORY),
        Rule(f"{FUNCTIONAL}.FunctionalTensor.cuda", "exact", dressed(_make_traced_cuda), moved, module=FUNCTIONAL),
        Rule("torch.nn.Module.to", "exact", dressed(_make_module_to), moved),
        Rule("torch.nn.Module.cuda", "exact", dressed(_make_module_cuda), moved),
        Rule("torch.nn.Module.cpu", "adapted", dressed(_make_module_cpu), COPIED, targets=("cpu",)),
        Rule("torch.nn.Module._apply", "exact", dressed(_make_module_apply), STAYS, targets=("cpu",)),
        Rule("torch.nn.Module.to_empty", "exact", dressed(_make_module_to_empty), "created on the target"),
        Rule(f"{RNN}.PackedSequence.cpu", "adapted", dressed(_make_packed_cpu), COPIED, targets=("cpu",)),
        Rule("torch.UntypedStorage.to", "exact", maps(), moved),
        *(
            Rule(f"torch.{kind}.__deepcopy__", "exact", dressed(_make_deepcopy), COPY_THERE, targets=("cpu",))
            for kind in ("Tensor", "nn.Parameter")
        ),
        Rule("torch.UntypedStorage.__new__", "exact", _make_storage_new, "created on the target"),
        Rule("torch.UntypedStorage.pin_memory", "ignored", dressed(_make_itself), NOT_PINNED, targets=HOST_MEMORY),
        Rule("torch.TypedStorage.pin_memory", "ignored", dressed(_make_itself), NOT_PINNED, targets=HOST_MEMORY),
        Rule("torch.set_default_dtype", "converted", dressed(_make_default_dtype), "the type that an option asks for"),
        Rule("torch.Tensor.device", "adapted", _make_device, shown),
        Rule("torch.Tensor.is_cuda", "adapted", _shows(lambda tensor, index: True, _place_of_tensor), shown),
        Rule("torch.Tensor.is_cpu", "adapted", _shows(lambda tensor, index: False, _place_of_tensor, True), shown),
        Rule("torch.Tensor.get_device", "adapted", _shows(lambda tensor, index: index, _place_of_tensor), shown),
        *(
            Rule(f"torch.{kind}.{name}", "adapted", _shows(what, _place_of_storage), shown)
            for kind in ("UntypedStorage", "TypedStorage")
            for name, what in (("device", _cuda_device), ("is_cuda", lambda storage, index: True))
        ),
    ]


def setup(session: Session) -> None:
    """Let parameters of lazy modules be moved: they know the methods of torch that need no data by identity. On target
    cpu let a device copy to itself, as other immutable values do: a copied model must know its place."""
    lazy = parameter.UninitializedTensorMixin  # type: ignore[attr-defined]
    moves = [torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.cpu, torch.Tensor.half]
    session.undo.set(lazy, "_allowed_methods", [*lazy._allowed_methods, *moves])
    if session.target.is_cpu:
        by_type: Any = copy._deepcopy_dispatch  # type: ignore[attr-defined]
        session.undo.set_item(by_type, torch.device, lambda device, memo: device)


COPY_THERE = "the copy is where the original is"
STAYS = "the result is where the original was"
COPIED = "copied, as from a GPU: a saved tensor must not change with the weights"
NOT_PINNED = "unchanged: the target uses host memory"
NO_STREAMS = "no effect: the target has no streams that could free it early"
FUNCTIONAL = "torch._subclasses.functional_tensor"
RNN = "torch.nn.utils.rnn"
PLACES = (str, torch.device, int)
CPU = torch.device("cpu")
MOVE = torch._C.TensorBase.to  # the original: ours would count the move twice


def _make_to(rule: Rule, original: Any, session: Session) -> Any:
    table, slow = session.devices.table, session.devices.get
    convert, conversions, is_cpu = convert_of(session), Conversions(rule), session.target.is_cpu

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        device: Any = args[0] if args else kwargs.get("device")
        given, named, place = args, kwargs, None
        is_named = is_read = is_converted = is_mapped = False
        if convert is not None and converts_here():
            dtype = dtype_of(args, kwargs)
            wanted = convert(dtype)
            is_converted = wanted is not dtype
            if is_converted:
                if not is_dynamo_compiling():
                    conversions.hit(dtype, wanted, args, kwargs)
                given = tuple(wanted if value is dtype else value for value in args)
                if "dtype" in kwargs:
                    named = kwargs | {"dtype": wanted}
        if type(device) in PLACES:
            if is_dynamo_compiling():
                there = slow(device)
            else:
                there = table.get(device, device)
                is_mapped = there is not device and not is_converted
                if is_cpu:
                    place, is_named = places.asked(device, there is not device)
                    is_read = device is not places.ANYWHERE and places.is_of_a_tensor(device)
            if there is not device:
                if args:
                    given = (there, *given[1:])
                else:
                    named = named | {"device": there}
        elif is_cpu and (isinstance(device, torch.Tensor) or "tensor" in kwargs) and not is_dynamo_compiling():
            place, is_read = places.find_place(kwargs.get("tensor", device)), True
        moved = original(self, *given, **named)
        if place is not None:
            apart, doubt = places.move(self, moved, place, is_named)
            is_copied = is_named and place == places.HOST and apart is not moved
            if is_mapped or is_copied or (doubt and zones.zone() == zones.SCRIPT):
                record.hit(in_doubt(rule, doubt), args, kwargs, "" if doubt or not is_copied else COPIED)
            return apart
        if is_mapped:
            record.hit(rule, args, kwargs)
        elif is_read and places.shares(self, moved) and zones.zone() == zones.SCRIPT:
            record.hit(in_doubt(rule, places.SHARED_IN_DOUBT), args, kwargs)
        return moved

    return to


def _make_type_as(rule: Rule, original: Any, session: Session) -> Any:
    def type_as(self: Any, other: Any) -> Any:
        moved = original(self, other)
        if is_dynamo_compiling():
            return moved
        place = places.find_place(other)
        apart, doubt = places.move(self, moved, place, is_named=False)
        if place is None and places.shares(self, moved):
            doubt = places.SHARED_IN_DOUBT
        if apart is not moved or (doubt and zones.zone() == zones.SCRIPT):
            record.hit(in_doubt(rule, doubt), (other,))
        return apart

    return type_as


def _make_cpu(rule: Rule, original: Any, session: Session) -> Any:
    def cpu(self: Any, *args: Any, **kwargs: Any) -> Any:
        moved = original(self, *args, **kwargs)
        zone = zones.MACHINERY if is_dynamo_compiling() else zones.zone()
        if zone == zones.MACHINERY:
            return moved
        apart, doubt = places.move(self, moved, places.HOST, is_named=zone == zones.SCRIPT)
        if apart is not moved or (doubt and zone == zones.SCRIPT):
            record.hit(in_doubt(rule, doubt), (), kwargs)
        return apart

    return cpu


def _make_cuda(rule: Rule, original: Any, session: Session) -> Any:
    slow, name, is_cpu = session.devices.get, session.devices.name, session.target.is_cpu

    def cuda(
        self: Any, device: Any = None, non_blocking: bool = False, memory_format: Any = torch.preserve_format
    ) -> Any:
        there = name if device is None else slow(device)
        if is_dynamo_compiling():
            return MOVE(self, there, non_blocking=non_blocking, memory_format=memory_format)
        there = places.ANYWHERE if is_cpu else there
        moved, doubt = MOVE(self, there, non_blocking=non_blocking, memory_format=memory_format), ""
        if is_cpu:
            moved, doubt = places.move(self, moved, places.DEVICE)
        record.hit(in_doubt(rule, doubt), () if device is None else (device,))
        return moved

    return cuda


def _make_traced_cuda(rule: Rule, original: Any, session: Session) -> Any:
    """Replace the traced tensor's own method, which asks torch.cuda for the current device."""
    slow, name = session.devices.get, session.devices.name

    def cuda(self: Any, device: Any = None, *args: Any, **kwargs: Any) -> Any:
        there = name if device is None else slow(device)
        return self.to(there, *args, **kwargs) if args else self.to(device=there, **kwargs)

    return cuda


def _make_half(rule: Rule, original: Any, session: Session) -> Any:
    """Convert Tensor.half and Tensor.bfloat16."""
    asked = getattr(torch, rule.name.rpartition(".")[2])
    convert, conversions = convert_of(session), Conversions(rule)
    if convert is None or convert(asked) is asked:
        return original
    used = convert(asked)

    def half(self: Any, memory_format: Any = torch.preserve_format) -> Any:
        if not converts_here():
            return original(self, memory_format=memory_format)
        if not is_dynamo_compiling():
            conversions.hit(asked, used)
        return MOVE(self, used, memory_format=memory_format)

    return half


def _make_module_half(rule: Rule, original: Any, session: Session) -> Any:
    """Convert Module.half and Module.bfloat16, counted once, not per parameter."""
    asked = getattr(torch, rule.name.rpartition(".")[2])
    convert, conversions = convert_of(session), Conversions(rule)
    if convert is None or convert(asked) is asked:
        return original
    used = convert(asked)

    def half(self: Any) -> Any:
        if not is_dynamo_compiling():
            conversions.hit(asked, used)
        return self._apply(lambda tensor: MOVE(tensor, used) if tensor.is_floating_point() else tensor)

    return half


def _make_type(rule: Rule, original: Any, session: Session) -> Any:
    name, shows = session.devices.name, session.shows_cuda
    convert, conversions, is_cpu = convert_of(session), Conversions(rule), session.target.is_cpu

    def type_(self: Any, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is None:
            text = original(self)
            if shows and not is_dynamo_compiling() and self.is_cuda and zones.zone() == zones.SCRIPT:
                record.hit(rule)
                return "torch.cuda." + text.rpartition(".")[2]
            return text
        wanted, is_cuda = _type_asked(dtype)
        used = convert(wanted) if convert is not None and converts_here() else wanted
        if used is not wanted and not is_dynamo_compiling():
            conversions.hit(wanted, used, (dtype,))
        if is_cuda:
            is_placed = is_cpu and not is_dynamo_compiling()
            moved, doubt = MOVE(self, places.ANYWHERE if is_placed else name, used, non_blocking=non_blocking), ""
            if is_placed:
                moved, doubt = places.move(self, moved, places.DEVICE)
            if used is wanted and not is_dynamo_compiling():
                record.hit(in_doubt(rule, doubt), (dtype,))
            return moved
        return original(self, dtype if used is wanted else used, non_blocking, **kwargs)

    return type_


def _type_asked(dtype: Any) -> tuple[Any, bool]:
    """Return (torch.float16, True) for "torch.cuda.HalfTensor" and the like; the second is True for CUDA types."""
    if isinstance(dtype, torch.dtype):
        return dtype, False
    if isinstance(dtype, str) and dtype.startswith("torch."):
        found = getattr(torch, dtype.rpartition(".")[2], None)
        return getattr(found, "dtype", dtype), dtype.startswith("torch.cuda.")
    return getattr(dtype, "dtype", dtype), bool(getattr(dtype, "is_cuda_type", False))


def _make_itself(rule: Rule, original: Any, session: Session) -> Any:
    def itself(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_dynamo_compiling():
            record.hit(rule, args, kwargs)
        return self

    return itself


def _make_not_pinned(rule: Rule, original: Any, session: Session) -> Any:
    """Return the tensor itself; on target cpu remember that it is on the host: a GPU pins no other."""
    itself, is_cpu = _make_itself(rule, original, session), session.target.is_cpu

    def pin_memory(self: Any, device: Any = None) -> Any:
        if is_cpu and not is_dynamo_compiling() and places.place_of(self) is None:
            places.put(self, places.HOST)
        return itself(self) if device is None else itself(self, device)

    return pin_memory


def _make_pin(rule: Rule, original: Any, session: Session) -> Any:
    if session.target.name in HOST_MEMORY:
        return original

    def pin_memory(self: Any, device: Any = None) -> Any:
        if device is not None:
            record.hit(rule, (device,))
        return original(self)

    return pin_memory


def _make_nothing(rule: Rule, original: Any, session: Session) -> Any:
    def nothing(self: Any, *args: Any, **kwargs: Any) -> None:
        if not is_dynamo_compiling():
            record.hit(rule, args, kwargs)

    return nothing


def _make_is_pinned(rule: Rule, original: Any, session: Session) -> Any:
    host = session.target.name in HOST_MEMORY

    def is_pinned(self: Any, device: Any = None) -> bool:
        if device is not None and not is_dynamo_compiling():
            record.hit(rule, (device,))
        return False if host else original(self)

    return is_pinned


def _make_module_cuda(rule: Rule, original: Any, session: Session) -> Any:
    slow, name, is_cpu = session.devices.get, session.devices.name, session.target.is_cpu

    def cuda(self: Any, device: Any = None) -> Any:
        there = name if device is None else slow(device)
        if is_dynamo_compiling():
            return self._apply(lambda tensor: MOVE(tensor, there))
        record.hit(rule, () if device is None else (device,))
        return _place_module(self, places.DEVICE) if is_cpu else self._apply(lambda tensor: MOVE(tensor, there))

    return cuda


def _make_module_cpu(rule: Rule, original: Any, session: Session) -> Any:
    def cpu(self: Any) -> Any:
        if is_dynamo_compiling():
            return original(self)
        if _is_away_from(self, places.HOST):
            record.hit(rule)
        return _place_module(self, places.HOST, is_named=False)

    return cpu


def _make_packed_cpu(rule: Rule, original: Any, session: Session) -> Any:
    """Name the device: the original leaves it out if `.data` reports cpu."""

    def cpu(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return original(self, *args, **kwargs)
        moved = self.to(*args, **(kwargs | {"device": "cpu"}))
        if moved is not self:
            record.hit(rule, args, kwargs)
        return moved

    return cpu


def _make_module_to(rule: Rule, original: Any, session: Session) -> Any:
    """Copy parameters and buffers between host and device, as a GPU does: a Parameter stays the same object."""
    is_cpu, get = session.target.is_cpu, session.devices.get
    convert, conversions = convert_of(session), Conversions(rule)

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_cpu and "tensor" in kwargs:
            args = (kwargs.pop("tensor"), *args)
        device, dtype = args[0] if args else kwargs.get("device"), dtype_of(args, kwargs)
        if is_cpu and isinstance(device, torch.Tensor):  # its device and dtype
            args, dtype = (device.device, device.dtype, *args[1:]), device.dtype
            device = args[0]
        there, used = get(device), dtype if convert is None else convert(dtype)
        is_placed = is_cpu and type(there) in PLACES and there in ("cpu", CPU) and not is_dynamo_compiling()
        if not is_dynamo_compiling():
            if used is not dtype:
                conversions.hit(dtype, used, args, kwargs)
            elif there is not device:
                record.hit(rule, args, kwargs)
        if is_placed:
            place, is_named = places.asked(device, there is not device)
            if there is device and place == places.HOST and _is_away_from(self, place):
                record.hit(rule, args, kwargs, COPIED)
            _place_module(self, place, is_named and place == places.DEVICE)
            if dtype is None and len(args) + len(kwargs) == 1:
                return self
        if used is not dtype:
            args = tuple(used if value is dtype else value for value in args)
            kwargs |= {"dtype": used} if "dtype" in kwargs else {}
        if is_placed:  # done: torch would parse the name of the target as that of the host
            args = (None, *args[1:]) if args else args
            kwargs |= {} if args else {"device": None}
        elif there is not device:
            args = (there, *args[1:]) if args else args
            kwargs |= {} if args else {"device": there}
        return original(self, *args, **kwargs)

    return to


def _make_module_to_empty(rule: Rule, original: Any, session: Session) -> Any:
    mapped = maps()(rule, original, session)
    is_cpu, get = session.target.is_cpu, session.devices.get

    def to_empty(self: Any, *, device: Any, recurse: bool = True) -> Any:
        made = mapped(self, device=device, recurse=recurse)
        if is_cpu and not is_dynamo_compiling():
            place, _ = places.asked(device, get(device) is not device)
            self._apply(lambda tensor: places.put(tensor, place), recurse=recurse)
        return made

    return to_empty


def _make_module_apply(rule: Rule, original: Any, session: Session) -> Any:
    """Keep the place of what is computed from a module's tensors: `.half()`, `.float()`, `._apply(function)`."""

    def _apply(self: Any, fn: Any, recurse: bool = True) -> Any:
        if is_dynamo_compiling() or getattr(fn, "keeps_place", False):
            return original(self, fn, recurse)

        def kept(tensor: Any) -> Any:
            made = fn(tensor)
            if made is not tensor and places.place_of(made) is None:
                places.put(made, places.place_of(tensor))
            return made

        kept.keeps_place = True  # type: ignore[attr-defined]
        for weight in self.parameters(recurse):
            if weight.grad is not None:  # computed where its parameter is, but not marked
                places.put(weight.grad, places.place_of(weight))
        return original(self, kept, recurse)

    return _apply


def _place_module(module: Any, place: str | None, is_named: bool = True) -> Any:
    """Move a module; a buffer that it computed, of which nothing is known, is where its other tensors are."""
    is_named = is_named or (place is not None and _is_away_from(module, place))
    return module._apply(lambda tensor: places.move(tensor, MOVE(tensor, places.ANYWHERE), place, is_named)[0])


def _is_away_from(module: Any, place: str) -> bool:
    other = places.HOST if place == places.DEVICE else places.DEVICE
    return any(places.place_of(tensor) == other for tensor in (*module.parameters(), *module.buffers()))


def _make_deepcopy(rule: Rule, original: Any, session: Session) -> Any:
    """Keep the place of a copied model: its weights are on the device without a second `.cuda()`."""

    def __deepcopy__(self: Any, memo: Any) -> Any:
        return places.put(original(self, memo), places.place_of(self))

    return __deepcopy__


def _make_storage_new(rule: Rule, original: Any, session: Session) -> Any:
    table = session.devices.table

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if type(device) in PLACES and device in table:
            record.hit(rule, args, kwargs)
            kwargs["device"] = table[device]
        return torch._C.StorageBase.__new__(cls, *args, **kwargs)

    return staticmethod(new)


def _make_default_dtype(rule: Rule, original: Any, session: Session) -> Any:
    convert, conversions = convert_of(session), Conversions(rule)
    if convert is None:
        return original

    def set_default_dtype(d: Any, /) -> None:
        used = convert(d) if converts_here() else d
        if used is not d:
            conversions.hit(d, used, (d,))
        original(used)

    return set_default_dtype


def _shown(session: Session, get: Any) -> Any:
    """Return a function: tensor -> CUDA index as the script sees it, or None to report the real device."""
    name, claims = session.target.name, session.options.claim

    def index(tensor: Any) -> int | None:
        real = get(tensor)
        if real.type != name or is_dynamo_compiling() or zones.zone() != zones.SCRIPT:
            return None
        if session.target.is_cpu:
            return session.runtime.current_device() if claims else None
        return real.index or 0

    return index


def _shows(what: Callable[[Any, int], Any], real: Callable[[Any], torch.device], needs_claim: bool = False) -> Maker:
    """Replace a property or method that reports a device: the script sees `what(it, index)`, others the real one."""

    def make(rule: Rule, original: Any, session: Session) -> Any:
        if not session.shows_cuda or (needs_claim and not session.options.claim):
            return original
        index_of = _shown(session, real)
        is_property = hasattr(type(original), "__set__")

        def shown(self: Any) -> Any:
            index = index_of(self)
            if index is None:
                return original.__get__(self) if is_property else original(self)
            record.hit(rule)
            return what(self, index)

        return property(shown, doc=original.__doc__) if is_property else patching.dress(shown, original, rule.name)

    return make


def _make_device(rule: Rule, original: Any, session: Session) -> Any:
    """Show cuda where the target can be told apart; on cpu return an object that tells `.to()` the tensor's place."""
    if not session.target.is_cpu:
        return _shows(_cuda_device, _place_of_tensor)(rule, original, session)
    index_of = _shown(session, _place_of_tensor) if session.options.claim else None

    def device(self: Any) -> torch.device:
        real = _place_of_tensor(self)
        if real != CPU:
            return real
        index = None if index_of is None else index_of(self)
        if index is not None:
            record.hit(rule)
        return places.device_of(self, index)

    return property(device, doc=original.__doc__)


def _cuda_device(_: Any, index: int) -> torch.device:
    return torch.device("cuda", index)


def _place_of_tensor(tensor: Any) -> torch.device:
    return torch._C.TensorBase.device.__get__(tensor)


def _place_of_storage(storage: Any) -> torch.device:
    return torch._C.StorageBase.device.__get__(getattr(storage, "_untyped_storage", storage))  # type: ignore[attr-defined]
