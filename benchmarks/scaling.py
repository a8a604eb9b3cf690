"""Is the model of `sightline benchmark --scaling` any good? Beside two ranks here, and beside published figures.

    python benchmarks/scaling.py ranks                # two gloo ranks, one thread each: about two minutes on two cores
    python benchmarks/scaling.py ranks --recipe demo_classification --rounds 9 --train.global-batch 8
    python benchmarks/scaling.py published            # no measurement: predictions beside published throughputs

`ranks` times, in turn and in the same two processes: one rank alone, two that know nothing of each other, two that
train together, and all-reduces of 4 bytes and of a bucket. From medians of the others it predicts those that train
together: by the link alone, and with the wait for the slower rank.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from sightline import config
from sightline.config import Recipe, Run
from sightline.hardware import devices
from sightline.hardware.world import World
from sightline.measure import scaling
from sightline.measure.benchmark import OurStep, image_of, synthetic_data
from sightline.measure.links import LINKS, Cluster, Link
from sightline.measure.provenance import provenance, result_file
from sightline.measure.scaling import Network, Work, buckets_of, network_of, predict
from sightline.train.step import build_step

# Published throughputs.


@dataclass(frozen=True)
class Published:
    """One device and many, as one source gives them."""

    what: str
    recipe: str  # whose network is meant
    batch: int  # per device
    one: float  # img/s
    devices: int
    many: float
    links: tuple[str, str]


GAUDI, A100, V100 = ("gaudi1-inside", "gaudi1-between"), ("nvlink3", "ib200"), ("nvlink2", "eth100")
# Gaudi: the vendor's performance page of release 1.0.0, mixed precision, batch 256 and (ResNeXt) 128. U-Net and SSD:
# NVIDIA's DeepLearningExamples, nnU-Net 21.x (2D, batch 64 or 128, PyTorch) and SSD300 v1.1 (its ResNet-50 trunk is
# stood in for by ours with ResNet-34, of about as many parameters).
PUBLISHED = (
    Published("ResNet-50 LARS, Gaudi", "resnet50", 256, 1690, 8, 12950, GAUDI),
    Published("ResNet-50 LARS, Gaudi", "resnet50", 256, 1690, 16, 23400, GAUDI),
    Published("ResNet-50 LARS, Gaudi", "resnet50", 256, 1690, 32, 46400, GAUDI),
    Published("ResNet-50 SGD, Gaudi", "resnet50", 256, 1700, 8, 12580, GAUDI),
    Published("ResNeXt-101, Gaudi", "resnext101", 128, 650, 8, 4656, GAUDI),
    Published("SSD300, A100, AMP", "ssd_resnet34", 128, 724, 8, 5734, A100),
    Published("U-Net 2D, A100, AMP, batch 64", "unet2d", 64, 1064, 8, 6478, A100),
    Published("U-Net 2D, A100, AMP, batch 128", "unet2d", 128, 1129, 8, 8164, A100),
    Published("U-Net 2D, A100, TF32, batch 64", "unet2d", 64, 679, 8, 4780, A100),
    Published("U-Net 2D, A100, TF32, batch 128", "unet2d", 128, 710, 8, 5342, A100),
    Published("U-Net 2D, V100, AMP, batch 64", "unet2d", 64, 575, 8, 4179, V100),
    Published("U-Net 2D, V100, fp32, batch 64", "unet2d", 64, 278, 8, 2149, V100),
)


def network_named(recipe: Recipe) -> Network:
    """Return the gradients and statistics that a recipe's network sends."""
    bound = synthetic_data(recipe, devices.select("cpu"))
    with torch.device("meta"):
        model = recipe.model.build(bound.dataset.spec)
    return network_of(model, image_of(bound))


