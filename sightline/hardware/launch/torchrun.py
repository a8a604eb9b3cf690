"""torchrun: RANK, WORLD_SIZE, LOCAL_RANK and where to meet. Its command starts the ranks of one host."""

from __future__ import annotations

from sightline.errors import UsageError
from sightline.hardware.launch.place import Environ, Place, is_pod
from sightline.hardware.launch.plan import LaunchPlan

NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def detect(environ: Environ) -> Place | None:
    """Return the place that torchrun gives, or anything that sets the same variables."""
    if environ.get("RANK") is None and environ.get("WORLD_SIZE") is None:
        return None
    if not environ.get("LOCAL_RANK") and is_pod(environ):
        return None  # an operator counts pods by these names
    missing = [name for name in (*NUMBERS, "MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if missing:
        raise UsageError(
            f"the environment is half set for several ranks: {', '.join(missing)} missing; start with "
            f"`torchrun --nproc-per-node N -m sightline train ...` or unset RANK and WORLD_SIZE"
        )
    values = {name: environ[name] for name in (*NUMBERS, "MASTER_PORT")}
    local = environ.get("LOCAL_WORLD_SIZE")
    try:
        rank, size, local_rank, port = (int(value) for value in values.values())
        local_size = int(local) if local else max(size, local_rank + 1)
    except ValueError:
        said = values | ({"LOCAL_WORLD_SIZE": local} if local else {})
        raise UsageError(f"RANK, WORLD_SIZE, LOCAL_RANK and the port must be whole numbers, got {said}") from None
    return Place("torchrun", rank, size, local_rank, local_size, environ["MASTER_ADDR"], port)


def command(plan: LaunchPlan, node: int) -> list[str]:
    """Return the command that starts the ranks of host number `node`; every host needs its own."""
    host = plan.hosts[node]
    return words(plan, host.slots, str(node), plan.hosts[0].name, host.name)


def words(plan: LaunchPlan, slots: int, node: str, first: str, here: str = "") -> list[str]:
    """Return the command with the node's number, the first host and this one as a scheduler fills them in."""
    found = [plan.python, "-m", "torch.distributed.run"]
    if plan.is_elastic:
        found += [f"--nnodes={plan.min_hosts or len(plan.hosts)}:{len(plan.hosts)}", f"--nproc-per-node={slots}"]
        found += [f"--max-restarts={plan.max_restarts}", "--rdzv-backend=c10d"]
        found += [f"--rdzv-endpoint={first}:{plan.port}", *([f"--local-addr={here}"] if here else [])]
    else:
        found += [f"--nnodes={len(plan.hosts)}", f"--node-rank={node}", f"--nproc-per-node={slots}"]
        found += [f"--master-addr={first}", f"--master-port={plan.port}"]
    found.append(f"--rdzv-id={plan.run_id}")
    if plan.output:
        found += [f"--log-dir={plan.output}", "--redirects=3", "--tee=3"]
    return [*found, "-m", "sightline", *plan.arguments]
