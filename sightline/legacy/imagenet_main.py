"""imagenet_main.py of the ResNeXt-101 README (TensorFlow's estimator script)."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import replace

from sightline.errors import UsageError
from sightline.legacy import imagenet_data, oplists
from sightline.legacy.cleaning import clean
from sightline.legacy.imagenet_data import BOTH, DATA_DIR, GRAPH, SHARED, USE_HOROVOD
from sightline.legacy.start import Row, Start
from sightline.legacy.summaries import OURS, board_points, log_lines
from sightline.legacy.table import (
    EVALUATE,
    TRAIN,
    Act,
    Field,
    Flag,
    Given,
    Mode,
    Notice,
    Refused,
    Script,
    counted_from_1,
    nothing,
    plain,
)

VALIDATION_IMAGES = 50_000
HOOKS = {
    name.lower(): name
    for name in ("LoggingTensorHook", "ProfilerHook", "ExamplesPerSecondHook", "LoggingMetricHook", "StepCounterHook")
}
LARS = Notice("only read with --enable_lars")


def _arch(given: Given) -> Sequence[str]:
    size, version = given["resnet_size"], given["resnet_version"]
    if size not in (18, 34, 50, 101, 152, 200):
        raise UsageError(f"--resnet_size {size}: the script knows 18, 34, 50, 101, 152 and 200")
    if version not in ("1", "2"):
        raise UsageError(f"--resnet_version {version}: the script knows 1 and 2")
    if given["model_type"] == "resnet":
        return ["--model.arch", f"resnet{size}{'v2' if version == '2' else ''}_tf1"]
    if size < 50:
        raise UsageError(f"--model_type resnext --resnet_size {size}: its blocks need 50 layers or more")
    return [] if (size, version) == (101, "1") else ["--model.arch", f"resnext{size}{'v2' * (version == '2')}_32x4d_tf"]


def _schedule(given: Given) -> Sequence[str]:
    warmup = 0.0 if given["disable_warmup"] else given["warmup_epochs"]
    words = [] if warmup == 8 else ["--schedule.warmup-epochs", plain(warmup)]
    if given["use_cosine_lr"]:
        return words
    lr = 0.1 if given["fine_tune"] or (given["use_horovod"] and given.ranks > 16) else 0.128
    steps = ["--schedule.kind", "step", "--schedule.drop-epochs", "30", "60", "80", "90", "--schedule.drop-after"]
    return [*steps, *words, "--optimizer.lr", plain(lr)]


def _checkpoints(given: Given) -> Sequence[str]:
    if given["disable_checkpoints"]:
        return ["--run.checkpoint-every-epochs", str(max(1, given["train_epochs"]))]
    steps = given["save_checkpoint_steps"]
    return ["--run.keep", "10", "--run.checkpoint-initial"] + (
        ["--run.checkpoint-every-steps", str(steps)] if steps else []
    )


def _hooks(given: Given) -> Sequence[str]:
    """Write the field for the profiler hook; the numbers of the other hooks are in the log anyway."""
    asked = [name.strip().lower() for name in given["hooks"].split(",")]
    if unknown := [name for name in asked if name not in HOOKS]:
        raise UsageError(f"--hooks {', '.join(unknown)}: the script knows {', '.join(HOOKS.values())}")
    return ["--run.profile", counted_from_1(given["profile_steps"])] if "profilerhook" in asked else []


def _max_eval_steps(given: Given) -> Sequence[str]:
    """Write a limit for evaluation if it does not cover the set, as the default does; alone, with the batch it counts
    in: a run may have been trained with another."""
    steps = given["max_eval_steps"]
    if steps is None or steps * given["batch_size"] >= VALIDATION_IMAGES:
        return []
    batch = imagenet_data.batch(given) if given["eval_only"] else []
    return [*batch, "--train.eval-max-steps", str(steps)]


def _max_cpus(given: Given) -> Sequence[str]:
    return ["--run.max-cpus", str(given["max_cpus"])] if "max_cpus" in given.named else []


def _mode(given: Given) -> Mode:
    folder = imagenet_data.run_folder(given)
    looked, exported = _export(given, folder)
    if given["eval_only"]:
        return Mode(EVALUATE, (folder, "--checkpoint", "latest"), before=looked, after=exported)
    before = (clean(given["model_dir"]), *looked) if given["clean"] else looked
    notes: list[Row] = list(oplists.tensorflow_lists(given).rows)
    if given["use_horovod"]:
        notes.append(("worker_N folders", folder, "rank 0 writes for all workers"))
    return Mode(TRAIN, ("resnext101",), recipe="resnext101", before=before, after=exported, notes=tuple(notes))


def _export(given: Given, folder: str) -> tuple[tuple[Act, ...], tuple[Act | tuple[str, ...], ...]]:
    """Return what is done before and after the command for --export_dir; each export has a folder of its own there."""
    if not given["export_dir"]:
        return (), ()
    out = f"{given.folder('export_dir')}/{int(time.time())}/model.onnx"
    words = ("export", folder, "--checkpoint", "latest", "--format", "onnx", "--out", out)
    if given.start.is_rank or given.start.hosts:
        return (), (Act(f"to export, run in one process where {folder} lies: {shlex.join(['sightline', *words])}"),)
    return (Act("look for the packages that export as ONNX needs", require_onnx),), (words,)


def require_onnx() -> None:
    """Fail before a training of days, not after it."""
    from sightline.export import formats

    formats.find("onnx").check_installed()


def _settle(given: Given) -> Start:
    start = imagenet_data.settle_horovod(given)
    return start if start.ranks else replace(start, ranks=1)


OWN = {
    "data_dir": replace(DATA_DIR, default="/data/tensorflow/imagenet/tf_records/"),
    "use_horovod": replace(USE_HOROVOD, spellings="--use_horovod -hvd"),
}
FLAGS = (
    *(OWN.get(flag.key, flag) for flag in SHARED),
    Flag("-rs --resnet_size", "int", 101, Field("--model.arch", effect="18, 34, 50, 101, 152 or 200", make=_arch)),
    Flag(
        "--model_type",
        "text",
        "resnext",
        Field("--model.arch", effect="resnext101_32x4d_tf; resnet: resnet101_tf1", make=nothing),
        ("resnet", "resnext"),
    ),
    Flag(
        "-rv --resnet_version",
        "text",
        "1",
        Field("--model.arch", effect="2: resnet101v2_tf1, resnext101v2_32x4d_tf", make=nothing),
    ),
    Flag(
        "-bs --batch_size",
        "int",
        32,
        Field(
            "--train.global-batch",
            effect="of one worker there, of all here; evaluate: only with --max_eval_steps",
            make=imagenet_data.batch,
            read_on=(EVALUATE,),
        ),
        least=1,
    ),
    Flag("-te --train_epochs", "int", 10, Field("--train.epochs", 90)),
    Flag(
        "-md --model_dir",
        "text",
        "/tmp/resnet",
        Field(
            "--run.out", effect="worker_0 in it under Horovod, as there", make=imagenet_data.out, read_on=(EVALUATE,)
        ),
    ),
    Flag("--clean", "bool", False, Field("deletes --model_dir", effect="only if it is a run", make=nothing)),
    Flag(
        "-mts --max_train_steps",
        "int",
        None,
        Field("--train.max-steps", effect="the schedule stays that of all epochs"),
    ),
    Flag(
        "-mes --max_eval_steps",
        "int",
        None,
        Field("--train.eval-max-steps", effect="where they do not cover the set", make=_max_eval_steps, on=BOTH),
        least=1,
    ),
    Flag("-mc --max_cpus", "int", 16, Field("--run.max-cpus", effect="off if not given", make=_max_cpus)),
    Flag(
        "--use_cosine_lr",
        "bool",
        True,
        Field("--schedule.kind", effect="without: drops at 30, 60, 80 and 90 from 0.128 per 256", make=_schedule),
    ),
    Flag(
        "--warmup_epochs", "float", 8.0, Field("--schedule.warmup-epochs", effect="see --use_cosine_lr", make=nothing)
    ),
    Flag(
        "--disable_warmup",
        "bool",
        False,
        Field("--schedule.warmup-epochs 0", effect="the original read it and ignored it; here it acts", make=nothing),
    ),
    Flag("--momentum", "float", 0.875, Field("--optimizer.momentum", 0.875)),
    Flag("--weight_decay", "float", 6.103515625e-05, Field("--optimizer.weight-decay", 1 / 16384)),
    Flag("--label_smoothing", "float", 0.1, Field("--task.label-smoothing", 0.1)),
    Flag(
        "--enable_lars",
        "bool",
        False,
        Refused("the README says that LARS was removed; use demo_resnet_keras.py --optimizer LARS, or resnet50_lars"),
    ),
    Flag("--start_learning_rate", "float", 9.5, LARS),
    Flag("--epochs_for_lars", "int", 38, LARS),
    Flag(
        "--save_checkpoint_steps",
        "int",
        None,
        Field("--run.checkpoint-every-steps", effect="besides those when epochs end", make=_checkpoints),
    ),
    Flag(
        "--disable_checkpoints",
        "bool",
        False,
        Field("--run.checkpoint-every-epochs", effect="the last and the best are written all the same", make=nothing),
    ),
    Flag(
        "--display_steps",
        "int",
        100,
        Field(
            "--run.log-every-steps",
            OURS,
            effect="more lines if --save_summary_steps N is given and not a multiple of it",
            make=lambda given: log_lines(given, "display_steps"),
        ),
        least=1,
    ),
    Flag(
        "--save_summary_steps",
        "int",
        100,
        Field(
            "--run.tensorboard --run.tensorboard-every-steps",
            effect="always on there; a point every N steps, if not given at log lines only",
            make=lambda given: board_points(given, "display_steps"),
        ),
        least=1,
    ),
    Flag("--log_steps", "int", 100, Notice("speed is in every log line: --display_steps")),
    Flag(
        "--hooks",
        "text",
        "LoggingTensorHook",
        Field("--run.profile", effect="ProfilerHook; the others' numbers are in the log", make=_hooks),
    ),
    Flag(
        "--profile_steps",
        "text",
        "7,10",
        Field(
            "--run.profile",
            effect="with --hooks ProfilerHook; both steps included, counted from 0 there, from 1 here",
            make=nothing,
        ),
    ),
    Flag("-st --stop_threshold", "float", None, Field("--train.target-score")),
    Flag(
        "--export_dir",
        "text",
        None,
        Field("export RUN --format onnx", effect="TIME/model.onnx in it, not a SavedModel", make=nothing, on=BOTH),
    ),
    Flag(
        "--image_bytes_as_serving_input",
        "bool",
        False,
        Refused(
            "the exported network takes pixels; leave it out, docs/howto/export.md has a program that decodes JPEGs"
        ),
    ),
    Flag("--eval_only", "bool", False, Field("evaluate RUN", effect="of --model_dir", make=nothing, on=BOTH)),
    Flag(
        "--disable_eval",
        "bool",
        False,
        Field("--train.eval-at-end", effect="off, and no evaluation before", make=nothing),
    ),
    Flag(
        "--return_before_eval",
        "bool",
        False,
        Refused("it ended the run before its first evaluation; use --disable_eval"),
    ),
    Flag(
        "--dummy_epoch",
        "bool",
        False,
        Field(
            "--run.warmup-steps 2",
            effect="two steps that are undone",
            make=lambda given: ["--run.warmup-steps", "2"] if given["dummy_epoch"] else [],
        ),
    ),
    Flag("--train_offset", "int", 0, Refused("a run resumes at its step by itself; leave it out")),
    Flag(
        "--fine_tune",
        "bool",
        False,
        Field(
            "--train.trainable",
            effect="head: only the last layer learns",
            make=lambda given: ["--train.trainable", "head"] if given["fine_tune"] else [],
        ),
    ),
    Flag(
        "--pretrained_model_checkpoint_path",
        "text",
        None,
        Field("--model.weights", effect="the original read it and ignored it; here it acts"),
    ),
    Flag("--use_train_and_evaluate", "bool", False, GRAPH),
    Flag("--mini_imagenet", "bool", False, Field("--data.path", effect="files are found by either name", make=nothing)),
    Flag("--loss_scale", "text", None, Notice("fp16 has a scale that follows the gradients")),
    Flag(
        "--bf16_config_path",
        "text",
        "full",
        Field("--train.fp32-ops", effect="operations that stay in fp32; the rest is named", make=oplists.tensorflow),
    ),
    Flag("--no_hpu", "bool", False, Notice("what the machine has; `sightline legacy --device cpu` for the CPU")),
)

SCRIPT = Script(
    "TensorFlow/computer_vision/Resnets/ResNeXt/imagenet_main.py",
    "ResNeXt-101 by TensorFlow's estimator script, `sightline train resnext101`",
    FLAGS,
    _mode,
    style="absl",
    settle=_settle,
)
