"""Every public name of torch.cuda: queries, streams, events, graphs, memory, random numbers, nvtx, profiler."""

from __future__ import annotations

from sightline.migrate.makers import answers
from sightline.migrate.rules import Rule


def rules() -> list[Rule]:
    return [
        Rule(
            "torch.cuda.is_available",
            "exact",
            answers(lambda session: lambda: session.target.count(session.options.device_count) > 0),
            "yes, unless CUDA_VISIBLE_DEVICES hides all devices",
        ),
        Rule(
            "torch.cuda.device_count",
            "adapted",
            answers(lambda session: lambda: session.target.count(session.options.device_count)),
            "devices of the target",
        ),
    ]
