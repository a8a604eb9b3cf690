"""Translations of command lines against numbers worked out by hand from descriptions of the originals."""

import json
import re
import shlex
from pathlib import Path

import pytest

from sightline import config
from sightline.errors import UsageError
from sightline.legacy.command import legacy
from sightline.legacy.line import read, split
from sightline.legacy.start import Start, of_environment
from sightline.legacy.table import Act
from sightline.legacy.translate import Translation, find_scripts, translate
from sightline.train.schedules import RunLength


def became(text: str, start: Start | None = None, device: str = "") -> Translation:
    return translate(read(split(text, {"PYTHON": "python3"}), start or Start()), device)


def words(text: str, **more) -> list[str]:
    """The command alone."""
    [found] = [step for step in became(text, **more).steps if not isinstance(step, Act)]
    return list(found)


def value(found: list[str], flag: str) -> str:
    return found[found.index(flag) + 1]


def rates(text: str, samples: int, steps: dict[int, float]) -> None:
    """The rates of a command at these steps."""
    _, name, *flags = words(text)
    ranks = int(value(flags, "--run.devices")) if "--run.devices" in flags else 1
    recipe, _ = config.load(name, flags)
    batch = recipe.train.global_batch
    per_epoch = -(-samples // batch) if recipe.train.last_batch == "pad" else samples // batch
    plan = RunLength(recipe.train.epochs, recipe.train.steps_per_epoch or per_epoch, samples, batch)
    base = recipe.optimizer.base_lr(batch, ranks)
    assert {step: recipe.schedule.rate(step, base, plan) for step in steps} == pytest.approx(steps, rel=5e-4)


IMAGENET, COCO = 1_281_167, 117_266
DEMO_8 = "demo_resnet_keras.py --use_horovod --num_workers_per_hls 8 -bs 256"


@pytest.mark.parametrize(
    ("text", "samples", "steps"),
    [
        ("train.py -b 256", IMAGENET, {0: 0.1, 5004: 0.275, 4 * 5004: 0.8, 30 * 5004: 0.08, 80 * 5004: 0.0008}),
        (
            "train.py --lr 1 --lr-scheduler steplr -b 256 --lr-gamma 0.5",
            IMAGENET,
            {0: 1, 30 * 5004: 0.5, 60 * 5004: 0.25},
        ),
        (
            "train.py --lr 1 --lr-scheduler cosineannealinglr -b 256 --epochs 10",
            IMAGENET,
            {5 * 5004: 0.5, 5 * 5004 + 9: 0.5},
        ),
        (
            "train.py --lr 1 --lr-scheduler cosineannealinglr -b 256 --epochs 12 --lr-warmup-epochs 2 "
            "--lr-warmup-method linear --lr-warmup-decay 0.5",
            IMAGENET,
            {0: 0.5, 5004: 0.75, 2 * 5004: 1, 7 * 5004: 0.5},
        ),
        (
            "train.py --lr 1 --lr-scheduler exponentiallr --lr-gamma 0.5 -b 256",
            IMAGENET,
            {0: 1, 5004: 0.5, 10008: 0.25},
        ),
        (DEMO_8 + " -te 90", IMAGENET, {1: 0.000256, 625: 0.16, 3124: 0.799744, 3125: 0.8, 18750: 0.8, 18751: 0.08}),
        ("demo_resnet_keras.py -te 90", IMAGENET, {25020: 0.1, 12510: 0.05}),
        (
            DEMO_8 + " --optimizer LARS -te 40",
            IMAGENET,
            {1: 0.0050667, 625: 3.1666667, 1875: 9.5, 1876: 9.4991784, 12500: 2.7760236, 24999: 0.0001001},
        ),
        ("demo_resnet_keras.py --optimizer LARS -te 40", IMAGENET, {15012: 2.5, 15013: 2.499973, 100080: 0.7305377}),
        (
            "resnet_ctl_imagenet_main.py --lr_schedule constant --base_learning_rate 0.4 -bs 64",
            IMAGENET,
            {0: 0.1, 99: 0.1},
        ),
        (
            "resnet_ctl_imagenet_main.py --lr_schedule polynomial --base_learning_rate 2.5 --warmup_epochs 3 -te 40",
            IMAGENET,
            {15012: 2.5, 15013: 2.499973, 100080: 0.7305377},
        ),
        (
            "mpirun -np 8 imagenet_main.py --use_horovod -bs 128 -te 90",
            IMAGENET,
            {1: 0.0001023, 10008: 1.0238977, 10009: 1.0041663, 56295: 0.5120857},
        ),
        ("imagenet_main.py -bs 256 -te 90 --nouse_cosine_lr", IMAGENET, {40036: 0.128, 150136: 0.128, 150137: 0.0128}),
        (
            "mpirun -np 8 ssd.py --use_horovod -b 128 -e 64",
            COCO,
            {0: 0, 287: 0.0479165, 575: 0.096, 4599: 0.096, 4600: 0.0096, 5750: 0.00096},
        ),
        (
            "mpirun -np 8 ssd.py --use_horovod --k 5 -e 64",
            COCO,
            {60 * 115 - 1: 0.096, 60 * 115: 0.0096, 75 * 115: 0.00096},
        ),
    ],
    ids=lambda text: text[:60] if isinstance(text, str) else "",
)
def test_rates_are_the_originals(text: str, samples: int, steps: dict[int, float]):
    rates(text, samples, steps)


@pytest.mark.parametrize(
    ("text", "batch"),
    [
        ("torchrun --nproc_per_node 8 train.py -b 256", 2048),
        ("torchvision/train.py", 32),
        ("torchrun torchvision/train.py", 32),
        (DEMO_8, 2048),
        ("demo_resnet_keras.py --distribution_strategy hpu --num_workers_per_hls 8 -bs 2048", 2048),
        ("MULTI_HLS_IPS=a,b demo_resnet_keras.py --use_horovod --num_workers_per_hls 8", 4096),
        ("mpirun -np 64 -H a:32,b:32 imagenet_main.py --use_horovod -bs 128", 8192),
        ("mpirun -np 8 ssd.py --use_horovod", 1024),
        ("main.py --task 01 --dim 2 --hpus 8 --batch_size 64", 512),
    ],
)
def test_a_batch_per_worker_becomes_the_batch_of_all(text: str, batch: int):
    assert value(words(text), "--train.global-batch") == str(batch)


def test_mpirun_before_a_launcher_that_was_told_so_counts_its_ranks():
    found = words("mpirun -np 8 demo_resnet_keras.py --use_horovod --num_workers_per_hls 8 --kubernetes_run=True")
    assert value(found, "--run.devices") == "8" and value(found, "--train.global-batch") == "2048"


def test_a_rank_of_a_launcher_trains_and_starts_none():
    environ = {
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_SIZE": "8",
        "OMPI_COMM_WORLD_LOCAL_RANK": "3",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
    }
    found = words("ssd.py --use_horovod", start=of_environment(environ))
    assert "--run.devices" not in found and value(found, "--train.global-batch") == "1024"
    with pytest.raises(UsageError, match="without --use_horovod each would train alone"):
        words("ssd.py", start=of_environment(environ))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("torchvision/train.py --amp", "--train.precision fp16"),
        ("torchvision/train.py", "--train.precision fp32"),
        ("train.py --dl-worker-type MP", "--data.decoder cpu"),
        ("PT_HPU_MEDIA_PIPE=0 torchvision/train.py", "--data.decoder cpu"),
        ("train.py --opt sgd_nesterov", "--optimizer.nesterov"),
        ("train.py --opt rmsprop", "--optimizer.kind rmsprop --optimizer.alpha 0.9 --optimizer.eps 0.0316"),
        ("train.py --model-ema", "--train.ema 0.99998 --train.ema-every-steps 32 --train.ema-rule torchvision"),
        ("train.py --ra-sampler", "--train.repeats 3"),
        ("train.py --auto-augment ra", "--data.policy randaugment"),
        ("train.py --sync-bn", "--train.bn-group -1"),
        ("train.py --save-checkpoint --epochs 7", "--run.keep 7"),
        ("train.py --wd=5e-5", "--optimizer.weight-decay 5e-05"),
        ("train.py --device cpu", "--run.device cpu"),
        ("train.py --epoch 5", "--train.epochs 5"),  # argparse completes what is unique
        ("demo_resnet_keras.py --nouse_synthetic_data --noexperimental_preloading", "--run.no-device-prefetch"),
        ("demo_resnet_keras.py --experimental_preloading=False", "--run.no-device-prefetch"),
        ("demo_resnet_keras.py -train_steps 20", "--train.steps-per-epoch 20"),
        ("demo_resnet_keras.py --steps_per_loop 10 --log_steps 30", "--run.log-every-steps 30"),
        ("demo_resnet_keras.py --keras_applications_model ResNet101V2", "--model.arch keras_resnet101v2"),
        ("demo_resnet_keras.py --optimizer LARS --base_learning_rate=5", "--optimizer.lr 5"),
        ("demo_resnet_keras.py --optimizer LARS --lars_epsilon 1e-6", "--optimizer.eps 1e-06"),
        ("demo_resnet_keras.py --single_l2_loss_op", "--optimizer.decay-form gradient"),
        ("demo_resnet_keras.py --enable_checkpoint_and_export", "--run.keep 10 --run.checkpoint-initial"),
        ("demo_resnet_keras.py --use_synthetic_data", "--data.path synthetic:classes=1000,samples=1281167,size=224"),
        ("demo_resnet_keras.py --data_format channels_first", "--run.no-channels-last"),
        (DEMO_8 + " --horovod_hierarchical_allreduce", "--run.reduce hierarchical"),
        (DEMO_8, "--train.eval-shards full --train.bn-eval local"),
        (
            "imagenet_main.py --benchmark_logger_type BenchmarkFileLogger --benchmark_log_dir /x --benchmark_test_id t",
            "--run.benchmark-log /x --run.test-id t",
        ),
        (
            "FORCE_HABANA_IMAGENET_LOADER_FALLBACK=1 imagenet_main.py --jpeg_data_dir /j -dd /r",
            "--data.path /r --data.source tfrecord --data.decoder cpu",
        ),
        ("imagenet_main.py --jpeg_data_dir /j -dd /r", "--data.path /j --data.source folder"),
        ("imagenet_main.py -rs 50 --model_type resnet -rv 2", "--model.arch resnet50v2_tf1"),
        ("imagenet_main.py -rv 2", "--model.arch resnext101v2_32x4d_tf"),
        ("imagenet_main.py --hooks profilerhook,StepCounterHook --profile_steps 5,8", "--run.profile 6,9"),
        ("resnet_ctl_imagenet_main.py --profile_steps 51,53 --steps_per_loop 3", "--run.profile 52,54"),
        ("imagenet_main.py --dummy_epoch --fine_tune", "--run.warmup-steps 2"),
        ("imagenet_main.py --disable_warmup", "--schedule.warmup-epochs 0"),
        ("imagenet_main.py --bf16_config_path basic -dt bf16", "--train.fp32-ops BatchNorm2d"),
        ("imagenet_main.py -st 0.7", "--train.target-score 0.7"),
        ("imagenet_main.py --max_eval_steps 10", "--train.eval-max-steps 10"),
        ("imagenet_main.py --disable_eval -te 3", "--train.eval-every-epochs 4 --train.no-eval-at-end"),
        ("demo_resnet_keras.py --skip_eval -te 5 -ebe 2", "--train.eval-every-epochs 6 --train.no-eval-at-end"),
        ("ssd.py --steps 100 --profile 50,53", "--run.profile 51,54"),
        ("mpirun -np 2 ssd.py --use_horovod --distributed_bn", "--train.bn-group -1"),
        ("ssd.py --num_examples_per_epoch 1280", "--train.steps-per-epoch 10"),
        ("ssd.py --static --data_dir /d", "--data.static /d/worker_0"),
        ("ssd.py --resnet_checkpoint r.pth", "--model.weights r.pth"),
        ("ssd.py --resnet_checkpoint torchvision:resnet34", "--model.weights torchvision:resnet34 --data.path"),
        (
            "train.py --model resnet50 --weights ResNet50_Weights.IMAGENET1K_V1",
            "--model.weights torchvision:resnet50.IMAGENET1K_V1",
        ),
        ("main.py --task 4 --dim 2 --gpus 1", "--data.path /data/04_2d"),
        ("main.py --task 01 --gpus 0 --hpus 0", "--run.device cpu"),
        ("main.py --task 01 --optimizer sgd", "--optimizer.kind sgd --optimizer.momentum 0.99"),
        (
            "main.py --task 01 --scheduler multistep --steps 10 20",
            "--schedule.kind step --schedule.drop-epochs 10 20 --schedule.factor 0.3",
        ),
        ("main.py --task 01 --skip_first_n_eval 5", "--train.eval-from-epoch 6"),
        ("main.py --task 01 --channels_last False", "--run.no-channels-last"),
        ("main.py --task 01 --hmp --hmp-fp32 ops_fp32_unet2d.txt", "--model.no-deep-supervision"),
        (
            "main.py --task 01 --dim 2 --gpus 1 --benchmark --train_batches 12 --warmup 3",
            "--steps 9 --warmup 3 --repeats 1",
        ),
        (
            "main.py --task 01 --dim 2 --hpus 8 --benchmark --batch_size 64 --train_batches 150 --warmup 50",
            "--train.global-batch 512 --data.nvol 8 --task.window-batch 4 --data.augment off --run.devices 8",
        ),
        (
            "main.py --task 01 --exec_mode evaluate --gpus 1 --ckpt_path /r/checkpoints/last.ckpt",
            "evaluate /r --checkpoint latest",
        ),
        (
            "main.py --task 01 --dim 2 --exec_mode predict --gpus 1 --results /r --data /d --save_preds --tta",
            "predict /r /d --out /r/preds_task_01_dim_2_fold_0_fp32_tta --checkpoint best --save-probabilities "
            "--task.tta",
        ),
        (
            "preprocess.py --task 4 --exec_mode test --dilation",
            "--out /data/04_3d/test --task 04 --dim 3 --mode test --dilation",
        ),
        ("evaluate.py --preds p --lbls l", "evaluate p --labels l"),
        ("scripts/train.py --task 01 --gpus 1 --fold 0 --dim 2", "--train.global-batch 64"),
        ("scripts/benchmark.py --mode predict --dim 2", "--steps 100 --warmup 50 --repeats 1 --what predict"),
        (
            "generate_static_dataset.py -i '/c/train*' -o /s -b 4 -s 3",
            "prepare static --out /s/worker_0 --batch 4 --steps 3",
        ),
        ("bash download_and_preprocess_coco.sh /c", "prepare coco --source /c-raw --out /c --form tfrecord --download"),
        (
            "preprocess_imagenet.py --raw_data_dir=/r --local_scratch_dir=/r/t",
            "prepare convert --source /r/by_class --out /r/t --form tfrecord",
        ),
        ("ssd.py --inference a.jpg --model_dir /m", "predict /m a.jpg --out /m/inference --checkpoint latest --top 10"),
        ("imagenet_main.py --eval_only -md /m", "evaluate /m --checkpoint latest"),
        (
            "mpirun -np 2 imagenet_main.py --use_horovod --eval_only -md /m --max_eval_steps 10",
            "evaluate /m/worker_0 --checkpoint latest --data.path /data/tensorflow/imagenet/tf_records/ "
            "--data.source tfrecord --train.global-batch 64 --train.eval-max-steps 10",
        ),
        ("main.py --task 01 --gpus 1 --batch_size 2 --test_batches 6", "--train.eval-max-steps 3"),
        (
            "main.py --task 01 --gpus 2 --exec_mode evaluate --test_batches 5",
            "--data.dim 3 --train.global-batch 2 --train.eval-max-steps 5",
        ),
        ("train.py --model-ema --model-ema-decay 0.99999876", "--train.ema 0.99999876"),
        ("train.py --momentum 0.87654321", "--optimizer.momentum 0.87654321"),
        ("resnet_ctl_imagenet_main.py --base_learning_rate 0.12345678", "--optimizer.lr 0.12345678"),
        ("imagenet_main.py --warmup_epochs 8.1234567", "--schedule.warmup-epochs 8.1234567"),
        ("main.py --task 01 --optimizer sgd --momentum 0.98765432", "--optimizer.momentum 0.98765432"),
        ("imagenet_main.py --model_dir /", "--run.out /"),
    ],
)
def test_a_flag_becomes_a_field(text: str, expected: str):
    found = shlex.join(words(text))
    assert expected in found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "torchvision/train.py",
            "train resnet50 --data.path /datasets01/imagenet_full_size/061417/ --model.arch resnet18 --data.classes 0 "
            "--train.global-batch 32 --optimizer.lr-for-batch 0 --schedule.kind table --schedule.table-epochs 1 2 3 4 "
            "30 60 80 --schedule.table-rates 0.275 0.45 0.625 0.8 0.08 0.008 0.0008 --schedule.warmup-epochs 0 "
            "--train.precision fp32",
        ),
        (
            "resnet_ctl_imagenet_main.py",
            "train resnet50_keras --train.precision fp32 --data.path /data/tensorflow_datasets/imagenet/tf_records/ "
            "--data.source tfrecord --train.global-batch 256 --train.epochs 1 --run.log-every-steps 100 "
            "--run.out /tmp/resnet",
        ),
        (
            "imagenet_main.py",
            "train resnext101 --train.precision fp32 --data.path /data/tensorflow/imagenet/tf_records/ --data.source "
            "tfrecord --train.global-batch 32 --train.epochs 10 --run.out /tmp/resnet --run.keep 10 "
            "--run.checkpoint-initial --run.log-every-steps 100 --run.tensorboard",
        ),
        (
            "ssd.py",
            "train ssd_resnet34 --train.eval-every-epochs 51 --train.no-eval-at-end --run.out /tmp/ssd --model.weights "
            "/data/ssd_r34-mlperf/model.ckpt-28152 --model.padding same --data.path /data/coco2017/ssd_tf_records "
            "--run.log-every-steps 1 --run.checkpoint-every-epochs 5 --run.checkpoint-initial --run.keep 20 "
            "--run.tensorboard",
        ),
        (
            "main.py --task 01 --gpus 1",
            "train unet2d --data.path /data/01_3d --run.out /results --train.precision fp32 "
            "--model.no-deep-supervision --train.seed 1 --train.global-batch 2 --task.window-batch 4 --data.dim 3",
        ),
        (
            "demo_unet.py --task 01 --gpus 1",
            "train unet2d --data.path /root/software/data/pytorch/unet/01_2d --run.out /tmp/Unet/fold_0 "
            "--train.precision fp32 --model.no-deep-supervision --train.seed 1 --train.global-batch 2 "
            "--task.window-batch 4",
        ),
        (
            "scripts/train.py --task 01 --gpus 1 --fold 0 --dim 3",
            "train unet2d --data.path /data/01_3d --run.out /results --train.precision fp32 --train.seed 1 "
            "--train.global-batch 2 --task.window-batch 4 --data.dim 3",
        ),
        (
            "scripts/inference.py --task 01 --dim 2 --ckpt_path /r/checkpoints/last.ckpt --amp",
            "predict /r /data/01_2d --out /results/preds_task_01_dim_2_fold_0_amp --checkpoint latest",
        ),
        ("preprocess.py --task 4", "prepare decathlon --source /data --out /data/04_3d --task 04 --dim 3"),
        (
            "preprocess.py --task 4 --dim 2 --results /r --data /d --exec_mode val --n_jobs 3",
            "prepare decathlon --source /d --out /r/04_2d/val --task 04 --dim 2 --mode val --jobs 3",
        ),
        (
            "mpirun -H a:2,b:2 ssd.py --use_horovod",
            "launch ssd_resnet34 --hosts a:2,b:2 --launcher mpirun --train.global-batch 512 "
            "--train.eval-every-epochs 51 --train.no-eval-at-end --run.out /tmp/ssd --model.weights "
            "/data/ssd_r34-mlperf/model.ckpt-28152 --model.padding same --data.path /data/coco2017/ssd_tf_records "
            "--run.log-every-steps 1 --run.checkpoint-every-epochs 5 --run.checkpoint-initial --run.keep 20 "
            "--run.tensorboard",
        ),
        (
            "mpirun -H a:2 --prefix /p --allow-run-as-root --mca plm_rsh_args -p3022 ssd.py --use_horovod -b 64",
            "train ssd_resnet34 --train.eval-every-epochs 51 --train.no-eval-at-end --run.out /tmp/ssd --model.weights "
            "/data/ssd_r34-mlperf/model.ckpt-28152 --model.padding same --data.path /data/coco2017/ssd_tf_records "
            "--run.log-every-steps 1 --run.checkpoint-every-epochs 5 --run.checkpoint-initial --run.keep 20 "
            "--run.tensorboard --run.devices 2",
        ),
        (
            "mpirun -H a,b --prefix /p --allow-run-as-root --mca btl_tcp_if_include eth0 --mca plm_rsh_args -p3022 "
            "imagenet_main.py --use_horovod",
            "launch resnext101 --hosts a:1,b:1 --launcher mpirun --ssh-port 3022 --interfaces eth0 --mpi.prefix /p "
            "--mpi.root --train.precision fp32 --data.path /data/tensorflow/imagenet/tf_records/ --data.source "
            "tfrecord --train.eval-shards full --train.bn-eval local --train.global-batch 64 --train.epochs 10 "
            "--run.out /tmp/resnet/worker_0 --run.keep 10 --run.checkpoint-initial --run.log-every-steps 100 "
            "--run.tensorboard",
        ),
    ],
)
def test_a_line_becomes_no_more_than_this_command(text: str, expected: str):
    assert shlex.join(words(text)) == expected


