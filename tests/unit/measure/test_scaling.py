"""The model of many devices: its limits, DDP's buckets, published figures, and the command."""

import dataclasses
import importlib.util
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from sightline import cli, config
from sightline.errors import UsageError
from sightline.measure import links, scaling
from sightline.measure.benchmark import BenchmarkOptions
from sightline.measure.links import LINKS, Cluster, Link, all_reduce_s
from sightline.measure.scaling import Gradient, Network, Rounds, ScalingOptions, Work, buckets_of, exposed_s, predict

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "scaling.py"
TINY = """--data.classes=10 --data.size=32 --data.eval-size=32 --data.eval-resize=32 --train.global-batch=8
--train.precision=fp32 --run.device=cpu --run.workers=0 --model.width=8""".split()
FAST = Link("fast", math.inf, 0.0, 0.0)
POD = Cluster(LINKS["nvlink4"], LINKS["ib400"], 8)
NETWORK = Network(tuple(Gradient(4_000_000, 1 - n / 25) for n in range(25)), (64, 128))  # 100 MB
WORK = Work(0.1, 32, NETWORK)
COUNTS = (1, 2, 4, 8, 16, 64, 256, 1024)


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("scaling_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


# Collectives


@pytest.mark.parametrize("seconds", links.ALGORITHMS.values(), ids=links.ALGORITHMS)
def test_no_way_beats_the_narrowest_place(seconds):
    """Each host must send its part of the sum out and get the rest in: 2 (H - 1) / H of the bytes over its ports."""
    size = 1e9
    for devices in (2, 8, 16, 64, 1024):
        hosts, local = POD.split(devices)
        least = max(
            2 * (hosts - 1) / hosts * size / (local * POD.between.bandwidth),
            2 * (local - 1) / local * size / POD.inside.bandwidth,
        )
        assert seconds(devices, size, POD) > least


def test_a_ring_inside_one_host_by_hand():
    cluster = Cluster(Link("a", 100.0, 2.0, 5.0), Link("b", 1.0, 50.0, 70.0), 4)
    assert links.ring_s(4, 1000.0, cluster) == 5 + 2 * 3 * 2 + 2 * 3 / 4 * 1000 / 100
    assert all_reduce_s(1, 1000.0, cluster) == 0
    # Two hosts of four: seven hops, one of them between; four ports of 1 byte/s.
    assert links.ring_s(8, 1000.0, cluster) == 70 + 2 * (6 * 2 + 50) + 2 * 7 / 8 * 1000 / 4
    assert links.tree_s(8, 1000.0, cluster) == 70 + 2 * (3 * 2 + 1 * 50) + 2 * 1000 / 4
    assert links.hierarchical_s(8, 1000.0, cluster) == 3 * 70 + 2 * 3 * (2 + 1000 / 4 / 100) + 2 * (50 + 1000 / 8 / 1)


def test_large_sums_take_a_ring_inside_and_a_tree_over_many_hosts():
    assert links.all_reduce_by(8, 25 << 20, POD) == "ring"
    assert links.all_reduce_by(1024, 4, POD) == "tree"
    # Where only the links between hosts cost anything, cutting the bytes first is as good as a tree or better.
    slow = Cluster(FAST, Link("slow", 1e9, 1e-9, 0.0), 8)
    assert links.hierarchical_s(64, 1e9, slow) <= links.tree_s(64, 1e9, slow)


def test_one_device_per_host_knows_only_the_links_between():
    alone = Cluster(FAST, LINKS["eth25"], 1)
    assert all_reduce_s(2, 1e9, alone) == pytest.approx(1e9 / LINKS["eth25"].bandwidth, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "bandwidth", "hop_s"),
    [
        ("nvlink4", 360e9, 3.4e-6),
        ("nvlink4,400GB/s", 400e9, 3.4e-6),
        ("rail,100Gbit/s", 12.5e9, links.NETWORK_HOP_S),
        ("wan,10Mbit/s,2000us", 1.25e6, 2e-3),
    ],
)
def test_links_are_named_or_given(text, bandwidth, hop_s):
    link = links.parse(text)
    assert (link.bandwidth, link.hop_s) == pytest.approx((bandwidth, hop_s))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nvlink9", "known: nvlink2, .* e.g. nvlink9,45GB/s"),
        ("a,5", "a speed in GB/s, MB/s"),
        ("a,5GB/s,3", "a latency in us"),
        ("a,0GB/s", "0 is not a positive number"),
        ("a,1.2.3GB/s", "1.2.3 is not a positive number"),
    ],
)
def test_bad_links(text, message):
    with pytest.raises(UsageError, match=message):
        ScalingOptions(links=(text,))