def beside_published() -> list[dict[str, Any]]:
    """Predict every row by links alone, and with one number for the unevenness of steps in all rows."""
    networks = {name: network_named(config.load(name, [])[0]) for name in {row.recipe for row in PUBLISHED}}
    found = []
    for row in PUBLISHED:
        cluster = Cluster(LINKS[row.links[0]], LINKS[row.links[1]], per_host=8)
        work = Work(row.batch / row.one, row.batch, networks[row.recipe])
        uneven = dataclasses.replace(work, spread=scaling.PUBLISHED_SPREAD)
        rates = [predict(each, row.devices, cluster)["images_per_s"] for each in (work, uneven)]
        found.append(
            {
                **dataclasses.asdict(row),
                "links": list(row.links),
                "links_alone": rates[0],
                "links_alone_error": rates[0] / row.many - 1,
                "predicted": rates[1],
                "error": rates[1] / row.many - 1,
            }
        )
    return found


def published_as_text(rows: Sequence[dict[str, Any]]) -> str:
    """Format the rows for people; the first lines are in docs/why/scaling.md."""
    names = f"{'published':>9} {'links alone':>11} {'error':>7} {'predicted':>9} {'error':>7}"
    lines = [f"{'':<32} {'one':>6} {'devices':>7} {names}"] + [
        f"{row['what']:<32} {row['one']:>6,.0f} {row['devices']:>7} {row['many']:>9,.0f} {row['links_alone']:>11,.0f} "
        f"{row['links_alone_error']:>+7.1%} {row['predicted']:>9,.0f} {row['error']:>+7.1%}"
        for row in rows
    ]
    errors = [abs(row["error"]) for row in rows]
    return "\n".join([*lines, f"absolute error: median {statistics.median(errors):.1%}, largest {max(errors):.1%}"])


# Two ranks of this machine.

RANKS = 2
SMALL_REPEATS, BUCKET_REPEATS = 50, 4


class RankStep(OurStep):
    """The step of one rank among others; as OurStep in all else."""

    def join(self, recipe: Recipe, run: Run, world: World) -> None:
        """Exchange gradients from now on."""
        bound = synthetic_data(recipe, self.device)
        self.step = build_step(recipe, run, self.device, world, self.state, bound)


def timed(call: Callable[[], object], times: int) -> list[float]:
    """Return seconds of each of `times` calls."""
    moments = [time.perf_counter()]
    for _ in range(times):
        call()
        moments.append(time.perf_counter())
    return [after - before for before, after in itertools.pairwise(moments)]


def rank_main(rank: int, folder: str, flags: list[str], name: str, steps: int, rounds: int) -> None:
    """Run one of the ranks: every phase begins together; rank 0 writes its times."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    recipe, run = config.load(name, flags)
    device, world = devices.select("cpu"), World(rank, RANKS, rank, None)
    alone, joined = (
        RankStep(recipe, run, synthetic_data(recipe, device), device, False, lambda _: None, (0, 1)) for _ in range(2)
    )
    joined.join(recipe, run, world)
    small, bucket = torch.zeros(1), torch.zeros(scaling.BUCKET_MIB * scaling.MIB // 4)
    found: dict[str, list[float]] = {"alone": [], "beside": [], "joined": [], "small": [], "bucket": []}
    for number in range(rounds + 1):
        for phase, call, times in (
            ("alone", alone.advance, steps),
            ("beside", alone.advance, steps),
            ("joined", joined.advance, steps),
            ("small", lambda: dist.all_reduce(small), SMALL_REPEATS),
            ("bucket", lambda: dist.all_reduce(bucket), BUCKET_REPEATS),
        ):
            dist.barrier()
            seconds = timed(call, times) if phase != "alone" or rank == 0 else []
            dist.barrier()
            if number:  # the first round warms up
                found[phase] += seconds
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def two_ranks(name: str, flags: list[str], steps: int, rounds: int) -> dict[str, Any]:
    """Time two ranks and compare with the model's prediction."""
    flags = [*flags, "--run.device=cpu", "--run.workers=0", "--train.precision=fp32"]
    recipe, _ = config.load(name, flags)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (folder, flags, name, steps, rounds), nprocs=RANKS)
        found = json.loads(Path(folder, "found.json").read_text(encoding="utf-8"))
    network, batch = network_named(recipe), recipe.train.global_batch
    return {
        "recipe": name,
        "batch_per_rank": batch,
        "gradient_bytes": network.size,
        "buckets": len(buckets_of(network.gradients, scaling.BUCKET_MIB * scaling.MIB)),
        "seconds": found,
        "rows": [compare(found, network, batch, recipe.train.bn_group, start) for start in ("alone", "beside")],
    }


