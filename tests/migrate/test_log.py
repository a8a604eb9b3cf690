"""What processes leave behind: the log's shape, files per process, JSON and table at exit, also after a crash."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import sightline_migrate as migrate
from sightline_migrate.reporting import logfile

Run = Callable[..., subprocess.CompletedProcess[str]]
RECORD = re.compile(
    r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] (?P<file>\S+):(?P<line>\d+)\n"
    r"    \[context\]: (?P<context>.*)\n"
    r"    \[(?P<kind>[a-z]+)\]: (?P<api>[\w.]+)\((?P<arguments>.*)\) --> (?P<what>.+)\n"
    r"(?:    \[user\]: (?P<user>.*)\n)?\n"
)


def documents(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("migrate_*.json"))]


def calls(found: list[dict[str, Any]]) -> Counter[str]:
    """How often each API was called, over processes and places."""
    total: Counter[str] = Counter()
    for document in found:
        for site in document["sites"]:
            total[site["api"]] += site["count"]
    return total


def test_links_planted_in_the_log_folder_are_not_followed(run_script: Run, tmp_path: Path):
    """Under the names of this process: of its log, and that of its JSON while it is being written."""
    text = """import os, torch
for name in (f"gpu_migration_{os.getpid()}.log", f"migrate_0_{os.getpid()}.partial"):
    os.symlink("../victim", os.path.join("migrate_log", name))
torch.ones(2, device="cuda")
"""
    (tmp_path / "victim").write_text("mine")
    done = run_script(text)
    assert (tmp_path / "victim").read_text() == "mine"
    assert re.search(r"logging stopped.*gpu_migration_\d+\.log", done.stderr)


def test_log_of_a_script(run_script: Run, tmp_path: Path):
    text = """import torch
for step in range(3):
    x = torch.ones(
        2, device="cuda"
    )
net = torch.nn.Linear(2, 3, device="cuda")
print("available", torch.cuda.is_available())
"""
    done = run_script(text)
    assert done.stdout == "available True\n"
    (log,) = (tmp_path / "migrate_log").glob("gpu_migration_*.log")
    written = log.read_text()
    records = [found.groupdict() for found in RECORD.finditer(written)]
    script = str(tmp_path / "script.py")
    (ones,) = [each for each in records if each["api"] == "torch.ones"]  # one record, whatever the number of calls
    assert (ones["file"], ones["context"], ones["kind"]) == (script, "x = torch.ones(", "exact")
    inside = [each for each in records if "/torch/nn/" in each["file"]]
    assert inside and {each["user"] for each in inside} == {
        f'{script}:6: net = torch.nn.Linear(2, 3, device="cuda")'  # the place inside torch and the line behind it
    }
    assert f"    [exact]: 3 x torch.ones at {script}:3\n" in written.split("] counts\n")[1]
    (document,) = documents(tmp_path / "migrate_log")
    assert log.name == f"gpu_migration_{document['pid']}.log"
    assert (document["rank"], document["finished"], document["error"], document["target"]) == (0, True, None, "cpu")
    assert calls([document])["torch.ones"] == 3
    table = done.stderr
    assert (
        "refused: none\n" in table and "       3  torch.ones --> " in table and "script.py:3  x = torch.ones(" in table
    )


WORKERS = """import multiprocessing, os, subprocess, sys
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

def answer(_):
    return torch.cuda.is_available() and torch.full((2,), 1.0, device="cuda").cuda().sum().item() == 2