def fields(found: list[str]) -> dict[str, list[str]]:
    """The values of every flag of a command."""
    values: dict[str, list[str]] = {}
    for word in found[2:]:
        if word.startswith("--"):
            values[word] = []
        else:
            values[list(values)[-1]].append(word)
    return values


@pytest.mark.parametrize(
    ("script", "flags", "expected"),
    [
        (
            "torchvision/train.py",
            "-j 4 --norm-weight-decay 0 --bias-weight-decay 0.5 --label-smoothing 0.1 --mixup-alpha 0.2 "
            "--cutmix-alpha 1 --seed 7 --random-erase 0.3 --interpolation bicubic --use-deterministic-algorithms "
            "--clip-grad-norm 2 --use-torch-compile --augmix-severity 2 --ra-magnitude 5 --auto-augment ra",
            "--run.workers 4 --optimizer.norm-weight-decay 0 --optimizer.bias-weight-decay 0.5 --task.label-smoothing "
            "0.1 --data.mixup 0.2 --data.cutmix 1 --train.seed 7 --data.policy randaugment --data.policy-magnitude 5 "
            "--data.augmix-severity 2 --data.random-erase 0.3 --data.interpolation bicubic --train.deterministic "
            "--train.clip 2 --run.compile on",
        ),
        (
            "torchvision/train.py",
            "--lr-scheduler cosineannealinglr --lr-min 0.01 --ra-sampler --ra-reps 4 --model-ema --model-ema-steps 8 "
            "--opt adamw",
            "--optimizer.kind adamw --schedule.kind cosine --schedule.unit epoch --schedule.final-lr 0.01 --train.ema "
            "0.99998 --train.ema-every-steps 8 --train.ema-rule torchvision --train.repeats 4",
        ),
        (
            "torchvision/train.py",
            "--lr-scheduler steplr --lr-warmup-epochs 5 --epochs 20 --lr-step-size 5 --output-dir /o --train-crop-size "
            "176 --val-resize-size 232",
            "--train.epochs 20 --schedule.kind step --schedule.drop-epochs 10 15 --schedule.factor 0.1 --schedule.unit "
            "epoch --schedule.warmup-epochs 5 --schedule.warmup constant --schedule.warmup-factor 0.01 --run.out /o "
            "--data.size 176 --data.eval-size 224 --data.eval-resize 232",
        ),
        (
            "resnet_ctl_imagenet_main.py",
            "-dlit bf16 --enable_tensorboard --weight_decay 0.5 --label_smoothing 0.2 --global_seed 9 --momentum 0.8 "
            "-te 3 -ebe 2",
            "--data.image-type bf16 --train.eval-every-epochs 2 --train.epochs 3 --run.checkpoint-every-epochs 3 "
            "--run.tensorboard --optimizer.momentum 0.8 --optimizer.weight-decay 0.5 --task.label-smoothing 0.2 "
            "--train.seed 9",
        ),
        (
            "resnet_ctl_imagenet_main.py",
            "--optimizer LARS --lr_schedule polynomial --end_learning_rate 0.01 --lars_decay_epochs 30 --warmup_epochs "
            "4",
            "--schedule.warmup-epochs 4 --schedule.decay-epochs 30 --schedule.final-lr 0.01 --optimizer.lr 0.1 "
            "--task.label-smoothing 0",
        ),
        (
            "imagenet_main.py",
            "--save_checkpoint_steps 500 --weight_decay 0.5 --label_smoothing 0.2 --pretrained_model_checkpoint_path "
            "w.pth -dlit bf16 -te 3 -ebe 2 --max_cpus 4 --mini_imagenet",
            "--data.image-type bf16 --train.eval-every-epochs 2 --train.epochs 3 --run.max-cpus 4 "
            "--optimizer.weight-decay 0.5 --task.label-smoothing 0.2 --run.checkpoint-every-steps 500 --model.weights "
            "w.pth",
        ),
        (
            "ssd.py",
            "-f --lr_warmup_epoch 2 --base_lr 0.1 --weight_decay 0.5 --keep_ckpt_max 3 --max_cpus 4 --k 3 -e 7",
            "--train.epochs 7 --train.eval-every-epochs 8 --run.max-cpus 4 --data.fake --schedule.warmup-epochs 2 "
            "--optimizer.lr 0.1 --optimizer.weight-decay 0.5 --schedule.drop-epochs 52 65 --run.keep 3",
        ),
        (
            "main.py --task 02 --gpus 1",
            "--learning_rate 0.5 --gradient_clip_val 2 --negative_slope 0.2 --drop_block --attention --residual "
            "--focal --sync_batchnorm --nfolds 3 --fold 2 --seed 5 --val_batch_size 8 --weight_decay 0.5 --num_workers "
            "3 --norm batch --oversampling 0.5 --overlap 0.25 --blend constant --affinity single --bucket_cap_mb 10 "
            "--no-augment --amp --tta",
            "--optimizer.lr 0.5 --train.clip 2 --model.negative-slope 0.2 --task.tta --train.precision fp16 "
            "--model.drop-block --model.attention --model.residual --task.voxel-loss focal --train.bn-group -1 "
            "--data.folds 3 --data.fold 2 --train.seed 5 --task.window-batch 8 --optimizer.weight-decay 0.5 "
            "--run.workers 3 --model.norm batch --data.oversampling 0.5 --task.overlap 0.25 --task.blend constant "
            "--run.affinity single --run.bucket-mb 10 --data.augment off",
        ),
        (
            "main.py --task 01 --gpus 1",
            "--min_epochs 2 --max_epochs 9 --patience 3 --scheduler plateau --lr_patience 4 --factor 0.5 --ckpt_every "
            "2 --train_batches 5",
            "--schedule.kind plateau --schedule.plateau-on val_loss --schedule.factor 0.5 --schedule.patience 4 "
            "--train.epochs 9 --train.min-epochs 2 --train.patience 3 --train.steps-per-epoch 5 "
            "--run.checkpoint-every-epochs 2 --run.keep 6",
        ),
        (
            "main.py --task 01 --gpus 1",
            "--scheduler cosine --ckpt_path /r/checkpoints/ckpt-3 --optimizer fusedadamw",
            "--run.resume /r/checkpoints/ckpt-3 --schedule.kind cosine --schedule.unit epoch",
        ),
    ],
)
def test_flags_change_these_fields_and_no_others(script: str, flags: str, expected: str):
    without, found = fields(words(script)), fields(words(f"{script} {flags}"))
    changed = {name: values for name, values in found.items() if without.get(name) != values}
    assert changed == fields(["", "", *expected.split()])


