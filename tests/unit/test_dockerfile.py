"""The Dockerfile and what a build is sent. tests/dockerfile.py executes its steps, as root and with a network."""

from pathlib import Path

import dockerfile

STEPS = list(dockerfile.instructions((dockerfile.REPO / "Dockerfile").read_text()))


def test_the_base_is_pinned_and_the_last_user_is_not_root():
    words = [word for word, _ in STEPS]
    assert words[0] == "FROM" and words.count("FROM") == 1 and "@sha256:" in STEPS[0][1]
    assert words.index("USER") > max(at for at, word in enumerate(words) if word == "RUN")
    assert dict(STEPS)["USER"] == "1000:1000" and dict(STEPS)["ENTRYPOINT"] == '["sightline"]'


def test_only_what_is_copied_is_sent():
    """Neither data nor runs, keys, environments or the history."""
    sent = dockerfile.context()
    copied = {source for word, argument in STEPS if word == "COPY" for source in argument.split()[:-1]}
    assert {name.split("/")[0] for name in sent} == {source.split("/")[0] for source in copied}
    assert "sightline/cli.py" in sent and not [name for name in sent if "__pycache__" in name]


def test_rules_of_dockerignore_as_docker_reads_them():
    rules = ["*", "!sightline", "**/__pycache__", "!sightline/keep/__pycache__", "sightline/*.key"]
    seen = {
        "a.txt": False,
        "sightline/cli.py": True,
        "sightline/data/a/b.py": True,
        "sightline/__pycache__/a.pyc": False,
        "sightline/a/__pycache__/b.pyc": False,
        "sightline/keep/__pycache__/b.pyc": True,
        "sightline/my.key": False,
        "sightline/a/my.key": True,  # * does not cross a slash
    }
    assert {path: dockerfile.is_sent(path, rules) for path in seen} == seen


def test_lines_are_joined_as_docker_joins_them():
    text = "# a\nFROM x\n\nRUN a \\\n    # between\n    && b\nenv A=1\n"
    assert list(dockerfile.instructions(text)) == [("FROM", "x"), ("RUN", "a      && b"), ("ENV", "A=1")]


def test_copies_lie_where_docker_puts_them(tmp_path: Path):
    image = dockerfile.Image(tmp_path, ())
    for word, argument in (
        ("WORKDIR", "/src"),
        ("COPY", "pyproject.toml LICENSE ./"),
        ("COPY", "sightline sightline/"),
    ):
        image.step(word, argument)
    assert sorted(path.name for path in (tmp_path / "src").iterdir()) == ["LICENSE", "pyproject.toml", "sightline"]
    assert (tmp_path / "src/sightline/cli.py").is_file()
