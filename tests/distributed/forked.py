"""What test files that load this one by its path know of tests/warm.py."""

from warm import leave, once, run

__all__ = ["leave", "once", "run"]
