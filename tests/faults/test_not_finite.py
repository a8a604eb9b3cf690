"""Steps whose loss or gradients are not finite, and devices without memory (B5: 30, 31, 32)."""

import json

import pytest

from sightline.data.loading.order import TrainOrder

EVERYTHING = ("--train.ema", "0.9", "--train.accumulation", "2", "--data.mixup", "0.2")
OFTEN = ("--run.checkpoint-every-steps", "2")
SAMPLE = 7
# Once in each of the two epochs of eight steps of eight images.
BAD_STEPS = [step for step in range(16) if SAMPLE in TrainOrder(64, 8, seed=0).batch(step)[1]]


def assert_finite(ended):
    tensors = ended.tensors()
    assert any(name.endswith("running_var") for name in tensors)
    assert [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())] == []


# nan goes through the network and its batch-norm statistics, infinite strikes the loss alone.
@pytest.mark.parametrize("fault", ["nan", pytest.param("infinite", marks=pytest.mark.slow)])
def test_stop_is_exit_5_with_the_samples_and_keeps_what_was_saved(sightline, tmp_path, fault):
    ended = sightline.run(tmp_path / "run", *EVERYTHING, *OFTEN, "--run.report=auto", FAULT=f"{fault}@sample:{SAMPLE}")
    assert ended.code == ended.exit_code_in_folder == 5, ended
    step = BAD_STEPS[0]
    assert f"not finite in step {step} (samples synthetic:train/" in ended.stderr
    assert "--run.on-nan skip" in ended.stderr
    assert [(line["step"], len(line["samples"])) for line in ended.events("bad_step")] == [(step, 8)]
    assert SAMPLE in ended.events("bad_step")[0]["samples"]
    assert ended.progress["step"] == step - step % 2
    assert_finite(ended)


def test_the_last_step_is_looked_at_too(sightline, tmp_path):
    """Steps are looked at one step late; tests/device does this where the device is late as well."""
    ended = sightline.run(tmp_path / "run", *OFTEN, FAULT="nan@train:16")
    assert ended.code == ended.exit_code_in_folder == 5, ended
    assert "not finite in step 15" in ended.stderr
    assert ended.progress["step"] == 14
    assert_finite(ended)


def test_weights_that_are_not_finite_replace_no_checkpoint(sightline, tmp_path):
    ended = sightline.run(tmp_path / "run", *OFTEN, FAULT="spoil@train:5")
    assert ended.code == ended.exit_code_in_folder == 5, ended
    assert "weights are not finite at step 6; nothing was saved over good checkpoints" in ended.stderr
    assert ended.progress["step"] == 4
    assert_finite(ended)


def test_skip_counts_and_continues(sightline, tmp_path):
    flags = (*EVERYTHING, "--run.on-nan", "skip")
    ended = sightline.run(tmp_path / "run", *flags, FAULT=f"nan@sample:{SAMPLE}")
    assert ended.code == 0, ended
    assert [line["step"] for line in ended.events("bad_step")] == BAD_STEPS
    assert ended.warnings.count(": skipped") == 2
    assert ended.progress["step"] == 16 and ended.progress["bad_steps"] == 2
    assert_finite(ended)
    assert all(abs(line["loss"]) < 1e3 for line in ended.events("train")), "and the log shows the steps that counted"
    # A step that is left out leaves no trace: the same as where it never came, whatever was wrong with it.
    other = sightline.run(tmp_path / "other", *flags, FAULT=f"infinite@sample:{SAMPLE}")
    assert other.bits == ended.bits


def test_skip_and_rewind_leave_out_the_same_step(sightline, tmp_path):
    fault = {"FAULT": f"nan@sample:{SAMPLE}"}
    skipped = sightline.run(tmp_path / "skip", *EVERYTHING, *OFTEN, "--run.on-nan", "skip", **fault)
    rewound = sightline.run(tmp_path / "rewind", *EVERYTHING, *OFTEN, "--run.on-nan", "rewind", **fault)
    assert rewound.code == 0, rewound
    assert rewound.warnings.count("leaving it out") == 2
    assert rewound.progress["avoid"] == BAD_STEPS and rewound.progress["bad_steps"] == 2
    assert [line["step"] for line in rewound.events("bad_step")] == BAD_STEPS
    assert_finite(rewound)
    assert rewound.bits == skipped.bits, "all later steps are the same, the average too"


def test_rewind_before_the_first_regular_save(sightline, tmp_path):
    """The state at the start is saved for this."""
    ended = sightline.run(tmp_path / "run", "--run.on-nan", "rewind", FAULT="nan@train:3")
    assert ended.code == 0, ended
    assert "back to step 0, leaving it out" in ended.warnings
    assert ended.progress["avoid"] == [2]


