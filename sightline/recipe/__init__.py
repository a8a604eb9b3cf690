"""A recipe as data: its parts and their rules, settings with their origin, and the one way to a frozen recipe.

Nothing here imports torch or NumPy, and nothing here knows a concrete part.
"""
