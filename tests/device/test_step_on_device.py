"""The step, the loader and resume on an accelerator: what the CPU cannot show."""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time

# cuBLAS repeats its bits only with this, and only if it is set before CUDA is initialised.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch

from sightline import api, config
from sightline.data.loading.loader import BadSamples, Loader
from sightline.data.loading.order import EvalOrder, TrainOrder
from sightline.engine.model import build_model
from sightline.hardware import devices
from sightline.hardware.world import World
from sightline.train.schedules import RunLength
from sightline.train.state import TrainState
from sightline.train.step import build_step

pytestmark = pytest.mark.device

TINY = """--data.path synthetic:classes=4,samples=256,size=40 --data.classes 4 --data.size 32 --data.eval-size 32
--data.eval-resize 36 --model.width 16 --train.global-batch 32 --data.mixup 0.2""".split()


def tiny(*flags):
    recipe, run = config.load("demo_classification", [*TINY, *flags])
    device = devices.select()
    if device.kind != "cuda":
        pytest.skip(f"written for cuda, this is {device.kind}")
    device.activate()
    precision = device.resolve_precision(recipe.train.precision)
    return dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, precision=precision)), run, device


def batches(recipe, device, count, workers=0):
    batch, seed = recipe.train.global_batch, recipe.train.seed
    train, val = (recipe.data.open(split, seed).bind(device, batch) for split in ("train", "val"))
    feeds = {
        "train": (train, TrainOrder(len(train.dataset), batch, seed)),
        "val": (val, EvalOrder(len(val.dataset), batch)),
    }
    loader = Loader(
        feeds, config.Run(workers=workers), device, World(), BadSamples("fail", 0, lambda bad: None), lambda: None
    )
    loader.seek("train", 0, count)
    got = [{k: v.clone() for k, v in loader.next("train").items()} for _ in range(count)]
    torch.cuda.synchronize()
    loader.close()
    return train, got


def run_steps(flags, steps=5, warmup=0):
    recipe, run, device = tiny(*flags)
    devices.set_deterministic(recipe.train.deterministic)
    bound, feed = batches(recipe, device, steps)
    state = TrainState(recipe, build_model(recipe, run, bound.dataset.spec, device), device, RunLength(1, 8))
    step = build_step(recipe, run, device, World(), state, bound)
    if warmup:
        step.warm_up(feed[-1], warmup)
    for number, batch in enumerate(feed):
        step(batch, number, 0.05)
    totals = step.read_totals(World())
    tensors = {f"{a}/{b}": t.detach().cpu().clone() for a, named in state.tensors().items() for b, t in named.items()}
    return totals, tensors


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_captured_step_gives_the_bits_of_an_eager_one(precision):
    flags = ["--run.compile", "off", "--train.precision", precision, "--train.ema", "0.9", "--train.deterministic"]
    flags += ["--train.accumulation", "2", "--train.clip", "1.0"]
    totals, eager = run_steps([*flags, "--run.graph", "off"])
    captured_totals, captured = run_steps([*flags, "--run.graph", "on"])
    assert totals == captured_totals
    assert all(torch.equal(eager[name], captured[name]) for name in eager)


def test_a_step_is_captured_while_another_thread_allocates_and_waits():
    """As the threads do that decode ahead of the step."""
    flags = ["--run.compile", "off", "--train.precision", "bf16", "--train.deterministic", "--run.graph", "on"]
    totals, alone = run_steps(flags)
    is_over, failed = threading.Event(), []

    def work():
        stream, size = torch.cuda.Stream(), 0
        try:
            with torch.cuda.stream(stream):
                while not is_over.is_set():
                    size = (size + 2**22) % 2**28
                    torch.zeros(size + 1).pin_memory().to("cuda", non_blocking=True)
                    stream.record_event().query()
                    stream.synchronize()
        except Exception as error:  # noqa: BLE001  # shown below
            failed.append(error)

    other = threading.Thread(target=work)
    other.start()
    try:
        beside_totals, beside = run_steps(flags)
    finally:
        is_over.set()
        other.join()
    assert not failed and totals == beside_totals
    assert all(torch.equal(alone[name], beside[name]) for name in alone)


