"""Instance norm with leaky ReLU: the reference, where kernels apply, how they tile a shape, and what they compute."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
import warm
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sightline.kernels import instance_norm

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[2]
# (images, channels, pixels): a U-Net of 192 x 160 and one of 56 x 40, odd ones, three dimensions, one image alone.
SHAPES = [
    (64, 32, 192 * 160),
    (64, 64, 96 * 80),
    (64, 128, 48 * 40),
    (64, 256, 24 * 20),
    (64, 512, 12 * 10),
    (64, 512, 6 * 5),
    (9, 32, 56 * 40),
    (9, 64, 28 * 20),
    (9, 256, 7 * 5),
    (2, 320, 8**3),
    (2, 32, 128**3),
    (1, 33, 1001),
    (1, 3, 100_003),
    (3, 1, 2),
    (5, 1000, 4099),
]


def test_the_reference_is_the_formula():
    """Ten lines of NumPy in float64, and torch's own layers."""
    generator = np.random.default_rng(0)
    for shape in ((2, 3, 5, 7), (2, 3, 4, 5, 6)):
        x, weight, bias = generator.normal(5, 3, shape), generator.normal(size=3), generator.normal(size=3)
        axes, column = tuple(range(2, len(shape))), (3,) + (1,) * (len(shape) - 2)
        mean, var = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
        y = (x - mean) / np.sqrt(var + 1e-5) * weight.reshape(column) + bias.reshape(column)
        y = np.where(y > 0, y, 0.01 * y)
        given = [torch.from_numpy(t) for t in (x, weight, bias)]
        np.testing.assert_allclose(instance_norm.reference(*given, 1e-5, 0.01).numpy(), y, rtol=1e-10, atol=1e-12)
    layers = nn.Sequential(nn.InstanceNorm2d(3, affine=True), nn.LeakyReLU(0.2))
    x = torch.randn(2, 3, 5, 7)
    torch.testing.assert_close(
        instance_norm.instance_norm_leaky_relu(x, layers[0].weight, layers[0].bias, layers[0].eps, 0.2), layers(x)
    )


def test_the_reference_rounds_half_precision_once():
    x = (torch.randn(2, 3, 20, 20) + 8).bfloat16()
    weight, bias = torch.rand(3), torch.randn(3)
    with torch.autocast("cpu", torch.bfloat16):
        y = instance_norm.reference(x, weight, bias, 1e-5, 0.01)
    assert y.dtype == torch.bfloat16
    exact = instance_norm.reference(x.double(), weight.double(), bias.double(), 1e-5, 0.01)
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=1e-5)


def test_where_the_kernels_apply():
    pytest.importorskip("triton")

    def applies(*shape: int, device: str = "cuda", dtype: torch.dtype = torch.bfloat16, last: bool = True) -> bool:
        with FakeTensorMode():  # a CUDA tensor without values needs no CUDA
            x = torch.empty(shape, device=device, dtype=dtype)
            if last:
                x = x.contiguous(memory_format=instance_norm.LAYOUTS.get(x.dim(), torch.contiguous_format))
            return instance_norm.applies(x)

    assert applies(2, 32, 8, 8) and applies(2, 32, 8, 8, 8)
    assert applies(2, 33, 7, 5, dtype=torch.float32) and applies(2, 32, 8, 8, dtype=torch.float16)
    assert not applies(2, 32, 8, 8, device="cpu")
    assert not applies(2, 32, 8, 8, last=False) and not applies(2, 32, 8, 8, 8, last=False)
    assert not applies(2, 32, 8, 8, dtype=torch.float64)
    assert not applies(2, 32, 8)
    assert not applies(2, 32, 1, 1)
    assert not applies(0, 32, 8, 8)
    assert not applies(1, 512, 1 << 11, 1 << 11)  # 2^31 elements in an image


