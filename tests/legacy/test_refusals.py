"""Lines that cannot be, options of `sightline legacy` itself, and files that a line names: each is refused by name."""

import json
import os
from pathlib import Path

import pytest

from sightline.errors import BadData, UsageError
from sightline.legacy import command, oplists, unet_files


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--device"], "--device needs a value"),
        (["--set", "workers=4"], "--set workers=4: write part.field=value, e.g. --set run.workers=4"),
        (["--set", "run.workers"], "--set run.workers: write part.field=value"),
        (["--set=--run.workers=4"], "--set --run.workers=4: write part.field=value"),
        (["--from", "README.md", "train.py"], "--from README.md brings the lines; leave out train.py"),
    ],
)
def test_our_own_options(flags: list[str], said: str):
    with pytest.raises(UsageError) as error:
        command.read_options(flags)
    assert said in str(error.value)


def test_options_stand_before_the_line_and_print_anywhere():
    options, words = command.read_options(["--set", "a.b=c=d", "--device=cpu", "--", "--set", "x", "--print"])
    assert words == ["--set", "x"]
    assert (options.prints, options.device, options.extra, options.file) == (True, "cpu", ("--a.b=c=d",), "")
    options, words = command.read_options(["--from=R", "--"])
    assert (options.prints, options.file, words) == (False, "R", [])


def test_a_pipe_of_lines_is_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "R")  # nobody writes to it: opening it would wait
    options, _ = command.read_options(["--from", str(tmp_path / "R")])
    with pytest.raises(
        UsageError, match=r"--from .*R cannot be read: .* a pipe or a device, expected a file; remove it"
    ):
        command._run_file(options, print, lambda *words: None, {})
    with pytest.raises(UsageError, match=r"R cannot be read as a list of operations: .* a pipe or a device"):
        oplists._text(str(tmp_path / "R"))


def test_a_file_of_lines_is_no_larger_than_a_readme(tmp_path: Path):
    (tmp_path / "R").write_bytes(b"#" * (command.MAX_FILE_BYTES + 1))
    options, _ = command.read_options(["--from", str(tmp_path / "R")])
    with pytest.raises(UsageError, match=f"R is larger than {command.MAX_FILE_BYTES} bytes; a README is smaller"):
        command._run_file(options, print, lambda *words: None, {})


@pytest.mark.parametrize(
    ("path", "results", "found"),
    [
        (None, "/r", ("/r", "best")),
        ("/r/checkpoints/last.ckpt", "/x", ("/r", "latest")),
        ("/r/checkpoints/best.ckpt", "/x", ("/r", "best")),
        ("/r/checkpoints/epoch.pt", "/x", ("/r", "best")),
        ("/r/checkpoints/ckpt-00000004", "/x", ("/r", "ckpt-00000004")),
        ("/r", "/x", ("/r", "best")),
    ],
)
def test_the_run_that_a_path_of_a_checkpoint_means(path: str | None, results: str, found: tuple[str, str]):
    assert unet_files.run_of(path, results) == found


def test_other_files_than_runs_of_ours_are_refused(tmp_path: Path):
    with pytest.raises(UsageError, match=r"--ckpt_path /r/last.ckpt: expected RESULTS/checkpoints/last.ckpt, or a run"):
        unet_files.run_of("/r/last.ckpt", "/x")
    with pytest.raises(BadData, match=r"has no scores of a checkpoint \(best\); evaluate it first"):
        unet_files.write_eval_log(tmp_path, "best", tmp_path / "log.json")
    for text, said in (("{", r"not JSON: \{: "), ("[1]", r"expected an object, found \[1\]")):
        with pytest.raises(BadData, match=said):
            unet_files._parsed(text)


def test_scores_of_a_checkpoint_are_written_in_per_cent(tmp_path: Path):
    scores = {"values": {"dice": 0.123456}, "tables": {"classes": [{"dice": 0.25}, {"dice": 0.987654}]}}
    (tmp_path / "scores-ckpt-1.json").write_text(json.dumps(scores))
    unet_files.write_eval_log(tmp_path, "best", tmp_path / "log.json")
    assert json.loads((tmp_path / "log.json").read_text()) == {"Mean dice": 12.35, "L1": 25.0, "L2": 98.77}


def test_lists_of_operations(tmp_path: Path):
    given = {"dtype": "bf16", "bf16_config_path": str(tmp_path / "ops.json")}
    (tmp_path / "ops.json").write_text("{")
    with pytest.raises(UsageError, match=r"--bf16_config_path .*ops.json is not JSON"):
        oplists.tensorflow_lists(given)
    (tmp_path / "ops.json").write_text('["NoSuchOperation"]')
    with pytest.raises(UsageError, match="names no operation that is in a network of ours; leave it out"):
        oplists.tensorflow_lists(given)
    (tmp_path / "ops.json").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(UsageError, match="cannot be read as a list of operations"):
        oplists.tensorflow_lists(given)
    (tmp_path / "ops.json").write_bytes(b" " * (oplists.MAX_BYTES + 1))
    with pytest.raises(UsageError, match=f"is larger than {oplists.MAX_BYTES} bytes; a list of operations is a few kB"):
        oplists.tensorflow_lists(given)
    name, *others = oplists.TF_MODULES
    (tmp_path / "ops.json").write_text(json.dumps({"a": [name, "Other"], "b": {"c": 3}}))
    kept = oplists.tensorflow_lists(given)
    assert set(kept.modules) == {oplists.TF_MODULES[each] for each in others}
    assert kept.rows == [("bf16 list: Other", "-", "autocast decides about this operation")]
    assert oplists.tensorflow_lists({**given, "dtype": "fp32"}) == oplists.Kept()
