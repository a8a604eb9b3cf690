"""Batch norm and the stem's tail: where kernels apply, how they tile a shape, and what a compiler sees of them.

What the kernels compute is in interpreted_batch_norm.py, which test_instance_norm.py runs.
"""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from sightline.hardware.devices import select
from sightline.hardware.precision import keep_fp32
from sightline.kernels import batch_norm, stem_tail
from sightline.kernels.batch_norm import norm_add_relu, norm_relu
from sightline.models import norm as sync
from sightline.models.resnet import ResNetConfig, SameMaxPool2d, end_stem, make_pool
from sightline.parts import DataSpec

LAST = torch.channels_last
SPEC = DataSpec(("a", "b"), 3, (32, 32), (0.5,) * 3, (0.2,) * 3)


@pytest.fixture(autouse=True)
def _trusted(monkeypatch):
    """As after the checks of batch_norm_check.py on a GPU."""
    checked = tuple((0, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32))
    monkeypatch.setattr(batch_norm, "_trusted", checked)


def test_on_the_cpu_all_is_plain_torch_to_the_bit():
    torch.manual_seed(0)
    x, other, norm = torch.randn(2, 4, 6, 5), torch.randn(2, 4, 6, 5), nn.BatchNorm2d(4)
    twin = copy.deepcopy(norm)
    assert torch.equal(norm_relu(x, norm), functional.relu(twin(x)))
    assert torch.equal(norm_add_relu(x, norm, other)[0], functional.relu(twin(x) + other))
    assert torch.equal(norm_add_relu(x, norm, other, norm)[0], functional.relu(twin(other).add(twin(x))))
    assert norm_add_relu(x, norm, other)[1] is None
    twin(x)
    for pool in (nn.MaxPool2d(3, 2, 1), SameMaxPool2d(), nn.Identity()):
        assert torch.equal(end_stem(x, norm, pool), pool(functional.relu(twin(x))))
    assert all(torch.equal(a, b) for a, b in zip(norm.buffers(), twin.buffers(), strict=True))


@pytest.mark.parametrize("size", [(8, 6), (7, 5), (7, 6), (2, 1)])
def test_the_reference_pools_as_the_networks_do(size):
    norm, x = nn.BatchNorm2d(3), torch.randn(2, 3, *size)
    active = functional.relu(norm(x))
    plain, same = make_pool(ResNetConfig()), make_pool(ResNetConfig(padding="same"))
    assert torch.equal(stem_tail.reference(x, norm, 1, 1), plain(active))
    assert torch.equal(stem_tail.reference(x, norm, size[0] % 2, size[1] % 2), same(active))


def test_where_the_kernels_apply(monkeypatch):
    pytest.importorskip("triton")

    def applies(*shape: int, norm=None, device: str = "cuda", dtype: torch.dtype = torch.bfloat16, layout=LAST) -> bool:
        with FakeTensorMode():  # a CUDA tensor without values needs no CUDA
            x = torch.empty(shape, device=device, dtype=dtype).contiguous(memory_format=layout)
            return batch_norm.applies(x, norm or nn.BatchNorm2d(shape[1]))

    assert not applies(2, 64, 8, 8)  # small
    monkeypatch.setattr(batch_norm, "LEAST", 1)
    assert applies(2, 64, 8, 8) and applies(2, 33, 7, 5, dtype=torch.float32) and applies(2, 1, 1, 1)
    assert not applies(2, 64, 8, 8, device="cpu") and not applies(2, 64, 8, 8, layout=torch.contiguous_format)
    assert not applies(2, 64, 8, 8, dtype=torch.float64)
    assert not applies(1, 64, 1, 1) and not applies(0, 64, 8, 8)
    assert not applies(2, 64, 8, 8, norm=nn.BatchNorm2d(64).eval())
    assert not applies(2, 64, 8, 8, norm=nn.BatchNorm2d(64, momentum=None))
    assert not applies(2, 64, 8, 8, norm=nn.BatchNorm2d(64, affine=False))
    assert not applies(2, 64, 8, 8, norm=nn.BatchNorm2d(64, track_running_stats=False))


def test_norms_over_ranks_and_norms_kept_in_fp32_run_as_they_are():
    pytest.importorskip("triton")
    kept, over_ranks = nn.Sequential(nn.BatchNorm2d(8)), nn.BatchNorm2d(8)
    keep_fp32(kept, ["BatchNorm2d"], select("cpu"))
    over_ranks.__class__ = type("BatchNorm2d", (sync.SyncBatchNorm, nn.BatchNorm2d), {})
    with FakeTensorMode():
        x = torch.empty(64, 8, 128, 128, device="cuda", dtype=torch.bfloat16).to(memory_format=LAST)
        assert batch_norm.applies(x, nn.BatchNorm2d(8))
        assert not batch_norm.applies(x, kept[0]) and not batch_norm.applies(x, over_ranks)
        assert not stem_tail.applies(x, kept[0])


class Start(nn.Module):
    """The end of a stem and two bottlenecks."""

    def __init__(self) -> None:
        super().__init__()
        model = ResNetConfig(depth=50).build(SPEC)
        self.norm, self.pool, self.blocks = model.bn1, model.maxpool, model.layer1[:2]

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(end_stem(x, self.norm, self.pool))


