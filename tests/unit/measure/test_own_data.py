"""benchmarks/own_data.py: how masks are scored, and which run waits for which."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchmetrics.classification import MulticlassJaccardIndex
from torchmetrics.functional.segmentation import dice_score

import sightline

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "own_data.py"


@pytest.fixture(scope="module")
def own_data():
    spec = importlib.util.spec_from_file_location("own_data", SCRIPT)
    module = sys.modules["own_data"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["own_data"]


@pytest.mark.parametrize("ignored", [0, 40])
def test_masks_are_scored_as_by_torchmetrics(own_data, tmp_path, ignored):
    masks = np.random.default_rng(0).integers(0, 3, (2, 20, 12), dtype=np.uint8)  # one image
    masks[0].flat[:ignored] = 255
    for folder, name, mask in zip(("truth", "seen"), ("a.png", "a_mask.png"), masks, strict=True):
        (tmp_path / folder).mkdir()
        Image.fromarray(mask).save(tmp_path / folder / name)
    truth, seen = torch.from_numpy(masks.reshape(2, -1)[:, ignored:]).long()
    dice = dice_score(seen[None], truth[None], 3, include_background=False, average="macro", input_format="index")
    expected = {"miou": MulticlassJaccardIndex(3)(seen, truth).item(), "dice": dice.item()}
    assert own_data.overlap(tmp_path / "truth", tmp_path / "seen") == pytest.approx(expected)


def test_255_beside_0_alone_is_a_class(own_data, tmp_path):
    for folder, name, value in (("truth", "a.png", 255), ("seen", "a_mask.png", 0)):
        (tmp_path / folder).mkdir()
        Image.fromarray(np.array([[0, 0, 255, value]], np.uint8)).save(tmp_path / folder / name)
    assert own_data.overlap(tmp_path / "truth", tmp_path / "seen") == pytest.approx({"miou": 7 / 12, "dice": 2 / 3})


def test_a_loop_waits_for_the_run_whose_time_it_has(own_data, tmp_path):
    words = f"classification {tmp_path / 'a'} {tmp_path / 'b'} --weights w.safetensors --work {tmp_path / 'new'}"
    jobs = own_data.jobs_of(own_data.arguments(words.split()))
    firsts = [job for job in jobs if job.name == "classification"]
    loops = [job for job in jobs if job.words[0] == own_data.LOOP]
    assert jobs[:12] == firsts + loops and len(jobs) == 30  # those come first, whatever the set
    assert [(job.data, job.seed) for job in firsts] == [(job.data, job.seed) for job in loops]
    assert [job.after for job in loops] == firsts and not any(job.is_ready for job in loops)
    firsts[4].row = {"seconds": 1.0}
    assert [job for job in loops if job.is_ready] == [loops[4]]


@pytest.mark.slow  # three seconds of imports, for a benchmark's own helper
def test_a_warm_process_carries_out_one_command_after_another(own_data, tmp_path):
    words = [sys.executable, str(SCRIPT.with_name("warm.py"))]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        codes = [
            own_data.asked(process, [*own_data.SIGHTLINE, *command.split()], tmp_path / f"{place}.txt")
            for place, command in enumerate(["--version", "train nothing_of_this_name", "--version"])
        ]
        process.stdin.close()
    assert codes == [0, 2, 0]
    first, refused, again = ((tmp_path / f"{place}.txt").read_text() for place in range(3))
    assert first == again == f"sightline {sightline.__version__}\n" and "nothing_of_this_name" in refused
