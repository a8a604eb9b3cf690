"""The tables against the originals' own lists of flags and against our recipes' defaults."""

import pytest

from sightline import recipes
from sightline.legacy import command
from sightline.legacy.table import Field, Flag, Notice, Refused, Script
from sightline.legacy.translate import SCRIPTS
from sightline.recipe.recipe import Run
from sightline.recipe.store import leaves

# Every flag of the originals, with its default, from descriptions of their parsers; nothing here is read from a table
# of ours. A default of "-" is none; words in brackets after the flag are its other spellings. --num_steps and
# --save_checkpoints_steps of ssd.py are of its README.
TENSORFLOW = """
dtype[-dt] fp32, data_loader_image_type[-dlit] fp32, epochs_between_evals[-ebe] 1, jpeg_data_dir[-jpdd] -,
model_dir[-md] /tmp/resnet, clean False, experimental_preloading True, use_synthetic_data False, data_format
channels_last, enable_scoped_allocator False, benchmark_logger_type BaseBenchmarkLogger, benchmark_log_dir -,
benchmark_test_id -, bf16_config_path full"""
ORIGINALS = {
    "torchvision/train.py": """
data-path /datasets01/imagenet_full_size/061417/, model resnet18, device cuda, batch-size[-b] 32, epochs 90,
dl-worker-type HABANA, workers[-j] 16, opt sgd, lr 0.1, momentum 0.9, wd[--weight-decay] 0.0001, norm-weight-decay -,
bias-weight-decay -, transformer-embedding-decay -, label-smoothing 0, mixup-alpha 0, cutmix-alpha 0, lr-scheduler
custom_lr, lr-warmup-epochs 0, lr-warmup-method constant, lr-warmup-decay 0.01, lr-step-size 30, lr-gamma 0.1, lr-min 0,
print-freq 10, output-dir ., resume -, start-epoch 0, seed 123, cache-dataset False, sync-bn False, test-only False,
auto-augment -, ra-magnitude 9, augmix-severity 3, random-erase 0, train-crop-size 224, interpolation bilinear,
val-resize-size 256, val-crop-size 224, amp False, world-size 1, dist-url env://, model-ema False, model-ema-steps 32,
model-ema-decay 0.99998, use-deterministic-algorithms False, clip-grad-norm -, ra-sampler False, ra-reps 3, weights -,
save-checkpoint False, use-torch-compile False""",
    "resnet_keras/resnet_ctl_imagenet_main.py": TENSORFLOW
    + """,
batch_size[-bs] 256, train_epochs[-te] 1, train_steps -, steps_per_loop 50, log_steps 100, data_dir[-dd]
/data/tensorflow_datasets/imagenet/tf_records/, enable_checkpoint_and_export False, enable_tensorboard False, optimizer
SGD, lr_schedule piecewise, base_learning_rate 0.1, warmup_epochs -, end_learning_rate -, momentum 0.9, weight_decay
0.0001, label_smoothing 0, single_l2_loss_op False, lars_epsilon 0, lars_decay_epochs -, use_horovod False,
distribution_strategy off, use_distributed_eval False, use_keras_mixed_precision False, keras_applications_model -,
skip_eval False, global_seed -, shuffle_seed -, sample_distorted_bounding_box_seed 0, random_flip_left_right_seed -,
dataset_parallel_calls -, interleave_cycle_length 10, datasets_num_private_threads -, training_dataset_cache False,
use_tf_while_loop True, use_tf_function True, profile_steps -, save_full_model False""",
    "ResNeXt/imagenet_main.py": TENSORFLOW
    + """,
resnet_size[-rs] 101, model_type resnext, resnet_version[-rv] 1, batch_size[-bs] 32, train_epochs[-te] 10, data_dir[-dd]
/data/tensorflow/imagenet/tf_records/, max_train_steps[-mts] -, max_eval_steps[-mes] -, max_cpus[-mc] 16,
use_horovod[-hvd] False, use_cosine_lr True, warmup_epochs 8, momentum 0.875, weight_decay 6.103515625e-05,
label_smoothing 0.1, enable_lars False, start_learning_rate 9.5, epochs_for_lars 38, save_checkpoint_steps -,
disable_checkpoints False, save_summary_steps 100, display_steps 100, log_steps 100, hooks LoggingTensorHook,
profile_steps 7,10, stop_threshold[-st] -, export_dir -, image_bytes_as_serving_input False, eval_only False,
disable_eval False, return_before_eval False, dummy_epoch False, train_offset 0, fine_tune False,
use_train_and_evaluate False, mini_imagenet False, loss_scale -, no_hpu False, disable_warmup False,
pretrained_model_checkpoint_path -""",
    "SSD_ResNet34/ssd.py": """
dtype[-d] bf16, batch_size[-b] 128, epochs[-e] 50, mode train, inference -, max_cpus 16, num_parallel_calls 64,
threadpool_size 0, use_horovod False, no_hpu False, distributed_bn False, vis_dataloader False, profile 0,0,
use_cocoeval_cc False, use_fake_data[-f] False, lr_warmup_epoch 5, base_lr 0.003, weight_decay 0.0005, k 0, model_dir
/tmp/ssd, resnet_checkpoint /data/ssd_r34-mlperf, data_dir /data/coco2017/ssd_tf_records, eval_samples 5000,
num_examples_per_epoch 117266, steps[-s][--num_steps] 0, log_step_count_steps[-v] 1, save_checkpoints_epochs[-c] 5,
save_checkpoints_steps 0, keep_ckpt_max 20,
save_summary_steps 1, static False, recipe_cache /tmp/ssd_recipe_cache/, hvd_workers 1, num_workers_per_hls 8,
kubernetes_run False""",
    "SSD_ResNet34/generate_static_dataset.py": """
input_pattern[-i] -, output_dir[-o] -, batch_size[-b] -, steps[-s] -, workers[-w] 1""",
    "Unet2D/main.py": """
exec_mode train, data /data, results /results, logname -, task -, gpus 0, hpus 0, learning_rate 0.001,
gradient_clip_val 0, negative_slope 0.01, tta False, amp False, benchmark False, deep_supervision False, drop_block
False, attention False, residual False, focal False, sync_batchnorm False, save_ckpt False, nfolds 5, fold 0, seed 1,
skip_first_n_eval 0, ckpt_path -, resume_training False, patience 100, lr_patience 70, batch_size 2, val_batch_size 4,
steps -, factor 0.3, scheduler none, optimizer adamw, momentum 0.99, weight_decay 0.0001, save_preds False, dim 3,
num_workers 8, min_epochs 30, max_epochs 10000, warmup 5, norm instance, nvol 1, data2d_dim 3, oversampling 0.33,
overlap 0.5, blend gaussian, affinity disabled, train_batches 0, test_batches 0, profile False, run_lazy_mode False,
hmp False, hmp-bf16 -, hmp-fp32 -, hmp-opt-level O1, hmp-verbose False, bucket_cap_mb 90, channels_last True,
ckpt_every -, set_aug_seed False, no-augment False""",
    "Unet2D/demo_unet.py": """
data[-p] /root/software/data/pytorch/unet/01_2d/, task -, gpus 0, hpus 0, learning_rate 0.001, tta False,
deep_supervision False, save_ckpt False, seed 1, fold 0, batch_size 2, val_batch_size 4, factor 0.3, num_workers 8,
min_epochs 30, max_epochs 10000, channels_last True, scheduler none, optimizer adamw, train_batches 0, test_batches 0,
mode lazy, data_type fp32, dist False, dim 2, norm instance, ckpt_path -, benchmark False, exec_mode train""",
    "Unet2D/download.py": "task -, results /data",
    "Unet2D/preprocess.py": "data /data, results /data, exec_mode training, dilation False, task -, dim 3, n_jobs -1",
    "Unet2D/evaluate.py": "preds -, lbls -",
    "Resnets/preprocess_imagenet.py": """
raw_data_dir -, local_scratch_dir -, gcs_upload False, project -, gcs_output_path -""",
    "scripts/train.py": "task 01, gpus 0, fold 0, dim 3, amp False, tta False, results /results, logname -",
    "scripts/inference.py": """
data /data, task 01, fold 0, dim 3, ckpt_path -, batch_size 4, amp False, tta False, save_preds False""",
    "scripts/benchmark.py": """
mode train, task 01, gpus 1, dim 3, batch_size 2, amp False, train_batches 150, test_batches 150, warmup 50, logname -,
profile False, results /results""",
}
ORIGINALS["resnet_keras/demo_resnet_keras.py"] = (
    ORIGINALS["resnet_keras/resnet_ctl_imagenet_main.py"]
    + ", num_workers_per_hls 1, kubernetes_run False, horovod_hierarchical_allreduce False"
)
RECIPES = {
    "torchvision/train.py": ["resnet50"],
    "resnet_keras/resnet_ctl_imagenet_main.py": ["resnet50_keras", "resnet50_lars"],
    "resnet_keras/demo_resnet_keras.py": ["resnet50_keras", "resnet50_lars"],
    "ResNeXt/imagenet_main.py": ["resnext101"],
    "SSD_ResNet34/ssd.py": ["ssd_resnet34"],
    "Unet2D/main.py": ["unet2d"],
    "Unet2D/demo_unet.py": ["unet2d"],
}