def test_a_network_compiles_without_a_break_to_these_operations(monkeypatch):
    """What Dynamo makes of `applies` on this torch: if it said no, a compiled step would lose the kernels."""
    pytest.importorskip("triton")
    monkeypatch.setattr(batch_norm, "LEAST", 1)
    graphs = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]):
        graphs.append(graph)
        return graph.forward

    with FakeTensorMode(), torch.device("cuda"):
        model = Start()
        x = torch.empty(2, 64, 8, 6).to(memory_format=LAST)
        y = torch.compile(model, fullgraph=True, backend=keep)(x)
    assert y.shape == (2, 256, 4, 3) and y.is_contiguous(memory_format=LAST)
    called = [str(node.target) for node in graphs[0].graph.nodes if "sightline" in str(node.target)]
    kinds = [name.split(".")[1] for name in called]
    assert kinds.count("batch_norm_statistics") == 8 and kinds.count("norm_relu_pool") == 1
    assert kinds.count("batch_norm_relu") == 4 and kinds.count("batch_norm_add_relu") == 2


BLOCKS = {
    "relu": lambda x, other, norms: norm_relu(x, norms[0]),
    "sum": lambda x, other, norms: norm_add_relu(x, norms[0], other)[0],
    "sum of norms": lambda x, other, norms: norm_add_relu(x, norms[0], other, norms[1])[0],
    "two blocks": lambda x, other, norms: _after(x, norms[1], *norm_add_relu(x, norms[0], other)),
    "pool": lambda x, other, norms: end_stem(x, norms[0], nn.MaxPool2d(3, 2, 1)),
    "same pool": lambda x, other, norms: end_stem(x, norms[0], SameMaxPool2d()),
}


def _after(x: Tensor, norm: nn.BatchNorm2d, y: Tensor, through: Tensor | None) -> Tensor:
    """A block whose shortcut is the result of the one before."""
    return norm_add_relu(x * 2, norm, y, None, through)[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("block", BLOCKS)
def test_results_and_gradients_have_the_types_shapes_and_layouts_of_plain_torch(monkeypatch, block: str, dtype):
    """Compilers plan memory by what an operation says of its results before it runs."""
    pytest.importorskip("triton")

    def described(is_ours: bool) -> list[tuple | None]:
        monkeypatch.setattr(batch_norm, "is_ours", lambda x: is_ours)  # backward() of fake CUDA tensors needs CUDA
        with FakeTensorMode():
            x, other = (torch.empty(2, 16, 7, 6, dtype=dtype).to(memory_format=LAST).requires_grad_() for _ in "ab")
            norms = nn.ModuleList([nn.BatchNorm2d(16), nn.BatchNorm2d(16)])
            y = BLOCKS[block](x, other, norms)
            y.sum().backward()
            names.append(y.grad_fn.name())
            given = [x, other, *norms.parameters()]
            found = [y, *(tensor.grad for tensor in given), *norms.buffers()]
            return [None if f is None else (f.dtype, f.shape, f.stride()) for f in found]

    names: list[str] = []
    assert described(is_ours=True) == described(is_ours=False)
    assert names[0] != names[1], "by operations of our own, and by torch's"


HALF = ("x", "other", "y", "winners", "grad", "grad_y", "grad_second", "grad_x", "grad_other")
WHOLE = ("rows", "channels", "chunks", "length", "height", "width", "out_height", "out_width", "top", "left")


@pytest.mark.slow
def test_the_kernels_compile_for_a_gpu_that_is_not_here(tmp_path, monkeypatch):
    """To machine code of a Hopper, in loads and stores of 16 bytes: narrower ones would halve the speed."""
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from sightline.kernels import batch_norm_sum_triton, batch_norm_triton, stem_tail_triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    tile, joined = {"ROWS": 32, "CHANNELS": 64}, {"CHUNKS": 256, "CHANNELS": 16}
    pool = {"STEPS": 2, "COLUMNS": 16, "CHANNELS": 64}
    runs = [
        *((batch_norm_triton, name, tile) for name in ("moments", "reduce_backward", "apply_backward")),
        *((batch_norm_triton, name, joined) for name in ("join", "join_backward")),
        *((batch_norm_triton, "apply", {**tile, "KIND": kind}) for kind in (0, 1, 2)),
        *((batch_norm_sum_triton, "apply_sum", {**tile, "HAS_OTHER": has}) for has in (False, True)),
        (batch_norm_sum_triton, "reduce_sum", {**tile, "HAS_OTHER": True, "HAS_SECOND": True}),
        *((stem_tail_triton, name, pool) for name in ("forward", "backward")),
    ]
    for module, name, constants in runs:
        kernel = getattr(module, f"{'stem_tail' if module is stem_tail_triton else 'batch_norm'}_{name}")
        names = [parameter.name for parameter in kernel.params]
        kinds = dict.fromkeys(HALF, "*bf16") | dict.fromkeys(WHOLE, "i32") | dict.fromkeys(constants, "constexpr")
        kinds |= {"places": "*u8", "eps": "fp32", "momentum": "fp32"}
        signature = {each: kinds.get(each, "*fp32") for each in names}
        aligned = [each for each, kind in signature.items() if kind.startswith("*") or each == "channels"]
        attributes = {(names.index(each),): [["tt.divisibility", 16]] for each in aligned}
        source = ASTSource(kernel, signature, constants, attributes)
        code = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "enable_fp_fusion": True}).asm
        assert len(code["cubin"]) > 0
        assert "ld.global.v4.b32" in code["ptx"] and "ld.global.b16" not in code["ptx"], name
        assert "st.global.v4.b32" in code["ptx"] or "reduce" in name or "join" in name or name == "moments", name
