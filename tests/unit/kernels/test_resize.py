"""The kernel that makes a batch of squares: its reference, and that it compiles for a GPU that is not here.

What the kernel computes is in interpreted_resize.py, which test_instance_norm.py runs.
"""

import numpy as np
import pytest
import torch
from exact_resize import KINDS, exact

from sightline.data.augment import batched
from sightline.data.augment.classification import Augmentation


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_what_the_cpu_path_computes(kind):
    rng = np.random.default_rng(3)
    augment = Augmentation(size=40, interpolation=kind)
    for index in range(4):
        image = rng.integers(0, 256, (*rng.integers(30, 120, 2), 3), dtype=np.uint8)
        params = augment.draw(5, 0, index, *image.shape[:2])
        difference = exact(image, batched.as_row(params), 40, kind) - augment.apply(params, image)
        assert np.abs(difference).max() < 1.6


@pytest.mark.slow
@pytest.mark.parametrize("kind", [0, 1, 2, "grid"])
def test_the_kernel_compiles_for_a_gpu_that_is_not_here(kind, tmp_path, monkeypatch):
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from sightline.kernels import resize_triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    is_grid = kind == "grid"
    kernel = resize_triton.sample_images if is_grid else resize_triton.resize_images
    numbers = {"grids": "*fp32"} if is_grid else {"geometry": "*i32"}
    types = {"buffer": "*u8", "places": "*i64", **numbers, "out": "*u8", "size": "i32"}
    sizes = {"LINES": resize_triton.LINES, "VALUES": resize_triton.VALUES} | ({} if is_grid else {"KIND": kind})
    source = ASTSource(kernel, types | dict.fromkeys(sizes, "constexpr"), constexprs=sizes)
    made = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "enable_fp_fusion": True})
    assert len(made.asm["cubin"]) > 1000


def test_the_rows_of_numbers_are_those_that_the_kernel_reads():
    triton = pytest.importorskip("sightline.kernels.resize_triton")
    assert len(batched.FIELDS) == triton.GEOMETRY_NUMBERS and len(triton.PLACE) == 5
    assert torch.iinfo(torch.int32).max > 3 * 2**24  # bytes of an image, which the kernel counts with 32 bits
