"""The screens of a person who trains: the first and the last lines, what a terminal of 80 columns shows, no colours."""

import io
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import SMALL

from sightline import cli

REPO = Path(__file__).resolve().parents[2]
NAME = "demo_classification"
HERE = ["--run.workers=0", "--run.device=cpu", "--train.precision=fp32"]


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """typed(*arguments): what a command shows on a terminal of 80 columns, errors included."""

    class Tty(io.StringIO):
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

    def run(*arguments: str) -> str:
        shown = Tty()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", shown)
            patch.setattr(sys, "stderr", shown)
            patch.setenv("COLUMNS", "80")
            patch.setenv("TERM", "xterm-256color")
            patch.setenv("NO_COLOR", "1")
            try:
                cli.main(list(arguments))
            except SystemExit:  # argparse and tyro
                pass
            finally:
                sys.stdout, sys.stderr = shown, shown  # the guard stays after an error
        return shown.getvalue()

    return run


def test_a_table_of_runs_fits_a_terminal_and_keeps_the_names_of_runs(typed, sightline, tmp_path: Path):
    for name in ("baseline", "lr-0.1"):
        (tmp_path / name).mkdir()
        config = f"recipe: {NAME}\ndata:\n  path: /data/photos-of-everything/classification-2024\n"
        (tmp_path / name / "config.yaml").write_text(config)
        (tmp_path / name / "log.jsonl").write_text('{"event": "start", "time": 1, "step": 0}\n')
    whole = sightline("runs", tmp_path).out
    assert max(map(len, whole.splitlines())) > 80 and "photos-of-everything/classification-2024" in whole
    shown = typed("runs", str(tmp_path)).splitlines()
    assert len(shown) == 3 and max(map(len, shown)) <= 80, shown
    assert [line.split()[0] for line in shown] == ["run", "baseline", "lr-0.1"]
    assert [line.split()[-1] for line in shown] == ["state", *[line.split()[-1] for line in whole.splitlines()[1:]]]
    assert all(line.count("..") >= 1 for line in shown[1:])


def test_a_recipe_is_described_between_words_and_its_commands_stay_whole(typed, sightline):
    shown, whole = typed("list", "resnet50"), sightline("list", "resnet50").out
    assert shown.split() == whole.split() and max(map(len, whole.splitlines())) > 80
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert [line for line in shown.splitlines() if "sightline train" in line] == [
        line for line in whole.splitlines() if "sightline train" in line
    ]


@pytest.fixture
def damaged(shapes: Path, tmp_path: Path) -> Path:
    """Class folders, in a folder with a space in its name; one image for training cannot be read."""
    folder = tmp_path / "my shapes"
    shutil.copytree(shapes, folder)
    next(path for path in sorted((folder / "train").rglob("*.jpg"))).write_text("not an image")
    return folder


