"""What peers are made of: all of it on the device that is measured, and their losses."""

import pytest
import torch
import torchvision

from sightline import config
from sightline.hardware import devices
from sightline.hardware.devices import Device
from sightline.measure import links, peers_classification, peers_detection, peers_segmentation
from sightline.measure.peers import Ours, Peer
from sightline.parts import DataSpec

SPEC = DataSpec(("background", "a", "b"), 3, (32, 32), (0.0,) * 3, (1.0,) * 3)
EAGER = Peer("eager", "fp32", channels_last=False)


class Elsewhere(Device):
    """As the CPU, but its tensors lie on the meta device: one that is made on the CPU by mistake stands out."""

    torch_device = torch.device("meta")


@pytest.mark.parametrize(
    ("recipe", "module"),
    [
        ("demo_classification", peers_classification),
        ("demo_detection", peers_detection),
        ("demo_segmentation", peers_segmentation),
    ],
)
def test_all_of_a_peers_step_is_on_the_device(recipe: str, module):
    if recipe == "demo_segmentation":
        pytest.importorskip("monai")
    elsewhere = Elsewhere(**vars(devices.select("cpu")))
    loaded, _ = config.load(recipe, ["--model.width=8"])
    spec = loaded.data.spec_of(("a", "b"), (1, 2)) if recipe == "demo_detection" else SPEC
    with torch.device("meta"):
        model = torchvision.models.resnet18(num_classes=3) if "class" in recipe else loaded.model.build(spec)
        image = torch.zeros(1, 3, 32, 32)
    [make] = module.steps([EAGER], Ours(loaded.model, model, image, spec, 2, elsewhere))
    step = make()
    tensors = [tensor for batch in step.batches for tensor in batch]
    assert len(tensors) >= 8 and {tensor.device.type for tensor in tensors} == {"meta"}
    assert {parameter.device.type for parameter in step.forward.parameters()} == {"meta"}
    assert step.first_s < 600 and step.number == 1


def test_the_loss_of_torchvisions_detector_is_the_sum_of_its_losses():
    """Of several numbers by name; the gradients of each reach the network."""
    a, b = torch.tensor(1.5, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    loss = peers_detection._shipped_loss(lambda images, targets: {"boxes": 2 * a, "classes": 3 * b}, ([], []))
    loss.backward()
    assert (loss.item(), a.grad.item(), b.grad.item()) == (9.0, 2.0, 3.0)


def test_a_link_costs_what_the_document_says():
    """benchmarks/notes/scaling.md: GB/s that are reached, and microseconds of a hop."""
    reached = {"nvlink2": 120, "nvlink3": 240, "nvlink4": 360, "pcie5": 50.4, "ib400": 40, "ib200": 20, "eth100": 10}
    reached |= {"eth25": 2.5, "gaudi1-inside": 70, "gaudi1-between": 30, "gloo-loopback": 0.9}
    assert {name: link.bandwidth / 1e9 for name, link in links.LINKS.items()} == pytest.approx(reached)
    hops = {"nvlink2": 3.4, "nvlink3": 3.4, "nvlink4": 3.4, "pcie5": 5.7, "ib400": 14, "ib200": 14, "eth100": 50}
    hops |= {"eth25": 50, "gaudi1-inside": 14, "gaudi1-between": 14, "gloo-loopback": 0}
    assert {name: link.hop_s * 1e6 for name, link in links.LINKS.items()} == pytest.approx(hops)
    starts = dict.fromkeys(hops, 8.4) | {"gloo-loopback": 240}
    assert {name: link.start_s * 1e6 for name, link in links.LINKS.items()} == pytest.approx(starts)
    assert [name for name, link in links.LINKS.items() if not link.overlaps] == ["gloo-loopback"]


def test_peers_are_those_that_the_document_describes():
    """docs/reference/benchmark.md: how each is called, how it is compiled, and whose optimizer is fused."""
    rows = {
        module: [(peer.name, peer.compile, peer.fused) for peer in module.STEP_PEERS]
        for module in (peers_classification, peers_detection, peers_segmentation)
    }
    assert rows == {
        peers_classification: [
            ("torchvision: eager AMP, fp16, NCHW", "", False),
            ("timm style: eager AMP, fp16, channels_last", "", False),
            ("torch.compile, bf16, channels_last", "default", True),
            ("reduce-overhead, bf16, channels_last", "reduce-overhead", True),
        ],
        peers_detection: [
            ("our network, plain loss: torch.compile, bf16, channels_last", "default", True),
            ("our network, plain loss: eager, bf16, channels_last", "", True),
            ("torchvision ssd300_vgg16: eager, bf16, NCHW", "", False),
        ],
        peers_segmentation: [
            ("MONAI DynUNet: torch.compile, bf16, NCHW", "default", True),
            ("MONAI DynUNet: torch.compile, bf16, channels_last", "default", True),
            ("MONAI DynUNet: eager, bf16, NCHW", "", True),
        ],
    }
