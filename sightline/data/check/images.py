"""`sightline check`: check every sample of all splits and list all that is wrong; a run stops at the first.

`Report` is the result for the data of any task; below it, the check of images with one label each. boxes.py checks
those with boxes.
"""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from sightline.data.check.clean_list import SOLVED, CleanList
from sightline.data.decode import decode_rgb, read_header
from sightline.data.processes import over_processes
from sightline.data.sources import Images, Source, SourceOptions, folder, open_source, recognised
from sightline.data.sources.layouts import SPLITS, NoTestSplit, Splits, counted
from sightline.data.writing.forms import file_of
from sightline.errors import BadData, BadSample
from sightline.parts import Split
from sightline.terminal.progress import Progress

_PER_JOB = 64
_WORTH_PROCESSES = 2000  # images; below this, starting processes takes longer than looking
_SHOWN_PAIRS = 3  # of equal files


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong; `where` is a sample, a class or a folder."""

    kind: str
    split: str
    where: str
    text: str


@dataclass
class Report:
    """Facts for a person to read, and problems, of which there should be none."""

    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    clean: CleanList | None = None  # of images with labels

    @property
    def unsolved(self) -> list[Problem]:
        """The problems that the data keep where they are read by the clean list."""
        return [problem for problem in self.problems if problem.kind not in SOLVED]

    def add(self, kind: str, split: str, where: str, text: str) -> None:
        """Note a problem."""
        self.problems.append(Problem(kind, split, where, text))

    def as_text(self) -> str:
        """Return the facts, then the problems by kind, all of them."""
        lines = []
        for split, facts in self.facts.items():
            lines.append(split)
            for name, value in facts.items():
                # Eighty classes with their counts would be one line of 1300 letters.
                lines += textwrap.wrap(f"  {name:22} {_plain(value)}", 110, subsequent_indent=" " * 25) or [f"  {name}"]
        counts = Counter(problem.kind for problem in self.problems)
        for kind, count in counts.items():
            lines.append(f"{kind}: {count}")
            found = [problem for problem in self.problems if problem.kind == kind]
            lines += [f"  {problem.split}: {problem.where}: {problem.text}" for problem in found]
        return "\n".join([*lines, "no problems" if not self.problems else f"problems: {len(self.problems)}"])

    def as_json(self) -> str:
        """Return the same for programs."""
        return json.dumps({"splits": self.facts, "problems": [vars(problem) for problem in self.problems]}, indent=1)


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items())
    return str(value)


@dataclass(frozen=True)
class Look:
    """The way to look at samples: whole or by their headers, in how many processes."""

    decode: bool
    processes: int
    progress: Progress

    def at(self, function: Callable[[Any, Any], list[Any]], shared: Any, total: int, split: Split) -> list[Any]:
        """Return function((shared, decode), (start, stop)) of all samples, together."""
        jobs = [(start, min(start + _PER_JOB, total)) for start in range(0, total, _PER_JOB)]
        seen: list[Any] = []
        processes = self.processes if total >= _WORTH_PROCESSES else 1
        with over_processes(processes, (shared, self.decode)) as run:
            for some in run(function, jobs):
                seen += some
                self.progress(f"{'decoding' if self.decode else 'reading'} {split}", len(seen), total)
        return seen


class HasDigest(Protocol):
    """A sample that was seen; its digest is empty if its bytes could not be read."""

    @property
    def digest(self) -> bytes: ...


def add_twins(
    train: Sequence[tuple[str, HasDigest]],
    others: Sequence[tuple[str, HasDigest]],
    report: Report,
    split: Split = "val",
) -> None:
    """Report each (name, sample) of train whose bytes equal those of one in val or test."""
    kept = {seen.digest: name for name, seen in reversed(others) if seen.digest}
    score = "validation" if split == "val" else split
    for name, seen in train:
        if seen.digest in kept:
            text = f"identical to {kept[seen.digest]} in {split}; the {score} score would be inflated"
            report.add(f"same image in train and {split}", "train", name, text)


class SeenSample(NamedTuple):
    """One sample: its labels, its size the right way up, a digest of its bytes, and what is wrong with it."""

    labels: tuple[int, ...]
    height: int
    width: int
    digest: bytes
    bad: str


def check_images(
    path: str, kind: str, options: SourceOptions, classes: int, decode: bool, processes: int, progress: Progress
) -> Report:
    """Check all splits of a data set for classification; `classes` is what the recipe declares, or 0."""
    report = Report()
    sources = _open_all(path, kind, options, classes, report)
    look = Look(decode, processes, progress)
    seen = {split: look.at(_look_at, source, len(source), split) for split, source in sources.items()}
    for split, source in sources.items():
        _describe(split, source, seen[split], report)
        _check_names(split, source, seen[split], report)
    _check_together(sources, seen, report)
    report.clean = CleanList(sources, seen)
    return report


def _open_all(path: str, kind: str, options: SourceOptions, declared: int, report: Report) -> dict[Split, Source]:
    """Open the splits that can be opened; folders leniently, so that one odd folder does not hide what else there
    is."""
    reads = recognised("open_source", path) if kind == "auto" else kind
    if reads == "folder" and (layout := folder.find(path)):
        return _open_folders(layout, options, declared, report)
    sources: dict[Split, Source] = {}
    for split in SPLITS:
        try:
            sources[split] = open_source(kind, path, split, options)
        except BadData as error:
            if str(error) not in {problem.text for problem in report.problems}:  # one table may be that of both splits
                report.add("cannot be opened", split, path, str(error))
    for split, source in list(sources.items())[:1]:
        _check_declared(declared, len(source.classes), split, path, report)
    try:
        test = open_source(kind, path, "test", options)
        if test.is_own_test(sources.get("val")):
            sources["test"] = test
    except NoTestSplit:
        pass
    except BadData as error:
        if not report.problems:  # of the other splits, which may be its reason
            report.add("cannot be opened", "test", path, str(error))
    return sources


def _check_declared(declared: int, found: int, split: Split, path: str, report: Report) -> None:
    if declared and declared != found:
        report.add("number of classes", split, path, f"{found} classes, the recipe declares {declared}")


def _open_folders(layout: Splits, options: SourceOptions, declared: int, report: Report) -> dict[Split, Source]:
    """Open the splits with the classes of train or val, so that a class of one split only is found by counting."""
    roots = {split: layout.place(split).images for split in SPLITS if layout.train or split == "val"}
    if "train" not in roots:
        report.add("cannot be opened", "train", str(roots["val"]), "there is no train split beside it")
    classes = tuple(sorted({name for root in roots.values() for name in folder.class_folders(root)}))
    first = next(iter(roots))
    _check_declared(declared, len(folder.class_folders(roots[first])), first, str(roots[first]), report)
    if layout.own_test:
        roots["test"] = layout.own_test.images
        for name in sorted(set(folder.class_folders(roots["test"])) - set(classes)):
            report.add("class without training", "test", name, f"no training image; {roots['test'] / name} is left out")
    listings = {}
    for root in dict.fromkeys(roots.values()):
        try:
            listings[root] = folder.Walk(root).list(classes, wants_all=False)
        except BadData as error:
            if root != roots.get("test"):
                raise
            report.add("cannot be opened", "test", str(root), str(error))
    return {
        split: folder.split_of(listings[root], root, classes, layout, split, options)
        for split, root in roots.items()
        if root in listings
    }


def _look_at(shared: tuple[Source, bool], job: tuple[int, int]) -> list[SeenSample]:
    source, decode = shared
    return [_look_at_one(source, index, decode) for index in range(*job)]


def _look_at_one(source: Source, index: int, decode: bool) -> SeenSample:
    labels: tuple[int, ...] = ()
    digest = b""
    try:
        sample = source.read(index)
        labels = (sample.label,) if isinstance(sample.label, int) else tuple(np.flatnonzero(sample.label).tolist())
        data = sample.data
        digest = hashlib.blake2b(data if isinstance(data, bytes) else data.tobytes(), digest_size=16).digest()
        if not isinstance(data, bytes):
            height, width = data.shape[:2]
        elif decode:
            height, width = decode_rgb(data, source.name(index)).shape[:2]
        else:
            height, width = read_header(data, source.name(index)).shape[:2]
    except BadSample as error:
        return SeenSample(labels, 0, 0, digest, error.reason)
    return SeenSample(labels, height, width, digest, "")


def _describe(split: Split, source: Source, seen: Sequence[SeenSample], report: Report) -> None:
    per_class = source.per_class().tolist()
    whole = [each for each in seen if not each.bad]
    report.facts[split] = {
        "images": len(seen),
        "unreadable": len(seen) - len(whole),
        "classes": len(source.classes),
        "images per class": spread(per_class),
        "classes without any": sum(count == 0 for count in per_class),
        "width": spread([each.width for each in whole]),
        "height": spread([each.height for each in whole]),
        **same_bytes([(source.name(index), each.digest) for index, each in enumerate(seen)]),
        **how_read(split, source),
    }
    if not seen:
        report.add("no images", split, split, "the split is empty")
    missing = set(source.missing)
    for index, each in enumerate(seen):
        if missing and (path := str(source.files[index])) in missing:
            report.add("unreadable", split, source.name(index), f"{path} does not exist")
        elif each.bad:
            report.add("unreadable", split, source.name(index), each.bad)
        elif outside := [label for label in each.labels if not 0 <= label < len(source.classes)]:
            text = f"label {outside[0]}, expected 0 to {len(source.classes) - 1}"
            report.add("label out of range", split, source.name(index), text)


def how_read(split: Split, source: Images) -> dict[str, str]:
    """Return which split validates for want of val, the files that were ignored, and notes such as a tool's name."""
    facts = how_chosen(split, source.held_out is not None, source.val_name)
    if source.ignored:
        facts["ignored"] = counted(Counter(source.ignored))
    if source.notes:
        facts["read"] = "; ".join(source.notes)
    return facts


