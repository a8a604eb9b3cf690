"""Several ranks as real processes over gloo: exact sums and metrics, disjoint samples, the training of one process."""

import dataclasses
import json
import os
import runpy
import signal
from pathlib import Path

import pytest
import torch
import warm
from safetensors.torch import load_file

from sightline import api
from sightline.hardware.world import World

HERE = Path(__file__).resolve().parent
COMMANDS = runpy.run_path(str(HERE / "started.py"))
started, finished, torchrun = (COMMANDS[name] for name in ("started", "finished", "torchrun"))
events, wait_for_step, LIMIT_S = (COMMANDS[name] for name in ("events", "wait_for_step", "LIMIT_S"))
RANKS_FILE = HERE / "ranks.py"
ALONE = runpy.run_path(str(RANKS_FILE))  # the same functions, for one rank in this process

# Softmax regression: no batch-norm, so that splitting a batch changes nothing but the order of a sum.
RECIPE = '''
"""Softmax regression on pixels."""

from dataclasses import dataclass

from torch import nn

from sightline.config import Recipe, TrainConfig
from sightline.data.classification import ClassificationData
from sightline.parts import DataSpec, ModelConfig
from sightline.tasks.classification import Classification
from sightline.train.optimizers import OptimizerConfig
from sightline.train.schedules import ScheduleConfig


@dataclass(frozen=True)
class Regression(ModelConfig):
    def build(self, spec: DataSpec) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * spec.size[0] * spec.size[1], len(spec.classes)))


def recipe() -> Recipe:
    return Recipe(
        name="regression",
        model=Regression(),
        data=ClassificationData(size=12, eval_resize=12, eval_size=12),
        task=Classification(label_smoothing=0.1),
        optimizer=OptimizerConfig(lr=0.01, weight_decay=1e-3),
        schedule=ScheduleConfig(kind="constant"),
        train=TrainConfig(epochs=2, global_batch=8, precision="fp32", clip=1.0, ema=0.9),
    )
'''
# 244 training images make 30 steps and a rest; 30 for evaluation make 3 batches and a rest, 4 and 2 on two ranks.
FLAGS = [
    "--data.path=synthetic:classes=4,samples=244,size=16",
    "--run.workers=0",
    "--run.report=off",
    "--run.device=cpu",
    "--run.threads=1",
    "--run.log-every-steps=1",
    "--run.keep=1000",
]


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "regression.py"
    path.write_text(RECIPE)
    return path


def train_alone(recipe_file: Path, out: Path, *flags: str):
    return api.train(*api.load(str(recipe_file), [*FLAGS, f"--run.out={out}", *flags]))


# One start on two ranks answers all of these


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """`alone`: the scores of a run on one rank; `two`: what each of two ranks saw, that run's scores among it."""
    folder = warm.once(tmp_path_factory, "ranks", ask)
    return json.loads((folder / "answers.json").read_text())


def ask(folder: Path) -> None:
    """13 evaluation images, which two ranks cannot share evenly."""
    run = folder / "run"
    tiny = ["--data.size=24", "--data.eval-resize=24", "--data.eval-size=24", "--model.width=4", "--train.epochs=1"]
    data = ["--data.path=synthetic:classes=10,samples=104,size=24", "--train.global-batch=8", "--train.precision=fp32"]
    api.train(*api.load("demo_classification", [*tiny, *data, *FLAGS[1:], f"--run.out={run}"]))
    alone = dataclasses.asdict(api.evaluate(str(run), FLAGS[1:4]))
    warm.run(str(RANKS_FILE), folder, 2)
    two = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    found = {"alone": alone, "two": two, "evaluations": len(events(run, "evaluate"))}
    (folder / "answers.json").write_text(json.dumps(found))


@pytest.fixture
def two(answers: dict) -> list[dict]:
    return answers["two"]


def test_collectives(two: list[dict]):
    for rank, seen in enumerate(each["collectives"] for each in two):
        assert seen == {
            "rank": rank,
            "sum": [3.0, 30.0],
            "gather": [[1.0, 10.0], [2.0, 20.0]],
            "average": [[1.5, 15.0], [1.5] * 8],
            "layout": True,
            "copied": [[1.0, 10.0], [5]],
            "max": [15],
            "texts": ["ü", "üüüü"],
        }


