"""The one way to a frozen recipe: what a user says, then what follows from it, each value with its origin.

`read` takes a file and flags, and checks them; nothing slow is imported. `decide` then asks the model, the fields that
follow others, and the data, each only for fields that nobody typed.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sightline import plugins
from sightline.errors import SightlineError
from sightline.files.checkpoint_folder import run_of
from sightline.files.typed_json import hints_of
from sightline.parts import DataFacts
from sightline.recipe import flags, store
from sightline.recipe.former import as_started, as_typed_before
from sightline.recipe.plan import Known, Purpose, reopened, with_model
from sightline.recipe.recipe import Recipe, Run
from sightline.recipe.settings import Origin, Settings

NO_RUN = os.path.join(os.devnull, "none")
FULL = {"drop": 2, "pad": 1}  # train.last_batch: steps of an epoch from which the recipe's batch stays


@dataclass(frozen=True)
class Resolved:
    """A frozen recipe and run, with what was found on the way."""

    settings: Settings
    recipe: Recipe
    run: Run
    facts: DataFacts = field(default_factory=DataFacts)
    lines: tuple[str, ...] = ()  # what was decided, for the user


def read(
    settings: Settings, *given: flags.Given, file: Path | None = None, of: str = "", own: Collection[str] = ()
) -> Settings:
    """Return settings with what a config file and then flags say. UsageError for a wrong name or value, and for parts
    that do not agree. `of` is the command and its recipe, `own` the command's own flags, for suggestions."""
    hints = settings.hints()
    values: dict[str, Any] = {}
    typed_as: dict[str, str] = {}
    for each in given:
        more, words = flags.read(each, hints, of, own)
        values, typed_as = values | more, typed_as | words
    if file:
        settings = store.put_file(settings, file)
    settings = settings.put(Origin.FLAG, values, typed_as)
    settings.build()
    return settings


def run_fields(*given: flags.Given) -> dict[str, Any]:
    """Return the fields of `run` that flags set, where the recipe of the other flags is not known yet."""
    hints = {f"run.{name}": hint for name, hint in hints_of(Run).items()}
    return {name: value for each in given for name, value in flags.fields_among(each, hints).items()}


def decide(
    settings: Settings, needs_data: bool, purpose: Purpose = "look", starts: bool = False, is_whole: bool = False
) -> Resolved:
    """Return the recipe with what the model, the data, its plan and other fields decide. `needs_data` raises what is
    wrong with the data; else those who open them report it. A command that `starts` a run, as training does, resumes
    the one in runs/RECIPE; for others only a run that was named counts. Settings of an object are whole: nothing that
    was typed at the start of the run is added to them."""
    lines = []
    usual = f"runs/{settings.recipe.name}" if starts or purpose == "train" else NO_RUN
    folder = Path(settings["run.out"].value or usual)
    before = _run_before(settings, folder)
    settings, typed = as_typed_before(settings, None if is_whole else before)
    if typed:
        lines.append(f"the run keeps what was typed when it was started: {', '.join(typed)}")
    started = as_started(settings, folder, settings["run.resume"].value)
    if started is not settings:
        kept = ", ".join(name for name in started.values if name not in settings.values)
        lines.append(f"the run keeps what {settings.recipe.name} had when it was started: {kept}")
        settings = started
    settings = with_model(settings)
    try:
        with plugins.naming_absent_sources(before, store.packages_of(before)):
            facts: DataFacts = settings.part("data").look(folder, settings.typed_in("data"))
    except SightlineError:
        if needs_data:
            raise
        facts = DataFacts()
    settings = settings.put(Origin.DATA, {f"data.{name}": value for name, value in facts.fields.items()}, facts.said)
    settings, decided = _with_plan(settings, facts, before, purpose)
    following = settings.part("data").following(settings.recipe.data, settings.typed_in("data"))
    of_sizes = {
        f"data.{name}": value for name, value in following.items() if settings[f"data.{name}"].origin < Origin.MODEL
    }
    settings = settings.put(Origin.DERIVED, of_sizes, "matches data.size")
    if of_sizes and not decided and not before:  # else it was said when the run was started
        lines.append(_of_sizes(of_sizes))
    settings, smaller = _with_smaller_batch(settings, facts, folder)
    if facts.line:
        lines[:0] = [facts.line + smaller, *([f"warning: {facts.warning}"] if facts.warning else [])]
    lines += decided
    return Resolved(settings, *settings.build(), facts, tuple(lines))