@pytest.mark.parametrize("graph", ["on", "off"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_steps_before_the_run_leave_nothing_behind(precision, graph):
    flags = ["--run.compile", "off", "--train.precision", precision, "--train.ema", "0.9", "--train.deterministic"]
    totals, cold = run_steps([*flags, "--run.graph", graph])
    warm_totals, warm = run_steps([*flags, "--run.graph", graph], warmup=3)
    assert totals == warm_totals
    assert all(torch.equal(cold[name], warm[name]) for name in cold)


def test_modules_kept_in_fp32_are_compiled_and_captured():
    flags = ["--train.precision", "bf16", "--train.fp32-ops", "BatchNorm2d", "fc"]
    totals, _ = run_steps([*flags, "--run.compile", "off", "--run.graph", "off"], steps=2)
    compiled_totals, _ = run_steps([*flags, "--run.compile", "on", "--run.graph", "on"], steps=2)
    assert compiled_totals["loss"] == pytest.approx(totals["loss"], rel=2e-2)


def test_adamw_can_be_captured_too():
    flags = ["--run.compile", "off", "--train.deterministic", "--optimizer.kind", "adamw", "--optimizer.no-nesterov"]
    _, eager = run_steps([*flags, "--run.graph", "off"])
    _, captured = run_steps([*flags, "--run.graph", "on"])
    assert all(torch.equal(eager[name], captured[name]) for name in eager)


def test_a_compiled_step_stays_close_to_an_eager_one(monkeypatch):
    # fp32 without TF32, and two steps: batch norm over a tiny batch magnifies every rounding with each further one.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(devices, "set_deterministic", lambda on: None)
    totals, eager = run_steps(["--run.compile", "off", "--train.precision", "fp32"], steps=2)
    compiled_totals, compiled = run_steps(["--run.compile", "on", "--train.precision", "fp32"], steps=2)
    assert compiled_totals["loss"] == pytest.approx(totals["loss"], rel=1e-3)
    for name, tensor in eager.items():
        if name.startswith("model/") and tensor.is_floating_point():
            difference = (compiled[name] - tensor).norm() / tensor.norm().clamp(min=1e-3)
            assert difference < 1e-2, (name, float(difference))


def test_steps_do_not_wait_for_the_device():
    recipe, run, device = tiny()
    bound, feed = batches(recipe, device, 6)
    state = TrainState(recipe, build_model(recipe, run, bound.dataset.spec, device), device, RunLength(1, 8))
    step = build_step(recipe, run, device, World(), state, bound)
    for number in range(2):
        step(feed[number], number, 0.05)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(2, 6):
            step(feed[number], number, 0.05)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_bad_step_changes_nothing_and_is_known_one_step_later():
    recipe, run, device = tiny("--run.compile", "off", "--data.mixup", "0.2")
    bound, feed = batches(recipe, device, 4)
    state = TrainState(recipe, build_model(recipe, run, bound.dataset.spec, device), device, RunLength(1, 8))
    step = build_step(recipe, run, device, World(), state, bound)
    step(feed[0], 0, 0.05)
    before = {k: v.clone() for k, v in state.model.state_dict().items()}
    step(dict(feed[1], mix=torch.full_like(feed[1]["mix"], float("nan"))), 1, 0.05)
    assert all(torch.equal(before[k], v) for k, v in state.model.state_dict().items())
    assert step.take_bad_steps() == 0
    step(feed[2], 2, 0.05)
    assert step.take_bad_steps() == 1
    assert step.last_bad_step == 1


def test_pinned_worker_batches_equal_those_loaded_in_process():
    recipe, _, device = tiny()
    _, alone = batches(recipe, device, 8, workers=0)
    _, with_workers = batches(recipe, device, 8, workers=3)
    for a, b in zip(alone, with_workers, strict=True):
        assert all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("compile_", ["off", pytest.param("on", marks=pytest.mark.slow)])
def test_killed_and_resumed_gives_equal_bits(tmp_path, compile_):
    flags = [*TINY, "--train.deterministic", "--train.epochs", "3", "--run.checkpoint-every-steps", "3"]
    flags += ["--train.ema", "0.9", "--run.progress", "off", "--run.workers", "2", "--run.compile", compile_]
    command = [sys.executable, "-m", "sightline", "train", "demo_classification", *flags, "--run.out"]
    subprocess.run([*command, str(tmp_path / "a")], check=True)
    process = subprocess.Popen([*command, str(tmp_path / "b")])
    deadline = time.monotonic() + 300
    while not (tmp_path / "b/checkpoints/ckpt-00000009").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    subprocess.run([*command, str(tmp_path / "b")], check=True)
    resumed = [line for line in (tmp_path / "b/log.jsonl").read_text().splitlines() if '"resume"' in line]
    assert resumed
    for name in ("model", "ema", "optimizer"):
        file = f"checkpoints/ckpt-00000024/{name}.safetensors"
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), name


def test_it_learns_with_everything_on(tmp_path):
    data = "--data.path synthetic:classes=4,samples=512,size=40".split()
    flags = [*TINY, *data, "--train.epochs", "8", "--run.out", str(tmp_path / "run"), "--run.progress", "off"]
    recipe, run = config.load("demo_classification", flags)
    assert api.train(recipe, run).values["top1"] >= 0.95