def test_flags_take_fields_away():
    without = fields(words("imagenet_main.py --disable_checkpoints"))
    assert without["--run.checkpoint-every-epochs"] == ["10"] and "--run.keep" not in without
    assert "--train.precision" not in fields(words("demo_unet.py --task 01 --hpus 1 --data_type bf16"))
    shared = words("mpirun -np 2 resnet_ctl_imagenet_main.py --use_horovod --use_distributed_eval")
    assert "--train.eval-shards" not in shared and "--train.bn-eval" not in shared


@pytest.mark.parametrize(
    "text",
    [
        "preprocess.py --task 4 --dim 2 --results /r --data /d --exec_mode val --n_jobs 3 --dilation",
        "generate_static_dataset.py -i /c/train -o /s -b 4 -s 3",
        "evaluate.py --preds p --lbls l",
        "download.py --task 4 --results /r",
        "preprocess_imagenet.py --raw_data_dir=/r --local_scratch_dir=/r/t",
    ],
)
def test_a_script_of_one_command_has_no_flag_that_it_does_not_read(text: str):
    rows = became(text).rows
    assert len(rows) >= 2 and not [row for row in rows if row[1] == "-" or "not read" in row[2]]


COUNTS_FROM_0 = ("--gpus", "--hpus", "--skip_first_n_eval", "--train_batches", "--test_batches", "--ckpt_every")


