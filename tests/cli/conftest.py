"""A command as it is typed, without the start of a process."""

from typing import NamedTuple

import pytest

from sightline import cli


class Said(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    def __repr__(self) -> str:
        return f"exit {self.code}\n{self.out}{self.err}"


@pytest.fixture
def sightline(capsys):
    """sightline(*arguments): as in a shell."""

    def run(*arguments: object) -> Said:
        capsys.readouterr()
        try:
            code = cli.main([str(each) for each in arguments])
        except SystemExit as error:  # argparse and tyro
            code = error.code
        return Said(code, *capsys.readouterr())

    return run
