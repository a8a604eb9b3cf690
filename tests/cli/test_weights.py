"""`--model.weights` as it is typed: runs, checkpoints and files start a run, `inspect` shows their tensors."""

import json
import re

import pytest
import torch
import torchvision
from PIL import Image
from safetensors.torch import load_file

from sightline.files.download import Patience

CLASSES = ("--data.path=synthetic:classes=5,samples=20,size=32", "--data.classes=5")
TINY = (
    "--model.width=4",
    "--train.global-batch=10",
    "--run.workers=0",
    "--run.report=off",
    "--run.device=cpu",
    "--run.progress=plain",
)
SHORT = ("--train.max-steps=1", "--train.epochs=1", "--run.threads=1")


def flags(classes: int) -> list[str]:
    return [*(each.replace("=5", f"={classes}") for each in CLASSES), *TINY, *SHORT]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run over five classes, with averaged weights."""
    from sightline import cli

    out = tmp_path_factory.mktemp("donor") / "run"
    assert cli.main(["train", "demo_classification", *flags(5), "--train.ema=0.5", f"--run.out={out}"]) == 0
    return out


@pytest.mark.parametrize("which", ["run", "checkpoint", "file"])
def test_a_run_starts_from_a_run_with_other_classes(tmp_path, run, sightline, which):
    """Its rate is 0, so that the weights stay what they were at the start."""
    checkpoint = next((run / "checkpoints").glob("ckpt-*"))
    given = {"run": run, "checkpoint": checkpoint, "file": checkpoint / "ema.safetensors"}[which]

    said = sightline(
        *("train", "demo_classification", *flags(3), f"--model.weights={given}", f"--run.out={tmp_path / 'run'}"),
        *("--optimizer.lr=0", "--optimizer.weight-decay=0"),
    )

    assert said.code == 0, said
    assert "the head starts at random: 5 classes there, 3 here" in said.out
    assert (": the averaged weights of the best checkpoint" in said.out) == (which == "run")
    written = load_file(next((tmp_path / "run/checkpoints").glob("ckpt-*")) / "model.safetensors")
    donor = load_file(checkpoint / "ema.safetensors")
    assert torch.equal(written["layer4.1.conv2.weight"], donor["layer4.1.conv2.weight"])
    assert written["fc.weight"].shape == (3, 32)


def test_a_head_for_as_many_other_classes_is_told(tmp_path, run, sightline):
    names = ("apple", "pear", "plum", "quince", "sloe")
    for split, name in ((split, name) for split in ("train", "val") for name in names):
        folder = tmp_path / "data" / split / name
        folder.mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (32, 32), (number, 0, 0)).save(folder / f"{number}.png")
    start = ("train", "demo_classification", *TINY, *SHORT, f"--data.path={tmp_path / 'data'}", "--data.classes=5")

    other = sightline(*start, f"--model.weights={run}", f"--run.out={tmp_path / 'other'}")
    same = sightline(*start, f"--model.weights={tmp_path / 'other'}", f"--run.out={tmp_path / 'same'}")

    assert other.code == same.code == 0, (other, same)
    assert re.search(r"warning: .* was trained on other classes, .* number 0 is \S+ there and apple here", other.out)
    assert "trained on other classes" not in same.out


def test_inspect_shows_what_becomes_of_every_tensor(run, sightline):
    arguments = ("inspect", "demo_classification", *flags(3), f"--model.weights={run}")

    text, found = sightline(*arguments).out, json.loads(sightline(*arguments, "--json").out)

    assert "  120 tensors loaded, 2 tensors at random (--json lists every one)\n" in text
    assert "conv1.weight" not in text
    assert {"state": "loaded", "name": "conv1.weight"}.items() <= found["weights"]["tensors"][0].items()
    assert re.search(r"^    at random fc.bias +3 <- 5$", text, re.MULTILINE)
    assert [row["name"] for row in found["weights"]["tensors"] if row["state"] == "at random"] == [
        "fc.weight",
        "fc.bias",
    ]


def test_a_damaged_run_is_refused_with_exit_4(tmp_path, run, sightline):
    copy = tmp_path / "ckpt-00000001"
    copy.mkdir()
    for file in next((run / "checkpoints").glob("ckpt-*")).iterdir():
        data = bytearray(file.read_bytes())
        data[-1] ^= file.name == "ema.safetensors"
        (copy / file.name).write_bytes(data)

    said = sightline("inspect", "demo_classification", *flags(3), f"--model.weights={copy}")

    assert said.code == 4 and "ema.safetensors is damaged: its sha256 is not the one in manifest.json" in said.err


def test_another_network_is_refused_before_a_step_is_made(tmp_path, run, sightline):
    said = sightline(
        *("train", "demo_classification", *flags(3), "--model.depth=34", f"--model.weights={run}"),
        f"--run.out={tmp_path / 'run'}",
    )
    assert (
        said.code == 4 and "does not match this model (122 tensors, 218 expected; missing: layer1.2.conv1" in said.err
    )


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("torchvision:squeezenet1_1", 3, "; fetch it by hand and put it at "),
        ("torchvision:squeezenet", 2, "torchvision has no model 'squeezenet'; did you mean squeezenet1_1"),
        ("timm:squeezenet1_1", 2, "timm has no weights of this name"),
    ],
)
def test_a_name_that_cannot_be_fetched_ends_with_address_and_place(
    tmp_path, monkeypatch, sightline, name, code, message
):
    url = "http://127.0.0.1:9/squeezenet1_1-b8a52dc0.pth"  # nobody listens there
    monkeypatch.setattr(torchvision.models.SqueezeNet1_1_Weights.IMAGENET1K_V1.value, "url", url)
    monkeypatch.setattr("sightline.models.named_weights.PATIENCE", Patience(tries=1))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    said = sightline("inspect", "resnet50", "--model.arch=squeezenet1_1", f"--model.weights={name}")

    assert said.code == code and message in said.err
    assert code == 2 or (url in said.err and str(tmp_path / "sightline/weights/squeezenet1_1-b8a52dc0.pth") in said.err)