@pytest.mark.parametrize(
    "text",
    [
        "torchvision/train.py -b 1 --lr-scheduler steplr --lr-step-size 1 --lr-warmup-epochs 0",
        "resnet_ctl_imagenet_main.py -bs 1 --log_steps 1",
        "imagenet_main.py -bs 1 --display_steps 1 --save_summary_steps 1 --max_eval_steps 1",
        "ssd.py -b 1 --k 0 -v 1 --save_checkpoints_steps 0 --save_summary_steps 1 --num_examples_per_epoch 1",
        "generate_static_dataset.py -i /c/t -o /s -b 1 -s 1",
        f"main.py --task 01 --nvol 1 --batch_size 1 {' 0 '.join(COUNTS_FROM_0)} 0",
    ],
)
def test_the_smallest_numbers_are_accepted(text: str):
    assert words(text)


@pytest.mark.parametrize(
    ("flags", "every"),
    [
        ("", 100),  # "How often display step status, defaults to 100"
        ("--log_steps 100", 100),
        ("--log_steps 10", 10),
        ("--steps_per_loop 10", 100),
        ("--steps_per_loop 1000 --log_steps 10", 10),
        ("--steps_per_loop 1000", 1000),
        ("--steps_per_loop 1000 -bs 2048", 625),  # "Will be capped at steps per epoch": 1281167 // 2048
        ("--train_steps 20", 100),  # an epoch that ends earlier is logged anyway
    ],
)
def test_keras_scripts_log_every_log_steps(flags: str, every: int):
    for script in ("demo_resnet_keras.py", "resnet_ctl_imagenet_main.py"):
        assert value(words(f"{script} {flags}"), "--run.log-every-steps") == str(every)


