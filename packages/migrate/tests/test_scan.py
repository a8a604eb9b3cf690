"""The scan before running: what becomes of each line, by the same table of rules, with nothing executed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sightline_migrate import cli
from sightline_migrate.reporting import scan, tuning
from sightline_migrate.rules.table import all_rules

HEAD = """import torch
import torch.cuda as tc
import torch.nn as nn
from torch import cuda
from torch.cuda.amp import autocast as ac, GradScaler
from torch.utils.cpp_extension import load
from torch.utils import cpp_extension as ce
from torch.utils import data
from torch.nn.parallel import DistributedDataParallel as DDP
import torch.distributed as dist
import triton
import apex
"""


@pytest.fixture(scope="module")
def table() -> scan.RuleIndex:
    return scan.RuleIndex("cpu")


def found(line: str, table: scan.RuleIndex, tmp_path: Path) -> list[tuple[str, str]]:
    """(kind, api) of what stands in `line`, put under HEAD."""
    path = tmp_path / "script.py"
    path.write_text(HEAD + line + "\n")
    here = len(HEAD.splitlines()) + 1
    findings = [each for each in scan.scan_file(path, table) if each.line >= here]
    assert all(each.source and each.source in line for each in findings)
    return [(each.kind, each.api) for each in findings]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("torch.cuda.is_available()", [("exact", "torch.cuda.is_available")]),
        ("tc.is_available()", [("exact", "torch.cuda.is_available")]),
        ("cuda.is_available()", [("exact", "torch.cuda.is_available")]),
        ("tc.memory.max_memory_allocated()", [("adapted", "torch.cuda.memory.max_memory_allocated")]),
        ("with ac(): pass", [("adapted", "torch.cuda.amp.autocast")]),
        ("torch.autocast('cuda')", [("adapted", "torch.autocast")]),
        ("s = GradScaler(enabled=True)", [("adapted", "torch.cuda.amp.GradScaler")]),
        ("x = torch.ones(2, device='cuda')", [("exact", "torch.ones")]),
        ("x = torch.ones(2, device=where)", [("exact", "torch.ones")]),
        ("x = torch.ones(2)", []),
        ("x = torch.ones(2, device='cpu')", []),
        ("make = torch.ones", []),  # what it is called with is not known
        ("pick = data.DataLoader", []),
        ("wait = dist.barrier", []),
        ("dist.barrier(device_ids=[0])", [("ignored", "torch.distributed.barrier")]),
        ("net = nn.Linear(2, 3).cuda()", [("exact", ".cuda()")]),
        ("x.to('cuda:1', non_blocking=True)", [("exact", ".to()")]),
        ("x.to(args.device)", [("exact", ".to()")]),
        ("x.to(device='cuda')", [("exact", ".to()")]),
        ("x.to(self.config.device), x.to(self.device)", [("exact", ".to()")]),
        ("x.to(y.device)", [("adapted", ".to()")]),
        ("x.to(device=next(net.parameters()).device)", [("adapted", ".to()")]),
        ("x.type_as(y)", [("adapted", ".type_as()")]),
        ("(x / 255).cuda()", [("adapted", ".cuda()")]),
        ("Variable(x.data + e, requires_grad=True).to('cuda')", [("adapted", ".to()")]),
        ("f(x + 1).cuda()", [("exact", ".cuda()")]),
        ("x.to(torch.float32)", []),
        ("x.to('cpu')", [("sync", '.to("cpu")')]),
        ("net = Net(device='cuda')", [("exact", 'device="cuda"')]),
        ("net = Net(device='meta', name='cuda')", []),
        ("if x.is_cuda: pass", [("adapted", ".is_cuda")]),
        ("x = torch.cuda.FloatTensor(2)", [("adapted", "torch.cuda.FloatTensor")]),
        ("g = torch.cuda.CUDAGraph()", [("refused", "torch.cuda.CUDAGraph")]),
        ("torch.cuda.wonder(1)", [("refused", "torch.cuda.wonder")]),
        ("tc.amp.wonder()", [("refused", "torch.cuda.amp.wonder")]),
        ("torch.cuda.nvtx.range_push('x')", [("ignored", "torch.cuda.nvtx.range_push")]),
        ("except_ = torch.cuda.OutOfMemoryError", []),
        ("load('k', ['k.cpp', 'k.cu'])", [("refused", "torch.utils.cpp_extension.load")]),
        ("load('k', ['k.cpp'])", []),
        ("load('k', ['k.cpp'], with_cuda=True)", [("refused", "torch.utils.cpp_extension.load")]),
        ("ce.load_inline('k', 'x', cuda_sources='y')", [("refused", "torch.utils.cpp_extension.load_inline")]),
        ("from .torch.cuda import synchronize\nsynchronize()", []),
        ("from . import cupy", []),
        ("ce.CUDAExtension('k', ['k.cu'])", [("refused", "torch.utils.cpp_extension.CUDAExtension")]),
        ("import ctypes\nctypes.CDLL('libcudart.so')", [("adapted", "ctypes.CDLL")]),
        ("from ctypes import cdll, CDLL\ncdll.LoadLibrary('/a/libcudart.so.12')", [("adapted", "ctypes.CDLL")]),
        ("import ctypes\nctypes.CDLL('libm.so.6')\nx.cudaMalloc(1)", []),
        (
            "from ctypes import CDLL\nlib = CDLL('libcudart.so')\nlib.cudaMalloc(p, 4), lib.cudaDeviceSetLimit(5, 128)",
            [
                ("adapted", "ctypes.CDLL"),
                ("refused", "libcudart.cudaMalloc"),
                ("adapted", "libcudart.cudaDeviceSetLimit"),
            ],
        ),
        ("import cupy as cp", [("refused", "cupy")]),
        ("from numba import cuda as nc", [("refused", "numba.cuda")]),
        ("@triton.jit\ndef kernel(x): pass", [("refused", "triton.jit")]),
        ("step = torch.compile(step)", [("adapted", "torch.compile")]),
        ("loss.item()", [("sync", ".item()")]),
        ("sync = torch.cuda.synchronize", [("exact", "torch.cuda.synchronize")]),
        ("device = torch.device('cuda' if big else 'cpu')", []),
        ("other.is_available()", []),
        ("data.DataLoader(made, pin_memory=True)", [("ignored", "torch.utils.data.DataLoader")]),
        ("data.DataLoader(made, pin_memory=False)", []),
        ("data.DataLoader(made, **options)", [("ignored", "torch.utils.data.DataLoader")]),
        ("subprocess.check_output(['nvidia-smi', '-L'])", [("refused", "nvidia-smi")]),
        ("os.system('/usr/bin/nvidia-smi')", [("refused", "nvidia-smi")]),
        ("os.popen(f'nvidia-smi -i {gpu}').read()", [("refused", "nvidia-smi")]),
        ("print('nvidia-smi'), run('my-nvidia-smi'), run(['cat', 'x'])", []),
        ("o = torch.optim.AdamW(p, capturable=True)", [("adapted", "torch.optim.Optimizer.add_param_group")]),
        ("o = torch.optim.AdamW(p, fused=True)", []),
        ("dist.init_process_group('nccl')", [("exact", "torch.distributed.init_process_group")]),
        ("dist.barrier()", []),
        ("DDP(net, device_ids=[0])", [("exact", "torch.nn.parallel.DistributedDataParallel")]),
        ("nn.parallel.scatter(x, [0, 1])", [("adapted", "torch.nn.parallel.scatter")]),
        ("tc.comm.reduce_add([x, y])", [("adapted", "torch.cuda.comm.reduce_add")]),
        ("tc._sleep(100)", [("ignored", "torch.cuda._sleep")]),
        ("apex.wonder()", [("refused", "apex.wonder")]),
        ("from apex import amp", []),
        ("apex.amp.__dict__", []),
        ("apex.amp.master_params(optimizer)", []),
        ("try:\n    import cupy\nexcept ImportError:\n    cupy = None", []),
        ("try:\n    from apex.contrib import fast\n    fast()\nexcept ImportError:\n    fast = None", []),
        ("from torch.ops.torchvision import nms", []),
        ("torch.optim.optimizer.params_t", []),
    ],
)
def test_one_line(line: str, expected: list[tuple[str, str]], table: scan.RuleIndex, tmp_path: Path):
    assert found(line, table, tmp_path) == expected


def test_name_for_a_function_counts_where_it_is_called(table: scan.RuleIndex, tmp_path: Path):
    text = "wait = torch.cuda.synchronize\nwait()"
    assert found(text, table, tmp_path) == [
        ("exact", "torch.cuda.synchronize"),
        ("exact", "torch.cuda.synchronize"),
        ("sync", "torch.cuda.synchronize"),
    ]


def test_every_rule_of_torch_is_found_by_its_own_name(table: scan.RuleIndex):
    """The scan and the run share one table: whatever name a rule has, the scan knows it."""
    looked_for = [rule.name for rule in all_rules() if rule.fits("cpu") and rule.name not in scan.CONVERTING]
    assert "torch.Tensor.cuda" in looked_for
    for rule in looked_for:
        owner, _, last = rule.rpartition(".")
        assert table.find(owner if last in scan.CALLS_OF_CLASSES else rule) is not None, rule


def test_device_number_depends_on_the_build(table: scan.RuleIndex, tmp_path: Path):
    has_cuda = torch.version.cuda is not None
    assert found("torch.device(0)", table, tmp_path) == ([] if has_cuda else [("refused", "torch.device(0)")])


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "train.py").write_text("import os\nos._exit(99)\nimport torch\nx = torch.cuda.wonder().item()\n")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "other.py").write_text("import cupy\n")
    assert scan.main([str(tmp_path), "--target", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "\nrefused:" in f"\n{text}" and not any(kind in text for kind in ("adapted:", "ignored:", "exact:", "sync:"))
    assert "train.py:4  torch.cuda.wonder --> " in text and text.endswith(
        "1 file on cpu: refused 1, adapted 0, ignored 0, exact 0\n"
    )
    assert ".item()" not in text
    assert scan.main([str(tmp_path), "--target", "cpu", "--strict", "--json", "--syncs"]) == 3
    document = json.loads(capsys.readouterr().out)
    assert [each["kind"] for each in document["findings"]] == ["refused", "sync"]
    (tmp_path / "train.py").write_text("print(1)\n")
    assert scan.main([str(tmp_path), "--target", "cpu", "--strict"]) == 0


def test_extensions_that_a_submodule_builds_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    built = tmp_path / "submodules" / "rasterizer"
    (tmp_path / "kernels").mkdir()
    built.mkdir(parents=True)
    (built / "setup.py").write_text(
        "from torch.utils.cpp_extension import CUDAExtension\nsetup(ext_modules=[CUDAExtension(name='fast_splat._C', "
        "sources=['a.cu']), CUDAExtension('mine', ['b.cu'])])\n"
    )
    path = tmp_path / "train.py"
    path.write_text(
        "from fast_splat import render\nimport mine\nimport other\ntry:\n    import fast_splat\n"
        "except ImportError:\n    pass\nfrom kernels import mine as own\nfrom flash_attn.x import y\n"
    )
    assert scan.main([str(path), "--target", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["findings"]
    assert [(each["line"], each["kind"], each["api"]) for each in found] == [
        (1, "refused", "fast_splat"),
        (2, "refused", "mine"),
        (9, "refused", "flash_attn"),
    ]
    assert found[0]["what"].startswith("CUDA kernels, built by ") and found[0]["what"].endswith("rasterizer/setup.py")
    (built / "fast_splat").mkdir()
    own = built / "fast_splat" / "use.py"  # of the package itself
    own.write_text("from fast_splat import render\nfrom fast_splat._C import rasterize\n")
    rules = scan.RuleIndex("cpu")
    rules.extensions = scan.extensions_near([path])
    assert [each.line for each in scan.scan_file(own, rules)] == [2]


def test_file_of_another_language_is_named(tmp_path: Path):
    path = tmp_path / "old.py"
    path.write_text("print 'two'\n")
    with pytest.raises(scan.MigrateError, match="old.py:1: .*; this Python version cannot parse it"):
        scan.scan_file(path, scan.RuleIndex("cpu"))


def test_files_that_cannot_be_read_are_named_and_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "deep.py").write_text(f"x = {' + '.join(['1'] * 20_000)}\n")
    (tmp_path / "moved.py").write_text(f"({' + '.join(['x'] * 600)}).cuda()\n")  # parsed, but too deep to write out
    (tmp_path / "old.py").write_text("print 'two'\n")
    with pytest.raises(scan.MigrateError, match=r"(?s)deep.py: .*old.py:1: "):
        scan.main([str(tmp_path), "--target", "cpu", "--advise"])
    (tmp_path / "train.py").write_text("import torch\ntorch.cuda.wonder()\n")
    assert scan.main([str(tmp_path), "--target", "cpu", "--advise", "--strict"]) == 3
    said, skipped = capsys.readouterr()
    assert "train.py:2  torch.cuda.wonder" in said and "\n1 file on cpu: refused 1," in said
    for name, line in zip(("deep.py: ", "moved.py: ", "old.py:1: "), skipped.splitlines(), strict=True):
        assert f" scan: skipped {tmp_path / name}" in line


def test_autocast_on_a_cpu_may_run_in_float32(table: scan.RuleIndex, tmp_path: Path):
    path = tmp_path / "script.py"
    path.write_text("import torch\nwith torch.autocast('cuda'), torch.cuda.amp.autocast(): pass\n")
    told = {each.what for each in scan.scan_file(path, table)}
    assert told == {"autocast on the target; in float32 where a CPU only emulates its type"}


ADVISED = """import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).cuda()
model = DDP(model, device_ids=[0])
loader = DataLoader(data, batch_size=32, shuffle=True, sampler=DistributedSampler(data))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = StepLR(optimizer, 30)
scaler = torch.amp.GradScaler("cuda")
criterion = nn.CrossEntropyLoss().cuda()
criterion.to("cuda")
for epoch in range(90):
    total = total.cpu()
    for step, (x, y) in enumerate(loader):
        x = x.cuda()
        y = y.to(device, non_blocking=True)
        loss = model(x)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        print(loss.item())
        if step % 100 == 0:
            print(loss.item())
