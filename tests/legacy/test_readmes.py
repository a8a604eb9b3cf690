"""Every command line of the five original READMEs: read, translated, and its equivalent parsed by our own commands."""

import io
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from sightline import cli, config
from sightline.recipe import options

HERE = Path(__file__).parent
PAGES = runpy.run_path(str(HERE / "pages.py"))
READMES = {name: list(PAGES["commands"](name)) for name in PAGES["TITLES"]}
# Counted by hand in the READMEs: (commands that run, for help, with words to fill in).
COUNTED = {"000": (3, 1, 0), "001": (18, 1, 1), "002": (6, 1, 1), "003": (6, 1, 1), "004": (13, 0, 0)}


@pytest.mark.parametrize("readme", COUNTED)
def test_every_command_is_understood(readme: str):
    kinds = [command.kind for command in READMES[readme]]
    assert tuple(kinds.count(kind) for kind in ("command", "help", "template")) == COUNTED[readme]


def test_words_to_fill_in_are_named_and_filled_in_they_are_understood():
    for readme in ("001", "002", "003"):
        [command] = [each for each in READMES[readme] if each.kind == "template"]
        filled = command.text
        for word, value in {
            "<interface_name>": "eth0",
            "<epoch>": "64",
            "<batch_size>": "128",
            "<precision>": "bf16",
            "<path/to/model_dir>": "/tmp/m",
        }.items():
            assert (word in command.text) == (word in command.ours)
            filled = filled.replace(word, value)
        assert PAGES["read"](filled, {"MPI_ROOT": "/usr/local/openmpi"}).kind == "command"


def test_sixty_four_cards_become_a_launch_on_eight_hosts(capsys: pytest.CaptureFixture[str]):
    [command] = [each for each in READMES["002"] if each.kind == "template"]
    text = command.text.replace("<interface_name>", "eth0")
    [words] = PAGES["read"](text, {"MPI_ROOT": "/usr/local/openmpi"}).words
    assert cli.main([*words, "--print", "--cores", "-1"]) == 0
    printed = capsys.readouterr().out
    for part in (
        "--host 192.10.100.174:8,10.10.100.101:8,",
        "-np 64",
        "-p 3022",
        "btl_tcp_if_include 192.10.100.174/24",
        "--prefix /usr/local/openmpi",
        "-x HCCL_SOCKET_IFNAME=eth0",
        "--train.global-batch 8192",
        "--optimizer.weight-decay 7.93e-05",
    ):
        assert part in printed


@pytest.mark.parametrize("readme", COUNTED)
def test_what_a_command_becomes_is_parsed_by_our_own_commands(readme: str, monkeypatch: pytest.MonkeyPatch):
    def said_only(*words: Any) -> None:
        said(*words)
        raise SystemExit(0)

    def parse_only(*arguments: object, **named: object) -> None:
        parse(*arguments, **named)
        raise SystemExit(0)

    said, parse = config.asked, options.parse_options
    monkeypatch.setattr(config, "asked", said_only)
    monkeypatch.setattr(options, "parse_options", parse_only)
    for words in dict.fromkeys(words for command in READMES[readme] for words in command.words):
        if words[0] in ("train", "benchmark", "launch", "prepare"):
            with pytest.raises(SystemExit) as end:
                cli.COMMANDS[words[0]](list(words[1:]))
            assert end.value.code == 0, words
        else:
            assert words[:2] == ("evaluate", "/tmp/ssd_1_hpu")


def test_a_file_with_all_lines_of_a_readme_is_printed_without_torch(tmp_path: Path):
    """In a process of its own, which would show what is imported."""
    text = (HERE / "readmes" / "004.txt").read_text(encoding="utf-8").replace("%%\n", "\n")
    (tmp_path / "lines.txt").write_text(text)
    source = "import sys; from sightline import cli; code = cli.main(sys.argv[1:]); assert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", f"{source}; sys.exit(code)", "legacy", "--print", "--from", str(tmp_path / "lines.txt")],
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\nsightline train unet2d ") + done.stdout.count("\nsightline benchmark unet2d ") == 11
    assert done.stdout.endswith("lines.txt: 13 commands, 8 lines out of scope\n")


@pytest.mark.parametrize("readme", COUNTED)
def test_every_command_prints_its_equivalent_and_a_table(readme: str):
    for command in READMES[readme]:
        if command.kind == "command" and "$IMAGENET_HOME" not in command.text:
            with redirect_stdout(io.StringIO()) as out:
                assert cli.main(["legacy", "--print", "--", command.text]) == 0
            assert out.getvalue().splitlines()[1:] and ("old" in out.getvalue())
        elif command.kind == "help":
            with redirect_stdout(io.StringIO()) as out:
                assert cli.main(["legacy", "--", command.text]) == 0
            assert "no meaning here" in out.getvalue()


def test_the_pages_in_docs_are_what_the_tables_say():
    for name, text in PAGES["pages"]().items():
        path = HERE.parents[1] / "docs" / name
        assert path.read_text(encoding="utf-8") == text, f"run `python tests/legacy/pages.py` to write {path} again"
        assert len(text.splitlines()) < 150