@pytest.mark.parametrize(
    ("text", "lines", "points"),
    [
        ("ssd.py", 1, 1),
        ("ssd.py --save_summary_steps 10", 1, 10),
        ("ssd.py -v 5 --save_summary_steps 10", 5, 10),
        ("ssd.py -v 50", 50, 50),  # there a point at every step, which would need a line
        ("ssd.py -v 10 --save_summary_steps 4", 2, 4),  # a line wherever a point is due
        ("imagenet_main.py", 100, 100),
        ("imagenet_main.py --display_steps 20", 20, 100),
        ("imagenet_main.py --save_summary_steps 500", 100, 500),
        ("imagenet_main.py --save_summary_steps 10", 10, 10),
        ("imagenet_main.py --display_steps 10 --save_summary_steps 10", 10, 10),
    ],
)
def test_summaries_are_written_every_so_many_steps(text: str, lines: int, points: int):
    command, name, *flags = words(text)
    _, run = config.load(name, flags)
    assert command == "train" and run.tensorboard and run.log_every_steps == lines
    assert (run.tensorboard_every_steps or run.log_every_steps) == points


def test_export_dir_exports_after_training_or_names_the_command_where_it_cannot():
    text = "imagenet_main.py --use_horovod -md /m --export_dir /x/"
    steps = became(f"mpirun -np 8 {text}").steps
    assert [step[0] for step in steps if not isinstance(step, Act)] == ["train", "export"]
    command = shlex.join(["sightline", *steps[-1]])
    expected = r"sightline export /m/worker_0 --checkpoint latest --format onnx --out /x/\d{10}/model.onnx"
    assert re.fullmatch(expected, command)
    for found in (became(text, start=Start(ranks=8, is_rank=True)), became(f"mpirun -np 16 -H a:8,b:8 {text}")):
        assert isinstance(found.steps[-1], Act) and re.search(expected, found.steps[-1].text)
    assert shlex.join(became(f"{text} --eval_only").steps[-2]).startswith("evaluate /m/worker_0")


