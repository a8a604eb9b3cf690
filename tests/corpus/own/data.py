"""The demo with a data class of one's own, which has one field more."""

from dataclasses import dataclass, fields, replace

from sightline.config import Recipe
from sightline.data.classification import ClassificationData
from sightline.recipes import demo_classification


@dataclass(frozen=True)
class Photos(ClassificationData):
    """Class folders of one's own."""

    photographer: str = ""
    """Whose images these are."""


def recipe() -> Recipe:
    """Return the demo's recipe with this data class."""
    base = demo_classification.recipe()
    values = {field.name: getattr(base.data, field.name) for field in fields(base.data)}
    return replace(base, name="data", data=Photos(**values, photographer="me"))
