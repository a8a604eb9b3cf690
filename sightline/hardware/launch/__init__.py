"""Starting ranks on one host or many: one file per launcher, each with detect() and what it writes.

Where several launchers are at work, the inner one counts: torchrun, then MPI, then Slurm, then Kubernetes.
"""

from __future__ import annotations

import os

from sightline.hardware.launch import kubernetes, mpi, slurm, torchrun
from sightline.hardware.launch.place import Environ, Place

# torchrun comes first: srun, mpirun and pods start it, it starts none of them. A step of srun comes after mpirun,
# which uses srun to reach its hosts. A pod is what all of them may run in.
ORDER = (torchrun.detect, mpi.detect, slurm.detect, kubernetes.detect)


def among_ranks() -> bool:
    """Return whether a launcher started this process: others would wait for one that ends early."""
    return detect(os.environ) is not None


def detect(environ: Environ) -> Place | None:
    """Return the place of this process as the innermost launcher gives it; None without a launcher."""
    for each in ORDER:
        place = each(environ)
        if place is not None:
            return place
    return None