def test_the_end_of_a_keras_run_names_the_export_that_its_readme_promises():
    last = became("demo_resnet_keras.py --enable_checkpoint_and_export -md /m").steps[-1]
    assert isinstance(last, Act) and "sightline export /m" in last.text


def test_steps_that_the_readme_of_ssd_names_are_understood():
    _, name, *flags = words("ssd.py --num_steps 100 --log_step_count_steps 2 --save_checkpoints_steps 50")
    recipe, run = config.load(name, flags)
    assert (recipe.train.max_steps, run.log_every_steps, run.checkpoint_every_steps) == (100, 2, 50)


def test_the_folder_of_mpirun_for_the_output_of_ranks_is_used_on_one_host_and_on_several():
    script = "imagenet_main.py --use_horovod"
    one = words(f"mpirun --output-filename /l -np 8 {script}")
    assert value(one, "--run.rank-logs") == "/l" and value(one, "--run.devices") == "8"
    several = words(f"mpirun --output-filename /l -np 16 -H a:8,b:8 {script}")
    assert value(several, "--output") == "/l" and "--run.rank-logs" not in several
    for ending, new, effect in (
        (f"-np 8 {script}", "--run.rank-logs /l", "rank_N.log of every rank in it"),
        (f"-np 16 -H a:8,b:8 {script}", "--output /l", "on every host"),
        (f"-np 8 {script} --eval_only", "-", "not read by evaluate"),
    ):
        rows = became(f"mpirun --output-filename /l {ending}").rows
        assert ("--output-filename /l", new, effect) in rows


