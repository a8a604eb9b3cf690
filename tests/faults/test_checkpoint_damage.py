"""Damaged checkpoints are noticed, named, moved aside and walked past; when none is left the run says so (B5: 5-8)."""

import json
import shutil
from hashlib import sha256
from pathlib import Path

import pytest
import torch
import warm
from PIL import Image
from safetensors.torch import load_file, save

from sightline.engine import checkpoint
from sightline.engine.checkpoint import Checkpoints
from sightline.errors import BadCheckpoint

FAULTY = str(Path(__file__).with_name("faulty.py"))
FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json")
OLD, NEW = "ckpt-00000001", "ckpt-00000002"
SPEC = {"classes": ["a"], "channels": 3, "size": [4, 4], "mean": [0.5], "std": [1.0]}


@pytest.fixture
def folder(tmp_path):
    """Two good checkpoints, of steps 1 and 2."""
    folder = tmp_path / "checkpoints"
    for step in (1, 2):
        tensors = {stem: {"w": torch.full((1000,), float(step))} for stem in ("model", "optimizer")}
        Checkpoints(folder, 2, print).save(step, tensors, {"progress": {"step": step}}, best_step=1)
    return folder


def assert_walks_back(folder: Path, *reasons: str) -> None:
    """The older checkpoint is found, and what was said about the newer one holds these words."""
    said: list[str] = []
    tensors, state, path = Checkpoints(folder, 2, said.append).newest()
    assert path.name == OLD and state["progress"]["step"] == 1
    assert all(bool((named["w"] == 1.0).all()) for named in tensors.values())
    assert len(said) == 1 and all(reason in said[0] for reason in (NEW, f"{NEW}.corrupt", *reasons)), said
    assert sorted(p.name for p in folder.glob("ckpt-*")) == [OLD, f"{NEW}.corrupt"]
    assert Checkpoints(folder, 2, said.append).newest()[2].name == OLD and len(said) == 1, "reported once"


@pytest.mark.parametrize("percent", [0, 1, 50, 99])
@pytest.mark.parametrize("name", FILES)
def test_truncated(folder, name, percent):
    path = folder / NEW / name
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * percent // 100])
    assert_walks_back(folder, name, "damaged", *([] if name == "manifest.json" else [f"instead of {len(whole)}"]))


@pytest.mark.parametrize("name", FILES[:3])
@pytest.mark.parametrize("place", [0.0, 0.1, 0.5, 0.999])
def test_one_bit_flipped(folder, name, place):
    path = folder / NEW / name
    data = bytearray(path.read_bytes())
    data[int(len(data) * place)] ^= 1
    path.write_bytes(data)
    assert_walks_back(folder, name, "sha256")


def test_every_flipped_byte_of_the_manifest_is_survived(folder):
    """A flip in a name, a size or a hash is noticed; elsewhere it may not matter."""
    path = folder / NEW / "manifest.json"
    whole = path.read_bytes()
    unnoticed = []
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        try:
            tensors, state = checkpoint.read(folder / NEW)
        except BadCheckpoint:
            continue
        unnoticed.append(place)
        assert state["progress"]["step"] == 2 and bool((tensors["model"]["w"] == 2.0).all())
    assert [place for place in unnoticed if place > whole.index(b'"files"')] == []


@pytest.mark.parametrize("name", FILES)
def test_file_missing(folder, name):
    (folder / NEW / name).unlink()
    assert_walks_back(folder, name, "missing")


def test_manifest_of_other_shapes(folder):
    for text in (
        "[]",
        "7",
        "{}",
        '{"files": []}',
        '{"files": {}}',
        '{"files": {"state.json": 3}}',
        '{"files": {"../x"',
    ):
        (folder / NEW / "manifest.json").write_text(text)
        with pytest.raises(BadCheckpoint, match="damaged"):
            checkpoint.read(folder / NEW)
    assert_walks_back(folder, "manifest.json")


def test_manifest_cannot_name_files_elsewhere(folder):
    manifest = json.loads((folder / NEW / "manifest.json").read_text())
    manifest["files"]["../latest"] = {"bytes": 14, "sha256": ""}
    (folder / NEW / "manifest.json").write_text(json.dumps(manifest))
    assert_walks_back(folder, "../latest")


