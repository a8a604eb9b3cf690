"""What several ranks measured, as one contender: tables and lines worked out by hand. tests/distributed/ runs ranks."""

import json
from types import SimpleNamespace

import pytest

from sightline.measure import ranks
from sightline.measure.peers import Timing


def merged(facts: dict, other: list[float]) -> Timing:
    """Of rank 0 with two repeats of 8 images, and another rank with these numbers."""
    mine = Timing("ours", 8, 3.0, [1.0, 2.0], [0.5, 0.25], facts)
    told: list[str] = []
    here = SimpleNamespace(size=2, gather_texts=lambda text: told.append(text) or [text, json.dumps(other)])
    found = ranks._merged(mine, here)
    assert json.loads(told[0])[:6] == [3.0, facts.get("peak_memory_gb", 0.0), 1.0, 2.0, 0.5, 0.25]
    return found


def test_a_repeat_lasts_as_long_as_on_the_slowest_rank():
    found = merged({"bad_steps": 0}, [5.0, 0.0, 1.5, 1.0, 0.1, 0.35])
    assert (found.name, found.images, found.first_s) == ("ours", 16, 5.0)
    assert found.seconds == [1.5, 2.0] and found.waited == pytest.approx([0.3, 0.3])
    assert found.facts == {
        "bad_steps": 0,
        "ranks": [
            {
                "rank": 0, "images_per_s": {"median": 6.0, "min": 4.0, "max": 8.0, "all": [8.0, 4.0]},
                "seconds": [1.0, 2.0], "images": 8, "first_s": 3.0, "data_wait": 0.25, "peak_memory_gb": 0.0,
            },
            {
                "rank": 1, "images_per_s": {"median": pytest.approx(20 / 3), "min": pytest.approx(16 / 3), "max": 8.0,
                                            "all": [pytest.approx(16 / 3), 8.0]},
                "seconds": [1.5, 1.0], "images": 8, "first_s": 5.0, "data_wait": pytest.approx(0.18),
                "peak_memory_gb": 0.0,
            },
        ],
    }  # fmt: skip


def test_latencies_are_those_of_every_rank_and_memory_is_the_most():
    facts = {"latency_s": [0.1, 0.2, 0.3], "peak_memory_gb": 2.0}
    found = merged(facts, [5.0, 4.0, 1.5, 1.0, 0.1, 0.35, 0.4, 0.5, 0.6])
    assert found.facts["latency_s"] == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6] and found.facts["peak_memory_gb"] == 4.0
    assert [row["peak_memory_gb"] for row in found.facts["ranks"]] == [2.0, 4.0]
    assert facts == {"latency_s": [0.1, 0.2, 0.3], "peak_memory_gb": 2.0}, "what was given is not changed"


def rows(*medians: float, **more: object) -> dict:
    return {"contenders": [{"images_per_s": {"median": m, "min": m - 1, "max": m + 2}, **more} for m in medians]}


def test_each_of_all_keeps_a_part_of_the_speed_of_one_alone():
    device = SimpleNamespace(backend="gloo", sharers=2)
    alone = {"step": rows(1000.0, 7.0), "loader": rows(50.0)}
    result = {"step": rows(3000.0, 9.0), "loader": rows(100.0), "other": 3}
    found = ranks.beside_one(result, alone, 16, device, SimpleNamespace(size=4))
    assert found == {
        "size": 4,
        "backend": "gloo",
        "sharing": 2,
        "batch_per_rank": 16,
        "alone": alone,
        "efficiency": {part: share for part, share in (("step", 0.75), ("loader", 0.5)) if part in ranks.PARTS},
    }
    assert ranks.beside_one(result, {}, 16, device, SimpleNamespace(size=4))["efficiency"] == {}
    each = [{"images_per_s": {"median": rate}} for rate in (700.0, 1100.4, 900.0, 800.0)]
    shown = {"step": rows(3000.0, ranks=each), "ranks": {**found, "efficiency": {"step": 0.75}}}
    assert ranks.as_lines(shown) == [
        "4 ranks over gloo, 16 images each per step",
        "step: each rank img/s min 700, median 850, max 1,100; one rank alone 1,000 (999 to 1,002); efficiency 75.0% "
        "of 4 times one",
    ]
