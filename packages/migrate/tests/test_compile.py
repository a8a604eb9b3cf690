"""Compilers see through the wrappers: torch.compile without graph breaks, torch.jit, fx, pickle."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable, Iterator
from typing import Any, Optional

import pytest
import torch

from sightline_migrate.options import MigrateError
from sightline_migrate.reporting import record
from sightline_migrate.session import Session

Start = Callable[..., Session]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def everything(x: torch.Tensor) -> torch.Tensor:
    assert torch.cuda.is_available()
    y = torch.zeros(4, device="cuda") + x.to("cuda:0", non_blocking=True) + torch.ones_like(x, device="cuda").cuda()
    with torch.autocast("cuda", enabled=False):
        return y.to(torch.device("cuda")) + torch.arange(4, device=torch.device("cuda", 0), dtype=torch.float32)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_whole(backend: str, on_cpu: Start):
    on_cpu()
    compiled = torch.compile(everything, backend=backend, fullgraph=True)
    x = torch.arange(4.0)
    assert torch.equal(compiled(x), everything(x))


def losses(device: str, backend: str) -> list[float]:
    """Of a small network that trains, compiled: autograd's graphs, and statistics that a step writes."""
    torch.manual_seed(0)
    layers = torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten()
    net = torch.nn.Sequential(*layers, torch.nn.Linear(36, 2)).to(device)
    step, x = torch.compile(net, backend=backend, fullgraph=True), torch.rand(4, 3, 5, 5).to(device)
    optimizer, found = torch.optim.SGD(net.parameters(), 0.1), []
    for _ in range(3):
        loss = step(x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return [*found, *net[1].running_mean.tolist()]


def test_compiled_training(on_cpu: Start):
    expected = losses("cpu", "aot_eager")
    assert len(set(expected)) == 7
    torch._dynamo.reset()
    on_cpu()
    assert losses("cuda", "aot_eager") == expected


@pytest.mark.slow  # a C++ compiler at work for 15 seconds
def test_inductor_whole_in_every_mode(on_cpu: Start):
    """One small function; `max-autotune` and the graph modes are what scripts ask for on a GPU."""
    on_cpu()
    x = torch.arange(4.0, requires_grad=True)
    for options in (
        {},
        {"mode": "reduce-overhead"},
        {"mode": "max-autotune"},
        {"options": {"triton.cudagraphs": True}},
    ):
        torch._dynamo.reset()
        compiled = torch.compile(everything, fullgraph=True, **options)
        result = compiled(x)
        assert torch.equal(result, everything(x))
        (gradient,) = torch.autograd.grad(result.sum(), x)
        assert gradient.tolist() == [1.0] * 4


def test_backend_of_cuda_alone_is_replaced(on_cpu: Start):
    on_cpu()
    compiled = torch.compile(everything, backend="cudagraphs")
    assert torch.equal(compiled(torch.ones(4)), everything(torch.ones(4)))
    (found,) = [each for each in record.records.values() if each.rule.name == "torch.compile"]
    assert found.what == "aot_eager instead of cudagraphs"


def test_compile_default(on_cpu: Start):
    on_cpu(compile="default")
    given = []

    def backend(graph: Any, inputs: Any, **more: Any) -> Any:
        given.append(more)
        return graph

    compiled = torch.compile(everything, backend=backend, options={"triton.cudagraphs": True})
    assert torch.equal(compiled(torch.ones(4)), everything(torch.ones(4))) and given == [{}]
    (found,) = [each for each in record.records.values() if each.rule.name == "torch.compile"]
    assert found.what == "without mode and options because of --compile default"


def test_compile_off(on_cpu: Start):
    on_cpu(compile="off")
    assert torch.compile(everything) is everything and torch.compile(mode="max-autotune")(everything) is everything
    model = torch.nn.Linear(2, 2)
    assert torch.compile(model) is model


def test_compiled_module_with_autocast(on_cpu: Start):
    on_cpu(amp="keep")
    model = torch.nn.Linear(3, 3).cuda()

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return model(x)

    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        assert torch.compile(step, backend=backend, fullgraph=True)(torch.ones(2, 3)).dtype is torch.bfloat16


def test_float16_inside_a_compiled_function(on_cpu: Start):
    on_cpu(fp16_to_bf16=True)

    def halves(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.half(), x.to(torch.float16), torch.zeros(2, dtype=torch.float16)

    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        assert {each.dtype for each in torch.compile(halves, backend=backend)(torch.ones(2))} == {torch.bfloat16}


@pytest.mark.filterwarnings("error")
def test_a_float_that_changes(on_cpu: Start):
    """For a learning rate, say: compiled code converts it with as_tensor, which must not be compiled in turn."""
    torch._dynamo.reset()
    on_cpu()

    def scaled(x: torch.Tensor, rate: float) -> torch.Tensor:
        return x * rate + torch.zeros(2, device="cuda")

    compiled = torch.compile(scaled, backend="eager", fullgraph=True)
    for rate in (0.5, 0.25, 0.125):
        assert torch.equal(compiled(torch.ones(2), rate), torch.full((2,), rate))


def test_compiled_optimizer(on_cpu: Start):
    on_cpu()
    weight = torch.nn.Parameter(torch.ones(3, device="cuda"))
    optimizer = torch.optim.SGD([weight], 0.5)

    @torch.compile(backend="aot_eager")
    def update() -> None:
        optimizer.step()

    weight.grad = torch.ones(3)
    update()
    assert weight.tolist() == [0.5] * 3


def test_jit_script(on_cpu: Start):
    on_cpu()

    @torch.jit.script
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(2) + torch.ones_like(x) + torch.arange(2) + torch.full([2], 3.0)

    assert function(torch.ones(2)).tolist() == [4.0, 5.0]

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) + torch.rand_like(x) * 0

    assert torch.jit.script(Net().cuda())(torch.ones(1, 2)).shape == (1, 2)
    assert torch.jit.trace(Net().cuda(), torch.ones(1, 2, device="cuda"), check_trace=False)(
        torch.ones(1, 2)
    ).shape == (1, 2)


def helper(x: torch.Tensor) -> torch.Tensor:
    return x.cuda()


class OnCuda(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            x = helper(x) + torch.zeros(2, device="cuda")
        return self.layer(x).to("cuda:0") + torch.ones(2, device=torch.device("cuda"))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_jit_with_devices_inside(on_cpu: Start, tmp_path: Any):
    path = tmp_path / "program.pt"
    torch.jit.script(OnCuda()).save(path)  # the program of someone with a GPU: it names the device
    on_cpu()
    model = OnCuda().cuda()
    x = torch.ones(1, 2)
    assert torch.equal(torch.jit.script(model)(x), model(x))
    loaded = torch.jit.load(path, map_location="cuda")
    assert torch.equal(loaded(x), loaded.layer(x) + 1)
    assert torch.equal(torch.jit.script(helper)(x), x)
    assert {"torch.jit.script", "torch.jit.load"} <= {each.rule.name for each in record.records.values()}


def default_device(x: torch.Tensor, device: torch.device = torch.device("cuda"), times: int = 3) -> torch.Tensor:  # noqa: B008
    return (x + torch.zeros(2, device=device)) * times


def default_name(x: torch.Tensor, device: str = "cuda:1") -> torch.Tensor:
    return x.to(device) + default_device(x)


def optional_device(x: torch.Tensor, device: Optional[torch.device] = None) -> torch.Tensor:  # noqa: UP045
    if device is None:
        device = x.device
    return x.to(device)


def device_or_error(x: torch.Tensor, is_wanted: bool) -> torch.device:
    if is_wanted:
        device = x.device
    else:
        raise ValueError("not wanted")
    return device


def computed_device(x: torch.Tensor, index: int = 0) -> torch.device:
    if index < 0:
        return torch.device("meta")
    return torch.device("cuda", index)


class WithDevice(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("cuda")

    def forward(self, x: torch.Tensor, device: torch.device = torch.device("cuda:0")) -> torch.Tensor:  # noqa: B008
        return x.to(self.device) + torch.ones(2, device=device)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_jit_with_devices_that_only_the_run_tells(on_cpu: Start):
    """Arguments, their defaults, attributes, and what is computed; defaults of other arguments stay."""
    on_cpu()
    x, cuda, meta = torch.ones(2), torch.device("cuda", 1), torch.device("meta")
    script = torch.jit.script
    named = script(default_name)
    assert named(x).tolist() == [4, 4] and named(x, "cuda").tolist() == [4, 4]
    function = script(default_device)  # compiled as a part of the one above, and run
    assert function(x).tolist() == [3, 3] and function(x, cuda, times=2).tolist() == [2, 2]
    optional = script(optional_device)
    assert [optional(x, *given).device.type for given in ((), (cuda,), (meta,))] == ["cpu", "cpu", "meta"]
    assert script(computed_device)(x) == torch.device("cpu") and script(computed_device)(x, -1) == meta
    assert script(device_or_error)(x, True) == torch.device("cpu")
    assert script({"a": 1})["a"] == 1 and list(script([1, 2])) == [1, 2]  # torch makes its own containers of these
    for _ in range(2):  # the second one shares what was compiled for the first
        module = script(WithDevice())
        assert module(x).tolist() == module(x, cuda).tolist() == [2, 2]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_jit_for_inference_is_saved_and_loaded(on_cpu: Start, tmp_path: Any):
    """For a CPU torch packs the weights of convolutions in a form that it cannot load."""
    on_cpu()
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU()).cuda().eval()
    x = torch.rand(1, 3, 5, 5, device="cuda")
    optimized = torch.jit.optimize_for_inference(torch.jit.trace(model, x))
    optimized.save(tmp_path / "optimized.pt")
    loaded = torch.jit.load(tmp_path / "optimized.pt").cuda()
    torch.testing.assert_close(loaded(x), model(x))
    frozen = torch.jit.freeze(torch.jit.script(model))
    torch.testing.assert_close(torch.jit.optimize_for_inference(frozen)(x), model(x))


def test_fx(on_cpu: Start):
    on_cpu()

    class Net(torch.nn.Module):
        def forward(self, x):  # without annotations: as strings, torch 2.11 cannot pickle them
            return x.cuda() + torch.ones_like(x, device="cuda") + torch.zeros(2, device="cuda")

    traced = torch.fx.symbolic_trace(Net())
    assert torch.equal(traced(torch.ones(2)), torch.full((2,), 2.0))
    assert torch.equal(pickle.loads(pickle.dumps(traced))(torch.ones(2)), torch.full((2,), 2.0))


def test_export(on_cpu: Start):
    on_cpu()

    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.cuda() + torch.zeros(2, device="cuda")

    assert torch.equal(torch.export.export(Net(), (torch.ones(2),)).module()(torch.ones(2)), torch.ones(2))


def test_functions_can_be_pickled(on_cpu: Start):
    on_cpu()
    for function in (torch.zeros, torch.cuda.is_available, torch.cuda.synchronize, torch.compile, torch.fft.fftfreq,
                     torch.nested.nested_tensor, torch.cuda.nvtx.mark, torch.set_default_dtype):  # fmt: skip
        assert pickle.loads(pickle.dumps(function)) is function
    assert pickle.loads(pickle.dumps(torch.device("cuda:1"))) == torch.device("cuda:1")
    assert torch.zeros.__name__ == "zeros" and torch.Tensor.to.__name__ == "to"


def test_function_modes_still_see_factories(on_cpu: Start):
    """A script's own TorchFunctionMode, and vmap, go on working over wrapped factories."""
    on_cpu()
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.zeros(2, device="cuda")
    assert [each.__name__ for each in seen] == ["zeros"]
    assert torch.func.vmap(lambda x: x.cuda() + torch.zeros_like(x, device="cuda"))(torch.ones(3)).tolist() == [1.0] * 3


def test_subclass_of_tensor(on_cpu: Start):
    on_cpu()

    class Named(torch.Tensor):
        pass

    moved = torch.ones(2).as_subclass(Named).to("cuda")
    assert isinstance(moved, Named) and isinstance(moved.cuda(), Named)


def test_extensions_are_refused(on_cpu: Start, tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    from torch.utils import cpp_extension

    monkeypatch.setenv("PATH", str(tmp_path))  # no nvcc
    on_cpu()
    with pytest.raises(MigrateError, match=r"test_compile.py:\d+: CUDA sources of extension 'own' cannot be compiled"):
        cpp_extension.load_inline("own", "", cuda_sources="__global__ void f() {}")
    with pytest.raises(MigrateError, match=r"test_compile.py:\d+: CUDA sources of extension 'own'"):
        cpp_extension.load(name="own", sources=["a.cpp", "b.cu"])
    with pytest.raises(MigrateError, match="CUDA sources of extension 'own'"):
        cpp_extension.CUDAExtension("own", ["a.cu"])


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("given", [{}, {"map_location": "cuda:1"}])
def test_a_program_whose_weights_are_those_of_a_gpu_is_loaded(on_cpu: Start, tmp_path: Any, given: dict[str, str]):
    """torch.jit.save marks each tensor with its place, in the pickles inside the archive."""
    host, path = io.BytesIO(), tmp_path / "gpu.pt"
    layer = torch.nn.Linear(2, 2)
    torch.jit.save(torch.jit.script(layer), host)
    changed = 0
    with zipfile.ZipFile(host) as read, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as write:
        for entry in read.infolist():
            content = read.read(entry)
            if entry.filename.endswith(".pkl"):
                changed += content.count(b"X\x03\x00\x00\x00cpu")
                content = content.replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:1")
            write.writestr(entry.filename, content)
    assert changed
    with pytest.raises((RuntimeError, NotImplementedError)):  # such a file needs it
        torch.jit.load(path)
    on_cpu()
    loaded = torch.jit.load(path, **given)
    assert loaded.weight.device.type == "cpu" and torch.equal(loaded(torch.ones(1, 2)), layer(torch.ones(1, 2)))
    assert "torch.jit.load" in {each.rule.name for each in record.records.values()}
