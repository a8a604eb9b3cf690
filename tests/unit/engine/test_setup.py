"""The setup of a process; the CPUs it is bound to."""

import os
import subprocess
import sys

import pytest
import torch

from sightline import config
from sightline.engine.setup import bind_to_cpus, set_up, torch_as_before
from sightline.errors import UsageError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux binds processes to CPUs")


@pytest.fixture
def allowed():
    """The CPUs of this process, given back afterwards."""
    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    yield sorted(before)
    os.sched_setaffinity(0, before)
    torch.set_num_threads(threads)


def test_a_run_keeps_to_the_first_cpus_it_may_use(allowed: list[int]):
    torch.set_num_threads(len(allowed) + 1)
    set_up(*config.load("demo_classification", ["--run.max-cpus=1", "--run.device=cpu"]))
    assert os.sched_getaffinity(0) == {allowed[0]} and torch.get_num_threads() == 1
    asked = [sys.executable, "-c", "import os; print(*os.sched_getaffinity(0))"]
    child = subprocess.run(asked, capture_output=True, text=True, check=True)
    assert child.stdout.split() == [str(allowed[0])]  # what it starts keeps to them too


def test_threads_that_are_asked_for_win(allowed: list[int]):
    set_up(*config.load("demo_classification", ["--run.max-cpus=1", "--run.threads=2", "--run.device=cpu"]))
    assert torch.get_num_threads() == 2


def test_more_cpus_than_there_are_is_usage(allowed: list[int]):
    wanted = len(allowed) + 1
    with pytest.raises(UsageError, match=rf"run.max_cpus={wanted}, but this process may use {len(allowed)} CPUs"):
        bind_to_cpus(wanted)
    assert sorted(os.sched_getaffinity(0)) == allowed


def test_a_system_that_cannot_bind_is_reported(monkeypatch):
    monkeypatch.delattr(os, "sched_setaffinity")
    with pytest.raises(UsageError, match="run.max_cpus=1: linux cannot bind a process to CPUs; leave it out"):
        bind_to_cpus(1)


def test_what_a_call_changes_for_the_process_is_given_back(allowed: list[int]):
    def seen() -> list[object]:
        cudnn = torch.backends.cudnn
        found = [cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32]
        return [*found, torch.get_num_threads(), torch.initial_seed(), torch.get_rng_state().tolist()]

    before = seen()
    with torch_as_before():
        cudnn = torch.backends.cudnn
        cudnn.deterministic, cudnn.benchmark = not cudnn.deterministic, not cudnn.benchmark
        cudnn.allow_tf32 = not cudnn.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = not torch.backends.cuda.matmul.allow_tf32
        torch.set_num_threads(before[4] + 1)
        torch.manual_seed(before[5] + 1)
        assert all(now != then for now, then in zip(seen(), before, strict=True))
    assert seen() == before
