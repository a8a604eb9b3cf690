"""torchvision:NAME and timm:NAME against a server on this machine: fetched once, checked, and found again."""

import dataclasses
import hashlib
import http.server
import json
import threading
from pathlib import Path

import pytest
import torch
import torchvision
from safetensors.torch import save_file

from sightline.errors import UsageError
from sightline.files.download import NotFetched
from sightline.models import named_weights
from sightline.models.arch import ArchConfig
from sightline.models.ssd import SsdConfig
from sightline.parts import DataSpec

SPEC = DataSpec(("a", "b"), 3, (64, 64), (0.0,) * 3, (1.0,) * 3)


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Serve the files of tmp_path/served; the cache is below tmp_path too."""
    (tmp_path / "served").mkdir()
    asked: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(tmp_path / "served"))

        def do_GET(self):
            asked.append(self.path)
            super().do_GET()

        def log_message(self, *_):
            """Silent."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as found:
        threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        yield f"http://127.0.0.1:{found.server_address[1]}", asked
        found.shutdown()


def served(folder: Path, model: torch.nn.Module, stem: str) -> str:
    """Save a state dict under a name with its hash, as torchvision publishes it; return the name."""
    path = folder / "served" / "weights.pth"
    torch.save(model.state_dict(), path)
    name = f"{stem}-{hashlib.sha256(path.read_bytes()).hexdigest()[:8]}.pth"
    path.rename(path.with_name(name))
    return name


def point(monkeypatch, entry, url: str) -> None:
    monkeypatch.setattr(entry.value, "url", url)


@pytest.mark.parametrize("name", ["torchvision:squeezenet1_1", "torchvision:squeezenet1_1.IMAGENET1K_V1"])
def test_torchvisions_weights_are_fetched_once_by_name(tmp_path, server, monkeypatch, name):
    address, asked = server
    source = torchvision.models.squeezenet1_1()
    file = served(tmp_path, source, "squeezenet1_1")
    point(monkeypatch, torchvision.models.SqueezeNet1_1_Weights.IMAGENET1K_V1, f"{address}/{file}")
    config = ArchConfig(arch="squeezenet1_1", weights=name)
    model = config.build(SPEC)

    note, again = config.start_from(model), config.start_from(model)

    cached = tmp_path / "cache/sightline/weights" / file
    assert note == again and asked == [f"/{file}"]
    assert note.startswith(f"loaded 50 tensors of {name} ({cached}); the head starts at random: 1000 classes there")
    assert torch.equal(model.features[0].weight, source.features[0].weight)
    assert json.loads(cached.with_name(f"{file}.sha256.json").read_text())["size"] == cached.stat().st_size


def test_a_detector_takes_its_trunk_by_name(tmp_path, server, monkeypatch):
    source = torchvision.models.resnet18(num_classes=3)
    file = served(tmp_path, source, "resnet18")
    point(monkeypatch, torchvision.models.ResNet18_Weights.IMAGENET1K_V1, f"{server[0]}/{file}")
    config = SsdConfig(depth=18, weights="torchvision:resnet18.IMAGENET1K_V1")
    model = config.build(SPEC)

    assert config.start_from(model).startswith("trunk: loaded 90 tensors of torchvision:resnet18.IMAGENET1K_V1 (")
    assert torch.equal(model.trunk.layer3[1].conv2.weight, source.layer3[1].conv2.weight)


def test_timms_weights_of_the_hub_have_their_repositorys_name(tmp_path, server, monkeypatch):
    import timm

    source = timm.create_model("resnet18", num_classes=2)
    folder = tmp_path / "served/timm/resnet18.a1_in1k/resolve/main"
    folder.mkdir(parents=True)
    save_file(source.state_dict(), folder / "model.safetensors")
    monkeypatch.setenv("HF_ENDPOINT", server[0])
    of_the_hub = dataclasses.replace(timm.get_pretrained_cfg("resnet18.a1_in1k"), url="")
    monkeypatch.setattr(timm, "get_pretrained_cfg", lambda name: of_the_hub)
    config = ArchConfig(arch="resnet18", weights="timm:resnet18.a1_in1k")
    model = config.build(SPEC)

    note = config.start_from(model)

    assert "loaded all 122 tensors of timm:resnet18.a1_in1k (" in note
    assert "weights/timm--resnet18.a1_in1k--model.safetensors)" in note
    assert torch.equal(model.fc.weight, source.fc.weight)


def test_a_file_with_another_hash_than_its_name_is_refused(tmp_path, server, monkeypatch):
    (tmp_path / "served/squeezenet1_1-0123abcd.pth").write_bytes(b"something else")
    point(
        monkeypatch,
        torchvision.models.SqueezeNet1_1_Weights.IMAGENET1K_V1,
        f"{server[0]}/squeezenet1_1-0123abcd.pth",
    )
    config = ArchConfig(arch="squeezenet1_1", weights="torchvision:squeezenet1_1")
    with pytest.raises(NotFetched, match="0123abcd was expected"):
        config.start_from(config.build(SPEC))


def test_without_a_network_the_error_gives_address_and_place(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(named_weights, "PATIENCE", named_weights.Patience(tries=1))
    url = "http://127.0.0.1:9/squeezenet1_1-b8a52dc0.pth"  # nobody listens there
    point(monkeypatch, torchvision.models.SqueezeNet1_1_Weights.IMAGENET1K_V1, url)
    place = tmp_path / "sightline/weights/squeezenet1_1-b8a52dc0.pth"

    with pytest.raises(NotFetched, match=f"{url}: .*check the network.*; fetch it by hand and put it at {place}"):
        named_weights.fetch_named("torchvision:squeezenet1_1")


def test_the_addresses_are_those_of_the_libraries():
    """As they are published; nothing is asked."""
    assert named_weights._torchvision("resnet50") == (
        "https://download.pytorch.org/models/resnet50-11ad3fa6.pth",
        "resnet50-11ad3fa6.pth",
    )
    assert named_weights._torchvision("resnet50.IMAGENET1K_V1")[1] == "resnet50-0676ba61.pth"
    assert named_weights._timm("resnet50.a1_in1k")[1] == "resnet50_a1_0-14fe96d1.pth"
    assert named_weights._timm("vit_base_patch16_224") == (
        "https://huggingface.co/timm/vit_base_patch16_224.augreg2_in21k_ft_in1k/resolve/main/model.safetensors",
        "timm--vit_base_patch16_224.augreg2_in21k_ft_in1k--model.safetensors",
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("torchvision:resnet_50", "torchvision has no model 'resnet_50'; did you mean resnet50"),
        ("torchvision:resnet50.V2", "resnet50 has the weights IMAGENET1K_V1, IMAGENET1K_V2, DEFAULT"),
        ("timm:resnet_50", "timm has no weights of this name; did you mean "),
        ("timm:resnet50.nonsense", "timm has no weights of this name; did you mean resnet50"),
    ],
)
def test_names_that_do_not_exist_are_usage_errors(name, message):
    with pytest.raises(UsageError, match=message):
        named_weights.fetch_named(name)


def test_a_path_is_not_a_name(tmp_path):
    assert named_weights.fetch_named(str(tmp_path / "torchvision.pth")) is None
    assert named_weights.fetch_named("s3:bucket") is None
