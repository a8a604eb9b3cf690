"""Differences between a run and its continuation: those allowed, and those refused (B5: 9, 10, 39)."""

import shutil
from pathlib import Path

import pytest

from sightline.engine.checkpoint import read, write
from sightline.overview import listing


def test_changed_recipe_is_refused_line_by_line(sightline, reference, halfway, tmp_path):
    out = halfway(tmp_path / "run")
    before = (out / "config.yaml").read_text()
    changes = ("--optimizer.lr", "0.1", "--train.ema", "0.5", "--data.crop-scale", "0.2", "1")
    refused = sightline.run(out, *changes)
    assert refused.code == 2 and refused.exit_code_in_folder == 143, refused  # the run is as it was
    for line in ("optimizer.lr: 0.2 -> 0.1", "train.ema: 0.0 -> 0.5", "data.crop_scale: [0.5, 1.0] -> [0.2, 1.0]"):
        assert f"\n  {line}\n" in refused.stderr
    assert refused.stderr.count(" -> ") == 3, "and nothing that has not changed"
    assert "--run.override" in refused.stderr
    assert (out / "config.yaml").read_text() == before, "config.yaml says what the run was made with"

    # The old values still resume to the same end.
    again = sightline.run(out)
    assert again.code == 0, again
    assert again.bits == reference().bits


def test_changed_run_is_not_refused(sightline, reference, halfway, tmp_path):
    out = halfway(tmp_path / "run")
    flags = ("--run.log-every-steps", "3", "--run.keep", "1", "--run.prefetch", "1", "--run.on-nan", "skip")
    again = sightline.run(out, *flags, "--data.max-bad-samples", "7")
    assert again.code == 0, again
    assert again.bits == reference().bits


def test_override_resumes_with_the_new_values(sightline, reference, halfway, tmp_path):
    out = halfway(tmp_path / "run")
    again = sightline.run(out, "--optimizer.lr", "0.1", "--run.override", progress="plain")
    assert again.code == 0, again
    assert again.events("resume")[-1]["changes"] == ["optimizer.lr: 0.2 -> 0.1"]
    assert "resuming with other values than before (--run.override): optimizer.lr: 0.2 -> 0.1\n" in again.stdout
    assert again.progress["step"] == 16
    assert again.bits != reference().bits
    assert "lr: 0.1\n" in (out / "config.yaml").read_text()


def test_changed_model_is_always_refused(sightline, halfway, tmp_path):
    out = halfway(tmp_path / "run")
    refused = sightline.run(out, "--model.width", "6", "--run.override")
    assert refused.code == 2, refused
    assert "model.width: 8 -> 6" in refused.stderr
    assert refused.checkpoints == ["ckpt-00000005"]


def test_resume_never_refuses_a_folder_with_checkpoints(sightline, halfway, tmp_path):
    out = halfway(tmp_path / "run")
    refused = sightline.run(out, "--run.resume", "never")
    assert refused.code == 2, refused
    assert refused.checkpoints == ["ckpt-00000005"]


def test_resume_from_another_run(sightline, reference, halfway, tmp_path):
    halfway(tmp_path / "first")
    again = sightline.run(tmp_path / "second", "--run.resume", str(tmp_path / "first"))
    assert again.code == 0, again
    assert again.bits == reference().bits


IMAGES = ("--data.classes", "10", "--run.checkpoint-every-steps", "2")


@pytest.fixture(scope="module")
def killed(sightline, shapes, tmp_path_factory) -> Path:
    """A run killed in step 6 of 20."""
    out = tmp_path_factory.mktemp("killed") / "run"
    killed = sightline.run(out, "--data.path", str(shapes), *IMAGES, FAULT="kill@train:6")
    assert killed.checkpoints == ["ckpt-00000002", "ckpt-00000004"], killed
    return out


@pytest.fixture
def out(killed, tmp_path) -> Path:
    return shutil.copytree(killed, tmp_path / "run")


@pytest.fixture
def data(shapes, tmp_path) -> Path:
    return shutil.copytree(shapes, tmp_path / "data")


def test_moved_data_resume(sightline, reference, shapes, data, out):
    again = sightline.run(out, "--data.path", str(data), *IMAGES)
    assert again.code == 0, again
    assert again.bits == reference("--data.path", str(shapes), *IMAGES).bits