def test_ranks_of_one_host_cannot_be_reached_from_another(two: list[dict]):
    """Neither the store of rank 0, which no agent of torchrun holds here, nor gloo."""
    assert [each["listening"] for each in two] == [["127.0.0.1"], ["127.0.0.1"]]


@pytest.mark.parametrize(("asked", "classes"), [("metric", 12), ("many_classes", ALONE["MANY"])])
def test_merged_metrics_are_those_of_one_rank(two: list[dict], asked: str, classes: int):
    alone = ALONE["metric"](World(), classes)
    for seen in (each[asked] for each in two):
        assert seen["tables"] == alone["tables"] and seen["worst"] == alone["worst"]
        loss, expected = seen["values"].pop("loss"), dict(alone["values"])
        assert loss == pytest.approx(expected.pop("loss"), rel=1e-12)
        assert seen["values"] == expected and expected["samples"] == 101


def test_merged_scores_of_several_labels_are_those_of_one_rank(two: list[dict]):
    alone = ALONE["several_labels"](World())
    for seen in (each["several_labels"] for each in two):
        assert seen["tables"] == alone["tables"] and seen["worst"] == alone["worst"]
        assert seen["values"] == pytest.approx(alone["values"], rel=1e-12) and seen["values"]["samples"] == 101


def test_batch_norm_statistics_follow_their_rule(two: list[dict]):
    assert [each["batch_norm"] for each in two] == [
        {"averaged": [1.5], "rank0": [1.0], "local": [1.0]},
        {"averaged": [1.5], "rank0": [1.0], "local": [2.0]},
    ]


@pytest.mark.parametrize("last", ["drop", "pad", "wrap"])
def test_ranks_share_every_batch_of_one_rank(two: list[dict], last: str):
    alone = ALONE["indices"](World())[last]
    for step, batch in enumerate(alone):
        first, second = (each["indices"][last][step] for each in two)
        assert first + second == batch
        # Within an epoch nothing comes twice; padding repeats its start, and a wrapped batch may span two.
        assert last != "drop" or not set(first) & set(second)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_ranks_agree_on_a_step_that_was_not_finite_on_one_of_them(two: list[dict], precision: str):
    """Else one rank would stop or rewind while the others wait for it."""
    first, second = (each["bad_steps"][precision] for each in two)
    assert first["weights"] == second["weights"]
    assert (first["bad"], first["last"]) == (second["bad"], second["last"]) == (1, 1)
    assert first["totals"] == second["totals"] and first["totals"]["samples"] == 2 * ALONE["BATCH"]


def test_every_rank_evaluates_everything_and_rank_0_is_reported(two: list[dict]):
    """Each with its own batch-norm statistics, as the original scripts do; what scores decide is decided alike."""
    alone = ALONE["evaluations"](World())  # the statistics of rank 0
    assert alone["full"] == alone["sharded"]
    everything = list(range(13))
    first, second = (each["evaluations"] for each in two)
    assert first["full"]["given"] == second["full"]["given"] == alone["full"]["given"] == everything
    assert first["full"]["values"] == second["full"]["values"]
    assert first["full"]["values"] == pytest.approx(alone["full"]["values"], rel=1e-5)
    # Shares are disjoint, and the counts of two different networks are added up.
    assert sorted(first["sharded"]["given"] + second["sharded"]["given"]) == everything
    assert first["sharded"]["values"] == second["sharded"]["values"]
    assert first["sharded"]["values"]["loss"] != pytest.approx(first["full"]["values"]["loss"], rel=1e-3)


def test_two_ranks_train_a_head_as_one(two: list[dict]):
    alone = ALONE["head_only"](World())
    statistics = ["1.num_batches_tracked", "1.running_mean", "1.running_var"]
    assert alone["changed"] == [*statistics, "3.bias", "3.weight"]
    first, second = (each["head_only"] for each in two)
    assert first["changed"] == second["changed"] == alone["changed"]
    # Each rank normalises with the statistics of its own images, so the weights are near to those of one.
    assert first["head"] == second["head"] == pytest.approx(alone["head"], abs=0.1)


