"""The benchmark at tiny size: what is counted, what stands in the result, who takes turns with whom."""

import dataclasses
import gc
import importlib
import itertools
import json
import sys
import time

import pytest
import torch
import torchvision
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from sightline import config
from sightline.errors import OutOfMemory, UsageError
from sightline.hardware import devices
from sightline.measure import benchmark as bench
from sightline.measure import latency, peers, peers_classification, peers_detection, peers_segmentation
from sightline.measure.benchmark import BenchmarkOptions, as_text, benchmark, with_folder
from sightline.measure.peers import Contender, Ours, Peer, PeerLoader, PeerStep, measure_in_turn
from sightline.measure.peers_classification import STEP_PEERS
from sightline.parts import DataSpec
from sightline.tasks.classification import Classification
from sightline.tasks.detection import Detection
from sightline.tasks.segmentation import Segmentation

CPU = devices.select("cpu")
TINY = """--data.classes=10 --data.size=32 --data.eval-size=32 --data.eval-resize=32 --train.global-batch=8
--train.precision=fp32 --run.device=cpu --run.workers=0""".split()
STEPS, WARMUP, REPEATS = 2, 1, 2


def measure(tmp_path, *flags, width=8, **options):
    recipe, run = config.load("demo_classification", [*TINY, f"--model.width={width}", *flags])
    said = []
    sizes = {"steps": STEPS, "warmup": WARMUP, "repeats": REPEATS, "out": tmp_path / "results"}
    began = time.perf_counter()
    result = benchmark(recipe, run, BenchmarkOptions(**{**sizes, **options}), said.append)
    elapsed = time.perf_counter() - began
    for row in [row for part in ("step", "loader") if part in result for row in result[part]["contenders"]]:
        assert row["first_s"] >= 0 and row["first_s"] + sum(row["seconds"]) < elapsed, row
    [path] = (tmp_path / "results").iterdir()
    assert json.loads(path.read_text()) == result
    assert str(path) in said[-1]
    if "step" in result:
        assert f"matrix product of 512 cubed in {result['step']['peak']['dtype']}: " in "\n".join(said)
    return result


def check_rates(row, images=STEPS * 8):
    assert row["images"] == images
    assert row["images_per_s"]["all"] == [images / seconds for seconds in row["seconds"]]
    low, middle, high = (row["images_per_s"][key] for key in ("min", "median", "max"))
    assert 0 < low <= middle <= high
    assert middle == pytest.approx((low + high) / 2)  # of two repeats
    assert len(row["seconds"]) == REPEATS


def test_the_step_alone(tmp_path):
    result = measure(tmp_path, "--data.mixup=0.2", "--train.accumulation=2")
    step = result["step"]
    [row] = step["contenders"]
    check_rates(row)
    calls = 1 + WARMUP + REPEATS * (Contender.settle + STEPS) + WARMUP + STEPS + 1  # at last the pass of single steps
    assert (row["calls"], row["images_trained"], row["bad_steps"]) == (calls, calls * 8, 0)
    assert row["data_wait"] == 0
    assert "mfu" not in row and step["chip_tflops"] is None and step["peak"]["tflops"] > 0
    assert "MFU is not given: no published peak is known" in as_text(result)
    assert row["first_s"] > 0 and row["peak_memory_gb"] > 0
    assert "loader" not in result and step["left_out"] == []
    assert result["recipe"] == "demo_classification" and result["batch"] == 8 and result["precision"] == "fp32"
    assert result["config"]["data"]["mixup"] == 0.2 and result["config"]["run"]["device"] == "cpu"
    assert result["environment"]["versions"]["torch"] == torch.__version__
    assert result["environment"]["command"] and result["device"] == CPU.name()


