"""Slurm: srun gives each task its place; the batch file gives every device a task, and needs no torchrun."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace

from sightline.errors import UsageError
from sightline.hardware.launch import torchrun
from sightline.hardware.launch.place import FIRST_OF_JOBS, PORTS_OF_JOBS, Environ, Place, address, number, port
from sightline.hardware.launch.plan import LaunchPlan

VALUE = re.compile(r"[A-Za-z0-9_./:@%=+,\[\]-]*")  # of a directive; nothing that needs quotes
MINUTES_TO_SAVE = 2
MAX_HOSTS = 1 << 16


def detect(environ: Environ) -> Place | None:
    """Return the place of a task of srun. A batch script or a shell of salloc is not one but has SLURM_PROCID."""
    if not any(name in environ for name in ("SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS")):
        return None
    size = number(environ, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS", "srun")
    rank, local_rank = (number(environ, name, "srun") for name in ("SLURM_PROCID", "SLURM_LOCALID"))
    local_size = _local_size(environ, size)
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    if size > 1 and not nodes:
        number(environ, "SLURM_STEP_NODELIST", "srun")  # says that it is missing
    first = next(hosts_of(nodes), "")
    job = f"{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}"
    where = address(environ, "srun", local_size == size, first)
    return Place("srun", rank, size, local_rank, local_size, where, port(environ, job))


def _local_size(environ: Environ, size: int) -> int:
    """Return this node's number of `4(x2),3`, which counts the tasks of each node."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")
    if not text:
        number(environ, "SLURM_STEP_TASKS_PER_NODE", "srun")
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            raise UsageError(f"SLURM_STEP_TASKS_PER_NODE='{text}' must be like 8(x2),4")
        counts += [int(match[1])] * min(int(match[2] or 1), MAX_HOSTS)
    node = number(environ, "SLURM_NODEID", "srun") if len(counts) > 1 else 0
    if sum(counts) != size or not 0 <= node < len(counts):
        raise UsageError(
            f"SLURM_STEP_TASKS_PER_NODE='{text}' and SLURM_NODEID={node} do not fit {size} tasks; start all with srun"
        )
    return counts[node]


def hosts_of(text: str) -> Iterator[str]:
    """Yield the names in a host list of Slurm, such as `gpu[01-03,07],login,rack[1-2]n[0-1]-ib`."""
    depth, start = 0, 0
    for at, letter in enumerate(f"{text},"):
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise UsageError(f"the host list '{text}' has brackets that do not close; expected like gpu[01-03,07]")
        if letter == "," and depth == 0:
            if at > start:
                yield from _expanded(text[start:at], text)
            start = at + 1
    if depth:
        raise UsageError(f"the host list '{text}' has brackets that do not close; expected like gpu[01-03,07]")


def _expanded(name: str, whole: str) -> Iterator[str]:
    before, bracket, rest = name.partition("[")
    if not bracket:
        yield name
        return
    ranges, _, after = rest.partition("]")
    for part in ranges.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UsageError(f"the host list '{whole}' has '[{ranges}]'; expected numbers such as [01-03,07]")
        for value in range(int(first), int(last if dash else first) + 1):
            for end in _expanded(after, whole) if after else [""]:
                yield f"{before}{value:0{len(first)}d}{end}"


@dataclass(frozen=True)
class SlurmOptions:
    """Options of Slurm."""

    partition: str = ""
    """Partition of the cluster."""
    account: str = ""
    """Account that pays."""
    time: str = ""
    """Time limit, e.g. 12:00:00; ranks get the signal to save two minutes before."""
    gres: str = "gpu"
    """Kind of device that each node gives, e.g. gpu or gpu:h100; none: CPUs only."""
    requeue: bool = False
    """Queue the job again when its time limit has stopped it, saved; it then resumes. Not after scancel, nor after an
    error."""
    extra: tuple[str, ...] = ()
    """More directives, e.g. --exclusive --qos=high, each as one word."""


def one_cpu(plan: LaunchPlan, options: SlurmOptions) -> str:
    """Return a warning for a file that asks for no number of CPUs."""
    if any(each.startswith("--cpus-per-") for each in options.extra):
        return ""
    ranks = f"{plan.slots} ranks and their" if plan.is_elastic and plan.slots > 1 else "a rank and its"
    return (
        f"warning: no --cores: Slurm gives each task one CPU, here for {ranks} loader workers, unless the cluster has "
        "another default; give --cores N, the cores of a node, or --cores -1 to keep the default"
    )