def test_a_step_compiled_in_mid_run_changes_no_state_of_any_rank(two: list[dict]):
    for seen in (each["compiled_in_mid_run"] for each in two):
        assert seen["1"] == seen["-1"]
        assert seen["1"]["totals"]["steps"] == 8  # of both ranks
    first, second = (each["compiled_in_mid_run"]["1"]["tensors"]["1.running_mean"] for each in two)
    assert first != second  # each rank keeps its own statistics


def test_evaluate_on_two_ranks_gives_the_scores_of_one(answers: dict):
    alone = answers["alone"]
    assert alone["values"]["samples"] == 13
    for seen in (each["evaluate"] for each in answers["two"]):
        assert seen["tables"] == alone["tables"]
        assert [row["index"] for row in seen["worst"]] == [row["index"] for row in alone["worst"]]
        assert {k: v for k, v in seen["values"].items() if k != "loss"} == {
            k: v for k, v in alone["values"].items() if k != "loss"
        }
        # Batches of other sizes take other kernels, so the last bits of a loss may differ.
        assert seen["values"]["loss"] == pytest.approx(alone["values"]["loss"], rel=1e-5)
    assert answers["evaluations"] == 3  # one of training, one of each evaluation: only rank 0 writes


# Training


def assert_same_course(run: Path, alone: Path, steps: int) -> None:
    """Compare losses and gradient norms of the first `steps` steps; only the order of sums differs between them."""
    ours, theirs = (events(folder, "train")[:steps] for folder in (run, alone))
    assert [e["step"] for e in ours] == [e["step"] for e in theirs] == list(range(1, steps + 1))
    for key in ("loss", "top1", "grad_norm", "lr"):
        assert [e[key] for e in ours] == pytest.approx([e[key] for e in theirs], rel=1e-4, abs=1e-6), key