def test_a_table_says_what_was_measured():
    rate = {"median": 1234.5, "min": 1000.0, "max": 2000.4, "all": []}
    ours = {"name": "sightline", "images_per_s": rate, "first_s": 1.25, "mfu": 0.4567, "data_wait": 0.125}
    ours |= {"peak_memory_gb": 2.345, "latency_s": [0.1, 0.2]}
    peer = {"name": "torch.compile", "images_per_s": rate, "first_s": 60.0, "ratio": 1.5}
    result = {
        "recipe": "resnet50",
        "device": "a GPU",
        "batch": 256,
        "precision": "bf16",
        "options": {"repeats": 5, "steps": 40, "what": "train"},
        "commit": {"id": "0123456789abcdef", "dirty": True},
        "environment": {"versions": {"torch": "2.9", "cuda": "13.0", "cudnn": 91002, "triton": "3.5"}},
        "step": {
            "contenders": [ours, peer],
            "chip_tflops": 989.4,
            "forward_gflop": 8.1789,
            "peak": {"side": 8192, "dtype": "bfloat16", "tflops": 712.34},
            "left_out": ["one (why)"],
        },
        "perf": latency.perf("train", [0.1, 0.2], 1234.5),
    }
    assert as_text(result).splitlines() == [
        "resnet50 on a GPU: batch 256, bf16, 5 repeats of 40 steps",
        "torch 2.9, cuda 13.0, cudnn 91002, triton 3.5, commit 0123456789 with changes",
        "step                                              img/s       min       max  ours is    MFU  first s",
        "  sightline                                       1,234     1,000     2,000           45.7%      1.2",
        "  torch.compile                                   1,234     1,000     2,000   1.50 x            60.0",
        "8.18 GFLOP forward per image, counted three times per step; data wait 12.5%; peak memory 2.35 GB",
        "matrix product of 8192 cubed in bfloat16: 712 TFLOP/s measured; MFU is of the chip's published 989.4",
        "not measured: one (why)",
        "latency of train, ms, waiting for each of 2: mean 150.000, 90 % 190.000, 95 % 195.000, 99 % 199.000",
    ]


def test_a_measured_peak_is_no_faster_than_the_clock():
    began = time.perf_counter()
    peak = bench.matmul_peak(CPU, "fp32")
    elapsed = time.perf_counter() - began
    assert (peak["side"], peak["dtype"]) == (512, "float32") and peak["tflops"] == sorted(peak["all"])[2]
    seconds = [4 * 2 * 512**3 / 1e12 / tflops for tflops in peak["all"]]  # four products of 512 cubed each
    assert len(seconds) == 5 and 0 < sum(seconds) < elapsed


def test_mfu_is_the_share_of_the_published_peak(tmp_path, monkeypatch):
    monkeypatch.setitem(bench.PUBLISHED_TFLOPS, CPU.name(), 0.25)  # as if this CPU were in the table
    result = measure(tmp_path, "--train.precision=bf16")
    step = result["step"]
    [row] = step["contenders"]
    trained = 3 * step["forward_gflop"] * 1e9 * row["images_per_s"]["median"]
    assert row["mfu"] == pytest.approx(trained / 0.25e12) and step["chip_tflops"] == 0.25
    assert f"{row['mfu']:.1%}" in as_text(result) and "MFU is of the chip's published 0.25" in as_text(result)


def test_peaks_are_those_of_the_data_sheets():
    assert bench.published_tflops("NVIDIA H200", "fp16") == 989.4  # 1,979 with sparsity
    assert bench.published_tflops("NVIDIA A100-SXM4-80GB", "bf16") == 312  # 624 with sparsity
    assert bench.published_tflops("NVIDIA H200", "fp32") == bench.published_tflops("NVIDIA H200 NVL", "bf16") == 0


def test_real_data_go_through_the_loader(tmp_path, shapes):
    result = measure(tmp_path, f"--data.path={shapes}", data="real")
    row, kept = result["step"]["contenders"]
    check_rates(row)
    ahead = 3 + 5  # batches that the loader may have ready
    calls = 1 + 2 * WARMUP + 2 * REPEATS * (ahead + STEPS) + ahead + STEPS + 1  # none of them is among single steps
    assert (row["calls"], row["images_trained"]) == (calls, 8 * calls)
    assert 0 < row["data_wait"] < 1  # loaded in this process, so the step waits for every image
    check_rates(kept)
    assert kept["data_wait"] == 0
    assert kept["ratio"] == pytest.approx(row["images_per_s"]["median"] / kept["images_per_s"]["median"])
    assert result["step"]["data"] == "real"