def test_the_last_screen_names_the_best_what_is_hardest_what_was_skipped_and_commands_that_work(
    sightline, damaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    flags = ["--data.path=my shapes", "--run.out=my run", "--train.epochs=2", "--data.on-bad-sample=skip"]
    said = sightline("train", NAME, *SMALL, *HERE, *flags)
    assert said.code == 0, said
    screen = said.out[said.out.index("\nfinished: ") + 1 :].splitlines()
    assert screen.pop() == "report: my run/report.html"
    assert len(screen) <= 12 and max(map(len, screen)) <= 80
    assert screen[0].startswith("finished: best top1 0.")
    assert re.fullmatch(r"results are in my run; evaluate and predict use ckpt-000000(05|10)", screen[1])
    assert len([line for line in screen if re.search(r" recall 0\.\d{4}  4 images$", line)]) == 3
    assert len([line for line in screen if re.search(r"\w predicted as \w+: [1-4] of 4$", line)]) == 3
    assert "skipped:        1 sample, listed in my run/bad_samples.jsonl" in screen
    commands = [shlex.split(line) for line in screen[screen.index("next:") + 1 :]]
    assert [command[:3] for command in commands] == [["sightline", verb, "my run"] for verb in ("evaluate", "predict")]
    assert commands[1][3].startswith("my shapes/val/")
    for command in commands:
        done = sightline(*command[1:], *HERE)
        assert done.code == 0, done


def test_lines_of_a_table_are_folded_between_words_on_a_terminal_only(typed, sightline):
    for command, column in (("list", 25), ("--help", 13)):
        folded = typed(command).splitlines()
        assert max(map(len, folded)) <= 80 or (command == "--help" and len(folded[-1]) > 80)
        one_line = sightline(command).out.splitlines()
        assert len(folded) > len(one_line)
        whole = " ".join(" ".join(folded).split())
        assert whole == " ".join(" ".join(one_line).split()), "no word was cut"
        assert all(line.startswith(" " * column) for line in folded if line.startswith("   "))


@pytest.mark.parametrize(
    "flags",
    [
        ["train", NAME, "--optimizer.kind", "nope"],
        ["train", NAME, "--train.epochs", "x"],
        ["prepare", "shapes", "--nope"],
        ["evaluate"],
        ["train", NAME, "--help-all", "run"],
    ],
    ids=" ".join,
)
def test_no_color_holds_for_option_errors_and_help(typed, flags: list[str]):
    shown = typed(*flags)
    assert shown and "\x1b" not in shown


def test_a_late_ctrl_c_ends_the_process_without_a_traceback(monkeypatch: pytest.MonkeyPatch, capsys):
    """Python waits for threads while it shuts down, and would show where."""
    monkeypatch.setattr(sys, "argv", ["sightline", "--version"])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert cli.main(["--version"]) == 0 and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert cli.main() == 0 and signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)


# The transcript in the documents


def masked(line: str) -> str:
    """Return a line without what differs from run to run: numbers, names of classes, the device, optional parts."""
    line = re.sub(r", [\d.]+ s of it for data|; last [\d.]+ at epoch \d+", "", line)
    line = re.sub(r"\b(fp32|bf16) on .*", "PRECISION on DEVICE", line)
    line = re.sub(r"\((best so far|best [\d.]+)\)", "(STANDING)", line)
    line = re.sub(r"(?<=  )\w+ +recall (?=[\d.]+  \d+ images)", "CLASS recall ", line)
    line = re.sub(r"\w+ predicted as \w+", "CLASS predicted as CLASS", line)
    line = re.sub(r"[^ ]*/val/\w+/", "PATH/", line)
    line = re.sub(r"(results are in|sightline evaluate|sightline predict|report:) [^ ;]+", r"\1 RUN", line)
    return re.sub(r"\d[\d.,:]*(e[+-]\d+)?", "N", line)


def test_the_documented_screens_are_those_of_the_command(sightline, shapes: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("sightline.runs.log.FIRST_STEP_S", 600)  # also on a machine that is busy
    text = (REPO / "docs" / "reference" / "runs.md").read_text(encoding="utf-8")
    blocks = [found.splitlines() for found in re.findall(r"^```text\n(.*?)^```", text, flags=re.M | re.S)]
    [(command, *first)] = [block for block in blocks if block[0].startswith("$ ")]
    [last] = [block for block in blocks if block[-1].startswith("report: ")]
    assert max(map(len, [*first, *last])) <= 80
    here = {"demo/shapes/classification": str(shapes), "demo/run": str(tmp_path / "run"), "5": "2"}
    said = sightline(*(here.get(word, word) for word in shlex.split(command)[2:]), *SMALL, *HERE)
    assert said.code == 0, said
    few = "warning: 80 images are few "  # the documented run has 4,000
    shown = [masked(line) for line in said.out.splitlines() if not line.startswith(few)]
    assert shown[: len(first)] == [masked(line) for line in first]
    assert shown[-len(last) :] == [masked(line) for line in last]