def script(plan: LaunchPlan, options: SlurmOptions) -> str:
    """Return the file that sbatch takes."""
    nodes, slots = len(plan.hosts), plan.slots
    directives = [f"--job-name={plan.name}", f"--nodes={nodes}"]
    directives.append("--ntasks-per-node=1" if plan.is_elastic else f"--ntasks-per-node={slots}")
    cores = plan.cores_each * (slots if plan.is_elastic else 1)
    directives += [f"--cpus-per-task={cores}"] if cores else []
    directives += [f"--gres={options.gres}:{slots}"] if options.gres != "none" else []
    directives += [f"--nodelist={','.join(host.name for host in plan.hosts)}"] if plan.are_named else []
    for name in ("partition", "account", "time"):
        directives += [f"--{name}={getattr(options, name)}"] if getattr(options, name) else []
    directives += ["--no-kill"] if 0 < plan.min_hosts < nodes else []
    seconds = 60 * MINUTES_TO_SAVE
    # B: to this file only, which then knows that the scheduler stops it, and passes the signal on.
    ending = ["--requeue", "--open-mode=append", f"--signal=B:USR1@{seconds}"]
    directives += ["--output=%x-%j.log", *(ending if options.requeue else [f"--signal=TERM@{seconds}"])]
    directives += options.extra
    for directive in directives:
        if not directive.startswith("--") or not VALUE.fullmatch(directive):
            raise UsageError(
                f"'{directive}' cannot be a directive of sbatch: it must begin with -- and hold only letters, digits "
                "and _./:@%=+,[]-"
            )
    lines = ["#!/bin/bash", *(f"#SBATCH {each}" for each in directives), "", "set -eu"]
    lines += [f"cd {shlex.quote(plan.folder)}"]
    lines += [f"mkdir -p {shlex.quote(plan.output)}"] if plan.output else []
    lines += [f"export {name}={shlex.quote(value)}" for name, value in plan.environ.items()]
    if plan.is_elastic:
        lines += ['export MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"']
    elif plan.port:
        lines += [f"export MASTER_PORT={plan.port}"]
    return "\n".join([*lines, "", *_requeued(_srun(plan, cores), options.requeue), ""])


def _requeued(command: str, is_wanted: bool) -> list[str]:
    """Return lines that run a command and queue its job again once the scheduler has stopped it. Only the scheduler
    sends SIGUSR1 here, so a job that is cancelled, fails or ends well stays out of the queue."""
    if not is_wanted:
        return [command]
    return [
        "stopped=0",
        # Explicitly a signal: it reaches the ranks, which save and leave, and cancels nothing.
        """if [ -n "${SLURM_JOB_ID:-}" ]; then trap 'stopped=1; scancel --signal=TERM "$SLURM_JOB_ID"' USR1; fi""",
        f"{command} &",
        "code=0",
        "wait $! || code=$?  # a signal ends it early",
        "while [ $stopped = 1 ] && kill -0 $! 2>/dev/null; do wait $! || true; done",
        "if [ $stopped = 1 ]; then code=0; wait $! || code=$?; fi",
        'if [ $stopped = 1 ] && [ $code != 0 ]; then scontrol requeue "$SLURM_JOB_ID"; fi',
        "exit $code",
    ]


def _srun(plan: LaunchPlan, cores: int) -> str:
    # Elastic: torchrun of the other nodes is to outlive one that is lost.
    words = ["srun", f"--kill-on-bad-exit={0 if plan.is_elastic else 1}"]
    words += ["--cpu-bind=cores", f"--cpus-per-task={cores}"] if cores else []
    words += [f"--output={plan.output}/rank_%t.log"] if plan.output else []
    if not plan.is_elastic:
        return shlex.join([*words, plan.python, "-m", "sightline", *plan.arguments])
    # Who meets where is known when the job has its nodes; its number tells it from others that are named alike, whose
    # run folder it must not take over. The first of these words are ours, whatever flags hold.
    command = shlex.join([*words, *torchrun.words(replace(plan, output=""), plan.slots, "", "FIRST")])
    command = command.replace(f"--rdzv-id={plan.run_id}", f'--rdzv-id={plan.run_id}-"$SLURM_JOB_ID"', 1)
    derived = f'"$(({FIRST_OF_JOBS} + SLURM_JOB_ID % {PORTS_OF_JOBS}))"'
    endpoint = f'--rdzv-endpoint="$MASTER_ADDR":{plan.port or derived}'
    return command.replace(f"--rdzv-endpoint=FIRST:{plan.port}", endpoint, 1)
