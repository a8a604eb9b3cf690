"""Packages made of CUDA kernels: what each is, and what to do without it."""

from __future__ import annotations

ATTENTION = "use the script's switch for scaled_dot_product_attention (in transformers attn_implementation='sdpa')"
NO_OTHER = "it has no version for other devices; use the script's switch without it, if there is one"
OF_APEX = "an extension of apex; use the script's switch for torch's own operations"
PACKAGES = {
    "amp_C": OF_APEX,
    "apex_C": OF_APEX,
    "bitsandbytes": "8-bit optimizers and weights; use torch.optim, and the script's switch for 16 or 32 bits",
    "causal_conv1d": f"CUDA kernels of convolutions over time; {NO_OTHER}",
    "cuda": "CUDA's driver in Python; leave out the code that calls it",
    "cudf": "tables on CUDA; pandas has the same functions",
    "cuml": "machine learning on CUDA; scikit-learn has the same classes",
    "cupy": "NumPy on CUDA; use numpy or torch, and write its RawKernels anew in torch",
    "diff_gaussian_rasterization": f"CUDA kernels of Gaussian splatting; {NO_OTHER}",
    "distributed_adam_cuda": OF_APEX,
    "fast_multihead_attn": OF_APEX,
    "flash_attn": f"CUDA kernels of attention; {ATTENTION}",
    "flash_attn_interface": f"CUDA kernels of attention; {ATTENTION}",
    "flashinfer": f"CUDA kernels of attention; {ATTENTION}",
    "fmhalib": OF_APEX,
    "fused_layer_norm_cuda": OF_APEX,
    "fused_weight_gradient_mlp_cuda": OF_APEX,
    "gsplat": f"CUDA kernels of Gaussian splatting; {NO_OTHER}",
    "kernels": f"compiled kernels of Hugging Face, for CUDA as a rule; {ATTENTION} or for another kernel",
    "mamba_ssm": f"CUDA kernels of state spaces; {NO_OTHER}",
    "numba.cuda": "CUDA kernels written in Python; use numba.njit or torch",
    "nvdiffrast": f"CUDA kernels of rendering; {NO_OTHER}",
    "nvidia.dali": "NVIDIA's data loading; use the script's loader of PyTorch, e.g. --data-backend pytorch",
    "pycuda": "CUDA's driver and kernels in Python; write the kernels anew in torch",
    "scaled_masked_softmax_cuda": OF_APEX,
    "scaled_upper_triang_masked_softmax_cuda": OF_APEX,
    "simple_knn": f"CUDA kernels of nearest neighbours; {NO_OTHER}",
    "spconv": f"CUDA kernels of sparse convolutions; {NO_OTHER}",
    "tensorrt": "NVIDIA's inference; run the model by torch instead",
    "tinycudann": f"CUDA kernels of small networks; {NO_OTHER}",
    "torch_tensorrt": "NVIDIA's inference; run the model by torch or torch.compile instead",
    "torchsparse": f"CUDA kernels of sparse convolutions; {NO_OTHER}",
    "transformer_engine": "layers with CUDA kernels; use torch.nn's, by the script's switch if there is one",
    "xentropy_cuda": OF_APEX,
    "xformers": f"CUDA kernels of attention; {ATTENTION}",
}


def find(name: str) -> str:
    """Return the package of the table that a module belongs to, or ''."""
    return next((known for known in PACKAGES if f"{name}.".startswith(known + ".")), "")
