"""torchrun starts again what lost a rank: equal bits with as many ranks, the same order of samples with any number."""

import json
import os
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path

import pytest

from sightline import api

slow = pytest.mark.slow  # half a dozen processes each, and limits in seconds: not beside other tests
EVERY_TWO = "--run.checkpoint-every-steps=2"


@pytest.fixture(scope="module")
def whole(ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks that nothing happens to."""
    out = tmp_path_factory.mktemp("whole") / "run"
    said = ranks.run_warm(out, 2, EVERY_TWO, "--run.rank-output=all")
    assert ranks.ended(out)["code"] == 0, said
    assert "[rank 0] epoch 1/2  step 1/20" in said and "[rank 1] epoch 1/2  step 1/20" in said
    return out


def test_a_killed_rank_leads_to_a_restart_and_equal_weights(ranks, whole: Path, tmp_path: Path):
    out = tmp_path / "run"
    said = ranks.run_warm(out, 2, EVERY_TWO, restarts=1, FAULT="kill@1:8")
    assert ranks.ended(out)["code"] == 0 and ranks.ended(out)["restarts"] == 1, said
    lost, last = ranks.events(out, "exit")
    assert (lost["code"], last["code"]) == (8, 0)
    assert lost["reason"].startswith("rank 1 is lost") and f"error: {lost['reason']}" in said
    assert "[rank0]: Traceback" not in said
    assert ranks.events(out, "resume")[0]["step"] == 6
    assert ranks.bits(out, 20) == ranks.bits(whole, 20)
    assert {"ema.safetensors", "model.safetensors", "optimizer.safetensors"} == set(ranks.bits(out, 20))
    assert "img/s" in (out / "rank_1.log").read_text() and "[rank" not in said
    assert ranks.events(out, "stop_time")[0]["seconds"] > 0 and "a stop (SIGTERM)" not in said


def test_ranks_forget_a_damaged_best_checkpoint_together(ranks, tmp_path: Path):
    """Only rank 0 looks at it. A rank that kept its score, which nothing beats, would miss the next best one's save."""
    out = tmp_path / "run"
    said = ranks.run_warm(out, 2, "--run.keep=1", FAULT="term@1:13")
    assert ranks.ended(out)["code"] == 143, said
    folder = out / "checkpoints"
    newest = folder / (folder / "latest").read_text().strip()
    state = json.loads((newest / "state.json").read_text())
    best = f"ckpt-{state['progress']['best_step']:08d}"
    state["progress"]["best_score"] = 2.0
    (newest / "state.json").write_text(json.dumps(state))
    manifest = json.loads((newest / "manifest.json").read_text())
    data = (newest / "state.json").read_bytes()
    manifest["files"]["state.json"] = {"bytes": len(data), "sha256": sha256(data).hexdigest()}
    (newest / "manifest.json").write_text(json.dumps(manifest))
    (folder / best / "model.safetensors").write_bytes(b"damaged")
    more = ("--train.epochs=3", "--run.checkpoint-every-epochs=100", "--run.timeout-s=20")
    said = ranks.run_warm(out, 2, "--run.keep=1", *more)
    assert ranks.ended(out)["code"] == 0, said
    (warning,) = (line["text"] for line in ranks.events(out, "warning") if "best" in line["text"])
    assert f"moved to {best}.corrupt. No other was evaluated" in warning
    assert (folder / "best").read_text().strip() in ("ckpt-00000020", "ckpt-00000030")


@slow
def test_a_signal_to_one_rank_stops_all_in_the_same_step(ranks, tmp_path: Path):
    out = tmp_path / "run"
    said = ranks.run(out, 2, FAULT="term@1:5")
    assert ranks.ended(out)["code"] == 143, said
    step = ranks.events(out, "train")[-1]["step"]
    assert 5 <= step <= 6 and [e["step"] for e in ranks.events(out, "checkpoint")] == [step]
    told = (out / "rank_1.log").read_text()
    assert f"saved at step {step}; the same command resumes from there" in told and "exit 143" in told


class Traced:
    """Runs of softmax regression in one folder that tell the samples of each step, all ranks together."""

    def __init__(self, ranks, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.ranks, self.folder, self.out = ranks, folder, folder / "run"
        self.said = ""
        folder.mkdir()
        monkeypatch.setenv("TRACE", str(folder))
        monkeypatch.setenv("MODEL", "regression")

    def train(self, number: int, *flags: str, **options) -> list[set[int]]:
        if number == 1:
            common = [*self.ranks.flags, f"--run.out={self.out}", "--run.progress=off"]
            api.train(*api.load(self.ranks.recipe, [*common, *flags]))
        else:
            self.said = self.ranks.run(self.out, number, *flags, **options)
        files = [self.folder / f"{rank}.jsonl" for rank in range(number)]
        shares = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
        for file in files:
            file.unlink()
        steps = [[index for part in parts for index in part] for parts in zip(*shares, strict=True)]
        assert all(len(step) == len(set(step)) == 12 for step in steps), "ranks must share a batch, not repeat it"
        return [set(step) for step in steps]


def assert_as_alone(traced: Traced, samples: list[set[int]], tmp_path: Path, monkeypatch, lr: float) -> None:
    """The samples and losses of one rank that did it all with the rate of the first start."""
    alone = Traced(traced.ranks, tmp_path / "alone", monkeypatch)
    assert samples == alone.train(1, f"--optimizer.lr={lr}")
    assert [e["base_lr"] for e in traced.ranks.events(traced.out, "start")] == [lr] * 2
    ours, theirs = ({e["step"]: e["loss"] for e in traced.ranks.events(t.out, "train")} for t in (traced, alone))
    assert len(theirs) == 20 and ours == pytest.approx(theirs, rel=1e-4)


@slow
def test_what_ends_in_vain_is_not_tried_again_until_a_person_does(ranks, tmp_path: Path, monkeypatch):
    """Who then takes one rank instead of two: the order of samples and the rate stay."""
    traced = Traced(ranks, tmp_path / "traced", monkeypatch)
    before = traced.train(2, "--run.checkpoint-every-steps=7", restarts=1, FAULT="always-data@1:8")
    out, said = traced.out, traced.said
    assert ranks.ended(out)["code"] == 3 and ranks.ended(out)["reason"] == "made to find bad data", said
    assert len(ranks.events(out, "start")) == 1 and len(before) == 8, "the second attempt must not have trained"
    assert "made to find bad data (as the attempt before; not tried again)" in said
    assert ranks.events(out, "exit")[-1]["reason"] == "rank 1 ended with exit 3: made to find bad data"

    after = traced.train(1)
    assert ranks.ended(out)["code"] == 0
    assert ranks.events(out, "warning")[-1]["text"].startswith("ranks changed from 2 to 1")
    assert_as_alone(traced, [*before[:7], *after], tmp_path, monkeypatch, lr=0.01)


@slow
@pytest.mark.parametrize(("first", "second", "lr"), [(1, 2, 0.02), (2, 3, 0.01), (3, 1, 0.01)])
def test_another_number_of_ranks_resumes_in_the_order_of_samples(ranks, tmp_path, monkeypatch, first, second, lr):
    traced = Traced(ranks, tmp_path / "traced", monkeypatch)
    before = traced.train(first, "--train.max-steps=7")
    samples = [*before, *traced.train(second)]
    assert ranks.ended(traced.out)["code"] == 0, traced.said
    assert_as_alone(traced, samples, tmp_path, monkeypatch, lr)


@slow
def test_a_batch_that_cannot_be_split_is_said_once(ranks, tmp_path: Path):
    said = ranks.run(tmp_path / "run", 2, "--train.global-batch=9", restarts=2)
    ended = ranks.ended(tmp_path / "run")
    assert ended["code"] == 2 and "global_batch=9 cannot be split over 2 devices" in ended["reason"], said
    assert len(ranks.events(tmp_path / "run", "exit")) == 1


@slow
def test_a_host_is_lost_and_comes_back(ranks, lose_host, tmp_path: Path):
    """Two agents as two hosts: both train, one loses its power, the other continues alone, then both train again."""
    out = tmp_path / "run"
    endpoint = f"localhost:{29500 + os.getpid() % 400}"

    def agent(is_host: int) -> list[str]:
        times = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=8"
        how = ["--rdzv-backend", "c10d", "--rdzv-id", "elastic", "--rdzv-endpoint", endpoint]
        conf = ["--rdzv-conf", f"is_host={is_host},{times}"]
        return ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "5", *how, *conf]

    def wait_for(ranks_now: int, starts: int, process) -> None:
        deadline = time.monotonic() + 150
        while True:
            begun = ranks.events(out, "start")
            steps = [e["step"] for e in ranks.events(out, "train")]
            if (
                len(begun) >= starts
                and begun[-1]["local_batch"] == 12 // ranks_now
                and steps[-1:] > [begun[-1]["step"]]
                and ranks.events(out, "checkpoint")  # what is lost before the first starts over, also with its rate
            ):
                return
            assert process.poll() is None, process.stdout.read()
            assert time.monotonic() < deadline, (ranks.events(out, "start"), ranks.events(out, "exit"))
            time.sleep(0.1)

    flags = [EVERY_TWO, "--train.epochs=100000", "--run.progress=off"]
    # Without this, hosts that rejoin hang under torchrun 2.15.
    rejoins = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with ranks.start(out, agent(1), *flags, **rejoins) as first:
        with ranks.start(out, agent(0), *flags, **rejoins) as second:
            wait_for(2, 1, first)
            lose_host(second.pid)
        wait_for(1, 2, first)
        with ranks.start(out, agent(0), *flags, **rejoins):
            wait_for(2, 3, first)
    steps = [e["step"] for e in ranks.events(out, "resume")]
    assert steps == sorted(steps) and steps[0] > 0
    # That of two ranks, or of one where the second host came later than a busy machine's two seconds.
    assert {e["base_lr"] for e in ranks.events(out, "start")} in ({0.01}, {0.02})


@slow
def test_ranks_that_do_not_share_the_run_folder_are_refused(ranks, tmp_path: Path, monkeypatch):
    """Each in a folder of its own, of which only that of rank 0 holds a run."""
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
    monkeypatch.chdir(tmp_path / "0")
    api.train(*api.load(ranks.recipe, [*ranks.flags, "--run.out=run", "--train.max-steps=3"]))
    script = tmp_path / "apart.py"
    script.write_text(
        "import os, sys\nfrom sightline.cli import main\n"
        f"os.chdir(os.path.join({str(tmp_path)!r}, os.environ['RANK']))\nsys.exit(main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(script)]
    done = subprocess.run(
        [*command, "train", ranks.recipe, *ranks.flags, "--run.out=run"], capture_output=True, text=True, timeout=200
    )
    assert "error: ranks do not find the same newest checkpoint in run; it must be one folder" in done.stderr
    assert ranks.ended(tmp_path / "0" / "run")["code"] == 8