def test_given_data_only_lend_their_classes_to_synthetic_input(shapes):
    flags = [*TINY, f"--data.path={shapes}", "--data.source=folder"]
    recipe, _ = config.load("demo_classification", flags)
    dataset = bench.synthetic_data(recipe, CPU).dataset
    assert len(dataset.spec.classes) == 10 and len(dataset) == peers.BATCHES * 8
    assert dataset.fingerprint.startswith("synthetic")


@pytest.mark.slow  # ResNets of 64 channels, two of them compiled
def test_peers_are_the_same_network_and_take_turns(tmp_path):
    result = measure(tmp_path, "--train.global-batch=4", width=64, peers=True)
    step = result["step"]
    ours, *others = step["contenders"]
    assert [ours["name"], *(row["name"] for row in others)] == [
        "sightline",
        "torchvision: eager AMP, fp32, NCHW",
        "timm style: eager AMP, fp32, channels_last",
    ]
    assert len(step["left_out"]) == 2 and all("--run.compile auto" in name for name in step["left_out"])
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        torchvision.models.resnet18(num_classes=10).eval()(torch.zeros(1, 3, 32, 32))
    assert step["forward_gflop"] * 1e9 == pytest.approx(counter.get_total_flops())
    for row in others:
        check_rates(row, STEPS * 4)
        assert row["ratio"] == ours["images_per_s"]["median"] / row["images_per_s"]["median"]
        assert row["ratio_by_round"] == pytest.approx(
            [theirs / mine for mine, theirs in zip(ours["seconds"], row["seconds"], strict=True)]
        )
    assert step["order"] == "in turn"
    text = as_text(result)
    assert all(row["name"] in text for row in step["contenders"]) and "not measured: torch.compile" in text


def test_the_input_beside_two_pipelines(tmp_path, shapes):
    result = measure(tmp_path, f"--data.path={shapes}", loader=True)
    loader = result["loader"]
    assert "step" not in result
    assert [row["name"].split(",")[0] for row in loader["contenders"]] == ["sightline loader", *["DataLoader"] * 2]
    ours, *others = loader["contenders"]
    for row in others:
        check_rates(row)
        assert row["ratio"] == ours["images_per_s"]["median"] / row["images_per_s"]["median"]
    assert "PIL" in as_text(result)
    assert {key: value for key, value in loader.items() if key != "contenders"} == {
        "workers": 0,
        "batches": STEPS,
        "order": "in turn",
    }


@pytest.mark.parametrize(("kind", "dtype", "low"), [("v2", torch.uint8, 0), ("pil", torch.float32, -2.2)])
def test_reference_pipelines_give_what_their_users_get(shapes, kind, dtype, low):
    recipe, _ = config.load("demo_classification", [*TINY, f"--data.path={shapes}"])
    loader = PeerLoader(kind, recipe.data, 8, 0, CPU)
    images, labels = next(loader.batches)
    assert (images.shape, images.dtype) == ((8, 3, 32, 32), dtype)
    assert images.min() >= low and images.float().std() > 0.5
    assert labels.shape == (8,) and labels.min() >= 0 and labels.max() < 10
    seen = [(images, labels), *itertools.islice(loader.batches, 14)]  # of 80 images, so that epochs would have ended
    assert len(seen) == 15 and all(len(labels.unique()) > 1 for _, labels in seen), "shuffled, and without end"
    loader.close()


