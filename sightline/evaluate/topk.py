"""Where TopK was; docs/howto/task.md told recipes of one's own to import it from here."""

from sightline.metrics.topk import TopK

__all__ = ["TopK"]
