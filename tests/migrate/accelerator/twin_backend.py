"""torch.twin, the Python half of twin.cpp: what the package of a real accelerator brings, loaded by `import torch`.

Run as a script it compiles the other half and prints its path, which TWIN_LIBRARY hands to the processes of a test.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import torch

NAME = "twin"
SOURCE = Path(__file__).with_name("twin.cpp")
Where = int | str | torch.device | None


def build() -> str:
    """The path of twin.cpp compiled for this torch; kept with torch's other extensions, for all copies of the file."""
    versions = f"py{sys.version_info.major}{sys.version_info.minor}-torch{torch.__version__}"
    kept = os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.expanduser("~/.cache/torch_extensions")
    folder = Path(kept) / f"sightline-{NAME}-{versions}-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "made").exists():
        from torch.utils import cpp_extension

        cpp_extension.load(NAME, [str(SOURCE)], ["-O0"], build_directory=str(folder), is_python_module=False)
        (folder / "made").touch()
    return str(folder / f"{NAME}.so")


def autoload() -> None:
    """The entry point, where real backends load their library too."""
    if "TWIN_LIBRARY" not in os.environ:
        return
    torch.ops.load_library(os.environ["TWIN_LIBRARY"])
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


def _index(device: Where = None) -> int:
    if device is None:
        return current_device()
    index = device if isinstance(device, int) else torch.device(device).index
    return current_device() if index is None else index


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None:
    """Nothing is to be started."""


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return torch.ops.twin.devices()


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: Where) -> None:
    torch.accelerator.set_device_index(_index(device))


def synchronize(device: Where = None) -> None:
    torch.accelerator.synchronize(_index(device))


def get_device_name(device: Where = None) -> str:
    return f"Twin {_index(device)}"


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def is_bf16_supported() -> bool:
    return True


class device:
    """`with torch.twin.device(1):`."""

    def __init__(self, device: Where) -> None:
        self.index = _index(device)

    def __enter__(self) -> None:
        self.before = current_device()
        set_device(self.index)

    def __exit__(self, *_: object) -> None:
        set_device(self.before)


class Stream(torch.Stream):
    def __new__(cls, device: Where = None, priority: int = 0, **kwargs: Any) -> Any:
        if kwargs:  # a stream that exists: stream_id, device_index, device_type
            return super().__new__(cls, priority=priority, **kwargs)
        return super().__new__(cls, device=torch.device(NAME, _index(device)), priority=priority)


class Event(torch.Event):
    """Calling it gives a plain torch.Event, the only type that Event.elapsed_time takes."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
        return torch.Event(device=NAME, enable_timing=enable_timing, blocking=blocking)


def current_stream(device: Where = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


class stream:
    """`with torch.twin.stream(s):`; None changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self.before = current_stream()
        if self.stream is not None:
            set_stream(self.stream)

    def __exit__(self, *_: object) -> None:
        set_stream(self.before)


def memory_allocated(device: Where = None) -> int:
    return torch.ops.twin.memory_used(_index(device))


def max_memory_allocated(device: Where = None) -> int:
    return torch.ops.twin.memory_peak(_index(device))


def reset_peak_memory_stats(device: Where = None) -> None:
    torch.ops.twin.reset_peak(_index(device))


def empty_cache() -> None:
    """Freed memory goes back at once."""


def manual_seed(seed: int) -> None:
    torch.ops.twin.generator(current_device()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        torch.ops.twin.generator(index).manual_seed(seed)


def initial_seed() -> int:
    return torch.ops.twin.generator(current_device()).initial_seed()


def get_rng_state(device: Where = NAME) -> torch.Tensor:
    return torch.ops.twin.generator(_index(device)).get_state()


def set_rng_state(state: torch.Tensor, device: Where = NAME) -> None:
    torch.ops.twin.generator(_index(device)).set_state(state)


if __name__ == "__main__":
    print(build())
