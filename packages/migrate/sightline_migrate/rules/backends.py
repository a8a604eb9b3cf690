"""Settings and profiling of CUDA: torch.backends.cuda and cudnn, torch.version.cuda, the profilers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_dynamo_compiling

from sightline_migrate.reporting import record
from sightline_migrate.rules.makers import answers
from sightline_migrate.rules.table import Rule, dressed
from sightline_migrate.targets import HOST_MEMORY

if TYPE_CHECKING:
    from sightline_migrate.session import Session

CUDNN_VERSION = 90100
ATTENTION = "torch.nn.attention"
MATH_STAYS = "plain attention stays enabled: the target lacks some of CUDA's kernels"
ACTIVITIES = {"xpu": "XPU", "hpu": "HPU", "mtia": "MTIA"}


def rules() -> list[Rule]:
    def yes(session: Session) -> Callable[..., Any]:
        return lambda *args, **kwargs: True

    return [
        Rule("torch.backends.cuda.is_built", "exact", answers(yes), "True"),
        Rule("torch.backends.cudnn.is_available", "adapted", answers(yes), "True: its settings have no effect"),
        Rule("torch.backends.cudnn.is_acceptable", "adapted", answers(yes), "True: its settings have no effect"),
        Rule("torch.backends.cudnn.version", "adapted", _version(), "a version with all features"),
        Rule("torch.backends.cuda.cufft_plan_cache", "ignored", _make_plan_cache, "stored, no effect"),
        Rule("torch.backends.cuda.enable_math_sdp", "adapted", dressed(_make_math), MATH_STAYS, targets=HOST_MEMORY),
        Rule(f"{ATTENTION}._sdpa_kernel", "adapted", dressed(_make_kernels), MATH_STAYS, HOST_MEMORY, ATTENTION),
        Rule("torch.version.cuda", "adapted", _make_version, "the value of --cuda-version"),
        Rule("torch.profiler.profile.__init__", "adapted", dressed(_make_profile), "activities of the target"),
        Rule("torch.autograd.profiler.profile.__init__", "adapted", dressed(_make_autograd_profile), "on the target"),
        Rule("torch.autograd.profiler.emit_nvtx.__init__", "ignored", dressed(_make_emit_nvtx), "no effect: no nvtx"),
    ]


def _version() -> Any:
    def make(rule: Rule, original: Any, session: Session) -> Any:
        return answers(lambda session: lambda: original() or CUDNN_VERSION)(rule, original, session)

    return make


class PlanCache:
    """Sizes that can be set and read; indexed by device, as cufft_plan_cache[0]."""

    def __init__(self) -> None:
        self.max_size = 4096
        self.size = 0

    def clear(self) -> None:
        """Do nothing: the cache is always empty."""

    def __getitem__(self, device: Any) -> PlanCache:
        return self


def _make_plan_cache(rule: Rule, original: Any, session: Session) -> Any:
    return PlanCache()


def _make_math(rule: Rule, original: Any, session: Session) -> Any:
    """Keep plain attention enabled: scripts disable it to force a fast kernel, which the target may not have."""

    def enable_math_sdp(enabled: bool) -> None:
        if not enabled and not is_dynamo_compiling():
            record.hit(rule, (enabled,))
        original(True)

    return enable_math_sdp


def _make_kernels(rule: Rule, original: Any, session: Session) -> Any:
    """Add plain attention to the allowed kernels; sdpa_kernel and sdp_kernel both call this function."""
    math = torch.nn.attention.SDPBackend.MATH

    def _sdpa_kernel(backends: Any, *args: Any, **kwargs: Any) -> None:
        if math not in backends:
            if not is_dynamo_compiling():
                record.hit(rule, [str(each) for each in backends])
            backends = [*backends, math]
        original(backends, *args, **kwargs)

    return _sdpa_kernel


def _make_version(rule: Rule, original: Any, session: Session) -> Any:
    return session.options.cuda_version or original


def _make_profile(rule: Rule, original: Any, session: Session) -> Any:
    """Map ProfilerActivity.CUDA to the target's activity, or to the CPU's if it has none."""
    cuda = torch.profiler.ProfilerActivity.CUDA
    name = ACTIVITIES.get(session.target.name, "CPU" if session.target.is_cpu else "PrivateUse1")
    there = getattr(torch.profiler.ProfilerActivity, name, torch.profiler.ProfilerActivity.CPU)

    def __init__(self: Any, *, activities: Any = None, **kwargs: Any) -> None:
        if kwargs.pop("use_cuda", None):  # as before torch 2.12; without activities it meant CPU and CUDA
            record.hit(rule, (), {"use_cuda": True}, f"ProfilerActivity.{name} instead of CUDA")
        if activities is None:
            activities = {torch.profiler.ProfilerActivity.CPU, there}
        wanted = [each for each in activities if each is not None]
        if cuda in wanted:
            record.hit(rule, (), {"activities": len(wanted)}, f"ProfilerActivity.{name} instead of CUDA")
            wanted = list(dict.fromkeys(there if each == cuda else each for each in wanted))
        original(self, activities=wanted, **kwargs)

    return __init__


def _make_autograd_profile(rule: Rule, original: Any, session: Session) -> Any:
    there = None if session.target.name in HOST_MEMORY else session.target.name

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("use_device") == "cuda":
            record.hit(rule, (), kwargs)
            kwargs["use_device"] = there
        if kwargs.pop("use_cuda", None):  # releases of torch that no longer take it would raise
            record.hit(rule, (), {"use_cuda": True})
            kwargs.setdefault("use_device", there)
        original(self, *args, **kwargs)

    return __init__


def _make_emit_nvtx(rule: Rule, original: Any, session: Session) -> Any:
    def __init__(self: Any, enabled: bool = True, *args: Any, **kwargs: Any) -> None:
        record.hit(rule, (enabled,), kwargs)
        original(self, False, *args, **kwargs)

    return __init__
