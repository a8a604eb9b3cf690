"""Kubernetes: one pod per host, with torchrun inside for its devices, or one process per pod placed by an operator.

Three forms: a plain Indexed Job with a headless Service, which every cluster has, and Kubeflow's PyTorchJob and
TrainJob.
"""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal

from sightline import __version__
from sightline.errors import UsageError
from sightline.hardware.launch import torchrun
from sightline.hardware.launch.place import PORT, Environ, Place, address, is_pod, number, port
from sightline.hardware.launch.plan import LABEL, SECONDS_TO_SAVE, LaunchPlan

KUBEFLOW = "Kubeflow's operator"
INDEX = "$(JOB_COMPLETION_INDEX)"  # kubelet puts the value in
PORT_NAME = {"pytorch": "pytorchjob-port"}  # by which Kubeflow's operator finds MASTER_PORT
PATH = re.compile(r"/[A-Za-z0-9_./-]*")
SECONDS_TO_LEAVE = SECONDS_TO_SAVE + 30  # before kubelet kills a pod: ranks save first, then torchrun ends
MAX_USER = 2**31 - 1


def detect(environ: Environ) -> Place | None:
    """Return the place of a process that is alone in its pod; torchrun starts several and gives them theirs."""
    if not is_pod(environ):
        return None
    if "PET_RDZV_ENDPOINT" in environ:
        raise UsageError(
            f"PET_RDZV_ENDPOINT={environ['PET_RDZV_ENDPOINT']} is set, which only torchrun understands; let the pod "
            "run `python -m torch.distributed.run -m sightline train ...`"
        )
    if "PET_NODE_RANK" in environ or "PET_NNODES" in environ:
        return _of_torchrun_settings(environ)
    if "RANK" in environ:
        names = ("RANK", "WORLD_SIZE")  # the older operator, and JobSets as their documents write them
    elif "JOB_COMPLETION_INDEX" in environ and ("WORLD_SIZE" in environ or "MASTER_ADDR" in environ):
        names = ("JOB_COMPLETION_INDEX", "WORLD_SIZE")
    elif "WORLD_SIZE" in environ:
        names = ("RANK", "WORLD_SIZE")
    else:
        return None  # pods of an Indexed Job may well be runs of their own
    rank, size = (number(environ, name, "Kubernetes") for name in names)
    where = address(environ, "Kubernetes", size == 1)
    return Place("Kubernetes", rank, size, 0, 1, where, port(environ))


def _of_torchrun_settings(environ: Environ) -> Place:
    """Read the place from PET_*, the options of torchrun as variables; without torchrun a pod has one process."""
    each = environ.get("PET_NPROC_PER_NODE", "1")
    if each.isdecimal() and int(each) > 1:
        raise UsageError(
            f"PET_NPROC_PER_NODE={each}: {KUBEFLOW} expects torchrun in this pod to start {each} ranks; let it run "
            f"`python -m torch.distributed.run -m sightline train ...`, or ask for one process per node"
        )
    rank, size = (number(environ, name, KUBEFLOW) for name in ("PET_NODE_RANK", "PET_NNODES"))
    told = {name: environ.get(f"PET_{name}") or environ.get(name) or "" for name in ("MASTER_ADDR", "MASTER_PORT")}
    return Place(KUBEFLOW, rank, size, 0, 1, address(told, KUBEFLOW, size == 1), port(told))


@dataclass(frozen=True)
class KubernetesOptions:
    """Options of Kubernetes."""

    image: str = f"sightline:{__version__}"
    """Image that holds Sightline, with its registry: what was built of the Dockerfile and pushed."""
    form: Literal["job", "pytorchjob", "trainjob"] = "job"
    """job: Indexed Job and headless Service; pytorchjob, trainjob: Kubeflow's, of its first and second version."""
    namespace: str = ""
    """Namespace; default: that of the one who applies it."""
    resource: str = "nvidia.com/gpu"
    """Device that a pod asks for, once per rank, e.g. habana.ai/gaudi; none: CPUs only."""
    cpus: str = ""
    """CPUs of a pod, e.g. 96."""
    memory: str = ""
    """Memory of a pod, e.g. 512Gi."""
    shared_memory: str = "16Gi"
    """Size of /dev/shm, which loader workers use; it counts as memory of the pod."""
    volumes: tuple[str, ...] = ()
    """claim:NAME:/where or host:/path:/where, :ro behind it for reading only."""
    user: int = 1000
    """Number of the user and the group that pods run as, which is not root (0); volumes must let it read and write."""
    runtime: str = "torch-distributed"
    """trainjob: the runtime that it refers to, where also the user of its pods is said."""


