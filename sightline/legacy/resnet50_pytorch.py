"""train.py of the ResNet-50 README (PyTorch, GPU migration): torchvision's reference script with three patches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sightline.errors import UsageError
from sightline.legacy.start import Start
from sightline.legacy.table import EVALUATE, TRAIN, Field, Flag, Given, Mode, Notice, Refused, Script, nothing, plain

POLICIES = {"ra": "randaugment", "ta_wide": "trivialaugment", "augmix": "augmix", "imagenet": "autoaugment"}
TRANSFORMERS = ("vit", "swin", "maxvit")
FALSE = ("0", "f", "false")
TABLE = "1 2 3 4 30 60 80", "0.275 0.45 0.625 0.8 0.08 0.008 0.0008"  # epochs and rates of custom_lr
DEAD = "the original read it and ignored it; here it acts"


def _batch(given: Given) -> Sequence[str]:
    return ["--train.global-batch", str(given["batch_size"] * given.ranks)]


def _classes(given: Given) -> Sequence[str]:
    arch = [] if given["model"] == "resnet50" else ["--model.arch", given["model"]]
    return [*arch, "--data.classes", "0"]


def _decoder(given: Given) -> Sequence[str]:
    is_off = given.variable("PT_HPU_MEDIA_PIPE").lower() in FALSE
    return ["--data.decoder", "cpu"] if given["dl_worker_type"] == "MP" or is_off else []


def _optimizer(given: Given) -> Sequence[str]:
    kind = given["opt"].lower()
    momentum = [] if given["momentum"] == 0.9 else ["--optimizer.momentum", plain(given["momentum"])]
    if kind.startswith("sgd"):
        return [*momentum, *(["--optimizer.nesterov"] if "nesterov" in kind else [])]
    if kind == "rmsprop":
        numbers = ["--optimizer.alpha", "0.9", "--optimizer.eps", "0.0316"]
        return ["--optimizer.kind", "rmsprop", *numbers, "--optimizer.momentum", plain(given["momentum"])]
    if kind == "adamw":
        return ["--optimizer.kind", "adamw"]
    raise UsageError(f"--opt {given['opt']}: train.py knows sgd, sgd_nesterov, rmsprop and adamw")


def _schedule(given: Given) -> Sequence[str]:
    kind, warmup = given["lr_scheduler"].lower(), given["lr_warmup_epochs"]
    words: list[str] = []
    if kind == "steplr":
        drops = range(
            warmup + given["lr_step_size"],
            max(given["epochs"], warmup + given["lr_step_size"] + 1),
            given["lr_step_size"],
        )
        words = ["--schedule.kind", "step", "--schedule.drop-epochs", *map(str, drops)]
        words += ["--schedule.factor", plain(given["lr_gamma"])]
    elif kind == "cosineannealinglr":
        words = ["--schedule.kind", "cosine", "--schedule.unit", "epoch", "--schedule.final-lr", plain(given["lr_min"])]
    elif kind == "exponentiallr":
        words = ["--schedule.kind", "exponential", "--schedule.unit", "epoch"]
        words += ["--schedule.factor", plain(given["lr_gamma"])]
    elif kind == "custom_lr":
        epochs, rates = TABLE
        words = ["--schedule.kind", "table", "--schedule.table-epochs", *epochs.split()]
        words += ["--schedule.table-rates", *rates.split()]
    else:
        known = "custom_lr, steplr, cosineannealinglr and exponentiallr"
        raise UsageError(f"--lr-scheduler {given['lr_scheduler']}: train.py knows {known}")
    if warmup:
        words += [] if "--schedule.unit" in words else ["--schedule.unit", "epoch"]
        words += ["--schedule.warmup-epochs", str(warmup), "--schedule.warmup", given["lr_warmup_method"]]
        words += ["--schedule.warmup-factor", plain(given["lr_warmup_decay"])]
    else:
        words += ["--schedule.warmup-epochs", "0"]
    return ["--optimizer.lr-for-batch", "0", *words]  # rates that do not scale


def _precision(given: Given) -> Sequence[str]:
    if not given["amp"]:
        return ["--train.precision", "fp32"]
    is_bf16 = given.variable("PT_HPU_CONVERT_FP16_TO_BF16_FOR_MIGRATION") not in ("", "0")
    return [] if is_bf16 else ["--train.precision", "fp16"]


def _policy(given: Given) -> Sequence[str]:
    if given["auto_augment"] is None:
        return []
    if given["auto_augment"] not in POLICIES:
        raise UsageError(f"--auto-augment {given['auto_augment']}: known here: {', '.join(POLICIES)}")
    return ["--data.policy", POLICIES[given["auto_augment"]]]


def _sizes(given: Given) -> Sequence[str]:
    """Write the sizes of evaluation along with that of training, which they would follow."""
    sizes = {"size": (given["train_crop_size"], 224), "eval-size": (given["val_crop_size"], 224)}
    sizes["eval-resize"] = (given["val_resize_size"], 256)
    if all(size == own for size, own in sizes.values()):
        return []
    return [word for name, (size, _) in sizes.items() for word in (f"--data.{name}", str(size))]


def _ema(given: Given) -> Sequence[str]:
    if not given["model_ema"]:
        return []
    words = ["--train.ema", plain(given["model_ema_decay"]), "--train.ema-every-steps", str(given["model_ema_steps"])]
    return [*words, "--train.ema-rule", "torchvision"]


def _weights(given: Given) -> Sequence[str]:
    """ResNet50_Weights.IMAGENET1K_V1, or its last word alone, of the model that is trained."""
    name = given["weights"]
    return ["--model.weights", f"torchvision:{given['model']}.{name.rpartition('.')[2]}"] if name else []


def _keep(given: Given) -> Sequence[str]:
    return ["--run.keep", str(given["epochs"])] if given["save_checkpoint"] else []


def _repeats(given: Given) -> Sequence[str]:
    return ["--train.repeats", str(given["ra_reps"])] if given["ra_sampler"] else []


def _resume(given: Given) -> Sequence[str]:
    path = given["resume"]
    if not path or given["test_only"]:
        return []
    if path.endswith((".pth", ".pt")):
        raise UsageError(
            f"--resume {path}: the state of the original's optimizer cannot be read; start from its weights with "
            f"`sightline legacy --set model.weights={path} train.py ...`, without --resume"
        )
    return ["--run.resume", path]


def _device(given: Given) -> str:
    """Return cpu, or a device by its number, as asked for; cuda, hpu and the like mean what the machine has."""
    word = given["device"]
    return given.start.device or (word if word == "cpu" or ":" in word else "")


def _settle(given: Given) -> Start:
    start = replace(given.start, device=_device(given))
    if start.launcher == "mpirun" and not start.is_rank:
        raise UsageError("train.py is started by torchrun, e.g. torchrun --nproc_per_node 8 train.py")
    return start


def _mode(given: Given) -> Mode:
    if given["transformer_embedding_decay"] is not None and given["model"].startswith(TRANSFORMERS):
        raise UsageError(
            f"--transformer-embedding-decay: embeddings of {given['model']} have no decay of their own; leave it out"
        )
    if not given["test_only"]:
        return Mode(TRAIN, ("resnet50",), recipe="resnet50")
    if given["resume"].endswith((".pth", ".pt")):
        raise UsageError(f"--test-only --resume {given['resume']}: expected a run folder, or a ckpt-* folder, of ours")
    folder = given["resume"] or (given["output_dir"] if "output_dir" in given.named else "runs/resnet50")
    return Mode(EVALUATE, (folder, "--checkpoint", "latest"))


def _out(given: Given) -> Sequence[str]:
    return ["--run.out", given["output_dir"]] if "output_dir" in given.named else []


def _workers(given: Given) -> Sequence[str]:
    return ["--run.workers", str(given["workers"])] if "workers" in given.named else []


BOTH = (TRAIN, EVALUATE)
WITH_SCHEDULER = "see --lr-scheduler"

FLAGS = (
    Flag("--data-path", "text", "/datasets01/imagenet_full_size/061417/", Field("--data.path", on=BOTH)),
    Flag(
        "--model", "text", "resnet18", Field("--model.arch", "resnet50", "as many classes as the folder has", _classes)
    ),
    Flag(
        "--device",
        "text",
        "cuda",
        Field("--run.device", effect="cuda and hpu: what the machine has", make=nothing, on=BOTH),
    ),
    Flag(
        "-b --batch-size",
        "int",
        32,
        Field("--train.global-batch", effect="of one rank there, of all here", make=_batch),
        least=1,
    ),
    Flag("--epochs", "int", 90, Field("--train.epochs", 90)),
    Flag(
        "--dl-worker-type",
        "text",
        "HABANA",
        Field("--data.decoder", effect="MP: cpu; HABANA: where the device can", make=_decoder),
        ("MP", "HABANA"),
    ),
    Flag(
        "-j --workers",
        "int",
        16,
        Field("--run.workers", effect="changes no result; chosen from the cores if not given", make=_workers),
    ),
    Flag(
        "--opt", "text", "sgd", Field("--optimizer.kind", effect="sgd, sgd_nesterov, rmsprop, adamw", make=_optimizer)
    ),
    Flag("--lr", "float", 0.1, Field("--optimizer.lr", 0.1, "custom_lr: of the first epoch only")),
    Flag("--momentum", "float", 0.9, Field("--optimizer.momentum", effect="see --opt", make=nothing)),
    Flag("--wd --weight-decay", "float", 1e-4, Field("--optimizer.weight-decay", 1e-4)),
    Flag("--norm-weight-decay", "float", None, Field("--optimizer.norm-weight-decay")),
    Flag(
        "--bias-weight-decay", "float", None, Field("--optimizer.bias-weight-decay", effect="of biases outside norms")
    ),
    Flag(
        "--transformer-embedding-decay",
        "float",
        None,
        Notice("a convolutional network has no embeddings; for ViT and Swin it is an error"),
    ),
    Flag("--label-smoothing", "float", 0.0, Field("--task.label-smoothing", 0.0)),
    Flag("--mixup-alpha", "float", 0.0, Field("--data.mixup", 0.0)),
    Flag("--cutmix-alpha", "float", 0.0, Field("--data.cutmix", 0.0)),
    Flag(
        "--lr-scheduler",
        "text",
        "custom_lr",
        Field("--schedule.kind", effect="custom_lr: absolute rates, as there", make=_schedule),
    ),
    Flag(
        "--lr-warmup-epochs",
        "int",
        0,
        Field("--schedule.warmup-epochs", effect="crashed with custom_lr there", make=nothing),
        least=0,
    ),
    Flag(
        "--lr-warmup-method",
        "text",
        "constant",
        Field("--schedule.warmup", effect=WITH_SCHEDULER, make=nothing),
        ("constant", "linear"),
    ),
    Flag("--lr-warmup-decay", "float", 0.01, Field("--schedule.warmup-factor", effect=WITH_SCHEDULER, make=nothing)),
    Flag("--lr-step-size", "int", 30, Field("--schedule.drop-epochs", effect=WITH_SCHEDULER, make=nothing), least=1),
    Flag("--lr-gamma", "float", 0.1, Field("--schedule.factor", effect=WITH_SCHEDULER, make=nothing)),
    Flag("--lr-min", "float", 0.0, Field("--schedule.final-lr", effect=WITH_SCHEDULER, make=nothing)),
    Flag("--print-freq", "int", 10, Field("--run.log-every-steps", 10)),
    Flag(
        "--output-dir",
        "text",
        ".",
        Field("--run.out", effect="runs/resnet50 if not given", make=_out, read_on=(EVALUATE,)),
    ),
    Flag(
        "--resume",
        "text",
        "",
        Field(
            "--run.resume", effect="of our own runs, which also resume by themselves", make=_resume, read_on=(EVALUATE,)
        ),
    ),
    Flag("--start-epoch", "int", 0, Refused("a run resumes at its step by itself; leave it out")),
    Flag("--seed", "int", 123, Field("--train.seed", 123)),
    Flag("--cache-dataset", "switch", False, Notice("the list of files is kept beside the data by itself")),
    Flag(
        "--sync-bn",
        "switch",
        False,
        Field(
            "--train.bn-group",
            effect="over all ranks",
            make=lambda given: ["--train.bn-group", "-1"] if given["sync_bn"] else [],
        ),
    ),
    Flag(
        "--test-only",
        "switch",
        False,
        Field("evaluate RUN", effect="RUN is --resume or --output-dir", make=nothing, on=BOTH),
    ),
    Flag("--auto-augment", "text", None, Field("--data.policy", effect=DEAD, make=_policy)),
    Flag("--ra-magnitude", "int", 9, Field("--data.policy-magnitude", 9, DEAD)),
    Flag("--augmix-severity", "int", 3, Field("--data.augmix-severity", 3, DEAD)),
    Flag("--random-erase", "float", 0.0, Field("--data.random-erase", 0.0, DEAD)),
    Flag("--train-crop-size", "int", 224, Field("--data.size", effect=DEAD, make=_sizes)),
    Flag("--interpolation", "text", "bilinear", Field("--data.interpolation", "bilinear", DEAD)),
    Flag("--val-resize-size", "int", 256, Field("--data.eval-resize", effect=DEAD, make=nothing)),
    Flag("--val-crop-size", "int", 224, Field("--data.eval-size", effect=DEAD, make=nothing)),
    Flag(
        "--amp",
        "switch",
        False,
        Field(
            "--train.precision",
            effect="fp16; bf16 with PT_HPU_CONVERT_FP16_TO_BF16_FOR_MIGRATION=1; without, fp32",
            make=_precision,
        ),
    ),
    Flag("--world-size", "int", 1, Notice("the launcher says how many ranks there are")),
    Flag("--dist-url", "text", "env://", Notice("ranks find each other by the launcher's variables")),
    Flag(
        "--model-ema",
        "switch",
        False,
        Field("--train.ema", effect="decay scaled by batch and epochs as there", make=_ema),
    ),
    Flag("--model-ema-steps", "int", 32, Field("--train.ema-every-steps", effect="with --model-ema", make=nothing)),
    Flag("--model-ema-decay", "float", 0.99998, Field("--train.ema", effect="with --model-ema", make=nothing)),
    Flag("--use-deterministic-algorithms", "switch", False, Field("--train.deterministic", False)),
    Flag("--clip-grad-norm", "float", None, Field("--train.clip")),
    Flag("--ra-sampler", "switch", False, Field("--train.repeats", effect="--ra-reps times", make=_repeats)),
    Flag("--ra-reps", "int", 3, Field("--train.repeats", effect="with --ra-sampler", make=nothing)),
    Flag(
        "--weights",
        "text",
        None,
        Field("--model.weights", effect="torchvision:MODEL.NAME, fetched into the user's cache", make=_weights),
    ),
    Flag(
        "--save-checkpoint",
        "switch",
        False,
        Field("--run.keep", effect="every epoch's is kept; without, the newest two and the best", make=_keep),
    ),
    Flag(
        "--use-torch-compile",
        "switch",
        False,
        Field(
            "--run.compile",
            effect="without: where it pays (auto)",
            make=lambda given: ["--run.compile", "on"] if given["use_torch_compile"] else [],
        ),
    ),
)

SCRIPT = Script(
    "PyTorch/examples/gpu_migration/computer_vision/classification/torchvision/train.py",
    "ResNet-50 by torchvision's reference script, `sightline train resnet50`",
    FLAGS,
    _mode,
    settle=_settle,
)
