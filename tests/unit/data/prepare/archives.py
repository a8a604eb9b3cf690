"""Tiny archives with the structure of ILSVRC 2012: a tar of one tar per class, a flat validation tar, a synset list."""

import io
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

SYNSETS = ("n01440764", "n02105855", "n03018349")


def jpeg(seed: int, mode: str = "RGB", size: tuple[int, int] = (24, 16), form: str = "JPEG") -> bytes:
    channels = {"RGB": 3, "L": 1, "CMYK": 4}[mode]
    coarse = np.random.default_rng(seed).bytes(6 * 4 * channels)
    image = Image.frombytes(mode, (6, 4), coarse).resize(size)
    out = io.BytesIO()
    image.save(out, form, **({"quality": 95} if form == "JPEG" else {}))
    return out.getvalue()


def tar_of(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(data), 1_300_000_000
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def train_images(per_class: int) -> dict[str, dict[str, bytes]]:
    """With ImageNet's one PNG and one of its CMYK images, both called .JPEG, and a grey one."""
    images = {
        synset: {f"{synset}_{i}.JPEG": jpeg(1000 * label + i, size=(24 + i % 5, 16)) for i in range(per_class)}
        for label, synset in enumerate(SYNSETS)
    }
    images["n01440764"]["n01440764_7.JPEG"] = jpeg(7, "L")
    images["n02105855"]["n02105855_2933.JPEG"] = jpeg(8, form="PNG")
    images["n03018349"]["n03018349_4028.JPEG"] = jpeg(9, "CMYK")
    return images


def val_images(count: int) -> dict[str, bytes]:
    return {f"ILSVRC2012_val_{i:08d}.JPEG": jpeg(5000 + i) for i in range(1, count + 1)}


def val_synsets(count: int) -> list[str]:
    return [SYNSETS[(i * 7 + 1) % 3] for i in range(count)]


def make_archives(folder: Path, per_class: int = 12, val: int = 7) -> list[str]:
    """Write the three files; return the flags that name them."""
    folder.mkdir(parents=True, exist_ok=True)
    # Neither level is sorted, as in no archive one may count on.
    outer = {f"{s}.tar": tar_of(dict(reversed(p.items()))) for s, p in reversed(train_images(per_class).items())}
    (folder / "train.tar").write_bytes(tar_of(outer))
    (folder / "val.tar").write_bytes(tar_of(dict(reversed(val_images(val).items()))))
    (folder / "labels.txt").write_text("".join(f"{synset}\n" for synset in val_synsets(val)))
    return ["--train", f"{folder}/train.tar", "--val", f"{folder}/val.tar", "--labels", f"{folder}/labels.txt"]
