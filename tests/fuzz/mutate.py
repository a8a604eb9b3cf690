"""Damaged inputs for a reader, made from good ones, and the limits under which a reader has to refuse them.

A test takes `fuzz` with runpy.run_path, as other folders take their files. Mutation number n of given seeds is the same
bytes everywhere: `mutated(seeds, n, tokens)` makes it again to look into a finding.
"""

import contextlib
import json
import os
import random
import re
import resource
import select
import signal
import struct
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from sightline.errors import SightlineError

NEAR = 400  # bytes from the start, where most formats say what follows; half of all changes fall there
STALLED_S = 300.0  # of the clock without an answer: a reader that waits (for a pipe, a lock) takes no CPU time
MB = 1 << 20
_LENGTHS = ("<H", ">H", "<I", ">I", "<Q", ">Q")
_NUMBERS = (b"0", b"-1", b"1", b"255", b"65536", b"4294967296", b"99999999999999999999", b"1e309", b"NaN", b"0x7f")


@dataclass
class Outcome:
    """Outcomes of the mutations; `foreign` holds a line for each that was neither read nor properly refused."""

    accepted: int = 0
    refused: int = 0
    foreign: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        kinds = Counter(re.sub(r"\d+", "N", line.partition(": ")[2])[:160] for line in self.foreign)
        head = f"{self.accepted} accepted, {self.refused} refused, {len(self.foreign)} foreign"
        return "\n".join([head, *(f"{count} x {kind}" for kind, count in kinds.most_common(20)), *self.foreign[:20]])


def fuzz(
    reader: Callable[[bytes], object],
    seeds: Sequence[bytes],
    mutations: int = 3000,
    *,
    tokens: Sequence[bytes] = (),
    refusals: tuple[type[BaseException], ...] = (SightlineError,),
    cpu_s: float = 10.0,
    memory_mb: int = 512,
) -> Outcome:
    """Give `reader` that many mutations of the seeds, in a forked child; another follows where one was killed.

    Foreign are: an error that is not one of `refusals`, or that was caused by a MemoryError; a warning; more than
    `memory_mb` above what the child began with; more than `cpu_s` of its own time, whatever else the machine does; a
    crash. `tokens` are bytes that mean something in the format (markers, keywords), to be put where they do not belong.
    """
    outcome, done = Outcome(), 0
    while done < mutations:
        answers, end = _run_child(reader, seeds, range(done, mutations), tokens, refusals, cpu_s, memory_mb)
        for number, kind, text in answers:
            if kind == "foreign":
                outcome.foreign.append(f"mutation {number}: {text}")
            else:
                setattr(outcome, kind, getattr(outcome, kind) + 1)
        done += len(answers)
        if done < mutations:
            outcome.foreign.append(f"mutation {done}: {end}")
            done += 1
    return outcome


def mutated(seeds: Sequence[bytes], number: int, tokens: Sequence[bytes] = ()) -> bytes:
    """Mutation `number`: one to five changes of one of the seeds, every fifth also cut off."""
    draw = random.Random(number)
    data = bytearray(seeds[number % len(seeds)])
    for _ in range(draw.randint(1, 5)):
        draw.choice((_flip, _overwrite, _delete, _insert, _copy, _splice, _length, _digits, _token))(
            draw, data, seeds, tokens
        )
    if number % 5 == 0:
        del data[draw.randrange(len(data) + 1) :]
    return bytes(data)


def _place(draw: random.Random, data: bytearray) -> int:
    reach = len(data) if draw.random() < 0.5 else min(len(data), NEAR)
    return draw.randrange(reach + 1)


def _flip(draw: random.Random, data: bytearray, *_: object) -> None:
    at = _place(draw, data)
    if at < len(data):
        data[at] ^= 1 << draw.randrange(8)


def _overwrite(draw: random.Random, data: bytearray, *_: object) -> None:
    at, span = _place(draw, data), draw.randint(1, 8)
    data[at : at + span] = draw.choice((bytes(span), b"\xff" * span, draw.randbytes(span)))


def _delete(draw: random.Random, data: bytearray, *_: object) -> None:
    at = _place(draw, data)
    del data[at : at + draw.choice((1, 2, 4, 8, 64, 1024))]


def _insert(draw: random.Random, data: bytearray, *_: object) -> None:
    at, span = _place(draw, data), draw.choice((1, 2, 4, 8, 64, 1024))
    data[at:at] = draw.choice((bytes(span), b"\xff" * span, draw.randbytes(span)))


def _copy(draw: random.Random, data: bytearray, *_: object) -> None:
    """A part again elsewhere: a second header, a repeated field."""
    start, to = _place(draw, data), _place(draw, data)
    part = data[start : start + draw.choice((4, 16, 64, 256))]
    data[to:to] = part * draw.choice((1, 1, 1, 50))


