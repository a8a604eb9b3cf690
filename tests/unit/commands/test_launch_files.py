"""The input of launchers: every word as it was, hosts that cannot be options, files that their readers accept."""

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import dockerfile
import pytest
import yaml

from sightline import config
from sightline.commands.launch_hosts import LaunchOptions, launch, make_plan, written
from sightline.errors import UsageError
from sightline.hardware.launch import mpi, slurm, ssh, torchrun
from sightline.hardware.launch.plan import Host, LaunchPlan, forwarded, parse_hosts

# A path that a shell, kubelet or YAML would change if it were not quoted.
NASTY = '/my data/$(x) $$(x) $$ `y`/it\'s: "z" #1 & *'
FLAGS = ("demo_classification", "--data.path", NASTY, "--train.global-batch", "512")
COMMAND = ("train", *FLAGS)


@cache
def load(*words: str) -> tuple[config.Recipe, config.Run]:
    return config.load(words[0], words[1:])


def plan_of(options: LaunchOptions, *flags: str) -> LaunchPlan:
    words = [*FLAGS, *flags]
    return make_plan(options, words, *load(*words))


def text_of(options: LaunchOptions, *flags: str) -> str:
    return written(options, plan_of(options, *flags))


# Hosts and options


def test_hosts():
    assert parse_hosts("a:8, b-1.c:4,10.0.0.1") == (Host("a", 8), Host("b-1.c", 4), Host("10.0.0.1", 1))


@pytest.mark.parametrize(
    "text",
    # What ssh would take for an option, what a shell would take apart, and what is simply wrong.
    [
        *("-oProxyCommand=x", "-oProxyCommand=x:8", "a;b:8", "a b:8", "a\n:8", "$(a)", "user@a:8"),
        *("", "a,,b", "a:0", "a:-1", "a:x", "::1", "a:8,a:8", "a-:8", "a" * 300),
    ],
)
def test_a_name_that_is_not_a_host_is_refused(text: str):
    with pytest.raises(UsageError, match="--hosts"):
        parse_hosts(text)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "give the hosts: --hosts a:8,b:8"),
        ({"hosts": "a:8", "nodes": 2}, "give the hosts"),
        ({"nodes": 2}, "torchrun chooses no hosts"),
        ({"nodes": 2, "per_node": 0, "launcher": "slurm"}, "both must be at least 1"),
        ({"hosts": "a:8", "interfaces": "-x"}, "--interfaces '-x' must be like eth0"),
        ({"hosts": "a:8", "interfaces": "eth0;reboot"}, "--interfaces"),
        (
            {"hosts": "a:8", "mpi": mpi.MpiOptions(networks="10.0.0.0")},
            "--mpi.networks '10.0.0.0' must be like 10.0.0.0/24",
        ),
        ({"hosts": "a:8", "port": 70000}, "--port 70000"),
        ({"hosts": "a:8", "name": "My Job"}, "--name 'My Job'"),
        ({"hosts": "a:8", "env": ("A",)}, "--env 'A' must be NAME=VALUE"),
        ({"hosts": "a:8", "env": ("A B=1",)}, "--env 'A B=1' must be"),
        ({"hosts": "a:8", "output": "x,y"}, "--output 'x,y' must be a path"),
        ({"hosts": "a:8", "python": "-c"}, "--python '-c' must be a path"),
        ({"hosts": "a:8", "min_hosts": 2}, "--min-hosts must be in 0..1"),
        ({"hosts": "a:8,b:8", "max_restarts": 1, "launcher": "mpirun"}, "mpirun ends when one rank ends"),
    ],
)
def test_what_cannot_be_started_is_refused(changes: dict, text: str):
    with pytest.raises(UsageError, match=text):
        plan_of(LaunchOptions(**changes))


def test_ranks_are_counted_by_hosts_only():
    with pytest.raises(UsageError, match="--run.devices 8: --hosts says how many"):
        plan_of(LaunchOptions(hosts="a:8"), "--run.devices=8")


@pytest.mark.parametrize("launcher", ["slurm", "kubernetes"])
def test_uneven_hosts_are_refused_where_they_cannot_be(launcher: str):
    options = LaunchOptions(hosts="a:8,b:4", launcher=launcher)
    options = replace(options, kubernetes=replace(options.kubernetes, image="x"))
    with pytest.raises(UsageError, match="equally many ranks on every host, not 4 and 8"):
        text_of(options)
    assert "--nproc-per-node=4" in text_of(replace(options, launcher="torchrun"))


