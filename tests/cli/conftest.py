"""A command as it is typed, without the start of a process."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from sightline import cli


class Asked(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    def __repr__(self) -> str:
        return f"exit {self.code}\n{self.out}{self.err}"


@pytest.fixture
def sightline(capsys):
    """sightline(*arguments): as in a shell."""

    def run(*arguments: object) -> Asked:
        capsys.readouterr()
        try:
            code = cli.main([str(each) for each in arguments])
        except SystemExit as error:  # argparse and tyro
            code = error.code
        return Asked(code, *capsys.readouterr())

    return run


@pytest.fixture
def not_root(tmp_path: Path) -> Callable[[], AbstractContextManager[None]]:
    """with not_root(): as a user to whom a folder can be closed."""
    import sightline.config  # noqa: F401  (and torch, which that user may not be able to read)

    @contextmanager
    def other() -> Iterator[None]:
        if os.geteuid() != 0:
            yield
            return
        for at in (tmp_path, *tmp_path.parents):
            if at.stat().st_uid == 0 and at != Path("/"):
                at.chmod(at.stat().st_mode | 0o055)
        os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(0)

    return other