@pytest.mark.parametrize(
    ("flags", "options", "message"),
    [
        ([], {"peers": True}, "--model.width 64 --model.stem 7x7"),  # a thin network is not torchvision's
        ([], {"loader": True}, "no train/CLASS"),
        (["--data.path=synthetic:classes=10"], {"loader": True}, "no train/CLASS"),
        ([], {"data": "real"}, "no data: give --data.path"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path, flags, options, message):
    with pytest.raises(UsageError, match=message):
        measure(tmp_path, *flags, **options)


def test_only_classifiers_have_reference_pipelines(tmp_path):
    recipe, run = config.load("demo_detection", TINY[4:])
    with pytest.raises(UsageError, match="--loader compares classification pipelines; DetectionData describes none"):
        benchmark(recipe, run, BenchmarkOptions(loader=True, out=tmp_path), lambda _: None)


def test_augmentation_the_references_lack_is_refused(tmp_path, shapes):
    with pytest.raises(UsageError, match="--data.augment on"):
        measure(tmp_path, f"--data.path={shapes}", "--data.augment=off", loader=True)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("resnet50 --data DIR --steps 3", "resnet50 --data.path DIR --data real --steps 3"),
        ("resnet50 --data=synthetic:samples=8", "resnet50 --data.path synthetic:samples=8 --data real"),
        ("resnet50 --data real --data.path DIR", "resnet50 --data real --data.path DIR"),
        ("resnet50 --data=synthetic", "resnet50 --data synthetic"),
        ("resnet50 --data syntetic", "resnet50 --data syntetic"),  # refused as before
        ("resnet50 --peers", "resnet50 --peers"),
        ("resnet50 --data", "resnet50 --data"),
    ],
)
def test_a_folder_behind_data_is_where_real_data_lie(given, expected, tmp_path, monkeypatch):
    assert with_folder(given.split()) == expected.split()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reals").mkdir()  # near to a word, but there
    assert with_folder(["--data", "reals"]) == ["--data.path", "reals", "--data", "real"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "--steps 0"),
        ({"repeats": 0}, "--repeats 0"),
        ({"warmup": -1}, "--warmup -1"),
        ({"data": "raw"}, "synthetic, real or a folder"),
        ({"peers": True, "data": "real"}, "leave --data out"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(UsageError, match=message):
        BenchmarkOptions(**options)


@pytest.mark.parametrize(
    ("flags", "options", "message"),
    [
        ([], {"peers": True}, "--peers measures one device, and 2 ranks were started; leave --run.devices"),
        ([], {"scaling": True}, "--scaling measures one device"),
        (["--train.global-batch=9"], {}, "global_batch=9 cannot be split over 2 devices; .* --train.global-batch 8"),
    ],
)
def test_what_ranks_cannot_measure_is_refused_before_they_meet(tmp_path, monkeypatch, flags, options, message):
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_ADDR": "x", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(UsageError, match=message):
        measure(tmp_path, *flags, **options)


def test_a_folder_that_cannot_be_written_is_found_before_measuring(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="give another folder"):
        measure(tmp_path, out=tmp_path / "file")


class Counted(Contender):
    """Writes down its turns; only `room` of them fit into memory."""

    alive = 0
    images = 1

    def __init__(self, name, turns, room):
        self.name, self.turns, self.opened = name, turns, False
        if Counted.alive == room:
            raise torch.OutOfMemoryError("no room")
        Counted.alive += 1
        self.opened = True

    def advance(self):
        self.turns.append(self.name)

    def close(self):
        Counted.alive -= 1


@pytest.mark.parametrize(
    ("room", "order", "turns"),
    [(2, "in turn", "aaabbb aaaabbbb aaaabbbb"), (1, "one after the other", "aaa aaa aaaa aaaa bbb bbbb bbbb")],
)
def test_turns(room, order, turns):
    seen = []
    makers = [lambda name=name: Counted(name, seen, room) for name in "ab"]
    timings, found = measure_in_turn(makers, batches=2, warmup=3, repeats=2, device=CPU, say=lambda text: None)
    assert (found, "".join(seen)) == (order, turns.replace(" ", ""))
    assert [(timing.name, len(timing.seconds), timing.images) for timing in timings] == [("a", 2, 2), ("b", 2, 2)]
    assert Counted.alive == 0


def test_nobody_works_in_the_turn_of_another():
    awake = set()

    class Loud(Contender):
        images = 1

        def __init__(self, name):
            self.name = name
            awake.add(name)  # as a loader whose workers fill their queues
            self.rest()

        def wake(self):
            awake.add(self.name)

        def rest(self):
            awake.discard(self.name)

        def advance(self):
            assert awake == {self.name}

    makers = [lambda name=name: Loud(name) for name in "abc"]
    measure_in_turn(makers, batches=2, warmup=1, repeats=2, device=CPU, say=lambda text: None)
    assert not awake


def test_a_first_contender_that_does_not_fit_alone_is_not_tried_again():
    class Full(Counted):
        def advance(self):
            super().advance()
            raise torch.OutOfMemoryError("no room")

    seen = []
    makers = [lambda: Full("a", seen, 2), lambda: Counted("b", seen, 2)]
    with pytest.raises(torch.OutOfMemoryError):
        measure_in_turn(makers, batches=2, warmup=3, repeats=2, device=CPU, say=lambda text: None)
    assert (seen, Counted.alive) == (["a"], 0)


def test_too_little_memory_for_ours_alone_is_an_error_with_a_remedy(tmp_path, monkeypatch):
    def no_room(*arguments):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(bench, "OurStep", no_room)
    with pytest.raises(OutOfMemory, match="smaller --train.global-batch"):
        measure(tmp_path)


def test_a_peer_that_does_not_fit_beside_our_step_has_its_memory(tmp_path, monkeypatch):
    class Large(Contender):
        name, images = "large", 8

        def __init__(self):
            if any(type(each) is bench.OurStep for each in gc.get_objects()):
                raise torch.OutOfMemoryError("no room")

        def advance(self):
            pass

    monkeypatch.setattr(bench, "_peers_of", lambda *arguments: ([Large], []))
    step = measure(tmp_path, peers=True)["step"]
    assert [row["name"] for row in step["contenders"]] == ["sightline", "large"]
    assert step["order"] == "one after the other"


def classifier_step(peer, network, images):
    """As `peers_classification.steps` makes it, of any network for 3x8x8 images and 4 classes."""
    batches = [
        (torch.randn(images, 3, 8, 8).to(memory_format=peer.layout), torch.randint(4, (images,)))
        for _ in range(peers.BATCHES)
    ]
    return PeerStep(peer, network, lambda net, b: nn.functional.cross_entropy(net(b[0]), b[1]), batches, images, CPU)


def test_a_peer_learns():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    peer = classifier_step(Peer("eager", "bf16", channels_last=True), network, 8)
    assert network[0].weight.is_contiguous(memory_format=torch.channels_last)

    def loss():
        with torch.no_grad():
            return sum(float(nn.functional.cross_entropy(network(x), y)) for x, y in peer.batches)

    before = loss()
    for _ in range(40):
        peer.advance()
    assert loss() < before / 2
    assert peer.number == 41


def test_the_peer_of_a_classifier_trains_torchvisions_network_on_batches_of_its_shape():
    with torch.device("meta"):
        network, image = torchvision.models.resnet18(num_classes=7), torch.zeros(1, 3, 32, 32)
    spec = DataSpec(tuple("abcdefg"), 3, (32, 32), (0.0,) * 3, (1.0,) * 3)
    ours = Ours(config.load("demo_classification", TINY)[0].model, network, image, spec, 2, CPU)
    began = time.perf_counter()
    [maker] = peers_classification.steps([Peer("eager", "fp32", channels_last=True)], ours)
    step = maker()
    assert 0 < step.first_s < time.perf_counter() - began
    assert step.images == 2 and len(step.batches) == peers.BATCHES
    for pixels, labels in step.batches:
        assert pixels.shape == (2, 3, 32, 32) and pixels.is_contiguous(memory_format=torch.channels_last)
        assert labels.shape == (2,) and labels.min() >= 0 and labels.max() < 7
    assert {name: tensor.shape for name, tensor in step.forward.state_dict().items()} == {
        name: tensor.shape for name, tensor in network.state_dict().items()
    }
    assert step.forward.fc.weight.grad.abs().sum() > 0 and step.forward.bn1.num_batches_tracked == 1


@pytest.mark.slow  # Inductor takes a while
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_peer_steps_like_an_eager_one(mode):
    losses = []
    for compile_ in ("", mode):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 4))
        peer = classifier_step(Peer("peer", "fp32", True, compile_, fused=bool(compile_)), network, 4)
        for _ in range(3):
            peer.advance()
        image, label = peer.batches[0]
        losses.append(float(nn.functional.cross_entropy(network(image), label)))
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_compiled_peers_run_where_our_step_is_compiled():
    names = {peer.name for peer in peers.choose_peers(STEP_PEERS, "auto", devices.KINDS["cuda"], "bf16")[0]}
    assert names == {peer.name for peer in STEP_PEERS}
    assert {peer.precision for peer in STEP_PEERS} == {"fp16", "bf16"}
    assert not any(peer.compile for peer in peers.choose_peers(STEP_PEERS, "off", devices.KINDS["cuda"], "bf16")[0])
    assert len(peers.choose_peers(STEP_PEERS, "on", CPU, "fp32")[0]) == 4