def test_a_batch_that_cannot_be_split_is_refused_before_the_start():
    words = ["demo_classification", "--train.global-batch=100"]
    with pytest.raises(UsageError, match="global_batch=100 cannot be split over 16 devices"):
        launch(LaunchOptions(hosts="a:8,b:8", print=True), words, *load(*words), print)


def test_variables_go_along_by_name_and_secrets_do_not():
    environ = {"PATH": "/a", "LD_LIBRARY_PATH": "/b c", "HOME": "/h", "NCCL_DEBUG": "INFO", "HABANA_X": "1"}
    secrets = {"NCCL_TOKEN": "s", "TORCH_API_KEY": "s", "ENABLE_PASSWORD": "s"}
    found = forwarded(
        environ | secrets | {"NCCL_BAD": "a\nb"}, LaunchOptions().forward, ["NCCL_DEBUG=WARN", "MINE=a b"], "eth0"
    )
    sockets = dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME"), "eth0")
    expected = {"PATH": "/a", "LD_LIBRARY_PATH": "/b c", "NCCL_DEBUG": "WARN", "HABANA_X": "1", "MINE": "a b"}
    assert found == expected | sockets


# Commands


def test_torchrun_on_each_host():
    lines = text_of(LaunchOptions(hosts="a:8,b:4", interfaces="eth0", port=1234)).splitlines()
    assert lines[::2] == ["# on a", "# on b"]
    for node, slots, line in ((0, 8, lines[1]), (1, 4, lines[3])):
        words = shlex.split(line)
        start = words.index(sys.executable)
        assert words[0] == "env" and "NCCL_SOCKET_IFNAME=eth0" in words[1:start]
        settings = [f"--nnodes=2 --node-rank={node} --nproc-per-node={slots} --master-addr=a --master-port=1234"]
        expected = [*"-m torch.distributed.run".split(), *settings[0].split(), "-m", "sightline", *COMMAND]
        (run_id,) = (word for word in words if word.startswith("--rdzv-id=demo-classification-"))
        words.remove(run_id)
        assert words[start + 1 :] == expected


def test_torchrun_reads_these_options_as_they_are_meant():
    from torch.distributed.run import parse_args

    options = LaunchOptions(hosts="a:8,b:8", max_restarts=3, min_hosts=1, output="logs")
    words = torchrun.command(plan_of(options), 1)
    read = parse_args(words[words.index("torch.distributed.run") + 1 :])
    assert (read.nnodes, read.nproc_per_node, read.max_restarts, read.rdzv_backend) == ("1:2", "8", 3, "c10d")
    assert (read.rdzv_endpoint, read.local_addr, read.log_dir, read.tee) == ("a:29500", "b", "logs", "3")
    assert (read.training_script, read.training_script_args) == ("sightline", list(COMMAND)) and read.module


@pytest.mark.parametrize(("user", "root", "allows"), [(0, False, True), (1000, False, False), (1000, True, True)])
def test_mpirun_runs_as_root_where_root_writes_the_command_or_says_so(monkeypatch, user, root, allows):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    options = mpi.MpiOptions(root=True) if root else mpi.MpiOptions()
    words = text_of(LaunchOptions(hosts="a:8,b:8", launcher="mpirun", mpi=options))
    assert ("--allow-run-as-root" in words) is allows


