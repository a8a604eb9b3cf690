"""Orders and length of a run, as the fields of a recipe describe them; data/loading/order.py carries them out."""

from __future__ import annotations

from dataclasses import replace

from sightline.data.loading.balanced import BalancedOrder, ClassMembers
from sightline.data.loading.order import EvalOrder, TrainOrder
from sightline.errors import UsageError
from sightline.hardware.world import World
from sightline.parts import Bound
from sightline.recipe.recipe import Recipe
from sightline.train.config import TrainConfig
from sightline.train.schedules import RunLength


def train_order(config: TrainConfig, items: int, samples_per_item: int, rank: int = 0, ranks: int = 1) -> TrainOrder:
    """Choose the training samples of each step on one of several ranks."""
    return TrainOrder(
        items,
        config.global_batch,
        config.seed,
        config.last_batch,
        rank=rank,
        ranks=ranks,
        repeats=config.repeats,
        cap=config.steps_per_epoch,
        least=config.min_epoch_steps,
        samples_per_item=samples_per_item,
    )


def train_order_of(config: TrainConfig, bound: Bound, world: World) -> TrainOrder:
    """Choose the training samples of this rank; refuse accumulation that cannot split them."""
    order = train_order(config, len(bound.dataset), bound.samples_per_item, world.rank, world.size)
    if bound.dataset.balanced_by is not None:
        members = ClassMembers(bound.dataset.balanced_by, len(bound.dataset.spec.classes))
        order = BalancedOrder(**vars(order), members=members)
    if order.local_batch % config.accumulation:
        each = order.samples_per_item
        held = f"{order.local_batch} volumes of {each} slices" if each > 1 else f"{order.local_batch} samples"
        raise UsageError(
            f"train.accumulation={config.accumulation} does not divide the {held} per device "
            f"(global_batch={config.global_batch} over {world.size})"
            + (f"; use --data.nvol {config.accumulation * world.size} or a multiple of it" if each > 1 else "")
        )
    return order


def refuse_uneven(recipe: Recipe, ranks: int) -> None:
    """Raise UsageError if the batch cannot be split over so many ranks, whatever the data are.

    Whether volumes can be split depends on how deep they are, which the ranks find out.
    """
    if not recipe.train.measures_batch:
        train_order(recipe.train, recipe.train.global_batch, 1, ranks=ranks)


def eval_order(config: TrainConfig, samples: int, world: World, most_at_once: int = 0) -> EvalOrder:
    """Choose the samples that this rank evaluates; `most_at_once` is what the data set for a device."""
    batch = min(config.global_batch, most_at_once * world.size or config.global_batch)
    if config.eval_shards == "full":
        order = EvalOrder(samples, -(-batch // world.size))
    else:
        order = EvalOrder(samples, batch, world.rank, world.size)
    most = config.eval_max_steps * order.local_batch * order.ranks
    return replace(order, samples=min(samples, most)) if most else order


def length_of(config: TrainConfig, order: TrainOrder) -> RunLength:
    """Return how long a run over this order is."""
    return RunLength(config.epochs, order.steps_per_epoch, order.samples_per_epoch, config.global_batch)
