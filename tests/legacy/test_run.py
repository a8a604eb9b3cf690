"""One command line of each kind runs on tiny data, in this process; those with two ranks are slow."""

import functools
import hashlib
import http.server
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sightline import cli
from sightline.data.prepare.decathlon import fetched
from sightline.engine.setup import bind_to_cpus
from sightline.errors import UsageError
from sightline.legacy.command import legacy as run_legacy
from sightline.legacy.imagenet_data import link_by_class

REPO = Path(__file__).resolve().parents[2]
TESTS = REPO / "tests"
ZIPS, FOLDERS = (
    runpy.run_path(str(TESTS / "unit/data/prepare" / name)) for name in ("coco_zips.py", "decathlon_folders.py")
)
BLOBS = runpy.run_path(str(TESTS / "recipes/conftest.py"))["write_blobs"]
HERE = ["--set", "run.workers=0", "--set", "run.report=off", "--set", "run.progress=plain"]
SMALL = "data.size=24 data.eval-resize=24 data.eval-size=24 data.classes=0 model.arch=shufflenet_v2_x0_5".split()
SMALL_BOXES = "model.depth=18 model.width=4 data.size=48 data.classes=0 data.max-boxes=20".split()
SMALL_VOLUMES = "model.width=4 data.task=own".split()


def sets(fields: list[str]) -> list[str]:
    return [*HERE, *(word for field in fields for word in ("--set", field))]


def legacy(*words: object, fields: list[str] = ()) -> int:
    return cli.main(["legacy", "--device", "cpu", *sets(list(fields)), *map(str, words)])


