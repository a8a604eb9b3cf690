"""A device without enough memory: exit 6 with what fits, or as many parts of the batch as fit (B5: 32).

RLIMIT_AS stands in for the small device: the kernel grants no more memory, and torch's allocator fails.
"""

import pytest
import yaml

HEAVY = ("--model.bulk", "400", "--train.max-steps", "2", "--train.no-eval-at-end")  # 8 samples take 3,200 MB
LIMIT = "memory2800@recipe:1"  # 4 of them, and 1,200 MB for what a start maps besides
AUTO = ("--train.accumulation", "auto")


def stored(out) -> object:
    return yaml.safe_load((out / "config.yaml").read_text())["train"]["accumulation"]


def test_batch_that_does_not_fit_is_cut_where_that_changes_no_result(sightline, reference, tmp_path):
    out, flags = tmp_path / "run", (*HEAVY, "--model.norm", "none")
    ended = sightline.run(out, *flags, *AUTO, progress="plain", FAULT=LIMIT)
    assert ended.code == 0, ended
    assert "accumulation 2: 4 samples at once per device are the most of train.global_batch=8 that fit" in ended.stdout
    assert stored(out) == 2
    assert ended.bits == reference(*flags, "--train.accumulation", "2").bits
    again = sightline.run(out, *flags, *AUTO, "--train.max-steps", "3", progress="plain")  # now all would fit
    assert again.code == 0 and "measuring" not in again.stdout, again
    assert stored(out) == 2


def test_batch_norm_is_not_changed_without_a_word(sightline, tmp_path):
    out = tmp_path / "run"
    ended = sightline.run(out, *HEAVY, *AUTO, FAULT=LIMIT)
    assert ended.code == ended.exit_code_in_folder == 6, ended
    assert "4 samples at once per device are the most of train.global_batch=8" in ended.stderr
    assert "--train.accumulation 2 keeps the batch" in ended.stderr
    assert "the batch-norm statistics would come from 4 samples instead of 8" in ended.stderr
    typed = sightline.run(out, *HEAVY, "--train.accumulation", "2", FAULT=LIMIT)
    assert typed.code == 0 and stored(out) == 2, typed


def test_batch_that_fits_stays_whole(sightline, reference, tmp_path):
    ended = sightline.run(tmp_path / "run", *AUTO, progress="plain")
    assert ended.code == 0 and stored(ended.out) == 1, ended
    before, _, after = ended.stdout.partition("measuring in how many parts a batch fits into memory")
    assert "accumulation 1: all 8 samples of a device at once" in after and "accumulation 1" not in before
    assert ended.bits == reference().bits


def test_out_of_memory_says_how_to_find_what_fits(sightline, tmp_path):
    ended = sightline.run(tmp_path / "run", *HEAVY, FAULT=LIMIT)
    assert ended.code == ended.exit_code_in_folder == 6, ended
    assert "8 samples at once per device; --train.accumulation auto --run.override finds the most" in ended.stderr
    assert "batch-norm, where the network has it, then takes its statistics from fewer samples" in ended.stderr
    assert "allocate" in ended.stderr, "and what torch said"


def test_network_that_cannot_be_built_is_named_with_its_size(sightline, tmp_path):
    ended = sightline.run(tmp_path / "run", "--model.width", "400000", FAULT=LIMIT)
    assert ended.code == ended.exit_code_in_folder == 6, ended
    assert "ran out of memory (peak " in ended.stderr
    assert "while the network was built, before any batch" in ended.stderr
    parameters = 400_000 * (28 + 2 + 24 * 24 * 4) + 4
    assert f"{parameters:,} parameters, 921,600,000 of them in fc.weight (4 x 230400000)" in ended.stderr
    assert "accumulation" not in ended.stderr and "allocate" in ended.stderr


def test_network_that_takes_most_of_the_memory_of_a_step_is_named_instead_of_the_batch(sightline, tmp_path):
    flags = ("--model.width", "20000", "--optimizer.kind", "adam")  # four times 184 MB in a step
    ended = sightline.run(tmp_path / "run", *flags, FAULT="memory100@train:1")
    assert ended.code == ended.exit_code_in_folder == 6, ended
    assert "most of it is the network, which takes 0.7 GB with its gradients and optimizer" in ended.stderr
    assert "46,080,000 of them in fc.weight (4 x 11520000)" in ended.stderr and "accumulation" not in ended.stderr


def test_evaluation_that_does_not_fit_is_named_instead_of_the_step(sightline, tmp_path):
    """It computes the whole batch of training, however many parts that has."""
    ended = sightline.run(tmp_path / "run", "--train.accumulation", "2", FAULT="oom@eval:1")
    assert ended.code == ended.exit_code_in_folder == 6, ended
    assert "in an evaluation of 8 samples at once per device and 4 classes" in ended.stderr
    assert "use a smaller --train.global-batch with --run.override" in ended.stderr


def test_memory_that_ends_before_the_network_is_not_blamed_on_the_batch(sightline, tmp_path):
    ended = sightline.run(tmp_path / "run", FAULT="oom@open:1")
    assert ended.code == ended.exit_code_in_folder == 6, ended
    assert "before the network was built, so no smaller batch helps" in ended.stderr
    assert "accumulation" not in ended.stderr


def test_no_part_fits(sightline, tmp_path):
    ended = sightline.run(tmp_path / "run", "--model.bulk", "3000", *AUTO, FAULT=LIMIT)
    assert ended.code == 6 and "not even a step in parts of 1 per device fits" in ended.stderr, ended


@pytest.mark.parametrize("command", ["inspect", "benchmark"])
def test_only_train_measures_accumulation(command, capsys):
    from sightline import cli

    assert cli.main([command, "resnet50", *AUTO]) == 2
    assert f"--train.accumulation auto: only `train` measures a batch; give {command}" in capsys.readouterr().err