class Made(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        assert answer(0)
        return torch.ones(2, device="cuda") * index

def rank_of(rank):
    torch.cuda.set_device(rank)
    assert answer(0) and torch.cuda.current_device() == rank and torch.cuda.device_count() == 2
    dist.init_process_group("nccl", init_method=f"file://{os.getcwd()}/store", world_size=2, rank=rank)
    total = torch.zeros(1, device="cuda") + rank + 1
    dist.all_reduce(total)
    assert total.item() == 3
    dist.destroy_process_group()

if __name__ == "__main__":
    for kind in sys.argv[1:]:
        loader = DataLoader(Made(), num_workers=1, pin_memory=True, multiprocessing_context=kind)
        print(kind, sum(float(x.sum()) for x in loader))
    for kind in ("fork", "forkserver"):
        pool = multiprocessing.get_context(kind).Pool(1)
        print(kind, pool.map(answer, [0]))
        pool.close()
        pool.join()
    if "spawn" in sys.argv:
        torch.multiprocessing.spawn(rank_of, nprocs=2)
    child = os.fork()
    if child == 0:
        torch.zeros(9, device="cuda")
        sys.exit(0)
    os.waitpid(child, 0)
    if "spawn" in sys.argv:
        code = "import torch; torch.cuda.is_available() and print('child', torch.zeros(2, device='cuda:0').tolist())"
        silent = os.environ | {"SIGHTLINE_MIGRATE_LOG": "0"}
        child = subprocess.run([sys.executable, "-c", code], env=silent, capture_output=True, text=True, check=True)
        print(child.stdout, end="")
    print(torch.cuda.device_count())
"""


# By default without what imports torch: what is spawned (as in test_accelerator.py), a program (as below), and a second
# fork server.
@pytest.mark.parametrize(
    "loaders", [("fork",), pytest.param(("fork", "spawn", "forkserver"), marks=pytest.mark.slow)], ids="-".join
)
def test_every_child_is_migrated_and_has_its_own_files(run_script: Run, tmp_path: Path, loaders: tuple[str, ...]):
    """Workers of loaders and pools, spawned ranks, forks and programs, however they start."""
    done = run_script(WORKERS, args=loaders)
    is_whole = "spawn" in loaders
    started = "".join(f"{kind} 12.0\n" for kind in loaders) + "fork [True]\nforkserver [True]\n"
    assert done.stdout == started + "child [0.0, 0.0]\n" * is_whole + "1\n"
    found = documents(tmp_path / "migrate_log")
    ranks = 2 * is_whole
    children = (
        len(loaders) + ranks + 3
    )  # two of pools and a fork; the fork server itself and the silent program have no files
    assert len({document["pid"] for document in found}) == len(found) == 1 + children
    (main,) = [document for document in found if document["parent"] is None]
    assert all(document["parent"] == main["pid"] and document["finished"] for document in found if document is not main)
    assert len({document["run"] for document in found}) == 1
    assert calls(found)["torch.ones"] == len(loaders) * 4 and calls(found)["torch.zeros"] == 1 + ranks
    assert calls(found)["torch.full"] == len(loaders) * 4 + 2 + ranks and calls([main])["torch.ones"] == 0
    # The process that started them speaks for all, once.
    assert done.stderr.count("on cpu, torch") == 1 and f"rank 0 with {children} child processes" in done.stderr
    assert re.search(rf"\n +{4 * len(loaders)}  torch\.ones --> ", done.stderr)


def test_table_waits_for_processes_that_the_script_does_not_join(run_script: Run, tmp_path: Path):
    text = """import multiprocessing, time
import torch
def work():
    time.sleep(0.2)  # the script has ended
    torch.ones(2, device="cuda")
multiprocessing.get_context("fork").Process(target=work).start()
"""
    table = run_script(text).stderr
    assert table.count("on cpu, torch") == 1 and "rank 0 with a child process" in table
    assert "       1  torch.ones --> " in table and "still running" not in table
    assert all(document["finished"] for document in documents(tmp_path / "migrate_log"))


def test_crash_leaves_a_report_and_the_same_traceback(run_script: Run, tmp_path: Path):
    text = """import sys
def train():
    if "plain" not in sys.argv:
        import torch
        torch.zeros(1, device="cuda")
    raise ValueError("loss is a fish")
train()
"""
    script = tmp_path / "script.py"
    script.write_text(text)
    plain = subprocess.run([sys.executable, script, "plain"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    done = run_script(text, "--quiet", check=False)
    assert done.returncode == plain.returncode == 1
    assert done.stderr.endswith(plain.stderr) and plain.stderr.endswith("ValueError: loss is a fish\n")
    (document,) = documents(tmp_path / "migrate_log")
    assert document["error"] == "ValueError: loss is a fish" and calls([document])["torch.zeros"] == 1


def test_killed_process_leaves_what_it_had_seen(run_script: Run, tmp_path: Path):
    text = """import os, signal, sys, torch
exec(compile("torch.cuda.is_available()", torch.__file__, "exec"))
torch.ones(1, device="cuda")
if os.fork() == 0:
    torch.zeros(1, device="cuda")
    sys.exit(0)
os.wait()
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert run_script(text, check=False).returncode == -signal.SIGKILL
    found = documents(tmp_path / "migrate_log")
    parent, child = sorted(found, key=lambda document: document["parent"] is not None)
    assert not parent["finished"] and calls([parent]) == {"torch.ones": 1}
    assert (parent["truths"], child["truths"]) == ({"torch.cuda.is_available": 1}, {})
    assert child["finished"] and calls([child]) == {"torch.zeros": 1} and child["parent"] == parent["pid"]


def test_no_log_where_there_can_be_no_folder(run_script: Run, tmp_path: Path):
    (tmp_path / "taken").write_text("a file")
    done = run_script("import torch\nprint(torch.ones(2, device='cuda').sum())\n", "--log", "taken")
    assert done.stdout == "tensor(2.)\n" and "logging stopped" in done.stderr


def test_log_ends_with_the_block(tmp_path: Path):
    with migrate.migrate(target="cpu", log=2, log_dir=str(tmp_path), quiet=True):
        torch.ones(1, device="cuda"), torch.ones(2, device="cuda")
        exec(compile("torch.cuda.is_available()", torch.__file__, "exec"))
        logfile._logs[0].close()  # as in a spawned worker: once by multiprocessing, once at exit
    (document,) = documents(tmp_path)
    _, counts = next(tmp_path.glob("gpu_migration_*.log")).read_text().split("] counts\n")
    assert "[exact]: 2 x torch.ones at" in counts and "[truth to torch]: 1 x torch.cuda.is_available\n" in counts
    assert document["finished"] and document["pid"] == os.getpid()
    assert logfile.RUN not in os.environ
    before = sorted(path.stat().st_mtime_ns for path in tmp_path.iterdir())
    with migrate.migrate(target="cpu"):
        torch.ones(1, device="cuda")
    assert before == sorted(path.stat().st_mtime_ns for path in tmp_path.iterdir())


@pytest.mark.slow  # three seconds; other processes that a script starts are above
def test_launcher_of_its_own_prints_no_second_table(run_script: Run, tmp_path: Path):
    """NVIDIA's launch.py and the like start `python train.py`, which speaks for itself; the error has no colours."""
    (tmp_path / "train.py").write_text("""import torch
torch.autocast("cuda", enabled=False)
torch.nn.Linear(1, 1).to("cuda")
raise ValueError("\\x1b[31mred\\x1b[0m fish")
""")
    done = run_script("import subprocess, sys\nsubprocess.run([sys.executable, 'train.py'])\n", "--target", "cpu")
    assert done.stderr.count("CUDA calls run on cpu") == 1 and done.stderr.count("on cpu, torch") == 1
    assert "ended with ValueError: red fish" in done.stderr and "real answers to torch" not in done.stderr
    found = {site["api"]: site for document in documents(tmp_path / "migrate_log") for site in document["sites"]}
    assert found["torch.nn.Module.to"]["arguments"] == "'cuda'"
    assert found["torch.amp.autocast_mode.autocast.__init__"]["what"] == "off, as the script asks"


def test_launchers_are_known_by_what_the_interpreter_runs(monkeypatch: pytest.MonkeyPatch):
    words = {
        "-m torch.distributed.run --nproc-per-node 2 train.py": "torch.distributed.run",
        "-u -X faulthandler /usr/bin/torchrun train.py": "/usr/bin/torchrun",
        "/usr/bin/torchrun train.py": "/usr/bin/torchrun",
        "-W ignore train.py torchrun": "train.py",
        "-c pass": "pass",
        "": "",
    }
    assert {text: logfile._program(text.split()) for text in words} == words
    launchers = []
    for text in words:
        monkeypatch.setattr(sys, "orig_argv", ["python", *text.split()])
        launchers += [text] if logfile.is_launcher() else []
    assert launchers == list(words)[:3]