def _with_plan(
    settings: Settings, facts: DataFacts, before: Path | None, purpose: Purpose
) -> tuple[Settings, tuple[str, ...]]:
    """Let the recipe's plan decide, where it has one and the data could be counted; the run that is continued keeps
    what was decided when it was started. Return also what to say."""
    plan = settings.recipe.plan
    if plan is None:
        return settings, ()
    if before:
        kept = store.with_decisions_of(settings, before)
        asked, origins = with_model(kept), store.origins_of(store.stored_in(before).get(store.ORIGINS))
        decided = [name for name in asked.values if not origins.get(name, "").startswith("model")]
        kept = store.with_decisions_of(reopened(asked, decided), before)
        head, epochs = kept["train.head_epochs"], kept["train.epochs"].value
        if head.origin is Origin.STORED and head.value >= epochs:  # fewer epochs were typed now
            kept = kept.put(Origin.STORED, {"train.head_epochs": 0}, f"decided: leaves the whole network its {epochs}")
        return kept, _chosen(Known(kept, facts, purpose))
    if facts.count is None:
        return settings, ()
    known = Known(settings, facts, purpose)
    plan(known)
    return known.settings, (*known.lines, *_chosen(known))


def _chosen(known: Known) -> tuple[str, ...]:
    """Say what the plan chose, now or at the first start of the run."""
    says = known.settings.recipe.chosen
    return (known.line(*says(known)),) if says and known.purpose != "score" else ()


def _run_before(settings: Settings, folder: Path) -> Path | None:
    """Return the run of this recipe that is continued; one without a checkpoint decides nothing."""
    for run in (folder, folder / "fold-0", run_of(Path(settings["run.resume"].value))):
        if any(run.glob("checkpoints/ckpt-*")) and store.stored_in(run).get("recipe") == settings.recipe.name:
            return run
    return None


def _of_sizes(values: Mapping[str, Any]) -> str:
    """Say which sizes follow --data.size."""
    found = {name.partition(".")[2]: value for name, value in values.items()}
    if set(found) == {"eval_size", "eval_resize"}:
        resized = "" if found["eval_resize"] == found["eval_size"] else f" (resized to {found['eval_resize']} first)"
        return f"evaluation size set to {found['eval_size']}{resized} to match --data.size"
    return f"{', '.join(f'{name} {value}' for name, value in found.items())} set to match --data.size"


def _with_smaller_batch(settings: Settings, facts: DataFacts, run: Path) -> tuple[Settings, str]:
    """Take a batch that leaves two steps in an epoch where the recipe's own leaves one or none, and scale a rate that
    was meant for it; where the last batch is padded, only if not one is full. A run that started with one step in an
    epoch keeps it. Return also what to say."""
    batch, enough = settings["train.global_batch"].value, FULL.get(settings["train.last_batch"].value, 0)
    has = settings.hints()  # parts of one's own may lack some
    is_open = settings["train.global_batch"].origin < Origin.FILE and isinstance(batch, int) and batch > 1
    if not is_open or not facts.steps or (steps := facts.steps(batch)) >= enough:
        return settings, ""
    has_step = bool(steps) or enough == 1
    if has_step and batch in (_batch_of(run), _batch_of(run / "fold-0")):
        return settings, ""
    powers = (1 << power for power in reversed(range((batch - 1).bit_length())))
    smaller = next((each for each in powers if facts.steps(each) >= 2), 0)
    if not smaller:
        return settings, ""
    values: dict[str, Any] = {"train.global_batch": smaller}
    said = f"; batch {smaller}"
    is_absolute = "optimizer.lr_for_batch" not in has or not settings["optimizer.lr_for_batch"].value
    if is_absolute and "optimizer.lr" in has and not settings.is_typed("optimizer.lr"):
        rate = values["optimizer.lr"] = _shown(settings["optimizer.lr"].value * smaller / batch)
        said += f" and rate {rate:g}"
        is_table = "schedule.table_rates" in has and settings["schedule.kind"].value == "table"
        if is_table and not settings.is_typed("schedule.table_rates"):
            rates = tuple(_shown(each * smaller / batch) for each in settings["schedule.table_rates"].value)
            values["schedule.table_rates"] = rates
            said += f" (later up to {max(rates):g})"
    why = "leaves one step in an epoch" if steps else "is more than there are"
    because = f"{facts.said}; the recipe's batch of {batch} {why}"
    return settings.put(Origin.DERIVED, values, because), f"{said}, as the recipe's {batch} {why}"


def _shown(rate: float) -> float:
    """Return a rate with the digits that are shown, so that the same number can be typed."""
    return float(f"{rate:g}")


def _batch_of(run: Path) -> int:
    """Return the batch that a run was started with; 0 if there is none."""
    train = store.stored_in(run).get("train")
    batch = train.get("global_batch") if isinstance(train, dict) else 0
    return batch if isinstance(batch, int) else 0
