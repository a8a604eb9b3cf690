"""Do our kernels pay? Instance norm with leaky ReLU beside torch's own layers, eager and compiled, in both layouts.

    python benchmarks/kernels.py                      # levels of the U-Net of 192 x 160, batch 64, bf16: about a minute
    python benchmarks/kernels.py --shapes 64,32,56,40 64,64,28,20

Every contender is captured in a CUDA graph, as a training step is, over inputs that together exceed the cache, and
they are timed in turn. GB/s count the least a perfect kernel moves (forward: read x, write y; backward: read x and
the outer gradient, write the inner one), so that a contender's extra passes and layout copies show as lost speed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sightline.hardware import devices
from sightline.kernels import instance_norm, instance_norm_check
from sightline.measure.provenance import provenance, result_file

UNET = ((64, 32, 192, 160), (64, 64, 96, 80), (64, 128, 48, 40), (64, 256, 24, 20), (64, 512, 12, 10), (64, 512, 6, 5))
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CACHE_BYTES = 200 << 20  # several times an H200's cache of 50 MB
MOST_INPUTS = 32
EPS, SLOPE = 1e-5, 0.01

Call = Callable[[Tensor], Tensor]


def contenders(channels: int, with_compiled: bool) -> dict[str, tuple[Call, bool, list[nn.Parameter]]]:
    """Return by name: the call, whether its input is channels_last, and its parameters."""
    norm = nn.InstanceNorm2d(channels, EPS, affine=True)
    layers = nn.Sequential(norm, nn.LeakyReLU(SLOPE)).cuda()

    def ours(x: Tensor) -> Tensor:
        assert instance_norm.applies(x)
        return instance_norm.instance_norm_leaky_relu(x, norm.weight, norm.bias, EPS, SLOPE)

    parameters = list(layers.parameters())
    found: dict[str, tuple[Call, bool, list[nn.Parameter]]] = {"ours": (ours, True, parameters)}
    found |= {f"eager {layout}": (layers, layout == "nhwc", parameters) for layout in ("nchw", "nhwc")}
    if with_compiled:
        compiled = torch.compile(layers, dynamic=False, fullgraph=True)
        found |= {f"compiled {layout}": (compiled, layout == "nhwc", parameters) for layout in ("nchw", "nhwc")}
    return found


def captured(work: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """Capture `work` as a graph, after runs in which everything is compiled."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def workloads(
    shape: tuple[int, ...], dtype: torch.dtype, with_compiled: bool
) -> tuple[dict[tuple[str, str], Callable[[], Any]], int]:
    """Return the calls to time, by contender and direction, and the number of inputs each goes through."""
    example = torch.empty(shape, dtype=dtype, device="meta")
    inputs = min(max(-(-CACHE_BYTES // example.nbytes), 2), MOST_INPUTS)
    plain = [torch.randn(shape, device="cuda").to(dtype).requires_grad_() for _ in range(inputs)]
    last = [x.detach().to(memory_format=torch.channels_last).requires_grad_() for x in plain]
    outer = torch.randn(shape, device="cuda").to(dtype)
    outer_last = outer.to(memory_format=torch.channels_last)
    target = torch.empty_like(outer_last)
    work: dict[tuple[str, str], Callable[[], Any]] = {
        ("copy", "forward"): lambda: [target.copy_(x.detach()) for x in last]
    }
    for name, (call, is_last, parameters) in contenders(shape[1], with_compiled).items():
        given, slope = (last, outer_last) if is_last else (plain, outer)

        def forward(call: Call = call, given: list[Tensor] = given) -> None:
            with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
                for x in given:
                    call(x)

        def training(
            call: Call = call,
            given: list[Tensor] = given,
            slope: Tensor = slope,
            parameters: list[nn.Parameter] = parameters,
        ) -> None:
            for x in given:
                with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
                    y = call(x)
                torch.autograd.grad(y, [x, *parameters], slope)

        work[name, "forward"], work[name, "forward + backward"] = forward, training
    return work, inputs


def measure(shape: tuple[int, ...], dtype: torch.dtype, with_compiled: bool, repeats: int) -> list[dict[str, Any]]:
    """Return one row per contender and direction: microseconds of a call, median and spread, and GB/s."""
    work, inputs = workloads(shape, dtype, with_compiled)
    graphs = {key: captured(each) for key, each in work.items()}
    times: dict[tuple[str, str], list[float]] = {key: [] for key in graphs}
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for number in range(repeats + 1):  # in turn, so that a clock that changes meets all; the first round is not counted
        for key, graph in graphs.items():
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if number:
                times[key].append(start.elapsed_time(end) * 1e3 / inputs)
    size = torch.empty(shape, dtype=dtype, device="meta").nbytes
    medians = {key: statistics.median(found) for key, found in times.items()}
    rows: list[dict[str, Any]] = []
    for (name, what), found in times.items():
        median = medians[name, what]
        moved = size * (2 if what == "forward" else 5)
        row = {"contender": name, "what": what, "us": median, "us_all": found, "gb_per_s": moved / median / 1e3}
        if what != "forward":
            backward = median - medians[name, "forward"]
            row |= {"us_backward": backward, "gb_per_s_backward": size * 3 / backward / 1e3}
        rows.append({"shape": list(shape), **row})
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    print(f"({', '.join(map(str, rows[0]['shape']))})")
    for row in rows:
        spread = f"{row['us']:8.1f} us [{min(row['us_all']):.1f}, {max(row['us_all']):.1f}]"
        backward = f"; backward {row['gb_per_s_backward']:6.0f} GB/s" if "us_backward" in row else ""
        print(f"  {row['contender']:14} {row['what']:18} {spread:32} {row['gb_per_s']:6.0f} GB/s{backward}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=[",".join(map(str, shape)) for shape in UNET])
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument(
        "--no-compiled", action="store_true", help="leave torch.compile out, which takes most of the time"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    shapes = [tuple(map(int, text.split(","))) for text in args.shapes]
    for text, shape in zip(args.shapes, shapes, strict=True):
        if len(shape) != 4 or min(shape) < 1:
            parser.error(f"--shapes {text}: give images,channels,height,width, e.g. 64,32,192,160")
    if not torch.cuda.is_available():
        parser.error("needs CUDA: our kernels apply nowhere else; torch finds no CUDA device on this machine")
    device, now, started = devices.select("cuda"), datetime.now(UTC), time.perf_counter()
    place = torch.device("cuda", torch.cuda.current_device())
    channels = instance_norm_check.kinds_of([shape[1] for shape in shapes])
    if note := instance_norm_check.decide(place, DTYPES[args.dtype], channels, instance_norm_check.SIZES):
        parser.error(note)
    rows = []
    for shape in shapes:
        torch._dynamo.reset()  # one entry per shape, as in a step of static shapes
        found = measure(shape, DTYPES[args.dtype], not args.no_compiled, args.repeats)
        show(found)
        rows += found
    wall_s = time.perf_counter() - started
    result = {
        "time": now.isoformat(timespec="seconds"),
        "device": device.name(),
        "dtype": args.dtype,
        "repeats": args.repeats,
        "wall_s": wall_s,
        "rows": rows,
        **provenance(device),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    path = result_file(args.out, f"kernels-{args.dtype}", device, now)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{wall_s:.0f} s; written to {path}")


if __name__ == "__main__":
    main()
