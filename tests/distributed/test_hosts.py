"""Two hosts with a network between them, in network namespaces: each runs torchrun, the rendezvous lives on one of
them, and the other is cut off and comes back. Both see the same run folder throughout, as on a file server that has a
network of its own."""

import contextlib
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from sightline import api

REPO = Path(__file__).resolve().parents[2]
LIMIT_S = 150  # after which something that must happen counts as never happening
STEPS = 600
PORT = 29400  # each test has its own network, so nobody else is there
CABLE = "cable"  # the one interface of a host besides the loopback
FLAGS = """--run.workers=0 --run.device=cpu --run.threads=1 --run.log-every-steps=1 --run.progress=plain
    --run.report=off --run.checkpoint-every-steps=10 --run.timeout-s=5""".split()

# Softmax regression: no batch-norm, so that splitting a batch changes nothing but the order of a sum. A step takes as
# long as the file PACE says, so that there is time to cut a cable.
RECIPE = '''
"""Softmax regression on pixels, at any pace."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from sightline.config import Recipe, TrainConfig
from sightline.data.classification import ClassificationData
from sightline.parts import DataSpec, ModelConfig
from sightline.tasks.classification import Classification
from sightline.train.optimizers import OptimizerConfig
from sightline.train.schedules import ScheduleConfig


class Paced(nn.Flatten):
    def forward(self, input):
        if self.training and "PACE" in os.environ:
            time.sleep(float(Path(os.environ["PACE"]).read_text()))
        return super().forward(input)


@dataclass(frozen=True)
class Regression(ModelConfig):
    def build(self, spec: DataSpec) -> nn.Module:
        return nn.Sequential(Paced(), nn.Linear(3 * spec.size[0] * spec.size[1], len(spec.classes)))


def recipe() -> Recipe:
    return Recipe(
        name="regression",
        model=Regression(),
        data=ClassificationData(path="synthetic:classes=4,samples=240,size=12", size=8, eval_resize=8, eval_size=8),
        task=Classification(),
        optimizer=OptimizerConfig(lr=0.01),
        schedule=ScheduleConfig(kind="cosine"),
        train=TrainConfig(epochs=20, global_batch=8, precision="fp32", ema=0.9, eval_every_epochs=20),
    )
'''


def ip(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)


class Host:
    """A network namespace, and the torchrun that was started in it last."""

    def __init__(self, name: str, address: str):
        self.name, self.address = name, address
        self.agent: subprocess.Popen | None = None
        self.said: list[Path] = []

    def ip(self, *words: str) -> None:
        done = ip("-n", self.name, *words)
        assert done.returncode == 0, done.stderr

    def plug(self, state: str) -> None:
        self.ip("link", "set", CABLE, state)

    def start(self, command: list[str], log: Path, environment: dict[str, str]) -> None:
        self.said.append(log)
        with log.open("w") as file:
            self.agent = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *command], env=environment, stdout=file, stderr=subprocess.STDOUT
            )

    def words(self) -> str:
        return f"\n== {self.name} ==\n".join(["", *(log.read_text()[-6000:] for log in self.said)])

    def remove(self) -> None:
        for pid in ip("netns", "pids", self.name).stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        if self.agent is not None:
            self.agent.wait()
        ip("netns", "del", self.name)


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> Iterator[list[Host]]:
    """(that with the rendezvous, the other); torchrun gives rank 0 to the lower of the addresses that are asked for."""
    made = [Host(f"sl{os.getpid()}{place}", f"10.77.0.{end}") for place, end in zip("ab", request.param, strict=True)]
    try:
        for host in made:
            if (done := ip("netns", "add", host.name)).returncode:
                pytest.skip(f"network namespaces are not allowed here: {done.stderr.strip()}")
        first, second = made
        done = ip("-n", first.name, "link", "add", CABLE, "type", "veth", "peer", "name", CABLE, "netns", second.name)
        if done.returncode:
            pytest.skip(f"veth pairs are not allowed here: {done.stderr.strip()}")
        for host in made:
            host.ip("link", "set", "lo", "up")
            host.ip("address", "add", f"{host.address}/24", "dev", CABLE)
            host.plug("up")
        yield made
    finally:
        for host in made:
            host.remove()