def test_scripts_of_one_name_are_distinguished_by_folder_or_flags():
    paths = {
        text: find_scripts(*text.split(" ", 1)[:1], text.split()[1:])[0].path
        for text in (
            "torchvision/train.py --amp",
            "scripts/train.py --amp",
            "train.py --data-path=x",
            "train.py --task 01",
        )
    }
    assert [path.split("/")[-2] for path in paths.values()] == ["torchvision", "scripts", "torchvision", "scripts"]
    assert len(find_scripts("train.py", ["--help"])) == 2
    for flags in ([], ["--amp"]):
        with pytest.raises(UsageError) as error:
            find_scripts("train.py", flags)
        said = str(error.value)
        assert "torchvision/train.py (ResNet-50 by torchvision's reference script, `sightline train resnet50`)" in said
        assert " or scripts/train.py (upstream's call of Unet2D's main.py" in said
        assert ("these flags" in said) == bool(flags)
    with pytest.raises(UsageError, match="torchvision/train.py has no --nope; scripts/train.py has no --nope"):
        find_scripts("train.py", ["--nope", "1"])


def test_lists_of_operations_keep_modules_in_fp32_and_name_the_rest(tmp_path: Path):
    (tmp_path / "fp32.txt").write_text("softmax\nbatch_norm\ntopk\n")
    (tmp_path / "bf16.txt").write_text("conv2d\nlinear\nlog\n")
    lists = f"--hmp-bf16 {tmp_path}/bf16.txt --hmp-fp32 {tmp_path}/fp32.txt"
    found = became(f"main.py --task 01 --gpus 1 --hmp {lists}")
    assert "--train.fp32-ops BatchNorm2d ConvTranspose2d" in shlex.join(found.steps[0])
    named = {old for old, _, _ in found.rows if "list:" in old}
    assert named == {"fp32 list: topk", "bf16 list: log"}
    (tmp_path / "own.json").write_text(json.dumps({"allowlist": ["Conv2D", "MatMul", "Relu", "MaxPool", "Exp"]}))
    found = became(f"imagenet_main.py -dt bf16 --bf16_config_path {tmp_path}/own.json")
    assert "--train.fp32-ops BatchNorm2d" in shlex.join(found.steps[0])
    assert "bf16 list: Exp" in {old for old, _, _ in found.rows}