def redo_manifest(path: Path) -> None:
    """Make the manifest fit what the files are now, as somebody would who wrote them so."""
    files = [file for file in path.iterdir() if file.name != "manifest.json"]
    entries = {f.name: {"bytes": f.stat().st_size, "sha256": sha256(f.read_bytes()).hexdigest()} for f in files}
    (path / "manifest.json").write_text(json.dumps({"format": 1, "files": entries}))


def with_header(**entry) -> bytes:
    """A safetensors file of one tensor that this describes, and 4000 bytes."""
    described = {"dtype": "F32", "shape": [1000], "data_offsets": [0, 4000]} | entry
    header = json.dumps({"w": described}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(4000)


STATES = {
    "no json": "{",
    "deep": "[" * 100_000,
    "nested": '{"format": 1, "progress": {"step": 2}, "x": ' + "[" * 50 + "]" * 50 + "}",
    "no object": "[]",
    "no format": '{"progress": {"step": 2}}',
    "another format": '{"format": 0, "progress": {"step": 2}}',
    "progress": '{"format": 1, "progress": []}',
    "twice": '{"format": 1, "progress": {"step": 2}, "progress": {"step": 2}}',
    "no step": '{"format": 1, "progress": {}}',
    "step of text": '{"format": 1, "progress": {"step": "2"}}',
    "negative step": '{"format": 1, "progress": {"step": -1}}',
    "huge step": '{"format": 1, "progress": {"step": 1e30}}',
    "step beyond 64 bits": '{"format": 1, "progress": {"step": 999999999999999999999}}',
    "step of thousands of digits": '{"format": 1, "progress": {"step": ' + "9" * 5000 + "}}",
    "later epoch": '{"format": 1, "progress": {"step": 2, "epoch": 3}}',
    "later best": '{"format": 1, "progress": {"step": 2, "best_step": 3}}',
    "negative rate": '{"format": 1, "progress": {"step": 2, "base_lr": -5}}',
    "avoid": '{"format": 1, "progress": {"step": 2, "avoid": 7}}',
    "scores": '{"format": 1, "progress": {"step": 2, "scores": {"a": []}}}',
    "recipe": '{"format": 1, "progress": {"step": 2}, "recipe": [1]}',
    "recipe part": '{"format": 1, "progress": {"step": 2}, "recipe": {"train": 7}}',
    "fingerprints": '{"format": 1, "progress": {"step": 2}, "fingerprints": {"train": null}}',
    "contents": '{"format": 1, "progress": {"step": 2}, "contents": {"train": {"sampled": [1]}}}',
    "environment": '{"format": 1, "progress": {"step": 2}, "environment": 1}',
    "stopwatch": '{"format": 1, "progress": {"step": 2}, "stopwatch": {"running_s": "x"}}',
    "spec": '{"format": 1, "progress": {"step": 2}, "spec": {"classes": ["a"]}}',
    "spec of NaN": '{"format": 1, "progress": {"step": 2}, "spec": {"classes": ["a"], "channels": 3, "size": [4, 4], '
    '"mean": [NaN], "std": [1]}}',
    "too long": '{"format": 1, "progress": {"step": 2}, "x": [' + "[]," * 6_000_000 + "[]]}",
}
MODELS = {
    "empty": b"",
    "no header": b"\xff" * 100,
    "not json": (10).to_bytes(8, "little") + b"{" * 10,
    "deep": (90_000).to_bytes(8, "little") + b"[" * 90_000,
    "no object": (2).to_bytes(8, "little") + b"[]",
    "entry": (7).to_bytes(8, "little") + b'{"w":1}',
    "unknown type": with_header(dtype="Q7"),
    "type that is not text": with_header(dtype=["F32"]),
    "other type": with_header(dtype="F64"),
    "negative side": with_header(shape=[-1000]),
    "huge sides": with_header(shape=[2**40, 2**40, 0], data_offsets=[0, 0]),
    "many sides": with_header(shape=[1] * 99 + [1000]),
    "fraction": with_header(shape=[1000.5]),
    "no list": with_header(shape={"a": 1}),
    "beyond the end": with_header(shape=[2000], data_offsets=[0, 8000]),
    "backwards": with_header(data_offsets=[4000, 0]),
    "huge place": with_header(data_offsets=[0, 10**30]),
    "cut": with_header()[:-1],
    "longer": with_header() + b"x",
    "thousands of headers": b"\0\0\x50\0\0\0\0\0" + b" " * (5 << 20),
}


@pytest.mark.parametrize("text", STATES.values(), ids=STATES.keys())
def test_a_state_that_no_run_wrote_is_damage_though_its_checksum_fits(folder, text):
    (folder / NEW / "state.json").write_text(text)
    redo_manifest(folder / NEW)
    assert_walks_back(folder, "is damaged: state.json cannot be read (")


@pytest.mark.parametrize("data", MODELS.values(), ids=MODELS.keys())
def test_tensors_that_no_run_wrote_are_damage_though_their_checksum_fits(folder, data):
    (folder / NEW / "model.safetensors").write_bytes(data)
    redo_manifest(folder / NEW)
    assert_walks_back(folder, "is damaged: model.safetensors cannot be read (")


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("../x", {"bytes": 14, "sha256": ""}),
        ("/etc/hostname", {"bytes": 14, "sha256": ""}),
        ("..", {}),
        (".", {}),
        ("", {}),
        ("a\0b", {}),
        ("x" * 5000, {}),
        ("state.json", {"bytes": "14", "sha256": 7}),
        ("state.json", {}),
        ("state.json", []),
        ("state.json", None),
    ],
    ids=str,
)
def test_entries_of_a_manifest_that_cannot_be(folder, name, entry):
    manifest = json.loads((folder / NEW / "manifest.json").read_text())
    manifest["files"][name] = entry
    (folder / NEW / "manifest.json").write_text(json.dumps(manifest))
    assert_walks_back(folder, "is damaged")


