"""Writes the golden files anew: `python tests/golden/regenerate.py`. Look at what changed before keeping it.

flags_RECIPE.txt holds every flag of a recipe with its default, one a line.
"""

from pathlib import Path

from sightline import config, recipes
from sightline.recipe import store

FOLDER = Path(__file__).parent


def flags_of(name: str) -> str:
    """The flags as `sightline train NAME --help` spells them."""
    parts = {**store.to_json(recipes.find(name).recipe()), "run": vars(config.Run())}
    lines = []
    for part, fields in parts.items():
        if part == "recipe":
            continue
        for field, value in fields.items():
            flag = f"--{part}.{field.replace('_', '-')}"
            shown = " ".join(map(str, value)) if isinstance(value, list | tuple) else value
            lines.append(f"{flag} {shown}".rstrip())
    return "\n".join(lines) + "\n"


def golden_file(name: str) -> Path:
    """Where the flags of a recipe are kept."""
    return FOLDER / f"flags_{name}.txt"


if __name__ == "__main__":
    for stale in set(FOLDER.glob("flags_*.txt")) - {golden_file(name) for name in recipes.names()}:
        stale.unlink()
    for name in recipes.names():
        golden_file(name).write_text(flags_of(name), encoding="utf-8")