def as_process(*words: object, fields: list[str] = ()) -> str:
    """For several ranks."""
    command = [sys.executable, "-m", "sightline", "legacy", "--device", "cpu", *sets(list(fields)), *map(str, words)]
    environ = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def events(run: Path, kind: str) -> list[dict]:
    lines = (run / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return [line for line in map(json.loads, lines) if line["event"] == kind]


TRAIN_PY = "--model shufflenet_v2_x0_5 -b 4 --epochs 1 --print-freq 1 --train-crop-size 24 --val-resize-size 24".split()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_train_py_trains_and_then_tests(shapes: Path, here: Path, capsys: pytest.CaptureFixture[str]):
    words = ["train.py", *TRAIN_PY, "--val-crop-size", "24", f"--data-path={shapes}", "--output-dir", "out"]
    assert legacy(*words, "--cache-dataset", fields=["train.max-steps=2"]) == 0
    [end] = events(here / "out", "start")
    assert end["steps"] == 2 and end["local_batch"] == 4
    said = capsys.readouterr().out.splitlines()  # what has no counterpart, then the command
    assert [line.split()[:2] for line in said if line.startswith("legacy: ")] == [
        ["legacy:", "--cache-dataset:"],
        ["legacy:", "sightline"],
    ]
    assert legacy(*words, "--test-only") == 0
    assert "sightline evaluate out --checkpoint latest" in capsys.readouterr().out


@pytest.fixture(scope="module")
def records(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The drawn classes as the READMEs unpack ImageNet, then prepared by the originals' command."""
    raw = tmp_path_factory.mktemp("imagenet")
    shutil.copytree(shapes / "train", raw / "img_train")
    (raw / "img_val").mkdir()
    synsets = []
    for number, file in enumerate(sorted((shapes / "val").glob("*/*"))):
        shutil.copy(file, raw / "img_val" / f"ILSVRC2012_val_{number:08d}{file.suffix}")
        synsets.append(file.parent.name)
    (raw / "synset_labels.txt").write_text("\n".join(synsets))
    words = [f"--raw_data_dir={raw}", f"--local_scratch_dir={raw}/tf_records", "--nogcs_upload"]
    assert cli.main(["legacy", "preprocess_imagenet.py", *words]) == 0
    return raw / "tf_records"


def test_imagenet_is_prepared_in_the_originals_shards(records: Path, shapes: Path):
    assert len(list(records.glob("train/train-*-of-01024"))) == 1024
    assert len(list(records.glob("validation/validation-*-of-00128"))) == 128
    assert len(list(records.parent.glob("by_class/val/*/*"))) == len(list((shapes / "val").glob("*/*")))


@pytest.fixture
def unpacked(here: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """ImageNet as the ResNeXt README unpacks it, with two classes, linked by class as the first preparation does."""
    for name in ("train/n1/a.JPEG", "train/n2/b.JPEG", *(f"validation/v{number}.JPEG" for number in (1, 2, 3))):
        (here / "raw" / name).parent.mkdir(parents=True, exist_ok=True)
        (here / "raw" / name).write_bytes(name.encode())
    (here / "raw" / "synset_labels.txt").write_text("n2\nn1\nn2\n")
    linked(here)
    capsys.readouterr()
    return here / "raw"


def linked(here: Path) -> dict[str, bytes]:
    link_by_class(Path("raw"), Path("raw/by_class"))
    files = [path for path in (here / "raw" / "by_class").rglob("*") if not path.is_dir() or path.is_symlink()]
    assert all(path.is_symlink() and path.exists() for path in files), "a link that leads nowhere"
    inside = (path for split in ("train", "val") for path in (here / "raw" / "by_class" / split).glob("*/*"))
    return {str(path.relative_to(here / "raw" / "by_class")): path.read_bytes() for path in inside}


def sort_by_class(val: Path) -> None:
    """As valprep.sh does."""
    for name, synset in (("v1.JPEG", "n2"), ("v2.JPEG", "n1"), ("v3.JPEG", "n2")):
        (val / synset).mkdir(exist_ok=True)
        (val / name).rename(val / synset / name)


WANTED = {
    "train/n1/a.JPEG": b"train/n1/a.JPEG",
    "train/n2/b.JPEG": b"train/n2/b.JPEG",
    "val/n1/v2.JPEG": b"validation/v2.JPEG",
    "val/n2/v1.JPEG": b"validation/v1.JPEG",
    "val/n2/v3.JPEG": b"validation/v3.JPEG",
}


def test_links_by_class_are_the_same_however_often_they_are_made(unpacked: Path, here: Path, capsys):
    for _ in range(2):
        assert linked(here) == WANTED
    assert not capsys.readouterr().out


def test_the_preparation_is_repeated_after_validation_became_val(records: Path, here: Path, capsys):
    shutil.copytree(records.parent, here / "raw", symlinks=True)
    (here / "raw" / "img_val").rename(here / "raw" / "val")
    words = "--raw_data_dir=raw --local_scratch_dir=raw/tf_records --nogcs_upload".split()
    assert cli.main(["legacy", "preprocess_imagenet.py", *words]) == 0
    again = {path.name: path.read_bytes() for path in (here / "raw" / "tf_records" / "validation").iterdir()}
    assert again == {path.name: path.read_bytes() for path in (records / "validation").iterdir()}
    assert all(path.resolve().is_relative_to(here / "raw") for path in (here / "raw" / "by_class").glob("val/*/*"))


def test_links_by_class_follow_validation_renamed_to_val(unpacked: Path, here: Path, capsys):
    (unpacked / "validation").rename(unpacked / "val")
    assert linked(here) == WANTED
    assert "removed 3 links of an earlier run from raw/by_class" in capsys.readouterr().out


def test_links_by_class_follow_validation_sorted_into_classes_and_back(unpacked: Path, here: Path, capsys):
    (unpacked / "validation").rename(unpacked / "val")
    sort_by_class(unpacked / "val")
    assert linked(here) == WANTED
    assert "removed 3 links of an earlier run from raw/by_class" in capsys.readouterr().out
    for file in list((unpacked / "val").glob("*/*")):
        file.rename(unpacked / "val" / file.name)
    for folder in ("n1", "n2"):
        (unpacked / "val" / folder).rmdir()
    assert linked(here) == WANTED
    assert sorted(path.name for path in (unpacked / "val").iterdir()) == ["v1.JPEG", "v2.JPEG", "v3.JPEG"]
    assert "removed 1 link of an earlier run from raw/by_class" in capsys.readouterr().out


def test_links_by_class_leave_out_images_that_are_gone(unpacked: Path, here: Path):
    (unpacked / "validation" / "v2.JPEG").unlink()
    (unpacked / "synset_labels.txt").write_text("n2\nn2\n")
    (unpacked / "train").rename(unpacked / "img_train")
    assert linked(here) == {name: data for name, data in WANTED.items() if "v2" not in name}
    assert not (unpacked / "by_class" / "val" / "n1").exists()


def test_links_by_class_need_a_synset_for_every_image(unpacked: Path, here: Path):
    (unpacked / "synset_labels.txt").write_text("n2\nn1\n")
    with pytest.raises(UsageError, match="raw/validation holds 3 images and raw/synset_labels.txt 2 lines; both must"):
        linked(here)
    (unpacked / "synset_labels.txt").write_text("n2\n../n1\nn2\n")
    with pytest.raises(UsageError, match="raw/synset_labels.txt: '../n1' is not a synset, e.g. n01440764"):
        linked(here)
    (unpacked / "synset_labels.txt").unlink()
    with pytest.raises(UsageError, match="raw/synset_labels.txt is missing; it gives the class of every validation"):
        linked(here)
    assert not (unpacked / "n1").exists()


def test_files_of_the_user_among_the_links_are_an_error(unpacked: Path, here: Path):
    (unpacked / "by_class" / "val" / "n1" / "mine.jpg").write_bytes(b"")
    (unpacked / "validation").rename(unpacked / "val")
    sort_by_class(unpacked / "val")
    with pytest.raises(UsageError, match="raw/by_class/val/n1/mine.jpg is not a link of this command; move it away"):
        linked(here)
    assert (unpacked / "by_class" / "val" / "n1" / "mine.jpg").exists()


def test_the_readmes_steps_leave_records_that_the_keras_script_finds(records: Path, here: Path, capsys):
    """They are in tf_records/ of a folder that is called so too, beside the images that they were made of."""
    words = f"resnet_ctl_imagenet_main.py -bs 8 --train_steps 2 -dd {records.parent} -md model".split()
    assert legacy(*words, fields=SMALL) == 0
    out = capsys.readouterr().out
    classes = len(list((records.parent / "img_train").iterdir()))
    assert f"data: {classes} classes, " in out and "; found in tf_records/, one folder deeper" in out
    assert "--data.source tfrecord" in out


def test_unpacked_images_are_not_trained_before_they_are_prepared(records: Path, here: Path, capsys):
    for name in ("img_train", "img_val"):
        (here / "raw" / name).parent.mkdir(exist_ok=True)
        (here / "raw" / name).symlink_to(records.parent / name)
    words = "demo_resnet_keras.py -bs 8 --train_steps 2 -dd raw -md model".split()
    assert legacy(*words, fields=SMALL) == 3
    said = capsys.readouterr().err
    assert "raw has no TFRecord files of the train split, found there: folders img_train, img_val" in said
    assert not (here / "model").exists()


def test_the_keras_launcher_trains_with_its_preset_and_cleans_a_run(records: Path, here: Path):
    words = f"demo_resnet_keras.py --optimizer LARS -bs 8 --train_steps 2 -dd {records} -md model --clean".split()
    for _ in range(2):
        assert legacy(*words, fields=SMALL) == 0
        assert events(here / "model", "start")[0]["base_lr"] == 2.5
    assert len(events(here / "model", "start")) == 1, "the second start has deleted the first"
    (here / "model" / "mine.txt").touch()
    assert legacy(*words, fields=SMALL) == 2
    assert (here / "model" / "mine.txt").exists()


def test_the_estimator_script_profiles_logs_and_evaluates(shapes: Path, here: Path, capsys):
    words = f"imagenet_main.py -bs 4 --jpeg_data_dir {shapes} -md model".split()
    log = "--benchmark_logger_type BenchmarkFileLogger --benchmark_log_dir logs --benchmark_test_id one".split()
    hooks = "--hooks ProfilerHook --profile_steps 1,2 --max_train_steps 4 --display_steps 1".split()
    assert legacy(*words, *log, *hooks, fields=SMALL) == 0
    assert (here / "model" / "profile" / "time.json").is_file() and (here / "logs" / "metric.log").is_file()
    assert json.loads((here / "logs" / "benchmark_run.log").read_text())["test_id"] == "one"
    assert list((here / "model" / "tensorboard").glob("events.*"))
    assert legacy(*words, "--eval_only") == 0
    assert "top1" in capsys.readouterr().out
    assert legacy(*words, "--eval_only", "--max_eval_steps", "2", "-bs", "3") == 0
    [scores] = (here / "model").glob("scores-ckpt-*.json")
    assert json.loads(scores.read_text())["values"]["samples"] == 6


def test_export_dir_writes_the_trained_network_at_the_end(shapes: Path, here: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("onnxruntime")
    words = f"imagenet_main.py -bs 4 --jpeg_data_dir {shapes} -md model --max_train_steps 2 --export_dir out".split()
    assert legacy(*words, fields=[*SMALL[:-1], "model.arch=squeezenet1_1"]) == 0
    [file] = (here / "out").glob("*/model.onnx")
    assert f"wrote {file.relative_to(here)}" in capsys.readouterr().out
    image = next((shapes / "val").glob("*/*"))
    assert cli.main(["predict", str(file), str(image), "--out", "found"]) == 0


def test_the_folder_of_mpirun_for_output_has_the_log_of_the_first_rank_too(
    shapes: Path, here: Path, monkeypatch: pytest.MonkeyPatch
):
    line = f"mpirun --tag-output --output-filename logs -np 1 $PYTHON imagenet_main.py -bs 4 --jpeg_data_dir {shapes}"
    assert legacy("--", f"{line} -md model --max_train_steps 2 --display_steps 1", fields=SMALL) == 0
    log = (here / "logs" / "rank_0.log").read_text()
    [start], trained = events(here / "model", "start"), events(here / "model", "train")
    assert start["steps"] == 2 and f"loss {trained[0]['loss']:.4g}" in log
    assert "ends with exit 0: finished" in log and not list((here / "model").glob("rank_*.log"))
    (here / "file").touch()
    monkeypatch.chdir(here)
    assert legacy("--", f"{line.replace('logs', 'file/logs')} -md other --max_train_steps 2", fields=SMALL) == 2


def test_ssd_writes_summaries_every_save_summary_steps(coco: Path, here: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    words = ["ssd.py", "--data_dir", coco, "--model_dir", "model", "--resnet_checkpoint", "", "-b", "4", "-d", "fp32"]
    more = "-e 4 --save_summary_steps 2 --num_steps 5 --save_checkpoints_steps 2".split()
    assert legacy(*words, *more, fields=SMALL_BOXES) == 0
    assert [line["step"] for line in events(here / "model", "train")] == [1, 2, 3, 4, 5]
    board = accumulator.EventAccumulator(str(here / "model" / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("train/loss")] == [2, 4]
    kept = sorted(int(path.name[5:]) for path in (here / "model" / "checkpoints").glob("ckpt-*"))
    assert kept == [0, 2, 4, 5]


@pytest.fixture(scope="module")
def coco(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("coco")
    zips = ZIPS["make_zips"](folder / "zips", 12, 6)
    words = ["--source", str(zips), "--out", str(folder / "records"), "--form", "tfrecord", "--jobs", "1"]
    assert cli.main(["prepare", "coco", *words, "--shards=2", "--val-shards=1", "--jobs=1"]) == 0
    return folder / "records"


def test_ssd_trains_evaluates_all_checkpoints_and_draws(coco: Path, here: Path, capsys: pytest.CaptureFixture[str]):
    words = ["ssd.py", "--data_dir", coco, "--model_dir", "model", "--resnet_checkpoint", "", "-b", "4", "-d", "fp32"]
    assert legacy(*words, "-e", "2", "-c", "1", fields=SMALL_BOXES) == 0
    ending = r"2 epochs are done; nothing was evaluated; total training time 0:00:\d\d at \d+ img/s\n"
    assert re.search(ending, capsys.readouterr().out)
    assert events(here / "model", "exit")[-1]["images_per_s"] > 0
    kept = sorted(path.name for path in (here / "model" / "checkpoints").glob("ckpt-*"))
    assert len(kept) == 3, "the start and two epochs"
    assert legacy(*words, "--mode", "eval") == 0
    rows = json.loads((here / "model" / "evaluation.json").read_text())["checkpoints"]
    assert [row["checkpoint"] for row in rows] == kept[1:]
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (60, 80, 3), np.uint8)).save("photo.jpg")
    assert legacy(*words, "--inference", "photo.jpg") == 0
    with Image.open("out.png") as drawn:
        assert drawn.format == "PNG"


def test_static_batches_are_written_and_replayed(coco: Path, here: Path):
    # The generator makes batches of 300 pixels, as the original; a run replays those of its own size only.
    assert legacy("generate_static_dataset.py", "-i", f"{coco}/train*", "-o", "static", "-b", "2", "-s", "2") == 2
    words = ["generate_static_dataset.py", "-i", f"{coco}/train*", "-o", "static", "-b", "2", "-s", "2"]
    assert cli.main(["legacy", *map(str, words)]) == 0
    assert (here / "static" / "worker_0").is_dir()


@pytest.fixture(scope="module")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return BLOBS(tmp_path_factory.mktemp("volumes") / "own", range(10))


MAIN_PY = "--task 01 --gpus 0 --hpus 0 --dim 2 --batch_size 8 --nvol 2 --deep_supervision --results out".split()


def test_unet_trains_and_evaluates_into_the_originals_file(volumes: Path, here: Path):
    words = ["main.py", *MAIN_PY, "--data", volumes]
    assert legacy(*words, "--max_epochs", "1", "--train_batches", "2", fields=SMALL_VOLUMES) == 0
    assert events(here / "out", "start")[0]["steps"] == 2
    assert legacy(*words, "--exec_mode", "evaluate", "--ckpt_path", "out/checkpoints/last.ckpt") == 0
    found = json.loads((here / "out" / "eval_log.json").read_text())
    assert list(found) == ["Mean dice", "L1", "L2"]
    assert found["Mean dice"] == pytest.approx((found["L1"] + found["L2"]) / 2, abs=0.011)


def test_a_3d_unet_evaluates_as_many_volumes_as_test_batches_says(here: Path):
    volumes = BLOBS(here / "own", range(15), (8, 32, 32))  # three to evaluate
    words = "--task 01 --gpus 0 --hpus 0 --dim 3 --batch_size 1 --results out --max_epochs 1 --train_batches 1".split()
    words = ["main.py", *words, "--data", volumes, "--test_batches"]
    assert legacy(*words, "1", fields=SMALL_VOLUMES) == 0
    assert events(here / "out", "evaluate")[-1]["samples"] == 1
    assert legacy(*words, "2", "--exec_mode", "evaluate") == 0
    [scores] = (here / "out").glob("scores-ckpt-*.json")
    assert json.loads(scores.read_text())["values"]["samples"] == 2


def test_the_unet_benchmark_writes_the_five_numbers_where_logname_says(volumes: Path, here: Path):
    words = "--benchmark --train_batches 5 --warmup 2 --logname res_log".split()
    assert legacy("main.py", *MAIN_PY, "--data", volumes, *words, fields=SMALL_VOLUMES) == 0
    found = json.loads((here / "out" / "res_log").read_text())
    names = ["throughput_train", *(f"latency_train_{name}" for name in ("mean", "90", "95", "99"))]
    assert sorted(found) == sorted(names) and all(value > 0 for value in found.values())


def test_a_decathlon_task_is_found_prepared_and_scored(here: Path, capsys: pytest.CaptureFixture[str]):
    FOLDERS["make_folder"](here / "Task04_Hippocampus", 6, name="Hippocampus")
    assert cli.main(["legacy", "download.py", "--task", "04", "--results", "."]) == 0
    words = "preprocess.py --task 04 --dim 2 --data . --results . --n_jobs 1".split()
    assert cli.main(["legacy", *words]) == 0
    assert (here / "04_2d" / "plan.json").is_file()
    assert cli.main(["legacy", *words, "--exec_mode", "test"]) == 0
    assert len(list((here / "04_2d" / "test").glob("*_x.npy"))) == 2
    labels = here / "Task04_Hippocampus" / "labelsTr"
    shutil.copytree(labels, "preds")
    capsys.readouterr()
    assert cli.main(["legacy", "evaluate.py", "--preds", "preds", "--lbls", str(labels)]) == 0
    assert "1.0000" in capsys.readouterr().out


@pytest.fixture
def bucket(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Serve the files of a folder of this machine in place of the public bucket."""
    folder = tmp_path_factory.mktemp("bucket")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Silent."""

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        monkeypatch.setattr(fetched, "BUCKET", f"http://127.0.0.1:{server.server_address[1]}")
        yield folder
        server.shutdown()


def test_download_py_fetches_a_task_that_preprocess_py_then_prepares(
    here: Path, bucket: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    tar = bucket / "Task04_Hippocampus.tar"
    FOLDERS["pack"](FOLDERS["make_folder"](bucket / "Task04_Hippocampus", 6, name="Hippocampus"), tar)
    words = ["legacy", "download.py", "--task", "04", "--results", "data"]
    assert cli.main(words) == 3
    assert f"{fetched.MD5['04']} was expected; what came is kept" in capsys.readouterr().err
    assert not (here / "data" / tar.name).exists()
    monkeypatch.setitem(fetched.MD5, "04", hashlib.md5(tar.read_bytes()).hexdigest())
    assert cli.main(words) == 0
    assert (here / "data" / tar.name).read_bytes() == tar.read_bytes()
    tar.unlink()
    assert cli.main(words) == 0, "it is there"
    assert cli.main("legacy preprocess.py --task 04 --dim 2 --data data --results data --n_jobs 1".split()) == 0
    assert (here / "data" / "04_2d" / "plan.json").is_file()


def test_weights_of_ssd_that_are_missing_name_those_that_fit(
    coco: Path, here: Path, capsys: pytest.CaptureFixture[str]
):
    words = [
        "ssd.py",
        "--data_dir",
        coco,
        "--model_dir",
        "model",
        "-b",
        "4",
        "-d",
        "fp32",
        "--resnet_checkpoint",
        "r34",
    ]
    assert legacy(*words, fields=["data.size=48", "data.classes=0", "data.max-boxes=20"]) == 4
    said = capsys.readouterr().err
    assert "weights r34/model.ckpt-28152 does not exist" in said and "give torchvision:resnet34" in said
    # as the README fetches them
    folder = "https://storage.googleapis.com/intel-optimized-tensorflow/models/ssd-backbone"
    assert f"model.ckpt-28152.index and model.ckpt-28152.data-00000-of-00001 from {folder}" in said


@pytest.mark.parametrize(
    "text",
    [
        "mpirun -np 16 -H 10.0.0.1:8,10.0.0.2:8 python3 ssd.py --use_horovod",
        "MULTI_HLS_IPS=10.0.0.1,10.0.0.2 python3 demo_resnet_keras.py --use_horovod --num_workers_per_hls 8",
    ],
)
def test_hosts_are_launched_from_one_without_devices(text: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    ran: list[list[str]] = []
    run_legacy(["--", text], print, lambda words: ran.append(list(words)), environ={})
    [words] = ran
    assert words[0] == "launch" and "10.0.0.1:8,10.0.0.2:8" in words


def test_a_line_of_a_file_does_not_bind_those_after_it(tmp_path: Path):
    import torch

    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system cannot bind a process to CPUs")
    (tmp_path / "lines").write_text("imagenet_main.py --max_cpus 1\nimagenet_main.py --max_cpus 1\n")
    found, before = [], (os.sched_getaffinity(0), torch.get_num_threads())

    def bind(words: Sequence[str]) -> None:
        found.append((os.sched_getaffinity(0), torch.get_num_threads()))
        bind_to_cpus(1)
        torch.set_num_threads(before[1] + 1)

    run_legacy(["--from", str(tmp_path / "lines")], print, bind, environ={})
    assert [*found, (os.sched_getaffinity(0), torch.get_num_threads())] == [before] * 3


def test_devices_that_are_not_there_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    import torch

    if torch.accelerator.is_available():
        pytest.skip("shows a machine without an accelerator")
    assert cli.main(["legacy", "main.py", "--task", "01", "--dim", "2", "--hpus", "8", "--data", "x"]) == 2
    assert "8 devices are asked for, and this machine has none besides its CPU" in capsys.readouterr().err


# Every command of the READMEs that asks for one device, for a few steps.

PAGES = runpy.run_path(str(Path(__file__).with_name("pages.py")))
COMMON = ["train.global-batch=8", "train.precision=fp32", "run.compile=off", "run.log-every-steps=1"]
TINY = {
    "resnet50": [*SMALL, "train.max-steps=2", "data.path=SHAPES", "run.out=out"],
    "resnet50_keras": [*SMALL, "train.max-steps=2", "data.path=RECORDS", "run.out=out"],
    "resnet50_lars": [*SMALL, "train.max-steps=2", "data.path=RECORDS", "run.out=out"],
    "resnext101": [*SMALL, "data.path=SHAPES", "data.source=auto", "run.out=out", "train.epochs=1"],
    "ssd_resnet34": [*SMALL_BOXES, "data.path=COCO", "model.weights=", "train.max-steps=2", "run.out=out"],
    "unet2d": [*SMALL_VOLUMES, "data.path=VOLUMES", "data.nvol=2"],
}


def single() -> dict[str, tuple[str, ...]]:
    """Return commands of one device by their text: of training, and of the benchmark that says where it writes."""
    found = {}
    for readme in PAGES["TITLES"]:
        for command in PAGES["commands"](readme):
            [words] = command.words or [("",)]
            if words[0] in ("train", "benchmark") and "--run.devices" not in words and "demo_unet" not in command.text:
                found[command.text] = words
    return found


SINGLE = single()


def test_most_commands_of_one_device_are_run_as_they_stand():
    assert len(SINGLE) == 17


@pytest.mark.slow
@pytest.mark.parametrize("text", SINGLE, ids=lambda text: text.partition(".py")[0][-30:])
def test_a_command_of_the_readmes_runs(
    text: str, shapes: Path, records: Path, coco: Path, volumes: Path, here: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("RANK", raising=False)
    fields = tiny(SINGLE[text], {"SHAPES": shapes, "RECORDS": records, "COCO": coco, "VOLUMES": volumes})
    assert legacy("--", text.replace("/tmp/", f"{here}/"), fields=fields) == 0
    written = list(here.rglob("log.jsonl")) + list(here.rglob("res_log"))
    assert len(written) == 1


def tiny(words: Sequence[str], places: dict[str, Path]) -> list[str]:
    """Fields that make a few steps on tiny data of one of our commands."""
    fields = [*TINY[words[1]], *COMMON]
    for name, path in places.items():
        fields = [field.replace(name, str(path)) for field in fields]
    if words[1] == "unet2d" and words[0] == "train":
        fields += ["train.max-steps=2"]
    if "--run.profile" in words:
        fields += ["run.profile=1,2"]
    return fields


# Two ranks, as processes.

EIGHT = re.compile(r"((?:--nproc_per_node|-np|--np|--num_workers_per_hls|--hpus) )8\b")


def on_eight() -> dict[str, tuple[str, ...]]:
    """Return the commands of eight devices by their text, written for two and for fewer batches; demo_unet.py, which
    calls main.py, does not say where it writes."""
    found = {}
    for command in (each for readme in PAGES["TITLES"] for each in PAGES["commands"](readme)):
        if command.words and "--run.devices" in command.words[0] and "demo_unet" not in command.text:
            text = EIGHT.sub(r"\g<1>2", command.text).replace("batches 150", "batches 6")
            found[text.replace("--warmup 50", "--warmup 2")] = command.words[0]
    return found


ON_EIGHT = on_eight()


def test_every_command_of_eight_devices_is_run_with_two():
    assert len(ON_EIGHT) == 15 and all(EIGHT.search(text) is None for text in ON_EIGHT)


@pytest.mark.slow
@pytest.mark.parametrize("text", ON_EIGHT, ids=lambda text: text.partition(".py")[0][-30:])
def test_a_command_of_eight_devices_runs_with_two(
    text: str, shapes: Path, records: Path, coco: Path, volumes: Path, here: Path
):
    fields = tiny(ON_EIGHT[text], {"SHAPES": shapes, "RECORDS": records, "COCO": coco, "VOLUMES": volumes})
    text, command = text.replace("/root/tmp/", "/tmp/").replace("/tmp/", f"{here}/"), ON_EIGHT[text]
    said = as_process("--", text, fields=fields)
    if command[0] == "benchmark":
        [result] = here.rglob("unet2d-*.json")
        assert json.loads(result.read_text())["ranks"]["size"] == 2 and "efficiency" in said
        return
    [log] = here.rglob("log.jsonl")
    [start] = events(log.parent, "start")
    ranks = [0, 1] if "--output-filename" in text else [1]
    place = here / "resnext_log" if 0 in ranks else log.parent
    assert start["local_batch"] == 4 and sorted(here.rglob("rank_*.log")) == [place / f"rank_{n}.log" for n in ranks]


@pytest.mark.slow
def test_torchrun_starts_two_ranks_of_train_py(shapes: Path, here: Path):
    words = ["torchrun", "--nproc_per_node", "2", "train.py", *TRAIN_PY, "--val-crop-size", "24"]
    as_process("--", *words, f"--data-path={shapes}", "--output-dir", "out", fields=["train.max-steps=2"])
    [start] = events(here / "out", "start")
    assert start["local_batch"] == 4 and (here / "out" / "rank_1.log").is_file()


@pytest.mark.slow
def test_under_torchrun_each_rank_reads_the_command_line(shapes: Path, here: Path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "sightline"]
    words = ["legacy", *sets(["train.max-steps=2"]), "train.py", "--device", "cpu", *TRAIN_PY, "--val-crop-size", "24"]
    environ = {**os.environ, "PYTHONPATH": str(REPO)}
    command = [*launcher, *words, f"--data-path={shapes}", "--output-dir", "out"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("legacy: sightline train resnet50") == 1, "one rank speaks"
    [start] = events(here / "out", "start")
    assert start["local_batch"] == 4 and (here / "out" / "rank_1.log").is_file()


@pytest.mark.slow
def test_horovod_workers_of_keras_and_estimator_write_worker_0(records: Path, shapes: Path, here: Path):
    demo = f"demo_resnet_keras.py --optimizer LARS --use_horovod --num_workers_per_hls 2 -bs 4 -dd {records} -md keras"
    as_process("--", *demo.split(), "--train_steps", "2", fields=SMALL)
    [start] = events(here / "keras" / "worker_0", "start")
    assert (start["base_lr"], start["local_batch"]) == (9.5, 4)
    line = f"mpirun --allow-run-as-root -np 2 python3 imagenet_main.py --use_horovod -bs 4 --jpeg_data_dir {shapes}"
    as_process("--", f"{line} -md estimator --max_train_steps 2 --clean", fields=SMALL)
    [start] = events(here / "estimator" / "worker_0", "start")
    assert start["local_batch"] == 4 and start["base_lr"] == pytest.approx(0.256 * 8 / 256)


@pytest.mark.slow
def test_mpirun_starts_two_ranks_of_ssd(coco: Path, here: Path):
    line = "mpirun --allow-run-as-root --bind-to core --map-by socket:PE=7 --np 2 \\\n $PYTHON /root/x/ssd.py -d fp32"
    more = f"--use_horovod -e 1 -b 2 --model_dir model --data_dir {coco} --resnet_checkpoint '' --distributed_bn"
    as_process("--", f"{line} {more}", fields=SMALL_BOXES)
    [start] = events(here / "model", "start")
    assert start["local_batch"] == 2 and start["base_lr"] == pytest.approx(0.003 * 4 / 32)


@pytest.mark.slow
def test_two_hpus_train_and_benchmark_the_unet(volumes: Path, here: Path):
    words = "--task 01 --hpus 2 --gpus 0 --dim 2 --batch_size 4 --deep_supervision --results out".split()
    benchmark = "--benchmark --train_batches 6 --warmup 2 --logname res_log".split()
    as_process("main.py", *words, "--data", volumes, *benchmark, fields=SMALL_VOLUMES)
    found = json.loads((here / "out" / "res_log").read_text())
    assert len(found) == 5 and found["latency_train_90"] <= found["latency_train_99"]
    [result] = (here / "out").glob("unet2d-*.json")
    assert json.loads(result.read_text())["ranks"]["size"] == 2
