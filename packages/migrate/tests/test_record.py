"""Every replaced call counts itself under its own name: a call that does not is missing from the log and the report."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sightline_migrate.reporting import record

PLAIN = {
    "torch.Event": 'torch.Event("cuda")',
    "torch.Generator": 'torch.Generator("cuda")',
    "torch.Stream": "torch.Stream()",
    "torch.Tensor.cpu": "x.cuda().cpu()",
    "torch.Tensor.cuda": "x.cuda()",
    "torch.Tensor.is_pinned": 'x.is_pinned("cuda")',
    "torch.Tensor.pin_memory": "x.pin_memory()",
    "torch.Tensor.record_stream": "x.record_stream(torch.cuda.current_stream())",
    "torch.Tensor.to": 'x.to("cuda:0")',
    "torch.Tensor.type": 'x.type("torch.cuda.HalfTensor")',
    "torch.Tensor.type_as": "x.cuda().type_as(x.cpu())",
    "torch.UntypedStorage.__new__": 'torch.UntypedStorage(2, device="cuda")',
    "torch.amp.autocast_mode.autocast.__init__": 'torch.autocast("cuda")',
    "torch.amp.custom_fwd": 'torch.amp.custom_fwd(lambda x: x, device_type="cuda")',
    "torch.amp.GradScaler.__init__": 'torch.amp.GradScaler("cuda")',
    "torch.autograd.profiler.emit_nvtx.__init__": "torch.autograd.profiler.emit_nvtx()",
    "torch.autograd.profiler.profile.__init__": 'torch.autograd.profiler.profile(use_device="cuda")',
    "torch.backends.cuda.enable_math_sdp": "torch.backends.cuda.enable_math_sdp(False)",
    "torch.cuda.DoubleStorage": "torch.cuda.DoubleStorage(2)",
    "torch.cuda.DoubleTensor": "torch.cuda.DoubleTensor([1])",
    "torch.cuda.Event": "torch.cuda.Event()",
    "torch.cuda.comm.broadcast": "torch.cuda.comm.broadcast(x, [0])",
    "torch.cuda.device": "torch.cuda.device(0)",
    "torch.cuda.empty_cache": "torch.cuda.empty_cache()",
    "torch.cuda.nvtx.mark": 'torch.cuda.nvtx.mark("a")',
    "torch.distributed.is_backend_available": 'torch.distributed.is_backend_available("nccl")',
    "torch.distributed.is_nccl_available": "torch.distributed.is_nccl_available()",
    "torch.empty": "torch.empty(2, pin_memory=True)",
    "torch.is_autocast_enabled": 'torch.is_autocast_enabled("cuda")',
    "torch.jit.optimize_for_inference": "torch.jit.optimize_for_inference(torch.jit.script(net.eval()))",
    "torch.nn.DataParallel.__init__": "nn.DataParallel(net)",
    "torch.nn.Module.cpu": "net.cuda().cpu()",
    "torch.nn.Module.cuda": "net.cuda()",
    "torch.nn.Module.to": 'net.to("cuda")',
    "torch.nn.Module.to_empty": 'net.to_empty(device="cuda")',
    "torch.nn.parallel.data_parallel": "nn.parallel.data_parallel(net, x)",
    "torch.nn.parallel.gather": "nn.parallel.gather([x], 0)",
    "torch.nn.parallel.parallel_apply": "nn.parallel.parallel_apply([net], [x])",
    "torch.nn.utils.rnn.PackedSequence.cpu": "nn.utils.rnn.pack_sequence([x]).cuda().cpu()",
    "torch.profiler.profile.__init__": "torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])",
    "torch.random.fork_rng": "torch.random.fork_rng()",
    "torch.set_default_tensor_type": 'torch.set_default_tensor_type("torch.cuda.FloatTensor")',
    "torch.utils._device.DeviceContext.__init__": 'torch.set_default_device("cuda")',
    "torch.utils.data.DataLoader.__init__": "torch.utils.data.DataLoader([1], pin_memory=True)",
}
APEX = {
    "apex.amp.disable_casts": "apex.amp.disable_casts()",
    "apex.amp.float_function": "apex.amp.register_float_function(nn.Module(), 'forward')",
    "apex.amp.half_function": "apex.amp.register_half_function(nn.Module(), 'forward')",
    "apex.amp.initialize": "apex.amp.initialize(net)",
    "apex.normalization.FusedLayerNorm": "apex.normalization.FusedLayerNorm(2)",
    "apex.normalization.FusedRMSNorm": "apex.normalization.FusedRMSNorm(2)",
    "apex.optimizers.FusedSGD": "apex.optimizers.FusedSGD(net.parameters(), lr=0.1)",
    "apex.parallel.LARC": "apex.parallel.LARC(torch.optim.SGD(net.parameters(), lr=0.1))",
    "apex.parallel.SyncBatchNorm": "apex.parallel.SyncBatchNorm(2)",
    "apex.parallel.convert_syncbn_model": "apex.parallel.convert_syncbn_model(net)",
}
COPIED = {
    "torch.Tensor.to": 'x.cuda().to("cpu")',
    "torch.nn.Module.to": 'net.cuda().to("cpu")',
}
SHOWN = {
    "torch.Tensor.device": "x.device",
    "torch.Tensor.get_device": "x.get_device()",
    "torch.Tensor.is_cpu": "x.is_cpu",
    "torch.Tensor.is_cuda": "x.is_cuda",
    "torch.Tensor.type": "x.type()",
}
BFLOAT16 = {
    "torch.Tensor.half": "x.half()",
    "torch.Tensor.to": "x.to(torch.float16)",
    "torch.Tensor.type": "x.type(torch.float16)",
    "torch.amp.autocast_mode.autocast.__init__": 'torch.autocast("cuda")',
    "torch.amp.custom_fwd": 'torch.amp.custom_fwd(lambda x: x, device_type="cuda", cast_inputs=torch.float16)',
    "torch.cuda.HalfTensor": "torch.cuda.HalfTensor([1])",
    "torch.nn.Module.half": "net.half()",
    "torch.nn.Module.to": "net.to(torch.float16)",
    "torch.set_autocast_dtype": 'torch.set_autocast_dtype("cuda", torch.float16)',
    "torch.set_default_dtype": "torch.set_default_dtype(torch.float16)",
    "torch.zeros": "torch.zeros(2, dtype=torch.float16)",
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    ("options", "calls", "what"),
    [
        ({}, PLAIN, ""),
        ({"amp": "keep"}, APEX, ""),
        ({}, COPIED, "cop"),
        ({"claim": True}, SHOWN, ""),
        ({"amp": "keep", "fp16_to_bf16": True}, BFLOAT16, "bfloat16 instead of float16"),
    ],
    ids=["plain", "apex", "copied", "shown", "converted"],
)
def test_a_call_counts_once_under_its_name(
    on_cpu: Callable[..., Any], options: dict[str, Any], calls: dict[str, str], what: str
):
    on_cpu(**options)
    apex = importlib.import_module("apex")  # the stand-in
    wrong = {}
    try:
        for name, call in calls.items():
            given = {"apex": apex, "torch": torch, "nn": torch.nn, "x": torch.ones(1, 2), "net": torch.nn.Linear(2, 2)}
            record.reset()
            exec(compile(call, __file__, "exec"), given)
            torch.set_default_device(None)
            torch.set_default_tensor_type("torch.FloatTensor")
            found = [(key, each) for key, each in record.records.items() if each.rule.name == name]
            seen = [(each.user.file, what in each.what, record.counts[key]) for key, each in found]
            wrong |= {name: seen} if seen != [(__file__, True, 1)] else {}
    finally:
        torch.backends.cuda.enable_math_sdp(True)
    assert not wrong


def test_arguments_are_described_in_one_short_line():
    class Big:
        pass

    described = record.describe(
        (torch.ones(2, 3), True, 1, 2.5, "a", None, torch.float16, torch.device("cuda", 1)), {"to": Big(), "of": Big}
    )
    assert (
        described
        == "Tensor(2, 3), True, 1, 2.5, 'a', None, torch.float16, device(type='cuda', index=1), to=Big, of=Big"
    )
    assert record.describe(range(8), {}) == "0, 1, 2, 3, 4, 5, 6, 7"
    assert record.describe(range(9), {"x": 1}) == "0, 1, 2, 3, 4, 5, 6, 7, ..., x=1"
    assert record.describe(([0] * 8, (1,) * 9), {}) == f"[{', '.join('0' * 8)}], ({', '.join('1' * 8)}, ...)"
    assert record.describe(("x" * 78, "x" * 79), {}) == f"'{'x' * 78}', '{'x' * 79}..."
    assert record.describe((["x" * 78], ["x" * 79]), {}) == f"['{'x' * 78}'], ['{'x' * 79}...]"
    assert record.describe((test_arguments_are_described_in_one_short_line,), {}).startswith("test_arguments_are")


def test_only_rank_0_speaks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.delenv("RANK", raising=False)
    record.say("one")
    monkeypatch.setenv("RANK", "0")
    record.say("two")
    monkeypatch.setenv("RANK", "1")
    record.say("three")
    assert capsys.readouterr() == ("", "sightline migrate: one\nsightline migrate: two\n")