def test_two_ranks_train_as_one_and_a_stopped_run_resumes_with_another_number(recipe_file: Path, tmp_path: Path):
    """SIGTERM to all processes of the launcher: all ranks leave in the same step, and rank 0 saves once."""
    run, alone = tmp_path / "two", tmp_path / "one"
    command = ["train", recipe_file, *FLAGS, f"--run.out={run}", "--train.epochs=200"]
    process = warm.start("torchrun", "--standalone", "--nproc-per-node=2", "sightline", *command)
    process.until(lambda: any(e["step"] >= 40 for e in events(run, "train")))
    os.killpg(process.pid, signal.SIGTERM)
    code, out, err = process.wait()
    assert code != 0
    told = json.loads((run / "exit.json").read_text())
    assert told["code"] == 143, out
    stopped = events(run, "train")[-1]["step"]
    assert err.count(f"SIGTERM (signal 15); saved at step {stopped}; the same command resumes from there") == 1
    saved = [e["step"] for e in events(run, "checkpoint")]
    assert saved == [*range(30, stopped, 30), stopped]  # one at the end of each epoch, and one
    assert "batch 8 (4 on each of 2)" in out and out.count("training and") == 1
    assert "FutureWarning" not in out

    # On one rank, to the end of the epoch after the one it was stopped in.
    epochs = stopped // 30 + 2
    flags = [f"--train.epochs={epochs}"]
    scores = train_alone(recipe_file, run, *flags, "--run.override")
    expected = train_alone(recipe_file, alone, *flags)
    assert events(run, "resume")[0]["step"] == stopped
    assert "ranks changed from 2 to 1" in " ".join(e["text"] for e in events(run, "warning"))
    assert_same_course(run, alone, epochs * 30)
    assert scores.values == pytest.approx(expected.values, rel=1e-4)
    name = f"ckpt-{epochs * 30:08d}"
    for file in ("model", "ema", "optimizer"):
        ours, theirs = (load_file(folder / "checkpoints" / name / f"{file}.safetensors") for folder in (run, alone))
        for key in theirs:
            torch.testing.assert_close(ours[key], theirs[key], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_evaluation_within_training_on_two_ranks_is_that_of_one(recipe_file: Path, tmp_path: Path):
    """Also of a checkpoint that two ranks wrote: 30 images, of which the last batch is uneven."""
    run = tmp_path / "run"
    finished(torchrun(2, "train", recipe_file, *FLAGS, f"--run.out={run}", "--train.epochs=1"))
    two = json.loads((run / "scores.json").read_text())
    one = api.evaluate(str(run), FLAGS[1:4], recipe_file=str(recipe_file))
    assert one.values == pytest.approx(two["values"], rel=1e-6) and one.values["samples"] == 30
    assert one.tables == two["tables"]


@pytest.mark.slow
def test_two_ranks_with_statistics_of_their_own_end_together_at_the_target(tmp_path: Path):
    """Each evaluates everything with its own statistics; without rank 0's word one could stop and the other wait."""
    flags = ["--model.width=4", "--data.path=synthetic:classes=4,samples=64,size=24", "--data.classes=4"]
    flags += ["--data.size=24", "--data.eval-resize=24", "--data.eval-size=24", "--train.global-batch=8"]
    flags += ["--train.precision=fp32", *FLAGS[1:], "--train.epochs=30", "--train.target-score=0.3"]
    flags += ["--train.eval-shards=full", "--train.bn-eval=local", f"--run.out={tmp_path}", "--run.warmup-steps=1"]
    finished(torchrun(2, "train", "demo_classification", *flags))
    scores = [e["top1"] for e in events(tmp_path, "evaluate")]
    assert scores[-1] >= 0.3 and all(score < 0.3 for score in scores[:-1]) and len(scores) < 30
    assert events(tmp_path, "evaluate")[-1]["samples"] == 8
    out = finished(torchrun(2, "train", "demo_classification", *flags))
    assert "is finished, top1" in out and len(events(tmp_path, "start")) == 1


@pytest.mark.slow
def test_two_ranks_stopped_and_resumed_end_with_equal_weights(tmp_path: Path):
    """With batch-norm, whose statistics the ranks share before every save."""
    flags = ["--model.width=4", "--data.path=synthetic:classes=10,samples=244,size=24", "--data.size=24"]
    flags += ["--data.eval-resize=24", "--data.eval-size=24", "--train.global-batch=8", "--train.precision=fp32"]
    flags += [*FLAGS[1:], "--train.epochs=4", "--train.ema=0.9"]
    whole, run = tmp_path / "whole", tmp_path / "run"
    finished(torchrun(2, "train", "demo_classification", *flags, f"--run.out={whole}"))
    command = torchrun(2, "train", "demo_classification", *flags, f"--run.out={run}")
    with started(command) as process:
        wait_for_step(run, 20, process)
        os.killpg(process.pid, signal.SIGTERM)
        process.communicate(timeout=LIMIT_S)
    stopped = events(run, "checkpoint")[-1]["step"]
    assert stopped < 120
    finished(command)
    assert events(run, "resume")[0]["step"] == stopped
    name = "ckpt-00000120"
    for file in ("model", "ema", "optimizer"):
        ours, theirs = (load_file(folder / "checkpoints" / name / f"{file}.safetensors") for folder in (run, whole))
        for key in theirs:
            # Statistics were averaged once more, at the stop; nothing in training reads them.
            tolerance = 1e-5 if "running_" in key else 0.0
            torch.testing.assert_close(ours[key], theirs[key], rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "code"),
    [(["--train.global-batch=9"], 2), (["--data.path=DIR"], 2), (["--optimizer.lr=1e38", "--train.clip=0"], 5)],
    ids=str,
)
def test_exit_json_has_the_code_the_launcher_hides(recipe_file: Path, tmp_path: Path, flags: list[str], code: int):
    run = tmp_path / "run"
    with started(torchrun(2, "train", recipe_file, *FLAGS, f"--run.out={run}", *flags)) as process:
        out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode != 0
    assert json.loads((run / "exit.json").read_text())["code"] == code, out


@pytest.mark.slow
def test_three_ranks_and_workers(recipe_file: Path, tmp_path: Path):
    """A batch of 9 over 3 ranks with a loader process each, against one rank without."""
    run, alone = tmp_path / "three", tmp_path / "one"
    flags = ["--train.global-batch=9", "--train.last-batch=wrap"]
    finished(torchrun(3, "train", recipe_file, *FLAGS, *flags, f"--run.out={run}", "--run.workers=1"))
    train_alone(recipe_file, alone, *flags)
    assert_same_course(run, alone, 54)
