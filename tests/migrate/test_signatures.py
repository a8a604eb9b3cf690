"""Defaults of the stand-ins of apex and the numbers of pynvml's, against those that the originals document."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sightline_migrate.stand_ins import apex, apex_amp, apex_optimizers

# As NVIDIA/apex declares them, but for the rate of FusedSGD, which apex has no default for.
DECLARED = {
    "optimizers.FusedAdam": {
        "lr": 0.001,
        "bias_correction": True,
        "betas": (0.9, 0.999),
        "eps": 1e-08,
        "adam_w_mode": True,
        "weight_decay": 0.0,
        "amsgrad": False,
        "set_grad_none": True,
        "capturable": False,
        "master_weights": False,
    },
    "optimizers.FusedLAMB": {
        "lr": 0.001,
        "bias_correction": True,
        "betas": (0.9, 0.999),
        "eps": 1e-06,
        "weight_decay": 0.01,
        "amsgrad": False,
        "adam_w_mode": True,
        "grad_averaging": True,
        "set_grad_none": True,
        "max_grad_norm": 1.0,
        "use_nvlamb": False,
    },
    "optimizers.FusedNovoGrad": {
        "lr": 0.001,
        "bias_correction": True,
        "betas": (0.9, 0.999),
        "eps": 1e-08,
        "weight_decay": 0.0,
        "amsgrad": False,
        "reg_inside_moment": False,
        "grad_averaging": True,
        "norm_type": 2,
        "init_zero": False,
        "set_grad_none": True,
    },
    "optimizers.FusedAdagrad": {
        "lr": 0.01,
        "eps": 1e-10,
        "weight_decay": 0.0,
        "set_grad_none": True,
        "adagrad_w_mode": False,
    },
    "optimizers.FusedSGD": {
        "lr": 0.001,
        "momentum": 0.0,
        "dampening": 0.0,
        "weight_decay": 0.0,
        "nesterov": False,
        "wd_after_momentum": False,
        "materialize_master_grads": True,
        "set_grad_none": False,
    },
    "parallel.LARC": {"trust_coefficient": 0.02, "clip": True, "eps": 1e-08},
    "parallel.SyncBatchNorm": {
        "eps": 1e-05,
        "momentum": 0.1,
        "affine": True,
        "track_running_stats": True,
        "process_group": None,
        "channel_last": False,
        "fuse_relu": False,
    },
    "parallel.DistributedDataParallel": {
        "message_size": 10000000,
        "delay_allreduce": False,
        "shared_param": None,
        "allreduce_trigger_params": None,
        "retain_allreduce_buffers": False,
        "allreduce_always_fp32": False,
        "num_allreduce_streams": 1,
        "allreduce_communicators": None,
        "gradient_average": True,
        "gradient_predivide_factor": 1.0,
        "gradient_average_split_factor": None,
        "prof": False,
    },
    "parallel.convert_syncbn_model": {"process_group": None, "channel_last": False},
    "normalization.FusedLayerNorm": {"eps": 1e-05, "elementwise_affine": True, "memory_efficient": False},
    "normalization.FusedRMSNorm": {"eps": 1e-05, "elementwise_affine": True, "memory_efficient": False},
    "normalization.MixedFusedLayerNorm": {"eps": 1e-05},
    "normalization.MixedFusedRMSNorm": {"eps": 1e-05},
    "normalization.fused_layer_norm.fused_layer_norm": {"eps": 1e-06, "memory_efficient": False},
    "normalization.fused_layer_norm.fused_layer_norm_affine": {"eps": 1e-06, "memory_efficient": False},
    "normalization.fused_layer_norm.mixed_dtype_fused_layer_norm_affine": {"eps": 1e-06, "memory_efficient": False},
    "normalization.fused_layer_norm.fused_rms_norm": {"eps": 1e-06, "memory_efficient": False},
    "normalization.fused_layer_norm.fused_rms_norm_affine": {"eps": 1e-06, "memory_efficient": False},
    "normalization.fused_layer_norm.mixed_dtype_fused_rms_norm_affine": {"eps": 1e-06, "memory_efficient": False},
    "amp.initialize": {
        "optimizers": None,
        "enabled": True,
        "opt_level": "O1",
        "cast_model_type": None,
        "patch_torch_functions": None,
        "keep_batchnorm_fp32": None,
        "master_weights": None,
        "loss_scale": None,
        "cast_model_outputs": None,
        "num_losses": 1,
        "verbosity": 1,
        "min_loss_scale": None,
        "max_loss_scale": 16777216.0,
    },
    "amp.scale_loss": {"loss_id": 0, "model": None, "delay_unscale": False, "delay_overflow_check": False},
}


@pytest.fixture
def started(on_cpu: Callable[..., Any]) -> None:
    on_cpu(amp="keep")


@pytest.mark.parametrize("name", DECLARED)
def test_defaults_are_those_of_apex(started: None, name: str):
    module, _, last = f"apex.{name}".rpartition(".")
    kind = getattr(importlib.import_module(module), last)
    parameters = inspect.signature(kind).parameters.values()
    found = {each.name: each.default for each in parameters if each.default is not inspect.Parameter.empty}
    assert found == DECLARED[name], name
    assert {key: type(value) for key, value in found.items()} == {k: type(v) for k, v in DECLARED[name].items()}


def test_every_default_of_apex_is_declared_above(started: None):
    """Of what sightline_migrate.stand_ins.apex, sightline_migrate.stand_ins.apex_amp and
    sightline_migrate.stand_ins.apex_optimizers hold in the place of apex."""
    for module in (apex, apex_amp, apex_optimizers):
        for name, each in inspect.getmembers(module, callable):
            if getattr(each, "__module__", "").startswith("apex.") and not name.startswith("_"):
                defaults = [p for p in inspect.signature(each).parameters.values() if p.default is not p.empty]
                assert not defaults or any(known.endswith(f".{name}") for known in DECLARED), name


def test_the_applier_of_kernels_has_the_chunks_of_apex(started: None):
    assert importlib.import_module("apex.multi_tensor_apply").multi_tensor_applier.chunk_size == 2048 * 32


@pytest.mark.parametrize("name", [name for name in DECLARED if name.startswith("optimizers.")])
def test_defaults_reach_the_groups_of_parameters(started: None, name: str):
    module, _, last = f"apex.{name}".rpartition(".")
    made = getattr(importlib.import_module(module), last)([torch.nn.Parameter(torch.ones(2))])
    known = {key: value for key, value in made.defaults.items() if key in DECLARED[name]}
    assert known == {key: DECLARED[name][key] for key in known} and {"lr", "weight_decay"} <= known.keys()
    assert (made.param_groups[0]["lr"], made.set_grad_none) == (DECLARED[name]["lr"], DECLARED[name]["set_grad_none"])


def test_layers_are_made_with_their_defaults(started: None):
    norms, parallel = (importlib.import_module(f"apex.{name}") for name in ("normalization", "parallel"))
    for kind in (norms.FusedLayerNorm, norms.FusedRMSNorm, norms.MixedFusedLayerNorm, norms.MixedFusedRMSNorm):
        made = kind(4)
        assert (made.eps, made.elementwise_affine, made.weight.tolist()) == (1e-5, True, [1.0] * 4), kind
    made = parallel.SyncBatchNorm(4)
    assert (made.eps, made.momentum, made.affine, made.track_running_stats) == (1e-5, 0.1, True, True)
    assert (made.process_group, made.channel_last, made.fuse_relu) == (None, False, False)
    assert made.weight.tolist() == [1] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_functions_of_apex_against_their_formulas(started: None, dtype: torch.dtype):
    """Of small values, where eps is most of what is under the root."""
    functions = importlib.import_module("apex.normalization.fused_layer_norm")
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, 5, generator=draws) * 1e-3
    weight, bias = torch.randn(2, 5, generator=draws), torch.randn(2, 5, generator=draws)
    wide = x.to(dtype).double()
    mean = wide.mean((1, 2), keepdim=True)
    layer = (wide - mean) / ((wide - mean).square().mean((1, 2), keepdim=True) + 1e-6).sqrt()
    rms = wide / (wide.square().mean((1, 2), keepdim=True) + 1e-6).sqrt()
    limit = 1e-5 if dtype is torch.float32 else 0.02
    narrow, within = x.to(dtype), {"rtol": limit, "atol": limit}
    for given, expected in (
        (functions.fused_layer_norm(narrow, (2, 5)), layer),
        (functions.fused_layer_norm_affine(narrow, weight.to(dtype), bias.to(dtype), [2, 5]), layer * weight + bias),
        (functions.fused_rms_norm(narrow, (2, 5)), rms),
        (functions.fused_rms_norm_affine(narrow, weight.to(dtype), (2, 5)), rms * weight),
    ):
        assert given.dtype is dtype
        torch.testing.assert_close(given.double(), expected, **within)
    for given, expected in (
        (functions.mixed_dtype_fused_layer_norm_affine(narrow, weight, bias, (2, 5)), layer * weight + bias),
        (functions.mixed_dtype_fused_rms_norm_affine(narrow, weight, (2, 5)), rms * weight),
    ):
        assert given.dtype is torch.float32  # that of the weight
        torch.testing.assert_close(given.double(), expected, rtol=1e-5, atol=1e-5)
    of_rows = functions.fused_layer_norm(x, 5)
    torch.testing.assert_close(of_rows, torch.nn.functional.layer_norm(x, (5,), eps=1e-6))


def test_numbers_are_those_of_nvml(started: None, monkeypatch: pytest.MonkeyPatch):
    """NVML's header, nvml.h: results, temperatures, clocks and what else a script compares with."""
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)  # another test may have planted one
    pynvml = importlib.import_module("pynvml")
    numbers = {
        "NVML_SUCCESS": 0,
        "NVML_ERROR_UNINITIALIZED": 1,
        "NVML_ERROR_INVALID_ARGUMENT": 2,
        "NVML_ERROR_NOT_SUPPORTED": 3,
        "NVML_ERROR_NO_PERMISSION": 4,
        "NVML_ERROR_NOT_FOUND": 6,
        "NVML_ERROR_INSUFFICIENT_SIZE": 7,
        "NVML_ERROR_DRIVER_NOT_LOADED": 9,
        "NVML_ERROR_TIMEOUT": 10,
        "NVML_ERROR_UNKNOWN": 999,
        "NVML_TEMPERATURE_GPU": 0,
        "NVML_CLOCK_GRAPHICS": 0,
        "NVML_CLOCK_SM": 1,
        "NVML_CLOCK_MEM": 2,
        "NVML_CLOCK_VIDEO": 3,
    }
    known = {name: number for name, number in numbers.items() if hasattr(pynvml, name)}
    assert {name: getattr(pynvml, name) for name in known} == known
    assert {"NVML_SUCCESS", "NVML_ERROR_INVALID_ARGUMENT", "NVML_ERROR_NOT_SUPPORTED"} <= known.keys()
    assert torch.cuda.is_available()  # the stand-ins belong to the target