def test_a_file_listed_twice_is_damage(folder):
    text = (folder / NEW / "manifest.json").read_text()
    again = text.replace('"files": {', '"files": {"state.json": {"bytes": 1, "sha256": ""},')
    (folder / NEW / "manifest.json").write_text(again)
    assert_walks_back(folder, "an object holds a key twice")


def test_fields_of_a_later_version_are_refused_in_place(folder):
    """Nothing is missing and nothing is wrong: a program that does not know them must not move the file away."""
    for part, values in (("progress", {"step": 2, "pace": 1}), ("spec", SPEC | {"pace": 1})):
        state = {"format": 1, "progress": {"step": 2}} | {part: values}
        (folder / NEW / "state.json").write_text(json.dumps(state))
        redo_manifest(folder / NEW)
        with pytest.raises(
            BadCheckpoint, match=f"holds {part}.pace, which this version does not know; use the version"
        ):
            Checkpoints(folder, 2, lambda _: None).newest()
        assert (folder / NEW).is_dir()


def refuse_step(step: int):
    def check(tensors, state):
        if state["progress"]["step"] == step:
            raise BadCheckpoint("its model does not fit")

    return check


def test_one_that_does_not_fit_is_walked_past_if_an_older_one_does(folder):
    said: list[str] = []
    assert Checkpoints(folder, 2, said.append).newest(refuse_step(2))[2].name == OLD
    assert len(said) == 1 and f"{NEW}: its model does not fit; moved to {NEW}.corrupt" in said[0]


def test_where_none_fits_all_stay_in_place(folder):
    """Then it is not the files that have changed."""

    def check(tensors, state):
        raise BadCheckpoint("its model does not fit")

    for _ in range(2):
        with pytest.raises(BadCheckpoint, match=f"{NEW}: its model does not fit"):
            Checkpoints(folder, 2, print).newest(check)
    assert sorted(p.name for p in folder.glob("ckpt-*")) == [OLD, NEW]


def test_empty_folder_or_file_in_the_place_of_a_checkpoint(folder):
    shutil.rmtree(folder / NEW)
    (folder / NEW).write_text("not a folder")
    assert_walks_back(folder, "manifest.json")
    (folder / NEW).mkdir()
    said: list[str] = []
    assert Checkpoints(folder, 2, said.append).newest()[2].name == OLD
    assert "corrupt1" in said[0], "the name of the first damaged one is taken"


@pytest.mark.parametrize("pointer", ["latest", "best"])
@pytest.mark.parametrize(
    "content",
    [None, b"", b"ckpt-00000099\n", b"../../elsewhere\n", b"\xff\xfe", b"\0" * 10**6],
    ids=["absent", "empty", "gone", "outside", "no text", "long"],
)
def test_pointer_missing_or_dangling(folder, pointer, content):
    if content is None:
        (folder / pointer).unlink()
    else:
        (folder / pointer).write_bytes(content)
    said: list[str] = []
    assert Checkpoints(folder, 2, said.append).newest()[2].name == NEW
    assert not said
    assert checkpoint.find(folder.parent, pointer).name == NEW


