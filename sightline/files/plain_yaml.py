"""YAML out of files that may be damaged or hostile: config files. Imports no torch."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from sightline.errors import UsageError

MAX_YAML_BYTES = 1 << 16  # read in two seconds; a config file is a few kB


class _PlainLoader(yaml.SafeLoader):
    """YAML without anchors, aliases and merge keys: 500 bytes of these become gigabytes."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise yaml.composer.ComposerError(None, None, "anchors and aliases are not read", event.start_mark)
        return super().compose_node(parent, index)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(None, None, "merge keys are not read", key.start_mark)


def to_text(values: Mapping[str, Any]) -> str:
    """Format plain values as YAML, in their order; `read_yaml` reads it."""
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


@functools.lru_cache(maxsize=4)  # a command reads the config of its run several times, in 30 ms each
def _parsed(text: str) -> Any:
    return _PlainLoader(text).get_single_data()


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the parts of a config file; UsageError where it cannot be read."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_YAML_BYTES + 1)
        if len(data) > MAX_YAML_BYTES:
            raise UsageError(f"{path} is larger than {MAX_YAML_BYTES} bytes; a config file is a few kB")
        values = copy.deepcopy(_parsed(data.decode("utf-8")))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:  # ValueError: no UTF-8, no such date
        raise UsageError(f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(values, dict):
        raise UsageError(f"{path} must hold `part: {{field: value}}` pairs, e.g. `train: {{epochs: 10}}`")
    return values
