"""What ranks share when they predict: which batches are whose, and what they tell each other."""

import json
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from sightline.data.loading.order import EvalOrder
from sightline.errors import BadData, PeerLost, UsageError
from sightline.hardware.world import World
from sightline.inference import shares


@pytest.fixture
def store() -> Iterator[dist.Store]:
    """That of two ranks; this process alone is in the group."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield dist.HashStore()
    dist.destroy_process_group()


@pytest.mark.parametrize(("items", "ranks"), [(17, 2), (4, 3), (1, 4), (16, 4)])
def test_each_rank_takes_every_nth_batch(items: int, ranks: int):
    order = EvalOrder(items, 4)
    parts = [shares.shared(order, SimpleNamespace(world=World(rank=rank, size=ranks))) for rank in range(ranks)]
    assert sum(part.steps_per_epoch for part in parts) == order.steps_per_epoch
    for rank, part in enumerate(parts):
        assert part.local_batch == 4
        for step in range(part.steps_per_epoch):
            for ours, whole in zip(part.batch(step), order.batch(rank + step * ranks), strict=True):
                assert ours.tolist() == whole.tolist()
    assert shares.shared(order, SimpleNamespace(world=World())) is order


def test_a_rank_keeps_its_lines_and_beats_once_a_second(store: dist.Store, monkeypatch: pytest.MonkeyPatch):
    now, said = [100.0], []
    monkeypatch.setattr(shares.time, "monotonic", lambda: now[0])
    ours = shares.Share(World(rank=1, size=2, store=store), 5.0, said.append)
    assert ours.limit_s >= 60 and shares.Share(World(rank=1, size=2, store=store), 9e9, said.append).limit_s == 9e9
    assert not store.check(["predict/1"])
    for seconds, at, expected in ((0.0, 3, b"3"), (0.9, 4, b"3"), (1.0, 5, b"3"), (1.1, 6, b"6"), (9.0, 7, b"7")):
        now[0] = 100.0 + seconds
        ours.beat(at)
        assert store.get("predict/1") == expected
    assert ours._beats() == {1: b"7"}
    ours.say("of the first")
    ours.begin(4)
    ours.say("of the ninth")
    assert said == [] and ours._lines == [(1, "of the first"), (9, "of the ninth")]
    with pytest.raises(UsageError, match="^Reporter is not a ResultFolder, so ranks cannot share its files; "):
        ours.checked(type("Reporter", (), {})())


def test_one_rank_prints_at_once_and_beats_for_nobody():
    said: list[str] = []
    alone = shares.Share(World(), 5.0, said.append)
    alone.begin(3)
    alone.say("a line")
    alone.beat(3)
    alone.merge(object())
    assert said == ["a line"] and alone.checked(said) is said


def test_ranks_that_begin_no_batch_for_a_while_are_given_up(store: dist.Store, monkeypatch: pytest.MonkeyPatch):
    """Looked at once a second; a beat of anybody counts."""
    now, beats = [0.0], {10: b"1", 65: b"2"}

    def sleep(seconds: float) -> None:
        now[0] += 0.25
        if now[0] in beats:
            store.set("predict/0", beats[now[0]])

    monkeypatch.setattr(shares, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(shares.dist, "barrier", lambda **_: SimpleNamespace(is_completed=lambda: False))
    ours = shares.Share(World(rank=1, size=2, store=store), 700.0, print)
    with pytest.raises(PeerLost, match="^no rank of 2 began a batch in 700 s, and predictions.json was not written"):
        ours._wait_for_all()
    assert 765 < now[0] <= 766.25


def test_lines_of_all_ranks_come_in_the_order_of_one(store: dist.Store, monkeypatch: pytest.MonkeyPatch):
    taken = []

    class Table(shares.ResultFolder):
        def __init__(self) -> None: ...
        def add(self, *given: object) -> None: ...
        def table_rows(self) -> list: ...
        def found(self) -> dict:
            return {"rows": [1]}

        def take(self, found: list, is_main: bool) -> None:
            taken.append((found, is_main))

    other = json.dumps({"rows": [2], "lines": [[1, "second"], [3, "fourth"]]})
    here = World(rank=0, size=2, store=store)
    said: list[str] = []
    ours = shares.Share(here, 5.0, said.append)
    ours.say("first")
    ours.begin(1)
    ours.say("third")
    monkeypatch.setattr(World, "gather_texts", lambda self, text: [text, other])
    ours.merge(Table())
    assert said == ["first", "second", "third", "fourth"]
    rows = [{"rows": [1], "lines": [[0, "first"], [2, "third"]]}, json.loads(other)]
    assert taken == [(rows, True)]


def test_ranks_that_find_other_files_are_refused():
    def gathered(*others: list[str]) -> SimpleNamespace:
        def gather(text: str) -> list[str]:
            found = []
            for files in others:
                one = SimpleNamespace(gather_texts=lambda told: found.append(told) or [told])
                shares.refuse_other_files(one, files)
            return [text, *found]

        return SimpleNamespace(gather_texts=gather)

    shares.refuse_other_files(gathered(["a", "b"], ["a", "b"]), iter(["a", "b"]))
    with pytest.raises(BadData, match=r"^ranks 0 and 2 find different files \(2 and 3\); give a folder that all of"):
        shares.refuse_other_files(gathered(["a", "b"], ["a", "b", "c"]), ["a", "b"])
    with pytest.raises(BadData, match=r"ranks 0 and 1 find different files \(2 and 2\)"):
        shares.refuse_other_files(gathered(["b", "a"]), ["a", "b"])
    main = SimpleNamespace(gather_texts=lambda text: [json.dumps("runs/\udcff"), text])
    assert shares.from_main(main, "mine") == "runs/\udcff"