def test_all_damaged_is_an_error_every_time(folder):
    for name in (OLD, NEW):
        (folder / name / "state.json").write_text("{}")
    for _ in range(2):
        with pytest.raises(BadCheckpoint, match="no checkpoint that verifies"):
            Checkpoints(folder, 2, lambda _: None).newest()


def test_no_checkpoint_yet_is_none(tmp_path):
    assert Checkpoints(tmp_path / "absent", 2, print).newest() is None
    (tmp_path / "ckpt-00000001.tmp-77").mkdir()
    assert Checkpoints(tmp_path, 2, print).newest() is None, "killed in its first save: a fresh start loses nothing"


def test_run_resumes_from_the_older_one_to_equal_bits(sightline, reference, tmp_path):
    whole = reference()
    out = shutil.copytree(whole.out, tmp_path / "run")
    with (out / "checkpoints" / "ckpt-00000016" / "model.safetensors").open("r+b") as file:
        file.seek(-100, 2)
        file.write(b"\x07")
    again = sightline.run(out)
    assert again.code == 0, again
    assert "ckpt-00000016/model.safetensors is damaged: its sha256" in again.warnings
    assert again.events("resume")[-1]["step"] == 8
    assert again.bits == whole.bits


@pytest.mark.parametrize("name", ["state.json", "model.safetensors"])
def test_run_resumes_from_the_older_one_where_the_newest_has_other_content(sightline, reference, tmp_path, name):
    """Its checksums fit: a progress that cannot be, or a model of which a tensor has another shape."""
    whole = reference()
    out = shutil.copytree(whole.out, tmp_path / "run")
    newest = out / "checkpoints" / "ckpt-00000016"
    if name == "state.json":
        state = json.loads((newest / name).read_text())
        state["progress"]["epoch"] = "two"
        (newest / name).write_text(json.dumps(state))
    else:
        tensors = load_file(newest / name)
        first = next(iter(tensors))
        tensors[first] = tensors[first].flatten()[:-1].clone()
        (newest / name).write_bytes(save(tensors))
    redo_manifest(newest)
    again = sightline.run(out)
    assert again.code == 0, again
    assert "ckpt-00000016" in again.warnings and "moved to ckpt-00000016.corrupt" in again.warnings
    assert again.events("resume")[-1]["step"] == 8
    assert again.bits == whole.bits


def test_run_with_only_damaged_ones_ends_with_exit_4_and_never_starts_afresh(sightline, reference, tmp_path):
    out = shutil.copytree(reference().out, tmp_path / "run")
    for path in (out / "checkpoints").glob("ckpt-*"):
        (path / "manifest.json").unlink()
    for _ in range(2):
        again = sightline.run(out)
        assert again.code == again.exit_code_in_folder == 4, again
        assert "no checkpoint that verifies" in again.stderr
        assert "manifest.json is missing" in again.warnings
        assert again.checkpoints == ["ckpt-00000008.corrupt", "ckpt-00000016.corrupt"]
        assert len(again.events("start")) == 1, "that of the first run"


LATER_IS_NO_BETTER = ("--optimizer.lr", "0", "--train.epochs", "4")
LONGER = (*LATER_IS_NO_BETTER[:-1], "5")


def flip_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)


def flip_best(run: Path) -> str:
    """Damage the best checkpoint; return its name."""
    best = (run / "checkpoints" / "best").read_text().strip()
    assert best != (run / "checkpoints" / "latest").read_text().strip()
    flip_bit(run / "checkpoints" / best / "model.safetensors")
    return best


def score_of(run: Path, name: str) -> tuple[float, float]:
    progress = json.loads((run / "checkpoints" / name / "state.json").read_text())["progress"]
    assert progress["scored_step"] == progress["step"]
    return progress["scores"]["top1"], -progress["scores"]["loss"]