graph = torch.cuda.CUDAGraph()
"""


def test_advice_goes_from_running_to_fast_to_accurate(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "train.py"
    path.write_text(ADVISED)
    assert cli.main(["scan", str(path), "--target", "cpu", "--advise", "--json"]) == 0
    advice = json.loads(capsys.readouterr().out)["advice"]
    assert [(each["stage"], each["line"]) for each in advice] == [
        ("so that it runs", 25),
        *(("so that it is fast", line) for line in (7, 9, 9, 10, 18, 22)),
        *(("so that it is accurate", line) for line in (8, 9, 9, 10, 11, 21)),
    ]
    lines = ADVISED.splitlines()
    assert [each["source"] for each in advice] == [lines[each["line"] - 1].strip() for each in advice]
    remedies = " ".join(each["remedy"] for each in advice)
    for word in ("non_blocking=True", "fused=True", "channels_last", "num_workers", "every N steps", "warm-up"):
        assert word in remedies
    better = ADVISED.replace("shuffle=True", "num_workers=4, pin_memory=True").replace("lr=0.1", "lr=0.1, fused=True")
    path.write_text(better.replace("x.cuda()", "x.cuda(non_blocking=True)").partition("graph =")[0])
    assert cli.main(["scan", str(path), "--target", "cpu", "--advise"]) == 0
    text = capsys.readouterr().out
    assert (
        "so that it runs: nothing to change" in text and "train.py:9 " in text and "non_blocking=True, with" not in text
    )


def test_advice_knows_which_steps_wait(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "train.py"
    path.write_text(
        "for x in loader:\n    a.cpu()\n    if rank == 0:\n        b.cpu()\n    elif c.cpu():\n        pass\n"
        "    if step > 0:\n        if step % 10 == 0:\n            for name, value in named:\n"
        "                if value.any():\n                    d.cpu()\n"
        "    def later():\n        e.cpu()\nif rank == 0:\n    for x in loader:\n        f.cpu()\n"
    )
    assert cli.main(["scan", str(path), "--target", "cpu", "--advise", "--json"]) == 0
    said = {each["line"]: each["what"] for each in json.loads(capsys.readouterr().out)["advice"]}
    every, some = (f".cpu() waits for the device {when}" for when in (tuning.EVERY_STEP, tuning.SOME_STEPS))
    assert said == {2: every, 4: some, 5: some, 16: every}


@pytest.mark.parametrize(
    ("made", "batch", "says"),
    [
        ("torch.randn(512, 3, 32, 32)", "64", None),
        ("torch.zeros((512, 3))", "size", None),
        ("torch.randint(0, 9, (500, 3))", "64", "is 52 of 64"),
        ("torch.load('x.pt')", "64", "may be smaller"),
        ("torch.randn(count, 3)", "64", "may be smaller"),
        ("torch.randn(512, 3)", "count", "may be smaller"),
        ("torch.arange(512)", "100", "is 12 of 100"),
        ("torch.arange(8, 512)", "64", "may be smaller"),
        ("torch.rand(size=[512, 3])", "100", "is 12 of 100"),
    ],
)
def test_advice_on_a_loader_of_tensors_knows_workers_and_the_last_batch(
    made: str, batch: str, says: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "train.py"
    path.write_text(
        "import torch\nfrom torch.utils.data import DataLoader, TensorDataset\n"
        f"size = 64\nx, y = {made}, torch.zeros(1)\ndata = TensorDataset(x, y)\n"
        f"loader = DataLoader(data, batch_size={batch}, shuffle=True, pin_memory=True)\n"
    )
    assert cli.main(["scan", str(path), "--target", "cpu", "--advise", "--json"]) == 0
    advice = [each["what"] for each in json.loads(capsys.readouterr().out)["advice"]]
    last = f"the last batch {says}: a noisier step, and other shapes to compile"
    assert advice == ([last] if says else [])  # tensors in memory need no workers


@pytest.mark.parametrize(
    "line", ["make = torch.zeros", "f = torch.utils.data.DataLoader", "from torch import ones", "dict(f=ce.load)"]
)
def test_what_matters_by_its_arguments_alone_is_nothing_where_it_is_named(line: str, table, tmp_path: Path):
    assert found(line, table, tmp_path) == []
