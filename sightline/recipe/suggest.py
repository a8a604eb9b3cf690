"""Suggestions for words that are nearly right: flags, fields and choices."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping

ALIASES = {
    "--data": "--data.path",
    "--epochs": "--train.epochs",
    "--batch-size": "--train.global-batch",
    "--lr": "--optimizer.lr",
    "--out": "--run.out",
    "--device": "--run.device",
    "--workers": "--run.workers",
    "--weights": "--model.weights",
    "--resume": "--run.resume",
}
MEANT = {  # words of other trainers that are unlike ours
    "--bs": "--batch-size",
    "--batch": "--batch-size",
    "--learning-rate": "--lr",
    "--imgsz": "--data.size",
    "--img-size": "--data.size",
    "--image-size": "--data.size",
}
SHORT = 4  # letters of words that are like too many others
SURE = 0.8  # ratio from which a short word counts as near one that begins otherwise
NEAR = 0.7  # ratio of difflib from which two words count as near
SHOWN = 3  # most flags that a suggestion names


def nearest_flags(flag: str, names: Collection[str], own: Collection[str] = ()) -> list[str]:
    """Return the long flags whose last word is most like that of `flag`: --bath-size is near --batch-size. `own` are
    the flags of a command, which have one word."""
    aliases = {short: long for short, long in ALIASES.items() if long in names} | {each: each for each in own}
    if (meant := MEANT.get(flag)) in (*aliases, *names):
        return [str(meant)]
    if f"{flag}s" in aliases:  # --epoch
        return [f"{flag}s"]
    if flag in aliases:
        return [aliases[flag]]
    if (dotted := f"--{flag[2:].replace('-', '.', 1)}") in names:  # --data-path
        return [dotted]
    if of_part := [name for name in names if name.startswith(f"{flag}.")]:  # --model resnet18
        return of_part[:1]
    part, _, word = flag.removeprefix("--").rpartition(".")
    scores = _scores(part, word, aliases, names)
    near = [name for name in sorted(scores, key=lambda name: -scores[name]) if scores[name] >= NEAR]
    first = aliases.get(f"--{word.partition('-')[0]}")  # --data-dir
    return [name for name in near if scores[name] > scores[near[0]] - 0.1][:SHOWN] or ([first] if first else [])


def nearest(word: str, known: Iterable[str], what: str = "{}") -> str:
    """Return "; did you mean X?" for the word that is most alike; "" if none is."""
    near = difflib.get_close_matches(word[:80], list(known), n=1)
    return f"; did you mean {what.format(near[0])}?" if near else ""


def _scores(part: str, word: str, aliases: Mapping[str, str], names: Collection[str]) -> dict[str, float]:
    scores: dict[str, float] = {}
    for typed, long in (*aliases.items(), *zip(names, names, strict=True)):
        its_part, _, other = typed.removeprefix("--").rpartition(".")
        ratios = [_likeness(word, other), *(0.85 * _likeness(word, piece) for piece in other.split("-"))]
        scores[long] = max(scores.get(long, 0), max(ratios) + (0.1 * _ratio(part, its_part) if part else 0))
    return scores


def _likeness(word: str, other: str) -> float:
    """Return the ratio of two words; 0 for a short one that begins otherwise and is not very near: count is not out."""
    ratio = _ratio(word, other)
    return ratio if ratio >= SURE or len(other) > SHORT or word[:1] == other[:1] else 0


def _ratio(word: str, other: str) -> float:
    return difflib.SequenceMatcher(None, word, other).ratio()
