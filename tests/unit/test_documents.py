"""What the documents tell the user to type exists."""

import re
from pathlib import Path

import pytest

from sightline import config, recipes
from sightline.config import Run

REPO = Path(__file__).resolve().parents[2]
DOCUMENTS = [REPO / "README.md", REPO / "SECURITY.md", *sorted((REPO / "docs").glob("*.md"))]
FLAG = re.compile(r"--((?:model|data|task|optimizer|schedule|train|run)\.[a-z0-9-]+)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_flag_is_one(document: Path):
    known = {
        key.replace("_", "-") for name in recipes.names() for key in config.leaves(recipes.find(name).recipe(), Run())
    }
    known |= {key.replace(".", ".no-") for key in known}
    assert {flag for flag in FLAG.findall(document.read_text(encoding="utf-8")) if flag not in known} == set()


# What docs/recipes.md says gives an original's other behaviour, with the recipe it is said of.
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("resnet50", "--schedule.kind cosine --optimizer.lr 0.1 --optimizer.lr-for-batch 256"),
        ("resnet50", "--train.ema 0.99998 --train.ema-every-steps 32 --train.ema-rule torchvision"),
        ("resnet50", "--data.eval-geometry stretch --train.eval-autocast --train.precision fp16"),
        ("resnet50_keras", "--optimizer.decay-form gradient --data.background none --model.arch resnet50"),
        ("resnet50_keras", "--model.arch keras_resnet101v2 --optimizer.weight-decay 0"),
        ("resnet50_lars", "--optimizer.lr 9.5 --optimizer.eps 0 --train.eval-shards full --train.bn-eval local"),
        ("resnet50_lars", "--schedule.kind constant"),
        (
            "resnet50_mlperf",
            "--train.epochs 40 --schedule.decay-epochs 41 --train.eval-from-epoch 2 --optimizer.weight-decay 2e-4",
        ),
        ("resnext101", "--data.crop area --data.crop-scale 0.08 1 --data.crop-ratio 0.75 1.3333"),
        ("resnext101", "--schedule.cosine-from warmup --model.zero-init-residual --schedule.warmup-epochs 0"),
        ("resnext101_mixup", "--data.mixup-per batch --data.mixup-partner random"),
    ],
    ids=lambda text: text[:40],
)
def test_flags_for_the_originals_other_ways_go_together(name: str, flags: str):
    document = (REPO / "docs" / "recipes.md").read_text(encoding="utf-8")
    words = flags.split()
    assert all(word in document for word in words)
    assert config.load(name, words)[0] != recipes.find(name).recipe()