def documents(plan: LaunchPlan, options: KubernetesOptions) -> list[dict[str, Any]]:
    """Return the manifest, one object per document."""
    if not options.image:
        raise UsageError("--launcher kubernetes needs an image that holds Sightline: --kubernetes.image NAME:TAG")
    if options.namespace and not LABEL.fullmatch(options.namespace):
        raise UsageError(f"--kubernetes.namespace '{options.namespace}' must be small letters, digits and dashes")
    if not 0 < options.user <= MAX_USER:
        raise UsageError(f"--kubernetes.user {options.user} must be in 1..{MAX_USER}: pods do not run as root")
    metadata: dict[str, Any] = {"name": plan.name}
    if options.namespace:
        metadata["namespace"] = options.namespace
    write = {"job": _indexed_job, "pytorchjob": _pytorch_job, "trainjob": _train_job}[options.form]
    return write(plan, options, metadata)


def unkept(plan: LaunchPlan, options: KubernetesOptions, data: str, out: str) -> str:
    """Return a warning if the run folder is in no volume that pods can write to; it is lost with its pod. A TrainJob
    has its volumes from its runtime."""
    mounts = [_volume(text, "")[1] for text in options.volumes]
    run = PurePosixPath(plan.folder, out)
    if options.form == "trainjob" or _is_below(run, [each for each in mounts if "readOnly" not in each]):
        return ""
    lost, volumes = [f"the run folder {run}"], [*options.volumes]
    place = PurePosixPath(plan.folder, data)
    if data and not data.startswith("synthetic:") and not _is_below(place, mounts):
        lost.insert(0, f"the data {place}")
        volumes.append(f"claim:NAME:{place}:ro")
    volumes.append(f"claim:NAME:{run.parent if len(run.parts) > 2 else run}")
    verbs = "is in no writable volume and vanishes" if len(lost) == 1 else "are in no volume and vanish"
    return f"warning: {' and '.join(lost)} {verbs} with the pod; give --kubernetes.volumes {' '.join(volumes)}"


def _is_below(folder: PurePosixPath, mounts: list[dict[str, Any]]) -> bool:
    return any(folder.is_relative_to(each["mountPath"]) for each in mounts)


def _indexed_job(plan: LaunchPlan, options: KubernetesOptions, metadata: dict[str, Any]) -> list[dict[str, Any]]:
    count, at = len(plan.hosts), plan.port or PORT
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # ranks meet before any of them is ready
            "selector": {"batch.kubernetes.io/job-name": plan.name},
            "ports": [{"name": "rendezvous", "port": at}],
        },
    }
    pod = _pod(plan, options, "sightline", torchrun.words(plan, plan.slots, INDEX, f"{plan.name}-0.{plan.name}"))
    pod["spec"] |= {"subdomain": plan.name, "restartPolicy": "Never"}
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "completionMode": "Indexed",
            "completions": count,
            "parallelism": count,
            "backoffLimit": plan.max_restarts * count,
            "template": pod,
        },
    }
    return [service, job]


def _pytorch_job(plan: LaunchPlan, options: KubernetesOptions, metadata: dict[str, Any]) -> list[dict[str, Any]]:
    # Its variables of the pod; RANK counts pods in every version of the operator, WORLD_SIZE does not.
    command = torchrun.words(plan, plan.slots, "$(RANK)", "$(MASTER_ADDR)")
    pod = _pod(plan, options, "pytorch", command)
    policy = "OnFailure" if plan.max_restarts else "Never"
    counts = {"Master": 1, "Worker": len(plan.hosts) - 1}
    replicas = {
        name: {"replicas": count, "restartPolicy": policy, "template": deepcopy(pod)}
        for name, count in counts.items()
        if count
    }
    spec = {
        "nprocPerNode": str(plan.slots),
        "runPolicy": {"cleanPodPolicy": "None", "backoffLimit": plan.max_restarts},
        "pytorchReplicaSpecs": replicas,
    }
    return [{"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": metadata, "spec": spec}]


def _train_job(plan: LaunchPlan, options: KubernetesOptions, metadata: dict[str, Any]) -> list[dict[str, Any]]:
    if options.volumes or plan.are_named:
        asked = "--kubernetes.volumes" if options.volumes else "--hosts"
        raise UsageError(
            f"{asked} cannot be written in a TrainJob: its versions spell changes of pods differently; put volumes and "
            f"hosts into the runtime that --kubernetes.runtime names (and say --nodes and --per-node), or use "
            "--kubernetes.form job"
        )
    if plan.is_elastic:
        raise UsageError("a TrainJob does not restart single pods; leave --max-restarts and --min-hosts out")
    trainer = {
        "image": options.image,
        # torchrun takes its options from the PET_ variables that the operator sets.
        "command": _escaped([plan.python, "-m", "torch.distributed.run", "-m", "sightline", *plan.arguments]),
        "numNodes": len(plan.hosts),
        "numProcPerNode": plan.slots,
        "resourcesPerNode": _resources(plan, options),
        "env": _environ(plan),
    }
    spec = {"runtimeRef": {"name": options.runtime}, "trainer": trainer}
    return [{"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": metadata, "spec": spec}]