def test_beside_a_run_in_fp16_all_peers_are_in_fp16():
    chosen, _ = peers.choose_peers(STEP_PEERS, "on", devices.KINDS["cuda"], "fp16")
    assert len(chosen) == 4 and {peer.precision for peer in chosen} == {"fp16"}


@pytest.mark.parametrize("task", [Classification(), Detection(), Segmentation()], ids=lambda task: task.peers)
def test_every_task_names_its_peers(task):
    named = importlib.import_module(f"sightline.measure.peers_{task.peers}")
    assert named.STEP_PEERS and callable(named.steps)


def test_a_task_without_peers_is_refused(tmp_path):
    class Own(Classification):
        peers = ""

    recipe, run = config.load("demo_classification", TINY)
    options = BenchmarkOptions(1, 0, 1, peers=True, out=tmp_path)
    with pytest.raises(UsageError, match="--peers: Own names nothing to compare with"):
        benchmark(dataclasses.replace(recipe, task=Own()), run, options, lambda _: None)


@pytest.mark.slow
def test_networks_are_recognised_by_weights_and_work():
    image = torch.empty(1, 3, 64, 64, device="meta")
    with torch.device("meta"):
        network = torchvision.models.resnext50_32x4d(num_classes=7)
        assert peers_classification.torchvision_twin(network, image, 7) == "resnext50_32x4d"
        moved = torchvision.models.resnet50(num_classes=7)
    # The original paper's form: the same weights, the stride in another convolution, less work.
    block = moved.layer2[0]
    block.conv1.stride, block.conv2.stride = (2, 2), (1, 1)
    with pytest.raises(UsageError, match="none of resnet18"):
        peers_classification.torchvision_twin(moved, image, 7)