# Gradients


def test_buckets_are_those_of_ddp():
    rng = np.random.default_rng(0)
    sizes = [int(10 ** rng.uniform(2, 6.5)) for _ in range(80)]
    tensors = [torch.empty(size, device="cpu") for size in reversed(sizes)]
    limits = [scaling.FIRST_BUCKET_BYTES, 3 << 20]
    assert dist._DEFAULT_FIRST_BUCKET_BYTES == scaling.FIRST_BUCKET_BYTES
    chosen, _ = dist._compute_bucket_assignment_by_size(tensors, limits)
    expected = [sum(tensors[i].nbytes for i in bucket) for bucket in chosen]
    assert [b.size for b in buckets_of([Gradient(4 * size, 0.5) for size in sizes], 3 << 20)] == expected
    assert len(expected) > 5


def test_gradients_are_ready_after_the_layers_behind_them():
    """Three layers of 8, 2 and 1 units of work; the norm has none and is ready with what is behind it."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 2), nn.Linear(2, 4)).to("meta")
    network = scaling.network_of(model, torch.empty(1, 8, device="meta"))
    assert [g.size for g in network.gradients] == [256, 32, 32, 64, 8, 32, 16]
    total = 64 + 16 + 8
    expected = [1, 24 / total, 24 / total, 24 / total, 24 / total, 8 / total, 8 / total]
    assert [g.ready for g in network.gradients] == pytest.approx(expected)
    assert network.norms == (8,) and network.size == 440


def test_a_bucket_is_ready_when_its_last_gradient_is():
    made = buckets_of([Gradient(2 << 20, 1.0), Gradient(2 << 20, 0.7), Gradient(2 << 20, 0.2)], 3 << 20)
    assert made == [Gradient(2 << 20, 0.2), Gradient(4 << 20, 1.0)]


def test_exposed_time_by_hand():
    """Each bucket takes 10 s; they are full at 2, 4 and 20 of 20 s."""
    cluster = Cluster(Link("a", 1.0, 0.0, 0.0), FAST, 2)
    buckets = [Gradient(10, 0.1), Gradient(10, 0.2), Gradient(10, 1.0)]
    assert exposed_s(buckets, 20.0, 2, cluster) == pytest.approx(2 + 10 + 10 + 10 - 20)
    assert exposed_s(buckets[:1], 20.0, 2, cluster) == 0
    assert exposed_s(buckets, 20.0, 1, cluster) == 0
    deaf = Cluster(dataclasses.replace(cluster.inside, overlaps=False), FAST, 2)
    assert exposed_s(buckets, 20.0, 2, deaf) == pytest.approx(30)


# The step


def test_one_device_is_the_step_itself():
    row = predict(dataclasses.replace(WORK, spread=0.2, bn_group=-1), 1, POD)
    assert row["step_s"] == WORK.step_s and row["efficiency"] == 1 and row["images_per_s"] == 320
    assert row["limit"] == "the device" and set(row["extra_s"].values()) == {0.0}
    assert row["storage_bytes_per_s"] == 0, "of input that is not counted"


def test_links_without_limit_cost_nothing():
    for devices in COUNTS:
        assert predict(WORK, devices, Cluster(FAST, FAST, 8))["step_s"] == pytest.approx(WORK.step_s)


def test_more_devices_are_never_more_efficient():
    for spread in (0.0, 0.03):
        work = dataclasses.replace(WORK, spread=spread, bn_group=-1)
        rows = [predict(work, devices, POD) for devices in COUNTS]
        shares = [row["efficiency"] for row in rows]
        assert shares == sorted(shares, reverse=True) and shares[-1] < shares[0]
        assert [row["images_per_s"] for row in rows] == sorted(row["images_per_s"] for row in rows)


def test_faster_links_are_never_slower():
    times = [predict(WORK, 64, Cluster(LINKS["nvlink4"], links.parse(f"x,{g}GB/s"), 8))["step_s"] for g in (1, 5, 40)]
    assert times == sorted(times, reverse=True) and times[0] > times[-1]
    slow = predict(WORK, 64, Cluster(LINKS["pcie5"], LINKS["eth25"], 1))
    assert slow["limit"] == "all-reduce" and slow["efficiency"] < 0.9


def test_accumulation_leaves_less_time_to_hide_in():
    thin = Cluster(LINKS["pcie5"], LINKS["eth25"], 1)
    steps = [predict(dataclasses.replace(WORK, accumulation=parts), 16, thin)["step_s"] for parts in (1, 4, 16)]
    assert steps == sorted(steps) and steps[0] < steps[-1]


def test_shared_statistics_cost_two_exchanges_of_every_norm():
    whole = scaling.statistics_s((64, 128), -1, 16, POD)
    sizes = (4 * 129, 4 * 128, 4 * 257, 4 * 256)
    assert whole == pytest.approx(sum(all_reduce_s(16, size, POD) for size in sizes))
    assert scaling.statistics_s((64, 128), 8, 16, POD) == scaling.statistics_s((64, 128), -1, 8, POD) < whole
    assert scaling.statistics_s((64,), 0, 16, POD) == scaling.statistics_s((64,), 1, 16, POD) == 0


def test_the_slowest_of_many_against_drawn_numbers():
    rng = np.random.default_rng(1)
    for devices in (1, 2, 8, 64, 1024):
        drawn = rng.standard_normal((4000, devices)).max(1).mean()
        assert scaling.slowest(devices) == pytest.approx(drawn, abs=0.06)


def test_spread_of_steps():
    seconds = statistics.NormalDist(10, 0.5).samples(4000, seed=3)
    assert scaling.spread_of([*seconds, 500.0]) == pytest.approx(0.05, rel=0.1)  # one outlier does not count


def test_storage_that_is_too_slow_sets_the_pace():
    work = dataclasses.replace(WORK, sample_bytes=1e5)
    free = predict(work, 64, POD)
    assert free["storage_bytes_per_s"] == pytest.approx(free["images_per_s"] * 1e5)
    tight = predict(work, 64, POD, storage=1e8)
    assert tight["images_per_s"] == pytest.approx(1000) and tight["limit"] == "storage"


@pytest.mark.parametrize(("share", "limit"), [(0.008, "the device"), (0.012, "slowest device")])
def test_less_than_a_hundredth_of_the_step_limits_nothing(share: float, limit: str):
    spread = share / scaling.slowest(8)
    assert predict(dataclasses.replace(WORK, spread=spread), 8, Cluster(FAST, FAST, 8))["limit"] == limit


@pytest.mark.parametrize(("in_background", "waits_s"), [(True, 0.1), (False, 2.0)])
def test_an_epoch_by_hand(in_background, waits_s):
    rounds = Rounds(32_000, 6_400, 2, 2_000_000_000, 1, 1e9, in_background)
    row = predict(WORK, 8, Cluster(FAST, FAST, 8))
    found = scaling.epoch_of(row, WORK, rounds)
    # 125 steps of 0.1 s; 25 batches of a third of it in every second epoch; 2 GB at 20 GB/s, or at 1.
    assert found["steps"] == 125 and found["train_s"] == pytest.approx(12.5)
    assert found["evaluate_s"] == pytest.approx(25 * 0.1 / 3 / 2)
    assert found["checkpoint_s"] == pytest.approx(waits_s)
    assert found["epoch_s"] == pytest.approx(12.5 + 25 / 60 + waits_s)
    many = scaling.epoch_of(predict(WORK, 1024, Cluster(FAST, FAST, 8)), WORK, rounds)
    # One step an epoch: the disk is not done before the next checkpoint wants it.
    assert many["steps"] == 1 and many["checkpoint_s"] > 1.9


def layout(image: tuple, label: tuple, **more: tuple) -> SimpleNamespace:
    """What is read of bound data: shapes and types of a sample."""
    return SimpleNamespace(layout={"image": (image, "uint8"), "label": (label, "int64"), **more}, samples_per_item=1)


def test_bytes_of_a_sample_are_those_of_the_data_that_recipes_are_for():
    """The archives' bytes over their images, as their sites give them; a crop by its pixels and labels."""
    images = scaling.sample_bytes_of(layout((3, 224, 224), ()))
    assert images == (147_897_477_120 / 1_281_167, "ImageNet: ILSVRC2012_img_train.tar over its images")
    boxes = scaling.sample_bytes_of(layout((3, 300, 300), (), boxes=((9, 4), "float32")))
    assert boxes == (19_336_861_798 / 118_287, "COCO: train2017.zip over its images")
    crop = layout((3, 32, 16), (32, 16))
    assert scaling.sample_bytes_of(crop) == (3 * 512 + 8 * 512, "a crop of an image and its mask, not compressed")
    crop = layout((4, 8, 16, 16), (8, 16, 16))
    crop.samples_per_item = 4
    assert scaling.sample_bytes_of(crop) == (3 * 2048.0, "a crop of a prepared volume, not compressed")


