"""The same images as class folders, tar shards and TFRecords: the same samples, and the same batches bit for bit."""

import io
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sightline.data.classification import ClassificationData
from sightline.data.sources import folder, open_source, tar, tfrecord

SPLITS = {"train": "train", "val": "validation"}


@pytest.fixture(params=["drawn", "real"])
def folders(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Class folders: of noise under names whose order is easily got wrong, or of real photographs."""
    root = tmp_path / "folders"
    if request.param == "real":
        given = request.getfixturevalue("shared_data") / "tiny-imagenet-20"
        for split in SPLITS:
            for each in sorted((given / split).iterdir())[:4]:
                (root / split / each.name).mkdir(parents=True)
                for image in sorted(each.iterdir())[:6]:
                    shutil.copy(image, root / split / each.name)
        return root
    rng = np.random.default_rng(0)
    for split in SPLITS:
        for name in ("n10", "n9", "N1"):
            (root / split / name).mkdir(parents=True)
            for stem in ("a", "a-1", "a_1", "B", "a10", "a9", "é"):
                pixels = rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{name}{stem}.JPEG")
    return root


@pytest.fixture
def images(folders: Path) -> dict[str, list[tuple[int, Path]]]:
    """(label, file) of each split, shuffled."""
    classes = sorted(path.name for path in (folders / "train").iterdir())
    found = {}
    for split in SPLITS:
        found[split] = [(classes.index(path.parent.name), path) for path in sorted((folders / split).rglob("*.JPEG"))]
        random.Random(5).shuffle(found[split])
    assert len(found["train"]) >= 20
    return found


@pytest.fixture
def records_path(images, tmp_path: Path, write_records) -> Path:
    for split, folder_name in SPLITS.items():
        for number in range(3):
            examples = []
            for label, path in images[split][number::3]:
                width, height = Image.open(path).size
                examples.append(
                    {
                        "image/height": height,
                        "image/width": width,
                        "image/channels": 3,
                        "image/colorspace": b"RGB",
                        "image/format": b"JPEG",
                        "image/class/label": 1 + label,
                        "image/class/synset": path.parent.name.encode(),
                        "image/filename": path.name.encode(),
                        "image/encoded": path.read_bytes(),
                    }
                )
            write_records(tmp_path / "records" / folder_name / f"{folder_name}-{number:05d}-of-00003", examples)
    return tmp_path / "records"


@pytest.fixture
def numbered_path(images, tmp_path: Path, write_tar) -> Path:
    """As WebDataset writes it, with a list of the classes."""
    names = sorted({path.parent.name for _, path in images["train"]})
    for split in SPLITS:
        for number in range(2):
            members = []
            for label, path in images[split][number::2]:
                members += [(f"{path.stem}.cls", b"%d" % label), (f"{path.stem}.jpg", path.read_bytes())]
            write_tar(tmp_path / "numbered" / f"{split}-{number:06d}.tar", members)
    (tmp_path / "numbered" / "classes.txt").write_text("\n".join(names))
    return tmp_path / "numbered"


@pytest.fixture
def named_path(images, tmp_path: Path, write_tar) -> Path:
    """A tar of class folders."""
    for split in SPLITS:
        members = [(f"{split}/{path.parent.name}/{path.name}", path.read_bytes()) for _, path in images[split]]
        write_tar(tmp_path / "named" / split / "all.tar", members)
    return tmp_path / "named"


def test_all_forms_give_the_same_samples_and_batches(
    folders: Path, records_path: Path, numbered_path: Path, named_path: Path
):
    kinds = (folder.FolderSource, tfrecord.TFRecordSource, tar.TarSource, tar.TarSource)
    paths = (folders, records_path, numbered_path, named_path)
    for split in SPLITS:
        sources = [open_source("auto", str(path), split) for path in paths]
        assert tuple(map(type, sources)) == kinds
        first = [sources[0].read(i) for i in range(len(sources[0]))]
        assert len({sample.label for sample in first}) >= 3
        for source in sources[1:]:
            assert source.classes == sources[0].classes
            assert [source.read(i) for i in range(len(source))] == first
        datasets = [ClassificationData(path=str(path), size=16, eval_size=16).open(split, seed=3) for path in paths]
        for index in range(len(first)):
            loaded = [dataset.load(1, index) for dataset in datasets]
            for other in loaded[1:]:
                assert other.keys() == loaded[0].keys()
                assert all(np.array_equal(other[key], loaded[0][key]) for key in other)


def test_a_read_gives_the_image_as_it_was_packed(images, named_path: Path):
    source = tar.open_source(str(named_path), "val")
    assert Image.open(io.BytesIO(source.read(0).data)).format == "JPEG"
    assert {source.read(i).data for i in range(len(source))} == {path.read_bytes() for _, path in images["val"]}