def test_a_decay_of_embeddings_is_accepted_for_a_network_without_any():
    text = "train.py --model resnet50 --transformer-embedding-decay 0"
    assert words(text) == words("train.py --model resnet50 --data-path /datasets01/imagenet_full_size/061417/")
    [row] = [row for row in became(text).rows if row[0] == "--transformer-embedding-decay 0"]
    assert row[1] == "-" and "no embeddings" in row[2]


def test_rows_tell_what_a_command_reads_from_what_it_does_not():
    text = "mpirun -np 2 imagenet_main.py --use_horovod --eval_only -md /m -mts 5 --max_eval_steps 10"
    rows = {old: new for old, new, effect in became(text).rows}
    assert rows["--model_dir /m"] == rows["--use_horovod"] == "evaluate ..."
    assert rows["--max_eval_steps 10"] == "--train.global-batch 64 --train.eval-max-steps 10"
    assert ("--max_train_steps 5", "-", "not read by evaluate") in became(text).rows


def test_the_table_has_a_row_for_every_word_that_was_given():
    text = "PT_HPU_LAZY_MODE=0 torchrun --nproc_per_node 8 train.py -b 4 --epochs 90 --cache-dataset --device=cuda"
    rows = {old: (new, effect) for old, new, effect in became(text).rows}
    assert rows["--batch-size 4"] == ("--train.global-batch 32", "of one rank there, of all here")
    assert rows["--epochs 90"][0] == rows["--device cuda"][0] == "as it is"
    assert rows["--cache-dataset"][0] == rows["PT_HPU_LAZY_MODE=0"][0] == "-"
    assert rows["torchrun"][0] == "--run.devices 8"


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        (
            "train.py --data-path /d --test-only --device hpu --output-dir out --epochs 3",
            [
                ("--data-path /d", "--data.path /d", ""),
                ("--device hpu", "--run.device", "cuda and hpu: what the machine has"),
                ("--epochs 3", "-", "not read by evaluate"),
                ("--output-dir out", "evaluate ...", "runs/resnet50 if not given"),
                ("--test-only", "evaluate RUN", "RUN is --resume or --output-dir"),
            ],
        ),
        (
            "imagenet_main.py --data_dir /d --model_dir m --eval_only --export_dir e --use_horovod",
            [
                ("--data_dir /d", "--data.path /d --data.source tfrecord", "TFRecords"),
                ("--use_horovod", "evaluate ...", "--batch_size is of one worker; the run lies in worker_0"),
                ("--model_dir m", "evaluate ...", "worker_0 in it under Horovod, as there"),
                ("--export_dir e", "export RUN --format onnx", "TIME/model.onnx in it, not a SavedModel"),
                ("--eval_only", "evaluate RUN", "of --model_dir"),
            ],
        ),
        (
            "main.py --exec_mode evaluate --data /d --results r --task 01",
            [
                ("--exec_mode evaluate", "train, evaluate, predict", "the command"),
                ("--data /d", "--data.path /d", "/data: /data/TASK_DIMd in it; must be prepared by us"),
                ("--results r", "evaluate ...", "also for perf.json and eval_log.json"),
                ("--task 01", "evaluate ...", "01 to 10"),
            ],
        ),
    ],
)
def test_every_flag_of_an_evaluation_is_told(text: str, rows: list[tuple[str, str, str]]):
    assert list(became(text).rows) == rows


def test_a_whole_line_is_one_word_and_a_path_with_a_space_is_none():
    def shown(*words: str) -> list[str]:
        said: list[str] = []
        legacy(["--print", *words], said.append, lambda command: None, {})
        return said

    plain = shown("torchvision/train.py", "--data-path", "/d")
    assert plain[0].startswith("sightline train resnet50 --data.path /d ")
    assert shown("torchvision/train.py --data-path /d") == plain
    assert shown("/my files/torchvision/train.py", "--data-path", "/d") == plain
