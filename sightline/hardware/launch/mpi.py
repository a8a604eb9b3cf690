"""MPI as a launcher only: Open MPI, MPICH, Intel MPI and MVAPICH set variables; torch communicates.

The command is in Open MPI 5's words (prte) or, for what Debian 12 and the originals have, in those of 4.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from sightline.errors import UsageError
from sightline.hardware.launch.place import Environ, Place, address, number, port
from sightline.hardware.launch.plan import LaunchPlan

# rank, size, local rank, local size; the first family of which one is set counts.
FAMILIES = {
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MVAPICH": (
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPICH or Intel MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


def detect(environ: Environ) -> Place | None:
    """Return the place that mpirun or mpiexec gives."""
    for launcher, names in FAMILIES.items():
        if not any(name in environ for name in names):
            continue
        if launcher.startswith("MPICH") and "SLURM_PROCID" in environ and "MPI_LOCALRANKID" not in environ:
            return None  # srun --mpi=pmi2 sets PMI_RANK and PMI_SIZE besides its own
        rank, size, local_rank, local_size = (number(environ, name, launcher) for name in names)
        where = address(environ, launcher, local_size == size)
        return Place(launcher, rank, size, local_rank, local_size, where, port(environ, _job(environ)))
    if "PMIX_RANK" in environ and "SLURM_PROCID" not in environ:
        raise UsageError(
            f"PMIX_RANK={environ['PMIX_RANK']} is set, but OMPI_COMM_WORLD_SIZE and the like are missing, so the "
            "number of ranks is unknown; start with Open MPI's mpirun or with torchrun, or unset PMIX_RANK"
        )
    return None


def _job(environ: Environ) -> str:
    """Return an id that all ranks of one start share, and no other start."""
    return environ.get("PMIX_NAMESPACE") or environ.get("PMI_JOBID") or ""


@dataclass(frozen=True)
class MpiOptions:
    """Options of mpirun."""

    version: Literal[4, 5] = 5
    """Open MPI's, as `mpirun --version` says it on the host that starts: its words differ."""
    networks: str = ""
    """Networks that MPI and its daemons use, as 10.0.0.0/24, comma-separated; default: --interfaces."""
    prefix: str = ""
    """Folder of Open MPI on the hosts, where PATH there does not lead to it."""
    root: bool = False
    """Add --allow-run-as-root although the one who writes the command is not root."""


def command(plan: LaunchPlan, options: MpiOptions) -> list[str]:
    """Return the mpirun command for all hosts, started on one that reaches the others by ssh."""
    words = ["mpirun"]
    if options.root or os.geteuid() == 0:
        words.append("--allow-run-as-root")
    words += ["--host", ",".join(f"{host.name}:{host.slots}" for host in plan.hosts), "-np", str(plan.ranks)]
    package = "package" if options.version == 5 else "socket"
    words += ["--map-by", f"{package}:PE={plan.cores_each}", "--bind-to", "core"] if plan.cores_each else []
    words += [] if plan.cores_each else ["--bind-to", "none"]
    words += _words_of_5(plan, options) if options.version == 5 else _words_of_4(plan, options)
    words += ["--prefix", options.prefix] if options.prefix else []
    for name, value in {"MASTER_ADDR": plan.hosts[0].name, "MASTER_PORT": str(plan.port), **plan.environ}.items():
        words += ["-x", f"{name}={value}"]
    return [*words, plan.python, "-m", "sightline", *plan.arguments]


def _words_of_5(plan: LaunchPlan, options: MpiOptions) -> list[str]:
    """Return what Open MPI 5 calls output, ssh and networks."""
    words = ["--output", f"merge,dir={plan.output}" if plan.output else "tag,merge"]
    if len(plan.hosts) > 1:
        words += ["--prtemca", "plm_ssh_args", _ssh(plan)]
    if networks := options.networks or plan.interfaces:
        words += ["--prtemca", "prte_if_include", networks, "--mca", "btl_tcp_if_include", networks]
    return words


def _words_of_4(plan: LaunchPlan, options: MpiOptions) -> list[str]:
    """Return what Open MPI 4 calls them; nocopy: the terminal shows nothing of what goes into files, as in 5."""
    output = ["--output-filename", f"{plan.output}:nocopy"] if plan.output else ["--tag-output"]
    words = ["--merge-stderr-to-stdout", *output]
    if len(plan.hosts) > 1:
        words += ["--mca", "plm_rsh_args", _ssh(plan)]
    if networks := options.networks or plan.interfaces:
        words += ["--mca", "oob_tcp_if_include", networks, "--mca", "btl_tcp_if_include", networks]
    return words


def _ssh(plan: LaunchPlan) -> str:
    return f"-p {plan.ssh_port} -o BatchMode=yes"