def _pod(plan: LaunchPlan, options: KubernetesOptions, container: str, command: list[str]) -> dict[str, Any]:
    """Return the template of a pod; command lines hold $(VARIABLE) only where we wrote it."""
    volumes: list[dict[str, Any]] = [
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": options.shared_memory}}
    ]
    mounts: list[dict[str, Any]] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    for at, text in enumerate(options.volumes):
        volume, mount = _volume(text, f"volume-{at}")
        if any(PurePosixPath(each["mountPath"]) == PurePosixPath(mount["mountPath"]) for each in mounts):
            raise UsageError(
                f"--kubernetes.volumes '{text}': another volume is mounted at {mount['mountPath']}; give another path"
            )
        volumes.append(volume)
        mounts.append(mount)
    body = {
        "name": container,
        "image": options.image,
        "command": [*command[: -len(plan.arguments)], *_escaped(plan.arguments)],
        "workingDir": plan.folder,
        "env": _environ(plan),
        "ports": [{"name": PORT_NAME.get(container, "rendezvous"), "containerPort": plan.port or PORT}],
        "resources": _resources(plan, options),
        "volumeMounts": mounts,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    spec: dict[str, Any] = {
        "containers": [body],
        "volumes": volumes,
        "securityContext": _security(options),
        "automountServiceAccountToken": False,  # ranks never speak to the cluster
        "terminationGracePeriodSeconds": SECONDS_TO_LEAVE,
    }
    if plan.are_named:
        spec["affinity"] = _affinity(plan)
    return {"metadata": {"labels": {"app.kubernetes.io/name": plan.name}}, "spec": spec}


def _security(options: KubernetesOptions) -> dict[str, Any]:
    """Return the security context: never root, whatever the image says. Claims get the group of the pod; their files
    are left alone if they have it already."""
    return {
        "runAsNonRoot": True,
        "runAsUser": options.user,
        "runAsGroup": options.user,
        "fsGroup": options.user,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _affinity(plan: LaunchPlan) -> dict[str, Any]:
    """Place one pod on each of the hosts."""
    key = "kubernetes.io/hostname"
    among = {"key": key, "operator": "In", "values": [host.name for host in plan.hosts]}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [among]}]}
    apart = {"labelSelector": {"matchLabels": {"app.kubernetes.io/name": plan.name}}, "topologyKey": key}
    return {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms},
        "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]},
    }


def _resources(plan: LaunchPlan, options: KubernetesOptions) -> dict[str, Any]:
    limits = {} if options.resource == "none" else {options.resource: str(plan.slots)}
    limits |= {"memory": options.memory} if options.memory else {}
    limits |= {"cpu": options.cpus} if options.cpus else {}
    return {"limits": limits, "requests": dict(limits)}


def _environ(plan: LaunchPlan) -> list[dict[str, str]]:
    # The image need not know the user: torch looks for a name and a home to keep compiled code in.
    user = {"HOME": "/tmp", "USER": "sightline"}
    ours = {"PYTHONUNBUFFERED": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SECONDS_TO_SAVE), **user}
    values = {**ours, **plan.environ}
    return [{"name": name, "value": value} for name, value in zip(values, _escaped([*values.values()]), strict=True)]


def _escaped(words: list[str] | tuple[str, ...]) -> list[str]:
    """Escape what kubelet would take for a variable."""
    return [word.replace("$", "$$") for word in words]


def _volume(text: str, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    kind, _, rest = text.partition(":")
    parts = rest.split(":")
    is_read_only = len(parts) == 3 and parts[2] == "ro"
    fits = kind in ("claim", "host") and (len(parts) == 2 or is_read_only)
    if fits:
        pattern = LABEL if kind == "claim" else PATH
        fits = bool(pattern.fullmatch(parts[0]) and PATH.fullmatch(parts[1]))
    if not fits:
        raise UsageError(
            f"--kubernetes.volumes '{text}' must be claim:NAME:/where or host:/path:/where, or either with :ro"
        )
    read_only = {"readOnly": True} if is_read_only else {}
    # Of the claim too: a volume that is only read keeps the groups of its files.
    claim = {"persistentVolumeClaim": {"claimName": parts[0], **read_only}}
    source = claim if kind == "claim" else {"hostPath": {"path": parts[0]}}
    return {"name": name, **source}, {"name": name, "mountPath": parts[1], **read_only}
