"""Decisions of the first start of a run, precision and batch, which later starts keep; and its warnings."""

import json
from hashlib import sha256
from pathlib import Path

import warm
import yaml

from sightline import config
from sightline.hardware import devices
from sightline.train import start

EMULATES = {"ONEDNN_MAX_CPU_ISA": "AVX2"}  # a CPU that could only emulate bf16
TINY = [
    "--data.path=synthetic:classes=10,samples=48,size=28",
    "--data.classes=10",
    "--data.size=24",
    "--data.eval-resize=24",
    "--data.eval-size=24",
    "--run.workers=0",
    "--run.report=off",
    "--run.device=cpu",
    "--run.threads=1",
    "--train.epochs=2",
]
RESNET = ["resnet50", *TINY, "--model.arch=shufflenet_v2_x0_5", "--train.global-batch=24", "--schedule.kind=constant"]
DEMO = ["demo_classification", *TINY, "--model.width=4", "--train.precision=fp32", "--optimizer.lr-for-batch=64"]


def train(out: Path, *words: str, **environ: str) -> warm.Ended:
    return warm.start("sightline", "train", *words, f"--run.out={out}", environ=environ).wait()


def settings(out: Path) -> dict:
    """The train fields, which config.yaml and the newest checkpoint hold alike."""
    found = yaml.safe_load((out / "config.yaml").read_text())["train"]
    newest = max((out / "checkpoints").glob("ckpt-????????"))
    assert json.loads((newest / "state.json").read_text())["recipe"]["train"] == found
    return found


def bits(out: Path) -> list[str]:
    newest = max((out / "checkpoints").glob("ckpt-????????"))
    return [sha256(file.read_bytes()).hexdigest() for file in sorted(newest.glob("*.safetensors"))]


def about(text: str, said: warm.Ended) -> list[str]:
    return [line for line in said.stdout.splitlines() if text in line]


def test_a_recipe_falls_back_where_its_precision_would_be_emulated_and_the_run_keeps_that(tmp_path: Path):
    first = train(tmp_path, *RESNET, "--train.max-steps=1", **EMULATES)
    assert first.code == 0, first
    assert about("bf16", first) == [
        "precision fp32 instead of bf16, which would only be emulated and slower: ONEDNN_MAX_CPU_ISA=AVX2 rules it "
        "out; --train.precision bf16 forces it"
    ]
    assert settings(tmp_path)["precision"] == "fp32"
    elsewhere = train(tmp_path, *RESNET, "--train.max-steps=2")  # on this machine, whatever it can do
    assert elsewhere.code == 0 and "resuming from step 1" in elsewhere.stdout, elsewhere
    kept = ["precision fp32, in which the run was started; a new run would use bf16 here"]
    assert about("bf16", elsewhere) == ([] if devices.select("cpu").no_bf16_because() else kept)
    assert settings(tmp_path)["precision"] == "fp32"
    file = tmp_path / "mine.py"
    file.write_text("from sightline.recipes.resnet50 import recipe as recipe\n")
    mine = train(tmp_path / "mine", str(file), *RESNET[1:], "--train.max-steps=1", **EMULATES)
    assert mine.code == 0 and settings(tmp_path / "mine")["precision"] == "fp32", mine
    refused = train(tmp_path, *RESNET, "--train.precision=bf16")
    assert refused.code == 2 and "\n  train.precision: fp32 -> bf16\n" in refused.stderr


def test_a_precision_that_the_user_types_is_honoured_with_a_warning_and_kept(tmp_path: Path):
    typed = train(tmp_path / "typed", *RESNET, "--train.max-steps=1", "--train.precision=bf16", **EMULATES)
    assert typed.code == 0 and settings(tmp_path / "typed")["precision"] == "bf16", typed
    (line,) = about("warning: bf16 is only emulated", typed)
    assert line.endswith("ONEDNN_MAX_CPU_ISA=AVX2 rules it out; --train.precision fp32 is faster")
    resumed = train(tmp_path / "typed", *RESNET, "--train.max-steps=2", **EMULATES)
    assert resumed.code == 0 and settings(tmp_path / "typed")["precision"] == "bf16", resumed
    (line,) = about("warning: bf16 is only emulated", resumed)
    assert line.endswith("the run was started in it and keeps it")

    file = tmp_path / "mine.yaml"
    file.write_text("recipe: resnet50\ntrain: {precision: bf16, max_steps: 1}\n")
    written = train(tmp_path / "written", "--config", str(file), *RESNET[1:], **EMULATES)
    assert written.code == 0 and about("warning: bf16 is only emulated", written), written
    assert settings(tmp_path / "written")["precision"] == "bf16"


def test_a_measured_batch_is_kept_and_gives_the_bits_of_the_same_number_typed(tmp_path: Path):
    """24 samples leave only 2 to try, so that no timing decides."""
    small = [*DEMO, "--data.path=synthetic:classes=10,samples=24,size=28"]
    measured = train(tmp_path / "auto", *small, "--train.global-batch=auto")
    assert measured.code == 0, measured
    line = about("img/s", measured)[0]
    assert line.startswith("batch 2: a larger one leaves fewer than 10 steps in an epoch of 24 samples; ")
    assert f"base rate {0.2 * 2 / 64:g} (0.2 per 64 samples)," in measured.stdout
    assert settings(tmp_path / "auto")["global_batch"] == 2
    typed = train(tmp_path / "typed", *small, "--train.global-batch=2")
    assert bits(tmp_path / "auto") == bits(tmp_path / "typed"), typed

    again = train(tmp_path / "auto", *small, "--batch-size=auto", "--train.epochs=3")
    assert again.code == 0 and not about("leaves fewer", again), again
    assert settings(tmp_path / "auto")["global_batch"] == 2
    recipe, _ = config.load(
        "demo_classification", ["--train.global-batch=auto"]
    )  # as other folds take that of the first
    assert start.with_batch_of(recipe, config.Run(out=str(tmp_path / "auto"))).train.global_batch == 2
    evaluated = warm.start("sightline", "evaluate", tmp_path / "auto", "--run.device=cpu", "--run.workers=0").wait()
    assert evaluated.code == 0 and "top1" in evaluated.stdout, evaluated
    other = train(tmp_path / "auto", *small, "--train.global-batch=8", "--train.epochs=3")
    assert other.code == 2 and "train.global_batch: 2 -> 8" in other.stderr


def test_running_out_of_memory_while_measuring_ends_the_search_and_not_the_run(tmp_path: Path):
    """The first loss, of two samples, fails; one sample fits."""
    recipe = str(Path(__file__).parents[1] / "faults" / "faulty.py")
    flags = ["--run.workers=0", "--run.report=off", "--run.device=cpu", "--run.threads=1", "--train.global-batch=auto"]
    said = train(tmp_path, recipe, *flags, "--train.max-steps=3", FAULT="oom@train:1")
    assert said.code == 0, said
    assert about("batch 1: the largest that fits in 40 % of", said), said
    assert settings(tmp_path)["global_batch"] == 1
    said = train(tmp_path / "none", recipe, *flags, FAULT="oom@train:1,oom@train:2")
    assert said.code == 6 and "not even a batch of 1 per device fits in 40 % of" in said.stderr, said


def test_only_train_measures_a_batch(sightline):
    for command in ("inspect", "benchmark"):
        said = sightline(command, "resnet50", "--train.global-batch", "auto")
        assert said.code == 2 and f"only `train` measures a batch; give {command} a number" in said.err
