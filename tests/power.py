"""Record what a save does to a folder, and rebuild the states that a power cut may leave of it.

The recorder looks at the file system itself before every call that Python reports, so it sees writes however they were
made: by os.write, a mapped file or a library. What a disk guarantees is only what fsync has confirmed. The bytes of a
file not flushed since may be old, half there, zeros or new; every entry made, renamed or removed in a folder not
flushed since may or may not be there, in any combination.
"""

import itertools
import math
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink"}


class Look(NamedTuple):
    """A folder at one moment, by inode, and the inode that an fsync confirms now."""

    entries: dict[int, dict[str, int]]
    contents: dict[int, bytes]
    synced: int | None


class Change(NamedTuple):
    """An entry that appeared, vanished (then `to` is None) or moved (then both are there), seen by look `at`."""

    at: int
    inode: int
    source: tuple[int, str] | None
    to: tuple[int, str] | None


class Recorder:
    """Looks at `root` before every call; files stay open, so that no inode is used twice."""

    def __init__(self, root: Path):
        self.root, self.looks, self.held = root, [], {}
        self.is_looking = False

    def look(self, synced: int | None = None) -> None:
        self.is_looking = True
        entries, contents = {}, {}
        for folder, folders, files in os.walk(self.root):
            inodes = {name: self._hold(Path(folder, name)) for name in (*folders, *files)}
            entries[os.stat(folder).st_ino] = inodes
            contents |= {inodes[name]: Path(folder, name).read_bytes() for name in files}
        self.looks.append(Look(entries, contents, synced))
        self.is_looking = False

    def _hold(self, path: Path) -> int:
        inode = os.stat(path).st_ino
        if inode not in self.held:
            self.held[inode] = os.open(path, os.O_RDONLY)
        return inode

    def start(self) -> None:
        """Record from now on; an audit hook cannot be removed, so the process should not live long."""
        self.look()
        sys.addaudithook(lambda event, _: self.look() if event in EVENTS and not self.is_looking else None)
        os.fsync = lambda file: self.look(os.fstat(file if isinstance(file, int) else file.fileno()).st_ino)


def record(root: Path, act: Callable[[], None]) -> list[Look]:
    """Return what `act` does to `root`, from the look before it to the look after it; no call reaches the disk."""
    kept = root.with_name(f"{root.name}.looks")
    pid = os.fork()
    if pid == 0:
        try:
            recorder = Recorder(root)
            recorder.start()
            act()
            recorder.look()
            recorder.is_looking = True
            kept.write_bytes(pickle.dumps(recorder.looks))
            os._exit(0)
        except BaseException as error:  # noqa: BLE001  # nothing may get out of the child into pytest
            os.write(2, f"{error!r}\n".encode())
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return pickle.loads(kept.read_bytes())


def changes(looks: list[Look]) -> list[Change]:
    """Return what happened to entries, in order; one inode that left one place for another was renamed."""
    found = []
    for at, (before, after) in enumerate(itertools.pairwise(looks), start=1):
        places = [
            {(folder, name): inode for folder, names in look.entries.items() for name, inode in names.items()}
            for look in (before, after)
        ]
        gone = {inode: place for place, inode in places[0].items() if places[1].get(place) != inode}
        new = {inode: place for place, inode in places[1].items() if places[0].get(place) != inode}
        # An entry replaced by a rename vanishes with that rename, not by itself.
        replaced = {place for inode, place in new.items() if inode in gone}
        for inode in sorted({*gone, *new}):
            source, to = gone.get(inode), new.get(inode)
            if to is not None or source not in replaced:
                found.append(Change(at, inode, source, to))
    return found


@dataclass
class Choices:
    """What a power cut right before look `at` leaves to chance: the changes, and the variants of each file."""

    base: Look
    changes: list[tuple[Change, bool]]  # with whether it is certain
    contents: dict[int, list[bytes]]  # the durable variant first
    root: int

    @property
    def combinations(self) -> int:
        uncertain = sum(not certain for _, certain in self.changes)
        return 2**uncertain * math.prod(len(variants) for variants in self.contents.values())

    def states(self, most: int, seed: int) -> Iterator[dict[str, bytes | None]]:
        """Yield the folder as {path: bytes, or None for a folder}: every combination, or `most` of them by seed. Those
        in which nothing and in which everything of what is left to chance was written come first."""
        doubtful = [change for change, certain in self.changes if not certain]
        files = list(self.contents)
        sizes = [2] * len(doubtful) + [len(self.contents[inode]) for inode in files]
        if self.combinations <= most:
            picked = itertools.product(*map(range, sizes))
        else:
            random = np.random.default_rng(seed)
            picked = iter([[0] * len(sizes), [size - 1 for size in sizes]])
            picked = itertools.chain(picked, ([*random.integers(0, sizes)] for _ in range(most - 2)))
        for choice in picked:
            happened = {change for change, chosen in zip(doubtful, choice, strict=False) if chosen}
            contents = {inode: self.contents[inode][n] for inode, n in zip(files, choice[len(doubtful) :], strict=True)}
            yield self._build(happened, contents)

    def _build(self, happened: set[Change], contents: dict[int, bytes]) -> dict[str, bytes | None]:
        entries = {folder: dict(names) for folder, names in self.base.entries.items()}
        for change, certain in self.changes:
            if not certain and change not in happened:
                continue
            if change.source and entries.get(change.source[0], {}).get(change.source[1]) == change.inode:
                del entries[change.source[0]][change.source[1]]
            if change.to:
                entries.setdefault(change.to[0], {})[change.to[1]] = change.inode
        built: dict[str, bytes | None] = {}

        def walk(folder: int, above: str) -> None:
            for name, inode in entries.get(folder, {}).items():
                built[above + name] = contents.get(inode)
                if inode not in contents:
                    walk(inode, f"{above}{name}/")

        walk(self.root, "")
        return built


def power_cuts(looks: list[Look], root: Path) -> Iterator[Choices]:
    """Yield what a power cut leaves to chance, for a cut at every look: the last one is after the save has returned."""
    every = changes(looks)
    for now in range(len(looks)):
        synced = {look.synced: at for at, look in enumerate(looks[: now + 1]) if look.synced is not None}
        seen = [change for change in every if change.at <= now]
        certain = [
            (change, any(synced.get(place[0], -1) >= change.at for place in (change.source, change.to) if place))
            for change in seen
        ]
        contents = {}
        for inode in {inode for look in looks[: now + 1] for inode in look.contents}:
            last = next(look.contents[inode] for look in reversed(looks[: now + 1]) if inode in look.contents)
            flushed = looks[synced[inode]].contents.get(inode, b"") if inode in synced else None
            durable = looks[0].contents.get(inode, b"") if flushed is None else flushed
            variants = [durable, last[: len(last) // 2], bytes(len(last)), last]
            contents[inode] = [durable] if durable == last else list(dict.fromkeys(variants))
        yield Choices(looks[0], certain, contents, os.stat(root).st_ino)


def put(state: dict[str, bytes | None], folder: Path) -> None:
    """Write a state to a new folder."""
    folder.mkdir()
    for name, content in state.items():
        if content is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(content)
