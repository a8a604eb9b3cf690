"""The documents name flags that exist and files that are there; their tables stay tables."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from sightline import config, recipes
from sightline.config import Run
from sightline.recipe import store

REPO = Path(__file__).resolve().parents[2]
README = REPO / "README.md"
DOCUMENTS = [
    *(README, REPO / "SECURITY.md"),
    *sorted((REPO / "docs").rglob("*.md")),
    *sorted((REPO / "benchmarks" / "notes").glob("*.md")),
]
MOST_IN_A_CELL = 120
FLAG = re.compile(r"--((?:model|data|task|optimizer|schedule|train|run)\.[a-z0-9-]+)")


def found_in(look: Callable[[Path], list[str]]) -> dict[str, list[str]]:
    """Return what is found in each document, of those in which something is."""
    return {str(path.relative_to(REPO)): found for path in DOCUMENTS if (found := look(path))}


def test_every_flag_is_one():
    known = {
        key.replace("_", "-") for name in recipes.names() for key in store.leaves(recipes.find(name).recipe(), Run())
    }
    known |= {key.replace(".", ".no-") for key in known}
    assert found_in(lambda path: [flag for flag in FLAG.findall(path.read_text("utf-8")) if flag not in known]) == {}


def outside_fences(document: Path) -> list[str]:
    """Return the lines outside of fenced blocks."""
    parts = re.split(r"^```.*\n", document.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return "".join(parts[::2]).splitlines()


def cells(line: str) -> list[str]:
    """Split a table row at every bar that is not escaped: Markdown does so within code too."""
    return [cell.strip() for cell in re.findall(r"(?:\\.|[^|])+", line.rstrip())] if line.startswith("|") else []


def test_no_table_cell_is_a_paragraph():
    assert (
        found_in(lambda path: [c for line in outside_fences(path) for c in cells(line) if len(c) > MOST_IN_A_CELL])
        == {}
    )


def rows_of_another_width(document: Path) -> list[str]:
    wrong, width = [], 0
    for line in outside_fences(document):
        found = len(cells(line))
        width = width or found if found else 0
        wrong += [line] if found != width else []
    return wrong


def test_every_row_of_a_table_has_the_cells_of_its_head():
    assert found_in(rows_of_another_width) == {}


def links_to_nothing(document: Path) -> list[str]:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", "\n".join(outside_fences(document)))
    local = [target for target in targets if "://" not in target]
    return [target for target in local if not (document.parent / target).exists()]


def test_every_link_to_a_file_leads_to_one():
    assert found_in(links_to_nothing) == {}


def anchors(document: Path) -> set[str]:
    """Return the anchors of headings, as GitHub and the site make them."""
    headings = [line.lstrip("# ") for line in outside_fences(document) if line.startswith("#")]
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def links_to_no_heading(document: Path) -> list[str]:
    targets = re.findall(r"\]\(([^)#\s]*)#([^)]+)\)", "\n".join(outside_fences(document)))
    local = [(document.parent / file if file else document, at) for file, at in targets if "://" not in file]
    return [f"{file.name}#{at}" for file, at in local if file.suffix == ".md" and at not in anchors(file)]


def test_the_changelog_names_pages_that_are_there():
    named = re.findall(r"\b(?:docs|benchmarks)/[\w/.-]+\.\w+", (REPO / "CHANGELOG.md").read_text("utf-8"))
    assert len(named) > 20 and [each for each in named if not (REPO / each).exists()] == []


def test_every_link_to_a_heading_leads_to_one():
    assert found_in(links_to_no_heading) == {}


INSTRUCTIONS = [README, *sorted((REPO / "docs").glob("start/*.md")), *sorted((REPO / "docs").glob("howto/*.md"))]


def test_instructions_name_no_commit():
    commit = re.compile(r"\b(?!ed25519)(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,8}\b(?!\.pth)")
    assert {path.name: found for path in INSTRUCTIONS if (found := commit.findall(path.read_text("utf-8")))} == {}


def test_instructions_say_nothing_twice():
    where: dict[str, list[str]] = {}
    for path in INSTRUCTIONS:
        text = "\n".join(line for line in outside_fences(path) if not line.startswith(("|", "#")))
        for sentence in re.split(r"(?<=[.:!?])\s+|\n\n|^- ", text, flags=re.MULTILINE):
            if len(words := sentence.split()) >= 7:
                where.setdefault(" ".join(words), []).append(path.name)
    assert {sentence: pages for sentence, pages in where.items() if len(pages) > 1} == {}


def test_the_readme_is_short_and_pictures_are_small():
    assert len(README.read_text("utf-8").splitlines()) < 100
    sizes = {path.name: path.stat().st_size for path in (REPO / "docs" / "images").iterdir()}
    assert {name: size for name, size in sizes.items() if size > 200_000} == {}
    shown = {name for path in DOCUMENTS for name in re.findall(r"images/([\w.]+)\)", path.read_text("utf-8"))}
    assert shown == sizes.keys()


def test_the_documented_config_file_does_what_its_flags_do(tmp_path: Path):
    text = (REPO / "docs" / "howto" / "recipe.md").read_text(encoding="utf-8")
    [shown] = re.findall(r"^```yaml\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    file = tmp_path / "mine.yaml"
    file.write_text(shown, encoding="utf-8")
    flags = ["--data.path", "demo/shapes/classification", "--train.epochs", "10", "--train.global-batch", "32"]
    assert config.load(config.recipe_named_in(file), config=file) == config.load("demo_classification", flags)


# What docs/reference/recipes.md says gives an original's other behaviour, with the recipe it is said of.
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("resnet50", "--schedule.kind cosine --schedule.unit step"),
        (
            "resnet50",
            "--optimizer.lr-for-batch 0 --schedule.kind table --schedule.table-epochs 1 2 3 4 30 60 80 "
            "--schedule.table-rates 0.275 0.45 0.625 0.8 0.08 0.008 0.0008 --schedule.warmup-epochs 0",
        ),
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
    document = (REPO / "docs" / "reference" / "recipes.md").read_text(encoding="utf-8")
    words = flags.split()
    assert all(word in document for word in words)
    assert config.load(name, words)[0] != recipes.find(name).recipe()
