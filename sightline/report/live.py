"""The page of a training, as `sightline train` brings it: worst samples, facts about the data, the page itself."""

from __future__ import annotations

from typing import Any

from sightline.parts import Scores
from sightline.report.data_facts import keep_facts
from sightline.report.refresh import Refresh, write_if_possible
from sightline.report.worst import draw_worst
from sightline.runs.page import Shown


class LivePage(Refresh):
    """report.html, which a process of its own keeps fresh."""

    def evaluated(self, shown: Shown, scores: Scores) -> dict[str, Any]:
        """Draw the worst samples, truth beside prediction."""
        return draw_worst(shown.network, shown.recipe, shown.val, shown.local_batch, shown.device, scores)

    def keep_facts(self, shown: Shown) -> str:
        """Count, measure and draw the data."""
        return keep_facts(self.folder, shown.recipe, shown.sets, shown.train, shown.order)

    def ended(self) -> None:
        """Write the page as it stays."""
        write_if_possible([self.folder])
