"""Two ranks on one GPU: gloo carries CUDA tensors, because NCCL refuses two ranks on one device. What they do is beside
two CPU ranks and one GPU: gradients, shared batch norm, checkpoints, evaluation. NCCL between ranks stays unseen."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from safetensors.torch import load_file

pytestmark = pytest.mark.device

REPO = Path(__file__).resolve().parents[2]
ONE, TWO = ["--run.device=cuda:0"], ["--run.device=cuda:0", "--run.devices=2"]
EXACT = [*TWO, "--train.deterministic"]  # else each process may choose other kernels, which round differently
# Batch norm over all ranks: without it, two ranks would not do what one does.
FLAGS = """train demo_classification --data.path=synthetic:classes=4,samples=64,size=40 --data.classes=4 --data.size=32
--data.eval-size=32 --data.eval-resize=32 --data.augment=off --data.decoder=cpu --model.width=16 --train.global-batch=8
--train.precision=fp32 --train.epochs=1 --train.bn-group=-1 --train.max-steps=6 --optimizer.lr=0.001 --run.compile=off
--run.workers=0 --run.threads=1 --run.report=off --run.progress=plain --run.log-every-steps=1 --run.keep=9
--run.checkpoint-every-steps=3""".split()
NCCL = """
import sys, torch, torch.distributed as dist
dist.init_process_group("nccl", init_method=sys.argv[1], rank=int(sys.argv[2]), world_size=2)
dist.all_reduce(torch.ones(1, device="cuda:0"))
torch.cuda.synchronize()
"""


def started(*words: str) -> subprocess.Popen:
    # Without TF32, so that a GPU rounds as a CPU does.
    path = os.pathsep.join(filter(None, (str(REPO), os.environ.get("PYTHONPATH"))))  # packages may lie there too
    environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "NVIDIA_TF32_OVERRIDE": "0"}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, *words], env=environ, **pipes)


def ended(process: subprocess.Popen) -> tuple[int, str]:
    try:
        said = process.communicate(timeout=100)[0]
    finally:
        process.kill()
    return process.returncode, said


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """Folders and what was said, by name; all start at once, because a start takes most of the time."""
    if not torch.cuda.is_available():
        pytest.skip("written for cuda")
    home = tmp_path_factory.mktemp("ranks")
    flags = {"gpu": TWO, "cpu": ["--run.device=cpu", "--run.devices=2"], "one": ONE}
    flags |= {"whole": EXACT, "stopped": [*EXACT, "--train.max-steps=3"]}
    started_runs = {
        name: started("-m", "sightline", *FLAGS, *each, f"--run.out={home / name}") for name, each in flags.items()
    }
    found = {name: ended(process) for name, process in started_runs.items()}
    assert {name: code for name, (code, _) in found.items()} == dict.fromkeys(found, 0), found
    more = {
        "stopped": started("-m", "sightline", *FLAGS, *EXACT, f"--run.out={home / 'stopped'}"),
        "evaluated": started("-m", "sightline", "evaluate", str(home / "gpu"), "--run.workers=0", *TWO),
    }
    found |= {name: ended(process) for name, process in more.items()}
    return {name: (home / name, said) for name, (_, said) in found.items()}


def curve(run: Path) -> list[tuple[float, float]]:
    lines = map(json.loads, (run / "log.jsonl").read_text().splitlines())
    return [(line["loss"], line["grad_norm"]) for line in lines if line["event"] == "train"]


def weights(run: Path, step: int = 6) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"ckpt-{step:08d}" / "model.safetensors")


@pytest.mark.parametrize("other", ["cpu", "one"])
def test_two_ranks_on_one_gpu_learn_what_two_cpu_ranks_and_one_gpu_learn(runs: dict, other: str):
    ours, theirs = (curve(runs[name][0]) for name in ("gpu", other))
    assert len(ours) == len(theirs) == 6
    for mine, expected in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(expected, rel=2e-3)
    found, reference = (weights(runs[name][0]) for name in ("gpu", other))
    assert found.keys() == reference.keys() and any("running_mean" in name for name in found)
    for name, tensor in reference.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-2, atol=2e-4, msg=name)


def test_a_line_says_who_shares_and_by_what(runs: dict):
    assert "2 ranks share cuda:0 and exchange tensors by gloo" in runs["gpu"][1]
    assert "batch 8 (4 on each of 2)" in runs["gpu"][1]


def test_ranks_that_share_a_gpu_resume_from_their_checkpoint(runs: dict):
    whole, resumed = weights(runs["whole"][0]), weights(runs["stopped"][0])
    events = [json.loads(line) for line in (runs["stopped"][0] / "log.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "resume"] == [3]
    apart = {name: float((resumed[name].double() - whole[name]).abs().max()) for name in whole}
    assert {name: most for name, most in apart.items() if most} == {}


def test_ranks_that_share_a_gpu_evaluate_as_the_training_did(runs: dict):
    [scores] = (runs["gpu"][0]).glob("scores-ckpt-*.json")
    again, before = (json.loads(path.read_text())["values"] for path in (scores, runs["gpu"][0] / "scores.json"))
    assert again["samples"] == before["samples"] == 8 and again["top1"] == before["top1"]
    assert again["loss"] == pytest.approx(before["loss"], rel=1e-4), runs["evaluated"][1]


def test_nccl_refuses_two_ranks_on_one_device(tmp_path: Path):
    """The reason for gloo; should this fail, NCCL can do it now, and devices.py need not avoid it."""
    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        pytest.skip("written for cuda with NCCL")
    place = f"tcp://127.0.0.1:{warm.free_port()}"
    ranks = [started("-c", NCCL, place, str(rank)) for rank in range(2)]
    found = [ended(rank) for rank in ranks]
    assert all(code for code, _ in found)
    assert any("Duplicate GPU detected" in said for _, said in found), found
