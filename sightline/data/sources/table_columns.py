"""Which columns of a table hold what: by the user's word, by their names, or else by what is in them."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sightline.data.formats.label_table import (
    BITS,
    FILE,
    LABEL,
    SPLITS,
    Columns,
    Head,
    found_names,
    labels_in,
    rows_of,
)
from sightline.errors import BadData, first_of

TRIED = 20  # rows whose files are looked for
_MAX_LOOKED_AT = 100  # columns that may hold files or labels
_MAX_LABELS = 10_000  # of a column that is taken for labels without being called so
_MAX_LENGTH = 1000  # characters of a cell in it
_SHOWN = 3  # lines in a message

Find = Callable[[str], str]  # the file that a cell names, "" if there is none


class Chosen(NamedTuple):
    """Columns, and what to say of them where their names alone did not decide."""

    columns: Columns
    said: str


class FileColumn(NamedTuple):
    """The column of file names."""

    at: int
    found: int  # how many of the first rows name a file
    why_not: str = ""  # which other column may be meant


def files_in(head: Head, at: int, find: Find) -> list[str]:
    """Return the files that exist of those that the first rows of a column name."""
    return [found for row in head.rows[:TRIED] if row[at] and (found := find(row[at]))]


def file_column(head: Head, wanted: str, finds: Sequence[Find]) -> FileColumn | None:
    """Return the column that holds file names: the one that is wanted, else the first of FILE that names files, else
    one that names most. `finds` look in one folder each. None if no column may."""
    if wanted:
        at = _named(head, wanted)
        return None if at is None else FileColumn(at, max(len(files_in(head, at, find)) for find in finds))
    known = head.place(FILE)
    if known is not None and (count := max(len(files_in(head, known, find)) for find in finds)):
        return FileColumn(known, count)
    most, rivals = list[str](), list[str]()
    chosen = known
    for at in range(min(len(head.names), _MAX_LOOKED_AT)):
        if at == known or all(row[at].lower() in BITS or not row[at] for row in head.rows):
            continue
        files = max((files_in(head, at, find) for find in finds), key=len)
        if len(files) > len(most):
            most, chosen, rivals = files, at, []
        elif files and len(files) == len(most) and files != most:
            rivals.append(head.names[at])
    if chosen is None:
        return None
    names = [head.names[chosen], *rivals]
    why_not = f"files may be in {' or '.join(names)}; say which: --data.file-column {names[0]}" if rivals else ""
    return FileColumn(chosen, len(most), why_not)


def choose(head: Head, file: FileColumn | None, wanted_file: str, wanted_labels: str) -> Chosen:
    """Choose all columns; BadData says everything that is wrong with them."""
    problems = []
    if file is None and wanted_file:
        problems.append(f"no column is called {wanted_file}, as --data.file-column says: found {found_names(head)}")
    elif file is None:
        problems.append(
            f"no column of files: found {found_names(head)}; call one {', '.join(FILE)}, or add a header line, or name "
            f"it with --data.file-column"
        )
    elif file.why_not:
        problems.append(file.why_not)
    at = file.at if file else None
    split = head.place(["split"])
    others = [place for place, name in enumerate(head.names) if name and place not in (at, split)]
    said = list[str]()
    label, classes = head.place(LABEL), list[int]()
    if wanted_labels:
        label, classes, problem = _wanted(head, wanted_labels, others)
        problems += [problem] if problem else []
        said.append(_said_labels(head, label, classes))
    elif label is None or label == at:
        guessed = _guess(head, others, split)
        label, classes, split = guessed.label, guessed.classes, guessed.split
        problems += guessed.problems
        said += guessed.said
    names = {head.names[place]: place for place in classes}
    if len(names) < len(classes):
        problems.append(f"two columns have one name: found {found_names(head)}; rename one of them")
    if problems:
        raise BadData(f"{head.path} line 1: {'; '.join(problems)}")
    assert file is not None
    if said or wanted_file or head.place(FILE) != file.at:
        said.insert(0, f"file names from column {head.names[file.at]}")
    return Chosen(Columns(file.at, label, split, names, len(head.names)), ", ".join(said))


def _named(head: Head, wanted: str) -> int | None:
    return head.names.index(wanted) if wanted in head.names else head.place([wanted.lower()])


def _said_labels(head: Head, label: int | None, classes: Sequence[int]) -> str:
    return f"labels from column {head.names[label]}" if label is not None else f"labels from {_counted(classes)}"


def _counted(columns: Sequence[int]) -> str:
    return f"{len(columns)} column{'s' * (len(columns) > 1)}"


def _wanted(head: Head, wanted: str, others: Sequence[int]) -> tuple[int | None, list[int], str]:
    """Return the columns that the user names: that of the labels, or those of 0 and 1; or what is wrong."""
    found: dict[int, None] = {}
    for name in (part.strip() for part in wanted.split(",")):
        exact = _named(head, name)
        some = [exact] if exact in others else [at for at in others if fnmatch.fnmatchcase(head.names[at], name)]
        if not some:
            why = f"no column is called {name}, as --data.label-column says: found {found_names(head)}"
            return None, [], why
        found |= dict.fromkeys(at for at in some if at is not None)
    places = list(found)
    return (places[0], [], "") if len(places) == 1 else (None, places, "")


@dataclass
class _Guess:
    label: int | None = None
    classes: list[int] = field(default_factory=list)
    split: int | None = None
    said: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class _Content:
    """What the cells of a column have in common."""

    def __init__(self) -> None:
        self.is_bits = self.is_splits = self.is_numbers = self.is_short = True
        self.filled = 0
        self.labels: set[str] = set()

    def add(self, cell: str) -> None:
        """Look at another cell."""
        if not cell:
            return
        self.filled += 1
        self.is_bits = self.is_bits and cell.lower() in BITS
        self.is_splits = self.is_splits and cell.lower() in SPLITS
        self.is_numbers = self.is_numbers and cell.isdecimal()
        self.is_short = self.is_short and len(cell) <= _MAX_LENGTH and len(self.labels) <= _MAX_LABELS
        if self.is_short:
            self.labels.update(labels_in(cell)[0])

    @property
    def may_be_labels(self) -> bool:
        """True if there are few values, of which most come again."""
        return not self.is_bits and self.is_short and 2 <= len(self.labels) <= self.filled / 2


def _guess(head: Head, others: Sequence[int], split: int | None) -> _Guess:
    """Find the labels in columns whose names say nothing. Columns of 0 and 1 alone are classes."""
    if not others:
        return _Guess(split=split, problems=[_no_labels(head)])
    if all(not row[at] or row[at].lower() in BITS for at in others for row in head.rows):
        return _Guess(classes=[*others], split=split)
    content = {at: _Content() for at in others[:_MAX_LOOKED_AT]}
    rest = dict.fromkeys(others[_MAX_LOOKED_AT:], True)  # of so many columns, these are classes or nothing
    for _, cells in rows_of(head):
        for at, each in content.items():
            each.add(cells[at])
        for at in rest:
            rest[at] = rest[at] and cells[at].lower() in BITS
    if split is None:
        said_splits = [at for at, each in content.items() if each.filled and each.is_splits]
        split = said_splits[0] if len(said_splits) == 1 else None
    bits = [at for at, each in content.items() if each.is_bits and each.filled] + [at for at in rest if rest[at]]
    texts = [at for at, each in content.items() if each.may_be_labels and at != split]
    texts = [at for at in texts if not content[at].is_numbers] or texts
    said = [f"splits from column {head.names[split]}"] if split is not None and split in others else []
    if texts:  # a column of 0 alone says nothing of them
        bits = [at for at in bits if at in rest or len(content[at].labels) > 1]
    if len(texts) == 1 and not bits:
        return _Guess(texts[0], [], split, [_said_labels(head, texts[0], []), *said])
    if len(texts) == 1:
        return _with_bits(head, texts[0], content[texts[0]].labels, bits, split, said)
    names = [head.names[at] for at in texts]
    if texts:
        text = f"labels may be in {first_of(names, 8) if len(names) > 2 else ' or '.join(names)}"
        text += f", or in {_counted(bits)} of 0 and 1" if bits else ""
        return _Guess(problems=[f"{text}; say which: --data.label-column {names[0]}"])
    if bits:  # the lines of the other columns say what is not 0 or 1
        return _Guess(classes=[at for at in others if at != split], split=split, said=said)
    return _Guess(problems=[_no_labels(head)])


def _with_bits(
    head: Head, text: int, labels: set[str], bits: Sequence[int], split: int | None, said: Sequence[str]
) -> _Guess:
    """Take a column of text for the labels if the columns of 0 and 1 beside it say the same in every line."""
    name = head.names[text]
    by_name = {head.names[at].casefold(): at for at in bits}
    differ, lines = 0, list[str]()
    for line, cells in rows_of(head):
        ones = {head.names[at].casefold() for at in bits if BITS.get(cells[at].lower())}
        if ones != {label.casefold() for label in labels_in(cells[text])[0]}:
            differ += 1
            lines += [str(line)] if len(lines) < _SHOWN else []
    if not differ and len(by_name) == len(bits):
        agree = f"{_said_labels(head, text, [])} ({_counted(bits)} of 0 and 1 agree with it)"
        return _Guess(text, [], split, [agree, *said])
    columns = ",".join(head.names[at] for at in bits)
    columns = columns if len(columns) < 80 else ",".join(head.names[at] for at in bits[:2]) + ",..."
    related = len(labels & {head.names[at] for at in bits})
    why = f", which disagree in {differ} lines, e.g. {first_of(lines, _SHOWN)}" if related else ""
    return _Guess(
        problems=[
            f"labels may be in {name}, or in {_counted(bits)} of 0 and 1{why}; say which: --data.label-column "
            f"{name}, or --data.label-column '{columns}'"
        ]
    )


def _no_labels(head: Head) -> str:
    return (
        f"no column of labels: found {found_names(head)}; call one {', '.join(LABEL)}, or name it with "
        f"--data.label-column"
    )