def compare(found: dict[str, list[float]], network: Network, batch: int, bn_group: int, start: str) -> dict[str, Any]:
    """Predict two ranks together, from one alone or from two apart, beside the measurement."""
    value = {phase: statistics.median(each) for phase, each in found.items()}
    # Of two ranks a ring sends every byte once in each direction: 2 (N - 1) / N = 1.
    bandwidth = scaling.BUCKET_MIB * scaling.MIB / (value["bucket"] - value["small"])
    link = Link("gloo here", bandwidth, 0.0, value["small"], overlaps=False)
    work = Work(value[start], batch, network, bn_group=bn_group)
    uneven = dataclasses.replace(work, spread=scaling.spread_of(found[start]))
    steps = [predict(each, RANKS, Cluster(link, link, RANKS))["step_s"] for each in (work, uneven)]
    return {
        "from": start,
        "start_s": value[start],
        "spread": uneven.spread,
        "bandwidth": bandwidth,
        "latency_s": value["small"],
        "measured_s": value["joined"],
        "link_alone_s": steps[0],
        "link_alone_error": steps[0] / value["joined"] - 1,
        "predicted_s": steps[1],
        "error": steps[1] / value["joined"] - 1,
    }


def ranks_as_text(found: dict[str, Any]) -> str:
    """Format the rows for people."""
    lines = [
        f"{found['recipe']}: {found['batch_per_rank']} samples per rank, {found['gradient_bytes'] / 1e6:.3g} MB of "
        f"gradients in {found['buckets']} buckets; {len(found['seconds']['joined'])} steps of each kind; ms",
        f"{'from':<7} {'step':>8} {'spread':>7} {'link GB/s':>13} {'latency':>8} {'measured':>8} {'link alone':>10} "
        f"{'error':>7} {'predicted':>9} {'error':>7}",
    ]
    for row in found["rows"]:
        lines.append(
            f"{row['from']:<7} {1e3 * row['start_s']:>8.2f} {row['spread']:>7.1%} {row['bandwidth'] / 1e9:>13.3f} "
            f"{1e3 * row['latency_s']:>8.3f} {1e3 * row['measured_s']:>8.2f} {1e3 * row['link_alone_s']:>10.2f} "
            f"{row['link_alone_error']:>+7.1%} {1e3 * row['predicted_s']:>9.2f} {row['error']:>+7.1%}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run one of the two comparisons and write its result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("ranks", "published"))
    parser.add_argument("--recipe", default="demo_classification", help="ranks: a small one")
    parser.add_argument("--steps", type=int, default=5, help="ranks: steps of a phase")
    parser.add_argument("--rounds", type=int, default=9, help="ranks: how often the phases come in turn")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments, flags = parser.parse_known_args(argv)
    device, now = devices.select("cpu"), datetime.now(UTC)
    if arguments.what == "ranks":
        found = two_ranks(arguments.recipe, flags, arguments.steps, arguments.rounds)
        print(ranks_as_text(found))
    else:
        found = {"spread": scaling.PUBLISHED_SPREAD, "rows": beside_published()}
        print(published_as_text(found["rows"]))
    result = {"what": arguments.what, "time": now.isoformat(timespec="seconds"), **found, **provenance(device)}
    path = result_file(arguments.out, f"scaling-{arguments.what}", device, now)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path}")
    return result


if __name__ == "__main__":
    main()
