"""Parts of the table of an original script: its flags as it parsed them, and what becomes of each here.

One file of this folder per original; translate.py turns a command line and its table into commands of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sightline.errors import UsageError
from sightline.legacy.start import Start

Kind = Literal["text", "int", "float", "switch", "bool", "ints"]
"""switch: argparse's store_true, no value; bool: absl's, `--x`, `--nox` or `--x=false`; ints: one or more."""
TRAIN, EVALUATE, PREDICT, BENCHMARK, PREPARE = "train", "evaluate", "predict", "benchmark", "prepare"


@dataclass(frozen=True)
class Given:
    """A command line of an original, parsed: every flag's value, which ones were written, and who starts the ranks."""

    values: Mapping[str, Any]
    named: frozenset[str]
    """Keys of flags that the command line names; the others have their defaults."""
    start: Start
    recipe: str = ""

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    @property
    def ranks(self) -> int:
        return max(1, self.start.ranks)

    def folder(self, key: str) -> str:
        """Return the folder that a flag names, without its last slash; an empty one is an error."""
        if not self[key]:
            raise UsageError(f"--{key} is empty; give a folder, e.g. --{key} /tmp/{key}")
        return str(self[key]).rstrip("/") or "/"

    def variable(self, name: str) -> str:
        """Return the value of an environment variable, of the line itself or of this process; "" where unset."""
        return self.start.variables.get(name, "")


Make = Callable[[Given], Sequence[str]]


def plain(value: Any) -> str:
    """Write a number without a needless .0 or exponent."""
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def counted_from_1(steps: str) -> str:
    """Return FIRST,LAST of a script that counts steps from 0 as --run.profile counts them; other text as it is."""
    parts = [part.strip() for part in steps.split(",")]
    return ",".join(str(int(part) + 1) for part in parts) if all(map(str.isdecimal, parts)) else steps


def nothing(given: Given) -> Sequence[str]:
    """Leave a flag to the words of another, or to the choice of the command."""
    return ()


@dataclass(frozen=True)
class Field:
    """The flag sets fields of a recipe, or an option of one of our commands."""

    to: str
    """Flag that it sets, e.g. --optimizer.lr; several separated by spaces."""
    ours: Any = None
    """The recipe's own value, which need not be written; by recipe where a script has several."""
    effect: str = ""
    """Unit, coupling or difference, in a few words."""
    make: Make | None = None
    """Words from all values; None: `to` and the value."""
    on: tuple[str, ...] = (TRAIN, BENCHMARK)
    """Commands that it is for."""
    read_on: tuple[str, ...] = ()
    """Other commands that take it in, as their run folder or another word of `Mode`."""


@dataclass(frozen=True)
class Notice:
    """The flag is accepted and has no meaning here."""

    why: str


@dataclass(frozen=True)
class Refused:
    """The flag is an error, unless its value is the default."""

    remedy: str


Outcome = Field | Notice | Refused


@dataclass(frozen=True)
class Flag:
    """One flag of an original."""

    spellings: str
    """All of them, separated by spaces: -b --batch-size."""
    kind: Kind
    default: Any
    outcome: Outcome
    choices: tuple[str, ...] = ()
    least: int | None = None
    """Least value of a number; smaller ones are an error."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.spellings.split())

    @property
    def name(self) -> str:
        """Return the name for people: the first long one."""
        return next((name for name in self.names if name.startswith("--")), self.names[0])

    @property
    def key(self) -> str:
        return self.name.lstrip("-").replace("-", "_")


@dataclass(frozen=True)
class Act:
    """Something that is done beside our commands, e.g. a file under the original's name."""

    text: str
    do: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Mode:
    """Our command that a command line becomes."""

    command: str
    words: tuple[str, ...] = ()
    """Words after the command: the recipe or the run folder, and everything that no flag sets."""
    recipe: str = ""
    before: tuple[Act, ...] = ()
    after: tuple[Act | tuple[str, ...], ...] = ()
    """Done in its order when the command has ended well; words are a further command."""
    notes: tuple[tuple[str, str, str], ...] = ()
    """Rows of the table that belong to no flag: old, new, effect."""


@dataclass(frozen=True)
class Script:
    """An original script."""

    path: str
    """In HabanaAI/Model-References; its end tells scripts of one name apart."""
    about: str
    flags: tuple[Flag, ...]
    mode: Callable[[Given], Mode]
    style: Literal["argparse", "absl"] = "argparse"
    complete: Callable[[Given], Given] = field(default=lambda given: given)
    """Set values that the original derives from others, where the command line does not name them."""
    settle: Callable[[Given], Start] = field(default=lambda given: given.start)
    """Decide who starts how many ranks, from the flags; raise where they contradict each other."""
    forward: Callable[[Given], tuple[str, list[str]]] | None = None
    """A launcher: the script that it calls, and the flags it passes on."""
    operands: tuple[str, ...] = ()
    """Names of words without a dash that it takes."""

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]