def short(script: Script) -> str:
    return "/".join(script.path.split("/")[-2:])


def listed(text: str) -> dict[str, tuple[set[str], str]]:
    """Name -> (other spellings, default)."""
    found = {}
    for part in text.replace("\n", " ").replace("7,10", "7;10").replace("0,0", "0;0").split(","):
        name, default = part.split()
        name, _, others = name.partition("[")
        found[name] = ({other for other in others.rstrip("]").split("][") if other}, default.replace(";", ","))
    return found


def as_text(flag: Flag) -> str:
    value = flag.default
    return "-" if value in (None, "") else f"{value:.12g}" if isinstance(value, float) else str(value)


BY_NAME = {short(script): script for script in SCRIPTS}


@pytest.mark.parametrize("name", ORIGINALS)
def test_every_flag_of_the_original_is_in_its_table_with_its_default(name: str):
    expected, script = listed(ORIGINALS[name]), BY_NAME[name]
    found = {}
    for flag in script.flags:
        first = next(each for each in flag.names if each.startswith("--"))
        found[first[2:]] = (set(flag.names) - {first}, as_text(flag))
    assert found == expected


def test_every_script_is_counted():
    # The shell script that prepares COCO takes one word and no flag.
    assert set(ORIGINALS) | {"datasets/download_and_preprocess_coco.sh"} == set(BY_NAME)


