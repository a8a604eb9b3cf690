"""ssd.py of the SSD-ResNet34 README (TensorFlow), the script that prepares COCO for it, and its fixed batches."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sightline.errors import UsageError
from sightline.legacy.imagenet_data import THREADS, settle_horovod
from sightline.legacy.start import Start
from sightline.legacy.summaries import OURS, board_points, log_lines
from sightline.legacy.table import (
    EVALUATE,
    PREDICT,
    PREPARE,
    TRAIN,
    Act,
    Field,
    Flag,
    Given,
    Mode,
    Notice,
    Script,
    counted_from_1,
    nothing,
    plain,
)

FOLDER = "TensorFlow/computer_vision/SSD_ResNet34"
EXAMPLES = 117_266
WEIGHTS = "model.ckpt-28152"  # the file that the README fetches
DRAWN = "out.png"
BOTH = (TRAIN, EVALUATE)
LAUNCHER = Notice("read and ignored there too; write mpirun -np N before the line")


def _whole(flag: str, value: float) -> int:
    if value != int(value) or value < 1:
        raise UsageError(f"{flag} {plain(value)}: expected a whole number of epochs")
    return int(value)


def _epochs(given: Given) -> int:
    return _whole("--epochs", math.floor(given["epochs"]))


def _training_length(given: Given) -> Sequence[str]:
    """Write the epochs; mode train never evaluates."""
    epochs = _epochs(given)
    words = [] if epochs == 50 else ["--train.epochs", str(epochs)]
    return [*words, "--train.eval-every-epochs", str(epochs + 1), "--train.no-eval-at-end"]


def _batch(given: Given) -> int:
    return int(given["batch_size"]) * given.ranks


def _drops(given: Given) -> Sequence[str]:
    k = given["k"]
    return ["--schedule.drop-epochs", str(40 + 4 * k), str(50 + 5 * k)] if k else []


def _weights(given: Given) -> Sequence[str]:
    """Write the initial weights: a TensorFlow checkpoint, with SAME padding, or a file or name of torchvision."""
    path = given["resnet_checkpoint"].rstrip("/")
    if not path:
        return []
    if path.endswith((".pth", ".safetensors")) or path.startswith("torchvision:"):
        return ["--model.weights", path]
    file = path if Path(path).name.startswith("model.ckpt") else f"{path}/{WEIGHTS}"
    return ["--model.weights", file, "--model.padding", "same"]


def _steps_per_epoch(given: Given) -> Sequence[str]:
    examples = given["num_examples_per_epoch"]
    return [] if examples == EXAMPLES else ["--train.steps-per-epoch", str(-(-examples // _batch(given)))]


def _profile(given: Given) -> Sequence[str]:
    return [] if given["profile"] == "0,0" else ["--run.profile", counted_from_1(given["profile"])]


def _bn(given: Given) -> Sequence[str]:
    return ["--train.bn-group", "-1"] if given["distributed_bn"] and given["use_horovod"] else []


def _data(given: Given) -> Sequence[str]:
    static = ["--data.static", f"{given['data_dir'].rstrip('/')}/worker_0"] if given["static"] else []
    return ["--data.path", given["data_dir"], *static]


def _max_cpus(given: Given) -> Sequence[str]:
    return ["--run.max-cpus", str(given["max_cpus"])] if "max_cpus" in given.named else []


def _mode(given: Given) -> Mode:
    run = given.folder("model_dir")
    if image := given["inference"]:
        seen = f"{run}/inference"
        words = (run, image, "--out", seen, "--checkpoint", "latest", "--top", "10", "--score-threshold", "0.05")
        copy = Act(f"copy the drawn image to {DRAWN}", lambda: copy_drawn(Path(seen, Path(image).name), Path(DRAWN)))
        return Mode(PREDICT, words, after=(copy,))
    if given["mode"] == "eval":
        return Mode(EVALUATE, (run, "--all"))
    note = ("--mode train", "--train.no-eval-at-end", "nothing is evaluated in training; `--mode eval` does all")
    return Mode(TRAIN, ("ssd_resnet34",), recipe="ssd_resnet34", notes=(note,))


def copy_drawn(drawn: Path, out: Path) -> None:
    """Put the drawn image where the original does, as a PNG; a link there is replaced, not followed."""
    from PIL import Image

    from sightline.files.whole import write_whole

    with Image.open(drawn) as image:
        write_whole(out, image.save)


def _settle(given: Given) -> Start:
    if given["mode"] == "eval" or given["inference"]:
        if given.start.ranks > 1 and not given.start.is_rank:
            raise UsageError("--mode eval and --inference run in one process; leave mpirun out")
        return replace(given.start, ranks=1)
    start = settle_horovod(given)
    return start if start.ranks else replace(start, ranks=1)


FLAGS = (
    Flag(
        "-d --dtype",
        "text",
        "bf16",
        Field("--train.precision", "bf16", "autocast; the loss in fp32, as there"),
        ("fp32", "bf16"),
    ),
    Flag(
        "-b --batch_size",
        "int",
        128,
        Field(
            "--train.global-batch",
            effect="of one worker there, of all here",
            make=lambda given: [] if _batch(given) == 128 else ["--train.global-batch", str(_batch(given))],
        ),
        least=1,
    ),
    Flag(
        "-e --epochs",
        "float",
        50.0,
        Field("--train.epochs", effect="a total, not so many more after a restart", make=_training_length),
    ),
    Flag(
        "--mode",
        "text",
        "train",
        Field(
            "train, evaluate --all",
            effect="eval: every checkpoint of --model_dir",
            make=nothing,
            on=(TRAIN, EVALUATE, PREDICT),
        ),
        ("train", "eval"),
    ),
    Flag(
        "--inference",
        "text",
        None,
        Field("predict", effect="draws the ten best into out.png", make=nothing, on=(PREDICT,)),
    ),
    Flag("--max_cpus", "int", 16, Field("--run.max-cpus", effect="off if not given", make=_max_cpus)),
    Flag("--num_parallel_calls", "int", 64, THREADS),
    Flag("--threadpool_size", "int", 0, THREADS),
    Flag("--use_horovod", "switch", False, Field("--run.devices", effect="mpirun says how many", make=nothing)),
    Flag("--no_hpu", "switch", False, Notice("what the machine has; `sightline legacy --device cpu` for the CPU")),
    Flag(
        "--distributed_bn",
        "switch",
        False,
        Field("--train.bn-group", effect="over all ranks; only with --use_horovod, as there", make=_bn),
    ),
    Flag("--vis_dataloader", "switch", False, Notice("nothing was drawn there; `sightline check` looks at the data")),
    Flag(
        "--profile",
        "text",
        "0,0",
        Field("--run.profile", effect="both steps included, counted from 0 there, from 1 here", make=_profile),
    ),
    Flag("--use_cocoeval_cc", "switch", False, Notice("COCO's numbers are made by compiled code already")),
    Flag("-f --use_fake_data", "switch", False, Field("--data.fake", False, "the first batch again and again")),
    Flag("--lr_warmup_epoch", "float", 5.0, Field("--schedule.warmup-epochs", 5.0)),
    Flag("--base_lr", "float", 3e-3, Field("--optimizer.lr", 3e-3, "for a batch of 32, as there")),
    Flag("--weight_decay", "float", 5e-4, Field("--optimizer.weight-decay", 5e-4)),
    Flag("--k", "int", 0, Field("--schedule.drop-epochs", effect="40 and 50 times 1 + k / 10", make=_drops), least=0),
    Flag(
        "--model_dir",
        "text",
        "/tmp/ssd",
        Field("--run.out", effect="rank 0 writes for all", read_on=(EVALUATE, PREDICT)),
    ),
    Flag(
        "--resnet_checkpoint",
        "text",
        "/data/ssd_r34-mlperf",
        Field(
            "--model.weights",
            effect="model.ckpt-28152 in it, with TensorFlow's padding; or torchvision:resnet34",
            make=_weights,
        ),
    ),
    Flag(
        "--data_dir",
        "text",
        "/data/coco2017/ssd_tf_records",
        Field("--data.path", effect="COCO's records", make=_data, on=BOTH),
    ),
    Flag("--eval_samples", "int", 5000, Notice("no effect there either; every image is evaluated")),
    Flag(
        "--num_examples_per_epoch",
        "int",
        EXAMPLES,
        Field("--train.steps-per-epoch", effect="at most what the data has", make=_steps_per_epoch),
        least=1,
    ),
    Flag(
        "-s --steps --num_steps",
        "int",
        0,
        Field("--train.max-steps", 0, "the schedule stays that of all epochs; --num_steps is the README's word"),
    ),
    Flag(
        "-v --log_step_count_steps",
        "int",
        1,
        Field(
            "--run.log-every-steps",
            OURS,
            effect="more lines if --save_summary_steps N is given and not a multiple of it",
            make=lambda given: log_lines(given, "log_step_count_steps"),
        ),
        least=1,
    ),
    Flag(
        "-c --save_checkpoints_epochs",
        "float",
        5.0,
        Field(
            "--run.checkpoint-every-epochs",
            effect="and one at the start and the end",
            make=lambda given: [
                "--run.checkpoint-every-epochs",
                str(_whole("--save_checkpoints_epochs", given["save_checkpoints_epochs"])),
                "--run.checkpoint-initial",
            ],
        ),
    ),
    Flag(
        "--save_checkpoints_steps",
        "int",
        0,
        Field("--run.checkpoint-every-steps", 0, "named by the README; besides those of --save_checkpoints_epochs"),
        least=0,
    ),
    Flag("--keep_ckpt_max", "int", 20, Field("--run.keep", 2, "and the best")),
    Flag(
        "--save_summary_steps",
        "int",
        1,
        Field(
            "--run.tensorboard --run.tensorboard-every-steps",
            effect="always on there; a point every N steps, if not given at log lines only",
            make=lambda given: board_points(given, "log_step_count_steps"),
        ),
        least=1,
    ),
    Flag(
        "--static",
        "switch",
        False,
        Field("--data.static", effect="worker_0 of --data_dir, written by `sightline prepare static`", make=nothing),
    ),
    Flag("--recipe_cache", "text", "/tmp/ssd_recipe_cache/", Notice("compiled graphs are cached by torch")),
    Flag("--hvd_workers", "int", 1, LAUNCHER),
    Flag("--num_workers_per_hls", "int", 8, LAUNCHER),
    Flag("--kubernetes_run", "text", "False", LAUNCHER),
)
SSD = Script(f"{FOLDER}/ssd.py", "SSD-ResNet34 on COCO, `sightline train ssd_resnet34`", FLAGS, _mode, settle=_settle)


# download_and_preprocess_coco.sh DIR, of tensorflow/tpu with the README's patch


def _prepare_coco(given: Given) -> Mode:
    out = given["DIR"].rstrip("/")
    words = ("coco", "--source", f"{out}-raw", "--out", out, "--form", "tfrecord", "--download")
    note = (f"{out}/raw-data", f"{out}-raw", "the archives lie beside the records, not in them")
    return Mode(PREPARE, words, notes=(note,))


COCO = Script(
    "tpu/tools/datasets/download_and_preprocess_coco.sh",
    "COCO 2017 to TFRecords, `sightline prepare coco`",
    (),
    _prepare_coco,
    operands=("DIR",),
)


# generate_static_dataset.py


def _static(given: Given) -> Mode:
    for name in ("input_pattern", "output_dir", "batch_size", "steps"):
        if given[name] is None:
            raise UsageError(f"generate_static_dataset.py needs --{name}")
    if given["workers"] != 1:
        raise UsageError(f"--workers {given['workers']}: batches are written for one rank; leave it out")
    words = ("static", "--out", f"{given['output_dir'].rstrip('/')}/worker_0", "--batch", str(given["batch_size"]))
    source = os.path.dirname(given["input_pattern"]) or "."
    return Mode(PREPARE, (*words, "--steps", str(given["steps"]), "--last-batch", "pad", "--data.path", source))


ON = (PREPARE,)
STATIC = Script(
    f"{FOLDER}/generate_static_dataset.py",
    "augmented batches as files, `sightline prepare static`",
    (
        Flag(
            "-i --input_pattern",
            "text",
            None,
            Field("--data.path", effect="the folder of the records", make=nothing, on=ON),
        ),
        Flag("-o --output_dir", "text", None, Field("--out", effect="worker_0 in it", make=nothing, on=ON)),
        Flag("-b --batch_size", "int", None, Field("--batch", make=nothing, on=ON), least=1),
        Flag("-s --steps", "int", None, Field("--steps", make=nothing, on=ON)),
        Flag(
            "-w --workers",
            "int",
            1,
            Field("", effect="1 only: a run replays the batches of one rank", make=nothing, on=ON),
        ),
    ),
    _static,
)
SCRIPTS = (SSD, COCO, STATIC)
