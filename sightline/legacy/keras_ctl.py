"""resnet_ctl_imagenet_main.py and its launcher demo_resnet_keras.py of the ResNet-50 Keras README (TensorFlow)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sightline.errors import UsageError
from sightline.legacy import imagenet_data, oplists
from sightline.legacy.cleaning import clean
from sightline.legacy.imagenet_data import (
    DATA_DIR,
    GRAPH,
    IMAGES,
    PREPROCESS,
    SEEDS,
    SHARED,
    THREADS,
    global_batch,
)
from sightline.legacy.start import Row, Start
from sightline.legacy.table import (
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

KERAS, LARS = "resnet50_keras", "resnet50_lars"
NETWORKS = ("ResNet50", "ResNet101", "ResNet152", "ResNet50V2", "ResNet101V2", "ResNet152V2")
FOLDER = "TensorFlow/computer_vision/Resnets/resnet_keras"
PRESET: Mapping[str, Any] = {
    "warmup_epochs": 3,
    "lr_schedule": "polynomial",
    "label_smoothing": 0.1,
    "weight_decay": 1e-4,
    "single_l2_loss_op": True,
}


def _profile(given: Given) -> Sequence[str]:
    return ["--run.profile", counted_from_1(given["profile_steps"])] if given["profile_steps"] else []


def _is_lars(given: Given) -> bool:
    return given["optimizer"] == "LARS"


def _warmup(given: Given) -> float:
    """Return the warm-up; by default 5 epochs, for polynomial 25 from a batch of 32,768 on."""
    if given["warmup_epochs"] is not None:
        return float(given["warmup_epochs"])
    return 25 if given["lr_schedule"] == "polynomial" and global_batch(given) >= 32768 else 5


def _schedule(given: Given) -> Sequence[str]:
    kind, lars = given["lr_schedule"], _is_lars(given)
    if kind == "constant":
        return ["--schedule.kind", "constant", "--schedule.warmup-epochs", "0"]
    warmup = _warmup(given)
    words = [] if warmup == (3 if lars else 5) else ["--schedule.warmup-epochs", plain(warmup)]
    if kind == "piecewise":
        steps = ["--schedule.kind", "step", "--schedule.drop-epochs", "30", "60", "80", "--schedule.drop-after"]
        return [*(steps if lars else []), *words]
    end = 1e-4 if given["end_learning_rate"] is None else given["end_learning_rate"]
    final = [] if lars and end == 1e-4 else ["--schedule.final-lr", plain(end)]
    decay = given["lars_decay_epochs"]
    words += ["--schedule.decay-epochs", str(decay)] if decay else []
    return [*([] if lars else ["--schedule.kind", "polynomial"]), *words, *final]


def _rate(given: Given) -> Sequence[str]:
    """Write the rate: absolute for polynomial, else for a batch of 256. For LARS always: its default is 2.5 or 9.5."""
    lr, is_absolute = given["base_learning_rate"], given["lr_schedule"] == "polynomial"
    if _is_lars(given):
        return ["--optimizer.lr", plain(lr), *([] if is_absolute else ["--optimizer.lr-for-batch", "256"])]
    words = [] if lr == 0.1 else ["--optimizer.lr", plain(lr)]
    return [*words, *(["--optimizer.lr-for-batch", "0"] if is_absolute else [])]


def _decay_form(given: Given) -> Sequence[str]:
    return ["--optimizer.decay-form", "gradient"] if given["single_l2_loss_op"] and not _is_lars(given) else []


def _log_every(given: Given) -> Sequence[str]:
    """Log every --log_steps as the README says. Without it, as the code did: 100, or at the end of longer loops."""
    lines = given["log_steps"]
    if "log_steps" not in given.named:
        epoch = max(1, min(IMAGES // global_batch(given), given["train_steps"] or IMAGES))
        lines = max(lines, min(given["steps_per_loop"], epoch))
    return ["--run.log-every-steps", str(lines)]


def _checkpoints(given: Given) -> Sequence[str]:
    if given["enable_checkpoint_and_export"]:
        return ["--run.keep", "10", "--run.checkpoint-initial"]
    every = given["train_epochs"]
    return ["--run.checkpoint-every-epochs", str(every)] if every > 1 else []


def _arch(given: Given) -> Sequence[str]:
    model = given["keras_applications_model"]
    return ["--model.arch", f"keras_{model.lower()}"] if model else []


def _lars_epsilon(given: Given) -> Sequence[str]:
    return ["--optimizer.eps", plain(given["lars_epsilon"])] if _is_lars(given) and given["lars_epsilon"] else []


def _mode(given: Given) -> Mode:
    recipe = LARS if _is_lars(given) else KERAS
    before = (clean(given["model_dir"]),) if given["clean"] else ()
    folder = imagenet_data.run_folder(given)
    notes: list[Row] = []
    notes += oplists.tensorflow_lists(given).rows
    if given["use_horovod"]:
        notes.append(("worker_N folders", folder, "rank 0 writes for all workers"))
    after = (Act(f"`sightline export {folder}` exports the network"),) if given["enable_checkpoint_and_export"] else ()
    return Mode(TRAIN, (recipe,), recipe=recipe, before=before, after=after, notes=tuple(notes))


def _settle(given: Given) -> Start:
    _check_strategy(given)
    start = imagenet_data.settle_horovod(given)
    if given["use_horovod"] and not start.ranks:
        return replace(start, ranks=1)
    return start


def _check_strategy(given: Given) -> None:
    strategy = given["distribution_strategy"]
    if strategy not in ("off", "hpu"):
        raise UsageError(f"--distribution_strategy {strategy}: the script knows off and hpu")
    if strategy == "hpu" and given["use_horovod"]:
        raise UsageError("--use_horovod and --distribution_strategy cannot be combined; leave one of them out")


RECORDS = replace(DATA_DIR, default="/data/tensorflow_datasets/imagenet/tf_records/")
MAIN_FLAGS = (
    *(RECORDS if flag is DATA_DIR else flag for flag in SHARED),
    Flag(
        "-bs --batch_size",
        "int",
        256,
        Field(
            "--train.global-batch",
            effect="of one worker under Horovod, of all under a strategy",
            make=imagenet_data.batch,
        ),
        least=1,
    ),
    Flag("-te --train_epochs", "int", 1, Field("--train.epochs", {KERAS: 90, LARS: 40})),
    Flag(
        "--train_steps",
        "int",
        None,
        Field("--train.steps-per-epoch", effect="most steps of an epoch; the schedule follows"),
    ),
    Flag(
        "--steps_per_loop",
        "int",
        50,
        Field(
            "--run.log-every-steps",
            effect="without --log_steps, if above 100 and at most an epoch long; there is no loop",
            make=nothing,
        ),
    ),
    Flag(
        "--log_steps",
        "int",
        100,
        Field(
            "--run.log-every-steps",
            effect="as the README says; there no line came before a loop of --steps_per_loop ended",
            make=_log_every,
        ),
        least=1,
    ),
    Flag(
        "-md --model_dir",
        "text",
        "/tmp/resnet",
        Field("--run.out", effect="worker_0 in it under Horovod, as there", make=imagenet_data.out),
    ),
    Flag("--clean", "bool", False, Field("deletes --model_dir", effect="only if it is a run", make=nothing)),
    Flag(
        "--enable_checkpoint_and_export",
        "bool",
        False,
        Field(
            "--run.keep",
            effect="ten, and one at step 0; without, the last and the best. The end names `sightline export`",
            make=_checkpoints,
        ),
    ),
    Flag("--enable_tensorboard", "bool", False, Field("--run.tensorboard", False, "in tensorboard/ of the run")),
    Flag("--optimizer", "text", "SGD", Field("recipe resnet50_keras or resnet50_lars", make=nothing), ("SGD", "LARS")),
    Flag(
        "--lr_schedule",
        "text",
        "piecewise",
        Field("--schedule.kind", effect="constant with LARS crashed there", make=_schedule),
        ("piecewise", "polynomial", "constant"),
    ),
    Flag(
        "--base_learning_rate",
        "float",
        0.1,
        Field(
            "--optimizer.lr",
            effect="absolute for polynomial, else for a batch of 256; piecewise ignored it there",
            make=_rate,
        ),
    ),
    Flag(
        "--warmup_epochs",
        "int",
        None,
        Field("--schedule.warmup-epochs", effect="piecewise ignored it there", make=nothing),
    ),
    Flag(
        "--end_learning_rate",
        "float",
        None,
        Field("--schedule.final-lr", effect="polynomial; 0.0001 if not given", make=nothing),
    ),
    Flag("--momentum", "float", 0.9, Field("--optimizer.momentum", 0.9, "SGD ignored it there")),
    Flag("--weight_decay", "float", 1e-4, Field("--optimizer.weight-decay", 1e-4)),
    Flag("--label_smoothing", "float", 0.0, Field("--task.label-smoothing", {KERAS: 0.0, LARS: 0.1})),
    Flag(
        "--single_l2_loss_op",
        "bool",
        False,
        Field("--optimizer.decay-form", effect="decay wd instead of 2 wd; LARS decays by itself", make=_decay_form),
    ),
    Flag(
        "--lars_epsilon",
        "float",
        0.0,
        Field("--optimizer.eps", effect="LARS; 0 means 1e-7, as there", make=_lars_epsilon),
    ),
    Flag("--lars_decay_epochs", "int", None, Field("--schedule.decay-epochs", effect="polynomial", make=nothing)),
    Flag(
        "--distribution_strategy",
        "text",
        "off",
        Field("--run.devices", effect="hpu: --batch_size is of all workers", make=nothing),
    ),
    Flag(
        "--use_distributed_eval",
        "bool",
        False,
        Field("--train.eval-shards", effect="without, under Horovod: every rank evaluates everything", make=nothing),
    ),
    Flag("--use_keras_mixed_precision", "bool", False, Notice("both ways of bf16 are autocast here")),
    Flag(
        "--bf16_config_path",
        "text",
        "full",
        Field("--train.fp32-ops", effect="operations that stay in fp32; the rest is named", make=oplists.tensorflow),
    ),
    Flag(
        "--keras_applications_model",
        "text",
        None,
        Field("--model.arch", effect="keras_resnet50 and so on; they decay here", make=_arch),
        NETWORKS,
    ),
    Flag(
        "--skip_eval",
        "bool",
        False,
        Field("--train.eval-at-end", effect="off, and no evaluation before", make=nothing),
    ),
    Flag("--global_seed", "int", None, Field("--train.seed")),
    Flag("--shuffle_seed", "int", None, SEEDS),
    Flag("--sample_distorted_bounding_box_seed", "int", 0, SEEDS),
    Flag("--random_flip_left_right_seed", "int", None, SEEDS),
    Flag("--dataset_parallel_calls", "int", None, THREADS),
    Flag(
        "--interleave_cycle_length",
        "int",
        10,
        Notice("one permutation of all images per epoch; no files are interleaved"),
    ),
    Flag("--datasets_num_private_threads", "int", None, THREADS),
    Flag("--training_dataset_cache", "bool", False, Notice("the system keeps files that were read in memory")),
    Flag("--use_tf_while_loop", "bool", True, GRAPH),
    Flag("--use_tf_function", "bool", True, GRAPH),
    Flag(
        "--profile_steps",
        "text",
        None,
        Field(
            "--run.profile",
            effect="exactly these steps, counted from 0 there, from 1 here; no loop must begin or end there",
            make=_profile,
        ),
    ),
    Flag(
        "--save_full_model",
        "bool",
        False,
        Refused("no Keras file is written; checkpoints of the run are in checkpoints/"),
    ),
)
LAUNCHER_FLAGS = (
    Flag("--num_workers_per_hls", "int", 1, Field("--run.devices", effect="ranks of each host", make=nothing)),
    Flag(
        "--kubernetes_run",
        "bool",
        False,
        Field("a launcher has started the ranks", effect="needs no HCL_CONFIG_PATH", make=nothing),
    ),
    Flag(
        "--horovod_hierarchical_allreduce",
        "bool",
        False,
        Field("--run.reduce", effect="within hosts, then between them", make=lambda given: _reduce(given)),
    ),
)


def _reduce(given: Given) -> Sequence[str]:
    asked = given["horovod_hierarchical_allreduce"] or given.variable("HOROVOD_HIERARCHICAL_ALLREDUCE") == "1"
    return ["--run.reduce", "hierarchical"] if asked and given.ranks > 1 else []


def _with_preset(given: Given) -> Given:
    """Set what the launcher adds for LARS, where the command line does not say it."""
    if not _is_lars(given):
        return given
    preset = {**PRESET, "base_learning_rate": 2.5 if given["num_workers_per_hls"] == 1 else 9.5}
    missing = {key: value for key, value in preset.items() if key not in given.named}
    return replace(given, values={**given.values, **missing})


def _settle_demo(given: Given) -> Start:
    _check_strategy(given)
    workers, start = given["num_workers_per_hls"], given.start
    is_distributed = given["use_horovod"] or given["distribution_strategy"] != "off"
    if workers < 1:
        raise UsageError(f"--num_workers_per_hls {workers} must be at least 1")
    if workers > 1 and not is_distributed:
        raise UsageError(f"--num_workers_per_hls {workers} needs --use_horovod or --distribution_strategy hpu")
    started = start.launcher == "mpirun" or start.is_rank
    if given["kubernetes_run"] and not started:
        raise UsageError(
            "--kubernetes_run expects that a launcher starts the ranks; write mpirun before the line, or let "
            "`sightline launch RECIPE --launcher kubernetes --nodes N --per-node 8 --print` write the manifest"
        )
    if start.launcher == "mpirun" and not given["kubernetes_run"]:
        raise UsageError("demo_resnet_keras.py calls mpirun itself; leave mpirun out, or add --kubernetes_run=True")
    return imagenet_data.settle_horovod(given, 0 if started else workers)


MAIN = Script(
    f"{FOLDER}/resnet_ctl_imagenet_main.py",
    "ResNet-50 in Keras, `sightline train resnet50_keras` or, with LARS, `resnet50_lars`",
    MAIN_FLAGS,
    _mode,
    style="absl",
    settle=_settle,
)
DEMO = Script(
    f"{FOLDER}/demo_resnet_keras.py",
    "launcher of resnet_ctl_imagenet_main.py, with a preset for LARS",
    (*MAIN_FLAGS, *LAUNCHER_FLAGS),
    _mode,
    style="absl",
    settle=_settle_demo,
    complete=_with_preset,
)
SCRIPTS = (DEMO, MAIN, PREPROCESS)
