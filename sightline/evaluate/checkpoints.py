"""Checkpoints brought back to be looked at: a network on its device, the scores of one, the scores of all of a run."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from sightline import config
from sightline.config import Recipe, Run
from sightline.data.loader import Loader
from sightline.errors import BadCheckpoint, BadData, UsageError
from sightline.evaluate.run import evaluate, order_for
from sightline.hardware import world
from sightline.hardware.devices import Device, place
from sightline.hardware.precision import keep_fp32
from sightline.hardware.setup import set_up
from sightline.hardware.world import World
from sightline.log import RunLog
from sightline.parts import Dataset, DataSpec, Scores
from sightline.train import checkpoint
from sightline.train.signals import StopSignals

TABLE = "evaluation.json"
Tensors = dict[str, dict[str, Tensor]]


def build(recipe: Recipe, run: Run, spec: DataSpec, device: Device) -> nn.Module:
    """The network of a recipe on its device; `load_weights` brings what it learnt."""
    model = place(recipe.model.build(spec), device, run.channels_last)
    keep_fp32(model, recipe.train.fp32_ops, device)
    return model


def load_weights(model: nn.Module, tensors: Tensors) -> None:
    """The average where the checkpoint has one: it is what is evaluated, called best, and shown."""
    model.load_state_dict(tensors.get("ema", tensors["model"]))


class Evaluation:
    """The val split of a recipe with its loader and a network, ready for the weights of any checkpoint of a run."""

    def __init__(
        self, recipe: Recipe, run: Run, device: Device, here: World, dataset: Dataset, loader: Loader, log: RunLog
    ):
        self.recipe = recipe
        self.device = device
        self.world = here
        self.dataset = dataset
        self.loader = loader
        self.log = log
        self.model = build(recipe, run, dataset.spec, device)

    def score(self, path: Path, tensors: Tensors, stored: dict[str, Any]) -> Scores:
        """Told, and written beside the run as scores-CHECKPOINT.json."""
        load_weights(self.model, tensors)
        scores = evaluate(
            self.model,
            self.recipe.task,
            self.dataset,
            self.loader,
            self.device,
            self.world,
            self.recipe.train.eval_precision,
            lambda done, total: self.log.evaluating(done, total, done, total),
            self.recipe.train.eval_shards,
        )
        self.log.scores(scores, f"scores-{path.name}.json", checkpoint=path.name, step=stored["progress"]["step"])
        return scores


@contextlib.contextmanager
def opened(
    path: Path, stored: dict[str, Any], flags: Sequence[str], recipe_file: str, folder: Path
) -> Iterator[Evaluation]:
    """What the recipe in a checkpoint says, changed by flags; results go into `folder` unless run.out is given."""
    recipe, run = config.from_json(stored["recipe"], recipe_file, flags)
    here, device, recipe = set_up(recipe, run)
    dataset = recipe.data.open("val", recipe.train.seed).for_batch(recipe.train.global_batch)
    spec = DataSpec.from_json(stored["spec"])
    if dataset.spec != spec:
        raise BadData(f"the data do not fit {path}: it was trained on {_differences(spec, dataset.spec)}")
    here = world.connect(here, device)
    folder = Path(run.out) if run.out else folder
    folder.mkdir(parents=True, exist_ok=True)
    log = RunLog(folder, run.progress, here.is_main, claims=False)
    with contextlib.ExitStack() as stack:
        stack.callback(log.release)
        stack.callback(here.close)
        signals = stack.enter_context(StopSignals(here))
        orders = {"val": order_for(recipe.train, len(dataset), here)}
        loader = Loader.of(
            run, {"val": dataset}, orders, recipe.data, device, here, on_bad=log.bad_sample, check_stop=signals.check
        )
        stack.callback(loader.close)
        for note in loader.notes:
            log.say(note)
        if stored.get("fingerprints", {}).get("val", dataset.fingerprint) != dataset.fingerprint:
            # Not refused: scores on other data are what some want. But one fold's training data are another's val.
            log.say("warning: this val split is not the one that the run held out; it may have been trained on these")
        yield Evaluation(recipe, run, device, here, dataset, loader, log)


def evaluate_all(run: Path, flags: Sequence[str], recipe_file: str) -> list[dict[str, Any]]:
    """A row of scores for every checkpoint that has made a step, by step.

    All are evaluated as the newest one's recipe says, so that the numbers compare. After each one the table is written;
    rows of the same checkpoint, data and fields are not made again, so an interrupted call goes on where it was.
    """
    if (run / checkpoint.MANIFEST).is_file():
        raise UsageError(f"{run} is a checkpoint and --all wants a run folder; leave out --all")
    paths = [path for path in checkpoint.all_of(run) if int(path.name.removeprefix("ckpt-")) > 0]
    newest, stored = _newest(run, paths)
    with opened(newest, stored, flags, recipe_file, run) as evaluation:
        log = evaluation.log
        made_with = {
            "data": evaluation.dataset.fingerprint,
            "changes": config.diff(stored["recipe"], evaluation.recipe),
        }
        table = {row["checkpoint"]: row for row in _rows(log.folder / TABLE) if _has(row, made_with)}
        evaluation.world.barrier()  # no rank may write before all have read
        for path in paths:
            try:
                key = {**made_with, "manifest": _sha256(path / checkpoint.MANIFEST)}
                if _has(table.get(path.name, {}), key):
                    log.say(f"{path.name} stands in {log.folder / TABLE} already")
                    continue
                tensors, its = checkpoint.read(path)
            except (BadCheckpoint, FileNotFoundError) as error:  # a run at work may remove one meanwhile
                log.say(f"warning: {path.name} is left out: {error}")
                continue
            scores = evaluation.score(path, tensors, its)
            table[path.name] = {
                "checkpoint": path.name,
                "step": its["progress"]["step"],
                "values": scores.values,
                **key,
            }
            rows = sorted(table.values(), key=lambda row: row["step"])
            log.write_json(TABLE, {"checkpoints": rows})
        return sorted(table.values(), key=lambda row: row["step"])


def _newest(run: Path, paths: Sequence[Path]) -> tuple[Path, dict[str, Any]]:
    """The newest checkpoint that verifies, and its state."""
    for path in reversed(paths):
        with contextlib.suppress(BadCheckpoint, FileNotFoundError):  # told when its turn comes
            return path, checkpoint.read(path)[1]
    raise BadCheckpoint(f"{run} holds no checkpoint that verifies and has made a step; there is nothing to evaluate")


def _rows(path: Path) -> list[dict[str, Any]]:
    """The table of an earlier call; none where it cannot be read, for it can be made again."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["checkpoints"]
        return [row for row in rows if {"checkpoint", "step", "values"} <= row.keys()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _has(row: dict[str, Any], values: dict[str, Any]) -> bool:
    return all(row.get(name) == value for name, value in values.items())


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _differences(trained: DataSpec, found: DataSpec) -> str:
    if trained.classes != found.classes:
        return (
            f"{len(trained.classes)} classes ({', '.join(trained.classes[:3])}, ...), "
            f"found {len(found.classes)} ({', '.join(found.classes[:3])}, ...)"
        )
    return f"{trained}, found {found}"