def _splice(draw: random.Random, data: bytearray, seeds: Sequence[bytes], *_: object) -> None:
    """The beginning of this and the end of another."""
    other = draw.choice(seeds)
    del data[_place(draw, data) :]
    data += other[draw.randrange(len(other) + 1) :]


def _length(draw: random.Random, data: bytearray, *_: object) -> None:
    """A number of 2, 4 or 8 bytes becomes an extreme one, or a neighbour of what it was."""
    form = draw.choice(_LENGTHS)
    size = struct.calcsize(form)
    at = _place(draw, data)
    if at + size > len(data):
        return
    most = 256**size - 1
    (was,) = struct.unpack_from(form, data, at)
    values = (0, 1, 2, most, most // 2, most // 2 + 1, len(data), was + 1, was - 1, was * 2, was // 2, 2**16, 2**30)
    struct.pack_into(form, data, at, draw.choice(values) & most)


def _digits(draw: random.Random, data: bytearray, *_: object) -> None:
    """A number that is written as text becomes another; formats of bytes hold few, so one more byte changes there."""
    found = list(re.finditer(rb"\d+", data[: 1 << 16]))
    if not found:
        return _flip(draw, data)
    match = draw.choice(found)
    data[match.start() : match.end()] = draw.choice(_NUMBERS)


def _token(draw: random.Random, data: bytearray, _: object, tokens: Sequence[bytes]) -> None:
    """Put in, or written over what is there."""
    if not tokens:
        return _flip(draw, data)
    token, at = draw.choice(tokens), _place(draw, data)
    data[at : at + draw.choice((0, len(token)))] = token


Answer = tuple[int, str, str]


def _run_child(
    reader: Callable[[bytes], object],
    seeds: Sequence[bytes],
    numbers: range,
    tokens: Sequence[bytes],
    refusals: tuple[type[BaseException], ...],
    cpu_s: float,
    memory_mb: int,
) -> tuple[list[Answer], str]:
    """The answers that came, in order, and how the child ended if there are fewer than numbers."""
    sys.stdout.flush()
    sys.stderr.flush()
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read_end)
            _limit(memory_mb)
            for number in numbers:
                data = mutated(seeds, number, tokens)
                signal.setitimer(signal.ITIMER_PROF, cpu_s)
                kind, text = _answer(reader, data, refusals, memory_mb)
                signal.setitimer(signal.ITIMER_PROF, 0)
                line = json.dumps((number, kind, text)) + "\n"
                os.write(write_end, line.encode())
        finally:
            os._exit(0)
    os.close(write_end)
    content, end = _collect(read_end, child)
    os.close(read_end)
    _, status = os.waitpid(child, 0)
    if not end:
        code = os.waitstatus_to_exitcode(status)
        reason = "took too much CPU time" if code == -signal.SIGPROF else "killed the reader"
        end = f"{reason} ({signal.Signals(-code).name if code < 0 else f'exit {code}'})"
    return [tuple(json.loads(line)) for line in content.splitlines(keepends=True) if line.endswith(b"\n")], end


def _collect(read_end: int, child: int) -> tuple[bytes, str]:
    content = bytearray()
    while True:
        ready, _, _ = select.select([read_end], [], [], STALLED_S)
        if not ready:
            os.kill(child, signal.SIGKILL)
            return bytes(content), f"gave no answer for {STALLED_S:.0f} s"
        part = os.read(read_end, 1 << 16)
        if not part:
            return bytes(content), ""
        content += part


def _limit(memory_mb: int) -> None:
    """In the child: less address space, silence, and a death that no handler of the parent's delays."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    warnings.simplefilter("error")
    # Address space is reserved far more freely than memory is used: the exact limit is that on resident memory.
    room = psutil.Process().memory_info().vms + 4 * memory_mb * MB
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (room if hard == resource.RLIM_INFINITY else min(room, hard), hard))


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (MB if sys.platform == "darwin" else 1024)


def _answer(
    reader: Callable[[bytes], object], data: bytes, refusals: tuple[type[BaseException], ...], memory_mb: int
) -> tuple[str, str]:
    with contextlib.suppress(OSError):  # a peak from before would hide what this input takes
        Path("/proc/self/clear_refs").write_text("5")
    before, peak_before = psutil.Process().memory_info().rss / MB, _peak_mb()
    try:
        reader(data)
        kind, text = "accepted", ""
    except refusals as error:
        kind, text = "refused", ""
        if _is_memory(error):
            kind, text = "foreign", f"refused for want of memory: {error}"
    except BaseException as error:  # noqa: BLE001  (any other is what is looked for)
        kind, text = "foreign", f"{type(error).__name__}: {str(error)[:300]}"
    peak = _peak_mb()
    if peak > peak_before and peak - before > memory_mb:
        return "foreign", f"took {peak - before:.0f} MB, more than {memory_mb} ({kind}: {text})"
    return kind, text


def _is_memory(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, MemoryError) or "insufficient memory" in str(error).lower():
            return True
        error = error.__cause__ or error.__context__
    return False
