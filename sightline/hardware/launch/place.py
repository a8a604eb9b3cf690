"""A process's place among the ranks, as a launcher's variables give it, and how these are read. Needs no torch."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from sightline.errors import UsageError

Environ = Mapping[str, str]
PORT = 29500  # where nothing says another; torchrun's own
FIRST_OF_JOBS, PORTS_OF_JOBS = 20000, 12000  # below 32768, where Linux begins to hand out ports by itself
LOOPBACK = "127.0.0.1"
STORE = "SIGHTLINE_STORE"  # of `--run.devices`: the file in which ranks meet, in a folder of their user alone


@dataclass(frozen=True)
class Place:
    """The rank of a process among all and on its host, and where ranks meet; `launcher` names the source."""

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    master_address: str
    master_port: int

    def __post_init__(self) -> None:
        said = f"{self.launcher} says rank {self.rank} of {self.size} and local rank {self.local_rank}"
        if not 0 <= self.rank < self.size:
            raise UsageError(f"{said}; ranks go from 0 to {self.size - 1}: look at its variables in the environment")
        if not 0 <= self.local_rank < self.local_size <= self.size:
            raise UsageError(
                f"{said} of {self.local_size}; local ranks go from 0 to one less than the ranks of a host, which are "
                f"at most {self.size}: look at its variables in the environment"
            )
        if not 0 < self.master_port < 65536:
            raise UsageError(f"{said} and port {self.master_port}; MASTER_PORT must be in 1..65535")

    def as_environ(self) -> dict[str, str]:
        """Return the place in torchrun's names, which torch and everything built on it read."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": str(self.master_port),
        }


def is_rank_0() -> bool:
    """Return whether this process is rank 0, by RANK: set by torchrun, and by world.detect for any other launcher."""
    return os.environ.get("RANK", "0") == "0"


def ranks_on_host(default: int) -> int:
    """Return the number of ranks on this host, by LOCAL_WORLD_SIZE, set like RANK; the default without a launcher."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", default))


def number(environ: Environ, name: str, launcher: str) -> int:
    """Read a variable that a launcher sets to a whole number."""
    text = environ.get(name, "")
    if not text:
        raise UsageError(f"the environment is half set by {launcher}: {name} missing; {_remedy(launcher)}")
    try:
        return int(text)
    except ValueError:
        raise UsageError(
            f"{name}='{text}' must be a whole number, as {launcher} sets it; {_remedy(launcher)}"
        ) from None


def address(environ: Environ, launcher: str, is_one_host: bool, derived: str = "") -> str:
    """Return where ranks meet: MASTER_ADDR, else from the launcher's variables, else this host if it is alone."""
    found = environ.get("MASTER_ADDR") or derived or (LOOPBACK if is_one_host else "")
    if not found:
        raise UsageError(
            f"{launcher} started ranks on several hosts and did not name the first of them; set MASTER_ADDR to the "
            f"host of rank 0 on all of them (mpirun: -x MASTER_ADDR=HOST), or let `sightline launch` write the command"
        )
    return found


def port(environ: Environ, job: str = "") -> int:
    """Return MASTER_PORT, else a port from the job's id, so that all ranks know it and two jobs rarely share it."""
    if environ.get("MASTER_PORT"):
        return number(environ, "MASTER_PORT", "MASTER_ADDR and MASTER_PORT")
    return FIRST_OF_JOBS + zlib.crc32(job.encode()) % PORTS_OF_JOBS if job else PORT


def is_pod(environ: Environ) -> bool:
    """Return whether this process runs in Kubernetes."""
    return any(name in environ for name in ("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX", "PET_NODE_RANK"))


def _remedy(launcher: str) -> str:
    return f"start all ranks with {launcher} itself, or unset what is left of it"
