"""Classes that scripts call and test with isinstance: torch.cuda.FloatTensor, torch.Generator, torch.Stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sightline_migrate.reporting import record
from sightline_migrate.rules.conversion import Conversions, convert_of
from sightline_migrate.rules.table import Rule
from sightline_migrate.targets import HOST_MEMORY

if TYPE_CHECKING:
    from sightline_migrate.session import Session


class _TypedTensor(type):
    """torch.cuda.FloatTensor: created on the host, then moved; instances are tensors of that dtype on the target."""

    rule: Rule
    session: Session
    host: Any
    asked: torch.dtype
    dtype: torch.dtype
    conversions: Conversions
    is_cuda_type = True

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls.dtype is cls.asked:
            record.hit(cls.rule, args, kwargs)
        else:
            cls.conversions.hit(cls.asked, cls.dtype, args, kwargs)
        kwargs.pop("device", None)
        if not args and not kwargs:
            made = cls.host()
        else:
            made = cls.host(*(torch._C.TensorBase.cpu(a) if isinstance(a, torch.Tensor) else a for a in args), **kwargs)
        return torch._C.TensorBase.to(made, cls.session.devices.name, cls.dtype)

    def __instancecheck__(cls, value: Any) -> bool:
        if not isinstance(value, torch.Tensor) or value.dtype is not cls.dtype:
            return False
        here = torch._C.TensorBase.device.__get__(value).type
        return cls.session.shows_cuda and here == cls.session.target.name


def typed_tensor(rule: Rule, original: Any, session: Session) -> Any:
    """Make torch.cuda.*Tensor and torch.cuda.sparse.*Tensor."""
    owner = torch.sparse if ".sparse." in rule.name else torch
    name = rule.name.rpartition(".")[2]
    asked = getattr(owner, name)
    convert = convert_of(session)
    dtype = asked.dtype if convert is None else convert(asked.dtype)
    host = {torch.float32: owner.FloatTensor, torch.bfloat16: owner.BFloat16Tensor}.get(dtype, asked)
    inside = {
        "rule": rule, "session": session, "host": host, "asked": asked.dtype, "dtype": dtype,
        "conversions": Conversions(rule), "__module__": original.__module__,
    }  # fmt: skip
    made = _TypedTensor(name, (), inside)
    made.__doc__ = original.__doc__
    return made


class _ReplacedClass(type):
    """Metaclass of a class whose calls are mapped; results and isinstance stay the original's."""

    root: Any
    build: Any
    instances: tuple[type, ...]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is not cls.root:
            return super().__call__(*args, **kwargs)  # a script's own subclass
        return cls.build(*args, **kwargs)

    def __instancecheck__(cls, value: Any) -> bool:
        if cls is not cls.root:
            return type.__instancecheck__(cls, value)
        return isinstance(value, cls.instances)

    def __subclasscheck__(cls, other: type) -> bool:
        if cls is not cls.root:
            return type.__subclasscheck__(cls, other)
        return issubclass(other, cls.instances)


def replace_class(rule: Rule, original: Any, build: Any, instances: tuple[type, ...] = ()) -> Any:
    """Make a class that looks like `original` and calls `build`; it has the public name, so that pickle finds it."""
    inside = {"__module__": rule.name.rpartition(".")[0], "__doc__": original.__doc__}
    kind = type(original)
    meta: Any = _ReplacedClass if kind is type else type(f"Replaced{kind.__name__}", (_ReplacedClass, kind), {})
    made: Any = meta(original.__name__, (original,), inside)
    made.root = made
    made.build = staticmethod(build)
    made.instances = (original, *instances)
    return made


def generator(rule: Rule, original: Any, session: Session) -> Any:
    """Make torch.Generator("cuda") return the target's generator, of the original C type, so that pickle finds it."""

    def build(*args: Any, **kwargs: Any) -> Any:
        device = args[0] if args else kwargs.get("device", "cpu")
        there = session.devices.get(device)
        if there is device:
            return original(*args, **kwargs)
        record.hit(rule, args, kwargs)
        return original(there)

    return replace_class(rule, original, build)


def generic_stream(virtual: Any) -> Any:
    """Make torch.Stream and torch.Event with a CUDA device, or none, the target's own or the virtual one."""

    def make(rule: Rule, original: Any, session: Session) -> Any:
        is_virtual = session.target.name in HOST_MEMORY

        def build(*args: Any, **kwargs: Any) -> Any:
            device = args[0] if args else kwargs.get("device")
            there = session.devices.get(device)
            if there is device and not (device is None and is_virtual):
                return original(*args, **kwargs)
            record.hit(rule, args, kwargs)
            if is_virtual:
                return virtual(**(kwargs | {"device": device}))
            return original(*args[1:], **(kwargs | {"device": there}))

        return replace_class(rule, original, build, (virtual,))

    return make
