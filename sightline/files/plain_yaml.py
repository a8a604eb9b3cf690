"""YAML out of files that may be damaged or hostile: config files. Imports no torch."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from sightline.errors import UsageError
from sightline.files.regular import regular

MAX_YAML_BYTES = 1 << 16  # read in two seconds; a config file is a few kB
_kept: dict[str, Any] = {}  # text -> values
_FEW = 64  # levels of nesting
# Lines of printable ASCII, indented a little, with at most one dash, without what anchors, aliases, tags, merge keys,
# directives, blocks of text, and complex keys begin with; a second dash is a minus. Nothing is tried twice: every
# repetition is possessive.
_LINE = r"(?: {0,64}+(?:- )?+(?:(?![- ])|(?=-[0-9.]))[^\x00-\x1f\x7f-\U0010ffff&*!|>%@`?<]*+)"
_PLAIN = re.compile(rf"(?:{_LINE}\n)*+{_LINE}")
_VALUE = re.compile(r"(?:^|[\s\[{,:])=(?:[\s\]},:]|$)", re.MULTILINE)  # YAML's `=`, which C takes for a text


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


def to_documents(documents: Sequence[Mapping[str, Any]]) -> str:
    """Format plain values as YAML, one document each."""
    return yaml.safe_dump_all(documents, sort_keys=False, explicit_start=True)


def dump(values: Mapping[str, Any]) -> str:
    """Format plain values as YAML of ASCII letters, in their order; `read_yaml` reads it."""
    # The same text as of SafeDumper, in a quarter of the time. Reading stays Python's: C overflows its stack.
    text: str = yaml.dump(values, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), sort_keys=False)
    _keep(text, values)
    return text


def _keep(text: str, values: Any) -> None:
    """Keep the last few: a command reads the config of its run several times, for 10 ms each."""
    for old in list(_kept)[:-3]:
        del _kept[old]
    _kept[text] = copy.deepcopy(values)


def _values_of(text: str) -> Any:
    if text in _kept:
        return copy.deepcopy(_kept[text])
    values = _parsed(text)
    _keep(text, values)
    return values


def _parsed(text: str) -> Any:
    """Parse what `dump` writes in C, in a seventh of the time; C overflows its stack where nesting is deep."""
    is_shallow = text.count("[") + text.count("{") <= _FEW and _PLAIN.fullmatch(text) and not _VALUE.search(text)
    if is_shallow and hasattr(yaml, "CSafeLoader"):
        try:
            return yaml.CSafeLoader(text).get_single_data()
        except (yaml.YAMLError, ValueError, RecursionError):
            pass  # Python's parser says what is wrong
    return _PlainLoader(text).get_single_data()


def read_yaml(path: Path, may_wait: bool = False) -> dict[str, Any]:
    """Return the parts of a config file; UsageError where it cannot be read. `may_wait`: a pipe is read too, for files
    that the user has named."""
    try:
        with open(path, "rb", opener=None if may_wait else regular) as file:
            data = file.read(MAX_YAML_BYTES + 1)
        if len(data) > MAX_YAML_BYTES:
            raise UsageError(f"{path} is larger than {MAX_YAML_BYTES} bytes; a config file is a few kB")
        values = _values_of(data.decode("utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:  # ValueError: no UTF-8, no such date
        raise UsageError(f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(values, dict):
        raise UsageError(f"{path} must hold `part: {{field: value}}` pairs, e.g. `train: {{epochs: 10}}`")
    return values