@pytest.mark.slow  # a VGG at 300 pixels
def test_a_detector_beside_its_peers(tmp_path):
    flags = [*TINY[4:], "--train.global-batch=2", "--model.width=8"]
    recipe, run = config.load("demo_detection", flags)
    result = benchmark(recipe, run, BenchmarkOptions(1, 0, 1, peers=True, out=tmp_path), lambda _: None)["step"]
    names = [row["name"].partition(":")[0] for row in result["contenders"]]
    assert names == ["sightline", "our network, plain loss", "torchvision ssd300_vgg16"]
    assert len(result["left_out"]) == 1 and "torch.compile" in result["left_out"][0]


def test_the_plain_loss_of_a_detector_is_the_loss_of_its_task():
    torch.manual_seed(0)
    recipe, _ = config.load("demo_detection", TINY[4:])
    spec = recipe.data.spec_of(("a", "b", "c"), (1, 2, 3))
    model = recipe.model.build(spec).eval()
    sides = torch.rand(2, 5, 2) * 0.5 + 0.1
    corner = torch.rand(2, 5, 2) * (1 - sides)
    boxes, labels = torch.cat([corner, corner + sides], 2), torch.randint(1, 4, (2, 5))
    image = torch.randn(2, 3, *spec.size)
    plain = peers_detection.PlainLoss(model)(image, boxes, labels)
    ours = recipe.task.build().loss(model, {"image": image, "boxes": boxes, "labels": labels}).total
    torch.testing.assert_close(plain, ours, rtol=1e-5, atol=0)


