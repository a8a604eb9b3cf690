"""Augmentation, one file per task: draw(key) -> Params, then apply(Params, pixels); `finish` is the device half.

A data config stays flat (`--data.mixup`): it inherits the fields of its task's augmentation and no behaviour. Its
`augmentation` is the object that has it.
"""

import dataclasses
from typing import Any, TypeVar

T = TypeVar("T")


def with_fields_of(config: Any, cls: type[T]) -> T:
    """Build a `cls` with the values that `config` has for its fields."""
    return cls(**{field.name: getattr(config, field.name) for field in dataclasses.fields(cls)})  # type: ignore[arg-type]
