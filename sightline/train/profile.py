"""The profile window `--run.profile 5,8`: a trace of exactly these steps, counted from 1 as the log does, and a table
of where their time went.

The table is read from the trace itself. A replayed CUDA graph shows kernels without the ops that launched them, so
kernels are classified by name (KINDS); on the CPU the ops themselves are, by the time they spent outside other ops.
"""

from __future__ import annotations

import bisect
import contextlib
import gzip
import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from sightline.errors import UsageError
from sightline.files.whole import replace_text, write_whole
from sightline.hardware.devices import Device

MARK = "sightline step "  # name of the range around each traced step, followed by its number
LONGEST = 25  # kernels listed by name in time.json, so that a person can check the classification

# One pattern per kind; the first that is found decides. What a Triton kernel fuses stands in its name: one with a norm
# in it is the norm's, and none but the templates (tem, mm) is a convolution or a product, even where it names the
# convolution whose weights it casts. cuDNN comes before cuBLAS: its 1x1 convolutions are products too.
_MOVES = r"(?:_to_copy|convert_element_type|clone|copy_?|_?unsafe_view|view|permute|(?:un)?squeeze|convolution)"
_POINTWISE_OPS = (
    "add|sub|mul|div|neg|relu|where|sum|mean|amax|argmax|eq|ne|lt|le|gt|ge|sqrt|rsqrt|reciprocal|pow|exp|log|abs"
    "|addcmul|roll|stack|full|arange|bitwise_not|bitwise_and|bitwise_or|logical_not|isfinite|linalg_vector_norm"
)
KINDS: dict[str, re.Pattern[str]] = {
    kind: re.compile(pattern, re.IGNORECASE)
    for kind, pattern in {
        "collective": r"nccl|rccl|hccl|oneccl|gloo:|c10d::|all_?reduce",
        "optimizer": r"multi_tensor_apply|_foreach_|^triton_for_fused|fused_?(sgd|adam|lamb|lars)",
        "norm": r"^(?!triton_tem).*((batch|layer|group|instance|rms)_?norm|\bbn_(fw|bw)|Rowwise|InternalGradients)",
        "pool": r"max_?pool|avg_?pool|::pooling",
        "copy": r"^mem(cpy|set)|copy_kernel|nchwToNhwc|nhwcToNchw|AddPadding|CatArray"
        rf"|^triton_poi_fused_(?=.*(to_copy|convert_element|clone|copy))({_MOVES}_)+\d+$"
        r"|^aten::(copy_|_to_copy|to|clone|contiguous|cat|_local_scalar_dense)$",
        "elementwise": r"^triton_(?!tem|mm|convolution)|elementwise|\breduce_kernel|softmax|nll_loss|cross_entropy"
        r"|index_(select|put|copy|fill|add)|\broll_"
        rf"|^aten::_?({_POINTWISE_OPS})_?(_backward)?$|^aten::(zero|ones|fill|threshold|clamp|dropout|bernoulli)",
        "conv": r"cudnn|implicit_gemm|fprop|dgrad|wgrad|conv(?!ert)|im2col|winograd",
        "matmul": r"gemm|gemv|nvjet|cublas|splitK|^triton_(tem|mm)|cutlass"
        r"|^(aten|mkl)::.*(mm|matmul|linear|mv|dot)(_backward)?$",
    }.items()
}
ROWS = ("conv", "matmul", "norm", "elementwise", "pool", "copy", "optimizer", "collective", "other", "idle")
HOST_SYNCS = re.compile(r"cuda(Stream|Device)Synchronize|cudaMemcpy(2D|3D)?|cu(Stream|Ctx)Synchronize")
Event = dict[str, Any]  # of a Chrome trace: ph, cat, name, ts and dur in microseconds, args
_OUTSIDE = contextlib.nullcontext()


def parse_window(text: str, steps: int) -> tuple[int, int] | None:
    """Return the first and last step to trace of a run of `steps`, counted from 1 as the log does; "" is none."""
    if not text:
        return None
    parts = text.split(",")
    if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
        raise UsageError(
            f"run.profile='{text}' must be two step numbers, the first and the last, e.g. --run.profile 5,8"
        )
    first, last = int(parts[0]), int(parts[1])
    if first > last:
        raise UsageError(f"run.profile={text} ends before it begins; write --run.profile {last},{first}")
    if not first:
        raise UsageError(
            f"run.profile={text} begins before the run, whose steps are 1 to {steps}, as the log counts them; "
            f"use --run.profile 1,{max(1, last)}"
        )
    if last > steps:
        raise UsageError(
            f"run.profile={text} lies beyond the run, whose steps are 1 to {steps}; "
            f"use e.g. --run.profile {max(1, steps - 3)},{steps}, or train for longer"
        )
    return first, last


def kind_of(name: str) -> str:
    """Return the kind of work of a kernel or an op, by its name."""
    return next((kind for kind, pattern in KINDS.items() if pattern.search(name)), "other")


