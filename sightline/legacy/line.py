"""A line as a README writes it, split without a shell: variables that are listed expand, everything else is refused.

`VAR=value mpirun OPTIONS $PYTHON -u SCRIPT ARGS`, with line continuations. Nothing is ever handed to a shell.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sightline.errors import UsageError
from sightline.legacy.start import Start, read_mpirun, read_torchrun, with_variables

EXPANDED = ("PYTHON", "MPI_ROOT", "IMAGENET_HOME", "HOME", "PYTHONPATH", "SSD_PATH", "TMP_DIR")
DEFAULTS = {"PYTHON": "python3", "PYTHONPATH": ""}
VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
ONLY_NAMES = "of `$`, only $NAME and ${NAME} are expanded here; write the value, or put a literal $ in single quotes"
TEMPLATE = re.compile(r"<[A-Za-z][\w./ -]*>")
ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
OPERATORS = {
    ";": "`;` begins a second command",
    "|": "`|` pipes into another command",
    "&": "`&` runs in the background or begins a second command",
    "<": "`<` reads a file as input",
    ">": "`>` writes output into a file",
    "(": "`(` begins a subshell",
    ")": "`)` ends a subshell",
    "`": "a backtick runs another command",
}
OUT_OF_SCOPE = {
    "pip": "installs packages",
    "git": "fetches or changes source code",
    "docker": "starts a container",
    **dict.fromkeys(("apt", "apt-get", "yum"), "installs packages"),
    **dict.fromkeys(("cd", "pushd", "popd"), "changes the folder"),
    **dict.fromkeys(("mkdir", "rm", "mv", "cp", "tar", "cat", "vi"), "works on files"),
    "wget": "fetches a file",
    "curl": "fetches a file",
    **dict.fromkeys(("for", "do", "done"), "is a loop of a shell"),
    **dict.fromkeys(("ssh-keygen", "ssh-keyscan", "service"), "sets up ssh"),
    **dict.fromkeys(("sudo", "sysctl", "ip", "ethtool"), "sets up the machine"),
}
INTERPRETER = re.compile(r"(.*/)?python(\d(\.\d+)?)?|(.*/)?bash|(.*/)?sh")


class OutOfScope(UsageError):
    """A line that sets up a machine or a folder, and does not run an original script."""


@dataclass(frozen=True)
class Line:
    """A script, what it is given, and who starts it."""

    script: str
    arguments: tuple[str, ...]
    start: Start


def logical_lines(text: str) -> Iterator[str]:
    """Yield the commands of a text: continued lines are one, comments and blank lines none.

    A line that begins with a dash belongs to the one before: one README breaks a command without a backslash. So do
    the lines of a loop, which is one command of a shell.
    """
    text = re.sub(r"\\[ \t]*\n", " ", text)
    text = re.sub(
        r"^\s*for .*?^\s*done\s*$", lambda loop: " ".join(loop[0].split()), text, flags=re.DOTALL | re.MULTILINE
    )
    pending = ""
    for line in text.splitlines():
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if line.startswith("-") and pending:
            pending += " " + line
            continue
        if pending:
            yield pending
        pending = line
    if pending:
        yield pending


def split(text: str, variables: Mapping[str, str]) -> list[str]:
    """Split a line into words as a shell would, with quotes; what only a shell could do is refused by name."""
    _refuse_out_of_scope(text.split())
    if found := TEMPLATE.findall(text):
        stand = "stands for a value of yours; write it" if len(found) == 1 else "stand for values of yours; write them"
        raise UsageError(f"{', '.join(dict.fromkeys(found))} {stand} in")
    text = re.sub(r"(?<!\S)\\(?=\s|$)", " ", text)  # a continuation whose line end was lost
    words: list[str] = []
    word: str | None = None
    at = 0
    while at < len(text):
        letter = text[at]
        if letter.isspace():
            if word is not None:
                words.append(word)
            word, at = None, at + 1
        elif letter == "#" and word is None:
            break
        elif letter in OPERATORS:
            raise UsageError(f"{OPERATORS[letter]}, and no shell is started here; write one command without it")
        elif letter == "'":
            end = _end_of_quote(text, at)
            word, at = (word or "") + text[at + 1 : end], end + 1
        elif letter == '"':
            end = _end_of_quote(text, at)
            inside = _expanded(text[at + 1 : end], variables)
            word, at = (word or "") + inside, end + 1
        elif letter == "\\":
            word, at = (word or "") + text[at + 1 : at + 2], at + 2
        else:
            end = at + 1
            while (
                end < len(text) and not text[end].isspace() and text[end] not in "'\"\\" and text[end] not in OPERATORS
            ):
                end += 1
            if text[at:end].endswith("$") and text[end : end + 1] == "(":
                raise UsageError("`$(` runs another command, and no shell is started here; write what it would print")
            _refuse_unquoted(text[at:end], is_start=word is None)
            word, at = (word or "") + _expanded(text[at:end], variables), end
    return [*words, word] if word is not None else words


def _refuse_unquoted(text: str, is_start: bool) -> None:
    """Refuse what a shell would replace: other forms of `$`, a home folder, and patterns of file names."""
    rest = VARIABLE.sub("", text)
    if "$" in rest:
        raise UsageError(f"`{text}`: {ONLY_NAMES}")
    if is_start and re.match(r"(\w+=)?~", text):
        raise UsageError(f"`{text}`: `~` is not expanded here; write $HOME or the whole path")
    if found := re.search(r"[*?[]", rest):
        raise UsageError(
            f"`{text}`: a shell would replace `{found[0]}` by names of files, and none is started here; write the "
            f"names, or quote it: '{text}'"
        )


def _end_of_quote(text: str, at: int) -> int:
    end = text.find(text[at], at + 1)
    if end < 0:
        raise UsageError(f"a quote opens at `{text[at : at + 20]}` and does not close; add the other {text[at]}")
    return end


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    if "`" in text or "$(" in text:
        raise UsageError(f"`{text}` runs another command, and no shell is started here; write what it would print")
    if "${" in VARIABLE.sub("", text):
        raise UsageError(f"`{text}`: {ONLY_NAMES}")

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        if name not in EXPANDED:
            raise UsageError(f"${name} is not expanded here; known: {', '.join(EXPANDED)}; write its value")
        return _value(name, variables)

    return VARIABLE.sub(value, text)


def with_listed(word: str, variables: Mapping[str, str]) -> str:
    """Expand the listed variables in a word that a shell has passed on as it is, e.g. a quoted '$PYTHON'."""
    listed = "|".join(EXPANDED)
    return re.sub(rf"\$(?:\{{({listed})\}}|({listed})\b)", lambda found: _value(found[1] or found[2], variables), word)


def _value(name: str, variables: Mapping[str, str]) -> str:
    if name not in variables and name not in DEFAULTS:
        raise UsageError(f"${name} is not set; export it, e.g. export {name}=..., or write its value")
    return variables.get(name) or DEFAULTS.get(name, "")


def export_of(text: str, variables: Mapping[str, str]) -> dict[str, str] | None:
    """Return what an `export NAME=VALUE` line sets; None where the line is another one."""
    if text.split()[:1] != ["export"]:
        return None
    if "$(" in text or "`" in text:
        raise OutOfScope(f"`{text}` runs another command, and no shell is started here; export what it would print")
    text = re.sub(r"^(export \w+): *", r"\1=", text)  # as one README writes it, where no shell would take it
    words = split(text, variables)[1:]
    pairs = [ASSIGNMENT.fullmatch(word) for word in words]
    if not words or None in pairs:
        raise UsageError(f"`{text}` sets nothing; write export NAME=VALUE")
    return {pair[1]: pair[2] for pair in pairs if pair}


def _refuse_out_of_scope(words: Sequence[str]) -> None:
    program = words[0] if words else ""
    if program.startswith("sightline"):
        raise UsageError("this line is one of ours already; run it as it is")
    if "-m" in words[:3] and words[words.index("-m") + 1 : words.index("-m") + 2] == ["pip"]:
        program = "pip"
    if program in OUT_OF_SCOPE:
        raise OutOfScope(f"`{program}` {OUT_OF_SCOPE[program]}: out of scope here, run it yourself where it is needed")


def read(words: Sequence[str], start: Start) -> Line:
    """Read the words of a line: variables, a launcher, an interpreter, the script and its arguments."""
    rest = [word for word in words if not word.isspace()]  # left of a continuation whose line end was lost
    _refuse_out_of_scope(rest)
    variables: dict[str, str] = {}
    if rest[:1] == ["env"]:
        del rest[0]
    while rest and (pair := ASSIGNMENT.fullmatch(rest[0])):
        variables[pair[1]] = pair[2]
        del rest[0]
    start = with_variables(start, variables)
    program = rest[0].rpartition("/")[2] if rest else ""
    if program in ("mpirun", "mpiexec"):
        start, rest = read_mpirun(rest[1:], start)
    elif program == "torchrun":
        start, rest = read_torchrun(rest[1:], start)
    rest = _behind_interpreter(rest)
    if rest[:1] == ["-m"]:
        if rest[1:2] not in (["torch.distributed.run"], ["torch.distributed.launch"]):
            raise UsageError(f"python -m {' '.join(rest[1:2])}: expected an original script, e.g. train.py")
        start, rest = read_torchrun(rest[2:], start)
    if not rest:
        raise UsageError("the line names no script; e.g. `sightline legacy train.py --help`")
    _refuse_out_of_scope(rest)
    return Line(rest[0], tuple(rest[1:]), start)


def _behind_interpreter(words: list[str]) -> list[str]:
    """Skip `python3 -u`, or a `-u` alone where $PYTHON was empty."""
    rest = words[1:] if words and INTERPRETER.fullmatch(words[0]) else words
    while rest and rest[0] in ("-u", "-O", "-B"):
        rest = rest[1:]
    return rest
