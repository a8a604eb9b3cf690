"""A checkpoint of format 1, written by version 0.1.0 and kept, is still read and still trains on (B5: 40)."""

import json
import shutil
from hashlib import sha256
from pathlib import Path

import pytest

from sightline import api
from sightline.engine import checkpoint

KEPT = Path(__file__).parent / "checkpoint_format1"
CKPT = KEPT / "run" / "checkpoints" / "ckpt-00000006"


def test_every_tensor_and_number_is_read():
    tensors, state = checkpoint.read(CKPT)
    found = {
        f"{stem}/{name}": [
            str(t.dtype).removeprefix("torch."),
            list(t.shape),
            sha256(t.numpy().tobytes()).hexdigest()[:16],
        ]
        for stem, named in tensors.items()
        for name, t in named.items()
    }
    assert found == json.loads((KEPT / "tensors.json").read_text())
    assert state["progress"]["step"] == 6 and state["progress"]["best_step"] == 4


@pytest.fixture
def run(tmp_path) -> Path:
    return shutil.copytree(KEPT / "run", tmp_path / "run")


def test_training_goes_on(run):
    """With --run.override, because later versions may have fields that this recipe did not know."""
    flags = [
        "--run.out",
        str(run),
        "--run.device",
        "cpu",
        "--run.threads",
        "1",
        "--run.workers",
        "0",
        "--run.report",
        "off",
    ]
    recipe, options = api.load(str(KEPT / "tiny.py"), [*flags, "--run.override", "--run.progress", "off"])
    scores = api.train(recipe, options)
    assert scores.values["samples"] == 2
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log if line["event"] == "resume"] == [6]
    assert checkpoint.find(run, "latest").name == "ckpt-00000008"


def test_evaluation(run):
    flags = ["--run.device", "cpu", "--run.workers", "0", "--run.progress", "off"]
    scores = api.evaluate(str(run), flags, "latest", recipe_file=str(KEPT / "tiny.py"))
    assert scores.values["samples"] == 2