def test_a_damaged_best_one_gives_its_place_to_the_best_that_is_left(sightline, reference, tmp_path):
    out = Path(shutil.copytree(reference(*LATER_IS_NO_BETTER).out, tmp_path / "run"))
    lost = flip_best(out)
    left = [name for name in ("ckpt-00000024", "ckpt-00000032") if name != lost]
    ended = sightline.run(out, *LONGER, progress="plain")
    assert ended.code == 0, ended
    best = max(left, key=lambda name: score_of(out, name))
    told = (
        f"{lost}/model.safetensors is damaged: its sha256 is not the one in manifest.json; moved to {lost}.corrupt. The"
    )
    assert f"{told} best is now {best}, top1 {score_of(out, best)[0]:.4f}" in ended.warnings
    assert "warning: the best checkpoint is lost" in ended.stdout
    if score_of(out, "ckpt-00000040") <= score_of(out, best):
        assert f"evaluate and predict use {best}" in ended.stdout
        assert checkpoint.find(out, "best").name == best
    progress = ended.progress
    named, scores = checkpoint.find(out, "best"), json.loads((out / "scores-best.json").read_text())
    assert progress["best_step"] == scores["step"] == int(named.name[5:])
    assert progress["best_score"] == scores["values"]["top1"] == score_of(out, named.name)[0]
    checkpoint.verify(named)
    assert ended.bits == reference(*LONGER).bits


@pytest.mark.parametrize("damage", ["flipped", pytest.param("deleted", marks=pytest.mark.slow)])
def test_where_no_other_was_evaluated_the_next_evaluation_is_the_best(sightline, reference, tmp_path, damage):
    out = tmp_path / "run"
    assert sightline.run(out, "--run.keep", "1", FAULT="term@train:13").code == 143
    scores = {"top1": 2.0, "loss": 0.0, "samples": 8.0}  # which nothing beats
    newest = out / "checkpoints" / "ckpt-00000013"
    state = json.loads((newest / "state.json").read_text())
    state["progress"] |= {"best_score": 2.0, "scores": scores}
    (newest / "state.json").write_text(json.dumps(state))
    redo_manifest(newest)
    assert checkpoint.find(out, "best").name == "ckpt-00000008"
    if damage == "flipped":
        flip_best(out)
    else:
        shutil.rmtree(out / "checkpoints" / "ckpt-00000008")
    killed = sightline.run(out, "--run.keep", "1", FAULT="kill@train:1")
    assert killed.code == -9, killed
    assert "No other was evaluated: the next evaluation sets the best" in killed.warnings
    assert not (out / "scores-best.json").exists()
    assert checkpoint.find(out, "best") == newest
    ended = sightline.run(out, "--run.keep", "1")
    assert ended.code == 0, ended
    assert ended.progress["best_step"] == 16 and ended.progress["best_score"] < 2
    assert checkpoint.find(out, "best").name == "ckpt-00000016"
    assert json.loads((out / "scores-best.json").read_text())["step"] == 16
    assert ended.bits == reference().bits


def test_commands_that_meet_a_damaged_best_one_name_the_latest(reference, tmp_path):
    out = Path(shutil.copytree(reference(*LATER_IS_NO_BETTER).out, tmp_path / "run"))
    best = flip_best(out)
    Image.new("RGB", (24, 24)).save(tmp_path / "image.png")
    for words in (["evaluate", out], ["predict", out, tmp_path / "image.png"], ["export", out, "--format", "pth"]):
        ended = warm.start("sightline", *words, "--recipe", FAULTY, "--run.device=cpu").wait()
        assert ended.code == 4, ended
        assert f"{best}/model.safetensors is damaged" in ended.stderr
        assert "; use --checkpoint latest (step 32, intact)" in ended.stderr
    flip_bit(out / "checkpoints" / "ckpt-00000032" / "optimizer.safetensors")
    with pytest.raises(BadCheckpoint, match=r"use --checkpoint ckpt-00000024 \(step 24, intact\)"):
        checkpoint.read_of_run(out, "best")
    flip_bit(out / "checkpoints" / "ckpt-00000024" / "state.json")
    with pytest.raises(BadCheckpoint, match="manifest.json$"):
        checkpoint.read_of_run(out, "best")


def test_a_best_one_that_cannot_be_read_now_stays_the_best(sightline, reference, tmp_path):
    """As on a file server that is not there for a moment: nothing says that it is damaged."""
    out = Path(shutil.copytree(reference(*LATER_IS_NO_BETTER).out, tmp_path / "run"))
    best = (out / "checkpoints" / "best").read_text().strip()
    file = out / "checkpoints" / best / "optimizer.safetensors"
    file.chmod(0)
    ended = sightline.run(out, *LONGER, FAULT="powerless@recipe:1")
    file.chmod(0o644)
    assert ended.code == 0, ended
    assert f"stays the best, but could not be looked at: {out / 'checkpoints' / best} cannot be read" in ended.warnings
    assert ended.progress["best_step"] == reference(*LONGER).progress["best_step"]
    assert checkpoint.find(out, "best").is_dir()
