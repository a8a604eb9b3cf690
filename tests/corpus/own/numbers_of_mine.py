"""Numbers that imports.py takes from here."""

WIDTH = 8
