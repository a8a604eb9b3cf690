"""The ranks' part of `sightline benchmark`: one rank measures alone, then all of them at the same time.

Each rank keeps its share of the batch in both, so the efficiency is that of a batch that grows with the ranks: images
per second of all, over those of one times their number.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from typing import Any

from sightline.engine.orders import refuse_uneven
from sightline.errors import UsageError
from sightline.hardware.devices import Device
from sightline.hardware.world import World
from sightline.measure import peers
from sightline.measure.peers import Contender, Maker, Say, Timing
from sightline.recipe.recipe import Recipe

PARTS = ("loader", "step", "predict")


def refuse(recipe: Recipe, here: World, asked: Sequence[str]) -> None:
    """Refuse options that measure one device, and a batch that cannot be split evenly."""
    if here.size > 1 and asked:
        raise UsageError(
            f"{asked[0]} measures one device, and {here.size} ranks were started; leave --run.devices and the launcher "
            f"out, or {asked[0]}"
        )
    refuse_uneven(recipe, here.size)


def share_of(recipe: Recipe, here: World) -> Recipe:
    """Return the recipe of one rank alone: with the batch that it has among all, of as many volumes."""
    batch, data = recipe.train.global_batch // here.size, recipe.data
    if nvol := getattr(data, "nvol", 0) // here.size:
        data = dataclasses.replace(data, nvol=nvol)  # type: ignore[type-var]  # only some data have volumes
    return dataclasses.replace(recipe, data=data, train=dataclasses.replace(recipe.train, global_batch=batch))


class AtOnce(Contender):
    """A contender whose turns begin on all ranks at the same time."""

    def __init__(self, own: Contender, here: World):
        self.own, self.here = own, here
        self.name, self.images = own.name, own.images
        self.settle, self.first_s = own.settle, own.first_s

    def advance(self) -> None:
        self.own.advance()

    def waited_s(self) -> float:
        return self.own.waited_s()

    def facts(self) -> dict[str, Any]:
        self.here.barrier()
        return self.own.facts()

    def wake(self) -> None:
        self.here.barrier()
        self.own.wake()

    def rest(self) -> None:
        self.own.rest()

    def close(self) -> None:
        self.own.close()


def measure(
    makers: Sequence[Maker], batches: int, warmup: int, repeats: int, device: Device, here: World, say: Say
) -> tuple[list[Timing], str]:
    """Time all contenders in turn, on all ranks at the same time; every rank gets the times of all."""
    if here.size == 1:
        return peers.measure_in_turn(makers, batches, warmup, repeats, device, say)
    together: list[Maker] = [lambda make=make: AtOnce(make(), here) for make in makers]  # type: ignore[misc]
    timings, order = peers.measure_in_turn(
        together, batches, warmup, repeats, device, lambda text: say(f"rank 0 of {here.size}: {text}")
    )
    return [_merged(timing, here) for timing in timings], order


def _merged(mine: Timing, here: World) -> Timing:
    """Return the times of all ranks as those of one contender: a repeat lasts as long as on the slowest rank, and the
    latencies are those of every rank."""
    repeats, latencies = len(mine.seconds), mine.facts.get("latency_s", [])
    memory = mine.facts.get("peak_memory_gb", 0.0)
    numbers = [mine.first_s, memory, *mine.seconds, *mine.waited, *latencies]
    table = [json.loads(text) for text in here.gather_texts(json.dumps(numbers))]
    own = [
        Timing(mine.name, mine.images, row[0], row[2 : 2 + repeats], row[2 + repeats : 2 + 2 * repeats])
        for row in table
    ]
    facts = {**mine.facts, "ranks": [_row_of_rank(rank, each, table[rank][1]) for rank, each in enumerate(own)]}
    if latencies:
        facts["latency_s"] = [seconds for row in table for seconds in row[2 + 2 * repeats :]]
        facts["peak_memory_gb"] = max(row[1] for row in table)
    return Timing(
        mine.name,
        mine.images * here.size,
        max(each.first_s for each in own),
        [max(seconds) for seconds in zip(*(each.seconds for each in own), strict=True)],
        [statistics.fmean(waited) for waited in zip(*(each.waited for each in own), strict=True)],
        facts,
    )


def _row_of_rank(rank: int, timing: Timing, memory_gb: float) -> dict[str, Any]:
    kept = ("images_per_s", "seconds", "images", "first_s", "data_wait")
    row = timing.row()
    return {"rank": rank, **{key: row[key] for key in kept}, "peak_memory_gb": memory_gb}


def beside_one(
    result: dict[str, Any], alone: dict[str, Any], batch: int, device: Device, here: World
) -> dict[str, Any]:
    """Return how many ranks measured over what, one of them alone, and what part of its speed each of all keeps. Only
    rank 0 has measured alone."""
    shares = {}
    for part in PARTS:
        if part in alone:
            all_of, one = (each[part]["contenders"][0]["images_per_s"]["median"] for each in (result, alone))
            shares[part] = all_of / (here.size * one)
    return {
        "size": here.size,
        "backend": device.backend,
        "sharing": device.sharers,
        "batch_per_rank": batch,
        "alone": alone,
        "efficiency": shares,
    }


def as_lines(result: dict[str, Any]) -> list[str]:
    """Format what several ranks add: each of them, and one alone."""
    found = result["ranks"]
    lines = [f"{found['size']} ranks over {found['backend']}, {found['batch_per_rank']} images each per step"]
    for part, share in found["efficiency"].items():
        own = result[part]["contenders"][0]
        rates = [each["images_per_s"]["median"] for each in own["ranks"]]
        one = found["alone"][part]["contenders"][0]["images_per_s"]
        lines += [
            f"{part}: each rank img/s min {min(rates):,.0f}, median {statistics.median(rates):,.0f}, max "
            f"{max(rates):,.0f}; one rank alone {one['median']:,.0f} ({one['min']:,.0f} to {one['max']:,.0f}); "
            f"efficiency {share:.1%} of {found['size']} times one"
        ]
    return lines