class ProfileWindow:
    """Wrap each step in step(number). After the window's last step, `folder`/profile holds the trace and the table."""

    def __init__(self, window: tuple[int, int] | None, folder: Path, device: Device, waited: Callable[[], float]):
        self.window = window
        self.folder = folder / "profile"
        self.device = device
        self.waited = waited  # seconds the loader has stood still so far
        self.summary = ""  # the table for people, once there is one
        self._profiler: torch.profiler.profile | None = None
        self._waited_s = 0.0
        self._told = False

    def step(self, number: int) -> contextlib.AbstractContextManager[None]:
        """Wrap everything that belongs to update `number`; costs nothing outside the window."""
        if self.window is None:
            return _OUTSIDE
        if not self.window[0] <= number <= self.window[1]:
            self.close()  # a rewind has left the window in the middle; it is traced afresh when it comes again
            return _OUTSIDE
        return _TracedStep(self, number)

    def take_summary(self) -> str:
        """Return the summary, the first time it is asked for; else ""."""
        text, self._told = "" if self._told else self.summary, self._told or bool(self.summary)
        return text

    def close(self) -> None:
        """Drop an unfinished trace."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _start(self) -> None:
        if self.device.has_graphs:
            # As torch.profiler does for Inductor's graphs: taking CUPTI down would break graphs that live on.
            os.environ.setdefault("TEARDOWN_CUPTI", "0")
        cpu_only = {torch.profiler.ProfilerActivity.CPU}
        activities = cpu_only if self.device.kind == "cpu" else torch.profiler.supported_activities()
        self._waited_s = 0.0
        self.device.synchronize()
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()

    def _finish(self) -> None:
        assert self._profiler is not None and self.window is not None
        self.device.synchronize()
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        trace = self.folder / "trace.json.gz"
        write_whole(trace, lambda path: profiler.export_chrome_trace(str(path)))
        with gzip.open(trace, "rt", encoding="utf-8", errors="replace") as file:
            events = json.load(file)["traceEvents"]
        table = {"device": self.device.name(), **tabulate(events, self._waited_s)}
        self.summary = f"{as_text(table)}\ntrace: {trace} (open it in https://ui.perfetto.dev)"
        replace_text(self.folder / "time.json", json.dumps(table, indent=1) + "\n")
        replace_text(self.folder / "time.txt", self.summary + "\n")
        self.window = None  # a rewound run passes these steps again; one trace is enough


class _TracedStep(contextlib.AbstractContextManager[None]):
    """One step inside the window."""

    def __init__(self, window: ProfileWindow, number: int):
        self.window = window
        self.number = number
        self.range = torch.profiler.record_function(f"{MARK}{number}")

    def __enter__(self) -> None:
        if self.window._profiler is None:
            self.window._start()
        self.waited_before = self.window.waited()
        self.range.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.range.__exit__(kind, error, trace)
        self.window._waited_s += self.window.waited() - self.waited_before
        if error is not None:
            self.window.close()
        elif self.window.window is not None and self.number == self.window.window[1]:
            self.window._finish()


@dataclass(frozen=True)
class _Span:
    """A stretch of work, in microseconds."""

    name: str
    kind: str
    start: float
    end: float
    busy: float  # without what other spans inside it account for


class _Steps:
    """The stretches of host time that belong to steps, in microseconds."""

    def __init__(self, marks: Iterable[Event]):
        ordered = sorted(marks, key=lambda mark: mark["ts"])
        self.numbers = [int(mark["name"].removeprefix(MARK)) for mark in ordered]
        self.starts = [float(mark["ts"]) for mark in ordered]
        self.ends = [float(mark["ts"] + mark["dur"]) for mark in ordered]
        self.length = sum(self.ends) - sum(self.starts)

    def hold(self, time_us: float) -> bool:
        """Return whether a moment lies in one of them."""
        at = bisect.bisect_right(self.starts, time_us) - 1
        return at >= 0 and time_us <= self.ends[at]


def tabulate(events: list[Event], data_wait_s: float) -> dict[str, Any]:
    """Time by kind of the marked steps of a Chrome trace, from the device's own events where it has any."""
    events = [event for event in events if event.get("ph") == "X"]
    steps = _Steps(e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith(MARK))
    calls = [e for e in events if str(e.get("cat", "")).endswith(("_runtime", "_driver"))]
    made_in_steps = Counter(call["name"] for call in calls if steps.hold(call["ts"]))
    syncs = {name: count for name, count in made_in_steps.items() if HOST_SYNCS.fullmatch(name)}
    ours, others = _device_events(events, calls, steps)
    if ours:
        spans = _device_spans(events, ours)
        idle_us = _idle_between(spans, others)
    else:
        spans = _host_spans(events, steps)
        idle_us = steps.length - _covered(spans)
    total_us = _covered(spans) + idle_us

    by_kind: dict[str, list[float]] = defaultdict(list)
    by_name: dict[tuple[str, str], list[float]] = defaultdict(list)
    for span in spans:
        by_kind[span.kind].append(span.busy)
        by_name[span.name, span.kind].append(span.busy)
    by_kind["idle"] = [idle_us]
    ms_per_step = 1e-3 / max(1, len(steps.numbers))
    return {
        "steps": steps.numbers,
        "step_ms": total_us * ms_per_step,
        "host_ms": steps.length * ms_per_step,
        "kinds": {
            kind: {
                "ms_per_step": sum(by_kind[kind]) * ms_per_step,
                "share": sum(by_kind[kind]) / total_us if total_us else 0.0,
                "calls": len(by_kind[kind]) if kind != "idle" else 0,
            }
            for kind in ROWS
        },
        "data_wait": {"ms_per_step": data_wait_s * 1e6 * ms_per_step, "share": data_wait_s * 1e6 / steps.length},
        "kernels": sum(event["cat"] == "kernel" for event in ours),
        "host_syncs": sum(syncs.values()),
        "host_syncs_by_name": syncs,
        "event_waits": made_in_steps["cudaEventSynchronize"],
        "longest": [
            {"name": name, "kind": kind, "calls": len(times), "ms_per_step": sum(times) * ms_per_step}
            for (name, kind), times in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:LONGEST]
        ],
    }