def test_peers_of_a_detector_get_boxes_inside_of_their_images():
    recipe, _ = config.load("demo_detection", [*TINY[4:], "--model.width=4"])
    spec = recipe.data.spec_of(("a", "b", "c"), (1, 2, 3))
    ours = Ours(recipe.model, nn.Identity(), torch.empty(0), spec, 2, CPU)
    [maker] = peers_detection.steps([Peer("our network, plain loss: eager", "fp32", channels_last=True)], ours)
    step = maker()
    assert step.images == 2 and len(step.batches) == peers.BATCHES
    assert all(parameter.grad is not None for parameter in step.forward.parameters() if parameter.requires_grad)
    for image, boxes, labels in step.batches:
        assert image.shape == (2, 3, *spec.size) and image.is_contiguous(memory_format=torch.channels_last)
        assert boxes.shape == (2, peers_detection.BOXES, 4) and boxes.min() >= 0 and boxes.max() <= 1
        assert (boxes[..., 2:] - boxes[..., :2]).min() >= 0.0999
        assert labels.shape == (2, peers_detection.BOXES) and labels.min() >= 1 and labels.max() <= 3
    wide = torch.full((1, 3, 100, 200), 0.0)
    pixels, targets = peers_detection._as_torchvision(wide, torch.tensor([[[0.1, 0.2, 0.5, 0.9]]]), labels[:1, :1])
    assert len(pixels) == len(targets) == 1 and (pixels[0] == 0.5).all()
    assert targets[0]["boxes"].tolist() == [pytest.approx([40, 10, 180, 50])]  # left first, in pixels
    assert targets[0]["labels"].tolist() == labels[0, :1].tolist()


def test_the_peer_of_a_unet_is_monais_network_of_the_same_form(monkeypatch):
    losses = pytest.importorskip("monai.losses")
    recipe, _ = config.load("demo_segmentation", [*TINY[4:], "--model.width=4"])
    spec = DataSpec(("background", "a", "b"), 1, (32, 32), (0.0,), (1.0,))
    model = recipe.model.build(spec)
    ours = Ours(recipe.model, model, torch.empty(0), spec, 2, CPU)
    makers = peers_segmentation.steps([Peer("eager", "fp32", is_last) for is_last in (False, True)], ours)
    step = makers[1]()
    assert sum(p.numel() for p in step.forward.parameters()) == sum(p.numel() for p in model.parameters())
    assert all(parameter.grad is not None for parameter in step.forward.parameters())
    for image, label in step.batches:
        assert image.shape == (2, 1, 32, 32) and image.is_contiguous(memory_format=torch.channels_last)
        assert label.shape == (2, 1, 32, 32) and set(label.unique().tolist()) == {0, 1, 2}
    answer = step.forward(image)
    assert answer.shape == (2, len(model.heads), 3, 32, 32) and len(model.heads) == 3
    criterion = losses.DiceCELoss(include_background=False, to_onehot_y=True, softmax=True, batch=True)
    expected = losses.DeepSupervisionLoss(criterion, "exp")(list(answer.unbind(1)), label) / (1 + 0.5 + 0.25)
    torch.testing.assert_close(step.loss_of(lambda _: answer, (image, label)), expected)
    of_volumes = dataclasses.replace(spec, size=(32, 32, 32))
    volumes = dataclasses.replace(ours, model=recipe.model.build(of_volumes), spec=of_volumes)
    assert len(peers_segmentation.steps([Peer("eager", "fp32", is_last) for is_last in (False, True)], volumes)) == 1
    monkeypatch.setitem(sys.modules, "monai.networks.nets", None)
    with pytest.raises(UsageError, match=r"--peers compares with MONAI, which is missing .*pip install monai"):
        peers_segmentation.steps([], ours)


@pytest.mark.parametrize("flags", [["--data.interpolation=legacy"], ["--data.crop=tf"]])
def test_pipelines_that_torchvision_does_not_have_are_refused(tmp_path, shapes, flags):
    with pytest.raises(UsageError, match="add --data.crop area --data.interpolation bilinear"):
        measure(tmp_path, f"--data.path={shapes}", *flags, loader=True)
