"""main.py of the Unet2D README (PyTorch, nnU-Net): training, evaluation, prediction, benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sightline.errors import UsageError
from sightline.legacy import oplists, unet_files
from sightline.legacy.start import Start
from sightline.legacy.table import (
    BENCHMARK,
    EVALUATE,
    PREDICT,
    TRAIN,
    Act,
    Field,
    Flag,
    Given,
    Mode,
    Notice,
    Refused,
    Script,
    nothing,
    plain,
)
from sightline.legacy.unet_files import task_code

FOLDER = "PyTorch/computer_vision/segmentation/Unet2D"
EVERY = (TRAIN, BENCHMARK, EVALUATE)
AFFINITIES = ("disabled", "socket", "single", "single_unique", "socket_unique_interleaved", "socket_unique_continuous")
WITH_BENCHMARK = "with --benchmark; the schedule of a training does not know it"


def _data(given: Given) -> Sequence[str]:
    """Return the data flags; `/data` means the folder of the task in it."""
    path = given["data"].rstrip("/") or "/"
    return ["--data.path", f"/data/{_task(given)}_{given['dim']}d" if path == "/data" else path]


def _task(given: Given) -> str:
    if given["task"] is None:
        raise UsageError("--task is missing; give the number of a Decathlon task, e.g. --task 01")
    return task_code(given["task"])


def _batch(given: Given) -> Sequence[str]:
    """Write the batch in slices (3D: patches) and volumes: per device in the original, over all devices here."""
    ranks = given.ranks
    words = ["--train.global-batch", str(given["batch_size"] * ranks)]
    nvol = given["nvol"] * ranks
    return [*words, *(["--data.nvol", str(nvol)] if nvol > 1 and given["dim"] == "2" else [])]


def _optimizer(given: Given) -> Sequence[str]:
    kind = given["optimizer"].lower()
    if kind not in ("sgd", "radam", "adam", "adamw", "fusedadamw"):
        raise UsageError(f"--optimizer {given['optimizer']}: main.py knows sgd, radam, adam, adamw and fusedadamw")
    if kind == "sgd":
        return ["--optimizer.kind", "sgd", "--optimizer.momentum", plain(given["momentum"])]
    return [] if kind.endswith("adamw") else ["--optimizer.kind", kind]


def _schedule(given: Given) -> Sequence[str]:
    kind, factor = given["scheduler"], plain(given["factor"])
    if kind == "multistep":
        if not given["steps"]:
            raise UsageError("--scheduler multistep needs --steps EPOCH ...")
        drops = [str(epoch) for epoch in given["steps"]]
        return ["--schedule.kind", "step", "--schedule.drop-epochs", *drops, "--schedule.factor", factor]
    if kind == "cosine":
        return ["--schedule.kind", "cosine", "--schedule.unit", "epoch"]
    if kind == "plateau":
        words = ["--schedule.kind", "plateau", "--schedule.plateau-on", "val_loss", "--schedule.factor", factor]
        return [*words, "--schedule.patience", str(given["lr_patience"])]
    return []


def _precision(given: Given) -> Sequence[str]:
    if given["amp"] and given["hmp"]:
        raise UsageError("--amp is fp16 and --hmp is bf16; leave one of them out")
    return [] if given["hmp"] else ["--train.precision", "fp16" if given["amp"] else "fp32"]


def _epochs(given: Given) -> Sequence[str]:
    words = [] if given["max_epochs"] == 10_000 else ["--train.epochs", str(given["max_epochs"])]
    words += [] if given["min_epochs"] == 30 else ["--train.min-epochs", str(given["min_epochs"])]
    words += [] if given["patience"] == 100 else ["--train.patience", str(given["patience"])]
    skipped = given["skip_first_n_eval"]
    return [*words, *(["--train.eval-from-epoch", str(skipped + 1)] if skipped else [])]


def _train_batches(given: Given) -> Sequence[str]:
    limit = given["train_batches"]
    return ["--train.steps-per-epoch", str(limit)] if limit else []


def _test_batches(given: Given) -> Sequence[str]:
    """Limit evaluations; a batch was one volume per device there, and is one of slices here in 2D."""
    volumes, batch = given["test_batches"], given["batch_size"]
    if not volumes or given["benchmark"]:
        return []
    asked = f"--test_batches {volumes}"
    if given["exec_mode"] == "predict":
        raise UsageError(f"{asked}: every volume of --data is predicted; give a folder with fewer, and leave it out")
    if given["dim"] == "2":
        raise UsageError(
            f"{asked} counts volumes, and a 2D evaluation can only be limited to batches of slices; leave it out, or "
            "choose their number: `sightline legacy --set train.eval-max-steps=N main.py ...`"
        )
    if given["exec_mode"] == "evaluate":
        return ["--data.dim", "3", "--train.global-batch", str(given.ranks), "--train.eval-max-steps", str(volumes)]
    if volumes % batch:
        near = -(-volumes // batch) * batch
        raise UsageError(f"{asked} counts volumes, evaluated in batches of --batch_size {batch}; use e.g. {near}")
    return ["--train.eval-max-steps", str(volumes // batch)]


def _backups(given: Given) -> Sequence[str]:
    every = given["ckpt_every"]
    if not every:
        return []
    return ["--run.checkpoint-every-epochs", str(every), "--run.keep", str(given["max_epochs"] // every + 2)]


def _resume(given: Given) -> Sequence[str]:
    path = given["ckpt_path"]
    if not path:
        return []
    if path.endswith((".ckpt", ".pt", ".pth")):
        raise UsageError(
            f"--ckpt_path {path}: checkpoints of the original cannot be resumed; give a ckpt-* folder of one of our "
            "runs, or leave it out: the same command resumes the run in --results"
        )
    return ["--run.resume", path]


def _channels_last(given: Given) -> Sequence[str]:
    return [] if str(given["channels_last"]).lower() == "true" else ["--run.no-channels-last"]


def _workers(given: Given) -> Sequence[str]:
    return ["--run.workers", str(given["num_workers"])] if "num_workers" in given.named else []


def _mode(given: Given) -> Mode:
    results, notes = given.folder("results"), tuple(oplists.torch_lists(given).rows)
    if given["benchmark"]:
        return _benchmark(given, results, notes)
    if given["exec_mode"] == "train":
        return Mode(TRAIN, ("unet2d",), recipe="unet2d", notes=notes)
    run, which = unet_files.run_of(given["ckpt_path"], results)
    if given["exec_mode"] == "evaluate":
        log = f"{results}/{given['logname'] or 'eval_log.json'}"
        write = Act(f"write {log}", lambda: unet_files.write_eval_log(Path(run), which, Path(log)))
        return Mode(EVALUATE, (run, "--checkpoint", which), after=(write,))
    kind = "amp" if given["amp"] else "fp32"
    name = f"preds_task_{_task(given)}_dim_{given['dim']}_fold_{given['fold']}_{kind}{'_tta' * given['tta']}"
    words: tuple[str, ...] = (run, _data(given)[1], "--out", f"{results}/{name}", "--checkpoint", which)
    words += ("--save-probabilities",) if given["save_preds"] else ()
    return Mode(PREDICT, (*words, *(("--task.tta",) if given["tta"] else ())))


def _benchmark(given: Given, results: str, notes: Sequence[tuple[str, str, str]]) -> Mode:
    """Measure speed by our own benchmark, which on several devices also measures one of them alone."""
    predicts = given["exec_mode"] == "predict"
    batches, flag = (
        (given["test_batches"], "--test_batches") if predicts else (given["train_batches"], "--train_batches")
    )
    steps = batches - given["warmup"]
    if steps < 2:
        raise UsageError(f"--benchmark needs {flag} above --warmup {given['warmup']} by 2 or more, e.g. {flag} 150")
    log = f"{results}/{given['logname'] or 'perf.json'}"
    words: tuple[str, ...] = ("unet2d", "--steps", str(steps), "--warmup", str(given["warmup"]), "--repeats", "1")
    words += ("--what", "predict") if predicts else ()
    words += ("--data", "real", "--out", results, "--logname", log)
    return Mode(BENCHMARK, words, recipe="unet2d", notes=tuple(notes))


def _settle(given: Given) -> Start:
    start, gpus, hpus = given.start, given["gpus"], given["hpus"]
    if gpus and hpus:
        raise UsageError(f"--gpus {gpus} and --hpus {hpus} cannot be combined; set one of them to 0")
    if start.launcher:
        raise UsageError(f"main.py starts its ranks itself; leave {start.launcher} out and write --hpus N")
    device = start.device or ("" if gpus or hpus else "cpu")
    count = max(gpus, hpus, 1) if given["exec_mode"] != PREDICT else 1
    return replace(start, device=device, ranks=start.ranks if start.is_rank else count)


SEEDED = Notice("every random number follows from --train.seed; operations draw independently")
HMP = "with --hmp"
FLAGS = (
    Flag(
        "--exec_mode",
        "text",
        "train",
        Field("train, evaluate, predict", effect="the command", make=nothing, on=(*EVERY, PREDICT)),
        ("train", "evaluate", "predict"),
    ),
    Flag(
        "--data",
        "text",
        "/data",
        Field(
            "--data.path",
            effect="/data: /data/TASK_DIMd in it; must be prepared by us",
            make=_data,
            on=EVERY,
            read_on=(PREDICT,),
        ),
    ),
    Flag(
        "--results",
        "text",
        "/results",
        Field(
            "--run.out",
            effect="also for perf.json and eval_log.json",
            make=lambda given: ["--run.out", given["results"]],
            on=(TRAIN,),
            read_on=(BENCHMARK, EVALUATE, PREDICT),
        ),
    ),
    Flag(
        "--logname",
        "text",
        None,
        Field(
            "--logname",
            effect="of the benchmark and of evaluate; a training's log is log.jsonl",
            make=nothing,
            on=(*EVERY, PREDICT),
        ),
    ),
    Flag(
        "--task",
        "text",
        None,
        Field(
            "--data.task",
            effect="01 to 10",
            make=lambda given: [] if _task(given) == "01" else ["--data.task", _task(given)],
            read_on=(EVALUATE, PREDICT),
        ),
    ),
    Flag(
        "--gpus",
        "int",
        0,
        Field("--run.devices", effect="0 with --hpus 0: the CPU", make=nothing, on=EVERY, read_on=(PREDICT,)),
        least=0,
    ),
    Flag(
        "--hpus",
        "int",
        0,
        Field(
            "--run.devices",
            effect="as many ranks (predict: one), on what the machine has",
            make=nothing,
            on=EVERY,
            read_on=(PREDICT,),
        ),
        least=0,
    ),
    Flag("--learning_rate", "float", 1e-3, Field("--optimizer.lr", 1e-3)),
    Flag("--gradient_clip_val", "float", 0.0, Field("--train.clip", 0.0)),
    Flag("--negative_slope", "float", 0.01, Field("--model.negative-slope", 0.01)),
    Flag(
        "--tta",
        "switch",
        False,
        Field("--task.tta", False, "mirrors height and width; there depth and height", on=EVERY, read_on=(PREDICT,)),
    ),
    Flag(
        "--amp",
        "switch",
        False,
        Field("--train.precision", effect="fp16; without --amp and --hmp: fp32", make=_precision),
    ),
    Flag(
        "--benchmark",
        "switch",
        False,
        Field("benchmark", effect="several devices: one of them alone first, then all", make=nothing),
    ),
    Flag("--deep_supervision", "switch", False, Field("--model.deep-supervision", True)),
    Flag("--drop_block", "switch", False, Field("--model.drop-block", False)),
    Flag("--attention", "switch", False, Field("--model.attention", False)),
    Flag("--residual", "switch", False, Field("--model.residual", False)),
    Flag(
        "--focal",
        "switch",
        False,
        Field(
            "--task.voxel-loss",
            effect="focal",
            make=lambda given: ["--task.voxel-loss", "focal"] if given["focal"] else [],
        ),
    ),
    Flag(
        "--sync_batchnorm",
        "switch",
        False,
        Field(
            "--train.bn-group",
            effect="over all ranks, with --norm batch",
            make=lambda given: ["--train.bn-group", "-1"] if given["sync_batchnorm"] else [],
        ),
    ),
    Flag("--save_ckpt", "switch", False, Notice("the newest and the best are always kept")),
    Flag("--nfolds", "int", 5, Field("--data.folds", 5, on=EVERY)),
    Flag(
        "--fold", "int", 0, Field("--data.fold", 0, "predict: in the name of the folder", on=EVERY, read_on=(PREDICT,))
    ),
    Flag("--seed", "int", 1, Field("--train.seed", 0)),
    Flag(
        "--skip_first_n_eval",
        "int",
        0,
        Field("--train.eval-from-epoch", effect="N + 1; no scores are invented before", make=nothing),
        least=0,
    ),
    Flag(
        "--ckpt_path",
        "text",
        None,
        Field(
            "--run.resume",
            effect="evaluate, predict: which checkpoint of which run",
            make=_resume,
            on=(TRAIN,),
            read_on=(EVALUATE, PREDICT),
        ),
    ),
    Flag("--resume_training", "switch", False, Notice("the same command resumes the run in --results by itself")),
    Flag("--patience", "int", 100, Field("--train.patience", 100, "in evaluations", make=nothing)),
    Flag("--lr_patience", "int", 70, Field("--schedule.patience", effect="--scheduler plateau", make=nothing)),
    Flag(
        "--batch_size",
        "int",
        2,
        Field("--train.global-batch", effect="of one device there, of all here; volumes likewise", make=_batch),
        least=1,
    ),
    Flag("--val_batch_size", "int", 4, Field("--task.window-batch", 64, "2D evaluation takes the training batch")),
    Flag("--steps", "ints", None, Field("--schedule.drop-epochs", effect="--scheduler multistep", make=nothing)),
    Flag("--factor", "float", 0.3, Field("--schedule.factor", effect="--scheduler multistep, plateau", make=nothing)),
    Flag(
        "--scheduler",
        "text",
        "none",
        Field("--schedule.kind", effect="multistep: step", make=_schedule),
        ("none", "multistep", "cosine", "plateau"),
    ),
    Flag("--optimizer", "text", "adamw", Field("--optimizer.kind", effect="fusedadamw: adamw, fused", make=_optimizer)),
    Flag("--momentum", "float", 0.99, Field("--optimizer.momentum", effect="--optimizer sgd", make=nothing)),
    Flag("--weight_decay", "float", 1e-4, Field("--optimizer.weight-decay", 1e-4, "sgd ignored it there")),
    Flag("--save_preds", "switch", False, Field("--save-probabilities", make=nothing, on=(PREDICT,))),
    Flag("--dim", "text", "3", Field("--data.dim", "2", read_on=(EVALUATE, PREDICT)), ("2", "3")),
    Flag(
        "--num_workers",
        "int",
        8,
        Field("--run.workers", effect="changes no result; chosen from the cores if not given", make=_workers),
    ),
    Flag("--min_epochs", "int", 30, Field("--train.min-epochs", effect="see --max_epochs", make=nothing)),
    Flag(
        "--max_epochs",
        "int",
        10_000,
        Field("--train.epochs", effect="with --min_epochs, --patience, --skip_first_n_eval", make=_epochs, on=(TRAIN,)),
    ),
    Flag("--warmup", "int", 5, Field("benchmark --warmup", effect=WITH_BENCHMARK, make=nothing)),
    Flag("--norm", "text", "instance", Field("--model.norm", "instance"), ("instance", "batch", "group")),
    Flag("--nvol", "int", 1, Field("--data.nvol", effect="of one device there, of all here", make=nothing), least=1),
    Flag(
        "--data2d_dim",
        "text",
        "3",
        Refused("data are volumes here, of which a 2D network sees slices; leave it out"),
        ("2", "3"),
    ),
    Flag("--oversampling", "float", 0.33, Field("--data.oversampling", 0.33)),
    Flag("--overlap", "float", 0.5, Field("--task.overlap", 0.5)),
    Flag("--blend", "text", "gaussian", Field("--task.blend", "gaussian"), ("gaussian", "constant")),
    Flag("--affinity", "text", "disabled", Field("--run.affinity", "disabled"), AFFINITIES),
    Flag(
        "--train_batches",
        "int",
        0,
        Field(
            "--train.steps-per-epoch",
            effect="with --benchmark: what is measured, after --warmup",
            make=_train_batches,
            on=(TRAIN,),
            read_on=(BENCHMARK,),
        ),
        least=0,
    ),
    Flag(
        "--test_batches",
        "int",
        0,
        Field(
            "--train.eval-max-steps",
            effect="volumes, so 3D only; benchmark --steps with --benchmark --exec_mode predict",
            make=_test_batches,
            on=(*EVERY, PREDICT),
        ),
        least=0,
    ),
    Flag(
        "--profile",
        "switch",
        False,
        Refused("say which steps: `sightline legacy --set run.profile=5,8 main.py ...`, without --profile"),
    ),
    Flag(
        "--run_lazy_mode",
        "switch",
        False,
        Notice("lazy and eager graphs are the vendor's; --run.compile and --run.graph decide here"),
    ),
    Flag("--hmp", "switch", False, Field("--train.precision bf16", effect="the recipe's own", make=nothing)),
    Flag(
        "--hmp-bf16",
        "text",
        "",
        Field("--train.fp32-ops", effect="what the list leaves out; the rest is named", make=oplists.torch),
    ),
    Flag("--hmp-fp32", "text", "", Field("--train.fp32-ops", effect=HMP, make=nothing)),
    Flag("--hmp-opt-level", "text", "O1", Notice("there is one level of autocast")),
    Flag("--hmp-verbose", "switch", False, Notice("autocast prints nothing")),
    Flag(
        "--bucket_cap_mb",
        "int",
        90,
        Field(
            "--run.bucket-mb",
            effect="only if given; changes no result",
            make=lambda given: (
                ["--run.bucket-mb", str(given["bucket_cap_mb"])] if "bucket_cap_mb" in given.named else []
            ),
        ),
    ),
    Flag(
        "--channels_last",
        "text",
        "True",
        Field("--run.channels-last", effect="anything but true: off", make=_channels_last),
    ),
    Flag(
        "--ckpt_every",
        "int",
        None,
        Field("--run.checkpoint-every-epochs", effect="all of them are kept", make=_backups, on=(TRAIN,)),
        least=0,
    ),
    Flag("--set_aug_seed", "switch", False, SEEDED),
    Flag(
        "--no-augment",
        "switch",
        False,
        Field(
            "--data.augment",
            effect="off; a benchmark never augments",
            make=lambda given: ["--data.augment", "off"] if given["no_augment"] or given["benchmark"] else [],
        ),
    ),
)
MAIN = Script(f"{FOLDER}/main.py", "U-Net on Decathlon tasks, `sightline train unet2d`", FLAGS, _mode, settle=_settle)