def test_rewind_when_resumed_from_another_run(sightline, halfway, tmp_path):
    halfway(tmp_path / "first")
    flags = ("--run.resume", str(tmp_path / "first"), "--run.on-nan", "rewind")
    ended = sightline.run(tmp_path / "second", *flags, FAULT="nan@train:2")
    assert ended.code == 0, ended
    assert "back to step 5, leaving it out" in ended.warnings


def test_rewound_run_resumes_to_equal_bits(sightline, tmp_path):
    """Skipped steps stay skipped, although the second start meets no fault."""
    flags = ("--run.on-nan", "rewind", *OFTEN)
    whole = sightline.run(tmp_path / "whole", *flags, FAULT="nan@train:6")
    assert whole.code == 0, whole
    out = tmp_path / "run"
    stopped = sightline.run(out, *flags, FAULT="nan@train:6,term@train:10")
    assert stopped.code == 143, stopped
    assert stopped.progress["avoid"] == [5]
    again = sightline.run(out, *flags)
    assert again.code == 0, again
    assert again.bits == whole.bits


@pytest.mark.parametrize("rule", ["rewind", pytest.param("skip", marks=pytest.mark.slow)])
def test_too_many_bad_steps_end_the_run_after_all(sightline, tmp_path, rule):
    fault = ",".join(f"nan@train:{number}" for number in range(3, 40))
    flags = ("--run.on-nan", rule, "--run.max-bad-steps", "4", *OFTEN)
    ended = sightline.run(tmp_path / "run", *flags, FAULT=fault)
    assert ended.code == ended.exit_code_in_folder == 5, ended
    assert "5 such steps so far" in ended.stderr
    assert_finite(ended)


def test_a_rate_that_explodes_is_noticed(sightline, tmp_path):
    """No injected fault: weights that grow until the loss overflows."""
    ended = sightline.run(tmp_path / "run", "--optimizer.lr", "1e9", "--schedule.warmup-epochs", "0")
    assert ended.code == ended.exit_code_in_folder == 5, ended
    assert "not finite" in ended.stderr and "--optimizer.lr" in ended.stderr


def test_fp16_overflow_is_skipped_and_halves_the_scale(sightline, tmp_path):
    """The loss is finite, its gradients in half precision are not: a matter of the scale, not of the recipe."""
    flags = ("--train.precision", "fp16", "--train.ema", "0.9", "--run.checkpoint-every-steps", "1", "--run.keep", "16")
    ended = sightline.run(tmp_path / "run", *flags, FAULT="huge@train:9,huge@train:13")
    assert ended.code == 0, ended
    assert ended.progress["bad_steps"] == 0 and not ended.events("bad_step"), "and so does not count as one"
    skipped = set()
    for step in range(2, 17):
        before, after = scale_at(ended.out, step - 1), scale_at(ended.out, step)
        changed = {
            file
            for file in ("model", "optimizer", "ema")
            if bytes_of(ended.out, step - 1, file) != bytes_of(ended.out, step, file)
        }
        if after == before / 2:
            skipped.add(step)
            assert changed == set(), f"what changed in step {step}, which was skipped"
        else:
            assert after == before and changed == {"model", "optimizer", "ema"}
    assert {9, 13} <= skipped and len(skipped) < 10
    assert_finite(ended)
    rates = [line["lr"] for line in ended.events("train")]
    assert rates == sorted(rates, reverse=True), "the schedule goes by steps, skipped or not"


def scale_at(out, step):
    from safetensors.torch import load_file

    return float(load_file(out / "checkpoints" / f"ckpt-{step:08d}" / "loss_scale.safetensors")["scale"])


def bytes_of(out, step, file):
    return (out / "checkpoints" / f"ckpt-{step:08d}" / f"{file}.safetensors").read_bytes()


@pytest.mark.parametrize("number", [6, pytest.param(1, marks=pytest.mark.slow)], ids=["later", "first step"])
def test_out_of_memory_is_exit_6_with_advice(sightline, reference, tmp_path, number):
    out = tmp_path / "run"
    ended = sightline.run(out, *OFTEN, FAULT=f"oom@train:{number}")
    assert ended.code == 6, ended
    assert "ran out of memory (peak " in ended.stderr
    assert "8 samples at once" in ended.stderr and "--train.accumulation 2" in ended.stderr
    assert "tried to allocate 20.00 GiB" in ended.stderr, "and what torch said"
    assert ended.exit_code_in_folder == 6
    assert "ran out of memory" in json.loads((out / "exit.json").read_text())["reason"]
    again = sightline.run(out, *OFTEN)
    assert again.code == 0, again
    assert again.bits == reference().bits


def test_out_of_memory_in_evaluation(sightline, tmp_path):
    ended = sightline.run(tmp_path / "run", *OFTEN, FAULT="oom@eval:1")
    assert ended.code == ended.exit_code_in_folder == 6, ended
    assert ended.progress["step"] == 8
