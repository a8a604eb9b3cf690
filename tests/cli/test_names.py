"""Names chosen by whoever made the data reach the terminal as text, whatever they hold; files keep them."""

import json
import shutil
from pathlib import Path

import pytest
import tiny

NAME = "demo_classification"
# Sets the title, clears the screen, colours by a C1 code, writes backwards; then rich's markup.
HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e[bold]"
SHOWN = r"\x1b]0;owned\x07\x1b[2J\x9b31m\u202e[bold]"
HERE = [*tiny.HERE, "--train.epochs=1"]
HARMLESS = {*range(32, 127), 9, 10}


@pytest.fixture
def data(shapes: Path, tmp_path: Path) -> Path:
    """One class and one file, which cannot be read, have the name."""
    folder = shutil.copytree(shapes, tmp_path / "data")
    for split in ("train", "val"):
        first = min((folder / split).iterdir())
        first.rename(first.with_name(HOSTILE))
    (folder / "train" / HOSTILE / f"{HOSTILE}.png").write_bytes(b"no image")
    return folder


def assert_harmless(*texts: str) -> None:
    for text in texts:
        assert set(text.encode()) <= HARMLESS, text


def test_check_lists_them(sightline, data: Path):
    found = sightline("check", NAME, f"--data.path={data}", "--run.workers=0")
    assert found.code == 3 and f"{SHOWN}/{SHOWN}.png" in found.out
    assert_harmless(found.out, found.err)
    told = json.loads(sightline("check", NAME, f"--data.path={data}", "--run.workers=0", "--json").out)
    assert [each["where"] for each in told["problems"]] == [f"{HOSTILE}/{HOSTILE}.png"]


def test_train_evaluate_and_predict_show_them(sightline, data: Path, tmp_path: Path):
    out = tmp_path / f"run {HOSTILE}"
    flags = [f"--data.path={data}", f"--run.out={out}", "--data.on-bad-sample=skip", *tiny.SMALL, *HERE]
    trained = sightline("train", NAME, *flags)
    assert trained.code == 0 and f"sample skipped: {SHOWN}/{SHOWN}.png" in trained.out
    scored = sightline("evaluate", out, "--run.workers=0")
    assert scored.code == 0 and SHOWN in scored.out
    named = shutil.copy(next((data / "val" / HOSTILE).iterdir()), tmp_path / f"{HOSTILE}.png")
    said = sightline("predict", out, named, data / "train" / HOSTILE, "--out", tmp_path / "said", "--run.workers=0")
    assert said.code == 3 and f"{SHOWN}.png" in said.out and f"{SHOWN}.png" in said.err  # one cannot be read
    for told in (trained, scored, said):
        assert_harmless(told.out, told.err)
    for path in [*out.glob("*.json*"), *out.glob("*.yaml"), *(tmp_path / "said").glob("*.json")]:
        assert_harmless(path.read_text())
    (bad,) = {json.loads(line)["name"] for line in (out / "bad_samples.jsonl").read_text().splitlines()}
    assert bad == f"{HOSTILE}/{HOSTILE}.png"


@pytest.mark.parametrize(
    "words",
    [
        [HOSTILE],
        ["list", HOSTILE],
        ["train", HOSTILE],
        ["train", NAME, f"--train.epochs={HOSTILE}"],
        ["train", NAME, f"--{HOSTILE}"],
        ["train", NAME, f"--data.path={HOSTILE}", "--run.device=cpu"],
        ["train", NAME, "--config", f"{HOSTILE}.yaml"],
        ["check", NAME, f"--data.path={HOSTILE}"],
        ["evaluate", HOSTILE],
        ["predict", HOSTILE, HOSTILE, "--out", "x", f"--top={HOSTILE}"],
        ["prepare", "imagenet", f"--{HOSTILE}"],
        ["launch", NAME, "--hosts", HOSTILE],
        ["migrate", "scan", HOSTILE],
        ["migrate", "report", HOSTILE, f"--{HOSTILE}"],
        ["migrate", HOSTILE],
    ],
    ids=lambda words: " ".join(words).replace(HOSTILE, "NAME"),
)
def test_errors_show_them(sightline, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    done = sightline(*words)
    assert done.code in (2, 3, 4) and "owned" in done.err, done
    text = done.out + done.err
    assert not set(text) & set("\x1b\x07\x9b\u202e"), text