def test_mpirun_in_the_words_of_open_mpi_5(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/my libs")
    hosts = ",".join(f"10.0.0.{n}:8" for n in range(1, 9))
    options = LaunchOptions(hosts=hosts, launcher="mpirun", interfaces="eth0", ssh_port=3022, cores=48, output="logs")
    words = shlex.split(text_of(replace(options, mpi=mpi.MpiOptions(networks="10.0.0.0/24", root=True))))
    end = words.index(sys.executable)
    assert words[end:] == [sys.executable, "-m", "sightline", *COMMAND]
    values = dict(itertools.pairwise(words))
    assert (values["--host"], values["-np"]) == (hosts, "64")
    assert (values["--map-by"], values["--bind-to"]) == ("package:PE=6", "core")
    assert values["plm_ssh_args"] == "-p 3022 -o BatchMode=yes"
    assert values["btl_tcp_if_include"] == values["prte_if_include"] == "10.0.0.0/24"
    assert values["--output"] == "merge,dir=logs" and "--allow-run-as-root" in words
    along = [after for word, after in itertools.pairwise(words) if word == "-x"]
    assert {"MASTER_ADDR=10.0.0.1", "MASTER_PORT=29500", "LD_LIBRARY_PATH=/opt/my libs"} < set(along)
    assert "HCCL_SOCKET_IFNAME=eth0" in along
    for cores in (7, -1):  # 8 ranks cannot have one of 7 cores each; -1 asks for none
        text = text_of(replace(options, cores=cores))
        assert "--bind-to none" in text and "--map-by" not in text
    assert "package:PE=1 --bind-to core" in text_of(replace(options, cores=8))


@pytest.mark.parametrize(("user", "asked", "allowed"), [(0, False, True), (1000, False, False), (1000, True, True)])
def test_root_may_start_mpirun_and_others_may_write_its_command(user, asked, allowed, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    given = mpi.MpiOptions(root=True) if asked else mpi.MpiOptions()
    options = LaunchOptions(hosts="a:8,b:8", launcher="mpirun", mpi=given)
    assert ("--allow-run-as-root" in text_of(options).split()) is allowed


def test_mpirun_in_the_words_of_open_mpi_4():
    """Those that the originals wrote, and that tests/distributed/test_mpi.py gives to Debian's mpirun."""
    options = LaunchOptions(hosts="10.0.0.1:8,10.0.0.2:8", launcher="mpirun", ssh_port=3022, cores=48, output="logs")
    words = shlex.split(text_of(replace(options, mpi=mpi.MpiOptions(version=4, networks="10.0.0.0/24"))))
    assert not {"--output", "--prtemca"} & set(words) and "--merge-stderr-to-stdout" in words
    values = dict(itertools.pairwise(words))
    assert (values["--map-by"], values["--bind-to"], values["-np"]) == ("socket:PE=6", "core", "16")
    assert (values["--output-filename"], values["plm_rsh_args"]) == ("logs:nocopy", "-p 3022 -o BatchMode=yes")
    assert values["btl_tcp_if_include"] == values["oob_tcp_if_include"] == "10.0.0.0/24"
    alone = text_of(replace(options, hosts="a:8", output="", mpi=mpi.MpiOptions(version=4)))
    assert " --tag-output " in alone and "--mca" not in alone


def test_ssh_hands_every_word_through_the_shell_of_the_host():
    """A shell is asked what it makes of it, in place of the host's."""
    plan = plan_of(LaunchOptions(hosts="a:1,b:1", launcher="ssh", ssh_port=3022, env=("MINE=it's $HOME",), folder="/"))
    say = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['MINE'], os.environ['TERM']]))"
    for node, words in zip((0, 1), ssh.commands(plan), strict=True):
        assert words[:2] == ["ssh", "-tt"] and "BatchMode=yes" in words and words[words.index("-p") + 1] == "3022"
        assert words[-3:-1] == ["--", "ab"[node]]
        remote = words[-1].replace("-m torch.distributed.run", f"-c {shlex.quote(say)}", 1)
        done = subprocess.run(["sh", "-c", remote], capture_output=True, text=True, check=True)
        seen, mine, terminal = json.loads(done.stdout)
        assert terminal == "dumb", "nothing may be drawn on the terminal of -tt: its lines get a tag"
        assert seen[-len(COMMAND) :] == list(COMMAND) and f"--node-rank={node}" in seen and mine == "it's $HOME"


@pytest.mark.parametrize("restarts", [0, 1])
@pytest.mark.parametrize("launcher", ["torchrun", "kubernetes"])
def test_two_runs_of_a_recipe_do_not_meet_but_the_hosts_of_one_do(launcher, restarts, monkeypatch, tmp_path):
    """torchrun is started by a command on each host, so what it is given follows from that command alone."""
    options = LaunchOptions(hosts="a:1,b:1", launcher=launcher, max_restarts=restarts)
    options = replace(options, kubernetes=replace(options.kubernetes, image="sightline:1"))

    def ids(options: LaunchOptions, *flags: str) -> list[str]:
        return re.findall(r"--rdzv-id=(\S+)", text_of(options, *flags))

    first = ids(options)
    assert len(first) == (2 if launcher == "torchrun" else 1) and len({*first, *ids(options)}) == 1
    others = [ids(options, "--run.out", "runs/b"), ids(replace(options, port=1234)), ids(replace(options, name="b"))]
    monkeypatch.chdir(tmp_path)
    others += [ids(options)] if launcher == "torchrun" else []
    found = [first[0], *(other[0] for other in others)]
    assert len(set(found)) == len(found)


