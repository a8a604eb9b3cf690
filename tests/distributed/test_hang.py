"""A rank that hangs, or fails alone: the others do not wait for ever, and say which it was (B5: 17)."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # limits of seconds, which a busy machine overruns


def test_a_hung_rank_ends_all_with_their_stacks(ranks, tmp_path: Path):
    out = tmp_path / "run"
    said = ranks.run(out, 2, "--run.timeout-s=3", FAULT="hang@1:4")
    ended = ranks.ended(out)
    assert ended["code"] == 8, said
    assert ended["reason"].startswith("no step was done in ")
    assert "rank 1 is late, in fail() of faulty_ranks.py:" in ended["reason"]
    assert f"error: {ended['reason']}" in said and "--run.timeout-s" in ended["reason"]
    assert "[rank0]: Traceback" not in said
    hung, waiting = ((out / f"rank_{rank}.log").read_text() for rank in (1, 0))
    assert "in fail\n" in hung and "faulty_ranks.py" in hung
    assert "in fail\n" not in waiting and "the stacks of rank 0" in waiting and "train/loop.py" in waiting


def test_a_rank_that_fails_alone_is_named_with_its_reason(ranks, tmp_path: Path):
    out = tmp_path / "run"
    said = ranks.run(out, 2, FAULT="raise@1:4")
    assert ranks.ended(out) | {"time": 0, "run_id": ""} == {
        "code": 8,
        "reason": "rank 1 ended with exit 1: ValueError: made to fail",
        "time": 0,
        "run_id": "",
        "restarts": 0,
        "ranks": 2,
    }
    assert "[rank1]: ValueError: made to fail" in said and "[rank0]: Traceback" not in said
    assert "ends with exit 1: ValueError: made to fail" in (out / "rank_1.log").read_text()


@pytest.mark.parametrize("how", ["--run.save-in-background", "--run.no-save-in-background"])
def test_a_slow_disk_is_no_hung_rank(ranks, tmp_path: Path, how: str):
    """Ranks wait for rank 0 where it waits for the disk, three times as long as a step may take."""
    out = tmp_path / "run"
    said = ranks.run(out, 2, "--run.timeout-s=3", "--run.checkpoint-every-steps=2", how, FAULT="disk@0:4")
    assert ranks.ended(out)["code"] == 0, said
    assert [line["step"] for line in ranks.events(out, "checkpoint")][:3] == [2, 4, 6]


def test_rank_0_may_hang_too(ranks, tmp_path: Path):
    out = tmp_path / "run"
    said = ranks.run(out, 2, "--run.timeout-s=3", FAULT="hang@0:4")
    assert ranks.ended(out)["code"] == 8 and "rank 0 is late, in fail()" in ranks.ended(out)["reason"], said
