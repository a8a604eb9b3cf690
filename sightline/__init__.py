"""Sightline: vision training with one engine, one command line, one checkpoint format and one report."""

__version__ = "0.2.0"