def test_printed_commands_of_ssh_say_that_they_start_together():
    first, *lines = text_of(LaunchOptions(hosts="a:8,b:8", launcher="ssh")).splitlines()
    assert first.startswith("# start these at the same time")
    assert [shlex.split(line)[:2] for line in lines] == [["ssh", "-tt"]] * 2


def test_two_elastic_starts_by_ssh_are_two_commands():
    """Equal ids let attempts take over a run folder from each other."""
    options = LaunchOptions(hosts="a:1,b:1", launcher="ssh", max_restarts=1)
    starts = [re.findall(r"--rdzv-id=(\S+)", text_of(options)) for _ in range(2)]
    assert all(len(ids) == 2 and ids[0] == ids[1] for ids in starts), "the hosts of one start are one command"
    assert starts[0] != starts[1]


# Slurm


def slurm_options(**changes) -> LaunchOptions:
    return LaunchOptions(nodes=8, per_node=8, launcher="slurm", **changes)


def directives(text: str) -> dict[str, str]:
    found = re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", text, re.MULTILINE)
    assert len(found) == text.count("#SBATCH")
    return dict(found)


def run_script(text: str, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Run the file in bash; return the words that srun gets, and its environment."""
    say = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
    for name, body in (("srun", f'exec {sys.executable} -c {shlex.quote(say)} "$@"'), ("scontrol", "echo n7; echo n9")):
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    environ = {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "n[7,9]", "SLURM_JOB_ID": "4711"}
    done = subprocess.run(["bash"], input=text, env=environ, capture_output=True, text=True, check=True)
    return tuple(json.loads(done.stdout))


def test_a_job_of_64_ranks_for_slurm(tmp_path: Path):
    """Read by bash; the directives are those that sbatch's manual names."""
    choices = slurm.SlurmOptions(
        partition="gpu", account="a-1", time="12:00:00", gres="gpu:h100", extra=("--exclusive",)
    )
    options = slurm_options(interfaces="ib0", cores=96, output=f"{tmp_path}/logs", folder=str(tmp_path), slurm=choices)
    text = text_of(replace(options, env=("MINE=it's $HOME",)))
    assert directives(text) == {
        "job-name": "demo-classification",
        "nodes": "8",
        "ntasks-per-node": "8",
        "cpus-per-task": "12",
        "gres": "gpu:h100:8",
        "partition": "gpu",
        "account": "a-1",
        "time": "12:00:00",
        "output": "%x-%j.log",
        "signal": "TERM@120",
        "exclusive": "",
    }
    words, environ = run_script(text, tmp_path)
    assert words[words.index(sys.executable) :] == [sys.executable, "-m", "sightline", *COMMAND]
    assert f"--output={tmp_path}/logs/rank_%t.log" in words and "--cpus-per-task=12" in words
    assert environ["NCCL_SOCKET_IFNAME"] == "ib0" and environ["MINE"] == "it's $HOME"
    assert "MASTER_PORT" not in environ  # each job makes its own
    assert (tmp_path / "logs").is_dir()


def test_an_elastic_job_for_slurm_starts_torchrun_on_each_node(tmp_path: Path):
    text = text_of(slurm_options(max_restarts=3, min_hosts=6, folder=str(tmp_path)))
    found = directives(text)
    assert (found["ntasks-per-node"], found["gres"], "no-kill" in found) == ("1", "gpu:8", True)
    words, environ = run_script(text, tmp_path)
    assert environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1", "a node that comes back would not be let in"
    assert {"--kill-on-bad-exit=0", "--nnodes=6:8", "--nproc-per-node=8", "--rdzv-endpoint=n7:24711"} < set(words)
    assert "--rdzv-id=demo-classification-4711" in words
    assert words[-len(COMMAND) :] == list(COMMAND)


def test_named_nodes_and_a_given_port_for_slurm(tmp_path: Path):
    options = LaunchOptions(hosts="n1:8,n2:8", launcher="slurm", port=1234, folder=str(tmp_path))
    text = text_of(replace(options, slurm=slurm.SlurmOptions(gres="none")))
    assert directives(text)["nodelist"] == "n1,n2" and "gres" not in directives(text)
    assert run_script(text, tmp_path)[1]["MASTER_PORT"] == "1234"
    elastic = text_of(replace(options, max_restarts=3))
    assert "--rdzv-endpoint=n7:1234" in run_script(elastic, tmp_path)[0]


@pytest.mark.parametrize("extra", ["-x", "--comment=a b", "--x\n#SBATCH --y", "--wrap=$(x)"])
def test_directives_that_would_be_more_than_one_are_refused(extra: str):
    with pytest.raises(UsageError, match="cannot be a directive of sbatch"):
        text_of(slurm_options(slurm=slurm.SlurmOptions(extra=(extra,))))


# Kubernetes


def kubernetes_text(form: str = "job", volumes: tuple[str, ...] = (), **changes) -> str:
    options = LaunchOptions(launcher="kubernetes", interfaces="eth0", **({"nodes": 8, "per_node": 8} | changes))
    chosen = replace(
        options.kubernetes, image="registry/sightline:1", form=form, volumes=volumes, memory="512Gi", cpus="96"
    )
    return text_of(replace(options, kubernetes=chosen, env=("MINE=$(HOME)",)))


Judge = Callable[[dict], None]


@pytest.fixture
def judge() -> Judge:
    """Raise at what the schemas of Kubernetes do not allow."""
    judges = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate, of the extra `dev`")
    return lambda document: judges.validate(document, "1.37", strict=True)


def expanded(words: list[str], environ: dict[str, str]) -> list[str]:
    """As kubelet does it: $(NAME) is the variable, $$ is one $."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else environ.get(match[1], match[0])

    return [re.sub(r"\$\$|\$\(([A-Za-z_]\w*)\)", value, word) for word in words]


def test_a_job_of_64_ranks_for_kubernetes(judge: Judge):
    """Judged by the schemas of Kubernetes itself."""
    service, job = yaml.safe_load_all(kubernetes_text(volumes=("claim:data:/data:ro", "host:/mnt/x:/runs")))
    for document in (service, job):
        judge(document)
    assert (service["kind"], job["kind"], service["spec"]["clusterIP"]) == ("Service", "Job", "None")
    assert service["spec"]["publishNotReadyAddresses"] is True, "the others look for the first before it is ready"
    assert service["spec"]["ports"] == [{"name": "rendezvous", "port": 29500}]
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (8, 8, "Indexed")
    # A pod is found under POD.SUBDOMAIN if a headless service of that name selects it.
    assert pod["subdomain"] == service["metadata"]["name"] == job["metadata"]["name"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    (container,) = pod["containers"]
    words = expanded(container["command"], {"JOB_COMPLETION_INDEX": "5", "x": "changed"})
    assert words[-len(COMMAND) :] == list(COMMAND)
    first = "demo-classification-0.demo-classification"
    assert {"--nnodes=8", "--node-rank=5", "--nproc-per-node=8", f"--master-addr={first}"} < set(words)
    environ = {each["name"]: each["value"] for each in container["env"]}
    assert environ["NCCL_SOCKET_IFNAME"] == "eth0" and environ["MINE"] == "$$(HOME)" and "PATH" not in environ
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8", "memory": "512Gi", "cpu": "96"}
    assert {each["mountPath"] for each in container["volumeMounts"]} == {"/dev/shm", "/data", "/runs"}
    assert "affinity" not in pod
    data, runs = pod["volumes"][1:]
    assert data["persistentVolumeClaim"]["readOnly"] and "readOnly" not in runs["hostPath"]


RESTRICTED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


@pytest.mark.parametrize("form", ["job", "pytorchjob"])
def test_pods_are_what_the_restricted_standard_of_kubernetes_allows(form: str, judge: Judge):
    """The list is that of its Pod Security Standards: volumes that hosts share are for the user to ask for."""
    documents = list(yaml.safe_load_all(kubernetes_text(form, volumes=("claim:runs:/runs",))))
    templates = [documents[-1]["spec"]["template"]] if form == "job" else []
    if form == "pytorchjob":
        templates = [each["template"] for each in documents[0]["spec"]["pytorchReplicaSpecs"].values()]
    for template in templates:
        pod = template["spec"]
        judge({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod})
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert all(container["securityContext"] == RESTRICTED for container in pod["containers"])
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        assert all({"emptyDir", "persistentVolumeClaim"} & volume.keys() for volume in pod["volumes"])
        assert pod["automountServiceAccountToken"] is False


def test_a_pod_lives_longer_than_its_ranks_may_take_to_save():
    """As torchrun reads it: the time in which ranks are let be after a signal."""
    _, job = yaml.safe_load_all(kubernetes_text())
    pod = job["spec"]["template"]["spec"]
    environ = {each["name"]: each["value"] for each in pod["containers"][0]["env"]}
    assert 30 < int(environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]


def test_the_user_of_pods_is_never_root():
    options = LaunchOptions(nodes=2, launcher="kubernetes")
    chosen = replace(options.kubernetes, image="x", user=5000)
    _, job = yaml.safe_load_all(text_of(replace(options, kubernetes=chosen)))
    found = job["spec"]["template"]["spec"]["securityContext"]
    assert [found[key] for key in ("runAsUser", "runAsGroup", "fsGroup")] == [5000] * 3
    with pytest.raises(UsageError, match="--kubernetes.user 0 must be in 1..2147483647: pods do not run as root"):
        text_of(replace(options, kubernetes=replace(chosen, user=0)))


def test_named_hosts_get_one_pod_each_in_kubernetes(judge: Judge):
    _, job = yaml.safe_load_all(kubernetes_text(nodes=0, hosts="n1:8,n2:8"))
    judge(job)
    affinity = job["spec"]["template"]["spec"]["affinity"]
    assert "['n1', 'n2']" in str(affinity["nodeAffinity"]) and affinity["podAntiAffinity"]


def test_the_form_of_kubeflow_1(judge: Judge):
    """Its pods are judged as those of a Job; its own fields as its documents name them."""
    (document,) = yaml.safe_load_all(kubernetes_text("pytorchjob"))
    assert (document["apiVersion"], document["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = document["spec"]["pytorchReplicaSpecs"]
    assert {name: each["replicas"] for name, each in replicas.items()} == {"Master": 1, "Worker": 7}
    for each in replicas.values():
        pod = each["template"]
        (container,) = pod["spec"]["containers"]
        assert container["name"] == "pytorch"
        words = expanded(container["command"], {"RANK": "6", "MASTER_ADDR": "job-master-0"})
        assert {"--node-rank=6", "--master-addr=job-master-0", "--nproc-per-node=8"} < set(words)
        assert words[-len(COMMAND) :] == list(COMMAND)
        whole = {"metadata": pod["metadata"], "spec": pod["spec"] | {"restartPolicy": "Never"}}
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": {"template": whole}}
        judge(job)


def test_the_form_of_kubeflow_2():
    (document,) = yaml.safe_load_all(kubernetes_text("trainjob"))
    assert (document["apiVersion"], document["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    trainer = document["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (8, 8)
    assert document["spec"]["runtimeRef"] == {"name": "torch-distributed"}
    assert expanded(trainer["command"], {})[-len(COMMAND) :] == list(COMMAND)
    for changes in ({"volumes": ("claim:a:/b",)}, {"nodes": 0, "hosts": "a:8"}):
        with pytest.raises(UsageError, match="cannot be written in a TrainJob"):
            kubernetes_text("trainjob", **changes)


@pytest.mark.parametrize("volume", ["data", "claim:data", "claim:Da ta:/x", "host:rel:/x", "claim:a:/x:rw", "nfs:a:/b"])
def test_a_volume_that_is_none_is_refused(volume: str):
    with pytest.raises(UsageError, match="--kubernetes.volumes"):
        kubernetes_text(volumes=(volume,))


@pytest.mark.parametrize("volumes", [("claim:d:/data", "claim:e:/data/"), ("claim:d:/dev/shm",)])
def test_two_volumes_at_one_path_are_refused(volumes: tuple[str, ...]):
    with pytest.raises(UsageError, match=f"'{volumes[-1]}': another volume is mounted at /d"):
        kubernetes_text(volumes=volumes)


def test_kubernetes_names_the_image_of_the_dockerfile_and_runs_it_as_its_user_in_its_folder():
    options = LaunchOptions(nodes=2, launcher="kubernetes")
    (pod,) = (
        each["spec"]["template"]["spec"] for each in yaml.safe_load_all(text_of(options)) if each["kind"] == "Job"
    )
    text = (Path(__file__).parents[3] / "Dockerfile").read_text()
    steps = list(dockerfile.instructions(text))
    (container,) = pod["containers"]
    assert f"#   docker build -t {container['image']} .\n" in text
    user = pod["securityContext"]["runAsUser"]
    assert [argument for word, argument in steps if word == "USER"] == [f"{user}:{user}"]
    assert [argument for word, argument in steps if word == "WORKDIR"][-1] == container["workingDir"]
    with pytest.raises(UsageError, match="--kubernetes.image"):
        text_of(replace(options, kubernetes=replace(options.kubernetes, image="")))