def as_text(table: dict[str, Any]) -> str:
    """Format the table for people."""
    steps = table["steps"]
    lines = [
        f"steps {steps[0]} to {steps[-1]} on {table['device']}: {table['step_ms']:.2f} ms per step; all {len(steps)} "
        f"together: {table['kernels']} kernels, {table['host_syncs']} host syncs, {table['event_waits']} event waits",
        f"  {'kind':<12} {'ms/step':>10} {'share':>7} {'calls':>7}",
    ]
    lines += [
        f"  {kind:<12} {row['ms_per_step']:>10.3f} {row['share']:>7.1%} {row['calls'] or '':>7}"
        for kind, row in table["kinds"].items()
        if row["ms_per_step"] or kind == "idle"
    ]
    wait = table["data_wait"]
    lines.append(f"  {'data wait':<12} {wait['ms_per_step']:>10.3f} {wait['share']:>7.1%}  of the host's time")
    return "\n".join(lines)


def _device_events(events: list[Event], calls: list[Event], steps: _Steps) -> tuple[list[Event], list[Event]]:
    """Return the device events that the steps launched, and all others. The device works behind the host, so what
    counts is when the launching call was made; a graph's kernels all share the call that launched the graph."""
    launches = {call.get("args", {}).get("correlation"): float(call["ts"]) for call in calls}
    ours: list[Event] = []
    others: list[Event] = []
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            launched = launches.get(event.get("args", {}).get("correlation", -1), float(event["ts"]))
            (ours if steps.hold(launched) else others).append(event)
    return ours, others


def _device_spans(events: list[Event], ours: list[Event]) -> list[_Span]:
    ops = {e["args"].get("External id"): e["name"] for e in events if e.get("cat") == "cpu_op" and "args" in e}
    spans = []
    for event in ours:
        kind = kind_of(event["name"])
        if kind in ("matmul", "other"):
            # Eager runs know the op: cuDNN computes some convolutions with plain products of cuBLAS and CUTLASS.
            op = kind_of(ops.get(event.get("args", {}).get("External id", -1), ""))
            kind = op if op in ("conv", "norm", "pool") else kind
        start, length = float(event["ts"]), float(event["dur"])
        spans.append(_Span(event["name"], kind, start, start + length, length))
    return spans


def _idle_between(spans: list[_Span], others: list[Event]) -> float:
    """Return how long the device was idle between two pieces of the steps' work; not after an evaluation."""
    timeline = [(span.start, span.end, True) for span in spans]
    timeline += [(float(e["ts"]), float(e["ts"] + e["dur"]), False) for e in others]
    idle, busy_until, was_ours = 0.0, 0.0, False
    for start, end, is_ours in sorted(timeline):
        if start > busy_until and is_ours and was_ours:
            idle += start - busy_until
        if end > busy_until:
            busy_until, was_ours = end, is_ours
    return idle


def _host_spans(events: list[Event], steps: _Steps) -> list[_Span]:
    """Return the ops of the steps, each with the time it spent outside the ops it called."""
    threads: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op" and steps.hold(event["ts"]):
            threads[event.get("tid")].append(event)
    spans = []
    for ops in threads.values():
        ops.sort(key=lambda event: (event["ts"], -event["dur"]))
        own = [float(op["dur"]) for op in ops]
        callers: list[int] = []
        for number, op in enumerate(ops):
            while callers and op["ts"] >= ops[callers[-1]]["ts"] + ops[callers[-1]]["dur"]:
                callers.pop()
            if callers:
                own[callers[-1]] -= op["dur"]
            callers.append(number)
        for op, self_us in zip(ops, own, strict=True):
            start = float(op["ts"])
            spans.append(_Span(op["name"], kind_of(op["name"]), start, start + op["dur"], max(0.0, self_us)))
    return spans


def _covered(spans: list[_Span]) -> float:
    """Return the length of the union of all spans."""
    total, until = 0.0, 0.0
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    return total