@pytest.mark.parametrize(
    ("bound", "held_out"),
    [
        (layout((3, 224, 224), ()), 50_000),  # ImageNet
        (layout((3, 300, 300), (), boxes=((9, 4), "float32")), 5_000),  # COCO
        (layout((3, 64, 64), (64, 64)), 21),  # one of five folds, where the other four are 87
        (layout((4, 8, 64, 64), (8, 64, 64)), 21 * 155),  # in slices, of BraTS
    ],
)
def test_an_epoch_without_data_is_as_the_recipe_declares_it(bound: SimpleNamespace, held_out: int):
    data = SimpleNamespace(declared=lambda: (("a", "b"), 87), declared_per_item=lambda batch: batch // 16)
    train = SimpleNamespace(global_batch=64, eval_every_epochs=3, trainable="all", ema=0.99)
    model = SimpleNamespace(build=lambda spec: torch.nn.Linear(*spec))
    optimizer = SimpleNamespace(build=lambda model, device: torch.optim.SGD(model.parameters()))  # it has no state
    recipe = SimpleNamespace(train=train, data=data, model=model, optimizer=optimizer)
    run = SimpleNamespace(checkpoint_every_epochs=5, save_in_background=False)
    bound.dataset = SimpleNamespace(spec=(3, 4))
    assert scaling.rounds_of(recipe, run, bound, ScalingOptions(disk_gbs=0.5)) == Rounds(
        87 * 4, held_out, 3, 2 * 4 * (3 * 4 + 4), 5, 0.5e9, False
    )


def test_the_table_says_all_numbers_of_each_row():
    link = {"name": "nvlink4", "bandwidth": 360e9}
    epoch = {"epoch_s": 123.456, "evaluate_s": 1.234, "checkpoint_s": 0.056}
    row = {
        "devices": 16, "step_s": 0.1234567, "images_per_s": 12345.6, "efficiency": 0.98765, "careful_efficiency": 0.5,
        "all_reduce_s": 0.0012345, "algorithm": "ring", "limit": "all-reduce", "storage_bytes_per_s": 1.5e9,
        "epoch": epoch,
    }  # fmt: skip
    rounds = {"checkpoint_bytes": 204.8e6, "disk": 1e9, "in_background": True}
    found = {
        "cluster": {"inside": link, "between": {"name": "mine", "bandwidth": 12.5e9}, "per_host": 8},
        "step_s": 0.1, "batch_per_device": 32, "spread": 0.0123, "gradient_bytes": 102.4e6, "buckets": [1, 2, 3],
        "rows": [row], "rounds": rounds, "sample_bytes": 114_560.0, "sample_bytes_from": "given",
    }  # fmt: skip
    first, head, line, last = scaling.as_text(found).splitlines()
    assert first == (
        "PREDICTED from one device's step of 100 ms with 32 samples (single steps vary by 1.2%): 102.4 MB of "
        "gradients in 3 buckets, nvlink4 360 GB/s inside hosts of 8 and mine 12.5 GB/s between hosts; every device "
        "keeps its batch"
    )
    names = (
        "devices batch step ms img/s efficiency careful all-reduce ms by limit storage GB/s epoch s of it eval, save"
    )
    assert head.split() == names.split()
    assert line.split() == "16 512 123.457 12,346 98.8% 50.0% 1.234 ring all-reduce 1.500 123.5 1.23 0.06".split()
    assert len(line) == len(head) and line.startswith(" " * 6 + "16" + " " * 6 + "512")
    assert last == (
        "careful: steps that vary by at least 5%, as published runs do; storage: 114.6 kB per sample (given); "
        "checkpoint of 204.8 MB, 0.205 s to write in the background"
    )
    waits = {**found, "rounds": {**rounds, "in_background": False}}
    assert scaling.as_text(waits).endswith("0.205 s to write while all wait")


# Against others


def test_published_throughputs(script):
    """Twelve figures of three vendors' machines; the one that is far off has half the batch of the one below it."""
    rows = script.beside_published()
    errors = [abs(row["error"]) for row in rows]
    assert len(rows) == 12 and statistics.median(errors) < 0.05
    assert sorted(errors)[-2] < 0.07 and max(errors) < 0.25
    # Links alone never explain what is lost.
    assert all(row["links_alone"] > row["many"] and row["links_alone"] <= row["devices"] * row["one"] for row in rows)
    assert "absolute error: median" in script.published_as_text(rows)


@pytest.mark.parametrize(("name", "parameters"), [("resnet50", 25_557_032), ("unet2d", 20_613_868)])
def test_networks_of_recipes(script, name, parameters):
    network = script.network_named(config.load(name, [])[0])
    assert network.size == 4 * parameters
    ready = [gradient.ready for gradient in network.gradients]
    assert ready == sorted(ready, reverse=True) and ready[0] == 1


@pytest.mark.slow  # three sets of processes one after the other
def test_two_ranks_are_compared(script, tmp_path):
    command = [sys.executable, str(SCRIPT), "ranks", "--steps=1", "--rounds=2", f"--out={tmp_path}", *TINY]
    done = subprocess.run(command, cwd=SCRIPT.parents[1], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    [path] = tmp_path.glob("scaling-ranks-*.json")
    result = json.loads(path.read_text())
    assert {phase: len(each) for phase, each in result["seconds"].items()} == {
        **dict.fromkeys(("alone", "beside", "joined"), 2),
        "small": 2 * script.SMALL_REPEATS,
        "bucket": 2 * script.BUCKET_REPEATS,
    }
    for row in result["rows"]:
        assert row["predicted_s"] >= row["link_alone_s"] > row["start_s"] > 0
        assert row["error"] == row["predicted_s"] / row["measured_s"] - 1
        assert row["start_s"] == statistics.median(result["seconds"][row["from"]])
    assert "link alone" in done.stdout


# The command


def test_the_command_predicts_from_what_it_measures(tmp_path, capsys):
    flags = ["--steps=3", "--warmup=1", "--repeats=2", f"--out={tmp_path}", "--devices", "1", "2", "16"]
    assert cli.main(["benchmark", "demo_classification", "--scaling", *flags, *TINY]) == 0
    text = capsys.readouterr().out
    assert "PREDICTED from one device's step" in text and "nvlink4 360 GB/s inside hosts of 8" in text
    [path] = tmp_path.glob("*.json")
    result = json.loads(path.read_text())
    found, [row] = result["scaling"], result["step"]["contenders"]
    assert found["predicted"] is True and [each["devices"] for each in found["rows"]] == [1, 2, 16]
    assert found["step_s"] == 8 / row["images_per_s"]["median"] == found["rows"][0]["step_s"]
    assert found["spread"] == scaling.spread_of(row["latency_s"])
    recipe, _ = config.load("demo_classification", TINY)
    model = recipe.model.build(recipe.data.declared()[0])
    assert found["gradient_bytes"] == 4 * sum(p.numel() for p in model.parameters())
    weights = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert found["rounds"]["checkpoint_bytes"] == weights + found["gradient_bytes"]  # momentum
    assert result["config"]["run"]["graph"] == "off"


def test_the_command_predicts_from_a_given_step(tmp_path, capsys, shapes):
    flags = ["--step-ms=100", "--links", "mine,2GB/s", "--per-host=4", "--sample-kb=50", "--storage-gbs=0.01"]
    data = [f"--data.path={shapes}", f"--out={tmp_path}"]
    assert cli.main(["benchmark", "demo_classification", "--scaling", "--devices=4", *flags, *data, *TINY]) == 0
    assert "not measured" in capsys.readouterr().out
    [path] = tmp_path.glob("*.json")
    result = json.loads(path.read_text())
    [row] = result["scaling"]["rows"]
    assert "step" not in result and result["scaling"]["step_s"] == 0.1 and result["scaling"]["spread"] == 0
    assert row["images_per_s"] == pytest.approx(200) and row["limit"] == "storage"  # 10 MB/s of 50 kB
    assert result["scaling"]["rounds"]["eval_samples"] == 40
    assert result["options"]["scaling"]["links"] == ["mine,2GB/s"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--devices", "8"], "--devices belongs to --scaling; add it"),
        (["--step-ms", "3"], "--step-ms belongs to --scaling; add it"),
        (["--scaling", "--devices", "0"], "must be numbers from 1 on"),
        (["--scaling", "--devices", "12"], "12 do not fill hosts of 8; use a multiple, or --per-host"),
        (["--scaling", "--links", "a", "b", "c"], "must be one or two"),
        (["--scaling", "--per-host", "0"], "at least 1"),
        (["--scaling", "--step-ms", "-1"], "--step-ms -1.0 must be a positive number"),
        (["--scaling", "--disk-gbs", "0"], "--disk-gbs 0.0 must be positive"),
        (["--scaling", "--spread", "5"], "a share below 1"),
        (["--scaling", "--peers"], "--scaling stands alone"),
    ],
)
def test_bad_flags(flags, message, capsys):
    assert cli.main(["benchmark", "demo_classification", *flags, *TINY]) == 2
    assert message in capsys.readouterr().err


def test_predictions_of_steps_only():
    with pytest.raises(UsageError, match="--scaling stands alone"):
        BenchmarkOptions(what="predict", scaling=True)