@pytest.mark.parametrize("script", SCRIPTS, ids=short)
def test_every_flag_has_one_outcome_and_says_it(script: Script):
    groups = {Field: 0, Notice: 0, Refused: 0}
    for flag in script.flags:
        [kind] = [kind for kind in groups if isinstance(flag.outcome, kind)]
        groups[kind] += 1
        said = {Field: ("to", "effect"), Notice: ("why",), Refused: ("remedy",)}[kind]
        assert any(getattr(flag.outcome, name) for name in said), flag.name
    assert sum(groups.values()) == len(script.flags)
    names = [name for flag in script.flags for name in flag.names]
    assert len(names) == len(set(names)), "a spelling stands twice"


@pytest.mark.parametrize("script", SCRIPTS, ids=short)
def test_help_names_every_spelling(script: Script):
    text = command.help_of(script)
    assert [name for flag in script.flags for name in flag.names if name not in text] == []


@pytest.mark.parametrize("name", RECIPES)
def test_values_that_are_left_out_are_the_recipes_own(name: str):
    checked = 0
    for recipe in RECIPES[name]:
        values = {
            f"--{key.replace('_', '-')}": value for key, value in leaves(recipes.find(recipe).recipe(), Run()).items()
        }
        for flag in BY_NAME[name].flags:
            if not isinstance(flag.outcome, Field) or flag.outcome.ours is None:
                continue
            ours = flag.outcome.ours[recipe] if isinstance(flag.outcome.ours, dict) else flag.outcome.ours
            found = values[flag.outcome.to]
            assert str(found) == str(ours) or found == ours, f"{flag.name}: {recipe} has {found}, the table {ours}"
            checked += 1
    assert checked > 5


@pytest.mark.parametrize("name", RECIPES)
def test_every_field_that_a_table_names_exists(name: str):
    known = set()
    for recipe in RECIPES[name]:
        for key in leaves(recipes.find(recipe).recipe(), Run()):
            known.add(f"--{key.replace('_', '-')}")
    for flag in BY_NAME[name].flags:
        if isinstance(flag.outcome, Field):
            named = [word for word in flag.outcome.to.split() if word.startswith("--") and "." in word]
            assert [word for word in named if word not in known] == [], flag.name