class Training:
    """One command on both hosts, into one run folder."""

    def __init__(self, folder: Path, hosts: list[Host], nodes: str):
        self.folder, self.hosts, self.nodes = folder, hosts, nodes
        self.out, self.pace = folder / "run", folder / "pace"
        (folder / "regression.py").write_text(RECIPE)
        self.set_pace(0.1)

    def set_pace(self, seconds: float) -> None:
        fresh = self.folder / "pace.new"
        fresh.write_text(str(seconds))
        fresh.replace(self.pace)

    def start(self, host: Host) -> None:
        times = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=5,read_timeout=10"
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", self.nodes, "--nproc-per-node", "1"]
        command += ["--rdzv-backend", "c10d", "--rdzv-id", "hosts", "--local-addr", host.address]
        command += ["--rdzv-endpoint", f"{self.hosts[0].address}:{PORT}", "--max-restarts", "5"]
        command += ["--rdzv-conf", f"is_host={int(host is self.hosts[0])},{times}"]
        command += ["-m", "sightline", "train", str(self.folder / "regression.py"), *FLAGS, f"--run.out={self.out}"]
        environment = {
            **os.environ,
            "PYTHONPATH": str(REPO),
            "OMP_NUM_THREADS": "1",
            "PACE": str(self.pace),
            "GLOO_SOCKET_IFNAME": CABLE,  # gloo would take the address of the host's name, which both share here
            # Else torchrun keeps the address of its first store, and a host that joins later waits for it in vain.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        host.start(command, self.folder / f"{host.name}.{len(host.said)}.log", environment)

    def events(self, kind: str) -> list[dict]:
        path = self.out / "log.jsonl"
        text = path.read_text() if path.exists() else ""
        lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        return [line for line in lines if line["event"] == kind]

    def ranks(self) -> list[int]:
        """Return the number of ranks of every start that has made a step."""
        lines = sorted(self.events("start") + self.events("train"), key=lambda line: line["time"])
        pairs = itertools.pairwise(lines)
        return [8 // a["local_batch"] for a, b in pairs if a["event"] == "start" and b["event"] == "train"]

    def wait(self, what: str, happens: Callable[[], bool]) -> None:
        """A host whose torchrun has ended for good gets a new one, as whatever watches over its services would do."""
        deadline = time.monotonic() + LIMIT_S
        while not happens():
            for host in self.hosts:
                if host.agent is not None and host.agent.poll():
                    assert host is not self.hosts[0], f"the host with the rendezvous gave up: {host.words()}"
                    self.start(host)
            told = "".join(host.words() for host in self.hosts)
            assert time.monotonic() < deadline, f"{what}: not within {LIMIT_S} s {told}"
            time.sleep(0.1)

    def step(self) -> int:
        return max((line["step"] for line in self.events("train")), default=0)


def run_to_the_end(training: Training) -> None:
    training.set_pace(0.0)
    training.wait("the end", lambda: all(host.agent.poll() == 0 for host in training.hosts))
    exits = json.loads((training.out / "exit.json").read_text())
    assert exits["code"] == 0, exits


def cut_off(training: Training) -> int:
    """After some steps of both; returns the last one that is known of."""
    for host in training.hosts:
        training.start(host)
    training.wait("steps on two hosts", lambda: training.step() >= 25)
    assert training.ranks() == [2]
    training.hosts[1].plug("down")
    return training.step()


def checkpoint(out: Path) -> Path:
    return out / "checkpoints" / f"ckpt-{STEPS:08d}"


def assert_resumes_from_checkpoints(training: Training, cut: int) -> None:
    """Each start from the newest checkpoint that there was, which a step that followed it proves to have been whole."""
    resumed = [line["step"] for line in training.events("resume")]
    assert resumed[0] % 10 == 0 and cut - 10 <= resumed[0] <= cut + 10 and resumed == sorted(resumed)
    steps = [line["step"] for line in training.events("train")]
    assert set(steps) == set(range(1, STEPS + 1))
    assert all(after == before + 1 or after - 1 in resumed for before, after in itertools.pairwise(steps))


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [(2, 1), (1, 2)], ids=["main rank lost", "main rank stays"], indirect=True)
def test_a_host_continues_alone_until_the_other_is_back(hosts: list[Host], tmp_path: Path):
    """2, 1 and 2 ranks; scores and weights are those of one process that nothing happened to, but for rounding."""
    training = Training(tmp_path, hosts, "1:2")
    cut = cut_off(training)
    training.wait("steps on one host", lambda: training.ranks() == [2, 1] and training.step() >= cut + 15)
    hosts[1].plug("up")
    training.wait("both hosts again", lambda: training.ranks()[-1:] == [2] and len(training.ranks()) > 2)
    run_to_the_end(training)
    assert training.ranks()[:3] == [2, 1, 2]
    assert_resumes_from_checkpoints(training, cut)

    alone = tmp_path / "alone"
    flags = [*FLAGS, f"--run.out={alone}", "--run.progress=off"]
    scores = api.train(*api.load(str(tmp_path / "regression.py"), flags))
    assert training.events("evaluate")[-1]["top1"] == pytest.approx(scores.values["top1"])
    for name in ("model", "ema", "optimizer"):
        ours, theirs = (load_file(checkpoint(out) / f"{name}.safetensors") for out in (training.out, alone))
        assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [(2, 1)], ids=["main rank lost"], indirect=True)
def test_a_host_that_waits_for_the_other_ends_with_equal_bits(hosts: list[Host], tmp_path: Path):
    """With 2 ranks throughout; equal to the last bit to two ranks that nothing happened to."""
    training = Training(tmp_path, hosts, "2:2")
    cut = cut_off(training)
    training.wait("the loss to be noticed", lambda: any(e["code"] == 8 for e in training.events("exit")))
    hosts[1].plug("up")
    training.wait("both hosts again", lambda: training.ranks() == [2, 2])
    run_to_the_end(training)
    assert set(training.ranks()) == {2}
    assert_resumes_from_checkpoints(training, cut)

    whole = tmp_path / "whole"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command += ["sightline", "train", str(tmp_path / "regression.py"), *FLAGS, f"--run.out={whole}"]
    environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, check=True, timeout=LIMIT_S, capture_output=True)
    for name in ("model", "ema", "optimizer"):
        ours, theirs = (checkpoint(out) / f"{name}.safetensors" for out in (training.out, whole))
        assert hashlib.sha256(ours.read_bytes()).digest() == hashlib.sha256(theirs.read_bytes()).digest(), name
