"""The other scripts of the Unet2D README: demo_unet.py, download.py, preprocess.py, evaluate.py, and scripts/."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sightline import terminal
from sightline.data.volumes.plan import TASKS
from sightline.errors import UsageError
from sightline.legacy.table import EVALUATE, PREPARE, Act, Field, Flag, Given, Mode, Notice, Script, nothing
from sightline.legacy.unet import FOLDER, MAIN
from sightline.legacy.unet_files import task_code

ON = (PREPARE,)


def _task(given: Given) -> str:
    if given["task"] is None:
        raise UsageError("--task is missing; give the number of a Decathlon task, e.g. --task 01")
    return task_code(given["task"])


def _download(given: Given) -> Mode:
    task, results = _task(given), given.folder("results")
    text = f"fetch {TASKS[task].folder}.tar into {results} unless it is there, and compare its MD5"
    return Mode("", before=(Act(text, lambda: fetch_task(task, Path(results))),))


def fetch_task(task: str, folder: Path) -> None:
    """Fetch the tar of a task as `prepare decathlon --download` does; one that is there, or unpacked, is kept."""
    from sightline.data.prepare.decathlon.fetched import fetch_tar
    from sightline.files.download import Expected
    from sightline.terminal.progress import shown_progress

    with shown_progress() as progress:
        found = fetch_tar(folder, folder, task, "", Expected(), progress)
    terminal.say(f"{TASKS[task].folder} is in {found}; next: preprocess.py --task {task} --data {folder}")


DOWNLOAD = Script(
    f"{FOLDER}/download.py",
    "fetch a Decathlon task, as `sightline prepare decathlon --download` does",
    (
        Flag("--task", "text", None, Field("--task", effect="01 to 10", make=nothing, on=("",))),
        Flag(
            "--results",
            "text",
            "/data",
            Field("--source", effect="the tar stays there, packed", make=nothing, on=("",)),
        ),
    ),
    _download,
)


def _preprocess(given: Given) -> Mode:
    task, mode = _task(given), given["exec_mode"]
    out = Path(given["results"], f"{task}_{given['dim']}d", *([] if mode == "training" else [mode]))
    words = ("decathlon", "--source", given["data"], "--out", str(out), "--task", task, "--dim", given["dim"])
    return Mode(PREPARE, (*words, *(() if mode == "training" else ("--mode", mode))))


def _jobs(given: Given) -> Sequence[str]:
    return ["--jobs", str(given["n_jobs"])] if given["n_jobs"] > 0 else []


PREPROCESS = Script(
    f"{FOLDER}/preprocess.py",
    "prepare a Decathlon task, `sightline prepare decathlon`",
    (
        Flag(
            "--data", "text", "/data", Field("--source", effect="holds the task's folder or tar", make=nothing, on=ON)
        ),
        Flag(
            "--results",
            "text",
            "/data",
            Field("--out", effect="TASK_DIMd in it; nothing is emptied first", make=nothing, on=ON),
        ),
        Flag(
            "--exec_mode",
            "text",
            "training",
            Field("--mode", effect="val and test lie in a folder of their own", make=nothing, on=ON),
            ("training", "val", "test"),
        ),
        Flag(
            "--dilation",
            "switch",
            False,
            Field(
                "--dilation",
                effect="closes gaps of one voxel",
                make=lambda given: ["--dilation"] if given["dilation"] else [],
                on=ON,
            ),
        ),
        Flag("--task", "text", None, Field("--task", effect="01 to 10", make=nothing, on=ON)),
        Flag("--dim", "text", "3", Field("--dim", make=nothing, on=ON), ("2", "3")),
        Flag("--n_jobs", "int", -1, Field("--jobs", effect="-1: one a core", make=_jobs, on=ON)),
    ),
    _preprocess,
)


def _evaluate(given: Given) -> Mode:
    if not given["preds"] or not given["lbls"]:
        raise UsageError("evaluate.py needs --preds DIR and --lbls DIR")
    return Mode(EVALUATE, (given["preds"], "--labels", given["lbls"]))


EVALUATION = Script(
    f"{FOLDER}/evaluate.py",
    "score masks against label files, `sightline evaluate MASKS --labels DIR`",
    (
        Flag(
            "--preds",
            "text",
            None,
            Field(
                "evaluate MASKS",
                effect="CASE.nii.gz, which predict writes beside CASE.npy",
                make=nothing,
                on=(EVALUATE,),
            ),
        ),
        Flag("--lbls", "text", None, Field("--labels", make=nothing, on=(EVALUATE,))),
    ),
    _evaluate,
)


# demo_unet.py: the launcher, with defaults of its own

FORWARDED = (
    "data task gpus hpus learning_rate tta deep_supervision save_ckpt seed fold batch_size val_batch_size factor "
    "num_workers min_epochs max_epochs channels_last scheduler optimizer train_batches test_batches dim norm ckpt_path "
    "benchmark exec_mode"
).split()
DEMO_DEFAULTS = {"data": "/root/software/data/pytorch/unet/01_2d/", "dim": "2"}
LISTS = ("--hmp-bf16", "./config/ops_bf16_unet2d.txt", "--hmp-fp32", "./config/ops_fp32_unet2d.txt")
DEMO_FLAGS = (
    *(
        replace(
            flag,
            spellings="-p --data" if flag.key == "data" else flag.spellings,
            default=DEMO_DEFAULTS.get(flag.key, flag.default),
        )
        for flag in MAIN.flags
        if flag.key in FORWARDED
    ),
    Flag(
        "--mode",
        "text",
        "lazy",
        Field("main.py --run_lazy_mode", effect="no meaning here", make=nothing),
        ("lazy", "eager"),
    ),
    Flag(
        "--data_type",
        "text",
        "fp32",
        Field("main.py --hmp", effect="bf16, with the lists of operations", make=nothing),
        ("fp32", "bf16"),
    ),
    Flag("--dist", "switch", False, Notice("unused there too")),
)


def words_for_main(given: Given, keys: Sequence[str]) -> list[str]:
    """Write the flags of main.py that a launcher passes on: those that are named or differ from main.py's own."""
    words: list[str] = []
    for flag in MAIN.flags:
        if flag.key not in keys or (flag.key not in given.named and given[flag.key] == flag.default):
            continue
        value = given[flag.key]
        words += [] if value is None or value is False else [flag.name] if value is True else [flag.name, str(value)]
    return words


