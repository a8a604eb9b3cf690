"""The names of tests/warm.py for test files that load this one by its path."""

from warm import leave, once, run

__all__ = ["leave", "once", "run"]
