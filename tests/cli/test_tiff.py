"""A folder of TIFFs is trained on and predicted like one of any other images."""

import json
from pathlib import Path

import numpy as np
from PIL import Image
from tiny import SIZES

NAME = "demo_classification"
SMALL = [*SIZES, "--train.global-batch=8"]
HERE = ["--run.workers=0", "--run.report=off", "--run.device=cpu", "--train.precision=fp32", "--train.epochs=1"]
MODES = {"a.tif": "RGB", "b.tiff": "L", "c.TIF": "CMYK", "d.tif": "RGBA", "e.tif": "I;16"}


def test_tiffs_are_trained_on_checked_and_predicted(sightline, tmp_path: Path):
    draws = np.random.default_rng(0)
    for folder in ("train/cat", "train/dog", "val/cat", "val/dog"):
        (tmp_path / "pets" / folder).mkdir(parents=True)
        for name, mode in MODES.items():
            pixels = draws.integers(0, 256, (30, 40, 3), dtype=np.uint8)
            deep = mode == "I;16"
            image = Image.fromarray(pixels[..., 0].astype(np.uint16) * 256 if deep else pixels)
            (image if deep else image.convert(mode)).save(tmp_path / "pets" / folder / name)
    data, run = f"--data.path={tmp_path / 'pets'}", tmp_path / "run"
    assert "\nno problems\n" in sightline("check", NAME, data, "--run.workers=0").out
    said = sightline("train", NAME, data, f"--run.out={run}", *SMALL, *HERE)
    assert said.code == 0 and said.out.startswith("data: 2 classes, 10 + 10 images"), said
    pages = tmp_path / "pages.tif"
    Image.new("RGB", (9, 9)).save(pages, save_all=True, append_images=[Image.new("RGB", (9, 9))])
    said = sightline("predict", run, tmp_path / "pets" / "val" / "cat", pages, "--out", tmp_path / "out")
    assert said.code == 3 and "warning: pages.tif cannot be read: TIFF of several pages" in said.out, said
    told = json.loads((tmp_path / "out" / "predictions.json").read_text())
    assert [row["file"] for row in told["files"]] == sorted(MODES)
    assert all((tmp_path / "out" / f"{name}.png").is_file() for name in MODES)  # drawn in a format that browsers show
