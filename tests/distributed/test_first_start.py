"""Several ranks agree on what the first start of a run decides."""

import json
from pathlib import Path


def test_a_measured_batch_is_the_smallest_of_all_ranks_times_their_number(ranks, tmp_path: Path):
    """Rank 1 alone has no memory for the first size, two samples."""
    said = ranks.run_warm(tmp_path, 2, "--train.global-batch=auto", "--train.max-steps=2", FAULT="memory@1:1")
    assert ranks.ended(tmp_path)["code"] == 0, said
    assert "batch 2 (1 on each of 2): the largest that fits in 40 % of" in said
    (state,) = tmp_path.glob("checkpoints/ckpt-????????/state.json")
    assert json.loads(state.read_text())["recipe"]["train"]["global_batch"] == 2
    assert [event["local_batch"] for event in ranks.events(tmp_path, "start")] == [1]


def test_all_ranks_name_the_parts_that_fit_on_the_fullest(ranks, tmp_path: Path):
    """Rank 1 alone has no memory for the first size, two of its six samples."""
    said = ranks.run_warm(tmp_path, 2, "--train.accumulation=auto", FAULT="memory@1:1")
    assert ranks.ended(tmp_path)["code"] == 6, said
    assert "--train.accumulation 6 keeps the batch" in said