def test_a_compiler_is_told_layout_and_types():
    pytest.importorskip("triton")
    with FakeTensorMode():
        x = torch.empty(2, 32, 6, 8, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
        weight, bias = torch.empty(2, 32, device="cuda").unbind()
        assert instance_norm.instance_norm_leaky_relu(x, weight, bias, 1e-5, 0.01).stride() == x.stride()
        y, statistics = instance_norm._operation(x, weight, bias, 1e-5, 0.01)
        inner, of_parameters = instance_norm._gradient(y.contiguous(), x, weight, bias, statistics, 0.01)
    for found in (y, inner):
        assert found.shape == x.shape and found.stride() == x.stride() and found.dtype == torch.bfloat16
    assert of_parameters.shape == (2, 2, 32) and of_parameters.dtype == statistics.dtype == torch.float32


def test_compiled_without_a_break_it_stays_one_operation():
    """What Dynamo makes of `applies` on this version of torch: if it said no, a compiled step would lose the kernel."""
    pytest.importorskip("triton")
    graphs = []

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        graphs.append(graph)
        return graph.forward

    with FakeTensorMode():
        x = torch.empty(2, 32, 6, 8, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
        weight, bias = torch.empty(32, device="cuda"), torch.empty(32, device="cuda")
        step = torch.compile(
            lambda *given: instance_norm.instance_norm_leaky_relu(*given, 1e-5, 0.01), fullgraph=True, backend=keep
        )
        assert step(x, weight, bias).stride() == x.stride()
    called = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert called[0] == "sightline.instance_norm_leaky_relu.default" and len(called) == 2  # the other takes the first


@pytest.mark.parametrize(("images", "channels", "pixels"), SHAPES, ids=str)
def test_a_tiling_holds_every_pixel_once(images, channels, pixels):
    """Chunks tile the rows without an empty one; blocks are powers of two that a program's registers hold."""
    triton = pytest.importorskip("sightline.kernels.instance_norm_triton")
    tiling = triton.choose_tiling(images, pixels, channels)
    for number in (tiling.rows, tiling.channels, tiling.warps):
        assert number.bit_count() == 1
    assert tiling.rows * tiling.channels <= 32 * 32 * tiling.warps  # elements per thread
    if tiling.chunks == 0:
        assert pixels <= tiling.rows
    else:
        length = tiling.rows * tiling.tiles
        assert (tiling.chunks - 1) * length < pixels <= tiling.chunks * length
        programs = images * -(-channels // tiling.channels) * tiling.chunks
        assert programs >= 264 or tiling.tiles <= 2 * triton.LEAST_TILES  # two for each of 132 processors, or few to do


@pytest.mark.parametrize("direction", ["FORWARD", "BACKWARD"])
def test_an_image_that_is_read_once_has_few_programs_and_every_pixel_in_one(direction):
    once = pytest.importorskip("sightline.kernels.instance_norm_once_triton")
    found = {shape: once.choose_sizes(shape[0], shape[2], shape[1], getattr(once, direction)) for shape in SHAPES}
    # The two finest levels of the U-Net of 192 x 160, and the third; others are small, too large, or too few.
    assert [shape[1] for shape, sizes in found.items() if sizes] == [32, 64, 128]
    for (images, channels, pixels), sizes in found.items():
        if not sizes:
            continue
        length = sizes.rows * sizes.tiles
        assert (sizes.chunks - 1) * length < pixels <= sizes.chunks * length
        programs = sizes.chunks * -(-channels // sizes.channels)
        assert programs <= once.MOST_PROGRAMS < once.PROCESSORS  # one for each processor at most
        assert images * programs >= once.LEAST_PROGRAMS


@pytest.mark.parametrize("chosen", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_all_kernels_compute_it_in_tritons_interpreter(chosen: str, tmp_path: Path):
    """In a process of its own: the interpreter must be chosen before Triton is imported, and stays."""
    pytest.importorskip("triton")
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--show-capture=no", "-m", chosen]
    words += [f"--rootdir={REPO}", f"--config-file={REPO / 'pyproject.toml'}", *sorted(HERE.glob("interpreted_*.py"))]
    environ = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(REPO)}
    done = warm.python(tmp_path, *words, environ=environ)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-500:]


FIRST_CALL = """
import sys
import torch
from sightline.kernels import instance_norm
x = torch.ones(2, 4, 6, 6).to(memory_format=torch.channels_last).requires_grad_()
instance_norm._operation(x, torch.ones(4), torch.zeros(4), 1e-5, 0.01)[0].sum().backward()
print(x.grad is not None, "torch._dynamo" in sys.modules)
"""


def test_a_first_call_does_not_import_torchs_compiler(tmp_path: Path):
    pytest.importorskip("triton")
    (tmp_path / "call.py").write_text(FIRST_CALL)
    environ = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(REPO)}
    done = warm.python(tmp_path, tmp_path / "call.py", environ=environ)
    assert done.stdout.split() == ["True", "False"], done.stderr[-2000:]


POINTERS = {"x": "*bf16", "y": "*bf16", "grad_y": "*bf16", "grad_x": "*bf16"}
POINTERS["arrived"] = "*i32"
SCALARS = {"rows": "i32", "channels": "i32", "chunks": "i32", "eps": "fp32", "slope": "fp32"}


@pytest.mark.parametrize(
    "shape",
    [pytest.param((64, 480, 256), id="whole"), pytest.param((64, 7680, 64), id="chunks", marks=pytest.mark.slow)],
)
def test_the_kernels_compile_for_a_gpu_that_is_not_here(shape, tmp_path, monkeypatch):
    """To machine code of a Hopper, in loads and stores of 16 bytes: narrower ones would halve the speed."""
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from sightline.kernels import instance_norm_once_triton as once
    from sightline.kernels import instance_norm_triton as kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    tiling = kernels.choose_tiling(*shape)
    length = {"LENGTH": tiling.rows * tiling.tiles}
    runs = [(kernels.instance_norm_whole, tiling, {}), (kernels.instance_norm_whole_backward, tiling, {})]
    if tiling.chunks:
        runs = [
            (kernels.instance_norm_reduce, tiling, {}),
            (kernels.instance_norm_apply, tiling, {}),
            (kernels.instance_norm_join, tiling.joining, length),
        ]
        runs += [
            (kernels.instance_norm_reduce_backward, tiling, {}),
            (kernels.instance_norm_apply_backward, tiling, {}),
        ]
    launches = [(kernel, {**sizes.launch_options, **more}) for kernel, sizes, more in runs]
    pairs = ((once.instance_norm_once, once.FORWARD), (once.instance_norm_once_backward, once.BACKWARD))
    for kernel, numbers in pairs:
        if sizes := once.choose_sizes(*shape, numbers):
            launches.append((kernel, sizes.options(once.TOGETHER)))
    for kernel, options in launches:
        names_of_constants = ("ROWS", "CHANNELS", "TILES", "LENGTH", "CHUNKS", "PHASE")
        constants = {name: options.pop(name) for name in names_of_constants if name in options}
        names = [parameter.name for parameter in kernel.params]
        types = {name: POINTERS.get(name) or SCALARS.get(name, "*fp32") for name in names if name not in constants}
        signature = {name: types.get(name, "constexpr") for name in names}
        aligned = [name for name, kind in types.items() if kind.startswith("*") or name in ("rows", "channels")]
        attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
        source = ASTSource(kernel, signature, constants, attributes)
        code = compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm
        assert len(code["cubin"]) > 0
        assert "ld.global.v4.b32" in code["ptx"] and "ld.global.b16" not in code["ptx"]
        assert "st.global.v4.b32" in code["ptx"] or "y" not in names