def _call_main(given: Given) -> tuple[str, list[str]]:
    words = ["--results", f"/tmp/Unet/fold_{given['fold']}", *words_for_main(given, FORWARDED)]
    words += ["--run_lazy_mode"] if given["mode"] == "lazy" else []
    words += ["--hmp", *LISTS] if given["data_type"] == "bf16" else []
    words += ["--resume_training"] if given["ckpt_path"] else []
    return MAIN.path, words


DEMO = Script(
    f"{FOLDER}/demo_unet.py",
    "launcher of main.py with defaults of its own",
    DEMO_FLAGS,
    MAIN.mode,
    forward=_call_main,
)


# scripts/ of the upstream repository: each calls main.py with flags of its own and fixed ones


def _call_train(given: Given) -> tuple[str, list[str]]:
    if missing := [name for name in ("gpus", "fold", "dim") if name not in given.named]:
        raise UsageError(f"scripts/train.py needs --{', --'.join(missing)}")
    sizes = ("64", "64") if given["dim"] == "2" else ("2", "4")
    fixed = ["--exec_mode", "train", "--deep_supervision", "--save_ckpt"]
    fixed += ["--batch_size", sizes[0], "--val_batch_size", sizes[1]]
    return MAIN.path, [*words_for_main(given, TRAIN_KEYS), *fixed]


def _call_inference(given: Given) -> tuple[str, list[str]]:
    words = words_for_main(given, [key for key in INFERENCE_KEYS if key != "batch_size"])
    return MAIN.path, ["--exec_mode", "predict", "--gpus", "1", *words, "--val_batch_size", str(given["batch_size"])]


def _call_benchmark(given: Given) -> tuple[str, list[str]]:
    fixed = ["--exec_mode", given["mode"], "--benchmark", "--max_epochs", "2", "--min_epochs", "1"]
    return MAIN.path, [*words_for_main(given, BENCHMARK_KEYS), *fixed, "--optimizer", "adam"]


def _flags(keys: Sequence[str], **defaults: Any) -> tuple[Flag, ...]:
    flags = {flag.key: flag for flag in MAIN.flags}
    return tuple(replace(flags[key], default=defaults.get(key, flags[key].default)) for key in keys)


TRAIN_KEYS = "task gpus fold dim amp tta results logname".split()
INFERENCE_KEYS = "data task fold dim ckpt_path batch_size amp tta save_preds".split()
BENCHMARK_KEYS = "task gpus dim batch_size amp train_batches test_batches warmup logname profile results".split()
WHAT = Flag("--mode", "text", "train", Field("main.py --exec_mode", make=nothing), ("train", "predict"))
CALLING_MAIN = (
    Script(
        f"{FOLDER}/scripts/train.py",
        "upstream's call of Unet2D's main.py for training",
        _flags(TRAIN_KEYS, task="01"),
        MAIN.mode,
        forward=_call_train,
    ),
    Script(
        f"{FOLDER}/scripts/inference.py",
        "upstream's call of main.py for prediction",
        _flags(INFERENCE_KEYS, task="01", batch_size=4),
        MAIN.mode,
        forward=_call_inference,
    ),
    Script(
        f"{FOLDER}/scripts/benchmark.py",
        "upstream's call of main.py for its benchmark",
        (
            *_flags(BENCHMARK_KEYS, task="01", gpus=1, train_batches=150, test_batches=150, warmup=50),
            WHAT,
        ),
        MAIN.mode,
        forward=_call_benchmark,
    ),
)
SCRIPTS = (MAIN, DEMO, DOWNLOAD, PREPROCESS, EVALUATION, *CALLING_MAIN)