@pytest.mark.parametrize(
    ("split", "change"),
    [
        ("train", "added"),
        ("val", "removed"),
        pytest.param("train", "grown", marks=pytest.mark.slow),
        pytest.param("val", "renamed", marks=pytest.mark.slow),
    ],
)
def test_changed_data_are_refused(sightline, data, out, split, change):
    image = sorted((data / split).glob("*/*.jpg"))[0]
    if change == "added":
        shutil.copy(image, image.with_name("another.jpg"))
    elif change == "removed":
        image.unlink()
    elif change == "renamed":
        image.rename(image.with_name("another.jpg"))
    else:
        image.write_bytes(image.read_bytes() + b"\0")
    refused = sightline.run(out, "--data.path", str(data), *IMAGES)
    assert refused.code == 3 and not (out / "exit.json").exists(), refused  # the run is as it was
    assert f"the {split} data are not those" in refused.stderr
    if (split, change) == ("train", "added"):
        again = sightline.run(out, "--data.path", str(data), *IMAGES, "--run.override")
        assert again.code == 0, again
        assert again.events("resume")[-1]["step"] == 4


@pytest.mark.shows("data.fingerprint")
def test_replaced_file_of_equal_size_is_refused_by_name(sightline, data, out):
    small, image = sorted((data / "train").glob("*/*.jpg"), key=lambda path: path.stat().st_size)[:2]
    image.write_bytes(small.read_bytes().ljust(image.stat().st_size, b"\0"))
    flags = ("--data.path", str(data), *IMAGES)
    refused = sightline.run(out, *flags)
    assert refused.code == 3 and not (out / "exit.json").exists(), refused  # the run is as it was
    assert f"{image} is not what it was then (train data, sampled fingerprint)" in refused.stderr
    assert "bring it back, choose another --run.out, or add --run.override" in refused.stderr
    again = sightline.run(out, *flags, "--data.fingerprint", "names", FAULT="term@train:1")
    assert again.code == 143, again
    assert sightline.run(out, *flags).code == 3, "the digests of the first start are kept"
    again = sightline.run(out, *flags, "--run.override", FAULT="term@train:1")
    assert again.code == 143, again
    assert sightline.run(out, *flags).code == 0, "what was overridden is what the run is made with"


@pytest.mark.slow
def test_run_saved_without_digests_of_contents_resumes(sightline, reference, shapes, out):
    for path in sorted((out / "checkpoints").glob("ckpt-*")):
        tensors, state = read(path)
        assert set(state.pop("contents")) == {"train", "val"}
        shutil.rmtree(path)
        write(path, tensors, state)
    again = sightline.run(out, "--data.path", str(shapes), *IMAGES)
    assert again.code == 0, again
    assert again.bits == reference("--data.path", str(shapes), *IMAGES).bits


def test_same_seed_same_bits_other_seed_other_bits(sightline, reference, tmp_path):
    again = sightline.run(tmp_path / "again")
    other = sightline.run(tmp_path / "other", "--train.seed", "1")
    assert again.bits == reference().bits
    assert not set(again.bits.values()) & set(other.bits.values())


def test_other_thread_count_warns(sightline, halfway, tmp_path):
    again = sightline.run(halfway(tmp_path / "run"), "--run.threads", "2", FAULT="term@train:1")
    assert again.code == 143, again
    assert "threads changed from 1 to 2; results may differ in the last bits" in again.warnings


@pytest.mark.parametrize(
    ("refusal", "stop"),
    [
        ("recipe", "int"),
        pytest.param("recipe", "kill", marks=pytest.mark.slow),
        pytest.param("data", "kill", marks=pytest.mark.slow),
        pytest.param("descriptors", "int", marks=pytest.mark.slow),
    ],
)
def test_a_refused_start_leaves_the_state_of_a_stopped_run(sightline, reference, tmp_path, stop, refusal):
    """Also one that is refused after the model was resumed: `sightline runs` says stopped, not failed."""
    out = tmp_path / "run"
    assert sightline.run(out, FAULT=f"{stop}@train:9").code != 0
    kept = {name: (out / name).read_bytes() for name in ("config.yaml", "exit.json") if (out / name).exists()}
    before = listing.read_run(out)
    flags = {
        "recipe": ("--optimizer.lr", "7"),
        "data": ("--data.path", "synthetic:classes=4,samples=72,size=24"),
        "descriptors": ("--run.workers", "2"),
    }[refusal]
    refused = sightline.run(out, *flags, FAULT="files40@recipe:1" if refusal == "descriptors" else "")
    assert refused.code in (2, 3), refused
    assert {name: (out / name).read_bytes() for name in ("config.yaml", "exit.json") if (out / name).exists()} == kept
    assert before.state == "stopped" and listing.read_run(out) == before, "also its time at work"
    ended = sightline.run(out)
    assert ended.code == 0 and ended.bits == reference().bits, ended
