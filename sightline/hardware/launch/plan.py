"""The plan of a start: hosts, ranks, command and environment, checked before any launcher writes them down."""

from __future__ import annotations

import os
import re
import shlex
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from sightline.errors import UsageError
from sightline.hardware.launch.place import Environ

# No name may begin with a dash: ssh, mpirun and srun would read it as an option.
HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252}[A-Za-z0-9_])?")
INTERFACE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,14}")
NETWORK = re.compile(r"[0-9]{1,3}(\.[0-9]{1,3}){3}/[0-9]{1,2}")
LABEL = re.compile(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?")  # of DNS, with room for "-63" and the like
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# The originals forwarded names that hold PATH, LD_, HABANA, HCL, HCCL, NCCL, GC_, TPC_, SYN, LOG_LEVEL, ENABLE_; these
# are the same for what torch runs on.
FORWARDED = (
    *("PATH", "*_PATH", "PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_*", "OMP_*", "MKL_*", "KMP_*", "TORCH*"),
    *("NCCL_*", "GLOO_*", "UCX_*", "FI_*", "CUDA_*", "CUBLAS_*", "HABANA*", "HCL_*", "HCCL_*", "PT_HPU_*", "GC_*"),
    *("TPC_*", "SYN*", "ASCEND_*", "CCL_*", "ZE_*", "*LOG_LEVEL*", "ENABLE_*"),
)
# Never carried along: secrets, and what a launcher must say itself.
KEPT_BACK = ("*TOKEN*", "*SECRET*", "*PASSWORD*", "*PASSWD*", "*_KEY", "*CREDENTIAL*", "TORCHELASTIC_*")
SECONDS_TO_SAVE = 120  # that ranks get after a signal, before they are killed
SOCKET_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME")


@dataclass(frozen=True)
class Host:
    """A machine and how many ranks it gets."""

    name: str
    slots: int


@dataclass(frozen=True)
class LaunchPlan:
    """One start of one command on all hosts."""

    hosts: tuple[Host, ...]
    arguments: tuple[str, ...]
    """The words after `sightline`: train, the recipe and its flags."""
    name: str
    run_id: str
    """Shared by the hosts of one start and the attempts of one command, and by nobody else."""
    python: str
    folder: str
    """Working folder of the command on every host."""
    port: int
    ssh_port: int
    interfaces: str
    environ: dict[str, str]
    cores_each: int
    """Cores a rank is bound to; 0 binds nothing."""
    output: str
    max_restarts: int
    min_hosts: int
    are_named: bool
    """False: a scheduler chooses the hosts, only their number counts."""

    @property
    def ranks(self) -> int:
        return sum(host.slots for host in self.hosts)

    @property
    def is_elastic(self) -> bool:
        return self.max_restarts > 0 or 0 < self.min_hosts < len(self.hosts)

    @property
    def slots(self) -> int:
        """Return the ranks of a host, for launchers that start equally many on each."""
        counts = sorted({host.slots for host in self.hosts})
        if len(counts) > 1:
            raise UsageError(
                f"this launcher starts equally many ranks on every host, not {' and '.join(map(str, counts))}; "
                "use --launcher torchrun, mpirun or ssh"
            )
        return counts[0]


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Parse `a:8,b:8`, or `a,b` for one rank each."""
    found = []
    for part in text.split(","):
        name, colon, slots = part.strip().partition(":")
        if not HOST.fullmatch(name):
            raise UsageError(
                f"--hosts: '{part}' is not a host; write NAME:RANKS, e.g. node1:8,node2:8 (IPv6 by name only)"
            )
        if colon and not (slots.isdecimal() and int(slots) > 0):
            raise UsageError(f"--hosts: '{part}' must end with the number of ranks there, e.g. {name}:8")
        found.append(Host(name, int(slots) if colon else 1))
    names = [host.name for host in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"--hosts names {', '.join(twice)} twice; add its ranks up, e.g. {twice[0]}:8")
    return tuple(found)


def forwarded(environ: Environ, patterns: Sequence[str], added: Sequence[str], interfaces: str) -> dict[str, str]:
    """Return the variables for the hosts: by pattern, those of the interfaces, and NAME=VALUE pairs, which win."""
    found = {
        name: environ[name]
        for name in sorted(environ)
        if any(fnmatchcase(name, pattern) for pattern in patterns)
        and not any(fnmatchcase(name.upper(), pattern) for pattern in KEPT_BACK)
        and VARIABLE.fullmatch(name)
        and "\n" not in environ[name]
    }
    if interfaces:
        found |= dict.fromkeys(SOCKET_VARIABLES, interfaces)
    for pair in added:
        name, equals, value = pair.partition("=")
        if not equals or not VARIABLE.fullmatch(name) or "\n" in value:
            raise UsageError(f"--env '{pair}' must be NAME=VALUE on one line, e.g. --env NCCL_DEBUG=INFO")
        found[name] = value
    return found


def check_names(pattern: re.Pattern[str], text: str, flag: str, example: str) -> None:
    """Refuse names that could be read as an option or as a second value."""
    for part in text.split(",") if text else ():
        if not pattern.fullmatch(part):
            raise UsageError(f"{flag} '{text}' must be like {example}")


def is_here(name: str) -> bool:
    """Return whether a host is the machine that this process runs on."""
    node = os.uname().nodename
    return name in ("localhost", "127.0.0.1", node, node.partition(".")[0])


def hangup() -> tuple[signal.Signals, ...]:
    """Return SIGHUP, the end of a terminal, unless it was ignored at the start (nohup): ranks then outlive it."""
    return () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)


def in_shell(plan: LaunchPlan, words: Sequence[str]) -> str:
    """Return one line for the shell of another host: the folder, the environment, the command, all quoted."""
    pairs = [f"{name}={value}" for name, value in plan.environ.items()]
    return f"cd {shlex.quote(plan.folder)} && exec " + shlex.join(["env", *pairs, *words] if pairs else words)