def how_chosen(split: Split, is_drawn: bool, val_name: str) -> dict[str, str]:
    """Return the fact of a val split that is not called so."""
    if split != "val" or not (is_drawn or val_name):
        return {}
    chosen = "from train" if is_drawn else f"{val_name} validates"
    return {"chosen": f"{chosen}, as the data have no val split"}


def _check_names(split: Split, source: Source, seen: Sequence[SeenSample], report: Report) -> None:
    """Report two samples of one class with one name: a folder cannot hold them, records can."""
    first: dict[tuple[tuple[int, ...], str], int] = {}
    for index, each in enumerate(seen):
        place = first.setdefault((each.labels, file_of(source, index)), index)
        if place != index and each.labels:
            text = f"has the class and the name of {source.name(place)}"
            report.add("same name twice", split, source.name(index), text)


def _check_together(sources: dict[Split, Source], seen: dict[Split, list[SeenSample]], report: Report) -> None:
    """Compare val and test with train."""
    named = {split: [(source.name(i), seen[split][i]) for i in range(len(source))] for split, source in sources.items()}
    if "train" in sources and "test" in sources:
        add_twins(named["train"], named["test"], report, "test")
    if not sources.keys() >= {*SPLITS}:
        return
    classes = sources["train"].classes
    if classes != sources["val"].classes:
        report.add("number of classes", "val", "val", "its classes are not those of train; label both alike")
        return
    train, val = (sources[split].per_class().tolist() for split in SPLITS)
    for name, in_train, in_val in zip(classes, train, val, strict=True):
        if not in_train:
            text = f"no training image, {in_val} in val" if in_val else "no image at all; remove the class"
            report.add("class without training", "train", name, text)
        elif not in_val:
            report.add("class without validation", "val", name, f"no validation image, {in_train} in train")
    add_twins(named["train"], named["val"], report)


def same_bytes(named: Iterable[tuple[str, bytes]]) -> dict[str, object]:
    """Return how many files repeat the bytes of another, with the first pairs and how many more there are."""
    first: dict[bytes, str] = {}
    pairs = [(first.setdefault(digest, name), name) for name, digest in named if digest]
    again = [f"{one} and {other}" for one, other in pairs if one != other]
    more = [f"{len(again) - _SHOWN_PAIRS} more"] if len(again) > _SHOWN_PAIRS else []
    named_pairs = {"e.g.": "; ".join([*again[:_SHOWN_PAIRS], *more])} if again else {}
    return {"duplicate files": len(pairs) - len(first), **named_pairs}


def spread(values: Sequence[int]) -> dict[str, float]:
    """Return smallest, median and largest."""
    if not values:
        return {}
    return {"min": min(values), "median": float(np.median(values)), "max": max(values)}
