"""Shared by the two TensorFlow classifiers: flags for ImageNet, batches, logs, and the preparation of records."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from sightline.errors import UsageError
from sightline.legacy.start import SSH_PORT, Start, with_networks
from sightline.legacy.table import (
    EVALUATE,
    PREPARE,
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
)
from sightline.terminal import say

IMAGES = 1_281_167
BOTH = (TRAIN, EVALUATE)
LOGGERS = ("BaseBenchmarkLogger", "BenchmarkFileLogger", "BenchmarkBigQueryLogger")
FORCED = "FORCE_HABANA_IMAGENET_LOADER_FALLBACK"


def global_batch(given: Given) -> int:
    """Return the samples of an update: per worker under Horovod, of all under a strategy."""
    is_global = given.values.get("distribution_strategy", "off") not in ("", "off")
    return int(given["batch_size"]) * (1 if is_global else given.ranks)


def batch(given: Given) -> Sequence[str]:
    """Write the global batch; a strategy's must split over its replicas."""
    size = global_batch(given)
    if size % given.ranks:
        near = -(-size // given.ranks) * given.ranks
        raise UsageError(f"--batch_size {size} cannot be split over {given.ranks} workers; use e.g. {near}")
    return ["--train.global-batch", str(size)]


def data_path(given: Given) -> Sequence[str]:
    """Choose between records, JPEG folders and made-up images."""
    if given["use_synthetic_data"]:
        return ["--data.path", f"synthetic:classes=1000,samples={IMAGES},size=224"]
    is_forced = bool(given.variable(FORCED))
    if given["jpeg_data_dir"] and not is_forced:
        return ["--data.path", given["jpeg_data_dir"], "--data.source", "folder"]
    records = ["--data.path", given["data_dir"], "--data.source", "tfrecord"]
    return [*records, *(["--data.decoder", "cpu"] if is_forced else [])]


def precision(given: Given) -> Sequence[str]:
    """Write the dtype; the recipes' own is bf16."""
    return [] if given["dtype"] == "bf16" else ["--train.precision", given["dtype"]]


def image_type(given: Given) -> Sequence[str]:
    """Write the type that images travel in, where it is given."""
    name = "data_loader_image_type"
    return ["--data.image-type", given[name]] if name in given.named else []


def run_folder(given: Given) -> str:
    """Return where the original's first worker wrote: worker_0 of the model folder under Horovod."""
    folder = given.folder("model_dir")
    return f"{folder}/worker_0" if given["use_horovod"] else folder


def out(given: Given) -> Sequence[str]:
    """Write the run folder."""
    return ["--run.out", run_folder(given)]


def whole_evaluation(given: Given) -> Sequence[str]:
    """Let every rank evaluate the whole set with statistics of its own, as Horovod's workers did."""
    if given.ranks == 1 or not given["use_horovod"] or given.values.get("use_distributed_eval"):
        return []
    return ["--train.eval-shards", "full", "--train.bn-eval", "local"]


def evaluations(given: Given) -> Sequence[str]:
    """Write how often the run evaluates, or that it never does."""
    every = given["epochs_between_evals"]
    if given.values.get("skip_eval") or given.values.get("disable_eval"):
        return ["--train.eval-every-epochs", str(given["train_epochs"] + 1), "--train.no-eval-at-end"]
    return [] if every == 1 else ["--train.eval-every-epochs", str(every)]


def benchmark_log(given: Given) -> Sequence[str]:
    """Write metric.log where the file logger is chosen."""
    if given["benchmark_logger_type"] == "BenchmarkBigQueryLogger":
        raise UsageError("BenchmarkBigQueryLogger sends results away; use --benchmark_logger_type BenchmarkFileLogger")
    if given["benchmark_logger_type"] != "BenchmarkFileLogger":
        return []
    if not given["benchmark_log_dir"]:
        raise UsageError("--benchmark_logger_type BenchmarkFileLogger needs --benchmark_log_dir DIR")
    test_id = ["--run.test-id", given["benchmark_test_id"]] if given["benchmark_test_id"] else []
    return ["--run.benchmark-log", given["benchmark_log_dir"], *test_id]


def settle_horovod(given: Given, per_host: int = 0) -> Start:
    """Return who starts the ranks of a script that Horovod runs in: mpirun's line, a launcher, or --per_host."""
    start = given.start
    if start.ranks > 1 and not given["use_horovod"] and given.values.get("distribution_strategy", "off") == "off":
        raise UsageError(f"{start.ranks} ranks, but without --use_horovod each would train alone; add --use_horovod")
    if start.launcher == "torchrun":
        raise UsageError("this script is started by mpirun, e.g. mpirun -np 8 python3 SCRIPT --use_horovod")
    hosts = [host for host in given.variable("MULTI_HLS_IPS").split(",") if host]
    if start.is_rank or start.launcher:
        return start
    if len(hosts) > 1 and per_host:
        start = with_networks(start, given.variable("MPI_TCP_INCLUDE"))
        port = given.variable("DOCKER_SSHD_PORT")
        if port and not port.isdecimal():
            raise UsageError(f"DOCKER_SSHD_PORT={port}: expected the port of sshd on the hosts, e.g. {SSH_PORT}")
        return replace(
            start,
            ranks=per_host * len(hosts),
            hosts=tuple((host, per_host) for host in hosts),
            ssh_port=int(port or SSH_PORT),
            prefix=given.variable("MPI_ROOT"),
        )
    return replace(start, ranks=per_host)


SEEDS = Notice("one seed decides all: --train.seed")
THREADS = Notice("loader processes are chosen from the cores; `--set run.workers=N` for another number")
GRAPH = Notice("of TensorFlow's graphs; torch.compile is --run.compile")
ONLY_WITH_LOGGER = "with --benchmark_logger_type BenchmarkFileLogger"

DATA_DIR = Flag("-dd --data_dir", "text", "", Field("--data.path", effect="TFRecords", make=data_path, on=BOTH))
USE_HOROVOD = Flag(
    "--use_horovod",
    "bool",
    False,
    Field(
        "--run.devices",
        effect="--batch_size is of one worker; the run lies in worker_0",
        make=whole_evaluation,
        read_on=(EVALUATE,),
    ),
)
SHARED = (
    Flag(
        "-dt --dtype",
        "text",
        "fp32",
        Field("--train.precision", effect="autocast", make=precision),
        ("fp32", "bf16", "fp16"),
    ),
    Flag(
        "-dlit --data_loader_image_type",
        "text",
        "fp32",
        Field("--data.image-type", effect="uint8 if not given: whole grey levels", make=image_type),
        ("fp32", "bf16"),
    ),
    DATA_DIR,
    Flag(
        "-jpdd --jpeg_data_dir",
        "text",
        None,
        Field("--data.path", effect="folders train/ and val/, instead of --data_dir", make=nothing, on=BOTH),
    ),
    Flag(
        "--use_synthetic_data",
        "bool",
        False,
        Field("--data.path synthetic:...", effect="instead of --data_dir", make=nothing, on=BOTH),
    ),
    Flag(
        "-ebe --epochs_between_evals",
        "int",
        1,
        Field("--train.eval-every-epochs", effect="and after the last epoch, as there", make=evaluations),
    ),
    USE_HOROVOD,
    Flag(
        "--experimental_preloading", "bool", True, Field("--run.device-prefetch", True, "copies the next batch ahead")
    ),
    Flag("--enable_scoped_allocator", "bool", False, Notice("gradients travel in buckets: --run.bucket-mb")),
    Flag(
        "--data_format",
        "text",
        "channels_last",
        Field(
            "--run.channels-last",
            effect="memory format",
            make=lambda given: [] if given["data_format"] == "channels_last" else ["--run.no-channels-last"],
        ),
        ("channels_last", "channels_first"),
    ),
    Flag(
        "--benchmark_logger_type",
        "text",
        LOGGERS[0],
        Field(
            "--run.benchmark-log",
            effect="BenchmarkFileLogger writes metric.log; BigQuery is an error",
            make=benchmark_log,
        ),
        LOGGERS,
    ),
    Flag("--benchmark_log_dir", "text", "", Field("--run.benchmark-log", effect=ONLY_WITH_LOGGER, make=nothing)),
    Flag("--benchmark_test_id", "text", "", Field("--run.test-id", effect=ONLY_WITH_LOGGER, make=nothing)),
)


# preprocess_imagenet.py, which both READMEs use.


def _preprocess(given: Given) -> Mode:
    raw, scratch = given["raw_data_dir"], given["local_scratch_dir"]
    if not raw or not scratch:
        raise UsageError("preprocess_imagenet.py needs --raw_data_dir and --local_scratch_dir")
    raw = raw.rstrip("/")
    tars = [f"{raw}/ILSVRC2012_img_{split}.tar" for split in ("train", "val")]
    if all(os.path.isfile(tar) for tar in tars):
        words = ("imagenet", "--train", tars[0], "--val", tars[1], "--labels", f"{raw}/synset_labels.txt")
        return Mode(PREPARE, (*words, "--out", scratch, "--form", "tfrecord"))
    links = f"{raw}/by_class"
    sort = Act(f"link the images below {raw} by class into {links}", lambda: link_by_class(Path(raw), Path(links)))
    shards = ("--shards", "1024", "--val-shards", "128", "--repair")
    return Mode(
        PREPARE, ("convert", "--source", links, "--out", scratch, "--form", "tfrecord", *shards), before=(sort,)
    )


def link_by_class(raw: Path, links: Path) -> None:
    """Make train/ and val/ with class folders of what the README unpacks, without copying: val/ from its flat folder
    and synset_labels.txt. Links of an earlier run that lead elsewhere are made again or removed."""
    wanted = {links / "train": _first(raw, ("train", "img_train")).resolve(), **_links_of_val(raw, links)}
    stale = _stale(links, wanted)
    for link in stale:
        link.unlink()
    for folder, _, _ in os.walk(links, topdown=False):
        if folder != str(links) and not os.listdir(folder):
            os.rmdir(folder)
    if stale:
        many = f"{len(stale)} link{'s' * (len(stale) > 1)}"
        say(f"legacy: removed {many} of an earlier run from {links}, whose images have moved")
    for link, target in wanted.items():
        if not link.is_symlink():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(target)


def _links_of_val(raw: Path, links: Path) -> dict[Path, Path]:
    """Return links for val/ with their targets: one if it has class folders, otherwise one for each image."""
    val = _first(raw, ("validation", "img_val", "val"))
    if any(entry.is_dir() for entry in val.iterdir()):
        return {links / "val": val.resolve()}
    labels = raw / "synset_labels.txt"
    if not labels.is_file():
        raise UsageError(f"{labels} is missing; it gives the class of every validation image, one a line")
    images = sorted(entry for entry in val.iterdir() if entry.is_file())
    synsets = labels.read_text(encoding="utf-8").split()
    if len(images) != len(synsets):
        raise UsageError(f"{val} holds {len(images)} images and {labels} {len(synsets)} lines; both must be equal")
    for synset in synsets:
        if "/" in synset or synset.startswith("."):
            raise UsageError(f"{labels}: '{synset}' is not a synset, e.g. n01440764")
    return {links / "val" / synset / image.name: image.resolve() for image, synset in zip(images, synsets, strict=True)}


def _stale(links: Path, wanted: Mapping[Path, Path]) -> list[Path]:
    """Return the links of an earlier run that are not wanted now, or lead elsewhere; UsageError if a file of the user's
    lies among them. Hidden files, such as an index, may lie beside train/ and val/."""
    stale = []
    for folder, folders, files in os.walk(links):
        for path in (Path(folder, name) for name in sorted((*folders, *files))):
            if path.is_symlink():
                if path not in wanted or os.readlink(path) != str(wanted[path]):
                    stale.append(path)
            elif not path.is_dir() and not (path.parent == links and path.name.startswith(".")):
                raise UsageError(f"{path} is not a link of this command; move it away")
    return stale


def _first(raw: Path, names: Sequence[str]) -> Path:
    for name in names:
        if (raw / name).is_dir():
            return raw / name
    raise UsageError(f"{raw} has no folder {' or '.join(names)}; unpack ImageNet's archives there, or put them there")


UPLOAD = Notice("nothing is uploaded anywhere")
PREPROCESS = Script(
    "TensorFlow/computer_vision/Resnets/preprocess_imagenet.py",
    "ImageNet to TFRecords, `sightline prepare convert` or `prepare imagenet`",
    (
        Flag(
            "--raw_data_dir",
            "text",
            None,
            Field("--source", effect="the unpacked archives, or the archives themselves", make=nothing, on=(PREPARE,)),
        ),
        Flag(
            "--local_scratch_dir",
            "text",
            None,
            Field("--out", effect="train/ and validation/ with 1024 and 128 shards", make=nothing, on=(PREPARE,)),
        ),
        Flag("--gcs_upload", "bool", False, Refused("nothing is uploaded; copy the folder yourself")),
        Flag("--project", "text", None, UPLOAD),
        Flag("--gcs_output_path", "text", None, UPLOAD),
    ),
    _preprocess,
    style="absl",
)
